"""Reads a row of chat data: its form, its columns, and the conversation in it.

A row travels as JSON text, like the text of any document: the line of a JSONL file, or the form's
columns of a parquet row as one JSON object (`as_text`). `to_example` makes a conversation of it.

    messages            {"messages": [{"role": "user", "content": "Hi?"}, …]}
    conversations       {"conversations": [{"from": "human", "value": "Hi?"}, …]}      (ShareGPT)
    prompt_completion   {"prompt": "Hi?", "completion": "Yes."}, or both lists of messages
    alpaca              {"instruction": "Say yes.", "input": "", "output": "Yes."}

Pairs of answers, and answers with a label, are read by `pairs.py`; which columns they have stands
here, beside those of conversations:

    pairs               {"prompt": …, "chosen": …, "rejected": …}, or whole conversations
    pairs_sharegpt      {"conversations": […], "chosen": {"from": "gpt", …}, "rejected": {…}}
    pairs_alpaca        {"instruction": …, "input": …, "chosen": …, "rejected": …}
    pairs_openai        {"input": {"messages": […]}, "preferred_output": […], …}
    feedback            a conversation of any form, and its "label"

The text has the source's own column names. `columns` (`data.sources.N.columns`) maps our names to
these wherever they differ.

What a row excludes from training is context: `train: false` or `weight: 0`, of a message or of the
row. Rows with the judgement of an answer (`label`, `chosen` beside `rejected` …) are no rows of
conversations, since their bad answers would be trained like the good ones: they need a run with
`preference.loss`.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from llmtrain.config.schema import Answers
from llmtrain.errors import Problem, UserError
from llmtrain.types import JsonMapping, JsonObject

Message = JsonObject

READING = 2  # of rows: runs that began with another one continue with it
FORMS = ("messages", "conversations", "prompt_completion", "alpaca")
PAIR_FORMS = ("pairs_openai", "pairs_sharegpt", "pairs_alpaca", "pairs")  # which has a prompt
FEEDBACK = "feedback"
ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of an answer's reasoning
# Form → the columns that every row of it has, in our names. Feedback has those of a conversation,
# too: see `needed_columns`.
NEEDED = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "pairs_openai": ("input", "preferred_output", "non_preferred_output"),
    "pairs_sharegpt": ("conversations", "chosen", "rejected"),
    "pairs_alpaca": ("instruction", "chosen", "rejected"),
    "pairs": ("chosen", "rejected"),
    FEEDBACK: ("label",),
}
_ANY_FORM = ("tools", "functions", "system", "system_prompt", "train", "weight")
_OPTIONAL = {  # besides those
    "alpaca": ("input", "history"),
    "pairs_alpaca": ("input", "history"),
    "pairs": ("prompt",),
    FEEDBACK: (*chain(*(NEEDED[form] for form in FORMS)), "input", "history"),
}
_NAMES = frozenset(chain(*NEEDED.values(), *_OPTIONAL.values(), _ANY_FORM))
_SINCE_2 = ("history", "functions", "system_prompt", "weight")
# Names under which other programs judge the answers of a row: these are no examples to follow.
KTO_TAG = "kto_tag"  # LLaMA-Factory's name of `label`
JUDGEMENTS = ("label", KTO_TAG, "chosen", "rejected", "preferred_output", "non_preferred_output")
_PAIRS = ({"chosen", "rejected"}, {"preferred_output"}, {"non_preferred_output"})
# Names under which other programs say what is trained on, in ways that are not read here.
MASKS = (
    *("trainable", "trained", "loss", "loss_weight", "loss_mask", "mask", "masked"),
    *("training", "training_detail", "train_detail", "train_on_turn"),
)
# Keys of a message that are read here, and not only by the template.
MESSAGE_KEYS = (
    *("role", "content", "from", "value"),
    *("tool_calls", "function_call", "train", "weight"),
)
_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
# A boolean as a table of CSV has it.
WRITTEN = {"true": True, "false": False, "True": True, "False": False, "0": 0, "1": 1}
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair, which no tokenizer accepts
_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")
SAME: Mapping[str, str] = MappingProxyType({})  # every column has our name


class BadRowError(Exception):
    """A row that cannot be trained on.

    key: the kind of failure, one word, by which such rows are counted
    why: what is wrong with this row
    """

    def __init__(self, key: str, why: str) -> None:
        super().__init__(key, why)
        self.key = key
        self.why = why

    def __str__(self) -> str:
        return self.why


class PreferenceDataError(UserError):
    """The columns judge answers, as preference pairs and feedback do, in a run that trains none."""


@dataclass(frozen=True, slots=True)
class Example:
    """The content of a row.

    messages: the conversation; empty if `text` is given
    tools: the functions that may be called; None = none
    text: prompt and completion, if the row has them as strings; no template is applied to these
    untrained: indices of messages that the row excludes from training (`train: false`,
        `weight: 0`); any index excludes a `text`
    written: the messages with the arguments of calls as the row has them; () = as in `messages`,
        where they are what their JSON means
    """

    messages: Sequence[Message]
    tools: list[JsonObject] | None = None
    text: tuple[str, str] | None = None
    untrained: frozenset[int] = frozenset()
    written: Sequence[Message] = field(default=(), compare=False)

    @property
    def with_strings(self) -> Sequence[Message]:
        """The messages with the arguments of calls as strings of JSON, those of the row unchanged.

        OpenAI stores them so, and some templates write nothing else.
        """
        return [_with_arguments(one, _as_string) for one in self.written or self.messages]


def our_names(available: Iterable[str], columns: Mapping[str, str], key: str) -> tuple[str, ...]:
    """Return a source's columns under our names.

    key: the config key of `columns`, for the message
    Raises UserError for names that are not ours, and for columns that the source lacks.
    """
    names = list(available)
    known = f"our names ({', '.join(sorted(_NAMES))}), each with the source's column"
    existing = f"columns of the source ({', '.join(names)})"
    unknown, missing = columns.keys() - _NAMES, {*columns.values()} - {*names}
    for wrong, expected in ((unknown, known), (missing, existing)):
        if wrong:
            raise UserError(Problem(key, ", ".join(sorted(wrong)), expected))
    ours = {theirs: name for name, theirs in columns.items()}
    hidden = columns.keys() - set(columns.values())
    return tuple(ours.get(name, name) for name in names if name not in hidden)


def form_of(
    columns: Iterable[str],
    key: str,
    named: Mapping[str, str] = SAME,
    answers: Answers | None = None,
) -> str | None:
    """Return the form of a source with these columns (our names), or None if it has no form.

    key: the config key of `columns`, for the message
    named: its value, our names → the source's
    answers: what the run trains on; forms of that alone are looked for. None = conversations
    Raises PreferenceDataError for columns that judge the answers, see `refused_columns`.
    """
    names = set(columns)
    pairs = PAIR_FORMS[::-1] if "prompt" in names else PAIR_FORMS
    forms = {None: FORMS, "pairs": pairs, "feedback": (FEEDBACK,)}[answers]
    form = next((one for one in forms if names.issuperset(needed_columns(one, names))), None)
    if form is not None:
        if problem := refused_columns(form, names, key, named):
            raise PreferenceDataError(problem)
    elif answers is None and any(pair <= names for pair in _PAIRS):
        expected = "messages, conversations, prompt and completion, or instruction and output"
        pair = ", ".join(name for name in JUDGEMENTS if name in names)
        remedy = "preference.loss=dpo, which trains on pairs of answers"
        raise PreferenceDataError(Problem(key, pair, expected, remedy))
    return form


def answers_of(form: str | None) -> Answers | None:
    """Return what rows of a form are: pairs, feedback, or None for conversations and texts."""
    return "feedback" if form == FEEDBACK else "pairs" if form in PAIR_FORMS else None


def needed_columns(form: str, names: Collection[str]) -> tuple[str, ...]:
    """Return the columns that rows of a form need, in our names.

    names: the columns that there are; feedback needs those of the conversation that it has
    """
    if form != FEEDBACK:
        return NEEDED[form]
    return (*NEEDED[chat_form(names) or FORMS[0]], *NEEDED[form])


def chat_form(names: Collection[str]) -> str | None:
    """Return the first form of conversations whose columns are among these names."""
    return next((one for one in FORMS if set(names).issuperset(NEEDED[one])), None)


def refused_columns(
    form: str, columns: Collection[str], key: str, named: Mapping[str, str]
) -> Problem | None:
    """Return the problem of columns that judge the answers, or may say which are trained.

    There is none if `named`, the value of the config key, names all columns of the form: then the
    answers are wanted, whatever these columns say.
    """
    if is_named(form, named):
        return None
    needed = needed_columns(form, columns)
    mapping = ", ".join(f"{name}: {named.get(name, name)}" for name in needed)
    judgements = [name for name in JUDGEMENTS if name in columns]
    if judgements and answers_of(form) is None:
        expected = (
            "conversations without a judgement: such rows are feedback or preference pairs, and "
            "their bad answers would be trained like the good ones"
        )
        loss = "dpo" if any(pair <= set(columns) for pair in _PAIRS) else "kto"
        ways = f"preference.loss={loss}, or keep the good answers and drop these columns"
        remedy = f"{ways}; to train all: {key}={{{mapping}}}"
        return Problem(key, ", ".join(judgements), expected, remedy)
    if masks := [name for name in columns if name.lower() in MASKS]:
        expected = "conversations without a column that may say what is trained of them"
        remedy = f"write `train: true` or `false` in the rows; to train all: {key}={{{mapping}}}"
        return Problem(key, ", ".join(masks), expected, remedy)
    return None


def is_named(form: str, named: Collection[str]) -> bool:
    """Return whether `columns` names all columns of a form."""
    return set(named).issuperset(needed_columns(form, named))


def columns_of_form(form: str, reading: int = READING) -> tuple[str, ...]:
    """Return all columns that a form may have, in our names. reading: as for `to_example`"""
    every = (*NEEDED[form], *_OPTIONAL.get(form, ()), *_ANY_FORM)
    return tuple(name for name in every if reading > 1 or name not in _SINCE_2)


def contents(example: Example) -> str:
    """Return what is said in a conversation, without roles and template."""
    if example.text is not None:
        return "\n".join(example.text)
    return "\n".join(message["content"] for message in example.messages)


def as_text(row: JsonMapping) -> str:
    """Return a parquet row as one JSON text.

    Parquet gives every struct every field, so a field that is None was not there.
    """
    return json.dumps(without_none(row), ensure_ascii=False, default=str)


def to_example(
    text: str, form: str, columns: Mapping[str, str] = SAME, reading: int = READING
) -> Example:
    """Return the content of a row.

    text: a JSON object with the source's column names
    columns: our names → the source's, where they differ
    reading: 1 = as of runs that began before weights, history and functions were read, and
        judgements and masks were refused
    Raises BadRowError.
    """
    row = read_row(text, columns)
    if reading == 1:
        row = {key: value for key, value in row.items() if key not in _SINCE_2}
    elif not is_named(form, columns):
        if judgements := [name for name in JUDGEMENTS if row.get(name) is not None]:
            why = f"it has {', '.join(judgements)}: feedback and pairs are not trained as chat"
            raise BadRowError("judgement", why)
        refuse_masks(row, "the row")
    return parse(row, form, reading)


def read_row(text: str, columns: Mapping[str, str] = SAME) -> JsonObject:
    """Return a row under our names; a column that has another of our names has that one alone.

    text, columns: as for `to_example`
    Raises BadRowError for a row that is no object.
    """
    try:
        row = _load(text)
    except (ValueError, RecursionError) as error:
        raise BadRowError("json", f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadRowError("json", f"{show(row)}, not an object")
    theirs = set(columns.values()) - set(columns)
    ours = {ours: row.get(theirs) for ours, theirs in columns.items()}
    return {**{key: value for key, value in row.items() if key not in theirs}, **ours}


def refuse_masks(named: JsonMapping, what: str, *more: str) -> None:
    """Raise BadRowError for keys that may say what is trained, in ways that are not read here."""
    for name, value in named.items():
        if name.lower() in (*MASKS, *more) and value is not None:
            why = f"{what} has the key {name!r}, which may say what is trained; "
            raise BadRowError("mask", f"{why}write `train: true` or `false`, or remove it")


def parse(row: JsonObject, form: str, reading: int = READING) -> Example:
    """Return the conversation of a row under our names. Raises BadRowError."""
    example = _parse(row, form, reading)
    if row.get("train") is not False if reading == 1 else _is_trained(row):
        return example
    return replace(example, untrained=frozenset(range(max(len(example.messages), 1))))


def _parse(row: JsonMapping, form: str, reading: int) -> Example:
    match form:
        case "messages":
            return _conversation(row, list_of(row, "messages"), reading)
        case "conversations":
            messages = [of_sharegpt(one) for one in list_of(row, "conversations")]
            return _conversation(row, messages, reading)
        case "prompt_completion":
            prompt, completion = row.get("prompt"), row.get("completion")
            if isinstance(prompt, list) and isinstance(completion, list):
                return _conversation(row, [*prompt, *completion], reading, prompts=len(prompt))
            if not isinstance(prompt, str) or not isinstance(completion, str):
                both = f"prompt is {show(prompt)} and completion is {show(completion)}"
                expected = "both must be strings, or both lists of messages"
                raise BadRowError("prompt", f"{both}; {expected}")
            if not completion.strip():
                raise BadRowError("answer", "the completion is blank")
            for name in ("system", "system_prompt", "tools", "functions"):
                if row.get(name):
                    raise BadRowError("prompt", f"{name!r} beside a prompt that is a string")
            return Example((), None, (prompt, completion))
        case "alpaca":
            return _conversation(row, of_alpaca(row, reading), reading)
    raise AssertionError(form)


def _conversation(
    row: JsonMapping, raw: Sequence[object], reading: int, prompts: int = 0
) -> Example:
    """Return the conversation of these messages.

    prompts: how many of the first messages belong to a prompt, and so are not trained
    """
    written = [_message(one, reading) for one in raw]
    if not written:
        raise BadRowError("messages", "it has no messages")
    untrained = {n for n, one in enumerate(written) if not _is_trained(one, reading)}
    untrained |= {*range(prompts)}
    system = _one_of(row, "system", "system_prompt")
    if system and written[0]["role"] != "system":
        written.insert(0, _message({"role": "system", "content": system}, reading))
        untrained = {n + 1 for n in untrained}
    elif system and reading > 1 and written[0]["content"] != system:
        raise BadRowError("system", "its system column differs from its first message")
    # What the arguments of a call mean, which may be a string of JSON.
    messages = [
        _with_arguments(one, lambda given: parse_json(given, "arguments") if given else {})
        for one in written
    ]
    answers = (one for one in messages if one["role"] == "assistant")
    for turn, one in enumerate(answers, start=1):
        if not one["content"].strip() and not one.get("tool_calls"):
            raise BadRowError("answer", f"turn {turn}: the assistant's answer is blank")
    return Example(messages, _tools(row), None, frozenset(untrained), written)


def _one_of(row: JsonMapping, name: str, other: str) -> object:
    """Return the value of a column that has two names."""
    value = row.get(name)
    if value and row.get(other):
        raise BadRowError(name, f"it has both {name} and {other}, which mean the same")
    return value or row.get(other)


def _message(raw: object, reading: int) -> Message:
    if not isinstance(raw, dict):
        raise BadRowError("messages", f"a message is {show(raw)}, not an object")
    message = {name: value for name, value in raw.items() if value is not None}
    if reading > 1:
        refuse_masks(message, "a message", "label")
    if reading > 1 and message.get("role") == "function":  # OpenAI's older name
        message["role"] = "tool"
    role = message.get("role")
    if role not in ROLES:
        raise BadRowError("role", f"role {show(role)}; allowed {', '.join(ROLES)}")
    for name in REASONING:
        if not isinstance(message.get(name, ""), str):
            raise BadRowError("content", f"{name} is {show(message[name])}, not a string")
    calls = parse_json(message.pop("tool_calls", None), "tool_calls")
    call = None
    if reading > 1:  # OpenAI's older form
        call = parse_json(message.pop("function_call", None), "function_call")
    if call and calls:
        raise BadRowError("tool_calls", "a message has both tool_calls and function_call")
    calls = calls or ([{"function": call}] if call else None)
    if calls:
        if not isinstance(calls, list):
            raise BadRowError("tool_calls", f"tool_calls is {show(calls)}, not a list")
        message["tool_calls"] = [_call(one) for one in calls]
    message["content"] = _content(message.get("content", "" if calls else None), role)
    return message


def _content(raw: object, role: str) -> str:
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        raise BadRowError("content", f"the content of a message ({role}) is {show(raw)}")
    texts = []
    for part in raw:
        is_text = isinstance(part, dict) and part.get("type", "text") == "text"
        text = part.get("text") if is_text else part
        if not isinstance(text, str):
            why = f"a part of a message is {show(part)}; only text is trained"
            raise BadRowError("content", why)
        texts.append(text)
    return "".join(texts)


def _call(raw: Any) -> JsonObject:
    function = raw.get("function", raw) if isinstance(raw, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise BadRowError("tool_calls", f"a tool call has no name: {show(raw)}")
    arguments = function.get("arguments")
    given = arguments if isinstance(arguments, str) else arguments or {}
    rest = {} if function is raw else {k: v for k, v in raw.items() if v is not None}
    return {"type": "function", **rest, "function": {**function, "arguments": given}}


def _as_string(given: object) -> str:
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    """Return a message with the arguments of its calls changed."""
    if "tool_calls" not in message:
        return message
    functions = [(call, call["function"]) for call in message["tool_calls"]]
    calls = [
        {**call, "function": {**function, "arguments": change(function["arguments"])}}
        for call, function in functions
    ]
    return {**message, "tool_calls": calls}


def _tools(row: JsonMapping) -> list[JsonObject] | None:
    """Return the functions that may be called; OpenAI's older form has them without a type."""
    given = parse_json(_one_of(row, "tools", "functions"), "tools")
    if not given:
        return None
    tools = [parse_json(one, "tools") for one in given] if isinstance(given, list) else [given]
    for one in tools:
        if not isinstance(one, dict):
            raise BadRowError("tools", f"a tool is {show(one)}, not an object")
    if row.get("tools"):
        return tools
    return [
        one if isinstance(one.get("function"), dict) else {"type": "function", "function": one}
        for one in tools
    ]


