"""The processes of a start: they meet, plan, compare config and versions, and form a group."""

import logging
import os
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import version

import torch

from llmtrain import system
from llmtrain.agreement import agreed, from_rank_zero, gathered, on_rank_zero
from llmtrain.config.binding import Bound
from llmtrain.config.schema import Config
from llmtrain.distributed.engines import accelerator as launching, zero
from llmtrain.distributed.engines.accelerator import Launched
from llmtrain.distributed.launch.environment import family, model_cut, verify_launch
from llmtrain.distributed.plan.memory import largest_block
from llmtrain.distributed.ranks import meet
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.model.base import Base
from llmtrain.model.build import unknown_fields
from llmtrain.rundir.contents import check_shared
from llmtrain.rundir.status import FrozenChoices
from llmtrain.system import decide_threads
from llmtrain.training.run import Planned, Processes
from llmtrain.training.start import frozen
from llmtrain.training.start.claim import ClaimedRun, check_start
from llmtrain.training.start.planning import FROZEN, launch_kind, plan_start
from llmtrain.types import Ranks

_log = logging.getLogger(__name__)

_SAME_MEMORY = "distributed.device_memory_gb=N, the smallest of the devices, plans alike on all"
_LIBRARIES = ("torch", "accelerate", "transformers", "tokenizers", "datasets", "pyarrow", "numpy")


def start_processes(
    config: Config,
    bound: Bound,
    place: ClaimedRun,
    alone: AbstractContextManager[None],
    stack: ExitStack,
) -> Processes:
    """Join the other ranks, and check that all are there with the same config and versions.

    alone: context for the time before there is a group, see `Signals.alone`
    """
    system.beat("joining the other processes")
    wanted, exact = config.training.threads, config.training.same_bits and launching.on_cpu()
    # For products that are timed before it is known what this launch began with.
    torch.set_num_threads(decide_threads(wanted, None, os.environ, same_bits=exact).count)
    kernels = frozen.decide_kernels(config)
    stack.enter_context(frozen.using(kernels))
    versions = {name: version(name) for name in ("llmtrain", *_LIBRARIES)}
    with alone:
        meeting = meet(timedelta(minutes=config.distributed.timeout_minutes))
        wrong = unknown_fields(config.model)
        cut = model_cut(os.environ, config.distributed)
        on_rank_zero(meeting, lambda: check_start(config, meeting.world_size, cut, wrong))
        precision, why = decide_precision(config, meeting)
        base = frozen.decide_base(config.model, config.run_dir, meeting)
        rank = meeting.rank
        planned = agreed(meeting, lambda: plan_here(config, precision, kernels, base, rank))
        _same_everywhere(bound, meeting, planned, {"precision": precision, **versions})
        launched = _launch(config, planned, precision)
    stack.push(lambda kind, error, traceback: launching.close(failed=kind is not None))
    ranks = launched.ranks
    asked, made = config.distributed.strategy, launched.accelerator
    facts = (made.num_processes, made.distributed_type.value, launched.strategy)
    agreed(ranks, lambda: verify_launch(os.environ, asked, *facts))
    check_shared(config.run_dir, ranks)
    run_id = from_rank_zero(ranks, lambda: place.run_id)
    where = (launched.device.type, ranks.world_size, launched.cut)
    kind = launch_kind(launched.strategy, *where)
    auto = FrozenChoices(config.run_dir, kind)
    again = planned.decided_again or (bool(auto.launches) and kind not in auto.launches)
    auto.precision = precision
    _freeze(auto, planned, kernels)
    if base:
        frozen.keep_base(auto, config.model, base)
    begun = auto.threads
    threads = decide_threads(wanted, begun, os.environ, same_bits=exact)
    torch.set_num_threads(threads.count)
    auto.threads = threads.count
    decided = precision, why, threads, begun
    return Processes(bound, launched, planned, base, run_id, auto, versions, again, *decided)


def _freeze(auto: FrozenChoices, planned: Planned, kernels: frozen.Kernels) -> None:
    """Freeze the plan's layout and the kernels, where an earlier start has not, or no longer fits.

    The micro-batch is first tried on the device.
    """
    for key in FROZEN if planned.decided_again else ():
        auto.launch.pop(key, None)
    layout = asdict(planned.layout)
    for key in FROZEN[1:]:
        auto.launch.setdefault(key, layout[key])
    auto.attention_backend = kernels.attention
    if kernels.compiled is not None:
        auto.compile = kernels.compiled


def decide_precision(config: Config, ranks: Ranks) -> tuple[str, str]:
    """Return the precision of the run, bf16 or fp32, and the reason. Collective.

    On a CPU rank 0 answers for all: products are timed there, and ranks that differed by noise
    would be refused. A GPU answers for itself, since an older one must be refused.
    """

    def here() -> tuple[str, str]:
        # All ranks read it before the group exists; rank 0 writes it only afterwards.
        known = FrozenChoices(config.run_dir, "").precision
        if known and config.training.precision == "auto":
            return known, "as this run began"
        return launching.resolve_precision(config.training.precision)

    answer = from_rank_zero(ranks, lambda: here() if launching.on_cpu() else None)
    return (answer[0], answer[1]) if answer else here()


def _launch(config: Config, planned: Planned, precision: str) -> Launched:
    layout = planned.layout
    if default := launching.default_config():
        _log.info("accelerate's own %s holds where no --config_file is given", default)
    return launching.make_accelerator(
        layout.strategy,
        precision,
        config.distributed,
        max_grad_norm=config.training.max_grad_norm,
        largest_block=largest_block(planned.shape),
        gradient_bytes=4 * planned.shape.trainable,
        fsdp_sync=layout.fsdp_sync,
        same_bits=config.training.same_bits,
    )


def plan_here(
    config: Config,
    precision: str,
    kernels: frozen.Kernels,
    base: Base | None,
    rank: int,
    env: Mapping[str, str] = os.environ,
) -> Planned:
    """Plan for this rank's machine: machines may differ in memory, or lack DeepSpeed.

    env: variables of the rank
    """
    try:
        frozen.check_kernels(kernels)
        planned = plan_start(config, config.run_dir, precision, base, env)
        strategy = planned.layout.strategy
        if family(strategy) == "zero":
            zero.refuse(strategy, cpu=planned.hardware.cpu)
    except UserError as error:
        if rank == 0:
            raise
        who = f"rank {rank} ({socket.gethostname()})"  # since rank 0 reports the error
        raise UserError(*error.problems, where=f"{who}: {error.where}") from error
    return planned


def _same_everywhere(
    bound: Bound, ranks: Ranks, planned: Planned, versions: Mapping[str, str]
) -> None:
    """Refuse ranks with another config, other versions, another device or another plan."""
    layout = {key: str(value) for key, value in asdict(planned.layout).items()}
    values = {key: str(value) for key, value in bound.values.items()}
    mine = {**values, **layout, **versions, "device": planned.hardware.device or "cpu"}
    of_ranks = gathered(ranks, mine)

    def compare() -> None:
        problems = [
            Problem(
                f"{key} on rank {rank}",
                other.get(key),
                f"{value}, as on rank 0",
                _SAME_MEMORY if key in layout else "",
            )
            for rank, other in enumerate(of_ranks)
            for key, value in mine.items()
            if other.get(key) != value
        ]
        raise_any(problems)

    agreed(ranks, compare)
