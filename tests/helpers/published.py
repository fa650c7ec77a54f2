"""Published tokens a second of other trainers, and what the speed of a plan makes of them.

Each row is two runs of one model on different numbers of GPUs. The share of the peak is taken from
the first, the second is predicted. Both constants of the model (what overlaps, what nodes cost)
were chosen while looking at these rows: they test the code and prove nothing for other machines.
"""

import math
from dataclasses import dataclass, replace

from llmtrain.distributed.plan.memory import Hardware, Layout, Work
from llmtrain.distributed.plan.speed import OVERLAP, PER_DOUBLING, Machine, machine_of, step_time
from llmtrain.types import ModelShape, ParameterShape


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


def titan(source: str, device: str, *numbers: int, gather: int = 2) -> Row:
    """torchtitan's Llama 3 8B, selective checkpointing. numbers: gpus and published, of both."""
    gpus, published = (numbers[0], numbers[1]), (numbers[2], numbers[3])
    name = f"torchtitan {source}"
    return Row(name, device, 8.03e9, 32 * 4096, 8192, (2, 2), gpus, 7, published, gather)


def mpt(size: str, device: str, layers: int, width: int, *numbers: int, factor: int) -> Row:
    """llm-foundry's: blocks of 12 h², learned positions, a vocabulary of 50,368, tied; pure bf16 on
    A100. numbers: micro, gpus and published, of both.
    """
    parameters = 12 * layers * width**2 + (50_368 + 2_048) * width
    micro, gpus, published = (tuple(numbers[i : i + 2]) for i in (0, 2, 4))
    reduce = 2 if device == "A100" else 4
    name, tokens = f"llm-foundry, {size}", 2048
    known = (parameters, layers * width, tokens, micro, gpus, factor, published, 2, reduce)
    return Row(name, device, *known)


ROWS = (
    titan("2024-12, 8B", "H100", 8, 128, 5762, 5605),
    titan("2024-12, 8B, compiled", "H100", 8, 128, 6667, 6514),
    titan("2025-06, 8B, float8", "H200", 32, 64, 10938, 10753, gather=1),
    mpt("13B", "H100", 40, 5120, 2, 2, 8, 64, 4792, 4800, factor=6),
    mpt("1B", "H100", 24, 2048, 20, 20, 16, 64, 46037, 44402, factor=6),
    mpt("3B", "H100", 32, 2560, 6, 6, 32, 64, 23021, 22525, factor=6),
    mpt("7B", "A100", 32, 4096, 18, 18, 32, 128, 3725, 3623, factor=8),
    mpt("13B", "A100", 40, 5120, 14, 16, 32, 128, 1998, 1972, factor=8),
    mpt("30B", "A100", 48, 7168, 4, 6, 32, 128, 857, 865, factor=8),
)
# Both start from the smallest micro-batch, probably short of memory.
MISSES = (
    mpt("70B", "H100", 80, 8192, 2, 8, 32, 64, 882, 1039, factor=8),
    mpt("70B", "A100", 80, 8192, 2, 4, 64, 128, 276, 376, factor=8),
)


def calibrate(
    published: float, shape: ModelShape, work: Work, layout: Layout, place: Hardware, known: Machine
) -> Machine:
    """Return the machine whose `hfu` makes the prediction equal published tokens a second."""
    paper = step_time(shape, work, layout, place, replace(known, hfu=1.0))
    growth = 1 + PER_DOUBLING * math.log2(place.nodes)
    seconds = paper.tokens / place.devices / published / growth
    return replace(known, hfu=paper.compute / (seconds - (1 - OVERLAP) * paper.links))


def predicted(row: Row) -> float:
    one = ParameterShape((int(row.parameters),), True, True, 0)
    shape = ModelShape((one,), 0, 0, 0, 0, False, 1, None, row.attention, 0)
    work = Work(row.seq_len, 1, None, "bf16", None, None, 1)
    recomputed = {6: "none", 7: "selective", 8: "full"}[row.factor]
    layouts = [Layout("fsdp2", recomputed, size, 1, "every") for size in row.micro]
    places = [Hardware(0, None, 8, count // 8, row.device) for count in row.gpus]
    machine = machine_of(row.device)
    assert machine is not None
    machine = replace(machine, gather=row.gather, reduce=row.reduce)
    known = calibrate(row.published[0], shape, work, layouts[0], places[0], machine)
    return step_time(shape, work, layouts[1], places[1], known).tokens_per_second / row.gpus[1]


def error(row: Row) -> float:
    return 100 * (predicted(row) - row.published[1]) / row.published[0]
