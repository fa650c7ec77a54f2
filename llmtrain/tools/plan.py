"""Memory, strategy and speed of a config before a run, on this machine or on one that is not here.

Nothing is downloaded but a model's config and its tokenizer. What a device of the plan is: this
machine's, unless its memory is given; then a device that is sold with so much is assumed for the
speed, and named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmtrain.checkpoint.retention import Policy, most_at_once
from llmtrain.config.checks import check, check_batch
from llmtrain.config.schema import Config
from llmtrain.distributed.engines.accelerator import on_cpu, resolve_precision
from llmtrain.distributed.launch.environment import allowed_strategies
from llmtrain.distributed.launch.named import one_sided
from llmtrain.distributed.plan.memory import (
    Hardware,
    Work,
    arithmetic_of,
    checkpoint_bytes,
    memory,
)
from llmtrain.distributed.plan.remedies import gib, missing
from llmtrain.distributed.plan.speed import device_by_memory, machine_of, step_time
from llmtrain.distributed.plan.strategy import Candidate, Choice, choose_strategy, possible
from llmtrain.errors import Problem, UserError
from llmtrain.model.count import CannotCountError
from llmtrain.tools.plan_file import launch_values, write_launch_file
from llmtrain.training.start import planning
from llmtrain.training.start.planning import PaperModel
from llmtrain.types import ModelShape, Saved

_BATCHES = (0.5, 2, 4)  # of the config's global batch: what its learning rate would be there
# Where a forward cannot be counted: what it keeps, its casts, and the share of all that is reserve.
UNCOUNTED = ("working", "activations", "reserve")
_MOST_GIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of all devices. efficiency: share of the time that arithmetic takes."""

    devices: int
    nodes: int
    accumulation: int
    tokens_per_second: float
    efficiency: float


