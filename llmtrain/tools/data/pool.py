"""Run a function over many tasks in spawned processes, which never outlive the command."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from llmtrain import processes
from llmtrain.errors import RESTARTABLE, RunError

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[int, int, int], None]  # tasks done, number of tasks, amount so far
_AHEAD = 2  # tasks that are submitted for each process


def each_left(
    function: Callable[[T], R],
    tasks: Sequence[T],
    known: Sequence[R | None],
    jobs: int,
    amount: Callable[[R], int],
    progress: Progress,
) -> int:
    """Run `each` over the tasks without a known result; return the amount of all results.

    known: for each task its result from an earlier command, or None
    jobs: processes
    amount: the number that a result adds to the amount
    progress: called before the first task and after each one
    """
    missing = [task for task, result in zip(tasks, known, strict=True) if result is None]
    done = len(tasks) - len(missing)
    total = sum(amount(result) for result in known if result is not None)
    progress(done, len(tasks), total)
    for result in each(function, missing, jobs):
        done, total = done + 1, total + amount(result)
        progress(done, len(tasks), total)
    return total


def each(function: Callable[[T], R], tasks: Sequence[T], jobs: int) -> Iterator[R]:
    """Yield the results as they are finished, in any order.

    jobs: processes; with 1 the tasks run in this process

    Raises what the function raises, and RunError if a process died; no further task is started
    then. An interrupt of this process ends the others at once.
    """
    if jobs == 1 or len(tasks) < 2:
        yield from map(function, tasks)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(jobs, len(tasks)), multiprocessing.get_context("spawn"), _start, (os.getpid(),)
    )
    try:
        left = iter(tasks)
        running: set[Future[R]] = set()
        while True:
            with _interrupts_held():  # the first task starts the processes
                for task in left:
                    running.add(pool.submit(function, task))
                    if len(running) >= _AHEAD * jobs:
                        break
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    except BrokenProcessPool as error:
        message = "a process of this command died (out of memory?)"
        remedy = "give the same command again, perhaps with fewer --jobs: it continues"
        raise RunError(message, RESTARTABLE, remedy) from error
    except KeyboardInterrupt:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()  # a task may take minutes, and its output is not in place yet
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hide interrupts from processes that are started inside; this process gets them afterwards.

    Before `_start` has run, an interrupt would end a new process with a traceback. New processes
    inherit the blocked signal. The trap: ignoring the signal would be inherited too, but an
    interrupt would then be lost for this process. The mask also holds for this thread only: if
    another thread receives the signal, Python runs the handler in the main thread, which may be
    starting a process. So the handlers only record the signal, and it is raised again at the end.
    """
    heard: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    handlers = {
        number: signal.signal(number, lambda number, _: heard.append(number))
        for number in (numbers if main else ())
        if callable(signal.getsignal(number))
    }
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for one in heard:
            signal.raise_signal(one)


def _start(parent: int) -> None:
    """Prepare a new process: ignore interrupts, which the command handles, and die with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.signal_on_death_of_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
