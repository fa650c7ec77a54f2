"""Decisions of a save that need no run; whole runs are in tests/faults and tests/distributed."""

import errno
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers.checkpoints import RUN, save
from helpers.tiny import tiny_config

from llmtrain.agreement import Alone
from llmtrain.checkpoint import candidates
from llmtrain.config.schema import Config
from llmtrain.training.saving import Saves, _retain, reserve, short_of_memory


def rank(host, needed, free):
    return {"host": host, "needed": needed, "free": free}


def test_copies_of_all_ranks_of_a_host_must_fit_into_what_is_free_there():
    assert short_of_memory([rank("a", 100, 1000), rank("a", 100, 990)]) == []
    assert short_of_memory([rank("a", 600, 1000), rank("a", 600, 990)]) == ["a"]


def test_each_host_counts_for_itself():
    heard = [rank("a", 600, 1000), rank("b", 600, 500), rank("c", 0, 0)]
    assert short_of_memory(heard) == ["b"]


def test_the_training_beside_the_copy_needs_some_memory_too():
    assert short_of_memory([rank("a", 1000, 1000)]) == ["a"]


def test_a_rank_that_writes_nothing_needs_nothing():
    assert short_of_memory([rank("a", 600, 700), rank("a", 0, 700)]) == []


def test_a_checkpoint_that_is_deleted_by_hand_is_told_once(tmp_path):
    events: list[tuple[str, int, str]] = []
    root = tmp_path / "checkpoints"
    root.mkdir()
    config = Config.model_validate(tiny_config(tmp_path / "run", checkpoint__keep_last=2))
    run = SimpleNamespace(
        checkpoints=Saves(config.checkpoint, None, False, False),
        run_dir=tmp_path,
        processes=SimpleNamespace(run_id=RUN),
        found=None,
        journal=SimpleNamespace(
            event=lambda name, step, checkpoint: events.append((name, step, checkpoint))
        ),
    )
    losses = {4: 1.0, 8: 2.0, 12: 3.0, 16: 4.0, 20: 5.0}  # the first stays for its loss
    for step, loss in losses.items():
        save(root, step, loss=loss)
        _retain(run, step, f"step-{step:08d}")
        if step == 12:
            shutil.rmtree(root / "step-00000004")
    assert events == [("checkpoint_missing", 16, "step-00000004")]
    assert sorted(path.name for path in root.glob("step-*")) == [
        "step-00000008",  # the best that is left
        "step-00000016",
        "step-00000020",
    ]


def test_a_disk_that_refuses_a_deletion_ends_no_run(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.EIO, "Input/output error")

    policy = Config.model_validate(tiny_config(tmp_path)).checkpoint
    monkeypatch.setattr(candidates, "prune", refused)
    events: list[tuple[str, int]] = []
    run = SimpleNamespace(
        processes=SimpleNamespace(run_id="one"),
        found=None,
        run_dir=tmp_path,
        checkpoints=Saves(policy, None, rank0_writes=False, replicas_shared=False),
        journal=SimpleNamespace(event=lambda name, step, **_: events.append((name, step))),
    )
    _retain(run, 8, "step-00000008")
    assert events == [("retention_failed", 8)]


@pytest.mark.parametrize(("device", "expected"), [("cpu", []), ("cuda", [24])])
def test_memory_is_pinned_ahead_on_cuda_alone(device, expected):
    asked: list[int] = []
    data = SimpleNamespace(nbytes=12, is_cuda=True)
    run = SimpleNamespace(
        device=torch.device(device),
        step=0,
        ranks=Alone(),
        due=SimpleNamespace(stop=lambda step: False),
        built=SimpleNamespace(spec={}),
        engine=SimpleNamespace(pieces=lambda *_, **__: [SimpleNamespace(data=data)] * 2),
        checkpoints=Saves(
            None, SimpleNamespace(reserve=asked.append), rank0_writes=False, replicas_shared=False
        ),
    )
    reserve(run)
    assert asked == expected
