"""The figures of a report: SVG for what is drawn, HTML for what is read.

The plot area is an SVG of 10,000 by 3,000 units that is stretched to its place, with strokes of a
fixed width. Labels are HTML, placed in percent, so that text is never stretched. Coordinates are
whole numbers, relative to the point before, which makes a curve of 1,000 points 8 kB. `hover.js`
reads the paths back; there is no second copy of the numbers.

    y = 3.2 ┬─────────────────  0
            │ ╲___              │   M x y l dx dy dx dy …
    y = 2.1 ┴─────────────────  3000
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from html import escape
from itertools import pairwise

from llmtrain.report.collect import Curve, thin
from llmtrain.rundir.goodput import OWNERS, Stretch, totals
from llmtrain.text import number, short

WIDTH, HEIGHT = 10_000, 3_000
COLUMNS = 160
_TALL = 20  # units of a column of the band
_FAR = 30 * HEIGHT  # a point outside of the figure is not drawn farther away than this
_TABLE_ROWS = 40
_SMOOTHED = 20  # points from which a curve is smoothed
_WORTH_LEAVING_OUT = 1.25  # the axis must become that much shorter


@dataclass(frozen=True, slots=True)
class Series:
    """A curve of a figure.

    colour: number of the colour, from 0; from the fifth on, the colours come again, dashed
    dots: whether each point has a dot
    band: whether the lowest and highest values of each bucket are shaded
    """

    label: str
    curve: Curve
    colour: int = 0
    dots: bool = False
    band: bool = False

    @property
    def look(self) -> str:
        """The CSS classes of its colour."""
        return f"c{self.colour % 4}" + (" dashed" if self.colour >= 4 else "")

    @property
    def highest(self) -> Sequence[float]:
        """The upper edge of what is drawn."""
        return self.curve.high if self.band else self.curve.mean


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure before it is drawn; the horizontal axis has steps unless `across` names another.

    unit: of the vertical axis
    limits: horizontal lines, each with a name
    restarts: steps from which later starts went on
    skipped: steps whose update was skipped
    tokens_per_step: if given, the horizontal axis shows tokens, too
    from_zero: whether the vertical axis begins at 0
    leave_out: whether values of the first 3 % of the steps may lie above the figure
    """

    name: str
    title: str
    unit: str
    series: tuple[Series, ...]
    limits: tuple[tuple[str, float], ...] = ()
    restarts: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()
    tokens_per_step: float | None = None
    from_zero: bool = False
    leave_out: bool = False
    across: str = "step"


@dataclass(frozen=True, slots=True)
class Axes:
    """The ranges of a figure's axes."""

    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> int:
        """Return the horizontal place of a value, from 0 at the left."""
        return round(WIDTH * (value - self.left) / (self.right - self.left))

    def y(self, value: float) -> int:
        """Return the vertical place of a value, from 0 at the top."""
        place = HEIGHT * (self.high - value) / (self.high - self.low)
        return round(max(-_FAR, min(_FAR, place)))


def draw(figure: Figure) -> str:
    """Return a figure as HTML. Every text in it is escaped."""
    axes = _axes(figure)
    paths = [_band(one, axes) for one in figure.series if one.band]
    paths += [
        f'<path class="restart" d="M{axes.x(step)} 0v{HEIGHT}"/>'
        for step in figure.restarts
        if step >= axes.left
    ]
    paths += [
        f'<path class="skipped" d="M{axes.x(step)} {HEIGHT}v-160"/>'
        for step in figure.skipped
        if axes.left <= step <= axes.right
    ]
    paths += [f'<path class="limit" d="M0 {axes.y(value)}h{WIDTH}"/>' for _, value in figure.limits]
    paths += [path for one in figure.series for path in _curve(one, axes)]
    names = ", ".join(one.label for one in figure.series)
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(f"{figure.title}: {names}, by {figure.across}")}">'
        f"{''.join(paths)}</svg>"
    )
    data = " ".join(
        f'data-{name}="{value:.9g}"'
        for name, value in zip(("x0", "x1", "y0", "y1"), astuple(axes), strict=True)
    )
    unit = f'<span class="soft">{escape(figure.unit)}</span>' if figure.unit else ""
    return (
        f'<figure id="figure-{escape(figure.name)}" class="figure" '
        f'data-across="{escape(figure.across)}" '
        f"{data}><figcaption><h3>{escape(figure.title)}</h3>{unit}{_legend(figure)}</figcaption>"
        f'<div class="plot">{_labels(figure, axes)}{drawing}</div>{_note(figure, axes)}'
        f"{_table(figure)}</figure>"
    )


