"""Secrets: refused in a config, and hidden in whatever a run writes down or says.

A secret is known by its name (`hub_token`, `api_key`), by what it looks like (`hf_…`, `sk-…`,
`https://user:password@…`) or, in a text, by being the value of an environment variable so named.

    model.config.hub_token: refused, remedy `export HF_TOKEN=…`        bos_token: "<s>" is no secret

The trap: a message about a secret must not show it. Nothing that leaves this file holds a value.
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
_SHORTEST = 8  # of a variable's value: shorter ones are words that stand everywhere

_NAME = re.compile(r"(^|_)(token|secret|password|passwd|(api|access|private|secret)_?key)$")
# `<s>` is the bos_token: these keys of models and tokenizers hold a piece of the vocabulary.
_VOCABULARY = re.compile(
    r"(^|_)(bos|eos|pad|unk|cls|sep|mask|start|end|image|video|audio|boi|eoi|boa|eoa|bov|eov|eot|eod"
    r"|begin|stop|special|prefix|suffix|middle|language|lang|blank|newline|think)_token$"
)
# What a secret looks like, and the variable that it belongs into. Long enough to be no plain name:
# `sk-` begins names of Slovak data, `hf_` names of files.
_LOOKS = (
    ("HF_TOKEN", r"hf_(?:oauth_|jwt_)?[A-Za-z0-9]{20,}"),
    ("ANTHROPIC_API_KEY", r"sk-ant-[\w-]{16,}"),
    ("OPENAI_API_KEY", r"sk-(?:(?:proj|svcacct|admin|or-v1)-[\w-]{16,}|[A-Za-z0-9]{20,})"),
    ("GITHUB_TOKEN", r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"),
    ("GITLAB_TOKEN", r"glpat-[\w-]{20,}"),
    ("SLACK_TOKEN", r"xox[abeoprs]-[A-Za-z0-9-]{10,}"),
    ("AWS_ACCESS_KEY_ID", r"A(?:KIA|SIA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    ("GOOGLE_API_KEY", r"AIza[\w-]{35}"),
    ("NPM_TOKEN", r"npm_[A-Za-z0-9]{36}"),
    ("PYPI_TOKEN", r"pypi-[\w-]{40,}"),
    ("WANDB_API_KEY", r"wandb_v\d+_\w{20,}"),
    ("PRIVATE_KEY_FILE", r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
)
_BEFORE = r"(?<![A-Za-z0-9])"
_LOOK = re.compile(_BEFORE + "(?:" + "|".join(f"(?:{text})" for _, text in _LOOKS) + ")")
_USER_AND_PASSWORD = re.compile(r"(?<=://)[^/\s\"'@:]*:[^/\s\"'@]+(?=@)")
_IN_ADDRESS = re.compile(
    r"(?<=://)[^/\s\"'@]+(?=@)"
    r"|(?<=[?&])[\w.-]*(?:sig|signature|token|key|credential)=[^&\s\"']+",
    re.IGNORECASE,
)


class Found(NamedTuple):
    """A secret in a config: the dotted key, the variable to use, and the text to be hidden."""

    key: str
    variable: str
    text: str


def is_secret_name(key: str) -> bool:
    """Whether what is called so is a secret, in any spelling: `hub_token`, `apiKey`, `API-KEY`."""
    name = _plain(key)
    return bool(_NAME.search(name)) and not _VOCABULARY.search(name)


def in_config(tree: object) -> list[Found]:
    """Every secret of a config as it was written, whether its keys exist or not, at any depth."""
    return list(_walk(tree, ()))


def problems(found: Iterable[Found]) -> list[Problem]:
    """What is said of them: never their values."""
    expected = "no secret in a config: it is written into the run directory and shown in reports"
    remedy = "take it out of the config (and change it if others could read it); export {}=…"
    hide = without([])
    return [Problem(hide(one.key), None, expected, remedy.format(one.variable)) for one in found]


def cleared(said: Iterable[Problem], found: Iterable[Found]) -> list[Problem]:
    """The secrets' own problems, and the others without anything of them in their texts."""
    found, said = list(found), list(said)
    unread = [str(one.value) for one in said if one.value and is_secret_name(one.key)]
    hide, keys = without([*(one.text for one in found), *unread]), {one.key for one in found}
    others = [
        Problem(
            hide(one.key),
            one.value if one.value is None else hide(str(one.value)),
            hide(one.expected),
            hide(one.remedy),
        )
        for one in said
        if one.key not in keys
    ]
    return [*problems(found), *others]


def hider(environ: Mapping[str, str]) -> Hide:
    """A function that puts `***` for every secret of a text: for the edges where texts go out.

    environ: the variables whose values are secrets if their names say so.
    """
    return without(
        [value for name, value in environ.items() if is_secret_name(name)],
        shortest=_SHORTEST,
    )


def without(secrets: Iterable[str], *, shortest: int = 1) -> Hide:
    """Hides these texts, however JSON and addresses spell them, and all that looks like one."""
    spelled = {text for one in secrets if len(one.strip()) >= shortest for text in _spellings(one)}
    # The longest first: one may begin with another.
    known = "|".join(re.escape(text) for text in sorted(spelled, key=lambda t: (-len(t), t)))
    known_pattern = re.compile(known) if known else None

    def hide(text: str) -> str:
        if known_pattern is not None:
            text = known_pattern.sub(HIDDEN, text)
        text = _LOOK.sub(HIDDEN, text)
        return _IN_ADDRESS.sub(HIDDEN, text) if "://" in text or "=" in text else text

    return hide


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
    return HIDDEN if is_secret_name(str(key)) else hide(value)


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
    """Where the secret belongs; "" if it is none."""
    names = [name for name in path if not name.isdecimal()]
    if names and is_secret_name(names[-1]) and _may_be_secret(names[-1], value):
        return _named_after(names)
    if not isinstance(value, str):
        return ""
    for variable, look in _LOOKS:
        if re.search(_BEFORE + f"(?:{look})", value):
            return variable
    return "HF_TOKEN" if _USER_AND_PASSWORD.search(value) else ""


def _may_be_secret(name: str, value: object) -> bool:
    """Texts; a password may be a number, which a count per token is not."""
    if isinstance(value, str):
        return bool(value.strip())
    counted = isinstance(value, bool) or name.lower().endswith("token")
    return value is not None and not counted


def _named_after(names: list[str]) -> str:
    path, last = _plain("_".join(names)), _plain(names[-1])
    if "wandb" in path:
        return "WANDB_API_KEY"
    hub = last in ("token", "auth_token", "access_token", "use_auth_token") or "hf" in last
    return "HF_TOKEN" if hub or "hub" in last else last.upper()


def _plain(name: str) -> str:
    """`hubToken`, `hub-token` and `HUB_TOKEN` as hub_token."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[^a-z0-9]+", "_", parted.lower())


def _spellings(secret: str) -> set[str]:
    """As it is, in JSON with and without its own letters, in an address, and as Python shows it."""
    plain = secret.strip()
    return {
        plain,
        json.dumps(plain)[1:-1],
        json.dumps(plain, ensure_ascii=False)[1:-1],
        repr(plain)[1:-1],
        quote(plain, safe=""),
    }
