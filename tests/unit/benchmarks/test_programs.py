"""Every program in benchmarks/ runs with its smallest arguments. Its figures are not looked at.

A program that is not in SMALLEST fails; so does one that imports what is no longer there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BENCHMARKS = ROOT / "benchmarks"
SAMPLE = ROOT / "llmtrain" / "data" / "sample"
TEXTS = ["--data", "{data}", "--tokenizer", str(SAMPLE)]
# Program → its smallest arguments. {data} is a folder of parquet files, {folder} an empty one.
SMALLEST: dict[str, list[str]] = {
    "checkpoint": ["--quick", "--only", "small"],
    "convergence": ["--data", "{data}", "--steps", "2", "--processes", "1"],
    "data": [*TEXTS, "--quick", "--only", "order"],
    "defaults": [*TEXTS, "--rounds", "1", "--tokens", "1"],
    "finetune": ["--quick", "--only", "step"],
    "gpu": ["--device", "cpu", "--seconds", "1"],
    "head": ["--rounds", "1"],
    "loop": ["--steps", "501", "--only", "bare,llmtrain"],
    "page": ["--out", "{folder}/speed.md"],
    "plan": ["--json", "{folder}/plan.json"],
    "scaling": ["--quick", "--only", "checkpoint"],
    "startup": ["--rounds", "1"],
    "strategies": ["--only", "ddp"],
    "threads": ["--rounds", "1", "--steps", "6"],
}
# These have no small form: they need a GPU, or are matrices of whole runs. They are imported.
LONG = {"memory", "portability", "report", "speedrun"}
MINUTES = {"data", "defaults", "head", "loop", "plan", "threads"}  # on a quiet machine: less


def test_every_program_has_its_smallest_arguments_here() -> None:
    programs = {path.stem for path in BENCHMARKS.glob("[a-z]*.py")}
    assert programs == SMALLEST.keys() | LONG


@pytest.mark.launches
def test_every_program_and_part_imports_what_is_still_there() -> None:
    """One process for all. A part that is imported late is a module of its own, and here too."""
    modules = [path.stem for path in sorted(BENCHMARKS.glob("*.py"))]
    code = "\n".join(
        ["import importlib", *(f"importlib.import_module({name!r})" for name in modules)]
    )
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


@pytest.mark.launches
@pytest.mark.parametrize(
    "program",
    [pytest.param(name, marks=[pytest.mark.slow] if name in MINUTES else []) for name in SMALLEST],
)
def test_a_program_runs_with_its_smallest_arguments(program: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for file in SAMPLE.glob("*.parquet"):
        (data / file.name).symlink_to(file)
    places = {"data": str(data), "folder": str(tmp_path)}
    arguments = [one.format(**places) for one in SMALLEST[program]]
    done = run([sys.executable, str(BENCHMARKS / f"{program}.py"), *arguments])
    assert done.returncode == 0, done.stderr[-3000:]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)
