import json

import pytest
from helpers import runs

from llmtrain.cli.escapes import columns
from llmtrain.cli.watch import frame, watch
from llmtrain.tools.watch import Watcher

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
    rows = [line for line in text.split("\n") if any("\u2800" <= sign <= "\u28ff" for sign in line)]
    assert len(rows) == 6
    assert text.endswith("The same command resumes the run.")


def test_json_is_one_object_and_once_is_one_screen(tmp_path, capsys):
    run = runs.write_run(tmp_path, runs.history())
    watch(run, once=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["state"] == "finished"
    watch(run, once=True, as_json=False)
    assert "finished" in capsys.readouterr().out
