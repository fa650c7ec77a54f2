"""Report the end of a run to the process that launched it, by a file with a code and a message.

The launcher between them has exit code 1 for every failure, and would print its own tracebacks
after our message. So rank 0 writes code and message to the file named by LLMTRAIN_LAUNCHED.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from llmtrain import durable
from llmtrain.processes import start_time
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


_AFTER = """
import os, sys, time
launcher, began, text = int(sys.argv[1]), sys.argv[2], sys.argv[3]
from llmtrain.processes import is_alive, start_time
end = time.monotonic() + 60
while is_alive(launcher) and start_time(launcher) == began and time.monotonic() < end:
    time.sleep(0.05)
os.write(2, os.fsencode(text) + b"\\n")
"""


def repeat_after_launcher(env: Mapping[str, str], message: str) -> None:
    """Print a message again below what torch's launcher prints when its ranks have failed.

    A launcher that a person has started himself cannot be asked to be silent. So a process of its
    own waits for its end, for at most a minute. env: that of rank 0
    """
    began = start_time(os.getppid())
    if "TORCHELASTIC_RUN_ID" not in env or env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    if began is not None:
        words = [sys.executable, "-c", _AFTER, str(os.getppid()), began, message]
        subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
