"""Write the accelerate file of a plan, like that in `accelerate_configs/` for the same strategy.

Those files are examples to copy. A file written here has the same keys, which a test compares, and
the numbers of one plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmtrain.config.yaml12 import write
from llmtrain.distributed.launch.environment import family
from llmtrain.distributed.launch.keys import STRATEGIES
from llmtrain.distributed.plan.memory import Hardware
from llmtrain.rundir.contents import write_output

_ADDRESS = "10.0.0.1"  # of the first machine; to be replaced, as in accelerate_configs/


def launch_values(strategy: str, hardware: Hardware, precision: str) -> dict[str, Any]:
    """Return the values for `accelerate launch`. precision: bf16 or fp32."""
    engine = family(strategy)
    alone = hardware.devices == 1 and engine == "ddp"
    kind = {"ddp": "NO" if alone else "MULTI_GPU", "fsdp": "FSDP", "zero": "DEEPSPEED"}
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind[engine],
        "use_cpu": hardware.cpu,
        "num_machines": hardware.nodes,
        "num_processes": hardware.devices,
        "mixed_precision": "no" if precision == "fp32" else precision,
        "main_training_function": "main",
    }
    values |= _machines(hardware, alone=alone)
    if engine == "fsdp":
        values["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            **STRATEGIES["fsdp"][strategy],
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_activation_checkpointing": False,
        }
    if engine == "zero":
        several = {"deepspeed_multinode_launcher": "standard"} if hardware.nodes > 1 else {}
        values["deepspeed_config"] = several | {
            **STRATEGIES["zero"][strategy],
            "zero3_init_flag": False,
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
    if strategy == "hsdp":
        values["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": hardware.nodes,
            "parallelism_config_dp_shard_size": hardware.devices_per_node,
        }
    return values


def write_launch_file(path: Path, values: dict[str, Any]) -> bool:
    """Write the file; return whether it replaced another one. Raises UserError if it cannot be."""
    several = values["num_machines"] > 1
    head = (_SEVERAL if several else _ONE).format(path=path)
    return write_output("--write", path, (head + write(values)).encode())


_ONE = """\
# Written by `llmtrain plan`.
#
#   accelerate launch --config_file {path} -m llmtrain train CONFIG
"""
_SEVERAL = """\
# Written by `llmtrain plan`. Put in the address of the first machine; the same command on each.
#
#   accelerate launch --config_file {path} --rdzv_backend c10d \\
#       -m llmtrain train CONFIG
#
# The option is there because accelerate 1.15 does not apply `rdzv_backend` of this file.
"""


def _machines(hardware: Hardware, *, alone: bool) -> dict[str, Any]:
    """Return the values by which processes find each other."""
    gpus = {} if hardware.cpu or alone else {"gpu_ids": "all"}
    if hardware.nodes > 1:
        meeting = {"main_process_ip": _ADDRESS, "main_process_port": 29500}
        return gpus | meeting | {"rdzv_backend": "c10d", "same_network": False}
    port = {} if hardware.cpu or alone else {"main_process_port": 0}
    return {"machine_rank": 0} | gpus | port
