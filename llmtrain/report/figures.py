"""The figures of a report, as data for BokehJS: loss, learning rate, gradient norm, speed.

All figures share one range of steps, so zooming one zooms all. Backgrounds are transparent and axes
mid-grey, so that they fit a light page and a dark one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmtrain.report.collect import Curve, Line, Tables, column, thin

if TYPE_CHECKING:
    from bokeh.models import Range1d
    from bokeh.plotting import figure as Figure

_GREY = "#7d8590"
_BLUE = "#3b82f6"
_ORANGE = "#f08c2e"
_GREEN = "#2fa36b"
_PURPLE = "#9b6ef3"


@dataclass(frozen=True, slots=True)
class Series:
    """One curve of a figure. A curve of few points gets a mark at each of them."""

    label: str
    colour: str
    curve: Curve


@dataclass(frozen=True, slots=True)
class Plan:
    """A figure before it is drawn.

    unit: of the vertical axis
    from_zero: whether that axis starts at 0
    """

    name: str
    title: str
    unit: str
    series: tuple[Series, ...]
    from_zero: bool = True


def plan_figures(tables: Tables) -> list[Plan]:
    """Return the figures, and of each the curves, for which the run has numbers."""

    def curve(name: str, label: str, colour: str, lines: tuple[Line, ...]) -> tuple[Series, ...]:
        points = column(lines, name)
        return (Series(label, colour, thin(points)),) if points else ()

    def plan(name: str, title: str, unit: str, label: str, colour: str) -> Plan:
        return Plan(name, title, unit, curve(name, label, colour, tables.train))

    losses = curve("loss", "training", _BLUE, tables.train)
    losses += curve("loss", "held-out", _ORANGE, tables.evaluations)
    speed = "tokens per second"
    plans = [
        Plan("loss", "Loss", "nats per token", losses, from_zero=False),
        plan("learning_rate", "Learning rate", "", "learning rate", _GREEN),
        plan("grad_norm", "Gradient norm, before clipping", "", "gradient norm", _PURPLE),
        plan("tokens_per_second", "Tokens per second", speed, speed, _BLUE),
    ]
    return [plan for plan in plans if plan.series]


def draw(plans: list[Plan], restarts: tuple[int, ...]) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Draw the figures; a dashed line marks the step from which a later start resumed.

    Returns what the page embeds: one Bokeh document, and for each figure the id of its root in it.
    """
    from bokeh.document import Document
    from bokeh.models import Range1d

    last = max((series.curve.steps[-1] for plan in plans for series in plan.series), default=1)
    # A little wider than the run, so that the marks at its ends are not cut off.
    edges = (-0.01 * max(1, last), 1.01 * max(1, last))
    steps = Range1d(*edges, bounds=edges)
    document, roots = Document(), {}
    for plan in plans:
        figure = _figure(plan, steps, restarts)
        document.add_root(figure)
        roots[plan.name] = figure.id
    return document.to_json(deferred=False), roots


def _figure(plan: Plan, steps: Range1d, restarts: tuple[int, ...]) -> Figure:
    from bokeh.models import DataRange1d, NumeralTickFormatter, Span
    from bokeh.plotting import figure

    drawn = figure(
        height=300,
        sizing_mode="stretch_width",
        x_range=steps,
        y_range=DataRange1d(start=0) if plan.from_zero else DataRange1d(),
        x_axis_label="step",
        y_axis_label=plan.unit or None,
        # No drag tool is active at first: on a phone it would prevent scrolling by finger.
        tools="pan,box_zoom,wheel_zoom,reset",
        active_drag=None,
        active_scroll=None,
        toolbar_location="above",
    )
    drawn.toolbar.logo = None
    drawn.xaxis.formatter = NumeralTickFormatter(format="0,0")
    top = max(max(series.curve.high) for series in plan.series)
    drawn.yaxis.formatter = _tick_formatter(top)
    for series in plan.series:
        _add_series(drawn, series, legend=len(plan.series) > 1)
    for step in restarts:
        mark = Span(location=step, dimension="height", line_color=_GREY, line_dash="dashed")
        drawn.add_layout(mark)
    _colour(drawn)
    return drawn


def _add_series(drawn: Figure, series: Series, *, legend: bool) -> None:
    from bokeh.models import ColumnDataSource, HoverTool

    curve = series.curve
    data: dict[str, Any] = {"step": curve.steps, "mean": _round(curve.mean)}
    if curve.thinned:
        data |= {"low": _round(curve.low), "high": _round(curve.high)}
    source = ColumnDataSource({name: list(values) for name, values in data.items()})
    named = {"legend_label": series.label} if legend else {}
    look = {"source": source, "color": series.colour}
    if curve.thinned:
        drawn.varea("step", "low", "high", source=source, color=series.colour, alpha=0.2)
    line = drawn.line("step", "mean", line_width=1.8, **look, **named)
    if len(curve.steps) <= 40:
        drawn.scatter("step", "mean", size=5, **look, **named)
    tips = [("step", "@step{0,0}"), (series.label, "@mean{0.[00000]}")]
    if curve.thinned:
        tips.append(("from … to", "@low{0.[0000]} … @high{0.[0000]}"))
    drawn.add_tools(HoverTool(renderers=[line], tooltips=tips, mode="vline"))


def _colour(drawn: Figure) -> None:
    drawn.background_fill_color = None
    drawn.border_fill_color = None
    drawn.outline_line_color = None
    for axis in drawn.axis:
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_color = axis.major_label_text_color = _GREY
        axis.axis_line_color = axis.major_tick_line_color = _GREY
        axis.minor_tick_line_color = None
    drawn.grid.grid_line_color = _GREY
    drawn.grid.grid_line_alpha = 0.25
    for legend in drawn.legend:
        legend.background_fill_color = legend.border_line_color = None
        legend.label_text_color = _GREY


def _tick_formatter(top: float) -> Any:
    """Choose a format by the range of the values: 12k, 3.5, 0.0005, 2.0e-05."""
    from bokeh.models import NumeralTickFormatter, PrintfTickFormatter

    if top >= 10_000:
        return NumeralTickFormatter(format="0.[0]a")
    if top >= 1e-3:
        return NumeralTickFormatter(format="0,0.[00000]")
    return PrintfTickFormatter(format="%.1e")


def _round(values: tuple[float, ...], digits: int = 5) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values]
