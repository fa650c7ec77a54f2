"""Ranks as threads, and checkpoints small enough for a unit test."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from helpers.runs import start_line, status, write_run
from hypothesis import strategies as st

from llmtrain.agreement import Alone, failure
from llmtrain.checkpoint import format as form, write
from llmtrain.types import Piece, Ranks, Spec, TensorSpec, Vote

T = TypeVar("T")

RUN = "0123456789abcdef"
SPEC: Spec = {
    "model.safetensors": {
        "a.weight": TensorSpec("F32", (5, 3)),
        "a.bias": TensorSpec("F32", (3,)),
        "scale": TensorSpec("BF16", ()),
        "mask": TensorSpec("BOOL", (7,)),
    },
    "optimizer-00001-of-00001.safetensors": {"a.weight.exp_avg": TensorSpec("F32", (5, 3))},
}
TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}
TORCH |= {"I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}


class Threads:
    """`Ranks` of one thread among several that share `bodies`."""

    def __init__(self, rank: int, barrier: threading.Barrier, bodies: list[Any]) -> None:
        self.rank, self.world_size = rank, barrier.parties
        self._barrier, self._bodies = barrier, bodies

    def _exchange(self, body: Any) -> list[Any]:
        self._bodies[self.rank] = body
        self._barrier.wait(timeout=30)
        found = list(self._bodies)
        self._barrier.wait(timeout=30)
        return found

    def gather(self, body: bytes) -> list[bytes]:
        found = self._exchange(body)
        return found if self.rank == 0 else []

    def broadcast(self, body: bytes) -> bytes:
        return self._exchange(body)[0]

    def vote(self, error: BaseException | None, body: bytes = b"") -> Vote:
        found = self._exchange((None if error is None else failure(self.rank, error), body))
        failures = tuple(failed for failed, _ in found if failed)
        return Vote(failures, tuple(body for _, body in found) if self.rank == 0 else ())

    def highest(self, value: int) -> int:
        return max(self._exchange(value))


def on_ranks(world_size: int, work: Callable[[Ranks], T]) -> list[T]:
    """What `work` returns on each of so many ranks; raises what the first of them raised."""
    barrier, bodies = threading.Barrier(world_size), [None] * world_size
    with ThreadPoolExecutor(world_size) as pool:
        jobs = [pool.submit(work, Threads(r, barrier, bodies)) for r in range(world_size)]
        return [job.result() for job in jobs]


def tensors(spec: Spec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random bits for every tensor of a spec (zeros and ones for a mask)."""
    generator = np.random.default_rng(seed)
    found = {}
    for name, tensor in (item for part in spec.values() for item in part.items()):
        value = torch.empty(tensor.shape, dtype=TORCH[tensor.dtype])
        bits = generator.integers(0, 2, form.tensor_bytes(tensor), dtype=np.uint8)
        if tensor.dtype != "BOOL":
            bits *= generator.integers(1, 60, bits.size, dtype=np.uint8)  # no NaN
        value.view(-1).view(torch.uint8).numpy()[:] = bits
        found[name] = value
    return found


def whole(spec: Spec, values: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
    """Every tensor as one piece, in the order of the spec."""
    return (Piece(name, 0, values[name].view(-1)) for part in spec.values() for name in part)


@st.composite
def divided(draw: st.DrawFn) -> tuple[Spec, dict[str, torch.Tensor], list[list[Piece]]]:
    """A spec, and for each of up to four ranks the ranges of its tensors that it writes."""
    dtypes = draw(st.lists(st.sampled_from(list(TORCH)), min_size=1, max_size=5))
    dtypes.sort(key=lambda dtype: -form.DTYPES[dtype][0])
    shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    part = {f"t{i}": TensorSpec(dtype, draw(shapes)) for i, dtype in enumerate(dtypes)}
    spec = {"a.safetensors": part, "b.safetensors": {"u": TensorSpec("F32", draw(shapes))}}
    values = tensors(spec, draw(st.integers(0, 9)))
    ranks: list[list[Piece]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for name, value in values.items():
        count = value.numel()
        cuts = sorted(draw(st.sets(st.integers(0, count), max_size=3)) | {0, count})
        for start, end in zip(cuts, [*cuts[1:], count], strict=True):
            piece = Piece(name, start, value.view(-1)[start:end])
            draw(st.sampled_from(ranks)).append(piece)
    return spec, values, ranks


def save(
    root: Path,
    step: int,
    spec: Spec = SPEC,
    pieces: Iterable[Piece] | None = None,
    *,
    small: Mapping[str, bytes] | None = None,
    loss: float | None = None,
    run_id: str = RUN,
    ranks: Ranks | None = None,
    collected: bool = False,
) -> write.SavedCheckpoint | write.FailedSave:
    """begin, pieces, commit: `pieces` defaults to random tensors drawn from `step`.

    collected: rank 0 writes what all hold.
    """
    ranks = ranks or Alone()
    evaluation = None if loss is None else {"loss": loss}
    state = {"format": 1, "run_id": run_id, "step": step, "evaluation": evaluation}
    files = {"config.json": b"{}", form.STATE: form.canonical(state), **(small or {})}
    begun = write.begin(root, step, spec, files, ranks, run_id)
    if isinstance(begun, write.FailedSave):
        return begun
    extents, error = {}, None
    try:
        if pieces is None:
            pieces = whole(spec, tensors(spec, step)) if ranks.rank == 0 else ()
        put = (
            (lambda *given: write.collect_pieces(*given, ranks))
            if collected
            else write.write_pieces
        )
        extents = put(begun, pieces)
    except Exception as caught:
        error = caught
    return write.commit(begun, extents, error, ranks)


CONFIG = """\
model: {config: {model_type: llama}, tokenizer: sample}
data: {sources: [{path: sample}]}
training: {steps: 100}
checkpoint: {every_steps: 4, keep_last: 2, keep_every: 8, keep_best: 1}
"""


def saved_run(folder: Path) -> Path:
    """A run directory with checkpoints 4 … 24, resumed from 20; 12 is the best of them."""
    lines = [start_line(0), start_line(20, "step-00000020")]
    run_dir = write_run(folder / "run", lines, status(run_id=RUN), CONFIG)
    for step, loss in {4: 4.0, 8: 3.5, 12: 2.5, 16: 3.25, 20: 3.0, 24: None}.items():
        save(run_dir / "checkpoints", step, loss=loss)
    return run_dir


def flip(path: Path, offset: int = -1) -> None:
    """Change one bit of a file."""
    body = bytearray(path.read_bytes())
    body[offset] ^= 1
    path.write_bytes(body)


class Killed(BaseException):
    """Ends a save at once, as a kill does: nothing catches it, nothing cleans up after it."""


@contextmanager
def broken_disk(nth: int, error: BaseException) -> Iterator[list[str]]:
    """The nth call (from 0) that touches the disk raises; yields the calls made so far."""
    calls: list[str] = []

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == nth + 1:
                raise error
            return call(*args, **kwargs)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "close", "pwrite", "fsync", "posix_fallocate", "mkdir", "rename"):
            patch.setattr(os, name, counted(name, getattr(os, name)))
        yield calls
