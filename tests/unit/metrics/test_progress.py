import io
import math
import re
from types import SimpleNamespace

import pytest
from helpers.runs import numbers

from llmtrain import system
from llmtrain.batch_size import BatchSize
from llmtrain.metrics.progress import Busy, Progress, plain_line
from llmtrain.text import duration

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def progress_of(steps, stream, *sizes, **options):
    progress = Progress(stream, **options)
    progress.lasts(steps, BatchSize(sizes or ((1, 4),)))
    return progress


def visible(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_log_gets_plain_lines_without_control_characters():
    out = io.StringIO()
    progress = progress_of(300, out)
    progress.note("run\x1b[31m runs/a\r")
    progress.training(numbers(10))
    progress.evaluation({"step": 10, "split": "heldout", "loss": 3.25, "bits_per_byte": 1.5})
    progress.close()
    assert not CONTROL.search(out.getvalue())
    _, train, evaluation = out.getvalue().splitlines()
    word, *parts = train.split()
    assert word == "train"
    fields = dict(part.split("=") for part in parts)
    assert fields["step"] == "10/300"
    assert float(fields["loss"]) == pytest.approx(numbers(10).loss, rel=1e-3)
    assert evaluation.split() == [
        "eval",
        "step=10",
        "split=heldout",
        "loss=3.25",
        "bits_per_byte=1.5",
    ]


def test_a_log_gets_a_line_only_where_the_metrics_do():
    out = io.StringIO()
    progress = progress_of(300, out)
    for step in range(1, 31):
        progress.training(numbers(step), line=step % 10 == 0)
    assert [line.split()[1] for line in out.getvalue().splitlines()] == [
        "step=10/300",
        "step=20/300",
        "step=30/300",
    ]


def test_a_terminal_shows_one_line_with_the_facts_of_the_step(terminal):
    clock = iter([0.0, 10.0])
    progress = progress_of(300, terminal, clock=lambda: next(clock))
    progress.evaluation({"step": 100, "split": "heldout", "loss": 3.61})
    progress.training(numbers(140, loss=3.5))
    progress.training(numbers(150, loss=3.4), memory_gb=1.25)
    last = visible(terminal.getvalue()).splitlines()[-1]
    for part in ("150/300 ━", "╺─", "50 %", "loss 3.400 ↓", "held-out 3.610", "tok/s", "1.2 GiB"):
        assert part in last
    assert "2 min 30 s left" in last  # 150 steps at one a second


def test_what_is_left_of_a_batch_that_grows_is_counted_in_blocks(terminal):
    """10 steps of 4 blocks took 10 s; 50 of them are left, and 100 of 12: 1,400 blocks."""
    clock = iter([0.0, 10.0])
    progress = progress_of(300, terminal, (1, 4), (201, 12), clock=lambda: next(clock))
    progress.training(numbers(140))
    progress.training(numbers(150))
    assert "5 min 50 s left" in visible(terminal.getvalue()).splitlines()[-1]


def test_a_terminal_shows_the_accuracy_of_pairs(terminal):
    progress = progress_of(300, terminal)
    line = {"step": 100, "split": "heldout", "loss": 0.61, "accuracy": 0.625, "perplexity": None}
    progress.evaluation(line)
    progress.training(numbers(140, loss=0.5, pairs={"accuracy": 0.71, "margin": 1.0}))
    shown = visible(terminal.getvalue())
    assert "held-out 0.610   accuracy 62 %" in shown
    assert "loss 0.500  accuracy 71 %  held-out 0.610" in shown


def test_memory_of_a_device_is_shown_with_what_the_device_has(terminal):
    progress = progress_of(300, terminal)
    progress.device_gb = 23.7
    progress.training(numbers(140), memory_gb=6.12)
    assert "  6.1/24 GiB" in visible(terminal.getvalue())


def test_a_narrow_terminal_keeps_what_matters_most(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    clock = iter([0.0, 10.0])
    progress = progress_of(100_000, terminal, clock=lambda: next(clock))
    progress.evaluation({"step": 40_000, "split": "heldout", "loss": 3.61})
    progress.training(numbers(41_000))
    progress.training(numbers(42_000), memory_gb=70.5)
    last = visible(terminal.getvalue()).splitlines()[-1].split("\r")[-1]
    assert "42,000/100,000" in last
    assert "9 min 40 s left" in last
    assert "GiB" not in last
    assert len(last) <= 80


def test_a_terminal_is_drawn_at_most_four_times_a_second(terminal):
    now = [0.0]
    progress = progress_of(10**6, terminal, clock=lambda: now[0])
    for step in range(1, 1001):  # ten seconds
        now[0] += 0.01
        progress.training(numbers(step))
    progress.close()
    assert 30 <= visible(terminal.getvalue()).count("/1,000,000 ") <= 42


def test_a_step_between_two_draws_formats_and_writes_nothing(terminal):
    progress = progress_of(10**6, terminal, clock=lambda: 0.0)
    progress.training(numbers(1))
    size = len(terminal.getvalue())
    progress.training(SimpleNamespace(step=2))  # any other field that is read raises
    assert len(terminal.getvalue()) == size


def test_no_color_is_honoured(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    progress = progress_of(300, terminal)
    progress.training(numbers(10))
    progress.close()
    assert not re.search(
        r"\x1b\[[0-9;]*m", terminal.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")
    )


def test_markup_in_a_text_stays_text(terminal):
    progress = progress_of(300, terminal)
    progress.training(numbers(10))
    progress.note("[red]sample[/red] [/]")
    progress.close()
    assert "[red]sample[/red] [/]" in visible(terminal.getvalue())


def test_a_dumb_terminal_is_a_log(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    progress = progress_of(300, terminal)
    progress.training(numbers(10))
    assert terminal.getvalue().startswith("train step=10/300 ")


def test_without_a_stream_nothing_is_shown(capsys):
    progress = progress_of(300, None)
    progress.training(numbers(10))
    progress.note("text")
    progress.close()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_that_goes_away_does_not_end_the_run():
    out = io.StringIO()
    progress = progress_of(300, out)
    out.close()
    progress.training(numbers(10))
    progress.training(numbers(20))


def test_a_loss_that_is_not_finite_is_shown_as_such():
    out = io.StringIO()
    progress_of(300, out).training(numbers(10, loss=math.nan))
    assert "loss=nan" in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.6, "4.6 s"), (65, "1 min 5 s"), (7800, "2 h 10 min"), (360000, "4 d 4 h"), (-1, "0 ms")],
)
def test_durations_are_for_people(seconds, text):
    assert duration(seconds) == text


def evaluate(progress, step, loss):
    progress.evaluation({"step": step, "split": "heldout", "loss": loss})
    progress.evaluation({"step": step, "split": "heldout/wiki", "loss": 1.0})
    progress.sample(step, "The planet", " is\nround. " + "x" * 300)


def test_a_terminal_shows_how_each_evaluation_compares_and_what_the_model_writes(terminal):
    progress = progress_of(300, terminal)
    for step, loss in ((0, 7.5), (100, 3.25), (200, 3.5), (300, 3.0)):
        evaluate(progress, step, loss)
        if step in (100, 300):
            progress.checkpoint({"step": step, "name": f"step-{step:08}"})
    evaluate(progress, 310, math.nan)
    progress.sample(310, "Long", " " + "x" * 300)
    progress.close()
    lines = terminal.getvalue().splitlines()
    assert lines == [
        "step 0       held-out 7.500",
        "step 100     held-out 3.250 (−4.250)   best so far   saved",
        "  The planet is",
        "step 200     held-out 3.500 (+0.250)",
        "  The planet is",
        "step 300     held-out 3.000 (−0.500)   best so far   saved",
        "  The planet is",
        "step 310     held-out nan",
        "  The planet is",
        "  Long " + "x" * 111 + "…",
    ]


def test_a_save_that_ends_steps_later_is_shown_then_and_one_without_evaluation_is_not(terminal):
    progress = progress_of(10**6, terminal)
    evaluate(progress, 100, 3.25)
    progress.training(numbers(101))
    progress.checkpoint({"step": 100})
    progress.checkpoint({"step": 150})
    progress.close()
    shown = [line.strip() for line in re.split(r"[\r\n]+", visible(terminal.getvalue()))]
    assert [line for line in shown if line.startswith("step")] == [
        "step 100     held-out 3.250",
        "step 100     saved",
    ]


def test_a_note_between_an_evaluation_and_its_save_is_not_the_one_that_is_saved(terminal):
    progress = progress_of(10**6, terminal)
    progress.evaluation({"step": 100, "split": "heldout", "loss": 3.25})
    progress.note("a token of a sample (7 of 64), 1 min 0 s")
    progress.sample(100, "The planet", " is round.")
    progress.checkpoint({"step": 100})
    progress.close()
    assert terminal.getvalue().splitlines() == [
        "step 100     held-out 3.250",
        "a token of a sample (7 of 64), 1 min 0 s",
        "  The planet is round.",
        "step 100     saved",
    ]


def test_after_the_end_the_moving_line_is_gone(terminal):
    import pyte

    progress = progress_of(300, terminal)
    evaluate(progress, 0, 7.5)
    progress.training(numbers(140))
    progress.close()
    progress.note("stopped    step 140 of 300 (SIGINT)")
    screen = pyte.Screen(120, 10)
    pyte.Stream(screen).feed(terminal.getvalue().replace("\n", "\r\n"))
    assert [line.rstrip() for line in screen.display if line.strip()] == [
        "step 0       held-out 7.500",
        "stopped    step 140 of 300 (SIGINT)",
    ]


def test_of_a_long_note_the_first_lines_are_shown():
    out = io.StringIO()
    progress = progress_of(300, out)
    progress.note("\n".join("abcdef"))
    progress.note("\n".join("abcdefg"))
    rest = "… (the rest is in logs/rank-0.log)"
    assert out.getvalue().splitlines() == [*"abcdef", *"abcde", rest]


def test_between_the_blocks_a_log_has_nothing_but_words_and_values():
    import shlex

    out = io.StringIO()
    progress = progress_of(300, out)
    progress.note("run       runs/a: a new run")
    progress.begin()
    progress.training(numbers(10))
    progress.note("warning: two\nlines of \x1b[31mtext")
    detail = {"step": 7, "loss": None, "names": ["a b"], "reason": 'is "x=1"'}
    progress.note("save failed at step 7", plain_line("event", {"step": 10, "event": "e"} | detail))
    progress.close()
    progress.note("finished   step 300 of 300")
    first, *records, last = out.getvalue().splitlines()
    assert (first, last) == ("run       runs/a: a new run", "finished   step 300 of 300")
    read = [shlex.split(line) for line in records]
    assert [one[0] for one in read] == ["train", "note", "event"]
    assert all("=" in part for one in read for part in one[1:])
    assert read[1][1] == "text=warning: two\\nlines of \\u001b[31mtext"
    assert read[2][1:] == ["step=7", "event=e", "names=['a b']", 'reason=is "x=1"']


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(520, "520"), (999.6, "1.00 k"), (1100, "1.10 k"), (9996, "10.0 k"), (14_800, "14.8 k"),
     (99_960, "100 k"), (124_000, "124 k"), (2_310_000, "2.31 M"), (5e9, "5.00 B")],
)  # fmt: skip
def test_rates_have_three_digits(terminal, rate, shown):
    progress = progress_of(300, terminal)
    progress.training(numbers(10, step_tokens=rate, seconds=1.0))
    assert f"  {shown} tok/s" in visible(terminal.getvalue())


