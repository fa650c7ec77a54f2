"""Read a config file of accelerate, and check that it starts what it seems to start.

A launched process cannot see most mistakes of such a file: it only finds itself alone, or waits in
a rendezvous that no other process joins. So the file is checked before anything is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmtrain.config.schema import Config
from llmtrain.config.yaml12 import parse
from llmtrain.distributed.launch.environment import contradictions
from llmtrain.distributed.launch.keys import example
from llmtrain.distributed.launch.named import unsupported_problems
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.tools.launch.sections import check_sections, variables_of

_KINDS = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED")
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
    values = _values(path)
    asked = processes if processes is not None else values.get("num_processes")
    problems = [*_kind(values, asked), *check_sections(values), *_machines(values, asked)]
    if not isinstance(asked, int) or asked < 1:
        expected = "a whole number ≥ 1: the processes of all machines together"
        problems.append(Problem("num_processes", asked, expected, "or --processes N"))
    else:
        env = variables_of(values, asked)
        problems += unsupported_problems(env, asked)
        if config is not None:
            problems += contradictions(env, config.distributed, config.training)
    if problems or not isinstance(asked, int):
        raise UserError(*problems, where=str(path))
    return LaunchFile(path, asked, values)


def _values(path: Path) -> dict[str, object]:
    try:
        document = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        expected = f"a readable file of accelerate ({error.strerror})"
        remedy = f"a file such as {example('ddp')}"
        raise UserError(Problem("--accelerate", str(path), expected, remedy)) from error
    raise_any(document.problems, str(path))
    if not isinstance(document.value, dict):
        raise UserError(Problem("--accelerate", str(path), "a mapping, as accelerate writes it"))
    return document.value


def _kind(values: Mapping[str, object], asked: object) -> list[Problem]:
    kind = values.get("distributed_type", "NO")
    if kind == "MULTI_CPU":
        expected = f"{_SUPPORTED}; accelerate starts one process for MULTI_CPU"
        return [Problem("distributed_type", kind, expected, "MULTI_GPU and use_cpu: true")]
    if kind not in _KINDS:
        return [Problem("distributed_type", kind, _SUPPORTED, example("ddp"))]
    if kind == "NO" and isinstance(asked, int) and asked > 1:
        expected = f"MULTI_GPU for {asked} processes; 'NO' starts one"
        return [Problem("distributed_type", kind, expected, example("ddp"))]
    return []


def _machines(values: Mapping[str, object], asked: object) -> list[Problem]:
    machines = values.get("num_machines", 1)
    if not isinstance(machines, int) or machines < 1:
        return [Problem("num_machines", machines, "a whole number ≥ 1")]
    if machines == 1:
        return []
    problems: list[Problem] = []
    if isinstance(asked, int) and asked % machines:
        expected = f"a multiple of num_machines {machines}: it counts the processes of all machines"
        remedy = (
            f"{asked // machines * machines or machines} or {(asked // machines + 1) * machines}"
        )
        problems.append(Problem("num_processes", asked, expected, remedy))
    if values.get("main_process_ip") is None:
        problems.append(Problem("main_process_ip", None, "the address of the first machine"))
    if values.get("main_process_port") is None:
        problems.append(Problem("main_process_port", None, "a port that is free there"))
    return [*problems, *_rendezvous(values, machines)]


def _rendezvous(values: Mapping[str, object], machines: int) -> list[Problem]:
    """Check how machines find out which is the first one.

    With c10d they find out by themselves; with static, the default, `machine_rank` decides. Without
    it every machine has number 0, and waits in the rendezvous without a message.
    """
    rank = values.get("machine_rank")
    if values.get("rdzv_backend", "static") != "static":
        if values.get("same_network", False) is False:
            return []
        expected = "false with rdzv_backend c10d: else accelerate does not pass the address on"
        return [Problem("same_network", values.get("same_network"), expected)]
    if isinstance(rank, int) and 0 <= rank < machines:
        return []
    expected = f"0 … {machines - 1}, another one on each machine (without it each is machine 0)"
    remedy = "or rdzv_backend: c10d and same_network: false, which need none"
    return [Problem("machine_rank", rank, expected, remedy)]
