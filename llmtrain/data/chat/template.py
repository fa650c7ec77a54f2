"""Renders conversations with a chat template as transformers does, without importing it.

The environment is jinja2's sandbox with the options, filters and globals of `apply_chat_template`.
One thing differs on purpose: the clock. `strftime_now` always says the date of the run, or the data
of a run would change from day to day.

`PROBES` are conversations on which two installations may differ: white space, scripts, tools,
reasoning. Their ids and masks are the fingerprint of a tokenizer and its template (`Chat.probe`).
`CALLED` shows how a template writes the call of a tool.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from llmtrain.data.chat.rendering import FAILURES, Conversation, Text, loop_context, rewrite
from llmtrain.data.chat.rows import REASONING, BadRowError, Example, Message
from llmtrain.data.tokens.tokenizer import token_text
from llmtrain.errors import Problem, UserError
from llmtrain.text import first_line
from llmtrain.types import JsonMapping, JsonObject

# The templates that come with the package → the tokens that they write.
NAMED: Mapping[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
}
Tools = list[JsonObject] | None

_SPECIAL = (
    *("bos_token", "eos_token", "unk_token", "sep_token"),
    *("pad_token", "cls_token", "mask_token"),
)
_MOST_ITEMS = 10**7  # of a string or list that a template multiplies
_MOST_BITS = 10**5  # of a power
_DICT_ATTRIBUTES = frozenset(dir(dict))
_SAFE: dict[tuple[type, str], bool] = {}  # what jinja2 answered for an attribute of a type


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template with all that decides what it writes, but for the conversation.

    sources: `default`, and `tool_use` where a tokenizer has a template of its own for tools
    variables: special tokens, and `chat.template_kwargs`
    date: what the template's clock says, an ISO date and time
    """

    sources: Mapping[str, str]
    variables: JsonMapping
    date: str

    def render(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool) -> str:
        """Return the text of a conversation. Raises BadRowError if the template cannot write it."""
        beginnings = self.beginnings(messages, tools)
        return str(beginnings.render(len(messages), add_generation_prompt))

    def beginnings(self, messages: Sequence[Message], tools: Tools) -> Beginnings:
        """Return what renders the beginnings of a conversation."""
        use = "tool_use" if tools is not None and "tool_use" in self.sources else "default"
        variables = {**self.variables, "tools": tools, "documents": None}
        named = [_with_reasoning(message) for message in messages]
        return Beginnings(_compile(self.sources[use], self.date), variables, named)

    @property
    def text(self) -> str:
        """All of the template's text."""
        return "\0".join(self.sources.values())

    @property
    def names(self) -> frozenset[str]:
        """The names that the template may read from a message: its attributes and strings."""
        trees = [_environment(self.date).parse(source) for source in self.sources.values()]
        strings = (one.value for tree in trees for one in tree.find_all(nodes.Const))
        attributes = (one.attr for tree in trees for one in tree.find_all(nodes.Getattr))
        return frozenset({*attributes, *(one for one in strings if isinstance(one, str))})


def named_template(name: str) -> str:
    """Return the text of a template that comes with the package."""
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text("utf-8")


def template_text(asked: str) -> tuple[str, tuple[str, ...]]:
    """Return the template that `chat.template` asks for, and the tokens that it needs.

    Raises UserError for what is neither a name, nor a file, nor a template.
    """
    if asked in NAMED:
        return named_template(asked), NAMED[asked]
    if "{%" in asked or "{{" in asked:
        return asked, ()
    try:
        return Path(asked).read_text("utf-8"), ()
    except (OSError, ValueError) as error:
        expected = f"{', '.join(NAMED)}, a .jinja file or a template ({first_line(error)})"
        raise UserError(Problem("chat.template", asked, expected)) from error


def template_tokens(asked: str | None) -> tuple[str, ...]:
    """Return the tokens that `chat.template` adds to a tokenizer that lacks them."""
    return NAMED.get(asked or "", ())


