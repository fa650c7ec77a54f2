"""`llmtrain data …`: the commands to inspect and convert training data.

Only typer is imported here, as in `main.py`.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.cli.escapes import show
from llmtrain.cli.options import App, AsJson, ConfigFile, Overrides, RunDir
from llmtrain.cli.progress import ProgressLine, busy
from llmtrain.processes import cores

if TYPE_CHECKING:
    from llmtrain.tools.data.repack import Repacked
    from llmtrain.tools.data.tokenize import Tokenized

app = App()

Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="A new directory, or the same.")]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Processes; as many as there are processors."),
]


@app.command(help="what a config would train on: counts, lengths, packing, the first blocks")
def inspect(
    config: ConfigFile,
    overrides: Overrides = None,
    blocks: Annotated[int, typer.Option(min=0, metavar="N", help="Blocks to show as text.")] = 3,
    documents: Annotated[
        int, typer.Option(min=0, metavar="N", help="Documents of a source to look at; 0 = all.")
    ] = 1000,
    as_json: AsJson = False,
) -> None:
    """Look at a config's data, before a run or beside one."""
    from llmtrain.cli.data_views import inspection
    from llmtrain.config.load import load_config

    loaded = load_config(config, overrides or [])
    with busy("importing torch"):
        from llmtrain.tools.data.inspect import inspect as look

        found = look(loaded, blocks=blocks, documents=documents)
    show([json.dumps(found.to_json())] if as_json else inspection(found))


@app.command(help="the documents of a step, checked against the digest that the run logged")
def which(
    run: RunDir,
    step: Annotated[int, typer.Option(metavar="N", help="A step that the run has made.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[data.sources.N.path=PATH]...", help="Where the data is now."),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Show what of them is in the step.")] = False,
    as_json: AsJson = False,
) -> None:
    """Name the documents of a step of a run."""
    from llmtrain.cli.data_views import step_documents

    with busy("importing torch"):
        from llmtrain.tools.data.which import which as find

        found = find(run, step, overrides=overrides or [], text=text)
    show([json.dumps(found.to_json())] if as_json else step_documents(found))


@app.command(help="tokens of all documents as Megatron .bin and .idx; the same command continues")
def tokenize(
    config: ConfigFile,
    out: Out,
    overrides: Overrides = None,
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Write the token cache of a config's sources."""
    told = _progress(lambda done, of, tokens: f"tokenized {done} of {of} units, {tokens:,} tokens")
    with _interruptible():
        from llmtrain.config.load import load_config

        loaded = load_config(config, overrides or [])
        from llmtrain.tools.data.tokenize import tokenize as write  # imports torch

        result = write(loaded, out, jobs or cores().count, told)
    _show(result, as_json, out)


@app.command(help="any data files as parquet with small row groups; the same command continues")
def repack(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A file, a directory or a glob.")],
    out: Out,
    row_group_mb: Annotated[
        float, typer.Option(min=0.001, metavar="N", help="MiB of data in a row group.")
    ] = 8.0,
    text_column: Annotated[
        str, typer.Option(metavar="NAME", help="The column for the lines of text files.")
    ] = "text",
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Rewrite data files in small row groups."""
    told = _progress(lambda done, of, rows: f"repacked {done} of {of} files, {rows:,} rows")
    with _interruptible():
        from llmtrain.tools.data.repack import repack as write

        result = write(path, out, row_group_mb, text_column, jobs or cores().count, told)
    _show(result, as_json, out)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the command with one line and code 75; complete files stay."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in signals]
    try:
        yield
    except KeyboardInterrupt:
        for number in signals:  # another one would only add a traceback
            signal.signal(number, signal.SIG_IGN)
        begin = "\n" if sys.stderr.isatty() else ""  # below the line of progress
        print(f"{begin}interrupted; the same command continues", file=sys.stderr, flush=True)
        raise typer.Exit(75) from None
    for number, old in zip(signals, before, strict=True):
        signal.signal(number, old)


def _progress(words: Callable[[int, int, int], str]) -> Callable[[int, int, int], None]:
    """Return a function that shows progress on stderr, at intervals and at the end.

    words: makes the line from the tasks done, the number of tasks and the amount so far
    """
    line = ProgressLine(wait=False)

    def tell(done: int, of: int, amount: int) -> None:
        if line.is_due() or done == of:
            line.show(words(done, of, amount), last=done == of)

    return tell


def _show(result: Tokenized | Repacked, as_json: bool, out: Path) -> None:
    """Print the result, as one JSON object or as lines."""
    values = asdict(result) | {"seconds": round(result.seconds, 3)}
    if as_json:
        print(json.dumps(values))
        return
    show(str(out / name) for name in result.files)
    facts = [f"{value:,} {key}" for key, value in values.items() if isinstance(value, int)]
    print(f"{', '.join(facts)} in {result.seconds:.1f} s")
