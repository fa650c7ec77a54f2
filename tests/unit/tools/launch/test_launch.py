"""A launcher is played by a few lines of shell: what matters is what it leaves behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.config import written

from llmtrain.config.load import load_config
from llmtrain.errors import UserError
from llmtrain.tools.launch import launch as module
from llmtrain.tools.launch.child import Ended, read_exit_report, write_exit_report
from llmtrain.tools.launch.file import read_launch_file
from llmtrain.tools.launch.launch import (
    has_gpu,
    launch,
    meeting,
    plain_launch_problems,
    run_launcher,
)


def run(folder, script):
    """Run a shell script as the launcher; the files `mark` and `status` are in its environment."""
    (folder / "run").mkdir(exist_ok=True)
    env = {
        **os.environ,
        "mark": str(folder / "ended"),
        "status": str(folder / "run" / "status.json"),
    }
    return run_launcher(["/bin/sh", "-c", script], env, folder / "ended", folder / "run")


def test_the_mark_of_rank_0_decides_and_not_the_launcher(tmp_path):
    assert run(tmp_path, """echo '[0, ""]' > "$mark"; exit 1""") == Ended(0, "")
    ended = run(tmp_path, """echo '[2, "error: 1 problem"]' > "$mark"; exit 1""")
    assert ended == Ended(2, "error: 1 problem")


@pytest.mark.parametrize(
    ("status", "launcher", "code"),
    [
        ({"state": "finished", "exit_code": 0}, 0, 0),
        ({"state": "stopped", "exit_code": 0}, 1, 0),
        ({"state": "failed", "exit_code": 74}, 1, 74),
        ({"state": "running", "exit_code": None}, 1, 75),
    ],
)
def test_without_a_mark_the_status_decides(tmp_path, status, launcher, code):
    ended = run(tmp_path, f"""echo '{json.dumps(status)}' > "$status"; exit {launcher}""")
    assert ended.exit_code == code
    assert ("without a word" in ended.message) == (code != 0)


@pytest.mark.parametrize(("launcher", "code"), [("exit 2", 2), ("exit 3", 1), ("kill -9 $$", 1)])
def test_a_status_of_an_earlier_start_decides_nothing(tmp_path, launcher, code):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text('{"state": "finished", "exit_code": 0}')
    assert run(tmp_path, launcher).exit_code == code


def test_other_children_of_this_process_are_left_alone(tmp_path):
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as other:
        assert run(tmp_path, "exit 3").exit_code == 1
        assert other.poll() is None
        other.kill()


def test_ranks_that_outlive_the_launcher_are_waited_for(tmp_path):
    script = """( while kill -0 $$ 2>/dev/null; do :; done; echo '[0, "saved"]' > "$mark" ) &
    kill -9 $$"""
    assert run(tmp_path, script) == Ended(0, "saved")


def test_a_rank_that_dies_without_a_word_is_not_waited_for_for_ever(tmp_path):
    script = "( while kill -0 $$ 2>/dev/null; do :; done ) &\n kill -9 $$"
    assert run(tmp_path, script).exit_code == 1


@pytest.mark.parametrize(
    ("sent", "received"),
    [("SIGTERM", "TERM"), ("SIGINT", "INT"), ("SIGUSR1", "TERM"), ("SIGHUP", "TERM")],
)
def test_signals_reach_the_launcher(tmp_path, sent, received, request):
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    number = getattr(signal, sent)
    whose = signal.signal(number, signal.default_int_handler)  # under nohup HUP is ignored
    request.addfinalizer(lambda: signal.signal(number, whose))

    def send():
        ready.read_text()  # until the script stands ready
        signal.pthread_kill(threading.main_thread().ident, number)

    sender = threading.Thread(target=send)
    sender.start()
    before = signal.getsignal(number)
    script = f"""
    for name in TERM INT USR1 HUP; do
        trap "echo '[0, \\"$name\\"]' > \\"$mark\\"; exit 1" $name
    done
    echo > {ready}
    while :; do sleep 0.01; done"""
    ended = run(tmp_path, script)
    sender.join()
    assert ended == Ended(0, received, asked_to_stop=True)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("strategy", "processes", "said"),
    [
        ("ddp", 2, []),
        ("hsdp", 2, ["distributed.strategy"]),
        ("zero2", 2, ["distributed.strategy"]),
        ("zero2", 5, ["training.global_batch_size", "distributed.strategy"]),
    ],
)
def test_what_a_start_would_refuse_is_known_without_one(
    tmp_path, monkeypatch, strategy, processes, said
):
    monkeypatch.setattr(module, "find_spec", lambda name: None)  # no DeepSpeed
    overrides = [f"distributed.strategy={strategy}", "training.global_batch_size=16"]
    config = load_config(str(written(tmp_path)), overrides)
    assert [one.key for one in plain_launch_problems(config, processes, {})] == said


def test_a_stop_before_there_was_a_rank_is_no_failure(tmp_path):
    ready = tmp_path / "ready"
    os.mkfifo(ready)

    def send():
        ready.read_text()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    assert run(tmp_path, f"echo > {ready}; exec sleep 60") == Ended(0, "", asked_to_stop=True)
    sender.join()


def test_all_that_is_printed_goes_where_it_is_sent(tmp_path, capfd):
    mark = tmp_path / "ended"
    with (tmp_path / "log").open("wb") as log:
        run_launcher(["/bin/sh", "-c", "echo a; echo b >&2"], os.environ, mark, tmp_path, log)
    assert (tmp_path / "log").read_text() == "a\nb\n"
    assert capfd.readouterr() == ("", "")


def test_only_rank_0_leaves_a_mark_and_only_for_a_launcher(tmp_path):
    path = tmp_path / "ended"
    assert not write_exit_report({}, 2, "x")
    assert not write_exit_report({"LLMTRAIN_LAUNCHED": "1"}, 2, "x")
    assert not write_exit_report({"LLMTRAIN_LAUNCHED": str(path), "RANK": "1"}, 2, "x")
    assert not write_exit_report({"LLMTRAIN_LAUNCHED": str(tmp_path / "none" / "ended")}, 2, "x")
    assert read_exit_report(path) is None
    assert write_exit_report({"LLMTRAIN_LAUNCHED": str(path), "RANK": "0"}, 2, "two\nlines")
    assert read_exit_report(path) == (2, "two\nlines")


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What would have been started: command, environment and the text of the accelerate file."""
    seen = {}

    def note(command, env, mark, run_dir, output):
        text = Path(command[command.index("--config_file") + 1]).read_text()
        seen.update(command=list(command), env=env, run_dir=run_dir, file=text, output=output)
        return Ended(0, "")

    monkeypatch.setattr(module, "run_launcher", note)
    monkeypatch.setattr(module, "has_gpu", lambda env: "GPU" in env)
    return seen


