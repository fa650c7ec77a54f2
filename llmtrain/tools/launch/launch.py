"""Start a launcher around a config, pass signals on, and find out how the run ended.

    llmtrain train CONFIG --processes N       accelerate's, also with --accelerate FILE
    llmtrain train CONFIG --nodes MIN:MAX     torch's elastic agent, see `elastic`
    llmtrain.train(config, processes=N)       the command line, from a program or a notebook

accelerate's launcher takes a fixed number of machines. So `--nodes` starts torch's, with the
variables that accelerate's file becomes. Some numbers of machines may not divide the batch: they
are named, and machines wait while the next smaller number trains.

Several machines are told by which address they meet. Torch's launcher would ask the name service
whether this machine is the one where all meet, and by which address others reach it. On a machine
with two networks, or whose name means 127.0.1.1, both answers are wrong: no machine opens the
rendezvous, or each connects to itself. The routing table gives the right answers.

Processes that Python starts cannot run what is typed in a REPL or a notebook, so they run the
command line, with a config that is written to a temporary file. What that would print comes back as
a `Result` or an error. accelerate's `notebook_launcher` would fork this process instead, which
fails once it has used CUDA.
"""

import json
import logging
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

from llmtrain.config.binding import dump
from llmtrain.config.checks import Rule, apply
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config, DistributedConfig, TrainingConfig
from llmtrain.config.yaml12 import write
from llmtrain.distributed.launch import environment
from llmtrain.distributed.launch.named import example, is_true, named_family
from llmtrain.distributed.plan.memory import Hardware
from llmtrain.errors import (
    RESTARTABLE,
    PeerError,
    Problem,
    RefusedError,
    UserError,
    raise_any,
    usable,
)
from llmtrain.rundir.contents import LOGS
from llmtrain.rundir.lock import check_file_locks
from llmtrain.rundir.status import Result, read_status
from llmtrain.tools.launch import child
from llmtrain.tools.launch.file import LaunchFile, launch_values, parse_launch_file
from llmtrain.training.start.claim import rules_of_a_launch
from llmtrain.training.stop import LAUNCHED
from llmtrain.types import ModelCut

_log = logging.getLogger(__name__)
_SHOWN = "the config"  # in messages, in place of the temporary file


