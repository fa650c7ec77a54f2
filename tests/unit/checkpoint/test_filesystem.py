import errno
import itertools
import os
import subprocess
from pathlib import Path

import pytest

from llmtrain.checkpoint import files
from llmtrain.errors import UserError


def test_a_store_that_renames_is_fine_and_left_as_it_was(tmp_path):
    (tmp_path / "mine").touch()
    files.probe_directory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_probe_that_was_killed_is_cleared_by_the_next(tmp_path):
    (tmp_path / ".probe" / "a").mkdir(parents=True)
    (tmp_path / ".probe" / "a" / "file").touch()
    files.probe_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["rename", "replace"])
def test_a_store_without_rename_is_refused_with_its_error(tmp_path, monkeypatch, call):
    def refused(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, call, refused)
    with pytest.raises(UserError) as caught:
        files.probe_directory(tmp_path)
    problem = caught.value.problems[0]
    assert problem.key == "run.dir"
    assert problem.value == tmp_path
    assert "Operation not supported" in problem.expected
    assert list(tmp_path.iterdir()) == []


def test_a_rename_that_copies_nothing_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "rename", lambda _, target: Path(target).mkdir())
    with pytest.raises(UserError, match="still has its old name"):
        files.probe_directory(tmp_path)


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
    monkeypatch.setattr(files, "_MOUNTS", tmp_path / "mountinfo")
    assert files.is_network(Path(path)) is expected


def test_the_innermost_mount_says_what_a_directory_is_on(tmp_path, monkeypatch):
    (tmp_path / "mountinfo").write_text(MOUNTS)
    monkeypatch.setattr(files, "_MOUNTS", tmp_path / "mountinfo")
    assert files.filesystem_kind(Path("/people/runs")) == "nfs4"
    assert files.filesystem_kind(Path("/people/local disk/runs")) == "xfs"
    assert files.filesystem_kind(Path("/runs")) == "ext4"
    monkeypatch.setattr(files, "_MOUNTS", tmp_path / "absent")
    assert files.filesystem_kind(Path("/runs")) == ""


def test_the_file_system_of_this_machine_is_what_df_says(tmp_path):
    said = subprocess.run(
        ["df", "--output=fstype", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if said.returncode:
        pytest.skip("df does not say it here")
    assert files.filesystem_kind(tmp_path) == said.stdout.split()[-1]


def test_this_machines_own_directories_are_not_on_nfs_and_without_mounts_nothing_is(
    tmp_path, monkeypatch
):
    assert files.is_network(Path("/proc/self")) is False
    monkeypatch.setattr(files, "_MOUNTS", tmp_path / "absent")
    assert files.is_network(tmp_path) is False


@pytest.mark.parametrize(
    ("family", "nodes", "network"),
    [*itertools.product(["ddp", "fsdp", "zero"], [1, 4], [False, True])],
)
def test_auto_is_rank_0_under_ddp_and_over_several_nodes_on_nfs(family, nodes, network):
    expected = "rank0" if family == "ddp" or (nodes == 4 and network) else "all"
    assert files.choose_writers("auto", family, nodes, network) == expected
    assert files.choose_writers("rank0", family, nodes, network) == "rank0"
    assert files.choose_writers("all", family, nodes, network) == "all"
