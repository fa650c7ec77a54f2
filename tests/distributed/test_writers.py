"""Who writes a checkpoint changes no byte of it, under any strategy."""

from pathlib import Path

import pytest
import torch
from helpers import zero
from helpers.allocated import Allocated
from helpers.zero import Case

TWO = (
    ("ddp", "fp32", "odd"),
    ("fsdp2", "fp32", "odd"),
    ("zero2", "fp32", "frozen"),
    ("zero3", "bf16", "odd"),
)
THREE = (("ddp", "fp32", "odd"), ("zero2", "bf16", "odd"))


def test_copies_are_counted_while_they_exist_and_views_are_not():
    held = torch.zeros(4)
    with Allocated() as allocated:
        held.view(2, 2).add_(1)
        for _ in range(3):
            held.clone()  # gone before the next one
        both = [held.clone(), held.double()]
    assert allocated.peak == 16 + 32 == sum(one.nbytes for one in both)


@pytest.mark.parametrize(("world_size", "forms"), [(2, TWO), (3, THREE)])
def test_all_writers_write_the_same_files_with_no_memory_but_for_one_tensor(
    server, tmp_path, world_size, forms
):
    models = sorted({model for _, _, model in forms})
    first = [Case("ddp", model=m, steps=2, save=str(tmp_path / m)) for m in models]
    zero.run(server, tmp_path / "first", world_size, first)
    cases = {
        (writers, *form): Case(
            form[0],
            form[1],
            model=form[2],
            steps=0,
            start=2,
            load=str(tmp_path / form[2]),
            save=str(tmp_path / "-".join((writers, *form))),
            writers=writers,
        )
        for form in forms
        for writers in ("rank0", "all")
    }
    results = zero.run(server, tmp_path / "again", world_size, list(cases.values()))
    for named, found in zip(cases, results, strict=True):  # the devices of these ranks are CPUs
        assert found["allocated"] <= found["largest"], named
    for named, case in cases.items():
        expected = zero.files(tmp_path / case.model)
        assert len(expected) == 2
        assert zero.files(Path(case.save)) == expected, named
