import errno
import itertools
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.checkpoints import RUN, SPEC, divided, on_ranks, save, tensors, whole
from helpers.rings import dear
from hypothesis import given, settings, strategies as st

from llmtrain import system
from llmtrain.checkpoint import disk, read, write
from llmtrain.config.schema import CheckpointConfig
from llmtrain.errors import UserError
from llmtrain.types import Piece


def tensor_files(directory):
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


@settings(dear(30), deadline=None)
@given(divided(), st.sampled_from([1, 2, 3, 16, 1 << 20]))
def test_the_files_are_those_of_a_save_by_all_ranks(tmp_path_factory, case, room):
    spec, values, ranks = case
    root = tmp_path_factory.mktemp("root")
    save(root / "whole", 1, spec, whole(spec, values))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "ROUND_BYTES", room)
        saved = on_ranks(
            len(ranks),
            lambda own: save(root / "one", 1, spec, ranks[own.rank], ranks=own, collected=True),
        )
    assert {type(outcome) for outcome in saved} == {write.SavedCheckpoint}
    one, expected = root / "one" / "step-00000001", root / "whole" / "step-00000001"
    assert tensor_files(one) == tensor_files(expected)
    assert read.verify(one) == []


def parted(ranks, values):
    """Each rank's rows of a tensor, the rest with rank 1."""
    for name, value in values.items():
        flat = value.view(-1)
        count = flat.numel()
        first, end = (count * at // ranks.world_size for at in (ranks.rank, ranks.rank + 1))
        yield Piece(name, first, flat[first:end])


def test_rank_0_alone_opens_files(tmp_path, monkeypatch):
    opened = []
    real = disk.open_when_visible
    monkeypatch.setattr(
        disk, "open_when_visible", lambda path: opened.append(path.name) or real(path)
    )

    def work(ranks):
        begun = write.begin(tmp_path, 4, SPEC, {}, ranks, RUN)
        extents = write.collect_pieces(begun, parted(ranks, tensors(SPEC, 4)), ranks)
        return extents, write.commit(begun, extents, None, ranks)

    found = on_ranks(3, work)
    assert opened == list(SPEC)
    assert found[0][0].keys() == SPEC.keys()
    assert found[1][0] == found[2][0] == {}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_whose_pieces_are_wrong_fails_the_save_and_holds_nobody_up(tmp_path, caplog, rank):
    def work(own):
        pieces = [*parted(own, tensors(SPEC, 4))]
        if own.rank == rank:
            pieces.append(Piece("unknown", 0, torch.ones(1)))
        return save(tmp_path, 4, pieces=pieces, ranks=own, collected=True)

    outcomes = on_ranks(3, work)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert [(one.rank, one.kind) for one in outcomes[0].failures] == [(rank, "ValueError")]
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_cannot_read_its_memory_fails_the_save_and_holds_nobody_up(tmp_path, caplog):
    class Broken(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.cpu:
                raise RuntimeError("the device is gone")
            return super().__torch_function__(func, types, args, kwargs or {})

    def work(own):
        pieces = [
            piece._replace(data=piece.data.as_subclass(Broken)) if own.rank == 1 else piece
            for piece in parted(own, tensors(SPEC, 4))
        ]
        return save(tmp_path, 4, pieces=pieces, ranks=own, collected=True)

    outcomes = on_ranks(3, work)
    assert [(one.rank, one.text) for one in outcomes[0].failures] == [(1, "the device is gone")]


def test_a_disk_that_is_full_at_rank_0_fails_the_save_on_all(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(disk, "open_when_visible", full)

    def work(own):
        pieces = parted(own, tensors(SPEC, 4))
        return save(tmp_path, 4, pieces=pieces, ranks=own, collected=True)

    outcomes = on_ranks(3, work)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert [(one.rank, one.errno) for one in outcomes[0].failures] == [(0, errno.ENOSPC)]


def keeping(last, every=0, best=0):
    return CheckpointConfig(keep_last=last, keep_every=every, keep_best=best)


def filled(root, steps):
    for step in steps:
        save(root, step)


def test_space_is_what_the_policy_keeps_and_two_more_less_what_is_there(tmp_path):
    policy = keeping(3, 0, 1)
    assert disk.check_room(tmp_path / "absent", policy, 1000, 10, 12) == 60
    assert disk.check_room(tmp_path, keeping(3, 300, 1), 1000, 10, 12) == 90
    filled(tmp_path, [2, 4])
    assert disk.check_room(tmp_path, policy, 1000, 10, 12) == 40
    assert disk.check_room(tmp_path, keeping(2), 1000, 10, 12) == 20
    filled(tmp_path, [6, 8, 10])
    assert disk.check_room(tmp_path, keeping(2), 1000, 10, 12) == 10


def statvfs_says(monkeypatch, **fields):
    said = {"f_bavail": 2**40, "f_frsize": 1, "f_files": 10**6, "f_favail": 10**6} | fields
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**said))


def test_checkpoints_of_another_run_make_no_room_for_ours(tmp_path):
    filled(tmp_path, [2, 4])
    save(tmp_path, 99, run_id="another")
    assert disk.check_room(tmp_path, keeping(3, 0, 1), 1000, 10, 12, RUN) == 40


def test_a_disk_without_room_is_refused_with_both_numbers(tmp_path, monkeypatch):
    statvfs_says(monkeypatch, f_bavail=5000)
    root = tmp_path / "not" / "there" / "yet"
    disk.check_room(root, keeping(2), 100, 1250, 12)
    with pytest.raises(UserError) as caught:
        disk.check_room(root, keeping(2), 100, 1251, 12)
    assert "5004 and 5000 bytes" in str(caught.value)
    assert caught.value.problems[0].key == "run.dir"


def test_a_disk_without_inodes_is_refused(tmp_path, monkeypatch):
    statvfs_says(monkeypatch, f_favail=55)
    with pytest.raises(UserError, match=r"56 files \(inodes\), not 55"):
        disk.check_room(tmp_path, keeping(2), 100, 1, 12)
    statvfs_says(monkeypatch, f_files=0, f_favail=0)  # a file system without such a limit
    disk.check_room(tmp_path, keeping(2), 100, 1, 12)


def test_a_store_that_renames_is_fine_and_left_as_it_was(tmp_path):
    (tmp_path / "mine").touch()
    disk.probe_directory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_probe_that_was_killed_is_cleared_by_the_next(tmp_path):
    (tmp_path / ".probe" / "a").mkdir(parents=True)
    (tmp_path / ".probe" / "a" / "file").touch()
    disk.probe_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["rename", "replace"])
