"""What accelerate's launcher reports about itself, and where it goes."""

import logging
import sys

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from llmtrain.tools.launch import quiet


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
        monkeypatch.setattr(sys, "argv", ["quiet", str(run_dir), "--config_file", "a.yaml"])
        with pytest.raises(SystemExit) as ended:
            quiet.main()
        assert sys.argv == ["quiet", "--config_file", "a.yaml"]
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
    quiet.tell(log, "Command '[train, x=correct-horse-battery]' returned 1")
    said = log.read_text() if log.exists() else capfd.readouterr().err
    assert said == "Command '[train, x=***]' returned 1\n"
