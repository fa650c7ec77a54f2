"""Read and write YAML 1.2; in PyYAML's YAML 1.1 `3e-4` is a string, `12:30` is 750, `on` is true.

PyYAML only splits the text into nodes. The type of a plain scalar is decided here, by the core
schema of YAML 1.2. The values are null, bool, int, float, strings, lists and mappings. The trap:
PyYAML silently takes the last of duplicate keys, so mappings are built here too.

    seq_len: 1e3     →  {"seq_len": 1000.0}, and source[("seq_len",)] == "1e3"
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import yaml

from llmtrain.errors import Problem

Path = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_DEEPEST = 32
_MOST_NODES = 100_000
# What a plain scalar looks like, and how it is read.
_SCALARS: dict[str, tuple[str, Callable[[str], object]]] = {
    "null": (r"(?:~|null|Null|NULL|)$", lambda text: None),
    "bool": (r"(?:true|True|TRUE|false|False|FALSE)$", lambda text: text.lower() == "true"),
    "int": (
        r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$",
        lambda text: int(text, 0 if text[:2] in ("0o", "0x") else 10),
    ),
    "float": (
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    ),
}


class _Loader(yaml.SafeLoader):
    """A loader that splits text into nodes, and gives plain scalars the tags of YAML 1.2."""


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes each string that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: object) -> bool:
        """Write every value in full, without anchors and aliases."""
        return True


_Loader.yaml_implicit_resolvers = {}  # without the inherited ones of YAML 1.1
for _name, (_pattern, _) in _SCALARS.items():
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(_pattern), None)
    _Dumper.add_implicit_resolver(_TAG + _name, re.compile(_pattern), None)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Write a string; in double quotes, with escapes, if it has line breaks that YAML changes."""
    style = '"' if any(mark in text for mark in "\r\x85\u2028\u2029") else None
    return dumper.represent_scalar(_TAG + "str", text, style=style)


_Dumper.add_representer(str, _text)


@dataclass(slots=True)
class YamlDocument:
    """The content of a YAML text.

    value: the outermost value
    source: path → the scalar at that path as it was written
    problems: what to correct; the other values are read nevertheless
    nodes: their number so far
    """

    value: object = None
    source: dict[Path, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    nodes: int = 0


def parse(text: str) -> YamlDocument:
    """Read one YAML document. Errors in the text are not raised: see `YamlDocument.problems`."""
    document = YamlDocument()
    try:
        node = yaml.compose(text, Loader=_Loader)
        document.value = None if node is None else _build(node, (), document)
    except yaml.MarkedYAMLError as error:
        document.problems.append(Problem(_place(error), None, "valid YAML", _reason(error)))
    except yaml.reader.ReaderError as error:
        place = f"character {error.position + 1}"
        document.problems.append(Problem(place, None, "valid YAML", error.reason))
    except RecursionError:
        expected = f"at most {_DEEPEST} levels and {_MOST_NODES:,} values"
        document.problems.append(Problem("nesting", None, expected))
    return document


def write(value: object) -> str:
    """Return text that `parse` and readers of YAML 1.1 read back as `value`."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def dotted_name(path: Path) -> str:
    """Return a path with dots, such as `data.sources.0.path`."""
    return ".".join(str(part) for part in path)


def _build(node: yaml.Node, path: Path, document: YamlDocument) -> object:
    document.nodes += 1
    if len(path) > _DEEPEST or document.nodes > _MOST_NODES:
        raise RecursionError  # or an alias contains itself
    if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
        return _mapping(node, path, document)
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        return [_build(item, (*path, i), document) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        document.source[path] = node.value
        try:
            # The value of a scalar. Raises ValueError for a tag that does not fit the text.
            kind = node.tag.removeprefix(_TAG)
            if kind == "str":
                return node.value
            if kind not in _SCALARS or not re.match(_SCALARS[kind][0], node.value):
                raise ValueError(kind)
            return _SCALARS[kind][1](node.value)
        except ValueError:
            pass  # reported below: the tag is not supported, or does not fit the text
    where = f"{dotted_name(path) or 'the file'} (line {node.start_mark.line + 1})"
    document.problems.append(Problem(where, node.tag, "plain values", "leave the YAML tag out"))
    return None


def _mapping(node: yaml.MappingNode, path: Path, document: YamlDocument) -> dict[str, object]:
    built: dict[str, object] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
            shown = getattr(key_node, "value", "")
            key = dotted_name((*path, shown if isinstance(shown, str) else "?"))
            remedy = "put it in quotes if it is meant"
            document.problems.append(Problem(key, None, f"a string as key (line {line})", remedy))
            continue
        key = key_node.value
        if key in lines:
            expected = f"every key once; it is on line {lines[key]} and on line {line}"
            document.problems.append(
                Problem(dotted_name((*path, key)), None, expected, "remove one")
            )
        lines.setdefault(key, line)
        built[key] = _build(value_node, (*path, key), document)
    return built


def _place(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the file"


def _reason(error: yaml.MarkedYAMLError) -> str:
    """Return PyYAML's reason for an error, without the names of aliases and anchors.

    Such a name may be a password that begins with `*` or `&`.
    """
    text = ", ".join(part for part in (error.context, error.problem) if part)
    return re.sub(r"(alias|anchor) '[^']*'", r"\1", text)
