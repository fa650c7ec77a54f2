"""One rank of `benchmarks/strategies.py`: updates on made-up blocks with uneven masks."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain.config.schema import DistributedConfig, OptimizerConfig
from llmtrain.distributed.engines.accelerator import Launched, close, make_accelerator
from llmtrain.model import attention
from llmtrain.model.loss import LossModule
from llmtrain.training.optimizer import make_optimizer
from llmtrain.training.step import update
from llmtrain.types import Batch, Flags, StepVector

STEPS, ROWS, SEQ_LEN = 20, 16, 64
COMMON = {"num_hidden_layers": 3, "max_position_embeddings": SEQ_LEN}
EVEN = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 176,
}
ODD = {
    "vocab_size": 509,
    "hidden_size": 66,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 18,
    "intermediate_size": 163,
}


@dataclass(frozen=True, slots=True)
class Case:
    """model: even, odd, tied, frozen (embedding, first layer) · micro: micro-batches a rank."""

    strategy: str
    processes: int
    micro: int
    precision: str = "fp32"
    model: str = "even"
    recompute: str = "none"
    fsdp_sync: str = "every"


def model_of(case: Case) -> LlamaForCausalLM:
    """The same weights on every rank and in every case of one kind."""
    torch.manual_seed(7)
    shape = {**COMMON, **(ODD if case.model == "odd" else EVEN)}
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=case.model == "tied"))
    if case.model == "frozen":
        for part in (model.model.embed_tokens, model.model.layers[0]):
            part.requires_grad_(False)
    attention.install(model, SEQ_LEN)
    shape.apply_checkpointing(model, case.recompute)
    return model.train()


def rows(step: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """ids (ROWS, S + 1), labels (ROWS, S): between one and all positions of a row are trained."""
    draw = np.random.default_rng(step)
    ids = draw.integers(0, vocabulary, (ROWS, SEQ_LEN + 1)).astype(np.int32)
    labels = ids[:, 1:].astype(np.int64)
    for row in range(ROWS):
        labels[row, 1 + (row * 7 + step) % SEQ_LEN :] = -100
    return ids, labels


def share(step: int, rank: int, world_size: int, vocabulary: int) -> Batch:
    """Rank r's rows of a step, as the stream deals them out."""
    ids, labels = (part[rank::world_size] for part in rows(step, vocabulary))
    tokens = int((labels != -100).sum())
    return Batch(ids, labels, tokens, None, {}, 0, 0, {"all": tokens}, {}, 0.0)


def train(case: Case, output: Path) -> None:
    """STEPS updates; rank 0 writes each step's loss and norm."""
    launched = make_accelerator(
        case.strategy,
        case.precision,
        DistributedConfig(timeout_minutes=3.0),
        largest_block=60_000,
        fsdp_sync=case.fsdp_sync,
    )
    sent: list[tuple[float, float]] = []
    run = run_of(case, launched, sent)
    for step in range(STEPS):
        world = launched.ranks.world_size
        vocabulary = run.built.loss.config.vocab_size
        update(run, share(step, launched.ranks.rank, world, vocabulary), min(1.0, (step + 1) / 5))
    if launched.ranks.rank == 0:
        output.write_text(json.dumps({"case": asdict(case), "steps": sent}))
    close()


def run_of(case: Case, launched: Launched, sent: list[tuple[float, float]]) -> Any:
    """What `update` asks of a run."""
    bare = model_of(case)
    optimizer = make_optimizer(bare, OptimizerConfig(learning_rate=3e-3))
    loss = LossModule(bare)
    prepared = launched.engine.prepare(loss, bare, optimizer)
    launched.engine.create_state()

    def send(sums: StepVector, norm: torch.Tensor) -> None:
        sent.append((float(sums["loss_sum"] / sums.tokens), float(norm)))

    manifest = SimpleNamespace(always_full=False, labels=("all",), packing="concat")
    micro_batch_size = ROWS // launched.ranks.world_size // case.micro
    return SimpleNamespace(
        ranks=launched.ranks,
        device=launched.device,
        engine=launched.engine,
        model=prepared,
        data=SimpleNamespace(manifest=manifest),
        built=SimpleNamespace(loss=loss, micro_batch_size=micro_batch_size),
        max_grad_norm=1.0,
        feed=SimpleNamespace(error=None),
        signals=SimpleNamespace(reason=None),
        requests=SimpleNamespace(flags=lambda reason, look=True: Flags()),
        due=SimpleNamespace(anything=lambda step: False),
        step=0,
        meter=SimpleNamespace(send=send),
        checkpoints=SimpleNamespace(wait_snapshot=lambda: None, flags=dict),
    )


def accumulate(output: Path) -> None:
    """Seconds of a step of eight micro-batches: gradients reduced once, and after each of them.

    The two take turns, so that a busy machine slows both.
    """
    launched = make_accelerator("ddp", "fp32", DistributedConfig(timeout_minutes=3.0))
    engine, device = launched.engine, launched.device
    torch.manual_seed(7)
    shape = LlamaConfig(
        vocab_size=8192, hidden_size=256, num_hidden_layers=4, intermediate_size=704
    )
    bare = LlamaForCausalLM(shape)
    prepared = engine.prepare(LossModule(bare), bare, make_optimizer(bare, OptimizerConfig()))
    ids = torch.randint(0, 8192, (1, 16))
    seconds: dict[str, list[float]] = {"once": [], "each": []}
    for turn in range(12):
        for name in ("once", "each") if turn % 2 else ("each", "once"):
            start = time.perf_counter()
            for index in range(8):
                with engine.micro(last=name == "each" or index == 7):
                    engine.backward(prepared(ids, ids), torch.ones((), device=device))
            seconds[name].append(time.perf_counter() - start)
            engine.clear()
    if launched.ranks.rank == 0:
        output.write_text(json.dumps({name: all_[2:] for name, all_ in seconds.items()}))
    close()