@dataclass(frozen=True, slots=True)
class Rate:
    """The learning rate at another global batch: by the linear rule and by that of the root."""

    global_batch_size: int
    linear: float
    root: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run of a config would take. speed: by number of devices, empty where not known.

    assumed: whether the device was named after its memory
    disk_bytes: of all checkpoints that are there at once
    steps: None where `training.epochs` says how long
    uncounted: why the parts `UNCOUNTED` are not known, and 0 or too little here; what is chosen may
        not fit then
    """

    choice: Choice
    shape: ModelShape
    work: Work
    hardware: Hardware
    assumed: bool
    checkpoint_bytes: int
    disk_bytes: int
    steps: int | None
    speeds: tuple[Speed, ...]
    rates: tuple[Rate, ...]
    uncounted: str | None = None

    @property
    def chosen(self) -> Candidate | None:
        """What the run would take; None where nothing fits."""
        return self.choice.chosen

    @property
    def suggestions(self) -> tuple[str, ...]:
        """What else would make the nearest miss smaller; empty where something fits."""
        near = self.choice.nearest_miss
        return () if self.chosen or near is None else tuple(_suggestions(near))

    def to_json(self) -> dict[str, Any]:
        """As `llmtrain plan --json` prints it."""
        chosen, hardware = self.chosen, self.hardware
        return {
            "chosen": chosen.layout.strategy if chosen else None,
            "reason": self.choice.reason,
            "fits": None if self.uncounted else chosen is not None,
            "devices": hardware.devices_per_node,
            "nodes": hardware.nodes,
            "device_bytes": hardware.device_bytes,
            "host_bytes": hardware.host_bytes,
            "seq_len": self.work.seq_len,
            "global_batch_size": self.work.global_batch_size,
            "strategies": [
                _row(one, one is chosen) | (_unknown(one) if self.uncounted else {})
                for one in self.choice.candidates
            ],
            "checkpoint_bytes": self.checkpoint_bytes,
            "disk_bytes": self.disk_bytes,
            "tokens_per_second": chosen.tokens_per_second if chosen else None,
        }


@dataclass(frozen=True, slots=True)
class _Asked:
    """Values in place of this machine's; None = this machine's."""

    devices: int | None
    nodes: int | None
    device_gib: float | None
    host_gib: float | None


def plan(
    config: Config,
    devices: int | None = None,
    nodes: int | None = None,
    device_memory_gb: float | None = None,
    host_memory_gb: float | None = None,
) -> Plan:
    """Compute what `config` needs on `nodes` machines with `devices` devices each.

    Memory in GiB, of a device and of a node's host. What is None is this machine's; the host of
    devices that are not here is not known then, and what it needs is stated alone. Raises UserError
    for a config that cannot be planned; what fits nowhere is a Plan with `chosen` None.
    """
    asked = _Asked(devices, nodes, device_memory_gb, host_memory_gb)
    if problems := [*check(config), *_problems(asked)]:
        raise UserError(*problems)

    hardware = _hardware(config, asked)
    if problems := [*check_batch(config.training, hardware.devices), *_mesh(config, hardware)]:
        raise UserError(*problems)
    assumed = device_memory_gb is not None and hardware.device is not None
    return plan_on(config, planning.describe(config, hardware), hardware, assumed=assumed)


def plan_on(config: Config, model: PaperModel, hardware: Hardware, *, assumed: bool) -> Plan:
    """The plan of a model that was described already, on hardware that its batch can be split over.

    assumed: whether the device was named after its memory. Where activations cannot be counted, the
    rest is computed, and `uncounted` gives the reason.
    """
    work = planning.work(config, _precision(config, hardware), cpu=hardware.cpu)
    allowed, uncounted = allowed_strategies({}, config.distributed.strategy), None
    try:
        choice = choose_strategy(model.shape, model.count, work, hardware, allowed)
    except CannotCountError as error:
        uncounted = str(error)
        choice = _without_count(model.shape, work, hardware, allowed, uncounted)
    steps, size = config.training.steps, checkpoint_bytes(model.shape)
    return Plan(
        choice=choice,
        shape=model.shape,
        work=work,
        hardware=hardware,
        assumed=assumed,
        checkpoint_bytes=size,
        disk_bytes=size * _checkpoints_at_once(config, steps),
        steps=steps,
        speeds=() if uncounted else tuple(_speeds(model, work, choice, hardware)),
        rates=tuple(_rates(config)),
        uncounted=uncounted,
    )


def _without_count(
    shape: ModelShape, work: Work, hardware: Hardware, allowed: tuple[str, ...], why: str
) -> Choice:
    """What is known of each strategy; a start takes the first, whatever it needs."""
    candidates = []
    for name in possible(shape, work, hardware, allowed):
        layout = planning.layout_by_tokens(name, work, hardware)
        known = memory(shape, Saved(0, 0, 0, 0), work, layout, hardware)
        lacking = missing(known, hardware)
        words = f"more than {gib(known.total_bytes)} a device" if lacking else ""
        candidates.append(Candidate(layout, known, not lacking, lacking, words, None))
    return Choice(candidates[0], f"memory was not planned: {why}", tuple(candidates))


def _unknown(one: Candidate) -> dict[str, Any]:
    """Of a row, where the forward cannot be counted."""
    parts = {name: None if name in UNCOUNTED else size for name, size in one.memory.parts.items()}
    fits = None if one.fits else False
    return {"parts": parts, "total_bytes": None, "host_bytes": None, "fits": fits}


def _suggestions(near: Candidate) -> Iterator[str]:
    """Moments in 8 bits take a quarter; adapters have next to no gradients and moments."""
    gradients, moments = (near.memory.parts[part] for part in ("gradients", "optimizer"))
    yield near.remedy
    if moments:
        where = near.layout.strategy
        yield f"8-bit Adam would save {gib(3 * moments // 4)} of {where}; it is not supported yet"
        saved = gib(gradients + moments)
        yield f"adapters (LoRA) would save up to {saved} of {where}; they are not supported yet"


def _row(one: Candidate, chosen: bool) -> dict[str, Any]:
    return {
        "name": one.layout.strategy,
        "chosen": chosen,
        "activation_checkpointing": one.layout.activation_checkpointing,
        "micro_batch_size": one.layout.micro_batch_size,
        "accumulation": one.layout.accumulation,
        "parts": dict(one.memory.parts),
        "total_bytes": one.memory.total_bytes,
        "host_bytes": one.memory.host_bytes,
        "fits": one.fits,
        "missing_bytes": one.missing_bytes,
        "remedy": one.remedy,
        "tokens_per_second": one.tokens_per_second,
    }


def _problems(asked: _Asked) -> Iterator[Problem]:
    for name, count in (("devices", asked.devices), ("nodes", asked.nodes)):
        if count is not None and count < 1:
            yield Problem(f"--{name}", count, "a whole number ≥ 1")
    for name, size in (("device", asked.device_gib), ("host", asked.host_gib)):
        if size is not None and not 0 < size < _MOST_GIB:
            yield Problem(f"--{name}-memory-gb", size, "a number of GiB above 0")


def _mesh(config: Config, hardware: Hardware) -> Iterator[Problem]:
    if config.distributed.strategy == "hsdp":
        mesh = (hardware.nodes, hardware.devices_per_node)
        yield from one_sided("distributed.strategy", mesh, "hsdp")


def _hardware(config: Config, asked: _Asked) -> Hardware:
    """This machine's devices, with what was asked for in their place."""
    local, nodes = asked.devices or _devices_here(), asked.nodes or 1
    here = planning.this_machine(config, {"WORLD_SIZE": str(local), "LOCAL_WORLD_SIZE": str(local)})
    hardware = replace(here, nodes=nodes)
    if asked.device_gib is not None:
        size, name = int(asked.device_gib * 2**30), device_by_memory(asked.device_gib)
        hardware = Hardware(size, None, local, nodes, name)
    if asked.host_gib is not None:
        hardware = replace(hardware, host_bytes=int(asked.host_gib * 2**30))
    return hardware


