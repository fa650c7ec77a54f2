"""The stages of a start, in the order in which they can fail cheaply.

    processes → checkpoint (its JSON alone) → data → model → discarded pass → state

Every stage runs on all ranks. Rank 0 decides and writes; whatever one rank refuses, all refuse
together, so that none is left waiting in a collective.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from llmtrain import heartbeat
from llmtrain.checkpoint import retention
from llmtrain.checkpoint.read import Found
from llmtrain.checkpoint.retention import Policy
from llmtrain.config.binding import config_digest_values
from llmtrain.config.checks import check_batch
from llmtrain.config.schema import Config
from llmtrain.distributed.engines import accelerator as launching
from llmtrain.distributed.engines import state as tensors
from llmtrain.distributed.engines import zero
from llmtrain.distributed.engines.accelerator import Launched
from llmtrain.distributed.launch.environment import family, verify_launch
from llmtrain.distributed.launch.rendezvous import meet
from llmtrain.distributed.plan.memory import largest_block
from llmtrain.distributed.ranks import agreed, from_rank_zero, on_rank_zero
from llmtrain.errors import Problem, UserError
from llmtrain.metrics import memory
from llmtrain.model import recompute
from llmtrain.model.build import resolve_revision
from llmtrain.processes import cores
from llmtrain.training.optimizer import make_optimizer
from llmtrain.training.run import rng
from llmtrain.training.start import weights
from llmtrain.training.start.claim import Auto, Place
from llmtrain.training.start.isolation import hiding_attention
from llmtrain.training.start.planning import FROZEN, Planned, launch_kind, plan_start
from llmtrain.training.start.shared_directory import check_shared
from llmtrain.training.start.trial_pass import discarded_pass, fitting_micro_batch
from llmtrain.types import Ranks, Spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

_SMALL_FILES = 10  # of a checkpoint: configs, tokenizer, state, manifest
_SAME_MEMORY = "distributed.device_memory_gb=N, the smallest of the devices, plans alike on all"
_LIBRARIES = ("torch", "accelerate", "transformers", "tokenizers", "datasets", "pyarrow", "numpy")


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of this start, and what is frozen for them.

    decided_anew: an earlier start had another number of processes or kind of device, or froze
    what does not fit any more.
    """

    launched: Launched
    planned: Planned
    run_id: str
    auto: Auto
    versions: dict[str, str]
    decided_anew: bool


@dataclass(frozen=True, slots=True)
class ModelSide:
    """The model, bare and as prepared for its strategy; spec: of its checkpoints.

    held_before: bytes of the device, or of the process on a CPU, before there was a model.
    """

    bare: PreTrainedModel
    prepared: nn.Module
    spec: Spec
    micro_batch_size: int
    held_before: int


def run_directory(config: Config) -> Path:
    """Where the run lives."""
    return Path(str(config.run.dir))


def total_steps(config: Config) -> int:
    """Optimizer updates of the whole run."""
    assert config.training.steps is not None
    return config.training.steps


def policy(config: Config) -> Policy:
    """Which checkpoints are kept."""
    keep = config.checkpoint
    return Policy(keep.keep_last, keep.keep_every, keep.keep_best)


def start_processes(
    config: Config, place: Place | None, alone: AbstractContextManager[None], stack: ExitStack
) -> Processes:
    """Join the other ranks and check that all came, with the same config and versions.

    alone: around what ranks do before they are a group, see `Signals.alone`.
    """
    heartbeat.beat("joining the other processes")
    # Read before the group is there; rank 0 writes it only at the end of the start.
    frozen = Auto(run_directory(config), "").run.get("precision")
    precision, why = (frozen, "as this run began") if frozen else _precision(config)
    versions = {name: version(name) for name in ("llmtrain", *_LIBRARIES)}
    with alone:
        meeting = meet(timedelta(minutes=config.distributed.timeout_minutes))
        planned = agreed(meeting, lambda: _planned(config, precision, meeting.rank))
        _same_everywhere(config, meeting, planned, {"precision": precision, **versions})
        launched = _launched(config, planned, precision)
    stack.push(lambda kind, error, traceback: launching.close(failed=kind is not None))
    ranks = launched.ranks
    agreed(ranks, lambda: _verify(config, launched))
    check_shared(run_directory(config), ranks)
    run_id = from_rank_zero(ranks, lambda: place.run_id.encode() if place else b"").decode()
    kind = launch_kind(launched.strategy, launched.device.type, ranks.world_size)
    auto = Auto(run_directory(config), kind)
    anew = planned.decided_anew or (bool(auto.launches) and kind not in auto.launches)
    for key in FROZEN if planned.decided_anew else ():
        auto.launch.pop(key, None)
    auto.run.setdefault("precision", precision)
    for key in FROZEN[1:]:  # the micro-batch is tried on the device first
        auto.launch.setdefault(key, getattr(planned.layout, key))
    torch.set_num_threads(auto.launch.setdefault("threads", _threads()))
    if default := launching.default_config():
        _log.info("accelerate's own %s holds where no --config_file is given", default)
    _log.info("%s on %s, %s (%s)", launched.strategy, launched.device, precision, why)
    return Processes(launched, planned, run_id, auto, versions, anew)


