import time

import pytest

from llmtrain.cli import progress
from llmtrain.cli.progress import ProgressLine


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(("moves", "seconds"), [(True, 0.5), (False, 30.0)])
def test_a_line_is_due_now_and_then(clock, monkeypatch, moves, seconds):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: moves, raising=False)
    line = ProgressLine(wait=False)
    assert line.is_due()
    clock[0] += seconds - 0.01
    assert not line.is_due()
    clock[0] += 0.02
    assert line.is_due()
    assert not ProgressLine(wait=True).is_due()


def test_on_a_terminal_a_line_replaces_the_one_before(monkeypatch, capsys):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
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
