import pytest

from llmtrain import durable


def test_a_file_system_that_cannot_sync_directories_is_said_once(tmp_path, monkeypatch, caplog):
    durable._warn_unsynced.cache_clear()
    monkeypatch.setattr(
        "os.fsync", lambda _: (_ for _ in ()).throw(OSError(22, "Invalid argument"))
    )
    durable.sync_directory(tmp_path, tmp_path)
    assert len(caplog.records) == 1
    monkeypatch.setattr(
        "os.fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    )
    with pytest.raises(OSError, match="Input/output"):
        durable.sync_directory(tmp_path)


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    durable.write(path, b"old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        durable.write(path, b"new")
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    durable.write(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