def build_model(
    config: Config, processes: Processes, found: Found | None, revision: str | None
) -> ModelSide:
    """The model from one seed on every rank, an optimizer with empty state, a discarded pass."""
    heartbeat.beat("building the model")
    launched, ranks = processes.launched, processes.launched.ranks
    held_before = memory.reset_peak(launched.device)
    model = weights.built(config, run_directory(config), launched, found, revision)
    bare = model.bare
    recompute.apply(bare, processes.planned.layout.activation_checkpointing)
    optimizer = make_optimizer(bare, config.optimizer)
    spec = tensors.spec(bare, optimizer, int(config.checkpoint.shard_gb * 2**30))
    on_rank_zero(ranks, lambda: _check_room(config, spec, processes.run_id))
    prepared = weights.prepared(model, launched, optimizer)
    rng.seed_rank(config.run.seed, ranks.rank)
    launched.engine.create_state()
    hiding = hiding_attention(bare, prepared, config, processes.auto.run["precision"], launched)
    vocabulary = bare.config.get_text_config().vocab_size
    micro_batch_size = _micro_batch_size(config, processes, prepared, vocabulary, hiding)
    shape = (micro_batch_size, config.data.seq_len, vocabulary)
    if family(launched.strategy) != "zero":  # its backward reduces into the optimizer's own buffers
        discarded_pass(prepared, launched.engine, launched.device, shape, hiding)
    return ModelSide(bare, prepared, spec, micro_batch_size, held_before)


def base_revision(config: Config, processes: Processes, found: Found | None) -> str | None:
    """The commit of `model.from`, resolved and written down once for the run."""
    path, auto, ranks = config.model.from_, processes.auto, processes.launched.ranks
    if path is None or found:
        return None
    if "revision" not in auto.run:
        asked = config.model.revision
        body = from_rank_zero(ranks, lambda: json.dumps(resolve_revision(path, asked)).encode())
        auto.run["revision"] = json.loads(body)
        on_rank_zero(ranks, auto.save)
    revision: str | None = auto.run["revision"]
    return revision


def _launched(config: Config, planned: Planned, precision: str) -> Launched:
    layout = planned.layout
    return launching.make_accelerator(
        layout.strategy,
        precision,
        config.distributed,
        max_grad_norm=config.training.max_grad_norm,
        largest_block=largest_block(planned.shape),
        fsdp_sync=layout.fsdp_sync,
    )


def _precision(config: Config) -> tuple[str, str]:
    return launching.resolve_precision(config.training.precision)


def _verify(config: Config, launched: Launched) -> None:
    world_size = launched.accelerator.num_processes
    kind = launched.accelerator.distributed_type.value
    verify_launch(os.environ, config, world_size, kind, launched.strategy)
    problems = check_batch(config, world_size)
    if problems:
        raise UserError(*problems)


def _planned(config: Config, precision: str, rank: int) -> Planned:
    """What this machine can do: another rank's may have less memory, or no DeepSpeed."""
    try:
        planned = plan_start(config, run_directory(config), precision)
        strategy = planned.layout.strategy
        if family(strategy) == "zero":
            zero.refuse(strategy, cpu=planned.hardware.cpu)
    except UserError as error:
        if rank == 0:
            raise
        who = f"rank {rank} ({socket.gethostname()})"  # rank 0 speaks for it
        raise UserError(*error.problems, where=f"{who}: {error.where}") from error
    return planned


def _same_everywhere(
    config: Config, ranks: Ranks, planned: Planned, versions: Mapping[str, str]
) -> None:
    """Refuse ranks with another config, other versions, another device or another plan."""
    layout = {key: str(value) for key, value in asdict(planned.layout).items()}
    values = {key: str(value) for key, value in config_digest_values(config).items()}
    mine = {**values, **layout, **versions, "device": planned.hardware.device or "cpu"}
    bodies = [json.loads(body) for body in ranks.gather(json.dumps(mine).encode())]

    def compare() -> None:
        problems = [
            Problem(
                f"{key} on rank {rank}",
                other.get(key),
                f"{value}, as on rank 0",
                _SAME_MEMORY if key in layout else "",
            )
            for rank, other in enumerate(bodies)
            for key, value in mine.items()
            if other.get(key) != value
        ]
        if problems:
            raise UserError(*problems)

    agreed(ranks, compare)


def _threads() -> int:
    """This machine's cores, shared by its ranks (the launcher would give each rank one)."""
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _check_room(config: Config, spec: Spec, run_id: str) -> None:
    """Refuse to start what the disk cannot hold."""
    root = run_directory(config) / "checkpoints"
    size, files = tensors.bytes_of(spec), len(spec) + _SMALL_FILES
    retention.check_space(root, policy(config), total_steps(config), size, files, run_id)


def _micro_batch_size(
    config: Config,
    processes: Processes,
    prepared: nn.Module,
    vocabulary: int,
    hiding: str | None,
) -> int:
    """As planned; where it is `auto` and each rank can try alone, the device has the last word."""
    planned, launched = processes.planned.layout.micro_batch_size, processes.launched
    if config.training.micro_batch_size != "auto":
        return planned
    if family(launched.strategy) != "ddp":  # a rank that fails between collectives cannot rejoin
        processes.auto.launch["micro_batch_size"] = planned
    if "micro_batch_size" not in processes.auto.launch:
        rows = config.training.global_batch_size // launched.ranks.world_size
        fitting = [n for n in range(planned, 0, -1) if rows % n == 0]
        processes.auto.launch["micro_batch_size"] = fitting_micro_batch(
            prepared,
            launched.engine,
            launched.ranks,
            launched.device,
            fitting,
            config.data.seq_len,
            vocabulary,
            hiding,
        )
    size: int = processes.auto.launch["micro_batch_size"]
    return size
