"""The blocks of a manifest, computed slowly and plainly: what the stream is compared with."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import xxhash

from llmtrain.data.manifest import DataManifest
from llmtrain.hashing import mix, permutation


@dataclass(frozen=True)
class Expected:
    """Block g. borders: positions 1 … S at which another document (or padding) begins."""

    ids: list[int]
    borders: list[int]
    labels: list[int]
    source: int

    @property
    def starts(self) -> list[int]:
        return [0, *(border for border in self.borders if border < len(self.labels))]


class Placed(NamedTuple):
    """A training document and its place in a lane's order."""

    epoch: int
    position: int
    row: int
    name: str
    text: str


class Raw(NamedTuple):
    """A block of one lane and source."""

    ids: list[int]
    borders: list[int]
    padding: int  # its first position; S + 1 = none


@lru_cache(maxsize=256)
def _rows(path: Path, group: int, start: int, stop: int) -> list[dict]:
    if group >= 0:
        return pq.ParquetFile(path).read_row_group(group).slice(start, stop - start).to_pylist()
    data, position, rows = path.read_bytes(), 0, []
    for line in data.splitlines(keepends=True):
        if start <= position < stop:
            rows.append(json.loads(line))
        position += len(line)
    return rows


def unit_rows(source, unit) -> list[tuple[str, str]]:
    """(id, text) of a unit of a small local parquet file or plain JSON lines."""
    path = Path(source.root) / source.files[unit.file].name
    rows = _rows(path, unit.group, unit.start, unit.stop)
    return [(row.get(source.id_column) or row["text"], row["text"]) for row in rows]


def is_heldout(source, u: int, name: str, seed: int) -> bool:
    below = xxhash.xxh3_64_intdigest(name.encode(), seed=seed) < source.threshold
    return u in source.heldout_units and below


def training_documents(manifest: DataManifest, k: int) -> list[str]:
    """Names of all documents of a source that are trained on."""
    source = manifest.sources[k]
    return [
        name
        for u, unit in enumerate(source.units)
        for name, text in unit_rows(source, unit)
        if text and text.strip() and not is_heldout(source, u, name, manifest.seed)
    ]


def lane_documents(manifest: DataManifest, k: int, lane: int, epoch: int) -> Iterator[Placed]:
    """The training documents that a lane walks in one epoch, in order."""
    source, seed = manifest.sources[k], manifest.seed
    order = permutation(len(source.units), mix(seed, 1, k, epoch)).tolist()
    first = (lane + mix(seed, 6, k, epoch)) % manifest.lanes
    for position, u in enumerate(order[first :: manifest.lanes]):
        rows = unit_rows(source, source.units[u])
        for row, index in enumerate(permutation(len(rows), mix(seed, 2, k, epoch, u)).tolist()):
            name, text = rows[index]
            if text and text.strip() and not is_heldout(source, u, name, seed):
                yield Placed(epoch, position, row, name, text)


def all_documents(manifest: DataManifest, k: int, lane: int) -> Iterator[Placed]:
    """Epoch after epoch, as many as the source has."""
    epoch, limit = 0, manifest.sources[k].max_epochs
    while limit is None or epoch < limit:
        yield from lane_documents(manifest, k, lane, epoch)
        epoch += 1


def concatenated(manifest: DataManifest, tokens, k: int, lane: int) -> Iterator[Raw]:
    """Every token in a row, cut at multiples of S."""
    size = manifest.seq_len
    stream: list[int] = []
    begins: list[int] = []
    start = 0
    for document in all_documents(manifest, k, lane):
        begins.append(len(stream))
        stream += tokens(document.text)
        while len(stream) >= start + size + 1:
            borders = [begin - start for begin in begins if start < begin <= start + size]
            yield Raw(stream[start : start + size + 1], borders, size + 1)
            start += size


