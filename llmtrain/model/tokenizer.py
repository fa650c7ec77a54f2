"""The run's tokenizer as transformers has it, and a model's rows, one for each of its tokens.

Rank 0 saves the tokenizer with transformers; the data code opens it without.

A model often has more rows than its tokenizer has entries (padding to a round number), so rows are
never taken away. They are added only where the tokenizer has entries that have no row.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.text import first_line


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The facts about a tokenizer that a model needs.

    length: ids are below it
    bos, eos, pad: ids of the special tokens; None if the tokenizer has no such token.
    """

    length: int
    bos: int | None
    eos: int
    pad: int | None


def save_tokenizer(path: str, revision: str | None, directory: Path) -> None:
    """Load the tokenizer of a directory or Hub id and write it as `tokenizer.json` to `directory`.

    Raises UserError if it cannot be loaded, needs its own code or is not a fast tokenizer.
    """
    tokenizer = _load_fast(path, revision)
    tokenizer.init_kwargs.pop("auto_map", None)  # code of its own, which nobody should run later
    tokenizer.save_pretrained(directory)


def add_template(directory: Path, template: str, tokens: Sequence[str]) -> None:
    """Give a saved tokenizer a chat template, and the special tokens of it that it lacks."""
    tokenizer = load(str(directory), None)
    lacking = [token for token in tokens if token not in tokenizer.get_vocab()]
    tokenizer.add_tokens(
        [transformers.AddedToken(t, special=True, normalized=False) for t in lacking], True
    )
    tokenizer.chat_template = template
    shutil.rmtree(directory / "additional_chat_templates", ignore_errors=True)  # of the old one
    tokenizer.save_pretrained(directory)


def special_tokens(
    path: str | Path, revision: str | None = None, added: Sequence[str] = ()
) -> SpecialTokens:
    """Return the length and special tokens of the tokenizer in a directory or of a Hub id.

    revision: of the Hub id; None = main
    added: tokens that the run adds to it, if it lacks them

    Raises UserError if it cannot be loaded or has no end-of-text token.
    """
    facts = _facts_of(str(path), revision)
    if facts.eos is None:
        expected = "a tokenizer with an end-of-text token"
        raise UserError(Problem("model.tokenizer", Path(path).name, expected))
    return SpecialTokens(_length(facts.entries, added), facts.bos, facts.eos, facts.pad)


def length_of(tokenizer: transformers.PreTrainedTokenizerBase, added: Sequence[str] = ()) -> int:
    """Return the number that all ids of a tokenizer are below: its entries, or more with holes.

    added: tokens that it will get if it lacks them; their ids follow the number of its entries
    """
    return _length(tokenizer.get_vocab(), added)


def _length(entries: Mapping[str, int], added: Sequence[str]) -> int:
    lacking = sum(token not in entries for token in added)
    return max(len(entries) + lacking, 1 + max(entries.values()))


def new_entries(tokenizer: Path, base: str, revision: str | None) -> tuple[int, ...]:
    """Return the ids of the entries of a tokenizer that its base does not have.

    base, revision: a directory or Hub id; revision None = main
    """
    known = _facts_of(base, revision).entries
    entries = _facts_of(str(tokenizer), None).entries
    return tuple(sorted(id for entry, id in entries.items() if entry not in known))


