"""What ranks say to each other, on real processes: each writes down what it heard."""

import json
from pathlib import Path

from llmtrain.config.schema import DistributedConfig
from llmtrain.distributed.accelerator import close, make_accelerator
from llmtrain.distributed.ranks import agreed, from_rank_zero
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
    heard["zero"] = from_rank_zero(ranks, lambda: b"zero").decode()

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
