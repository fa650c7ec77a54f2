"""Starts and ends data workers, and turns each kind of failure into one error.

    raises        its last item has the error, with the traceback and the unit
    dies          a thread waits for this, whatever the main thread is doing: it ends the other
                  workers and closes the pipe, so that a reader that waits for an item wakes up
    is silent     the loader gives up after 0.8 of the peers' timeout

The trap: torch's own handler of SIGCHLD raises at any line of the main thread. And a worker that is
killed while it writes leaves half a message, and a reader waits for the rest. So torch's handler
has to forget these workers, and the end of the pipe wakes the reader.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import connection, parent_process
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from typing import Any, Final, TypeAlias

from llmtrain import faults, system
from llmtrain.data.lanes import Block
from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError

# A launcher passes SIGHUP on as well, to its rank and all processes that the rank has started.
IGNORED_SIGNALS: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
CLOSE_SECONDS: Final = 2.0
CONTINUES: Final = "the same command continues from the newest checkpoint"
_NAME_BYTES: Final = 256
Failed: TypeAlias = UserError | RunError  # the last entry of a worker's last item


class Asked:
    """The unit that each worker asked for last, in shared memory that outlives the worker."""

    def __init__(self, workers: int) -> None:
        self._names = RawArray(ctypes.c_char, max(1, workers) * _NAME_BYTES)

    def write(self, worker: int, name: str) -> None:
        """Store a unit's name. Of a long name only the end is stored, which is the telling part."""
        encoded = name.encode(errors="backslashreplace")[-_NAME_BYTES:].ljust(_NAME_BYTES, b"\0")
        self._slot(worker)[:] = encoded

    def read(self, worker: int) -> str:
        """Return the name, or "no unit yet"."""
        raw = bytes(self._slot(worker))
        return raw.rstrip(b"\0").decode(errors="replace") or "no unit yet"

    def _slot(self, worker: int) -> memoryview:
        whole = memoryview(self._names).cast("B")
        return whole[worker * _NAME_BYTES : (worker + 1) * _NAME_BYTES]


