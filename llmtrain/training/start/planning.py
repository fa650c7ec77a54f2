"""The plan of a start, made before anything is allocated: strategy, micro-batch, recomputation.

    config ─► model on paper ─► bytes by strategy ─► the fastest that fits this machine

Every rank plans by itself, from the config, the run directory and its own device. Once the ranks
can communicate they compare their plans. `llmtrain plan` uses the same functions for other
machines. A run whose device has no memory left reports the plan, the peak, and one change.
"""

import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from llmtrain.checkpoint import format as form
from llmtrain.checkpoint.candidates import is_foreign
from llmtrain.config.checks import (
    EXACT,
    inexact_optimizer,
    strategies_with,
    strategy_problem,
    unsplit,
)
from llmtrain.config.schema import Config, TrainTokenizer
from llmtrain.data.chat.template import template_tokens
from llmtrain.distributed.engines import pipeline, sequence, zero
from llmtrain.distributed.engines.accelerator import on_cpu
from llmtrain.distributed.launch.environment import allowed_strategies, family, model_cut
from llmtrain.distributed.plan import memory
from llmtrain.distributed.plan.balance import micro_batch_sizes
from llmtrain.distributed.plan.speed import across_nodes
from llmtrain.distributed.plan.strategy import (
    Choice,
    Cuts,
    choose_strategy,
    counted,
    layout_in_words,
    missing,
    remedy,
)
from llmtrain.errors import Problem, RunError, UserError, raise_any
from llmtrain.metrics.memory import host_bytes, peak_bytes
from llmtrain.model import tensor, trainable
from llmtrain.model.base import Base
from llmtrain.model.build import model_config, stored_config
from llmtrain.model.count import CannotCountError, count_saved, shorten
from llmtrain.model.cross_entropy import chunk_of
from llmtrain.model.shape import describe_parameters, on_meta
from llmtrain.model.tokenizer import SpecialTokens, special_tokens
from llmtrain.rundir import contents
from llmtrain.rundir.status import FrozenChoices, read_status
from llmtrain.text import first_line, size
from llmtrain.training.optimizer import algorithms
from llmtrain.training.run import Planned, Processes
from llmtrain.training.start import frozen
from llmtrain.training.start.small_trials import stage_problems
from llmtrain.types import WHOLE, ModelCut, ModelShape, Saved

_log = logging.getLogger(__name__)