@pytest.mark.launches
def test_several_processes_on_cpus(tmp_path, started):
    config = written(tmp_path)
    launch(str(config), ["training.steps=3"], processes=2, env={})
    assert started["command"][:3] == [sys.executable, "-m", "llmtrain.tools.launch.launcher"]
    assert started["command"][3] == "runs/my"
    assert started["command"][-5:] == ["-m", "llmtrain", "train", str(config), "training.steps=3"]
    assert "distributed_type: MULTI_GPU" in started["file"]
    assert "use_cpu: true" in started["file"]
    assert started["env"]["ACCELERATE_USE_CPU"] == "true"
    assert started["env"]["CUDA_VISIBLE_DEVICES"] == ""
    assert Path(started["env"]["LLMTRAIN_LAUNCHED"]).is_absolute()
    assert started["run_dir"] == Path("runs/my")


def test_a_written_file_is_what_was_asked_for(tmp_path, started):
    launch(str(written(tmp_path)), processes=2, env={})
    (tmp_path / "a.yaml").write_text(started["file"])
    again = read_launch_file(tmp_path / "a.yaml", None)
    assert (again.processes, again.on_cpu, again.values["mixed_precision"]) == (2, True, "no")


@pytest.mark.parametrize(
    ("env", "precision", "expected"),
    [
        ({}, "auto", "no"),
        ({}, "bf16", "bf16"),
        ({"GPU": "1"}, "auto", "bf16"),
        ({"GPU": "1"}, "fp32", "no"),
    ],
)
def test_the_written_file_has_the_precision_of_the_config(
    tmp_path, started, env, precision, expected
):
    launch(str(written(tmp_path)), [f"training.precision={precision}"], processes=2, env=env)
    assert f"mixed_precision: {expected}" in started["file"].replace("'", "")


