"""Bytes of model states: those of the plan against those of two real processes, within 1 %."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import counted
from helpers.ranks import Server

from llmtrain.distributed.plan import Hardware, model_states


def count(
    server: Server, folder: Path, strategy: str, precision: str, kind: str, world_size: int = 2
) -> list[counted.Counted]:
    output = folder / "counted.json"
    arguments = ["call", "helpers.counted", "count", str(output), strategy, precision, kind]
    codes = server.run(arguments, world_size, folder)
    assert codes == [0] * world_size, (folder / "output.txt").read_text()
    found = [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(world_size)]
    return [counted.Counted(**one) for one in found]


@pytest.mark.parametrize(
    ("strategy", "precision", "kind"),
    [
        ("ddp", "fp32", "even"),
        ("ddp", "bf16", "frozen"),
        ("fsdp2", "fp32", "odd"),
        ("fsdp2", "bf16", "tied"),
        ("fsdp2", "bf16", "frozen"),
    ],
)
def test_states_of_the_plan_are_those_of_the_fullest_of_two_ranks(
    server: Server, tmp_path: Path, strategy: str, precision: str, kind: str
) -> None:
    found = count(server, tmp_path, strategy, precision, kind)
    shape = counted.model_shape(kind)
    planned = model_states(shape, strategy, precision, Hardware(2**30, None, 2, 1, cpu=True))
    fullest = max(found, key=lambda one: one.total)
    assert fullest.parameters == pytest.approx(planned.parameters, rel=0.01)
    assert fullest.gradients == pytest.approx(planned.gradients, rel=0.01)
    assert fullest.optimizer == pytest.approx(planned.optimizer, rel=0.01)
