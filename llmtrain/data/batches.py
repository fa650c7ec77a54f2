"""The batch of one step and rank: arrays of ids and labels, document borders, digest, counts.

Pairs of answers have keys of their content, by which the log-probabilities of a reference are found
again: equal ids and masks have equal keys, in any block, run or held-out set.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import xxhash

from llmtrain.data.lanes import Block
from llmtrain.data.manifest import DataManifest
from llmtrain.data.packing import PlacedPair
from llmtrain.pairs import Pairs
from llmtrain.types import NOT_TRAINED, Batch

UNTRAINED_BLOCKS = "untrained_blocks"  # in `Batch.counts`
_HASHED = np.dtype("<i4")
_LENGTH = np.dtype("<i8")


def batch_of(
    numbered: Sequence[tuple[int, Block]],
    manifest: DataManifest,
    *,
    first_block: int,
    wait_seconds: float,
    ended: bool,
) -> Batch:
    """Return the `Batch` of this rank's blocks, which are given as (g, block) in order of g.

    first_block: the first block of the step, over all ranks
    """
    blocks = [block for _, block in numbered]
    ids = np.empty((len(blocks), manifest.seq_len + 1), np.int32)
    for row, block in enumerate(blocks):
        ids[row] = block.ids
    labels = ids[:, 1:].astype(np.int64)
    names = manifest.labels
    whole = all(block.trained is None for block in blocks)  # without padding
    trained = _leave_out(labels, blocks, whole=whole, document_mask=manifest.document_mask)
    tokens, counts = _by_source(blocks, names, trained)
    # How many positions are not padding.
    lengths = (sum(span.stop - span.start for span in block.spans) for block in blocks)
    real = labels.size if whole else sum(min(manifest.seq_len, length) for length in lengths)
    starts = None
    if manifest.hides_documents:  # a block's last id is not part of its input
        starts = tuple(block.starts[block.starts < manifest.seq_len] for block in blocks)
    answers = manifest.answers if manifest.chat else None
    judged = [block.pairs for block in blocks] if answers == "feedback" else None
    pairs = None
    if answers:
        pairs = pairs_of(zip(ids, labels, (block.pairs for block in blocks), strict=True))
    return Batch(
        ids=ids,
        labels=labels,
        trained_tokens=sum(trained),
        starts=starts,
        cursors={g % manifest.lanes: block.cursors for g, block in numbered},
        digest=_digest([g for g, _ in numbered], ids, labels, trained, judged),
        first_block=first_block,
        sources=tokens,
        counts=counts,
        wait_seconds=wait_seconds,
        ended=ended,
        real_tokens=real,
        pairs=pairs,
    )


def pairs_of(rows: Iterable[tuple[np.ndarray, np.ndarray, Sequence[PlacedPair]]]) -> Pairs:
    """Return the pairs in some rows.

    rows: ids (S + 1,), labels (S,), and the pairs in them
    """
    every = [
        (number, pair, _key(ids, labels, pair))
        for number, (ids, labels, placed) in enumerate(rows)
        for pair in placed
    ]
    borders = [(pair.begin, pair.second, pair.stop) for _, pair, _ in every]
    return Pairs(
        np.array([number for number, _, _ in every], np.int64),
        np.array(borders, np.int64).reshape(-1, 3),
        np.array([key for _, _, key in every], np.uint64).reshape(-1, 2),
        np.array([pair.desirable for _, pair, _ in every], np.bool_),
    )


def _key(ids: np.ndarray, labels: np.ndarray, pair: PlacedPair) -> tuple[int, int]:
    """Return the digest of both halves of a pair: their lengths, ids, and what is trained."""
    digest = xxhash.xxh3_128()
    for first, stop in (pair[:2], pair[2:4]):
        digest.update(np.array(stop - first, _LENGTH).tobytes())
        digest.update(ids[first:stop].astype(_HASHED, copy=False).tobytes())
        digest.update((labels[first : stop - 1] != NOT_TRAINED).tobytes())
    return divmod(digest.intdigest(), 1 << 64)


def _leave_out(
    labels: np.ndarray, blocks: Sequence[Block], *, whole: bool, document_mask: bool
) -> list[int]:
    """Set a label to −100 where it belongs to the next document, or is not trained.

    whole: whether every token of the blocks is trained

    Return how many of each row are trained.
    """
    if not document_mask and whole:
        return [labels.shape[1]] * len(blocks)
    for row, block in enumerate(blocks):
        if document_mask:
            labels[row, block.starts[1:] - 1] = NOT_TRAINED
        if block.trained is not None:
            labels[row, ~block.trained] = NOT_TRAINED
    trained: list[int] = np.count_nonzero(labels != NOT_TRAINED, axis=1).tolist()
    return trained


def _digest(
    numbers: Sequence[int],
    ids: np.ndarray,
    labels: np.ndarray,
    trained: Sequence[int],
    judged: Sequence[Sequence[PlacedPair]] | None,
) -> int:
    """Return the sum of the blocks' hashes modulo 2^64.

    A hash covers the ids, and also the labels if one of them is −100.

    judged: the pairs of each block, if whether they are desirable is covered, too
    """
    total = 0
    for row, g in enumerate(numbers):
        covered = [ids[row].astype(_HASHED, copy=False)]
        if trained[row] < labels.shape[1]:
            covered.append(labels[row].astype(_HASHED))
        if judged is not None:
            covered.append(np.array([pair.desirable for pair in judged[row]], np.bool_))
        total += xxhash.xxh3_64_intdigest(b"".join(covered), seed=g % 2**64)
    return total % 2**64


def _by_source(
    blocks: Sequence[Block], labels: tuple[str, ...], trained: Sequence[int]
) -> tuple[dict[str, int], Mapping[str, Mapping[str, int]]]:
    """Return the trained tokens by source, and what was met there.

    Blocks that have nothing to train are counted, too.
    """
    tokens: defaultdict[str, int] = defaultdict(int)
    total: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for block, count in zip(blocks, trained, strict=True):
        for k, met in block.counts.items():
            total[labels[k]].update(met)
        if block.source >= 0:  # else it is padding behind the end of the data
            tokens[labels[block.source]] += count
            if not count:
                total[labels[block.source]][UNTRAINED_BLOCKS] += 1
    return dict(tokens), dict(total)


NO_PAIRS = pairs_of(())
