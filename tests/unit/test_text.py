import pytest

from llmtrain import text


@pytest.mark.parametrize(
    ("given", "expected"),
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
def test_a_length_of_time_is_days_hours_minutes_and_seconds(given, expected):
    assert text.parse_duration(given) == expected


@pytest.mark.parametrize(
    ("format_", "value", "expected"),
    [
        ("number", None, "–"), ("number", float("nan"), "–"), ("number", 0.000123456, "0.000123"),
        ("number", 2.34567891, "2.346"), ("number", 12345.6, "12,346"), ("number", 1e30, "1e+30"),
        ("fixed", 2.5, "2.500"), ("fixed", True, "–"), ("short", 14_800, "14.8 k"),
        ("size", 0, "0 B"), ("size", 1023, "1023 B"), ("size", 14_900_000, "14.2 MiB"),
        ("size", 2**50, "1,024.0 TiB"), ("percent", 0.944, "94 %"), ("percent", 0.0001, "< 0.1 %"),
        ("duration", 0.028, "28 ms"), ("duration", 75, "1 min 15 s"),
        ("duration", 7800, "2 h 10 min"), ("when", 1e30, "–"), ("when", 0, "1970-01-01 00:00:00"),
    ],
)  # fmt: skip
def test_numbers_are_written_for_people(format_, value, expected):
    assert getattr(text, format_)(value) == expected
