"""Writes `report.html`: one file that opens anywhere, without a network, light or dark.

Everything that a run wrote is text in the page: Jinja escapes it. The figures' numbers are in a
JSON block, and the content security policy allows only our two scripts, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmtrain import durable
from llmtrain.errors import Problem, UserError
from llmtrain.metrics.progress import duration
from llmtrain.report.collect import Line, Tables, collect, column, thin
from llmtrain.report.figures import Plan, draw, plan_figures
from llmtrain.rundir import contents

_HELD_OUT = {"held-out loss": "loss", "bits per byte": "bits_per_byte", "perplexity": "perplexity"}
_TABLE_ROWS = 60
_SAMPLES = 40
_EVENTS = 200
_TEXT_CHARACTERS = 4000
_CONFIG_CHARACTERS = 100_000

# Bokeh's set_log_level is not used: it writes a line to the console itself, and so does level info.
_START = """
"use strict";
Bokeh.logger.set_level("error");
const figures = JSON.parse(document.getElementById("figures").textContent);
Bokeh.embed.embed_items({figures: figures.document}, [
  {docid: "figures", roots: figures.roots, root_ids: Object.keys(figures.roots)},
]);
"""


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run and return its path (`report.html` in the run directory).

    Raises UserError if the directory has no run or the file cannot be written.
    """
    path = out or run_dir / contents.REPORT
    page = render(collect(run_dir))
    try:
        durable.write(path, page.encode(), sync=False)
    except OSError as error:
        expected = f"a file that can be written ({error.strerror})"
        raise UserError(Problem("report", path, expected, "another --out FILE")) from error
    return path


def render(tables: Tables) -> str:
    """Render the page of a run."""
    from jinja2 import Environment
    from markupsafe import Markup

    plans = plan_figures(tables)
    restarts = tuple(start["step"] for start in tables.starts[1:])
    document, roots = draw(plans, restarts)
    scripts = [_bokeh(), _START] if plans else []
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"duration": duration, "compact": _compact, "clip": _clip}
    environment.filters |= {"number": number, "count": count, "size": size, "when": when}
    # Only BokehJS, `_START` and the JSON, which has no angle brackets, are not escaped.
    return environment.from_string(template).render(
        run=tables,
        state=str(tables.status.get("state", "unknown")),
        verdict=verdict(tables),
        warnings=warnings(tables),
        cards=cards(tables),
        figures={plan.name: _figure(plan, roots[plan.name]) for plan in plans},
        restarts=restarts,
        samples=_newest(tables.samples, _SAMPLES),
        events=_newest(tables.events, _EVENTS),
        config=_clip(tables.config, _CONFIG_CHARACTERS),
        data=Markup(_json(document, roots)),
        scripts=[Markup(script) for script in scripts],
        policy=_policy(scripts),
    )


def verdict(tables: Tables) -> list[str]:
    """Describe in sentences how the run went."""
    sentences = [_state(tables)]
    if losses := column(tables.train, "loss"):
        (first, high), (last, low) = losses[0], losses[-1]
        sentences.append(
            f"The training loss went from {number(high)} at step {count(first)} "
            f"to {number(low)} nats per token at step {count(last)}."
        )
    if heldout := column(tables.evaluations, "loss"):
        best, lowest = min(heldout, key=lambda point: point[1])
        sentences.append(
            f"Held-out loss: {number(heldout[0][1])} at step {count(heldout[0][0])}, "
            f"{number(heldout[-1][1])} at step {count(heldout[-1][0])}; "
            f"the best is {number(lowest)} at step {count(best)}."
        )
    return sentences


def warnings(tables: Tables) -> list[str]:
    """Return what a person should look at."""
    found = []
    skipped = {event["step"] for event in tables.events if event.get("event") == "update_skipped"}
    if skipped:
        updates = _plural(len(skipped), "update was", "updates were")
        found.append(f"{updates} skipped: the loss or the norm was not finite.")
    if (restarts := len(tables.starts) - 1) > 0:
        found.append(f"{_plural(restarts, 'restart', 'restarts')}: dashed in the figures.")
    heldout = column(tables.evaluations, "loss")
    if heldout and heldout[-1][1] > 1.01 * min(value for _, value in heldout):
        found.append("The held-out loss is rising again: the best checkpoint is not the last.")
    if (share := _waiting_share(tables)) > 0.05:
        found.append(f"The run waited for data {share:.0%} of the time: raise data.workers.")
    return found


