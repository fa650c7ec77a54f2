"""`make test` and `make test-all` share out the tests, and a unit test stays quick."""

import itertools
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import rings

ROOT = Path(__file__).parents[2]
CORE = [name for names in rings.CORE.values() for name in names]


def target(name):
    """The recipe of a target, and what it needs first."""
    text = (ROOT / "Makefile").read_text()
    return re.search(rf"^{name}:([^#\n]*).*\n((?:\t.*\n)*)", text, flags=re.M).groups()


def expression(name):
    return re.search(r'-m "(.*?)"', target(name)[1]).group(1)


def test_every_test_but_a_sweep_is_in_one_of_the_two_rings():
    first, rest = expression("test"), expression("test-all")
    for slow, launches, core, wide in itertools.product([False, True], repeat=4):
        if launches or not core:
            marks = {"slow": slow, "launches": launches, "core": core, "wide": wide}
            runs = [eval(one, {}, marks) for one in (first, rest)]  # noqa: S307
            assert sum(runs) == (not slow), marks


def test_test_all_calls_test_and_check_calls_test_all():
    assert "$(MAKE) test &&" in target("test-all")[1]
    assert target("check")[0].split() == ["lint", "types", "test-all"]


def test_each_value_of_a_matrix_is_on_its_diagonal():
    cases = rings.diagonal("abcde", [1, 2], "xyz")
    assert [case.values for case in cases] == list(itertools.product("abcde", [1, 2], "xyz"))
    on = [case.values for case in cases if not case.marks]
    assert len(on) == 5
    assert [set(column) for column in zip(*on, strict=True)] == [set("abcde"), {1, 2}, set("xyz")]
    assert {mark.name for case in cases for mark in case.marks} == {"wide"}
    cases = rings.diagonal([1, 2], [3, 4], beside="slow")
    assert [[mark.name for mark in case.marks] for case in cases] == [[], ["slow"], ["slow"], []]


def test_core_is_one_or_a_few_tests_for_each_promise():
    assert len(set(CORE)) == len(CORE) <= 40
    assert max(map(len, rings.CORE.values())) <= 4


@pytest.mark.parametrize("name", CORE)
def test_a_core_test_is_there(name, request):
    file, function = re.match(r"(.*)::(\w+)", name).groups()
    assert f"def {function}(" in (ROOT / "tests" / file).read_text()
    assert file.split("/")[0] in rings.FOLDERS
    # Its parameters are known only to a session that has collected them.
    collected = {item.nodeid.removeprefix("tests/") for item in request.session.items}
    ours = {one for one in collected if one.startswith(f"{file}::{function}")}
    whole = request.config.args == request.config.getini("testpaths")
    if whole and "core" in request.config.getoption("markexpr"):
        assert any(one == name or one.startswith(f"{name}@") for one in ours) == (
            "not core" not in request.config.getoption("markexpr")
        )


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run([sys.executable, "-c", ""]),
        lambda: subprocess.Popen(sys.executable),
        lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
        lambda: multiprocessing.get_context("forkserver").Process(target=print).start(),
    ],
)
def test_an_interpreter_that_is_started_without_the_mark_fails_the_test(start):
    with pytest.raises(pytest.fail.Exception, match=r"mark it with @pytest\.mark\.launches"):
        start()


def test_other_programs_may_be_started():
    assert subprocess.run(["true"], check=False).returncode == 0
