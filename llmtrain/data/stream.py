"""The blocks of one rank, read ahead by torch's DataLoader, dealt out as the batches of steps.

A worker is a virtual rank: worker j of K on rank r acts as rank r + W·j of W·K. The loader takes
from its workers in turn, which gives this rank's blocks in order (W = 2, K = 2, rank 0):

    worker 0 (virtual rank 0 of 4)   0       4       8
    worker 1 (virtual rank 2 of 4)       2       6       10
    rank 0                           0   2   4   6   8   10 …

The trap: what goes between processes is numpy; a tensor would cost a file descriptor each.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from llmtrain.data.lanes import Block, Lane
from llmtrain.data.manifest import Manifest
from llmtrain.data.readers import Reader, Reading
from llmtrain.data.request import Stopping
from llmtrain.data.tokenizer import open_tokenizer
from llmtrain.data.units import differing_tokenizer
from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError
from llmtrain.types import Batch, Cursor

PREFETCH_BYTES = 64 << 20
MIN_PREFETCH = 8
TIMEOUT_SHARE = 0.8  # of the peers' patience: retries of the network (0.75) report before
CLOSE_SECONDS = 2.0
PR_SET_PDEATHSIG = 1
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Failed:
    """The last item of a worker that could not go on: what it raised, without its class."""

    problems: tuple[Problem, ...]
    message: str
    exit_code: int
    remedy: str


class Blocks(IterableDataset[Block | Failed]):
    """The endless blocks of one virtual rank: g ≡ first (mod step), in order.

    Opens every lane that these blocks lie in, and discards its blocks that are not its own.
    """

    def __init__(
        self,
        manifest: Manifest,
        tokenizer_dir: Path,
        *,
        next_block: int,
        rank: int,
        world_size: int,
        cursors: np.ndarray,
        reading: Reading,
        stop: Stopping | None,
    ) -> None:
        self.manifest = manifest
        self.tokenizer_dir = tokenizer_dir
        self.next_block = next_block
        self.rank = rank
        self.world_size = world_size
        self.cursors = cursors
        self.reading = reading
        self.stop = stop

    def __iter__(self) -> Iterator[Block | Failed]:
        worker = get_worker_info()
        index, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        blocks = self._blocks(self.rank + self.world_size * index, self.world_size * workers)
        return blocks if worker is None else _carrying_failures(blocks)

    def _blocks(self, virtual_rank: int, virtual_ranks: int) -> Iterator[Block]:
        tokenizer = open_tokenizer(self.tokenizer_dir)
        problems = differing_tokenizer(self.manifest, tokenizer)
        if problems:
            raise UserError(*problems)
        reader = Reader(self.reading, self.stop)
        lanes: dict[int, Lane] = {}
        g = self.next_block + virtual_rank
        while True:
            index = g % self.manifest.lanes
            if index not in lanes:
                first = self._first_block(index)
                cursors = [Cursor(*map(int, cursor)) for cursor in self.cursors[index]]
                lanes[index] = Lane(self.manifest, tokenizer, reader, index, first, cursors)
            while lanes[index].next_block < g:
                lanes[index].take()  # another rank's block; W does not divide L
            yield lanes[index].take()
            g += virtual_ranks

    def _first_block(self, lane: int) -> int:
        """The lane's first block from `next_block` on."""
        return self.next_block + (lane - self.next_block) % self.manifest.lanes


class Stream(Iterator[Batch]):
    """This rank's batches, one a step, for ever. Close it: workers are processes."""

    def __init__(self, blocks: Blocks, blocks_per_step: int, workers: int, stop: Any) -> None:
        self._next_block = blocks.next_block
        self._rank = blocks.rank
        self._world_size = blocks.world_size
        self._labels = blocks.manifest.labels
        self._seq_len = blocks.manifest.seq_len
        self._blocks_per_step = blocks_per_step
        self._stop = stop
        self._g = blocks.next_block + blocks.rank
        # In this process the loader would only add its own 60 µs a block.
        source = _loader(blocks, blocks_per_step, workers) if workers else blocks
        self._items: Iterator[Block | Failed] | None = iter(source)
        self.lanes = blocks.manifest.lanes

    def __next__(self) -> Batch:
        """Raises UserError for bad data, RunError if it cannot be read or a worker died."""
        began = time.perf_counter()
        first = self._next_block
        self._next_block += self._blocks_per_step
        numbered: list[tuple[int, Block]] = []
        while self._g < self._next_block:
            numbered.append((self._g, self._take()))
            self._g += self._world_size
        waited = time.perf_counter() - began
        return _batch(numbered, first, self._labels, self.lanes, self._seq_len, waited)

    def close(self) -> None:
        """End the workers, those that hang too. Call it in a `finally`; twice does no harm."""
        items, self._items = self._items, None
        if items is None:
            return
        self._stop.set()
        processes = list(getattr(items, "_workers", ()))
        if not processes:
            return
        late = threading.Timer(CLOSE_SECONDS, _kill, [processes])
        late.start()
        try:
            with _child_signals_off():
                items._shutdown_workers()  # type: ignore[attr-defined]
        finally:
            late.cancel()

    def _take(self) -> Block:
        assert self._items is not None, "the stream is closed"
        try:
            item = next(self._items)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader"):
                raise
            raise RunError(str(error), RESTARTABLE, "the same command continues") from error
        if isinstance(item, Failed):
            raise _error(item)
        return item


