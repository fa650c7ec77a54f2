"""The keys of the schema as a list: for messages, suggestions and the reference page.

The description of the values that a key takes is made from its type, so that messages always agree
with what is checked.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from llmtrain.config.schema import Config

ITEM = "*"  # stands for the number of a source in a key


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the schema.

    name: with dots, and `*` for the number of a source
    takes: the valid values, in words
    default: as JSON, or `required`
    description: from the schema
    text: whether it takes a string
    expert: whether the schema marks it as a key for experts
    """

    name: str
    takes: str
    default: str
    description: str
    text: bool
    expert: bool

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default == "required"


@cache
def all_keys() -> tuple[Key, ...]:
    """Return every key of the schema, in its order."""
    return tuple(_walk(Config, ""))


@cache
def sections() -> frozenset[str]:
    """Return the dotted names of all groups of keys; the outermost one is ""."""
    names = {""}
    for key in all_keys():
        parts = key.name.split(".")
        names.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
    return frozenset(names - {"data.sources", "evaluation.sources"})


def _walk(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, info in section.model_fields.items():
        key = prefix + (info.alias or name)
        inner = _inner_section(info.annotation)
        if inner is None or get_origin(info.annotation) is tuple:
            yield _key(key, info)
        if inner is not None:
            item = f".{ITEM}" if get_origin(info.annotation) is tuple else ""
            yield from _walk(inner, f"{key}{item}.")


def _key(name: str, info: FieldInfo) -> Key:
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    return Key(
        name=name,
        takes=_takes(info.annotation, info.metadata),
        default=_default(info),
        description=info.description or "",
        text=_is_text(info.annotation),
        expert=bool(extra.get("expert", False)),
    )


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    return json.dumps(info.get_default(call_default_factory=True), ensure_ascii=False)


def _inner_section(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a field contains, alone or in a list; None for other fields."""
    if get_origin(annotation) is tuple:
        annotation = get_args(annotation)[0]
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_section else None


def _is_text(annotation: Any) -> bool:
    if get_origin(annotation) is Annotated:
        return _is_text(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return any(_is_text(choice) for choice in get_args(annotation))
    return annotation is str


def _takes(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return in words what a type takes."""
    arguments = get_args(annotation)
    match get_origin(annotation):
        case origin if origin is Annotated:
            return _takes(arguments[0], arguments[1:])
        case origin if origin is Literal:
            return _either([str(choice) for choice in arguments])
        case origin if origin in (Union, types.UnionType):
            return _either([_takes(choice, metadata) for choice in arguments])
        case origin if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
            return f"a list, each {_takes(arguments[0])}"
        case origin if origin is tuple:
            return f"a list of {len(arguments)}, each {_takes(arguments[0])}"
        case origin if origin is dict:
            return "a mapping"
    return _plain(annotation, _limits(metadata))


def _either(choices: Sequence[str]) -> str:
    *most, last = choices
    return f"{', '.join(most)} or {last}" if most else last


def _plain(annotation: Any, limits: str) -> str:
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        inner = ", ".join(
            f"{name}: {_takes(info.annotation, info.metadata)}"
            for name, info in annotation.model_fields.items()
            if info.is_required()
        )
        return f"{{{inner}}}"
    words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    return words[annotation] + limits


def _limits(metadata: Sequence[Any]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found: list[str] = []
    for item in metadata:
        if isinstance(item, FieldInfo):
            return _limits(item.metadata)
        there = [name for name in signs if hasattr(item, name)]
        found += [f"{signs[name]} {getattr(item, name)}" for name in there]
    return " " + " and ".join(found) if found else ""
