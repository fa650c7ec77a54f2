"""How near llmtrain comes to what one GPU can do, beside a bare loop and transformers' Trainer.

    python benchmarks/gpu.py [--seconds 500] [--only NAME …] [--device cpu] [--json FILE]

Each row is a process with a time limit of its own; what does not fit into --seconds is left out and
says so. The order is that of interest: the ceilings of the device, GPT-2 124M and what is measured
once, Llama 1B, GPT-2 350M and 1.5B. NAME: a shape (124M, llama-1b, 350M, 1.5B) or a part (train,
loss, attention, sync, save). Out of memory halves the rows of a step. 30 steps of which 10 warm up;
the figure is the median of the others, timed by the GPU. All train on the same blocks of the
built-in sample from the same weights, so the losses of the last step agree, and mean nothing else.

    bare         a loop by hand with llmtrain's attention and loss; eager or with compiled blocks
    llmtrain     with its data, clipping and log
    Trainer      bf16, the same blocks; and with torch_compile
    loss         head and loss alone: transformers' path, ours in chunks, torch's
    attention    each kernel alone, and runs with it
    sync         20 steps in which a wait for the device is an error
    save         how long two saves hold up the training, beside torch.save

Without a GPU it ends with 2. `--device cpu --only tiny` rehearses every row with a tiny shape.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _gpu_rows import (
    REHEARSED,
    REHEARSED_WARM,
    SHAPES,
    STEPS,
    WARM,
    Row,
    compare,
    compare_losses,
    rows_of,
)
from _rows import Table, measure, one_core

DRIFT = 0.03  # of the ceiling between start and end, from which on the rates are in doubt


@dataclass
class Session:
    """One call of the program.

    until: on the clock of `time.monotonic`
    peak: operations a second that the vendor names; None on a CPU
    rates: tokens a second, by row
    ceilings: TFLOP/s at the start and the end
    """

    table: Table
    device: str
    name: str
    until: float
    peak: float | None
    rates: dict[str, float] = field(default_factory=dict)
    ceilings: list[float] = field(default_factory=list)

    def run(self, row: Row) -> None:
        """Measure a row, or say why not."""
        why = why_not(row, self.device, self.until - time.monotonic())
        if why:
            self.table.say(row.name, None, device=self.name, note=why)
        elif row.script == "_gpu_parts.py":
            self._part(row)
        else:
            self._training(row)

    def _part(self, row: Row) -> None:
        asked = {"part": row.part, "device": self.device}
        found, wrong = measure(row.script, asked, self._limit(row))
        if row.part == "ceiling":
            self.ceilings += [one["tflops"] for one in found]
        for one in found:
            name, figure, unit = described(row, one)
            self.table.say(name, figure, unit, device=self.name, **one)
        if row.part == "loss":
            compare_losses(self.table, found, self.device)
        if wrong:
            self.table.say(row.name, None, device=self.name, note=wrong)

    def _training(self, row: Row) -> None:
        size = SHAPES[row.shape].rows
        found: list[dict[str, Any]] = []
        wrong = "out of memory"
        while size and self.until > time.monotonic():
            with tempfile.TemporaryDirectory() as folder:
                asked = self._asked(row, size, folder)
                found, wrong = measure(row.script, asked, self._limit(row))
            if wrong or not found[-1].get("out_of_memory"):
                break
            size, wrong = size // 2, "out of memory"
        if wrong:
            self._failed(row, wrong)
        elif row.part == "sync":
            self._synced(row, 0)
        elif row.part == "save":
            self._saved(row, found[-1])
        else:
            self._trained(row, found[-1])

    def _asked(self, row: Row, size: int, folder: str) -> dict[str, Any]:
        rehearsed = self.device == "cpu"
        steps = {"steps": REHEARSED, "warm": REHEARSED_WARM} if rehearsed else {}
        if row.part == "save":
            steps = {"steps": 10}  # two saves, and steps behind them
        asked = {"steps": STEPS, "warm": WARM} | steps | {"shape": row.shape, "rows": size}
        asked["warm"] = min(asked["warm"], asked["steps"] - 1)
        return asked | {"device": self.device, "folder": folder} | row.asked

    def _trained(self, row: Row, one: dict[str, Any]) -> None:
        shape, rate = SHAPES[row.shape], one["tokens_per_second"]
        self.rates[row.name] = rate
        shares = {
            name: rate * shape.flops(causal=causal) / self.peak if self.peak else None
            for name, causal in (("mfu", False), ("mfu_causal", True))
        }
        more = {"shape": row.shape, "seq_len": shape.seq_len, "ceilings_tflops": self.ceilings}
        precision = "fp32" if self.device == "cpu" else "bf16"
        more |= {"device": self.name, "precision": precision, **shares, **one}
        self.table.say(row.name, rate, "tokens/s", **more)

    def _synced(self, row: Row, waits: int) -> None:
        if self.device == "cpu":
            note = "its steps ran unchecked: only CUDA can make a wait an error"
            return self.table.say(row.name, None, device=self.name, note=note)
        return self.table.say(row.name, waits, "waits in 20 steps", "≤ 0", device=self.name)

    def _saved(self, row: Row, one: dict[str, Any]) -> None:
        judged = self.device != "cpu"
        plain = one["torch_save_seconds"]
        more = {"device": self.name, "bytes": one["bytes"]}
        for name, blocked in zip(("the first", "the second"), one["blocked_seconds"], strict=True):
            goal = "≤ 1" if judged else ""
            self.table.say(f"{row.name}: blocked, {name}", blocked, "s", goal, **more)
            goal = "≥ 10" if judged else ""
            self.table.say(
                f"{row.name}: torch.save over {name}", plain / blocked, "×", goal, **more
            )

    def _failed(self, row: Row, wrong: str) -> None:
        if row.part == "sync" and "synchroniz" in wrong:
            self.table.say(row.name, 1, "wait or more", "≤ 0", device=self.name, note=wrong)
        else:
            self.table.say(row.name, None, device=self.name, note=wrong)

    def _limit(self, row: Row) -> float:
        return max(1.0, min(row.limit, self.until - time.monotonic()))


def why_not(row: Row, device: str, seconds_left: float) -> str:
    """Return why a row is left out; "" if it is measured."""
    if device == "cpu" and row.asked.get("attention_backend") in ("flash", "cudnn"):
        return f"a CPU cannot: {row.asked['attention_backend']} attention is refused without CUDA"
    needed = min(row.seconds, 20) if device == "cpu" else row.seconds  # a tiny shape
    if seconds_left < needed:
        return f"left out: it takes about {needed:.0f} s, {max(0, seconds_left):.0f} s are left"
    return ""


def described(row: Row, one: dict[str, Any]) -> tuple[str, float | None, str]:
    """Return the name, figure and unit of a row that trains nothing."""
    if row.part == "ceiling":
        return row.name, one["tflops"], "TFLOP/s"
    if row.part == "loss":
        name = f"loss, V {one['vocabulary']:,}, {one['tokens']:,} tokens: {one['path']}"
    else:
        name = f"attention {tuple(one['size'])}: {one['backend'].lower()}"
    seconds = one.get("seconds")
    return name, seconds if seconds is None else 1e3 * seconds, "ms"


def wanted(row: Row, only: Sequence[str]) -> bool:
    """Whether a row is asked for; the ceilings always are."""
    return not only or row.part == "ceiling" or bool({row.shape, row.part} & {*only})


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=500)
    names = [*SHAPES, "train", "loss", "attention", "sync", "save"]
    parser.add_argument("--only", nargs="+", choices=names, default=[])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.device == "cpu":
        one_core()  # threads that wait for each other on a busy machine take minutes
    name, peak = device_of(asked.device)
    table = Table("gpu", asked.json)
    session = Session(table, asked.device, name, time.monotonic() + asked.seconds, peak)
    rows = [row for row in rows_of(asked.device) if wanted(row, asked.only)]
    for row in rows:
        session.run(row)
    for shape in dict.fromkeys(row.shape for row in rows if row.part == "train"):
        compare(table, shape, session.rates, asked.device)
    if len(session.ceilings) == 2:
        drift = abs(session.ceilings[1] / session.ceilings[0] - 1)
        note = {"note": "the rates are in doubt"} if drift > DRIFT else {}
        table.say("drift of the ceiling", 100 * drift, "%", device=name, **note)


def device_of(device: str) -> tuple[str, float | None]:
    """Return the name of the device and its peak; end with 2 where it is not there."""
    import torch

    if device == "cpu":
        return "cpu", None
    if not torch.cuda.is_available():
        print("not measured: no GPU (--device cpu rehearses it)", file=sys.stderr)
        sys.exit(2)
    from llmtrain.distributed.plan.speed import machine_of

    name = torch.cuda.get_device_name()
    machine = machine_of(name)
    return name, machine.peak if machine else None


if __name__ == "__main__":
    main()
