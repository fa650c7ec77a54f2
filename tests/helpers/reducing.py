"""What is reduced over ranks: DDP's buckets, and squares of gradients on two meshes."""

import json
from pathlib import Path
from typing import Any

import torch
from helpers import uneven
from helpers.sharded import Job, opened
from helpers.sharded_models import build
from torch import nn

from llmtrain.config.schema import DdpConfig, DistributedConfig, OptimizerConfig
from llmtrain.distributed.engines.accelerator import close, make_accelerator
from llmtrain.distributed.ranks import sum_over_ranks
from llmtrain.model.loss import LossModule
from llmtrain.training.optimizer import make_optimizer
from llmtrain.training.step import update
from llmtrain.types import SLOTS, StepVector


def buckets(output: str, cap: str) -> None:
    """In how many parts eight gradients of 1 MiB each are reduced; rank 0 writes it."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    asked = DistributedConfig(timeout_minutes=1.0, ddp=DdpConfig(bucket_cap_mb=int(cap)))
    launched = make_accelerator("ddp", "fp32", asked)
    layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    prepared: Any = launched.accelerator.prepare(layers)
    seen: list[int] = []

    def hook(group, bucket):  # torch refuses annotations that are text
        seen.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    prepared.register_comm_hook(None, hook)
    for _ in range(2):  # the first backward finds the order
        seen.clear()
        prepared(torch.ones(1, 512)).sum().backward()
    if launched.ranks.rank == 0:
        Path(output).write_text(json.dumps(seen))
    close()


def reduced(output: str, micro: str) -> None:
    """Bytes that DDP's own buckets hold for each of some updates; rank 0 writes them."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    launched, _, run, _ = opened(Job(micro=int(micro), kind="untied", frozen=("model.embed",)))
    sent: list[int] = []

    def hook(group, bucket):  # torch refuses annotations that are text
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    run.model.register_comm_hook(None, hook)
    totals = []
    for step in range(3):
        sent.clear()
        share = uneven.share(step, launched.ranks.rank, launched.ranks.world_size, False)
        update(run, share, 1.0)
        totals.append(sum(sent))
    trained = sum(p.numel() for p in run.built.model.parameters() if p.requires_grad)
    if launched.ranks.rank == 0:
        Path(output).write_text(json.dumps({"bytes": totals, "trained": trained}))
    close()


def meshes(output: str) -> None:
    """Norm and clipping of a model whose blocks are sharded over two meshes (of the same ranks)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    launched = make_accelerator("fsdp2", "fp32", DistributedConfig(timeout_minutes=1.0))
    bare = build("untied")
    module = LossModule(bare)
    one = init_device_mesh("cpu", (2,), mesh_dim_names=("all",))
    two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    for layer, mesh in zip(bare.model.layers, (one, two), strict=True):
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=one)
    optimizer = make_optimizer(bare, OptimizerConfig())
    engine = launched.engine
    prepared = engine.prepare(module, bare, optimizer)
    ids, labels = (torch.from_numpy(part).long() for part in uneven.blocks(0))
    with engine.micro(last=True):
        engine.backward(prepared(ids[:, :-1], labels), torch.tensor(0.1))
    sums = squared(engine)
    norm = float(engine.norm(sums))
    engine.clip(sums, norm / 2)
    found = {
        "meshes": len({p.device_mesh for p in bare.parameters()}),
        "norm": norm,
        "clipped": float(engine.norm(squared(engine))),
    }
    alone = LossModule(build("untied"))
    (alone(ids[:, :-1], labels) * 0.1).backward()
    gradients = [p.grad for p in alone.parameters()]
    found["expected"] = float(nn.utils.get_total_norm(gradients))
    if launched.ranks.rank == 0:
        Path(output).write_text(json.dumps(found))
    close()


def squared(engine: Any) -> StepVector:
    """The step's vector of all ranks, with nothing in it but the squares."""
    said = [engine.squares() if slot == "squares" else torch.zeros(()) for slot in SLOTS]
    return StepVector(
        sum_over_ranks(torch.stack([one.double() for one in [*said, torch.ones(())]]))
    )
