"""What becomes of conversations with more ids than a block has (`chat.too_long`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmtrain.data.chat.mask import TokenSequence
from llmtrain.data.chat.rows import Message


def truncate(sequence: TokenSequence, limit: int) -> TokenSequence | None:
    """Return the start of a sequence, up to its last trained token; None if none is left.

    limit: the most ids that it may have
    """
    trained = sequence.trained[:limit]
    if not any(trained):
        return None
    last = len(trained) - trained[::-1].index(True)
    return TokenSequence(sequence.ids[:last], trained[:last])


def split(messages: Sequence[Message], fits: Callable[[list[int]], bool]) -> list[list[int]]:
    """Return the pieces of a conversation, each as the indices of its messages.

    A piece has the system messages at the front, then as many whole exchanges as fit, but at least
    one. An exchange begins at a user message that does not follow another.

    fits: whether these messages are short enough
    """
    front, exchanges = _exchanges(messages)
    pieces: list[list[int]] = []
    piece: list[int] = []
    for exchange in exchanges:
        if piece and not fits([*front, *piece, *exchange]):
            pieces.append([*front, *piece])
            piece = []
        piece = [*piece, *exchange]
    return [*pieces, [*front, *piece]]


def _exchanges(messages: Sequence[Message]) -> tuple[list[int], list[list[int]]]:
    roles = [message["role"] for message in messages]
    size = next((n for n, role in enumerate(roles) if role not in ("system", "developer")), 0)
    exchanges: list[list[int]] = []
    for n in range(size, len(roles)):
        begins = roles[n] == "user" and (n == size or roles[n - 1] != "user")
        if begins or not exchanges:
            exchanges.append([])
        exchanges[-1].append(n)
    return list(range(size)), exchanges
