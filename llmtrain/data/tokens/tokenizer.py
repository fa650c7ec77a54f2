"""The tokenizer of a run: trained on its texts or taken over, opened with one of two back ends.

The back ends give the same ids: `tokenizers`, which is the reference, and tiktoken, several times
as fast, for tokenizers that can be converted (`convert.py`). Rank 0 chooses at a run's first start
and logs the reason. It takes tiktoken if the merges lead to every entry, and the ids equal those of
`tokenizers` on documents of the run and on texts made to find a difference. The manifest keeps the
choice, and every later start and every worker opens that back end.

Text is only ever text: an article that contains `<|endoftext|>` gets the ids of these characters,
never the control token. No back end knows added tokens, special or not. If a model makes one from
text by itself, the string is cut in two.

A tokenizer that is trained has the form of GPT-2's: a byte-level BPE, in which every byte is a
symbol, so no text is unknown and decoding returns exactly the same bytes; GPT-2's pattern cuts text
into words before merging. `<|endoftext|>` has id 0 and is the only special token. The same texts
give the same files, with any number of threads.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import xxhash

from llmtrain.data.tokens import convert
from llmtrain.errors import Problem, UserError

if TYPE_CHECKING:
    import tokenizers


Backend = Literal["tokenizers", "tiktoken"]

# A longer document is encoded in parts. Patterns that end in `\s+(?!\S)` overflow tiktoken's stack
# at a million spaces; at half of that they never do.
PART_CHARACTERS = 1 << 19
BATCH = 64  # texts in one call to `tokenizers`: a sixth faster than one by one
_BORDERS = (
    re.compile(r"\S(?= \S)"),  # before a single space: a word begins there, in any tokenizer
    re.compile(r"\S\n(?=\S)"),  # after a single newline
    re.compile(r"\S(?=\s)"),
)
_BORDER_CHARACTERS = 1 << 14  # how far back a border is searched for


class TokenizerBackend(Protocol):
    """The interface of a back end."""

    def encode(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """Yield the ids (n,) int32 of each text."""

    def encode_part(self, text: str) -> np.ndarray:
        """Return the ids of a later part of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens written out."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The back end `tokenizers`, with a tokenizer for each purpose.

    whole: encodes whole texts, without added tokens
    rest: encodes later parts of a text, and puts nothing in front of them
    full: decodes, with added tokens
    """

    whole: tokenizers.Tokenizer
    rest: tokenizers.Tokenizer
    full: tokenizers.Tokenizer

    def encode(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """Yield the ids of each text."""
        for i in range(0, len(texts), BATCH):
            part = texts[i : i + BATCH]
            for encoding in self.whole.encode_batch_fast(part, add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.int32)

    def encode_part(self, text: str) -> np.ndarray:
        """Return the ids of a later part of a text."""
        encoding = self.rest.encode_batch_fast([text], add_special_tokens=False)[0]
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens written out."""
        return str(self.full.decode(ids, skip_special_tokens=False))


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """The run's tokenizer.

    eos: id of the end-of-text token
    bos: id of the begin token; None unless the tokenizer itself puts it before a text
    pad: id of the pad token; of the end-of-text token if there is no pad token
    length: ids are below it
    digest: of its files
    added: the added tokens, by id; they are only named here
    awkward: texts on which it may differ from another: `PROBES`, and its added tokens
    _control: strings from which the model would make a control token; None = no such strings
    """

    eos: int
    bos: int | None
    pad: int
    length: int
    digest: str
    backend: Backend
    _encoder: TokenizerBackend = field(repr=False)
    _control: re.Pattern[str] | None = field(repr=False)
    added: dict[int, tokenizers.AddedToken] = field(repr=False)
    awkward: tuple[str, ...] = field(repr=False)

    def encode(self, text: str) -> np.ndarray:
        """Return the text's own ids (n,) int32: no begin or end token, no control tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode each text."""
        return list(self._encode(texts))

    def documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode documents as they are trained on: begin token if any, text, end of text."""
        begin = np.array([] if self.bos is None else [self.bos], dtype=np.int32)
        end = np.array([self.eos], dtype=np.int32)
        return [np.concatenate((begin, ids, end)) for ids in self._encode(texts)]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids, control tokens written out."""
        return self._encoder.decode([int(i) for i in ids])

    @property
    def probe(self) -> str:
        """Digest of the ids of the awkward texts: equal if and only if the ids are."""
        digest = xxhash.xxh3_64()
        for ids in self.encode_batch(self.awkward):
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i4").tobytes())
        return digest.hexdigest()

    def _encode(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        parts = [split_long(text, PART_CHARACTERS, self._control) for text in texts]
        firsts = self._encoder.encode([first for first, *_ in parts])
        for ids, (_, *rest) in zip(firsts, parts, strict=True):
            yield np.concatenate((ids, *map(self._encoder.encode_part, rest))) if rest else ids


def open_tokenizer(directory: Path, backend: Backend = "tokenizers") -> Tokenizer:
    """Open `tokenizer.json` and `tokenizer_config.json` with the back end that the run began with.

    Raises UserError if a file is missing, the tokenizer has no end-of-text token, or it cannot be
    opened with this back end here.
    """
    content, description = describe(directory)
    _, settings = _read(directory / "tokenizer_config.json")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # otherwise it starts a thread for every core
    os.environ["RAYON_NUM_THREADS"] = "1"
    if backend == "tiktoken":
        encoder: TokenizerBackend = _convert(description, str(directory))
    else:
        encoder = _reference(description, content.decode())
    added = convert.added_tokens(description)
    ids = convert.vocabulary(description) | {token["content"]: token["id"] for token in added}
    texts = (token_text(settings.get(name)) for name in ("eos_token", "bos_token", "pad_token"))
    eos, bos, pad = (None if text is None else ids.get(text) for text in texts)
    if eos is None:
        expected = "a tokenizer with an end-of-text token (eos_token in tokenizer_config.json)"
        raise UserError(Problem("model.tokenizer", str(directory), expected))
    # Whether the post-processor puts the begin token before a text.
    model = {"type": "BPE", "vocab": {"a": 1 << 30}, "merges": []}
    begin = convert.shell(description, "post_processor", model=model).encode("a").ids[:1]
    control = convert.control_strings(description)
    return Tokenizer(
        eos=eos,
        bos=bos if begin == [bos] else None,
        pad=eos if pad is None else pad,
        length=max(ids.values()) + 1,
        digest=xxhash.xxh3_64_hexdigest(content + json.dumps([eos, pad]).encode()),
        backend=backend,
        _encoder=encoder,
        _control=re.compile("|".join(map(re.escape, control))) if control else None,
        added={token["id"]: _added_token(token) for token in added},
        awkward=(*convert.PROBES, "".join(f"a{t['content']} b {t['content']}" for t in added)),
    )


def describe(directory: Path) -> tuple[bytes, convert.Description]:
    """Return the bytes of `tokenizer.json`, and its parsed content. Raises UserError."""
    return _read(directory / "tokenizer.json")


def split_long(text: str, limit: int, control: re.Pattern[str] | None = None) -> list[str]:
    """Return a text as parts that are encoded one by one, by a fixed rule for both back ends.

    A part has at most `limit` characters. It is cut where a word begins (before the last single
    space, else after the last single newline, else before white space), so that the ids are those
    of the whole text. Without such a place it is cut at the limit.

    control: matches strings that must also be cut in two
    """
    if len(text) <= limit and control is None:
        return [text]
    cuts = [match.start() + 1 for match in control.finditer(text)] if control else []
    start = 0
    while len(text) - start > limit:
        start = _border(text, start, start + limit)
        cuts.append(start)
    bounds = [0, *sorted(set(cuts)), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


def _border(text: str, start: int, end: int) -> int:
    """Return the best place to cut text[start:end], near its end."""
    first = max(start, end - _BORDER_CHARACTERS)
    for border in _BORDERS:
        places = [match.end() for match in border.finditer(text, first, end)]
        if places:
            return places[-1]
    return end


def _convert(description: convert.Description, place: str) -> TokenizerBackend:
    remedy = "restore the run's tokenizer/, and tiktoken in the version that the run began with"
    reason = next(convert.obstacles(description), None)
    try:
        if reason is None:
            return convert.convert(description)
    except (ImportError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
    expected = f"a tokenizer that tiktoken can be made of, as when the run began ({reason})"
    raise UserError(Problem("tokenizer backend", f"tiktoken for {place}", expected, remedy))


def _reference(description: convert.Description, content: str) -> Reference:
    import tokenizers

    full = tokenizers.Tokenizer.from_str(content)
    # Later parts of a text: they put nothing in front.
    steps_of_rest = {
        part: _continue_step(description.get(part)) for part in ("normalizer", "pre_tokenizer")
    }
    whole, rest = (
        without_added(full.model, convert.shell(frame, "normalizer", "pre_tokenizer"))
        for frame in (description, {**description, **steps_of_rest})
    )
    return Reference(whole, rest, full)


def without_added(
    model: tokenizers.models.Model, steps: tokenizers.Tokenizer
) -> tokenizers.Tokenizer:
    """Return a tokenizer without added tokens. steps: has its normalizer and its pre-tokenizer"""
    made = type(steps)(model)
    if steps.normalizer is not None:
        made.normalizer = steps.normalizer
    if steps.pre_tokenizer is not None:
        made.pre_tokenizer = steps.pre_tokenizer
    return made


def _continue_step(step: convert.Description | None) -> convert.Description | None:
    if step is None or step["type"] == "Prepend":
        return None
    for key in {"normalizers", "pretokenizers"} & step.keys():
        steps = [_continue_step(inner) for inner in step[key]]
        return {**step, key: [inner for inner in steps if inner is not None]}
    changes: convert.Description = {
        "Metaspace": {"prepend_scheme": "never"},
        "ByteLevel": {"add_prefix_space": False},
        "Strip": {"strip_left": False},
    }
    return {**step, **changes.get(step["type"], {})}


def _read(path: Path) -> tuple[bytes, convert.Description]:
    was_on = gc.isenabled()
    gc.disable()  # it takes half of the time where each merge is a list
    try:
        content = path.read_bytes()
        parsed = json.loads(content)
    except FileNotFoundError:
        expected = f"a directory with {path.name}"
        raise UserError(Problem("model.tokenizer", str(path.parent), expected)) from None
    except (ValueError, RecursionError) as error:
        problem = Problem("model.tokenizer", str(path), f"JSON ({error})", "save it again")
        raise UserError(problem) from error
    finally:
        if was_on:
            gc.enable()
    if not isinstance(parsed, dict):
        raise UserError(Problem("model.tokenizer", str(path), "a JSON object"))
    return content, parsed


def token_text(token: object) -> str | None:
    """Return the text of a token, which a setting has as a string or as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _added_token(described: convert.Description) -> tokenizers.AddedToken:
    from tokenizers import AddedToken

    options = {k: v for k, v in described.items() if k not in ("id", "content")}
    return AddedToken(described["content"], **options)


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
    failure = _failure(candidate, convert.long_runs(PART_CHARACTERS))
    texts = [*reference.awkward, *documents]
    if difference := failure or first_difference(reference, candidate, texts):
        _log.warning("tokenizing with tokenizers, because %s", difference)
        return reference
    message = "tokenizing with tiktoken: ids equal those of tokenizers on %d documents"
    _log.info(message, len(documents))
    return candidate


def first_difference(one: Tokenizer, other: Tokenizer, texts: Iterable[str]) -> str | None:
    """Describe where `other` first gives other ids; None if it gives the same."""
    for text in texts:
        expected, actual = one.encode(text), other.encode(text)
        if not np.array_equal(expected, actual):
            same = expected[: len(actual)] == actual[: len(expected)]
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
    if obstacle := next(convert.obstacles(description), None):
        return obstacle
    model = tokenizers.Tokenizer.from_str(content.decode()).model
    if entry := convert.find_unreached(description, model):
        return f"its merges do not lead to the entry {entry!r}"
    try:
        return open_tokenizer(directory, "tiktoken")
    except UserError as error:
        return error.problems[0].expected


END_OF_TEXT = "<|endoftext|>"
SMALLEST = 256 + 1  # the byte symbols and the special token


def train_bpe(texts: Iterable[str], entries: int) -> str:
    """Train on `texts` and return the text of a `tokenizer.json` with exactly `entries` entries.

    It keeps one count for each distinct word in memory. Raises UserError if `entries` is less than
    the 256 byte symbols and the special token, or if the texts are too small to reach it.
    """
    asked = f"{{train: {entries}}}"
    if entries < SMALLEST:
        raise UserError(Problem("model.tokenizer", asked, f"at least {SMALLEST} entries"))
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), [END_OF_TEXT]
    trainer = trainers.BpeTrainer(
        vocab_size=entries, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    reached = tokenizer.get_vocab_size()
    if reached != entries:
        expected = f"text enough for {entries} entries; the training text gives {reached}"
        remedy = f"{{train: {reached}}}, or more text"
        raise UserError(Problem("model.tokenizer", asked, expected, remedy))
    return str(tokenizer.to_str(pretty=False))


def tokenizer_config() -> str:
    """Return the `tokenizer_config.json` with which transformers loads such a tokenizer.

    `<|endoftext|>` ends a document. Since no text contains it, it also begins a text and pads.
    Nothing is added to a text when it is encoded.
    """
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,  # transformers' own number for "no limit"
    }
    return json.dumps(fields, indent=2) + "\n"