@contextmanager
def hold_signals() -> Iterator[None]:
    """Block signals while processes are started, which inherit this until `start_worker`.

    `start_worker` runs seconds after the process has begun, since torch is imported first.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(worker_id: int) -> None:
    """Set up a new worker: ignore signals, which the rank handles, and die with the rank."""
    faults.install(os.environ)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    system.signal_on_death_of_parent(signal.SIGKILL)
    rank = parent_process()
    if rank is not None and not rank.is_alive():  # it died before the line above
        os._exit(1)


def carry(blocks: Iterator[Block], worker: int, size: int) -> Iterator[list[Block | Failed]]:
    """Yield items of `size` blocks in a worker, without `spans`, which the trainer does not need.

    An error is the last entry of the last item. If it were raised, torch would lose its details.
    """
    item: list[Block | Failed] = []
    try:
        for block in blocks:
            faults.hit("worker.block")
            item.append(replace(block, spans=()))
            if len(item) == size:
                yield item
                item = []
    except UserError as error:
        item.append(UserError(*map(_in_words, error.problems)))
    except RunError as error:
        item.append(error)
    except Exception:  # any other failure is sent to the rank, too
        message = f"data worker {worker} failed: {traceback.format_exc()}"
        item.append(RunError(message, 1, "this is a defect: the traceback shows where"))
    yield item


def _in_words(problem: Problem) -> Problem:
    """Return a problem with its value as a string: one that is not pickled would lose the error."""
    return problem if problem.value is None else replace(problem, value=str(problem.value))


class Workers(Iterator[Block | Failed]):
    """The blocks of worker processes, one of each in turn. Errors say how a worker ended.

    Torch gives the workers' items in turn, too; blocks of an item that are not due yet are kept
    here.
    """

    def __init__(self, items: Any, asked: Asked, stop: Any, timeout_seconds: float) -> None:
        """Watch the workers of `items`, a `_MultiProcessingDataLoaderIter`.

        Torch's handler of SIGCHLD must have forgotten them.
        """
        self.processes: list[BaseProcess] = list(items._workers)
        self._items: Any | None = items
        self._asked = asked
        self._stop = stop
        self._timeout_seconds = timeout_seconds
        self._turn = 0
        self._held: list[deque[Block | Failed]] = [deque() for _ in self.processes]
        self._fate = _Fate()
        # The thread must not refer to `items`: without references, torch ends its workers.
        arguments = (self.processes, items._data_queue._writer, self._fate)
        self._thread = threading.Thread(target=_watch, args=arguments, daemon=True)
        self._thread.start()
        # Workers ignore SIGTERM, so `multiprocessing` would wait without end at the exit.
        self._at_exit = partial(_kill, self.processes)
        atexit.register(self._at_exit)

    def __next__(self) -> Block | Failed:
        """Return the next block. Raises RunError (75) if a worker died or sent nothing in time."""
        if self._fate.dead is not None:
            raise self._death()
        assert self._items is not None, "the stream is closed"
        held = self._held[self._turn]
        if not held:
            try:
                held.extend(next(self._items))
            except (RuntimeError, OSError, EOFError) as error:
                raise self._explain(error) from error
        self._turn = (self._turn + 1) % len(self._held)
        return held.popleft()

    def close(self) -> None:
        """End the workers, even those that hang. It may be called twice."""
        items, self._items = self._items, None
        if items is None:
            return
        self._fate.closing = True
        if self._fate.dead is None and not self._fate.silent:
            _end_gently(items, self._stop, self.processes)
        else:
            # A worker that was killed may have held the lock of an event: use no event.
            items._shutdown = True
            _kill(self.processes)
        for process in self.processes:
            process.join()
        self._thread.join()
        atexit.unregister(self._at_exit)

    def _explain(self, error: Exception) -> Exception:
        if not _has_ended(self.processes) and "timed out" in str(error):
            self._fate.silent = True
            silence = f"sent nothing for {self._timeout_seconds:.0f} s"
            return self._failure(self._turn, silence, CONTINUES)
        if _has_ended(self.processes):
            self._thread.join()  # it is about to set which worker ended, and how
            return self._death()
        return error

    def _death(self) -> RunError:
        assert self._fate.dead is not None
        worker, exit_code = self._fate.dead
        remedy = CONTINUES
        if exit_code == -signal.SIGKILL:
            remedy += "; if the machine was short of memory, with a smaller data.workers"
        return self._failure(worker, _end(exit_code), remedy)

    def _failure(self, worker: int, what: str, remedy: str) -> RunError:
        pid, unit = self.processes[worker].pid, self._asked.read(worker)
        message = f"data worker {worker} (pid {pid}) {what}; its last unit: {unit}"
        return RunError(message, RESTARTABLE, remedy)


class _Fate:
    """State that the watching thread and the main thread share.

    dead: the first worker that ended by itself, and its exit code as `multiprocessing` has it
    """

    def __init__(self) -> None:
        self.closing = False
        self.silent = False
        self.dead: tuple[int, int | None] | None = None


def _watch(processes: list[BaseProcess], writer: Any, fate: _Fate) -> None:
    """Wait for the first worker that ends; then end the others, and wake the reader of their pipe.

    The pipe ends once nobody can write to it: neither the workers nor this process.
    """
    ended = connection.wait([process.sentinel for process in processes])
    if fate.closing:
        return
    first = next(i for i, process in enumerate(processes) if process.sentinel in ended)
    processes[first].join()
    fate.dead = (first, processes[first].exitcode)
    _kill(processes)
    writer.close()


def _has_ended(processes: list[BaseProcess]) -> bool:
    return bool(connection.wait([process.sentinel for process in processes], timeout=0))


def _end(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"ended by itself (exit code {exit_code})"
    known = {int(number): number.name for number in signal.Signals}
    name = known.get(-exit_code, str(-exit_code))
    reason = ", as by the kernel when memory runs out" if exit_code == -signal.SIGKILL else ""
    return f"was killed by signal {name}{reason}"


def _end_gently(items: Any, stop: Any, processes: list[BaseProcess]) -> None:
    stop.set()
    late = threading.Timer(CLOSE_SECONDS, _kill, [processes])
    late.start()
    try:
        items._shutdown_workers()
    finally:
        late.cancel()


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
