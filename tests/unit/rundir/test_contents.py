import os
import shutil
import socket
import stat
from pathlib import Path

import pytest
from helpers.checkpoints import on_ranks

from llmtrain import system
from llmtrain.errors import PeerError, RunError, UserError
from llmtrain.rundir.contents import SHARED, Originals, check_shared, write_atomically, write_output


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


FILES = {
    "config.yaml": b"run: {}\n",
    "auto.json": b"{}\n",
    "tokenizer/tokenizer.json": b"t" * 100_000,
    "tokenizer/more/special.json": b"[]",
    "eval.safetensors": b"\0\1\2",
    "manifest.json": b"{}",
}


@pytest.fixture
def run_dir(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "run"


@pytest.fixture
def originals(run_dir):
    originals = Originals(run_dir)
    yield originals
    originals.close()


def files(run_dir):
    found = (path for path in run_dir.rglob("*") if path.is_file())
    return {path.relative_to(run_dir).as_posix(): path.read_bytes() for path in found}


def test_nothing_is_written_while_all_is_there(run_dir, originals, monkeypatch):
    monkeypatch.setattr(system, "write_durably", None)
    assert originals.restore() == []


def test_a_directory_that_was_deleted_is_written_as_it_was(run_dir, originals):
    shutil.rmtree(run_dir)
    assert sorted(originals.restore()) == sorted(run_dir / name for name in FILES)
    assert files(run_dir) == FILES
    assert originals.restore() == []
    shutil.rmtree(run_dir)  # a second time: the first files stay open
    originals.restore()
    assert files(run_dir) == FILES


def test_one_file_that_was_deleted_is_written_and_the_others_stay(run_dir, originals):
    (run_dir / "auto.json").write_bytes(b"changed")
    shutil.rmtree(run_dir / "tokenizer")
    restored = originals.restore()
    assert {path.parent.name for path in restored} == {"tokenizer", "more"}
    assert files(run_dir) == FILES | {"auto.json": b"changed"}


def test_a_place_that_cannot_be_written_is_an_error_of_the_disk(run_dir, originals):
    shutil.rmtree(run_dir)
    run_dir.write_bytes(b"in the way")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        originals.restore()


# All ranks must have the one run directory; ranks are threads, a machine is a path of its own.


def no_wait(seconds):
    pass


def check(ranks, paths, wait=no_wait):
    """What the check raises on this rank, whose run directory is the path of its number."""
    try:
        check_shared(paths[ranks.rank], ranks, wait)
    except Exception as error:
        return error
    return None


def test_one_directory_passes_and_keeps_nothing(tmp_path):
    assert on_ranks(3, lambda ranks: check(ranks, [tmp_path] * 3)) == [None] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has", ["nothing", "no directory", "what an earlier start left"])
def test_ranks_with_another_directory_are_named_with_their_host(tmp_path, has):
    shared, other = tmp_path / "shared", tmp_path / "other"
    shared.mkdir()
    if has != "no directory":
        other.mkdir()
    if has == "what an earlier start left":
        (other / SHARED).write_bytes(b"0" * 32)
    paths = [shared, other, shared, other]
    errors = on_ranks(4, lambda ranks: check(ranks, paths))
    refused, *told = errors
    assert isinstance(refused, UserError)
    assert f"run.dir on ranks 1, 3 (host {socket.gethostname()})" in str(refused)
    assert "a file system that all machines share" in str(refused)
    assert all(isinstance(error, PeerError) and error.exit_code == 2 for error in told)
    assert list(shared.iterdir()) == []


def test_a_file_system_that_shows_new_files_late_is_waited_for(tmp_path):
    shared, late = tmp_path / "shared", tmp_path / "late"
    shared.mkdir()
    waited: list[float] = []

    def wait(seconds):
        waited.append(seconds)
        if len(waited) == 3:
            late.symlink_to(shared)

    assert on_ranks(2, lambda ranks: check(ranks, [shared, late], wait)) == [None, None]
    assert len(waited) == 3


def test_it_is_waited_for_ten_seconds_and_no_longer(tmp_path):
    waited: list[float] = []
    (tmp_path / "shared").mkdir()
    paths = [tmp_path / "shared", tmp_path / "gone"]
    assert all(on_ranks(2, lambda ranks: check(ranks, paths, waited.append)))
    assert sum(waited) == 10.0


def test_a_directory_that_cannot_be_entered_is_not_waited_for(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    (tmp_path / "file").touch()
    waited: list[float] = []
    paths = [shared, tmp_path / "file"]
    refused, _ = on_ranks(2, lambda ranks: check(ranks, paths, waited.append))
    assert "Not a directory" in str(refused)
    assert waited == []


def test_one_process_writes_nothing(tmp_path):
    gone = tmp_path / "gone"
    assert on_ranks(1, lambda ranks: check(ranks, [gone])) == [None]
    assert not gone.exists()
