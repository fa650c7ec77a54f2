"""The pages of the documentation: their fences, their sentences, what a command should print."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from helpers.ranks import ROOT
from markdown_it import MarkdownIt
from markdown_it.token import Token

DOCS = ROOT / "docs"
MEASURED = ("results", "faults")
GENERATED = ("config", "commands", "files", "exit-codes", "python")
WRITTEN_BY_PROGRAMS = {f"reference/{name}.md" for name in (*MEASURED, *GENERATED)}
OPTIONS = {
    "bash": {"run", "add", "reason"},
    "python": {"run", "reason"},
    "text": {"compare", "reason"},
    "yaml": {"config", "reason"},
    **dict.fromkeys(("json", "toml", "html", "mermaid", "dockerfile", "diff"), frozenset[str]()),
}


@dataclass(frozen=True)
class Fence:
    """A block of code.

    page: its path below docs/; README.md and CONTRIBUTING.md are pages too
    line: of the page, where it begins
    options: what is in braces behind the language
    """

    page: str
    line: int
    language: str
    options: Mapping[str, str]
    text: str

    @property
    def runs(self) -> bool:
        """Whether the page's test runs it."""
        return self.language in ("bash", "python") and self.options.get("run") != "no"

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def names() -> list[str]:
    """Every page below docs/."""
    return sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def by_hand() -> list[str]:
    """The pages below docs/ that people write."""
    return [name for name in names() if name not in WRITTEN_BY_PROGRAMS]


def path_of(page: str) -> Path:
    """The file of a page."""
    return (ROOT if page in ("README.md", "CONTRIBUTING.md") else DOCS) / page


@cache
def tokens(page: str) -> list[Token]:
    """A page as markdown-it-py reads it."""
    text = path_of(page).read_text("utf-8")
    return MarkdownIt().enable("table").parse(text)


def fences(page: str) -> list[Fence]:
    """The blocks of code of a page, in order."""
    found = (token for token in tokens(page) if token.type == "fence")
    return [_fence(page, token) for token in found]


def _fence(page: str, token: Token) -> Fence:
    """Only `language {options}`: the site's generator would show anything else as plain text."""
    line = (token.map or [0])[0] + 1
    parts = re.fullmatch(r"(\w+)(?: \{(.*)\})?", token.info)
    assert parts, f"{page}:{line}: not `language` or `language {{options}}`: {token.info}"
    options = dict(one.split("=", 1) for one in shlex.split(parts[2] or ""))
    assert parts[1] in OPTIONS, f"{page}:{line}: none of {', '.join(OPTIONS)}: {parts[1]}"
    unknown = options.keys() - OPTIONS[parts[1]]
    assert not unknown, f"{page}:{line}: unknown options {unknown}"
    left_out = {"run", "compare", "config"} & options.keys()
    assert all(options[one] in ("no", "exact") for one in left_out), f"{page}:{line}: {options}"
    needs_reason = any(options[one] == "no" for one in left_out)
    assert needs_reason == ("reason" in options), f"{page}:{line}: `no` and a reason go together"
    return Fence(page, line, parts[1], options, token.content)


def command_lines(text: str) -> list[str]:
    """The lines of a bash fence; those that end in a backslash are joined."""
    joined = re.sub(r"\\\n\s*", " ", text)
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def prints(shown: str, printed: str, *, exact: bool = False) -> bool:
    """Whether a command printed what a page shows.

    `…` is any text of a line, and alone any number of lines. Runs of spaces are one, and a number
    with a decimal point stands for any such number, unless `exact`.
    """
    if exact:
        return shown == printed
    lines = [_pattern(line) for line in _plain(shown).splitlines()]
    return re.fullmatch("".join(lines), _plain(printed) + "\n") is not None


def _plain(text: str) -> str:
    return "\n".join(re.sub(" +", " ", line).rstrip() for line in text.strip().splitlines())


def _pattern(line: str) -> str:
    if line.strip() == "…":
        return r"(?:[^\n]*\n)*"
    pieces = re.split(r"(…|\d[\d,]*\.\d+(?:e[+-]?\d+)?)", line)
    number = r"\d[\d,]*\.\d+(?:e[+-]?\d+)?"
    wild = [r"[^\n]*" if piece == "…" else number for piece in pieces[1::2]]
    plain = [re.escape(piece) for piece in pieces[::2]]
    return "".join(one + other for one, other in zip(plain, [*wild, r"\n"], strict=True))


def sentences(page: str) -> Iterator[list[str]]:
    """The words of each sentence of the prose: paragraphs and items, not headings and tables."""
    kind = ""
    for token in tokens(page):
        if token.type.endswith("_open"):
            kind = token.type
        if token.type == "inline" and kind not in ("heading_open", "th_open", "td_open"):
            for sentence in re.split(r"(?<=[.!?])\s+", _words(token)):
                if words := re.findall(r"[\w§%×†'’+-]*\w[\w'’-]*", sentence):
                    yield words


def words(page: str) -> int:
    """How many words a page has, its tables too; blocks of code are left out."""
    inline = (token for token in tokens(page) if token.type == "inline")
    return sum(len(re.findall(r"\w[\w'’-]*", _words(token))) for token in inline)


def _words(token: Token) -> str:
    """The text of a paragraph; code is one word."""
    shown = {"text": str, "code_inline": lambda _: "code", "softbreak": lambda _: " "}
    children = token.children or []
    return "".join(shown[c.type](c.content) for c in children if c.type in shown)


def links(page: str) -> Iterator[str]:
    """What a page's links lead to."""
    for token in tokens(page):
        for child in token.children or []:
            target = child.attrs.get("href") or child.attrs.get("src")
            if target:
                yield str(target)


def anchors(page: str) -> set[str]:
    """The names of a page's headings, as in links."""
    found, before = set(), None
    for token in tokens(page):
        if before is not None and before.type == "heading_open":
            text = "".join(child.content for child in token.children or [])
            found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower()))
        before = token
    return found