def of_sharegpt(raw: object) -> object:
    """Return a message of ShareGPT with role and content; what is no object as it is."""
    if not isinstance(raw, dict):
        return raw
    speaker = raw.get("from", raw.get("role"))
    value = raw.get("value", raw.get("content"))
    role = _SHAREGPT.get(speaker, speaker) if isinstance(speaker, str) else speaker
    rest = {k: v for k, v in raw.items() if k not in ("from", "value")}
    if speaker != "function_call":
        return {**rest, "role": role, "content": value}
    calls = parse_json(value, "tool_calls")
    return {**rest, "role": role, "tool_calls": calls if isinstance(calls, list) else [calls]}


def of_alpaca(row: JsonMapping, reading: int = READING) -> list[Message]:
    """Return the messages of a row of alpaca. Raises BadRowError."""
    instruction, given = row.get("instruction"), row.get("input")
    if not isinstance(instruction, str):
        raise BadRowError("content", f"instruction is {show(instruction)}")
    if given is not None and not isinstance(given, str):
        raise BadRowError("content", f"input is {show(given)}")
    pairs = parse_json(row.get("history"), "history") or []
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise BadRowError("history", f"history is {show(pairs)}, not pairs of question and answer")
    asked = f"{instruction}\n\n{given}" if given else instruction
    if isinstance(row.get("output"), list) and reading > 1:
        why = "output is a list: answers of which one is better are not trained as chat"
        raise BadRowError("judgement", why)
    for text in chain.from_iterable(pairs):
        if not isinstance(text, str):
            raise BadRowError("history", f"history has {show(text)}, not a string")
    return [
        {"role": role, "content": text}
        for pair in [*pairs, (asked, row.get("output"))]
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _is_trained(named: JsonObject, reading: int = READING) -> bool:
    """Take the keys `train` and `weight` out of a message or a row, and return what they say.

    A table of CSV has them as strings.
    """
    train, weight = named.pop("train", None), named.pop("weight", None) if reading > 1 else None
    if reading > 1:
        train, weight = (WRITTEN.get(v, v) if isinstance(v, str) else v for v in (train, weight))
    if train is not None and not isinstance(train, bool):
        raise BadRowError("train", f"train is {show(train)}, not true or false")
    if weight is not None and weight not in (0, 1):
        why = f"weight is {show(weight)}; only 0 (context) and 1 (trained) are known here"
        raise BadRowError("weight", why)
    return train is not False and weight != 0


def list_of(row: JsonMapping, name: str) -> list[object]:
    """Return the list in a column. Raises BadRowError."""
    value = parse_json(row.get(name), name)
    if isinstance(value, dict) and value and all(isinstance(v, list) for v in value.values()):
        # A list of structs, as older releases of `datasets` store it: a struct of lists.
        with suppress(ValueError):
            lines = list(zip(*value.values(), strict=True))
            return [dict(zip(value, line, strict=True)) for line in lines]
    if not isinstance(value, list):
        raise BadRowError("messages", f"{name} is {show(value)}, not a list")
    return value


def parse_json(value: object, name: str) -> Any:
    """Return what a string of JSON means, and any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return _load(value) if value.strip() else None
    except (ValueError, RecursionError):
        raise BadRowError(name, f"{name} is a string that is not JSON: {show(value)}") from None


def _load(text: str) -> Any:
    """Return what JSON means, half a surrogate pair replaced by U+FFFD."""
    value = json.loads(text)
    if _ESCAPED_HALF.search(text):
        value = json.loads(_HALF.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    return value


def without_none(value: object) -> object:
    """Return a value without the fields that are None, at any depth."""
    if isinstance(value, Mapping):
        return {k: without_none(one) for k, one in value.items() if one is not None}
    return [without_none(one) for one in value] if isinstance(value, list) else value


def show(value: object) -> str:
    """Return a value as a message shows it."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
