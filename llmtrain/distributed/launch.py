"""Is this process where a launcher meant it to be? Asked before and after an `Accelerator` is made.

accelerate decides by the environment what a run becomes, and some launches become something else
without a word: one process instead of two, plain DDP instead of FSDP, or two processes that each
train alone. Standard library only, since the first check runs before torch is imported.

    accelerate launch --cpu --num_processes 2   →  one process, MASTER_ADDR set, no WORLD_SIZE
    MULTI_GPU + use_cpu, Accelerator()          →  two processes, each of them rank 0 of 1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from llmtrain.config.checks import check_batch
from llmtrain.errors import Problem, UserError

if TYPE_CHECKING:
    from llmtrain.config.schema import Config

_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_NOT_BUILT = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}
_SPLIT_MODEL = ("TP", "CP", "SP")
_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU")
# In the order in which a plan prefers them; the last three are never chosen, only asked for.
STRATEGIES = ("ddp", "hsdp", "fsdp2", "fsdp2_offload", "zero3_offload", "zero1", "zero2", "zero3")
_WHERE = "the launch"


def check_environment(env: Mapping[str, str], config: Config, processes: int | None = None) -> None:
    """Refuse an environment that cannot lead to the run that was asked for.

    processes: what `--processes` asked for, if it did. Before torch is imported.
    Raises UserError with every problem.
    """
    problems = [
        *_launcher(env),
        *_asked(env, processes),
        *_strategy(env),
        *_precision(env, config.training.precision),
        *(check_batch(config, world_size(env)) if not list(_launcher(env)) else ()),
    ]
    if problems:
        raise UserError(*problems, where=_WHERE)


def verify_launch(
    env: Mapping[str, str], config: Config, launched_processes: int, distributed_type: str
) -> None:
    """Refuse an `Accelerator` that is not what the launcher started.

    launched_processes: its `num_processes` · distributed_type: the name of its type.
    Before the model is built. Raises UserError with every problem.
    """
    problems: list[Problem] = []
    asked = world_size(env)
    if asked != launched_processes:
        expected = f"{asked} processes (WORLD_SIZE); every process thinks it is alone"
        remedy = "export ACCELERATE_USE_CPU=true, or make the GPUs visible to all processes"
        problems.append(Problem("accelerate's num_processes", launched_processes, expected, remedy))
    if distributed_type not in _KINDS:
        expected = (
            f"{', '.join(_KINDS)}: what distributed.strategy {config.distributed.strategy} is"
        )
        problems.append(Problem("accelerate's distributed_type", distributed_type, expected))
    if problems:
        raise UserError(*problems, where=_WHERE)


def world_size(env: Mapping[str, str]) -> int:
    """How many processes the launcher started; 1 without a launcher."""
    return _number(env, "WORLD_SIZE") or 1


def family(strategy: str) -> Literal["ddp", "fsdp", "zero"]:
    """Which engine a strategy is of: whole replicas, FSDP2 or DeepSpeed."""
    if strategy in ("fsdp2", "fsdp2_offload", "hsdp"):
        return "fsdp"
    return "zero" if strategy.startswith("zero") else "ddp"


def allowed_strategies(env: Mapping[str, str], config: Config) -> tuple[str, ...]:
    """Which strategies this launch leaves open, the preferred one first.

    A plain launch leaves all open, FSDP and DEEPSPEED name one; an explicit
    `distributed.strategy` is the only one. To be asked after `check_environment` and before there
    is an `Accelerator`, which writes ACCELERATE_USE_FSDP and _DEEPSPEED into the environment.
    """
    if config.distributed.strategy != "auto":
        return (config.distributed.strategy,)
    named = named_strategy(env)
    return STRATEGIES if named is None else (named,)


def named_strategy(env: Mapping[str, str]) -> str | None:
    """The strategy that the launch itself names; None: a plain launch, or one that is refused."""
    if _true(env, "ACCELERATE_USE_FSDP"):
        offloaded = _true(env, "FSDP_OFFLOAD_PARAMS")
        replicated = _number(env, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE") > 1
        return {
            (False, False): "fsdp2",
            (True, False): "fsdp2_offload",
            (False, True): "hsdp",
        }.get((offloaded, replicated))
    if _true(env, "ACCELERATE_USE_DEEPSPEED"):
        stage = env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")  # accelerate's default
        offloads = (_device(env, "OPTIMIZER"), _device(env, "PARAM"))
        return {
            ("1", ("none", "none")): "zero1",
            ("2", ("none", "none")): "zero2",
            ("3", ("none", "none")): "zero3",
            ("3", ("cpu", "cpu")): "zero3_offload",
        }.get((stage, offloads))
    return None


def _launcher(env: Mapping[str, str]) -> Iterator[Problem]:
    """Traces of a launcher that did not start this process, or started fewer than asked."""
    if "LOCAL_RANK" in env:
        return
    for name in _SIZES:
        if env.get(name, "1") != "1" and _number(env, name) != 1:
            expected = "1 or unset: no launcher started this process (LOCAL_RANK is not set)"
            yield Problem(name, env[name], expected, f"unset {name}, or use accelerate launch")
    if "MASTER_ADDR" in env and "WORLD_SIZE" not in env:
        expected = "several processes, but the launcher started one (WORLD_SIZE is not set)"
        remedy = (
            "distributed_type: MULTI_GPU with use_cpu: true, as in accelerate_configs/cpu.yaml "
            "(MULTI_CPU and --cpu start one process); without a launcher: unset MASTER_ADDR"
        )
        yield Problem("MASTER_ADDR", env["MASTER_ADDR"], expected, remedy)


def _asked(env: Mapping[str, str], processes: int | None) -> Iterator[Problem]:
    if processes is not None and processes != world_size(env):
        expected = f"{world_size(env)}, the number of processes that were started (WORLD_SIZE)"
        yield Problem("--processes", processes, expected)


def _strategy(env: Mapping[str, str]) -> Iterator[Problem]:
    for name, what in _NOT_BUILT.items():
        if env.get(name, "false").lower() == "true":
            expected = f"a plain launch: {what} is not supported yet"
            yield Problem(name, env[name], expected, "accelerate_configs/ddp.yaml")
    if env.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        sizes = {kind: _number(env, f"PARALLELISM_CONFIG_{kind}_SIZE") for kind in _SPLIT_MODEL}
        split = ", ".join(f"{kind.lower()} {size}" for kind, size in sizes.items() if size > 1)
        expected = "no parallelism_config: only data parallel training (ddp) is supported"
        remedy = "remove parallelism_config from the accelerate file"
        yield Problem("parallelism_config", split or None, expected, remedy)


def _precision(env: Mapping[str, str], asked: str) -> Iterator[Problem]:
    """accelerate exports `no` where nobody said anything, so `no` contradicts nothing."""
    launched = env.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched in ("fp16", "fp8"):
        expected = f"bf16 or 'no': {launched} is not offered"
        remedy = "bf16, or 'no' (fp32) on GPUs older than Ampere"
        yield Problem("mixed_precision", launched, expected, remedy)
    elif launched == "bf16" and asked == "fp32":
        expected = "the bf16 that the accelerate file says (mixed_precision)"
        remedy = "training.precision=auto, or mixed_precision: 'no' in the accelerate file"
        yield Problem("training.precision", asked, expected, remedy)


def _number(env: Mapping[str, str], name: str) -> int:
    """A whole number of the environment; 0 where it is absent or none."""
    text = env.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() else 0


def _true(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "false").lower() in ("1", "true", "yes")


def _device(env: Mapping[str, str], what: Literal["OPTIMIZER", "PARAM"]) -> str:
    """Where DeepSpeed is to keep it."""
    return env.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_DEVICE", "none").lower()
