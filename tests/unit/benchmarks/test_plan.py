"""The tables of docs/reference/plan-figures.md are those of benchmarks/plan.py."""

import runpy

import pytest
from helpers.pages import DOCS
from helpers.ranks import ROOT

PAGE = (DOCS / "reference" / "plan-figures.md").read_text("utf-8")
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "plan.py"))


def table(name):
    """The lines between the marks."""
    _, _, rest = PAGE.partition(f"<!-- {name} -->\n\n")
    return rest.partition("\n\n<!-- end -->")[0].splitlines()


@pytest.mark.wide  # seconds of arithmetic
@pytest.mark.parametrize("name", ["1 B", "70 B"])
def test_the_choices_of_the_page_are_those_of_the_plan(name):
    expected = list(BENCHMARK["choices"](list(BENCHMARK["plans"]([name]))))
    assert [row for row in table("choices") if row.startswith(f"| {name} |")] == expected[2:]
    assert table("choices")[:2] == expected[:2]


def test_the_published_runs_of_the_page_are_those_of_the_scaling_model():
    assert table("scaling") == list(BENCHMARK["scaling"]())
    assert sum("*miss:*" in row for row in table("scaling")) == 2


def test_every_model_is_in_the_table():
    places = BENCHMARK["PLACES"]
    assert len(table("choices")) == 2 + sum(len(one) for one in places.values())
    assert len(table("parts")) == 2 + 4
