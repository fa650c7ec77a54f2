import io
import json
import re
import sys

import pyte
import pytest
from helpers import runs

from llmtrain.cli import watch as module
from llmtrain.cli.watch import frame, watch
from llmtrain.errors import UserError
from llmtrain.text import columns
from llmtrain.tools.watch import Watcher

BRAILLE = re.compile("[\u2800-\u28ff]")
RESUMES = "The same command resumes the run."
LONG = "x" * 300 + "\n\x1b[2J漢字"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 12), (200, 50)])
def test_nothing_is_wider_or_higher_than_the_screen(tmp_path, width, height):
    lines = [*runs.history(3000), *(runs.event_line(3000, LONG, reason=LONG) for _ in range(6))]
    run = runs.write_run(tmp_path, lines, runs.status("failed"))
    drawn = frame(Watcher(run).look(), width, height)
    assert len(drawn) < height
    assert max(map(columns, drawn)) < width
    assert not any("\n" in line or "\x1b" in line for line in drawn)


def test_a_screen_has_the_bar_the_numbers_the_curve_and_what_to_do(tmp_path):
    start, *lines = runs.history(300)
    run = runs.write_run(tmp_path, [start | {"steps": 600}, *lines], runs.status("stopped"))
    text = "\n".join(frame(Watcher(run).look(), 80, 24))
    assert "300 of 600 steps" in text
    assert "50 %" in text
    assert "held-out 2." in text
    assert "tok/s" in text
    assert sum(bool(BRAILLE.search(line)) for line in text.split("\n")) == 6
    assert text.endswith(RESUMES)


def test_a_router_loss_is_shown_beside_the_loss_where_there_is_one(tmp_path):
    start, *lines = runs.history(300)
    for added, shown in (({}, False), ({"router_loss": 0.25}, True)):
        some = [line | added if line["kind"] == "train" else line for line in lines]
        folder = tmp_path / str(shown)
        folder.mkdir()
        view = Watcher(runs.write_run(folder, [start, *some])).look()
        assert ("router 0.25" in "\n".join(frame(view, 80, 24))) == shown
        assert view.to_json()["router_loss"] == added.get("router_loss")


def test_json_is_one_object_and_once_is_one_screen(tmp_path, capsys):
    run = runs.write_run(tmp_path, runs.history())
    watch(run, once=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["state"] == "finished"
    watch(run, once=True, as_json=False)
    assert "finished" in capsys.readouterr().out


class Terminal(io.StringIO):
    """A terminal of 80 × 24 cells: what is written to it, and what it then shows."""

    def __init__(self):
        super().__init__()
        self.screen = pyte.HistoryScreen(80, 24)
        self._stream = pyte.Stream(self.screen)

    def isatty(self):
        return True

    def write(self, text):
        self._stream.feed(text.replace("\n", "\r\n"))  # as a terminal's driver does
        return len(text)

    def shown(self):
        return [line.rstrip() for line in self.screen.display]


def test_a_terminal_of_80_by_24_holds_all_of_the_picture_while_it_changes(tmp_path, monkeypatch):
    run = tmp_path / ("a long name " * 8)
    run.mkdir()
    start, *lines = [line for line in runs.history(300) if line["kind"] != "end"]
    events = [runs.event_line(0, LONG, reason=LONG) for _ in range(6)]
    runs.write_run(run, [start | {"steps": 600}, *events, *lines[:-20]], runs.status("running"))
    pictures = []

    def next_second(_seconds):
        pictures.append(terminal.shown())
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in lines[-20:])
        (run / "status.json").write_text(json.dumps(runs.status("stopped")))

    terminal = Terminal()
    for name, value in {"COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(module.time, "sleep", next_second)
    watch(run, once=False, as_json=False)
    pictures.append(terminal.shown())
    for state, picture in zip(("silent", "stopped"), pictures, strict=True):
        head, *rest = picture
        assert head.startswith("a long name a long name")
        assert head.endswith(f"{state}   ddp · 2 processes · cpu")
        assert sum("of 600 steps" in line for line in rest) == 1
        (numbers,) = (line for line in rest if line.startswith("loss "))
        assert all(word in numbers for word in ("held-out", "tok/s", "data wait"))
        assert ("left" in numbers) == (state == "silent")
        assert sum(bool(BRAILLE.search(line)) for line in rest) == 6
        assert sum(line.startswith("  step 0: xxx") for line in rest) == 4
        assert any(line.startswith("! no line for ") for line in rest) == (state == "silent")
        last = "Ctrl-C leaves; the run goes on." if state == "silent" else RESUMES
        assert last in rest
    assert "300 of 600 steps" in "\n".join(pictures[-1])
    assert len(terminal.screen.history.top) == 0, "nothing was wrapped, nothing scrolled away"


def test_it_waits_for_a_run_that_starts(tmp_path, monkeypatch):
    run, steps = tmp_path / "new", []

    def next_second(_seconds):
        steps.append(terminal.shown())
        if len(steps) == 1:
            run.mkdir()
            (run / "lock").touch()
        else:
            runs.write_run(run, runs.history(20), runs.status("finished"))

    terminal = Terminal()
    for name, value in {"COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(module.time, "sleep", next_second)
    watch(run, once=False, as_json=False)
    assert len(steps) == 2
    assert "waiting for a run to start in" in steps[0][0]
    assert any("finished" in line for line in terminal.shown())


def test_it_does_not_wait_in_what_is_no_run(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").touch()
    monkeypatch.setattr(sys, "stdout", Terminal())
    with pytest.raises(UserError, match="a run directory"):
        watch(tmp_path, once=False, as_json=False)
    for options in ({"once": True, "as_json": False}, {"once": False, "as_json": True}):
        with pytest.raises(UserError, match="a run directory"):
            watch(tmp_path / "new", **options)


def test_over_how_many_processes_a_model_is_cut_stands_beside_the_strategy(tmp_path):
    start, *lines = runs.history(30)
    cut = {"tensor_parallel": 2, "pipeline_parallel": 1, "sequence_parallel": 1}
    view = Watcher(runs.write_run(tmp_path, [start | cut, *lines])).look()
    assert "ddp × tensor parallel 2 · 2 processes" in frame(view, 120, 24)[0]
    assert {key: view.to_json()[key] for key in cut} == cut
