"""The run's tokenizer: saved once by rank 0 with transformers, opened by the data room without."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llmtrain.errors import Problem, UserError


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
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision or "main", trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            Problem("model.tokenizer", path, f"a tokenizer directory or a Hub id: {first}")
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            Problem("model.tokenizer", path, "a fast tokenizer (one with a tokenizer.json)")
        )
    tokenizer.save_pretrained(directory)


def special_tokens(directory: Path) -> SpecialTokens:
    """Read what the model must know from a saved tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        raise UserError(
            Problem("model.tokenizer", directory.name, "a tokenizer with an end-of-text token")
        )
    return SpecialTokens(
        len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    )
