"""Start `accelerate launch` around a config, pass signals on, and find out how the run ended.

Several machines are told by which address they meet. Torch's launcher would ask the name service
whether this machine is the one where all meet, and by which address others reach it. On a machine
with two networks, or whose name means 127.0.1.1, both answers are wrong: no machine opens the
rendezvous, or each connects to itself. The routing table gives the right answers.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from llmtrain.config.checks import Rule, apply
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config, DistributedConfig
from llmtrain.config.yaml12 import write
from llmtrain.distributed.launch.environment import INSTALL_DEEPSPEED, family, launcher_problems
from llmtrain.distributed.launch.named import example, is_true, named_family
from llmtrain.distributed.plan.memory import Hardware
from llmtrain.errors import RESTARTABLE, Problem, UserError, raise_any
from llmtrain.rundir.contents import LOGS
from llmtrain.tools.launch import child
from llmtrain.tools.launch.file import LaunchFile, launch_values, parse_launch_file
from llmtrain.training.start.claim import rules_of_a_launch
from llmtrain.training.stop import LAUNCHED


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
    own, theirs = address_towards(first)
    here = own == theirs
    return [*options, "--rdzv_conf", f"is_host={int(here)}"], {
        "PET_LOCAL_ADDR": first if here else own,
        # torch 2.13 keeps the addresses of ranks for the next attempt of --max_restarts, and
        # some ranks then connect to dead ones.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def address_towards(first: str) -> tuple[str, str]:
    """Return this machine's address on the route to `first`, and the address of `first`.

    Raises UserError if there is no route.
    """
    try:
        found = socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: it asks the routing table
            return str(probe.getsockname()[0]), str(address[0])
    except OSError as error:
        expected = f"an address that this machine can reach ({error.strerror or error})"
        raise UserError(Problem("main_process_ip", first, expected)) from error


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
    processes: in place of the file's number
    env: the environment of the ranks; None = that of this process
    output: a file for everything that they print; None = the streams of this process

    Raises UserError before anything is started.
    """
    env = dict(os.environ if env is None else env)
    launched_already(env, "leave --accelerate and --processes out")
    raise_any(launcher_problems(env), "the launch")
    if accelerate_file is None:
        file, wrong = of_this_machine(processes or 1, env), list[Problem]()
    else:
        file, wrong = parse_launch_file(accelerate_file, processes)
    rules = [lambda: wrong, *launch_rules(config_file, file, env)]
    try:
        config = load_config(config_file, overrides, rules)
    except UserError as error:
        where = f"{config_file} and {accelerate_file}" if accelerate_file else error.where
        raise UserError(*error.problems, where=where) from None
    with tempfile.TemporaryDirectory(prefix="llmtrain-") as folder:
        if file.path is None:
            file = written(file, Path(folder) / "accelerate.yaml", config.training.precision)
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


def launched_already(env: Mapping[str, str], remedy: str) -> None:
    """Raise UserError if a launcher has started this process: each rank would start all again."""
    for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", LAUNCHED):
        if name in env:
            expected = "no launcher around this process: it starts one itself"
            raise UserError(Problem(name, env[name], expected, remedy), where="the launch")


def written(file: LaunchFile, path: Path, precision: str) -> LaunchFile:
    """Write the launch of this machine to a file. precision: as the config asks for it."""
    fp32 = precision == "fp32" or (file.on_cpu and precision == "auto")
    values = {**file.values, "mixed_precision": "no" if fp32 else "bf16"}
    path.write_text(write(values), encoding="utf-8")
    return replace(file, path=path)


def launch_rules(config_file: str, file: LaunchFile, env: Mapping[str, str]) -> list[Rule]:
    """Return the rules for the config of a launch. env: in which the launcher is started."""
    told = file.environment
    exported = {} if file.path else {name: env[name] for name in env.keys() - told.keys()}
    ranks = {**exported, **told}
    deepspeed = partial(_deepspeed_problems, ranks)
    return [*rules_of_a_launch(config_file, ranks, exported), deepspeed]


def _deepspeed_problems(
    env: Mapping[str, str], distributed: DistributedConfig
) -> Iterator[Problem]:
    """Check that DeepSpeed is installed if it is needed: the launcher would import it first."""
    by_file, strategy = named_family(env) == "zero", distributed.strategy
    if (by_file or family(strategy) == "zero") and find_spec("deepspeed") is None:
        key, found = ("distributed_type", "DEEPSPEED") if by_file else (_KEY, strategy)
        expected = "fsdp2 or ddp: the package deepspeed is not installed"
        yield Problem(key, found, expected, f"{INSTALL_DEEPSPEED}, or {example('fsdp2')}")


def plain_launch_problems(config: Config, processes: int, env: Mapping[str, str]) -> list[Problem]:
    """Return why a start of this many processes here would be refused; nothing is started."""
    rules = launch_rules("", of_this_machine(processes, env), env)
    return launcher_problems(env) or list(apply(rules, dict(config)))


def of_this_machine(processes: int, env: Mapping[str, str]) -> LaunchFile:
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
    there = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    return there and not hidden and not asked_cpu


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
