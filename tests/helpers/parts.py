"""Updates of several models on made-up blocks with uneven masks, whose rows processes may share."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import uneven
from helpers.updates import run_of, with_loss
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from llmtrain.agreement import gathered
from llmtrain.config.schema import DistributedConfig, OptimizerConfig
from llmtrain.distributed.engines import sequence
from llmtrain.distributed.engines.accelerator import Launched, close, make_accelerator
from llmtrain.distributed.engines.engine import TorchEngine
from llmtrain.model import attention
from llmtrain.model.shape import apply_checkpointing
from llmtrain.training.optimizer import make_optimizer
from llmtrain.training.step import update
from llmtrain.types import Batch, MicroBatch

STEPS, ROWS, MICRO, SEQ_LEN, VOCABULARY = 20, 8, 2, 24, 67
RATE = 2e-3
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
# Name → type, other fields, recomputed activations, whether documents are hidden.
CASES: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "llama": ("llama", {}, "none", False),
    "llama, documents": ("llama", {"tie_word_embeddings": True}, "none", True),
    "qwen3, one head of keys": ("qwen3", {"num_key_value_heads": 1, "head_dim": 8}, "none", True),
    "gpt2": ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "none", True),
    "llama, recomputed in parts": ("llama", {"num_key_value_heads": 4}, "selective", True),
    "mistral, recomputed": ("mistral", {"sliding_window": None}, "full", True),
}


def train(output: str, strategy: str, size: str, *names: str) -> None:
    """On every rank: STEPS updates of each case; rank 0 writes the loss and norm of each.

    size: of a group that shares rows
    """
    asked = DistributedConfig(timeout_minutes=2.0, sequence_parallel=int(size))
    launched = make_accelerator(strategy, "fp32", asked)
    found = {}
    for name in names or CASES:
        engine = TorchEngine(
            launched.accelerator, launched.sharding, launched.layout, launched.groups
        )
        found[name] = _updates(replace(launched, engine=engine), *CASES[name])
    if launched.ranks.rank == 0:
        Path(output).write_text(json.dumps(found))
    close()


def _updates(
    launched: Launched, kind: str, fields: dict[str, Any], recomputed: str, hiding: bool
) -> list[list[float]]:
    """Loss, norm and tokens of each step."""
    torch.manual_seed(3)
    bare = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(_SHAPE | fields))).train()
    assert attention.install(bare, SEQ_LEN) == attention.NAME
    if (group := launched.groups.sequence) is not None:
        ours = sequence.exchanged(attention.attention, group)
        attention.use(bare, attention.NAME, ours)
    apply_checkpointing(bare, recomputed)
    optimizer = make_optimizer(bare, OptimizerConfig(learning_rate=RATE))
    prepared = launched.engine.prepare(with_loss(bare), bare, optimizer)
    launched.engine.create_state()
    sent: list[list[float]] = []
    run = run_of(
        launched,
        prepared,
        bare,
        lambda sums, norm: sent.append(
            [float(sums["loss_sum"] / sums.tokens), float(norm), float(sums.tokens)]
        ),
        micro_batch_size=MICRO,
        seq_len=SEQ_LEN,
    )
    for step in range(STEPS):
        update(
            run, _blocks(step, launched.layout.data_rank, launched.layout.data_size, hiding), 1.0
        )
    return sent


def _blocks(step: int, rank: int, size: int, hiding: bool) -> Batch:
    """A data rank's rows of a step; in every fifth step all but the first have no trained token."""
    all_rows = uneven.blocks(step, ROWS, SEQ_LEN, VOCABULARY)
    ids, labels = (part[rank::size] for part in all_rows)
    starts = [np.array([0, 3, 4, 9, 17][: 1 + row % 5], np.int32) for row in range(ROWS)]
    borders, tokens = (tuple(starts[rank::size]) if hiding else None), int((labels != -100).sum())
    return Batch(ids, labels, tokens, borders, {}, 0, 0, {"all": tokens}, {}, 0.0)


HEADS = ((4, 4), (4, 2), (4, 1), (12, 3))  # of queries, and of keys and values


