"""Updates under any strategy, many cases in one launch: a launch and its imports cost seconds.

A case says what is trained and how; rank 0 writes what came of each. The blocks are `uneven`'s.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from helpers import uneven
from helpers.allocated import Allocated, OnTheHost
from helpers.ranks import Server, free_port
from helpers.updates import run_of, with_loss
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain.checkpoint import read, write
from llmtrain.checkpoint.read import ResumePoint
from llmtrain.config.schema import DistributedConfig, OptimizerConfig
from llmtrain.distributed.engines import state
from llmtrain.distributed.engines.accelerator import Launched, close, make_accelerator
from llmtrain.model import attention, shape
from llmtrain.model.loss import made_up_batch
from llmtrain.training.optimizer import make_optimizer
from llmtrain.training.step import update
from llmtrain.types import Batch, Spec, StepVector, tensor_bytes

RUN = "0123456789abcdef"
LIMIT = 0.2  # of the gradient norm, which is above it in every step


@dataclass(frozen=True, slots=True)
class Case:
    """model: tied, odd or frozen · forbid: at `bad_step` one rank's loss is NaN, its gradient is
    NaN, its data failed or no rank has a trained token; "loss everywhere": that of every rank ·
    left_out: a step that is not made · load, save: checkpoint directories; a
    loaded state is of `start` steps · save_halfway: after half of the steps, and training goes on ·
    factors: of the learning rate, over and over · writers: as `checkpoint.writers`, "" = all that
    hold a part, and rank 0 what all hold.
    """

    strategy: str = "zero2"
    precision: str = "fp32"
    micro: int = 4
    model: str = "tied"
    forbid: str = ""
    bad_step: int = 2
    steps: int = uneven.STEPS
    start: int = 0
    factors: tuple[float, ...] = ()
    max_grad_norm: float | None = LIMIT
    load: str = ""
    save: str = ""
    save_halfway: str = ""
    writers: str = ""
    evaluate: bool = False
    discard: bool = False
    fused: bool = True
    checkpointing: str = "none"
    left_out: int = -1
    same_bits: bool = False


def run(server: Server, folder: Path, world_size: int, cases: Sequence[Case], **env: str) -> Any:
    """What each case came to, on `world_size` processes; fails with the ranks' output."""
    folder.mkdir(parents=True, exist_ok=True)
    ports: set[int] = set()  # on one that comes again, ranks may find the case's before
    while len(ports) < len(cases):
        ports.add(free_port())
    told = [asdict(case) | {"port": port} for case, port in zip(cases, ports, strict=True)]
    (folder / "cases.json").write_text(json.dumps(told))
    codes = server.run(["call", "helpers.zero", "train_all", str(folder)], world_size, folder, env)
    assert codes == [0] * world_size, (folder / "output.txt").read_text()[-6000:]
    return json.loads((folder / "results.json").read_text())


def train_all(folder: str) -> None:
    """On every rank: the cases, one after the other."""
    results = []
    for told in json.loads(Path(folder, "cases.json").read_text()):
        port = str(told.pop("port"))
        if "LOCAL_RANK" in os.environ:
            os.environ["MASTER_PORT"] = port
        told["factors"] = tuple(told["factors"])
        results.append(train(Case(**told)))
        close()
    if int(os.environ.get("RANK", "0")) == 0:
        Path(folder, "results.json").write_text(json.dumps(results))


def build(kind: str) -> LlamaForCausalLM:
    """tied: `uneven`'s · odd: sizes that nothing divides, untied, with dimensions of 1 · frozen:
    embedding and first layer."""
    if kind == "tied":
        return uneven.model()
    torch.manual_seed(5)
    odd = {"hidden_size": 6, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 2}
    even = {"hidden_size": 16, "num_attention_heads": 2}
    shape = LlamaConfig(
        vocab_size=uneven.VOCABULARY if kind == "frozen" else uneven.VOCABULARY + 3,
        num_hidden_layers=2,
        intermediate_size=7 if kind == "odd" else 24,
        tie_word_embeddings=False,
        **(odd if kind == "odd" else even),
    )
    bare = LlamaForCausalLM(shape).train()
    if kind == "odd":
        bare.model.register_buffer("kept", torch.linspace(0.1, 0.9, 3))  # persistent
    if kind == "frozen":
        bare.model.embed_tokens.weight.requires_grad_(False)
        bare.model.layers[0].requires_grad_(False)
    return bare


