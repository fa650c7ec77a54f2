"""The sections of accelerate's file that name a strategy, and the variables that they become.

accelerate passes over a key that it does not know, and over a whole section that does not belong to
`distributed_type`. Whoever wrote it meant something, so both are refused here.

    fsdp_config:      {fsdp_version: 2, …}   →  FSDP_VERSION=2 …
    deepspeed_config: {zero_stage: 3, …}     →  ACCELERATE_DEEPSPEED_ZERO_STAGE=3 …
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import cast

from llmtrain.errors import Problem

# Key of the file → variable of a rank; None: for the launcher, or nothing of ours depends on it.
_FSDP: dict[str, str | None] = {
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
}
_FSDP1 = (
    "fsdp_forward_prefetch",
    "fsdp_backward_prefetch",
    "fsdp_use_orig_params",
    "fsdp_sync_module_states",
    "fsdp_sharding_strategy",
)
_DEEPSPEED: dict[str, str | None] = {
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
}
_MESH: dict[str, str | None] = {
    **{
        f"parallelism_config_{kind}_size": f"PARALLELISM_CONFIG_{kind.upper()}_SIZE"
        for kind in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    },
    **{
        f"parallelism_config_{kind}": None
        for kind in (
            "cp_backend",
            "cp_comm_strategy",
            "sp_backend",
            "sp_seq_length",
            "sp_seq_length_is_variable",
            "sp_attn_implementation",
        )
    },
}
_SECTIONS = {
    "fsdp_config": ("FSDP", "ACCELERATE_USE_FSDP", _FSDP),
    "deepspeed_config": ("DEEPSPEED", "ACCELERATE_USE_DEEPSPEED", _DEEPSPEED),
}


def exported(values: Mapping[str, object], processes: int) -> dict[str, str]:
    """What a rank finds in its environment, as far as it decides something.

    values: of the file · processes: of all machines together.
    """
    machines = values.get("num_machines", 1)
    on_a_node = processes // machines if isinstance(machines, int) and machines > 0 else processes
    env = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(on_a_node),
        "ACCELERATE_MIXED_PRECISION": str(values.get("mixed_precision", "no")),
    }
    for section, (kind, switch, keys) in _SECTIONS.items():
        if values.get("distributed_type") == kind:
            env |= {switch: "true", **_variables(_section(values, section), keys)}
    if compiler := _section(values, "dynamo_config").get("dynamo_backend"):
        env["ACCELERATE_DYNAMO_BACKEND"] = str(compiler).upper()
    if mesh := _section(values, "parallelism_config"):
        env |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **_variables(mesh, _MESH)}
    return env


def check_sections(values: Mapping[str, object]) -> Iterator[Problem]:
    """What accelerate would pass over in a section, or take for FSDP1."""
    for section, (kind, _, keys) in _SECTIONS.items():
        found = _section(values, section)
        if found and values.get("distributed_type") != kind:
            expected = f"no such section: accelerate reads it for distributed_type {kind} alone"
            yield Problem(section, None, expected, f"distributed_type: {kind}, or remove it")
        else:
            yield from _unknown(section, found, keys)
    yield from _unknown("parallelism_config", _section(values, "parallelism_config"), _MESH)
    yield from _multinode(values)


def _multinode(values: Mapping[str, object]) -> Iterator[Problem]:
    machines = values.get("num_machines", 1)
    if values.get("distributed_type") != "DEEPSPEED" or machines == 1:
        return
    launcher = _section(values, "deepspeed_config").get("deepspeed_multinode_launcher", "pdsh")
    if launcher != "standard":
        expected = (
            "standard: the same command on every machine. pdsh (accelerate's default) starts all "
            "machines from one and writes the environment to ~/.deepspeed_env"
        )
        yield Problem("deepspeed_multinode_launcher", launcher, expected)


def _unknown(
    section: str, found: Mapping[str, object], keys: Mapping[str, str | None]
) -> Iterator[Problem]:
    for key, value in found.items():
        if key in _FSDP1:
            expected = "no such key with fsdp_version 2: it belongs to FSDP1"
            yield Problem(key, value, expected, f"remove it from {section}")
        elif key not in keys:
            near = [name for name in keys if name.endswith(f"_{key}")]
            near = near or difflib.get_close_matches(key, keys, n=1)
            expected = f"a key of {section} that accelerate knows; it would pass over this one"
            remedy = f"did you mean {near[0]}?" if near else "remove it"
            yield Problem(f"{section}.{key}", value, expected, remedy)


def _section(values: Mapping[str, object], name: str) -> dict[str, object]:
    """A section; its keys as accelerate reads them: fsdp_config may leave the prefix out."""
    found = values.get(name)
    if not isinstance(found, dict):
        return {}
    section = cast(dict[object, object], found)
    prefix = "fsdp_" if name == "fsdp_config" else ""
    return {
        text if text.startswith(prefix[:-1]) else prefix + text: value
        for text, value in ((str(key), value) for key, value in section.items())
    }


def _variables(section: Mapping[str, object], keys: Mapping[str, str | None]) -> dict[str, str]:
    """As accelerate writes them: booleans small, what is null not at all."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in section.items()
        if (name := keys.get(key)) is not None and value is not None
    }
