"""Several runs side by side: which ends lower, in which keys they differ, their curves.

Losses of runs with different tokenizers cannot be compared, since a token is then something else.
Such runs are compared by bits per byte, and the page says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.report import verdict
from llmtrain.report.collect import Points, Tables, collect, column, thin
from llmtrain.report.page import fill, write
from llmtrain.report.svg import Figure, Series, draw, smooth
from llmtrain.rundir.words import strategy_in_words
from llmtrain.text import compact, fixed

_DRAWN = 4
_OWN = ("run.dir",)
_MEASURES = {
    "loss": "held-out loss",
    "bits_per_byte": "bits per byte",
    "accuracy": "held-out accuracy",
}
# What the loss of pairs depends on beside the model.
_OF_PAIRS = (
    *("loss", "beta", "label_smoothing", "gamma", "sft_weight"),
    *("desirable_weight", "undesirable_weight"),
)


@dataclass(frozen=True, slots=True)
class ReportRow:
    """What the table shows of a run. last, best: of the measure that the runs are compared by."""

    name: str
    state: str
    steps: int
    last: float | None
    best: float | None
    trained: float | None
    tokens: float | None
    seconds: float
    goodput: float | None


def write_comparison(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write a page that compares runs, and return its path.

    Raises UserError if a directory has no run, or the file cannot be written.
    """
    return write(render([collect(one) for one in run_dirs]), out)


def render(runs: Sequence[Tables]) -> str:
    """Render the page that compares runs."""
    from markupsafe import Markup

    names = _names(runs)
    # The tokenizers differ, as far as the records know.
    kinds = {
        (_of_start(run, "vocabulary"), compact(run.settings.get("model.tokenizer"))) for run in runs
    }
    losses = {
        tuple(str(run.settings.get(f"preference.{key}")) for key in _OF_PAIRS) for run in runs
    }
    if any(run.pair_loss for run in runs):
        measure = "accuracy" if len(losses) > 1 or len(kinds) > 1 else "loss"
    else:
        measure = "bits_per_byte" if len(kinds) > 1 else "loss"
    rows = [_row(name, run, measure) for name, run in zip(names, runs, strict=True)]
    drawn = [*_figures(names, runs, measure)] if len(runs) <= _DRAWN else []
    return fill(
        "compare.html",
        title=" and ".join(names[:3]),
        scripted=bool(drawn),
        sentence=sentence(rows, measure),
        remarks=_remarks(runs, measure),
        rows=rows,
        measure=_MEASURES[measure],
        differences=differences(runs),
        figures=[Markup(draw(one)) for one in drawn],
    )


def sentence(rows: Sequence[ReportRow], measure: str) -> str:
    """Say which run ends lowest, of accuracy highest, and by how much."""
    label, high = _MEASURES[measure], measure == "accuracy"
    results = [(row.last, place) for place, row in enumerate(rows) if row.last is not None]
    scored = sorted(results, key=lambda one: (-one[0] if high else one[0], one[1]))
    if len(scored) < 2:
        return f"Fewer than two of the runs have a {label}, so nothing can be compared."
    (best, first), (next_, second) = scored[0], scored[1]
    if best == next_:
        return f"{rows[first].name} and {rows[second].name} end equal: {label} {fixed(best)}."
    apart = f"{fixed(abs(next_ - best))} {'above' if high else 'below'} {rows[second].name}"
    ends = "ends highest" if high else "ends lowest"
    return f"{rows[first].name} {ends}: {label} {fixed(best)}, {apart}."


