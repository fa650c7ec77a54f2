r"""Reads a row of preference data: a prompt and two answers to it, or an answer and its label.

A pair becomes two conversations that share the messages of the prompt, none of which is trained:

    {"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."}   strings: no template is applied
    {"prompt": [U], "chosen": [A], "rejected": [B]}          messages; the prompt may be a string
    {"chosen": [U, A], "rejected": [U, B]}                   conversations: the prompt is what both
    {"chosen": "\n\nHuman: …\n\nAssistant: …", …}         begin with; transcripts become messages

and as `rows.py` lists them. Of feedback the last answer is judged, those before it are context.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from operator import eq
from typing import NamedTuple

from llmtrain.data.chat import rows
from llmtrain.types import JsonMapping, JsonObject

ANSWERS = ("chosen", "rejected", "preferred_output", "non_preferred_output")
_OURS = ANSWERS[:2]
_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_BEGINS = ("\n\nHuman:", "\n\nAssistant:")
_ROLES = {"Human": "user", "Assistant": "assistant"}


class Judged(NamedTuple):
    """An answer, with the conversation before it, and whether it is a good one."""

    example: rows.Example
    desirable: bool


def examples(
    text: str, form: str, columns: Mapping[str, str] = rows.SAME, reading: int = rows.READING
) -> Sequence[rows.Example]:
    """Return what is said in a row of any form: one conversation, of a pair two.

    text, form, columns, reading: as for `rows.to_example`
    Raises BadRowError.
    """
    match rows.answers_of(form):
        case "pairs":
            return to_pair(text, form, columns)
        case "feedback":
            return [to_judged(text, form, columns).example]
    return [rows.to_example(text, form, columns, reading)]


def to_pair(
    text: str, form: str, columns: Mapping[str, str] = rows.SAME
) -> tuple[rows.Example, rows.Example]:
    """Return the chosen answer and the rejected one, each with its prompt.

    text, form, columns: as for `rows.to_example`
    Raises BadRowError.
    """
    row = _read(text, form, columns)
    prompt, answers = _parts(row, form)
    for name, answer in zip(_OURS, answers, strict=True):
        if not answer or (isinstance(answer, str) and not answer.strip()):
            raise rows.BadRowError("answer", f"{name} is blank")
        if isinstance(answer, list) and (role := _role(answer[0])) != "assistant":
            why = f"{name} begins with a message of role {rows.show(role)}, not with an answer"
            raise rows.BadRowError("difference", why)
    if not prompt and isinstance(prompt, list):
        raise rows.BadRowError("prompt", "it has no prompt before its answers")
    chosen, rejected = (
        rows.parse({**row, "prompt": prompt, "completion": answer}, "prompt_completion")
        for answer in answers
    )
    one, other = chosen.text or chosen.messages, rejected.text or rejected.messages
    if one == other:
        raise rows.BadRowError("equal", "chosen and rejected are equal")
    if chosen.text is None and all(map(eq, chosen.messages, rejected.messages)):
        raise rows.BadRowError("equal", "one of chosen and rejected is the beginning of the other")
    return chosen, rejected


def to_judged(text: str, form: str, columns: Mapping[str, str] = rows.SAME) -> Judged:
    """Return the judged answer of a row of feedback, with the conversation before it.

    text, form, columns: as for `rows.to_example`
    Raises BadRowError.
    """
    row = _read(text, form, columns)
    label = row.get("label")
    label = rows.WRITTEN.get(label, label) if isinstance(label, str) else label
    if label not in (0, 1):  # True and False are equal to these
        raise rows.BadRowError("label", f"label is {rows.show(label)}, not true or false")
    inner = rows.chat_form([name for name, value in row.items() if value is not None])
    if inner is None:
        why = "it has neither messages, conversations, prompt and completion, nor an instruction"
        raise rows.BadRowError("messages", why)
    example = rows.parse(row, inner)
    if example.text is None:
        last = len(example.messages) - 1
        if example.messages[last]["role"] != "assistant":
            role = example.messages[last]["role"]
            raise rows.BadRowError("answer", f"its last message is of role {role!r}, not an answer")
        if inner != "prompt_completion":  # else all of the completion is the answer
            example = replace(example, untrained=example.untrained | {*range(last)})
    return Judged(example, bool(label))


def _read(text: str, form: str, columns: Mapping[str, str]) -> JsonObject:
    row = rows.read_row(text, columns)
    if not rows.is_named(form, columns):
        rows.refuse_masks(row, "the row")
    return row


def _parts(row: JsonObject, form: str) -> tuple[object, Sequence[object]]:
    """Return the prompt of a row, and both answers: all strings, or all lists of messages."""
    match form:
        case "pairs_openai":
            given = rows.parse_json(row.get("input"), "input")
            if not isinstance(given, dict):
                raise rows.BadRowError("prompt", f"input is {rows.show(given)}, not an object")
            for name in ("tools", "functions"):
                row[name] = row.get(name) or given.get(name)
            return rows.list_of(given, "messages"), [_messages(row, name) for name in ANSWERS[2:]]
        case "pairs_sharegpt":
            prompt = [rows.of_sharegpt(one) for one in rows.list_of(row, "conversations")]
            return prompt, [[*map(rows.of_sharegpt, _messages(row, name))] for name in _OURS]
        case "pairs_alpaca":
            for name in _OURS:
                if not isinstance(row.get(name), str):
                    why = f"{name} is {rows.show(row.get(name))}, not a string"
                    raise rows.BadRowError("content", why)
            both = [rows.of_alpaca({**row, "output": row[name]}) for name in _OURS]
            return both[0][:-1], [one[-1:] for one in both]
    return _of_pairs(row)


def _of_pairs(row: JsonMapping) -> tuple[object, Sequence[object]]:
    prompt, given = row.get("prompt"), [row.get(name) for name in _OURS]
    for name, one in zip(_OURS, given, strict=True):
        if one is None:
            raise rows.BadRowError("answer", f"{name} is null")
    texts = [one for one in given if isinstance(one, str)]
    if len(texts) == 2:
        if all(one.startswith(_BEGINS) for one in texts):
            return _shared([*map(_of_transcript, texts)])
        if isinstance(prompt, str):
            return prompt, texts
        if isinstance(prompt, list):
            return prompt, [[{"role": "assistant", "content": one}] for one in texts]
        if not all(one.lstrip().startswith("[") for one in texts):  # not JSON either
            why = "chosen and rejected are strings without a prompt; name the prompt"
            raise rows.BadRowError("prompt", f"{why}: a column `prompt`, or data.sources.N.columns")
    answers = [_messages(row, name) for name in _OURS]
    if any(_role(one[0]) != "assistant" for one in answers if one):
        return _shared(answers)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return rows.list_of({"prompt": prompt or []}, "prompt"), answers


def _messages(row: JsonMapping, name: str) -> list[object]:
    """Return the messages of an answer, which may be a single one."""
    value = rows.parse_json(row.get(name), name)
    if value is None:
        raise rows.BadRowError("answer", f"{name} is null")
    if isinstance(value, dict) and not all(isinstance(one, list) for one in value.values()):
        return [value]
    return rows.list_of({name: value}, name)


def _shared(conversations: Sequence[Sequence[object]]) -> tuple[object, Sequence[object]]:
    """Return the messages with which both conversations begin, and what follows in each."""
    chosen, rejected = conversations
    one, other = ([*map(rows.without_none, messages)] for messages in (chosen, rejected))
    shared = sum(1 for _ in takewhile(bool, map(eq, one, other)))
    if shared == min(len(one), len(other)):
        both = "equal" if len(one) == len(other) else "the beginning of one another"
        raise rows.BadRowError("equal", f"chosen and rejected are {both}")
    roles = [_role(one[shared]), _role(other[shared])]
    if roles != ["assistant"] * 2 or not shared:
        why = f"chosen and rejected differ first in message {shared + 1}, which is no answer"
        raise rows.BadRowError("difference", why)
    return chosen[:shared], [chosen[shared:], rejected[shared:]]


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None


def _of_transcript(text: str) -> list[object]:
    pieces = _TURN.split(text)[1:]
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    return [{"role": _ROLES[who], "content": what} for who, what in turns]
