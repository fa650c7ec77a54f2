"""Start this machine's part of a run on MIN to MAX machines; see `elastic` for what it does then.

    llmtrain train CONFIG --nodes MIN:MAX --processes-per-node P     the same on every machine

accelerate's launcher takes a fixed number of machines, so torch's is started in its place, with the
variables that accelerate's file becomes. Some numbers of machines may not divide the batch: these
are named, and machines wait where the next smaller number trains.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.distributed.launch.environment import launcher_problems, model_cut, split_problems
from llmtrain.errors import RESTARTABLE, Problem, UserError, raise_any
from llmtrain.rundir.lock import check_file_locks
from llmtrain.tools.launch import child
from llmtrain.tools.launch.file import LaunchFile, parse_launch_file
from llmtrain.tools.launch.launch import (
    address_towards,
    launch_rules,
    launched_already,
    of_this_machine,
    run_launcher,
    written,
)
from llmtrain.training.stop import LAUNCHED

LAST_CALL_SECONDS = 5
MAX_RESTARTS = 3
_NODES = re.compile(r"([0-9]+)(?::([0-9]+))?")
_ELSEWHERE = "192.0.2.1"  # an address of nobody (RFC 5737), to which a default route leads
_OF_A_RANK = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What the agent of a machine is started with; all but `address` is the same on all machines.

    counts: the numbers of machines that may train, ascending
    processes: on each machine
    max_restarts: failures in a row, without a step and on as many machines
    last_call: seconds in which further machines may join a group that could begin
    address: of this machine, as the others reach it
    """

    counts: tuple[int, ...]
    processes: int
    max_restarts: int
    last_call: int
    address: str

    def __str__(self) -> str:
        return f"{self.counts[0]}:{self.counts[-1]} machines × {self.processes} processes"


def launch_on_machines(
    config_file: str,
    overrides: Sequence[str],
    accelerate_file: Path | None,
    nodes: str,
    processes: int | None,
    last_call: int | None = None,
    max_restarts: int | None = None,
) -> child.Ended:
    """Take part in a run on several machines, until it has ended or this machine has left it.

    nodes: as on the command line, MIN:MAX or a number
    processes: on each machine
    last_call, max_restarts: as in `AgentSettings`; None = the default

    Raises UserError before anything is started.
    """
    env = dict(os.environ)
    launched_already(env, "leave --nodes out")
    raise_any(launcher_problems(env), "the launch")
    least, most = parse_nodes(nodes)
    if processes is None:
        expected = "a whole number ≥ 1: the processes of each machine"
        raise UserError(Problem("--processes-per-node", None, expected), where="the launch")
    config = load_config(config_file, overrides)
    file = _file(accelerate_file, processes, (least, most), env)
    counts = _counts(config, file, (least, most), processes)
    # With the most machines that may train, what the file says must fit the config.
    largest = {**file.values, "num_machines": counts[-1]}
    file = replace(file, processes=counts[-1] * processes, values=largest)
    try:
        load_config(config_file, overrides, launch_rules(config_file, file, env))
    except UserError as error:
        where = f"{config_file} and {accelerate_file}" if accelerate_file else error.where
        raise UserError(*error.problems, where=where) from None
    check_file_locks(config.run_dir)
    settings = AgentSettings(
        tuple(counts),
        processes,
        MAX_RESTARTS if max_restarts is None else max_restarts,
        last_call or LAST_CALL_SECONDS,
        _own_address(file.values, env),
    )
    return _start_agent(config, file, settings, [config_file, *overrides], env)


