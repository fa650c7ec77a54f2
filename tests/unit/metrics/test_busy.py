import io

import pytest

from llmtrain import system
from llmtrain.metrics.progress import Busy, Progress


def told(seconds, *, loop=False, shown=None):
    """What a plain log gets in so many seconds of one phase. shown: second → a line of its own"""
    out = io.StringIO()
    progress = Progress(out)
    if loop:
        progress.begin()
    begun = len(out.getvalue())
    busy = Busy(progress)
    for second in range(1, seconds + 1):
        if shown and second in shown:
            progress.note(shown[second])
        system.beat("looking into the files of the data", second, 500)
        busy.look()
    return out.getvalue()[begun:].splitlines()


def test_what_takes_over_three_seconds_is_told_with_a_count():
    assert told(2) == []
    assert told(3) == ["looking into the files of the data (3 of 500), 3 s"]


def test_each_line_comes_after_twice_the_time_of_the_last_but_at_least_once_a_minute():
    assert [line.rpartition(", ")[2] for line in told(200)] == [
        *("3 s", "6 s", "12 s", "24 s", "48 s", "1 min 36 s", "2 min 36 s"),
    ]


def test_whatever_else_is_shown_begins_the_wait_again():
    assert told(6, shown={3: "resumed", 6: "ready"}) == [
        "resumed",
        "looking into the files of the data (5 of 500), 3 s",
        "ready",
    ]


def test_between_the_lines_of_slow_steps_nothing_is_told_for_a_minute():
    assert told(59, loop=True) == []
    (line,) = told(60, loop=True)
    assert line == 'note text="looking into the files of the data (60 of 500), 1 min 0 s"'


@pytest.mark.parametrize(
    ("done", "of", "words"), [(0, 0, "waiting"), (1234, 0, "waiting (1,234)"), (0, 9, "waiting")]
)
def test_a_count_that_is_not_known_is_left_out(done, of, words):
    system.beat("waiting", done, of)
    assert system.beat_in_words() == words
