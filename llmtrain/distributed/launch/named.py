"""The strategy and mesh that the environment of a launch requests, and requests we do not support.

accelerate's launcher turns each key of its file into a variable. All code uses the tables of this
module: `llmtrain plan` writes the keys, `train --launch` checks them, a rank reads the variables.

    distributed_type: FSDP       →  ACCELERATE_USE_FSDP=true, FSDP_VERSION=1, FSDP_OFFLOAD_PARAMS=…
    distributed_type: DEEPSPEED  →  ACCELERATE_USE_DEEPSPEED=true, ACCELERATE_DEEPSPEED_ZERO_STAGE=2
    MULTI_GPU, NO, torchrun      →  neither: every strategy is still possible

The trap: the launcher also sets defaults for missing keys, so a rank cannot distinguish
`fsdp_version: 1` in the file from a file without the key. Problems are named by the keys of the
file. Only the standard library is used, since this is read before torch is imported.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from llmtrain.errors import Problem
from llmtrain.types import WHOLE, ModelCut


@dataclass(frozen=True, slots=True)
class LaunchSection:
    """A section of accelerate's file.

    kind: the `distributed_type` for which accelerate reads it; None for any.
    switch: the variable that is true in a rank if the section applies.
    variables: key → variable of a rank; None if only the launcher reads it or it has no effect.
    """

    kind: str | None
    switch: str
    variables: Mapping[str, str | None]


FSDP = LaunchSection(
    "FSDP",
    "ACCELERATE_USE_FSDP",
    {
        "fsdp_version": "FSDP_VERSION",
        "fsdp_offload_params": "FSDP_OFFLOAD_PARAMS",
        "fsdp_reshard_after_forward": "FSDP_RESHARD_AFTER_FORWARD",
        "fsdp_auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
        "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
        "fsdp_state_dict_type": "FSDP_STATE_DICT_TYPE",
        "fsdp_cpu_ram_efficient_loading": "FSDP_CPU_RAM_EFFICIENT_LOADING",
        "fsdp_activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
        "fsdp_activation_checkpointing_offload": "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        "fsdp_ignored_modules": "FSDP_IGNORED_MODULES",
        "fsdp_min_num_params": None,
    },
)
DEEPSPEED = LaunchSection(
    "DEEPSPEED",
    "ACCELERATE_USE_DEEPSPEED",
    {
        "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
        "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
        "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
        "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
        "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        "zero3_save_16bit_model": None,
        "offload_optimizer_nvme_path": None,
        "offload_param_nvme_path": None,
        "deepspeed_multinode_launcher": None,
        "deepspeed_hostfile": None,
        "deepspeed_exclusion_filter": None,
        "deepspeed_inclusion_filter": None,
    },
)
MESH = LaunchSection(
    None,
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    {
        "parallelism_config_dp_replicate_size": "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
        "parallelism_config_dp_shard_size": "PARALLELISM_CONFIG_DP_SHARD_SIZE",
        "parallelism_config_tp_size": "PARALLELISM_CONFIG_TP_SIZE",
        "parallelism_config_cp_size": "PARALLELISM_CONFIG_CP_SIZE",
        "parallelism_config_sp_size": "PARALLELISM_CONFIG_SP_SIZE",
        "parallelism_config_cp_backend": None,
        "parallelism_config_cp_comm_strategy": None,
        "parallelism_config_sp_backend": None,
        "parallelism_config_sp_seq_length": None,
        "parallelism_config_sp_seq_length_is_variable": None,
        "parallelism_config_sp_attn_implementation": None,
    },
)
STAGES = "parallelism_config_pp_size"  # as some would name it; there is no such key
SECTIONS = {"fsdp_config": FSDP, "deepspeed_config": DEEPSPEED, "parallelism_config": MESH}
VARIABLES = {**FSDP.variables, **DEEPSPEED.variables, **MESH.variables}
_TRUE = ("1", "true", "yes")
# accelerate's defaults for keys that its file does not have.
_DEFAULTS = {
    "fsdp_version": "1",
    "fsdp_reshard_after_forward": "true",
    "zero_stage": "2",
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def _zero(stage: int, device: str) -> dict[str, object]:
    devices = {"offload_optimizer_device": device, "offload_param_device": device}
    return {"zero_stage": stage, **devices}


# Family → strategy → the keys that make it; the first that fits counts. HSDP is FSDP2 with a
# `parallelism_config` beside it.
STRATEGIES: dict[str, dict[str, dict[str, object]]] = {
    "fsdp": {
        "fsdp2": {"fsdp_offload_params": False},
        "fsdp2_offload": {"fsdp_offload_params": True},
        "hsdp": {"fsdp_offload_params": False},
    },
    "zero": {
        "zero1": _zero(1, "none"),
        "zero2": _zero(2, "none"),
        "zero3": _zero(3, "none"),
        "zero3_offload": _zero(3, "cpu"),
    },
}


def variable(key: str) -> str:
    """Return the variable of a rank that a key becomes. Raises ValueError if it becomes none."""
    name = VARIABLES[key]
    if name is None:
        raise ValueError(f"{key} becomes no variable of a rank")
    return name


def value(env: Mapping[str, str], key: str) -> str:
    """Return the value of a launch file's key as a rank reads it, or accelerate's default."""
    return env.get(variable(key), _DEFAULTS.get(key, "")).strip()


def is_true(env: Mapping[str, str], name: str) -> bool:
    """Whether a variable is set to true, yes or 1."""
    return env.get(name, "").strip().lower() in _TRUE


def has_values(env: Mapping[str, str], values: Mapping[str, object]) -> bool:
    """Whether these keys of the launch file have these values in the environment of a rank."""
    return all(
        (value(env, key).lower() in _TRUE) == wanted
        if isinstance(wanted, bool)
        else value(env, key).lower() == str(wanted)
        for key, wanted in values.items()
    )


def example(name: str) -> str:
    """Return where the launch file of this name is, in a checkout or to be written, for people."""
    path = f"accelerate_configs/{name}.yaml"
    return path if Path(path).exists() else f"{name}.yaml (llmtrain init --recipe {name})"


# The variables of problem keys that are not in a section or that come from several variables.
_VARIABLES = {
    "mixed_precision": ("ACCELERATE_MIXED_PRECISION",),
    "training.precision": ("ACCELERATE_MIXED_PRECISION",),
    "dynamo_backend": ("ACCELERATE_DYNAMO_BACKEND",),
    "distributed_type": ("ACCELERATE_USE_MEGATRON_LM",),
    "distributed.strategy": (FSDP.switch, DEEPSPEED.switch),
    "parallelism_config": (MESH.switch,),
    "fsdp_version": (variable("fsdp_version"), FSDP.switch),
    "offload_optimizer_device": (
        variable("offload_optimizer_device"),
        variable("offload_param_device"),
    ),
}


def named_family(env: Mapping[str, str]) -> Literal["fsdp", "zero"] | None:
    """Return the engine that the launch requests; None for a plain launch."""
    if is_true(env, FSDP.switch):
        return "fsdp"
    return "zero" if is_true(env, DEEPSPEED.switch) else None


def named_strategy(env: Mapping[str, str]) -> str | None:
    """Return the strategy that the launch requests; None for a plain or a refused launch."""
    family = named_family(env)
    replicated = family == "fsdp" and (named_mesh(env) or (1, 1))[0] > 1
    for strategy, values in STRATEGIES[family].items() if family else ():
        if has_values(env, values) and (strategy == "hsdp") == replicated:
            return strategy
    return None


def named_mesh(env: Mapping[str, str]) -> tuple[int, int] | None:
    """Return (replicas, shards of each replica) of `parallelism_config`; None if it is not set."""
    if not is_true(env, MESH.switch):
        return None
    return side(env, "dp_replicate"), side(env, "dp_shard")


def hsdp_mesh(env: Mapping[str, str], processes: int, cut: ModelCut = WHOLE) -> tuple[int, int]:
    """Return (replicas, shards of each): the launch's mesh, or nodes and what a node holds.

    processes: on all nodes, a multiple of those that hold one model
    """
    if (mesh := named_mesh(env)) is not None:
        return mesh[0], mesh[1] * cut.sequence
    on_a_node = number(env, "LOCAL_WORLD_SIZE") or processes
    return processes // on_a_node, on_a_node // cut.weights


def unsupported_problems(
    env: Mapping[str, str], processes: int, cut: ModelCut = WHOLE
) -> Iterator[Problem]:
    """Yield the requests of this launch that are not supported under any config.

    processes: the number of processes on all nodes.
    """
    if is_true(env, "ACCELERATE_USE_MEGATRON_LM"):
        expected = "NO, MULTI_GPU, FSDP or DEEPSPEED: Megatron-LM brings a trainer of its own"
        yield Problem("distributed_type", "MEGATRON_LM", expected, example("fsdp2"))
    precision = env.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", "bf16"):
        expected = "bf16 or 'no' (in quotes): nothing else is offered"
        remedy = "bf16, or 'no' (fp32) on GPUs older than Ampere"
        yield Problem("mixed_precision", precision, expected, remedy)
    if (compiler := env.get("ACCELERATE_DYNAMO_BACKEND", "no")).lower() != "no":
        expected = "no: accelerate would compile the model, which is not tried here"
        yield Problem("dynamo_backend", compiler, expected, "remove dynamo_config")
    yield from _parallelism(env, processes, cut)
    if named_family(env) == "fsdp":
        yield from _fsdp(env)
    elif named_family(env) == "zero":
        yield from _deepspeed(env)


def with_variables(problems: Iterable[Problem], env: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the problems of an environment, each with the variable that it comes from.

    A launcher sets these variables from its file. Without a launcher they were exported in the
    shell, so the remedy is to unset them.
    """
    for problem in problems:
        known = _VARIABLES.get(problem.key) or (VARIABLES.get(problem.key),)
        # A switch counts if it is on, any other variable if it is set.
        on = (name for name in known if name and (is_true(env, name) or "_USE_" not in name))
        names = [name for name in on if name in env]
        if not names:
            yield problem
            continue
        remedy = problem.remedy
        if "LOCAL_RANK" not in env:
            remedy = f"unset {names[0]}" + (f", or {remedy}" if remedy else "")
        expected = f"{problem.expected}; it comes from the variable {names[0]}"
        yield replace(problem, expected=expected, remedy=remedy)


