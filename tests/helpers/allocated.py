"""How many bytes of tensors are made inside a block, those that are there at the same time."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):
    """peak: the most bytes of storages that operations inside of it made and that still existed.

    Views and what is changed in place make none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: set[int] = set()
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(one)._cdata for one in tree_leaves((args, kwargs)) if _held(one)}
        result = func(*args, **(kwargs or {}))
        self._made = [(made, size) for made, size in self._made if not made.expired()]
        there = given | {made.cdata for made, _ in self._made}
        for one in tree_leaves(result):
            if _held(one) and _storage(one)._cdata not in there:
                self._made.append((StorageWeakRef(_storage(one)), _storage(one).nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self._made))
        return result


class OnTheHost:
    """Ranks whose messages are not counted: their bytes are in host memory on any device."""

    def __init__(self, ranks: Any) -> None:
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ranks, name)
        return self._apart(found) if callable(found) else found

    def _apart(self, method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            with _disable_current_modes():
                return method(*arguments)

        return call


def _held(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta


def _storage(tensor: Tensor) -> Any:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()
