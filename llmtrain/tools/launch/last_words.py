"""How a run reports its end to the process that launched it: a file with a code and a message.

The launcher between them has exit code 1 for everything, and its own tracebacks would come after
our message. So rank 0 leaves both in a file named by LLMTRAIN_LAUNCHED.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from llmtrain import durable
from llmtrain.training.stop.signals import LAUNCHED


def leave(env: Mapping[str, str], exit_code: int, message: str) -> bool:
    """Leave the mark, if this is rank 0 and a launcher waits for it; return whether that worked."""
    path = Path(env.get(LAUNCHED, ""))
    if not path.is_absolute() or env.get("RANK", "0") != "0":
        return False
    try:
        durable.write(path, json.dumps([exit_code, message]).encode())
    except OSError:
        return False  # the message is then printed, and the code is looked up in status.json
    return True


def found(path: Path) -> tuple[int, str] | None:
    """The code and message that were left; None if rank 0 ended without a word."""
    if not path.exists():
        return None
    exit_code, message = json.loads(path.read_text(encoding="utf-8"))
    return int(exit_code), str(message)
