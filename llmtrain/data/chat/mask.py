r"""Decides which tokens of a conversation are trained: those that the model would have to generate.

For turn i of the assistant, P is the prompt that inference feeds, and F the text with its answer:

    P = render(messages[:i], add_generation_prompt=True)
    F = render(messages[:i+1])

    <|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n
    └──────────────────────── P ───────────────────────────┘└── span ───┘

F begins with P; the span ends with the last end-of-turn token, which is trained like the answer.
Where a template leaves that to the next message (`EndOfTurn.closing`), the token is put behind F.
Turns whose text up to there begins the text of the last turn share one sequence. A template may
write history in another way than the newest answer, without its reasoning for example; such a turn
has a sequence of its own.

The trap: the ids of P need not begin the ids of F, since the answer's first characters may merge
with the prompt's last ones. Such a turn *straddles*: in a sequence of its own, its prompt and its
answer are encoded apart. So the ids before a span are always those that inference feeds.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from llmtrain.data.chat.encode import OffsetEncoder, unmark
from llmtrain.data.chat.end_of_turn import EndOfTurn
from llmtrain.data.chat.rendering import Text
from llmtrain.data.chat.rows import REASONING, BadRowError, Message
from llmtrain.data.chat.template import Beginnings

_NEEDED = 20  # characters at the end of a message that must be in the text, white space aside
_NOTHING = Text("", 0, "")
_WORTH_NOTING = 4  # turns: from so many on it is faster to note the rounds of a template
_SHOWN = 24  # characters of a text in a message


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A sequence to train on.

    trained: for each id, whether it is trained
    """

    ids: list[int]
    trained: list[bool]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the assistant that is trained.

    number: counted from 1
    prompt: what inference feeds
    text: the prompt and the answer, up to the end-of-turn token
    """

    number: int
    prompt: Text
    text: Text


def find_turns(
    beginnings: Beginnings,
    messages: Sequence[Message],
    trained: Sequence[int],
    end: EndOfTurn,
    hopeless: Callable[[int], bool],
) -> list[Turn]:
    """Return the turns at these indices of messages, in order.

    beginnings: renders them
    hopeless: whether the prompt of the turn at an index is too long in any case. Later turns are
        left out, if the template has to be run on all messages for each of them.
    Raises BadRowError if the template cannot render one, drops text, or does not write the prompt
    in front of the answer.
    """
    turns: list[Turn] = []
    assistants = list(accumulate(message["role"] == "assistant" for message in messages))
    checked, before = 0, _NOTHING
    if len(trained) >= _WORTH_NOTING:
        beginnings.note(trained[-1] + 1)
    for index in trained:
        number = assistants[index]
        prompt = beginnings.render(index, True)
        following = messages[index + 1] if index + 1 < len(messages) else None
        closing = end.closing(messages[index], following)
        whole = beginnings.render(index + 1, False).plus(closing)
        known, start = (checked, len(before)) if prompt.startswith(before) else (0, 0)
        # A prompt must have every message, an assistant's reasoning excepted. If one is not where
        # it is expected, the rest is looked through, too.
        try:
            _require(unmark(prompt.part(start, len(prompt))), messages[known:index], number)
        except BadRowError:
            _require(unmark(str(prompt)), messages[known:index], number)
        checked, before = index, prompt
        turn = _turn(number, prompt, whole, end)
        _require_answer(turn, messages[index])
        turns.append(turn)
        if beginnings.slow and hopeless(index):
            break
    return turns


def group(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Return turns by the text that they share, which is that of the last turn of each group."""
    groups = []
    left = list(turns)
    while left:
        text = left[-1].text
        begin = [text.startswith(turn.text) for turn in left]
        groups.append([turn for turn, shared in zip(left, begin, strict=True) if shared])
        left = [turn for turn, shared in zip(left, begin, strict=True) if not shared]
    return groups[::-1]


