"""`llmtrain data …`: inspect and convert training data, and show the results in 80 columns.

Only typer is imported here, as in `main.py`.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.cli import options
from llmtrain.system import cores
from llmtrain.text import columns, fit, harmless, wrap

if TYPE_CHECKING:
    from llmtrain.tools.data.inspect import Inspection, PairFacts, Shown, SourceFacts
    from llmtrain.tools.data.tokenize import Repacked, Tokenized
    from llmtrain.tools.data.which import DocumentSpan, StepDocuments


BAR = 40
SHOWN_DOCUMENTS = 6  # of a block
SHOWN_LINES = 3  # of a document
SHOWN_PROMPT = 80  # characters of a pair's prompt
INDENT = "    "


def inspection(found: Inspection) -> Iterator[str]:
    """Yield counts, lengths and blocks. A number after ~ is an estimate."""
    count = len(found.sources)
    measured = f"in the first {found.measured_blocks:,} blocks"
    yield f"data      {count} source{'s' * (count > 1)}, {found.lanes} lanes"
    tokens = f"{_mark('tokens_per_byte', found)}{found.tokens_per_byte:.3f}"
    yield f"tokens    {tokens} a byte, tokenized by {found.backend}"
    yield f"blocks    {found.seq_len:,} tokens, {found.packing}"
    yield f"epoch     {_mark('steps_per_epoch', found)}{found.steps_per_epoch:,} steps"
    yield f"padding   {_mark('padding', found)}{found.padding:.1%} of the tokens {measured}"
    cut = f"{_mark('documents_cut', found)}{found.documents_cut:.1%}"
    yield f"cut       {cut} of the {found.measured_documents:,} documents {measured}"
    if found.few_steps is not None:
        yield from options.labelled("note", str(found.few_steps))
    if found.pairs is not None:
        yield from _pairs(found.pairs)
    elif found.sequences is not None:
        each = f"{found.rewriting:.2f} tokens for each of whole conversations"
        yield f"chat      {found.sequences:,} sequences, {each}, {found.straddles:,} cut in two"
    for why, rows in (found.rejected or {}).items():
        yield f"          {rows:,} rows rejected: {why}"
    for source in found.sources:
        yield ""
        yield from _source(source)
    yield ""
    estimated = "lengths" in found.estimated
    looked = "of the documents that were looked at" if estimated else "of all documents"
    yield f"lengths in tokens, {looked}"
    most = max((bucket.documents for bucket in found.lengths), default=1)
    for bucket in found.lengths:
        bar = "#" * -(-BAR * bucket.documents // most)
        span = f"{bucket.least:,}-{bucket.most:,}"
        yield f"{INDENT}{span:>17} {bucket.documents:>11,} {bar}".rstrip()
    for block in found.blocks:
        yield ""
        yield from _block(block)


def _pairs(facts: PairFacts) -> Iterator[str]:
    """Yield the number of pairs, their lengths, and what is left out or cut."""
    names: Sequence[str] = ("chosen", "rejected")
    what = "pairs"
    if facts.desirable is not None:
        names, what = ("answer",), f"answers, {facts.desirable:,} of them desirable and "
        what += f"{facts.undesirable:,} undesirable"
    yield f"pairs     {facts.pairs:,} {what}; {facts.a_block:.2f} in a block"
    yield "          tokens of          median    90 % within    most"
    for name, size in zip(("prompt", *names), (facts.prompt, *facts.answers), strict=True):
        yield f"          {name:<14} {size.median:>10,} {size.most_of_90:>14,} {size.most:>7,}"
    cut = f"{facts.too_long:,} left out as too long, {facts.truncated:,} cut"
    yield f"          {cut}, {facts.equal:,} with equal answers"


def _mark(name: str, of: Inspection | SourceFacts) -> str:
    """Return the mark before a value: ~ for an estimate."""
    return "~" * (name in of.estimated)


def _source(source: SourceFacts) -> Iterator[str]:
    name = fit(harmless(source.name), 40)
    yield f"source {name}: {source.files:,} files, {source.units:,} units"
    if source.revision:
        yield f"{INDENT}revision {source.revision}"
    if source.estimated:
        yield f"{INDENT}~ estimated from {source.looked_at:,} documents"
    counts = ("documents", "heldout", "dropped", "replaced", "bytes", "tokens")
    facts = {name: f"{getattr(source, name):,}" for name in counts}
    facts["duplicates"] = f"{source.duplicates:,} of {source.looked_at:,}"
    facts["epochs"] = f"{source.epochs:,.2f} in the run"
    cells = [
        f"{name.replace('heldout', 'held out'):<11}{_mark(name, source) + fact:<24}"
        for name, fact in facts.items()
    ]
    for left, right in zip(cells[::2], cells[1::2], strict=True):
        yield f"{INDENT}{left} {right}".rstrip()
    if source.unread:
        keys = ", ".join(f"{key} ({rows})" for key, rows in sorted(source.unread.items()))
        yield from _lines(f"not read of its first rows (in how many): {keys}")


def _block(block: Shown) -> Iterator[str]:
    trained = sum(end - begin for begin, end in block.trained)
    share = trained / max(1, len(block.text))
    padding = f", {block.padding:,} tokens of padding" if block.padding else ""
    source = "no source" if block.source is None else harmless(block.source)
    yield fit(f"block {block.g} of {source}: {share:.0%} trained{padding}", options.WIDTH)
    edges = [0, *block.borders, len(block.text)]
    texts = [_with_marks(block, start, stop) for start, stop in pairwise(edges)]
    for number, text in enumerate(texts[:SHOWN_DOCUMENTS]):
        if block.halves:
            yield f"{INDENT}-------- pair {number // 2 + 1}: {block.halves[number]}"
        elif number:
            yield f"{INDENT}-------- document border"
        yield from _text(text)
    if len(texts) > SHOWN_DOCUMENTS:
        more = len(texts) - SHOWN_DOCUMENTS
        left_out = f"{more // 2} more pairs" if block.halves else f"{more} more documents"
        yield f"{INDENT}-------- {left_out}"


def _with_marks(block: Shown, start: int, stop: int) -> str:
    """Return the text of a document; of a conversation in ⟦…⟧ what is trained."""
    text = block.text[start:stop]
    if not block.conversations:
        return text
    for begin, end in reversed(block.trained):
        a, b = max(begin, start) - start, min(end, stop) - start
        if a < b:
            text = f"{text[:a]}⟦{text[a:b]}⟧{text[b:]}"
    answer = text.find("⟦")
    if block.halves and answer > SHOWN_PROMPT:
        return f"... {text[answer - SHOWN_PROMPT :]}"
    return text


def _text(text: str) -> Iterator[str]:
    """Yield the beginning of a text, and its length if there is more of it."""
    lines = list(_lines(text[: SHOWN_LINES * options.WIDTH]))
    yield from lines[:SHOWN_LINES]
    if len(lines) > SHOWN_LINES:  # also true if the text was cut above, as lines are < WIDTH
        yield f"{INDENT}... ({len(text):,} characters)"


def _lines(text: str) -> Iterator[str]:
    for line in wrap(harmless(text), options.WIDTH - len(INDENT)):
        yield (INDENT + line).rstrip()


def step_documents(found: StepDocuments) -> Iterator[str]:
    """Yield one line for each document in each block, and below it its text, if asked for."""
    yield f"step {found.step}: {found.blocks} blocks, digest {found.batch_digest}"
    yield _check(found)
    yield ""
    rows = [_row(document) for document in found.documents]
    head = ("block", "tokens", "source", "id", "title")
    limits = (12, 19, 21, 16, options.WIDTH)
    widths = [
        min(limit, max(columns(row[i]) for row in [head, *rows])) for i, limit in enumerate(limits)
    ]
    widths[-1] = options.WIDTH - sum(widths[:-1]) - 2 * (len(widths) - 1)
    yield _in_columns(head, widths)
    for row, document in zip(rows, found.documents, strict=True):
        yield _in_columns(row, widths)
        if document.text is not None:
            yield from _lines(document.text)
        if document.second_text is not None:
            yield f"{INDENT}-------- the second half of the pair"
            yield from _lines(document.second_text)


def _check(documents: StepDocuments) -> str:
    """Return how the documents were checked against the logged digests."""
    if documents.checked_at == documents.step:
        return "checked: metrics.jsonl has the same digest"
    if documents.checked_at is not None:
        only = f"checked at step {documents.checked_at} only"
        return f"{only}, the next whose digest was logged (logging.every_steps)"
    return "not checked: metrics.jsonl has no digest of this step or one soon after it"


def _row(document: DocumentSpan) -> tuple[str, ...]:
    place = f"{document.file} " + (f"{document.group}:" if document.group is not None else "")
    span = ":".join(map(str, (*document.span, *(document.second or ()))))
    title = document.title or document.url or f"{place}{document.at}"
    cells = (f"{document.g}", span, document.source, document.id or "-", title)
    return tuple(map(harmless, cells))


def _in_columns(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [fit(cell, width) for cell, width in zip(row, widths, strict=True)]
    gaps = [" " * (width - columns(cell)) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join(cell + gap for cell, gap in zip(cells, gaps, strict=True)).rstrip()


app = options.App()

Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="A new directory, or the same.")]
Jobs = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Processes; as many as there are processors.")
]


@app.command(help="what a config would train on: counts, lengths, packing, the first blocks")
def inspect(
    config: options.ConfigFile,
    overrides: options.Overrides = None,
    blocks: Annotated[int, typer.Option(min=0, metavar="N", help="Blocks to show as text.")] = 3,
    documents: Annotated[
        int, typer.Option(min=0, metavar="N", help="Documents of a source to look at; 0 = all.")
    ] = 1000,
    as_json: options.AsJson = False,
) -> None:
    """Look at a config's data, before a run or beside one."""
    from llmtrain.config.load import load_config

    loaded = load_config(config, overrides or [])
    with options.busy("importing torch"):
        from llmtrain.tools.data.inspect import inspect as look

        facts = look(loaded, blocks=blocks, documents=documents)
    options.show([json.dumps(facts.to_json())] if as_json else inspection(facts))