def draw_band(stretches: Sequence[Stretch]) -> str:
    """Return where the time went as a band over the wall time. Its legend is the page's.

    Each column is divided among the owners of its seconds, from the top in the order of OWNERS.
    """
    if not stretches:
        return ""
    begin, end = stretches[0].begin, stretches[-1].end
    width = (end - begin) / COLUMNS
    if width <= 0:
        return ""
    parts = [_parts(column) for column in _columns(stretches, begin, width)]
    rects, first = [], 0
    for place in range(1, COLUMNS + 1):
        if place == COLUMNS or parts[place] != parts[first]:
            rects += [
                f'<rect class="{owner}" x="{first}" y="{top}" width="{place - first}" '
                f'height="{height}"/>'
                for owner, top, height in parts[first]
            ]
            first = place
    return (
        f'<svg class="band" viewBox="0 0 {COLUMNS} {_TALL}" preserveAspectRatio="none" role="img" '
        f'aria-label="What each part of the time was spent on">{"".join(rects)}</svg>'
    )


def _columns(stretches: Sequence[Stretch], begin: float, width: float) -> list[dict[str, float]]:
    """Divide the seconds of the stretches among columns of equal width."""
    columns: list[dict[str, float]] = [{} for _ in range(COLUMNS)]
    for stretch in stretches:
        length = stretch.end - stretch.begin
        first = min(COLUMNS - 1, int((stretch.begin - begin) / width))
        last = min(COLUMNS - 1, int((stretch.end - begin) / width))
        for place in range(first, last + 1):
            left = max(stretch.begin, begin + place * width)
            right = min(stretch.end, begin + (place + 1) * width)
            share = max(0.0, right - left) / length
            for owner, seconds in stretch.seconds.items():
                columns[place][owner] = columns[place].get(owner, 0.0) + seconds * share
    return columns


def _parts(column: dict[str, float]) -> list[tuple[str, int, int]]:
    """Return (owner, top, height) of the parts of a column, in units of which it has _TALL."""
    whole = sum(column.values())
    if whole <= 0:
        return [("other", 0, _TALL)]
    parts, so_far, top = [], 0.0, 0
    for owner in OWNERS:
        so_far += column.get(owner, 0.0)
        bottom = round(_TALL * so_far / whole)
        if bottom > top:
            parts.append((owner, top, bottom - top))
        top = bottom
    return parts


def shares(stretches: Sequence[Stretch]) -> list[tuple[str, float, float]]:
    """Return (owner, share, seconds) of all owners with time; the shares add up to 1."""
    total = totals(stretches)
    whole = sum(total.values())
    return [(owner, each / whole, each) for owner, each in total.items() if each > 0]


def smooth(curve: Curve) -> Curve:
    """Return the curve with each point the mean of its neighbours, 1/50 of the curve.

    low and high become the least and greatest value of these neighbours. A short curve stays as
    it is.
    """
    count = len(curve.steps)
    if count < _SMOOTHED:
        return curve
    reach = max(1, count // 100)
    around = [slice(max(0, place - reach), place + reach + 1) for place in range(count)]
    means = [curve.mean[part] for part in around]
    return Curve(
        steps=curve.steps,
        low=tuple(min(curve.low[part]) for part in around),
        mean=tuple(sum(part) / len(part) for part in means),
        high=tuple(max(curve.high[part]) for part in around),
        thinned=curve.thinned,
    )


def ticks(low: float, high: float, most: int, least: float = 0.0) -> list[float]:
    """Return about `most` round numbers between two different numbers, at least `least` apart."""
    rough = max(least, (high - low) / most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * part for part in (1, 2, 2.5, 5, 10, 20) if power * part >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)][: most + 1]


def _axes(figure: Figure) -> Axes:
    """Choose ranges that hold every curve, and are never empty."""
    steps = [step for one in figure.series for step in one.curve.steps]
    left, right = min(0, *steps), max(steps)
    start = left + 0.03 * (right - left)
    lows = [
        value for one in figure.series for value in (one.curve.low if one.band else one.curve.mean)
    ]
    every = [
        point for one in figure.series for point in zip(one.curve.steps, one.highest, strict=True)
    ]
    low = min([*lows, *([0.0] if figure.from_zero else [])])
    high = max(value for _, value in every)
    if figure.leave_out and all(one.curve.steps[-1] > start for one in figure.series):
        later = max(value for step, value in every if step > start)
        if high - low > _WORTH_LEAVING_OUT * (later - low):
            high = later
    for _, value in figure.limits:
        if value <= 4 * high:
            high = max(high, value)
    if high <= low:
        low, high = low - max(abs(low) * 0.05, 1e-9), high + max(abs(high) * 0.05, 1e-9)
    margin = 0.05 * (high - low)
    bottom = low if figure.from_zero and low == 0 else low - margin
    return Axes(left, right if right > left else left + 1, bottom, high + margin)