def test_a_store_without_rename_is_refused_with_its_error(tmp_path, monkeypatch, call):
    def refused(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, call, refused)
    with pytest.raises(UserError) as caught:
        disk.probe_directory(tmp_path)
    problem = caught.value.problems[0]
    assert problem.key == "run.dir"
    assert problem.value == tmp_path
    assert "Operation not supported" in problem.expected
    assert list(tmp_path.iterdir()) == []


def test_a_rename_that_copies_nothing_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "rename", lambda _, target: Path(target).mkdir())
    with pytest.raises(UserError, match="still has its old name"):
        disk.probe_directory(tmp_path)


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
40 22 0:35 / /people rw,relatime shared:20 - nfs4 server:/people rw,vers=4.2
41 40 254:3 / /people/local\\040disk rw - xfs /dev/vdb1 rw
42 22 0:36 / /scratch rw - lustre 10.0.0.1@tcp:/scratch rw
43 22 254:9 / /covered rw - nfs server:/covered rw
44 43 254:9 / /covered rw - ext4 /dev/vdc1 rw
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/runs/a", False),
        ("/people/runs/a", True),
        ("/peoples/runs", False),
        ("/people/local disk/runs", False),
        ("/scratch/runs", False),
        ("/covered/runs", False),
    ],
)
def test_what_lies_on_nfs_is_known_by_what_is_mounted(tmp_path, monkeypatch, path, expected):
    (tmp_path / "mountinfo").write_text(MOUNTS)
    monkeypatch.setattr(system, "_MOUNTS", tmp_path / "mountinfo")
    assert disk.is_network(Path(path)) is expected


def test_the_innermost_mount_says_what_a_directory_is_on(tmp_path, monkeypatch):
    (tmp_path / "mountinfo").write_text(MOUNTS)
    monkeypatch.setattr(system, "_MOUNTS", tmp_path / "mountinfo")
    assert system.mounted(Path("/people/runs")).kind == "nfs4"
    assert system.mounted(Path("/people/local disk/runs")).kind == "xfs"
    assert system.mounted(Path("/runs")).kind == "ext4"
    monkeypatch.setattr(system, "_MOUNTS", tmp_path / "absent")
    assert system.mounted(Path("/runs")).kind == ""


def test_the_file_system_of_this_machine_is_what_df_says(tmp_path):
    said = subprocess.run(
        ["df", "--output=fstype", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if said.returncode:
        pytest.skip("df does not say it here")
    assert system.mounted(tmp_path).kind == said.stdout.split()[-1]


def test_this_machines_own_directories_are_not_on_nfs_and_without_mounts_nothing_is(
    tmp_path, monkeypatch
):
    assert disk.is_network(Path("/proc/self")) is False
    monkeypatch.setattr(system, "_MOUNTS", tmp_path / "absent")
    assert disk.is_network(tmp_path) is False


@pytest.mark.parametrize(
    ("whole", "nodes", "network"), [*itertools.product([True, False], [1, 4], [False, True])]
)
def test_auto_is_rank_0_if_it_has_all_and_over_several_nodes_on_nfs(whole, nodes, network):
    expected = "rank0" if whole or (nodes == 4 and network) else "all"
    assert disk.choose_writers("auto", nodes, network, whole=whole) == expected
    assert disk.choose_writers("rank0", nodes, network, whole=whole) == "rank0"
    assert disk.choose_writers("all", nodes, network, whole=whole) == "all"
