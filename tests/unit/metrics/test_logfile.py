import logging
import os
import shutil
import warnings
from contextlib import closing

from llmtrain.metrics.logfile import LogFile


def test_lines_from_before_the_directory_is_there_are_kept(tmp_path):
    with closing(LogFile()) as logfile:
        logging.getLogger("llmtrain.x").info("before")
        logfile.open(tmp_path / "run" / "logs" / "rank-3.log")
        logging.getLogger("some.library").warning("after")
    text = (tmp_path / "run" / "logs" / "rank-3.log").read_text()
    assert text.index("before") < text.index("after")


def test_warnings_of_libraries_go_to_the_file_and_not_to_the_screen(tmp_path, capsys):
    shown: list[tuple[str, str | None]] = []
    with closing(LogFile()) as logfile, warnings.catch_warnings():
        warnings.simplefilter("always")
        logfile.open(tmp_path / "logs" / "rank-0.log")
        logfile.show(lambda text, plain: shown.append((text, plain)))
        warnings.warn("a library warns", stacklevel=1)
        logging.getLogger("transformers").warning("another one")
        logging.getLogger("llmtrain.run").info("ours")
        logging.getLogger("llmtrain.run").warning("mind this", extra={"plain": "event x=1"})
    assert shown == [("ours", None), ("warning: mind this", "event x=1")]
    text = (tmp_path / "logs" / "rank-0.log").read_text()
    assert "a library warns" in text
    assert "another one" in text
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_the_loggers_are_given_back(tmp_path):
    root, ours = logging.getLogger(), logging.getLogger("llmtrain")
    before = (root.level, list(root.handlers), ours.level, list(ours.handlers))
    with closing(LogFile()) as logfile:
        logfile.open(tmp_path / "logs" / "rank-0.log")
        logfile.show(lambda text, plain: None)
    assert (root.level, list(root.handlers), ours.level, list(ours.handlers)) == before


def test_the_level_of_our_lines_is_in_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMTRAIN_LOG_LEVEL", "warning")
    with closing(LogFile()) as logfile:
        logfile.open(tmp_path / "logs" / "rank-0.log")
        logging.getLogger("llmtrain.x").info("quiet")
    assert "quiet" not in (tmp_path / "logs" / "rank-0.log").read_text()


def test_a_deleted_log_is_made_again_once_its_run_directory_is_there(tmp_path):
    run_dir = tmp_path / "run"
    path = run_dir / "logs" / "rank-0.log"
    with closing(LogFile()) as logfile:
        logfile.open(path)
        descriptor = logfile.descriptor
        shutil.rmtree(run_dir)
        logging.getLogger("llmtrain.x").info("while it is gone")
        assert not run_dir.exists()
        run_dir.mkdir()
        logging.getLogger("llmtrain.x").info("back again")
        assert logfile.descriptor == descriptor
        os.write(descriptor, b"a stack\n")
        logging.getLogger("llmtrain.x").info("and more")
    text = path.read_text()
    assert "while it is gone" not in text
    assert [word in text for word in ("back again", "a stack", "and more")] == [True] * 3
