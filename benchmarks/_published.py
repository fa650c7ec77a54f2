"""Published tokens a second of other trainers, and what `distributed.scaling` makes of them.

Each row is two runs of one model on different numbers of GPUs. The share of the peak is taken from
the first, the second is predicted. Both constants of the model (what overlaps, what nodes cost)
were chosen while looking at these rows: they test the code and prove nothing for other machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from llmtrain.distributed.plan.memory import Hardware, Layout, Work
from llmtrain.distributed.plan.speed import (
    OVERLAP,
    PER_DOUBLING,
    Machine,
    machine_of,
    step_time,
)
from llmtrain.types import ModelShape, ParameterShape

_RECOMPUTED = {6: "none", 7: "selective", 8: "full"}


@dataclass(frozen=True, slots=True)
class Row:
    """Two runs. parameters; attention: layers × width · micro, gpus, published (tokens a second and
    GPU): of the first and the second run · factor: of P and tokens, by what is recomputed · gather,
    reduce: bytes of a gathered weight and a reduced gradient.
    """

    source: str
    device: str
    parameters: float
    attention: int
    seq_len: int
    micro: tuple[int, int]
    gpus: tuple[int, int]
    factor: int
    published: tuple[int, int]
    gather: int = 2
    reduce: int = 4

    @property
    def machine(self) -> Machine:
        """What these runs had."""
        known = machine_of(self.device)
        assert known is not None
        return replace(known, gather=self.gather, reduce=self.reduce)


def _torchtitan(
    source: str, device: str, gpus: tuple[int, int], published: tuple[int, int], gather: int = 2
) -> Row:
    """Llama 3 8B, selective checkpointing."""
    return Row(source, device, 8.03e9, 32 * 4096, 8192, (2, 2), gpus, 7, published, gather)


def _mpt(
    source: str,
    device: str,
    blocks: tuple[int, int],
    micro: tuple[int, int],
    gpus: tuple[int, int],
    factor: int,
    published: tuple[int, int],
) -> Row:
    """Blocks of 12 h², learned positions, a vocabulary of 50,368, tied; pure bf16 on A100."""
    layers, width = blocks
    parameters = 12 * layers * width**2 + (50_368 + 2_048) * width
    reduce = 2 if device == "A100" else 4
    attention = layers * width
    return Row(
        source, device, parameters, attention, 2048, micro, gpus, factor, published, 2, reduce
    )


ROWS = (
    _torchtitan("torchtitan 2024-12, 8B", "H100", (8, 128), (5762, 5605)),
    _torchtitan("torchtitan 2024-12, 8B, compiled", "H100", (8, 128), (6667, 6514)),
    _torchtitan("torchtitan 2025-06, 8B, float8", "H200", (32, 64), (10938, 10753), 1),
    _mpt("llm-foundry, 13B", "H100", (40, 5120), (2, 2), (8, 64), 6, (4792, 4800)),
    _mpt("llm-foundry, 1B", "H100", (24, 2048), (20, 20), (16, 64), 6, (46037, 44402)),
    _mpt("llm-foundry, 3B", "H100", (32, 2560), (6, 6), (32, 64), 6, (23021, 22525)),
    _mpt("llm-foundry, 7B", "A100", (32, 4096), (18, 18), (32, 128), 8, (3725, 3623)),
    _mpt("llm-foundry, 13B", "A100", (40, 5120), (14, 16), (32, 128), 8, (1998, 1972)),
    _mpt("llm-foundry, 30B", "A100", (48, 7168), (4, 6), (32, 128), 8, (857, 865)),
)
# Both start from the smallest micro-batch, probably short of memory.
MISSES = (
    _mpt("llm-foundry, 70B", "H100", (80, 8192), (2, 8), (32, 64), 8, (882, 1039)),
    _mpt("llm-foundry, 70B", "A100", (80, 8192), (2, 4), (64, 128), 8, (276, 376)),
)


def calibrate(
    published: float,
    shape: ModelShape,
    work: Work,
    layout: Layout,
    hardware: Hardware,
    machine: Machine,
) -> Machine:
    """The machine whose `hfu` makes the prediction equal published tokens a second and device."""
    whole = replace(machine, hfu=1.0)
    paper = step_time(shape, work, layout, hardware, whole)
    growth = 1 + PER_DOUBLING * math.log2(hardware.nodes)
    seconds = paper.tokens / hardware.devices / published / growth
    return replace(machine, hfu=paper.compute / (seconds - (1 - OVERLAP) * paper.links))


def predicted(row: Row) -> float:
    """Tokens a second and GPU of the second run."""
    one = ParameterShape((int(row.parameters),), True, True, 0)
    shape = ModelShape((one,), 0, 0, 0, 0, False, 1, None, row.attention, 0)
    work = Work(row.seq_len, 1, None, "bf16", None, None, 1)
    kept = _RECOMPUTED[row.factor]
    layouts = [Layout("fsdp2", kept, size, 1, "every") for size in row.micro]
    places = [Hardware(0, None, 8, count // 8, row.device) for count in row.gpus]
    known = calibrate(row.published[0], shape, work, layouts[0], places[0], row.machine)
    found = step_time(shape, work, layouts[1], places[1], known)
    return found.tokens_per_second / row.gpus[1]


def error(row: Row) -> float:
    """Of the prediction, in percent of the first run."""
    return 100 * (predicted(row) - row.published[1]) / row.published[0]
