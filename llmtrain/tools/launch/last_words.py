"""Report the end of a run to the process that launched it, by a file with a code and a message.

The launcher between them has exit code 1 for every failure, and would print its own tracebacks
after our message. So rank 0 writes code and message to the file named by LLMTRAIN_LAUNCHED.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from llmtrain import durable
from llmtrain.training.stop.signals import LAUNCHED


def leave(env: Mapping[str, str], exit_code: int, message: str) -> bool:
    """Write the file, if this is rank 0 and LLMTRAIN_LAUNCHED is set; return whether it worked."""
    path = Path(env.get(LAUNCHED, ""))
    if not path.is_absolute() or env.get("RANK", "0") != "0":
        return False
    try:
        durable.write(path, json.dumps([exit_code, message]).encode())
    except OSError:
        return False  # the caller prints the message, and the launcher reads status.json
    return True


def found(path: Path) -> tuple[int, str] | None:
    """Return the code and message of rank 0; None if it ended without writing them."""
    if not path.exists():
        return None
    exit_code, message = json.loads(path.read_text(encoding="utf-8"))
    return int(exit_code), str(message)
