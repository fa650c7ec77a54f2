"""Makes batches, one per step, from the blocks of one rank, which workers read ahead.

A worker is a virtual rank: worker j of K on rank r acts as rank r + W·j of W·K. A block is taken
from each in turn, which gives this rank's blocks in order (W = 2, K = 2, rank 0):

    worker 0 (virtual rank 0 of 4)   0       4       8
    worker 1 (virtual rank 2 of 4)       2       6       10
    rank 0                           0   2   4   6   8   10 …

Several blocks are sent between processes at once, since a transfer costs more than its bytes. The
trap: nothing here imports torch, which would triple the memory of a worker.
"""

import logging
import multiprocessing
import threading
import time
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import count
from math import ceil, gcd
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from llmtrain import faults, system
from llmtrain.batch_size import BatchSize
from llmtrain.data.batches import batch_of
from llmtrain.data.documents.lines import refetch_warning
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.lanes import Block, Lanes
from llmtrain.data.manifest import DataManifest
from llmtrain.data.sources.fetch import Stopping
from llmtrain.data.survey import differing_tokenizer
from llmtrain.data.tokens.encode import DocumentEncoder, open_encoder
from llmtrain.data.workers import Asked, Failed, Workers
from llmtrain.errors import raise_any
from llmtrain.types import Batch

_log = logging.getLogger(__name__)

PREFETCH_BYTES = 64 << 20
MIN_PREFETCH = 8
ITEM_BLOCKS = 32
ITEM_BYTES = 1 << 18
TIMEOUT_SHARE = 0.8  # of the peers' timeout; the network's retries give up before, at 0.75


@dataclass(eq=False)
class Blocks:
    """The endless blocks of one virtual rank: g ≡ first (mod step), in order.

    Each lane with one of these blocks is opened, and its blocks for other ranks are discarded.

    encoder: that of the manifest, checked; None = it is opened and checked, as in every worker
    """

    manifest: DataManifest
    tokenizer_dir: Path
    _: KW_ONLY
    next_block: int
    rank: int
    world_size: int
    cursors: np.ndarray
    reading: Reading
    stop: Stopping | None = None
    asked: Asked = field(default_factory=partial(Asked, 1))
    encoder: DocumentEncoder | None = None

    def virtual(self, worker: int, workers: int) -> Iterator[Block]:
        """Yield the blocks of worker number `worker` of `workers`. Errors name the last unit."""
        rank, step = self.rank + self.world_size * worker, self.world_size * workers
        try:
            encoder = self.encoder
            if encoder is None:
                encoder = open_encoder(self.tokenizer_dir, self.manifest)
                raise_any(differing_tokenizer(self.manifest, encoder))
            reader = Reader(self.reading, self.stop, partial(self.asked.write, worker))
            lanes = Lanes(self.manifest, encoder, reader, self.cursors, self.next_block)
            for g in count(self.next_block + rank, step):
                yield lanes.take(g)
        except Exception as error:
            error.add_note(f"the last unit that was asked for: {self.asked.read(worker)}")
            raise


