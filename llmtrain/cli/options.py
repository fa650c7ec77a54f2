"""What several commands share: arguments and options, their completion by the shell, and output.

TAB starts a process, so completion imports only typer: the keys and their values come from
`config/keys.json`, a list that `scripts/reference.py` writes and a test compares with the schema.

    llmtrain train configs/quickstart.yaml data.pack‸   →   data.packing=auto, =concat, …

What commands print may hold the text of documents, which may contain anything. Characters that are
not printable are written as escapes, so that they cannot move the cursor or change the direction of
writing. No colours are used.
"""

import json
import logging
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from llmtrain import config as config_package, system
from llmtrain.errors import Problem, raise_any
from llmtrain.text import harmless, wrap

_KEYS = Path(config_package.__file__).with_name("keys.json")
_ITEM = "*"


class _Completes:
    """Parses the words of a completion without checking them, for which typer needs pydantic."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the command."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # typer's class has it
        if ctx.resilient_parsing:  # nothing is run: the shell wants a completion
            for one in params:
                one.process_value = lambda ctx, value: value
        return params


class Command(_Completes, TyperCommand):
    """A command."""


class CommandGroup(_Completes, TyperGroup):
    """A group of commands."""


class App(typer.Typer):
    """A group of commands whose help is plain text."""

    def __init__(self, cls: type[TyperGroup] = CommandGroup) -> None:
        super().__init__(
            cls=cls, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True
        )

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """Return a decorator that adds a command."""
        return super().command(name, cls=Command, **options)


def configs(incomplete: str) -> list[str]:
    """Return configs that may be meant: those in `configs/`, and those in the folder typed."""
    return _yaml_files("configs/**/[!.]*.yaml", incomplete)


def runs(incomplete: str) -> list[str]:
    """Return run directories that may be meant: those in `runs/`, and those in the folder typed."""
    from llmtrain.rundir.contents import METRICS

    folder = _folder(incomplete)
    beside = (folder + path.parent.name for path in Path(folder or ".").glob(f"*/{METRICS}"))
    return sorted({*(str(path.parent) for path in Path().glob(f"runs/*/{METRICS}")), *beside})


def configs_and_runs(incomplete: str) -> list[str]:
    """Return configs and run directories that may be meant."""
    return [*configs(incomplete), *runs(incomplete)]


def launch_files(incomplete: str) -> list[str]:
    """Return launch files that may be meant: of `accelerate_configs/`, and in the folder typed."""
    return _yaml_files("accelerate_configs/*.yaml", incomplete)


def recipes(incomplete: str) -> list[str]:
    """Return the names of all recipes."""
    from llmtrain.tools.recipes import recipes as known

    return list(known())


def overrides(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return `section.key=` for the keys that may be meant; for a single one its values, too.

    Bash hands `key=value` over as three words, `key`, `=` and `value`, and `key=` as the word
    `key` with nothing after it. It then replaces only the value.
    """
    known = json.loads(_KEYS.read_text(encoding="utf-8"))
    given: list[str] = ["", "", *(ctx.params.get("overrides") or [])]
    before, last = given[-2:]
    if last == "=":
        return _values(known, before)
    if not incomplete and before != "=" and _values(known, last):
        return _values(known, last)
    name, equals, _ = incomplete.partition("=")
    names = [name] if equals else [key for key in _names(known, name) if key.startswith(name)]
    if len(names) != 1:
        return [f"{key}=" for key in names]
    # A space would follow a completion that has no alternative.
    return [f"{names[0]}=", *(f"{names[0]}={value}" for value in _values(known, names[0]))]


def _yaml_files(pattern: str, incomplete: str) -> list[str]:
    folder = _folder(incomplete)
    beside = (folder + path.name for path in Path(folder or ".").glob("[!.]*.yaml"))
    return sorted({*map(str, Path().glob(pattern)), *beside})


def _folder(incomplete: str) -> str:
    """Return the folder of a path that is being typed, as it was typed, with its slash."""
    head, slash, _ = incomplete.rpartition("/")
    return head + slash


def _names(known: dict[str, list[str]], typed: str) -> Iterator[str]:
    """Yield the names of all keys; in a list, those of the item that was typed, or of the first."""
    number = next((part for part in typed.split(".") if part.isdecimal()), "0")
    yield from (key.replace(_ITEM, number) for key in known)


