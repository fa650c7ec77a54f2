import subprocess
import sys
from pathlib import Path

import pytest
from helpers.layers import LAYERS, violations

ROOT = Path(__file__).parents[2]
IF_CHECKING = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"


def plant(root, **files):
    """A small package that keeps every rule, and these files over it."""
    clean = {
        "llmtrain/__init__.py": "",
        "llmtrain/errors.py": "import json\n",
        "llmtrain/types.py": f"{IF_CHECKING}    import torch\n",
        "llmtrain/hashing.py": "import numpy\n",
        "llmtrain/config/__init__.py": "",
        "llmtrain/config/schema.py": "import pydantic\nfrom llmtrain.errors import UserError\n",
        "llmtrain/data/__init__.py": "",
        "llmtrain/data/lanes.py": "import numpy\nfrom llmtrain import hashing\n",
        "llmtrain/data/stream.py": "from llmtrain.data import lanes\n",
        "llmtrain/model/__init__.py": "",
        "llmtrain/model/build.py": "import torch\nfrom llmtrain.config.schema import Config\n",
        "llmtrain/training/loop.py": "from llmtrain.data.stream import Stream\nimport torch\n",
        "llmtrain/report/page.py": "def page():\n    import jinja2\n",
        "llmtrain/cli/main.py": "import typer\ndef train():\n    import llmtrain.training.loop\n",
        "scripts/train.py": "from llmtrain.cli.main import main\n",
    }
    planted = {name.replace("__", "/").replace("/py", ".py"): text for name, text in files.items()}
    for name, text in (clean | planted).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return violations(root)


def test_every_import_of_the_package_goes_down():
    assert violations(ROOT) == []


def test_every_part_of_the_package_stands_in_a_layer():
    parts = {
        path.stem
        for path in (ROOT / "llmtrain").iterdir()
        if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))
    }
    assert parts <= LAYERS.keys()


def test_a_package_that_keeps_the_rules_passes(tmp_path):
    assert plant(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        "from llmtrain.training.loop import train\n",
        "import llmtrain.training.loop\n",
        "from llmtrain.training import loop\n",
        "from ..training import loop\n",
        "def late():\n    from llmtrain.training.loop import train\n",
        f"{IF_CHECKING}    import llmtrain.training.loop\n",
    ],
)
def test_an_upward_import_is_found_however_it_is_written(tmp_path, text):
    (found,) = plant(tmp_path, llmtrain__model__build__py=text)
    assert "llmtrain.model.build" in found
    assert "upwards, from layer 2 to layer 3" in found


def test_an_import_of_the_whole_package_from_inside_is_upward(tmp_path):
    (found,) = plant(tmp_path, llmtrain__model__build__py="from llmtrain import train\n")
    assert "upwards" in found


def test_an_import_between_rooms_is_found(tmp_path):
    (found,) = plant(tmp_path, llmtrain__model__build__py="from llmtrain.data import stream\n")
    assert "between rooms" in found


def test_the_modules_at_the_bottom_do_not_import_each_other(tmp_path):
    (found,) = plant(tmp_path, llmtrain__types__py="from llmtrain.errors import Problem\n")
    assert "layer 0" in found


def test_a_cycle_inside_a_room_is_found(tmp_path):
    back = "def late():\n    import llmtrain.data.stream\n"
    (found,) = plant(tmp_path, llmtrain__data__lanes__py=back)
    assert found.startswith("cycle: ")
    assert {"llmtrain.data.lanes", "llmtrain.data.stream"} == set(found[7:].split(" → "))


def test_an_annotation_closes_a_cycle_like_any_other_import(tmp_path):
    back = f"{IF_CHECKING}    from llmtrain.data.stream import Stream\n"
    (found,) = plant(tmp_path, llmtrain__data__lanes__py=back)
    assert found.startswith("cycle: ")
    assert {"llmtrain.data.lanes", "llmtrain.data.stream"} == set(found[7:].split(" → "))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("llmtrain__data__stream__py", "import torch\n"),
        ("llmtrain__data__lanes__py", "try:\n    import torch.nn\nexcept ImportError:\n    pass\n"),
        ("llmtrain__report__page__py", "from jinja2 import Environment\n"),
        ("llmtrain__config__schema__py", "class A:\n    import numpy\n"),
        ("llmtrain__cli__main__py", "import rich\n"),
        ("scripts__train__py", "import torch\n"),
    ],
)
def test_a_heavy_package_at_the_top_is_found(tmp_path, file, text):
    (found,) = plant(tmp_path, **{file: text})
    assert "at its top" in found


def test_a_module_outside_all_layers_is_found(tmp_path):
    (found,) = plant(tmp_path, llmtrain__utils__py="import llmtrain.errors\n")
    assert "in no layer" in found


def loaded_after(*arguments):
    """The heavy packages that a fresh Python has loaded after running this."""
    heavy = "torch transformers accelerate datasets numpy pydantic rich"
    code = (
        "import atexit, runpy, sys\n"
        f"names = '{heavy}'.split()\n"
        "atexit.register(lambda: print('loaded:', *[n for n in names if n in sys.modules]))\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_module('llmtrain', run_name='__main__', alter_sys=False)\n"
    )
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return result, result.stdout.splitlines()[-1].split()[1:]


@pytest.mark.launches
def test_help_loads_no_heavy_package():
    result, loaded = loaded_after("llmtrain", "--help")
    assert result.returncode == 0, result.stderr
    assert loaded == []


@pytest.mark.launches
def test_reports_runs_and_status_load_no_torch():
    code = (
        "import sys, llmtrain, llmtrain.cli.watch, llmtrain.report.compare\n"
        "from llmtrain import Result, Run, open_run\n"
        "import llmtrain.tools.launch.library\n"
        "from llmtrain.rundir import contents, failures, goodput, lock, record, status\n"
        "assert not {'torch', 'numpy', 'accelerate'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
