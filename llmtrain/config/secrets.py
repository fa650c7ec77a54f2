"""Find secrets, which are refused in a config and hidden in everything a run writes or prints.

A secret is recognized by its name (`hub_token`, `api_key`), by its form (`hf_…`, `sk-…`, a user or
a password in an address, `?token=…`) or, in a string, as the value of an environment variable with
such a name. If a model or a tokenizer may have a field of that name, the value decides: see
`is_secret`.

    model.config.hub_token: refused, remedy `export HF_TOKEN=…`
    model.config.assistant_token: "<|a|>" is no secret

The trap: a message about a secret must not show it. No message made here contains its value.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from llmtrain.errors import Problem

Hide = Callable[[str], str]

HIDDEN = "***"
_SHORTEST = 8  # shorter values of variables, and of fields that may be a model's, are no secrets
_LONG = 16  # a shorter value may be a part of another word by chance; it is not hidden there

_NAME = re.compile(
    r"(secret|password|passwd|passphrase|credentials?|authorization|connection_string"
    r"|(api|access|private|secret)_?key|(hf|hub|auth|access)_?token)$"
)
_ALSO_A_FIELD = re.compile(r"(token|signature|(^|_)(key|pat|sig))$")
_WORD = re.compile(r"[A-Za-z][a-z]{0,14}|[A-Z]{1,15}|")
_OPAQUE = re.compile(r"[\w.~+/=:-]{8,}", re.ASCII)  # no `<s>`, `[INST]` or `### Answer:`
# The variable that a secret belongs in, and what the secret looks like. Lengths and letters must
# be those of real secrets, since other names begin in the same way: those of Slovak data with
# `sk-`, and those of files with `hf_` and `pypi-`.
_MIXED = r"(?=[\w-]{0,31}[a-z])(?=[\w-]{0,31}[A-Z])"  # bounded, so a hostile line costs no time
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
# A user without a password is a token in an HTTP address, but only a name in other ones, such as
# `ssh://git@host` and `abfss://container@host`.
_USER = re.compile(
    r"(?:(?<=://)[^/?#\s\"':]*:|(?<=http://)|(?<=https://))[^/?#\s\"']+(?=@)", re.IGNORECASE
)
_QUERY = re.compile(r"(?<=[?&#])([\w.-]+)=[^&#\s\"']+")
_KEY = re.compile(r"(?<![\w.-])[\w.-]++(?=[\\\"']*\s*[:=])")


class SecretHit(NamedTuple):
    """A secret in a config.

    key: its dotted name
    variable: the environment variable to use instead
    text: what must be hidden
    """

    key: str
    variable: str
    text: str


def is_secret_name(key: str) -> bool:
    """Whether a key is the name of a secret, in any spelling: `hub_token`, `apiKey`, `API-KEY`."""
    name = _plain(key)
    return bool(_NAME.search(name) or _ALSO_A_FIELD.search(name))


def is_secret(name: str, value: object) -> bool:
    """Whether the value under this name is a secret; a password may be a number.

    If a model may have a field of that name (`assistant_token`, `sort_key`), only a string of 8 or
    more letters, digits and `_.~+/=:-` is a secret, and only if it is not made of plain words.
    """
    plain = _plain(name)
    if _NAME.search(plain):
        return value is not None and not isinstance(value, bool) and bool(str(value).strip())
    if not isinstance(value, str) or not _ALSO_A_FIELD.search(plain):
        return False
    text = value.strip()
    words = all(_WORD.fullmatch(part) for part in re.split(r"[^A-Za-z0-9]", text))
    return bool(_OPAQUE.fullmatch(text)) and not words


def in_config(tree: object) -> list[SecretHit]:
    """Return every secret in the values of a config file, at any depth, also under unknown keys."""
    values = [(path, value, _variable(path, value)) for path, value in leaves(tree)]
    return [
        SecretHit(".".join(path), variable, str(value))
        for path, value, variable in values
        if variable
    ]


def problems(found: Iterable[SecretHit]) -> list[Problem]:
    """Return one problem for each secret, without its value."""
    expected = "no secret in a config: it is written into the run directory and shown in reports"
    remedy = "take it out of the config (and change it if others could read it); export {}=…"
    hide = without([])
    return [Problem(hide(one.key), None, expected, remedy.format(one.variable)) for one in found]


def clear(said: Iterable[Problem], found: Iterable[SecretHit]) -> list[Problem]:
    """Return the problems of the secrets, and the other problems with the secrets hidden."""
    found = list(found)
    hide, keys = without(one.text for one in found), {one.key for one in found}
    others = [
        Problem(hide(one.key), _value(one, hide), hide(one.expected), hide(one.remedy))
        for one in said
        if one.key not in keys
    ]
    return [*problems(found), *others]


def hide_unparsed(text: str) -> str:
    """Hide secrets in a string that may not be YAML, and everything after the name of a secret."""
    text = without([])(text)
    for name in _KEY.finditer(text):
        if is_secret_name(name[0]):
            return text[: name.end()] + re.sub(
                r"(?s)([:=]\s*).*", rf"\1{HIDDEN}", text[name.end() :]
            )
    return text


def hider(environ: Mapping[str, str]) -> Hide:
    """Return a function that puts `***` in place of every secret in a string.

    environ: values of its variables with the name of a secret are hidden if they have 8 characters
        or more and are not one plain word (`training`). Those below 16 characters are hidden only
        where they are whole words

    These are always hidden: text that looks like a token or key, a user or password in an address,
    and parameters of an address with the name of a secret.
    """
    named = [value.strip() for name, value in environ.items() if is_secret_name(name)]
    return without(one for one in named if len(one) >= _SHORTEST and not _WORD.fullmatch(one))


def without(secrets: Iterable[str]) -> Hide:
    """Return a function that hides these secrets, and everything that looks like one.

    The secrets are also hidden as JSON, Python and addresses spell them.
    """
    spelled: set[str] = set()
    for plain in filter(None, map(str.strip, secrets)):
        in_json = (json.dumps(plain, ensure_ascii=both)[1:-1] for both in (True, False))
        spelled |= {plain, *in_json, repr(plain)[1:-1], quote(plain, safe="")}
    # The longest first, since one may begin with another.
    known = "|".join(map(_pattern, sorted(spelled, key=lambda text: (-len(text), text))))
    known_pattern = re.compile(known) if known else None

    def hide(text: str) -> str:
        if known_pattern is not None:
            text = known_pattern.sub(HIDDEN, text)
        text = _LOOK.sub(HIDDEN, text)
        if "://" in text:
            text = _USER.sub(HIDDEN, text)
        if "=" in text:
            text = _QUERY.sub(lambda one: HIDDEN if is_secret_name(one[1]) else one[0], text)
        return text

    return hide


def _pattern(text: str) -> str:
    r"""Return a pattern for the text; for a short one as a whole word, also after `\n` or `%20`."""
    escaped = re.escape(text)
    if len(text) >= _LONG:
        return escaped
    return rf"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-F][0-9A-F])){escaped}(?![A-Za-z0-9])"


def hidden(value: object, hide: Hide, name: str = "") -> Any:
    """Return a copy of plain data in which secrets are hidden, by `hide` and by their names."""
    if isinstance(value, Mapping):
        return {key: hidden(inner, hide, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [hidden(inner, hide, name) for inner in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if is_secret(name, value) else hide(value)


def _value(problem: Problem, hide: Hide) -> object:
    """Return the value that a problem shows, with secrets hidden.

    The problem's key may end with ` (line 3)`, and its value may be a tag that begins with `!`.
    """
    if problem.value is None:
        return None
    shown = str(problem.value)
    secret = is_secret(problem.key.partition(" ")[0], shown.strip("\"'!"))
    return HIDDEN if secret else hide(shown)


def leaves(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the path and the value of every scalar in plain data, at any depth."""
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, inner in value.items():
        yield from leaves(inner, (*path, str(name)))


def _variable(path: tuple[str, ...], value: object) -> str:
    """Return the variable that a secret belongs in; "" if the value is no secret."""
    names = [name for name in path if not name.isdecimal()]
    if names and is_secret(names[-1], value):
        if "wandb" in _plain("_".join(names)):
            return "WANDB_API_KEY"
        last = _plain(names[-1])
        plain = last in ("token", "auth_token", "access_token", "use_auth_token")
        return "HF_TOKEN" if plain or {"hf", "hub"} & set(last.split("_")) else last.upper()
    if not isinstance(value, str):
        return ""
    for variable, look in _LOOKS:
        if re.search(_BEFORE + f"(?:{look})", value):
            return variable
    parameters = (match[1] for match in _QUERY.finditer(value))
    in_address = _USER.search(value) or any(map(is_secret_name, parameters))
    return "HF_TOKEN" if in_address else ""


def _plain(name: str) -> str:
    """Return a name in one spelling: hub_token for `hubToken`, `hub-token` and `HUB_TOKEN`."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[^a-z0-9]+", "_", parted.lower())
