"""Every program in benchmarks/ runs with its smallest arguments. Its figures are not looked at.

A program that is not in SMALLEST fails; so does one that imports what is no longer there.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BENCHMARKS = ROOT / "benchmarks"
SAMPLE = ROOT / "llmtrain" / "data" / "sample"
TEXTS = ["--data", "{data}", "--tokenizer", str(SAMPLE)]
# Program → its smallest arguments beside --quick. {data} is a folder of parquet files.
SMALLEST: dict[str, list[str]] = {
    "checkpoint": ["--only", "small", "memory"],
    "convergence": ["--data", "{data}"],
    "deaths": [],
    "data": [*TEXTS, "--only", "order"],
    "defaults": TEXTS,
    "finetune": ["--only", "step", "shards", "export"],
    "gpu": ["--only", "sync"],
    "head": [],
    "loop": ["--only", "steps"],
    "parallel": ["--only", "exchanges", "memory"],
    "plan": [],
    "preference": ["--only", "head"],
    "report": [],
    "same_bits": [],
    "scaling": ["--only", "checkpoint", "run"],
    "speedrun": ["--data", "{data}"],
    "threads": [],
}
# Half a minute and more on a quiet machine, or between other tests.
LONG = {
    "checkpoint",
    "convergence",
    "deaths",
    "defaults",
    "finetune",
    "head",
    "parallel",
    "scaling",
    "speedrun",
    "threads",
}


def test_every_program_has_its_smallest_arguments_here():
    assert {path.stem for path in BENCHMARKS.glob("[a-z]*.py")} == SMALLEST.keys() | {"harness"}


@pytest.mark.launches
def test_every_program_and_part_imports_what_is_still_there():
    """One process for all. A part that is imported late is a module of its own, and here too."""
    modules = [path.stem for path in sorted(BENCHMARKS.glob("*.py"))]
    lines = ["import importlib", *(f"importlib.import_module({name!r})" for name in modules)]
    done = run([sys.executable, "-c", "\n".join(lines)])
    assert done.returncode == 0, done.stderr


@pytest.mark.launches
@pytest.mark.parametrize(
    "program",
    [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in SMALLEST],
)
def test_a_program_runs_with_its_smallest_arguments(program, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for file in SAMPLE.glob("*.parquet"):
        (data / file.name).symlink_to(file)
    asked = [one.format(data=data) for one in SMALLEST[program]]
    rows = tmp_path / "rows.json"
    asked += ["--quick", "--json", str(rows)]
    done = run([sys.executable, str(BENCHMARKS / f"{program}.py"), *asked])
    assert done.returncode == 0, done.stderr[-3000:]
    assert f'"bench": "{program}"' in rows.read_text("utf-8")


def run(command):
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)
