import os
import shutil
import subprocess
import sys

import pytest
from helpers.checkpoints import CONFIG, RUN, flip, save, saved_run
from helpers.damage import sign
from helpers.ranks import ROOT
from helpers.runs import start_line, status, write_run

from llmtrain.agreement import Alone
from llmtrain.checkpoint import format as form, read
from llmtrain.errors import RunError, UserError
from llmtrain.rundir.lock import RunLock
from llmtrain.tools import checkpoints as module
from llmtrain.tools.checkpoints import look, verify

MODEL = "model.safetensors"


@pytest.fixture
def run(tmp_path):
    return saved_run(tmp_path)


def rows(path):
    return {row.name: row for row in look(path).rows}


def newest(run_dir):
    return run_dir / "checkpoints" / "step-00000024"


def files_of(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def tree(path):
    """Every name, with the bytes of files."""
    return {
        file.relative_to(path): file.read_bytes() if file.is_file() else None
        for file in path.rglob("*")
    }


def times(path):
    return {one: one.stat().st_mtime_ns for one in (path, *path.rglob("*"))}


def test_each_checkpoint_has_its_size_its_loss_and_why_it_stays(run):
    found = look(run)
    assert [row.step for row in found.rows] == [4, 8, 12, 16, 20, 24]
    assert [row.loss for row in found.rows] == [4.0, 3.5, 2.5, 3.25, 3.0, None]
    assert [row.kept for row in found.rows] == [
        (),
        ("every 8",),
        ("best",),
        ("every 8",),
        ("newest", "resumed from"),
        ("newest", "every 8"),
    ]
    assert all(row.valid and row.kind == "complete" for row in found.rows)
    assert [row.bytes for row in found.rows] == [
        files_of(run / "checkpoints" / row.name) for row in found.rows
    ]
    assert (found.run_id, found.resumed_from) == (RUN, "step-00000020")


def test_a_loss_is_shown_where_that_step_was_evaluated(run):
    for step, evaluated in ((28, 27), (32, 32)):
        state = {"format": 1, "run_id": RUN, "step": step}
        state["evaluation"] = {"step": evaluated, "loss": 0.5}
        save(run / "checkpoints", step, small={form.STATE: form.canonical(state)})
    assert [(row.loss, row.last_loss) for row in look(run).rows[-2:]] == [(None, 0.5), (0.5, 0.5)]


def test_what_is_no_complete_checkpoint_of_the_run_is_shown_as_what_it_is(run):
    root = run / "checkpoints"
    save(root, 99_999_999, run_id="another")
    (root / "step-00000008").rename(root / "step-00000008.damaged-2")
    (root / "step-00000016").rename(root / "step-00000016.superseded")
    (root / "step-00000028.partial").mkdir()
    (root / "step-00000028.partial" / MODEL).write_bytes(bytes(7))
    for name in (".trash-4", "step-9", "notes"):
        (root / name).mkdir()
    found = rows(run)
    assert {name: row.kind for name, row in found.items()} == {
        "step-00000004": "complete",
        "step-00000008.damaged-2": "damaged",
        "step-00000012": "complete",
        "step-00000016.superseded": "superseded",
        "step-00000020": "complete",
        "step-00000024": "complete",
        "step-00000028.partial": "partial",
        "step-99999999": "other run",
        ".trash-4": "trash",
        "step-9": "other",
        "notes": "other",
    }
    assert found["step-00000028.partial"].bytes == 7
    assert found["step-00000028.partial"].valid is None
    assert found["step-00000016.superseded"].valid is True
    assert all(not row.kept for row in found.values() if row.kind != "complete")
    assert found["step-00000020"].kept == ("newest", "resumed from")  # the foreign one is newer


def test_a_link_is_what_a_resume_takes_it_for(run, tmp_path):
    """It is followed, to a sound checkpoint on another disk or to one of another step."""
    root = run / "checkpoints"
    elsewhere = tmp_path / "elsewhere"
    newest(run).rename(elsewhere)
    newest(run).symlink_to(elsewhere)
    (root / "step-00000099").symlink_to(root / "step-00000008")
    found = rows(run)
    assert (found["step-00000024"].kind, found["step-00000024"].valid) == ("complete", True)
    assert found["step-00000024"].kept == ("a link",)
    assert found["step-00000020"].kept == ("newest", "resumed from")
    wrong = found["step-00000099"]
    assert (wrong.kind, wrong.wrong) == ("unreadable", ("manifest.json: is of step 8",))
    assert {one.name for one in verify(run) if one.problems} == {"step-00000099"}
    heard = []
    taken = read.find(root, RUN, Alone(), log=lambda event, detail: heard.append(detail))
    assert taken.name == "step-00000024"
    assert [(one["checkpoint"], one["reason"]) for one in heard] == [
        ("step-00000099", "manifest.json: is of step 8")
    ]
    assert rows(run)["step-00000099.damaged"].kind == "damaged"
    assert not (root / "step-00000008" / "why.txt").exists()  # that one is sound


def test_a_wrong_size_and_a_missing_file_are_seen_and_a_flipped_bit_of_a_tensor_is_not(run):
    root = run / "checkpoints"
    (root / "step-00000020" / "config.json").unlink()
    os.truncate(root / "step-00000016" / MODEL, 5)
    flip(root / "step-00000012" / MODEL)
    flip(root / "step-00000008" / MODEL, 9)  # of its header
    found = rows(run)
    assert found["step-00000008"].wrong[0].startswith(f"{MODEL}: ")
    assert found["step-00000020"].wrong == ("config.json: is missing",)
    (wrong,) = found["step-00000016"].wrong
    assert wrong.startswith(f"{MODEL}: has 5 bytes instead of ")
    assert found["step-00000012"].valid is True


def test_one_that_was_set_aside_says_what_was_found(run):
    aside = run / "checkpoints" / "step-00000020.damaged"
    flip(run / "checkpoints" / "step-00000020" / MODEL)
    (run / "checkpoints" / "step-00000020").rename(aside)
    assert rows(run)[aside.name].valid is True  # as far as sizes show
    (aside / "why.txt").write_text("model.safetensors: the digest differs\n")
    row = rows(run)[aside.name]
    assert (row.valid, row.wrong) == (False, ("model.safetensors: the digest differs",))


def test_one_whose_manifest_is_not_intact_is_unreadable(run):
    flip(newest(run) / form.MANIFEST, 10)
    row = rows(run)["step-00000024"]
    assert (row.kind, row.valid, row.kept) == ("unreadable", False, ())
    assert row.wrong[0].startswith(form.MANIFEST)
    assert rows(run)["step-00000016"].kept == ("newest", "every 8")
    save(run / "checkpoints", 28, run_id="another")
    flip(run / "checkpoints" / "step-00000028" / form.MANIFEST, 10)
    assert rows(run)["step-00000028"].kind == "other run"  # its state says so, as a resume hears


def test_the_run_its_checkpoints_and_one_of_them_are_told_apart(run, tmp_path, monkeypatch):
    assert look(run / "checkpoints") == look(run)
    one = look(newest(run))
    assert [row.name for row in one.rows] == ["step-00000024"]
    assert one.rows[0].kept == ("newest", "every 8")
    monkeypatch.chdir(run)
    assert look(type(run)()) == look(run)
    copied = shutil.copytree(newest(run), tmp_path / "copy")
    (alone,) = look(copied).rows
    assert (alone.name, alone.valid, alone.kind) == ("copy", True, "other")
    shutil.copytree(run / "checkpoints", tmp_path / "saved" / "checkpoints")
    apart = look(tmp_path / "saved" / "checkpoints")
    assert (apart.policy, len(apart.rows), apart.run_id) == (None, 6, RUN)


def test_a_run_that_has_saved_nothing_has_no_rows(tmp_path):
    run_dir = write_run(tmp_path / "run", [start_line(0)], status(run_id=RUN), CONFIG)
    assert look(run_dir).rows == ()
    with pytest.raises(UserError, match="it has none"):
        list(verify(run_dir))


@pytest.mark.parametrize("name", ["missing", "file", "empty"])
def test_what_is_neither_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for use in (look, verify):
        with pytest.raises(UserError, match="a run directory, its checkpoints/, or one"):
            use(tmp_path / name)


def test_without_a_config_that_loads_the_rest_is_shown(run):
    (run / "config.yaml").write_text("training: {stps: 3}\n")
    assert look(run).policy is None
    assert [row.valid for row in look(run).rows] == [True] * 6
    assert not any(row.kept for row in look(run).rows)


def test_without_a_status_the_newest_intact_one_says_whose_run_it_is(run):
    (run / "status.json").unlink()
    flip(newest(run) / form.MANIFEST)
    assert look(run).run_id == RUN


def test_what_goes_away_while_it_is_looked_at_is_left_out(run, monkeypatch):
    """As retention of a live run does."""
    true = module._whole

    def deleting(path):
        if path.name == "step-00000008":
            shutil.rmtree(path)
        return true(path)

    monkeypatch.setattr(module, "_whole", deleting)
    assert [row.step for row in look(run).rows] == [4, 12, 16, 20, 24]


def test_a_verification_names_every_damaged_file_and_changes_nothing(run):
    root = run / "checkpoints"
    flip(root / "step-00000012" / MODEL)
    flip(root / "step-00000012" / "config.json", 0)
    (root / "step-00000004" / form.MANIFEST).unlink()
    before = tree(run)
    found = {one.name: [str(problem.key) for problem in one.problems] for one in verify(run)}
    assert found == {
        "step-00000004": [form.MANIFEST],
        "step-00000008": [],
        "step-00000012": ["config.json", MODEL],
        "step-00000016": [],
        "step-00000020": [],
        "step-00000024": [],
    }
    assert tree(run) == before


def test_one_checkpoint_is_verified_by_name_or_by_path_whatever_it_is(run):
    root = run / "checkpoints"
    (root / "step-00000008").rename(root / "step-00000008.damaged")
    (one,) = verify(run, "step-00000008.damaged")
    assert (one.name, one.problems) == ("step-00000008.damaged", ())
    assert [one.name for one in verify(newest(run))] == ["step-00000024"]
    with pytest.raises(UserError, match="step-00000008"):
        verify(run, "step-00000008")


@pytest.mark.parametrize("name", ["../../kept", "../checkpoints/step-00000024", "/", ".", ""])
def test_a_path_is_no_name_of_a_checkpoint(run, name):
    shutil.copytree(newest(run), run.parent / "kept")
    asked = str(newest(run)) if name == "/" else name
    with pytest.raises(UserError, match=r"(?s)NAME.*not a path.*there are step-00000004"):
        verify(run, asked)


def test_one_of_a_newer_format_is_a_problem_of_its_own(run):
    sign(newest(run), format=2)
    (one,) = verify(run, "step-00000024")
    assert "format 2" in str(one.problems[0].value)
    assert one.other_format
    row = rows(run)["step-00000024"]
    assert (row.kind, row.valid) == ("unreadable", False)


def test_one_whose_state_is_of_a_newer_format_is_not_called_valid(run):
    state = form.canonical({"format": 2, "run_id": RUN, "step": 28})
    save(run / "checkpoints", 28, small={form.STATE: state})
    (one,) = verify(run, "step-00000028")
    assert one.other_format
    assert "format 2" in str(one.problems[0].value)


def test_one_whose_manifest_lists_no_file_is_damaged(run):
    sign(newest(run), files={})
    (one,) = verify(run, "step-00000024")
    assert [(wrong.key, wrong.value) for wrong in one.problems] == [
        (form.MANIFEST, "lists no file")
    ]
    assert rows(run)["step-00000024"].wrong == ("manifest.json: lists no file",)


def test_a_verification_says_how_far_it_is(run):
    heard = []
    (one,) = verify(run, "step-00000024", lambda *said: heard.append(said))
    assert {said[:2] for said in heard} == {("step-00000024", one.bytes)}
    done = [said[2] for said in heard]
    assert done == sorted(done)
    assert done[-1] == one.bytes - (newest(run) / form.MANIFEST).stat().st_size


def test_one_that_a_live_run_deletes_meanwhile_is_left_out(run, monkeypatch):
    true = module.read.verify

    def deleting(path, **more):
        if path.name == "step-00000008":
            shutil.rmtree(path)
            raise FileNotFoundError(2, "gone", str(path))
        return true(path, **more)

    monkeypatch.setattr(module.read, "verify", deleting)
    assert len([one.name for one in verify(run)]) == 5


def test_a_disk_that_does_not_answer_proves_nothing(run, monkeypatch):
    def failing(path, **more):
        raise OSError(5, "Input/output error", str(path / MODEL))

    monkeypatch.setattr(module.read, "verify", failing)
    with pytest.raises(RunError, match="Input/output error") as caught:
        list(verify(run))
    assert caught.value.exit_code == 74


@pytest.mark.launches
def test_nothing_of_it_needs_torch_or_writes_and_a_live_run_is_no_hindrance(run):
    """Names, bytes and times of the whole directory are what they were."""
    code = (
        "import sys; from pathlib import Path\n"
        "from llmtrain.tools.checkpoints import look, verify\n"
        "assert len(look(Path(sys.argv[1])).rows) == 6\n"
        "assert not any(one.problems for one in verify(Path(sys.argv[1])))\n"
        "heavy = {'torch', 'transformers', 'accelerate'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    with RunLock(run, RUN, beat_seconds=3600):
        before = tree(run), times(run)
        subprocess.run([sys.executable, "-c", code, str(run)], check=True, cwd=ROOT)
        assert (tree(run), times(run)) == before
