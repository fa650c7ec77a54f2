"""From raw articles to trained tokens: llmtrain and transformers' Trainer with their defaults.

    python benchmarks/defaults.py --data DIR --tokenizer DIR [--trl PYTHON] [--rounds 3]
                                  [--tokens N] [--json FILE]

DIR: parquet files with a column `text`; the files of GPT-2's tokenizer. One model for all (Llama,
hidden 192, 4 layers, a tied vocabulary of 50,304), 8 rows a step. Contenders:

    padded      the Trainer as most tutorials use it: an article a row, padded to 1,024 tokens
    by length   the Trainer's group_by_length: rows of like length, padded to the longest of 8
    grouped     the Trainer as transformers' example for language models uses it: streaming,
                map(tokenize), map(group_texts), 256 tokens a row; in fp32, its default, and bf16
    trl         TRL's SFTTrainer with packing, 256 tokens a row; PYTHON is the interpreter of an
                environment that has it
    llmtrain    its defaults, 256 tokens a block, and fp32 where the default is another precision

The padded row shows what a tutorial costs. The honest rows are group_by_length and TRL packed, what
someone uses who has looked for speed; their articles are tokenized before the first step, which the
rates do not count.

A process each, in turns, on one core with one thread. Times are CPU seconds, children included; of
all rounds the best counts; trained tokens are those with a loss. Rows in bf16 are left out where a
timed product shows that bf16 is not the faster precision of this machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _rows import Table, measure, one_core

LIMIT = 600  # seconds of one process
FASTER = 1.3  # from here on bf16 is worth its rounding; llmtrain's `auto` has the same limit
NAMES = {
    ("padded", "fp32"): "Trainer, padded to 1,024",
    ("by_length", "fp32"): "Trainer, group_by_length (honest)",
    ("trl", "fp32"): "TRL, packed, fp32 (honest)",
    ("trl", "bf16"): "TRL, packed, bf16 (honest)",
    ("grouped", "fp32"): "Trainer, group_texts, fp32 (its default)",
    ("grouped", "bf16"): "Trainer, group_texts, bf16",
    ("llmtrain", "auto"): "llmtrain, defaults",
    ("llmtrain", "fp32"): "llmtrain, fp32",
}
Contender = tuple[str, str]
Found = dict[Contender, list[dict[str, Any]]]


def product_rates() -> tuple[float, float]:
    """Return the GFLOP/s of a 1024 × 768 × 768 product in fp32 and in bf16, the best of five."""
    import torch

    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        one = torch.randn(1024, 768, generator=torch.Generator().manual_seed(0)).to(dtype)
        other = one[:768, :768].contiguous()
        seconds = []
        for _ in range(5):
            began = time.thread_time()
            one @ other
            seconds.append(time.thread_time() - began)
        rates.append(2 * 1024 * 768 * 768 / min(seconds) / 1e9)
    return rates[0], rates[1]


def contenders(bf16_over_fp32: float, trl: Path | None = None) -> list[Contender]:
    """Return who runs, in the order of the table. trl: None = TRL does not."""
    left_out = {("trl", "fp32")}  # it would take bf16, its default
    if bf16_over_fp32 < FASTER:
        left_out = {("grouped", "bf16"), ("llmtrain", "fp32"), ("trl", "bf16")}
    return [one for one in NAMES if one not in left_out and (trl or one[0] != "trl")]


def rounds(asked: argparse.Namespace, who: Sequence[Contender]) -> Found:
    """Run each contender once a round, beginning with another one each time."""
    found: Found = {one: [] for one in who}
    for turn in range(asked.rounds):
        for one in [*who[turn % len(who) :], *who[: turn % len(who)]]:
            with tempfile.TemporaryDirectory() as folder:
                keys = {
                    "contender": one[0],
                    "precision": one[1],
                    "data": str(asked.data.resolve()),
                    "tokenizer": str(asked.tokenizer.resolve()),
                    "tokens": asked.tokens,
                    "folder": folder,
                }
                python = {"python": str(asked.trl)} if one[0] == "trl" else {}
                rows, wrong = measure("_defaults_runs.py", keys, LIMIT, **python)
            if wrong:
                sys.exit(f"{NAMES[one]}: {wrong}")
            found[one].append(rows[-1])
            rate = rows[-1]["tokens_per_cpu_second"]
            print(f"    round {turn + 1}: {NAMES[one]:<42} {rate:8.0f} tokens/s", flush=True)
    return found


def best(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the best figure of each kind over the rounds."""
    return {
        "tokens_per_cpu_second": max(run["tokens_per_cpu_second"] for run in runs),
        "first_step_cpu_seconds": min(run["first_step_cpu_seconds"] for run in runs),
        "peak_mb": min(run["peak_mb"] for run in runs),
    }


