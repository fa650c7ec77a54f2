"""Checks of this machine: devices, memory, limits, software, and whether processes find each other.

Things are tried where that is possible: every device multiplies two matrices, and the compiler
compiles a file. Whether processes meet depends on the environment, accelerate's files and the
addresses in them. The bandwidth of an all-reduce is measured between two real processes:

    doctor ── TCPStore ──┬── rank 0   python -m llmtrain.tools.doctor.machine 0 PORT BACKEND
                         └── rank 1   …                                       1 PORT BACKEND

They are killed after a time limit, so that a collective that would hang a run gives an error line
here. They exit by `os._exit`, as gloo's threads may outlive the interpreter.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain import system
from llmtrain.config.schema import Config
from llmtrain.distributed.launch.environment import (
    INSTALL_DEEPSPEED,
    awaited,
    check_environment,
    family,
    launch_problems,
    launcher_problems,
    launcher_variables,
    world_size,
)
from llmtrain.distributed.launch.named import example, is_true
from llmtrain.errors import raise_any
from llmtrain.metrics.trackers import check_installed
from llmtrain.text import size
from llmtrain.tools.doctor.context import (
    DoctorContext,
    Verdict,
    error,
    join,
    ok,
    refusal,
    run_check,
    warning,
)
from llmtrain.tools.launch.file import LaunchFile
from llmtrain.tools.launch.launch import Nodes, has_gpu, launch_of_nodes

if TYPE_CHECKING:
    import torch


_ROWS = 4096  # of the matrices that a GPU multiplies
_LEAST_MEMORY = 2 << 30
_LEAST_SHARED_MEMORY = 1 << 30
_LEAST_LIMIT = 1024  # open files, processes
_COMPILE_SECONDS = 60
_OFFLOAD = "zero3_offload"
_SOURCE = "#include <Python.h>\n#include <vector>\nint main() { std::vector<int> v; return 0; }\n"
SHARED_MEMORY = Path("/dev/shm")


# Library → the releases that passed the tests, the lowest first; scripts/try_versions.sh runs them,
# docs/reference/versions.md has the results. Later ones are not allowed by the package.
TESTED = {
    "torch": ("2.13", "2.14"),
    "accelerate": ("1.10", "1.15"),
    "transformers": ("5.12", "5.23", "5.24"),
    "deepspeed": ("0.19",),
    "peft": ("0.21",),
}


def devices(context: DoctorContext) -> Verdict:
    """Check the GPUs and their memory, or the CPU, by a matrix product in fp32 and in bf16."""
    import torch

    from llmtrain.distributed.engines.accelerator import cpu_rates

    if count := gpus(context):
        looked = [run_check(partial(_gpu, index)) for index in range(count)]
        broken = [
            error(f"GPU {index}: {one.found}", one.remedy)
            for index, one in enumerate(looked)
            if isinstance(one, Verdict)
        ]
        return join([*_by_kind([one for one in looked if isinstance(one, Gpu)], context), *broken])
    rates = cpu_rates()
    finding = f"{_threads(context)}; {rates}: precision auto is {rates.faster}"
    if sys.platform == "darwin":
        return ok(f"macOS: training is on the CPU, never on Apple's GPU; {finding}")
    if has_gpu(context.env):
        built = torch.version.cuda or torch.version.hip or "without any"
        unused = f"a GPU is there, but torch {torch.__version__} (CUDA: {built}) cannot use it"
        remedy = "install a build of torch for this driver, or set CUDA_VISIBLE_DEVICES=''"
        return warning(f"{unused}; {finding}", remedy)
    if context.launch and not context.launch.on_cpu and context.here > 1:
        meant = f"no GPU, though the launch file is for {context.here} of them here"
        return warning(f"{meant}; {finding}", "use_cpu: true if a rehearsal on processors is meant")
    return ok(f"no GPU; {finding}")


def _threads(context: DoctorContext) -> str:
    """Return the cores of this machine, and with how many threads a process of the run computes."""
    env = {**context.env, "LOCAL_WORLD_SIZE": str(context.here)}
    asked = context.config.training.threads if context.config else "auto"
    exact = context.config is not None and context.config.training.same_bits and not gpus(context)
    threads = system.decide_threads(asked, None, env, same_bits=exact)
    usable = system.cores()
    plural = "s" if threads.count > 1 else ""
    why = "" if usable.why in threads.why and context.here == 1 else f" ({threads.why})"
    return f"{usable.why}; {threads.count} thread{plural} a process{why}"


def gpus(context: DoctorContext) -> int:
    """Return how many GPUs a run would use on this machine."""
    import torch

    by_file = context.launch is not None and context.launch.on_cpu
    on_cpu = by_file or is_true(context.env, "ACCELERATE_USE_CPU")
    return torch.cuda.device_count() if torch.cuda.is_available() and not on_cpu else 0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    total: its memory in bytes
    free: bytes of it that are free
    bf16: whether it computes in bf16
    speeds: of a product in fp32 and in bf16, in words
    """

    index: int
    name: str
    total: int
    free: int
    bf16: bool
    speeds: str


