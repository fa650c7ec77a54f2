"""`llmtrain checkpoints …`: the commands to list, verify, prune and rehearse checkpoints.

Only typer is imported here, as in `main.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.cli import options
from llmtrain.errors import Problem, UserError
from llmtrain.text import size

if TYPE_CHECKING:
    from llmtrain.tools.checkpoints import CheckpointRow, Listing, Pruned, Verified
    from llmtrain.tools.rehearse import Rehearsal, RehearsedSizes

app = options.App()

_RUN = "A run, its checkpoints/, or one checkpoint."
Run = Annotated[Path, typer.Argument(metavar="RUN", help=_RUN, autocompletion=options.runs)]
_LARGE_BYTES = 1 << 30  # size from which a verification shows its progress
_SIZE, _LOSS = 11, 9  # columns
_MEANS = {
    "partial": "being written, or cut off: never read",
    "damaged": "renamed: it is not what was written",
    "superseded": "renamed: the run resumed from an older one",
    "trash": "being deleted",
    "other run": "of another run: never read, never deleted",
    "unreadable": "unreadable: its manifest is not intact, or of another format",
    "other": "no checkpoint of a run",
}


@app.command("list", help="what is there, why it stays, and whether it looks valid")
def list_(run: Run, as_json: options.AsJson = False) -> None:
    """Show everything under `checkpoints/`; reads manifests and file sizes alone."""
    from llmtrain.tools.checkpoints import look

    checkpoints = look(run)
    options.show([json.dumps(checkpoints.to_json())] if as_json else listing(checkpoints))


@app.command(help="every byte against its digest; exit code 2 if anything differs")
def verify(
    run: Run,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One of them, as step-00000400.")
    ] = None,
    hashed: Annotated[
        bool, typer.Option("--hash", help="Show the SHA-256 of all weights and moments, too.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Read complete checkpoints as a resume does, and change nothing."""
    from llmtrain.tools.checkpoints import verify as look

    verified, show_progress = [], _progress()
    for one in look(run, name, show_progress, hashed=hashed):
        show_progress("", 0, 0)
        verified.append(one)
        if not as_json:
            options.show(verification(one))
    if as_json:
        options.show([json.dumps({"checkpoints": [one.to_json() for one in verified]})])
    raise typer.Exit(0 if verified and all(not one.problems for one in verified) else 2)


