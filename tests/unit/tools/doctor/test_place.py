import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.cases import case

from llmtrain.checkpoint import files
from llmtrain.tools.doctor import doctor


@pytest.fixture
def on(tmp_path, monkeypatch):
    """The run directory lies on a file system of this kind, as far as the system says."""

    def lie(kind):
        monkeypatch.setattr(files, "filesystem_kind", lambda where: kind)

    return lie


def test_a_directory_that_is_not_there_is_looked_at_above_and_nothing_is_left(tmp_path):
    looked = doctor.directory(case(tmp_path))
    assert looked.found.startswith(f"{tmp_path} on ")
    assert "locks hold" in looked.found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my.yaml"]


@pytest.mark.parametrize(
    ("kind", "alone", "two_machines"),
    [
        ("ext4", "ok", "error"),
        ("tmpfs", "warning", "error"),
        ("overlay", "warning", "error"),
        ("nfs4", "ok", "ok"),
        ("lustre", "ok", "ok"),
        ("strangefs", "ok", "warning"),
    ],
)
def test_what_a_file_system_means_for_one_machine_and_for_two(
    tmp_path, on, kind, alone, two_machines
):
    on(kind)
    assert doctor.directory(case(tmp_path)).state == alone
    looked = doctor.directory(case(tmp_path, launch={"num_machines": 2}))
    assert looked.state == two_machines
    assert ("all 2 machines" in looked.remedy) == (two_machines != "ok")


def test_a_file_in_the_place_of_the_directory_is_an_error(tmp_path):
    (tmp_path / "run").write_text("")
    assert doctor.directory(case(tmp_path)).state == "error"
    looked = doctor.directory(case(tmp_path, f"run.dir={tmp_path / 'run' / 'deeper'}"))
    assert looked.state == "error"
    assert looked.found == f"{tmp_path / 'run'} is a file, not a directory"


def test_a_directory_that_cannot_be_written_is_an_error():
    looked = doctor.directory(case_at("/proc/run"))
    assert looked.state == "error"
    assert looked.found.startswith("/proc cannot be written")


def case_at(run_dir):
    from llmtrain.config.schema import Config

    made = Config.model_validate(
        {
            "run": {"dir": run_dir},
            "model": {"config": {"model_type": "llama"}, "tokenizer": "sample"},
            "data": {"sources": [{"path": "sample"}]},
            "training": {"steps": 1},
        }
    )
    return doctor.DoctorContext(made, None, {}, 0.0, 0.0)


def test_a_lock_that_another_process_takes_too_is_a_warning(tmp_path, monkeypatch):
    granted = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: granted)
    looked = doctor.directory(case(tmp_path))
    assert looked.state in ("warning", "error")
    assert "granted twice" in looked.found


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    import fcntl

    def refuse(file, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    looked = doctor.directory(case(tmp_path))
    assert "no locks (Operation not supported)" in looked.found
    assert "nolock" in looked.remedy


def test_a_run_that_lives_there_is_named(tmp_path):
    from llmtrain.rundir.lock import RunLock

    with RunLock(tmp_path / "run", "1"):
        looked = doctor.directory(case(tmp_path))
        assert f"pid {os.getpid()}" in looked.found
        assert "STOP" in looked.remedy
    assert "pid" not in doctor.directory(case(tmp_path)).found


def test_a_run_of_another_config_is_an_error_and_one_of_this_is_resumed(tmp_path):
    from llmtrain.config.binding import dump

    first = case(tmp_path)
    first.config.run_dir.mkdir()
    (first.config.run_dir / "config.yaml").write_text(dump(first.config))
    (first.config.run_dir / "metrics.jsonl").write_text(
        '{"kind": "start", "time": 1.0, "step": 0}\n'
    )
    assert "would be resumed" in doctor.directory(case(tmp_path)).found
    looked = doctor.directory(case(tmp_path, "run.seed=7"))
    assert looked.state == "error"
    assert "run.seed = 7" in looked.found


def test_clocks_that_agree_are_ok(tmp_path):
    looked = doctor.clocks(case(tmp_path))
    assert looked.state == "ok"
    assert "differs by 0.0" in looked.found
    assert doctor.clocks(case()).state == "ok"


def test_a_file_system_with_another_time_is_a_warning(tmp_path, monkeypatch):
    real = Path.stat

    def an_hour_ahead(path, **options):
        found = list(real(path, **options))
        found[8] += 3600
        return os.stat_result(found)

    looked_at = case(tmp_path)
    monkeypatch.setattr(Path, "stat", an_hour_ahead)
    skew = doctor._skew(tmp_path)
    assert skew.state == "warning"
    assert "differs by 3" in skew.found
    assert looked_at.config


def test_a_clock_that_is_set_meanwhile_is_a_warning():
    looked = doctor.clocks(case(clock_was_set_by=90.0))
    assert looked.state == "warning"
    assert "+90." in looked.found


def test_a_date_before_this_code_is_an_error():
    looked = doctor.clocks(replace(case(), wall=0.0))
    assert looked.state == "error"
    assert "the date is 1970-01-01" in looked.found


@pytest.mark.launches
def test_the_lock_is_asked_for_by_another_process(tmp_path):
    """The little program itself, against a lock that is held and one that is free."""
    import fcntl

    path = tmp_path / "lock"
    command = [sys.executable, "-I", "-S", "-c", doctor._TAKE, str(path)]
    with path.open("wb") as file:
        assert subprocess.run(command, check=False).returncode == 0
        fcntl.flock(file, fcntl.LOCK_EX)
        assert subprocess.run(command, check=False).returncode == 1
    missing = [*command[:-1], str(tmp_path / "none")]
    done = subprocess.run(missing, capture_output=True, text=True, check=False)
    assert (done.returncode, "No such file" in done.stderr) == (1, True)


def test_what_can_be_no_part_of_a_run_directory_is_an_error(tmp_path):
    (tmp_path / "lock").mkdir()
    looked = doctor.directory(case_at(str(tmp_path)))
    assert looked.state == "error"
    assert str(tmp_path / "lock") in looked.found
