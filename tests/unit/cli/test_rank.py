import errno
import html
import io
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers import runs
from helpers.config import written

import llmtrain
from llmtrain.cli import rank as module
from llmtrain.cli.rank import describe, end_block, refused, train_here
from llmtrain.errors import Problem, RunError, UserError
from llmtrain.report import page
from llmtrain.report.collect import collect
from llmtrain.report.page import write_report
from llmtrain.training import stop


class LeftError(Exception):
    """Where the process would have ended."""


@pytest.fixture
def ends(monkeypatch):
    """Run `train_here` up to its last statement; `train` is played by a function."""

    def leave(code):
        raise LeftError(code)

    def run(folder, train, text=None):
        monkeypatch.setattr(module.os, "_exit", leave)
        monkeypatch.setattr(module.logging, "shutdown", lambda: None)
        monkeypatch.setattr(stop, "install", lambda: None)
        monkeypatch.setattr(llmtrain, "train", train)
        monkeypatch.setattr(page, "write_report", lambda run_dir: run_dir / "report.html")
        with pytest.raises(LeftError) as left:
            train_here(str(written(folder) if text is None else written(folder, text)), [])
        return left.value.args[0]

    for name in ("RANK", "LLMTRAIN_LAUNCHED", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    return run


def finished(config):
    runs.write_run(config.run_dir, runs.history(20))
    return SimpleNamespace(exit_code=0, run_dir=config.run_dir)


def test_the_last_line_is_the_path_of_the_report(tmp_path, ends, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ends(tmp_path, finished) == 0
    out, block = capsys.readouterr()
    assert out == "runs/my/report.html\n"
    assert block.startswith("held-out   9.0")
    assert len(block.splitlines()) <= 8


def test_only_rank_0_writes_the_report(tmp_path, ends, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.chdir(tmp_path)
    assert ends(tmp_path, finished) == 0
    assert capsys.readouterr().out == ""


def test_a_report_that_cannot_be_written_does_not_undo_the_run(tmp_path, ends, capsys, monkeypatch):
    def full_disk(run_dir):
        raise UserError(Problem("report", run_dir, "a disk with room on it"))

    def train(config):
        monkeypatch.setattr(page, "write_report", full_disk)
        return finished(config)

    monkeypatch.chdir(tmp_path)
    assert ends(tmp_path, train) == 0
    assert "the run is complete, its report is not" in capsys.readouterr().err


def test_a_defect_of_the_report_does_not_change_the_code_of_the_run(
    tmp_path, ends, capsys, monkeypatch
):
    def train(config):
        monkeypatch.setattr(page, "write_report", lambda run_dir: 1 // 0)
        return finished(config)

    monkeypatch.chdir(tmp_path)
    assert ends(tmp_path, train) == 0
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "the run is complete, its report is not: error: ZeroDivisionError" in said


def test_a_run_whose_output_nobody_reads_any_more_keeps_its_code(tmp_path, ends, monkeypatch):
    """In `train | tee log`, Ctrl-C ends `tee` at once, and the run after its checkpoint."""

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def train(config):
        monkeypatch.setattr(sys, "stderr", Gone())
        return finished(config)

    monkeypatch.chdir(tmp_path)
    assert ends(tmp_path, train) == 0


def raising(error):
    def train(config):
        raise error

    return train


def test_bad_input_is_a_message_and_code_2(tmp_path, ends, capsys):
    assert ends(tmp_path, raising(UserError(Problem("data.x", 3, "something else")))) == 2
    err = capsys.readouterr().err
    assert err == "error: 1 problem\n  data.x = 3\n    expected: something else\n"


def test_a_failure_of_the_machine_has_its_own_code(tmp_path, ends, capsys):
    assert ends(tmp_path, raising(RunError("disk full", 74, "make room"))) == 74
    assert capsys.readouterr().err == "error: disk full\n    next:     make room\n"


def test_a_defect_is_a_traceback_and_code_1(tmp_path, ends, capsys):
    assert ends(tmp_path, raising(ValueError("oops"))) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "\nerror: ValueError: oops\n    where:    rank 0" in err
    assert err.splitlines()[-1].lstrip().startswith("next:")


def test_a_device_without_memory_is_a_message_and_code_2(tmp_path, ends, capsys):
    import torch

    said = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
        "of which 1.50 GiB is free. Including non-PyTorch memory, this process has 77.6 GiB in use."
    )
    assert ends(tmp_path, raising(torch.OutOfMemoryError(said))) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: 1 problem\n  device memory\n")
    assert "79.10 GiB of which 1.50 GiB is free.)" in err
    assert "smaller training.micro_batch_size" in err
    assert "activation_checkpointing=full" in err
    assert "Traceback" not in err


def test_a_defect_says_what_and_where_and_names_the_log_file_if_there_is_one(tmp_path, capsys):
    log = tmp_path / "rank-0.log"
    log.write_text("")
    try:
        page.write(None, tmp_path)  # raises inside of llmtrain
    except AttributeError as error:
        error.add_note("after step 7")
        code, said = describe(error, log)
    assert code == 1
    what, where, todo, more = said.splitlines()
    assert what == "error: AttributeError: 'NoneType' object has no attribute 'encode'"
    assert where.startswith("    where:    rank 0, after step 7, llmtrain/report/page.py, line ")
    assert todo.startswith("    next:     this is a defect")
    assert more == f"    log:      {log}"
    assert "Traceback" in capsys.readouterr().err
    assert "log:" not in describe(ValueError(), tmp_path / "none")[1]


def test_a_failure_of_the_machine_names_the_log_file_too(tmp_path):
    log = tmp_path / "rank-0.log"
    log.write_text("")
    assert describe(RunError("disk full", 74, "make room"), log) == (
        74,
        f"error: disk full\n    next:     make room\n    log:      {log}",
    )


def test_other_ranks_say_only_what_rank_0_may_not_know(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert describe(UserError(Problem("a", 1, "b"))) == (2, "")
    assert describe(RunError("what another rank refused", 2, "")) == (2, "")
    assert describe(RunError("gone", 75, "again"))[1].startswith("rank 3: error: gone")


def test_under_our_own_launch_the_message_is_left_to_the_launcher(
    tmp_path, ends, capsys, monkeypatch
):
    mark = tmp_path / "ended"
    monkeypatch.setenv("LLMTRAIN_LAUNCHED", str(mark))
    assert ends(tmp_path, finished, text="training: {steps: x}\n") == 2
    assert capsys.readouterr().err == ""
    assert "training.steps" in mark.read_text(encoding="utf-8")


def test_the_launcher_of_torch_hears_of_an_error_without_a_traceback(
    tmp_path, ends, monkeypatch, capsys
):
    pytest.importorskip("torch")
    assert "torch" in sys.modules
    heard = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(heard))
    ends(tmp_path, raising(UserError(Problem("data.x", 3, "something else"))))
    text = heard.read_text(encoding="utf-8")
    assert "data.x = 3" in text
    assert "Traceback" not in text
    ends(tmp_path, raising(ValueError("oops")))
    assert "Traceback" in heard.read_text(encoding="utf-8")


@pytest.mark.launches
def test_nothing_comes_behind_the_last_line_while_semaphores_are_still_held():
    program = (
        "import multiprocessing\n"
        "from llmtrain.cli.rank import _leave\n"
        "held = multiprocessing.get_context('spawn').Event()\n"
        "_leave(75, 'the last line')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    # The tracker has the pipe, too: it has ended, and has said all it says.
    assert (ended.returncode, ended.stderr) == (75, "the last line\n")


def test_a_path_that_the_system_refuses_is_one_message(tmp_path, capsys):
    for path, why in ((tmp_path / ("x" * 300), "File name too long"), (tmp_path / "a", "denied")):
        number = errno.ENAMETOOLONG if "long" in why else errno.EACCES
        code, message = describe(refused(OSError(number, os.strerror(number), str(path))))
        assert code == 2
        assert str(path) in message
        assert why in message
    assert capsys.readouterr().err == ""


def test_a_full_disk_is_a_message_and_code_74():
    code, message = describe(refused(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert code == 74
    assert "No space left on device" in message


def test_another_error_of_a_disk_is_a_defect(capsys):
    assert describe(refused(OSError(errno.EIO, os.strerror(errno.EIO), "/disk")))[0] == 1
    assert "Input/output error: '/disk'" in capsys.readouterr().err


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