def open_template(directory: Path, kwargs: JsonMapping, date: str) -> Template:
    """Open the template of a tokenizer's directory.

    kwargs: further variables
    date: what the template's clock says, an ISO date and time
    Raises UserError if there is no template, or it is not one.
    """
    settings = _json(directory / "tokenizer_config.json")
    others = _json(directory / "special_tokens_map.json")
    sources = _sources(directory, settings)
    if "default" not in sources:
        expected = "a chat template: the tokenizer has none"
        remedy = f"name one of {', '.join(NAMED)} or a .jinja file"
        raise UserError(Problem("chat.template", None, expected, remedy))
    try:
        for source in sources.values():
            _compile(source, date)
    except TemplateSyntaxError as error:
        expected = f"a Jinja template (line {error.lineno}: {error.message})"
        raise UserError(Problem("chat.template", None, expected)) from error
    # Too many brackets in each other for the parser or for Python's compiler, half a character.
    except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
        expected = f"a Jinja template that can be compiled ({first_line(error)})"
        raise UserError(Problem("chat.template", None, expected)) from error
    tokens = {name: token_text(settings.get(name, others.get(name))) for name in _SPECIAL}
    special = {name: token for name, token in tokens.items() if token is not None}
    return Template(sources, {**special, **kwargs}, date)


def has_template(directory: Path) -> bool:
    """Return whether a tokenizer's directory has a chat template."""
    return "default" in _sources(directory, _json(directory / "tokenizer_config.json"))


def _sources(directory: Path, settings: JsonMapping) -> dict[str, str]:
    file = directory / "chat_template.jinja"
    if file.is_file():
        others = (directory / "additional_chat_templates").glob("*.jinja")
        files = {"default": file, **{path.stem: path for path in sorted(others)}}
        return {name: _text(path) for name, path in files.items()}
    setting = settings.get("chat_template")
    if setting is None or isinstance(setting, str):
        return {} if setting is None else {"default": setting}
    try:
        named = {one["name"]: one["template"] for one in setting}
        if not all(isinstance(text, str) for pair in named.items() for text in pair):
            raise TypeError("a name or a template is no string")
    except (TypeError, LookupError) as error:
        expected = "a string, or a list of {name, template}, in the tokenizer's files"
        raise UserError(Problem("chat.template", json.dumps(setting), expected)) from error
    return named


def _json(path: Path) -> JsonObject:
    if not path.is_file():
        return {}
    value = json.loads(_text(path))
    return value if isinstance(value, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(Problem("chat.template", path, f"text in UTF-8 ({error})")) from error


def _with_reasoning(message: Message) -> Message:
    """Return a message whose reasoning has the names that templates read."""
    for name in REASONING:
        if message.get(name) is not None:
            reasoning = message[name]
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


class Beginnings(Conversation):
    """Renders the beginnings of a conversation; what a template cannot render is a bad row."""

    def render(self, count: int, add_generation_prompt: bool) -> Text:
        """Return the text of the first `count` messages. Raises BadRowError."""
        try:
            text = Conversation.render(self, count, add_generation_prompt)
            text.own.encode()
        except UnicodeEncodeError as error:
            why = f"the template writes half a character: {error.object[error.start]!a}"
            raise BadRowError("template", why) from error
        except (TemplateError, *FAILURES) as error:
            why = f"the template cannot render it: {first_line(error)}"
            raise BadRowError("template", why) from error
        return text


@lru_cache(maxsize=16)
def _compile(source: str, date: str) -> jinja2.Template:
    environment = _environment(date)
    tree = environment.parse(source)
    rewrite(tree)
    tree.set_environment(environment)
    # The globals as a dict: each rendering copies them, a ChainMap slowly.
    template = jinja2.Template.from_code(
        environment, environment.compile(tree), dict(environment.globals)
    )
    template.root_render_func.__globals__["LoopContext"] = loop_context
    return template


def _environment(date: str) -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    clock = datetime.fromisoformat(date)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = clock.strftime
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox of jinja2 with a short way to what templates read most.

    It allows and refuses the same. Without it half of the time of a render goes into its checks.
    """

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse a product or a power that would fill the memory."""
        sizes = [len(one) for one in (left, right) if isinstance(one, str | bytes | list | tuple)]
        counts = [one for one in (left, right) if isinstance(one, int)]
        if operator == "*" and sizes and counts and sizes[0] * counts[0] > _MOST_ITEMS:
            raise SecurityError(f"a product of more than {_MOST_ITEMS:,} items")
        if operator == "**" and len(counts) == 2 and left.bit_length() * right > _MOST_BITS:
            raise SecurityError(f"a power of more than {_MOST_BITS:,} bits")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: object, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        key = type(obj), attr  # neither the object nor the value decides
        if key not in _SAFE:
            _SAFE[key] = super().is_safe_attribute(obj, attr, value)
        return _SAFE[key]


class _Namespace(Namespace):
    """A namespace in a template: it refuses names that begin with an underscore.

    `held` is what has been set in it; a template that asks for an attribute does not get it.
    """

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that an attribute may be called self
        self, args = args[0], args[1:]
        Namespace.__init__(self)
        object.__setattr__(self, "held", {})
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no attribute {name!r}")
        object.__getattribute__(self, "held")[name] = value
        Namespace.__setitem__(self, name, value)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON. The filter that jinja2 has of this name escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


class _Dict:
    """`dict` in a template: not the type itself, whose base classes lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return what `dict.fromkeys` returns."""
        return dict.fromkeys(*args)


class _Generation(Extension):
    """The tag `{% generation %}`: what an assistant says is inside, and is written as it is.

    Few templates have it, and nothing here relies on it.
    """

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("write"), [], [], body).set_lineno(line)

    def write(self, caller: Callable[[], str]) -> str:
        return caller()


