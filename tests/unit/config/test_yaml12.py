import math

import pytest
import yaml
from hypothesis import example, given, settings, strategies as st

from llmtrain.config.yaml12 import parse, write


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-7", -7),
        ("0012", 12),
        ("0o17", 15),
        ("0xff", 255),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("-.inf", -math.inf),
        ("12:30", "12:30"),
        ("on", "on"),
        ("yes", "yes"),
        ("NO", "NO"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("0b11", "0b11"),
        ("12345e6", 12345e6),
        ("'12345e6'", "12345e6"),
        ("!!str 12", "12"),
        ("<<", "<<"),
        ("[1, a, {b: 2.0}]", [1, "a", {"b": 2.0}]),
    ],
)
def test_scalars_mean_what_yaml_1_2_says(text, value):
    document = parse(text)
    assert document.problems == []
    assert document.value == value
    assert type(document.value) is type(value)


def test_not_a_number_is_a_number():
    assert math.isnan(parse(".nan").value)


def test_a_duplicate_key_is_told_with_both_lines():
    document = parse("a:\n  b: 1\n  c: 2\n  b: 3\n")
    (problem,) = document.problems
    assert problem.key == "a.b"
    assert "line 2 and on line 4" in problem.expected


def test_text_that_is_not_yaml_is_told_with_its_line():
    (problem,) = parse("a: 1\nb: [1, 2\n").problems
    assert problem.key.startswith("line 3")


@pytest.mark.parametrize("text", ["a: \x07", "\tx: 1", "a: 1\n---\nb: 2", "*.parquet", "a: b: c"])
def test_every_broken_text_is_a_problem_and_no_exception(text):
    assert parse(text).problems


@pytest.mark.parametrize(
    "text", ["!!python/object:os.system x", "a: !mine 3", "!!int abc", "!!set {a}"]
)
def test_tags_that_are_not_plain_values_are_refused(text):
    (problem,) = parse(text).problems
    assert "plain values" in problem.expected


def test_keys_are_texts():
    document = parse("1: a\nnull: b\n[x]: c\non: d\n")
    assert [problem.key for problem in document.problems] == ["1", "null", "?"]
    assert document.value == {"on": "d"}


@pytest.mark.parametrize(
    "text",
    [
        "&a [*a]",
        "[" * 5000,
        "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
        + "".join(
            f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
            for before, name in zip("abcdefg", "bcdefgh", strict=True)
        ),
    ],
)
def test_a_nest_without_end_is_a_problem(text):
    (problem,) = parse(text).problems
    assert "levels" in problem.expected


def test_scalars_are_kept_as_they_were_written():
    assert parse("a: {b: [12345e6]}").source[("a", "b", 0)] == "12345e6"


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(["3e-4", "on", "12:30", "null", "0o17", "1_000", "=", "<<", "2024-01-01"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@example("0\x85")
@example("a\u2028 b")
@example("\r\n ")
@given(values)
def test_what_is_written_is_read_back(value):
    document = parse(write(value))
    assert document.problems == []
    assert document.value == value


@settings(deadline=None)
@given(st.text())
def test_written_texts_are_texts_for_readers_of_yaml_1_1_too(text):
    assert yaml.safe_load(write({"key": text})) == {"key": text}


@settings(deadline=None)
@given(st.text())
def test_no_text_makes_the_reader_fail(text):
    parse(text)
