import errno
import os
import re
import resource
import shutil
import socket
import stat
import sys
import tomllib
from contextlib import closing
from importlib import metadata
from pathlib import Path

import pytest
from helpers.cases import case, says

from llmtrain.errors import UserError
from llmtrain.tools.doctor import machine

ROOT = Path(__file__).parents[4]


@pytest.fixture
def limit(request):
    """Lowers a limit of this process for one test."""
    before = {}

    def lower(which, soft):
        before[which] = resource.getrlimit(which)
        resource.setrlimit(which, (soft, before[which][1]))

    yield lower
    for which, pair in before.items():
        resource.setrlimit(which, pair)


@pytest.fixture
def bare_path(tmp_path, monkeypatch):
    """A PATH that leads to one empty directory."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def test_devices_compute_in_both_precisions():
    looked = machine.devices(case(env={"CUDA_VISIBLE_DEVICES": ""}))
    says(looked, "ok", f"{len(os.sched_getaffinity(0))} CPU core")
    said = r"fp32 [\d,]+ and bf16 [\d,]+ GFLOP/s: precision auto is (fp32|bf16)$"
    assert re.search(said, looked.found)


def test_a_gpu_that_torch_cannot_use_is_a_warning(monkeypatch):
    monkeypatch.setattr(machine, "has_gpu", lambda env: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    says(machine.devices(case()), "warning", "cannot use it", remedy="build of torch")


def test_a_launch_file_for_gpus_on_a_machine_without_them_is_a_warning():
    env = {"CUDA_VISIBLE_DEVICES": ""}
    file = {"num_processes": 8, "use_cpu": False}
    says(machine.devices(case(launch=file, env=env)), "warning", "for 8 of them here")
    assert machine.devices(case(launch={**file, "use_cpu": True}, env=env)).state == "ok"


def pretended(monkeypatch, *gpus):
    """A machine with these; one whose speeds are an error cannot compute."""

    def look(index):
        if gpus[index].speeds == "broken":
            raise RuntimeError("no kernel image is available")
        return gpus[index]

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(gpus))
    monkeypatch.setattr(machine, "_gpu", look)


def gpu(index, **changes):
    values = {"name": "H100", "total": 80 << 30, "free": 79 << 30, "bf16": True, "speeds": "fast"}
    return machine.Gpu(index, **(values | changes))


def test_equal_gpus_stand_together(monkeypatch):
    pretended(monkeypatch, gpu(0), gpu(1, free=78 << 30))
    looked = machine.devices(case())
    assert looked == machine.ok("2 × H100: 80 GiB, 78 GiB free, fast")


@pytest.mark.parametrize(
    ("changes", "state", "found", "remedy"),
    [
        ({"free": 10 << 30}, "warning", "GPU 1: 70 GiB are held", "nvidia-smi"),
        ({"total": 40 << 30, "free": 40 << 30}, "warning", "memories differ", "=40.0"),
        ({"bf16": False}, "error", "GPU 1 does not compute in bf16", "training.precision=fp32"),
        ({"speeds": "broken"}, "error", "GPU 1: the look at it failed: RuntimeError: no k", ""),
    ],
)
def test_what_is_wrong_with_a_gpu_is_said(tmp_path, monkeypatch, changes, state, found, remedy):
    pretended(monkeypatch, gpu(0), gpu(1, **changes))
    says(machine.devices(case(tmp_path, "training.precision=bf16")), state, found, remedy=remedy)


def test_a_gpu_is_needed_for_each_process_of_the_file(monkeypatch):
    pretended(monkeypatch, gpu(0), gpu(1))
    file = {"num_processes": 8, "num_machines": 2, "use_cpu": False}
    says(
        machine.devices(case(launch=file)),
        "error",
        "4 processes on this machine",
        remedy="num_processes: 4",
    )
    assert machine.devices(case(launch={**file, "num_processes": 4})).state == "ok"


def test_a_run_on_a_cpu_uses_no_gpu(monkeypatch):
    pretended(monkeypatch, gpu(0), gpu(1))
    assert machine.gpus(case()) == 2
    assert machine.gpus(case(env={"ACCELERATE_USE_CPU": "true"})) == 0
    assert machine.gpus(case(launch={"use_cpu": True})) == 0


def test_little_shared_memory_for_several_gpus_is_a_warning(monkeypatch):
    pretended(monkeypatch, gpu(0), gpu(1))
    used = shutil.disk_usage("/")._replace(free=64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: used)
    says(machine.limits(case()), "warning", remedy="--shm-size")


def test_memory_says_what_is_there():
    import psutil

    looked = machine.memory(case())
    assert machine.size(psutil.virtual_memory().total) in looked.found


def test_little_memory_is_a_warning(monkeypatch):
    import psutil

    there = psutil.virtual_memory()._replace(available=2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: there)
    assert machine.memory(case()).state == "warning"


def test_a_low_limit_of_open_files_is_a_warning(limit):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit(resource.RLIMIT_NOFILE, min(4096, hard))
    assert machine.limits(case()).state == "ok"
    limit(resource.RLIMIT_NOFILE, 500)
    says(machine.limits(case()), "warning", "open files: 500", remedy="ulimit -n")


def test_the_pins_are_of_tested_releases():
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    for name, releases in machine.TESTED.items():
        assert ".".join(pins[name].split(".")[:2]) in releases, name


def test_the_package_allows_what_lies_between_tested_releases():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = {re.match(r"[\w-]+", one)[0]: one.split(";")[0] for one in project["dependencies"]}
    bounded = {name: bound for name, bound in bounds.items() if "<" in bound}
    assert bounded.keys() == machine.TESTED.keys()
    for name, releases in machine.TESTED.items():
        major, minor = releases[-1].split(".")
        lowest = rf"{releases[0]}(\.\d+)?"
        assert re.fullmatch(rf"{name}>={lowest},<{major}\.{int(minor) + 1}", bounds[name]), name


@pytest.fixture
def installed(monkeypatch):
    """Library → its version: the lowest that was tested, whatever is installed here."""
    versions = {name: f"{releases[0]}.0" for name, releases in machine.TESTED.items()}

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    return versions


def test_the_installed_libraries_are_named():
    looked = machine.versions(case())
    assert f"torch {metadata.version('torch')}" in looked.found
    assert f"transformers {metadata.version('transformers')}" in looked.found


@pytest.mark.parametrize(
    ("name", "there", "state"),
    [
        ("torch", "2.13.1+cu130", "ok"),
        ("torch", "2.14.0", "ok"),
        ("torch", "2.12.9", "error"),
        ("torch", "2.9.0", "error"),
        ("torch", "2.15.0", "error"),
        ("accelerate", "1.12.0", "warning"),
        ("transformers", "5.24.3", "ok"),
        ("transformers", "5.15.1", "warning"),
        ("transformers", "6.0.0", "error"),
        ("deepspeed", "0.20.0", "error"),
        ("peft", "0.20.0", "error"),
    ],
)
def test_another_release_than_the_tested_ones_is_said(installed, name, there, state):
    installed[name] = there
    looked = machine.versions(case())
    says(looked, state, f"{name} {there}")
    assert (f"pip install '{name}" in looked.remedy) == (state != "ok")


@pytest.fixture
def no_deepspeed(installed):
    del installed["deepspeed"]


@pytest.mark.usefixtures("no_deepspeed")
def test_deepspeed_is_missed_only_where_it_is_asked_for(tmp_path):
    assert machine.versions(case()).state == "ok"
    assert machine.versions(case(tmp_path, "distributed.strategy=fsdp2")).state == "ok"
    says(
        machine.versions(case(tmp_path, "distributed.strategy=zero2")),
        "error",
        remedy="deepspeed>=0.19",
    )
    zero2 = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}
    assert machine.versions(case(launch=zero2)).state == "error"


def test_a_tracker_that_is_not_installed_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="tensorboard"):
        machine.versions(case(tmp_path, "logging.trackers=[tensorboard]"))


def test_the_compiler_of_this_machine_compiles():
    if not (shutil.which("c++") and shutil.which("ninja")):
        pytest.skip("no compiler or ninja here")
    looked = machine.compiler(case())
    assert (looked.state, looked.remedy) == ("ok", "")


@pytest.mark.parametrize(
    ("strategy", "on_gpus", "on_a_cpu"),
    [
        ("zero3_offload", "error", "warning"),
        ("auto", "warning", "ok"),
        ("zero2", "ok", "ok"),
        ("fsdp2", "ok", "ok"),
    ],
)
@pytest.mark.usefixtures("bare_path")
def test_without_a_compiler_offload_is_an_error_that_names_it(
    tmp_path, monkeypatch, strategy, on_gpus, on_a_cpu
):
    asked = case(tmp_path, f"distributed.strategy={strategy}")
    for count, state in ((1, on_gpus), (0, on_a_cpu)):
        monkeypatch.setattr(machine, "gpus", lambda case, count=count: count)
        looked = machine.compiler(asked)
        says(looked, state, "no C++ compiler (c++)", "no ninja in PATH")
        assert ("g++" in looked.remedy) == (state != "ok")


def test_a_compiler_without_headers_is_found_out(bare_path, monkeypatch):
    compiler = bare_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'fatal error: vector: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    looked = machine.compiler(case())
    assert "does not compile: fatal error: vector: No such file" in looked.found


def test_a_lock_that_nobody_holds_is_said(tmp_path, monkeypatch):
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "built")}
    assert machine.extensions(case(env=env)).state == "ok"
    lock = tmp_path / "built" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    looked = machine.extensions(case(env=env))
    assert looked.state == "warning"
    assert looked.remedy.startswith(f"rm {lock}")
    asked = case(tmp_path, "distributed.strategy=zero3_offload", env=env)
    assert machine.extensions(asked).state == "warning"
    monkeypatch.setattr(machine, "gpus", lambda case: 1)
    assert machine.extensions(asked).state == "error"
    lock.unlink()
    assert machine.extensions(asked).state == "ok"


def test_a_build_that_goes_on_holds_its_lock(tmp_path):
    from torch.utils.file_baton import FileBaton

    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    (tmp_path / "cpu_adam").mkdir()
    baton = FileBaton(str(tmp_path / "cpu_adam" / "lock"))
    assert baton.try_acquire()
    assert machine.extensions(case(env=env)).state == "ok"
    os.close(baton.fd)  # as a kill would: the file stays, nobody has it open
    assert machine.extensions(case(env=env)).state == "warning"


def test_the_default_directory_of_extensions_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr("torch.utils.cpp_extension.get_default_build_root", lambda: str(tmp_path))
    (tmp_path / "py311_cpu" / "cpu_adam").mkdir(parents=True)
    (tmp_path / "py311_cpu" / "cpu_adam" / "lock").touch()
    assert machine.extensions(case()).state == "warning"


HERE = {"main_process_ip": "127.0.0.1", "num_machines": 1}


@pytest.fixture
def busy():
    """A port of this machine that somebody listens on."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


