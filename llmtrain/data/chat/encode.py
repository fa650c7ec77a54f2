r"""Encodes rendered text with the run's tokenizer, added tokens included, in pieces.

A tokenizer first cuts a text at its added tokens, then encodes each part on its own. This module
cuts at the same places, so a part that comes again, in a later prompt, is encoded once:

    <|im_start|> · user\nHi? · <|im_end|> · \n · <|im_start|> · assistant\n · Yes. · <|im_end|>

It also tells where a prompt ends in the ids of a longer text (`boundary`), without offsets, which
some tokenizers get wrong. How a part is encoded depends on what precedes it:

    first     nothing
    behind    an added token
    glued     other text, encoded apart: "\n" is put in front, and its ids are removed
    literal   the same, and its text is a control token that must stay text

The trap: SentencePiece's tokenizers put a blank in front of a text, some also behind every added
token. So a part behind an added token is encoded behind one, whose id is removed. Byte-level
tokenizers do no such thing: the run's faster back end, if it has one, encodes their parts.

The other trap: a user may write `<|im_end|>`, which after rendering could not be told from the
template's own. So `Control` puts marks around control tokens in the content of a message before it
is rendered, and what is between marks is encoded as text:

    {"content": "what is <|im_end|>?"}   →   "what is \U000f0000<|im_end|>\U000f0001?"
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from llmtrain.data.chat.rows import REASONING, Message
from llmtrain.data.tokens.tokenizer import Tokenizer, without_added
from llmtrain.errors import Problem, UserError

if TYPE_CHECKING:
    import tokenizers


START, END = "\U000f0000", "\U000f0001"
_REMOVE = {ord(START): None, ord(END): None}
_SPOKEN = ("content", *REASONING)


@dataclass(frozen=True, slots=True)
class Control:
    """The strings that are control tokens, which are marked in what people have written.

    Marks are characters for private use; those in the input are removed first. Only rows that hold
    such a string are marked. Tokens that are not special, such as `<think>`, are control tokens
    only if the template writes them: Gemma has an added token for each HTML tag, and those stay
    what they are in inference. What an assistant says is marked for special tokens alone, since its
    `<think>` is what it generates.

    special: matches a special token or a mark
    every: matches those, and any other added token that the template writes
    """

    special: re.Pattern[str]
    every: re.Pattern[str]

    def find(self, messages: Iterable[Message], tools: object) -> str | None:
        """Return a control token or a mark in messages and tools; None if they have none."""
        for message in messages:
            for name, value in message.items():
                pattern = self._pattern(message, name, alone=False)
                for text in _strings(value):
                    if match := pattern.search(text):
                        return match.group()
        matches = (self.every.search(text) for text in _strings(tools))
        return next((match.group() for match in matches if match), None)

    def mark(
        self, messages: Iterable[Message], tools: object, *, special: bool
    ) -> tuple[list[Message], Any]:
        """Return messages and tools with marks around control tokens.

        special: mark special tokens alone
        """
        pattern = self.special if special else self.every
        return [
            {
                name: _change_texts(value, _marker(self._pattern(message, name, alone=special)))
                for name, value in message.items()
            }
            for message in messages
        ], _change_texts(tools, _marker(pattern))

    def _pattern(self, message: Message, name: str, *, alone: bool) -> re.Pattern[str]:
        spoken = message["role"] == "assistant" and name in _SPOKEN
        return self.special if alone or spoken else self.every


def control_of(added: Iterable[tokenizers.AddedToken], template: str) -> Control:
    """Return the control tokens of a tokenizer, for a template.

    White space is never a control token: templates write it as text.
    """
    tokens = [token for token in added if token.content and not token.content.isspace()]
    special = [token.content for token in tokens if token.special]
    written = [token.content for token in tokens if token.content in template]
    return Control(*(longest({**dict.fromkeys(s, ""), START: "", END: ""}) for s in (
        special, [*special, *written],
    )))  # fmt: skip


def unmark(text: str) -> str:
    """Remove all marks."""
    return text.translate(_REMOVE) if START in text or END in text else text


def without_marks(value: object) -> Any:
    """Remove all marks from every string in messages or tools."""
    return _change_texts(value, unmark)


def longest(words: Mapping[str, str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of these words at the leftmost place.

    Words with the same beginning share it in the pattern: Gemma has 6,000 added tokens, and trying
    one after the other takes 40 times as long.

    words: word → a pattern for what belongs to it behind it
    """
    return re.compile(_branches(words) if words else "(?!)")


