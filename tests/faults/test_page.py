"""The page of scenarios: each has a test, and the page says what the results say."""

import pytest
from helpers import fault_matrix


def test_every_scenario_has_a_test_that_carries_its_id():
    found = {name for test in fault_matrix.names_of_tests() for name in fault_matrix.ids(test)}
    assert fault_matrix.SCENARIOS.keys() - found == set()


def test_there_are_48_scenarios_and_the_matrix_of_portability():
    numbered = [f"F{number:02}" for number in range(1, 49)]
    assert [*fault_matrix.SCENARIOS] == [*numbered, "P"]


def test_the_page_shows_the_results_that_were_kept():
    assert fault_matrix.PAGE.read_text(encoding="utf-8") == fault_matrix.page(fault_matrix.load())


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("tests/faults/test_kills.py::test_f10_killed", ["F10"]),
        ("test_f01_f02_killed[f02_create]", ["F02"]),
        ("test_f01_f02_killed", ["F01", "F02"]),
        ("test_f35_a_rank[2-1]", ["F35"]),
        ("test_f44_nan[f44-adamw]", ["F44"]),
        ("test_p_any_to_any[ddp-zero2]", ["P"]),
        ("test_df_12_a_file", []),
        ("test_f1_or_f100_f", []),
        ("test_bad_input_07_other", []),
    ],
)
def test_a_test_is_known_by_the_ids_in_its_name(test, expected):
    assert fault_matrix.ids(test) == expected


@pytest.mark.parametrize(
    ("outcomes", "cell"),
    [
        ([], "not run"),
        (["passed", "passed"], "passed (2)"),
        (["passed", "failed"], "**failed**: 1 of 2"),
        (["passed", "skipped"], "passed (1), skipped (1)"),
        (["skipped"], "skipped: no tmpfs"),
    ],
)
def test_a_scenario_passes_only_if_all_of_its_tests_did(outcomes, cell):
    tests = [{"outcome": one, "note": "no tmpfs"} for one in outcomes]
    assert fault_matrix.result(tests) == cell
