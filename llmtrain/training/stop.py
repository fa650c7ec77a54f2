"""What stops or saves a run: signals and files, which ranks report as flags in a step's vector.

    a signal, a launcher that is gone      reported by every rank
    RUN/STOP, `checkpoint.stop_after`      reported by rank 0 alone: end with a checkpoint
    RUN/SAVE, `checkpoint.every_minutes`   reported by rank 0 alone: save and continue

A handler only sets a flag, which the step's reduction shares. Handlers are installed before torch
is imported, so only the standard library is used for them: imports take seconds, in which a signal
must not kill a rank and leave its peers waiting.

To look for a file costs as much as some operations of a small model, so a step looks only if the
last look is 0.2 s old, or if its numbers decide at once. A file is deleted when its request is
served. If it cannot be deleted, it is ignored from then on, so that it is served only once.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from llmtrain import system
from llmtrain.errors import RESTARTABLE, RunError
from llmtrain.rundir.contents import SAVE, STOP
from llmtrain.text import parse_duration
from llmtrain.types import Flags

if TYPE_CHECKING:
    from llmtrain.config.schema import CheckpointConfig

LAUNCHED = "LLMTRAIN_LAUNCHED"  # set by `llmtrain train --processes`, as torchrun sets its run id
RESTARTS = "LLMTRAIN_RESTARTS"  # how often `llmtrain supervise` has started the command before
# When the launcher of this machine began, where it forms several groups: by `time.monotonic`.
STARTED = "LLMTRAIN_STARTED"
SUPERVISOR = "LLMTRAIN_SUPERVISOR"  # the process id of `llmtrain supervise`
# Names a file that exists when the launcher is about to form its group of ranks again, with more or
# fewer machines: a signal means that then. It is set where the launcher can do so at all, and then
# a stop that the launcher has caused ends with 75, so that it forms another group.
REGROUP = "LLMTRAIN_REGROUP"
CLOSING = "closing"  # beside it: this launcher ends, and waits for nothing but the end of its ranks
LOST = ("launcher_lost", "rank_lost")  # reasons to stop that no person has caused
GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # read by torch's launcher, under accelerate too
_GRACE_SECONDS = 30  # the default of torch 2.13
_SAFE_SHARE = 0.7
_SECOND_INTERRUPT_SECONDS = 2.0
_DYING_SECONDS = 0.25
_NOTE_SECONDS = 2.0
_LOOK_SECONDS = 0.5
_STDERR = 2
_LOOK, _LEAVE = 0, 255  # no signal has such a number


class Signals:
    """Whether this process was asked to stop, and by what.

    started: what `time.monotonic` returned when this process or its launcher began, see `STARTED`
    before_exit: called with an exit code and a reason before the process ends at once
    """

    def __init__(self) -> None:
        self.started = float(os.environ.get(STARTED) or time.monotonic())
        self._parent: int | None = None
        self._signal: str | None = None
        self._signalled = 0.0
        self._noted = False
        self._lost = False
        self._ended = False
        self._training = False
        self._old: dict[int, object] = {}
        self._late: tuple[float, Callable[[], None]] | None = None
        self._listener: _Listener | None = None
        self.before_exit: Callable[[int, str], None] = lambda _code, _reason: None

    @property
    def reason(self) -> str | None:
        """Why to stop: `launcher_lost`, `rank_lost`, the name of a signal, or None.

        `launcher_lost` takes precedence over the signal that the death of a launcher causes. It is
        also the reason if the launcher notes that it forms its group again. If it signals without
        any note, a rank beside this one has died.
        """
        if self._lost or self._parent not in (None, os.getppid()):
            self._lost = True
            return "launcher_lost"
        # The threads of a launcher end one by one. Its death signal may arrive while another of its
        # threads, with the same process id, still counts as the parent of this process.
        fresh = time.monotonic() - self._signalled < _DYING_SECONDS
        if self._parent is not None and self._signal == "SIGTERM" and fresh:
            return None
        if self._signal is None or (note := os.environ.get(REGROUP)) is None:
            return self._signal
        if Path(note).is_file():
            return "launcher_lost"
        if Path(note).with_name(CLOSING).is_file():
            return self._signal
        # Who stops launcher and ranks at once may be seen here before the launcher's note is.
        late = time.monotonic() - self._signalled >= _NOTE_SECONDS
        return "rank_lost" if late else None

    @property
    def reason_alone(self) -> str | None:
        """`reason` of a rank that has not met the others: also if the run is over for them.

        Its launcher notes that, and does not signal ranks that may still save.
        """
        note = os.environ.get(REGROUP)
        over = note is not None and Path(note).with_name(CLOSING).is_file()
        return self.reason or ("SIGTERM" if over else None)

    def wait(self, seconds: float) -> None:
        """Wait, before ranks can communicate. Raises RunError (75) if this process is to stop."""
        if self.reason_alone:
            message = "stopped before the process that has the run directory had ended"
            raise RunError(message, RESTARTABLE, "the same command resumes")
        time.sleep(seconds)

    def install(self) -> None:
        """Catch the signals that ask for a stop; do nothing outside the main thread.

        Python allows handlers to be set only in the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in system.stop_signals():
            self._old[number] = signal.signal(number, self._handle)
        self._listener = _Listener(self)
        _write_stacks_to(_STDERR)
        if _has_launcher(os.environ):  # if it dies for any reason, this process receives SIGTERM
            self._parent = os.getppid()
            system.signal_on_death_of_parent(signal.SIGTERM)

    def restore(self) -> None:
        """Restore the old handlers."""
        if self._listener is None:
            return
        faulthandler.unregister(signal.SIGUSR2)
        for number, old in self._old.items():
            signal.signal(number, old)  # type: ignore[arg-type]  # what signal.signal returned
        self._old.clear()
        self._listener.close()
        self._listener = None

    @contextmanager
    def stacks_in(self, descriptor: int) -> Iterator[None]:
        """During the block, SIGUSR2 writes the stacks of all threads to this open file.

        At other times it writes them to stderr. It needs no Python code to run, so it works
        whatever the threads are waiting for.
        """
        if self._listener is None:
            yield
            return
        _write_stacks_to(descriptor)
        try:
            yield
        finally:
            _write_stacks_to(_STDERR)  # the number of a closed file may be reused for another one

    @contextmanager
    def alone(self, on_stop: Callable[[str], int]) -> Iterator[None]:
        """During the block, a stop ends the process with the exit code that `on_stop` returns.

        For the time before ranks can communicate: a rank that waits for peers that are gone would
        otherwise wait until the rendezvous times out. on_stop: is called with the reason.
        """
        if self._listener is None:
            yield
            return
        self._listener.answer(on_stop)
        try:
            yield
        finally:
            self._listener.answer(None)

    def cut_short(self, seconds: float, end_wait: Callable[[], None]) -> None:
        """Arrange that `end_wait` is called this many seconds after the first signal.

        Each call replaces the one before.
        """
        self._late = (seconds, end_wait)

    def begin(self) -> None:
        """Note that steps have begun."""
        self._training = True

    def end(self) -> None:
        """Note that the run is over, so that signals no longer ask for a stop."""
        self._ended = True

    def receive(self, number: int) -> bool:
        """Note a signal. Returns whether it asks for a stop of a run that is not over."""
        if self._ended or number not in self._old:
            return False
        if self._signal is None:
            self._signalled = time.monotonic()
            self._signal = signal.Signals(number).name
        return True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if not self.receive(number) or self._noted:
            return
        self._noted = True
        if os.environ.get("RANK", "0") == "0":
            line, again = b"stopping before the first step: there is nothing to save", b"at once"
            if self._training:
                line = b"stopping after the step under way, with a checkpoint"
                again = b"without one"
            hint = b" (interrupt again: " + again + b")" if number == signal.SIGINT else b""
            _write_line(line + hint + b"\n")
        if self._late is not None:
            timer = threading.Timer(*self._late)
            timer.daemon = True
            timer.start()


