import pytest

from llmtrain.text import parse_duration


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3h50m", 13_800),
        ("90m", 5_400),
        ("45s", 45),
        ("1d12h", 129_600),
        (" 1d1h1m1s ", 90_061),
        ("", None),
        ("0s", None),
        ("3:50", None),
        ("50m3h", None),
        ("3.5h", None),
        ("-3h", None),
        ("3 h", None),
        ("90", None),
    ],
)
def test_a_length_of_time_is_days_hours_minutes_and_parse_duration(text, expected):
    assert parse_duration(text) == expected
