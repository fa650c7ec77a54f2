"""Saves in which rank 0 writes everything: the other ranks send it their parts.

For one tensor after another, every rank sends its parts, some MiB at a time, and rank 0 writes
them:

    round of 16 MiB, 2 ranks     rank 0: a[0, 8)   rank 1: a[20, 28)
                                 rank 0: a[8, 16)  rank 1: a[28, 36)  …

All ranks make the same number of exchanges, so a rank that fails continues with empty messages and
raises its error at the end. The files are the same as if every rank had written its own parts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from llmtrain import heartbeat
from llmtrain.agreement import attempt
from llmtrain.checkpoint import format as form
from llmtrain.checkpoint import write
from llmtrain.checkpoint.format import Extents
from llmtrain.checkpoint.write import Begun, Block
from llmtrain.types import Piece, Ranks

if TYPE_CHECKING:
    from torch import Tensor

    Part = tuple[int, Tensor]  # offset in the file, bytes as uint8

ROUND_BYTES = 16 << 20  # of all ranks together; rank 0 needs about three times as much memory
_HEAD = struct.Struct("<QQ")  # offset in the file, number of bytes


def pieces(begun: Begun, pieces: Iterable[Piece], ranks: Ranks) -> Extents:
    """Do the same as `write.pieces`, but rank 0 writes the pieces of all ranks.

    Collective; only rank 0 gets extents. An error of this rank is raised after the last exchange.
    """
    own = attempt(lambda: _by_name(begun, pieces))
    failed = [own.error] if own.error else []
    blocks = _exchange(begun, {} if own.error else own.result(), ranks, failed)
    total = sum(form.tensor_bytes(place.tensor) for place in begun.places.values())
    found = attempt(lambda: write.blocks(begun, blocks, total) if ranks.rank == 0 else {})
    for _ in blocks:  # every rank takes part in every exchange, even if rank 0 has failed
        continue
    if failed:
        raise failed[0]
    return found.result()


def _by_name(begun: Begun, pieces: Iterable[Piece]) -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = {}
    for piece in pieces:
        found.setdefault(piece.name, []).append(write.flat(begun, piece))
    return found


def _exchange(
    begun: Begun, own: dict[str, list[Part]], ranks: Ranks, failed: list[Exception]
) -> Iterator[Block]:
    """Send bytes to rank 0 in rounds. Rank 0 yields them, each round in the order of the file."""
    room = -(-ROUND_BYTES // ranks.world_size)
    for name, place in begun.places.items():
        heartbeat.beat(f"sending {name} to rank 0")
        mine = _messages(own.get(name, []), room)
        # As many rounds as one rank alone would need for the whole tensor: a rank does not know
        # which parts the others have.
        for _ in range(-(-form.tensor_bytes(place.tensor) // room)):
            heard = ranks.gather(_next(mine, failed))
            blocks = [Block(place.file, *part) for body in heard for part in _parts(body)]
            yield from sorted(blocks, key=lambda block: block.offset)


def _next(messages: Iterator[bytes], failed: list[Exception]) -> bytes:
    """Return the next message; an empty one after the last, or if it cannot be made."""
    message = attempt(lambda: next(messages, b""))
    if message.error:
        failed.append(message.error)  # raised by `pieces`
        return b""
    return message.result()


def _messages(parts: Iterable[Part], room: int) -> Iterator[bytes]:
    """Yield the parts as messages with `room` bytes of data each; the last one may have fewer."""
    message: list[bytes] = []
    left = room
    for offset, data in parts:
        first = 0
        while first < data.numel():
            part = data[first : first + left]
            message += [_HEAD.pack(offset + first, part.numel()), part.cpu().numpy().tobytes()]
            first, left = first + part.numel(), left - part.numel()
            if not left:
                yield b"".join(message)
                message, left = [], room
    if message:
        yield b"".join(message)


def _parts(body: bytes) -> Iterator[tuple[int, memoryview]]:
    """Yield the parts in a message: each one's offset in the file, and its bytes."""
    view = memoryview(body)
    while view.nbytes:
        offset, size = _HEAD.unpack_from(view)
        yield offset, view[_HEAD.size : _HEAD.size + size]
        view = view[_HEAD.size + size :]
