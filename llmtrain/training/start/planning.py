"""What a start decides before anything is allocated: strategy, micro-batch, what is recomputed.

    config ─► model on paper ─► bytes by strategy ─► the fastest that fits this machine

Every rank reckons by itself, from the config, the run directory and its own device; they compare
once they can talk. The same functions serve `llmtrain plan`, for machines that are not there.
"""

from __future__ import annotations

import importlib.resources
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from llmtrain.checkpoint import format as form
from llmtrain.config.schema import Config, TrainTokenizer
from llmtrain.distributed.engines import zero
from llmtrain.distributed.engines.accelerator import on_cpu
from llmtrain.distributed.launch.environment import allowed_strategies, family
from llmtrain.distributed.plan.memory import (
    OFFLOADS,
    Count,
    Hardware,
    Layout,
    Work,
    arithmetic_of,
    memory,
)
from llmtrain.distributed.plan.remedies import gib, missing
from llmtrain.distributed.plan.strategy import Candidate, Choice, choose_strategy
from llmtrain.distributed.plan.strategy import described as layout_in_words
from llmtrain.errors import Problem, UserError
from llmtrain.metrics.memory import host_bytes
from llmtrain.model.build import model_config, stored_config
from llmtrain.model.count import CannotCountError, count_saved, shortened
from llmtrain.model.shape import census
from llmtrain.model.tokenizer import SpecialTokens, special_tokens
from llmtrain.rundir import contents
from llmtrain.rundir.auto import Auto
from llmtrain.rundir.status import read_status
from llmtrain.training.run.opened import Planned
from llmtrain.types import ModelShape, Saved

_log = logging.getLogger(__name__)

# Tokens of one forward where the micro-batch is `auto`: more is no faster.
MOST_TOKENS = {"cuda": 65_536, "cpu": 4_096}
_MANY_BLOCKS = 1_000  # more than any model has; they are built in a few seconds
_BYTES_OF_FP32 = 4
FROZEN = ("micro_batch_size", "activation_checkpointing", "fsdp_sync")


@dataclass(frozen=True, slots=True)
class Described:
    """A model on paper. count: bytes that a forward keeps; raises CannotCountError."""

    shape: ModelShape
    count: Count


def described(config: Config, hardware: Hardware, run_dir: Path | None = None) -> Described:
    """The model that a config asks for, without its weights.

    run_dir: of a run that began, whose own tokenizer and checkpoints count. Raises UserError for a
    model or tokenizer that cannot be read, and for far more blocks than `hardware` could hold.
    """
    found = config_of_newest_checkpoint(config, run_dir)
    if found is None:
        found = model_config(config.model, _tokens(config, run_dir), config.data.seq_len)
    _check_depth(found, hardware)

    def count(arithmetic: str, checkpointing: str) -> Saved:
        seq_len, freeze = config.data.seq_len, config.model.freeze
        return count_saved(found, seq_len, arithmetic, checkpointing, freeze)

    return Described(census(found, config.model.freeze), count)


def _check_depth(model_config: Any, hardware: Hardware) -> None:
    """Refuse very many blocks by what one of them weighs: to build them all takes minutes.

    A host whose memory is not known counts as one without any.
    """
    number = getattr(model_config.get_text_config(), "num_hidden_layers", 0)
    if number <= _MANY_BLOCKS:
        return
    one = census(shortened(model_config, number, 1))
    block = sum(math.prod(each.shape) for each in one.parameters if each.block == 0)
    needed = number * block * _BYTES_OF_FP32
    host = hardware.nodes * (hardware.host_bytes or 0)
    there = host if hardware.cpu else host + hardware.devices * hardware.device_bytes
    if needed > there:
        expected = (
            f"a model that fits: its weights alone, {block:,} parameters in each block, are "
            f"{gib(needed)}; devices and hosts have {gib(there)}"
        )
        most = there // (block * _BYTES_OF_FP32)
        remedy = f"fewer blocks; the weights of {most:,} would fill all of the memory"
        raise UserError(Problem("model.config.num_hidden_layers", number, expected, remedy))