def _devices_here() -> int:
    import torch

    return 1 if on_cpu() else torch.cuda.device_count()


def _precision(config: Config, hardware: Hardware) -> str:
    """bf16 or fp32: as a run would decide, and bf16 on a device that is not here."""
    asked = config.training.precision
    if asked == "auto" and hardware.cpu == on_cpu():
        return resolve_precision(asked)[0]
    return "bf16" if asked == "auto" else asked


def _checkpoints_at_once(config: Config, steps: int | None) -> int:
    """How many checkpoints are there at once."""
    keep = config.checkpoint
    return most_at_once(Policy.of(keep), steps or 0)


def _speeds(model: PaperModel, work: Work, choice: Choice, hardware: Hardware) -> Iterator[Speed]:
    """The chosen layout on fewer devices and on all, where it fits, at the same global batch."""
    machine = None if hardware.cpu else machine_of(hardware.device)
    if choice.chosen is None or machine is None:
        return
    layout = choice.chosen.layout
    arithmetic = arithmetic_of(layout.strategy, work.precision)
    saved = model.count(arithmetic, layout.activation_checkpointing)
    for local, nodes in _sizes(hardware):
        per_pass = local * nodes * layout.micro_batch_size
        if work.global_batch_size % per_pass:
            continue
        part = replace(hardware, devices_per_node=local, nodes=nodes)
        spread = replace(layout, accumulation=work.global_batch_size // per_pass)
        if not missing(memory(model.shape, saved, work, spread, part), part):
            found = step_time(model.shape, work, spread, part, machine)
            rate, share = found.tokens_per_second, found.efficiency
            yield Speed(local * nodes, nodes, spread.accumulation, rate, share)


def _sizes(hardware: Hardware) -> Iterator[tuple[int, int]]:
    """(devices a node, nodes): 1, 2, 4 … up to what is planned for."""
    local = 1
    while local < hardware.devices_per_node:
        yield local, 1
        local *= 2
    nodes = 1
    while nodes < hardware.nodes:
        yield hardware.devices_per_node, nodes
        nodes *= 2
    yield hardware.devices_per_node, hardware.nodes


def _rates(config: Config) -> Iterator[Rate]:
    batch, rate = config.training.global_batch_size, config.optimizer.learning_rate
    for share in _BATCHES:
        if (other := batch * share) >= 1:
            yield Rate(int(other), rate * int(other) / batch, rate * (int(other) / batch) ** 0.5)


def launch_file(found: Plan, path: Path) -> bool:
    """Write the accelerate file of what was chosen; returns whether another one was there.

    Only for a plan that fits. Raises UserError where the file cannot be written.
    """
    assert found.chosen is not None
    values = launch_values(found.chosen.layout.strategy, found.hardware, found.work.precision)
    try:
        return write_launch_file(path, values)
    except OSError as error:
        expected = f"a file that can be written ({error.strerror})"
        raise UserError(Problem("--write", str(path), expected)) from error
