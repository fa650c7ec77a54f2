import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache
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


STREAM = "import llmtrain.data.stream"
SHOWING = """\
import llmtrain.cli.watch, llmtrain.report.compare, llmtrain.tools.launch.launch
from llmtrain import Result, Run, open_run
from llmtrain.rundir import contents, failures, goodput, lock, record, status
"""


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (SHOWING, "torch numpy accelerate"),
        ("import llmtrain.training.stop", "torch numpy pydantic accelerate"),
        ("import llmtrain.tools.launch.supervise", "torch numpy pydantic yaml psutil"),
        (STREAM, "torch transformers accelerate datasets huggingface_hub pandas"),
        ("import llmtrain.data.tokens.tokenizer", "tokenizers"),
    ],
)
@pytest.mark.launches
def test_importing_it_loads_nothing_heavy(code, heavy):
    code += f"\nimport sys; assert not set({heavy.split()}) & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# The shape of the package, by syntax trees: what a reader has to open and to keep in mind.
PACKAGE = Path(__file__).parents[2] / "llmtrain"
PRIVATE = re.compile(r"_[A-Za-z]\w*")
# Private names of torch, accelerate, transformers, deepspeed and CPython are used here alone.
WITH_PRIVATE_NAMES = {
    "torch_private.py": "torch",
    "distributed/engines/zero.py": "deepspeed",
    "distributed/engines/accelerator.py": "accelerate",
    "model/attention.py": "transformers",
    "cli/rank.py": "CPython",
}
# Not private: documented with an underscore, of our own files' formats, or of another library.
PUBLIC = {"_exit", "_asdict", "_data_files", "_indices_data_files", "_warned_failures"}
ENDINGS = {"_offload", "_token_id", "_time_total", "_USE_", "_function"}  # of longer names


@cache
def trees():
    found = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    del found["tools/train_one.py"]  # parts of a program that stands alone, which nobody imports
    return {name: ast.parse(path.read_text("utf-8")) for name, path in found.items()}


def nodes(*kinds):
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, kinds):
                yield name, node


def own_names():
    for _, node in nodes(ast.FunctionDef, ast.ClassDef, ast.Name, ast.Attribute):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node.ctx, ast.Store):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr


def private_names():
    """File → the private names of other libraries in it: attributes, imports and strings."""
    own = set(own_names()) | PUBLIC | ENDINGS
    found = defaultdict(list)
    for file, node in nodes(ast.Attribute, ast.ImportFrom, ast.Constant):
        match node:
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                names = [name]
            case ast.ImportFrom(module=module, names=names) if module:
                outside = not module.startswith("llmtrain")
                names = [*module.split("."), *(one.name for one in names)] if outside else []
            case _:
                continue
        found[file] += [n for n in names if PRIVATE.fullmatch(n) and n not in own]
    return {file: names for file, names in found.items() if names}


def test_private_names_of_other_libraries_stand_in_a_module_for_each():
    assert private_names().keys() == WITH_PRIVATE_NAMES.keys()
    assert sum(map(len, private_names().values())) <= 30


def test_few_signatures_say_that_anything_goes():
    def says_any(annotation):
        return annotation is not None and any(
            isinstance(part, ast.Name) and part.id == "Any" for part in ast.walk(annotation)
        )

    def annotations(function):
        given = function.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        return [function.returns, *(one.annotation for one in every if one is not None)]

    loose = [
        f"{file}: {function.name}"
        for file, function in nodes(ast.FunctionDef, ast.AsyncFunctionDef)
        if any(map(says_any, annotations(function)))
    ]
    assert len(loose) <= 130


def test_few_private_functions_are_used_once():
    """Nine in 1,000 lines of code; most are steps too long to stand where they are used."""
    defined, used = defaultdict(int), Counter()
    for _, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.Name, ast.Attribute):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                used[name] += 1
            case _ if node.name.startswith("_") and not node.name.startswith("__"):
                defined[node.name] += 1
    once = [name for name, count in defined.items() if (count, used[name]) == (1, 1)]
    assert len(once) <= 300
    # Called by notebooks and by typer.
    assert {name for name in defined if not used[name]} == {"_repr_html_", "_main"}


def test_a_class_name_has_one_meaning():
    counts = Counter(node.name for _, node in nodes(ast.ClassDef))
    # The run that a program opens, and the state of one that trains; a block and its candidates.
    assert {name for name, count in counts.items() if count > 1} <= {"Run"}


def test_a_file_is_one_subject_and_a_folder_can_be_read_at_a_glance():
    lines = {file: (PACKAGE / file).read_text("utf-8").count("\n") for file in trees()}
    assert [file for file, count in lines.items() if count > 600] == []
    assert len(lines) <= 200
    folders = Counter(str(Path(file).parent) for file in lines if not file.endswith("__init__.py"))
    assert [folder for folder, count in folders.items() if count > 14] == []


@pytest.mark.parametrize(("share", "most"), [(0.9, 28), (1.0, 50)])
def test_a_function_fits_a_readers_thought(share, most):
    lengths = sorted(
        node.end_lineno - node.lineno + 1
        for _, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef)
    )
    assert lengths[round(share * (len(lengths) - 1))] <= most