def test_a_free_port_is_taken_unless_the_file_names_one(tmp_path, started):
    text = "distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true\n"
    for more, free in (("", True), ("main_process_port: 29555\n", False)):
        file = tmp_path / "a.yaml"
        file.write_text(text + more)
        launch(str(written(tmp_path)), accelerate_file=file, env={})
        assert ("--main_process_port" in started["command"]) == free


def test_the_rendezvous_of_the_file_is_passed_on(tmp_path, started):
    shipped = Path(__file__).parents[4] / "accelerate_configs" / "ddp_multinode.yaml"
    file = tmp_path / "launch.yaml"
    file.write_text(shipped.read_text().replace("10.0.0.1", "127.0.0.1"))
    launch(str(written(tmp_path)), ["training.global_batch_size=32"], file, env={})
    assert "--rdzv_backend c10d --rdzv_conf is_host=1" in " ".join(started["command"])
    assert started["env"]["PET_LOCAL_ADDR"] == "127.0.0.1"
    assert "--main_process_port" not in started["command"]


@pytest.mark.parametrize(
    ("overrides", "processes", "env", "said"),
    [
        ([], 3, {}, "255 or 258"),  # a batch that cannot be split
        ([], 2, {"WORLD_SIZE": "4"}, "WORLD_SIZE"),
        (["distributed.strategy=hsdp"], 4, {}, "fsdp2"),  # on one machine
        *(
            ([], 2, {name: "0"}, name)
            for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "LLMTRAIN_LAUNCHED")
        ),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_starts(
    tmp_path, started, overrides, processes, env, said
):
    with pytest.raises(UserError, match=said):
        launch(str(written(tmp_path)), overrides, processes=processes, env=env)
    assert not started


def test_a_file_that_contradicts_the_precision_is_refused(tmp_path, started):
    file = tmp_path / "a.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bf16\n")
    with pytest.raises(UserError, match=r"training\.precision"):
        launch(str(written(tmp_path)), ["training.precision=fp32"], file, env={})
    assert not started


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2_offload", "zero1", "zero3_offload"])
def test_a_plain_launch_is_enough_for_a_strategy(tmp_path, started, strategy):
    launch(str(written(tmp_path)), [f"distributed.strategy={strategy}"], processes=2, env={})
    assert "distributed_type: MULTI_GPU" in started["file"]


def test_a_deepspeed_file_without_the_package_is_refused(tmp_path, started, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    file = Path(__file__).parents[4] / "accelerate_configs" / "zero2.yaml"
    with pytest.raises(UserError, match="not installed"):
        launch(str(written(tmp_path)), accelerate_file=file, env={})
    assert not started


@pytest.mark.parametrize("env", [{"CUDA_VISIBLE_DEVICES": ""}, {"ACCELERATE_USE_CPU": "true"}])
def test_hidden_gpus_are_none(env):
    assert not has_gpu(env)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])  # as the others know it
def test_the_machine_that_all_meet_at_knows_itself(name):
    options, env = meeting("c10d", name)
    assert options == ["--rdzv_backend", "c10d", "--rdzv_conf", "is_host=1"]
    assert env["PET_LOCAL_ADDR"] == name
    # Ranks of a second attempt do not meet the addresses of the first.
    assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_another_machine_gives_the_address_that_leads_there(monkeypatch):
    asked: list[object] = []

    class Routed(socket.socket):
        """A machine whose way to 10.1.0.1 begins at 10.1.0.2."""

        def connect(self, address):
            asked.append(address)

        def getsockname(self):
            return "10.1.0.2", 40_000

    monkeypatch.setattr(socket, "socket", Routed)
    options, env = meeting("c10d", "10.1.0.1")
    assert options[-1] == "is_host=0"
    assert env["PET_LOCAL_ADDR"] == "10.1.0.2"
    assert asked == [("10.1.0.1", 9)]


def test_static_machines_have_been_told_who_they_are():
    assert meeting("static", "10.1.0.1") == (["--rdzv_backend", "static"], {})


def test_an_address_that_leads_nowhere_is_refused_by_its_key(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UserError, match=r"main_process_ip = node-7\n.*not known") as refused:
        meeting("c10d", "node-7")
    assert refused.value.exit_code == 2
