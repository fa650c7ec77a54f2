"""Updates of small models that are cut over processes, and the same on one process.

A case is a name of `MODELS` and what is asked beside it: `full` and `selective` compute blocks
again, `documents` hides them from each other, `frozen` trains no embedding, `logits` computes the
loss from these, `double` is fp64. All cases of a launch run one after another, since each start of
processes has its price.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from helpers.updates import run_of
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.config.schema import DdpConfig, DistributedConfig, OptimizerConfig
from llmtrain.distributed.engines import state
from llmtrain.distributed.engines.accelerator import Launched, close, make_accelerator
from llmtrain.distributed.engines.engine import TorchEngine
from llmtrain.model import attention, shape
from llmtrain.model.loss import Head, LossModule, examine
from llmtrain.model.tensor import cut_model
from llmtrain.training.optimizer import make_optimizer
from llmtrain.training.step import update
from llmtrain.types import Batch, Cut, Piece

STEPS, ROWS, MICRO, LENGTH, VOCABULARY = 20, 8, 2, 32, 509  # an odd vocabulary
BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,  # its row has no gradient
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 16},  # norms of queries and keys
    "gemma2": {"tie_word_embeddings": True, "head_dim": 16},  # a cap of the logits
    "mistral": {},
    "phi": {},  # biases, also of the head
    "olmo2": {},  # norms over all heads
}


def built(kind: str) -> Any:
    """Norms away from 1 and biases away from 0, so that a wrong gradient of them shows."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **BASE | MODELS[kind]))
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return model.train()


