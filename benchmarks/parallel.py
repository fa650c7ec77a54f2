"""What does a model cost that is cut over processes: bytes, exchanges, memory, idle time?

Counted, not timed, but for the idle time: that of stages which sleep in place of computing. Small
Llamas in fp32 on processes of this machine; the same counts hold for any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness import Bench, main, ranks

HIDDEN, QUERIES, KEYS, MLP, HEADS = 64, 64, 64, 160, 4  # widths of a block, and its heads
BLOCKS, VOCABULARY, LENGTH, MICRO = 4, 512, 64, 2
SIZES = {"micro_batches": (4, 2)}


def opened(
    tensor: int, strategy: str, blocks: int = BLOCKS, sequence: int = 1
) -> tuple[Any, Any, Any]:
    """Return (launched, bare model, optimizer) as a run has them after its preparation."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from llmtrain.config.schema import DistributedConfig, OptimizerConfig
    from llmtrain.distributed.engines import state
    from llmtrain.distributed.engines.accelerator import make_accelerator
    from llmtrain.distributed.engines.sequence import exchanged as in_heads
    from llmtrain.model import attention
    from llmtrain.model.loss import Head, LossModule, examine
    from llmtrain.model.tensor import cut_model
    from llmtrain.training.optimizer import make_optimizer

    torch.set_num_threads(1)
    asked = DistributedConfig(tensor_parallel=tensor, sequence_parallel=sequence)
    launched = make_accelerator(strategy, "fp32", asked)
    shape = {"hidden_size": HIDDEN, "intermediate_size": MLP, "num_attention_heads": HEADS}
    shape |= {"num_hidden_layers": blocks}
    torch.manual_seed(0)
    bare = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=VOCABULARY)).train()
    head = examine(bare)
    assert isinstance(head, Head)
    attention.install(bare, LENGTH, tell=False)
    if (group := launched.groups.sequence) is not None:
        attention.use(bare, attention.NAME, in_heads(attention.attention, group))
    optimizer = make_optimizer(bare, OptimizerConfig())
    module = LossModule(bare, head)
    if (group := launched.groups.tensor) is not None:
        driven = state.names_of(optimizer, bare)
        launched.engine.cuts = cut_model(module, group)
        state.replace_parameters(optimizer, bare, driven)
    launched.engine.prepare(module, bare, optimizer)
    launched.engine.create_state()
    return launched, bare, optimizer


def step(launched: Any, count: int) -> None:
    """Make so many micro-batches."""
    import torch

    from llmtrain.model.loss import made_up_batch

    ids = made_up_batch(MICRO, LENGTH, VOCABULARY, launched.device)
    batch = {"input_ids": ids, "labels": ids, "all_trained": True}
    for _ in launched.engine.forward_backward([batch] * count, torch.ones(())):
        continue


@contextmanager
def reductions() -> Iterator[list[int]]:
    """Count the elements of each all-reduce."""
    import torch.distributed as dist

    seen: list[int] = []
    before = dist.all_reduce

    def counted(tensor: Any, *args: Any, **more: Any) -> Any:
        seen.append(tensor.numel())
        return before(tensor, *args, **more)

    dist.all_reduce = counted
    try:
        yield seen
    finally:
        dist.all_reduce = before


def held(tensor: int, strategy: str) -> dict[str, Any]:
    """Measure bytes of a rank's parameters, gradients and moments for each of the model's."""
    from llmtrain.distributed.engines import state
    from llmtrain.distributed.engines.accelerator import close

    launched, bare, optimizer = opened(tensor, strategy)
    step(launched, 2)
    parts = {
        "parameters": [one.detach() for one in bare.parameters()],
        "gradients": [one.grad for one in bare.parameters()],
        "moments": [one for kept in optimizer.state.values() for one in kept.values() if one.ndim],
    }
    block = 2 * HIDDEN * (QUERIES + KEYS) + 3 * HIDDEN * MLP + 2 * HIDDEN
    whole = 2 * VOCABULARY * HIDDEN + BLOCKS * block + HIDDEN
    found = {name: sum(state.local(t).nbytes for t in own) / whole for name, own in parts.items()}
    close()
    return found


def exchanged(tensor: int, blocks: int, count: int) -> dict[str, Any]:
    """Count the all-reduces of some micro-batches."""
    from llmtrain.distributed.engines.accelerator import close

    launched, _, _ = opened(tensor, "ddp", blocks)
    step(launched, 1)
    with reductions() as seen:
        step(launched, count)
    close()
    return {"count": len(seen), "elements": sum(seen)}


def kept(tensor: int, sequence: int, blocks: int) -> dict[str, Any]:
    """Measure the bytes that the decoder's forward keeps for its backward."""
    from torch.autograd.graph import saved_tensors_hooks

    from llmtrain.distributed.engines.accelerator import close
    from llmtrain.model.attention import in_parts, model_keywords
    from llmtrain.model.loss import made_up_batch

    launched, bare, _ = opened(tensor, "ddp", blocks, sequence)
    weights = {one.untyped_storage().data_ptr() for one in (*bare.parameters(), *bare.buffers())}
    seen: dict[int, Any] = {}

    def keep(saved: Any) -> Any:
        seen[saved.untyped_storage().data_ptr()] = saved.untyped_storage()
        return saved

    own = launched.layout.positions(LENGTH)
    ids = made_up_batch(MICRO, LENGTH, VOCABULARY, launched.device)[:, own]
    row: Any = {} if sequence == 1 else in_parts({"input_ids": ids}, own)
    row.pop("input_ids", None)
    with saved_tensors_hooks(keep, lambda saved: saved):
        output = bare.base_model(ids, **model_keywords(**row))[0]
    found = sum(one.nbytes() for address, one in seen.items() if address not in weights)
    del output
    close()
    return {"bytes": found}


def bytes_of_a_rank(bench: Bench) -> None:
    for name, count, tensor, strategy, goal in (
        ("one process", 1, 1, "ddp", ""),
        ("matrices over 2", 2, 2, "ddp", "≤ 2.02"),
        ("matrices over 2, fsdp2 over 2", 4, 2, "fsdp2", "≤ 1.01"),
    ):
        every = ranks(__file__, {"what": "held", "tensor": tensor, "strategy": strategy}, count)
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
        count = tensor * sequence
        more, fewer = (ranks(__file__, asked | {"blocks": n}, count)[0] for n in (3, 2))
        found = (more["bytes"] - fewer["bytes"]) / tokens
        # Of what attention returns, both its own heads and all heads that come back are kept.
        again = 4 * QUERIES if sequence > 1 else 0
        expected = (whole + shared / tensor + again) / sequence
        name = f"positions over {sequence}" if sequence > 1 else f"matrices over {tensor}"
        name += ": kept by a block for a token, off the formula"
        bench.say(name, abs(found - expected), "B", "≤ 0", measured=found, formula=expected)


PARTS = {"bytes": bytes_of_a_rank, "exchanges": exchanges, "activations": activations}

if __name__ == "__main__":
    children = {"held": held, "exchanged": exchanged, "kept": kept}
    main(__doc__ or "", PARTS, SIZES, child=children)
