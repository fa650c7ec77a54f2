"""What does a model cost that is cut over processes: bytes, exchanges, memory, idle time?

Counted, not timed, but for the idle time: that of stages which sleep in place of computing. Small
Llamas in fp32 on processes of this machine; the same counts hold for any size.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from harness import ROOT, Bench, main, ranks, timed

HIDDEN, QUERIES, KEYS, MLP, HEADS = 64, 64, 64, 160, 4  # widths of a block, and its heads
BLOCKS, VOCABULARY, LENGTH, MICRO = 4, 512, 64, 2
SLEEP = 0.1  # seconds of a block's forward
SIZES = {"micro_batches": (4, 2), "counts": ((4, 8, 16), (4,))}


@contextmanager
def opened(
    strategy: str = "ddp",
    blocks: int = BLOCKS,
    schedule: str = "1f1b",
    stages_each: int = 1,
    **cut: int,
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (launched, bare model, optimizer) as a run has them after its preparation.

    cut: tensor_parallel, pipeline_parallel, sequence_parallel
    """
    import copy

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from llmtrain.config.schema import DistributedConfig, OptimizerConfig
    from llmtrain.distributed.engines import stages, state
    from llmtrain.distributed.engines.accelerator import close, make_accelerator
    from llmtrain.distributed.engines.pipeline import PipelineEngine
    from llmtrain.distributed.engines.sequence import exchanged as in_heads
    from llmtrain.model import attention
    from llmtrain.model.loss import Head, LossModule, examine
    from llmtrain.model.tensor import cut_model
    from llmtrain.training.optimizer import make_optimizer

    torch.set_num_threads(1)
    asked = DistributedConfig(**cut, pipeline_stages_per_rank=stages_each)
    launched = make_accelerator(strategy, "fp32", asked)
    shape = {"hidden_size": HIDDEN, "intermediate_size": MLP, "num_attention_heads": HEADS}
    shape |= {"num_hidden_layers": blocks}
    torch.manual_seed(0)
    bare = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=VOCABULARY)).train()
    head = examine(bare)
    assert isinstance(head, Head)
    attention.install(bare, LENGTH, log_reason=False)
    if (group := launched.groups.sequence) is not None:
        attention.use(bare, attention.NAME, in_heads(attention.attention, group))
    optimizer = make_optimizer(bare, OptimizerConfig())
    module = LossModule(bare, head)
    if (group := launched.groups.tensor) is not None:
        driven = state.names_of(optimizer, bare)
        launched.engine.cuts = cut_model(module, group)
        state.replace_parameters(optimizer, bare, driven)
    if isinstance(launched.engine, PipelineEngine):
        anatomy = stages.examine(copy.deepcopy(bare).eval())
        each = blocks // (launched.cut.pipeline * stages_each)
        ranges = [range(first, first + each) for first in range(0, blocks, each)]
        launched.engine.cut_into_stages(module, optimizer, anatomy, ranges, schedule)
    launched.engine.prepare(module, bare, optimizer)
    launched.engine.create_state()
    yield launched, bare, optimizer
    close()


def step(launched: Any, count: int) -> None:
    """Make so many micro-batches."""
    import torch

    from llmtrain.model.loss import made_up_batch

    ids = made_up_batch(MICRO, LENGTH, VOCABULARY, launched.device)
    batch = {"input_ids": ids, "labels": ids, "all_trained": True}
    for _ in launched.engine.forward_backward([batch] * count, torch.ones(())):
        continue


def held(strategy: str, **cut: int) -> dict[str, Any]:
    """Measure bytes of a rank's parameters, gradients and moments for each of the model's."""
    from llmtrain.distributed.engines.state import local

    block = 2 * HIDDEN * (QUERIES + KEYS) + 3 * HIDDEN * MLP + 2 * HIDDEN
    whole = 2 * VOCABULARY * HIDDEN + BLOCKS * block + HIDDEN
    with opened(strategy, **cut) as (launched, bare, optimizer):
        step(launched, 2)
        parts = {
            "parameters": [one.detach() for one in bare.parameters()],
            "gradients": [one.grad for one in bare.parameters()],
            "moments": [m for kept in optimizer.state.values() for m in kept.values() if m.ndim],
        }
        return {name: sum(local(one).nbytes for one in own) / whole for name, own in parts.items()}


def exchanged(tensor: int, blocks: int, count: int) -> dict[str, Any]:
    """Count the all-reduces of some micro-batches."""
    import torch.distributed as dist

    with opened(blocks=blocks, tensor_parallel=tensor) as (launched, _, _):
        step(launched, 1)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
            step(launched, count)
    elements = sum(call.args[0].numel() for call in reduce.call_args_list)
    return {"count": reduce.call_count, "elements": elements}


def kept(tensor: int, sequence: int, blocks: int) -> dict[str, Any]:
    """Measure the bytes that the decoder's forward keeps for its backward."""
    from torch.autograd.graph import saved_tensors_hooks

    from llmtrain.model.attention import in_parts, model_keywords
    from llmtrain.model.loss import made_up_batch

    seen: dict[int, Any] = {}

    def keep(saved: Any) -> Any:
        seen[saved.untyped_storage().data_ptr()] = saved.untyped_storage()
        return saved

    cut = {"tensor_parallel": tensor, "sequence_parallel": sequence}
    with opened(blocks=blocks, **cut) as (launched, bare, _):
        whole = (*bare.parameters(), *bare.buffers())
        weights = {one.untyped_storage().data_ptr() for one in whole}
        own = launched.layout.positions(LENGTH)
        ids = made_up_batch(MICRO, LENGTH, VOCABULARY, launched.device)[:, own]
        row: Any = {} if sequence == 1 else in_parts({"input_ids": ids}, own)
        row.pop("input_ids", None)
        with saved_tensors_hooks(keep, lambda saved: saved):
            output = bare.base_model(ids, **model_keywords(**row))[0]
        found = sum(one.nbytes() for address, one in seen.items() if address not in weights)
        del output
    return {"bytes": found}