class Stream(Iterator[Batch]):
    """This rank's batches, one per step, without an end. Close it, since workers are processes.

    It starts where it was opened, and no other state can be loaded later. Once every lane of this
    rank has returned padding, its batches have `ended` set. If ranks share lanes (W does not divide
    L), this may be some steps later than for a single rank.
    """

    def __init__(
        self, blocks: Blocks, batch: BatchSize, workers: int, stop: Event | threading.Event
    ) -> None:
        self._manifest = blocks.manifest
        self._next_block = blocks.next_block
        self._world_size = blocks.world_size
        self._step = round(batch.steps(blocks.next_block))  # the last one before
        self._sizes, self._size = dict(batch.sizes), batch.of(self._step)
        self._stop = stop
        self._g = blocks.next_block + blocks.rank
        # The lanes that blocks g, g + W, g + 2W … are in.
        step = gcd(blocks.world_size, blocks.manifest.lanes)
        self._running = set(range(self._g % step, blocks.manifest.lanes, step))
        self._items: Iterator[Block | Failed] | None = blocks.virtual(0, 1)
        if workers:
            share = batch.of(self._step + 1) // blocks.world_size
            size = item_blocks(blocks.manifest, share, workers)
            makes = [partial(blocks.virtual, worker, workers) for worker in range(workers)]
            ahead = prefetch_factor(blocks.manifest, share, workers, size)
            timeout = TIMEOUT_SHARE * blocks.reading.timeout_seconds
            self._items = Workers(makes, blocks.asked, size, ahead, timeout)

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises UserError for bad data, RunError if it cannot be read or a worker died.
        """
        began = time.perf_counter()
        system.beat("waiting for data")
        faults.hit("data.next")
        first = self._next_block
        self._step += 1
        self._size = self._sizes.get(self._step, self._size)
        self._next_block += self._size
        numbered: list[tuple[int, Block]] = []
        while self._g < self._next_block:
            assert self._items is not None, "the stream is closed"
            block = next(self._items)
            if isinstance(block, Exception):
                raise block
            if block.source < 0:
                self._running.discard(self._g % self._manifest.lanes)
            numbered.append((self._g, block))
            self._g += self._world_size
        system.beat("a step, its data is there")
        wait, ended = time.perf_counter() - began, not self._running
        return batch_of(numbered, self._manifest, first_block=first, wait_seconds=wait, ended=ended)

    def interrupt(self) -> None:
        """Stop waiting for the network, from any thread. The wait fails with 75 at once."""
        self._stop.set()

    def close(self) -> None:
        """End the workers, even those that hang. Call it in a `finally`; it may be called twice."""
        items, self._items = self._items, None
        if isinstance(items, Workers):
            items.close()
        else:
            self._stop.set()


def open_stream(
    manifest: DataManifest,
    tokenizer_dir: Path,
    *,
    batch: BatchSize,
    rank: int,
    world_size: int,
    workers: int,
    next_block: int = 0,
    cursors: np.ndarray | None = None,
    reading: Reading,
    encoder: DocumentEncoder | None = None,
) -> Stream:
    """Open the stream of this rank's blocks. Workers begin to read at once.

    batch: how many blocks a step has, over all ranks
    workers: number of processes; 0 = this process reads
    next_block: first block of the next step
    cursors (L, sources, 4): those of the state; None = the beginning
    reading: how units are read
    encoder: that of the manifest, if this process has opened and checked it; workers open their own
    """
    shape = (manifest.lanes, len(manifest.sources), 4)
    # A copy: lanes are opened later, and the caller may have changed the array by then.
    cursors = np.zeros(shape, np.int64) if cursors is None else cursors.copy()
    assert cursors.shape == shape
    for source in manifest.sources:
        if rank == 0 and (costly := refetch_warning(source, reading.cache_bytes)):
            _log.warning(costly)
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
        asked=Asked(workers),
        encoder=None if workers else encoder,
    )
    return Stream(blocks, batch, workers, stop)


def discard_factor(world_size: int, workers: int, lanes: int) -> int:
    """Return how many blocks are made for each one used: 1 if ranks × workers divides the lanes."""
    processes = world_size * max(1, workers)
    return processes // gcd(processes, lanes)


def item_blocks(manifest: DataManifest, blocks_per_step: int, workers: int) -> int:
    """Return how many blocks a worker sends at once: its share of a step, up to 32 and 256 KiB.

    blocks_per_step: of this rank
    """
    wanted = min(ITEM_BLOCKS, blocks_per_step // max(1, workers))
    return max(1, min(wanted, ITEM_BYTES // _bytes_of_a_block(manifest)))


def prefetch_factor(
    manifest: DataManifest, blocks_per_step: int, workers: int, item_blocks: int
) -> int:
    """Return how many items a worker reads ahead.

    They have the blocks of two steps, at least 8, but no more than 64 MiB for all workers together.
    There are always at least 2 items.

    blocks_per_step: of this rank
    """
    blocks = max(MIN_PREFETCH, 2 * blocks_per_step // workers)
    most = PREFETCH_BYTES // (_bytes_of_a_block(manifest) * item_blocks * workers)
    return max(2, min(ceil(blocks / item_blocks), most))


def _bytes_of_a_block(manifest: DataManifest) -> int:
    """Return an upper bound of a block's bytes: ids have 4 each, borders and masks less."""
    return 8 * (manifest.seq_len + 1) + 200 * len(manifest.sources)