_ASKED = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
_WEATHER = {"name": "weather", "description": "The weather in a town, now.", "parameters": _ASKED}
_TOOLS = [{"type": "function", "function": _WEATHER}]


def _call(town: str) -> JsonObject:
    return {"type": "function", "function": {"name": "weather", "arguments": {"town": town}}}


_CALL = _call("Đà Nẵng")
TOWN = "Ulm"  # the end of what is said in the call of `CALLED`
_ID = "abcdefghi"  # Mistral's templates take nine letters and nothing else
CALLED = Example(
    [
        {"role": "user", "content": "Is it warm there?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": _ID, **_call(TOWN)}]},
        {"role": "tool", "tool_call_id": _ID, "name": "weather", "content": '{"celsius": 21}'},
    ],
    _TOOLS,
)


def _talk(*texts: str, system: str | None = None) -> Example:
    """Return a conversation of these texts, the user's first."""
    roles = ("user", "assistant")
    messages: list[Message] = [
        {"role": roles[n % 2], "content": text} for n, text in enumerate(texts)
    ]
    front = [] if system is None else [{"role": "system", "content": system}]
    return Example([*front, *messages])


PROBES: tuple[Example, ...] = (
    _talk("Hi?", "Yes."),
    _talk("Hi?", "Yes.", system="Answer briefly."),
    _talk("One?", "1", "Two?", "2", "Three?", "3"),
    _talk("What is 6 × 7?", "42", "And 7 × 6?", " 42 \n"),
    _talk("  blanks in front and behind  ", "\n\nA blank line first, then a tab:\t.\n\n"),
    _talk("line\r\nline\rline", "a\u00a0b\u2003c\u3000d"),
    _talk("请介绍一下六西格玛理论。", "六西格玛是一种管理策略。", "谢谢！", "不客气。"),
    _talk("Thời tiết hôm nay thế nào?", "Trời nắng đẹp ☀️ 👩‍👩‍👧 🇻🇳"),
    _talk("cafe\u0301 and caf\u00e9", "e\u0301\u0323 ﬁ Å Å"),
    _talk("مرحبا، كيف حالك؟", "בסדר, תודה"),
    _talk("```python\ndef f(x):\n    return x\n```", "if x:\n\treturn {'a': [1, 2]}\n"),
    _talk("What does <|im_end|> mean?", "It ends a turn: <|im_end|>."),
    _talk("Is </s> or <eos> a tag? <think>", "No; <b>bold</b> is one.", "[INST]?", "Neither."),
    _talk("Think.", "<think>\nOne and one.\n</think>\n\nTwo."),
    _talk("First?", "<think>\nHm.\n</think>\n\nThis.", "Then?", "<think>\nSo.\n</think>\n\nThat."),
    _talk("'s 're 'll DON'T 12345 67.89 1e-5", "a" * 40 + " " * 20 + "z"),
    _talk("?", "!", "??", "!!", "???", "!!!", system="  \n"),
    Example([
        {"role": "user", "content": "And if you think about it?"},
        {"role": "assistant", "content": "Then this.", "reasoning_content": "It may be so."},
    ]),
    Example(
        [
            {"role": "user", "content": "Is it warm in Đà Nẵng?"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": '{"celsius": 31, "sky": "clear"}'},
            {"role": "assistant", "content": "It is 31 °C, and the sky is clear."},
        ],
        _TOOLS,
    ),
    Example(
        [
            {"role": "system", "content": "Use the functions."},
            {"role": "user", "content": "Is it warm?"},
            {"role": "assistant", "content": "Where?"},
            {"role": "user", "content": "Here."},
            {"role": "assistant", "content": "One moment.", "tool_calls": [_CALL, _CALL]},
        ],
        _TOOLS,
        untrained=frozenset({2}),
    ),
)  # fmt: skip