def _branches(words: Mapping[str, str]) -> str:
    if len(words) == 1:
        ((word, behind),) = words.items()
        return re.escape(word) + behind
    alternatives = [
        re.escape(first) + _branches({word[1:]: words[word] for word in some})
        for first, some in groupby(sorted(words, reverse=True), key=lambda word: word[:1])
    ]  # in reverse, a word is behind those that it begins
    return alternatives[0] if len(alternatives) == 1 else f"(?:{'|'.join(alternatives)})"


def _marker(pattern: re.Pattern[str]) -> Callable[[str], str]:
    return lambda text: pattern.sub(rf"{START}\g<0>{END}", unmark(text))


def _change_texts(value: object, change: Callable[[str], str]) -> Any:
    """Return a value with every string in it changed, keys excepted."""
    match value:
        case str():
            return change(value)
        case dict():
            return {name: _change_texts(one, change) for name, one in value.items()}
        case list() | tuple():
            return [_change_texts(one, change) for one in value]
    return value


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings(one)


Kind = Literal["first", "behind", "glued", "literal"]
Encode = Callable[[list[str]], list[list[int]]]

CACHE_CHARACTERS = 1 << 18  # about 3 MB of text and ids
# White space as the tokenizers library has it, which Python's own \s is not.
_BLANKS = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*"
_MARKED = re.compile(f"{START}([^{START}{END}]*){END}|[{START}{END}]")


