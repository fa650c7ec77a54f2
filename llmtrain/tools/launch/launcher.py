"""accelerate's launcher, with what it reports about itself in RUN/logs/launcher.log.

    python -m llmtrain.tools.launch.launcher RUN --config_file …      as `accelerate launch …`

torch's part of the launcher warns of every signal that it passes on, and raises when a rank fails
or a person stops the run. Its tracebacks would stand around the message of the run. If the run
directory has no folder for logs in the end, everything goes to stderr, unless rank 0 has left a
message that says why.
"""

import logging
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from subprocess import CalledProcessError

from llmtrain.config import secrets
from llmtrain.rundir import contents
from llmtrain.tools.launch.child import read_exit_report
from llmtrain.training.stop import LAUNCHED


def main() -> None:
    """Launch, and exit with 1 for what the launcher raises."""
    log = contents.launcher_log(Path(sys.argv.pop(1)))
    from accelerate.commands.launch import main as launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    torchs, handler = logging.getLogger("torch.distributed"), LauncherLog(log)
    torchs.handlers, torchs.propagate = [handler], False  # its own one writes to stderr
    try:
        launch()
    except (SignalException, ChildFailedError, CalledProcessError):
        handler.tell(traceback.format_exc())
        sys.exit(1)
    finally:
        handler.end(os.environ)


def tell(log: Path, text: str) -> None:
    """Append text without secrets to the log if its folder exists, else write it to stderr."""
    lines = f"{secrets.hider(os.environ)(text).rstrip()}\n"
    try:
        with log.open("a", encoding="utf-8") as file:
            file.write(lines)
    except OSError:
        sys.stderr.write(lines)


class LauncherLog(logging.Handler):
    """Appends the lines of a logger to a file; keeps them while its folder does not exist."""

    def __init__(self, log: Path) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
        self._path = log
        self._kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See base class."""
        self.tell(self.format(record))

    def tell(self, text: str) -> None:
        """Write text, with what was kept before it, or keep it too."""
        self._kept.append(text)
        if self._path.parent.is_dir():
            self._write()

    def end(self, env: Mapping[str, str]) -> None:
        """Write what was kept to stderr, unless rank 0 has left a message for the caller."""
        report = env.get(LAUNCHED)
        if report is None or read_exit_report(Path(report)) is None:
            self._write()

    def _write(self) -> None:
        for text in self._kept:
            tell(self._path, text)
        self._kept = []


if __name__ == "__main__":
    main()
