"""What a report costs: CPU seconds and bytes on a long record, and the time to draw it.

    python benchmarks/report.py --json benchmarks/results/report.json

The record is made up: 100,000 `train` lines of the length of real ones (57 MB). CPU time is that of
a process of its own, imports included, the least of three. Drawn means: the page's load event in
Chromium, by the browser's own clock. `watch` runs in a terminal while a line a second is appended;
its CPU time is counted from its first picture on.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from _rows import Table

ROOT = Path(__file__).resolve().parents[1]
LINES = 100_000
WATCHED_SECONDS = 10


def main() -> None:
    """Measure everything, and write a row a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--quickstart", type=Path, help="run directory of a finished quickstart")
    options = parser.parse_args()
    table = Table("report", options.json)
    with tempfile.TemporaryDirectory() as folder:
        run_dir, out = Path(folder) / "run", Path(folder) / "report.html"
        size = write_record(run_dir)
        what = f"the report of {LINES:,} lines ({size / 1e6:.0f} MB)"
        spent = cpu_seconds("report", str(run_dir), "--out", str(out))
        table.say(f"{what}: CPU time", spent, "s", "≤ 3.0")
        table.say(f"{what}: the page", out.stat().st_size / 1e6, "MB", "≤ 0.35")
        table.say(f"{what}: drawn after", drawn_seconds(out), "s", "≤ 0.5")
        quickstart = kilobytes(options.quickstart, Path(folder) / "quickstart.html")
        table.say("the report of the quickstart", quickstart, "kB", "≤ 80")
        table.say("llmtrain --help: CPU time", cpu_seconds("--help"), "s", "≤ 0.15")
        watched = watch_milliseconds(run_dir)
        table.say("llmtrain watch: CPU time in a second", watched, "ms", "≤ 20")


def write_record(run_dir: Path) -> int:
    """Write a run directory with a long record, and return the size of the record in bytes."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers import runs  # what a run writes is known there

    lines = runs.history(LINES, every=1, evaluate_every=1000)
    sources = {f"wikipedia/{n:02d}": 8192 * n for n in range(4)}
    lines = [
        one | {"sources": sources, "span_seconds": one["seconds"]}
        if one["kind"] == "train"
        else one
        for one in lines
    ]
    runs.write_run(run_dir, lines)
    return (run_dir / "metrics.jsonl").stat().st_size


def cpu_seconds(*arguments: str) -> float:
    """Return the least CPU seconds of three calls of the command."""
    found = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "llmtrain", *arguments]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def watch_milliseconds(run_dir: Path) -> float:
    """Return the milliseconds of CPU that `watch` takes a second after its first picture."""
    metrics = run_dir / "metrics.jsonl"
    with metrics.open("rb") as file:
        line = next(one for one in file if b'"train"' in one)
    (run_dir / "status.json").write_text(json.dumps({"state": "running"}))
    ours, terminal = pty.openpty()
    command = [sys.executable, "-m", "llmtrain", "watch", str(run_dir)]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, cwd=ROOT) as watching:
        shown = b""
        while b"Ctrl-C" not in shown:  # the last line of the picture
            shown += os.read(ours, 1 << 16)
        process, begin = psutil.Process(watching.pid), time.perf_counter()
        before = sum(process.cpu_times()[:2])
        while time.perf_counter() - begin < WATCHED_SECONDS:
            os.read(ours, 1 << 16)  # the next picture
            with metrics.open("ab") as file:
                file.write(line)
        spent, seconds = sum(process.cpu_times()[:2]) - before, time.perf_counter() - begin
        watching.terminate()
    return 1000 * spent / seconds


def kilobytes(run_dir: Path | None, out: Path) -> float | None:
    """Return the size of a run's report; None without a run."""
    if run_dir is None:
        return None
    command = [sys.executable, "-m", "llmtrain", "report", str(run_dir), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out.stat().st_size / 1e3


def drawn_seconds(path: Path) -> float | None:
    """Return the seconds from navigation to the end of the load event; None without a browser."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.browser import browser_path

    if browser_path() is None:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        found = []
        for _ in range(3):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(path.as_uri())
            ends = "performance.getEntriesByType('navigation')[0].loadEventEnd"
            found.append(float(page.evaluate(ends)) / 1000)
            page.close()
        browser.close()
    return min(found)


if __name__ == "__main__":
    main()