def to_sequences(
    encoder: OffsetEncoder,
    turns: Sequence[Turn],
    end: EndOfTurn,
    counts: Counter[str],
    limit: float,
) -> Iterator[TokenSequence]:
    """Yield the sequences of turns that share a text: one for each that straddles, and one.

    limit: a turn that straddles behind so many ids is dropped
    """
    encoded = encoder.encode(str(turns[-1].text))
    trained = [False] * len(encoded.ids)
    last = 0
    for turn in turns:
        first = encoder.boundary(encoded, len(turn.prompt))
        stop = encoder.boundary(encoded, len(turn.text))
        if first is None or stop is None:
            counts["straddles"] += 1
            if encoder.ids_before(encoded, len(turn.prompt)) < limit:
                # Its prompt and its answer are encoded apart.
                prompt = encoder.encode(str(turn.prompt)).ids
                answer = encoder.encode(_span(turn), "glued").ids
                assert answer[-1] in end.ids, "the last token of a turn ends it"
                flags = [False] * len(prompt) + [True] * len(answer)
                yield token_sequence([*prompt, *answer], flags)
            else:
                counts["dropped"] += 1
            continue
        assert encoded.ids[stop - 1] in end.ids, "the last token of a turn ends it"
        trained[first:stop] = [True] * (stop - first)
        last = stop
    if last:
        yield token_sequence(encoded.ids[:last], trained[:last])


def token_sequence(ids: list[int], trained: list[bool]) -> TokenSequence:
    """Return a sequence, its first id not trained: nothing precedes it."""
    return TokenSequence(ids, [False, *trained[1:]])


def _turn(number: int, prompt: Text, whole: Text, end: EndOfTurn) -> Turn:
    if not whole.startswith(prompt):
        fed, text = unmark(str(prompt)), unmark(str(whole))
        pairs = enumerate(zip(fed, text, strict=False))
        at = next((n for n, (a, b) in pairs if a != b), min(len(fed), len(text)))
        why = (
            f"turn {number}: generation prompt ends {fed[at:][:_SHOWN]!r} but training text "
            f"continues {text[at:][:_SHOWN]!r}; try chat.template_kwargs"
        )
        raise BadRowError("prompt", why)
    behind = len(prompt) + len(end.lead)
    if end.lead and whole.part(len(prompt), behind) == end.lead:
        prompt = whole.until(behind)
    # Looked through is what is behind the prompt, and what before it may belong to the token.
    start = max(0, len(prompt) - max(map(len, end.texts)) - 1)
    stop = end.stop(whole.part(start, len(whole)))
    if stop <= 0 or start + stop <= len(prompt):
        why = f"turn {number}: no end-of-turn token after the answer; set chat.end_of_turn"
        raise BadRowError("end_of_turn", why)
    return Turn(number, prompt, whole.until(start + stop))


def _span(turn: Turn) -> str:
    """Return what is trained of a turn."""
    return turn.text.part(len(turn.prompt), len(turn.text))


def _require_answer(turn: Turn, message: Message) -> None:
    """Raise BadRowError if a turn's span lacks what the assistant says in it."""
    span = unmark(_span(turn))
    reasoning, answer = split_reasoning(message)
    _require_calls(span, message, turn.number)
    for what, text in (("text", answer), ("reasoning", reasoning)):
        if not _holds(span, text):
            why = f"turn {turn.number}: the template drops the assistant's {what}"
            raise BadRowError("dropped", why)


def _require(prompt: str, messages: Sequence[Message], number: int) -> None:
    for message in messages:
        _require_calls(prompt, message, number)
        if not _holds(prompt, split_reasoning(message)[1]):
            role = message["role"]
            why = f"turn {number}: the template drops the text of a message before it ({role})"
            raise BadRowError("dropped", why)


def _require_calls(text: str, message: Message, number: int) -> None:
    for call in message.get("tool_calls", ()):
        name = call["function"]["name"]
        if unmark(name) not in text:
            why = f"turn {number}: the template drops the tool call {name!r}"
            raise BadRowError("dropped", why)


def split_reasoning(message: Message) -> tuple[str, str]:
    """Return the reasoning in a message, and the text after it."""
    content = unmark(message["content"])
    if message["role"] != "assistant":
        return "", content
    thought, _, answer = content.rpartition("</think>")
    given = next((message[name] for name in REASONING if message.get(name)), "")
    return unmark(given) or thought.rpartition("<think>")[2], answer


def _holds(text: str, content: str) -> bool:
    """Return whether the end of what was said is in a text, as it is or inside a JSON string."""
    content = content.strip()
    if content in text:
        return True
    squeezed = "".join(text.split())
    forms = (content, json.dumps(content, ensure_ascii=False)[1:-1])
    return any("".join(form.split())[-_NEEDED:] in squeezed for form in forms)
