r"""Finds how a template writes turns: what precedes an answer, how a call, and what ends both.

A question is rendered twice, with two answers. What follows both must begin with one added token,
white space aside. It need not be the tokenizer's `eos_token`:

    <|im_start|>assistant\n<think>\n\n</think>\n\n{answer}<|im_end|>\n
    └─────── prompt ──────┘└──────── X ──────────┘        └ end of turn

If X, what is between the prompt and the answer, is added tokens and white space, the model need not
generate it: it becomes part of the prompt (`lead`). Any other X is trained: the blank that Mistral
writes before an answer, for example, belongs to the answer's first token.

A call of a tool may end with another token, so it is rendered, too. If the answer's token does not
follow it, the call ends with the last token that is written with it:

    <|start|>assistant to=functions.weather …{"town": "Ulm"}<|call|>

Some templates write no end at all: there the first token of the next message ends a turn, unless
the assistant's own messages begin with it, too. A message of the user behind an answer and a result
behind a call show it, and it is put behind every turn:

    <|assistant|>\n{answer}<|user|>    <|assistant|>\n<tool_call>…</tool_call><|observation|>

Arguments of calls are objects for most templates; some only write strings of JSON (`find_call`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from llmtrain.data.chat.encode import START, longest
from llmtrain.data.chat.rows import BadRowError, Message
from llmtrain.data.chat.template import CALLED, TOWN, Tools
from llmtrain.errors import Problem, UserError
from llmtrain.types import JsonObject

AUTO = "auto"
_ANSWERS = ("Certainly, the first.", "Perhaps another one?")
_QUESTION: Message = {"role": "user", "content": "Which one?"}
_NEXT: Message = {"role": "user", "content": "And then?"}
_KEY = "chat.end_of_turn"

Arguments = Literal["object", "string"]
Write = Callable[[Sequence[Message], Tools, bool], str]  # …, add_generation_prompt → text


@dataclass(frozen=True, slots=True)
class EndOfTurn:
    """How turns of the assistant end and begin.

    text, id: the token that ends an answer
    lead: what is appended to every prompt; "" = nothing
    header: what else the template writes before an answer, which is trained; "" = nothing
    others: further tokens that end a turn, a call of a tool for example, with their ids
    after_answer: what is put behind an answer to end it, up to the first token of the message that
        follows; "" = the template ends answers itself
    after_call: the same for a call of a tool
    """

    text: str
    id: int
    lead: str
    header: str
    others: Mapping[str, int] = field(default_factory=dict)
    after_answer: str = ""
    after_call: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """All tokens that end a turn."""
        return (self.text, *self.others)

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of all tokens that end a turn."""
        return (self.id, *self.others.values())

    def to_json(self) -> JsonObject:
        """Return the fields for the manifest; what most templates do not have is left out."""
        optional = ("others", "after_answer", "after_call")
        fields = asdict(self).items()
        return {name: value for name, value in fields if value or name not in optional}

    def closing(self, message: Message, following: Message | None) -> str:
        """Return what is put behind a message to end it; "" if the template has ended it.

        following: the message behind it, whose role decides; without one it is what the message
            asks for: a call the tool's, an answer the user's
        """
        if message["role"] != "assistant":
            return ""
        end, other, role = self.after_answer, self.after_call, "tool"
        if message.get("tool_calls"):
            end, other, role = self.after_call, self.after_answer, "user"
        turned = end and other and following is not None and following["role"] == role
        return other if turned else end

    def stop(self, rendered: str) -> int:
        """Return where the last end-of-turn token of a text ends, or -1 if it has none.

        Marked ones are content.
        """
        return max(_stop(rendered, token) for token in self.texts)


class Call(NamedTuple):
    """How a template writes the call of a tool.

    arguments: what it takes them as
    messages: those of `CALLED`, with arguments as it takes them
    text: of a question and the call; "" = it writes no calls
    """

    arguments: Arguments
    messages: Sequence[Message]
    text: str


NO_CALL = Call("object", CALLED.messages, "")


def find_call(write: Write) -> Call:
    """Find how a template takes the arguments of calls.

    As strings, if it writes objects not at all or as Python shows them. write: renders messages
    """
    objects, strings = CALLED.messages, CALLED.with_strings
    call = Call("object", objects, _text_of_call(write, objects))
    if TOWN in call.text and str(_arguments(objects)) not in call.text:
        return call
    text = _text_of_call(write, strings)
    return Call("string", strings, text) if _arguments(strings) in text else call


