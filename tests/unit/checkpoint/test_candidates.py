"""Which checkpoint a start goes on from, where a person has said so or another's lies beside it."""

import errno
import json
import os
import shutil

import pytest
from helpers.checkpoints import RUN, on_ranks, save
from helpers.damage import flip, sign

from llmtrain.agreement import Alone
from llmtrain.checkpoint import candidates, format, format as form, read
from llmtrain.checkpoint.disk import Patience, StoppedError
from llmtrain.config.schema import CheckpointConfig
from llmtrain.errors import RunError, UserError

MODEL = "model.safetensors"


@pytest.fixture
def root(tmp_path):
    """Checkpoints of steps 4, 8 and 12."""
    for step in (4, 8, 12):
        save(tmp_path, step)
    return tmp_path


def names(root):
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def refusal(root, **asked):
    with pytest.raises(UserError) as caught:
        on_ranks(2, lambda ranks: read.find(root, RUN, ranks, **asked))
    return caught.value


def test_a_checkpoint_that_is_not_there_is_answered_with_those_that_are(root):
    save(root, 99, run_id="another")
    (problem,) = refusal(root, resume="step-00000400").problems
    assert (problem.key, problem.value) == ("checkpoint.resume", "step-00000400")
    assert "there are step-00000012, step-00000008, step-00000004" in problem.expected
    assert "step-00000099" not in problem.expected


def test_without_any_checkpoint_it_says_so(tmp_path):
    (problem,) = refusal(tmp_path, resume="step-00000400").problems
    assert "which has no checkpoint" in problem.expected


def test_all_damaged_is_refused_with_the_reason_of_each(root):
    for name in names(root):
        (root / name / "config.json").unlink()
    (root / "step-00000008.damaged").mkdir()  # an earlier start's
    for _ in range(2):
        said = refusal(root).problems
        assert [problem.key.rpartition("/")[2] for problem in said] == [
            "step-00000004.damaged",
            "step-00000008.damaged",
            "step-00000008.damaged-2",
            "step-00000012.damaged",
        ]
        assert [problem.value for problem in said if "config.json: is missing" in problem.value]
        assert "nothing was deleted" in said[0].expected


def test_damage_of_another_run_is_none_of_ours(root):
    save(root, 16, run_id="another")
    (root / "step-00000016").rename(root / "step-00000016.damaged")
    for name in ("step-00000004", "step-00000008", "step-00000012"):
        (root / name).rename(root.parent / name)
    assert read.find(root, RUN, Alone()) is None


def test_an_older_one_is_refused_while_newer_are_there(root):
    (problem,) = refusal(root, resume="step-00000004").problems
    assert (problem.key, problem.value) == ("checkpoint.resume", "step-00000004")
    assert "newer are step-00000012, step-00000008" in problem.expected
    assert "checkpoint.supersede=true" in problem.remedy
    assert names(root) == ["step-00000004", "step-00000008", "step-00000012"]


def test_the_newest_may_be_named(root):
    assert read.find(root, RUN, Alone(), resume="step-00000012").step == 12


def test_newer_ones_are_set_aside_once_the_older_one_is_known_to_be_whole(root):
    save(root, 99, run_id="another")
    (root / "step-00000012.superseded").mkdir()
    heard = []

    def find(ranks):
        asked = {"resume": "step-00000004", "supersede": True}
        log = lambda event, detail: heard.append((event, detail["checkpoint"]))  # noqa: E731
        return read.find(root, RUN, ranks, log=log, **asked).step

    assert on_ranks(2, find) == [4, 4]
    assert sorted(heard) == sorted(
        [("checkpoint_superseded", "step-00000012"), ("checkpoint_superseded", "step-00000008")] * 2
    )
    assert names(root) == [
        "step-00000004",
        "step-00000008.superseded",
        "step-00000012.superseded",
        "step-00000012.superseded-2",
        "step-00000099",
    ]
    assert read.find(root, RUN, Alone()).step == 4


def test_a_named_one_that_is_damaged_is_refused_and_nothing_is_renamed(root):
    flip(root / "step-00000008" / MODEL, -1)
    (problem,) = refusal(root, resume="step-00000008", supersede=True).problems
    assert f"{MODEL}: the digest" in problem.expected
    assert names(root) == ["step-00000004", "step-00000008", "step-00000012"]


def test_a_checkpoint_of_another_run_is_refused(root):
    save(root, 16, run_id="another")
    (problem,) = refusal(root, resume="step-00000016").problems
    assert f"this run ({RUN})" in problem.expected
    assert "of run another" in problem.expected
    assert "model.from" in problem.remedy


@pytest.mark.parametrize("found", [0, "one", None])
def test_an_unknown_format_is_named_and_left_in_place(root, found):
    sign(root / "step-00000012", format=found)
    for resume in ("auto", "step-00000012"):
        (problem,) = refusal(root, resume=resume).problems
        assert problem.key.endswith("step-00000012")
        assert problem.value == f"format {found}"
        assert "format 1, the only one that this llmtrain reads" in problem.expected
    assert "step-00000012" in names(root)


def test_a_newer_llmtrain_is_named_with_the_version_to_use(root):
    directory = root / "step-00000012"
    state = {"format": 1, "run_id": RUN, "step": 12, "versions": {"llmtrain": "9.1"}}
    (directory / form.STATE).write_bytes(form.canonical(state))
    sign(directory, format=2)
    (problem,) = refusal(root).problems
    assert problem.value == "format 2, written by llmtrain 9.1"
    assert "the newest that this llmtrain reads" in problem.expected
    assert "use llmtrain 9.1" in problem.remedy
    assert "step-00000012" in names(root)


