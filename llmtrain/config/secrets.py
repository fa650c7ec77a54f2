"""Secrets: refused in a config, and hidden in whatever a run writes or prints.

Known by the name (`hub_token`, `api_key`), by the look (`hf_…`, `sk-…`, a user or a password in an
address, `?token=…`) and, in a string, as the value of an environment variable with such a name.
Where a model or a tokenizer may have a field of the name, its value decides: see `is_secret`.

    model.config.hub_token: refused, remedy `export HF_TOKEN=…`
    model.config.assistant_token: "<|a|>" is no secret

The trap: a message about a secret must not show it. Nothing that leaves this file contains a value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from llmtrain.errors import Problem

Hide = Callable[[str], str]

HIDDEN = "***"
_SHORTEST = 8  # shorter values of variables, and of fields that may be a model's, are words
_LONG = 16  # what is shorter may stand within another word, where it is not hidden

_NAME = re.compile(
    r"(secret|password|passwd|passphrase|credentials?|authorization|connection_string"
    r"|(api|access|private|secret)_?key|(hf|hub|auth|access)_?token)$"
)
_ALSO_A_FIELD = re.compile(r"(token|signature|(^|_)(key|pat|sig))$")
_WORD = re.compile(r"[A-Za-z][a-z]{0,14}|[A-Z]{1,15}|")
_OPAQUE = re.compile(r"[\w.~+/=:-]{8,}", re.ASCII)  # no `<s>`, `[INST]` or `### Answer:`
# What a secret looks like, and the variable that it belongs into. As long and as mixed as they are
# given out: `sk-` begins names of Slovak data, `hf_` and `pypi-` names of files.
_MIXED = r"(?=[\w-]{0,31}[a-z])(?=[\w-]{0,31}[A-Z])"  # bounded: no time for a hostile line
_DIGIT = r"(?=[\w-]{0,31}\d)"
_LOOKS = (
    ("HF_TOKEN", r"(?:hf|api_org)_" + _MIXED + r"[A-Za-z0-9]{34,}|hf_(?:oauth|jwt)_[\w.-]{20,}"),
    ("ANTHROPIC_API_KEY", r"sk-ant-[a-z]+\d\d-[\w-]{20,}"),
    ("OPENAI_API_KEY", r"sk-(?:proj|svcacct|admin)-" + _DIGIT + _MIXED + r"[\w-]{40,}"),
    ("OPENAI_API_KEY", r"sk-" + _DIGIT + _MIXED + r"[A-Za-z0-9]{32,}"),
    ("OPENAI_API_KEY", r"sk-(?:or-v1-)?[0-9a-f]{32,}"),
    ("GITHUB_TOKEN", r"gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{20,}"),
    ("GITLAB_TOKEN", r"glpat-[\w-]{20,}"),
    ("SLACK_TOKEN", r"xox[abeoprs]-[A-Za-z0-9-]{10,}"),
    ("AWS_ACCESS_KEY_ID", r"A(?:KIA|SIA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    ("GOOGLE_API_KEY", r"AIza[\w-]{35}"),
    ("NPM_TOKEN", r"npm_[A-Za-z0-9]{36}"),
    ("PYPI_TOKEN", r"pypi-AgE[\w-]{50,}"),
    ("WANDB_API_KEY", r"wandb_v\d+_\w{20,}"),
    ("ACCESS_TOKEN", r"eyJ[\w-]{12,500}(?:\.[\w-]+)+|(?i:bearer)\s+(?=\S*\d)[\w.~+/-]{16,}=*"),
    ("PRIVATE_KEY_FILE", r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
)
_BEFORE = r"(?<![A-Za-z0-9])"
_LOOK = re.compile(_BEFORE + "(?:" + "|".join(f"(?:{text})" for _, text in _LOOKS) + ")")
# A user alone is a token over HTTP, elsewhere a name: `ssh://git@host`, `abfss://container@host`.
_USER = re.compile(
    r"(?:(?<=://)[^/?#\s\"':]*:|(?<=http://)|(?<=https://))[^/?#\s\"']+(?=@)", re.IGNORECASE
)
_QUERY = re.compile(r"(?<=[?&#])([\w.-]+)=[^&#\s\"']+")
_KEY = re.compile(r"(?<![\w.-])[\w.-]++(?=[\\\"']*\s*[:=])")


class Found(NamedTuple):
    """A secret in a config: the dotted key, the variable to use, and the text to be hidden."""

    key: str
    variable: str
    text: str


def is_secret_name(key: str) -> bool:
    """Whether what is called so is a secret, in any spelling: `hub_token`, `apiKey`, `API-KEY`."""
    name = _plain(key)
    return bool(_NAME.search(name) or _ALSO_A_FIELD.search(name))


def is_secret(name: str, value: object) -> bool:
    """Whether the value under this name is one; a password may be a number.

    Where a model may have a field of the name (`assistant_token`, `sort_key`) only a string of 8
    or more letters, digits and `_.~+/=:-`, unless it consists of plain words.
    """
    plain = _plain(name)
    if _NAME.search(plain):
        return value is not None and not isinstance(value, bool) and bool(str(value).strip())
    if not isinstance(value, str) or not _ALSO_A_FIELD.search(plain):
        return False
    text = value.strip()
    words = all(_WORD.fullmatch(part) for part in re.split(r"[^A-Za-z0-9]", text))
    return bool(_OPAQUE.fullmatch(text)) and not words


def in_config(tree: object) -> list[Found]:
    """Every secret of a config as it was written, whether its keys exist or not, at any depth."""
    return list(_walk(tree, ()))


def problems(found: Iterable[Found]) -> list[Problem]:
    """One problem for each secret, without its value."""
    expected = "no secret in a config: it is written into the run directory and shown in reports"
    remedy = "take it out of the config (and change it if others could read it); export {}=…"
    hide = without([])
    return [Problem(hide(one.key), None, expected, remedy.format(one.variable)) for one in found]


def clear(said: Iterable[Problem], found: Iterable[Found]) -> list[Problem]:
    """The problems of the secrets, and the other problems with the secrets removed."""
    found = list(found)
    hide, keys = without(one.text for one in found), {one.key for one in found}
    others = [
        Problem(hide(one.key), _value(one, hide), hide(one.expected), hide(one.remedy))
        for one in said
        if one.key not in keys
    ]
    return [*problems(found), *others]


def hide_unparsed(text: str) -> str:
    """Cut a string that is no YAML at the first name of a secret, and hide the rest."""
    text = without([])(text)
    for name in _KEY.finditer(text):
        if is_secret_name(name[0]):
            return text[: name.end()] + re.sub(
                r"(?s)([:=]\s*).*", rf"\1{HIDDEN}", text[name.end() :]
            )
    return text


def hider(environ: Mapping[str, str]) -> Hide:
    """Return a function that puts `***` in place of every secret of a string.

    environ: hidden are the values of the variables whose names say so, from 8 characters on and
    unless they are one plain word (`training`); below 16 characters where they stand as words of
    their own. Hidden whatever it holds: what looks like a token or key, a user or password in an
    address, and its parameters with the name of a secret.
    """
    named = [value.strip() for name, value in environ.items() if is_secret_name(name)]
    return without(one for one in named if len(one) >= _SHORTEST and not _WORD.fullmatch(one))


def without(secrets: Iterable[str]) -> Hide:
    """Hides these texts, however JSON and addresses spell them, and all that looks like one."""
    spelled = {text for one in secrets if one.strip() for text in _spellings(one.strip())}
    # The longest first: one may begin with another.
    known = "|".join(map(_pattern, sorted(spelled, key=lambda text: (-len(text), text))))
    known_pattern = re.compile(known) if known else None

    def hide(text: str) -> str:
        if known_pattern is not None:
            text = known_pattern.sub(HIDDEN, text)
        text = _LOOK.sub(HIDDEN, text)
        if "://" in text:
            text = _USER.sub(HIDDEN, text)
        return _QUERY.sub(_parameter, text) if "=" in text else text

    return hide


def _pattern(text: str) -> str:
    r"""The text; a short one as a word, of which `\n` and `%20` before it are no part."""
    escaped = re.escape(text)
    if len(text) >= _LONG:
        return escaped
    return rf"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-F][0-9A-F])){escaped}(?![A-Za-z0-9])"


def _parameter(found: re.Match[str]) -> str:
    return HIDDEN if is_secret_name(found[1]) else found[0]


def hidden(values: Mapping[str, Any], hide: Hide) -> dict[str, Any]:
    """A copy of plain data: every text went through `hide`, none is under the name of a secret."""
    return {key: _hidden(key, value, hide) for key, value in values.items()}


def _hidden(key: str, value: Any, hide: Hide) -> Any:
    if isinstance(value, Mapping):
        return hidden(value, hide)
    if isinstance(value, (list, tuple)):
        return [_hidden(key, inner, hide) for inner in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if is_secret(str(key), value) else hide(value)


def _value(said: Problem, hide: Hide) -> object:
    """What a problem shows as found; its key may end with ` (line 3)`, a tag begins with `!`."""
    if said.value is None:
        return None
    shown = str(said.value)
    secret = is_secret(said.key.partition(" ")[0], shown.strip("\"'!"))
    return HIDDEN if secret else hide(shown)


def _walk(value: object, path: tuple[str, ...]) -> Iterator[Found]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _walk(inner, (*path, str(name)))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _walk(inner, (*path, str(index)))
    elif path and (variable := _variable(path, value)):
        yield Found(".".join(path), variable, str(value))


def _variable(path: tuple[str, ...], value: object) -> str:
    """The variable that a secret belongs into; "" if the value is no secret."""
    names = [name for name in path if not name.isdecimal()]
    if names and is_secret(names[-1], value):
        return _named_after(names)
    if not isinstance(value, str):
        return ""
    for variable, look in _LOOKS:
        if re.search(_BEFORE + f"(?:{look})", value):
            return variable
    parameters = (found[1] for found in _QUERY.finditer(value))
    in_address = _USER.search(value) or any(map(is_secret_name, parameters))
    return "HF_TOKEN" if in_address else ""


def _named_after(names: list[str]) -> str:
    path, last = _plain("_".join(names)), _plain(names[-1])
    if "wandb" in path:
        return "WANDB_API_KEY"
    plain = last in ("token", "auth_token", "access_token", "use_auth_token")
    return "HF_TOKEN" if plain or {"hf", "hub"} & set(last.split("_")) else last.upper()


def _plain(name: str) -> str:
    """`hubToken`, `hub-token` and `HUB_TOKEN` as hub_token."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[^a-z0-9]+", "_", parted.lower())


def _spellings(plain: str) -> set[str]:
    """As it is, in JSON with and without its own letters, in an address, and as Python shows it."""
    return {
        plain,
        json.dumps(plain)[1:-1],
        json.dumps(plain, ensure_ascii=False)[1:-1],
        repr(plain)[1:-1],
        quote(plain, safe=""),
    }
