"""Starts and ends data workers: processes that read ahead, each with a pipe of its own.

    rank     asks for an item, as often as it takes one; for some items ahead at first
    worker   makes an item for each message  ─►  a thread that sends  ─►  its pipe
    rank     receives from the pipe of the worker whose turn it is

Each kind of failure becomes one error, when its turn comes:

    raises        its last item has the error, with the traceback and the unit
    dies          its pipe ends behind what it had sent, even within a message
    is silent     the rank gives up after 0.8 of the peers' timeout

Only the worker itself can write to its pipe: so the end of the pipe is the end of the worker, and
no handler of signals and no thread has to watch it. Workers are always killed: nothing that they
write to disk needs more than a rename.
"""

import atexit
import ctypes
import fcntl
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from queue import SimpleQueue
from typing import Final, TypeAlias

from llmtrain import faults, system
from llmtrain.data.lanes import Block
from llmtrain.errors import RESTARTABLE, RunError, UserError

# A launcher passes SIGHUP on as well, to its rank and all processes that the rank has started.
IGNORED_SIGNALS: Final = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
PIPE_BYTES: Final = 1 << 18
CONTINUES: Final = "the same command continues from the newest checkpoint"
_NAME_BYTES: Final = 256
Failed: TypeAlias = UserError | RunError  # the last entry of a worker's last item
Make: TypeAlias = Callable[[], Iterator[Block]]


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
    """Block signals while processes are started, which inherit this until `start_worker`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker() -> None:
    """Set up a new worker: ignore signals, which the rank handles, and die with the rank."""
    faults.install(os.environ)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    system.signal_on_death_of_parent(signal.SIGKILL)
    rank = parent_process()
    if rank is not None and not rank.is_alive():  # it died before the line above
        os._exit(1)


def work(make: Make, worker: int, size: int, asks: Connection, pipe: Connection) -> None:
    """Send an item of `size` blocks for each message of `asks`. Returns if the rank has ended."""
    start_worker()
    items: SimpleQueue[list[Block | Failed]] = SimpleQueue()
    threading.Thread(target=_send, args=(items, pipe), daemon=True).start()
    made = carry(make(), worker, size)
    with suppress(EOFError):
        while True:
            asks.recv_bytes()
            if item := next(made, None):  # else the last one had an error: the rank ends the worker
                items.put(item)


def _send(items: SimpleQueue[list[Block | Failed]], pipe: Connection) -> None:
    try:
        while True:
            pipe.send(items.get())
    except OSError:
        return  # the rank has ended
    except Exception:  # it cannot be sent, and the rank must not wait for it
        traceback.print_exc()
        os._exit(1)


def carry(blocks: Iterator[Block], worker: int, size: int) -> Iterator[list[Block | Failed]]:
    """Yield items of `size` blocks, without `spans`, which the trainer does not need.

    An error is the last entry of the last item.
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
        # With their values as strings: one that is not pickled would lose the error.
        shown = ((one, None if one.value is None else str(one.value)) for one in error.problems)
        item.append(UserError(*(replace(one, value=value) for one, value in shown)))
    except RunError as error:
        item.append(error)
    except Exception:  # any other failure is sent to the rank, too
        message = f"data worker {worker} failed: {traceback.format_exc()}"
        item.append(RunError(message, 1, "this is a defect: the traceback shows where"))
    yield item


class Workers(Iterator[Block | Failed]):
    """The blocks of worker processes, one of each in turn. Errors say how a worker ended.

    Blocks of an item that are not due yet are kept here.
    """

    def __init__(
        self, makes: Sequence[Make], asked: Asked, size: int, ahead: int, timeout_seconds: float
    ) -> None:
        """Start a worker for each of `makes`, which are sent there.

        size: blocks of an item
        ahead: items that a worker makes before the rank takes one
        """
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        self.timeout_seconds = timeout_seconds
        self._asked = asked
        self._asks: list[Connection] = []
        self._turn = 0
        self._held: list[deque[Block | Failed]] = [deque() for _ in makes]
        context = multiprocessing.get_context("spawn")
        # Workers ignore SIGTERM, so `multiprocessing` would wait without end at the exit.
        atexit.register(self.close)
        with hold_signals():
            for worker, make in enumerate(makes):
                (pipe, theirs), (requests, asks) = (context.Pipe(duplex=False) for _ in "12")
                with theirs, requests:
                    if sys.platform == "linux":
                        # Room for a whole item, so that neither reader nor writer has to wait.
                        with suppress(OSError):  # over this user's limit: it is only slower
                            fcntl.fcntl(theirs.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
                    arguments = (make, worker, size, requests, theirs)
                    process = context.Process(target=work, args=arguments, daemon=True)
                    process.start()
                self.processes.append(process)
                self.pipes.append(pipe)
                self._asks.append(asks)
                for _ in range(ahead):
                    self._ask(worker)

    def __next__(self) -> Block | Failed:
        """Return the next block. Raises RunError (75) if a worker died or sent nothing in time."""
        held = self._held[self._turn]
        if not held:
            pipe = self.pipes[self._turn]
            if not pipe.poll(self.timeout_seconds):
                raise self._failure(f"sent nothing for {self.timeout_seconds:.0f} s", CONTINUES)
            try:
                held.extend(pipe.recv())
            except (EOFError, OSError) as error:  # an OSError within a message
                process, remedy = self.processes[self._turn], CONTINUES
                process.join(self.timeout_seconds)  # its pipe has ended, so it has, or is about to
                if process.exitcode == -signal.SIGKILL:
                    remedy += "; if the machine was short of memory, with a smaller data.workers"
                raise self._failure(_end(process.exitcode), remedy) from error
            self._ask(self._turn)
        self._turn = (self._turn + 1) % len(self._held)
        return held.popleft()

    def close(self) -> None:
        """End the workers, even those that hang. It may be called twice."""
        atexit.unregister(self.close)
        for process in self.processes:
            process.kill()
        for process, *pipes in zip(self.processes, self.pipes, self._asks, strict=True):
            process.join()
            for pipe in pipes:
                pipe.close()

    def _ask(self, worker: int) -> None:
        with suppress(OSError):  # it died, which its own pipe will tell
            self._asks[worker].send_bytes(b"1")

    def _failure(self, what: str, remedy: str) -> RunError:
        worker = self._turn
        pid, unit = self.processes[worker].pid, self._asked.read(worker)
        message = f"data worker {worker} (pid {pid}) {what}; its last unit: {unit}"
        return RunError(message, RESTARTABLE, remedy)


def _end(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"ended by itself (exit code {exit_code})"
    known = {int(number): number.name for number in signal.Signals}
    name = known.get(-exit_code, str(-exit_code))
    reason = ", as by the kernel when memory runs out" if exit_code == -signal.SIGKILL else ""
    return f"was killed by signal {name}{reason}"
