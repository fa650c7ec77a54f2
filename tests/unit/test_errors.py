"""What a terminal would obey is written as an escape in every message."""

import pytest

from llmtrain.errors import (
    PeerError,
    Problem,
    RunError,
    UserError,
    exit_code_of,
    explained,
    first_line,
    harmless,
    precedence,
)

HOSTILE = "a\x1b[31m\x07\u202eb\x9bAc\ud800.jsonl"
HARMLESS = r"a\x1b[31m\x07\u202eb\x9bAc\ud800.jsonl"


def test_what_is_not_printable_is_written_as_an_escape():
    assert harmless(HOSTILE) == HARMLESS
    assert harmless("é 土星 … ×") == "é 土星 … ×"
    assert harmless("a\nb\tc", keep="\n") == r"a" + "\n" + r"b\tc"


@pytest.mark.parametrize("field", range(4))
def test_a_problem_is_harmless_in_each_of_its_parts(field):
    parts = ["key", "value", "expected", "remedy"]
    parts[field] = HOSTILE
    text = str(UserError(Problem(*parts), where=HOSTILE))
    assert text.count(HARMLESS) == 2
    assert text.replace("\n", "").isprintable()


def test_the_name_of_a_file_cannot_forge_a_line_of_a_message():
    text = str(Problem("data.sources.0.path", "x\n    try:      rm -rf", "a data file"))
    assert text.splitlines() == [
        r"  data.sources.0.path = x\n    try:      rm -rf",
        "    expected: a data file",
    ]


def test_an_expectation_of_several_lines_keeps_them():
    assert str(Problem("key", None, "a table:\n  1\n  2")).count("\n") == 3


@pytest.mark.parametrize("error", [RunError(HOSTILE, 74, HOSTILE), PeerError(HOSTILE, 75, 1)])
def test_what_the_machine_did_is_told_harmlessly(error):
    assert HARMLESS in str(error)
    assert str(error).replace("\n", "").isprintable()


def test_an_error_has_the_exit_code_of_what_it_is_and_a_defect_1():
    errors = [UserError(), RunError("", 74, ""), PeerError("", 75, 1), KeyError(), SystemExit(3)]
    assert [exit_code_of(error) for error in errors] == [2, 74, 75, 1, 1]


def test_a_cause_comes_before_its_consequences():
    assert sorted([75, 1, 74, 2], key=precedence) == [2, 74, 1, 75]
    assert precedence(137) == precedence(1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("one\ntwo"), "one"),
        (OSError("\n  spaced  \nmore"), "spaced  "),
        (RuntimeError(), "RuntimeError"),
        (KeyError(""), "''"),
    ],
)
def test_an_error_in_one_line_is_never_empty(error, expected):
    assert first_line(error) == expected


def test_an_operation_without_a_deterministic_kernel_is_a_mistake_of_the_config():
    """The words of torch 2.13."""
    said = "cumsum_cuda_kernel does not have a deterministic implementation, but you set …"
    found = explained(RuntimeError(said))
    assert exit_code_of(RuntimeError(said)) == 2
    assert "training.deterministic" in str(found)
    assert "cumsum_cuda_kernel" in str(found)
    assert "Traceback" not in str(found)
