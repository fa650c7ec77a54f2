"""Writes `report.html`: one file that opens anywhere, without a network, light or dark.

Everything that a run wrote is text in the page: Jinja escapes it, and `svg.py` escapes the names in
figures. The content security policy allows one script, by its hash; without it, only hovering and
zooming are missing.
"""

import base64
import gc
import hashlib
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

from llmtrain import text
from llmtrain.report import verdict
from llmtrain.report.collect import Curve, Line, Points, Tables, collect, column, joined, thin
from llmtrain.report.svg import Figure, Series, draw, draw_band, shares, smooth
from llmtrain.rundir import contents
from llmtrain.rundir.words import in_words, strategy_in_words
from llmtrain.types import JsonMapping

_ROWS = 60
_CONFIG = 100_000
_MINUTES_FROM = 7200  # seconds of a run from which its time is shown in minutes
_OWNERS = {
    "training": "training",
    "waiting": "waiting for data",
    "evaluating": "evaluating",
    "saving": "saving",
    "starting": "starting",
    "redone": "steps that were done again",
    "down": "not running",
    "other": "other",
}


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run and return its path (`report.html` in the run directory).

    Raises UserError if the directory has no run or the file cannot be written.
    """
    gc.disable()  # a long record has no garbage, and to look for some takes a fifth of the time
    try:
        page = render(collect(run_dir))
    finally:
        gc.enable()
    return write(page, out or run_dir / contents.REPORT)


def write(page: str, path: Path) -> Path:
    """Write a page, or raise UserError that names the file."""
    contents.write_output("--out", path, page.encode(errors="replace"))
    return path


def render(tables: Tables) -> str:
    """Render the page of a run."""
    from markupsafe import Markup

    whole = {one.name: Markup(draw(one)) for one in figures(tables)}
    best = verdict.best_checkpoint(tables)
    by_prompt: dict[str, list[Line]] = {}
    for one in tables.samples:
        by_prompt.setdefault(str(one.get("prompt") or ""), []).append(one)
    return fill(
        "page.html",
        title=tables.name,
        scripted=bool(whole),
        run=tables,
        sentence=verdict.sentence(tables),
        keys=verdict.figures(tables),
        checks=[(_KIND[one.mark], one) for one in verdict.checks(tables)],
        figures=whole,
        band=Markup(draw_band(tables.stretches)),
        shares=[(owner, _OWNERS[owner], *each) for owner, *each in shares(tables.stretches)],
        changes=tables.changes[: -_ROWS - 1 : -1],
        samples=[(prompt, all_[-1], all_[-2::-1][:_ROWS]) for prompt, all_ in by_prompt.items()],
        losses=dict(column(tables.evaluations, "loss")),
        best=best,
        newest=next(reversed(tables.kept_checkpoints), None),
        uses=verdict.uses(tables),
        where=verdict.where(tables),
        events=[(one, in_words(one)) for one in tables.events[::-1][:_ROWS]],
        sources=_sources(tables),
        settings=_chosen(tables),
        config=text.clip(tables.config, _CONFIG),
        start=tables.last_start,
        strategy=strategy_in_words(tables.last_start),
    )


def inline(tables: Tables) -> str:
    """Return the verdict and the loss figure as HTML for a notebook: one element, no script."""
    from markupsafe import escape

    loss = "".join(draw(one) for one in figures(tables) if one.name == "loss")
    head = f'<p class="verdict">{escape(verdict.sentence(tables))}</p>'
    style = _text("style.css").replace(":root", ":scope")
    return (
        f'<div class="llmtrain"><style>@scope {{{style}}}</style>'
        f'<div class="tall">{head}{loss}</div></div>'
    )


def fill(template: str, *, title: str, scripted: bool, **values: object) -> str:
    """Fill a template of this folder with values, styles and, if it is wanted, the script."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    script = _text("hover.js") if scripted else ""
    # The content security policy: nothing is loaded, and only this script runs.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"'sha256-{digest}'" if script else "'none'"
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src "
    environment.globals |= dict(inspect.getmembers(text, inspect.isfunction))
    return environment.get_template(template).render(
        title=title,
        style=Markup(_text("style.css")),
        script=Markup(script),
        policy=policy + allowed,
        **values,
    )


def figures(tables: Tables) -> list[Figure]:
    """Return the figures for which the run has numbers."""
    clip = tables.settings.get("training.max_grad_norm")
    limit = (("clipped above", float(clip)),) if isinstance(clip, int | float) else ()
    room = verdict.room(tables)
    plan = tables.last_start.get("plan")
    planned = plan.get("total_bytes") if isinstance(plan, dict) else None
    limits: tuple[tuple[str, float], ...] = ()
    # On a CPU it is that of the whole process, which nothing planned.
    if tables.last_start.get("device_type") != "cpu":
        limits += (("planned", planned / 2**30),) if isinstance(planned, int | float) else ()
        limits += (("device", room),) if room else ()
    seconds = tables.numbers("span_seconds")
    waits = Points(islice(tables.numbers("span_wait_seconds"), 1, None))  # from the second line on
    waited = [(step, 100 * wait / span) for step, wait, span in joined(waits, seconds) if span > 0]
    mfu = [(step, 100 * value) for step, value in tables.numbers("mfu")]
    small = [
        *_answers(tables),
        _small("router_loss", "Router loss", _nats(tables), tables.numbers("router_loss")),
        _small("learning_rate", "Learning rate", "", tables.numbers("learning_rate")),
        _small(
            "grad_norm", "Gradient norm, before clipping", "", tables.numbers("grad_norm"), limit
        ),
        _small("speed", "Speed", "tokens a second", _speeds(tables)),
        _small("mfu", "Model FLOPs utilization", "%", mfu),
        _small("wait", "Waiting for data", "% of the step time", waited),
        _small("memory", "Memory", "GiB", tables.numbers("memory_gb"), limits),
    ]
    of_steps = [replace(one, restarts=tables.restarts) for one in (*_loss(tables), *small) if one]
    return [*of_steps, *_processes(tables)]


