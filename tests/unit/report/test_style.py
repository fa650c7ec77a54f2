"""The colours of a report: apart for everybody, and legible."""

import itertools
import re
from pathlib import Path

import pytest

import llmtrain.report
from llmtrain.rundir.goodput import OWNERS

CSS = (Path(llmtrain.report.__file__).parent / "style.css").read_text(encoding="utf-8")
CURVES = ("c0", "c1", "c2", "c3")
# Machado, Oliveira and Fernandes (2009), severity 1.0, for linear RGB.
SIGHT = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def colours(scheme):
    """The variables of a scheme; the dark one comes second."""
    part = CSS.split("prefers-color-scheme: dark")[scheme == "dark"]
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6});", part))


def linear(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * one for one in colour[1:])
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    return [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]


def lab(rgb):
    """CIELAB of linear sRGB, D65."""
    r, g, b = (min(1.0, max(0.0, one)) for one in rgb)
    x = (0.4124564 * r + 0.3575761 * g + 0.1804375 * b) / 0.95047
    y = 0.2126729 * r + 0.7151522 * g + 0.0721750 * b
    z = (0.0193339 * r + 0.1191920 * g + 0.9503041 * b) / 1.08883

    def f(t):
        return t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116

    return 116 * f(y) - 16, 500 * (f(x) - f(y)), 200 * (f(y) - f(z))


def difference(one, other, sight):
    """ΔE*ab (CIE 1976) of two colours, as an eye of this kind sees them."""
    seen = [
        lab([sum(w * c for w, c in zip(row, linear(colour), strict=True)) for row in SIGHT[sight]])
        for colour in (one, other)
    ]
    return sum((a - b) ** 2 for a, b in zip(*seen, strict=True)) ** 0.5


def contrast(one, other):
    """The contrast ratio of WCAG."""
    lights = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(linear, (one, other))]
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def test_black_and_white_differ_by_a_hundred_for_every_eye():
    for sight in SIGHT:
        assert difference("#000000", "#ffffff", sight) == pytest.approx(100, abs=0.1)
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("names", "least"), [(CURVES, 20), (OWNERS, 11)], ids=["curves", "bands"])
def test_colours_stay_apart_under_three_kinds_of_colour_blindness(scheme, names, least):
    own = colours(scheme)
    for (one, other), sight in itertools.product(itertools.combinations(names, 2), SIGHT):
        assert difference(own[one], own[other], sight) >= least, (one, other, sight)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_curves_and_words_stand_out_from_the_page(scheme):
    own = colours(scheme)
    for name in CURVES:
        assert contrast(own[name], own["page"]) >= 3.5
    for name in ("ink", "soft", "good", "look", "bad", "accent"):
        assert contrast(own[name], own["page"]) >= 4.5, name
