"""The blocks of a manifest, computed slowly and plainly: what the stream is compared with."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import xxhash

from llmtrain.data.manifest import Manifest
from llmtrain.hashing import mix, permutation


def unit_rows(source, unit) -> list[tuple[str, str]]:
    """(id, text) of a unit of a small local parquet file or plain JSON lines."""
    path = Path(source.root) / source.files[unit.file].name
    if unit.group >= 0:
        table = pq.ParquetFile(path).read_row_group(unit.group).slice(unit.start)
        rows = table.to_pylist()[: unit.stop - unit.start]
    else:
        data, position, rows = path.read_bytes(), 0, []
        for line in data.splitlines(keepends=True):
            if unit.start <= position < unit.stop:
                rows.append(json.loads(line))
            position += len(line)
    return [(row.get(source.id_column) or row["text"], row["text"]) for row in rows]


def is_heldout(source, u: int, name: str, seed: int) -> bool:
    below = xxhash.xxh3_64_intdigest(name.encode(), seed=seed) < source.threshold
    return u in source.heldout_units and below


def lane_documents(manifest: Manifest, k: int, lane: int, epoch: int):
    """(id, text) of the training documents that a lane walks in one epoch, in order."""
    source, seed = manifest.sources[k], manifest.seed
    order = permutation(len(source.units), mix(seed, 1, k, epoch)).tolist()
    first = (lane + mix(seed, 6, k, epoch)) % manifest.lanes
    for u in order[first :: manifest.lanes]:
        rows = unit_rows(source, source.units[u])
        for row in permutation(len(rows), mix(seed, 2, k, epoch, u)).tolist():
            name, text = rows[row]
            if text and text.strip() and not is_heldout(source, u, name, seed):
                yield name, text


def source_number(manifest: Manifest, g: int) -> int:
    shares = [round(2**32 * w / sum(manifest.weights)) for w in manifest.weights]
    point = (g * 0x9E3779B97F4A7C15 % 2**64) * sum(shares) // 2**64
    return next(k for k in range(len(shares)) if point < sum(shares[: k + 1]))


def blocks(manifest: Manifest, encode, eos: int, count: int) -> list[list[int]]:
    """The ids of blocks 0 … count − 1."""
    streams: dict[tuple[int, int], tuple[list[int], int]] = {}  # (lane, k) → tokens, next epoch
    taken: dict[tuple[int, int], int] = {}
    found = []
    for g in range(count):
        key = (g % manifest.lanes, source_number(manifest, g))
        tokens, epoch = streams.get(key, ([], 0))
        start = taken.get(key, 0) * manifest.seq_len
        while len(tokens) < start + manifest.seq_len + 1:
            for _, text in lane_documents(manifest, key[1], key[0], epoch):
                tokens += [*encode(text), eos]
            epoch += 1
        streams[key], taken[key] = (tokens, epoch), taken.get(key, 0) + 1
        found.append(tokens[start : start + manifest.seq_len + 1])
    return found
