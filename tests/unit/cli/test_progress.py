import time

import pytest
from helpers.ranks import until

from llmtrain import system
from llmtrain.cli import options
from llmtrain.cli.options import ProgressLine, busy


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(("moves", "seconds"), [(True, 0.5), (False, 30.0)])
def test_a_line_is_due_now_and_then(clock, monkeypatch, moves, seconds):
    monkeypatch.setattr(options.sys.stderr, "isatty", lambda: moves, raising=False)
    line = ProgressLine(wait=False)
    assert line.is_due()
    clock[0] += seconds - 0.01
    assert not line.is_due()
    clock[0] += 0.02
    assert line.is_due()
    assert not ProgressLine(wait=True).is_due()


def test_on_a_terminal_a_line_replaces_the_one_before(monkeypatch, capsys):
    monkeypatch.setattr(options.sys.stderr, "isatty", lambda: True, raising=False)
    line = ProgressLine(wait=False)
    line.show("1 of 2")
    line.show("2 of 2\x1b[31m", last=True)
    line.clear()
    assert capsys.readouterr().err == "\r\033[K1 of 2\r\033[K2 of 2\\x1b[31m\n\r\033[K"


def test_elsewhere_each_line_stays_and_there_is_nothing_to_remove(capsys):
    line = ProgressLine(wait=False)
    line.show("1 of 2")
    line.clear()
    line.show("2 of 2", last=True)
    assert capsys.readouterr().err == "1 of 2\n2 of 2\n"


def test_a_command_shows_on_a_terminal_what_takes_long_and_then_removes_it(monkeypatch, capsys):
    monkeypatch.setattr(options.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(options, "_BUSY_AFTER_SECONDS", 0.0)
    monkeypatch.setitem(options._SECONDS_BETWEEN, True, 0.001)
    shown = []
    monkeypatch.setattr(ProgressLine, "show", lambda line, text, **_: shown.append(text))
    with busy("loading") as end:
        until(lambda: any(text == "loading, 0 s" for text in shown), "the first phase")
        system.beat("reading files", 3, 7)
        until(lambda: any("reading files (3 of 7), " in text for text in shown), "a count")
        end()
        count = len(shown)
    assert len(shown) == count  # the clearing, once
    assert shown[-1] == ""


def test_where_there_is_no_terminal_nothing_is_added(monkeypatch, capsys):
    monkeypatch.setattr(options, "_BUSY_AFTER_SECONDS", 0.0)
    with busy("loading") as end:
        end()
    assert capsys.readouterr().err == ""
