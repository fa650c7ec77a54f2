import os

import pytest

from llmtrain import system


def test_a_file_system_that_cannot_sync_directories_is_said_once(tmp_path, monkeypatch, caplog):
    system._warn_unsynced.cache_clear()
    monkeypatch.setattr(
        "os.fsync", lambda _: (_ for _ in ()).throw(OSError(22, "Invalid argument"))
    )
    system.sync_directory(tmp_path, tmp_path)
    assert len(caplog.records) == 1
    monkeypatch.setattr(
        "os.fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    )
    with pytest.raises(OSError, match="Input/output"):
        system.sync_directory(tmp_path)


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    system.write_durably(path, b"old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        system.write_durably(path, b"new")
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    system.write_durably(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_was_removed_or_replaced_is_not_the_open_one(tmp_path):
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    path.write_bytes(b"")
    with path.open("rb") as file:
        assert system.is_at(path, file.fileno())
        assert not system.is_gone(path)
        path.rename(tmp_path / "moved")
        assert system.is_gone(path)
        assert not system.is_at(path, file.fileno())
        path.write_bytes(b"")
        assert not system.is_at(path, file.fileno())
        path.unlink()
        path.parent.rmdir()
        path.parent.write_bytes(b"a file in place of the directory")
        assert system.is_gone(path)
        assert not system.is_at(path, file.fileno())


def test_a_file_is_closed_if_the_work_on_it_fails_and_stays_open_otherwise(tmp_path):
    with system.close_on_error(os.open(tmp_path, os.O_RDONLY)) as kept:
        os.fstat(kept)
    os.fstat(kept)

    def fail(descriptor):
        with system.close_on_error(descriptor):
            raise ValueError("the rest")

    with pytest.raises(ValueError, match="the rest"):
        fail(kept)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(kept)


def test_a_file_that_was_not_finished_leaves_nothing_behind(tmp_path):
    def begin():
        with system.replacing(tmp_path / "page", sync=False) as file:
            file.write(b"half")
            raise ValueError("the rest")

    with pytest.raises(ValueError, match="the rest"):
        begin()
    assert not list(tmp_path.iterdir())


def test_two_writers_of_a_shared_file_do_not_meet(tmp_path):
    path = tmp_path / "part"
    with system.replacing(path, shared=True) as one, system.replacing(path, shared=True) as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() == b"one"  # the first that was opened is renamed last
    assert list(tmp_path.iterdir()) == [path]
