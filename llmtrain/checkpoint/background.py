"""Saves in the background of the training: a thread copies this rank's ranges and writes the copy.

    submit   between two steps: copies what the forward changes and starts a thread
    thread   snapshot into host buffers  →  event  →  `write_pieces` on the copy: no collective
    caller   forward, backward … wait_snapshot() before the update … finish() before the commit

Parameters and moments change only in the update, so until then the thread can copy them. The
buffers are kept from save to save. To pin them takes seconds for a large model, so on CUDA a thread
does it ahead of the first save (`reserve`).

The trap: an error in here is not raised. `finish` returns it, and it becomes this rank's failed
vote. A snapshot that failed counts as finished, or the training would wait for it permanently.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llmtrain import faults, system
from llmtrain.agreement import captured
from llmtrain.checkpoint import write
from llmtrain.checkpoint.format import Extents
from llmtrain.checkpoint.write import OpenSave
from llmtrain.types import Piece

CHUNK_BYTES = 64 << 20  # of one host buffer; torch rounds pinned memory up to powers of two
_ALIGNMENT = 8  # bytes of an element of the widest dtype

State = Literal["idle", "writing", "ready", "failed"]


class _Copy(NamedTuple):
    """One copy to make: a piece's memory, on any device, and a host buffer for its elements."""

    source: Tensor
    target: Piece


class Writer:
    """Writes one save at a time: idle → writing → ready or failed → (finish, release) → idle.

    Only the training's thread calls it.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._reserved: Future[None] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._work: Future[Extents] | None = None
        self._blocked = 0.0

    @property
    def state(self) -> State:
        """What the writer is doing. In `ready` and `failed` it has ended and can be released."""
        if self._work is None:
            return "idle"
        if not self._work.done():
            return "writing"
        return "failed" if self._work.exception() else "ready"

    def reserve(self, nbytes: int) -> None:
        """Pin the host memory of a save of `nbytes` in a thread, so that no save waits for it.

        Memory that is refused is asked for again by the save, whose vote then fails.
        """
        count = -(-nbytes // CHUNK_BYTES)
        self._reserved = system.begin_in_thread(partial(self._reserve, count), "pinned memory")

    def submit(self, begun: OpenSave, pieces: Iterable[Piece], at_once: frozenset[str]) -> None:
        """Copy and write this rank's ranges in a thread.

        The caller may continue, but may change the pieces only after `wait_snapshot`. A rank
        without pieces is ready at once. Never raises.

        pieces: views of the memory itself
        at_once: names of the pieces that the forward changes; they are copied before this returns
        """
        assert self.state == "idle", self.state
        self._blocked = 0.0
        self._copied.clear()
        with self._measure_wait():
            prepared = captured(lambda: self._prepare(pieces, at_once))
        if copies := next(iter(prepared.returned), None):
            run = partial(self._run, begun, copies, at_once)
            self._work = system.begin_in_thread(run, "checkpoint")
            return
        self._copied.set()
        self._work = Future()  # there is nothing to write, or an error
        if prepared.error:
            self._work.set_exception(prepared.error)
        else:
            self._work.set_result({})

    def wait_snapshot(self) -> None:
        """Wait until the pieces may change: they are copied, or the save failed. Never raises."""
        if not self._copied.is_set():
            with self._measure_wait():
                self._copied.wait()

    def finish(self) -> tuple[BaseException | None, Extents]:
        """Wait until this rank has written its part. Returns error and extents for the commit."""
        if self._work is None:
            return None, {}
        with self._measure_wait():
            error = self._work.exception()
        return error, {} if error else self._work.result()

    def release(self) -> float:
        """Return to idle after a save. Returns the seconds that the caller waited for this save."""
        self.finish()
        self._work = None
        return self._blocked

    def _prepare(self, pieces: Iterable[Piece], at_once: frozenset[str]) -> list[_Copy]:
        """Copy what the forward changes now. Returns the copies to make, of all pieces."""
        if self._reserved is not None:
            self._reserved.exception()  # waits; without its memory the layout allocates
            self._reserved = None
        copies = self._lay_out(pieces)
        device = next((one.source.device for one in copies if one.source.is_cuda), None)
        for copy in copies:
            if copy.target.name in at_once:
                _copy(copy)
        if device is not None:  # the thread's copies wait for these, and for the last update
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # no stub
            self._stream.wait_stream(torch.cuda.current_stream(device))
        return copies

    def _run(self, begun: OpenSave, copies: list[_Copy], at_once: frozenset[str]) -> Extents:
        """Copy the rest and write everything. Runs in the thread."""
        try:
            faults.hit("save.snapshot", step=begun.step)
            with torch.cuda.stream(self._stream) if self._stream else nullcontext():
                for copy in copies:
                    if copy.target.name not in at_once:
                        _copy(copy)
            if self._stream:
                self._stream.synchronize()
        finally:
            self._copied.set()
        return write.write_pieces(begun, [copy.target for copy in copies])

    def _lay_out(self, pieces: Iterable[Piece]) -> list[_Copy]:
        """Assign the pieces to the chunks, one after another; a piece is cut where one is full."""
        copies: list[_Copy] = []
        chunk = used = 0
        for name, start, data in pieces:
            flat, item = data.detach(), data.element_size()
            first = 0
            while first < flat.numel():
                count = min((CHUNK_BYTES - used) // item, flat.numel() - first)
                room = self._chunk(chunk, pinned=flat.is_cuda)[used : used + count * item]
                source = flat[first : first + count]
                copies.append(_Copy(source, Piece(name, start + first, room.view(flat.dtype))))
                first += count
                used += -(-count * item // _ALIGNMENT) * _ALIGNMENT
                if used >= CHUNK_BYTES:
                    chunk, used = chunk + 1, 0
        return copies

    def _chunk(self, index: int, *, pinned: bool) -> Tensor:
        """Return a buffer of host memory, the same one at every save."""
        if index == len(self._chunks):
            self._chunks.append(_host_memory(pinned=pinned))
        return self._chunks[index]

    def _reserve(self, count: int) -> None:
        for index in range(count):
            self._chunk(index, pinned=True)

    @contextmanager
    def _measure_wait(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._blocked += time.perf_counter() - began


def _host_memory(*, pinned: bool) -> Tensor:
    """Return the memory of one chunk."""
    return torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned)


def _copy(copy: _Copy) -> None:
    """Copy into the host buffer. A copy from a device is only queued; the caller waits for it."""
    if copy.source.is_cuda:
        copy.target.data.copy_(copy.source, non_blocking=True)
    else:  # NumPy copies in one thread, without the GIL; torch would take cores from the training
        source, target = copy.source.view(torch.uint8), copy.target.data.view(torch.uint8)
        target.numpy()[:] = source.numpy()
