"""Which checkpoint a start goes on from, where a person has said so or another's lies beside it."""

import errno
import json
import os

import pytest
from helpers.checkpoints import RUN, on_ranks, save
from helpers.damage import flip, sign

from llmtrain.agreement import Alone
from llmtrain.checkpoint import candidates, format, format as form, read
from llmtrain.checkpoint.disk import Patience, StoppedError
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