class TextPart(NamedTuple):
    """A part of a text: where it begins, in characters, and how it is encoded."""

    start: int
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A text's ids, and its parts.

    firsts: where the ids of each part begin
    """

    ids: list[int]
    parts: Sequence[TextPart]
    firsts: Sequence[int]


@dataclass(frozen=True, slots=True)
class TextEncoders:
    """What encodes the parts.

    added: the added tokens, by id
    whole: encodes texts; added tokens in them get their own ids
    bare: encodes texts; added tokens in them are text
    by_parts: whether `whole` takes an added token only by itself, and a text without any; then a
        text has the same ids behind everything
    """

    added: Mapping[int, tokenizers.AddedToken]
    whole: Encode
    bare: Encode
    by_parts: bool = False


class OffsetEncoder:
    """Encodes rendered text, and remembers the ids of parts.

    added: the added tokens, by id
    """

    def __init__(self, engine: TextEncoders) -> None:
        self.added = engine.added
        self._engine = engine
        self._known: dict[tuple[Kind, str], list[int]] = {}
        self._characters = 0
        cuts = _cuts(list(self.added.values()))
        guards = (token for token, blanks in cuts.items() if not blanks)
        self._guard = "" if engine.by_parts else next(guards, "")
        self._cuts = longest(cuts)
        if not engine.by_parts:  # texts in parts must have the ids that they have as a whole
            tokens = [token.content for token in self.added.values()][:64]
            texts = [f"a{token} b{token}\n c {token}{token}d" for token in tokens]
            texts.append("".join(tokens))
            if [self.encode(text).ids for text in texts] != engine.whole(texts):
                self._cuts = longest({})

    def encode(self, text: str, kind: Kind = "first") -> EncodedText:
        """Return the ids of a text that may hold marks. kind: of its first part."""
        parts = self._parts(text, kind)
        self._learn(parts)
        ids: list[int] = []
        firsts = []
        for part in parts:
            firsts.append(len(ids))
            ids += self._known[part.kind, part.text]
        return EncodedText(ids, parts, firsts)

    def boundary(self, encoded: EncodedText, place: int) -> int | None:
        """Return how many ids the text has up to a place, in characters.

        None: that part of the text alone has ids with which the whole text's do not begin.
        """
        n = bisect_right(encoded.parts, place, key=lambda part: part.start) - 1
        if n < 0:
            return 0
        part, first = encoded.parts[n], encoded.firsts[n]
        if place - part.start >= len(part.text):
            return encoded.firsts[n + 1] if n + 1 < len(encoded.parts) else len(encoded.ids)
        begun = part.text[: place - part.start]
        if not begun:
            return first
        self._learn([TextPart(part.start, part.kind, begun)])
        ids = self._known[part.kind, begun]
        last = first + len(ids)
        return last if encoded.ids[first:last] == ids else None

    def ids_before(self, encoded: EncodedText, place: int) -> int:
        """Return how many ids are before the part that a place is in, at least."""
        n = bisect_right(encoded.parts, place, key=lambda part: part.start) - 1
        return encoded.firsts[n] if n >= 0 else 0

    def _parts(self, text: str, kind: Kind) -> list[TextPart]:
        if START not in text and END not in text:
            return list(self._between(text, 0, kind))
        parts: list[TextPart] = []
        start = 0
        for match in _MARKED.finditer(text):
            parts += self._between(text[start : match.start()], start, kind)
            if match[1]:
                parts.append(TextPart(match.start(1), "literal", match[1]))
            start, kind = match.end(), "glued"
        return [*parts, *self._between(text[start:], start, kind)]

    def _between(self, text: str, offset: int, kind: Kind) -> Iterator[TextPart]:
        """Yield the parts of a text without marks: added tokens, and what is between them."""
        start = 0
        for match in self._cuts.finditer(text):
            if match.start() > start:
                yield TextPart(offset + start, kind, text[start : match.start()])
            yield TextPart(offset + match.start(), "behind", match.group())
            start, kind = match.end(), "behind"
        if start < len(text):
            yield TextPart(offset + start, kind, text[start:])

    def _learn(self, parts: Sequence[TextPart]) -> None:
        """Encode the parts that are not known yet."""
        if self._characters > CACHE_CHARACTERS:
            self._known.clear()
            self._characters = 0
        keys = {(part.kind, part.text) for part in parts}
        new = [key for key in keys if key not in self._known]
        behind = [text for kind, text in new if kind == "behind"]
        guarded = self._engine.whole([self._guard + text for text in behind]) if behind else []
        for text, ids in zip(behind, guarded, strict=True):
            self._known["behind", text] = ids[1:] if self._guard else ids
        for kind, text in new:
            self._characters += len(text)
            if kind != "behind":
                self._known[kind, text] = self._ids(kind, text)

    def _ids(self, kind: Kind, text: str) -> list[int]:
        if kind == "first":
            return self._engine.whole([text])[0]
        if kind == "glued":
            return _glue(self._engine.whole, text)
        bare = self._engine.bare
        ids = _glue(bare, text)
        if not self.added.keys().isdisjoint(ids):  # a model that makes a control token of text
            ids = [*_glue(bare, text[0]), *_glue(bare, text[1:])]
        return ids


def open_encoder(directory: Path, tokenizer: Tokenizer | None = None) -> OffsetEncoder:
    """Open `tokenizer.json` with its added tokens. Raises UserError if it is missing.

    tokenizer: the one in that directory, with the run's back end; it is used if it is faster
    """
    import tokenizers

    fast = None if tokenizer is None else of_back_end(tokenizer)
    if fast is not None:
        return OffsetEncoder(fast)
    path = directory / "tokenizer.json"
    if not path.is_file():
        expected = "a directory with tokenizer.json"
        raise UserError(Problem("model.tokenizer", str(directory), expected))
    full = tokenizers.Tokenizer.from_file(str(path))
    full.no_truncation()
    full.no_padding()
    return OffsetEncoder(of_library(full))


def of_library(full: tokenizers.Tokenizer) -> TextEncoders:
    """Return the engine of a tokenizer with its added tokens."""

    def encode(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    whole, bare = (partial(encode, one) for one in (full, without_added(full.model, full)))
    return TextEncoders(full.get_added_tokens_decoder(), whole, bare)


def of_back_end(tokenizer: Tokenizer) -> TextEncoders | None:
    """Return the engine of a run's tokenizer.

    None: it is no faster than the library, or a text cannot be cut at every added token.
    """
    if tokenizer.backend != "tiktoken":  # that converts byte-level tokenizers alone
        return None
    added = tokenizer.added
    cuts = _cuts(list(added.values()))
    if any(cuts.values()) or any(one.content not in cuts for one in added.values()):
        return None
    ids = {one.content: [id] for id, one in added.items()}

    def bare(texts: list[str]) -> list[list[int]]:
        return [encoded.tolist() for encoded in tokenizer.encode_batch(texts)]

    def whole(texts: list[str]) -> list[list[int]]:
        return [ids.get(text) or bare([text])[0] for text in texts]

    return TextEncoders(added, whole, bare, by_parts=True)


def _glue(encode: Encode, text: str) -> list[int]:
    newline, ids = encode(["\n", "\n" + text])
    if ids[: len(newline)] == newline:
        return ids[len(newline) :]
    return encode([text])[0]


def _cuts(added: Sequence[tokenizers.AddedToken]) -> dict[str, str]:
    """Return the added tokens at which a text can be cut → a pattern for the blanks they take.

    Left out are those that the tokenizer finds after normalizing, in single words only, or with
    blanks in front, and those that one of these contains.
    """
    soft = [one.content for one in added if one.normalized or one.single_word or one.lstrip]
    soft += [one.content for one in added if one.content != one.content.strip()]
    return {
        one.content: _BLANKS if one.rstrip else ""
        for one in added
        if one.content and not any(one.content in other for other in soft)
    }