def train(case: Case) -> dict[str, Any]:
    """One case on this rank. Numbers of every step, and what is asked of the state behind it."""
    launched = make_accelerator(
        case.strategy,
        case.precision,
        DistributedConfig(timeout_minutes=2.0),
        max_grad_norm=case.max_grad_norm,
        largest_block=2000,
        same_bits=case.same_bits,
    )
    engine, ranks = launched.engine, launched.ranks
    bare = build(case.model)
    attention.install(bare, uneven.SEQ_LEN)
    shape.apply_checkpointing(bare, case.checkpointing)
    optimizer = make_optimizer(bare, OptimizerConfig(learning_rate=uneven.RATE), fused=case.fused)
    spec = state.spec(bare, optimizer, 1 << 30)
    prepared = engine.prepare(with_loss(bare), bare, optimizer)
    engine.create_state()
    sent: list[Any] = []
    fake = run_of(
        launched,
        prepared,
        bare,
        lambda sums, norm: sent.append((sums, float(norm))),
        micro_batch_size=case.micro,
        seq_len=uneven.SEQ_LEN,
        max_grad_norm=case.max_grad_norm,
        same_bits=case.same_bits,
    )
    if case.discard:
        discard(fake)
    if case.load:
        load(launched, spec, Path(case.load), case.start)
    evaluations = []
    for step in range(case.start, case.start + case.steps):
        if case.evaluate:
            evaluations.append(evaluate(fake))
        batch = uneven.share(step, ranks.rank, ranks.world_size, False)
        if step == case.left_out:
            continue
        bad = step == case.bad_step and case.forbid
        update(fake, forbidden(fake, batch, case.forbid) if bad else batch, factor(case, step))
        fake.feed.error = None
        if case.save_halfway and 2 * (step + 1 - case.start) == case.steps:
            save(launched, spec, Path(case.save_halfway), step + 1, case.writers)
    result = {
        "numbers": [numbers(sums, norm) for sums, norm in sent],
        "evaluations": evaluations,
        "optimizer_steps": engine.optimizer_steps(),
        "unequal_replicas": engine.unequal_replicas(),
        "other_moments": other_moments(spec, bare),
    }
    if case.save:
        with Allocated() as allocated:
            save(launched, spec, Path(case.save), case.start + case.steps, case.writers)
        sizes = [tensor_bytes(tensor) for part in spec.values() for tensor in part.values()]
        peaks = [json.loads(peak) for peak in ranks.gather(json.dumps(allocated.peak).encode())]
        result |= {"allocated": max(peaks, default=0), "largest": max(sizes)}
    return result


def factor(case: Case, step: int) -> float:
    return case.factors[step % len(case.factors)] if case.factors else 1.0


def forbidden(fake: Any, batch: Batch, why: str) -> Batch:
    """What must not be applied: made bad on rank 1, or on all where it is the tokens."""
    if why == "tokens":
        labels = np.full_like(batch.labels, -100)
        return Batch(batch.ids, labels, 0, None, {}, 0, 0, {"all": 0}, {}, 0.0)
    if fake.ranks.rank == fake.ranks.world_size - 1 or why.endswith(" everywhere"):
        match why.removesuffix(" everywhere"):
            case "data":
                fake.feed.error = OSError("the stream broke")
            case "gradient":
                weight = fake.built.model.model.layers[1].mlp.up_proj.weight
                handle = weight.register_hook(lambda g: (handle.remove(), g * float("nan"))[1])
            case "loss":
                norm = fake.built.model.model.norm
                handle = norm.register_forward_hook(
                    lambda _module, _inputs, out: (handle.remove(), out * float("nan"))[1]
                )
    return batch


def discard(fake: Any) -> None:
    """What a start does before anything is loaded: forward, backward, nothing of it kept."""
    ids = made_up_batch(2, uneven.SEQ_LEN, uneven.VOCABULARY, fake.device)
    for last in (False, True):
        with fake.engine.micro(last=last):
            loss = fake.model(input_ids=ids, labels=ids)
            fake.engine.backward(loss, torch.ones((), device=fake.device))
    fake.engine.clear()


