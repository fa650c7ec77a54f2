import os
import stat
from pathlib import Path

import pytest

from llmtrain.errors import RunError, UserError
from llmtrain.rundir.contents import write_atomically, write_output


def test_an_atomic_write_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("kind", ["directory", "pipe", "socket", "device", "link", "dangling"])
def test_only_a_regular_file_is_replaced_by_what_a_person_asks_to_write(tmp_path, kind):
    path = tmp_path / "out"
    make = {
        "directory": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "socket": lambda: os.mknod(path, stat.S_IFSOCK),
        "device": lambda: None,
        "link": lambda: path.symlink_to(tmp_path / "other"),
        "dangling": lambda: path.symlink_to(tmp_path / "gone"),
    }
    (tmp_path / "other").write_text("mine")
    make[kind]()
    path = Path("/dev/null") if kind == "device" else path
    before = path.lstat()
    with pytest.raises(UserError, match="--out") as caught:
        write_output("--out", path, b"a page")
    (problem,) = caught.value.problems
    assert "a regular file, or a name that does not exist yet; it is " in problem.expected
    assert path.lstat() == before
    assert (tmp_path / "other").read_text() == "mine"
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "other/out"])
def test_a_name_that_cannot_be_written_is_refused(tmp_path, name):
    (tmp_path / "other").write_text("mine")
    with pytest.raises(UserError, match="a file that can be written"):
        write_output("--out", tmp_path / name, b"a page")


def test_a_file_is_replaced_and_its_folder_made(tmp_path):
    path = tmp_path / "new" / "page.html"
    assert not write_output("--out", path, b"one")
    assert write_output("--out", path, b"two")
    assert path.read_bytes() == b"two"