def _gpu(index: int) -> Gpu:
    import torch

    device = torch.device("cuda", index)
    free, total = torch.cuda.mem_get_info(device)
    with torch.cuda.device(device):
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Gpu(index, torch.cuda.get_device_name(device), total, free, bf16, _speeds(device))


def _by_kind(working: Sequence[Gpu], context: DoctorContext) -> Iterator[Verdict]:
    """Yield a verdict for each kind of GPU, and one for each problem of them or their number."""
    kinds: dict[tuple[str, int], list[Gpu]] = {}
    for gpu in working:
        kinds.setdefault((gpu.name, gpu.total), []).append(gpu)
    for (name, total), same in kinds.items():
        least = size(min(gpu.free for gpu in same))
        yield ok(f"{len(same)} × {name}: {size(total)}, {least} free, {same[0].speeds}")
    if len({total for _, total in kinds}) > 1:
        least_gib = min(total for _, total in kinds) / 2**30
        remedy = f"distributed.device_memory_gb={least_gib:.1f}, which all of them have"
        yield warning("their memories differ", remedy)
    for gpu in working:
        if gpu.free < 0.9 * gpu.total:
            held = f"GPU {gpu.index}: {size(gpu.total - gpu.free)} are held by other processes"
            yield warning(held, "see nvidia-smi, or choose others by CUDA_VISIBLE_DEVICES")
        if context.config and context.config.training.precision == "bf16" and not gpu.bf16:
            yield error(f"GPU {gpu.index} does not compute in bf16", "training.precision=fp32")
    here, count = context.here, len(working)
    if context.launch and here > count:  # each process of the launch file needs a GPU of its own
        more = f"{here} processes on this machine (num_processes {context.processes}), {count} GPUs"
        fewer = f"num_processes: {count * context.machines}"
        fewer = f"--processes-per-node {count}" if context.come_and_go else fewer
        yield error(more, f"{fewer}, or use_cpu: true")


def _speeds(device: torch.device) -> str:
    """Return the GFLOP/s of a product in each precision; raises if the device cannot compute."""
    import torch

    parts = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        matrix = torch.ones(_ROWS, _ROWS, device=device, dtype=dtype)
        seconds = min(_seconds(matrix) for _ in range(3))
        parts.append(f"{name} {2 * _ROWS**3 / seconds / 1e9:,.0f}")
    return f"{' and '.join(parts)} GFLOP/s"


def _seconds(matrix: torch.Tensor) -> float:
    start = time.perf_counter()
    product = matrix @ matrix
    product[0, 0].item()  # waits for the device
    return time.perf_counter() - start


def memory(_context: DoctorContext) -> Verdict:
    """Check how much of the host's memory is available, within this process's limit."""
    import psutil

    from llmtrain.metrics.memory import host_bytes

    host = psutil.virtual_memory()
    total = host_bytes()
    available = min(host.available, total)
    finding = f"{size(available)} of {size(total)} available"
    if total < host.total:
        finding += f" (a limit: the machine has {size(host.total)})"
    if available < _LEAST_MEMORY:
        remedy = "end other programs: each rank takes about 1 GiB for libraries alone"
        return warning(finding, remedy)
    return ok(finding)


def limits(context: DoctorContext) -> Verdict:
    """Check the limits of this session: open files, processes and shared memory."""
    verdicts = [
        _limit(resource.RLIMIT_NOFILE, "open files", "ulimit -n 65536"),
        _limit(resource.RLIMIT_NPROC, "processes and threads", "ulimit -u 65536"),
    ]
    if gpus(context) > 1 and SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        finding = f"{size(free)} free in {SHARED_MEMORY}"
        remedy = "NCCL needs it between GPUs: docker run --shm-size=8g, or mount it larger"
        verdicts.append(ok(finding) if free >= _LEAST_SHARED_MEMORY else warning(finding, remedy))
    return join(verdicts)


