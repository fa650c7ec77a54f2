"""The proof of an export: another process loads it, and computes the loss of the run's own model.

    this process    8 blocks of the run's held-out set ─► stdin of `reload.py`
    the other one   loads the run's model, then the export; prints both losses

The other process needs the memory of one model. Its arithmetic is fp32, so only what was written
can make a difference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.data import heldout_set
from llmtrain.data.manifest import glance
from llmtrain.errors import RunError
from llmtrain.rundir import contents
from llmtrain.tools.use.target import Target

_BLOCKS = 8
_MADE_UP = (2, 32)  # blocks and positions where a run held nothing out
# Nats a token, by dtype: weights of 16 bits are rounded, those of 32 are not.
_BOUNDS = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 1e-2}


@dataclass(frozen=True, slots=True)
class Losses:
    """Mean nats a token of the run's model and of the export, on the same blocks."""

    run: float
    export: float


def compare(target: Target, exported: Path, dtype: str) -> Losses:
    """Compare an export with the checkpoint that it was made of.

    Raises RunError 1 if the losses differ by more than the bound of the dtype, or it does not load.
    """
    body = {
        "models": [str(target.directory.absolute()), str(exported.absolute())],
        "state": {key: target.state.get(key) for key in ("config", "auto")},
        **_blocks(target),
    }
    command = [sys.executable, "-m", "llmtrain.tools.use.export.reload"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        command,
        input=json.dumps(body),
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    remedy = f"{exported} is left as it is, to be looked at"
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RunError(f"the export cannot be loaded again: {said}", 1, remedy)
    run, export = json.loads(done.stdout.splitlines()[-1])
    if not abs(run - export) <= _BOUNDS[dtype]:
        text = f"the export computes another loss than the run's model: {export} instead of {run}"
        raise RunError(text, 1, remedy)
    return Losses(run, export)


def _blocks(target: Target) -> dict[str, Any]:
    """Return ids and labels of blocks of the run's held-out set; made-up ones if it has none."""
    held = heldout_set.load(target.run_dir / contents.HELDOUT) if target.run_dir else None
    if held is None or target.run_dir is None:
        rows, length = _MADE_UP
        ids = [[7 * row + step for step in range(length + 1)] for row in range(rows)]
        return {"ids": [row[:-1] for row in ids], "labels": [row[1:] for row in ids]}
    seq_len = glance(target.run_dir / contents.MANIFEST)["seq_len"]
    blocks = [held.block(g, seq_len) for g in range(min(_BLOCKS, held.num_blocks(seq_len)))]
    return {
        "ids": [ids[:-1].tolist() for ids, _, _ in blocks],
        "labels": [labels.tolist() for _, labels, _ in blocks],
    }
