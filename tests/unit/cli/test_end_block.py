import html
import json
import re

import pytest
from helpers import runs

from llmtrain.cli.rank import end_block
from llmtrain.report.collect import collect
from llmtrain.report.page import write_report


def test_the_block_says_what_was_reached_and_what_to_do_next(tmp_path):
    start, *lines = runs.history()
    folder = runs.write_run(tmp_path / "mine", [start | {"steps": 300}, *lines])
    (folder / "checkpoints" / "step-00000300").mkdir(parents=True)
    said = list(end_block(collect(folder)))
    assert len(said) <= 8
    assert said[0].startswith("held-out   9.0")
    assert said[0].endswith("at step 300")
    assert "goodput" in said[1]
    assert said[2] == "sample     The planet Saturn has 300 moons and a thick atmosphere."
    assert said[3] == 'use        llmtrain generate mine "…"'


def test_a_run_on_conversations_is_used_in_a_conversation(tmp_path):
    folder = runs.write_run(tmp_path / "my chat", runs.history())
    (folder / "checkpoints" / "step-00000300").mkdir(parents=True)
    for chat, advice in (
        (
            {"template": "a1"},
            ["llmtrain chat 'my chat'", "llmtrain generate --chat 'my chat' \"…\""],
        ),
        ({"template": ""}, ["llmtrain generate 'my chat' \"…\""]),  # strings need no template
        (None, ["llmtrain generate 'my chat' \"…\""]),
    ):
        (folder / "manifest.json").write_text(json.dumps({"chat": chat}))
        found = collect(folder)
        first, *more = advice
        said = list(end_block(found))
        assert f"use        {first}" in said
        assert [line for line in said if line.startswith(" ")] == [f"{'':<11}{one}" for one in more]
        commands = re.findall(
            '<code class="command">(.*?)</code>', write_report(folder).read_text()
        )
        assert [html.unescape(one) for one in commands][: len(advice)] == advice


@pytest.mark.parametrize("lines", [[], [runs.start_line(0)], [runs.train_line(1, loss=None)]])
def test_any_run_has_a_block(tmp_path, lines):
    said = list(end_block(collect(runs.write_run(tmp_path, lines, runs.status("stopped")))))
    assert "resume     give the same command again" in said


def test_a_long_sample_is_cut_at_the_width_of_the_terminal(tmp_path):
    lines = [runs.start_line(0), runs.sample_line(5, " 木" * 100 + "\n\nend")]
    folder = runs.write_run(tmp_path, lines)
    (shown,) = (one for one in end_block(collect(folder), 40) if one.startswith("sample"))
    assert shown == "sample     The planet 木 木 木 木 木…"


def test_a_directory_with_spaces_is_one_word_of_the_commands(tmp_path):
    folder = runs.write_run(tmp_path / "my first run", [runs.start_line(0), runs.train_line(1)])
    assert any("report 'my first run' OTHER" in line for line in end_block(collect(folder)))