def evaluate(fake: Any) -> list[float]:
    """Loss of one batch, and the logits that a text would be drawn from."""
    ids, labels = (torch.from_numpy(part).long() for part in uneven.blocks(100))
    with fake.engine.evaluating():
        loss = fake.model(input_ids=ids[:, :-1], labels=labels)
        logits = [fake.model(ids[:1, :length]) for length in (3, 4)]
        assert not fake.built.model.training
        assert not loss.requires_grad
    assert fake.built.model.training
    return [float(loss), *(float(one.sum()) for one in logits)]


def numbers(sums: StepVector, norm: float) -> dict[str, float]:
    tokens = int(sums.tokens)
    return {"loss": float(sums["loss_sum"]) / max(tokens, 1), "norm": norm, "tokens": tokens}


def other_moments(spec: Spec, bare: nn.Module) -> list[str]:
    """Moments of the spec that are of no trained parameter, and those that are not in it."""
    trained = {name for name, weight in bare.named_parameters() if weight.requires_grad}
    moments = {name for part in spec.values() for name in part if name.endswith(".exp_avg")}
    return sorted(moments ^ {f"{name}.exp_avg" for name in trained})


def save(launched: Launched, spec: Spec, root: Path, step: int, writers: str) -> None:
    """A checkpoint, as a run writes it."""
    state_file = {"format": 1, "run_id": RUN, "step": step, "evaluation": None}
    small = {"config.json": b"{}", "trainer_state.json": json.dumps(state_file).encode() + b"\n"}
    ranks: Any = OnTheHost(launched.ranks)
    begun = write.begin(root, step, spec, small, ranks, RUN)
    assert not isinstance(begun, write.FailedSave), begun
    pieces = launched.engine.pieces(spec, writing=True, replicas_shared=writers == "all")
    if writers == "rank0":
        extents = write.collect_pieces(begun, pieces, ranks)
    else:
        extents = write.write_pieces(begun, pieces)
    done = write.commit(begun, extents, None, ranks)
    assert not isinstance(done, write.FailedSave), done


def load(launched: Launched, spec: Spec, root: Path, steps: int) -> None:
    """The newest checkpoint into the engine."""
    found = read.find(root, RUN, launched.ranks)
    assert isinstance(found, ResumePoint)
    read.load_tensors(found, spec, launched.engine.pieces(spec, writing=False), launched.ranks)
    launched.engine.finish_loading(steps)


def files(root: Path) -> dict[str, str]:
    """Digests of the tensor files of the only checkpoint."""
    return {
        path.name: xxhash.xxh3_128_hexdigest(path.read_bytes())
        for path in sorted(root.glob("step-*/*.safetensors"))
    }


def reference(case: Case) -> list[dict[str, float]]:
    """Plain PyTorch in fp32: the mean over all trained tokens of a step; a bad step is left out."""
    same_for_all = replace(
        case, strategy="", precision="", micro=0, load="", save="", checkpointing="", evaluate=False
    )
    return [numbers for numbers, _ in plain(replace(same_for_all, discard=False))]


def evaluations(case: Case) -> list[list[float]]:
    """What `evaluate` finds before each step, in plain PyTorch."""
    return [found for _, found in plain(case)]


@cache
def plain(case: Case) -> list[tuple[dict[str, float], list[float]]]:
    """Numbers of each step, and what an evaluation before it finds."""
    bare = build(case.model)
    own = {n: p for n, p in bare.named_parameters() if p.requires_grad}
    decayed = [p for n, p in own.items() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in own.items() if p.ndim < 2 or "embed" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=uneven.RATE, betas=(0.9, 0.95))
    found = []
    for step in range(case.steps):
        before = evaluated(bare)
        ids, labels = (torch.from_numpy(part).long() for part in uneven.blocks(step))
        logits = bare(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        limit = case.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(list(own.values()), limit)
        for group in optimizer.param_groups:
            group["lr"] = uneven.RATE * factor(case, step)
        if not (case.forbid and step == case.bad_step):
            optimizer.step()
        optimizer.zero_grad()
        found.append(({"loss": loss.item(), "norm": norm.item()}, before))
    return found


def evaluated(bare: Any) -> list[float]:
    ids, labels = (torch.from_numpy(part).long() for part in uneven.blocks(100))
    with torch.no_grad():
        logits = bare(ids[:, :-1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        last = [bare(ids[:1, :length]).logits[:, -1].sum() for length in (3, 4)]
    return [float(loss), *map(float, last)]
