"""A hint is tried before a person does: it is refused neither by its own rule nor by another one.

Each bad input is given alone and beside each other one. Then what the message proposes is applied,
once every first proposal and once every last one, until nothing is refused. A hint that leads from
one refusal to the next, or back, fails.
"""

import itertools
import re

import pytest
from helpers.config import SMALLEST, written

from llmtrain.config.load import load_config
from llmtrain.errors import UserError
from llmtrain.training.start.claim import split_rule

BAD = {
    "batch and micro-batch": ("training.global_batch_size=10", "training.micro_batch_size=4"),
    "batch below the micro-batch": ("training.global_batch_size=4", "training.micro_batch_size=8"),
    "bestfit without a mask": ("data.packing=bestfit", "data.document_mask=false"),
    "checkpoints that are never written": ("checkpoint.keep_every=700",),
    "a broken warm-up": ("optimizer.warmup_steps=12.5",),
    "steps and epochs": ("training.epochs=2",),
    "no length": ("training.steps=null",),
    "the best of nothing": ("data.heldout=0", "checkpoint.keep_best=2"),
    "patience with nothing": ("data.heldout=0", "evaluation.patience=3"),
    "muon under zero": ("optimizer.name=muon", "distributed.strategy=zero2"),
    "eight bits, sharded": ("optimizer.name=adamw_8bit", "distributed.strategy=fsdp2"),
    "steps to profile": ("logging.profile_steps=[5, 3]",),
    "steps to profile behind the end": ("logging.profile_steps=[90, 120]",),
    "a whole model with a mask": ("training.compile=model", "data.document_mask=true"),
    "longer than the positions": ("model.config.max_position_embeddings=64", "data.seq_len=128"),
    "rows twice": ("model.pad_vocab_to=64", "model.config.vocab_size=64"),
    "fp16": ("training.precision=fp16",),
    "steps as a float": ("training.steps=1e3",),
    "steps with underscores": ("training.steps=1_000",),
    "a pattern that is no list": ("model.freeze=*embed*",),
    "patterns that are no list": ("model.freeze=[*embed*, *norm*]",),
    "targets without quotes": ("adapter.targets=*proj",),
    "a path without quotes": ("data.sources.0.revision=0012",),
    "no value": ("data.lanes=null",),
    "no targets": ("model={from: base}", "adapter={kind: lora, targets: []}"),
    "adapters beside frozen weights": (*("model={from: base, freeze: [a]}", "adapter.kind=lora"),),
    "qlora that is split": (
        *("model={from: base}", "adapter.kind=qlora", "distributed.strategy=fsdp2"),
    ),
    "an accepted change that is no key": ("checkpoint.accept_changes=[training.step]",),
}
_SETTING = re.compile(r"'?\b([a-z_]+(?:\.\w+)+)=(\[[^\]]*\]|\"[^\"]*\"|[^\s,;']+)")


def refusals(folder, overrides, processes):
    rules = [split_rule(processes)] if processes else []
    try:
        load_config(written(folder, SMALLEST), overrides, rules)
    except UserError as error:
        return list(error.problems)
    return []


def follow(overrides, problem, choice):
    """The overrides of somebody who does what the message proposes."""
    remedy = re.split(", without| on GPUs|; ", problem.remedy or problem.expected)[0]
    if "leave" in remedy or "remove" in remedy:
        return [one.replace("freeze: [a]", "") for one in overrides if given(one) != problem.key]
    if "did you mean" in remedy:
        return put(overrides, f"{problem.key}=[{remedy.split()[-1].rstrip('?')}]")
    found = _SETTING.findall(remedy) if "quote" in remedy else None
    told = re.split(r",? or |, and ", remedy)
    chosen = [one for one in told if "=" in one] or told
    found = found or _SETTING.findall(chosen[choice])
    if found:
        return put(overrides, *(f"{key}={value}" for key, value in found))
    value = re.sub(r"^.*quotes: |,.*quotes.*$", "", remedy if "[" in remedy else chosen[choice])
    return put(overrides, f"{problem.key}={value}")


def given(override):
    return override.partition("=")[0]


def put(overrides, *new):
    keys = {given(one) for one in new}
    return [*(one for one in overrides if given(one) not in keys), *new]


def lead_out(folder, overrides, processes, choice):
    seen: list[set[tuple[str, str]]] = []
    for _ in range(3):
        found = refusals(folder, overrides, processes)
        if not found:
            return
        now = {(problem.key, str(problem.value)) for problem in found}
        assert now not in seen, f"a circle: {overrides}: {[*map(str, found)]}"
        seen.append(now)
        for problem in found:
            overrides = follow(overrides, problem, choice)
    pytest.fail(f"{overrides}: still {[*map(str, found)]}")


@pytest.mark.parametrize("choice", [0, -1])
@pytest.mark.parametrize("processes", [0, 2, 3])
@pytest.mark.parametrize("case", BAD)
def test_a_hint_is_not_refused(tmp_path, case, processes, choice):
    overrides = list(BAD[case])
    assert refusals(tmp_path, overrides, processes)
    lead_out(tmp_path, overrides, processes, choice)


@pytest.mark.parametrize("choice", [0, -1])
@pytest.mark.parametrize("first", BAD)
def test_nor_is_it_beside_another_refusal(tmp_path, first, choice):
    for second in BAD.keys() - {first}:
        both = [*BAD[first], *BAD[second]]
        if len({given(one).partition(".")[0] for one in both}) == len(both):
            lead_out(tmp_path, both, 2, choice)


def test_there_is_a_case_of_each_kind():
    keys = set(itertools.chain.from_iterable(BAD.values()))
    assert len(keys) > 30