def number(env: Mapping[str, str], name: str) -> int:
    """Return an integer of the environment; 0 if the variable is missing or not a number."""
    text = env.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() else 0


def _parallelism(env: Mapping[str, str], processes: int, cut: ModelCut) -> Iterator[Problem]:
    if (mesh := named_mesh(env)) is None:
        return
    key = "parallelism_config"
    for kind in ("tp", "sp"):
        if side(env, kind) == 0:
            name = f"{key}_{kind}_size"
            yield Problem(name, value(env, name), "a whole number ≥ 1")
    if (ring := side(env, "cp")) != 1:
        expected = "1: it means ring attention, which torch has for GPUs alone, and as a trial"
        remedy = "parallelism_config_sp_size, which exchanges heads for positions"
        yield Problem("parallelism_config_cp_size", ring, expected, remedy)
    elif named_family(env) == "zero" or (named_family(env) is None and mesh != (1, 1)):
        expected = "none: accelerate lays out a mesh for distributed_type FSDP alone"
        file = "hsdp_multinode" if cut.processes == 1 else "fsdp2_tp"
        yield Problem(key, None, expected, f"remove it, or {example(file)}")
    elif named_family(env) is None or processes % cut.processes:
        return  # of what a model is cut into: `environment` reports it
    elif math.prod(mesh) * cut.processes != processes:
        product = f"dp_replicate_size {mesh[0]} × dp_shard_size {mesh[1]}"
        if cut.processes > 1:
            product += f" × {cut.processes} that hold one model"
        expected = f"a product of {processes}, the number of processes"
        yield Problem(key, product, expected, "nodes × processes of a node")
    elif mesh[0] > 1:
        yield from one_sided(key, mesh)