@app.command(help="delete what the config does not keep; without --yes only show it")
def prune(
    run: Run,
    keep_last: Annotated[
        int | None,
        typer.Option(min=2, metavar="K", help="Newest to keep, instead of the config's."),
    ] = None,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Damaged and superseded ones go too.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Make room in a run that is not alive; what stays is verified before anything is deleted."""
    from llmtrain.tools.checkpoints import prune as clear

    show_progress = _progress()
    pruned = clear(run, keep_last, yes=yes, set_aside=set_aside, on_progress=show_progress)
    show_progress("", 0, 0)
    options.show([json.dumps(pruned.to_json())] if as_json else pruning(pruned))
    raise typer.Exit(2 if pruned.lost else 0)


@app.command(help="prove here that a killed and resumed run equals a straight one")
def rehearse(
    config: options.ConfigFile,
    overrides: options.Overrides = None,
    kill_at: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="The step in which it is killed; 6 if left out."),
    ] = None,
    to: Annotated[
        str | None, typer.Option(metavar="STRATEGY", help="Strategy of the resumed run.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of processes of the resumed run.")
    ] = None,
    same_bits: Annotated[
        str | None,
        typer.Option(metavar="N,N…", help="Compare runs on these numbers of processes instead."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Train a few steps straight, the same with a kill and a resume, and compare."""
    from llmtrain.tools import rehearse as tool

    result: Rehearsal | RehearsedSizes
    if same_bits is not None:
        sizes = _sizes(same_bits, {"--kill-at": kill_at, "--to": to, "--processes": processes})
        result = tool.rehearse_sizes(config, overrides or [], sizes, options.tell)
        lines = sizes_rehearsal(result)
    else:
        at = tool.KILL_AT if kill_at is None else kill_at
        result = tool.rehearse(config, overrides or [], at, to, processes, options.tell)
        lines = rehearsal(result)
    options.show([json.dumps(result.to_json())] if as_json else lines)
    raise typer.Exit(0 if result.same else 2)


def _sizes(asked: str, others: Mapping[str, object]) -> list[int]:
    """Return the numbers of `--same-bits`. others: options that say something else, by name"""
    options.refuse(others, "nothing beside --same-bits, in which nothing is killed")
    parts = [part.strip() for part in asked.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(Problem("--same-bits", asked, "numbers of processes, as 1,2,3"))
    return [int(part) for part in parts]


def listing(found: Listing) -> Iterator[str]:
    """Yield a line for each directory, and below it what is wrong with it."""
    if not found.rows:
        yield "no checkpoints"
        return
    name = max(len(row.name) for row in found.rows) + 2
    yield f"{'name':<{name}}{'size':>{_SIZE}}{'loss':>{_LOSS}}  valid  stays as"
    for row in found.rows:
        valid = {None: "", True: "yes", False: "no"}[row.valid]
        loss = "" if row.loss is None else f"{row.loss:.4f}"
        line = f"{row.name:<{name}}{size(row.bytes):>{_SIZE}}{loss:>{_LOSS}}  {valid:<7}"
        line += _why(row, found)
        yield line.rstrip()
        for wrong in row.wrong or ():
            yield f"    {wrong}"


def verification(one: Verified) -> Iterator[str]:
    """Yield one line for a checkpoint, and below it one for each problem."""
    state = "damaged" if one.problems else "ok"
    if one.other_format:
        state = "another format"
    yield f"{one.name:<16}{state:<8} {size(one.bytes)} in {one.seconds:.1f} s"
    if one.sha256 is not None:
        yield f"    sha256 of all tensors: {one.sha256}"
    for problem in one.problems:
        if one.other_format:
            yield f"    {problem.value}; this needs {problem.expected}"
            yield f"    try: {problem.remedy}"
        else:
            yield f"    {problem.key}: {problem.value}"


def pruning(found: Pruned) -> Iterator[str]:
    """Yield what is deleted, what is kept, and how to delete if that was not done yet."""
    for word, rows in (("goes", found.goes), ("stays", found.stays)):
        for row in rows:
            why = ", ".join((*row.kept, *([] if row.kind == "complete" else [row.kind])))
            yield f"{word:<7}{row.name:<30}{size(row.bytes):>{_SIZE}}  {why}".rstrip()
            yield from (f"    {wrong}" for wrong in row.wrong or () if row.kind == "unreadable")
    if found.lost:
        yield "warning: no checkpoint of this run is valid; what was renamed stays"
    count = f"{len(found.goes)} of {len(found.goes) + len(found.stays)}"
    if not found.goes:
        yield "nothing to delete"
    elif found.deleted:
        yield f"deleted {count}, {size(found.bytes)}"
    else:
        yield f"would delete {count}, {size(found.bytes)}; --yes deletes"


def rehearsal(found: Rehearsal) -> Iterator[str]:
    """Yield both runs, what was compared, and the result."""
    seen = found.compared
    yield f"straight   {seen.straight}"
    yield f"killed     in step {found.killed_at}, resumed from {seen.resumed.resumed_from}"
    yield f"resumed    {seen.resumed}"
    yield f"batches    of {seen.steps} steps, by digest"
    if seen.losses:
        yield f"losses     of {seen.losses} steps, at most {seen.largest_difference:.1e} apart"
    if seen.note:
        yield f"           {seen.note}"
    if seen.files:
        yield f"files      {len(seen.files)} of weights and optimizer, byte by byte"
    for difference in seen.differences:
        yield f"differs    {difference}"
    yield from _result(found, "")


def sizes_rehearsal(found: RehearsedSizes) -> Iterator[str]:
    """Yield the hash of each number of processes, and whether all are one."""
    for launch, digest in zip(found.launches, found.hashes, strict=True):
        yield f"{launch!s:<21}{digest}"
    yield from _result(found, f", behind {found.steps} steps")


def _result(found: Rehearsal | RehearsedSizes, where: str) -> Iterator[str]:
    if found.folder is not None:
        yield f"kept       {found.folder}"
    yield f"{'the same' if found.same else 'different'}{where}, in {found.seconds:.0f} s"


def _why(row: CheckpointRow, checkpoints: Listing) -> str:
    if row.kind != "complete":
        return ", ".join((*row.kept, _MEANS[row.kind]))
    if checkpoints.policy is None:
        return "not known: no config.yaml that loads"
    return ", ".join(row.kept) or "not kept: goes after the next save, or by prune"


def _progress() -> Callable[[str, int, int], None]:
    """Return a function that shows the progress of a large file; 0 bytes clear the line."""
    line = options.ProgressLine(wait=True)

    def show_progress(name: str, whole: int, done: int) -> None:
        if not whole:
            line.clear()
        elif whole >= _LARGE_BYTES and line.is_due():
            line.show(f"{name}: {size(done)} of {size(whole)}")

    return show_progress
