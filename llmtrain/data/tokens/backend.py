"""Chooses the back end that a new run tokenizes with. Rank 0 does it once, and logs the reason.

It is tiktoken if the tokenizer can be converted, its merges lead to every entry, and the ids equal
those of `tokenizers` on documents of the run and on texts made to find a difference.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from llmtrain.data.tokens.convert import find_unreached, obstacles
from llmtrain.data.tokens.probe_texts import long_runs
from llmtrain.data.tokens.tokenizer import PART_CHARACTERS, Tokenizer, describe, open_tokenizer
from llmtrain.errors import UserError

_log = logging.getLogger(__name__)


def choose_tokenizer(directory: Path, texts: Iterable[str]) -> Tokenizer:
    """Choose the tokenizer of a new run: tiktoken if it gives the same ids. If not, log why.

    It takes one to two seconds.

    texts: documents of the run, compared in addition to the awkward texts
    """
    reference = open_tokenizer(directory)
    candidate = _candidate(directory)
    if isinstance(candidate, str):
        _log.info("tokenizing with tokenizers, because %s", candidate)
        return reference
    documents = list(texts)
    difference = _failure(candidate, long_runs(PART_CHARACTERS)) or first_difference(
        reference, candidate, [*reference.awkward, *documents]
    )
    if difference:
        _log.warning("tokenizing with tokenizers, because %s", difference)
        return reference
    said = "tokenizing with tiktoken: ids equal those of tokenizers on %d documents"
    _log.info(said, len(documents))
    return candidate


def first_difference(one: Tokenizer, other: Tokenizer, texts: Iterable[str]) -> str | None:
    """Describe where `other` first gives other ids; None if it gives the same."""
    for text in texts:
        expected, found = one.encode(text), other.encode(text)
        if not np.array_equal(expected, found):
            same = expected[: len(found)] == found[: len(expected)]
            at = len(same) if same.all() else int(same.argmin())
            near = one.decode(expected[max(0, at - 8) : at + 8])
            return f"{other.backend} gives other ids at {near!r}"
    return None


def _failure(tokenizer: Tokenizer, texts: Iterable[str]) -> str | None:
    """Return the error of a back end that fails on one of these texts, or None."""
    for text in texts:
        try:
            tokenizer.encode(text)
        except ValueError as error:  # its regular expression engine has limits
            return f"{tokenizer.backend} fails on {len(text)} characters {text[:8]!r}…: {error}"
    return None


def _candidate(directory: Path) -> Tokenizer | str:
    """Return the tokenizer with tiktoken, or the reason why it cannot be used."""
    import tokenizers

    if importlib.util.find_spec("tiktoken") is None:
        return "tiktoken is not installed"
    content, description = describe(directory)
    obstacle = next(obstacles(description), None)
    if obstacle:
        return obstacle
    entry = find_unreached(description, tokenizers.Tokenizer.from_str(content.decode()).model)
    if entry:
        return f"its merges do not lead to the entry {entry!r}"
    try:
        return open_tokenizer(directory, "tiktoken")
    except UserError as error:
        return error.problems[0].expected
