"""What a finished start prints: what it reached, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.metrics.progress import clipped
from llmtrain.report import verdict
from llmtrain.report.collect import Tables, column
from llmtrain.report.words import count, fixed, percent, seconds, short


def end_block(run: Tables, width: int = 160) -> Iterator[str]:
    """Yield at most ten lines, between how the run ended and the path of its report.

    width: of the terminal; the sample is cut there
    """
    if losses := column(run.evaluations, "loss"):
        best, lowest = min(losses, key=lambda point: point[1])
        first, last = fixed(losses[0][1]), fixed(losses[-1][1])
        last = verdict.NOT_FINITE if verdict.ended_not_finite(run) else last
        yield f"held-out   {first} → {last}, best {fixed(lowest)} at step {count(best)}"
    elif verdict.ended_not_finite(run):
        yield f"held-out   {verdict.NOT_FINITE} in every evaluation"
    elif trained := run.numbers("loss"):
        yield f"loss       {fixed(trained[0][1])} → {fixed(trained[-1][1])}"
    if tokens := run.numbers("tokens"):
        share = verdict.goodput(run)
        good = "" if share is None else f", goodput {percent(share)}"
        yield f"tokens     {short(tokens[-1][1])} in {seconds(run.wall_seconds)}{good}"
    if run.samples:
        newest = run.samples[-1]
        said = " ".join(f"{newest.get('prompt')}{newest.get('text')}".split())
        yield clipped(f"sample     {said}", width)
    yield from (f"wrong      {said}" for said in verdict.failures(run))
    if verdict.best_checkpoint(run):
        for command, word in zip(verdict.uses(run), ("use", ""), strict=False):
            yield f"{word:<11}{command}"
    if run.status.get("state") != "finished":
        yield "resume     give the same command again"
    yield f"compare    llmtrain report {verdict.where(run)} OTHER --out comparison.html"
