"""Config files of accelerate: read, checked before anything is started, and written for a plan.

A launched process cannot see most mistakes of such a file: it only finds itself alone, or waits in
a rendezvous that no other process joins. accelerate ignores unknown keys, and a whole section that
does not belong to `distributed_type`. Somebody meant something by them, so both are refused here.

A file that is written has the keys of the one in `accelerate_configs/` for the same strategy, which
a test compares, and the numbers of one plan.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from llmtrain.config.schema import Config, DistributedConfig
from llmtrain.config.yaml12 import parse, write
from llmtrain.distributed.launch import named
from llmtrain.distributed.launch.environment import family, launch_problems, model_cut
from llmtrain.distributed.plan.memory import Hardware
from llmtrain.errors import Problem, UserError, raise_any, usable
from llmtrain.rundir.contents import write_output
from llmtrain.types import JsonObject

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
    kind = values.get("distributed_type", "NO")
    for name, section in named.SECTIONS.items():
        entries = _section(values, name)
        if entries and kind != "NO" if section.kind is None else kind == section.kind:
            env[section.switch] = "true"
            for key, value in entries.items():
                if value is not None and (variable := section.variables.get(key)):
                    env[variable] = str(value).lower() if isinstance(value, bool) else str(value)
    if compiler := _section(values, "dynamo_config").get("dynamo_backend"):
        env["ACCELERATE_DYNAMO_BACKEND"] = str(compiler).upper()
    return env


def check_sections(values: Mapping[str, object]) -> Iterator[Problem]:
    """Yield a problem for what accelerate would ignore in a section, or use only for FSDP1."""
    yield from named.ignored_problems(values)
    for name, section in named.SECTIONS.items():
        entries, kind = _section(values, name), section.kind
        if entries and kind not in (None, values.get("distributed_type")):
            expected = f"no such section: accelerate reads it for distributed_type {kind} alone"
            yield Problem(name, None, expected, f"distributed_type: {kind}, or remove it")
        else:
            yield from _unknown(name, entries, section.variables)
    deepspeed = values.get("distributed_type") == "DEEPSPEED"
    key = "deepspeed_multinode_launcher"
    launcher = _section(values, "deepspeed_config").get(key, "pdsh")
    if deepspeed and values.get("num_machines", 1) != 1 and launcher != "standard":
        expected = (
            "standard: the same command on every machine. pdsh (accelerate's default) starts all "
            "machines from one and writes the environment to ~/.deepspeed_env"
        )
        yield Problem(key, launcher, expected)


def _unknown(
    section: str, entries: Mapping[str, object], keys: Mapping[str, str | None]
) -> Iterator[Problem]:
    for key, value in entries.items():
        if key in _FSDP1:
            expected = "no such key with fsdp_version 2: it belongs to FSDP1"
            yield Problem(key, value, expected, f"remove it from {section}")
        elif key not in keys and key != named.STAGES:
            near = [name for name in keys if name.endswith(f"_{key}")]
            near = near or difflib.get_close_matches(key, keys, n=1)
            expected = f"a key of {section} that accelerate knows; it would pass over this one"
            remedy = f"did you mean {near[0]}?" if near else "remove it"
            yield Problem(f"{section}.{key}", value, expected, remedy)


def _section(values: Mapping[str, object], name: str) -> dict[str, object]:
    """Return a section with full keys: in fsdp_config the prefix `fsdp_` may be left out."""
    raw = values.get(name)
    if not isinstance(raw, dict):
        return {}
    section = {str(key): value for key, value in cast(dict[object, object], raw).items()}
    if name != "fsdp_config":
        return section
    return {k if k.startswith("fsdp") else f"fsdp_{k}": value for k, value in section.items()}


_MEETING = {
    "main_process_ip": "the address of the first machine",
    "main_process_port": "a port that is free there",
}
_SUPPORTED = (
    "'NO' (one process), MULTI_GPU (several, with use_cpu: true on CPUs as well), FSDP or DEEPSPEED"
)


@dataclass(frozen=True, slots=True)
class LaunchFile:
    """What an accelerate file starts.

    path: None = not written yet
    processes: on all machines together
    values: of the file
    """

    path: Path | None
    processes: int
    values: Mapping[str, object]

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks use no GPU."""
        return self.values.get("use_cpu") is True

    @property
    def machines(self) -> int:
        """The number of machines."""
        machines = self.values.get("num_machines", 1)
        return machines if isinstance(machines, int) else 1

    @property
    def rendezvous(self) -> str:
        """The backend by which machines find each other, `static` or `c10d`."""
        return str(self.values.get("rdzv_backend", "static"))

    @property
    def environment(self) -> dict[str, str]:
        """The relevant variables that the launcher sets for a rank because of this file."""
        return variables_of(self.values, self.processes)


def read_launch_file(path: Path, processes: int | None, config: Config | None = None) -> LaunchFile:
    """Read a file and check that it starts what it seems to start.

    processes: in place of the file's number
    config: of the run to be started, which the file must not contradict

    Raises UserError with every problem.
    """
    file, problems = parse_launch_file(path, processes)
    env = file.environment
    if config is None:
        cut = model_cut(env, DistributedConfig())
        problems += named.unsupported_problems(env, file.processes, cut)
    else:
        problems += launch_problems(env, {}, config.distributed, config.training)
    raise_any(problems, str(path))
    return file


