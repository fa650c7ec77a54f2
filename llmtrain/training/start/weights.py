"""The model of a run: built by every rank, or only by rank 0 if it is sharded.

One seed gives the same weights on every rank, so every rank can build the model itself. But for a
sharded model, a copy for each rank may need more host memory than a machine has. So rank 0 alone
builds it, the others have it on the meta device, and its weights are sent once every rank has
allocated its part.

A run of adapters reads the weights of `model.from` at every start, since no checkpoint has them. A
run that is resumed finds its checkpoint before, and loads its state behind that:

    clean_up → read.find → (the model is built) → read.load_tensors

Random states are none of what is loaded: each step seeds its own draws. The trap: only in a new run
is it correct to find no checkpoint. If the record names one and none is left, the start is refused,
since it would silently train the same steps again.
"""

import copy
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from llmtrain import system
from llmtrain.agreement import agreed, from_rank_zero, on_rank_zero
from llmtrain.checkpoint import candidates, format as form, read
from llmtrain.checkpoint.disk import Patience, check_room
from llmtrain.checkpoint.read import ResumePoint
from llmtrain.config.binding import Bound, changes, refusals
from llmtrain.config.schema import Config, TrainingConfig
from llmtrain.data.manifest import DataManifest
from llmtrain.distributed.engines import fsdp, sequence, state as tensors
from llmtrain.distributed.engines.accelerator import Launched
from llmtrain.distributed.engines.pipeline import PipelineEngine
from llmtrain.distributed.launch.environment import family
from llmtrain.distributed.plan.balance import stages_of
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.metrics import memory
from llmtrain.model import attention, build, shape
from llmtrain.model.base import Base
from llmtrain.model.compile import compile_blocks
from llmtrain.model.loss import Head, LossModule, examine, why_wrapped
from llmtrain.model.tensor import add_up, cut_model
from llmtrain.model.tokenizer import special_tokens
from llmtrain.rundir import contents
from llmtrain.training.journal import Journal
from llmtrain.training.optimizer import make_optimizer
from llmtrain.training.run import ModelSide, Processes
from llmtrain.training.start import frozen, small_trials, trials
from llmtrain.training.start.claim import ClaimedRun, asked_resume
from llmtrain.types import Compiled

_log = logging.getLogger(__name__)

_SMALL_FILES = 10  # about how many a checkpoint has: configs, tokenizer, state, manifest


@dataclass(frozen=True, slots=True)
class Built:
    """A model before it is prepared.

    model: the one that is trained
    on_meta: whether `model` is on the meta device, and rank 0's `full_model` has its weights
    full_model: the model with its weights, if `on_meta` and on rank 0
    head: the head whose loss is computed from its input; None = from logits
    """

    model: PreTrainedModel
    on_meta: bool
    full_model: PreTrainedModel | None
    head: Head | None


def build_model(
    config: Config,
    processes: Processes,
    data: DataManifest,
    resume_point: ResumePoint | None,
    *,
    begins: bool,
) -> ModelSide:
    """Build the model and an optimizer with empty state, prepare them, and make a discarded pass.

    All ranks use the same seed for the weights.

    begins: whether it has the weights that the run begins with, even if a checkpoint is read later
    """
    system.beat("building the model")
    launched = processes.launched
    held_before = memory.reset_peak(launched.device)
    compiled = frozen.decide_compile(config, processes, document_mask=data.document_mask)
    built = _build(config, processes, resume_point, begins=begins)
    if processes.base is not None:
        on_rank_zero(launched.ranks, lambda: _keep_generation(built.model, resume_point))
    if data.chat is not None:
        end_turns(built.model, data.chat.ends)
    shape.apply_checkpointing(built.model, processes.planned.layout.activation_checkpointing)
    if count := compile_blocks(built.model, compiled):
        _log.info("compiling %s (%d modules) at their first forward", compiled, count)
    optimizer = make_optimizer(built.model, config.optimizer, fused=not config.training.same_bits)
    spec = tensors.spec(built.model, optimizer, int(config.checkpoint.shard_gb * 2**30))
    root, size = config.run_dir / contents.CHECKPOINTS, tensors.bytes_of(spec)
    room = (root, config.checkpoint, config.total_steps, size, len(spec) + _SMALL_FILES)
    on_rank_zero(launched.ranks, lambda: check_room(*room, processes.run_id))
    if (group := launched.groups.sequence) is not None:
        ours = sequence.exchanged(attention.attention, group)
        attention.use(built.model, attention.backend(built.model), ours)
    prepared = _prepare(config, built, processes, optimizer)
    launched.engine.create_state()
    precision = processes.auto.run["precision"]
    hiding = trials.hiding_attention(built.model, prepared, data, precision, launched)
    trial = _trial(config, built.model, prepared, launched, hiding, compiled, data)
    micro_batch_size = _micro_batch_size(config.training, processes, trial)
    if family(launched.strategy) != "zero":  # its backward reduces into the optimizer's buffers
        trials.discarded_pass(trial, micro_batch_size)
    beside = frozen.adapter_files(config, processes, built.model, spec)
    loss = next(part for part in prepared.modules() if isinstance(part, LossModule))
    return ModelSide(
        built.model, loss, prepared, spec, micro_batch_size, held_before, beside, compiled, hiding
    )


