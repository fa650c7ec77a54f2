"""An oracle of memory: what a computation on fake tensors would hold at its peak.

Every tensor that an operation returns is looked at; its storage counts from then until Python
collects it. Nothing is computed and nothing is allocated, so models of any size fit.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveStorage(TorchDispatchMode):
    """live, peak: bytes of all storages that exist, and the most there have been."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            size = storage.nbytes()
            self._known.add(storage._cdata)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._drop, storage._cdata, size)

    def _drop(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.live -= size


@contextmanager
def live_storage() -> Iterator[LiveStorage]:
    """Count what is made inside, on fake tensors of the CPU."""
    with FakeTensorMode(), LiveStorage() as count:
        yield count
