"""What accelerate's launcher reports about itself, where it goes, and what is printed below it."""

import logging
import os
import subprocess
import sys

import pytest
from helpers.ranks import ROOT
from torch.distributed.elastic.multiprocessing.api import SignalException

from llmtrain.tools.launch import launcher


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Run `main` for a run directory whose launcher warns, and is then stopped by a signal."""
    torchs = logging.getLogger("torch.distributed")
    before = (list(torchs.handlers), torchs.propagate)

    def stopped():
        logging.getLogger("torch.distributed.elastic.agent").warning("Received 2 death signal")
        raise SignalException("Process 7 got signal: 2", 2)

    def run(run_dir):
        monkeypatch.setattr("accelerate.commands.launch.main", stopped)
        monkeypatch.setattr(sys, "argv", ["launcher", str(run_dir), "--config_file", "a.yaml"])
        with pytest.raises(SystemExit) as ended:
            launcher.main()
        assert sys.argv == ["launcher", "--config_file", "a.yaml"]
        return ended.value.code

    yield run
    torchs.handlers, torchs.propagate = before


def test_warnings_and_tracebacks_of_the_launcher_go_to_its_log(launched, tmp_path, capfd):
    (tmp_path / "logs").mkdir()
    assert launched(tmp_path) == 1
    assert capfd.readouterr().err == ""
    text = (tmp_path / "logs" / "launcher.log").read_text()
    assert "WARNING torch.distributed.elastic.agent: Received 2 death signal" in text
    assert text.splitlines()[-1].endswith("Process 7 got signal: 2")
    assert "Traceback" in text


def test_before_the_run_has_a_folder_for_logs_they_go_to_stderr(launched, tmp_path, capfd):
    assert launched(tmp_path / "new") == 1
    said = capfd.readouterr().err
    assert "Received 2 death signal" in said
    assert said.endswith("Process 7 got signal: 2\n")
    assert not (tmp_path / "new").exists()


def test_they_go_nowhere_if_rank_0_has_said_why_there_is_no_run(
    launched, tmp_path, capfd, monkeypatch
):
    """The caller prints that, and torch's thirty lines above it would hide it."""
    mark = tmp_path / "ended"
    monkeypatch.setenv("LLMTRAIN_LAUNCHED", str(mark))
    mark.write_text('[2, "error: 1 problem"]')
    assert launched(tmp_path / "new") == 1
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("folder", ["logs", "elsewhere"])
def test_no_secret_is_written(tmp_path, capfd, monkeypatch, folder):
    monkeypatch.setenv("HUB_TOKEN", "correct-horse-battery")
    (tmp_path / "logs").mkdir()
    log = tmp_path / folder / "launcher.log"
    launcher.tell(log, "Command '[train, x=correct-horse-battery]' returned 1")
    said = log.read_text() if log.exists() else capfd.readouterr().err
    assert said == "Command '[train, x=***]' returned 1\n"


RANK = """
import os, sys
from llmtrain.cli.rank import _leave
_leave(int(sys.argv[1]), "error: 1 problem")
"""
# A launcher waits for its ranks, prints its own lines and ends.
LAUNCHER = """
import subprocess, sys, time
code = subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]]).returncode
time.sleep(0.3)
print("ChildFailedError", file=sys.stderr, flush=True)
sys.exit(1)
"""


def shown(code, **env):
    """What a launcher and its rank print; the pipe ends when the last of them has closed it."""
    words = [sys.executable, "-c", LAUNCHER, RANK, str(code)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", **env}
    done = subprocess.run(words, env=environ, stderr=subprocess.PIPE, text=True, timeout=60)
    return done.stderr.splitlines()


@pytest.mark.launches
def test_a_refusal_is_repeated_below_what_the_launcher_prints():
    said = shown(2, TORCHELASTIC_RUN_ID="none")
    assert said == ["error: 1 problem", "ChildFailedError", "error: 1 problem"]


@pytest.mark.launches
@pytest.mark.parametrize(
    ("code", "env"),
    [
        (1, {"TORCHELASTIC_RUN_ID": "none"}),
        (2, {}),
        (2, {"TORCHELASTIC_RUN_ID": "none"} | {"TORCHELASTIC_RESTART_COUNT": "1"}),
    ],
)
def test_nothing_else_is(code, env):
    assert shown(code, **env) == ["error: 1 problem", "ChildFailedError"]