def token_ids(
    path: str | Path, entries: Sequence[str], revision: str | None = None, added: Sequence[str] = ()
) -> tuple[int, ...]:
    """Return the ids of entries of the tokenizer in a directory or of a Hub id.

    revision: of the Hub id; None = main
    added: tokens that the run adds to it, if it lacks them

    Raises UserError for each one that it does not have.
    """
    known: dict[str, int] = _facts_of(str(path), revision).entries
    lacking = [token for token in added if token not in known]
    known = known | {token: id for id, token in enumerate(lacking, len(known))}
    key, expected = "adapter.train_tokens", "an entry of the run's tokenizer, as its files write it"
    problems = []
    for one in entries:
        if one not in known:  # it may have the word with a blank before it
            with_blank = (f"{mark}{one}" for mark in "Ġ▁" if f"{mark}{one}" in known)
            problems.append(Problem(key, one, expected, next(with_blank, "")))
    raise_any(problems)
    return tuple(sorted({known[one] for one in entries}))


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a start asks of a tokenizer, several times. Nobody changes it.

    entries: each with its id
    """

    entries: dict[str, int]
    bos: int | None
    eos: int | None
    pad: int | None


def _facts_of(path: str, revision: str | None) -> _Facts:
    """Return the facts of a tokenizer, which is loaded again only where its files have changed."""
    files = sorted(Path(path).iterdir()) if Path(path).is_dir() else ()
    stamps = [(file.name, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return _load_facts(path, revision, tuple(stamps))


@lru_cache(maxsize=2)  # the base's and the run's
def _load_facts(path: str, revision: str | None, stamps: tuple[tuple[str, int], ...]) -> _Facts:
    fast = _load_fast(path, revision)
    return _Facts(fast.get_vocab(), fast.bos_token_id, fast.eos_token_id, fast.pad_token_id)


def _load_fast(path: str, revision: str | None) -> transformers.PreTrainedTokenizerFast:
    tokenizer = load(path, revision)
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        expected = "a fast tokenizer (one with a tokenizer.json)"
        raise UserError(Problem("model.tokenizer", path, expected))
    return tokenizer


def load(path: str, revision: str | None) -> transformers.PreTrainedTokenizerBase:
    """Load the tokenizer of a directory or Hub id with transformers.

    Raises UserError if it cannot be loaded or needs its own code.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            path, revision=revision or "main", trust_remote_code=False
        )
    except StrictDataclassError as error:  # of a model's config.json beside the tokenizer
        expected = f"a config.json that transformers accepts: {' '.join(str(error).split())}"
        raise UserError(Problem("model.tokenizer", path, expected)) from error
    except Exception as error:  # of a file that is brought `tokenizers` raises this very class
        expected = f"a tokenizer directory or a Hub id: {first_line(error)}"
        raise UserError(Problem("model.tokenizer", path, expected)) from error
    if not isinstance(template := tokenizer.chat_template, str | dict | None):
        expected = f"a tokenizer whose chat_template is a string; it is {json.dumps(template)}"
        raise UserError(Problem("model.tokenizer", path, expected))
    if not isinstance(length := tokenizer.model_max_length, int | float):
        expected = f"a tokenizer whose model_max_length is a number; it is {json.dumps(length)}"
        raise UserError(Problem("model.tokenizer", path, expected))
    return tokenizer


_ROWS_AT_ONCE = 8192  # in double precision


def rows_for(entries: int, pad_to: int | None) -> int:
    """Return the rows of a model whose rows the tokenizer decides. pad_to: `model.pad_vocab_to`."""
    return max(entries, pad_to or 0)


def set_rows(config: transformers.PreTrainedConfig, entries: int, pad_to: int | None) -> None:
    """Change the config of weights so that each entry of the tokenizer has a row."""
    text = config.get_text_config()
    if entries > text.vocab_size:
        text.vocab_size = rows_for(entries, pad_to)


def grow(model: transformers.PreTrainedModel, rows: int) -> None:
    """Give the input embeddings and the output head `rows` rows, and set them in the config.

    Each new row is the mean of the old ones, so that the new tokens begin as likely as an average
    token. No random numbers are drawn. Tied parameters stay tied, and a bias grows as well.
    `resize_token_embeddings` of transformers would draw the new rows at random, and take padded
    rows away from a model whose tokenizer has fewer entries.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = [one for one in (embedding, head) if one is not None]
    old = {id(p): p for one in ends for p in one.parameters(recurse=False)}
    grown = {
        key: nn.Parameter(longer(p.detach(), rows), requires_grad=p.requires_grad)
        for key, p in old.items()
    }
    for module in model.modules():  # a parameter may have several names
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in grown:
                setattr(module, name, grown[id(parameter)])
    sizes = (embedding, "num_embeddings"), (head, "out_features"), (model, "vocab_size")
    for module, size in sizes:
        if hasattr(module, size):
            setattr(module, size, rows)
    model.config.get_text_config().vocab_size = rows


def longer(old: Tensor, rows: int) -> Tensor:
    """Return a tensor (V, …) with `rows` rows: its own, then their mean."""
    if rows <= len(old):
        return old
    parts = (part.double().sum(0) for part in torch.split(old, _ROWS_AT_ONCE))
    mean = (torch.stack(list(parts)).sum(0) / len(old)).to(old.dtype)
    return torch.cat([old, mean.expand(rows - len(old), *mean.shape)])
