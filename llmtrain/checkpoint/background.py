"""A save beside the training: copy this rank's ranges, then write the copy, all in one thread.

    submit   at the boundary: what the forward changes is copied, the rest is noted; a thread begins
    thread   snapshot into host buffers  →  event  →  `write.pieces` on the copy: no collective
    caller   forward, backward … wait_snapshot() before the update … finish() before the commit

Parameters and moments change only in the update, so until then the copy reads them where they are.
The buffers are kept from save to save. The trap: whatever fails in here is this rank's failed vote
and is told by `finish`; nothing is raised, and a snapshot that failed is over too, or the training
would wait for it for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llmtrain import faults, processes
from llmtrain.agreement import attempt
from llmtrain.checkpoint import write
from llmtrain.checkpoint.format import Extents
from llmtrain.checkpoint.write import Begun
from llmtrain.types import Piece

CHUNK_BYTES = 64 << 20  # of one host buffer; torch rounds pinned memory up to powers of two
_ALIGNMENT = 8  # bytes: of the widest dtype

State = Literal["idle", "writing", "ready", "failed"]


class _Copy(NamedTuple):
    """source: bytes of a piece, wherever they are · target: the same elements in a host buffer."""

    source: Tensor
    target: Piece


class Writer:
    """One save at a time: idle → writing → ready or failed → (finish, release) → idle.

    Called by one thread, the training's.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._work: Future[Extents] | None = None
        self._blocked = 0.0

    @property
    def state(self) -> State:
        """idle: nothing is in flight · ready, failed: through with it, waiting for `release`."""
        if self._work is None:
            return "idle"
        if not self._work.done():
            return "writing"
        return "failed" if self._work.exception() else "ready"

    def submit(self, begun: Begun, pieces: Iterable[Piece], at_once: frozenset[str]) -> None:
        """Copy and write this rank's ranges beside the caller, who may go on but not update them.

        pieces: views of the memory itself, read until `wait_snapshot` returns · at_once: names of
        those that the forward changes, copied before this returns. Never raises. A rank without
        pieces is ready at once.
        """
        assert self.state == "idle", self.state
        self._blocked = 0.0
        self._copied.clear()
        with self._blocking():
            prepared = attempt(lambda: self._prepare(pieces, at_once))
            if prepared.error is None and (copies := prepared.result()):
                run = partial(self._run, begun, copies, at_once)
                self._work = processes.begin(run, "checkpoint")
            else:
                self._copied.set()
                self._work = _done(prepared.error)

    def wait_snapshot(self) -> None:
        """Wait until the pieces may change: they were copied, or the save failed. Never raises."""
        if not self._copied.is_set():
            with self._blocking():
                self._copied.wait()

    def finish(self) -> tuple[BaseException | None, Extents]:
        """Wait until this rank is through. Returns what `write.commit` wants to know."""
        if self._work is None:
            return None, {}
        with self._blocking():
            error = self._work.exception()
        return error, {} if error else self._work.result()

    def release(self) -> float:
        """The save in flight is over: idle again. Returns the seconds that the caller waited."""
        self.finish()
        self._work = None
        return self._blocked

    def _prepare(self, pieces: Iterable[Piece], at_once: frozenset[str]) -> list[_Copy]:
        """Copy what the forward changes. Returns where all pieces go."""
        copies = self._laid_out(pieces)
        device = next((one.source.device for one in copies if one.source.is_cuda), None)
        for copy in copies:
            if copy.target.name in at_once:
                _copy(copy)
        if device is not None:  # behind those copies, and behind the update before
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # no stub
            self._stream.wait_stream(torch.cuda.current_stream(device))
        return copies

    def _run(self, begun: Begun, copies: list[_Copy], at_once: frozenset[str]) -> Extents:
        """What the thread does."""
        try:
            faults.hit("save.snapshot", step=begun.step)
            self._snapshot(copies, at_once)
        finally:
            self._copied.set()
        return write.pieces(begun, [copy.target for copy in copies])

    def _snapshot(self, copies: list[_Copy], at_once: frozenset[str]) -> None:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for copy in copies:
                if copy.target.name not in at_once:
                    _copy(copy)
        if self._stream:
            self._stream.synchronize()

    def _laid_out(self, pieces: Iterable[Piece]) -> list[_Copy]:
        """Where the pieces go: one behind the other into the chunks, cut where one is full."""
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
        """A buffer of host memory, the same one at every save."""
        if index == len(self._chunks):
            self._chunks.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned))
        return self._chunks[index]

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._blocked += time.perf_counter() - began


def _done(error: Exception | None) -> Future[Extents]:
    """A save that is over before a thread began."""
    future: Future[Extents] = Future()
    if error:
        future.set_exception(error)
    else:
        future.set_result({})
    return future


def _copy(copy: _Copy) -> None:
    """Into the host buffer; of a device only the order is given, the stream is waited for."""
    if copy.source.is_cuda:
        copy.target.data.copy_(copy.source, non_blocking=True)
    else:  # in one thread and without the interpreter's lock: torch would take cores from training
        source, target = copy.source.view(torch.uint8), copy.target.data.view(torch.uint8)
        target.numpy()[:] = source.numpy()
