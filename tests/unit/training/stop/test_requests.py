import errno
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmtrain.config.schema import CheckpointConfig
from llmtrain.training.stop import Requests
from llmtrain.types import Flags


@dataclass
class Clock:
    """One that is set by hand, and says what no real one says at its start."""

    now: float = 5000.0

    def __call__(self):
        return self.now


def requests(run_dir, clock=None, rank=0, started=5000.0, **keys):
    return Requests(run_dir, CheckpointConfig(**keys), rank, started, clock or Clock())


def test_nothing_is_asked_of_a_run_that_is_left_alone(tmp_path):
    clock = Clock()
    asked = requests(tmp_path, clock)
    clock.now += 1e9
    assert asked.flags(None) == Flags()


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_says_what_it_was_signalled(tmp_path, rank):
    asked = requests(tmp_path, rank=rank)
    assert asked.flags("SIGTERM") == Flags(signal=True)
    assert asked.flags("launcher_lost") == Flags(launcher_lost=True)


def test_files_and_clocks_are_rank_0s_alone(tmp_path):
    (tmp_path / "STOP").touch()
    (tmp_path / "SAVE").touch()
    late = Clock(9000.0)
    keys = {"stop_after": "1h", "every_minutes": 1.0}
    first, second = (requests(tmp_path, late, rank, **keys) for rank in (0, 1))
    late.now += 60
    assert first.flags(None) == Flags(
        stop_file=True, stop_after=True, minutes_due=True, save_file=True
    )
    assert second.flags(None) == Flags()
    second.begin_save()
    second.end_stop()
    assert {path.name for path in tmp_path.iterdir()} == {"STOP", "SAVE"}


def test_a_save_serves_the_file_and_a_new_one_asks_again(tmp_path):
    asked = requests(tmp_path)
    (tmp_path / "SAVE").touch()
    assert asked.flags(None) == Flags(save_file=True)
    asked.begin_save()
    assert asked.flags(None) == Flags()
    assert not (tmp_path / "SAVE").exists()
    (tmp_path / "SAVE").touch()
    assert asked.flags(None) == Flags(save_file=True)


def test_a_save_that_was_left_over_is_asked_for_at_once(tmp_path):
    (tmp_path / "SAVE").touch()
    assert requests(tmp_path).flags(None) == Flags(save_file=True)


def test_the_minutes_count_from_the_begin_of_the_last_save(tmp_path):
    clock = Clock()
    asked = requests(tmp_path, clock, started=0.0, every_minutes=2.5)
    clock.now += 149
    assert not asked.flags(None).minutes_due
    clock.now += 1
    assert asked.flags(None).minutes_due
    asked.begin_save()
    asked.end_save(20.0)
    clock.now += 149
    assert not asked.flags(None).minutes_due
    clock.now += 1
    assert asked.flags(None).minutes_due


def test_stop_after_leaves_time_for_twice_the_longest_save(tmp_path):
    clock = Clock()
    asked = requests(tmp_path, clock, started=4000.0, stop_after="1h")  # until 7600
    due_at = {7600.0: (), 7540.0: (30.0,), 7500.0: (50.0, 10.0)}
    for moment, saves in due_at.items():
        for seconds in saves:
            asked.end_save(seconds)
        clock.now = moment - 0.5
        assert not asked.flags(None).stop_after
        clock.now = moment
        assert asked.flags(None).stop_after


def test_a_stop_is_deleted_when_it_has_come_to_its_end(tmp_path):
    asked = requests(tmp_path)
    (tmp_path / "STOP").touch()
    assert asked.flags(None) == Flags(stop_file=True)
    asked.begin_save()
    assert (tmp_path / "STOP").exists()
    asked.end_stop()
    assert not (tmp_path / "STOP").exists()
    asked.end_stop()


def test_a_stop_that_was_left_over_is_said_by_rank_0(tmp_path, caplog):
    (tmp_path / "STOP").touch()
    requests(tmp_path, rank=1)
    assert not caplog.records
    requests(tmp_path)
    assert f"{tmp_path / 'STOP'} is there already" in caplog.text


def test_a_file_that_cannot_be_deleted_is_served_once(tmp_path, monkeypatch, caplog):
    def refused(path, *, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    asked = requests(tmp_path)
    (tmp_path / "SAVE").touch()
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", refused)
        asked.begin_save()
    assert "SAVE could not be deleted" in caplog.text
    assert asked.flags(None) == Flags()
    (tmp_path / "SAVE").unlink()
    assert asked.flags(None) == Flags()
    (tmp_path / "SAVE").touch()
    assert asked.flags(None) == Flags(save_file=True)


def test_a_file_system_that_does_not_answer_asks_for_nothing_and_is_said_once(
    tmp_path, monkeypatch, caplog
):
    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    asked = requests(tmp_path)
    (tmp_path / "STOP").touch()
    with monkeypatch.context() as broken:
        broken.setattr(Path, "exists", stale)
        assert asked.flags(None) == asked.flags(None) == Flags()
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2  # STOP and SAVE
    assert asked.flags(None) == Flags(stop_file=True)


def test_steps_look_for_the_files_at_most_every_fifth_of_a_second(tmp_path):
    clock = Clock()
    asked = requests(tmp_path, clock)
    assert asked.flags(None, look=False) == Flags()  # the first one looks
    (tmp_path / "STOP").touch()
    clock.now += 0.19
    assert asked.flags(None, look=False) == Flags()
    clock.now += 0.02
    assert asked.flags(None, look=False) == Flags(stop_file=True)
    (tmp_path / "SAVE").touch()
    assert asked.flags(None, look=False) == Flags(stop_file=True)
    assert asked.flags(None) == Flags(stop_file=True, save_file=True)  # a step that decides at once


def test_a_served_request_is_not_reported_again_by_the_next_step(tmp_path):
    asked = requests(tmp_path)
    (tmp_path / "SAVE").touch()
    (tmp_path / "STOP").touch()
    assert asked.flags(None, look=False) == Flags(save_file=True, stop_file=True)
    asked.begin_save()
    assert asked.flags(None, look=False) == Flags(stop_file=True)
    asked.end_stop()
    assert asked.flags(None, look=False) == Flags()
