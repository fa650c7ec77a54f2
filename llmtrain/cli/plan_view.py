"""Print the result of `llmtrain plan`, in lines of 80 columns."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.cli.options import LABEL, busy, labelled, show
from llmtrain.distributed.plan.speed import HFU, across_nodes
from llmtrain.errors import UserError
from llmtrain.text import duration, short, size

if TYPE_CHECKING:
    from llmtrain.distributed.plan.strategy import PlannedLayout
    from llmtrain.tools.cost import Cost
    from llmtrain.tools.plan import Plan

_PARTS = {
    "parameters": "weights",
    "gradients": "grads",
    "optimizer": "optim",
    "working": "working",
    "activations": "activ",
    "head": "head",
    "reserve": "reserve",
}
_NAME = 16


def show_plan(
    config: str,
    overrides: Sequence[str],
    asked: tuple[int | None, int | str | None, *tuple[float | None, ...]],
    write: Path | None,
    *,
    as_json: bool,
) -> int:
    """Plan, print the plan and write the launch file; return the exit code.

    asked: devices, nodes, GiB of a device, GiB of a host, and, if any, prices of device and node
    write: the launch file; None = write none
    """
    from llmtrain.config.load import load_config
    from llmtrain.training.start.claim import split_rule

    devices, nodes, *others = asked
    known = None if isinstance(nodes, str) or devices is None else devices * (nodes or 1)
    rules = [split_rule(known)] if known else []
    loaded = load_config(config, overrides, rules)
    with busy("importing torch and transformers"):
        from llmtrain.tools.plan import launch_file, plan

        planned = plan(loaded, devices, nodes, *others)
    show([json.dumps(planned.to_json())] if as_json else plan_lines(planned))
    if planned.chosen is None:
        print(f"error: {planned.choice.reason}", file=sys.stderr)
        return UserError.exit_code
    if write is not None:
        notes = ", in place of the file that was there" * launch_file(planned, write)
        print(f"{'written':<{LABEL}}{write}{notes}", file=sys.stderr)
    return 0


def plan_lines(found: Plan) -> Iterator[str]:
    """Yield the tables, the choice and its reason, what else it needs, and predicted speeds."""
    shape, hardware, work = found.shape, found.hardware, found.work
    trained = "" if shape.trainable == shape.count else f", {short(shape.trainable)} trained"
    yield f"{'model':<{LABEL}}{short(shape.count)} parameters{trained}"
    nodes = f"{hardware.nodes} nodes × " if hardware.nodes > 1 else ""
    several = hardware.devices_per_node > 1
    kind = f"process{'es' * several} on the CPU" if hardware.cpu else f"device{'s' * several}"
    each = f"{hardware.device_bytes / 2**30:.1f} GiB"
    named = f", {hardware.device}" if hardware.device else ""
    yield from labelled("devices", f"{nodes}{hardware.devices_per_node} {kind} of {each}{named}")
    for other in found.waiting:
        yield from labelled("", other)
    yield from _cut(found)
    blocks = f"{found.batch.of(1):,} blocks of {work.seq_len:,} tokens a step"
    blocks += found.batch.later(1)
    yield from labelled("work", f"{blocks}, {work.precision} ({found.precision_why})")
    yield ""
    yield from _memory(found)
    yield ""
    yield from _layouts(found)
    yield ""
    yield from labelled("choice", found.choice.reason)
    yield from _outcome(found)
    one, run = size(found.checkpoint_bytes), size(found.disk_bytes)
    more = "" if found.steps else ", without those of keep_every: how many steps is not known"
    yield from labelled("disk", f"{one} a checkpoint, at most {run} at once in the run{more}")
    yield from _reference(found)
    yield from _speeds(found)
    yield from _duration(found)
    yield from cost_lines(found.cost)
    yield from _rates(found)


def _cut(plan: Plan) -> Iterator[str]:
    """Yield over how many devices each model is cut, and what a group across nodes costs."""
    hardware, one = plan.hardware, plan.chosen or plan.choice.candidates[0]
    if hardware.cut.processes == 1:
        return
    sizes = {key: size for key, size in hardware.cut.to_json().items() if size > 1}
    ways = ", ".join(f"{key.replace('_', ' ')} {size}" for key, size in sizes.items())
    count, each = hardware.groups, f"{hardware.cut.processes:,} devices"
    where = f"{count:,} models, each on {each}" if count > 1 else f"one model on {each}"
    yield from labelled("cut", f"{ways}: {where}; computed, not measured")
    if warned := across_nodes(plan.shape, plan.work, one.layout, hardware):
        yield from labelled("warning", "; ".join(warned))


def _duration(plan: Plan) -> Iterator[str]:
    """Yield how long all steps take, as far as their number and speed are known."""
    if plan.chosen is None:
        return
    if plan.seconds is not None:
        why = "at that speed, without evaluations and saves"
        yield from labelled("duration", f"{duration(plan.seconds)} for {plan.steps:,} steps, {why}")
    elif plan.steps is None:
        steps = "training.epochs: `llmtrain data inspect` says how many steps an epoch has"
        yield from labelled("duration", f"not known of {steps}")
    else:
        yield from labelled("duration", f"not predicted: {plan.steps:,} steps at a speed not known")


def cost_lines(cost: Cost | None) -> Iterator[str]:
    """Yield what the steps that are left cost, and what a lost machine does, as far as known."""
    if cost is None:
        return
    if cost.hours is None or cost.steps is None:
        unknown = f"not known at EUR {cost.hourly:,.2f} an hour; it needs {cost.needs}"
        yield from labelled("cost", unknown)
    else:
        made = f", {cost.done:,} of which are made" if cost.done else ""
        takes = f"EUR {cost.hours * cost.hourly:,.2f} for {duration(cost.hours * 3600)}"
        rate = f"EUR {cost.hourly:,.2f} an hour"
        yield from labelled("cost", f"{takes} up to step {cost.steps:,}{made}; {rate}")
        how = f"measured on these devices over {cost.measured:,} steps"
        how = how if cost.speed == "measured" else "computed, not measured"
        yield from labelled("", f"speed {how}")
        for count, seconds, what in (
            (cost.evaluations, cost.evaluation_seconds, "evaluations"),
            (cost.saves, cost.save_seconds, "saves"),
        ):
            share = cost.share(seconds)
            known = "not in it, as none was measured" if share is None else f"{share:.1%} of it"
            yield from labelled("", f"{count:,} {what}: {known}")
    if cost.lost_hours is None or cost.interval is None:
        return
    restart = "and a start, which was not measured"
    if cost.restart is not None:
        restart = f"and a start of {duration(cost.restart)}"
    price = f"EUR {cost.lost_hours * cost.hourly:,.2f}, {duration(cost.lost_hours * 3600)}"
    half = f"half of the {duration(cost.interval)} between two checkpoints"
    lost = f"{price} of all devices for each machine that dies: {half}, {restart}"
    yield from labelled("lost", lost)


def _memory(plan: Plan) -> Iterator[str]:
    """Yield the table of memory of one device, in GiB, or in MiB for small models."""
    from llmtrain.tools.plan import UNCOUNTED

    plans = [one.memory for one in plan.choice.candidates]
    most = max(one.total_bytes - one.parts["reserve"] for one in plans)
    unit, size = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    yield f"{unit:<{_NAME}}" + "".join(f"{word:>8}" for word in [*_PARTS.values(), "total"])
    unknown = UNCOUNTED if plan.uncounted else ()
    for one in plan.choice.candidates:
        parts = one.memory.parts
        shown = ["?" if part in unknown else f"{parts[part] / size:.1f}" for part in _PARTS]
        shown.append(f"{'>' if unknown else ''}{one.memory.total_bytes / size:.1f}")
        yield _mark(plan, one) + "".join(f"{word:>8}" for word in shown)


def _layouts(plan: Plan) -> Iterator[str]:
    head = f"{'recomputed':<12}{'micro':>6}{'accum':>7}{'host GiB':>10}{'tokens/s':>12}"
    yield f"{'':<{_NAME}}{head}   fits"
    fits = "?" if plan.uncounted else "yes"
    for one in plan.choice.candidates:
        layout, speed = one.layout, one.tokens_per_second
        row = f"{layout.activation_checkpointing:<12}{layout.micro_batch_size:>6,}"
        row += f"{layout.accumulation:>7,}{one.memory.host_bytes / 2**30:>10.1f}"
        rate = "-" if speed is None else f"{speed:,.0f}"
        yield f"{_mark(plan, one)}{row}{rate:>12}   {fits if one.fits else 'no'}"
    for one in plan.choice.candidates:
        if not one.fits:
            yield from labelled("would fit", f"{one.layout.strategy}: {one.remedy}")


def _mark(plan: Plan, one: PlannedLayout) -> str:
    mark = "*" if one is plan.chosen else " "
    return f"{mark} {one.layout.strategy:<{_NAME - 2}}"


def _outcome(plan: Plan) -> Iterator[str]:
    chosen = plan.chosen
    if chosen is None:
        for one in plan.suggestions:
            yield from labelled("try", one)
        return
    layout = chosen.layout  # its values are what `auto` stands for, as overrides to copy
    micro, recompute = layout.micro_batch_size, layout.activation_checkpointing
    keys = f"training.micro_batch_size={micro} model.activation_checkpointing={recompute}"
    last = " distributed.fsdp_sync=last" if layout.fsdp_sync == "last" else ""
    yield from labelled("keys", keys + last)
    host, available = chosen.memory.host_bytes, plan.hardware.host_bytes
    known = "" if available is None else f", of {size(available)}"
    yield from labelled("host", f"{size(host)} of memory on each node{known}")
    for one in plan.suggestions:
        yield from labelled("or", f"without offload: {one}")


def _reference(plan: Plan) -> Iterator[str]:
    """Yield what the reference of the pairs of answers costs, if there is one."""
    if plan.reference is None:
        return
    forwards = "one forward of each block of an epoch before step 1"
    if plan.work.answers == "feedback":
        forwards = "one forward of each block before step 1, and one more in each step"
    share = f"{forwards}, each {plan.reference:.2f} of a block in a step by the formula"
    yield from labelled("reference", f"{share}; 40 B a pair in each process and on the disk")


def _speeds(plan: Plan) -> Iterator[str]:
    if plan.chosen is None:
        return
    if not plan.speeds:
        why = "a CPU" if plan.hardware.cpu else "this device"
        why = "a model that cannot be counted" if plan.uncounted else why
        yield from labelled("speed", f"not predicted for {why}")
        return
    device = f", as of an {plan.hardware.device}" if plan.assumed else ""
    share = f"at an assumed {HFU:.0%} of the peak"
    yield from labelled("speed", f"on paper{device}, {share}, at this global batch, where it fits")
    rates = f"{'tokens/s':>12}{'a device':>12}{'efficiency':>12}"
    yield f"{'devices':>17}{'nodes':>7}{'accum':>7}{rates}"
    for one in plan.speeds:
        each = one.tokens_per_second / one.devices
        layout = f"{one.devices:>17,}{one.nodes:>7,}{one.accumulation:>7,}"
        yield f"{layout}{one.tokens_per_second:>12,.0f}{each:>12,.0f}{one.efficiency:>12.0%}"


def _rates(plan: Plan) -> Iterator[str]:
    if plan.rates:
        yield from labelled("rates", "learning rate at another training.global_batch_size")
        yield f"{'batch':>17}{'linear rule':>14}{'root rule':>12}"
    for one in plan.rates:
        yield f"{one.global_batch_size:>17,}{one.linear:>14.2e}{one.root:>12.2e}"