def _limit(which: int, what: str, remedy: str) -> Verdict:
    soft, _ = resource.getrlimit(which)
    if soft == resource.RLIM_INFINITY:
        return ok(f"{what}: unlimited")
    finding = f"{what}: {soft:,}"
    return ok(finding) if soft >= _LEAST_LIMIT else warning(finding, remedy)


def versions(context: DoctorContext) -> Verdict:
    """Check the libraries against the tested releases, and for the packages of the trackers."""
    if context.config:
        check_installed(context.config.logging.trackers)
    looked = [_version(name, releases, context) for name, releases in TESTED.items()]
    return join([ok(f"Python {platform.python_version()}"), *looked])


def _version(name: str, releases: Sequence[str], context: DoctorContext) -> Verdict:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        if name != "deepspeed":
            return error(f"no {name}", f"pip install {name}")
        if family(context.strategy) != "zero":
            return ok("no deepspeed (only the zero strategies need it)")
        finding = f"no deepspeed, which distributed.strategy {context.strategy} is"
        return error(finding, INSTALL_DEEPSPEED)
    finding, release = f"{name} {version}", _release(version)
    tested = [_release(one) for one in releases]
    if release < tested[0]:
        return error(f"{finding} (needs {releases[0]})", f"pip install '{name}>={releases[0]}'")
    if release in tested:
        return ok(finding)
    finding = f"{finding} (tried with {', '.join(releases)} only)"
    remedy = f"pip install '{name}=={releases[-1]}.*'"
    return error(finding, remedy) if release > tested[-1] else warning(finding, remedy)