def comparisons(figures: dict[Contender, dict[str, float]], chosen: str) -> list[dict[str, Any]]:
    """Return the rows with goals.

    figures: of each contender, as `best` returns them
    chosen: the precision that llmtrain's defaults resolved to
    """
    ours = figures["llmtrain", "auto"]
    plain = figures["grouped", "fp32"]

    def ratio(kind: str, one: dict[str, float], other: dict[str, float]) -> float:
        return one[kind] / other[kind]

    rate, memory, first = "tokens_per_cpu_second", "peak_mb", "first_step_cpu_seconds"
    fp32 = figures.get(("llmtrain", "fp32"), ours)
    rows = [("tokens/s, fp32, over group_texts in fp32", ratio(rate, fp32, plain), "≥ 1.2")]
    same = plain
    if chosen == "bf16":
        same = figures["grouped", "bf16"]
        rows += [
            ("tokens/s, bf16, over group_texts in bf16", ratio(rate, ours, same), "≥ 1.8"),
            ("tokens/s, both with their defaults", ratio(rate, ours, plain), "≥ 2.4"),
        ]
    rows += [
        ("tokens/s over the padded default", ratio(rate, ours, figures["padded", "fp32"]), "≥ 4"),
        ("tokens/s over group_by_length", ratio(rate, ours, figures["by_length", "fp32"]), ""),
        ("peak memory over group_texts", ratio(memory, ours, same), "≤ 0.60"),
    ]
    if packed := figures.get(("trl", chosen)):
        rows.append(("tokens/s over TRL packed", ratio(rate, ours, packed), ""))
    limit = "≤ 1.25" if chosen == "bf16" else "≤ 1.4"
    rows.append(
        (f"CPU to the first step over group_texts, {chosen}", ratio(first, ours, same), limit)
    )
    return [{"name": name, "figure": figure, "goal": goal} for name, figure, goal in rows]


def differing(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return a line for each default that differs."""
    return [
        f"{name}: llmtrain {ours[name]}, Trainer {theirs[name]}"
        for name in ours
        if ours[name] != theirs[name]
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--trl", type=Path, metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16_384, help="counted of each contender")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    table = Table("defaults", asked.json)
    fp32, bf16 = product_rates()
    table.say("a product in fp32", fp32, "GFLOP/s")
    table.say("a product in bf16", bf16, "GFLOP/s")
    who = contenders(bf16 / fp32, asked.trl)
    found = rounds(asked, who)
    settings = found["llmtrain", "auto"][0]["settings"]
    chosen = settings["training.precision"]
    figures = {one: best(runs) for one, runs in found.items()}
    for one, name in NAMES.items():
        if one not in figures and one[0] == "trl":
            table.say(name, None, note="no --trl, or not the faster precision here")
            continue
        if one not in figures:
            reason = f"bf16 products run at {bf16 / fp32:.2f} × the rate of fp32 here"
            same = "its defaults are in fp32: " if one[0] == "llmtrain" else ""
            table.say(name, None, note=f"{same}{reason}")
            continue
        more = {"shape": "llama 192 × 4, V 50,304", "precision": one[1], "tokens": asked.tokens}
        figure = figures[one]
        table.say(name, figure["tokens_per_cpu_second"], "tokens/CPU s", **more, runs=found[one])
        table.say(f"  {name}: to the first step", figure["first_step_cpu_seconds"], "CPU s")
        table.say(f"  {name}: peak memory", figure["peak_mb"], "MB")
    for row in comparisons(figures, chosen):
        table.say(row["name"], row["figure"], "×", row["goal"])
    print("defaults that differ (the learning rate has no part in the time):")
    lines = differing(settings, found["grouped", "fp32"][0]["settings"])
    print("\n".join(f"    {line}" for line in lines))
    table.say("defaults that differ", len(lines), "", lines=lines)


if __name__ == "__main__":
    one_core()
    main()