def find_end_of_turn(
    write: Write, tokens: Mapping[str, int], named: str | Sequence[str], call: Call = NO_CALL
) -> EndOfTurn:
    """Find the end-of-turn tokens of a template.

    write: renders messages
    tokens: added token → id
    named: the value of `chat.end_of_turn`; "auto" = they are detected
    call: how it writes calls; if it writes none, turns with calls end as answers do
    Raises UserError if the template writes no such token, or not the named ones.
    """
    try:
        prompt = write([_QUESTION], None, True)
        texts = [write([_QUESTION, _answer(answer)], None, False) for answer in _ANSWERS]
    except BadRowError as error:
        expected = f"a template that renders a question and an answer ({error.why})"
        raise UserError(Problem("chat.template", None, expected)) from error
    ends = {t.rpartition(a)[2] for t, a in zip(texts, _ANSWERS, strict=True) if a in t}
    if len(ends) != 1 or _ANSWERS[0] not in texts[0]:
        expected = "a template that writes every answer, and the same after each"
        raise UserError(Problem("chat.template", None, expected))
    answer = _Behind(ends.pop(), "")
    if not answer.own.strip():
        talk = [_QUESTION, _answer(_ANSWERS[0]), _NEXT]
        answer = _with_next(write, talk, None, _ANSWERS[0], answer.own, tokens)
    names = [named] if isinstance(named, str) else named
    chosen = [_first(answer, tokens)] if named == AUTO else list(names)
    called = _Behind("", "")  # nothing, if the template writes no calls
    if TOWN in call.text:
        called = _Behind(call.text.rpartition(TOWN)[2], "")
        if not called.is_ended(chosen):
            called = _with_next(write, call.messages, CALLED.tools, TOWN, called.own, tokens)
    if named == AUTO:
        chosen += _last(called, answer, chosen, tokens)
    else:
        chosen = _checked(names, answer, called, tokens)
    before = texts[0].rpartition(_ANSWERS[0])[0]
    between = before.removeprefix(prompt) if before.startswith(prompt) else ""
    # Whether it is at least one added token, and else white space.
    rest, count = _any_of(tokens).subn("", between)
    is_lead = count > 0 and not rest.strip()
    return EndOfTurn(
        chosen[0],
        tokens[chosen[0]],
        between if is_lead else "",
        "" if is_lead else between,
        {token: tokens[token] for token in chosen[1:]},
        answer.closing(chosen),
        called.closing(chosen),
    )


class _Behind(NamedTuple):
    """What is behind an answer or a call.

    own: what the template writes with it
    following: what it writes of the next message, up to its first token; "" = that ends no turn
    """

    own: str
    following: str

    def is_ended(self, tokens: Sequence[str]) -> bool:
        """Return whether the template writes one of these tokens itself."""
        return any(token in self.own for token in tokens)

    def closing(self, tokens: Sequence[str]) -> str:
        """Return what has to be put behind a turn, so that one of these tokens ends it."""
        ends = not self.is_ended(tokens) and self.following.lstrip() in tokens
        return self.following if ends else ""


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _arguments(messages: Sequence[Message]) -> Any:
    return messages[1]["tool_calls"][0]["function"]["arguments"]


def _text_of_call(write: Write, messages: Sequence[Message]) -> str:
    """Return the text of a question and a call; "" if the template cannot write it."""
    with suppress(BadRowError):
        return write(messages[:2], CALLED.tools, False)
    return ""


def _with_next(
    write: Write,
    messages: Sequence[Message],
    tools: Tools,
    content: str,
    suffix: str,
    tokens: Mapping[str, int],
) -> _Behind:
    """Return what is behind a turn, with what the template writes of the last message.

    That is nothing if it begins with no token, or with one that begins the assistant's messages.

    messages: a question, a turn, and what follows
    content: the end of what the turn says
    suffix: what the template writes behind it, if nothing follows
    """
    try:
        header = write(messages[:1], tools, True).rpartition(messages[0]["content"])[2]
        behind = write(messages, tools, False).rpartition(content)[2]
    except BadRowError:
        return _Behind(suffix, "")
    rest = behind.removeprefix(suffix)
    token = _any_of(tokens).match(rest.lstrip())
    if not behind.startswith(suffix) or token is None or token.group() in header:
        return _Behind(suffix, "")
    return _Behind(suffix, rest[: len(rest) - len(rest.lstrip())] + token.group())


def _first(answer: _Behind, tokens: Mapping[str, int]) -> str:
    """Return the token that ends an answer."""
    match = _any_of(tokens).match((answer.own + answer.following).lstrip())
    if match is None:
        expected = (
            f"no end-of-turn token after the answer (the template writes {answer.own!r} there)"
        )
        raise UserError(
            Problem("chat.template", None, f"a token that ends a turn: {expected}", f"set {_KEY}")
        )
    return match.group()


def _last(
    call: _Behind, answer: _Behind, ends: Sequence[str], tokens: Mapping[str, int]
) -> list[str]:
    """Return the token that ends a call, if it is none of `ends`."""
    if call.is_ended(ends):
        return []
    written = [token for token in _visible(tokens) if call.own.rstrip().endswith(token)]
    closing, following = max(written, key=len, default=""), call.following.lstrip()
    last = following or closing if answer.following else closing or following
    return [last] if last and last not in ends else []


def _checked(
    named: Sequence[str], answer: _Behind, call: _Behind, tokens: Mapping[str, int]
) -> list[str]:
    """Return the named tokens, those that end an answer first."""
    for token in named:
        if token not in tokens:
            raise UserError(Problem(_KEY, token, "an added token of the tokenizer"))
    after_answer, after_call = answer.own + answer.following, call.own + call.following
    first = [token for token in named if token in after_answer]
    wrong = [token for token in named if token not in first and token not in after_call]
    if wrong or not first:
        expected = f"a token that the template writes after an answer; it writes {after_answer!r}"
        if after_call and first:
            expected = (
                "a token that the template writes after an answer or a call of a tool; "
                f"it writes {after_answer!r} and {after_call!r}"
            )
        raise UserError(Problem(_KEY, next(iter(wrong), named[0]), expected))
    return list(dict.fromkeys([*first, *named]))


def _any_of(tokens: Mapping[str, int]) -> re.Pattern[str]:
    return longest(dict.fromkeys(_visible(tokens), ""))


def _visible(tokens: Mapping[str, int]) -> list[str]:
    return [token for token in tokens if token.strip()]


def _stop(rendered: str, token: str) -> int:
    """Return where the last of this token that is not marked ends, or -1."""
    at = rendered.rfind(token)
    while at > 0 and rendered[at - 1] == START:
        at = rendered.rfind(token, 0, at)
    return at + len(token) if at >= 0 else -1