def windowed(manifest: DataManifest, tokens, pad: int, k: int, lane: int) -> Iterator[Raw]:
    """Windows of documents, each packed by trying every bin."""
    place, window, found = (0, 0, 0), [], 0
    for document in all_documents(manifest, k, lane):
        window.append(tokens(document.text))
        found += len(window[-1])
        if found >= max(min(32 * manifest.seq_len, 65536), 8 * manifest.seq_len):
            yield from _packed(manifest, window, pad, (k, lane, *place))
            place, window, found = (*document[:2], document.row + 1), [], 0
    if window:
        yield from _packed(manifest, window, pad, (k, lane, *place))


def _packed(manifest: DataManifest, window: list, pad: int, key: tuple) -> Iterator[Raw]:
    size = manifest.seq_len + 1
    blocks, pieces = [], []
    for ids in window:
        if len(ids) <= size:
            pieces.append(ids)
            continue
        while len(ids) >= size:
            blocks.append([ids[:size]])
            ids = ids[size - 1 :]
        if len(ids) > 1:
            pieces.append(ids)
    bins: list[list] = []
    for piece in sorted(pieces, key=len, reverse=True):
        room = [one for one in bins if sum(map(len, one)) + len(piece) <= size]
        if not room:
            bins.append([piece])
        else:
            max(room, key=lambda one: sum(map(len, one))).append(piece)
    blocks += bins
    for index in permutation(len(blocks), mix(manifest.seed, 4, *key)).tolist():
        ids, borders = [], []
        for piece in blocks[index]:
            borders.append(len(ids))
            ids += piece
        padding = len(ids)
        if padding < size:
            borders.append(padding)
        yield Raw(ids + [pad] * (size - padding), borders[1:], padding)


def draw(manifest: DataManifest, g: int, left: list[int]) -> int:
    """The source of block g, of those that are left."""
    shares = [round(2**32 * w / sum(manifest.weights)) for w in manifest.weights]
    point = (g * 0x9E3779B97F4A7C15 % 2**64) * sum(shares[k] for k in left) // 2**64
    for k in left:
        if point < shares[k]:
            return k
        point -= shares[k]
    raise AssertionError(g)


def blocks(manifest: DataManifest, tokenizer, count: int) -> list[Expected]:
    """Blocks 0 … count − 1."""

    @lru_cache(maxsize=4096)
    def tokens(text: str) -> list[int]:
        return [*tokenizer.encode(text).tolist(), tokenizer.eos]

    def opened(k: int, lane: int) -> Iterator[Raw]:
        if manifest.packing == "concat":
            return concatenated(manifest, tokens, k, lane)
        return windowed(manifest, tokens, tokenizer.pad, k, lane)

    sources = range(len(manifest.sources))
    lanes = [[opened(k, lane) for k in sources] for lane in range(manifest.lanes)]
    upcoming = [[next(packer, None) for packer in lane] for lane in lanes]
    found = []
    for g in range(count):
        lane = g % manifest.lanes
        left = [k for k in sources if upcoming[lane][k] is not None]
        if not left:
            size = manifest.seq_len
            found.append(Expected([tokenizer.pad] * (size + 1), [], [-100] * size, -1))
            continue
        k = draw(manifest, g, left)
        found.append(_labelled(manifest, upcoming[lane][k], k))
        upcoming[lane][k] = next(lanes[lane][k], None)
    return found


def _labelled(manifest: DataManifest, raw: Raw, k: int) -> Expected:
    labels = [
        -100
        if position >= raw.padding or (manifest.document_mask and position in raw.borders)
        else raw.ids[position]
        for position in range(1, len(raw.ids))
    ]
    return Expected(raw.ids, raw.borders, labels, k)


def digest(expected: list[Expected], first: int) -> int:
    """The batch digest of blocks first, first + 1, …"""
    total = 0
    for g, block in enumerate(expected, first):
        numbers = block.ids + (block.labels if -100 in block.labels else [])
        data = b"".join((n % 2**32).to_bytes(4, "little") for n in numbers)
        total += xxhash.xxh3_64_intdigest(data, seed=g)
    return total % 2**64