def open_stream(
    manifest: Manifest,
    tokenizer_dir: Path,
    *,
    blocks_per_step: int,
    rank: int,
    world_size: int,
    workers: int,
    next_block: int = 0,
    cursors: np.ndarray | None = None,
    reading: Reading,
) -> Stream:
    """Begin to read this rank's blocks; with workers, they start at once.

    blocks_per_step: over all ranks · workers: processes, 0 = in this one · next_block: first block
    of the next step, a multiple of `blocks_per_step` · cursors (L, sources, 4): the state's; None =
    the beginning · reading: how units are read.
    """
    shape = (manifest.lanes, len(manifest.sources), 4)
    cursors = np.zeros(shape, np.int64) if cursors is None else cursors
    assert cursors.shape == shape
    stop = multiprocessing.get_context("spawn").Event() if workers else threading.Event()
    blocks = Blocks(
        manifest,
        tokenizer_dir,
        next_block=next_block,
        rank=rank,
        world_size=world_size,
        cursors=cursors,
        reading=reading,
        stop=stop,
    )
    return Stream(blocks, blocks_per_step, workers, stop)


def discard_factor(world_size: int, workers: int, lanes: int) -> int:
    """How many blocks are made for each one used: 1 where processes × workers divide the lanes."""
    processes = world_size * max(1, workers)
    return processes // gcd(processes, lanes)


def identity(item: Any) -> Any:
    """In place of torch's collate function, which would make tensors of the arrays."""
    return item


def start_worker(worker_id: int) -> None:
    """In a new worker: signals are the rank's business; die with it."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _loader(blocks: Blocks, blocks_per_step: int, workers: int) -> DataLoader[Block | Failed]:
    # A generator of its own: making an iterator draws a number from torch's global one otherwise.
    generator = torch.Generator()
    item_bytes = 4 * (blocks.manifest.seq_len + 1) + 100 * len(blocks.manifest.sources)
    wanted = max(MIN_PREFETCH, 2 * blocks_per_step // (blocks.world_size * workers))
    return DataLoader(
        blocks,
        batch_size=None,
        collate_fn=identity,
        generator=generator,
        num_workers=workers,
        multiprocessing_context="spawn",
        persistent_workers=True,
        prefetch_factor=max(2, min(wanted, PREFETCH_BYTES // (item_bytes * workers))),
        timeout=TIMEOUT_SHARE * blocks.reading.timeout_seconds,
        worker_init_fn=start_worker,
    )


def _batch(
    numbered: list[tuple[int, Block]],
    first: int,
    labels: tuple[str, ...],
    lanes: int,
    seq_len: int,
    wait: float,
) -> Batch:
    ids = np.empty((len(numbered), seq_len + 1), np.int32)
    digest = 0
    tokens: Counter[str] = Counter()
    counts: dict[str, Counter[str]] = {}
    cursors: dict[int, tuple[Cursor, ...]] = {}
    for row, (g, block) in enumerate(numbered):
        label = labels[block.source]
        ids[row] = block.ids
        digest += xxhash.xxh3_64_intdigest(block.ids.astype("<i4").tobytes(), seed=g % 2**64)
        tokens[label] += seq_len
        counts.setdefault(label, Counter()).update(block.counts)
        cursors[g % lanes] = block.cursors
    return Batch(
        ids=ids,
        labels=ids[:, 1:].astype(np.int64),
        trained_tokens=len(numbered) * seq_len,
        starts=None,
        cursors=cursors,
        digest=digest % 2**64,
        first_block=first,
        sources=dict(tokens),
        counts={label: dict(met) for label, met in counts.items()},
        wait_seconds=wait,
    )


def _carrying_failures(blocks: Iterator[Block]) -> Iterator[Block | Failed]:
    """Turn what a worker raises into its last item: torch would lose what the exception knows."""
    try:
        yield from blocks
    except UserError as error:
        problems = [Problem(p.key, str(p.value), p.expected, p.remedy) for p in error.problems]
        yield Failed(tuple(problems), "", error.exit_code, "")
    except RunError as error:
        yield Failed((), str(error.args[0]), error.exit_code, error.remedy)


def _error(item: Failed) -> UserError | RunError:
    if item.problems:
        return UserError(*item.problems)
    return RunError(item.message, item.exit_code, item.remedy)


def _kill(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()


@contextmanager
def _child_signals_off() -> Iterator[None]:
    """Torch's handler raises when a worker dies by a signal; at the end that is no news."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
