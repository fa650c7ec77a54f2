"""All ranks must have the one run directory; ranks are threads, a machine is a path of its own."""

import socket

import pytest
from helpers.checkpoints import on_ranks

from llmtrain.errors import PeerError, UserError
from llmtrain.rundir.contents import SHARED, check_shared


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

    errors = on_ranks(2, lambda ranks: check(ranks, [shared, late], wait))
    assert errors == [None, None]
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
