import errno

import pytest
import torch
from helpers.checkpoints import RUN, SPEC, divided, on_ranks, save, tensors, whole
from helpers.rings import dear
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.checkpoint import files, read, write
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
    real = files.open_when_visible
    monkeypatch.setattr(
        files, "open_when_visible", lambda path: opened.append(path.name) or real(path)
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

    monkeypatch.setattr(files, "open_when_visible", full)

    def work(own):
        pieces = parted(own, tensors(SPEC, 4))
        return save(tmp_path, 4, pieces=pieces, ranks=own, collected=True)

    outcomes = on_ranks(3, work)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert [(one.rank, one.errno) for one in outcomes[0].failures] == [(0, errno.ENOSPC)]