def parse_launch_file(path: Path, processes: int | None) -> tuple[LaunchFile, list[Problem]]:
    """Read a file; return it with the problems that no variable of a rank shows.

    processes: in place of the file's number

    Raises UserError for a file that cannot be read, or does not tell the number of processes.
    """
    values = _values(path)
    asked = processes if processes is not None else values.get("num_processes")
    problems = [*_kind(values, asked), *check_sections(values), *_machines(values, asked)]
    if not isinstance(asked, int) or asked < 1:
        expected = "a whole number ≥ 1: the processes of all machines together"
        wrong = Problem("num_processes", asked, expected, "or --processes N")
        raise UserError(*problems, wrong, where=str(path))
    return LaunchFile(path, asked, values), problems


def _values(path: Path) -> dict[str, object]:
    remedy = f"a file such as {named.example('ddp')}"
    with usable("--accelerate", str(path), "a readable file of accelerate", remedy):
        document = parse(path.read_text(encoding="utf-8"))
    raise_any(document.problems, str(path))
    if not isinstance(document.value, dict):
        raise UserError(Problem("--accelerate", str(path), "a mapping, as accelerate writes it"))
    return document.value


def _kind(values: Mapping[str, object], asked: object) -> Iterator[Problem]:
    kind, expected, remedy = values.get("distributed_type", "NO"), _SUPPORTED, named.example("ddp")
    if kind == "MULTI_CPU":
        expected += "; accelerate starts one process for MULTI_CPU"
        remedy = "MULTI_GPU and use_cpu: true"
    elif kind == "NO" and isinstance(asked, int) and asked > 1:
        expected = f"MULTI_GPU for {asked} processes; 'NO' starts one"
    elif kind in ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED"):
        return
    yield Problem("distributed_type", kind, expected, remedy)


def _machines(values: Mapping[str, object], asked: object) -> Iterator[Problem]:
    """Check how machines find each other, and which is the first one.

    With c10d they find out by themselves; with static, the default, `machine_rank` decides. Without
    it every machine has number 0, and waits in the rendezvous without a message.
    """
    machines = values.get("num_machines", 1)
    if not isinstance(machines, int) or machines < 1:
        yield Problem("num_machines", machines, "a whole number ≥ 1")
        return
    if machines == 1:
        return
    if isinstance(asked, int) and asked % machines:
        expected = f"a multiple of num_machines {machines}: it counts the processes of all machines"
        less = asked // machines * machines
        remedy = f"{less or machines} or {less + machines}"
        yield Problem("num_processes", asked, expected, remedy)
    for key, expected in _MEETING.items():
        if values.get(key) is None:
            yield Problem(key, None, expected)
    rank, same = values.get("machine_rank"), values.get("same_network", False)
    static = values.get("rdzv_backend", "static") == "static"
    if not static and same is not False:
        expected = "false with rdzv_backend c10d: else accelerate does not pass the address on"
        yield Problem("same_network", same, expected)
    if static and not (isinstance(rank, int) and 0 <= rank < machines):
        expected = f"0 … {machines - 1}, another one on each machine (without it each is machine 0)"
        remedy = "or rdzv_backend: c10d and same_network: false, which need none"
        yield Problem("machine_rank", rank, expected, remedy)


_ADDRESS = "10.0.0.1"  # of the first machine; to be replaced, as in accelerate_configs/


def launch_values(strategy: str, hardware: Hardware, precision: str) -> JsonObject:
    """Return the values for `accelerate launch`. precision: bf16 or fp32."""
    engine = family(strategy)
    alone = hardware.devices == 1 and engine == "ddp"
    kind = {"ddp": "NO" if alone else "MULTI_GPU", "fsdp": "FSDP", "zero": "DEEPSPEED"}
    values: JsonObject = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind[engine],
        "use_cpu": hardware.cpu,
        "num_machines": hardware.nodes,
        "num_processes": hardware.devices,
        "mixed_precision": "no" if precision == "fp32" else precision,
        "main_training_function": "main",
    }
    values |= _machine_keys(hardware, alone=alone)
    if engine == "fsdp":
        values["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            **named.STRATEGIES["fsdp"][strategy],
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_activation_checkpointing": False,
        }
    if engine == "zero":
        several = {"deepspeed_multinode_launcher": "standard"} if hardware.nodes > 1 else {}
        values["deepspeed_config"] = several | {
            **named.STRATEGIES["zero"][strategy],
            "zero3_init_flag": False,
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
    cut, key = hardware.cut, "parallelism_config"
    sides = {"tp": cut.tensor, "sp": cut.sequence}  # the config of the run names the pipeline
    if strategy == "hsdp" or (engine == "fsdp" and cut.tensor * cut.sequence > 1):
        replicas = hardware.nodes if strategy == "hsdp" else 1
        sides = {"dp_replicate": replicas, "dp_shard": hardware.groups // replicas} | sides
    if sizes := {f"{key}_{side}_size": size for side, size in sides.items() if size > 1}:
        values[key] = sizes
    return values


def write_launch_file(path: Path, values: JsonObject) -> bool:
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


def _machine_keys(hardware: Hardware, *, alone: bool) -> JsonObject:
    """Return the values by which processes find each other."""
    gpus = {} if hardware.cpu or alone else {"gpu_ids": "all"}
    if hardware.nodes > 1:
        meeting = {"main_process_ip": _ADDRESS, "main_process_port": 29500}
        return gpus | meeting | {"rdzv_backend": "c10d", "same_network": False}
    port = {} if hardware.cpu or alone else {"main_process_port": 0}
    return {"machine_rank": 0} | gpus | port
