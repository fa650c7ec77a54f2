"""Bytes of model states as they lie in memory: unique storages of two real updates, on every rank.

Counted behind each backward of the second step, where weights, gradients and moments are all there,
and the fuller of both moments counts: ZeRO-1 has whole gradients until the last micro-batch. What
DeepSpeed keeps besides (masters, gradients that it has taken over) is found by walking through what
its optimizer holds.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from helpers.saved_bytes import kept_by, real_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain.config.schema import DistributedConfig, OptimizerConfig
from llmtrain.distributed.engines.accelerator import close, make_accelerator
from llmtrain.distributed.plan.memory import largest_block
from llmtrain.model.loss import LossModule, made_up_batch
from llmtrain.model.shape import shape
from llmtrain.model.tensor import cut_model
from llmtrain.training.optimizer import make_optimizer
from llmtrain.types import ModelShape, StepVector

ROWS, SEQ_LEN = 2, 32
SHAPES: dict[str, dict[str, Any]] = {
    "even": {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4},
    # Odd numbers of rows; no parameter has a multiple of DeepSpeed's alignment.
    "odd": {
        "hidden_size": 255,
        "intermediate_size": 707,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 86,
    },
}


def model(kind: str) -> LlamaForCausalLM:
    """frozen: the even one without gradients of its embedding and its first block."""
    torch.manual_seed(3)
    asked = SHAPES["odd" if kind == "odd" else "even"]
    config = LlamaConfig(
        vocab_size=2001, num_hidden_layers=3, tie_word_embeddings=kind == "tied", **asked
    )
    made = LlamaForCausalLM(config)
    for name, parameter in made.named_parameters():
        if kind == "frozen":
            parameter.requires_grad_(not name.startswith(("model.embed", "model.layers.0")))
    return made.train()


def model_shape(kind: str) -> ModelShape:
    return shape(model(kind))


@dataclass(frozen=True)
class Counted:
    """Bytes of one rank. held: what DeepSpeed's optimizer holds besides, buckets included."""

    parameters: int
    gradients: int
    optimizer: int
    held: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.held


def count(output: str, strategy: str, precision: str, kind: str) -> None:
    """On every rank: two steps of two micro-batches, then a file `output.RANK`."""
    bare = model(kind)
    asked = DistributedConfig(timeout_minutes=2.0)
    launched = make_accelerator(
        strategy, precision, asked, largest_block=largest_block(shape(bare))
    )
    engine, device = launched.engine, launched.device
    optimizer = make_optimizer(bare, OptimizerConfig())
    prepared = engine.prepare(LossModule(bare), bare, optimizer)
    engine.create_state()
    ids = made_up_batch(ROWS, SEQ_LEN, 2001, device)
    scale = torch.ones((), device=device)
    found = []
    for step in range(2):
        for index in range(2):
            with engine.micro(last=index == 1):
                engine.backward(prepared(input_ids=ids, labels=ids), scale)
            if step == 1:
                found.append(_counted(bare, optimizer, getattr(engine, "_zero", None)))
        if step == 0:
            engine.step(1e-3, healthy())
    fullest = asdict(max(found, key=lambda one: one.total))
    Path(f"{output}.{launched.ranks.rank}").write_text(json.dumps(fullest))
    close()


def cut(output: str, tensor: str, fields: str, seq_len: str) -> None:
    """On every rank of a group: what a forward of a Llama keeps, and its states, in `output.RANK`.

    fields: of its config, as JSON
    """
    config = LlamaConfig(**json.loads(fields))
    asked = DistributedConfig(tensor_parallel=int(tensor), timeout_minutes=2.0)
    launched = make_accelerator("ddp", "fp32", asked)
    ids = torch.arange(int(seq_len))[None] % config.vocab_size
    found = {}
    for arithmetic in ("fp32", "bf16", "autocast"):
        bare = real_model(config, arithmetic, int(seq_len))
        cut_model(LossModule(bare), launched.groups.tensor)
        found[arithmetic] = kept_by(bare, ids, arithmetic)[0]
        if arithmetic == "fp32":
            found["parameters"] = _bytes(bare.parameters(), set())
    Path(f"{output}.{launched.ranks.rank}").write_text(json.dumps(found))
    close()


def healthy() -> StepVector:
    """Sums that forbid nothing."""
    from llmtrain.types import SLOTS

    data = torch.zeros(len(SLOTS) + 1, dtype=torch.float64)
    data[SLOTS.index("squares")] = data[-1] = 1.0
    return StepVector(data)


def _counted(bare: Any, optimizer: torch.optim.Optimizer, zero: Any) -> Counted:
    seen: set[int] = set()
    parameters = list(bare.parameters())
    own = [*parameters, *(getattr(p, "ds_tensor", None) for p in parameters)]
    weights = _bytes(own, seen)
    gradients = _bytes([p.grad for p in parameters], seen)
    inner = optimizer if zero is None else zero.optimizer
    moments = _bytes(_tensors(inner.state, set()), seen)
    held = 0 if zero is None else _bytes(_tensors(vars(zero), set()), seen)
    return Counted(weights, gradients, moments, held)


def _bytes(tensors: Iterable[Tensor | None], seen: set[int]) -> int:
    """Of storages that were not counted before."""
    total = 0
    for tensor in tensors:
        if tensor is None or tensor.is_meta:
            continue
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that is reached through containers, and gradients and shards of tensors."""
    if isinstance(value, Tensor):
        yield value
        for name in ("grad", "ds_tensor", "grad_accum"):
            if isinstance(inner := getattr(value, name, None), Tensor):
                yield inner
    elif isinstance(value, (dict, list, tuple, set)) and id(value) not in seen:
        seen.add(id(value))
        members = [*value, *value.values()] if isinstance(value, dict) else value
        for member in members:
            yield from _tensors(member, seen)
