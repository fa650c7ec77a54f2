"""Ranks that are made unequal on purpose: one bit of what one of them holds."""

import json
from pathlib import Path
from typing import Any

import torch
from helpers import sharded
from helpers.sharded import Job
from torch import Tensor

from llmtrain.distributed.engines import state
from llmtrain.distributed.engines.accelerator import close


def flip(tensor: Tensor, bit: int = 0) -> None:
    """One bit of the first element that this rank holds, in place."""
    held = state.local(tensor.detach()).view(-1)[:1].view(torch.int32)
    held ^= (-1 << 31) if bit == 31 else (1 << bit)


def compare(output: str, job_text: str, told: str) -> None:
    """On every rank: what it says of the replicas, as they are and after each of the flips.

    told: JSON, a list of launches' flips; each is rank → (parameter, bit), undone behind it.
    """
    job = Job(**json.loads(job_text))
    launched, _, run, _ = sharded.opened(job)
    sharded.trained(job, run)
    named = dict(run.built.model.named_parameters())
    found: list[Any] = [launched.engine.unequal_replicas()]
    for flips in json.loads(told):
        mine = flips.get(str(launched.ranks.rank), [])
        for name, bit in mine:
            flip(named[name], bit)
        found.append(launched.engine.unequal_replicas())
        for name, bit in mine:
            flip(named[name], bit)
    found.append(launched.engine.unequal_replicas())
    Path(f"{output}.{launched.ranks.rank}").write_text(json.dumps(found))
    close()