def _values(known: dict[str, list[str]], name: str) -> list[str]:
    """Return the default of a key and its other values where they are few; [] if not known."""
    general = ".".join(_ITEM if part.isdecimal() else part for part in name.split("."))
    return [shlex.quote(value) for value in known.get(general, [])]


ConfigFile = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML file.", autocompletion=configs)
]
_KEY_VALUE, _VALUES = "[section.key=value]...", "Values in place of the file's."
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar=_KEY_VALUE, help=_VALUES, autocompletion=overrides),
]
RunDir = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory.", autocompletion=runs)
]
_LAUNCH = "The accelerate config to launch with."
AccelerateFile = Annotated[
    Path | None,
    typer.Option("--accelerate", metavar="FILE", help=_LAUNCH, autocompletion=launch_files),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


_NODES = "Machines that may come and go; give it on each."
Nodes = Annotated[str | None, typer.Option(metavar="MIN:MAX", help=_NODES)]
ProcessesPerNode = Annotated[
    int | None, typer.Option(min=1, metavar="P", help="Processes of each machine.")
]


def refuse(given: Mapping[str, object], expected: str) -> None:
    """Raise UserError that lists the options that are given, each with what was expected."""
    raise_any([Problem(key, one, expected) for key, one in given.items() if one is not None])


WIDTH = 80


def show(lines: Iterable[str], keep: str = "") -> None:
    """Print lines, with control characters written as escapes.

    Characters that the terminal's encoding lacks are also escaped. keep: as in `harmless`.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    for line in lines:
        print(harmless(line, keep))


def tell(text: object, keep: str = "") -> None:
    """Print a text on stderr, at once and with control characters escaped. keep: as for `show`"""
    print(harmless(str(text), keep), file=sys.stderr, flush=True)


LABEL = 10  # columns


def labelled(label: str, text: str) -> Iterator[str]:
    """Yield the label and the text after it; further lines of the text are indented."""
    for line in wrap(text, WIDTH - LABEL):
        yield f"{label:<{LABEL}}{line}"
        label = ""


class LogLine(logging.Formatter):
    """A formatter of log lines for a terminal, used until a run has set up its log file."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted message, with control characters escaped."""
        return harmless(super().format(record), keep="\n")


_BUSY_AFTER_SECONDS = 3.0
_SECONDS_BETWEEN = {True: 0.5, False: 30.0}  # True: on a terminal, where lines replace each other


class ProgressLine:
    """A line of progress: on a terminal it replaces the last one, elsewhere it is added below."""

    def __init__(self, wait: bool) -> None:
        """Begin. wait: whether the first line is due only after a normal interval."""
        self.moves = sys.stderr.isatty()
        self._next = time.perf_counter() + _SECONDS_BETWEEN[self.moves] * wait

    def is_due(self) -> bool:
        """Whether it is time for another line. If so, the next one is due after an interval."""
        now = time.perf_counter()
        if now < self._next:
            return False
        self._next = now + _SECONDS_BETWEEN[self.moves]
        return True

    def show(self, text: str, *, last: bool = False) -> None:
        """Write the line. last: move the cursor to the next line."""
        begin, end = ("\r\033[K", "\n" * last) if self.moves else ("", "\n")
        print(f"{begin}{harmless(text)}", end=end, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line, if it is on a terminal."""
        if self.moves:
            self.show("")


@contextmanager
def busy(what: str) -> Iterator[Callable[[], None]]:
    """While the block runs, show on a terminal what it does, from the third second on.

    what: the first phase; `system.beat` sets the next ones

    Yields a function that ends this early, before the block shows something itself.
    """
    system.beat(what)
    line, over, began = ProgressLine(wait=False), threading.Event(), time.monotonic()

    def tell() -> None:
        wait = _BUSY_AFTER_SECONDS
        while not over.wait(wait):
            line.show(f"{system.beat_in_words()}, {time.monotonic() - began:.0f} s")
            wait = _SECONDS_BETWEEN[True]

    def end() -> None:
        if not over.is_set():
            over.set()
            thread.join()
            line.clear()

    thread = threading.Thread(target=tell, name="busy", daemon=True)
    if line.moves:
        thread.start()
    else:
        over.set()
    try:
        yield end
    finally:
        end()
