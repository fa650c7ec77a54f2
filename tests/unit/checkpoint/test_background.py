import errno
import os
import threading
import time

import pytest
import torch
from helpers.checkpoints import RUN, SPEC, on_ranks, save, tensors, whole
from safetensors.torch import load_file

from llmtrain import faults
from llmtrain.agreement import Alone
from llmtrain.checkpoint import background, read, write
from llmtrain.checkpoint.background import Writer
from llmtrain.types import TensorSpec

LARGE = {"model.safetensors": {"a": TensorSpec("F32", (1000, 7)), "b": TensorSpec("BF16", (33,))}}


@pytest.fixture
def inject(monkeypatch):
    yield lambda text: faults.install({"LLMTRAIN_FAULTS": text})
    faults.install({})


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def saved(writer, root, step, values, spec=SPEC, at_once=frozenset(), ranks=None):
    """A save in the background whose tensors are overwritten as soon as they may be."""
    ranks = ranks or Alone()
    small = {"config.json": b"{}"} if ranks.rank == 0 else {}
    begun = write.begin(root, step, spec, small, ranks, RUN)
    writer.submit(begun, whole(spec, values) if ranks.rank == 0 else (), at_once)
    writer.wait_snapshot()
    for value in values.values():
        value.zero_()
    error, extents = writer.finish()
    done = write.commit(begun, extents, error, ranks)
    writer.release()
    return done


def test_a_save_in_the_background_writes_the_bytes_of_one_in_line(tmp_path):
    done = saved(Writer(), tmp_path / "beside", 4, tensors(SPEC, 4))
    save(tmp_path / "in_line", 4)
    found = contents(tmp_path / "beside" / done.name)
    expected = contents(tmp_path / "in_line" / done.name)
    assert {name: found[name] for name in SPEC} == {name: expected[name] for name in SPEC}
    assert read.verify(tmp_path / "beside" / done.name) == []


def test_only_what_the_forward_changes_is_copied_in_the_call(tmp_path, monkeypatch):
    begun = write.begin(tmp_path, 4, SPEC, {}, Alone(), RUN)
    go_on = threading.Event()
    monkeypatch.setattr(faults, "hit", lambda *_, **__: go_on.wait(30) and None)
    writer, values = Writer(), tensors(SPEC, 4)
    writer.submit(begun, whole(SPEC, values), frozenset({"scale"}))
    assert writer.state == "writing"
    for name in ("scale", "a.weight"):  # too early for the second: it shows in the file
        values[name].zero_()
    go_on.set()
    error, extents = writer.finish()
    done = write.commit(begun, extents, error, Alone())
    found, before = load_file(tmp_path / done.name / "model.safetensors"), tensors(SPEC, 4)
    assert torch.equal(found["scale"], before["scale"])
    assert torch.equal(found["a.bias"], before["a.bias"])
    assert not found["a.weight"].any()


def test_a_rank_without_pieces_is_ready_at_once(tmp_path):
    def work(ranks):
        values = tensors(SPEC, 4)
        begun = write.begin(tmp_path, 4, SPEC, {}, ranks, RUN)
        writer = Writer()
        assert writer.state == "idle"
        writer.submit(begun, whole(SPEC, values) if ranks.rank == 0 else (), frozenset())
        state = writer.state
        writer.wait_snapshot()
        error, extents = writer.finish()
        return state, write.commit(begun, extents, error, ranks)

    (_, first), (state, second) = on_ranks(2, work)
    assert state == "ready"
    assert isinstance(first, write.SavedCheckpoint)
    assert isinstance(second, write.SavedCheckpoint)
    assert read.verify(tmp_path / first.name) == []


@pytest.mark.parametrize(
    ("fault", "number"),
    [("save.snapshot=eio", errno.EIO), ("save.write@nth=2=enospc", errno.ENOSPC)],
)
def test_what_fails_beside_the_training_is_a_failed_vote_and_the_next_save_works(
    tmp_path, inject, caplog, fault, number
):
    inject(fault)
    writer = Writer()
    outcome = saved(writer, tmp_path, 4, tensors(SPEC, 4))
    assert [failed.errno for failed in outcome.failures] == [number]
    assert list(tmp_path.iterdir()) == []
    assert writer.state == "idle"
    inject("")
    assert isinstance(saved(writer, tmp_path, 8, tensors(SPEC, 8)), write.SavedCheckpoint)


