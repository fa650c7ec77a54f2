"""What ranks say to each other, on real processes: each writes down what it heard."""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from llmtrain.agreement import agreed, from_rank_zero
from llmtrain.config.schema import DistributedConfig
from llmtrain.distributed.engines.accelerator import close, make_accelerator
from llmtrain.distributed.ranks import lost_peer, meet
from llmtrain.errors import PeerError, Problem, UserError


def talk(output: str) -> None:
    """Every kind of talk once."""
    ranks = make_accelerator("ddp", "fp32", DistributedConfig(timeout_minutes=1.0)).ranks
    heard = {
        "gathered": [body.decode() for body in ranks.gather(b"x" * ranks.rank)],
        "nothing": [body.decode() for body in ranks.gather(b"")],
        "broadcast": ranks.broadcast(b"from 0" if ranks.rank == 0 else b"").decode(),
        "highest": ranks.highest(ranks.rank * 3),
    }
    error = OSError(28, "No space left", "weights") if ranks.rank == 1 else None
    vote = ranks.vote(error, b"body %d" % ranks.rank)
    heard["failures"] = [str(failure) for failure in vote.failures]
    heard["bodies"] = [body.decode() for body in vote.bodies]
    heard["zero"] = from_rank_zero(ranks, lambda: "zero")

    def refuse_on_two() -> str:
        if ranks.rank == 2:
            raise UserError(Problem("key", 1, "two"))
        return "fine"

    try:
        agreed(ranks, refuse_on_two)
    except PeerError as told:
        heard["error"] = ["peer", told.exit_code, str(told)]
    except UserError as own:
        heard["error"] = ["own", own.exit_code, str(own)]
    Path(f"{output}.{ranks.rank}").write_text(json.dumps(heard))
    close()


def meet_in_attempts(output: str, *counts: str) -> None:
    """Rank r believes that this is attempt `counts[r]`; rank 0 writes down whom it meets."""
    rank = int(os.environ["RANK"])
    os.environ["TORCHELASTIC_RESTART_COUNT"] = counts[rank]
    ranks = meet(timedelta(minutes=1.0))
    heard = ranks.gather(b"rank %d" % rank)
    assert ranks.broadcast(b"from 0" if rank == 0 else b"") == b"from 0"
    if rank == 0:
        Path(output).write_text(json.dumps([body.decode() for body in heard]))


def lose(output: str) -> None:
    """Rank 1 dies; rank 0 writes down what each collective says of it, and whether it is known."""
    ranks = make_accelerator("ddp", "fp32", DistributedConfig(timeout_minutes=1.0)).ranks
    groups = {name: dist.new_group(backend="gloo", timeout=timedelta(seconds=30)) for name in OPS}
    for name, collective in OPS.items():
        collective(groups[name])
    if ranks.rank == 1:
        os._exit(9)
    heard = {}
    for name, collective in OPS.items():
        try:
            collective(groups[name])
        except Exception as error:
            heard[name] = [lost_peer(error), f"{type(error).__name__}: {error}"]
    Path(output).write_text(json.dumps(heard))


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(1 << 18), torch.ones(1 << 19)


# What DDP, FSDP2 and DeepSpeed call while they train, and our own talk.
OPS: dict[str, Callable[[dist.ProcessGroup], object]] = {
    "all_reduce": lambda group: dist.all_reduce(_data()[0], group=group),
    "all_gather": lambda group: dist.all_gather_into_tensor(_data()[1], _data()[0], group=group),
    "reduce_scatter": lambda group: dist.reduce_scatter_tensor(*_data(), group=group),
    "broadcast": lambda group: dist.broadcast(_data()[0], src=1, group=group),
    "gather": lambda group: dist.gather(
        _data()[0], [_data()[0]] * 2 if dist.get_rank() == 0 else None, dst=0, group=group
    ),
    "barrier": lambda group: dist.barrier(group=group),
}
