"""Megatron's `.bin`/`.idx` as its description says, read and written without llmtrain's code."""

import struct
from itertools import pairwise
from pathlib import Path

CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}


def read(index: Path) -> tuple[int, list[list[int]]]:
    """The dtype code, and the tokens of every document, sequence by sequence."""
    data = index.read_bytes()
    assert data[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, borders = struct.unpack_from("<QBQQ", data, 9)
    assert version == 1
    lengths = struct.unpack_from(f"<{sequences}i", data, 34)
    offsets = struct.unpack_from(f"<{sequences}q", data, 34 + 4 * sequences)
    indices = struct.unpack_from(f"<{borders}q", data, 34 + 12 * sequences)
    assert len(data) == 34 + 12 * sequences + 8 * borders
    tokens = index.with_suffix(".bin").read_bytes()
    found = [
        list(struct.unpack_from(f"<{length}{CODES[code]}", tokens, offset))
        for length, offset in zip(lengths, offsets, strict=True)
    ]
    assert sum(lengths) * SIZES[code] == len(tokens)
    documents = []
    for first, behind in pairwise(indices):
        documents.append([token for sequence in found[first:behind] for token in sequence])
    return code, documents


def write(index: Path, documents: list[list[list[int]]], code: int = 8) -> Path:
    """Documents, each a list of sequences, as a pair of files."""
    index.parent.mkdir(parents=True, exist_ok=True)
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    offsets = [SIZES[code] * sum(lengths[:i]) for i in range(len(lengths))]
    indices = [0]
    for document in documents:
        indices.append(indices[-1] + len(document))
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(sequences), len(indices))
    body = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(offsets)}q", *offsets)
    index.write_bytes(head + body + struct.pack(f"<{len(indices)}q", *indices))
    flat = [token for sequence in sequences for token in sequence]
    index.with_suffix(".bin").write_bytes(struct.pack(f"<{len(flat)}{CODES[code]}", *flat))
    return index
