import json
import os
import shutil
import socket
from dataclasses import asdict

import pytest
from helpers.checkpoints import RUN, flip, save, saved_run

from llmtrain.checkpoint import candidates, format as form
from llmtrain.config.schema import CheckpointConfig
from llmtrain.errors import RunError, UserError
from llmtrain.rundir.lock import Holder, RunLock, boot_id
from llmtrain.tools.checkpoints import look, prune

MODEL = "model.safetensors"


@pytest.fixture
def run(tmp_path):
    return saved_run(tmp_path)


def there(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def names(rows):
    return [row.name for row in rows]


def test_nothing_is_deleted_before_it_is_asked_for(run):
    before = there(run)
    found = prune(run)
    assert (names(found.goes), found.deleted) == (["step-00000004"], False)
    assert found.bytes == sum(
        file.stat().st_size for file in (run / "checkpoints" / "step-00000004").iterdir()
    )
    assert there(run) == before


def test_what_goes_is_what_retention_of_the_run_would_delete(run, tmp_path):
    twin = tmp_path / "twin"
    shutil.copytree(run / "checkpoints", twin)
    policy = CheckpointConfig(keep_last=2, keep_every=8, keep_best=1)
    gone = candidates.prune(twin, policy, RUN, "step-00000020")
    found = prune(run, yes=True)
    assert names(found.goes) == gone == ["step-00000004"]
    assert there(run) == sorted(path.name for path in twin.iterdir())
    assert found.deleted


def test_more_may_be_kept_than_the_config_says_and_fewer_but_never_one(run):
    assert names(prune(run, keep_last=5).goes) == ["step-00000004"]
    assert names(prune(run, keep_last=6).goes) == []
    with pytest.raises(UserError, match="at least 2"):
        prune(run, keep_last=1, yes=True)


def test_the_best_and_the_one_resumed_from_stay(run):
    save(run / "checkpoints", 28, loss=5.0)
    stays = {row.name: row.kept for row in prune(run, yes=True).stays}
    assert stays["step-00000012"] == ("best",)
    assert "step-00000020" not in stays  # two newer ones are complete now
    assert there(run) == [f"step-{step:08d}" for step in (8, 12, 16, 24, 28)]


def test_one_that_is_to_stay_and_is_damaged_stops_it(run):
    """A flipped bit of a tensor, which sizes do not show: found before anything is deleted."""
    flip(run / "checkpoints" / "step-00000024" / MODEL)
    before = there(run)
    with pytest.raises(UserError, match=r"(?s)step-00000024.*digest.*nothing was deleted"):
        prune(run, yes=True)
    assert there(run) == before
    os.truncate(run / "checkpoints" / "step-00000008" / MODEL, 3)
    with pytest.raises(UserError, match="step-00000008"):
        prune(run)


def test_one_that_is_damaged_and_goes_is_no_hindrance(run):
    flip(run / "checkpoints" / "step-00000004" / MODEL)
    prune(run, yes=True)
    assert "step-00000004" not in there(run)


def test_left_overs_go_and_what_was_set_aside_only_when_asked_for(run):
    root = run / "checkpoints"
    (root / "step-00000004").rename(root / "step-00000004.damaged")
    (root / "step-00000008").rename(root / "step-00000008.superseded-2")
    (root / "step-00000028.partial").mkdir()
    (root / ".trash-2").mkdir()
    assert names(prune(run, yes=True).goes) == ["step-00000028.partial", ".trash-2"]
    assert [name for name in there(run) if "." in name] == [
        "step-00000004.damaged",
        "step-00000008.superseded-2",
    ]
    found = prune(run, yes=True, set_aside=True)
    assert names(found.goes) == ["step-00000004.damaged", "step-00000008.superseded-2"]
    assert there(run) == [f"step-{step:08d}" for step in (12, 16, 20, 24)]
    assert prune(run).goes == ()


def test_a_link_stays_and_what_it_leads_to_is_looked_at(run, tmp_path):
    root, elsewhere = run / "checkpoints", tmp_path / "elsewhere"
    for step in (4, 8):  # the first would go
        (root / f"step-{step:08d}").rename(elsewhere.with_suffix(f".{step}"))
        (root / f"step-{step:08d}").symlink_to(elsewhere.with_suffix(f".{step}"))
    (root / "step-00000020.damaged").symlink_to(root / "step-00000020")
    found = prune(run, yes=True, set_aside=True)
    assert found.goes == ()
    kept = {row.name: row.kept for row in found.stays}
    assert kept["step-00000004"] == kept["step-00000020.damaged"] == ("a link",)
    flip(elsewhere.with_suffix(".4") / MODEL)
    save(root, 2)
    with pytest.raises(UserError, match="step-00000004"):
        prune(run, yes=True)


def test_what_is_not_of_this_run_or_not_known_always_stays(run):
    root = run / "checkpoints"
    save(root, 2, run_id="another")
    flip(root / "step-00000004" / form.MANIFEST, 10)
    (root / "step-9").mkdir()
    assert prune(run, yes=True, set_aside=True).goes == ()
    assert {"step-00000002", "step-00000004", "step-9"} < set(there(run))


def test_where_nothing_valid_is_left_that_is_said_and_what_was_set_aside_stays(run):
    root = run / "checkpoints"
    for step in (4, 8, 12):
        shutil.rmtree(root / f"step-{step:08d}")
    assert not prune(run).lost
    for step in (16, 20):
        flip(root / f"step-{step:08d}" / form.MANIFEST, 10)
    assert not prune(run, yes=True).lost
    (root / "step-00000024").rename(root / "step-00000024.damaged")
    (root / "step-00000028.partial").mkdir()
    found = prune(run, yes=True, set_aside=True)
    assert (names(found.goes), found.lost) == (["step-00000028.partial"], True)
    assert there(run) == ["step-00000016", "step-00000020", "step-00000024.damaged"]


def test_a_run_that_has_saved_nothing_has_lost_nothing(run):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    save(run / "checkpoints", 2, run_id="another")
    assert not prune(run, yes=True).lost


def test_a_plan_leaves_the_lock_of_a_killed_run_to_its_next_start(run):
    holder = Holder(socket.gethostname(), boot_id(), os.getpid(), "0", "killed")
    (run / "lock").write_text(json.dumps(asdict(holder)))
    before = (run / "lock").read_bytes()
    assert names(prune(run).goes) == ["step-00000004"]
    assert (run / "lock").read_bytes() == before
    with RunLock(run, RUN) as lock:
        assert lock.takeover == "this process or an earlier one with the same number left it"


def test_a_live_run_is_not_touched(run):
    before = there(run)
    with RunLock(run, RUN):
        for yes in (False, True):
            with pytest.raises(UserError, match="in use by pid"):
                prune(run, yes=yes)
    assert there(run) == before
    prune(run, yes=True)
    assert (run / "lock").read_bytes() == b""  # and it leaves no lock behind


def test_a_directory_outside_a_run_has_no_policy_and_a_broken_config_is_said(run, tmp_path):
    shutil.copytree(run / "checkpoints", tmp_path / "copy" / "checkpoints")
    for path in (tmp_path / "copy" / "checkpoints", run / "checkpoints" / "step-00000024"):
        with pytest.raises(UserError, match="its config says what is kept"):
            prune(path)
    (run / "config.yaml").write_text("checkpoint: {keep_lst: 3}")
    with pytest.raises(UserError, match=r"did you mean checkpoint\.keep_last"):
        prune(run)


def test_what_cannot_be_deleted_is_an_error(run, monkeypatch):
    def refused(path, **more):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refused)
    with pytest.raises(RunError, match=r"could not delete \.trash-4") as caught:
        prune(run, yes=True)
    assert caught.value.exit_code == 74
    monkeypatch.undo()
    assert look(run).rows[-1].kind == "trash"
    prune(run, yes=True)
    assert ".trash-4" not in there(run)
