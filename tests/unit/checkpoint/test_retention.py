"""Which checkpoints a run keeps, and that no others of its directory are touched."""

import math
import os
import shutil

from helpers.checkpoints import RUN, save

from llmtrain.checkpoint import candidates, format
from llmtrain.config.schema import CheckpointConfig


def keeping(last, every=0, best=0):
    return CheckpointConfig.model_construct(keep_last=last, keep_every=every, keep_best=best)


TWO = keeping(2)


def steps(root):
    return sorted(format.step_of(name) for name in format.complete_names(root))


def directories(root):
    return {path.name for path in root.iterdir()}


def filled(root, losses):
    for step, loss in losses.items():
        save(root, step, loss=loss)
    return root


def test_the_newest_by_number_stay_whatever_the_disk_says(tmp_path):
    filled(tmp_path, dict.fromkeys([9, 10, 100, 11]))
    for age, step in enumerate([100, 11, 10, 9]):
        os.utime(tmp_path / format.directory_name(step), (age, age))
    assert candidates.prune(tmp_path, TWO, RUN, None) == ["step-00000009", "step-00000010"]
    assert steps(tmp_path) == [11, 100]
    assert sorted(directories(tmp_path)) == ["step-00000011", "step-00000100"]


def test_multiples_of_keep_every_stay_for_ever(tmp_path):
    filled(tmp_path, dict.fromkeys(range(2, 22, 2)))
    candidates.prune(tmp_path, keeping(2, 6), RUN, None)
    assert steps(tmp_path) == [6, 12, 18, 20]


def test_the_best_by_held_out_loss_stay(tmp_path):
    losses = {2: 3.0, 4: 1.5, 6: None, 8: 2.0, 10: float("inf"), 12: 2.5, 14: 2.6}
    filled(tmp_path, {step: loss for step, loss in losses.items() if loss != float("inf")})
    candidates.prune(tmp_path, keeping(2, 0, 2), RUN, None)
    assert steps(tmp_path) == [4, 8, 12, 14]


def test_the_one_resumed_from_stays_until_two_newer_are_there(tmp_path):
    filled(tmp_path, dict.fromkeys([2, 4, 6]))
    for lost in (4, 6):  # an older one was chosen, newer ones are gone
        shutil.rmtree(tmp_path / format.directory_name(lost))
    policy = keeping(1)
    save(tmp_path, 8)
    assert candidates.prune(tmp_path, policy, RUN, "step-00000002") == []
    save(tmp_path, 10)
    gone = candidates.prune(tmp_path, policy, RUN, "step-00000002")
    assert gone == ["step-00000002", "step-00000008"]


def test_only_intact_checkpoints_of_this_run_are_touched(tmp_path, caplog):
    filled(tmp_path, dict.fromkeys([2, 4, 6, 8]))
    save(tmp_path, 99_999_999, run_id="another")
    save(tmp_path, 1, run_id="another")
    (tmp_path / "step-00000002" / format.MANIFEST).write_bytes(b"{}")
    for name in ("step-9", "step-10", "step-00000003.damaged", "step-00000005.partial", "mine"):
        (tmp_path / name).mkdir()
    save(tmp_path / "mine", 3)
    (tmp_path / "step-00000003").symlink_to(tmp_path / "mine" / "step-00000003")
    assert candidates.prune(tmp_path, TWO, RUN, None) == ["step-00000004"]
    assert steps(tmp_path) == [1, 2, 3, 6, 8, 99_999_999]
    assert {"step-9", "step-10", "step-00000003.damaged", "mine"} <= {
        path.name for path in tmp_path.iterdir()
    }
    assert "step-00000002" in caplog.text


def test_a_new_name_is_on_the_disk_before_a_file_is_deleted(tmp_path, monkeypatch):
    filled(tmp_path, dict.fromkeys([2, 4, 6]))
    done = []
    monkeypatch.setattr(candidates.system, "sync_directory", lambda path: done.append(path.name))
    monkeypatch.setattr(shutil, "rmtree", lambda path: done.append(path.name))
    candidates.prune(tmp_path, TWO, RUN, None)
    assert done == [tmp_path.name, ".trash-2"]


def test_only_a_finite_number_is_a_held_out_loss():
    losses = [1.5, math.nan, math.inf, "1.5", None]
    found = [candidates.loss_in({"evaluation": {"loss": one}}) for one in losses]
    assert found == [1.5, None, None, None, None]


def test_what_cannot_be_deleted_is_logged_and_tried_again(tmp_path, monkeypatch, caplog):
    filled(tmp_path, dict.fromkeys([2, 4, 6]))

    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        assert candidates.prune(tmp_path, TWO, RUN, None) == ["step-00000002"]
        assert candidates.clean_up(tmp_path) == []
    assert "Permission denied" in caplog.text
    assert steps(tmp_path) == [4, 6]  # its name is gone already
    assert candidates.clean_up(tmp_path) == [".trash-2"]


def test_a_start_clears_away_what_was_left_unfinished(tmp_path):
    filled(tmp_path, {2: None})
    for name in ("step-00000004.partial", ".trash-1", "step-00000006.damaged", "x.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x")
    assert candidates.clean_up(tmp_path) == [".trash-1", "step-00000004.partial"]
    assert sorted(directories(tmp_path)) == ["step-00000002", "step-00000006.damaged", "x.partial"]
    assert candidates.clean_up(tmp_path / "absent") == []


def test_three_of_one_evaluation_count_as_one_of_the_best(tmp_path):
    filled(tmp_path, {2: 1.0, 4: 1.0, 6: 1.0, 8: 3.0, 10: 2.0, 12: 4.0, 14: 5.0})
    candidates.prune(tmp_path, keeping(2, 0, 2), RUN, None)
    assert steps(tmp_path) == [2, 10, 12, 14]


def test_every_reason_to_stay_is_said_and_what_has_none_is_what_goes(tmp_path):
    losses = {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5, 10: None, 12: 1.5, 14: 1.5}
    for step, loss in losses.items():
        save(tmp_path, step, loss=loss)
    policy = keeping(2, 6, 2)
    found = candidates.reasons_to_keep(losses, policy, "step-00000010")
    assert found == {
        2: (),
        4: ("best",),
        6: ("every 6",),
        8: (),
        10: (),
        12: ("newest", "every 6", "best"),
        14: ("newest",),
    }
    assert candidates.reasons_to_keep(losses, policy, "step-00000012")[12][-1] == "resumed from"
    assert candidates.reasons_to_keep(losses, keeping(2), None)[4] == ()
    gone = candidates.prune(tmp_path, policy, RUN, "step-00000010")
    assert gone == [f"step-{step:08d}" for step, why in found.items() if not why]
