"""Each rank's log file, and the lines that rank 0 shows on its terminal.

The log lines of all libraries go to `logs/rank-R.log`, tracebacks too. Rank 0 also shows llmtrain's
own lines on its terminal. Lines are kept in memory until the run directory exists.
"""

import logging
import logging.handlers
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from llmtrain import system
from llmtrain.config import secrets
from llmtrain.errors import Problem, UserError
from llmtrain.text import harmless

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_BUFFERED_LINES = 10_000


class LogFile:
    """Takes over the root logger until `close`."""

    def __init__(self) -> None:
        self._hide = secrets.hider(os.environ)
        self._root = logging.getLogger()
        self._ours = logging.getLogger("llmtrain")
        self._levels = (self._root.level, self._ours.level)
        self._root.setLevel(logging.INFO)
        level, levels = os.environ.get("LLMTRAIN_LOG_LEVEL", "INFO"), logging.getLevelNamesMapping()
        if level.upper() not in levels:
            expected = f"one of {', '.join(sorted(levels, key=lambda name: levels[name]))}"
            raise UserError(Problem("LLMTRAIN_LOG_LEVEL", level.upper(), expected))
        self._ours.setLevel(levels[level.upper()])
        self._buffer = logging.handlers.MemoryHandler(
            _BUFFERED_LINES, flushLevel=logging.CRITICAL + 1, flushOnClose=False
        )
        self._file: logging.FileHandler | None = None
        self._screen: logging.Handler | None = None
        self._root.addHandler(self._buffer)
        logging.captureWarnings(True)
        # Have libraries log through the root logger and draw no progress bars.
        for name in ("huggingface_hub", "datasets"):
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True
        transformers = sys.modules.get("transformers")
        if transformers is not None:
            transformers.utils.logging.disable_default_handler()
            transformers.utils.logging.enable_propagation()
            transformers.utils.logging.disable_progress_bar()

    def open(self, path: Path) -> None:
        """Write to `path` from now on, beginning with the lines that were kept in memory."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _File(path, encoding="utf-8")
        self._file.setFormatter(_Formatter(self._hide))
        self._buffer.setTarget(self._file)
        self._buffer.flush()
        self._root.removeHandler(self._buffer)
        self._root.addHandler(self._file)

    @property
    def descriptor(self) -> int:
        """File descriptor of the open log file, for writers that do not use Python's logging."""
        stream = self._file.stream if self._file is not None else None
        assert stream is not None, "the file is open"
        return stream.fileno()

    def show(self, note: Callable[[str, str | None], None]) -> None:
        """Show llmtrain's own lines through `note` (rank 0's terminal).

        It gets the line as text and, if the caller gave one as `extra={"plain": …}`, as a line of
        `word key=value`.
        """
        self._screen = _Screen(note, self._hide)
        self._ours.addHandler(self._screen)

    def close(self) -> None:
        """Flush, and restore the loggers."""
        for handler in (self._buffer, self._file):
            if handler is not None:
                self._root.removeHandler(handler)
                handler.close()
        if self._screen is not None:
            self._ours.removeHandler(self._screen)
        self._root.setLevel(self._levels[0])
        self._ours.setLevel(self._levels[1])
        logging.captureWarnings(False)


class _Formatter(logging.Formatter):
    """Formats lines and hides secrets in them: a library may log an address or its arguments."""

    def __init__(self, hide: secrets.Hide) -> None:
        super().__init__(_FORMAT)
        self._hide = hide

    def format(self, record: logging.LogRecord) -> str:
        return harmless(self._hide(super().format(record)), keep="\n\t")


class _File(logging.FileHandler):
    """A log file that is created again if it is deleted while the run directory exists.

    It keeps its descriptor, since stack dumps are written to that without Python's logging.
    """

    def emit(self, record: logging.LogRecord) -> None:
        path, flags = Path(self.baseFilename), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        if self.stream is not None and system.is_gone(path):
            with suppress(OSError):  # else later lines go to the deleted file
                path.parent.mkdir(exist_ok=True)  # not the run directory: the next save makes it
                with os.fdopen(os.open(path, flags, 0o666), "wb") as new:
                    with suppress(OSError):  # what a full disk does not take is lost with that file
                        self.flush()
                    os.dup2(new.fileno(), self.stream.fileno(), inheritable=False)
        super().emit(record)


class _Screen(logging.Handler):
    def __init__(self, note: Callable[[str, str | None], None], hide: secrets.Hide) -> None:
        super().__init__(logging.INFO)
        self._note = note
        self._hide = hide

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            return  # a traceback is for the file; whoever caught the error reports it
        prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        plain = record.__dict__.get("plain")
        text = self._hide(prefix + record.getMessage())
        self._note(text, None if plain is None else self._hide(plain))
