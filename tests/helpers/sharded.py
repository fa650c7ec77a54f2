"""A run of updates under any strategy on real ranks, and the same in plain PyTorch.

A `Job` is JSON for `call helpers.sharded work`: which model, how it is spread out, what is loaded
and saved. The blocks are those of `uneven`: masks of unequal lengths on every rank.
"""

import json
import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from helpers import uneven
from helpers.ranks import until
from helpers.sharded_models import build, build_from
from helpers.updates import run_of, with_loss
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmtrain.checkpoint import read, write
from llmtrain.config.schema import DdpConfig, DistributedConfig, OptimizerConfig
from llmtrain.distributed.engines import fsdp, state
from llmtrain.distributed.engines.accelerator import Launched, close, make_accelerator
from llmtrain.distributed.launch.environment import family
from llmtrain.errors import UserError
from llmtrain.model import attention, shape
from llmtrain.training.optimizer import make_optimizer
from llmtrain.training.start.trials import hiding_attention
from llmtrain.training.step import update

RUN = "0123456789abcdef"


@dataclass(frozen=True)
class Job:
    """frozen: beginnings of parameter names · load, save: a root of checkpoints ("" = none).

    hiding: several documents in a block · source: a model directory in place of fresh weights.
    apart: rank 0 alone builds the model.
    """

    strategy: str = "ddp"
    kind: str = "tied"
    micro: int = 8
    steps: int = 4
    precision: str = "fp32"
    sync: str = "every"
    frozen: tuple[str, ...] = ()
    load: str = ""
    save: str = ""
    evaluate: bool = False
    seed: int = 3
    wrap_class: str = "auto"
    hiding: bool = False
    source: str = ""
    apart: bool = False
    checkpointing: str = "none"
    optimizer: str = "adamw"

    def text(self) -> str:
        return json.dumps(asdict(self))


def apart(job: Job, launched: Launched, whole: Any) -> tuple[Any, nn.Module, Any]:
    """The model on meta, sharded, and filled from rank 0; the others' weights are not looked at."""
    with torch.device("meta"):
        bare = build(job.kind, job.frozen, job.seed)
    shape.apply_checkpointing(bare, job.checkpointing)
    if job.hiding:
        bare.set_attn_implementation(attention.backend(whole))
    optimizer = make_optimizer(bare, OptimizerConfig(name=job.optimizer, learning_rate=uneven.RATE))
    assert launched.sharding is not None
    module = fsdp.prepare_empty(with_loss(bare, whole), optimizer, launched.sharding)
    fsdp.share_weights(bare, whole if launched.ranks.rank == 0 else None, launched.device)
    return bare, launched.engine.prepare(module, bare, optimizer), optimizer


def whole(tensor: Tensor) -> Tensor:
    """All of a parameter, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Collectives(TorchDispatchMode):
    """What is sent inside of it: (name, dtype, elements, ranks) of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if func.namespace == "c10d":
            given = max((t for t in tree_leaves(args) if isinstance(t, Tensor)), key=Tensor.numel)
            group = next(one for one in args if isinstance(one, torch.ScriptObject))
            ranks = torch.distributed.ProcessGroup.unbox(group).size()
            self.seen.append((name, str(given.dtype), given.numel(), ranks))
        return func(*args, **(kwargs or {}))


def opened(job: Job) -> tuple[Launched, Any, SimpleNamespace, Any]:
    """The bare model, prepared, and what `update` asks of a run."""
    ddp = DdpConfig(find_unused_parameters=job.kind == "rare")
    asked = DistributedConfig(timeout_minutes=1.0, wrap_class=job.wrap_class, ddp=ddp)
    launched = make_accelerator(job.strategy, job.precision, asked, fsdp_sync=job.sync)
    bare = build_from(job.source) if job.source else build(job.kind, job.frozen, job.seed)
    if job.hiding:
        attention.install(bare, uneven.SEQ_LEN)
    shape.apply_checkpointing(bare, job.checkpointing)
    optimizer = make_optimizer(bare, OptimizerConfig(name=job.optimizer, learning_rate=uneven.RATE))
    spec = state.spec(bare, optimizer, 4 << 30)
    if job.apart:
        bare, prepared, optimizer = apart(job, launched, bare)
    else:
        prepared = launched.engine.prepare(with_loss(bare), bare, optimizer)
    launched.engine.create_state()
    data = SimpleNamespace(seq_len=uneven.SEQ_LEN, document_mask=job.hiding, chat=None)
    data.hides_documents = job.hiding
    hiding_attention(bare, prepared, data, job.precision, launched)  # before any other forward
    sent: list[Any] = []
    run = run_of(
        launched,
        prepared,
        bare,
        lambda sums, norm: sent.append((sums, norm)),
        micro_batch_size=job.micro,
        seq_len=uneven.SEQ_LEN,
    )
    run.sent = sent
    return launched, spec, run, optimizer


