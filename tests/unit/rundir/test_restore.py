import shutil

import pytest

from llmtrain import system
from llmtrain.rundir.contents import Originals

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
