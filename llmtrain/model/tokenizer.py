"""The run's tokenizer: saved once by rank 0 with transformers, opened by the data room without."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llmtrain.errors import Problem, UserError, first_line


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What the model must know of its tokenizer: entries, and the ids of its special tokens."""

    length: int
    bos: int | None
    eos: int
    pad: int | None


def save_tokenizer(path: str, revision: str | None, directory: Path) -> None:
    """Load the tokenizer of a directory or Hub id and write it as `tokenizer.json` to `directory`.

    Raises UserError for one that cannot be loaded, needs its own code or is not a fast one.
    """
    tokenizer = _load(path, revision)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        expected = "a fast tokenizer (one with a tokenizer.json)"
        raise UserError(Problem("model.tokenizer", path, expected))
    tokenizer.save_pretrained(directory)


def special_tokens(path: str | Path) -> SpecialTokens:
    """Read what the model must know from a tokenizer's directory or Hub id. Raises UserError."""
    tokenizer = _load(str(path), None)
    if tokenizer.eos_token_id is None:
        expected = "a tokenizer with an end-of-text token"
        raise UserError(Problem("model.tokenizer", Path(path).name, expected))
    return SpecialTokens(
        len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    )


def _load(path: str, revision: str | None) -> Any:
    try:
        return AutoTokenizer.from_pretrained(
            path, revision=revision or "main", trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError, RecursionError) as error:
        expected = f"a tokenizer directory or a Hub id: {first_line(error)}"
        raise UserError(Problem("model.tokenizer", path, expected)) from error