def exchange(output: str, size: str) -> None:
    """On every rank: attention of parts of rows beside that of whole rows, and its gradients.

    Rank 0 writes the largest difference on any rank, by case, relative to the largest number.
    """
    asked = DistributedConfig(timeout_minutes=2.0, sequence_parallel=int(size))
    launched = make_accelerator("ddp", "fp32", asked)
    assert launched.groups.sequence is not None
    attend = sequence.exchanged(attention.attention, launched.groups.sequence)
    own = launched.layout.positions(SEQ_LEN)
    borders = {"cu_seq_lens_q": torch.tensor([0, 5, 24, 37, 48], dtype=torch.int32)}
    found = {}
    for heads, kv_heads in HEADS:
        for name, documents in (("", {}), (", documents", borders | {"max_length_q": 19})):
            for dtype in (torch.float32, torch.bfloat16):
                torch.manual_seed(heads + kv_heads)
                shapes = [(2, n, SEQ_LEN, 8) for n in (heads, kv_heads, kv_heads)]
                whole = [torch.randn(shape, requires_grad=True) for shape in shapes]
                weights = torch.randn(2, SEQ_LEN, heads, 8)
                parts = [one.detach()[:, :, own].requires_grad_() for one in whole]
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                    right, _ = attention.attention(torch.nn.Module(), *whole, None, **documents)
                    out, _ = attend(torch.nn.Module(), *parts, None, in_parts=True, **documents)
                    same, _ = attend(torch.nn.Module(), *whole, None, **documents)
                assert same.equal(right)
                (right * weights).sum().backward()
                (out * weights[:, own]).sum().backward()
                pairs = [(out, right[:, own])]
                pairs += [(a.grad, b.grad[:, :, own]) for a, b in zip(parts, whole, strict=True)]
                found[f"{heads} over {kv_heads}{name}, {dtype}"] = max(
                    float((a - b).abs().max() / b.abs().max()) for a, b in pairs
                )
    of_ranks = gathered(launched.ranks, found)
    if launched.ranks.rank == 0:
        worst = {name: max(one[name] for one in of_ranks) for name in found}
        Path(output).write_text(json.dumps(worst))
    close()


def saved(output: str, size: str) -> None:
    """On every rank: bytes that the decoder keeps of whole rows, and of this process's parts."""
    asked = DistributedConfig(timeout_minutes=2.0, sequence_parallel=int(size))
    launched = make_accelerator("ddp", "fp32", asked)
    group, found = launched.groups.sequence, {}
    assert group is not None
    for name, documents in (("one document a row", False), ("documents", True)):
        torch.manual_seed(3)
        fields: dict[str, Any] = _SHAPE | {"hidden_size": 64, "num_key_value_heads": 4}
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**fields)).train()
        attention.install(model, LONG)
        attention.use(model, attention.NAME, sequence.exchanged(attention.attention, group))
        ids, own = (
            torch.arange(2 * LONG).view(2, LONG) % VOCABULARY,
            launched.layout.positions(LONG),
        )
        given: MicroBatch = {}
        if documents:
            starts = [np.array([0, 40]), np.array([0, 96])]
            given = attention.document_tensors(starts, LONG, attention.NAME, torch.device("cpu"))
        whole: MicroBatch = {"input_ids": ids, **given}
        if not documents:
            whole["position_ids"] = torch.arange(LONG).expand(2, -1)
        part = attention.in_parts(whole | {"input_ids": ids[:, own]}, own)
        found[name] = [_kept(model, row) for row in (whole, part)]
    if launched.ranks.rank == 0:
        Path(output).write_text(json.dumps(found))
    close()


LONG = 128


def _kept(model: Any, row: MicroBatch) -> int:
    """Bytes of distinct storages that autograd saves of a forward, without the weights."""
    held = {one.untyped_storage().data_ptr() for one in model.parameters()}
    sizes: dict[int, int] = {}
    alive = []  # so that no address comes twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        alive.append(tensor)
        if storage.data_ptr() not in held:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        keywords = {name: value for name, value in row.items() if name != "input_ids"}
        model.base_model(row["input_ids"], **attention.model_keywords(**keywords))
    return sum(sizes.values())