def test_each_record_is_one_line_of_a_log_that_can_be_read_back():
    import shlex

    out = io.StringIO()
    progress = progress_of(300, out)
    text = ' "is" = a\nround\\thing\u2028.'
    progress.sample(0, "The planet", text)
    progress.checkpoint({"step": 5, "name": "step-00000005", "bytes": 7, "blocked_seconds": 1.0})
    sample, checkpoint = out.getvalue().splitlines()
    assert sample.split()[0] == "sample"
    parts = dict(part.split("=", 1) for part in shlex.split(sample)[1:])
    assert parts["prompt"] == "The planet"
    assert "\\n" in sample
    assert checkpoint == "checkpoint step=5 name=step-00000005 bytes=7"


def test_a_secret_in_a_prompt_is_hidden_in_what_is_shown(monkeypatch, terminal):
    monkeypatch.setenv("HUB_TOKEN", "correct-horse-9-battery")
    for stream in (io.StringIO(), terminal):
        shown = progress_of(9, stream)
        shown.sample(3, "say correct-horse-9-battery", " to correct-horse-9-battery")
        shown.note("at correct-horse-9-battery")
        shown.close()
        assert "battery" not in stream.getvalue()
        assert stream.getvalue().count("***") == 3


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
        *("3 s", "6 s", "12 s", "24 s", "48 s", "1 min 36 s", "2 min 36 s")
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