# Most tokens of one forward if the micro-batch is `auto`: more are no faster.
MOST_TOKENS = {"cuda": 65_536, "cpu": 4_096}
_MANY_BLOCKS = 1_000  # more than any model has; they are built in a few seconds
_BYTES_OF_FP32 = 4
FROZEN = ("micro_batch_size", "activation_checkpointing", "fsdp_sync")
# torch writes "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of …"
_ASKED = re.compile(r"Tried to allocate ([\d.]+) ([KMG]i)?B")
_BYTES = {None: 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A model without weights.

    config: of transformers
    count: returns the bytes that a forward keeps, or raises CannotCountError
    cuts: whether the model may be cut over processes so
    """

    config: PreTrainedConfig
    shape: ModelShape
    count: memory.Count
    cuts: Cuts


def describe(
    config: Config, hardware: memory.Hardware, run_dir: Path | None = None, base: Base | None = None
) -> PaperModel:
    """Return the model that a config asks for, without its weights.

    run_dir: where a run has begun there, its own tokenizer and checkpoints are used
    base: what was decided for `model.from`; None = it is looked up if it is needed

    Raises UserError for a model or tokenizer that cannot be read, and for far more blocks than
    `hardware` could hold; RunError (75) if the Hub does not answer.
    """
    described = config_of_newest_checkpoint(config, run_dir)
    if described is None:
        if config.model.from_ and base is None:
            base = frozen.find_base(config.model)
        special = tokens_of(config, run_dir, base)
        how = {"scores": config.preference.scores}
        described = model_config(config.model, special, config.data.seq_len, base, **how)
    _check_depth(described, hardware)
    begun = run_dir if run_dir is not None and _has_begun(run_dir) else None
    tokens = frozen.trained_tokens(config, base, begun / contents.TOKENIZER if begun else None)
    adapter = frozen.resolve_adapter(config, FrozenChoices(begun, "")) if begun else config.adapter
    asked = (config.model.freeze, adapter, tokens)

    def count(arithmetic: str, checkpointing: str, tensor: int = 1) -> Saved:
        seq_len = config.data.seq_len
        return count_saved(described, seq_len, arithmetic, checkpointing, *asked, tensor)

    def cuts(cut: ModelCut) -> bool:
        return not list(cut_problems(config, described, cut))

    updates = partial(algorithms, config.optimizer)
    return PaperModel(
        described, describe_parameters(described, *asked, updates=updates), count, cuts
    )


def _check_depth(model_config: PreTrainedConfig, hardware: memory.Hardware) -> None:
    """Refuse a model with so many blocks that its weights cannot fit.

    The size is estimated from one block, since building all of them would take minutes. A host of
    unknown memory counts as having none.
    """
    described = model_config.get_text_config()
    number = getattr(described, "num_hidden_layers", 0)
    if number <= _MANY_BLOCKS:
        return
    one = describe_parameters(shorten(model_config, number, 1))
    block = sum(math.prod(each.shape) for each in one.parameters if each.block == 0)
    needed = number * block * _BYTES_OF_FP32
    host = hardware.nodes * (hardware.host_bytes or 0)
    room = host if hardware.cpu else host + hardware.devices * hardware.device_bytes
    if needed > room:
        expected = (
            f"a model that fits: its weights alone, {block:,} parameters in each block, are "
            f"{size(needed)}; devices and hosts have {size(room)}"
        )
        most = room // (block * _BYTES_OF_FP32)
        remedy = f"fewer blocks; the weights of {most:,} would fill all of the memory"
        name = described.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        raise UserError(Problem(f"model.config.{name}", number, expected, remedy))


def this_machine(config: Config, env: Mapping[str, str]) -> memory.Hardware:
    """Return the hardware of this start; `distributed.device_memory_gb` overrides its memory."""
    world = int(env.get("WORLD_SIZE", "1"))
    local = int(env.get("LOCAL_WORLD_SIZE", str(world)))
    host = host_bytes()
    asked, device = config.distributed.device_memory_gb, int(env.get("LOCAL_RANK", "0"))
    cpu = on_cpu()
    if asked != "auto":
        device_bytes = int(asked * 2**30)
    else:
        device_bytes = host // local if cpu else torch.cuda.mem_get_info(device)[1]
    name = None if cpu else torch.cuda.get_device_name(device)
    nodes, cut = max(1, world // local), model_cut(env, config.distributed)
    return memory.Hardware(device_bytes, host, local, nodes, name, cpu, cut)


def work(config: Config, precision: str, *, cpu: bool, run_dir: Path | None = None) -> memory.Work:
    """Return what a step of the config computes.

    precision: bf16 or fp32
    run_dir: where a run has begun there, its loss is computed as it began
    """
    training, device = config.training, "cpu" if cpu else "cuda"
    in_chunks = frozen.asked_kernel(training, run_dir) in ("auto", "chunked")
    recompute, sync = config.model.activation_checkpointing, config.distributed.fsdp_sync
    if training.same_bits:  # each micro-batch is added up by itself
        sync = "every"
    return memory.Work(
        seq_len=config.data.seq_len,
        global_batch_size=training.batch.unit,
        micro_batch_size=None if training.micro_batch_size == "auto" else training.micro_batch_size,
        precision=precision,
        activation_checkpointing=None if recompute == "auto" else recompute,
        fsdp_sync=None if sync == "auto" else sync,
        most_tokens=MOST_TOKENS[device],
        wrap_class=config.distributed.wrap_class,
        chunk=chunk_of(device) if in_chunks else None,
        pipeline_schedule=config.distributed.pipeline_schedule,
        answers=None if config.preference.scores else config.preference.answers,
        same_bits=training.same_bits,
    )


def plan_start(
    config: Config,
    run_dir: Path,
    precision: str,
    base: Base | None = None,
    env: Mapping[str, str] = os.environ,
) -> Planned:
    """Return the plan of this start. Raises UserError if no allowed strategy fits the device.

    base: as for `describe`
    env: variables of a rank

    Offloading, the last resort, is planned only if nothing else fits: computing its memory takes as
    long as the rest of the plan, at each start.
    """
    hardware = this_machine(config, env)
    four_bits = config.adapter.kind == "qlora"
    raise_any(trainable.missing_for_four_bits(cpu=hardware.cpu) if four_bits else ())
    model = describe(config, hardware, run_dir, base)
    of_bits = exact_problems(config, model.shape, cpu=hardware.cpu)
    raise_any([*cut_problems(config, model.config, hardware.cut), *of_bits])
    if (cut := hardware.cut).pipeline > 1:
        raise_any(pipeline.fill_problems(config, cut, hardware.groups))
        raise_any(pipeline.trained_problems(model.shape, cut, config.data.seq_len))
    asked = work(config, precision, cpu=hardware.cpu, run_dir=run_dir)
    allowed = strategies_for(config, env)
    without: dict[str, Problem] = {}  # the first reason why a strategy does not work here
    several = len(allowed) > 1 and hardware.cut.processes == 1  # of a cut model none is
    tried = [name for name in allowed if family(name) == "zero"] if several else []
    for name in tried:  # a single one is kept: the start later refuses it with the same message
        if problem := next(zero.missing_parts(name, cpu=hardware.cpu), None):
            without[name] = problem
    allowed = tuple(name for name in allowed if name not in without)
    resident = tuple(name for name in allowed if name not in memory.OFFLOADS)
    try:
        choose = partial(choose_strategy, model.shape, model.count, asked, hardware)
        choice = choose(resident or allowed, model.cuts)
        if choice.chosen is None and resident != allowed:
            choice = choose(allowed, model.cuts)
    except CannotCountError as error:
        layout = layout_by_tokens(allowed[0], asked, hardware)
        reason = f"memory was not planned: {error}"
        return Planned(layout, model.shape, hardware, None, reason)
    if choice.chosen is None:
        raise does_not_fit(choice, hardware, without)
    layout, needed = choice.chosen.layout, choice.chosen.memory
    if warned := across_nodes(model.shape, asked, layout, hardware):
        _log.warning("; ".join(warned))
    planned = Planned(layout, model.shape, hardware, needed, choice.reason)
    return _prefer_frozen(planned, model.count, asked, run_dir)


def cut_problems(
    config: Config, model_config: PreTrainedConfig, cut: ModelCut
) -> Iterator[Problem]:
    """Yield why a run cannot be cut over processes as its launch or its config says."""
    if config.preference.scores:
        keys = {tensor.KEY: cut.tensor, sequence.KEY: cut.sequence, pipeline.KEY: cut.pipeline}
        for key, count in keys.items():
            if count > 1:
                expected = "1 with preference.loss reward: a model that scores is not cut"
                yield Problem(key, count, expected, f"{key}=1")
        return
    if cut.tensor > 1:
        with_it = f"with {tensor.KEY} = {cut.tensor}"
        run_dir = None if config.run.dir is None else config.run_dir
        adapter, kernel = config.adapter.kind, frozen.asked_kernel(config.training, run_dir)
        if adapter != "none":
            expected = f"none {with_it}: the matrices of adapters are not cut"
            yield Problem("adapter.kind", adapter, expected, f"{tensor.KEY}=1")
        if (optimizer := config.optimizer.name) != "adamw":
            expected = f"adamw {with_it}: {optimizer} needs whole matrices"
            yield Problem("optimizer.name", optimizer, expected, f"{tensor.KEY}=1")
        yield from sequence.compile_problems(config, with_it, "exchanges")
        if kernel == "torch":
            expected = f"chunked or logits {with_it}: torch's kernel takes the whole head alone"
            if config.training.loss_kernel == "auto":
                expected += ", and auto.json has it"
            yield Problem("training.loss_kernel", kernel, expected, "training.loss_kernel=chunked")
        if config.checkpoint.background is True:
            expected = f"false {with_it}: its processes exchange columns for rows as they write"
            yield Problem("checkpoint.background", True, expected, "checkpoint.background=auto")
        for problem in tensor.refusals(on_meta(model_config), cut.tensor):
            of_model = config.model.from_ and problem.key.startswith("model.config.")
            yield replace(problem, remedy="a config.json without it") if of_model else problem
    if cut.sequence > 1:
        yield from sequence.problems(config, model_config, cut)
    if cut.pipeline > 1:
        yield from (problems := list(pipeline.problems(config, model_config, cut)))
        if not problems:
            yield from stage_problems(model_config, cut)


def exact_problems(config: Config, shape: ModelShape, *, cpu: bool) -> Iterator[Problem]:
    """Yield why this device or this model has no equal bits for `training.same_bits`."""
    if not config.training.same_bits:
        return
    if not cpu and not config.training.deterministic:
        expected = "true with training.same_bits on CUDA, where kernels add up in any order"
        yield Problem("training.deterministic", False, expected, "training.deterministic=true")
    if any(0 < one.used < 1 for one in shape.parameters):
        expected = "false for a mixture of experts: how its rows are grouped is not measured"
        yield Problem("training.same_bits", True, expected, "training.same_bits=false")


def strategies_for(config: Config, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the strategies that launch, optimizer and adapter allow, the preferred one first.

    Raises UserError if the launch names a strategy that the optimizer does not work under, or one
    that splits the weights of `adapter.kind: qlora`.
    """
    launched = allowed_strategies(env, config.distributed.strategy)
    if config.training.same_bits:
        launched = tuple(name for name in launched if name in EXACT)
    allowed = strategies_with(config.optimizer.name, launched)
    if not allowed:
        raise UserError(strategy_problem(config.optimizer.name, launched[0]))
    if config.training.same_bits and config.optimizer.name == "muon":
        if "ddp" not in allowed:
            raise UserError(inexact_optimizer("muon"))
        allowed = ("ddp",)
    if config.adapter.kind != "qlora":
        return allowed
    if "ddp" not in allowed:
        raise UserError(unsplit(allowed[0]))
    return ("ddp",)


def does_not_fit(
    choice: Choice, hardware: memory.Hardware, without: Mapping[str, Problem]
) -> UserError:
    """Return the error if nothing fits: what each strategy needs and what would make it fit.

    without: strategy that does not work on this machine → the first reason
    """
    width = max(len(one.layout.strategy) for one in choice.candidates)
    rows = [
        f"      {one.layout.strategy:<{width}}  {size(one.memory.total_bytes):>10}  {one.remedy}"
        for one in choice.candidates
    ]
    rows += [
        f"      {name:<{width}}  not on this machine: {one.key} = {one.value}, expected "
        f"{one.expected}; {one.remedy}"
        for name, one in without.items()
    ]
    table = "\n".join(["one of these to fit; each with what would make it fit", *rows])
    devices = f"{size(hardware.device_bytes)} a device, {hardware.devices} of them"
    near = choice.nearest_miss
    problem = Problem("device memory", devices, table, near.remedy if near else "")
    return UserError(problem, where=f"the memory plan: {choice.reason}")


def _prefer_frozen(
    planned: Planned, count: memory.Count, asked: memory.Work, run_dir: Path
) -> Planned:
    """Return the plan with the values that an earlier start of this kind froze, if they fit.

    Values that the config sets take precedence.
    """
    hardware, device = planned.hardware, "cpu" if planned.hardware.cpu else "cuda"
    kind = launch_kind(planned.layout.strategy, device, hardware.devices, hardware.cut)
    known = FrozenChoices(run_dir, kind).launch
    open_keys = [key for key in FROZEN if key in known and getattr(asked, key) is None]
    layout = replace(planned.layout, **{key: known[key] for key in open_keys})
    if layout == planned.layout:
        return planned
    share = asked.global_batch_size // hardware.groups
    layout = replace(layout, accumulation=share // layout.micro_batch_size)
    saved = counted(count, asked, layout, hardware)
    needed = memory.memory(planned.shape, saved, asked, layout, hardware)
    before = f"{layout_in_words(layout)} as an earlier start froze it (auto.json)"
    if lacking := missing(needed, hardware):
        reason = f"{planned.reason}; {before}, misses {size(lacking)}"
        return replace(planned, reason=reason, decided_again=True)
    return replace(planned, layout=layout, memory=needed, reason=before)


def launch_kind(strategy: str, device: str, world_size: int, cut: ModelCut = WHOLE) -> str:
    """Return the name under which `auto.json` freezes the choices for one kind of launch."""
    sizes = {"tensor": cut.tensor, "pipeline": cut.pipeline, "sequence": cut.sequence}
    cuts = "".join(f"/{name}-{size}" for name, size in sizes.items() if size > 1)
    return f"{strategy}/{device}/{world_size}{cuts}"


def layout_by_tokens(strategy: str, asked: memory.Work, hardware: memory.Hardware) -> memory.Layout:
    """Return the layout of a start if the memory of a forward is not known."""
    share = asked.global_batch_size // hardware.groups
    most = max(1, asked.most_tokens // asked.seq_len)
    fitting = micro_batch_sizes(share, most, hardware.cut, asked.pipeline_schedule)
    micro = asked.micro_batch_size or fitting[0]
    recompute, sync = asked.activation_checkpointing or "none", asked.fsdp_sync or "every"
    return memory.Layout(strategy, recompute, micro, share // micro, sync)


def config_of_newest_checkpoint(config: Config, run_dir: Path | None) -> PreTrainedConfig | None:
    """Return the model's config from a run's newest checkpoint, if `model.from` is set; else None.

    None for adapters, too: their checkpoints have none, and their base must be there.

    The path in `model.from` may no longer exist. A config that cannot be read is skipped: its
    checkpoint is verified and quarantined later.
    """
    if run_dir is None or config.model.from_ is None or config.adapter.kind != "none":
        return None
    root, run_id = run_dir / contents.CHECKPOINTS, read_status(run_dir).get("run_id")
    for name in form.complete_names(root):
        try:
            if not is_foreign(root / name, run_id):
                return stored_config(root / name)
        except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
            message = "the model's config in %s is not what memory is planned by: %s"
            _log.warning(message, name, first_line(error))
    return None


def _has_begun(run_dir: Path) -> bool:
    """Whether a run's tokenizer is final, as it is once `auto.json` exists.

    One that a refused start left behind may be deleted while ranks look for it.
    """
    return (run_dir / contents.AUTO).exists()


def tokens_of(config: Config, run_dir: Path | None, base: Base | None) -> SpecialTokens:
    """Return the length and special tokens of the tokenizer that a run has or will have.

    Raises UserError for a tokenizer that cannot be loaded.
    """
    asked, added = config.model.tokenizer, template_tokens(config.chat.template)
    if run_dir is not None and _has_begun(run_dir):
        return special_tokens(run_dir / contents.TOKENIZER)
    if isinstance(asked, TrainTokenizer):
        return SpecialTokens(asked.train + len(added), 0, 0, 0)  # the special one is its first
    path, revision = frozen.named_tokenizer(asked, base)
    return special_tokens(path, revision, added)


@contextmanager
def compared_with_plan(config: Config, processes: Processes) -> Iterator[None]:
    """Turn a lack of device memory in the block into a UserError that compares it with the plan.

    Where that cannot be computed, torch's error is raised.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        try:
            problem = _compare(config, processes, error)
        except (CannotCountError, UserError, RunError):  # the model can no longer be read
            problem = None
        if problem is None:
            raise
        raise UserError(problem) from error


def _compare(config: Config, processes: Processes, error: Exception) -> Problem | None:
    """Return the problem, with the smallest change that helps; None if memory was not planned."""
    planned, hardware = processes.planned, processes.planned.hardware
    if planned.memory is None:
        return None
    asked = work(config, processes.auto.run["precision"], cpu=hardware.cpu, run_dir=config.run_dir)
    model = describe(config, hardware, config.run_dir, processes.base)
    layout = planned.layout
    micro = processes.auto.micro_batch_size or layout.micro_batch_size  # as it was found by trying
    share = asked.global_batch_size // processes.launched.layout.data_size
    layout = replace(layout, micro_batch_size=micro, accumulation=share // micro)
    saved = counted(model.count, asked, layout, hardware)
    plan = memory.memory(model.shape, saved, asked, layout, hardware)
    peak, more = peak_bytes(processes.launched.device), asked_bytes(str(error))
    # The run needs at least what it had and asked for; the device refused it, so it was too much.
    needed = max(peak + more, hardware.device_bytes + 1)
    known = (model.shape, model.count, asked, layout, hardware, model.cuts)
    change = remedy(*known, needed - plan.total_bytes)
    summary, _, _ = first_line(error).partition(" Including ")  # how torch divided what it has
    return Problem(
        "device memory",
        f"{size(peak)} at the peak" + (f", and {size(more)} more asked for" if more else ""),
        f"at most the {size(plan.total_bytes)} planned for {layout_in_words(layout)} of "
        f"{size(hardware.device_bytes)} ({summary})",
        f"{change}; `llmtrain plan` shows other changes",
    )


def asked_bytes(text: str) -> int:
    """Return how many bytes the failed allocation asked for; 0 if the message does not tell."""
    match = _ASKED.search(text)
    return int(float(match[1]) * _BYTES[match[2]]) if match else 0