def refused(output: str, error: Exception) -> None:
    """Every rank is refused; none ends before all are, since rank 0 holds the store of the rest."""
    Path(output).write_text(json.dumps({"refused": str(error)}))
    said = [Path(f"{output}.refused-{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))]
    said[int(os.environ["RANK"])].touch()
    until(lambda: all(path.exists() for path in said), "a refusal on every rank")


def work(output: str, job_text: str) -> None:
    """On every rank: the job; rank 0 writes numbers, weights and what else a test asks."""
    job = Job(**json.loads(job_text))
    try:
        launched, spec, run, optimizer = opened(job)
    except (UserError, ValueError) as error:
        refused(output, error)
        return
    if job.load:
        loaded(Path(job.load), spec, launched)
    passes = uneven.passes(run.built.model)
    seen = trained(job, run)
    evaluated = evaluation(run, job) if job.evaluate else []
    if job.save:
        saved(Path(job.save), spec, launched)
    sent = {"collectives": seen, "passes": len(passes), "evaluated": evaluated}
    result = sent | described(run, optimizer)
    if launched.ranks.rank == 0:
        Path(output).write_text(json.dumps(result))
    close()


def trained(job: Job, run: Any) -> list[tuple[str, str, int, int]]:
    """All updates; what was sent in the last of them, where that can be seen."""
    ranks, seen = run.ranks, []
    for step in range(job.steps):
        batch = uneven.share(step, ranks.rank, ranks.world_size, job.hiding)
        watched = Collectives() if job.strategy != "ddp" else nullcontext()
        with watched:
            update(run, batch, 1.0)
        seen = watched.seen if isinstance(watched, Collectives) else []
    return seen


def described(run: Any, optimizer: Any) -> dict[str, Any]:
    """Numbers, weights and what else a test asks of a run at its end."""
    bare = run.built.model
    embedding, head = (getattr(bare, f"get_{side}_embeddings")() for side in ("input", "output"))
    named = list(bare.named_parameters())
    return {
        "numbers": [
            {"loss": float(sums["loss_sum"] / sums.tokens), "norm": float(norm)}
            for sums, norm in run.sent
        ],
        "norm_type": type(run.sent[-1][1]).__name__ if run.sent else "",
        "weights": {name: whole(p.detach()).flatten().tolist() for name, p in named},
        "names": [name for name, _ in named],
        "tied": embedding.weight is head.weight,
        "dtypes": sorted({str(p.dtype) for _, p in named if p.requires_grad}),
        "states": sorted(name for name, p in named if p in optimizer.state),
        "steps": run.engine.optimizer_steps(),
        "gradients": sum(p.grad is not None for _, p in named),
    }


def loaded(root: Path, spec: Any, launched: Launched) -> None:
    """The newest checkpoint, by every rank's pieces."""
    found = read.find(root, RUN, launched.ranks)
    assert found is not None
    read.load_tensors(found, spec, launched.engine.pieces(spec, writing=False), launched.ranks)
    launched.engine.finish_loading(found.state["optimizer_steps"])


def evaluation(run: Any, job: Job) -> list[float]:
    """A loss without a gradient, and the last position's logits of one row."""
    ids, labels = (torch.from_numpy(part).long() for part in uneven.blocks(9))
    with run.engine.evaluating():
        loss = run.model(ids[:, :-1], labels)
        logits = run.model(ids[:1, :-1])
        assert str(loss.dtype) == str(logits.dtype) == "torch.float32"
    assert run.model.training
    if family(job.strategy) == "fsdp":
        assert all(isinstance(p, DTensor) for p in run.built.model.parameters())
    return [float(loss), *logits[0].tolist()]


def saved(root: Path, spec: Any, launched: Launched) -> None:
    """A checkpoint by every rank's pieces."""
    ranks = launched.ranks
    small = {"trainer_state.json": b"", "config.json": b"{}"}
    steps = {"format": 1, "run_id": RUN, "optimizer_steps": launched.engine.optimizer_steps()}
    small["trainer_state.json"] = json.dumps(steps).encode()
    begun = write.begin(root, 4, spec, small, ranks, RUN)
    assert isinstance(begun, write.OpenSave), begun
    extents = write.write_pieces(begun, launched.engine.pieces(spec, writing=True))
    done = write.commit(begun, extents, None, ranks)
    assert isinstance(done, write.SavedCheckpoint), done


def reference(job: Job) -> dict[str, Any]:
    """The same updates in plain PyTorch on one process."""
    bare = build(job.kind, job.frozen, job.seed)
    tables = [p for n, p in bare.named_parameters() if p.requires_grad and p.ndim == 2]
    decayed = [p for p in tables if p is not bare.get_input_embeddings().weight]
    rest = [p for p in bare.parameters() if p.requires_grad and not any(p is q for q in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=uneven.RATE, betas=(0.9, 0.95))
    numbers = []
    for step in range(job.steps):
        ids, labels = (torch.from_numpy(part).long() for part in uneven.blocks(step))
        logits = bare(ids[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append({"loss": loss.item(), "norm": norm.item()})
    weights = {n: p.detach().flatten().tolist() for n, p in bare.named_parameters()}
    return {"numbers": numbers, "weights": weights}


def counted(result: dict[str, Any]) -> Counter[tuple[str, str, int]]:
    """Collectives of the last update: (name, dtype, group size) → how many."""
    return Counter((name, dtype, size) for name, dtype, _, size in result["collectives"])