def _waiting_share(tables: Tables) -> float:
    """Return the share of the time for which the steps, logged or not, waited for data.

    The first step of each start, which always has a line of its own, is left out: it opens the
    stream, and more workers would not make that shorter.
    """
    first = {start["step"] + 1 for start in tables.starts}
    lines = [line for line in tables.train if line["step"] not in first]
    waited, whole = (
        sum(value for _, value in column(lines, name))
        for name in ("span_wait_seconds", "span_seconds")
    )
    return waited / max(1e-9, whole)


def cards(tables: Tables) -> list[tuple[str, str]]:
    """Return the key figures: a name and a value each."""
    found = [
        (name, number(values[-1][1]))
        for name, key in _HELD_OUT.items()
        if (values := column(tables.evaluations, key))
    ]
    if tokens := column(tables.train, "tokens"):
        found.append(("tokens", _short(tokens[-1][1])))
    if speeds := sorted(value for _, value in column(tables.train, "tokens_per_second")):
        found.append(("tokens per s", _short(speeds[len(speeds) // 2])))
    if start := tables.starts[-1:]:
        found.append(("parameters", _short(float(start[0].get("parameters") or 0))))
        found.append(("processes", str(start[0].get("world_size", "?"))))
    found.append(("time", duration(tables.wall_seconds)))
    if tables.end and isinstance(goodput := tables.end.get("goodput"), (int, float)):
        found.append(("goodput", f"{goodput:.0%}"))
    return found


def _state(tables: Tables) -> str:
    known = tables.status
    last = max([known.get("step") or 0, *(line["step"] for line in tables.train[-1:])])
    where = f"step {count(last)}" + (f" of {count(tables.steps)}" if tables.steps else "")
    reason = f" ({_clip(str(known['reason']), 500)})" if known.get("reason") else ""
    sentences = {
        "finished": f"Finished at {where}{reason}.",
        "stopped": f"Stopped at {where}{reason}. The same command resumes the run.",
        "failed": f"Failed at {where} with exit code {known.get('exit_code')}{reason}.",
        "running": f"Running, or ended without writing its end: the last line is of {where}.",
    }
    without = f"The run directory has no status; the last line is of {where}."
    return sentences.get(str(known.get("state")), without)


def number(value: object) -> str:
    """Format a number: at most five significant digits, commas between thousands; else a dash."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return "–"
    if abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) < 1 else f"{value:.5g}"


def count(value: object) -> str:
    """Format a whole number with commas between thousands."""
    return f"{value:,}" if isinstance(value, int) else "–"


def size(value: object) -> str:
    """Format bytes for people, in powers of 1,024."""
    if not isinstance(value, (int, float)):
        return "–"
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}" if amount < 1000 else f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:,.1f} TiB"


def when(value: object) -> str:
    """Format a time stamp in UTC."""
    if not isinstance(value, (int, float)):
        return "–"
    return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _figure(plan: Plan, root: str) -> dict[str, Any]:
    """Return what the template needs for a figure: ids and titles, and its numbers as tables."""
    return {
        "id": f"figure-{plan.name}",
        "title": plan.title,
        "unit": plan.unit,
        "root": root,
        "tables": [(one.label, thin(one.curve.points, _TABLE_ROWS).points) for one in plan.series],
    }


def _bokeh() -> str:
    """Read BokehJS from Bokeh's Python package, without the script that sets the log level."""
    from bokeh.resources import Resources

    script: str = Resources("inline", components=["bokeh"]).js_raw[0]
    return script


def _json(document: Mapping[str, Any], roots: Mapping[str, str]) -> str:
    """Encode as JSON that can end neither a script element nor a line of JavaScript."""
    places = {root: f"figure-{name}" for name, root in roots.items()}
    text = json.dumps({"document": document, "roots": places}, separators=(",", ":"))
    return text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"})


def _policy(scripts: list[str]) -> str:
    """Return a content security policy: nothing is loaded and only these scripts run."""
    hashes = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(one).decode()}'" for one in hashes)
    return (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src {allowed or chr(39) + 'none' + chr(39)}"
    )


def _newest(lines: tuple[Line, ...], most: int) -> Mapping[str, Any]:
    """Return the newest lines, newest first, and how many older ones are left out."""
    return {"lines": lines[::-1][:most], "left_out": max(0, len(lines) - most)}


def _compact(value: object) -> str:
    """Format a value of an event's detail as one short line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return _clip(text, 500)


def _clip(text: object, characters: int = _TEXT_CHARACTERS) -> str:
    whole = str(text)
    return whole if len(whole) <= characters else whole[:characters] + " …"


def _plural(how_many: int, one: str, more: str) -> str:
    return f"{count(how_many)} {one if how_many == 1 else more}"


def _short(value: float) -> str:
    for unit, sign in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if value >= unit:
            return f"{value / unit:.3g}{sign}"
    return f"{value:.3g}"
