"""CPU time of what a person waits for: help, version, TAB, and a config with mistakes.

    python benchmarks/startup.py [--rounds 9] [--json FILE]

Whole processes, in turn, so that a machine that slows down slows all of them; CPU seconds of user
and system as the operating system counts them. `python -c pass` is what an interpreter costs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# As the shell asks for a completion, by variables of the environment.
TAB = [
    "env",
    "_LLMTRAIN_COMPLETE=complete_bash",
    "COMP_WORDS=llmtrain train a.yaml data.pack",
    "COMP_CWORD=3",
]
MISTAKES = "training: {lerning_rate: 1}\ndata: {seq_len: long}\n"


def cpu_seconds(command: list[str]) -> float:
    """User and system time of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "mistakes.yaml"
        config.write_text(MISTAKES)
        llmtrain = [sys.executable, "-m", "llmtrain"]
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "llmtrain --help": [*llmtrain, "--help"],
            "llmtrain --version": [*llmtrain, "--version"],
            "llmtrain train a.yaml data.pack, TAB": [*TAB, *llmtrain],
            "llmtrain train, config with mistakes": [*llmtrain, "train", str(config)],
        }
        found: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(asked.rounds):
            for name, command in commands.items():
                found[name].append(cpu_seconds(command))
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": sys.version[:6]}
    rows = [
        {
            "bench": "startup",
            "variant": name,
            "cpu_seconds_median": statistics.median(seconds),
            "cpu_seconds_min": min(seconds),
            "cpu_seconds_max": max(seconds),
            **machine,
        }
        for name, seconds in found.items()
    ]
    for row in rows:
        low, high = row["cpu_seconds_min"], row["cpu_seconds_max"]
        print(f"{row['variant']:<38} {row['cpu_seconds_median']:.3f} s ({low:.3f} … {high:.3f})")
    if asked.json:
        asked.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