@app.command(help="the documents of a step, checked against the digest that the run logged")
def which(
    run: options.RunDir,
    step: Annotated[int, typer.Option(metavar="N", help="A step that the run has made.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[data.sources.N.path=PATH]...", help="Where the data is now."),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Show what of them is in the step.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Name the documents of a step of a run."""

    with options.busy("importing torch"):
        from llmtrain.tools.data.which import which as find

        documents = find(run, step, overrides=overrides or [], text=text)
    options.show([json.dumps(documents.to_json())] if as_json else step_documents(documents))


@app.command(help="tokens of all documents as Megatron .bin and .idx; the same command continues")
def tokenize(
    config: options.ConfigFile,
    out: Out,
    overrides: options.Overrides = None,
    jobs: Jobs = None,
    as_json: options.AsJson = False,
) -> None:
    """Write the token cache of a config's sources."""
    on_progress = _progress(
        lambda done, of, tokens: f"tokenized {done} of {of} units, {tokens:,} tokens"
    )
    with _interruptible():
        from llmtrain.config.load import load_config

        loaded = load_config(config, overrides or [])
        from llmtrain.tools.data.tokenize import tokenize as write  # imports torch

        result = write(loaded, out, jobs or cores().count, on_progress)
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
    as_json: options.AsJson = False,
) -> None:
    """Rewrite data files in small row groups."""
    on_progress = _progress(lambda done, of, rows: f"repacked {done} of {of} files, {rows:,} rows")
    with _interruptible():
        from llmtrain.tools.data.tokenize import repack as write

        result = write(path, out, row_group_mb, text_column, jobs or cores().count, on_progress)
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
    line = options.ProgressLine(wait=False)

    def show_progress(done: int, of: int, amount: int) -> None:
        if line.is_due() or done == of:
            line.show(words(done, of, amount), last=done == of)

    return show_progress


def _show(result: Tokenized | Repacked, as_json: bool, out: Path) -> None:
    """Print the result, as one JSON object or as lines."""
    values = asdict(result) | {"seconds": round(result.seconds, 3)}
    if as_json:
        print(json.dumps(values))
        return
    options.show(str(out / name) for name in result.files)
    facts = [f"{value:,} {key}" for key, value in values.items() if isinstance(value, int)]
    print(f"{', '.join(facts)} in {result.seconds:.1f} s")
