"""Plan memory, strategy and speed of a run, for this machine or for another one.

Only a model's config and tokenizer are downloaded. Devices are those of this machine, unless their
memory is given: then the speed is that of a device which is sold with that much memory, and the
plan names it. In a notebook the strategies are an HTML table: escaped, and without a script.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from pathlib import Path

from llmtrain.batch_size import BatchSize
from llmtrain.checkpoint.disk import most_at_once
from llmtrain.config.checks import check
from llmtrain.config.schema import Config
from llmtrain.distributed.engines.accelerator import on_cpu, resolve_precision
from llmtrain.distributed.launch.environment import model_cut, split_problems, strategy_problems
from llmtrain.distributed.launch.named import one_sided
from llmtrain.distributed.plan import strategy
from llmtrain.distributed.plan.memory import (
    FSDP,
    Hardware,
    Work,
    arithmetic_of,
    checkpoint_bytes,
    memory,
    shards,
)
from llmtrain.distributed.plan.speed import (
    device_by_memory,
    flops,
    forward_flops,
    machine_of,
    more_flops,
    step_time,
)
from llmtrain.errors import Problem, raise_any
from llmtrain.model import trainable
from llmtrain.model.count import CannotCountError
from llmtrain.text import size
from llmtrain.tools.cost import Cost, Price, cost
from llmtrain.tools.launch.file import launch_values, write_launch_file
from llmtrain.tools.launch.launch import node_counts, parse_nodes
from llmtrain.training.start import planning
from llmtrain.training.start.planning import PaperModel
from llmtrain.types import JsonMapping, JsonObject, ModelShape, Saved

_HEAD = ("strategy", "memory of a device", "recomputed", "micro-batch", "accumulation", "tokens/s")
_UNKNOWN = "?"


def table(plan: JsonMapping) -> str:
    """Return the table. plan: as `Plan.to_json` returns it"""
    rows = "".join(_html_row(_cells(one), "td") for one in plan["strategies"])
    return (
        f"<table><caption>{escape(plan['reason'])}</caption>"
        f"<thead>{_html_row((*_HEAD, 'fits'), 'th')}</thead><tbody>{rows}</tbody></table>"
    )


def _cells(one: JsonMapping) -> Iterator[str]:
    """Yield the cells of a strategy, in the order of the head."""
    yield f"{one['name']}, chosen" if one["chosen"] else one["name"]
    yield _memory(one["total_bytes"], one["parts"])
    yield one["activation_checkpointing"]
    yield f"{one['micro_batch_size']:,}"
    yield f"{one['accumulation']:,}"
    yield _UNKNOWN if one["tokens_per_second"] is None else f"{one['tokens_per_second']:,.0f}"
    if one["fits"] is False:
        yield f"no; try {one['remedy']}" if one["remedy"] else "no"
    else:
        yield _UNKNOWN if one["fits"] is None else "yes"


def _memory(total: int | None, parts: Mapping[str, int | None]) -> str:
    """Return the memory of a device, and what most of it is for."""
    known = {name: size for name, size in parts.items() if size}
    largest = sorted(known, key=lambda name: -known[name])[:3]
    shown = ", ".join(f"{name} {size(known[name])}" for name in largest)
    return f"{_UNKNOWN if total is None else size(total)} ({shown})"


def _html_row(cells: Iterable[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


_BATCHES = (0.5, 2, 4)  # times the config's global batch, for which learning rates are given
# Parts of the memory that are unknown if a forward cannot be counted: its casts, what it keeps,
# and the reserve, which is a share of the total.
UNCOUNTED = ("working", "activations", "reserve")
_MOST_GIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed on a number of devices.

    devices: on all nodes together
    accumulation: micro-batches of a device in a step
    tokens_per_second: of all devices together
    efficiency: share of the time that is spent on arithmetic
    """

    devices: int
    nodes: int
    accumulation: int
    tokens_per_second: float
    efficiency: float