def _start_agent(
    config: Config,
    file: LaunchFile,
    settings: AgentSettings,
    words: Sequence[str],
    env: Mapping[str, str],
) -> child.Ended:
    """Start the agent of this machine and wait for it. words: the config's file and overrides"""
    with tempfile.TemporaryDirectory(prefix="llmtrain-") as folder:
        if file.path is None:
            path = Path(folder) / "accelerate.yaml"
            file = written(file, path, config.training.precision)
        told = {name: text for name, text in file.environment.items() if name not in _OF_A_RANK}
        env = {**env, **told, LAUNCHED: str(report := Path(folder) / "ended")}
        if file.on_cpu:
            env |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "llmtrain.tools.launch.elastic", str(config.run_dir)]
        command += [json.dumps(asdict(settings)), "--config_file", str(file.path), *words]
        ended = run_launcher(command, env, report, config.run_dir, may_leave=True)
        if report.exists():
            return ended
    if ended.asked_to_stop:  # before the agent could know what it was asked
        said = "this machine has left the run before it took part"
        return child.Ended(0, said, asked_to_stop=True)
    message = (
        "error: the launcher of this machine was killed\n"
        "    next:     the same command joins the run again"
    )
    return child.Ended(RESTARTABLE, message, began=ended.began)


def parse_nodes(text: str) -> tuple[int, int]:
    """Return the least and the largest number of machines. text: MIN:MAX, or one number for both.

    Raises UserError.
    """
    found = _NODES.fullmatch(text.strip())
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        expected = "MIN:MAX, two whole numbers with 1 ≤ MIN ≤ MAX"
        raise UserError(
            Problem("--nodes", text, expected, "such as --nodes 1:4"), where="the launch"
        )
    return least, most


def _file(
    path: Path | None, processes: int, nodes: tuple[int, int], env: Mapping[str, str]
) -> LaunchFile:
    """Return what accelerate's file says, or what fits this machine if there is no file."""
    least, most = nodes
    if path is None:
        return of_this_machine(processes, env)
    file, problems = parse_launch_file(path, None)
    machines = file.values.get("num_machines", 1)
    if isinstance(machines, int) and machines != 1 and not least <= machines <= most:
        expected = f"a number from {least} to {most}, as --nodes says, or no such key"
        problems.append(Problem("num_machines", machines, expected))
    elif isinstance(machines, int) and machines > 0 and file.processes != machines * processes:
        expected = (
            f"num_machines × --processes-per-node = {machines} × {processes} = "
            f"{machines * processes}"
        )
        remedy = f"--processes-per-node {file.processes // machines or 1}"
        problems.append(Problem("num_processes", file.processes, expected, remedy))
    raise_any(problems, str(path))
    return file


def _counts(config: Config, file: LaunchFile, nodes: tuple[int, int], processes: int) -> list[int]:
    """Return the numbers of machines that may train; name the others on stderr."""
    cut = model_cut(file.environment, config.distributed)
    least, most = nodes
    every = range(least, most + 1)
    wrong = {
        count: problems
        for count in every
        if (problems := list(split_problems(config.training, count * processes, cut)))
    }
    counts = [count for count in every if count not in wrong]
    if not counts:
        raise UserError(*wrong[most], where=f"--nodes {least}:{most} × {processes} processes")
    for count in wrong:
        fewer = max((one for one in counts if one < count), default=None)
        then = f"{fewer} of them train" if fewer else "all wait for more"
        names = f"{count} machines ({count * processes} processes)"
        sys.stderr.write(f"the batch cannot be divided among {names}: {then}\n")
    return counts


def _own_address(values: Mapping[str, object], env: Mapping[str, str]) -> str:
    """Return the address by which other machines reach this one.

    In this order: PET_LOCAL_ADDR; the device that gloo or NCCL is told to use; on the way to the
    first machine of accelerate's file; on the way out of this network.
    """
    if own := env.get("PET_LOCAL_ADDR"):
        return own
    if device := env.get("GLOO_SOCKET_IFNAME") or env.get("NCCL_SOCKET_IFNAME"):
        return _address_of(device)
    try:
        return address_towards(str(values.get("main_process_ip") or _ELSEWHERE))[0]
    except UserError:
        if values.get("main_process_ip"):
            raise
        return "127.0.0.1"  # a machine without a network


def _address_of(device: str) -> str:
    import psutil

    addresses = psutil.net_if_addrs().get(device, ())
    for one in addresses:
        if one.family == socket.AF_INET:
            return one.address
    expected = (
        f"a network device of this machine with an address: {', '.join(psutil.net_if_addrs())}"
    )
    raise UserError(Problem("GLOO_SOCKET_IFNAME", device, expected), where="the launch")
