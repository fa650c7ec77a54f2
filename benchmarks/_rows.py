"""What `defaults.py`, `gpu.py` and `scaling.py` share: rows and goals, processes, what they ran on.

A row is a dict: `name` and `figure` (None: not measured, and `note` has the reason), `unit`, `goal`
as "≥ 1.2" or "≤ 0.6", whether it is `met`, and whatever else was measured.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Nothing heavy here: a machine may lack a package that only some rows need.

HERE = Path(__file__).parent
PACKAGES = "torch", "transformers", "accelerate", "datasets", "tokenizers", "tiktoken"
THREADS = "OMP_NUM_THREADS", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS"


def about() -> dict[str, Any]:
    """Return what the rows were measured on."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _processor(),
        "cpus": os.cpu_count(),
        "machine": f"{platform.system()} {platform.machine()}",
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "git": _commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(model, platform.processor())


def _commit() -> str | None:
    """Return the commit, with a + if files were changed since; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def is_met(figure: float | None, goal: str) -> bool | None:
    """Return whether a figure meets its goal; None where one of the two is missing."""
    if figure is None or not goal:
        return None
    sign, limit = goal.split()
    return figure >= float(limit) if sign == "≥" else figure <= float(limit)


def spell(figure: float) -> str:
    """Return three digits of a figure."""
    return f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"


class Table:
    """The rows of one benchmark, printed and written as they come.

    A row of the file stays until one of the same name is measured.
    """

    def __init__(self, bench: str, path: Path | None) -> None:
        self._path = path
        self._about = {"bench": bench, **about()}
        self.rows = read_rows(path) if path else []
        print(", ".join(f"{key} {value}" for key, value in self._about.items()), flush=True)

    def say(
        self, name: str, figure: float | None, unit: str = "", goal: str = "", **more: Any
    ) -> None:
        """Add a row."""
        row = {"name": name, "figure": figure, "unit": unit, "goal": goal}
        row |= {"met": is_met(figure, goal), "load": round(os.getloadavg()[0], 1)}
        self.rows = [old for old in self.rows if old["name"] != name]
        self.rows.append({**self._about, **row, **more})
        print(shown(self.rows[-1]), flush=True)
        if self._path:
            write_rows(self._path, self.rows)


def shown(row: dict[str, Any]) -> str:
    """Return the line of a row on the terminal."""
    figure = "not measured" if row["figure"] is None else f"{spell(row['figure'])} {row['unit']}"
    verdict = {True: "met", False: "MISSED", None: ""}[row["met"]]
    note = f"  ({row['note']})" if row.get("note") else ""
    return f"{row['name']:<66} {figure:>20} {row['goal']:<8} {verdict}{note}".rstrip()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of results; none if it does not exist."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a row a line."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), "utf-8")


def measure(
    script: str,
    asked: dict[str, Any],
    limit: float,
    environment: dict[str, str] | None = None,
    *,
    python: str = sys.executable,
) -> tuple[list[dict[str, Any]], str]:
    """Run a script of this folder in a process of its own, and end it after `limit` seconds.

    asked: JSON, its only argument
    python: the interpreter, which may be that of another environment

    Returns the objects that it printed, and what went wrong ("" = nothing).
    """
    process = subprocess.Popen(
        [python, str(HERE / script), json.dumps(asked)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
        start_new_session=True,  # so that its own children end with it
    )
    try:
        out, err = process.communicate(timeout=limit)
        wrong = "" if process.returncode == 0 else _last_line(err)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        wrong = f"not finished after {limit:.0f} s"
    found = [json.loads(line) for line in out.splitlines() if line.startswith('{"')]
    return found, wrong


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it ended without a word"


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children so far."""
    import psutil

    own = psutil.Process()
    spent = sum(own.cpu_times()[:4])  # with children that have ended
    for child in own.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            spent += sum(child.cpu_times()[:2])
    return spent


def peak_mb() -> float:
    """Return the peak of resident memory, in MB; of children what is theirs alone now (Linux)."""
    import psutil

    # Not `ru_maxrss`, which a process inherits.
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            peak += child.memory_full_info().uss
    return peak / 1e6


def one_core() -> None:
    """Keep this process and its children on one core, with one thread in every library.

    The environment is read when libraries are imported, so the program starts itself again.
    """
    if os.environ.get("OMP_NUM_THREADS") == "1" and "LLMTRAIN_ONE_CORE" in os.environ:
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ |= {**dict.fromkeys(THREADS, "1"), "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"LLMTRAIN_ONE_CORE": "1", "CUDA_VISIBLE_DEVICES": ""}
    os.execv(sys.executable, [sys.executable, *sys.argv])