def _trial(
    config: Config,
    model: PreTrainedModel,
    prepared: nn.Module,
    launched: Launched,
    hiding: str | None,
    compiled: Compiled,
    data: DataManifest,
) -> trials.Trial:
    return trials.Trial(
        prepared,
        launched,
        config.data.seq_len,
        model.config.get_text_config().vocab_size,
        hiding,
        compiled=compiled != "off",
        rows=config.training.batch.unit // launched.layout.data_size,
        preference=config.preference if config.preference.answers else None,
        halves=data.packing == "single",
    )


def end_turns(model: PreTrainedModel, tokens: Sequence[int]) -> None:
    """Let generation end with these tokens too. `generation_config.json` of checkpoints has them.

    Without it, a model that was trained to end its turns writes on behind them.
    """
    config = model.generation_config
    if config is not None and tokens:
        known = config.eos_token_id
        ends = known if isinstance(known, list) else [] if known is None else [known]
        config.eos_token_id = [*ends, *(token for token in tokens if token not in ends)]


def _keep_generation(model: PreTrainedModel, resume_point: ResumePoint | None) -> None:
    """Give the model the generation config of the checkpoint, which rank 0 saves again.

    A model that is made from its config alone has none of its end tokens.
    """
    if resume_point and (resume_point.path / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(resume_point.path)


def _build(
    config: Config, processes: Processes, resume_point: ResumePoint | None, *, begins: bool
) -> Built:
    """Build the model from the seed, from `model.from`, or in the form of a checkpoint.

    A checkpoint's weights are loaded later. Collective. Raises UserError for a model that cannot be
    built or read, for weights that are not those that the run was planned with, and for a kernel
    that cannot compute the model's loss.
    """
    launched, base = processes.launched, processes.base
    ranks, adapted = launched.ranks, config.adapter.kind != "none"
    if resume_point:
        on_rank_zero(ranks, lambda: frozen.check_base(config, base, resume_point))
    torch.manual_seed(config.run.seed)
    described = agreed(ranks, lambda: _describe(config, base, resume_point))
    if launched.groups.sequence is not None:
        small_trials.check_small_parts(described, launched, config.data.seq_len)
    if launched.cut.tensor > 1:
        small_trials.check_cut(described, launched)
    asked = frozen.asked_kernel(config.training, config.run_dir)
    asked = "logits" if config.preference.scores else asked  # which predicts no token

    def load() -> tuple[PreTrainedModel, Head | str]:
        mine = copy.deepcopy(described)
        if base is None or not (begins or adapted):  # what it began with may no longer exist
            model = build.rebuild(mine, config.model)
        else:
            frozen.check_unchanged(base)
            _log.info("loading the weights of %s", base)
            model = build.build(mine, config.model, base)
        attention.install(model, config.data.seq_len)
        head = "logits are asked for" if asked == "logits" else examine(model)
        frozen.attach_adapters(config, processes, model, meta=False)
        return model, why_wrapped(model) or head

    if launched.sharding is None or ranks.world_size == 1:
        model, head = agreed(ranks, load)
        return Built(model, False, None, _choose(config, processes, asked, head))
    whole, head = agreed(ranks, lambda: load() if ranks.rank == 0 else (None, ""))
    name = from_rank_zero(ranks, lambda: attention.backend(whole) if whole else "")
    sent: Any = from_rank_zero(ranks, lambda: head)
    head = sent if isinstance(sent, str) else Head(*sent)
    bare = build.skeleton(described, config.model)
    attention.use(bare, name)
    frozen.attach_adapters(config, processes, bare, meta=True)
    if whole:
        bare.generation_config = whole.generation_config
    return Built(bare, True, whole, _choose(config, processes, asked, head))


def _choose(config: Config, processes: Processes, asked: str, head: Head | str) -> Head | None:
    """Freeze the kernel of the loss, and return the head that it is for. Collective."""
    kind = (processes.precision, config.training.z_loss)
    kernel, chosen = agreed(
        processes.launched.ranks, lambda: frozen.choose_kernel(asked, head, *kind)
    )
    processes.auto.loss_kernel = kernel
    return chosen


def _prepare(
    config: Config, built: Built, processes: Processes, optimizer: torch.optim.Optimizer
) -> nn.Module:
    """Return the module whose forward is called, prepared by the engine. Collective.

    Its weights are loaded. Afterwards `built.full_model` is on the meta device too.
    """
    launched, kernel = processes.launched, processes.auto.loss_kernel or "logits"
    z_loss = config.training.z_loss
    preference = config.preference if config.preference.answers else None
    loss = LossModule(built.model, built.head, kernel=kernel, z_loss=z_loss, preference=preference)
    if (group := launched.groups.sequence) is not None:
        loss.share_positions(partial(add_up, group=group))
    module: nn.Module = loss
    sent = fsdp.named_tensors(built.model) if built.on_meta else {}
    if (group := launched.groups.tensor) is not None:
        driven = tensors.names_of(optimizer, built.model)
        launched.engine.cuts = cut_model(loss, group)
        tensors.replace_parameters(optimizer, built.model, driven)
    if isinstance(launched.engine, PipelineEngine):
        anatomy = small_trials.anatomy(built.model.config)
        assert not isinstance(anatomy, str), anatomy  # the plan has refused it
        ranges = stages_of(processes.planned.shape, launched.cut, config.data.seq_len)
        schedule = config.distributed.pipeline_schedule
        launched.engine.cut_into_stages(loss, optimizer, anatomy, ranges, schedule)
    if built.on_meta:
        assert launched.sharding is not None
        module = fsdp.prepare_empty(module, optimizer, launched.sharding)
        cuts_and_tensors = launched.engine.cuts, launched.layout.tensor_rank, sent
        fsdp.share_weights(built.model, built.full_model, launched.device, *cuts_and_tensors)
        if built.full_model:
            built.full_model.to("meta")
    return launched.engine.prepare(module, built.model, optimizer)


def _describe(
    config: Config, base: Base | None, resume_point: ResumePoint | None
) -> PreTrainedConfig:
    """Return the transformers config of the model."""
    if resume_point and base and config.adapter.kind == "none":
        described = build.stored_config(resume_point.path)
    else:
        tokens = special_tokens(config.run_dir / contents.TOKENIZER)
        scores = config.preference.scores
        sizes = tokens, config.data.seq_len
        described = build.model_config(config.model, *sizes, base, scores=scores)
    if config.preference.answers and (noise := build.without_noise(described)):
        _log.info("dropout   %s: 0, as in every run on pairs of answers", ", ".join(noise))
    return described


def _micro_batch_size(config: TrainingConfig, processes: Processes, trial: trials.Trial) -> int:
    """Return the micro-batch size: under DDP with `auto` the largest that fits, else the planned.

    A size that an earlier start froze takes precedence over trying.
    """
    planned, launched = processes.planned.layout.micro_batch_size, processes.launched
    if config.micro_batch_size != "auto":
        return planned
    auto = processes.auto
    # A rank that fails between collectives cannot rejoin.
    if family(launched.strategy) != "ddp" or launched.cut.processes > 1:
        auto.micro_batch_size = planned
    if auto.micro_batch_size is not None:
        return auto.micro_batch_size
    rows = config.batch.unit // launched.layout.data_size
    size = trials.fitting_micro_batch(trial, [n for n in range(planned, 0, -1) if rows % n == 0])
    auto.micro_batch_size = size
    return size


def find_checkpoint(
    config: Config, processes: Processes, place: ClaimedRun, journal: Journal, patience: Patience
) -> ResumePoint | None:
    """Return the checkpoint to resume from, the same on all ranks; None in a new run.

    Reports checkpoints that it quarantines or removes as events. Raises UserError if a person must
    decide, RunError (74) if the disk does not answer, StoppedError at a stop.
    """
    system.beat("looking for a checkpoint")
    root = config.run_dir / contents.CHECKPOINTS
    asked, ranks = config.checkpoint, processes.launched.ranks
    on_rank_zero(ranks, lambda: _clear_away(root, journal))
    resume = asked_resume(asked.resume, os.environ)
    if resume == "never":  # `claim` has checked that there is no checkpoint
        _log.info("run       %s: a new run, as checkpoint.resume = never asks", config.run_dir)
        return None
    start = time.perf_counter()
    resume_point = read.find(
        root,
        processes.run_id,
        ranks,
        resume=resume,
        verify=asked.verify,
        supersede=asked.supersede,
        log=lambda event, detail: journal.event(event, 0, **detail),
        patience=patience,
    )
    agreed(ranks, lambda: _refuse_other(resume_point, config, processes.bound, place))
    if resume_point is None:
        if place.begun:
            journal.event("begun_again", 0, reason="no checkpoint was committed before")
        _log.info("run       %s: a new run", config.run_dir)
        return None
    known = form.step_of(place.checkpoint) if place.checkpoint else None
    if known and known > resume_point.step and resume == "auto":  # older than the record names
        missing = {"checkpoint": place.checkpoint, "used": resume_point.name}
        journal.event("checkpoint_missing", resume_point.step, **missing)
    seconds = time.perf_counter() - start
    why = "the newest valid one" if resume == "auto" else f"as checkpoint.resume = {resume} asks"
    _log.info(
        "run       %s: resuming at step %s from %s, %s (verified in %.1f s)",
        *(config.run_dir, f"{resume_point.step:,}", resume_point.name, why, seconds),
    )
    return resume_point


def load_state(
    processes: Processes, model: ModelSide, resume_point: ResumePoint, patience: Patience
) -> None:
    """Load the weights and the optimizer state of the checkpoint.

    Raises UserError if the checkpoint's tensors are not those of the model, RunError (74) and
    StoppedError as `find_checkpoint` does.
    """
    system.beat("loading the checkpoint")
    engine = processes.launched.engine
    pieces = engine.pieces(model.spec, writing=False)
    read.load_tensors(resume_point, model.spec, pieces, processes.launched.ranks, patience=patience)
    engine.finish_loading(resume_point.state["optimizer_steps"])


def _clear_away(root: Path, journal: Journal) -> None:
    """Remove the unfinished saves and deletions of a killed start."""
    if gone := candidates.clean_up(root):
        journal.event("leftovers_removed", 0, names=gone)


def _refuse_other(
    resume_point: ResumePoint | None, config: Config, bound: Bound, place: ClaimedRun
) -> None:
    """Refuse a checkpoint of another config, and none where the record of the run names one.

    The former even if config.yaml was lost or changed.
    """
    if resume_point is not None:
        changed = changes(resume_point.state["config"], bound.binding)
        raise_any(refusals(changed, config.checkpoint.accept_changes, f"as in {resume_point.name}"))
    elif place.checkpoint is not None:
        root = config.run_dir / contents.CHECKPOINTS
        expected = f"{place.checkpoint}, which the record of the run names"
        remedy = "put it back, or begin again in another run.dir"
        raise UserError(Problem(str(root), "no checkpoint", expected, remedy))