def ignored_problems(values: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the sizes in a file of accelerate that its launcher ignores without a word.

    values: of the whole file
    """
    section = values.get("parallelism_config")
    if not isinstance(section, dict):
        return
    if (stages := section.get(STAGES)) is not None:
        expected = f"no such key: accelerate has none for pipelines, and ignores {STAGES}"
        yield Problem(STAGES, stages, expected, f"distributed.pipeline_parallel={stages}")
    sizes = {name: size for name, size in section.items() if isinstance(size, int) and size > 1}
    if values.get("distributed_type", "NO") == "NO" and sizes.keys() & MESH.variables.keys():
        expected = "no such section with distributed_type 'NO', which starts one process"
        yield Problem("parallelism_config", None, expected, example("tp"))


def one_sided(key: str, mesh: tuple[int, int]) -> Iterator[Problem]:
    """Yield a problem for HSDP on a mesh with a side of 1, which is really another strategy."""
    replicas, shards = mesh
    mesh_in_words = f"hsdp, {replicas} × {shards} processes (replicas × shards of each)"
    if replicas == 1:
        expected = "at least 2 replicas, one for each node: with 1 there is nothing to replicate"
        yield Problem(
            key, mesh_in_words, expected, "distributed.strategy=fsdp2 shards over all processes"
        )
    elif shards <= 1:
        expected = "at least 2 processes that share a replica: with 1 nothing is sharded"
        yield Problem(key, mesh_in_words, expected, "distributed.strategy=ddp, which that is")


def _fsdp(env: Mapping[str, str]) -> Iterator[Problem]:
    version = value(env, "fsdp_version")
    if version != "2":
        expected = (
            "2. FSDP1, accelerate's default, joins the parameters of a "
            "block into one flat tensor: no frozen parameters beside trained ones, and no "
            "checkpoint that another number of processes or strategy reads"
        )
        yield Problem(
            "fsdp_version", version, expected, f"fsdp_version: 2, as in {example('fsdp2')}"
        )
        return
    if ignored := value(env, "fsdp_ignored_modules"):
        yield Problem("fsdp_ignored_modules", ignored, "no such key: every parameter is sharded")
    if named_strategy(env) is None:
        expected = "false with more than one replica: HSDP has no offload"
        yield Problem("fsdp_offload_params", "true", expected, example("fsdp2_offload"))


def _deepspeed(env: Mapping[str, str]) -> Iterator[Problem]:
    file = value(env, "deepspeed_config_file")
    if file.lower() not in ("", "none"):
        expected = (
            "no JSON file for DeepSpeed: batch size, precision, clipping and optimizer are set by "
            "the config of the run"
        )
        remedy = (
            f"zero_stage and the offload devices in the accelerate file, as in {example('zero3')}"
        )
        yield Problem("deepspeed_config_file", file, expected, remedy)
        return  # the other keys would come from that JSON
    yield from _stages(env)
    accumulation = value(env, "gradient_accumulation_steps").lower()
    if accumulation not in ("auto", "none", "1"):
        expected = "auto: it follows from global batch, micro-batch and processes"
        remedy = "training.global_batch_size, training.micro_batch_size"
        yield Problem("gradient_accumulation_steps", accumulation, expected, remedy)
    if has_values(env, {"zero_stage": 3, "zero3_init_flag": True}):
        expected = (
            "false: DeepSpeed would partition the model while it is built, and give it other "
            "initial weights than every other strategy"
        )
        yield Problem("zero3_init_flag", "true", expected)
    if leaves := value(env, "deepspeed_moe_layer_cls_names"):
        yield Problem("deepspeed_moe_layer_cls_names", leaves, "no such key: it is not offered")


def _stages(env: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for stage and offload of no strategy, which would silently be ignored."""
    keys = ("zero_stage", "offload_optimizer_device", "offload_param_device")
    stage, optimizer, parameters = (value(env, key).lower() for key in keys)
    if stage not in ("1", "2", "3"):
        remedy = f"{example('ddp')} for whole replicas, which is stage 0"
        yield Problem("zero_stage", stage, "1, 2 or 3", remedy)
        return
    if named_strategy(env) is not None:
        return
    devices = f"{optimizer}, offload_param_device = {parameters}"
    if "nvme" in (optimizer, parameters):
        expected = "cpu or none: offload to disk is not offered"
    elif stage == "3":
        expected = "both cpu or both none: zero3_offload moves optimizer and parameters"
    else:
        expected = f"none and none: stage {stage} is offered without offload"
    remedy = f"{example('zero3_offload')}, or both none"
    yield Problem("offload_optimizer_device", devices, expected, remedy)


def side(env: Mapping[str, str], kind: str) -> int:
    """Return a side of `parallelism_config`: 1 if it is not set, 0 if it is not a number.

    kind: dp_replicate, dp_shard, tp, sp or cp
    """
    if not is_true(env, MESH.switch):
        return 1
    name = variable(f"parallelism_config_{kind}_size")
    return number(env, name) if name in env else 1