class _Listener:
    """A thread that receives signals while the main thread cannot.

    A handler runs only when the main thread executes Python code, but that thread may be waiting in
    a rendezvous, or in a reduction whose peer hangs. A pipe receives the signal's number at once.
    """

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._on_stop: Callable[[str], int] | None = None
        self._interrupted: float | None = None
        self._lock = threading.Lock()
        self._numbers, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._before = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="stop", daemon=True)
        self._thread.start()

    def answer(self, on_stop: Callable[[str], int] | None) -> None:
        """From now on, end the process at a stop with the exit code that `on_stop` returns.

        on_stop: None = do not end the process
        """
        with self._lock:
            self._on_stop = on_stop
        os.write(self._wake, bytes([_LOOK]))

    def close(self) -> None:
        """Stop listening."""
        signal.set_wakeup_fd(self._before)
        os.write(self._wake, bytes([_LEAVE]))
        self._thread.join()
        os.close(self._wake)
        os.close(self._numbers)

    def _listen(self) -> None:
        numbers = b""
        while _LEAVE not in numbers:
            seconds = _LOOK_SECONDS if self._on_stop else None
            ready = select.select([self._numbers], [], [], seconds)[0]
            numbers = os.read(self._numbers, 256) if ready else b""
            for number in numbers:
                if self._signals.receive(number) and number == signal.SIGINT:
                    now = time.monotonic()
                    if self._interrupted is None:
                        self._interrupted = now
                    elif now - self._interrupted >= _SECOND_INTERRUPT_SECONDS:
                        _write_line(b"interrupted again: ending without a checkpoint\n")
                        self._signals.before_exit(RESTARTABLE, "interrupted again")
                        os._exit(RESTARTABLE)
            with self._lock:
                if self._on_stop and (reason := self._signals.reason_alone):
                    _leave(self._on_stop, reason)