def _release(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (2, 13) for 2.13.0+cpu."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def compiler(context: DoctorContext) -> Verdict:
    """Check what DeepSpeed builds its extensions with, by compiling: headers may be missing."""
    missing = [*_without_compiler(), *([] if shutil.which("ninja") else ["no ninja in PATH"])]
    if not missing:
        return ok("C++ compiler, Python's headers and ninja build extensions")
    finding = ", ".join(missing)
    remedy = "install g++, Python's headers (python3-dev) and ninja, and activate the environment"
    if _builds(context):
        return error(f"{finding}: {context.strategy} builds DeepSpeed's Adam", remedy)
    if context.strategy == _OFFLOAD or (context.strategy == "auto" and gpus(context)):
        return warning(f"{finding}: {_OFFLOAD} is out of reach on GPUs", remedy)
    return ok(f"{finding} (only {_OFFLOAD} on GPUs needs a compiler)")


def _builds(context: DoctorContext) -> bool:
    """Whether the run compiles an extension. On CPUs torch's own Adam is used instead."""
    return context.strategy == _OFFLOAD and gpus(context) > 0


def _without_compiler() -> list[str]:
    """Return what is wrong with the C++ compiler; an empty list if it compiles."""
    name = os.environ.get("CXX", "c++")  # as torch chooses it
    command = [*name.split(), "-x", "c++", "-fsyntax-only", "-"]
    include = sysconfig.get_path("include")
    try:
        done = subprocess.run(
            [*command, f"-I{include}"],
            input=_SOURCE,
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        return [f"no C++ compiler ({name})"]
    except (OSError, subprocess.TimeoutExpired) as broken:
        return [f"{name} does not run ({broken})"]
    if done.returncode == 0:
        return []
    lines = [line for line in done.stderr.splitlines() if "error" in line] or ["it fails"]
    return [f"{name} does not compile: {lines[0].strip()}"]


def extensions(context: DoctorContext) -> Verdict:
    """Check for left-over locks among torch's extensions: each blocks every later build."""
    from torch.utils import cpp_extension

    from llmtrain.distributed.engines.zero import stale_locks

    given = context.env.get("TORCH_EXTENSIONS_DIR")  # by default one for each Python and torch
    default = Path(cpp_extension.get_default_build_root())
    folders = [Path(given)] if given else sorted(default.glob("*"))
    left = [lock for folder in folders for lock in stale_locks(folder, context.env)]
    if not left:
        return ok("no lock left behind")
    named = ", ".join(str(lock) for lock in left)
    finding = f"a build was cut off: {named}, held by no process here; DeepSpeed would hang"
    remedy = f"rm {' '.join(str(lock) for lock in left)} (unless another machine builds there)"
    return (error if _builds(context) else warning)(finding, remedy)


_REACH_SECONDS = 5.0


def environment(context: DoctorContext) -> Verdict:
    """Check for variables that a launcher left behind, or that contradict the config."""
    if "LOCAL_RANK" in context.env and (size := world_size(context.env)) > 1:
        finding = (
            f"RANK = {context.env.get('RANK')}, WORLD_SIZE = {size}: a launcher started this, or "
            f"left its variables behind, and llmtrain train would wait for {awaited(context.env)}"
        )
        names = " ".join(launcher_variables(context.env))
        return error(finding, f"unset {names}; under a launcher: start llmtrain doctor by itself")
    if "LOCAL_RANK" in context.env:
        finding = f"LOCAL_RANK = {context.env['LOCAL_RANK']}: a launcher started this"
        return warning(finding, "start llmtrain doctor by itself, once on each machine")
    if context.config is None or context.launch is not None:
        problems = launcher_problems(context.env)
        return refusal(problems) if problems else ok("no traces of a launcher")
    check_environment(context.env, context.config.distributed, context.config.training)
    return ok("nothing that contradicts the config, no traces of a launcher")


def default_file(context: DoctorContext) -> Verdict:
    """Check for the config file that accelerate uses when none is named."""
    from accelerate.commands.config.config_args import default_config_file

    path = Path(default_config_file)
    if not path.is_file():
        return ok("no default config of accelerate")
    if context.launch is not None:
        named = context.launch.path or "--nodes"
        return ok(f"{path} is there; {named} is named and takes its place")
    finding = f"accelerate launch without --config_file takes {path}, which nobody named"
    return warning(finding, f"name one: --config_file FILE, such as {example('ddp')}")


def describe_launch(file: LaunchFile) -> Verdict:
    """Return in words what a valid file of accelerate starts."""
    machines = f"on {file.machines} machines" if file.machines > 1 else "on this machine"
    count = f"{file.processes} process{'es' * (file.processes > 1)}"
    return ok(f"{file.path}: {count} {machines}, {file.values.get('distributed_type', 'NO')}")


def look_at_nodes(
    config: Config, accelerate_file: Path | None, nodes: Nodes, env: Mapping[str, str]
) -> tuple[LaunchFile, Verdict]:
    """Return what starts on the most machines, and how many of them may train.

    Raises UserError for what a start would refuse.
    """
    file, counts, others = launch_of_nodes(config, accelerate_file, nodes, env)
    problems = launch_problems(file.environment, {}, config.distributed, config.training)
    raise_any(problems, str(file.path or "--nodes"))
    machines = f"{', '.join(map(str, counts))} machine{'s' * (counts[-1] > 1)}"
    finding = f"{machines} × {nodes.processes} process{'es' * (nodes.processes > 1)}"
    if not others:
        return file, ok(finding)
    remedy = "a training.global_batch_size that all numbers divide, unless some may wait"
    return file, warning("; ".join([finding, *others]), remedy)


def rendezvous(context: DoctorContext) -> Verdict:
    """Check whether ranks can meet: on a free port here, and at the launch file's address."""
    with socket.create_server(("127.0.0.1", 0)) as server:  # bytes are sent by `all_reduce`
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), _REACH_SECONDS).close()
    free = ok(f"port {port} of 127.0.0.1 is free and answers")
    if context.come_and_go:  # they meet in the run directory, see `directory`
        return free
    return join([free, *_own_name(context), *_named_address(context)])


def _own_name(context: DoctorContext) -> Iterator[Verdict]:
    """Warn if other machines cannot reach this one by its name, which accelerate gives to them."""
    if context.machines == 1:
        return
    name = socket.gethostname()
    addresses = _addresses(name)
    if not addresses or all(ipaddress.ip_address(one).is_loopback for one in addresses):
        meaning = ", ".join(addresses) or "nothing"
        finding = f"this machine's name {name} means {meaning}, which no other machine can reach"
        remedy = f"launch by llmtrain train --accelerate FILE, or let {name} mean its address"
        yield warning(finding, f"{remedy} (DNS or /etc/hosts)")


def _named_address(context: DoctorContext) -> Iterator[Verdict]:
    values = context.launch.values if context.launch else {}
    name, port = values.get("main_process_ip"), values.get("main_process_port")
    if name is None and not isinstance(port, int):
        return
    host = str(name) if name is not None else "127.0.0.1"
    addresses = _addresses(host)
    if not addresses:
        yield error(f"main_process_ip {host} is no address", "the first machine's name or address")
    elif context.machines > 1 and ipaddress.ip_address(addresses[0]).is_loopback:
        finding = f"main_process_ip {host} ({addresses[0]}) is every machine's own loopback"
        yield error(finding, "the address of the first machine that the others reach it by")
    elif isinstance(port, int):
        yield _port(host, addresses[0], port, context)


