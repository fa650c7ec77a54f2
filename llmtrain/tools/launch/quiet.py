"""accelerate's launcher, with what it reports about itself in RUN/logs/launcher.log.

    python -m llmtrain.tools.launch.quiet RUN --config_file …      as `accelerate launch …`

torch's part of the launcher warns of every signal that it passes on, and raises when a rank fails
or a person stops the run. Its tracebacks would be the last lines on a terminal, below the message
of the run. Until the run directory has a folder for logs, everything still goes to stderr.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path
from subprocess import CalledProcessError

from llmtrain.config import secrets
from llmtrain.rundir import contents


def main() -> None:
    """Launch, and exit with 1 for what the launcher raises."""
    log = contents.launcher_log(Path(sys.argv.pop(1)))
    from accelerate.commands.launch import main as launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    torchs = logging.getLogger("torch.distributed")
    torchs.handlers, torchs.propagate = [_Log(log)], False  # its own one writes to stderr
    try:
        launch()
    except (SignalException, ChildFailedError, CalledProcessError):
        tell(log, traceback.format_exc())
        sys.exit(1)


def tell(log: Path, text: str) -> None:
    """Append text without secrets to the log if its folder exists, else write it to stderr."""
    lines = f"{secrets.hider(os.environ)(text).rstrip()}\n"
    try:
        with log.open("a", encoding="utf-8") as file:
            file.write(lines)
    except OSError:
        sys.stderr.write(lines)


class _Log(logging.Handler):
    """Appends the lines of a logger to a file that may not be there yet."""

    def __init__(self, log: Path) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
        self._path = log

    def emit(self, record: logging.LogRecord) -> None:
        tell(self._path, self.format(record))


if __name__ == "__main__":
    main()