def blocks(step: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """ids (ROWS, T + 1), labels (ROWS, T) with uneven masks, and where documents begin."""
    draw = np.random.default_rng(step)
    ids = draw.integers(0, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)
    kept = draw.random((ROWS, LENGTH)) < draw.random((ROWS, 1)) * 0.9 + 0.1
    labels = np.where(kept, ids[:, 1:], -100).astype(np.int64)
    starts = [np.unique([0, *draw.integers(1, LENGTH, 1 + row % 3)]) for row in range(ROWS)]
    return ids, labels, starts


def share(step: int, launched: Launched, documents: bool) -> Batch:
    rank, of = launched.layout.data_rank, launched.layout.data_size
    ids, labels, starts = (part[rank::of] for part in blocks(step))
    tokens = int((labels != -100).sum())
    borders = tuple(starts) if documents else None
    return Batch(ids, labels, tokens, borders, {}, 0, 0, {"all": tokens}, {}, 0.0)


def opened(launched: Launched, case: str) -> tuple[Any, Any, list[Any]]:
    """A run as `update` sees it, with the sums and norms that it will send."""
    kind, *asked = case.split()
    bare = built(kind).to(torch.float64 if "double" in asked else torch.float32)
    found = examine(bare)
    attention.install(bare, LENGTH, log_reason=False)
    kinds = [kind for kind in ("selective", "full") if kind in asked]
    shape.apply_checkpointing(bare, *(kinds or ["none"]))
    fused = make_optimizer(bare, OptimizerConfig(learning_rate=1e-3))
    if "frozen" in asked:
        bare.get_input_embeddings().requires_grad_(False)
    head = found if isinstance(found, Head) and "logits" not in asked else None
    loss = LossModule(bare, head, z_loss=0.01 if "z_loss" in asked else 0.0)
    if (group := launched.groups.tensor) is not None:
        driven = state.names_of(fused, bare)
        launched.engine.cuts = cut_model(loss, group)
        state.replace_parameters(fused, bare, driven)
    prepared = launched.engine.prepare(loss, bare, fused)
    launched.engine.create_state()
    sent: list[Any] = []
    run = run_of(
        launched,
        prepared,
        bare,
        lambda sums, norm: sent.append((sums, float(norm))),
        micro_batch_size=MICRO,
        seq_len=LENGTH,
    )
    return run, fused, sent


def of_all(launched: Launched, case: str) -> dict[str, Any]:
    """What a case gives: numbers of each step, losses by token, logits, and what ranks hold."""
    again = TorchEngine(launched.accelerator, launched.sharding, launched.layout, launched.groups)
    launched = replace(launched, engine=again)
    run, optimizer, sent = opened(launched, case)
    for step in range(STEPS):
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
            update(run, share(step, launched, "documents" in case), 1.0)
    ids, labels, _ = blocks(99)
    given = torch.from_numpy(ids[:2, :-1].astype(np.int64))
    with run.engine.evaluating():
        each = run.model(given, torch.from_numpy(labels[:2]), each=True)
        logits = run.model(given[:1, :7])
    count = sum(math.prod(one.shape) for one in built(case.split()[0]).parameters())
    return {
        "losses": [float(sums["loss_sum"] / sums.tokens) for sums, _ in sent],
        "norms": [norm for _, norm in sent],
        "each": each.flatten().tolist(),
        "logits": logits[0].tolist(),
        "tied": tied(run.built.model),
        "unlike": unlike(run, launched),
        "held": held(run.built.model, optimizer) / count,
        "reductions": reduced.call_count,
        "replicas": run.engine.unequal_replicas(),
    }


def tied(bare: Any) -> bool:
    return bare.get_input_embeddings().weight is bare.get_output_embeddings().weight


def held(bare: Any, optimizer: Any) -> float:
    """Bytes of parameters and moments on this rank."""
    own = [state.local(one.detach()) for one in bare.parameters()]
    moments = [state.local(one) for kept in optimizer.state.values() for one in kept.values()]
    return float(sum(one.nbytes for one in (*own, *moments) if one.ndim))


def unlike(run: Any, launched: Launched) -> list[str]:
    """Names of parameters that are not cut and yet differ between the processes of a group."""
    group = launched.groups.tensor
    if group is None:
        return []
    found = []
    for name, parameter in run.built.model.named_parameters():
        if name in launched.engine.cuts:
            continue
        own = state.local(parameter.detach())
        both = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(both, own.contiguous(), group=group)
        if not all(torch.equal(both[0], other) for other in both):
            found.append(name)
    return found


def work(
    output: str,
    cases_text: str,
    strategy: str = "ddp",
    tensor: str = "1",
    precision: str = "fp32",
    unused: str = "",
) -> None:
    """On every rank: all cases; rank 0 writes what they give. unused: as DDP looks for them."""
    ddp = DdpConfig(find_unused_parameters=bool(unused))
    asked = DistributedConfig(timeout_minutes=1.0, tensor_parallel=int(tensor), ddp=ddp)
    launched = make_accelerator(strategy, precision, asked)
    found = {case: of_all(launched, case) for case in json.loads(cases_text)}
    if launched.ranks.rank == 0:
        Path(output).write_text(json.dumps(found))
    close()


def exchange(output: str) -> None:
    """On every rank: columns of matrices of several heights become whole rows, and come back."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    made = {}
    for rows, columns in ((1, 4), (7, 8), (64, 12), (0, 4)):
        whole = torch.arange(1.0, rows * columns + 1).view(rows, columns)
        cut = Cut(1, tuple([columns // size] * size), (rows, columns))
        own = Piece("w", 0, cut.part(whole, rank).contiguous().view(-1))
        state._EXCHANGED = 100  # bytes: several rounds
        assert dist.group.WORLD is not None
        pieces = list(state.rows_for_columns(own, cut, dist.group.WORLD))
        again = own._replace(data=torch.zeros_like(own.data))
        for piece in state.columns_from_rows(again, cut, rank):
            start = piece.start
            piece.data.copy_(whole.view(-1)[start : start + piece.data.numel()])
        assert torch.equal(again.data, own.data)
        made[f"{rows} {columns}"] = [[piece.start, piece.data.tolist()] for piece in pieces]
    every: list[Any] = [None] * size
    dist.all_gather_object(every, made)
    if rank == 0:
        Path(output).write_text(json.dumps(every))
    dist.destroy_process_group()
