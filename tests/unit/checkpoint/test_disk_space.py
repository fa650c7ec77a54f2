import os
from types import SimpleNamespace

import pytest
from helpers.checkpoints import RUN, save

from llmtrain.checkpoint import files
from llmtrain.config.schema import CheckpointConfig
from llmtrain.errors import UserError


def keeping(last, every=0, best=0):
    return CheckpointConfig(keep_last=last, keep_every=every, keep_best=best)


def filled(root, steps):
    for step in steps:
        save(root, step)


def test_space_is_what_the_policy_keeps_and_two_more_less_what_is_there(tmp_path):
    policy = keeping(3, 0, 1)
    assert files.check_room(tmp_path / "absent", policy, 1000, 10, 12) == 60
    assert files.check_room(tmp_path, keeping(3, 300, 1), 1000, 10, 12) == 90
    filled(tmp_path, [2, 4])
    assert files.check_room(tmp_path, policy, 1000, 10, 12) == 40
    assert files.check_room(tmp_path, keeping(2), 1000, 10, 12) == 20
    filled(tmp_path, [6, 8, 10])
    assert files.check_room(tmp_path, keeping(2), 1000, 10, 12) == 10


def disk(monkeypatch, **fields):
    said = {"f_bavail": 2**40, "f_frsize": 1, "f_files": 10**6, "f_favail": 10**6} | fields
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**said))


def test_checkpoints_of_another_run_make_no_room_for_ours(tmp_path):
    filled(tmp_path, [2, 4])
    save(tmp_path, 99, run_id="another")
    assert files.check_room(tmp_path, keeping(3, 0, 1), 1000, 10, 12, RUN) == 40


def test_a_disk_without_room_is_refused_with_both_numbers(tmp_path, monkeypatch):
    disk(monkeypatch, f_bavail=5000)
    root = tmp_path / "not" / "there" / "yet"
    files.check_room(root, keeping(2), 100, 1250, 12)
    with pytest.raises(UserError) as caught:
        files.check_room(root, keeping(2), 100, 1251, 12)
    assert "5004 and 5000 bytes" in str(caught.value)
    assert caught.value.problems[0].key == "run.dir"


def test_a_disk_without_inodes_is_refused(tmp_path, monkeypatch):
    disk(monkeypatch, f_favail=55)
    with pytest.raises(UserError, match=r"56 files \(inodes\), not 55"):
        files.check_room(tmp_path, keeping(2), 100, 1, 12)
    disk(monkeypatch, f_files=0, f_favail=0)  # a file system without such a limit
    files.check_room(tmp_path, keeping(2), 100, 1, 12)
