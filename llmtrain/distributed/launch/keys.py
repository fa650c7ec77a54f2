"""The keys of accelerate's config file, and the variables of a rank that they become.

accelerate's launcher turns each key of its file into a variable. All code uses this one table:
`llmtrain plan` writes the keys, `train --launch` checks them, and a rank reads the variables.

    fsdp_config:      {fsdp_version: 2, …}   ↔  FSDP_VERSION=2 …
    deepspeed_config: {zero_stage: 3, …}     ↔  ACCELERATE_DEEPSPEED_ZERO_STAGE=3 …
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Section:
    """A section of accelerate's file.

    kind: the `distributed_type` for which accelerate reads it; None for any.
    switch: the variable that is true in a rank if the section applies.
    variables: key → variable of a rank; None if only the launcher reads it or it has no effect.
    """

    kind: str | None
    switch: str
    variables: Mapping[str, str | None]


FSDP = Section(
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
DEEPSPEED = Section(
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
MESH = Section(
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
SECTIONS = {"fsdp_config": FSDP, "deepspeed_config": DEEPSPEED, "parallelism_config": MESH}
VARIABLES = {**FSDP.variables, **DEEPSPEED.variables, **MESH.variables}
# accelerate's defaults for keys that its file does not have.
_DEFAULTS = {
    "fsdp_version": "1",
    "zero_stage": "2",
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def _zero(stage: int, device: str) -> dict[str, object]:
    devices = {"offload_optimizer_device": device, "offload_param_device": device}
    return {"zero_stage": stage, **devices}


# Family → strategy → the keys that make it. HSDP is FSDP2 with a `parallelism_config` beside it.
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
    return env.get(name, "false").strip().lower() in ("1", "true", "yes")


def has_values(env: Mapping[str, str], values: Mapping[str, object]) -> bool:
    """Whether these keys of the launch file have these values in the environment of a rank."""
    return all(
        is_true(env, variable(key)) == wanted
        if isinstance(wanted, bool)
        else value(env, key).lower() == str(wanted)
        for key, wanted in values.items()
    )


def example(name: str) -> str:
    """Return where the launch file of this name is, in a checkout or to be written, for people."""
    path = f"accelerate_configs/{name}.yaml"
    return path if Path(path).exists() else f"{name}.yaml (llmtrain init --recipe {name})"
