import re
from itertools import pairwise

import pytest

from llmtrain.report.collect import thin
from llmtrain.report.svg import (
    HEIGHT,
    WIDTH,
    Figure,
    Series,
    draw,
    draw_band,
    shares,
    smooth,
    ticks,
)  # fmt: skip
from llmtrain.rundir.goodput import Stretch


def figure(points, **options):
    return Figure("loss", "Loss", "", (Series("training", thin(points)),), **options)


def numbers(html):
    """Read the numbers back from the drawing, as the script does."""
    (data,) = re.findall(r'data-x0="(.*?)" data-x1="(.*?)" data-y0="(.*?)" data-y1="(.*?)"', html)
    x0, x1, y0, y1 = map(float, data)
    (path,) = re.findall(r'class="line c0" data-label="training" d="(.*?)"', html)
    x, y, *rest = map(int, re.findall(r"-?\d+", path))
    places = [(x, y)]
    for right, down in zip(rest[::2], rest[1::2], strict=True):
        x, y = x + right, y + down
        places.append((x, y))
    return [(x0 + x / WIDTH * (x1 - x0), y1 - y / HEIGHT * (y1 - y0)) for x, y in places]


def test_the_numbers_can_be_read_back_from_the_drawing():
    points = [(step, 9 / step) for step in range(1, 200, 7)]
    read = numbers(draw(figure(points)))
    assert len(read) == len(points)
    for (step, value), (x, y) in zip(points, read, strict=True):
        assert x == pytest.approx(step, abs=199 / WIDTH)
        assert y == pytest.approx(value, abs=1.1 * 9 / HEIGHT)


@pytest.mark.parametrize(
    "points",
    [[(0, 0.0)], [(7, 3.0)], [(1, 2.0), (5, 2.0)], [(1, 1e30), (2, -1e30)], [(3, 1e-30), (4, 0.0)]],
    ids=["zero", "one point", "equal", "huge", "tiny"],
)
@pytest.mark.parametrize("from_zero", [False, True])
def test_any_numbers_have_a_drawing_with_labels(points, from_zero):
    html = draw(figure(points, from_zero=from_zero, leave_out=True))
    assert len(numbers(html)) >= 1
    assert "nan" not in html
    assert "inf" not in html
    assert html.count('class="y"') >= 2


def test_the_first_steps_may_lie_above_and_the_note_says_so():
    points = [(1, 900.0), *((step, 3.0 - step / 1000) for step in range(2, 400))]
    html = draw(figure(points, leave_out=True))
    assert "up to 900, lie above the figure" in html
    (top,) = re.findall(r'data-y1="(.*?)"', html)
    assert float(top) < 3.2
    assert "above the figure" not in draw(figure(points))


def test_every_text_is_escaped():
    bad = '"><script>alert(1)</script>'
    html = draw(Figure(bad, bad, bad, (Series(bad, thin([(1, 2.0)])),), limits=((bad, 2.0),)))
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 5


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (2.1, 3.3), (-5, 7), (0, 1e30), (1e-9, 2e-9), (0, 123_456)]
)
def test_ticks_are_few_round_and_within(low, high):
    found = ticks(low, high, 5)
    assert 2 <= len(found) <= 6
    assert all(low - 1e-9 * high <= one <= high * (1 + 1e-9) for one in found)
    steps = [b - a for a, b in pairwise(found)]
    assert max(steps) == pytest.approx(min(steps))


def test_a_smooth_curve_is_the_mean_of_its_neighbours_between_their_extremes():
    curve = thin([(step, float(step % 2)) for step in range(1000)])
    smoothed = smooth(curve)
    assert all(0.4 < value < 0.6 for value in smoothed.mean)
    assert set(smoothed.low) == {0.0}
    assert set(smoothed.high) == {1.0}
    short = thin([(1, 5.0), (2, 6.0)])
    assert smooth(short) == short


def test_the_band_divides_each_part_among_its_owners_and_the_shares_add_up_to_one():
    stretches = [
        Stretch(0, 60, {"starting": 60.0}),
        Stretch(60, 160, {"training": 90.0, "waiting": 10.0}),
    ]
    band = draw_band(stretches)
    parts = r'rect class="(\w+)" x="(\d+)" y="(\d+)" width="(\d+)" height="(\d+)"'
    assert re.findall(parts, band) == [
        ("starting", "0", "0", "60", "20"),
        ("training", "60", "0", "100", "18"),
        ("waiting", "60", "18", "100", "2"),
    ]
    found = shares(stretches)
    assert sum(share for _, share, _ in found) == pytest.approx(1)
    assert [owner for owner, *_ in found] == ["training", "waiting", "starting"]
    assert draw_band([]) == ""


@pytest.mark.parametrize(("first", "hidden"), [(3.1, False), (9.0, True)])
def test_first_steps_are_left_out_only_where_the_rest_is_seen_better(first, hidden):
    curve = thin([(1, first), (50, 3.0), (100, 2.0)])
    drawn = draw(Figure("loss", "Loss", "", (Series("training", curve),), leave_out=True))
    assert ("lie above the figure" in drawn) == hidden


@pytest.mark.parametrize(("last", "shown"), [(2724.4, "2,724"), (20_554, "20.6 k"), (0.5, "0.5")])
def test_the_legend_shows_the_last_value_as_hovering_does(last, shown):
    drawn = draw(Figure("speed", "Speed", "", (Series("speed", thin([(1, 1.0), (2, last)])),)))
    assert f"speed <output>{shown}</output>" in drawn
