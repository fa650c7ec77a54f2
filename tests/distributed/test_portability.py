"""A checkpoint goes anywhere: {DDP, FSDP2, ZeRO-2, ZeRO-3} × itself × {1, 2, 3 processes}.

Each form loads what another has written and writes it again: the same bytes. So every pair is a
round trip, and what was written by one and read by the other may go on to any third. In the suite
each of six forms reads two checkpoints of fp32, and each is read by two; four forms of bf16 read
one. All 144 pairs of either are a sweep.
"""

from typing import Any

import pytest
from helpers import portability
from helpers.portability import Form, Work, forms, worst

FP32 = [
    *(Form("ddp", 1), Form("fsdp2", 2), Form("zero2", 1)),
    *(Form("zero3", 2), Form("ddp", 3), Form("zero3", 3)),
]
BF16 = [forms("bf16")[place] for place in (0, 5, 10, 7)]  # each strategy, each number of processes
UNFUSED = [Form(name, 2, fused=False) for name in ("ddp", "fsdp2")]
TURNS = (0, 1)  # from reader to writer: itself, and the next one

Found = dict[str, Any]


def sources(readers, reader, turns):
    place = readers.index(reader)
    return tuple(readers[(place + turn) % len(readers)].name for turn in turns)


@pytest.fixture(scope="module")
def written(server, tmp_path_factory):
    """A checkpoint of each form after three steps, and twenty steps that went on behind it."""
    root = tmp_path_factory.mktemp("portability")
    works = [Work(form) for form in (*FP32, *UNFUSED)] + [Work(form, steps=0) for form in BF16]
    return root, portability.run(server, root, works)


@pytest.fixture(scope="module")
def read(server, written):
    """What each form makes of two checkpoints (bf16: of one, only written again)."""
    works = [Work(form, sources(FP32, form, TURNS)) for form in FP32]
    works += [Work(form, tuple(one.name for one in UNFUSED)) for form in UNFUSED]
    works += [Work(form, sources(BF16, form, TURNS[1:2]), steps=0) for form in BF16]
    return portability.run(server, written[0], works)


def test_p_files_are_the_same_bytes_behind_load_and_save(written, read):
    names = [form.name for form in (*FP32, *UNFUSED, *BF16)]
    assert portability.different_files(written[1], read, names) == []
    for name in names:
        saved = written[1][name][name]["saved"]
        assert sorted(saved) == ["model.safetensors", "optimizer-00001-of-00001.safetensors"]
    readers = {reader for reader in read for writer in read[reader] if writer != reader}
    writers = {writer for reader in read for writer in read[reader] if writer != reader}
    assert readers == writers == set(names)


@pytest.mark.parametrize("form", FP32, ids=lambda form: form.name)
def test_p_losses_go_on_within_1e_5_over_twenty_steps(written, read, form):
    """A load without the moments is 1.7e-2 away, one with another count of updates 7.5e-3."""
    for writer, one in read[form.name].items():
        straight = written[1][writer][writer]
        assert len(one["numbers"]) == 20
        assert [n["tokens"] for n in one["numbers"]] == [n["tokens"] for n in straight["numbers"]]
        assert worst(one, straight) <= 1e-5, writer


@pytest.mark.parametrize("form", [*FP32, *UNFUSED], ids=lambda form: form.name)
def test_p_training_is_the_same_bits_where_strategy_and_processes_stay(written, read, form):
    straight, resumed = written[1][form.name][form.name], read[form.name][form.name]
    assert resumed["numbers"] == straight["numbers"]
    assert resumed["ended"] == straight["ended"]
    assert straight["ended"] != straight["saved"]


def test_p_ddp_and_fsdp2_train_to_the_same_bits_on_two_processes(written, read):
    """Clipped in every step, gradients reduced once in a step, AdamW not fused."""
    ddp, fsdp2 = (form.name for form in UNFUSED)
    straight = written[1][ddp][ddp]
    assert min(one["norm"] for one in straight["numbers"]) > portability.LIMIT
    for name in (ddp, fsdp2):
        assert written[1][name][name] == straight
        assert read[name] == {ddp: straight, fsdp2: straight}


@pytest.mark.slow
def test_p_all_144_pairs(server, tmp_path):
    table = portability.whole(server, tmp_path)
    assert len(table) == 2 * 144
    for pair in table:
        assert pair.same_files, pair
        if pair.worst_loss is not None:
            assert pair.worst_loss <= 1e-5, pair
            assert pair.same_bits or pair.writer != pair.reader, pair
