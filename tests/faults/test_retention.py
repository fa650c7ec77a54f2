"""What retention keeps and deletes while things are moved under it."""

import shutil

from helpers.damage import copy_as, files_of

OLDER = "step-00000020"


def test_f31_checkpoints_of_others_are_neither_used_nor_deleted(finished, straight):
    run = finished(2)
    (run.checkpoints / "step-00000024").rename(run.folder / "moved away")
    (run.run_dir / "status.json").unlink()  # the record knows whose directory this is
    foreign = copy_as(run.checkpoints / OLDER, 99_999_999, "another")
    damaged = copy_as(run.checkpoints / OLDER, 22, "another")
    (damaged / "model.safetensors").unlink()
    for name in ("step-9", "step-10", "mine"):
        (run.checkpoints / name).mkdir()
    others = {path.name: files_of(path) for path in (foreign, damaged)}
    assert run.launch() == [0, 0], run.output()
    assert run.resumed()[-1] == OLDER
    assert run.outcome() == straight(2)
    assert {name: files_of(run.checkpoints / name) for name in others} == others
    assert {"step-9", "step-10", "mine"} <= set(run.names())


def test_f33_a_best_checkpoint_that_is_deleted_by_hand_is_told_and_the_run_ends_well(
    faulty, straight
):
    run = faulty(2)
    assert 0 not in run.launch("loop.step@step=10=kill")
    shutil.rmtree(run.checkpoints / "step-00000008")  # the only one with an evaluation
    assert run.launch() == [0, 0], run.output()
    (event,) = run.events("checkpoint_missing")
    assert (event["checkpoint"], event["used"]) == ("step-00000008", "step-00000004")
    assert run.outcome() == straight(2)