def free():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


def test_a_clean_environment_is_ok_with_and_without_a_config(tmp_path):
    assert machine.environment(case()).state == "ok"
    assert machine.environment(case(tmp_path)).state == "ok"


def test_a_variable_that_a_launcher_left_is_named(tmp_path):
    env = {"PMI_SIZE": "2"}
    says(machine.environment(case(env=env)), "error", "PMI_SIZE = 2", remedy="unset PMI_SIZE")
    with pytest.raises(UserError, match="PMI_SIZE"):
        machine.environment(case(tmp_path, env=env))


def test_under_a_launcher_it_says_so():
    says(
        machine.environment(case(env={"LOCAL_RANK": "0", "WORLD_SIZE": "1"})),
        "warning",
        remedy="by itself",
    )


def test_variables_with_which_a_start_would_wait_for_others_are_an_error():
    env = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "PATH": "/bin"}
    env |= {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
    looked = machine.environment(case(env=env))
    says(
        looked,
        "error",
        "would wait for rank 0 at 10.0.0.7:29500",
        remedy="unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT;",
    )
    assert "by itself" in looked.remedy


def test_a_default_config_that_nobody_named_is_a_warning(tmp_path, monkeypatch):
    path = tmp_path / "default_config.yaml"
    module = "accelerate.commands.config.config_args.default_config_file"
    monkeypatch.setattr(module, str(path))
    assert machine.default_file(case()).state == "ok"
    path.write_text("num_processes: 8\n")
    says(machine.default_file(case()), "warning", str(path), remedy="--config_file")
    assert machine.default_file(case(launch=HERE)).state == "ok"


def test_what_a_file_starts_is_said():
    looked = machine.describe_launch(case(launch={"num_processes": 2}).launch)
    assert looked.state == "ok"
    assert looked.found == "accelerate.yaml: 2 processes on this machine, NO"


def test_a_free_port_is_found_and_answers():
    says(machine.rendezvous(case()), "ok", "is free and answers")


def test_a_machine_without_ports_is_an_error(monkeypatch):
    from llmtrain.tools.doctor.context import run_check

    def refuse(address, *rest):
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    says(run_check(lambda: machine.rendezvous(case())), "error", "Cannot assign requested address")


def test_a_busy_port_of_the_file_is_an_error_and_a_free_one_is_not(busy):
    says(
        machine.rendezvous(case(launch={**HERE, "main_process_port": busy})),
        "error",
        f"127.0.0.1:{busy} cannot be bound: Address already in use",
    )
    says(
        machine.rendezvous(case(launch={**HERE, "main_process_port": free()})),
        "ok",
        "is this machine's, and free",
    )
    assert machine.rendezvous(case(launch={"main_process_port": busy})).state == "error"
    assert machine.rendezvous(case(launch={"main_process_port": 0})).state == "ok"


def test_the_loopback_address_cannot_join_two_machines():
    file = {"main_process_ip": "localhost", "main_process_port": 29500, "num_machines": 2}
    says(machine.rendezvous(case(launch=file)), "error", "every machine's own loopback")


def test_a_name_that_is_no_address_is_an_error():
    file = {"main_process_ip": "nowhere.invalid", "main_process_port": 29500}
    says(machine.rendezvous(case(launch=file)), "error", "nowhere.invalid is no address")


ELSEWHERE = {
    "main_process_ip": "192.0.2.1",  # set aside for documentation: no machine has it
    "main_process_port": 29500,
    "num_machines": 2,
    "num_processes": 4,
}


def answering(monkeypatch, error):
    """Another machine behaves like this when its port is knocked at."""
    real = socket.create_connection

    def connect(address, *rest):
        if address[0] != "192.0.2.1":
            return real(address, *rest)
        if error is not None:
            raise error
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)