def _leave(on_stop: Callable[[str], int], reason: str) -> NoReturn:
    try:
        code = on_stop(reason)
    except Exception:  # the edge of the process: it must end, and nothing else would show why
        traceback.print_exc()
        code = 1
    os._exit(code)


def _write_line(line: bytes) -> None:
    if os.isatty(_STDERR):
        line = b"\r\x1b[2K" + line  # in place of the moving line, to which ^C was added
    # An error in a handler would be raised in whatever code is running, and end the run without a
    # checkpoint. It can happen: in `train | tee log`, Ctrl-C has already ended tee.
    with suppress(OSError):
        os.write(_STDERR, line)


def _write_stacks_to(descriptor: int) -> None:
    faulthandler.register(signal.SIGUSR2, file=descriptor, all_threads=True, chain=False)


def stop_code(reason: str | None, environ: Mapping[str, str]) -> int:
    """Return the exit code of a stop. reason: one of `STOPS`, or of `Signals`"""
    return RESTARTABLE if reason in LOST and REGROUP in environ else 0


def is_awaited(environ: Mapping[str, str]) -> bool:
    """Whether the launcher waits until this rank returns, instead of until it ends."""
    note = environ.get(REGROUP)
    return note is not None and not Path(note).with_name(CLOSING).exists()


def _has_launcher(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("TORCHELASTIC_RUN_ID") or environ.get(LAUNCHED))


def grace_warning(
    save_seconds: float, step_seconds: float, environ: Mapping[str, str]
) -> str | None:
    """Return a warning if a stop may take longer than the launcher waits, or None.

    The launcher forwards a signal to its processes, and kills them after its waiting time. They
    need one or two steps to agree on the stop, and then a save.
    """
    if not _has_launcher(environ):
        return None
    grace = int(environ.get(GRACE, _GRACE_SECONDS))
    needed = save_seconds + 2 * step_seconds
    if needed <= _SAFE_SHARE * grace:
        return None
    enough = 10 * math.ceil(needed / _SAFE_SHARE / 10)
    return (
        f"a stop takes about {needed:.0f} s here (a save of {save_seconds:.1f} s and two steps of "
        f"{step_seconds:.1f} s), but the launcher kills its processes {grace} s after a signal: "
        f"start it with {GRACE}={enough} in its environment"
    )


