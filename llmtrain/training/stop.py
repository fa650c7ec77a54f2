"""Signals as an agreed stop: a handler only raises a flag, the step's reduction carries it on.

Standard library only, and installed before torch is imported: the imports take seconds, in which a
signal must not kill a rank and leave its peers waiting.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

LAUNCHED = "LLMTRAIN_LAUNCHED"  # set by `llmtrain train --processes`, as torchrun sets its run id
_PR_SET_PDEATHSIG = 1
_SECOND_INTERRUPT_SECONDS = 2.0
_DYING_SECONDS = 0.25


class Signals:
    """Which stop was asked for, and by what. The only state is what the handlers write.

    started: what `time.monotonic` said when this process began to listen, before it imported torch.
    """

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._parent: int | None = None
        self._signal: str | None = None
        self._signalled = 0.0
        self._lost = False
        self._ended = False
        self._training = False
        self._interrupted: float | None = None
        self._old: dict[int, object] = {}
        self._late: tuple[float, Callable[[], None]] | None = None

    @property
    def reason(self) -> str | None:
        """`launcher_lost`, the name of the signal, or None. A lost launcher outranks its signal."""
        if self._lost or self._parent_is_gone():
            self._lost = True
            return "launcher_lost"
        # A launcher dies thread by thread: its death signal may come while another of its threads,
        # under the same process number, still counts as this one's parent.
        fresh = time.monotonic() - self._signalled < _DYING_SECONDS
        if self._parent is not None and self._signal == "SIGTERM" and fresh:
            return None
        return self._signal

    def install(self) -> None:
        """Catch the signals that ask for a stop. In the main thread only, as Python demands."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                self._old[number] = signal.signal(number, self._note)
        self._follow_launcher()

    def restore(self) -> None:
        """Put the old handlers back."""
        for number, old in self._old.items():
            signal.signal(number, old)  # type: ignore[arg-type]  # what signal.signal returned
        self._old.clear()

    @contextmanager
    def alone(self, on_stop: Callable[[str], None]) -> Iterator[None]:
        """While ranks cannot talk yet: on a stop, call `on_stop(reason)` and end with code 0.

        A rank that waited here for peers which are gone would wait until the rendezvous times out.
        """
        # A handler runs only once the main thread is back in Python, and that thread may sit in a
        # rendezvous; the number of the signal comes through this pipe at once.
        numbers, wake = os.pipe()
        os.set_blocking(wake, False)
        main = threading.current_thread() is threading.main_thread()
        before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False) if main else -1

        def watch() -> None:
            while not done.is_set():
                if select.select([numbers], [], [], 0.5)[0]:
                    heard = os.read(numbers, 1)[0]
                    if heard in self._old:
                        self._signalled = self._signalled or time.monotonic()
                        self._signal = signal.Signals(heard).name
                reason = None if done.is_set() else self.reason
                if reason:
                    on_stop(reason)
                    os._exit(0)

        done = threading.Event()
        thread = threading.Thread(target=watch, name="stop", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            if main:
                signal.set_wakeup_fd(before)
            os.write(wake, b"\0")
            thread.join()
            os.close(wake)
            os.close(numbers)

    def cut_short(self, seconds: float, wait: Callable[[], None]) -> None:
        """So long after the first signal call `wait`, which ends what is waited for.

        The newest pair counts when the signal comes.
        """
        self._late = (seconds, wait)

    def begin(self) -> None:
        """From now on there is always a step under way."""
        self._training = True

    def end(self) -> None:
        """The run is over and on disk: there is nothing left to stop."""
        self._ended = True

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._ended:
            return
        now = time.monotonic()
        if self._signal is None and os.environ.get("RANK", "0") == "0":
            os.write(2, self._announcement(interrupted=number == signal.SIGINT))
        if number == signal.SIGINT:
            if self._interrupted is None:
                self._interrupted = now
            elif now - self._interrupted >= _SECOND_INTERRUPT_SECONDS:
                os.write(2, b"interrupted again: ending without a checkpoint\n")
                os._exit(75)
        if self._signal is None:
            self._signalled = now
            self._call_late()
        self._signal = signal.Signals(number).name

    def _announcement(self, *, interrupted: bool) -> bytes:
        if not self._training:
            again = b" (interrupt again: at once)" if interrupted else b""
            return b"\nstopping before the first step: there is nothing to save" + again + b"\n"
        again = b" (interrupt again: without one)" if interrupted else b""
        return b"\nstopping after the step under way, with a checkpoint" + again + b"\n"

    def _call_late(self) -> None:
        if self._late is not None:
            timer = threading.Timer(*self._late)
            timer.daemon = True
            timer.start()

    def _parent_is_gone(self) -> bool:
        return self._parent is not None and os.getppid() != self._parent

    def _follow_launcher(self) -> None:
        """Under a launcher: its death reaches this process as a SIGTERM, however it died."""
        if not (os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get(LAUNCHED)):
            return
        self._parent = os.getppid()
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


_installed: list[Signals] = []


def install() -> Signals:
    """Install the handlers once for this process; a second call returns the first one's."""
    if not _installed:
        signals = Signals()
        signals.install()
        _installed.append(signals)
    return _installed[0]


@contextmanager
def catching() -> Iterator[Signals]:
    """Handlers for as long as a run lives; where they stand already, they stay."""
    already = bool(_installed)
    try:
        yield install()
    finally:
        _installed[0].end()
        if not already:
            _installed.pop().restore()
