import os
import signal
import subprocess
import sys
import threading

import pytest

from llmtrain import system


def test_cores_are_those_this_process_may_use():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        found = system.cores()
        assert found.count == 1
        installed = os.cpu_count() or 1
        assert installed == 1 or found.why.startswith(f"1 of {installed} CPU cores, to which")
    finally:
        os.sched_setaffinity(0, before)


def machine(root, groups, mounts, **files):
    """The files of a machine that say what may be used; `files`: under /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/mountinfo").write_text(mounts)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "31 23 0:28 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate\n"
V1 = "33 31 0:30 {part} /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
QUOTAS = {
    "v2, in a container": ("0::/\n", V2, {"cpu.max": "200000 100000\n"}, 2),
    "v2, no limit": ("0::/\n", V2, {"cpu.max": "max 100000\n"}, 64),
    "v2, a part of a processor": ("0::/\n", V2, {"cpu.max": "50000 100000\n"}, 1),
    "v2, three and a half": ("0::/\n", V2, {"cpu.max": "350000 100000\n"}, 3),
    "v2, a group above it": (
        "0::/jobs/one\n",
        V2,
        {"jobs/one/cpu.max": "800000 100000\n", "jobs/cpu.max": "400000 100000\n"},
        4,
    ),
    "v2, the root, which has no limit": ("0::/\n", V2, {}, 64),
    "v1, in a container, by its path on the host": (
        "9:name=systemd:/docker/ab\n4:cpu,cpuacct:/docker/ab\n",
        V1.format(part="/docker/ab"),
        {"cpu,cpuacct/cpu.cfs_quota_us": "300000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
        3,
    ),
    "v1, no limit": (
        "4:cpu,cpuacct:/\n",
        V1.format(part="/"),
        {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
        64,
    ),
    "v1, a path that is not mounted": (
        "4:cpu,cpuacct:/kubepods/pod\n",
        V1.format(part="/"),
        {"cpu,cpuacct/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/cpu.cfs_period_us": "50000\n"},
        5,
    ),
    "more than there are": ("0::/\n", V2, {"cpu.max": "9900000 100000\n"}, 64),
    "no control groups": ("", "", {}, 64),
}


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "expected"), QUOTAS.values(), ids=list(QUOTAS)
)
def test_the_cpu_quota_of_a_container_counts_as_cores(
    tmp_path, monkeypatch, groups, mounts, files, expected
):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
    found = system.cores(machine(tmp_path, groups, mounts, **files))
    assert found.count == expected
    assert ("may use" in found.why) == (expected < 64)


def test_without_files_of_the_kernel_all_cores_count(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert system.cores(tmp_path) == system.CpuCount(8, "8 CPU cores")


OMP = {"OMP_NUM_THREADS": "1"}
TORCHRUN, ACCELERATE = {"TORCHELASTIC_RUN_ID": "none"}, {"ACCELERATE_DYNAMO_MODE": "default"}
SHELL = ({"HOME": "/root"}, ["bash"])
LAUNCHES = {
    "a shell, by hand": (OMP, [SHELL], True),
    "a container's image": (OMP, [(OMP, ["bash"]), (OMP, ["sh"])], True),
    "torchrun, which chose it": (OMP | TORCHRUN, [({}, ["torchrun"]), SHELL], False),
    "torchrun, told by the user": (OMP | TORCHRUN, [(OMP, ["torchrun"]), SHELL], True),
    "accelerate, which chose it": (
        OMP | ACCELERATE,
        [({}, ["accelerate", "launch"]), SHELL],
        False,
    ),
    "accelerate, told by the user": (OMP | ACCELERATE, [(OMP, ["accelerate"]), SHELL], True),
    "accelerate, told by an option": (
        OMP | ACCELERATE,
        [({}, ["accelerate", "launch", "--num_cpu_threads_per_process=1"]), SHELL],
        True,
    ),
    "torchrun, through a script of the user's": (
        OMP | TORCHRUN,
        [(OMP | TORCHRUN, ["bash", "wrapper.sh"]), ({}, ["torchrun"]), SHELL],
        False,
    ),
    "a script of the user's that sets it": (OMP, [({}, ["python", "sweep.py"]), SHELL], True),
    "under a launcher that may not be read": (OMP | TORCHRUN, [], False),
    "another number under such a one": ({"OMP_NUM_THREADS": "4"} | TORCHRUN, [], True),
}


@pytest.mark.parametrize(("env", "above", "own"), LAUNCHES.values(), ids=list(LAUNCHES))
def test_a_number_of_threads_is_the_users_unless_a_launcher_chose_it(monkeypatch, env, above, own):
    monkeypatch.setattr(system, "ancestors", lambda: iter(above))
    monkeypatch.setattr(system, "cores", lambda: system.CpuCount(6, "6 CPU cores"))
    assert system.set_by_user(env) is own
    found = system.decide_threads("auto", None, env | {"LOCAL_WORLD_SIZE": "2"})
    number = int(env["OMP_NUM_THREADS"])
    if own:
        assert found == system.CpuCount(number, "OMP_NUM_THREADS")
    else:
        assert found == system.CpuCount(3, "1/2 of 6 CPU cores")


def test_threads_are_those_of_the_config_then_the_user_then_earlier_launches(monkeypatch):
    monkeypatch.setattr(system, "ancestors", lambda: iter([SHELL]))
    monkeypatch.setattr(system, "cores", lambda: system.CpuCount(2, "2 CPU cores"))
    decide = system.decide_threads
    assert decide(5, 3, {"OMP_NUM_THREADS": "4"}) == system.CpuCount(5, "training.threads")
    assert decide("auto", 3, {"OMP_NUM_THREADS": "4,2"}).count == 4
    assert decide("auto", 3, {}).count == 3
    for unusable in ("", "0", "many"):
        assert decide("auto", None, {"OMP_NUM_THREADS": unusable}).count == 2
    assert decide("auto", None, {"LOCAL_WORLD_SIZE": "8"}).count == 1
    one = system.CpuCount(1, "training.same_bits")
    assert decide("auto", 3, {"OMP_NUM_THREADS": "4"}, same_bits=True) == one
    assert decide(5, 3, {}, same_bits=True).count == 5


@pytest.mark.launches
def test_ancestors_are_seen_as_they_began():
    inner = (
        "from llmtrain.system import ancestors; (env, command), *_ = ancestors();"
        "print(env.get('MARK'), command[-1])"
    )
    outer = (
        "import os, subprocess, sys; os.environ['MARK'] = 'changed';"
        f"subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", outer],
        env={**os.environ, "MARK": "first"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("first import os")


def test_a_hangup_that_nohup_ignores_asks_for_nothing():
    old = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup themselves
    try:
        assert signal.SIGHUP in system.stop_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert signal.SIGHUP not in system.stop_signals()
    finally:
        signal.signal(signal.SIGHUP, old)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux sends it")
@pytest.mark.launches
def test_a_child_ends_with_its_parent():
    child = (
        "import os, signal, time; from llmtrain import system as processes;"
        "processes.signal_on_death_of_parent(signal.SIGKILL);"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.kill()
        assert process.stdout.read() == ""  # returns once the child has closed it too


def test_work_in_a_thread_gives_its_result_or_its_exception_to_who_waits():
    assert system.begin_in_thread(lambda: 3, "three").result() == 3
    with pytest.raises(KeyError, match="a"):
        system.begin_in_thread(lambda: {}["a"], "raises").result()


def test_a_thread_that_hangs_keeps_no_process_from_its_end():
    answer = threading.Event()
    hanging = system.begin_in_thread(answer.wait, "hangs")
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "hangs"] == [True]
    answer.set()
    assert hanging.result()


def test_a_file_system_that_cannot_sync_directories_is_said_once(tmp_path, monkeypatch, caplog):
    system._warn_unsynced.cache_clear()
    monkeypatch.setattr(
        "os.fsync", lambda _: (_ for _ in ()).throw(OSError(22, "Invalid argument"))
    )
    system.sync_directory(tmp_path, tmp_path)
    assert len(caplog.records) == 1
    monkeypatch.setattr(
        "os.fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    )
    with pytest.raises(OSError, match="Input/output"):
        system.sync_directory(tmp_path)


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    system.write_durably(path, b"old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        system.write_durably(path, b"new")
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    system.write_durably(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_was_removed_or_replaced_is_not_the_open_one(tmp_path):
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    path.write_bytes(b"")
    with path.open("rb") as file:
        assert system.is_at(path, file.fileno())
        assert not system.is_gone(path)
        path.rename(tmp_path / "moved")
        assert system.is_gone(path)
        assert not system.is_at(path, file.fileno())
        path.write_bytes(b"")
        assert not system.is_at(path, file.fileno())
        path.unlink()
        path.parent.rmdir()
        path.parent.write_bytes(b"a file in place of the directory")
        assert system.is_gone(path)
        assert not system.is_at(path, file.fileno())


def test_a_file_is_closed_if_the_work_on_it_fails_and_stays_open_otherwise(tmp_path):
    with system.close_on_error(os.open(tmp_path, os.O_RDONLY)) as kept:
        os.fstat(kept)
    os.fstat(kept)

    def fail(descriptor):
        with system.close_on_error(descriptor):
            raise ValueError("the rest")

    with pytest.raises(ValueError, match="the rest"):
        fail(kept)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(kept)


def test_a_file_that_was_not_finished_leaves_nothing_behind(tmp_path):
    def begin():
        with system.replacing(tmp_path / "page", sync=False) as file:
            file.write(b"half")
            raise ValueError("the rest")

    with pytest.raises(ValueError, match="the rest"):
        begin()
    assert not list(tmp_path.iterdir())


def test_two_writers_of_a_shared_file_do_not_meet(tmp_path):
    path = tmp_path / "part"
    with system.replacing(path, shared=True) as one, system.replacing(path, shared=True) as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() == b"one"  # the first that was opened is renamed last
    assert list(tmp_path.iterdir()) == [path]


def test_each_beat_counts_and_the_last_phase_stays():
    before, _ = system.last_beat()
    system.beat("reading")
    system.beat("writing")
    assert system.last_beat() == (before + 2, "writing")


def test_more_work_of_a_phase_keeps_its_count():
    before, _ = system.last_beat()
    system.beat("reading files", 3, 2000)
    system.beat_again()
    assert system.last_beat() == (before + 2, "reading files")
    assert system.beat_in_words() == "reading files (3 of 2,000)"