def this_machine(config: Config, env: Mapping[str, str]) -> Hardware:
    """The devices that this start was given, or as `distributed.device_memory_gb` says."""
    world = int(env.get("WORLD_SIZE", "1"))
    local = int(env.get("LOCAL_WORLD_SIZE", str(world)))
    host = host_bytes()
    asked, cpu = config.distributed.device_memory_gb, on_cpu()
    if asked != "auto":
        device_bytes = int(asked * 2**30)
    elif cpu:
        device_bytes = host // local
    else:
        device_bytes = torch.cuda.mem_get_info(int(env.get("LOCAL_RANK", "0")))[1]
    name = None if cpu else torch.cuda.get_device_name(int(env.get("LOCAL_RANK", "0")))
    return Hardware(device_bytes, host, local, max(1, world // local), name, cpu)


def work(config: Config, precision: str, *, cpu: bool) -> Work:
    """What a step of the config computes. precision: bf16 or fp32."""
    training = config.training
    recompute, sync = config.model.activation_checkpointing, config.distributed.fsdp_sync
    return Work(
        seq_len=config.data.seq_len,
        global_batch_size=training.global_batch_size,
        micro_batch_size=None if training.micro_batch_size == "auto" else training.micro_batch_size,
        precision=precision,
        activation_checkpointing=None if recompute == "auto" else recompute,
        fsdp_sync=None if sync == "auto" else sync,
        most_tokens=MOST_TOKENS["cpu" if cpu else "cuda"],
        wrap_class=config.distributed.wrap_class,
    )


def plan_start(config: Config, run_dir: Path, precision: str) -> Planned:
    """The layout of this start. Raises UserError when no allowed strategy fits the device.

    Offloading, which is the last resort, is reckoned only where nothing else fits: what it would
    keep costs as much to count as the rest of the plan, and at each start.
    """
    hardware = this_machine(config, os.environ)
    model = described(config, hardware, run_dir)
    asked = work(config, precision, cpu=hardware.cpu)
    allowed, without = _possible(allowed_strategies(os.environ, config), cpu=hardware.cpu)
    resident = tuple(name for name in allowed if name not in OFFLOADS)
    try:
        choice = choose_strategy(model.shape, model.count, asked, hardware, resident or allowed)
        if choice.chosen is None and resident != allowed:
            choice = choose_strategy(model.shape, model.count, asked, hardware, allowed)
    except CannotCountError as error:
        return _unplanned(model.shape, asked, hardware, allowed, str(error))
    if choice.chosen is None:
        raise does_not_fit(choice, hardware, without)
    return _as_frozen(choice.chosen, choice.reason, model, asked, hardware, run_dir)


def _possible(allowed: tuple[str, ...], *, cpu: bool) -> tuple[tuple[str, ...], dict[str, Problem]]:
    """What DeepSpeed cannot do on this machine is no step of a ladder; why not.

    A strategy that somebody named stays: the start refuses it with the same words.
    """
    if len(allowed) == 1:
        return allowed, {}
    found = {name: list(zero.missing(name, cpu=cpu)) for name in allowed if family(name) == "zero"}
    without = {name: problems[0] for name, problems in found.items() if problems}
    return tuple(name for name in allowed if name not in without), without


def does_not_fit(
    choice: Choice, hardware: Hardware, without: Mapping[str, Problem] = MappingProxyType({})
) -> UserError:
    """What a person reads when nothing fits: what each strategy needs and what would help it.

    without: strategies that this machine cannot do, and the first reason.
    """
    width = max(len(one.layout.strategy) for one in choice.candidates)
    rows = [
        f"      {one.layout.strategy:<{width}}  {gib(one.memory.total_bytes):>10}  {one.remedy}"
        for one in choice.candidates
    ]
    rows += [
        f"      {name:<{width}}  not on this machine: {one.key} = {one.value}, expected "
        f"{one.expected}; {one.remedy}"
        for name, one in without.items()
    ]
    table = "\n".join(["one of these to fit; each with what would make it fit", *rows])
    found = f"{gib(hardware.device_bytes)} a device, {hardware.devices} of them"
    problem = Problem("device memory", found, table)
    return UserError(problem, where=f"the memory plan: {choice.reason}")


def _as_frozen(
    chosen: Candidate,
    reason: str,
    model: Described,
    asked: Work,
    hardware: Hardware,
    run_dir: Path,
) -> Planned:
    """What an earlier start of this kind froze counts if it fits, where the config is silent."""
    layout = chosen.layout
    kind = launch_kind(layout.strategy, "cpu" if hardware.cpu else "cuda", hardware.devices)
    known = Auto(run_dir, kind).launch
    open_now = {
        "micro_batch_size": asked.micro_batch_size is None,
        "activation_checkpointing": asked.activation_checkpointing is None,
        "fsdp_sync": asked.fsdp_sync is None,
    }
    frozen = {key: known[key] for key in FROZEN if open_now[key] and key in known}
    if all(getattr(layout, key) == value for key, value in frozen.items()):
        return Planned(layout, model.shape, hardware, chosen.memory, reason)
    layout = replace(layout, **frozen)
    share = asked.global_batch_size // hardware.devices
    layout = replace(layout, accumulation=share // layout.micro_batch_size)
    saved = model.count(
        arithmetic_of(layout.strategy, asked.precision), layout.activation_checkpointing
    )
    reckoned = memory(model.shape, saved, asked, layout, hardware)
    before = f"{layout_in_words(layout)} as an earlier start froze it (auto.json)"
    if lacking := missing(reckoned, hardware):
        reason = f"{reason}; {before}, misses {gib(lacking)}"
        return Planned(chosen.layout, model.shape, hardware, chosen.memory, reason, True)
    return Planned(layout, model.shape, hardware, reckoned, before)


def launch_kind(strategy: str, device: str, world_size: int) -> str:
    """Under which name `auto.json` freezes what belongs to a launch of one kind."""
    return f"{strategy}/{device}/{world_size}"


def _unplanned(
    shape: ModelShape, asked: Work, hardware: Hardware, allowed: tuple[str, ...], why: str
) -> Planned:
    """The first strategy that is allowed, with the micro-batch by tokens alone."""
    layout = layout_by_tokens(allowed[0], asked, hardware)
    return Planned(layout, shape, hardware, None, f"memory was not planned: {why}")


def layout_by_tokens(strategy: str, asked: Work, hardware: Hardware) -> Layout:
    """What a start takes where nobody knows how much a forward keeps."""
    share = asked.global_batch_size // hardware.devices
    most = max(1, asked.most_tokens // asked.seq_len)
    fitting = max(size for size in range(1, min(share, most) + 1) if share % size == 0)
    micro = asked.micro_batch_size or fitting
    return Layout(
        strategy,
        asked.activation_checkpointing or "none",
        micro,
        share // micro,
        asked.fsdp_sync or "every",
    )


def config_of_newest_checkpoint(config: Config, run_dir: Path | None) -> Any:
    """Of a run that began with weights from elsewhere, which may be gone by now; else None.

    A config that cannot be read is passed over: its checkpoint is verified and set aside later.
    """
    if run_dir is None or config.model.from_ is None:
        return None
    root, run_id = run_dir / contents.CHECKPOINTS, read_status(run_dir).get("run_id")
    for name in form.complete_names(root):
        if _is_of_another_run(root / name, run_id):
            continue
        try:
            return stored_config(root / name)
        except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            _log.warning(
                "the model's config in %s is not what memory is planned by: %s", name, first
            )
    return None


def _is_of_another_run(checkpoint: Path, run_id: str | None) -> bool:
    """Whether a checkpoint says so itself; one that cannot be read is looked at later."""
    try:
        found = form.state(checkpoint).get("run_id")
    except (form.DamagedError, OSError):
        return False
    return None not in (found, run_id) and found != run_id


def own_tokens(config: Config, run_dir: Path | None) -> SpecialTokens | None:
    """Of the tokenizer that the run has, will train, or finds in this package; else None."""
    asked = config.model.tokenizer
    # Only then is it final: what a refused start left behind is deleted while ranks look.
    if run_dir is not None and (run_dir / contents.AUTO).exists():
        return special_tokens(run_dir / contents.TOKENIZER)
    if isinstance(asked, TrainTokenizer):
        return SpecialTokens(asked.train, 0, 0, 0)  # its one special token is its first entry
    if asked == "sample":
        sample = importlib.resources.files("llmtrain.data.sample")
        with importlib.resources.as_file(sample) as folder:
            return special_tokens(folder)
    return None


def _tokens(config: Config, run_dir: Path | None) -> SpecialTokens:
    """The tokenizer's length and special tokens; only the length decides anything here."""
    asked = config.model.tokenizer
    if own := own_tokens(config, run_dir):
        return own
    if asked == "auto":  # of model.from, whose config says how long it is
        return SpecialTokens(0, None, 0, None)
    return special_tokens(str(asked))