def differences(runs: Sequence[Tables]) -> list[tuple[str, list[str]]]:
    """Return the keys whose values are not the same in all runs, with the value in each."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    values = {key: [run.settings.get(key, "–") for run in runs] for key in keys if key not in _OWN}
    values["processes"] = [_of_start(run, "world_size") for run in runs]
    values["strategy"] = [strategy_in_words(run.last_start) for run in runs]
    return [
        (key, [compact(one) for one in each])
        for key, each in values.items()
        if any(one != each[0] for one in each)
    ]


def _of_start(run: Tables, name: str) -> str:
    return str(run.last_start.get(name, "?"))


def _names(runs: Sequence[Tables]) -> list[str]:
    """Return a name for each run that no other one has."""
    names: list[str] = []
    for run in runs:
        name, number = run.name, 2
        while name in names:
            name, number = f"{run.name} ({number})", number + 1
        names.append(name)
    return names


def _by_tokens(runs: Sequence[Tables]) -> bool:
    """Whether steps of the runs have different numbers of tokens."""
    keys = ("training.global_batch_size", "data.seq_len")
    return len({tuple(compact(run.settings.get(key)) for key in keys) for run in runs}) > 1


def _remarks(runs: Sequence[Tables], measure: str) -> Iterator[str]:
    if measure == "bits_per_byte":
        yield (
            "The tokenizers differ, so that a loss by token means something else in each run. "
            "The runs are compared by bits per byte of held-out text."
        )
    if measure == "accuracy":
        yield (
            "What is computed of a pair differs, so that a loss means something else in each run. "
            "The runs are compared by the share of held-out pairs that they have right."
        )
    if len({compact(run.settings.get("data.sources")) for run in runs}) > 1:
        yield "The data differs, so that the held-out documents may be others, too."
    if _by_tokens(runs):
        yield "The batches differ, so that the curves are drawn over tokens, not steps."
    for name, run in zip(_names(runs), runs, strict=True):
        if verdict.ended_not_finite(run):
            yield f"The last held-out loss of {name} is {verdict.NOT_FINITE}."
        else:
            yield from (f"{name}: {failure}" for failure in verdict.failures(run))
    if len(runs) > _DRAWN:
        yield f"Curves are drawn for up to {_DRAWN} runs."
    ids = [run.last_start.get("run_id") for run in runs if run.starts]
    if len(set(map(str, ids))) < len(ids):
        yield "The same run is here more than once."


def _row(name: str, run: Tables, measure: str) -> ReportRow:
    values = [value for _, value in column(run.evaluations, measure)]
    trained, tokens = run.numbers("loss").values, run.numbers("tokens").values
    return ReportRow(
        name=name,
        state=str(run.status.get("state", "unknown")),
        steps=verdict.last_step(run),
        last=values[-1] if values and not verdict.ended_not_finite(run) else None,
        best=(max if measure == "accuracy" else min)(values, default=None),
        trained=trained[-1] if trained else None,
        tokens=tokens[-1] if tokens else None,
        seconds=run.wall_seconds,
        goodput=verdict.goodput(run),
    )


def _figures(names: Sequence[str], runs: Sequence[Tables], measure: str) -> Iterator[Figure]:
    """Yield the figures: the measure held out, and, with equal tokenizers, the training loss."""
    over_tokens = _by_tokens(runs)
    kinds = [("heldout", _MEASURES[measure].capitalize(), "evaluations", measure)]
    if measure == "loss":
        kinds.append(("loss", "Training loss", "train", "loss"))
    for name, title, lines, field in kinds:
        series = []
        for place, (label, run) in enumerate(zip(names, runs, strict=True)):
            points, tokens = column(getattr(run, lines), field), run.numbers("tokens")
            if over_tokens:  # the steps become the tokens that were trained until then
                each = tokens[-1][1] / tokens[-1][0] if tokens and tokens[-1][0] else None
                points = Points((round(step * each), value) for step, value in points if each)
            if points:
                curve = thin(points) if lines == "evaluations" else smooth(thin(points))
                series.append(Series(label, curve, place, dots=lines == "evaluations"))
        if series:
            nats = "nats a pair" if any(run.pair_loss for run in runs) else "nats a token"
            unit = nats if field == "loss" else ""
            across = "token" if over_tokens else "step"
            yield Figure(name, title, unit, tuple(series), leave_out=True, across=across)