def peak(schedule: str, count: int) -> dict[str, Any]:
    """Measure the most bytes that a step of two stages makes and holds at a time."""
    sys.path.append(str(ROOT / "tests"))
    from helpers.live_storage import LiveStorage

    with opened(schedule=schedule, pipeline_parallel=2) as (launched, _, _):
        step(launched, count)
        launched.engine.clear()
        with LiveStorage() as live:
            step(launched, count)
    return {"bytes": live.peak}


def idle(schedule: str, count: int, stages_each: int) -> dict[str, Any]:
    """Time a step of a pipeline whose blocks sleep."""
    import torch

    class Slept(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, hidden: Any) -> Any:
            time.sleep(SLEEP)
            return hidden.view_as(hidden)

        @staticmethod
        def backward(_ctx: Any, gradient: Any) -> Any:
            time.sleep(2 * SLEEP)
            return gradient

    processes, seconds = int(os.environ["WORLD_SIZE"]), list[float]()
    cut = {"stages_each": stages_each, "pipeline_parallel": processes}
    with opened(schedule=schedule, **cut) as (launched, bare, _):
        for block in bare.model.layers:
            if any(True for _ in block.parameters()):  # else it is on another process
                block.register_forward_hook(lambda _block, _given, hidden: Slept.apply(hidden))
        step(launched, count)
        with timed(seconds, time.perf_counter):
            step(launched, count)
    own = BLOCKS // processes
    return {"share": 1 - count * own * 3 * SLEEP / seconds[0]}


def bytes_of_a_rank(bench: Bench) -> None:
    tensor, pipeline = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
    for name, count, cut, strategy, goal in (
        ("one process", 1, {}, "ddp", ""),
        ("matrices over 2", 2, tensor, "ddp", "≤ 2.02"),
        ("matrices over 2, fsdp2 over 2", 4, tensor, "fsdp2", "≤ 1.01"),
        ("blocks over 2, fsdp2 over 2", 4, pipeline, "fsdp2", "≤ 1.01"),
    ):
        every = ranks(__file__, {"what": "held", "strategy": strategy, **cut}, count)
        most = {part: max(one[part] for one in every) for part in every[0]}
        bench.say(f"{name}: bytes of parameters", most["parameters"], "B", goal, **most)


def exchanges(bench: Bench) -> None:
    count = bench.sizes.micro_batches
    asked = {"what": "exchanged", "tensor": 2, "count": count}
    more, fewer = (ranks(__file__, asked | {"blocks": n}, 2)[0] for n in (BLOCKS, BLOCKS - 1))
    each = (more["count"] - fewer["count"]) / count
    elements = (more["elements"] - fewer["elements"]) / count / (MICRO * LENGTH * HIDDEN)
    bench.say("all-reduces of a block and micro-batch", each, "", "≤ 4", elements=elements)
    outside = fewer["count"] / count - (BLOCKS - 1) * each
    bench.say("  outside of the blocks", outside, "")


def activations(bench: Bench) -> None:
    tokens = MICRO * LENGTH
    whole, shared = 24 * HIDDEN + 8, 4 * (2 * QUERIES + 2 * KEYS + 4 * MLP) + 4 * HEADS
    for tensor, sequence in ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4)):
        asked = {"what": "kept", "tensor": tensor, "sequence": sequence}
        more, fewer = (ranks(__file__, asked | {"blocks": n}, tensor * sequence)[0] for n in (3, 2))
        found = (more["bytes"] - fewer["bytes"]) / tokens
        # Of what attention returns, both its own heads and all heads that come back are kept.
        again = 4 * QUERIES if sequence > 1 else 0
        expected = (whole + shared / tensor + again) / sequence
        name = f"positions over {sequence}" if sequence > 1 else f"matrices over {tensor}"
        name += ": kept by a block for a token, off the formula"
        bench.say(name, abs(found - expected), "B", "≤ 0", measured=found, formula=expected)


def memory(bench: Bench) -> None:
    found = {}
    for schedule in ("gpipe", "1f1b"):
        rows = ranks(__file__, {"what": "peak", "schedule": schedule, "count": 16}, 2)
        found[schedule] = [row["bytes"] for row in rows]
    least = min(a / b for a, b in zip(found["gpipe"], found["1f1b"], strict=True))
    bench.say("16 micro-batches: peak of GPipe over that of 1F1B", least, "×", "≥ 3", **found)


def bubble(bench: Bench) -> None:
    for count, schedule, each, micro_batches in (
        *((2, "1f1b", 1, m) for m in bench.sizes.counts),
        (2, "gpipe", 1, 8),
        (2, "interleaved", 2, 8),
        (4, "1f1b", 1, 8),
    ):
        asked = {"what": "idle", "schedule": schedule, "stages_each": each, "count": micro_batches}
        found = max(one["share"] for one in ranks(__file__, asked, count))
        expected = (count - 1) / (each * micro_batches + count - 1)
        name = f"{schedule} over {count}, {micro_batches} micro-batches: idle, off the formula"
        bench.say(name, abs(found - expected), "", "≤ 0.02", measured=found, formula=expected)


if __name__ == "__main__":
    parts = {"bytes": bytes_of_a_rank, "exchanges": exchanges, "activations": activations}
    parts |= {"memory": memory, "bubble": bubble}
    children = {"held": held, "exchanged": exchanged, "kept": kept, "peak": peak, "idle": idle}
    main(__doc__, parts, SIZES, child=children, pinned=False)