_installed: list[Signals] = []


def install() -> Signals:
    """Install the handlers of this process; a second call returns what the first one returned."""
    if not _installed:
        signals = Signals()
        signals.install()
        _installed.append(signals)
    return _installed[0]


@contextmanager
def catching() -> Iterator[Signals]:
    """Install handlers for the duration of a run; if they were already installed, they remain."""
    already = bool(_installed)
    try:
        yield install()
    finally:
        _installed[0].end()
        if not already:
            _installed.pop().restore()


_log = logging.getLogger(__name__)

_FILES_SECONDS = 0.2  # between two looks for the files


def asked(reason: str | None, **others: bool) -> Flags:
    """Return the flags of this process's own reason to stop, and others. reason: from `Signals`."""
    lost = reason in LOST
    return Flags(signal=reason is not None and not lost, launcher_lost=lost, **others)


class Requests:
    """The requests of one start of a run."""

    def __init__(
        self,
        run_dir: Path,
        checkpoint: CheckpointConfig,
        rank: int,
        started: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """started: the time by `clock` when this process began. clock: seconds, never goes back."""
        self._paths = {name: run_dir / name for name in (STOP, SAVE)}
        self._decides = rank == 0
        self._clock = clock
        self._started = started
        after = parse_duration(checkpoint.stop_after or "")
        self._stop_after = math.inf if after is None else after
        self._every = 60 * (checkpoint.every_minutes or math.inf)
        self._begun = clock()
        self._longest_save = 0.0
        self._there: frozenset[str] = frozenset()  # the files that the last look found
        self._looked = -math.inf
        self._served: set[str] = set()
        self._unseen: set[str] = set()
        if self._decides and self._is_there(STOP):
            _log.warning(
                "%s is there already: this start ends before its first step, and deletes it",
                run_dir / STOP,
            )

    def flags(self, reason: str | None, *, look: bool = True) -> Flags:
        """Return the requests that this rank reports now.

        reason: from `Signals`
        look: whether to look for the files in any case, even if that was done a moment ago
        """
        if not self._decides:
            return asked(reason)
        now = self._clock()
        if look or now - self._looked >= _FILES_SECONDS:
            self._there = frozenset(filter(self._is_there, self._paths))
            self._looked = now
        return asked(
            reason,
            stop_file=STOP in self._there,
            # Leaves twice the time of the longest save so far, since the last one may be slower.
            stop_after=now - self._started >= self._stop_after - 2 * self._longest_save,
            minutes_due=now - self._begun >= self._every,
            save_file=SAVE in self._there,
        )

    def begin_save(self) -> None:
        """Note that a save serves the requests for one; restart the period in minutes."""
        self._begun = self._clock()
        if self._decides:
            self._delete(SAVE)

    def end_save(self, seconds: float) -> None:
        """Note how many seconds a save took, from its begin to its commit."""
        self._longest_save = max(self._longest_save, seconds)

    def end_stop(self) -> None:
        """Delete the STOP file, now that the run has stopped for whatever reason."""
        if self._decides:
            self._delete(STOP)

    def _is_there(self, name: str) -> bool:
        try:
            exists = self._paths[name].exists()
        except OSError as error:
            # Without an answer of the file system there is no request; the next step looks again.
            if name not in self._unseen:
                _log.warning("%s could not be looked for: %s", name, error)
            self._unseen.add(name)
            return False
        self._unseen.discard(name)
        if not exists:
            self._served.discard(name)
        return exists and name not in self._served

    def _delete(self, name: str) -> None:
        self._looked = -math.inf  # what was found is out of date
        try:
            self._paths[name].unlink(missing_ok=True)
        except OSError as error:
            self._served.add(name)
            _log.warning("%s could not be deleted, and counts no more: %s", name, error)
