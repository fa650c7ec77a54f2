"""Checks that a run is what its launcher requested, before and after an `Accelerator` is made.

accelerate chooses the kind of a run by the environment, and some launches silently become something
else: one process instead of two, plain DDP instead of FSDP, or two processes that each train alone.
This module uses only the standard library, since the first check runs before torch is imported.

    accelerate launch --cpu --num_processes 2   →  one process, MASTER_ADDR set, no WORLD_SIZE
    MULTI_GPU + use_cpu, Accelerator()          →  two processes, each of them rank 0 of 1
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmtrain.config.checks import EXACT, check_batch, check_micro_batch
from llmtrain.config.yaml12 import parse
from llmtrain.distributed.launch import named
from llmtrain.distributed.plan.memory import FSDP, OFFLOADS, ZERO
from llmtrain.distributed.plan.strategy import LADDER
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.system import ancestors
from llmtrain.types import ModelCut

if TYPE_CHECKING:
    from llmtrain.config.schema import DistributedConfig, TrainingConfig

_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
# The variables that torch's launcher sets for a rank, besides all that begin with TORCHELASTIC_:
# RANK, LOCAL_RANK, … and WORLD_SIZE, LOCAL_WORLD_SIZE, …
_OF = ("", "LOCAL_", "GROUP_", "ROLE_")
_NUMBERS = [f"{of}{what}" for what in ("RANK", "WORLD_SIZE") for of in _OF]
_OF_A_LAUNCHER = (*_NUMBERS, "MASTER_ADDR", "MASTER_PORT")
_BY_SIDE = {"tp": "tensor_parallel", "sp": "sequence_parallel"}  # side of a mesh → our key
_KINDS = {"ddp": ("NO", "MULTI_CPU", "MULTI_GPU"), "fsdp": ("FSDP",), "zero": ("DEEPSPEED",)}
_WHERE = "the launch"
_FILE_OPTION = "__config_file"  # of accelerate, which takes dashes for underscores

# DeepSpeed is installed with llmtrain on Linux, and does not run on other systems.
INSTALL_DEEPSPEED = (
    "pip install 'deepspeed>=0.19.8,<0.20' on Linux, distributed.strategy=fsdp2 elsewhere"
)


def check_environment(
    env: Mapping[str, str], distributed: DistributedConfig, training: TrainingConfig
) -> None:
    """Raise UserError, with every problem, if the environment contradicts the requested run.

    Call it once, before torch is imported: an `Accelerator` writes ACCELERATE_USE_FSDP and
    ACCELERATE_USE_DEEPSPEED into the environment. If one with settings of its own exists already,
    this is refused.
    """
    check_docstrings(sys.flags.optimize)
    state = sys.modules.get("accelerate.state")
    if state is not None and state.is_initialized():
        made = state.AcceleratorState()
        kind = made.distributed_type.value
        if made.mixed_precision != "no" or kind in ("FSDP", "DEEPSPEED"):
            value = f"{kind}, mixed_precision={made.mixed_precision}, in this process"
            expected = "none before a run, which would get both, or one that has neither"
            remedy = "llmtrain.train before it, or train(config, processes=1): a process of its own"
            raise UserError(Problem("Accelerator", value, expected, remedy))
    ignored = named.ignored_problems(launcher_file(env))
    raise_any([*ignored, *launch_problems(env, env, distributed, training)], _WHERE)


def launcher_file(env: Mapping[str, str]) -> Mapping[str, object]:
    """Return the values of the file with which accelerate started this process.

    Empty if it was started in another way, or if the file cannot be read.
    """
    if "ACCELERATE_MIXED_PRECISION" not in env:
        return {}
    words = (pairwise([*command, ""]) for _, command in ancestors())
    given = (
        Path(value if equals else following)
        for word, following in chain.from_iterable(words)
        for option, equals, value in [word.partition("=")]
        if option.replace("-", "_") == _FILE_OPTION
    )
    # accelerate's own file holds where none is named.
    cache = env.get("HF_HOME") or f"{env.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    path = next(given, Path(cache).expanduser() / "accelerate" / "default_config.yaml")
    text = path.read_text("utf-8", "replace") if path.is_file() else ""
    values = parse(text).value
    return values if isinstance(values, dict) else {}


def launch_problems(
    env: Mapping[str, str],
    exported: Mapping[str, str],
    distributed: DistributedConfig,
    training: TrainingConfig,
) -> list[Problem]:
    """Return why a launch is refused, by the variables that its ranks get.

    env: variables of a rank
    exported: those of them that do not come from a file of accelerate, and are named in messages
    """
    if problems := launcher_problems(exported):  # the number of processes may be wrong
        return [*problems, *check_micro_batch(training)]
    conflicts = [
        *named.unsupported_problems(env, world_size(env), model_cut(env, distributed)),
        *_other_than(env, distributed, training),
    ]
    return list(named.with_variables(conflicts, exported))


def check_docstrings(optimize: int) -> None:
    """Raise UserError if Python leaves docstrings out. optimize: `sys.flags.optimize`"""
    if optimize > 1:
        expected = "0 or 1: transformers reads docstrings when it is imported, which 2 leaves out"
        raise UserError(Problem("PYTHONOPTIMIZE", optimize, expected, "unset PYTHONOPTIMIZE"))


def verify_launch(
    env: Mapping[str, str],
    asked: str,
    launched_processes: int,
    distributed_type: str,
    strategy: str,
) -> None:
    """Raise UserError, with every problem, if the `Accelerator` does not match the launch.

    asked: `distributed.strategy`.
    launched_processes: `num_processes` of the `Accelerator`.
    distributed_type: the name of the `Accelerator`'s type.
    strategy: the strategy that is trained, never auto.

    Call it before the model is built.
    """
    problems: list[Problem] = []
    started = world_size(env)
    if started != launched_processes:
        expected = f"{started} processes (WORLD_SIZE); every process thinks it is alone"
        remedy = "export ACCELERATE_USE_CPU=true, or make the GPUs visible to all processes"
        problems.append(Problem("accelerate's num_processes", launched_processes, expected, remedy))
    if named.named_family(env) not in (None, family(strategy)):
        expected = "a strategy of the launch (distributed_type FSDP or DEEPSPEED)"
        problems.append(Problem("the strategy that is trained", strategy, expected))
    kinds = _KINDS[family(strategy)]
    if distributed_type not in kinds:
        expected = f"{' or '.join(kinds)}: what strategy {strategy} is"
        remedy = f"distributed.strategy={asked} with {_plain()}"
        problems.append(
            Problem("accelerate's distributed_type", distributed_type, expected, remedy)
        )
    raise_any(problems, _WHERE)


def allowed_strategies(env: Mapping[str, str], asked: str) -> tuple[str, ...]:
    """Return the strategies that this launch allows, the preferred one first.

    asked: `distributed.strategy`; if it is not auto, it is the only strategy.

    A plain launch allows all strategies that a plan may choose from; FSDP and DEEPSPEED name one.
    Call it after `check_environment`, and before an `Accelerator` writes into the environment.
    """
    strategy = named.named_strategy(env) if asked == "auto" else asked
    return LADDER if strategy is None else (strategy,)


def model_cut(env: Mapping[str, str], distributed: DistributedConfig) -> ModelCut:
    """Return over how many processes this launch cuts a model; a key goes before the file."""
    tensor, sequence = distributed.tensor_parallel, distributed.sequence_parallel
    return ModelCut(
        max(1, named.side(env, "tp")) if tensor == "auto" else tensor,
        distributed.pipeline_parallel,
        max(1, named.side(env, "sp")) if sequence == "auto" else sequence,
        distributed.pipeline_stages_per_rank,
    )


def world_size(env: Mapping[str, str]) -> int:
    """Return how many processes the launcher started; 1 without a launcher."""
    return named.number(env, "WORLD_SIZE") or 1


def launcher_variables(env: Mapping[str, str]) -> list[str]:
    """Return the names of the variables in an environment that only a launcher sets."""
    others = sorted(name for name in env if name.startswith("TORCHELASTIC_"))
    return [name for name in _OF_A_LAUNCHER if name in env] + others


def awaited(env: Mapping[str, str]) -> str:
    """Return in words which ranks this process waits for before it joins its group, and where."""
    size = world_size(env)
    address = f"{env.get('MASTER_ADDR', '?')}:{env.get('MASTER_PORT', '?')}"
    place = f"at {address} (MASTER_ADDR, MASTER_PORT)"
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return f"its launcher {place}"
    if named.number(env, "RANK") != 0:
        return f"rank 0 {place}"
    others = "rank 1" if size == 2 else f"all of the ranks 1 to {size - 1}"
    return f"{others} {place}"


def family(strategy: str) -> Literal["ddp", "fsdp", "zero"]:
    """Return the engine of a strategy: whole replicas, FSDP2 or DeepSpeed."""
    if strategy in FSDP:
        return "fsdp"
    return "zero" if strategy in ZERO else "ddp"


def launcher_problems(env: Mapping[str, str]) -> list[Problem]:
    """Return problems where a launcher did not start this process, or started too few."""
    if "LOCAL_RANK" in env:
        return []
    problems = []
    for name in _SIZES:
        if env.get(name, "1") != "1" and named.number(env, name) != 1:
            expected = "1 or unset: no launcher started this process (LOCAL_RANK is not set)"
            names = dict.fromkeys([name, *launcher_variables(env)])
            remedy = f"unset {' '.join(names)}, or use accelerate launch"
            problems.append(Problem(name, env[name], expected, remedy))
    if "MASTER_ADDR" in env and "WORLD_SIZE" not in env:
        expected = "several processes, but the launcher started one (WORLD_SIZE is not set)"
        remedy = (
            f"distributed_type: MULTI_GPU with use_cpu: true, as in {named.example('cpu')} "
            "(MULTI_CPU and --cpu start one process); without a launcher: unset MASTER_ADDR"
        )
        problems.append(Problem("MASTER_ADDR", env["MASTER_ADDR"], expected, remedy))
    return problems


def _other_than(
    env: Mapping[str, str], distributed: DistributedConfig, training: TrainingConfig
) -> Iterator[Problem]:
    """Yield problems where the launch contradicts the config; a plain one allows all strategies."""
    kind, launched = named.named_family(env), named.named_strategy(env)
    strategy = distributed.strategy
    # HSDP without a mesh in the file uses nodes × processes of a node.
    fine = {"auto", launched} | ({"hsdp"} if launched == "fsdp2" else set())
    other = family(strategy) != kind or (launched is not None and strategy not in fine)
    if kind and strategy != "auto" and other:
        what = "FSDP" if kind == "fsdp" else "DEEPSPEED"
        expected = f"{launched or 'auto'}: what the launch is (distributed_type {what})"
        yield Problem("distributed.strategy", strategy, expected, f"auto, or {_plain()}")
    elif strategy == "hsdp":
        mesh = named.hsdp_mesh(env, world_size(env), model_cut(env, distributed))
        if named.named_mesh(env) is None or mesh[0] == 1:  # `named` reports the others
            yield from named.one_sided("distributed.strategy", mesh)
    for name, size in (("tp", distributed.tensor_parallel), ("sp", distributed.sequence_parallel)):
        if (launched_size := named.side(env, name)) > 1 and size not in ("auto", launched_size):
            file_key, own_key = f"parallelism_config_{name}_size", f"distributed.{_BY_SIDE[name]}"
            expected = f"{launched_size}, as {file_key} in the accelerate file"
            remedy = f"{own_key}=auto, or {file_key}: {size} in the accelerate file"
            yield Problem(own_key, size, expected, remedy)
    if env.get("ACCELERATE_MIXED_PRECISION") == "bf16" and training.precision == "fp32":
        expected = "bf16, as mixed_precision in the accelerate file"  # `no` is only its default
        remedy = "training.precision=auto, or mixed_precision: 'no' in the accelerate file"
        yield Problem("training.precision", "fp32", expected, remedy)
    if training.same_bits:
        yield from _inexact(env, distributed)
    key, asked = "fsdp_transformer_layer_cls_to_wrap", distributed.wrap_class
    if kind == "fsdp" and (wrapped := named.value(env, key) or asked) != asked:
        expected = f"{asked}, as distributed.wrap_class says, or no such key"
        remedy = f"distributed.wrap_class={wrapped}, or remove it from the accelerate file"
        yield Problem(key, wrapped, expected, remedy)
    if kind == "zero":
        clipping, norm = named.value(env, "gradient_clipping").lower(), training.max_grad_norm
        try:
            same = clipping in ("auto", "none") or float(clipping) == norm
        except ValueError:
            same = False
        if not same:
            expected = f"auto: gradients are clipped as training.max_grad_norm ({norm}) says"
            yield Problem("gradient_clipping", clipping, expected, "training.max_grad_norm")
    cut, processes = model_cut(env, distributed), world_size(env)
    yield from strategy_problems(launched or strategy, processes, cut)
    yield from split_problems(training, processes, cut)


def _inexact(env: Mapping[str, str], distributed: DistributedConfig) -> Iterator[Problem]:
    """Yield why a launch has no engine for `training.same_bits`, unless the config says it too."""
    launched = named.named_strategy(env)
    known = launched or ("zero" if named.named_family(env) == "zero" else "ddp")
    if known not in EXACT and distributed.strategy == "auto":
        expected = f"{' or '.join(EXACT)} with training.same_bits: others add up in their own order"
        remedy = f"{named.example('fsdp2')}, or {_plain()}"
        yield Problem("the strategy of the launch", known, expected, remedy)
    for name, key in (("tp", "tensor_parallel"), ("sp", "sequence_parallel")):
        size, configured = named.side(env, name), getattr(distributed, key)
        if configured == "auto" and size > 1:
            expected = "1 with training.same_bits: a model that is cut has other sums"
            yield Problem(f"parallelism_config_{name}_size", size, expected, _plain())


def strategy_problems(strategy: str, processes: int, cut: ModelCut) -> Iterator[Problem]:
    """Yield why a strategy does not work on models that are cut.

    strategy: as `distributed.strategy`, also auto
    processes: on all nodes, a multiple of those that hold one model
    """
    if cut.processes == 1:
        return
    key, sizes = "distributed.strategy", cut.to_json()
    named_cut = " and ".join(f"distributed.{name} = {n}" for name, n in sizes.items() if n > 1)
    if family(strategy) == "zero":
        expected = f"ddp, fsdp2 or hsdp with {named_cut}: DeepSpeed shards whole models"
        yield Problem(key, strategy, expected, f"fsdp2, as in {named.example('fsdp2_tp')}")
    elif strategy in OFFLOADS and cut.weights > 1:
        expected = f"fsdp2 with {named_cut}: parts on the host cannot be exchanged for a checkpoint"
        yield Problem(key, strategy, expected, f"fsdp2, as in {named.example('fsdp2_tp')}")
    elif family(strategy) == "fsdp" and processes == cut.weights:
        expected = f"ddp with {named_cut} on {processes} processes: each holds another part already"
        remedy = f"ddp, as in {named.example('tp')}, or twice as many processes"
        yield Problem(key, strategy, expected, remedy)


def split_problems(training: TrainingConfig, processes: int, cut: ModelCut) -> Iterator[Problem]:
    """Yield why the processes cannot be divided into models, or a step's batch among these."""
    if processes % cut.processes == 0:
        what = "processes" if cut.processes == 1 else "models"
        yield from check_batch(training, processes // cut.processes, what)
        return
    sizes = {f"distributed.{key}": size for key, size in cut.to_json().items() if size > 1}
    (key, size), *others = sizes.items()
    expected = f"a divisor of the number of processes, {processes}"
    if others:
        product = " × ".join([str(size), *(f"{other} {n}" for other, n in others)])
        expected += f"; the product {product} = {cut.processes} must be one"
    near = -(-processes // cut.processes) * cut.processes
    yield Problem(key, size, expected, f"{near} processes, or other sizes")


def _plain() -> str:
    return f"a plain launch, which leaves every strategy open ({named.example('ddp')})"
