"""Counts of a step that do not depend on the machine's load; `benchmarks/loop.py` records them."""

import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

FIRST, EACH = 70, 10  # steps: those before, and those of each of the two counts
STEPS = FIRST + 2 * EACH + 1
# torch's compiler wraps functions of its optimizers, or not, depending on what a process has done.
COMPILER = tuple(str(Path(torch.__file__).parent / name) for name in ("_dynamo", "compiler"))
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


class Operations(TorchDispatchMode):
    """Counts aten operations, those of the backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count one."""
        self.count += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def reads(found: list[str]) -> Iterator[None]:
    """Append to `found` each read of a tensor by the host: the file of the code that asks for it.

    Python methods that call each other count once.
    """
    kept = {name: getattr(torch.Tensor, name) for name in READS}
    inside = False

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(*given: Any, **more: Any) -> Any:
            nonlocal inside
            outermost, inside = not inside, True
            if outermost:
                found.append(sys._getframe(1).f_code.co_filename)
            try:
                return original(*given, **more)
            finally:
                inside = inside and not outermost

        return read

    for name, original in kept.items():
        setattr(torch.Tensor, name, watched(original))
    try:
        yield
    finally:
        for name, original in kept.items():
            setattr(torch.Tensor, name, original)


class Counter:
    """Counts in two windows of steps: operations and reads, then calls; `turn` begins a step."""

    def __init__(self) -> None:
        self._step, self._calls = -1, 0
        self._after: list[int] = []  # calls so far, at each turn of their window
        self._found: list[str] = []
        self._operations = Operations()
        self._reading = reads(self._found)

    def turn(self) -> None:
        """A step begins, or the last one is over."""
        self._step += 1
        if self._step == FIRST:
            self._operations.__enter__()
            self._reading.__enter__()
        if self._step == FIRST + EACH:
            self._reading.__exit__(None, None, None)
            self._operations.__exit__(None, None, None)
            gc.collect()
            gc.disable()  # a finalizer is a call
            sys.setprofile(self._called)
        if FIRST + EACH <= self._step <= FIRST + 2 * EACH:
            self._after.append(self._calls)
        if self._step == FIRST + 2 * EACH:
            sys.setprofile(None)
            gc.enable()

    def counts(self) -> dict[str, float]:
        """The numbers of one step. Of calls it is the median, as some come by the clock."""
        return {
            "aten_operations": self._operations.count / EACH,
            "host_reads": len(self._found) / EACH,
            "python_calls": statistics.median(b - a for a, b in pairwise(self._after)),
        }

    def _called(self, frame: Any, event: str, _argument: Any) -> None:
        self._calls += event == "call" and not frame.f_code.co_filename.startswith(COMPILER)
