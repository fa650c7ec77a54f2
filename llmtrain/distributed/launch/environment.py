"""Is this process where a launcher meant it to be? Asked before and after an `Accelerator` is made.

accelerate decides by the environment what a run becomes, and some launches silently become
something else: one process instead of two, plain DDP instead of FSDP, or two processes that each
train alone. Standard library only, since the first check runs before torch is imported.

    accelerate launch --cpu --num_processes 2   →  one process, MASTER_ADDR set, no WORLD_SIZE
    MULTI_GPU + use_cpu, Accelerator()          →  two processes, each of them rank 0 of 1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from llmtrain.config.checks import check_batch
from llmtrain.distributed.launch.keys import value
from llmtrain.distributed.launch.named import (
    named_family,
    named_mesh,
    named_strategy,
    number,
    one_sided,
    unsupported_problems,
    with_variables,
)
from llmtrain.distributed.plan.memory import FSDP, ZERO
from llmtrain.distributed.plan.strategy import LADDER
from llmtrain.errors import Problem, UserError

if TYPE_CHECKING:
    from llmtrain.config.schema import DistributedConfig, TrainingConfig

_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
# What torch's launcher tells a rank; beside it everything that begins with TORCHELASTIC_.
_OF_A_LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_KINDS = {
    "ddp": ("NO", "MULTI_CPU", "MULTI_GPU"),
    "fsdp": ("FSDP",),
    "zero": ("DEEPSPEED",),
}
_PLAIN = "a plain launch, which leaves every strategy open (accelerate_configs/ddp.yaml)"
_WHERE = "the launch"

# It comes with llmtrain on Linux, and does not run elsewhere.
INSTALL_DEEPSPEED = (
    "pip install 'deepspeed>=0.19,<0.20' on Linux, distributed.strategy=fsdp2 elsewhere"
)


def check_environment(
    env: Mapping[str, str], distributed: DistributedConfig, training: TrainingConfig
) -> None:
    """Refuse an environment that cannot lead to the run that was asked for.

    Before torch is imported, and once: an `Accelerator` writes ACCELERATE_USE_FSDP and _DEEPSPEED
    into the environment. Raises UserError with every problem.
    """
    problems = launcher_problems(env)
    if not problems:  # else the number of processes is not to be trusted
        found = [
            *unsupported_problems(env, world_size(env)),
            *contradictions(env, distributed, training),
        ]
        problems = list(with_variables(found, env))
    if problems:
        raise UserError(*problems, where=_WHERE)


def verify_launch(
    env: Mapping[str, str],
    asked: str,
    launched_processes: int,
    distributed_type: str,
    strategy: str,
) -> None:
    """Refuse an `Accelerator` that is not what the launcher started, or not of its strategy.

    asked: `distributed.strategy`.
    launched_processes: `num_processes` of the `Accelerator`.
    distributed_type: the name of its type.
    strategy: the one that is trained, never auto.

    Called before the model is built. Raises UserError with every problem.
    """
    problems: list[Problem] = []
    started = world_size(env)
    if started != launched_processes:
        expected = f"{started} processes (WORLD_SIZE); every process thinks it is alone"
        remedy = "export ACCELERATE_USE_CPU=true, or make the GPUs visible to all processes"
        problems.append(Problem("accelerate's num_processes", launched_processes, expected, remedy))
    if named_family(env) not in (None, family(strategy)):
        expected = "a strategy of the launch (distributed_type FSDP or DEEPSPEED)"
        problems.append(Problem("the strategy that is trained", strategy, expected))
    kinds = _KINDS[family(strategy)]
    if distributed_type not in kinds:
        expected = f"{' or '.join(kinds)}: what strategy {strategy} is"
        remedy = f"distributed.strategy={asked} with {_PLAIN}"
        problems.append(
            Problem("accelerate's distributed_type", distributed_type, expected, remedy)
        )
    if problems:
        raise UserError(*problems, where=_WHERE)


def allowed_strategies(env: Mapping[str, str], asked: str) -> tuple[str, ...]:
    """Which strategies this launch leaves open, the preferred one first.

    A plain launch leaves open all that a plan may choose from, FSDP and DEEPSPEED name one; an
    explicit `distributed.strategy` (asked) is the only one. To be called after `check_environment`,
    and before there is an `Accelerator`, which writes into the environment.
    """
    named = named_strategy(env) if asked == "auto" else asked
    return LADDER if named is None else (named,)


def world_size(env: Mapping[str, str]) -> int:
    """How many processes the launcher started; 1 without a launcher."""
    return number(env, "WORLD_SIZE") or 1


def launcher_variables(env: Mapping[str, str]) -> list[str]:
    """The variables of an environment that only a launcher sets."""
    others = sorted(name for name in env if name.startswith("TORCHELASTIC_"))
    return [name for name in _OF_A_LAUNCHER if name in env] + others


def awaited(env: Mapping[str, str]) -> str:
    """For whom the process with this environment waits before it is one of a group, and where."""
    size = world_size(env)
    place = f"at {env.get('MASTER_ADDR', '?')}:{env.get('MASTER_PORT', '?')}"
    place = f"{place} (MASTER_ADDR, MASTER_PORT)"
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return f"its launcher {place}"
    if number(env, "RANK") != 0:
        return f"rank 0 {place}"
    others = "rank 1" if size == 2 else f"all of the ranks 1 to {size - 1}"
    return f"{others} {place}"


def family(strategy: str) -> Literal["ddp", "fsdp", "zero"]:
    """Which engine a strategy is of: whole replicas, FSDP2 or DeepSpeed."""
    if strategy in FSDP:
        return "fsdp"
    return "zero" if strategy in ZERO else "ddp"


def launcher_problems(env: Mapping[str, str]) -> list[Problem]:
    """Find traces of a launcher that did not start this process, or started fewer than asked."""
    if "LOCAL_RANK" in env:
        return []
    problems = []
    for name in _SIZES:
        if env.get(name, "1") != "1" and number(env, name) != 1:
            expected = "1 or unset: no launcher started this process (LOCAL_RANK is not set)"
            names = dict.fromkeys([name, *launcher_variables(env)])
            remedy = f"unset {' '.join(names)}, or use accelerate launch"
            problems.append(Problem(name, env[name], expected, remedy))
    if "MASTER_ADDR" in env and "WORLD_SIZE" not in env:
        expected = "several processes, but the launcher started one (WORLD_SIZE is not set)"
        remedy = (
            "distributed_type: MULTI_GPU with use_cpu: true, as in accelerate_configs/cpu.yaml "
            "(MULTI_CPU and --cpu start one process); without a launcher: unset MASTER_ADDR"
        )
        problems.append(Problem("MASTER_ADDR", env["MASTER_ADDR"], expected, remedy))
    return problems


def contradictions(
    env: Mapping[str, str], distributed: DistributedConfig, training: TrainingConfig
) -> Iterator[Problem]:
    """Find where the launch contradicts the config."""
    yield from _strategy(env, distributed.strategy)
    yield from _precision(env, training.precision)
    if named_family(env) == "fsdp":
        yield from _wrapping(env, distributed.wrap_class)
    elif named_family(env) == "zero":
        yield from _clipping(env, training.max_grad_norm)
    yield from check_batch(training, world_size(env))


def _strategy(env: Mapping[str, str], asked: str) -> Iterator[Problem]:
    """A plain launch contradicts no strategy."""
    launched, named = named_family(env), named_strategy(env)
    # HSDP without a mesh in the file takes that of the machines.
    fine = {"auto", named} | ({"hsdp"} if named == "fsdp2" else set())
    other = family(asked) != launched or (named is not None and asked not in fine)
    if launched and asked != "auto" and other:
        what = "FSDP" if launched == "fsdp" else "DEEPSPEED"
        expected = f"{named or 'auto'}: what the launch is (distributed_type {what})"
        yield Problem("distributed.strategy", asked, expected, f"auto, or {_PLAIN}")
    elif asked == "hsdp":
        on_a_node = number(env, "LOCAL_WORLD_SIZE") or 1
        mesh = named_mesh(env) or (world_size(env) // on_a_node, on_a_node)
        if named_mesh(env) is None or mesh[0] == 1:  # else parallelism_config is the problem
            yield from one_sided("distributed.strategy", mesh, "hsdp")


def _precision(env: Mapping[str, str], asked: str) -> Iterator[Problem]:
    """accelerate exports `no` by default, so `no` contradicts nothing."""
    if env.get("ACCELERATE_MIXED_PRECISION") == "bf16" and asked == "fp32":
        expected = "the bf16 that the accelerate file says (mixed_precision)"
        remedy = "training.precision=auto, or mixed_precision: 'no' in the accelerate file"
        yield Problem("training.precision", asked, expected, remedy)


def _wrapping(env: Mapping[str, str], asked: str) -> Iterator[Problem]:
    launched = value(env, "fsdp_transformer_layer_cls_to_wrap") or asked
    if launched != asked:
        expected = f"{asked}, as distributed.wrap_class says, or no such key"
        remedy = f"distributed.wrap_class={launched}, or remove it from the accelerate file"
        yield Problem("fsdp_transformer_layer_cls_to_wrap", launched, expected, remedy)


def _clipping(env: Mapping[str, str], asked: float | None) -> Iterator[Problem]:
    launched = value(env, "gradient_clipping").lower()
    try:
        same = launched in ("auto", "none") or float(launched) == asked
    except ValueError:
        same = False
    if not same:
        expected = f"auto: gradients are clipped as training.max_grad_norm ({asked}) says"
        yield Problem("gradient_clipping", launched, expected, "training.max_grad_norm")
