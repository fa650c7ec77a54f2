"""Updates of small models on made-up pairs of answers, on one process or cut over several.

A case is a name of `cut.MODELS`, a loss and what is asked beside: `frozen` trains no head and no
embedding, `logits` computes the loss from these. All cases of a launch run one after another.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from helpers import answers, cut
from helpers.answers import Pair
from torch import Tensor

from llmtrain.agreement import gathered
from llmtrain.config.schema import DistributedConfig, OptimizerConfig, PreferenceConfig
from llmtrain.distributed.engines import sequence, stages, state
from llmtrain.distributed.engines.accelerator import Launched, close, make_accelerator
from llmtrain.distributed.engines.pipeline import PipelineEngine
from llmtrain.distributed.ranks import sum_over_ranks
from llmtrain.model import attention, tensor
from llmtrain.model.loss import Head, LossModule, examine
from llmtrain.pairs import PAIR_SLOTS
from llmtrain.training.optimizer import make_optimizer
from llmtrain.types import SLOTS, MicroBatch, StepVector

STEPS, ROWS, MICRO, LENGTH = 20, 8, 2, 48
CUTS = ("tensor_parallel", "sequence_parallel", "pipeline_parallel")


def rows_of(step: int) -> list[list[Pair]]:
    """A step's rows, of 0 to 2 pairs; every fifth step has a pair in its first row alone."""
    few = step % 5 == 4
    counts = [1 if few and row == 0 else 0 if few else (row + step) % 3 for row in range(ROWS)]
    return [
        answers.pairs(count, cut.VOCABULARY, 100 * step + row) for row, count in enumerate(counts)
    ]


def micro_batches(launched: Launched, step: int, asked: PreferenceConfig) -> list[MicroBatch]:
    """This process's part of a step's rows."""
    layout = launched.layout
    mine = rows_of(step)[layout.data_rank :: layout.data_size]
    return [of_rows(launched, mine[n : n + MICRO], asked) for n in range(0, len(mine), MICRO)]


def of_rows(launched: Launched, rows: list[list[Pair]], asked: PreferenceConfig) -> MicroBatch:
    layout = launched.layout
    sharing = layout.sequence_size > 1
    own = layout.positions(LENGTH) if sharing else slice(None)
    count = sum(map(len, rows))
    # A reference that is a number of each pair alone, wherever it is.
    sizes = [[-4.0 * len(half.answer) for half in pair] for row in rows for pair in row]
    more: dict[str, Tensor] = {}
    if asked.answers == "feedback":
        good = [pair[0].answer[0] % 2 == 0 for row in rows for pair in row]
        more["desirable"] = torch.tensor(good, dtype=torch.bool)
        more["divergence"] = torch.tensor(0.3, dtype=torch.float64)
    reference = torch.tensor(sizes, dtype=torch.float64).view(count, 2)
    pairs = answers.tensors(rows, reference, LENGTH, own, **more)
    row = answers.micro_batch(rows, LENGTH, attention.NAME, pairs)
    if not sharing:
        return row
    labels = row["labels"][:, own]
    trained = (labels.reshape(-1) != -100).nonzero()[:, 0]
    parts: MicroBatch = {"input_ids": row["input_ids"][:, own], "labels": labels}
    return attention.in_parts(row | parts | {"trained": trained}, own)


