"""The pictures of README and of the pages: they exist, are small, and are shown somewhere."""

import re
from xml.etree import ElementTree

import pytest
from helpers.ranks import ROOT

PICTURES = sorted((ROOT / "docs" / "images").iterdir())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SVG = "{http://www.w3.org/2000/svg}"
NARROW = 343  # pixels that a page has for a picture on a screen of 390


def shown():
    """The file of every picture that a page shows."""
    pattern = r'(?:src|srcset)="([^":]+)"|!\[[^\]]*\]\(([^):]+)\)'
    for page in PAGES:
        for tag, markdown in re.findall(pattern, page.read_text("utf-8")):
            yield (page.parent / (tag or markdown)).resolve()


def test_every_picture_that_is_shown_exists_and_every_one_that_exists_is_shown():
    assert set(shown()) == {picture.resolve() for picture in PICTURES}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_small(picture):
    assert picture.stat().st_size < 150_000


@pytest.mark.parametrize(
    "picture", [one for one in PICTURES if one.suffix == ".svg"], ids=lambda one: one.name
)
def test_a_drawing_has_a_dark_form_words_for_who_cannot_see_it_and_text_to_read_when_narrow(
    picture,
):
    root = ElementTree.fromstring(picture.read_text("utf-8"))
    assert root.find(f"{SVG}title") is not None
    assert root.find(f"{SVG}desc") is not None
    assert "prefers-color-scheme: dark" in (root.findtext(f"{SVG}style") or "")
    width = float(root.attrib["viewBox"].split()[2])
    assert float(root.attrib["font-size"]) * NARROW / width >= 11


def test_the_picture_of_the_report_is_as_wide_light_as_dark():
    sizes = {
        path.read_bytes()[16:20] for path in PICTURES if path.name.startswith("report-")
    }  # the width in the header of a PNG
    assert len(sizes) == 1