@pytest.mark.parametrize(
    ("error", "state", "found"),
    [
        (None, "ok", "somebody listens there"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "ok", "nobody listens there yet"),
        (TimeoutError("timed out"), "error", "does not answer (timed out)"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "error", "No route to host"),
    ],
)
def test_another_machines_port_is_knocked_at(monkeypatch, error, state, found):
    monkeypatch.setattr(socket, "gethostname", lambda: "192.0.2.2")
    answering(monkeypatch, error)
    says(machine.rendezvous(case(launch={**ELSEWHERE, "machine_rank": 1})), state, found)


def test_the_first_machine_must_have_the_address_that_the_file_names():
    says(
        machine.rendezvous(case(launch={**ELSEWHERE, "machine_rank": 0})),
        "error",
        "not an address of this machine",
    )


def test_a_name_of_this_machine_that_others_cannot_use_is_a_warning(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    answering(monkeypatch, None)
    elastic = {**ELSEWHERE, "rdzv_backend": "c10d"}
    says(machine.rendezvous(case(launch=elastic)), "warning", "localhost means")


QUIET = {"CUDA_VISIBLE_DEVICES": ""}


def python_that(tmp_path, body):
    """A stand-in for the interpreter of the ranks."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.launches
def test_two_real_processes_sum_and_say_how_fast():
    looked = machine.all_reduce(case(env=QUIET))
    assert looked.state == "ok", looked.found
    rate = re.search(r"\(gloo\) sum ([\d,]+) MB/s", looked.found)
    assert rate
    assert 10 < int(rate[1].replace(",", "")) < 1_000_000


def test_traces_of_a_launcher_do_not_reach_the_processes():
    stale = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "192.0.2.1", "LOCAL_RANK": "7"}
    assert not machine._environment(case(env=stale)).keys() & stale.keys()


@pytest.mark.launches
def test_a_network_that_is_not_there_is_an_error_with_what_gloo_says():
    says(
        machine.all_reduce(case(env={**QUIET, "GLOO_SOCKET_IFNAME": "nowhere0"})),
        "error",
        "nowhere0",
        remedy="GLOO_SOCKET_IFNAME",
    )


@pytest.mark.launches
def test_processes_that_hang_are_ended_and_said(tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    hanging = python_that(tmp_path, f"echo $$ >> {pids}; exec sleep 600")
    monkeypatch.setattr(sys, "executable", hanging)
    says(machine.all_reduce(case(env=QUIET), allowed_seconds=1.0), "error", "did not finish in 1 s")
    for pid in map(int, pids.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.launches
def test_a_process_that_dies_is_said_with_its_last_words(tmp_path, monkeypatch):
    dying = python_that(tmp_path, "echo 'no CUDA-capable device is detected' >&2; exit 1")
    monkeypatch.setattr(sys, "executable", dying)
    says(
        machine.all_reduce(case(env=QUIET)),
        "error",
        "rank 0 of 2 (gloo) failed: no CUDA-capable device is detected",
    )