def meeting(backend: str, first: str) -> tuple[list[str], dict[str, str]]:
    """Return the settings for machines to meet at the machine whose address is `first`.

    The settings are options for `accelerate launch`, and variables for it and its ranks.

    backend: c10d or static

    Raises UserError if this machine has no route to that address.
    """
    # accelerate 1.15 ignores `rdzv_backend` in its file and uses its default, static.
    options = ["--rdzv_backend", backend]
    if backend != "c10d":
        return options, {}
    local, theirs = _addresses(first)
    here = local == theirs
    return [*options, "--rdzv_conf", f"is_host={int(here)}"], {
        "PET_LOCAL_ADDR": first if here else local,
        # torch 2.13 keeps the addresses of ranks for the next attempt of --max_restarts, and
        # some ranks then connect to dead ones.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _addresses(first: str) -> tuple[str, str]:
    """Return this machine's address on the route to `first`, and the address of `first`.

    Raises UserError if there is no route.
    """
    with usable("main_process_ip", first, "an address that this machine can reach"):
        entries = socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = entries[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: it asks the routing table
            return str(probe.getsockname()[0]), str(address[0])


_KEY = "distributed.strategy"


def launch(
    config_file: str,
    overrides: Sequence[str] = (),
    accelerate_file: Path | None = None,
    processes: int | None = None,
    env: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> child.Ended:
    """Train in several processes, and wait for them.

    accelerate_file: a config of accelerate; None = this machine, with its GPUs if it has any
    processes: in place of the file's number; without a file None = 1
    env: the environment of the ranks; None = that of this process
    output: a file for everything that they print; None = the streams of this process

    Raises UserError before anything is started.
    """
    env = dict(os.environ if env is None else env)
    _refuse_launcher(env, "leave --accelerate and --processes out")
    if accelerate_file is None:
        file, wrong = _of_this_machine(processes or 1, env), list[Problem]()
    else:
        file, wrong = parse_launch_file(accelerate_file, processes)
    rules = [lambda: wrong, *_rules(config_file, file, env)]
    config = _load_both(config_file, overrides, accelerate_file, rules)
    with tempfile.TemporaryDirectory(prefix="llmtrain-") as folder:
        if file.path is None:
            file = _written(file, Path(folder) / "accelerate.yaml", config.training.precision)
        env[LAUNCHED] = str(report := Path(folder) / "ended")
        if file.on_cpu:  # torch's launcher does not set these, and sharding looks for devices
            env |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        options: list[str] = []
        if file.machines > 1:
            options, met = meeting(file.rendezvous, str(file.values["main_process_ip"]))
            env = {**met, **env}
        elif file.values.get("main_process_port") is None:
            options = ["--main_process_port", "0"]  # any free one, so two runs do not share one
        launcher = [sys.executable, "-m", "llmtrain.tools.launch.launcher", str(config.run_dir)]
        launcher += ["--config_file", str(file.path), "--num_processes", str(file.processes)]
        command = [*launcher, *options, "-m", "llmtrain", "train", config_file, *overrides]
        return run_launcher(command, env, report, config.run_dir, output)


def _refuse_launcher(env: Mapping[str, str], remedy: str) -> None:
    """Raise UserError if a launcher has started this process, or its variables were left behind.

    Each rank would start all again.
    """
    for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", LAUNCHED):
        if name in env:
            expected = "no launcher around this process: it starts one itself"
            raise UserError(Problem(name, env[name], expected, remedy), where="the launch")
    raise_any(environment.launcher_problems(env), "the launch")


def _written(file: LaunchFile, path: Path, precision: str) -> LaunchFile:
    """Write the launch of this machine to a file. precision: as the config asks for it."""
    fp32 = precision == "fp32" or (file.on_cpu and precision == "auto")
    values = {**file.values, "mixed_precision": "no" if fp32 else "bf16"}
    path.write_text(write(values), encoding="utf-8")
    return replace(file, path=path)


def _rules(config_file: str, file: LaunchFile, env: Mapping[str, str]) -> list[Rule]:
    """Return the rules for the config of a launch. env: in which the launcher is started."""
    variables = file.environment
    exported = {} if file.path else {name: env[name] for name in env.keys() - variables.keys()}
    ranks = {**exported, **variables}
    deepspeed = partial(_deepspeed_problems, ranks)
    return [*rules_of_a_launch(config_file, ranks, exported), deepspeed]


def _deepspeed_problems(
    env: Mapping[str, str], distributed: DistributedConfig
) -> Iterator[Problem]:
    """Check that DeepSpeed is installed if it is needed: the launcher would import it first."""
    by_file, strategy = named_family(env) == "zero", distributed.strategy
    if (by_file or environment.family(strategy) == "zero") and find_spec("deepspeed") is None:
        key, value = ("distributed_type", "DEEPSPEED") if by_file else (_KEY, strategy)
        expected = "fsdp2 or ddp: the package deepspeed is not installed"
        remedy = f"{environment.INSTALL_DEEPSPEED}, or {example('fsdp2')}"
        yield Problem(key, value, expected, remedy)


def plain_launch_problems(config: Config, processes: int, env: Mapping[str, str]) -> list[Problem]:
    """Return why a start of this many processes here would be refused; nothing is started."""
    rules = _rules("", _of_this_machine(processes, env), env)
    return environment.launcher_problems(env) or list(apply(rules, dict(config)))


def _of_this_machine(processes: int, env: Mapping[str, str]) -> LaunchFile:
    """Return the settings of a start without a file of accelerate, but for the precision."""
    here = Hardware(0, None, processes, 1, cpu=not has_gpu(env))
    values = launch_values("ddp", here, "fp32")
    # MULTI_CPU would start only one process. MULTI_GPU also works with one process; it uses
    # torch's launcher, which passes signals on, as accelerate's own does not.
    return LaunchFile(None, processes, values | {"distributed_type": "MULTI_GPU"})


def has_gpu(env: Mapping[str, str]) -> bool:
    """Whether this machine has a visible GPU. Does not import torch."""
    hidden = env.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    asked_cpu = is_true(env, "ACCELERATE_USE_CPU")
    present = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    return present and not hidden and not asked_cpu


def run_launcher(
    command: Sequence[str],
    env: Mapping[str, str],
    report: Path,
    run_dir: Path,
    output: IO[bytes] | None = None,
    *,
    may_leave: bool = False,
) -> child.Ended:
    """Start a launcher, wait for it and for ranks that outlive it; return how the run ended.

    report: where rank 0 writes its exit report
    may_leave: whether the launcher knows SIGUSR1, and gets it instead of SIGTERM

    Meanwhile SIGTERM, SIGINT, SIGHUP and SIGUSR1 are passed on to the launcher.
    """

    def wait_for_ranks(others: set[int]) -> None:
        # Ranks whose launcher was killed stop and save by themselves.
        child.wait_until(lambda: report.exists() or not child.living_children(others))

    with child.passing_signals_on(may_leave=may_leave) as forward:
        end = child.run_child(command, env, run_dir, forward, wait_for_ranks, report, output)
    if report.exists():
        return end
    message = (
        "error: rank 0 ended without a word\n"
        f"    next:     look into {run_dir / LOGS}, where launcher.log says how each rank ended; "
        "the same command resumes"
    )
    # If the launcher was killed before there was a run, nothing says that a restart may help.
    code = 1 if end.exit_code == RESTARTABLE and not end.began else end.exit_code
    return replace(end, exit_code=code, message=message if code else "")


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

    counts: Sequence[int]
    processes: int
    max_restarts: int
    last_call: int
    address: str

    def __str__(self) -> str:
        machines = f"{', '.join(map(str, self.counts))} machines × {self.processes} processes"
        return f"{machines}, --last-call {self.last_call}, --max-restarts {self.max_restarts}"


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

    nodes, processes: as on the command line, see `parse_nodes`
    last_call, max_restarts: as in `AgentSettings`; None = the default

    Raises UserError before anything is started.
    """
    env = dict(os.environ)
    _refuse_launcher(env, "leave --nodes out")
    asked = parse_nodes(nodes, processes)
    config = load_config(config_file, overrides)
    file, counts, others = launch_of_nodes(config, accelerate_file, asked, env)
    for other in others:
        sys.stderr.write(f"{other}\n")
    _load_both(config_file, overrides, accelerate_file, _rules(config_file, file, env))
    check_file_locks(config.run_dir)
    settings = AgentSettings(
        counts,
        asked.processes,
        MAX_RESTARTS if max_restarts is None else max_restarts,
        last_call or LAST_CALL_SECONDS,
        _own_address(file.values, env),
    )
    return _start_agent(config, file, settings, [config_file, *overrides], env)


def _load_both(
    config_file: str, overrides: Sequence[str], accelerate_file: Path | None, rules: Sequence[Rule]
) -> Config:
    """Load the config with the rules of its launch file. An error is one of both files."""
    try:
        return load_config(config_file, overrides, rules)
    except UserError as error:
        where = f"{config_file} and {accelerate_file}" if accelerate_file else error.where
        raise UserError(*error.problems, where=where) from None


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
            file = _written(file, path, config.training.precision)
        shared = {name: text for name, text in file.environment.items() if name not in _OF_A_RANK}
        env = {**env, **shared, LAUNCHED: str(report := Path(folder) / "ended")}
        if file.on_cpu:
            env |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "llmtrain.tools.launch.elastic", str(config.run_dir)]
        command += [json.dumps(asdict(settings)), "--config_file", str(file.path), *words]
        ended = run_launcher(command, env, report, config.run_dir, may_leave=True)
        if report.exists():
            return ended
    if ended.asked_to_stop:  # before the agent could know what it was asked
        return child.Ended(0, "stopped before this machine took part", asked_to_stop=True)
    message = (
        "error: the launcher of this machine was killed\n"
        "    next:     the same command joins the run again"
    )
    return child.Ended(RESTARTABLE, message, began=ended.began)


class Nodes(NamedTuple):
    """The least and the largest number of machines, and the processes of each."""

    least: int
    most: int
    processes: int


def parse_nodes(text: str, processes: int | None) -> Nodes:
    """Read the options of machines that come and go.

    text: MIN:MAX, or one number for both
    processes: of each machine; None = not given

    Raises UserError.
    """
    match = _NODES.fullmatch(text.strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        expected = "MIN:MAX, two whole numbers with 1 ≤ MIN ≤ MAX"
        problem = Problem("--nodes", text, expected, "such as --nodes 1:4")
        raise UserError(problem, where="the launch")
    if processes is None:
        expected = "a whole number ≥ 1: the processes of each machine"
        raise UserError(Problem("--processes-per-node", None, expected), where="the launch")
    return Nodes(least, most, processes)


def launch_of_nodes(
    config: Config, accelerate_file: Path | None, nodes: Nodes, env: Mapping[str, str]
) -> tuple[LaunchFile, list[int], list[str]]:
    """Return what starts on the most machines that may train, and what `node_counts` returns.

    Raises UserError.
    """
    file = _file(accelerate_file, nodes, env)
    cut = environment.model_cut(file.environment, config.distributed)
    counts, others = node_counts(config.training, cut, nodes)
    # With the most machines that may train, what the file says must fit the config.
    largest = {**file.values, "num_machines": counts[-1]}
    file = replace(file, processes=counts[-1] * nodes.processes, values=largest)
    return file, counts, others


def _file(path: Path | None, nodes: Nodes, env: Mapping[str, str]) -> LaunchFile:
    """Return what accelerate's file says, or what fits this machine if there is no file."""
    if path is None:
        return _of_this_machine(nodes.processes, env)
    file, problems = parse_launch_file(path, None)
    machines = file.values.get("num_machines", 1)
    if isinstance(machines, int) and machines != 1 and not nodes.least <= machines <= nodes.most:
        expected = f"a number from {nodes.least} to {nodes.most}, as --nodes says, or no such key"
        problems.append(Problem("num_machines", machines, expected))
    raise_any(problems, str(path))
    return file


def node_counts(
    training: TrainingConfig, cut: ModelCut, nodes: Nodes
) -> tuple[list[int], list[str]]:
    """Return the numbers of machines that divide the batch, and a sentence on each other number.

    Raises UserError if no number does.
    """
    least, most, processes = nodes
    every = range(least, most + 1)
    wrong = {
        count: problems
        for count in every
        if (problems := list(environment.split_problems(training, count * processes, cut)))
    }
    counts = [count for count in every if count not in wrong]
    if not counts:
        raise UserError(*wrong[most], where=f"--nodes {least}:{most} × {processes} processes")
    others = []
    for count in wrong:
        fewer = max((one for one in counts if one < count), default=None)
        then = f"{fewer} of them train" if fewer else "all wait for more"
        names = f"{count} machines ({count * processes} processes)"
        others.append(f"the batch cannot be divided among {names}: {then}")
    return counts, others


def _own_address(values: Mapping[str, object], env: Mapping[str, str]) -> str:
    """Return the address by which other machines reach this one.

    In this order: PET_LOCAL_ADDR; the device that gloo or NCCL is told to use; on the way to the
    first machine of accelerate's file; on the way out of this network.
    """
    if address := env.get("PET_LOCAL_ADDR"):
        return address
    if device := env.get("GLOO_SOCKET_IFNAME") or env.get("NCCL_SOCKET_IFNAME"):
        import psutil

        interfaces = psutil.net_if_addrs()
        for one in interfaces.get(device, ()):
            if one.family == socket.AF_INET:
                return one.address
        expected = f"a network device of this machine with an address: {', '.join(interfaces)}"
        raise UserError(Problem("GLOO_SOCKET_IFNAME", device, expected), where="the launch")
    try:
        return _addresses(str(values.get("main_process_ip") or _ELSEWHERE))[0]
    except UserError:
        if values.get("main_process_ip"):
            raise
        sys.stderr.write(
            "this machine has no way out of its network, so no other machine can reach it; "
            "PET_LOCAL_ADDR names an address by which they can\n"
        )
        return "127.0.0.1"


def train_in_processes(config: Config, processes: int) -> Result:
    """Start `accelerate launch` on this machine, wait for the run, and return how it ended.

    config: a checked one; it is not changed

    Raises UserError or RunError by the exit code of the run.
    """
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        expected = "a whole number ≥ 1, or None for this process alone"
        raise UserError(Problem("processes", processes, expected))
    values = config.model_dump(mode="json", by_alias=True)
    # What was set on a command line, so that the run records it as such.
    overrides = [
        f"{key}={json.dumps(_value(values, key), ensure_ascii=False)}"
        for key, origin in config.origins.items()
        if origin == "command line"
    ]
    with tempfile.TemporaryDirectory(prefix="llmtrain-") as folder:
        path = Path(folder) / "config.yaml"
        # Without the defaults: the run records for each key in the file that somebody has set it.
        path.write_text(dump(config, whole=False), encoding="utf-8")
        try:
            ended = launch(str(path), overrides, processes=processes)
        except UserError as error:
            where = _SHOWN if error.where == str(path) else error.where
            raise UserError(*error.problems, where=where) from None
    message = ended.message.replace(str(path), _SHOWN).removeprefix("error: ")
    if ended.exit_code == UserError.exit_code:
        raise RefusedError(message)
    if ended.exit_code:
        raise PeerError(message, ended.exit_code, rank=0)
    if message:
        _log.warning("%s", message)
    status = read_status(config.run_dir)
    state, reason = status.get("state"), status.get("reason")
    if not ended.began:  # it was asked to stop before there was a rank
        state, reason = "stopped", "signal"
    return Result(config.run_dir, str(state), 0, reason, int(status.get("step") or 0))


def _value(tree: Any, key: str) -> object:
    for part in key.split("."):
        tree = tree[int(part) if isinstance(tree, list) else part]
    return tree