def test_a_newer_state_beside_a_manifest_of_ours_is_refused_too(tmp_path):
    state = {"format": 3, "run_id": RUN, "step": 4}
    save(tmp_path, 4, small={form.STATE: form.canonical(state)})
    assert refusal(tmp_path).problems[0].value == "format 3"


@pytest.mark.parametrize("name", ["../config.json", "/etc/hosts", "a/../../x"])
def test_a_manifest_that_names_a_file_outside_is_refused(root, name):
    directory = root / "step-00000012"
    files = json.loads((directory / form.MANIFEST).read_bytes())["files"]
    sign(directory, files={**files, name: {"size": 0, "extents": []}})
    (problem,) = refusal(root, resume="step-00000012").problems
    assert f"{name!r} is not a plain path inside the directory" in problem.expected


def test_a_link_out_of_a_checkpoint_is_refused(root):
    path = root / "step-00000012" / MODEL
    path.rename(root.parent / "elsewhere")
    path.symlink_to(root.parent / "elsewhere")
    (problem,) = refusal(root, resume="step-00000012").problems
    assert f"{MODEL}: is not a regular file of this directory" in problem.expected


def test_a_file_that_a_manifest_names_twice_is_refused(root):
    path = root / "step-00000012" / form.MANIFEST
    body = path.read_bytes()
    path.write_bytes(body.replace(b'"files":{', b'"files":{"config.json":{"extents":[],"size":0},'))
    (problem,) = refusal(root, resume="step-00000012").problems
    assert f"{form.MANIFEST}: its own digest differs" in problem.expected


def test_sizes_compares_no_digest_of_weights_but_those_of_small_files(root):
    flip(root / "step-00000012" / MODEL, -1)
    assert read.find(root, RUN, Alone(), verify="sizes").step == 12
    state = root / "step-00000012" / form.STATE
    state.write_bytes(state.read_bytes().replace(b'"step":12', b'"step":13'))
    assert read.find(root, RUN, Alone(), verify="sizes").step == 8
    os.truncate(root / "step-00000008" / MODEL, 10)
    assert read.find(root, RUN, Alone(), verify="sizes").step == 4


def test_the_reason_stands_in_what_was_set_aside(root):
    flip(root / "step-00000012" / MODEL, -1)
    read.find(root, RUN, Alone())
    assert "digest of bytes" in (root / "step-00000012.damaged" / candidates.WHY).read_text()


def stop_at(times):
    """A stop that is asked for so many looks from now."""
    left = [times]

    def stopping():
        left[0] -= 1
        return "signal" if left[0] < 0 else None

    return stopping


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("looks", [0, 1, 2])
def test_a_stop_on_any_rank_ends_the_search_on_all(root, rank, looks):
    def find(ranks):
        stopping = stop_at(looks) if ranks.rank == rank else lambda: None
        with pytest.raises(StoppedError) as stopped:
            read.find(root, RUN, ranks, patience=Patience(stopping))
        return str(stopped.value)

    assert on_ranks(2, find) == ["signal", "signal"]
    assert names(root) == ["step-00000004", "step-00000008", "step-00000012"]


def test_a_stop_does_not_wait_for_a_disk_that_is_waited_for(root, monkeypatch):
    def refuse(path, name, extent):
        raise OSError(errno.ESTALE, "Stale file handle", name)

    monkeypatch.setattr(format, "check_extent", refuse)
    waited = []
    stopping = lambda: "signal" if len(waited) >= 5 else None  # noqa: E731
    with pytest.raises(StoppedError):
        read.find(root, RUN, Alone(), patience=Patience(stopping, waited.append))
    assert sum(waited) == 5.0


def test_another_runs_directory_that_cannot_be_read_hinders_nobody(root, monkeypatch):
    save(root, 99, run_id="another")
    real = form.regular_size

    def size(directory, name):
        if directory.name == "step-00000099" and name != form.MANIFEST:
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return real(directory, name)

    monkeypatch.setattr(form, "regular_size", size)
    assert read.find(root, RUN, Alone()).step == 12


def test_a_directory_that_cannot_be_listed_is_trouble(root, monkeypatch):
    def refuse(_):
        raise OSError(errno.EIO, "Input/output error", str(root))

    monkeypatch.setattr(form, "names", refuse)
    with pytest.raises(RunError) as caught:
        read.find(root, RUN, Alone(), patience=Patience(wait=lambda seconds: None))
    assert caught.value.exit_code == 74


def test_the_best_is_of_lowest_loss_the_oldest_of_equals_and_else_the_newest(tmp_path):
    for step, loss in {4: 3.0, 8: 2.0, 12: 2.0, 16: None}.items():
        save(tmp_path / "measured", step, loss=loss)
        save(tmp_path / "not", step)
    assert candidates.best(tmp_path / "measured", RUN) == "step-00000008"
    assert candidates.best(tmp_path / "not", None) == "step-00000016"
    assert candidates.best(tmp_path / "nowhere", RUN) is None


def test_the_best_is_whole_and_of_the_run(root, caplog):
    save(root, 16, loss=1.0, run_id="another")
    save(root, 20, loss=2.0)
    assert candidates.best(root, RUN) == "step-00000020"
    (root / "step-00000020" / MODEL).write_bytes(b"short")
    assert candidates.best(root, RUN) == "step-00000012"
    assert "has 5 bytes" in caplog.text
    assert names(root)[-1] == "step-00000020"


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
    assert candidates.prune(tmp_path, TWO, RUN, None) == ["step-00000004"]
    assert steps(tmp_path) == [1, 2, 6, 8, 99_999_999]
    assert {"step-9", "step-10", "step-00000003.damaged", "mine"} <= {
        path.name for path in tmp_path.iterdir()
    }
    assert "step-00000002" in caplog.text


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
