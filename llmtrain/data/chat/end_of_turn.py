r"""Finds the token with which the assistant ends its turn, and what a template puts before answers.

A conversation is rendered twice, with two answers. What follows both must begin with one added
token, white space aside. It need not be the tokenizer's `eos_token`:

    <|im_start|>assistant\n<think>\n\n</think>\n\n{answer}<|im_end|>\n
    └─────── prompt ──────┘└──────── X ──────────┘        └ end of turn

If X, what is between the prompt and the answer, is added tokens and white space, the model need not
generate it: it becomes part of the prompt (`lead`). Any other X is trained: the blank that Mistral
writes before an answer, for example, belongs to the answer's first token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llmtrain.data.chat.control import START, longest
from llmtrain.data.chat.rows import BadRowError, Message
from llmtrain.errors import Problem, UserError

AUTO = "auto"
_ANSWERS = ("Certainly, the first.", "Perhaps another one?")
_KEY = "chat.end_of_turn"

Write = Callable[[Sequence[Message], bool], str]  # messages, add_generation_prompt → text


@dataclass(frozen=True, slots=True)
class EndOfTurn:
    """How a turn of the assistant ends and begins.

    text, id: the token that ends it
    lead: what is appended to every prompt; "" = nothing
    header: what else the template writes before an answer, which is trained; "" = nothing
    """

    text: str
    id: int
    lead: str
    header: str

    def stop(self, rendered: str) -> int:
        """Return where the last end-of-turn token of a text ends, or -1 if it has none.

        Marked ones are content.
        """
        at = rendered.rfind(self.text)
        while at > 0 and rendered[at - 1] == START:
            at = rendered.rfind(self.text, 0, at)
        return at + len(self.text) if at >= 0 else -1


def find_end_of_turn(write: Write, tokens: Mapping[str, int], named: str) -> EndOfTurn:
    """Find the end-of-turn token of a template.

    write: renders messages
    tokens: added token → id
    named: the value of `chat.end_of_turn`; "auto" = it is detected
    Raises UserError if there is none, or the template does not write the named one.
    """
    question: Message = {"role": "user", "content": "Which one?"}
    try:
        prompt = write([question], True)
        texts = [
            write([question, {"role": "assistant", "content": answer}], False)
            for answer in _ANSWERS
        ]
    except BadRowError as error:
        expected = f"a template that renders a question and an answer ({error.why})"
        raise UserError(Problem("chat.template", None, expected)) from error
    ends = {t.rpartition(a)[2] for t, a in zip(texts, _ANSWERS, strict=True) if a in t}
    if len(ends) != 1 or _ANSWERS[0] not in texts[0]:
        expected = "a template that writes every answer, and the same after each"
        raise UserError(Problem("chat.template", None, expected))
    token = _token(ends.pop(), tokens, named)
    before = texts[0].rpartition(_ANSWERS[0])[0]
    between = before.removeprefix(prompt) if before.startswith(prompt) else ""
    is_lead = _is_lead(between, tokens)
    return EndOfTurn(token, tokens[token], between if is_lead else "", "" if is_lead else between)


def _token(end: str, tokens: Mapping[str, int], named: str) -> str:
    if named != AUTO:
        if named not in tokens:
            raise UserError(Problem(_KEY, named, "an added token of the tokenizer"))
        if named not in end:
            expected = f"a token that the template writes after an answer; it writes {end!r}"
            raise UserError(Problem(_KEY, named, expected))
        return named
    found = longest(dict.fromkeys(_visible(tokens), "")).match(end.lstrip())
    if found is None:
        expected = f"no end-of-turn token after the answer (the template writes {end!r} there)"
        raise UserError(
            Problem("chat.template", None, f"a token that ends a turn: {expected}", f"set {_KEY}")
        )
    return found.group()


def _is_lead(between: str, tokens: Mapping[str, int]) -> bool:
    """Return whether a text is at least one added token, and else white space."""
    rest, count = longest(dict.fromkeys(_visible(tokens), "")).subn("", between)
    return count > 0 and not rest.strip()


def _visible(tokens: Mapping[str, int]) -> list[str]:
    return [token for token in tokens if token.strip()]
