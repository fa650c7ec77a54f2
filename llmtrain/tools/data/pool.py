"""One function over many tasks, in spawned processes that end with the command whatever ends it."""

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
Progress = Callable[[int, int, int], None]  # tasks done, of how many, amount so far
_AHEAD = 2  # tasks a process that are handed out


def each_left(
    function: Callable[[T], R],
    tasks: Sequence[T],
    known: Sequence[R | None],
    jobs: int,
    amount: Callable[[R], int],
    progress: Progress,
) -> int:
    """`each` of the tasks of which nothing is known yet; the amount of all of them, known or not.

    known: the result of each task that an earlier command has done
    progress: called before the first task and after each
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
    """The results as they come, in any order; with one job they are made in this process.

    jobs: processes. Raises what the function raises, after which no further task is begun, and
    RunError if a process died. An interrupt of this process ends the others at once.
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
            process.terminate()  # a task may take minutes, and what it writes is not there yet
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes that are started here never see an interrupt; this one sees it afterwards.

    Until `_start` runs, one would end them with a traceback. They inherit the mask; the trap: an
    ignored signal would be inherited too, but one that comes meanwhile would be lost for us. And
    the mask is this thread's: another thread may receive the signal, and Python then
    interrupts this one while it starts a process. So the handlers wait as well.
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
    """In a new process: an interrupt is the command's business; die with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.signal_on_death_of_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