@dataclass(frozen=True, slots=True)
class Rate:
    """The learning rate at another global batch, by the linear and by the square-root rule."""

    global_batch_size: int
    linear: float
    root: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run of a config would need.

    assumed: whether the kind of device was guessed from its memory
    precision_why: how the precision of `work` was found
    disk_bytes: of all checkpoints that exist at the same time
    batch: how many blocks a step has
    steps: None if `training.epochs` sets the length of the run
    seconds: the predicted duration of all steps; None if their number or speed is not known
    speeds: by number of devices; empty if not known
    reference: the operations of a block in the pass before the first step, as a share of those of a
        block in a step; None without a reference of answers
    cost: hours and price of the steps that are left; None if no price was given
    uncounted: why the parts named in `UNCOUNTED` are not known; they are 0 or too small then, so
        what is chosen may not fit
    waiting: a sentence on each number of machines that does not divide the batch
    """

    choice: strategy.Choice
    shape: ModelShape
    work: Work
    hardware: Hardware
    assumed: bool
    precision_why: str
    checkpoint_bytes: int
    disk_bytes: int
    batch: BatchSize
    steps: int | None
    seconds: float | None
    speeds: tuple[Speed, ...]
    rates: tuple[Rate, ...]
    reference: float | None = None
    uncounted: str | None = None
    cost: Cost | None = None
    waiting: tuple[str, ...] = ()

    @property
    def chosen(self) -> strategy.PlannedLayout | None:
        """The candidate that a run would choose; None if nothing fits."""
        return self.choice.chosen

    @property
    def suggestions(self) -> tuple[str, ...]:
        """Remedies that make the nearest miss fit, or need less.

        If something fits, they are empty, or adapters in place of an offload to the host.
        """
        near, chosen = self.choice.nearest_miss, self.chosen
        if chosen and chosen.layout.strategy.endswith("_offload"):
            return tuple(_adapters(self.choice.candidates[0], self.shape))
        return () if chosen or near is None else tuple(_suggestions(near, self.shape))

    def to_json(self) -> JsonObject:
        """Return the object that `llmtrain plan --json` prints."""
        chosen, hardware = self.chosen, self.hardware
        return {
            "chosen": chosen.layout.strategy if chosen else None,
            "reason": self.choice.reason,
            "fits": None if self.uncounted else chosen is not None,
            "devices": hardware.devices_per_node,
            "nodes": hardware.nodes,
            **hardware.cut.to_json(),
            "device_bytes": hardware.device_bytes,
            "host_bytes": hardware.host_bytes,
            "seq_len": self.work.seq_len,
            "global_batch_size": self.batch.of(1),
            **({"batch_sizes": self.batch.sizes} if self.batch.grows else {}),
            "parameters": self.shape.count,
            "trainable_parameters": self.shape.trainable,
            "strategies": [
                _row(one, one is chosen) | (_unknown(one) if self.uncounted else {})
                for one in self.choice.candidates
            ],
            "checkpoint_bytes": self.checkpoint_bytes,
            "disk_bytes": self.disk_bytes,
            **({} if self.reference is None else {"reference_share": self.reference}),
            "tokens_per_second": chosen.tokens_per_second if chosen else None,
            **({} if self.cost is None else {"cost": self.cost.to_json()}),
            **({"waiting": list(self.waiting)} if self.waiting else {}),
        }

    def _repr_html_(self) -> str:
        return table(self.to_json())


def plan(
    config: Config,
    devices: int | None = None,
    nodes: int | str | None = None,
    device_memory_gb: float | None = None,
    host_memory_gb: float | None = None,
    price: float | None = None,
    price_node: float | None = None,
) -> Plan:
    """Compute what `config` needs on `nodes` machines with `devices` devices each.

    devices: for each node; None = as many as this machine has
    nodes: None = 1; a text is MIN:MAX, machines that come and go, and the plan is of the largest
        number that divides the batch
    device_memory_gb: GiB of a device; None = that of this machine's devices
    host_memory_gb: GiB of a node's host; None = this machine's, or unknown if the memory of a
        device is given: then the plan only states what the host needs
    price, price_node: EUR an hour for a device, and for a node besides; None = nothing

    Raises UserError for a config that cannot be planned. If the run fits nowhere, the Plan has
    `chosen` None.
    """
    fixed = None if isinstance(nodes, str) else nodes
    counts = {"devices": devices, "nodes": fixed}
    sizes = {"device-memory-gb": device_memory_gb, "host-memory-gb": host_memory_gb}
    asked_price = Price(price, price_node)
    raise_any([*check(config), *_problems(counts, sizes), *asked_price.problems()])

    hardware = _hardware(config, devices, fixed or 1, device_memory_gb, host_memory_gb)
    waiting = list[str]()
    if isinstance(nodes, str):
        asked_nodes = parse_nodes(nodes, hardware.devices_per_node)
        numbers, waiting = node_counts(config.training, hardware.cut, asked_nodes)
        hardware = replace(hardware, nodes=numbers[-1])
    if config.adapter.kind == "qlora" and hardware.cpu:
        raise_any(trainable.missing_for_four_bits(cpu=True))
    cut, asked = hardware.cut, config.distributed.strategy
    problems = [
        *strategy_problems(asked, hardware.devices, cut),
        *split_problems(config.training, hardware.devices, cut),
    ]
    if asked == "hsdp":
        mesh = (hardware.nodes, hardware.devices_per_node // cut.weights)
        problems += one_sided("distributed.strategy", mesh)
    raise_any(problems)
    assumed = device_memory_gb is not None and hardware.device is not None
    planned = plan_on(config, planning.describe(config, hardware), hardware, assumed=assumed)
    if price is not None or price_node is not None:
        planned = replace(planned, cost=cost(config, asked_price, hardware, planned.seconds))
    return replace(planned, waiting=tuple(waiting))


def plan_on(config: Config, model: PaperModel, hardware: Hardware, *, assumed: bool) -> Plan:
    """Plan a model that was described already, on hardware that its batch can be split over.

    assumed: whether the kind of device was guessed from its memory

    If activations cannot be counted, the rest is computed, and `uncounted` is the reason.
    """
    precision, why = _precision(config, hardware)
    of_bits = planning.exact_problems(config, model.shape, cpu=hardware.cpu)
    raise_any([*planning.cut_problems(config, model.config, hardware.cut), *of_bits])
    work = planning.work(config, precision, cpu=hardware.cpu)
    allowed, uncounted = planning.strategies_for(config, {}), None
    try:
        by = (model.shape, model.count, work, hardware, allowed, model.cuts)
        choice = strategy.choose_strategy(*by)
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
        precision_why=why,
        checkpoint_bytes=size,
        disk_bytes=size * most_at_once(config.checkpoint, steps or 0),
        batch=config.training.batch,
        steps=steps,
        seconds=_seconds(config, model.shape, work, choice, hardware),
        speeds=() if uncounted else tuple(_speeds(model, work, choice, hardware)),
        rates=tuple(_rates(config)),
        reference=_reference(model.shape, work) if config.preference.has_reference else None,
        uncounted=uncounted,
    )


def _reference(shape: ModelShape, work: Work) -> float:
    """Return the operations of a forward as a share of those of a step, both of one block."""
    step = flops(shape, work.seq_len) + more_flops(shape, work)
    return forward_flops(shape, work.seq_len) / step


def _without_count(
    shape: ModelShape, work: Work, hardware: Hardware, allowed: tuple[str, ...], why: str
) -> strategy.Choice:
    """Return what is known of each strategy; a start uses the first, whatever it needs."""
    candidates = []
    for name in strategy.possible(shape, work, hardware, allowed):
        layout = planning.layout_by_tokens(name, work, hardware)
        known = memory(shape, Saved(0, 0, 0, 0), work, layout, hardware)
        lacking = strategy.missing(known, hardware)
        words = f"more than {size(known.total_bytes)} a device" if lacking else ""
        candidates.append(strategy.PlannedLayout(layout, known, lacking, words, None))
    return strategy.Choice(candidates[0], f"memory was not planned: {why}", tuple(candidates))


def _unknown(one: strategy.PlannedLayout) -> JsonObject:
    """Return the values of a row that change if the forward cannot be counted."""
    parts = {name: None if name in UNCOUNTED else size for name, size in one.memory.parts.items()}
    fits = None if one.fits else False
    return {"parts": parts, "total_bytes": None, "host_bytes": None, "fits": fits}


def _suggestions(near: strategy.PlannedLayout, shape: ModelShape) -> Iterator[str]:
    """Yield remedies that make the nearest miss fit, or need less memory.

    8-bit moments need a quarter of the memory; adapters have almost no gradients and moments.
    """
    moments, where = near.memory.parts["optimizer"], near.layout.strategy
    yield near.remedy
    if moments and where == "ddp" and {one.algorithm for one in shape.parameters} == {"adamw"}:
        yield f"optimizer.name=adamw_8bit would save {size(3 * moments // 4)} of {where}"
    yield from _adapters(near, shape)


def _adapters(near: strategy.PlannedLayout, shape: ModelShape) -> Iterator[str]:
    """Yield what adapters would save; in four bits a weight of 32 takes about an eighth."""
    parts, where = near.memory.parts, near.layout.strategy
    if not parts["optimizer"] or shape.adapted:
        return
    saved = parts["gradients"] + parts["optimizer"]
    yield f"adapter.kind=lora, which needs model.from, would save up to {size(saved)} of {where}"
    saved += 7 * parts["parameters"] // 8
    yield f"adapter.kind=qlora, on CUDA, would save up to {size(saved)} of {where}"


def _row(one: strategy.PlannedLayout, chosen: bool) -> JsonObject:
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


def _problems(
    counts: Mapping[str, int | None], sizes: Mapping[str, float | None]
) -> Iterator[Problem]:
    for name, count in counts.items():
        if count is not None and count < 1:
            yield Problem(f"--{name}", count, "a whole number ≥ 1")
    for name, asked in sizes.items():
        if asked is not None and not 0 < asked < _MOST_GIB:
            yield Problem(f"--{name}", asked, "a number of GiB above 0")


def _hardware(
    config: Config, devices: int | None, nodes: int, gib_each: float | None, host_gib: float | None
) -> Hardware:
    """Return this machine's hardware, or what was asked for in its place."""
    import torch

    host = None if host_gib is None else int(host_gib * 2**30)
    local = devices or (1 if on_cpu() else torch.cuda.device_count())
    if gib_each is not None:
        named, cut = device_by_memory(gib_each), model_cut({}, config.distributed)
        return Hardware(int(gib_each * 2**30), host, local, nodes, named, cut=cut)
    sizes = {"WORLD_SIZE": str(local), "LOCAL_WORLD_SIZE": str(local)}
    here = planning.this_machine(config, sizes)
    return replace(here, nodes=nodes, host_bytes=here.host_bytes if host is None else host)


