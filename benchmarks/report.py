"""What does a report cost? CPU seconds and bytes on a long record, and the time to draw it.

The record is made up, its lines are as long as real ones. CPU time, imports included, is the least
of three; drawn means the load event of Chromium; `watch` is sent a line a second.
"""

import json
import os
import pty
import resource
import subprocess
import sys
import time
from pathlib import Path

from harness import LLMTRAIN, ROOT, Bench, main

# What a run writes, and which browser there is, is known there.
sys.path.append(str(ROOT / "tests"))


def report(bench: Bench) -> None:
    from helpers import runs

    run_dir, out, count = bench.folder / "run", bench.folder / "report.html", bench.sizes.lines
    sources = {f"wikipedia/{n:02d}": 8192 * n for n in range(4)}
    lines = [
        one | {"sources": sources, "span_seconds": one["seconds"]}
        if one["kind"] == "train"
        else one
        for one in runs.history(count, every=1, evaluate_every=1000)
    ]
    runs.write_run(run_dir, lines)
    size = (run_dir / "metrics.jsonl").stat().st_size
    what = f"the report of {count:,} lines ({size / 1e6:.0f} MB)"
    spent = cpu_seconds("report", str(run_dir), "--out", str(out))
    bench.say(f"{what}: CPU time", spent, "s", "≤ 3.0")
    bench.say(f"{what}: the page", out.stat().st_size / 1e6, "MB", "≤ 0.35")
    bench.say(f"{what}: drawn after", drawn_seconds(out), "s", "≤ 0.5")
    kilobytes = None
    if bench.asked.quickstart:
        cpu_seconds("report", str(bench.asked.quickstart), "--out", str(out))
        kilobytes = out.stat().st_size / 1e3
    bench.say("the report of the quickstart", kilobytes, "kB", "≤ 80")
    bench.say("llmtrain --help: CPU time", cpu_seconds("--help"), "s", "≤ 0.15")
    watched = watch_milliseconds(run_dir, bench.sizes.watched)
    bench.say("llmtrain watch: CPU time in a second", watched, "ms", "≤ 20")


def cpu_seconds(*arguments: str) -> float:
    """Return the least CPU seconds of three calls of the command."""
    found = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*LLMTRAIN, *arguments], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def watch_milliseconds(run_dir: Path, watched: float) -> float:
    """Return the milliseconds of CPU that `watch` takes a second after its first picture."""
    import psutil

    metrics = run_dir / "metrics.jsonl"
    with metrics.open("rb") as file:
        line = next(one for one in file if b'"train"' in one)
    (run_dir / "status.json").write_text(json.dumps({"state": "running"}))
    ours, terminal = pty.openpty()
    command = [*LLMTRAIN, "watch", str(run_dir)]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, cwd=ROOT) as watching:
        shown = b""
        while b"Ctrl-C" not in shown:  # the last line of the picture
            shown += os.read(ours, 1 << 16)
        process, begin = psutil.Process(watching.pid), time.perf_counter()
        before = sum(process.cpu_times()[:2])
        while time.perf_counter() - begin < watched:
            os.read(ours, 1 << 16)  # the next picture
            with metrics.open("ab") as file:
                file.write(line)
        spent, seconds = sum(process.cpu_times()[:2]) - before, time.perf_counter() - begin
        watching.terminate()
    return 1000 * spent / seconds


def drawn_seconds(path: Path) -> float | None:
    """Return the seconds from navigation to the end of the load event; None without a browser."""
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
    sizes = {"lines": (100_000, 2000), "watched": (10, 1)}
    main(__doc__, report, sizes, paths={"quickstart": False}, pinned=False)