@pytest.mark.parametrize("at_once", [frozenset(), frozenset({"a"})])
def test_memory_that_is_refused_is_a_failed_vote(tmp_path, monkeypatch, caplog, at_once):
    def refused(*_, **__):
        raise MemoryError("no memory")

    begun = write.begin(tmp_path, 4, LARGE, {}, Alone(), RUN)
    values = tensors(LARGE)
    writer = Writer()
    monkeypatch.setattr(torch, "empty", refused)
    writer.submit(begun, whole(LARGE, values), at_once)
    assert writer.state == "failed"
    writer.wait_snapshot()
    error, extents = writer.finish()
    assert isinstance(error, MemoryError)
    assert write.commit(begun, extents, error, Alone()).failures[0].text == "no memory"


def test_pieces_that_are_cut_over_buffers_make_the_same_file(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "CHUNK_BYTES", 1024)
    done = saved(Writer(), tmp_path / "beside", 4, tensors(LARGE, 4), LARGE)
    save(tmp_path / "in_line", 4, LARGE)
    file = f"{done.name}/model.safetensors"
    assert (tmp_path / "beside" / file).read_bytes() == (tmp_path / "in_line" / file).read_bytes()
    assert read.verify(tmp_path / "beside" / done.name) == []


def test_buffers_are_those_of_the_save_before(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "CHUNK_BYTES", 1024)
    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(a) or empty(*a, **k))
    writer, after = Writer(), []
    for step in range(10):
        values = tensors(LARGE, step)
        made.clear()
        saved(writer, tmp_path, step, values, LARGE)
        after.append([size for size, *_ in made].count(1024))
    assert after == [-(-(1000 * 7 * 4 + 33 * 2) // 1024)] + [0] * 9


def test_the_time_that_the_caller_waited_is_told(tmp_path, inject):
    inject("save.snapshot=delay:0.2;save.fsync=delay:0.2")
    values = tensors(LARGE)
    writer = Writer()
    begun = write.begin(tmp_path, 4, LARGE, {}, Alone(), RUN)
    writer.submit(begun, whole(LARGE, values), frozenset())
    writer.wait_snapshot()
    error, extents = writer.finish()
    write.commit(begun, extents, error, Alone())
    assert writer.release() >= 0.39
    assert writer.release() >= 0.39  # until the next save begins


def test_a_disk_that_does_not_answer_does_not_hold_up_the_caller(tmp_path, monkeypatch):
    begun = write.begin(tmp_path, 4, LARGE, {}, Alone(), RUN)
    answer = threading.Event()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: answer.wait(30) and fsync(file))
    writer = Writer()
    writer.submit(begun, whole(LARGE, tensors(LARGE)), frozenset())
    writer.wait_snapshot()
    assert writer.state == "writing"
    assert next(t for t in threading.enumerate() if t.name == "checkpoint").daemon
    answer.set()
    assert writer.finish()[0] is None
    assert writer.state == "ready"


def test_memory_that_was_reserved_is_that_of_the_first_save(tmp_path, monkeypatch):
    """Pinning is faked: there is no device here."""
    asked, go_on = [], threading.Event()

    def memory(*, pinned):
        asked.append((threading.current_thread().name, pinned))
        go_on.wait(30)
        return torch.empty(background.CHUNK_BYTES, dtype=torch.uint8)

    monkeypatch.setattr(background, "_host_memory", memory)
    monkeypatch.setattr(background, "CHUNK_BYTES", 1 << 14)
    writer = Writer()
    writer.reserve(2 * background.CHUNK_BYTES - 5)  # returns at once, although memory waits
    assert writer.state == "idle"
    go_on.set()
    done = saved(writer, tmp_path, 4, tensors(LARGE), LARGE)
    assert asked == [("pinned memory", True)] * 2
    assert read.verify(tmp_path / done.name) == []


def test_memory_that_cannot_be_reserved_is_asked_for_again_by_the_save(tmp_path, monkeypatch):
    usual = background._host_memory
    monkeypatch.setattr(background, "_host_memory", lambda *, pinned: [][0])
    writer = Writer()
    writer.reserve(5)
    assert isinstance(writer._reserved.exception(), IndexError)
    monkeypatch.setattr(background, "_host_memory", usual)
    assert isinstance(saved(writer, tmp_path, 4, tensors(SPEC, 4)), write.SavedCheckpoint)


def test_a_save_waits_for_memory_that_is_still_being_reserved(tmp_path, monkeypatch):
    usual = background._host_memory

    def slow(*, pinned):
        time.sleep(0.3)
        return usual(pinned=False)

    monkeypatch.setattr(background, "_host_memory", slow)
    writer = Writer()
    writer.reserve(5)
    begun = write.begin(tmp_path, 4, SPEC, {"config.json": b"{}"}, Alone(), RUN)
    writer.submit(begun, whole(SPEC, tensors(SPEC, 4)), frozenset())
    assert len(writer._chunks) == 1
    assert writer.finish()[0] is None
    assert writer.release() > 0.1
