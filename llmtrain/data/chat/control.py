r"""Keeps control tokens that stand in the content of a message text.

A user may write `<|im_end|>`. After rendering, this string could not be told from the template's
own. So before rendering, such strings are put between two marks, characters for private use:

    {"content": "what is <|im_end|>?"}   →   "what is \U000f0000<|im_end|>\U000f0001?"

`encode.py` encodes what is between the marks as text. Marks in the input are removed first. Only
rows that hold such a string are marked.

The trap: tokens that are not special, such as `<think>`, are control tokens only if the template
writes them. Gemma has an added token for each HTML tag, and those stay what they are in inference.
What an assistant says is marked for special tokens alone, since its `<think>` is what it generates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmtrain.data.chat.rows import REASONING, Message

if TYPE_CHECKING:
    import tokenizers

START, END = "\U000f0000", "\U000f0001"
_REMOVE = {ord(START): None, ord(END): None}
_SPOKEN = ("content", *REASONING)


@dataclass(frozen=True, slots=True)
class Control:
    """The strings that are control tokens.

    special: matches a special token or a mark
    every: matches those, and any other added token that the template writes
    """

    special: re.Pattern[str]
    every: re.Pattern[str]

    def find(self, messages: Iterable[Message], tools: Any) -> str | None:
        """Return a control token or a mark in messages and tools; None if there is none."""
        for message in messages:
            for name, value in message.items():
                pattern = self._pattern(message, name, alone=False)
                for text in _strings(value):
                    if found := pattern.search(text):
                        return found.group()
        matches = (self.every.search(text) for text in _strings(tools))
        return next((found.group() for found in matches if found), None)

    def mark(
        self, messages: Iterable[Message], tools: Any, *, special: bool
    ) -> tuple[list[Message], Any]:
        """Return messages and tools with marks around control tokens.

        special: mark special tokens alone
        """
        pattern = self.special if special else self.every
        return [
            {
                name: _changed(value, _marking(self._pattern(message, name, alone=special)))
                for name, value in message.items()
            }
            for message in messages
        ], _changed(tools, _marking(pattern))

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


def without_marks(value: Any) -> Any:
    """Remove all marks from every string in messages or tools."""
    return _changed(value, unmark)


def longest(words: Mapping[str, str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of these words at the leftmost place.

    A tokenizer may have a thousand added tokens, so the pattern is a tree of their characters.

    words: word → a pattern for what belongs to it behind it
    """
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = words[word]
    return re.compile(_branches(tree) if tree else "(?!)")


def _branches(node: Mapping[str, Any]) -> str:
    """Return the pattern of a tree: continuations first, since the longest match is wanted."""
    found = []
    for character, child in sorted(node.items(), reverse=True):  # "", the end of a word, is last
        chain = character
        while len(child) == 1 and "" not in child:
            ((character, child),) = child.items()
            chain += character
        found.append(re.escape(chain) + _branches(child) if character else child)
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"


def _marking(pattern: re.Pattern[str]) -> Callable[[str], str]:
    return lambda text: pattern.sub(rf"{START}\g<0>{END}", unmark(text))


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with every string in it changed, keys excepted."""
    match value:
        case str():
            return change(value)
        case dict():
            return {name: _changed(one, change) for name, one in value.items()}
        case list() | tuple():
            return [_changed(one, change) for one in value]
    return value


def _strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for one in value.values():
                yield from _strings(one)
        case list() | tuple():
            for one in value:
                yield from _strings(one)
