"""The sections of accelerate's file that name a strategy, and the variables set for them.

accelerate ignores unknown keys, and a whole section that does not belong to `distributed_type`.
Somebody meant something by them, so both are refused here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import cast

from llmtrain.distributed.launch.keys import SECTIONS
from llmtrain.errors import Problem

_FSDP1 = (
    "fsdp_forward_prefetch",
    "fsdp_backward_prefetch",
    "fsdp_use_orig_params",
    "fsdp_sync_module_states",
    "fsdp_sharding_strategy",
)


def variables_of(values: Mapping[str, object], processes: int) -> dict[str, str]:
    """Return the relevant variables that accelerate sets in the environment of a rank.

    It writes booleans in lower case, and leaves out nulls.

    values: of the file
    processes: on all machines together
    """
    machines = values.get("num_machines", 1)
    on_a_node = processes // machines if isinstance(machines, int) and machines > 0 else processes
    env = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(on_a_node),
        "ACCELERATE_MIXED_PRECISION": str(values.get("mixed_precision", "no")),
    }
    for name, section in SECTIONS.items():
        found = _section(values, name)
        if found if section.kind is None else values.get("distributed_type") == section.kind:
            env[section.switch] = "true"
            for key, value in found.items():
                if value is not None and (variable := section.variables.get(key)):
                    env[variable] = str(value).lower() if isinstance(value, bool) else str(value)
    if compiler := _section(values, "dynamo_config").get("dynamo_backend"):
        env["ACCELERATE_DYNAMO_BACKEND"] = str(compiler).upper()
    return env


def check_sections(values: Mapping[str, object]) -> Iterator[Problem]:
    """Yield a problem for what accelerate would ignore in a section, or use only for FSDP1."""
    for name, section in SECTIONS.items():
        found, kind = _section(values, name), section.kind
        if found and kind not in (None, values.get("distributed_type")):
            expected = f"no such section: accelerate reads it for distributed_type {kind} alone"
            yield Problem(name, None, expected, f"distributed_type: {kind}, or remove it")
        else:
            yield from _unknown(name, found, section.variables)
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
    """Return a section with full keys: in fsdp_config the prefix `fsdp_` may be left out."""
    found = values.get(name)
    if not isinstance(found, dict):
        return {}
    section = {str(key): value for key, value in cast(dict[object, object], found).items()}
    if name != "fsdp_config":
        return section
    return {k if k.startswith("fsdp") else f"fsdp_{k}": value for k, value in section.items()}