def _curve(series: Series, axes: Axes) -> list[str]:
    points, label = series.curve.points, escape(series.label)
    drawn = [f'<path class="line {series.look}" data-label="{label}" d="{_line(points, axes)}"/>']
    if series.dots or len(points) == 1:
        spots = "".join(f"M{axes.x(step)} {axes.y(value)}h0" for step, value in points)
        drawn.append(f'<path class="dots {series.look}" d="{spots}"/>')
    return drawn


def _line(points: Sequence[tuple[int, float]], axes: Axes) -> str:
    """Return path commands for a line through points."""
    places = [(axes.x(step), axes.y(value)) for step, value in points]
    moves = (f"{right - x} {down - y}" for (x, y), (right, down) in pairwise(places))
    return f"M{places[0][0]} {places[0][1]}l" + (" ".join(moves) or "0 0")


def _band(series: Series, axes: Axes) -> str:
    curve = series.curve
    above = list(zip(curve.steps, curve.high, strict=True))
    below = list(zip(reversed(curve.steps), reversed(curve.low), strict=True))
    return f'<path class="range c{series.colour % 4}" d="{_line([*above, *below], axes)}z"/>'


def _labels(figure: Figure, axes: Axes) -> str:
    """Return the labels of the axes and the names of dashed lines, which are beside them.

    Every other label below the figure is hidden on a narrow screen.
    """
    labels = [
        f'<i class="y" style="top:{100 * axes.y(value) / HEIGHT:.2f}%"><b>{_tick(value)}</b></i>'
        for value in ticks(axes.low, axes.high, 5)
    ]
    each = figure.tokens_per_step
    for place, value in enumerate(ticks(axes.left, axes.right, 6, least=1)):
        tokens = f"<small>{_tick(value * each)}</small>" if each and value else ""
        odd, left = " odd" if place % 2 else "", 100 * axes.x(value) / WIDTH
        labels.append(
            f'<i class="x{odd}" style="left:{left:.2f}%"><b>{_tick(value)}{tokens}</b></i>'
        )
    labels += [
        f'<i class="named" style="left:{100 * axes.x(step) / WIDTH:.2f}%">restart</i>'
        for step in figure.restarts[:6]
        if axes.left <= step <= axes.right
    ]
    labels += [
        f'<i class="named limit" style="top:{100 * axes.y(value) / HEIGHT:.2f}%">{escape(name)}</i>'
        for name, value in figure.limits
        if axes.low <= value <= axes.high
    ]
    return "".join(labels)


def _tick(value: float) -> str:
    """Format a round number as short as it can be."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:,.10g}" if abs(value) >= 1000 else f"{value:.6g}"
    return short(value) if 1e4 <= abs(value) < 1e15 else f"{value:.3g}"


def _legend(figure: Figure) -> str:
    """Return the names of the curves with their last values, which hovering replaces."""
    parts = []
    for one in figure.series:
        value = one.curve.mean[-1]
        last = short(value) if abs(value) >= 1e4 else number(value)  # as `hover.js` writes it
        parts.append(
            f'<span class="entry"><svg class="swatch" viewBox="0 0 20 8"><path class="line '
            f'{one.look}" d="M0 4h20"/></svg>{escape(one.label)} <output>{last}</output></span>'
        )
    return f'<span class="legend">{"".join(parts)}<output class="at"></output></span>'


def _note(figure: Figure, axes: Axes) -> str:
    """Return what the reader has to know to read the figure."""
    notes = []
    if above := [value for one in figure.series for value in one.highest if value > axes.high]:
        notes.append(
            f"The first steps, up to {number(max(above))}, lie above the figure, so that the rest "
            "can be seen."
        )
    if any(one.band and one.curve.low != one.curve.high for one in figure.series):
        notes.append("Shaded: from the least to the greatest value; the line is their mean.")
    if figure.tokens_per_step:
        notes.append(f"Below each {figure.across}: the tokens trained until then.")
    if figure.skipped:
        notes.append("Ticks at the bottom: steps whose update was skipped.")
    return f'<p class="soft note">{" ".join(notes)}</p>' if notes else ""


def _table(figure: Figure) -> str:
    """Return the numbers of a figure, for readers, and for whoever wants to copy them."""
    tables = []
    for one in figure.series:
        rows = "".join(
            f"<tr><td>{step:,}</td><td>{number(value)}</td></tr>"
            for step, value in thin(one.curve.points, _TABLE_ROWS).points
        )
        tables.append(
            f"<table><thead><tr><th>{escape(figure.across)}</th><th>{escape(one.label)}</th></tr>"
            f"</thead><tbody>{rows}</tbody></table>"
        )
    inner = "".join(tables)
    return f'<details><summary>Numbers</summary><div class="scroll columns">{inner}</div></details>'
