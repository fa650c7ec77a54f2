"""Updates on made-up blocks whose masks are uneven: what `update` does with them on real ranks.

With documents, each block holds several, which are hidden from each other.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from helpers.updates import run_of, with_loss
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from llmtrain.config.schema import DistributedConfig, OptimizerConfig
from llmtrain.distributed.engines.accelerator import close, make_accelerator
from llmtrain.model import attention
from llmtrain.training.optimizer import make_optimizer
from llmtrain.training.step import update
from llmtrain.types import SLOTS, Batch

STEPS, ROWS, SEQ_LEN, VOCABULARY = 20, 8, 16, 64
RATE = 1e-2
ROUTER = 0.5  # the coefficient of a router's loss


def model(kind: str = "llama") -> Any:
    """kind: llama, or mixtral with a router loss."""
    torch.manual_seed(3)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "tie_word_embeddings": True,
    }
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape)).train()
    shape |= {"num_key_value_heads": 2, "num_local_experts": 4}
    shape |= {"output_router_logits": True, "router_aux_loss_coef": ROUTER}
    return MixtralForCausalLM(MixtralConfig(**shape)).train()


def blocks(
    step: int, rows: int = ROWS, seq_len: int = SEQ_LEN, vocabulary: int = VOCABULARY
) -> tuple[np.ndarray, np.ndarray]:
    """ids (rows, S + 1) and labels (rows, S): each row has another number of trained tokens.

    In every fifth step the first row has all, and no other has any: most micro-batches have none.
    """
    draw = np.random.default_rng(step)
    ids = draw.integers(0, vocabulary, (rows, seq_len + 1), dtype=np.int64).astype(np.int32)
    labels = ids[:, 1:].astype(np.int64)
    for row in range(rows):
        trained = 1 + (row * 5 + step) % seq_len
        if step % 5 == 2:
            trained = 0 if row else seq_len
        labels[row, trained:] = -100
    return ids, labels


def starts() -> list[np.ndarray]:
    """Where documents begin in each row: one to four of them, unequal, the shortest one token."""
    return [np.array([0, 3, 4, 9][: 1 + row % 4], np.int32) for row in range(ROWS)]


def train(output: str, micro_batch_size: str, hiding: str = "", kind: str = "llama") -> None:
    """On every rank: STEPS updates; rank 0 writes numbers and the final weights' digests.

    hiding: `documents`, or nothing where blocks are one document each.
    """
    launched = make_accelerator("ddp", "fp32", DistributedConfig(timeout_minutes=2.0))
    bare = model(kind)
    attention.install(bare, SEQ_LEN)
    optimizer = make_optimizer(bare, OptimizerConfig(learning_rate=RATE))
    prepared = launched.engine.prepare(with_loss(bare), bare, optimizer)
    launched.engine.create_state()
    sent: list[Any] = []
    run = run_of(
        launched,
        prepared,
        bare,
        lambda sums, norm: sent.append((sums, float(norm))),
        micro_batch_size=int(micro_batch_size),
        seq_len=SEQ_LEN,
    )
    for step in range(STEPS):
        batch = share(step, launched.ranks.rank, launched.ranks.world_size, bool(hiding))
        update(run, batch, 1.0)
    if launched.ranks.rank == 0:
        numbers = [
            {
                "loss": float(sums["loss_sum"] / sums.tokens),
                "norm": norm,
                "tokens": int(sums.tokens),
                "router": [float(one / sums.tokens) for one in sums.data[len(SLOTS) + 1 :]],
            }
            for sums, norm in sent
        ]
        Path(output).write_text(json.dumps({"numbers": numbers, "weights": digests(bare)}))
    close()


def passes(bare: Any) -> list[None]:
    """Grows by one with each time that the first block is computed, or computed again."""
    begun: list[None] = []
    inside = next(bare.base_model.layers[0].children())  # hooks of the block itself are called once
    inside.register_forward_pre_hook(lambda *_: begun.append(None))
    return begun


def share(step: int, rank: int, world_size: int, hiding: bool) -> Batch:
    """Rank r's rows of a step, as the stream deals them out."""
    ids, labels = (part[rank::world_size] for part in blocks(step))
    tokens = int((labels != -100).sum())
    borders = tuple(starts()[rank::world_size]) if hiding else None
    return Batch(ids, labels, tokens, borders, {}, 0, 0, {"all": tokens}, {}, 0.0)


def digests(bare: LlamaForCausalLM) -> dict[str, Any]:
    """Name → digest of the bits, and the values rounded for a comparison with tolerance."""
    found = {name: p.detach().numpy() for name, p in bare.named_parameters()}
    return {
        name: [xxhash.xxh3_64_hexdigest(v.tobytes()), v.ravel()[:50].astype(float).tolist()]
        for name, v in found.items()
    }


@cache
def reference(
    hiding: bool = False, kind: str = "llama"
) -> tuple[list[dict[str, float]], dict[str, list[float]]]:
    """Plain PyTorch: the mean over all trained tokens of a step; each document by itself.

    A router's loss is that of each row, weighted by its trained tokens.
    """
    bare = model(kind)
    borders = starts() if hiding else [np.zeros(1, np.int32)] * ROWS
    decayed = [p for n, p in bare.named_parameters() if p.ndim > 1 and "embed" not in n]
    rest = [p for n, p in bare.named_parameters() if p.ndim < 2 or "embed" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    numbers = []
    for step in range(STEPS):
        ids, labels = (torch.from_numpy(part).long() for part in blocks(step))
        rows = zip(ids[:, :-1], borders, strict=True)
        texts = [row.tensor_split(first[1:].tolist()) for row, first in rows]
        found = [[bare(text[None]) for text in row] for row in texts]
        logits = torch.stack([torch.cat([one.logits[0] for one in row]) for row in found])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        router = torch.zeros(())
        if kind != "llama":
            shares = (labels != -100).sum(1) / (labels != -100).sum()
            router = ROUTER * sum(a * one[0].aux_loss for a, one in zip(shares, found, strict=True))
        (loss + router).backward()
        norm = torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append({"loss": loss.item(), "norm": norm.item(), "router": router.item()})
    weights = {n: p.detach().ravel()[:50].tolist() for n, p in bare.named_parameters()}
    return numbers, weights
