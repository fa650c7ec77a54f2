"""A thread that reports where this process makes no progress, and ends the process in time.

It compares `last_beat()` once a second, from the start of a run to its end. It counts its own ticks
and reads no clock, so a machine or a process that was suspended does not count as hanging.

    no progress ──300 s or 20 steps──► stacks and phase in logs/rank-R.log, event `no_progress`
                ──10 s before distributed.timeout_minutes──► status, mark, exit code 75

At that time-out the peers stop waiting, and NCCL then aborts processes without a message. The trap:
the disk itself may hang, or a thread that holds a lock of `logging`. So each thing is written by a
separate thread, for which the watchdog waits only a few seconds.
"""

import faulthandler
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llmtrain import system
from llmtrain.errors import RESTARTABLE
from llmtrain.rundir import contents, failures
from llmtrain.training.journal import Journal

_TICK_SECONDS = 1.0
_REPORT_SECONDS = 300.0
_REPORT_STEPS = 20
_BEFORE_SECONDS = 10.0
_LATEST_SHARE = 0.9  # of a short time-out; later than 0.8, after which a wait for data fails
_WRITING_SECONDS = 2.0
# Each of these phases is one call of a library, which takes minutes for large models or texts. It
# is reported later and never ended: waiting peers have a time-out, and so has the rendezvous.
_LONG = ("joining the other processes", "building the model", "training a tokenizer")


class Watchdog:
    """Counts the calls of `look`, one a second, since the last progress."""

    def __init__(
        self, journal: Journal, timeout_minutes: float, leave: Callable[[int], object] = os._exit
    ) -> None:
        """leave: ends this process with an exit code."""
        timeout = 60 * timeout_minutes
        self._end_after = max(timeout - _BEFORE_SECONDS, _LATEST_SHARE * timeout)
        self._most = timeout / 2
        self._journal = journal
        self._rank = journal.rank
        self._leave = leave
        self._median: Callable[[], float] | None = None
        self._seen = system.last_beat()[0]
        self._still = 0
        self._reported = False

    def follow(self, median_seconds: Callable[[], float]) -> None:
        """Note that the start is over.

        median_seconds: returns the median time of the last steps, 0 before the first step
        """
        self._median = median_seconds

    def look(self) -> None:
        """Check for progress: report a hang once, end the process before its peers stop waiting."""
        count, phase = system.last_beat()
        if count != self._seen:
            self._seen, self._still, self._reported = count, 0, False
            return
        self._still += 1
        long = any(one in phase for one in _LONG)
        message = f"no progress for {self._still} s: {phase}"
        steps = _REPORT_STEPS * self._median() if self._median else 0.0
        if self._median is None and self._rank:
            report_after = self._end_after  # it waits for rank 0, which may work alone for minutes
        else:
            report_after = self._most if long else min(max(_REPORT_SECONDS, steps), self._most)
        if self._still >= self._end_after and not long:
            self._end(message)
        elif not self._reported and self._still >= report_after:
            self._reported = True
            self._write_stacks(message)
            detail = {"seconds": self._still, "phase": phase, "rank": self._rank}
            _in_thread(lambda: self._journal.event("no_progress", self._journal.step, **detail))

    def _end(self, message: str) -> None:
        code = self._journal.exit_code  # not None if the run is over and hangs while it closes
        self._write_stacks(message)
        if code is None:
            _in_thread(
                lambda: failures.write(self._journal.run_dir, self._rank, RESTARTABLE, message)
            )
            marks: list[failures.Mark | None] = []  # of a failed rank that rank 0 waited for
            if not self._rank:
                run_dir = self._journal.run_dir
                _in_thread(lambda: marks.append(failures.outranking(run_dir, seconds=0)))
            causes = ((one.code, str(one)) for one in marks if one and one.is_cause)
            code, why = next(causes, (RESTARTABLE, message))
            _in_thread(lambda: self._journal.end("failed", code, why))
        _in_thread(lambda: os.write(2, f"rank {self._rank}: error: {message}\n".encode()))
        self._leave(code)

    def _write_stacks(self, message: str) -> None:
        """Append the stacks of all threads to the log, or to stderr if it cannot be opened."""
        log_file = contents.log_file(self._journal.run_dir, self._rank)

        def append() -> None:
            try:
                file = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            except OSError:
                file = os.dup(2)
            try:
                os.write(file, f"{message}; the stacks of all threads:\n".encode())
                faulthandler.dump_traceback(file=file, all_threads=True)
            finally:
                os.close(file)

        _in_thread(append)


@contextmanager
def watching(
    journal: Journal, timeout_minutes: float, show: Callable[[], object] = lambda: None
) -> Iterator[Watchdog]:
    """Run a watchdog during the block.

    timeout_minutes: how long peers wait for each other
    show: called once a second too, in a thread of its own: it may wait for a terminal
    """
    watchdog = Watchdog(journal, timeout_minutes)
    over = threading.Event()

    def each_second(call: Callable[[], object]) -> None:
        while not over.wait(_TICK_SECONDS):
            call()

    watches, tells = (
        threading.Thread(target=each_second, args=(call,), name=name, daemon=True)
        for name, call in (("watchdog", watchdog.look), ("teller", show))
    )
    watches.start()
    tells.start()
    try:
        yield watchdog
    finally:
        over.set()
        watches.join()
        tells.join(_WRITING_SECONDS)


def _in_thread(work: Callable[[], object]) -> None:
    """Call `work` in a thread, and wait for it for `_WRITING_SECONDS` at most."""
    thread = threading.Thread(target=work, name="watchdog writes", daemon=True)
    thread.start()
    thread.join(_WRITING_SECONDS)
