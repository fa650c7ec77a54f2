from pathlib import Path

import pytest

from llmtrain.errors import RunError
from llmtrain.rundir.contents import write_atomically


def test_an_atomic_write_leaves_the_old_file_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