def of_all(launched: Launched, case: str) -> dict[str, Any]:
    """What a case gives: loss, margin and norm of each step, and the sums of some pairs behind."""
    engine = (
        type(launched.engine)(
            launched.accelerator, launched.sharding, launched.layout, launched.groups
        )
        if launched.strategy in ("ddp", "fsdp2")
        else launched.engine
    )
    launched = replace(launched, engine=engine)
    kind, loss, *others = case.split()
    asked = PreferenceConfig(loss=loss, beta=0.3)
    bare = cut.built(kind).to(torch.float32)
    found = examine(bare)
    attention.install(bare, LENGTH, log_reason=False)
    if (group := launched.groups.sequence) is not None:
        attention.use(bare, attention.NAME, sequence.exchanged(attention.attention, group))
    if "frozen" in others:
        bare.get_input_embeddings().requires_grad_(False)
        bare.get_output_embeddings().requires_grad_(False)
    optimizer = make_optimizer(bare, OptimizerConfig(learning_rate=1e-3))
    head = found if isinstance(found, Head) and "logits" not in others else None
    module = LossModule(bare, head, preference=asked)
    if group is not None:
        module.share_positions(lambda sums: tensor.add_up(sums, group))
    if (matrices := launched.groups.tensor) is not None:
        driven = state.names_of(optimizer, bare)
        engine.cuts = tensor.cut_model(module, matrices)
        state.replace_parameters(optimizer, bare, driven)
    if isinstance(engine, PipelineEngine):
        anatomy = stages.anatomy_of(cut.built(kind).eval())
        engine.cut_into_stages(module, optimizer, anatomy, [range(1), range(1, 3)], "1f1b")
    prepared = engine.prepare(module, bare, optimizer)
    engine.create_state()
    steps = [_step(launched, micro_batches(launched, step, asked)) for step in range(STEPS)]
    with engine.evaluating():
        held = of_rows(launched, rows_of(99)[:3], asked)
        each = prepared(each=True, **held)
        whole = prepared(**held)
    last = launched.layout.last_stage
    every = gathered(launched.ranks, [each.tolist(), whole.tolist()] if last else None)
    return {"steps": steps, "each": [one for one in every if one]}


def _step(launched: Launched, forwards: list[MicroBatch]) -> list[float]:
    """Make an update as `training.step.update` does. Returns loss, margin and norm."""
    layout, engine = launched.layout, launched.engine
    tells = layout.tells_loss and layout.sequence_rank == 0
    count = sum(len(one["pairs"].sizes) for one in forwards)
    told = torch.tensor(float(count if layout.leads else 0))
    total = sum_over_ranks(told).clamp(min=1)
    losses = list(engine.forward_backward(forwards, layout.replicas / total))
    assert all(one.dtype == torch.float64 and not one.requires_grad for one in losses)
    sums = torch.zeros(1 + len(PAIR_SLOTS), dtype=torch.float64)
    if tells:
        sums = sum(losses, sums)
    numbers = dict.fromkeys(SLOTS, 0.0) | {"squares": float(engine.squares())}
    vector = torch.tensor([*numbers.values(), float(told), *sums.tolist()], dtype=torch.float64)
    summed = StepVector(sum_over_ranks(vector), 1 + len(PAIR_SLOTS))
    engine.clip(summed, 1.0)
    engine.step(1.0, summed)
    loss, *slots = summed.data[len(SLOTS) + 1 :].tolist()
    of = dict(zip(PAIR_SLOTS, slots, strict=True))
    count = max(of["pairs"], 1.0)
    margin = (of["chosen_reward"] - of["rejected_reward"]) / count
    return [loss / count, margin, float(engine.norm(summed))]


def work(output: str, cases_text: str, strategy: str, cuts_text: str, precision: str) -> None:
    """On every rank: all cases; rank 0 writes what they give. cuts: of CUTS → processes"""
    asked = DistributedConfig(timeout_minutes=2.0, **json.loads(cuts_text))
    launched = make_accelerator(strategy, precision, asked)
    found = {case: of_all(launched, case) for case in json.loads(cases_text)}
    if launched.ranks.rank == 0:
        Path(output).write_text(json.dumps(found))
    close()


def given(output: str, strategy: str) -> None:
    """On every rank, in bf16: rewards with the reference that the model itself has computed."""
    launched = make_accelerator(strategy, "bf16", DistributedConfig(timeout_minutes=2.0))
    asked = PreferenceConfig(loss="dpo", beta=0.3)
    bare = cut.built("llama").to(torch.float32)
    head = examine(bare)
    attention.install(bare, LENGTH, log_reason=False)
    optimizer = make_optimizer(bare, OptimizerConfig(learning_rate=1e-3))
    module = LossModule(bare, head if isinstance(head, Head) else None, preference=asked)
    prepared = launched.engine.prepare(module, bare, optimizer)
    row = of_rows(launched, rows_of(99)[:3], asked)
    with launched.engine.evaluating():
        sums = prepared(each=True, **row)
        row["pairs"] = row["pairs"].changed(reference=sums)
        found = prepared(**row)
    of = dict(zip(PAIR_SLOTS, found[1:].tolist(), strict=True))
    if launched.ranks.rank == 0:
        rewards = [of["chosen_reward"], of["rejected_reward"]]
        Path(output).write_text(json.dumps([rewards, [str(sums.dtype), str(found.dtype)]]))
    close()