def _addresses(host: str) -> list[str]:
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in entries))


def _port(host: str, address: str, port: int, context: DoctorContext) -> Verdict:
    """Bind the port if the address is this machine's; else try to connect to it."""
    place = f"{host}:{port}"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if port == 0:
        return ok(f"{host}: any free port")
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((address, port))
        except OSError as failed:
            if failed.errno == errno.EADDRNOTAVAIL:
                return _knock(place, address, port, context)
            finding = f"{place} cannot be bound: {failed.strerror}"
            return error(finding, "main_process_port: another one, or end what listens there")
    return ok(f"{place} is this machine's, and free")


def _knock(place: str, address: str, port: int, context: DoctorContext) -> Verdict:
    """Connect to a port of another machine: it must answer, but nothing needs to listen yet."""
    rank = context.launch.values.get("machine_rank") if context.launch else None
    if context.machines == 1 or (
        rank == 0 and context.launch and context.launch.rendezvous == "static"
    ):
        finding = f"{place} is not an address of this machine, where rank 0 would listen"
        return error(finding, "main_process_ip: an address of this machine")
    try:
        socket.create_connection((address, port), _REACH_SECONDS).close()
    except ConnectionRefusedError:
        return ok(f"{place} is reached; nobody listens there yet")
    except OSError as failed:
        finding = f"{place} does not answer ({failed.strerror or failed})"
        return error(finding, "see that the machine is up, and open the port in its firewall")
    return ok(f"{place} is reached, and somebody listens there")


RANKS = 2
BYTES = 64 << 20
_REPEATS = 5
_ANSWER = "seconds:"
ALLOWED_SECONDS = 180.0  # with the import of torch on a busy machine


def all_reduce(context: DoctorContext, allowed_seconds: float = ALLOWED_SECONDS) -> Verdict:
    """Sum 64 MiB over two processes; with NCCL if there are two GPUs, else with gloo."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

    backend = "nccl" if gpus(context) >= RANKS else "gloo"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "llmtrain.tools.doctor.machine"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(store.port), backend, str(allowed_seconds)],
            env=_environment(context),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        return _verdict(ranks, backend, allowed_seconds)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def _environment(context: DoctorContext) -> dict[str, str]:
    """Return the environment without a launcher's variables, which torch would use."""
    mine = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in context.env.items() if name not in mine}


def _verdict(ranks: list[subprocess.Popen[str]], backend: str, allowed_seconds: float) -> Verdict:
    until = time.monotonic() + allowed_seconds
    remedy = (
        "look for a firewall on loopback, a wrong GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; "
        "NCCL_DEBUG=INFO tells more of GPUs"
    )
    outputs = []
    for number, rank in enumerate(ranks):
        try:
            out, err = rank.communicate(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            finding = f"{RANKS} processes ({backend}) did not finish in {allowed_seconds:g} s"
            return error(finding, remedy)
        outputs.append(out)
        if _ANSWER not in out:
            last = (err.strip().splitlines() or ["no word"])[-1]
            return error(f"rank {number} of {RANKS} ({backend}) failed: {last}", remedy)
    seconds = max(float(out.rpartition(_ANSWER)[2]) for out in outputs)
    rate = BYTES / 1e6 / seconds
    return ok(f"{RANKS} processes of this machine ({backend}) sum {rate:,.0f} MB/s")


def main() -> None:
    """Sum as one of the two processes, print the median time of a sum in seconds, and exit.

    Raises RuntimeError for a wrong sum.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

    number, port, backend, allowed_seconds = sys.argv[1:]
    timeout, rank = timedelta(seconds=float(allowed_seconds)), int(number)
    store = TCPStore("127.0.0.1", int(port), is_master=False, timeout=timeout)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS, timeout=timeout)
    vector = torch.full((BYTES // 4,), float(rank + 1), device=device)
    dist.all_reduce(vector)
    expected = sum(range(1, RANKS + 1))
    if vector[0].item() != expected or vector[-1].item() != expected:
        raise RuntimeError(f"the sum is {vector[0].item():g}, not {expected}")
    took = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        dist.all_reduce(vector)
        vector[0].item()  # waits for the device
        took.append(time.perf_counter() - start)
    sys.stdout.write(f"{_ANSWER}{statistics.median(took)}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