def _processes(tables: Tables) -> Iterator[Figure]:
    """Yield the number of processes over the time, if it has changed."""
    if all(one.before == one.processes for one in tables.changes):
        return
    begin, end = tables.stretches[0].begin, tables.stretches[-1].end
    unit, name = (60, "minute") if end - begin > _MINUTES_FROM else (1, "second")
    edges = [(begin, tables.changes[0].before)]
    for one in tables.changes:
        edges += [(one.time, edges[-1][1]), (one.time, one.processes)]
    edges.append((end, edges[-1][1]))
    curve = thin([(round((time - begin) / unit), count) for time, count in edges])
    series = (Series("processes", curve),)
    yield Figure("processes", "Processes", "", series, from_zero=True, across=name)


def _loss(tables: Tables) -> list[Figure]:
    train, heldout = tables.numbers("loss"), column(tables.evaluations, "loss")
    series = []
    if train:
        series.append(Series("training", smooth(thin(train)), 0, band=len(train) > 1))
    if heldout:
        series.append(Series("held-out", thin(heldout), 1, dots=len(heldout) <= _ROWS))
    if not series:
        return []
    tokens = tables.numbers("tokens")
    each = tokens[-1][1] / tokens[-1][0] if tokens and tokens[-1][0] else None
    return [
        Figure(
            "loss", "Training and held-out", _nats(tables), tuple(series), _untaught(tables),
            skipped=verdict.skipped_steps(tables), tokens_per_step=each, leave_out=True,
        )
    ]  # fmt: skip


def _nats(tables: Tables) -> str:
    return "nats a token" if tables.pair_loss is None else "nats a pair"


def _untaught(tables: Tables) -> tuple[tuple[str, float], ...]:
    """Return the loss of a model that prefers neither answer, where it is the same number."""
    logistic = tables.pair_loss in ("dpo", "dpo_norm", "robust", "reward")
    if logistic and not tables.settings.get("preference.sft_weight"):
        return (("ln 2: no preference", math.log(2)),)
    return ()


def _answers(tables: Tables) -> Iterator[Figure]:
    """Yield the figures of a run on pairs: accuracy, rewards and log-probabilities."""
    sides = ("good", "bad") if tables.pair_loss == "kto" else ("chosen", "rejected")
    share, series = {"training": tables.train, "held-out": tables.evaluations}, []
    for place, (label, lines) in enumerate(share.items()):
        points = [(step, 100 * value) for step, value in column(lines, "accuracy")]
        if points:
            curve = thin(points) if place else smooth(thin(points))
            series.append(Series(label, curve, place, dots=bool(place) and len(points) <= _ROWS))
    if series:
        limit = (("guessing", 50.0),)
        yield Figure("accuracy", "Accuracy", "% of the pairs", tuple(series), limit)
    kinds = (("reward", "Rewards", ""), ("logp", "Log-probability of answers", "nats"))
    for field, title, unit in kinds:
        columns = [tables.numbers(f"{half}_{field}") for half in ("chosen", "rejected")]
        both = tuple(
            Series(side, smooth(thin(points)), place)
            for place, (side, points) in enumerate(zip(sides, columns, strict=True))
            if points
        )
        if both:
            yield Figure(field, f"{title}, training", unit, both)


def _small(
    name: str,
    title: str,
    unit: str,
    points: Sequence[tuple[int, float]],
    limits: tuple[tuple[str, float], ...] = (),
) -> Figure | None:
    """Return a figure of one curve; None without points."""
    if not points:
        return None
    curve: Curve = thin(points)
    series = Series(title.split(",")[0].lower(), curve, band=curve.thinned)
    return Figure(name, title, unit, (series,), limits=limits, from_zero=True)


def _speeds(tables: Tables) -> Points:
    """Return tokens a second between one line and the next, from the second line on."""
    gained = Points(
        (step, now - before)
        for (_, before), (step, now) in islice(pairwise(tables.numbers("tokens")), 1, None)
    )
    both = joined(gained, tables.numbers("span_seconds"))
    return Points((step, more / span) for step, more, span in both if span > 0 and more > 0)


_KIND = {verdict.GOOD: "good", verdict.LOOK: "look", verdict.BAD: "bad"}


def _sources(tables: Tables) -> list[tuple[str, object]]:
    """Return each source and the tokens that were trained from it."""
    tokens = tables.train[-1].get("sources") if tables.train else None
    return list(tokens.items()) if isinstance(tokens, dict) else []


def _chosen(tables: Tables) -> list[tuple[str, str, str]]:
    """Return (key, value, origin) of each key that somebody has set or the start has decided."""
    origins = tables.last_start.get("set")
    origins = origins if isinstance(origins, dict) else {}
    chosen = [
        (key, text.compact(tables.settings.get(key, "see the config")), str(origin))
        for key, origin in origins.items()
    ]
    asked = {key.partition(".")[2] for key in origins}
    decided = [(key, value) for key, value in _flat(tables.auto) if key not in asked]
    return chosen + [(key, text.compact(value), "auto") for key, value in decided]


def _flat(decided: JsonMapping) -> Iterator[tuple[str, object]]:
    """Yield the keys of `auto.json` with their values; what holds on a device is in groups."""
    for key, value in decided.items():
        yield from _flat(value) if isinstance(value, dict) else [(key, value)]


def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
