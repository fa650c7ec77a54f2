"""The keys of the schema as a list: for messages, suggestions and the reference page.

The description of the values that a key takes is made from the JSON schema that pydantic derives
from its type, so that messages always agree with what is checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from llmtrain.config.schema import Config
from llmtrain.types import JsonMapping

ITEM = "*"  # stands for the number of an item of a list in a key

Schema = JsonMapping

_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "object": "a mapping",
    "null": "null",
}
_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the schema.

    name: with dots, and `*` for the number of an item of a list
    takes: the valid values, in words
    default: as JSON, or `required`
    description: from the schema
    expert: whether the schema marks it as a key for experts
    words: the values among which one chooses, as YAML; () for free ones
    """

    name: str
    takes: str
    default: str
    description: str
    expert: bool
    words: tuple[str, ...]


@cache
def all_keys() -> tuple[Key, ...]:
    """Return every key of the schema, in its order."""
    schema = Config.model_json_schema()
    return tuple(_walk(schema, schema["$defs"], ""))


@cache
def sections() -> frozenset[str]:
    """Return the dotted names of all groups of keys, such as `data.sources.*`."""
    names = {key.name for key in all_keys()}
    return frozenset(name.rsplit(".", depth)[0] for name in names for depth in (1, 2, 3)) - names


def general_name(name: str) -> str:
    """Return a key with `*` in place of the number of a source: `data.sources.*.path`."""
    return ".".join(ITEM if part.isdecimal() else part for part in name.split("."))


def _walk(section: Schema, definitions: Schema, prefix: str) -> Iterator[Key]:
    for name, field in section["properties"].items():
        key, inner = prefix + name, _definition(field.get("items", field), definitions)
        is_section = "properties" in inner
        if "items" in field or not is_section:
            default = json.dumps(field.get("default"), ensure_ascii=False)
            yield Key(
                name=key,
                takes=_takes(field, definitions),
                default="required" if name in section.get("required", ()) else default,
                description=" ".join(field.get("description", "").split()),
                expert=field.get("expert", False),
                words=tuple(_words(field, definitions)),
            )
        if is_section:
            item = f".{ITEM}" if "items" in field else ""
            yield from _walk(inner, definitions, f"{key}{item}.")


def _definition(field: Schema, definitions: Schema) -> Schema:
    """Return the section that a field refers to, or the field itself."""
    return definitions[field["$ref"].rpartition("/")[2]] if "$ref" in field else field


def _takes(field: Schema, definitions: Schema) -> str:
    """Return in words what a field takes."""
    match _definition(field, definitions):
        case {"anyOf": choices}:
            return _either([_takes(choice, definitions) for choice in choices])
        case {"enum": values}:
            return _either(values)
        case {"const": value}:
            return str(value)
        case {"prefixItems": [first, *_] as items}:
            return f"a list of {len(items)}, each {_takes(first, definitions)}"
        case {"items": item, "minItems": 1}:
            return f"a list of one or more, each {_takes(item, definitions)}"
        case {"items": item}:
            return f"a list, each {_takes(item, definitions)}"
        case {"properties": inner, "required": names}:
            parts = (f"{name}: {_takes(inner[name], definitions)}" for name in names)
            return f"{{{', '.join(parts)}}}"
    hidden = "maximum" if field.get("generous") else None
    limits = [
        f"{sign} {field[name]}" for name, sign in _SIGNS.items() if name in field and name != hidden
    ]
    return " ".join([_WORDS[field["type"]], " and ".join(limits)]).rstrip()


def _words(field: Schema, definitions: Schema) -> Iterator[str]:
    """Yield the values of a field that are named one by one, as YAML spells them."""
    match _definition(field, definitions):
        case {"anyOf": choices}:
            for choice in choices:
                yield from _words(choice, definitions)
        case {"enum": values}:
            yield from values
        case {"const": value}:
            yield str(value)
        case {"type": "boolean"}:
            yield from ("true", "false")
        case {"type": "null"}:
            yield "null"


def _either(choices: Sequence[str]) -> str:
    *most, last = choices
    return f"{', '.join(most)} or {last}" if most else last