def _precision(config: Config, hardware: Hardware) -> tuple[str, str]:
    """Return the precision that a run would choose, bf16 or fp32, and why; bf16 if it is absent."""
    asked = config.training.precision
    if asked != "auto" or hardware.cpu == on_cpu():
        return resolve_precision(asked)
    return "bf16", "assumed of devices that are not here"


def _speeds(
    model: PaperModel, work: Work, choice: strategy.Choice, hardware: Hardware
) -> Iterator[Speed]:
    """Yield the speed of the chosen layout on fewer devices and on all, where it fits.

    The global batch is always the same.
    """
    machine = None if hardware.cpu else machine_of(hardware.device)
    if choice.chosen is None or machine is None:
        return
    layout = choice.chosen.layout
    arithmetic = arithmetic_of(layout.strategy, work.precision)
    saved = model.count(arithmetic, layout.activation_checkpointing, hardware.cut.tensor)
    for local, nodes in _sizes(hardware):
        part = replace(hardware, devices_per_node=local, nodes=nodes)
        if part.devices % part.cut.processes:
            continue
        per_pass = part.groups * layout.micro_batch_size
        alone = layout.strategy in FSDP and shards(layout.strategy, part) < 2
        if work.global_batch_size % per_pass or (alone and part.cut.processes > 1):
            continue
        spread = replace(layout, accumulation=work.global_batch_size // per_pass)
        if not strategy.missing(memory(model.shape, saved, work, spread, part), part):
            predicted = step_time(model.shape, work, spread, part, machine)
            rate, share = predicted.tokens_per_second, predicted.efficiency
            yield Speed(local * nodes, nodes, spread.accumulation, rate, share)


def _seconds(
    config: Config, shape: ModelShape, work: Work, choice: strategy.Choice, hardware: Hardware
) -> float | None:
    """Return how long all steps take; a larger batch has more micro-batches, at another speed."""
    machine = None if hardware.cpu else machine_of(hardware.device)
    steps, batch, seconds = config.training.steps, config.training.batch, 0.0
    if choice.chosen is None or machine is None or steps is None:
        return None
    for begin, end in pairwise([*(first for first, _ in batch.sizes if first <= steps), steps + 1]):
        of_step = replace(work, global_batch_size=batch.of(begin))
        per_pass = hardware.groups * choice.chosen.layout.micro_batch_size
        layout = replace(choice.chosen.layout, accumulation=batch.of(begin) // per_pass)
        rate = step_time(shape, of_step, layout, hardware, machine).tokens_per_second
        seconds += (end - begin) * batch.of(begin) * work.seq_len / rate
    return seconds


def _sizes(hardware: Hardware) -> list[tuple[int, int]]:
    """Return (devices of a node, nodes): 1, 2, 4 … devices of one node, then 1, 2, 4 … nodes."""
    local, nodes = hardware.devices_per_node, hardware.nodes
    fewer, on_fewer = [(size, 1) for size in _doubling(local)], _doubling(nodes)
    return [*fewer, *((local, size) for size in on_fewer), (local, nodes)]


def _doubling(end: int) -> list[int]:
    """Return 1, 2, 4 … below `end`."""
    return [1 << bit for bit in range((end - 1).bit_length())]


def _rates(config: Config) -> Iterator[Rate]:
    batch, rate = config.training.global_batch_size, config.optimizer.learning_rate
    if not isinstance(batch, int):
        return
    for share in _BATCHES:
        if (other := batch * share) >= 1:
            yield Rate(int(other), rate * int(other) / batch, rate * (int(other) / batch) ** 0.5)


def launch_file(found: Plan, path: Path) -> bool:
    """Write the accelerate file of the chosen layout; return whether it replaced another file.

    Only for a plan that fits. Raises UserError if the file cannot be written.
    """
    assert found.chosen is not None
    values = launch_values(found.chosen.layout.strategy, found.hardware, found.work.precision)
    return write_launch_file(path, values)
