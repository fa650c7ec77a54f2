"""Which ends are started again, and how often; the command is played by a few lines of shell."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from helpers.config import SMALLEST, written
from helpers.ranks import ROOT, until

from llmtrain.errors import UserError
from llmtrain.rundir.failures import Mark
from llmtrain.rundir.lock import RunLock, is_held
from llmtrain.tools.launch.child import Ended, judge
from llmtrain.tools.launch.supervise import (
    Supervised,
    Tries,
    Waits,
    checked_run_dir,
    config_in,
    decide,
    is_of_machines,
    shown,
    supervise,
)

NOTHING = Tries()
WAITS = Waits(first=5.0, most=300.0)
NOW = Waits(first=0.0, leave=60.0)
LOST = Ended(0, "", lost_launcher=True)


def decided(code, tries=NOTHING, **more):
    return decide(Ended(code, ""), tries, WAITS, **{"progress": False, "stopped": False, **more})


@pytest.mark.parametrize("code", [0, 2, 74])
@pytest.mark.parametrize("progress", [False, True])
def test_the_end_a_wrong_config_and_a_full_disk_are_final(code, progress):
    found = decided(code, progress=progress)
    assert (found.restart, found.code) == (False, code)


@pytest.mark.parametrize(
    ("code", "before", "progress", "seconds", "after"),
    [
        (75, Tries(), False, 5, Tries(1, 1, 0)),
        (75, Tries(1, 1), False, 10, Tries(2, 2, 0)),
        (75, Tries(2, 2), False, None, None),
        (75, Tries(2, 2), True, 5, Tries(0, 1, 0)),
        (75, Tries(0, 1), False, 10, Tries(1, 2, 0)),
        (75, Tries(1, 2), False, 20, Tries(2, 3, 0)),
        (75, Tries(2, 3), False, None, None),
        (1, Tries(), False, 5, Tries(1, 1, 1)),
        (1, Tries(1, 1, 1), False, None, None),
        (1, Tries(1, 1, 0), False, 10, Tries(2, 2, 1)),
        (1, Tries(1, 1, 1), True, 5, Tries(0, 1, 1)),
        (1, Tries(0, 1, 1), False, None, None),
        (75, Tries(1, 1, 1), False, 10, Tries(2, 2, 1)),
        (139, Tries(), False, 5, Tries(1, 1, 1)),
    ],
)
def test_what_a_restart_may_cure_is_started_again_so_often(code, before, progress, seconds, after):
    found = decided(code, before, progress=progress)
    assert found.code == code
    assert found.restart == (seconds is not None)
    if found.restart:
        assert (found.seconds, found.tries) == (seconds, after)


def test_no_wait_is_longer_than_the_longest():
    found = decide(Ended(75, ""), Tries(1, 2), Waits(200, 300), progress=False, stopped=False)
    assert found.seconds == 300


def test_a_run_that_stopped_for_its_launcher_goes_on():
    assert decide(LOST, Tries(), WAITS, progress=True, stopped=False).restart
    ended = decide(LOST, Tries(2, 2), WAITS, progress=False, stopped=False)
    assert (ended.restart, ended.code) == (False, 75)  # nobody wanted this stop


@pytest.mark.parametrize("code", [0, 1, 2, 74, 75])
def test_nothing_is_started_after_a_person_asked_for_the_end(code):
    found = decided(code, stopped=True)
    assert (found.restart, found.code) == (False, code)
    assert not decide(LOST, Tries(), WAITS, progress=True, stopped=True).restart


def mark(code, *, lost_peer=False):
    return Mark(1, code, "a row\n is bad", lost_peer, "host", "1:1", 0)


@pytest.mark.parametrize(
    ("status", "marks", "launcher", "changed", "code"),
    [
        ({"state": "finished", "exit_code": 0}, [], 0, True, 0),
        ({"state": "stopped", "exit_code": 0, "reason": "signal"}, [], 1, True, 0),
        ({"state": "failed", "exit_code": 74}, [mark(2)], 1, True, 74),
        ({"state": "failed", "exit_code": 75}, [], -9, True, 75),
        ({"state": "running", "exit_code": None}, [], 1, True, 75),
        ({"state": "running", "exit_code": None}, [mark(75)], 1, True, 75),
        ({"state": "running", "exit_code": None}, [mark(2)], 1, True, 2),
        ({"state": "running", "exit_code": None}, [], -9, True, 75),
        ({"state": "finished", "exit_code": 0}, [], 0, False, 1),
        ({"state": "finished", "exit_code": 0}, [], 1, False, 1),
        ({"state": "finished", "exit_code": 0}, [], -9, False, 75),
        ({"state": "finished", "exit_code": 0}, [mark(2)], 1, False, 2),
        ({"state": "finished", "exit_code": 0}, [mark(75, lost_peer=True)], 1, False, 1),
        ({}, [], 1, True, 1),
        ({}, [], 1, False, 1),
        ({}, [], 2, False, 2),
        ({"state": "finished", "exit_code": 0}, [], 2, False, 2),
        ({"state": "failed", "exit_code": 75}, [], 2, True, 75),
        ({"state": "running", "exit_code": None}, [], 2, True, 75),
        ({}, [mark(75, lost_peer=True)], 2, False, 1),
        ({}, [mark(75)], 2, False, 1),
    ],
)
def test_the_record_of_the_run_decides_and_not_the_launcher(status, marks, launcher, changed, code):
    assert judge(status, marks, launcher, changed=changed).exit_code == code


def test_a_lost_launcher_is_told_from_a_stop_that_was_asked_for():
    stopped = {"state": "stopped", "exit_code": 0, "step": 7}
    assert judge(stopped | {"reason": "launcher_lost"}, [], -9, changed=True).lost_launcher
    assert not judge(stopped | {"reason": "signal"}, [], 1, changed=True).lost_launcher


# The command counts its starts and does what the line of that number says.
COMMAND = """
cd "$0" || exit 99
echo >> starts
eval "$(sed -n "$(wc -l < starts)p" script)"
"""
STATUS = """echo '{"state": "%s", "exit_code": %s, "reason": "%s", "step": 3}' > status.json"""


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def run(run_dir, *lines, waits=NOW):
    """Supervise a command whose n-th start is the n-th line of shell."""
    (run_dir / "script").write_text("\n".join(lines) + "\n")
    said: list[str] = []
    ended = supervise(["/bin/sh", "-c", COMMAND, str(run_dir)], run_dir, said.append, waits)
    assert (run_dir / "starts").read_text().count("\n") == ended.starts
    return ended, said


def ends(state, code, reason=""):
    return STATUS % (state, code, reason)


def commits(step):
    return f"mkdir -p checkpoints/step-{step:08d}"


def test_a_run_that_dies_between_checkpoints_is_finished(run_dir):
    dies = ends("failed", 75)
    lines = [f"{commits(step)}; {dies}; exit 1" for step in range(1, 8)]
    ended, said = run(run_dir, *lines, ends("finished", 0))
    assert (ended.exit_code, ended.starts) == (0, 8)
    assert len(said) == 16
    assert "start 3 failed at step 3 with code 75: restart in about 0 s" in said[5]
    assert said[15].endswith("the end")


@pytest.mark.parametrize(
    ("line", "code", "starts"),
    [
        (ends("failed", 75), 75, 3),
        (ends("running", "null"), 75, 3),
        (ends("stopped", 0, "launcher_lost"), 75, 3),
        ("kill -9 $$", 75, 3),
        (ends("failed", 1), 1, 2),
        ("exit 0", 1, 2),
        (ends("finished", "null"), 1, 2),
        (ends("failed", '"2"'), 1, 2),
        ("echo '[1, 2]' > status.json", 1, 2),
        ("echo '{}' > status.json; exit 2", 1, 2),
        ("exit 2", 2, 1),
        (ends("failed", 2), 2, 1),
        (ends("failed", 74), 74, 1),
        (ends("stopped", 0, "stop_file"), 0, 1),
    ],
)
def test_without_progress_it_ends_with_the_code_of_the_last_start(run_dir, line, code, starts):
    ended, _ = run(run_dir, *[line] * 5)
    assert (ended.exit_code, ended.starts) == (code, starts)


def test_a_refused_start_of_a_run_that_had_finished_ends_with_2(run_dir):
    (run_dir / "status.json").write_text('{"state": "finished", "exit_code": 0, "step": 3}')
    (run_dir / "logs").mkdir()
    mark = Mark(0, 2, "a key is wrong", False, "host", "1:1", 0)
    left = shlex.quote(json.dumps(asdict(mark)))
    refused = f"cp status.json s; mv s status.json; echo {left} > logs/rank-0.failed; exit 1"
    ended, said = run(run_dir, refused)
    assert (ended.exit_code, ended.starts) == (2, 1)
    assert "a key is wrong" in said[1]


def test_the_command_can_see_that_it_was_started_before(run_dir):
    line = f'echo "$LLMTRAIN_RESTARTS" >> seen; {ends("failed", 75)}'
    run(run_dir, line, line, ends("finished", 0))
    assert (run_dir / "seen").read_text() == "0\n1\n"


def test_a_checkpoint_that_was_there_before_is_no_progress(run_dir):
    (run_dir / "checkpoints" / "step-00000008").mkdir(parents=True)
    again = f"rmdir checkpoints/*; {commits(8)}; {ends('failed', 75)}"
    assert run(run_dir, *[again] * 5)[0].starts == 3


def test_a_directory_that_is_in_use_starts_nothing(run_dir):
    with RunLock(run_dir, "other"), pytest.raises(UserError, match=f"pid {os.getpid()}"):
        supervise(["/bin/sh", "-c", f"touch {run_dir}/started"], run_dir, print)
    assert not (run_dir / "started").exists()


@pytest.mark.parametrize(
    "words",
    [["--nodes", "1:2", "--processes-per-node", "1"], ["--nodes=1:2", "--processes-per-node=1"]],
)
def test_a_machines_part_of_a_run_that_others_hold_is_restarted_by_its_own_code(run_dir, words):
    """The status says that the run goes on, as it does on other machines."""
    (run_dir / "status.json").write_text('{"state": "running", "step": 3}')
    line = f"cd {run_dir}; echo >> starts; [ $(wc -l < starts) = 3 ] || exit 75"
    said: list[str] = []
    command = ["/bin/sh", "-c", line, "sh", *words]
    with RunLock(run_dir, "other"):
        ended = supervise(command, run_dir, said.append, NOW)
    assert (ended.exit_code, ended.starts) == (0, 3)
    assert said[1].startswith("start 1 ended with code 75: restart")
    assert said[-1] == "start 3 ended with code 0: the end"


def test_a_machines_part_that_is_killed_is_started_again_and_one_that_is_refused_is_not(run_dir):
    line = f"cd {run_dir}; echo >> starts; [ $(wc -l < starts) = 2 ] && exit 2; kill -9 $$"
    words = ["--nodes", "1:2", "--processes-per-node", "1"]
    ended = supervise(["/bin/sh", "-c", line, "sh", *words], run_dir, print, NOW)
    assert (ended.exit_code, ended.starts) == (2, 2)


def test_nodes_of_a_batch_system_are_not_machines_that_come_and_go():
    assert not is_of_machines(["srun", "--nodes=2", "llmtrain", "train", "c.yaml"])


def test_a_machines_part_that_cannot_be_started_is_a_wrong_command(run_dir):
    command = ["no-such-program", "--nodes", "1:2", "--processes-per-node", "1"]
    with pytest.raises(UserError, match="a program that can be started"):
        supervise(command, run_dir, print, NOW)


def test_the_lock_is_left_as_it_is_for_the_run_to_judge(run_dir):
    said = {"host": "h", "boot_id": "b", "pid": 1, "started": "1", "run_id": "r", "beat": 1}
    body = json.dumps(said | {"host": socket.gethostname()})
    (run_dir / "lock").write_text(body)
    assert run(run_dir, ends("finished", 0))[0].exit_code == 0
    assert (run_dir / "lock").read_text() == body


@pytest.mark.parametrize("named", [None, "r", "typo"])
def test_a_wrong_config_or_another_run_directory_starts_nothing(tmp_path, named):
    wrong = SMALLEST if named == "typo" else SMALLEST.replace("steps", "step")
    path, run_dir = str(written(tmp_path, wrong)), tmp_path / named if named else None
    line = ["/bin/sh", "-c", f"touch {tmp_path}/started", path, f"run.dir={tmp_path}/r"]
    with pytest.raises(UserError, match="--run" if named == "typo" else r"training\.step "):
        supervise(line, run_dir, print)
    assert {one.name for one in tmp_path.iterdir()} == {"my.yaml"}


def test_the_run_directory_is_that_of_the_config_and_its_overrides(tmp_path):
    path = str(written(tmp_path))
    line = f"cd {tmp_path}/r && {ends('finished', 0)}"
    ended = supervise(["/bin/sh", "-c", line, path, f"run.dir={tmp_path}/r"], None, print, NOW)
    assert ended == Supervised(0, 1, "finished at step 3")


def test_no_secret_is_said(run_dir, monkeypatch):
    secret = "correct-horse-battery"
    said: list[str] = []
    command = ["env", f"HF_TOKEN={secret}", "sh", "-c", f"cd {run_dir}; {ends('finished', 0)}"]
    supervise(command, run_dir, said.append, NOW)
    assert "HF_TOKEN=***" in said[0]
    assert not any(secret in line for line in said)
    with pytest.raises(UserError, match="No such file") as caught:
        supervise([f"HF_TOKEN={secret}", "llmtrain"], run_dir, said.append, NOW)
    assert secret not in str(caught.value)
    monkeypatch.setenv("MY_PASSWORD", secret)
    supervise(["sh", "-c", f"cd {run_dir}; {ends('failed', 74, secret)}"], run_dir, said.append)
    assert "failed at step 3 (***) with code 74" in said[-1]


def test_a_program_that_is_not_there_is_bad_input(run_dir):
    with pytest.raises(UserError, match="No such file"):
        supervise([str(run_dir / "nothing")], run_dir, print)


# A rank that holds the lock and outlives its launcher, as one that saves; 1: until it is killed.
OUTLIVES = """
import json, os, sys, time
from pathlib import Path
from llmtrain.rundir.lock import RunLock
run = Path(sys.argv[1])
with RunLock(run, "r"):
    (run / "holding").touch()
    while sys.argv[2] == "1" or not (run / "launcher-gone").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    text = json.dumps({"state": "stopped", "exit_code": 0, "reason": "launcher_lost", "step": 4})
    (run / "status.json").write_text(text)
"""


def outliving(run_dir, how, rank="RANK=0"):
    (run_dir / "rank.py").write_text(OUTLIVES)
    rank = f"PYTHONPATH={ROOT} {rank} setsid {sys.executable} rank.py {run_dir} {how} &"
    return f"{rank} while [ ! -e holding ]; do sleep 0.02; done; touch launcher-gone; kill -9 $$"


@pytest.mark.launches
def test_it_waits_for_ranks_that_outlive_their_launcher(run_dir):
    ended, said = run(run_dir, outliving(run_dir, 0), ends("finished", 0))
    assert (ended.exit_code, ended.starts) == (0, 2)
    assert "stopped at step 4 (launcher_lost)" in said[1]


@pytest.mark.parametrize("rank", ["RANK=0", ""])
@pytest.mark.launches
def test_ranks_that_never_end_are_killed(run_dir, rank):
    waits = Waits(first=0.0, leave=0.5)
    ended, said = run(run_dir, outliving(run_dir, 1, rank), ends("finished", 0), waits=waits)
    assert (ended.exit_code, ended.starts) == (0, 2)
    assert "killed process" in said[1]
    assert "ended by signal 9 with code 75" in said[2]


SUPERVISE = """
import sys
from pathlib import Path
from llmtrain.tools.launch.supervise import Waits, supervise
say = lambda line: print(line, flush=True)
ended = supervise(sys.argv[2:], Path(sys.argv[1]), say, Waits(first=float(3600)))
sys.exit(ended.exit_code)
"""


@pytest.fixture
def supervising(run_dir):
    """Supervise a line of shell in a process of its own, which can be sent signals."""
    started: list[subprocess.Popen[str]] = []

    def start(line):
        command = [sys.executable, "-c", SUPERVISE, str(run_dir), "/bin/sh", "-c", line]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=run_dir, env=env)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("sent", "heard"), [(signal.SIGTERM, "TERM"), (signal.SIGINT, "INT"), (signal.SIGUSR1, "TERM")]
)
@pytest.mark.launches
def test_a_signal_reaches_the_command_and_nothing_is_started_again(
    run_dir, supervising, sent, heard
):
    stops = f"stops() {{ {ends('failed', 75, 'heard')}; exit; }}; trap stops {heard}"
    process = supervising(f"{stops}; touch ready; while :; do sleep 0.05; done")
    until((run_dir / "ready").exists, "the command runs")
    process.send_signal(sent)
    said, _ = process.communicate()
    assert process.returncode == 75, said
    assert "asked to stop" in said


# A run of one process, with no RANK, that only ends when it is told to.
HEARS = """
import json, signal, sys, time
from pathlib import Path
from llmtrain.rundir.lock import RunLock
run, heard = Path(sys.argv[1]), []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
with RunLock(run, "r"):
    (run / "ready").touch()
    while not heard:
        time.sleep(0.01)
    text = json.dumps({"state": "stopped", "exit_code": 0, "reason": "SIGTERM", "step": 4})
    (run / "status.json").write_text(text)
"""


@pytest.mark.launches
def test_a_run_behind_a_shell_hears_the_signal_and_is_waited_for(run_dir, supervising):
    (run_dir / "train.py").write_text(HEARS)
    process = supervising(f"unset RANK; {sys.executable} train.py {run_dir}; true")
    until((run_dir / "ready").exists, "the run holds its lock")
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    assert "stopped at step 4 (SIGTERM) with code 0: asked to stop" in said
    assert not is_held(run_dir)


@pytest.mark.launches
def test_a_run_that_was_interrupted_twice_is_not_started_again(run_dir, supervising):
    started = ends("running", "null")
    again = "trap 'touch twice; exit 75' INT; touch once"
    process = supervising(
        f'{started}; trap "{again}" INT; touch ready; while :; do sleep 0.05; done'
    )
    for name in ("ready", "once"):
        until((run_dir / name).exists, name)
        process.send_signal(signal.SIGINT)
    said, _ = process.communicate()
    assert (run_dir / "twice").exists()
    assert process.returncode == 75, said
    assert said.count("start ") == 2  # one start, one end
    assert "ended as rank 0 died without a word with code 75: asked to stop" in said


@pytest.mark.launches
def test_a_signal_ends_the_wait_for_a_restart(run_dir, supervising):
    process = supervising(ends("failed", 75))
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(2)]
    assert "restart in about 300 s" in said[1]
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75


@pytest.mark.launches
def test_a_supervisor_that_is_killed_tells_the_command_to_stop(run_dir, supervising):
    process = supervising("trap 'touch told; exit' TERM; touch ready; while :; do sleep 0.05; done")
    until((run_dir / "ready").exists, "the command runs")
    process.kill()
    until((run_dir / "told").exists, "the command is told to stop")


# What a command says of the run that it starts: config, run directory, secrets.


@pytest.mark.parametrize(
    ("command", "config"),
    [
        ("accelerate launch --config_file a.yaml scripts/train.py my.yaml", ("my.yaml", [])),
        ("accelerate launch --config_file=a.yaml scripts/train.py my.yaml", ("my.yaml", [])),
        (
            "llmtrain train my.yaml run.dir=r data.sources.0.path=x=y --processes 2",
            ("my.yaml", ["run.dir=r", "data.sources.0.path=x=y"]),
        ),
        ("llmtrain train --accelerate a.yaml my.yml run.seed=2", ("my.yml", ["run.seed=2"])),
        ("env A.B=1 sh -c exit my.yaml", ("my.yaml", [])),
        ("sh run.sh", None),
        ("train --config_file a.yaml", None),
    ],
)
def test_the_config_of_the_run_is_found_in_the_command(command, config):
    assert config_in(command.split()) == config


def train(path, *overrides):
    return ["llmtrain", "train", str(path), *overrides]


def test_the_checked_run_directory_is_that_of_the_config_and_its_overrides(tmp_path):
    command = train(written(tmp_path), f"run.dir={tmp_path}/r")
    assert checked_run_dir(command, None) == tmp_path / "r"


def test_a_config_that_names_the_same_directory_in_other_words_agrees(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = train(written(tmp_path), "run.dir=runs/../r")
    assert checked_run_dir(command, tmp_path / "r") == Path("runs/../r")


def test_a_run_directory_that_the_config_does_not_name_is_bad_input(tmp_path):
    command = train(written(tmp_path), "run.dir=runs/other")
    with pytest.raises(UserError, match="--run = runs/typo") as caught:
        checked_run_dir(command, Path("runs/typo"))
    assert "runs/other, the run.dir of" in str(caught.value)


@pytest.mark.parametrize("run_dir", [None, Path("r")])
def test_a_wrong_config_is_bad_input_whether_the_directory_is_named_or_not(tmp_path, run_dir):
    with pytest.raises(UserError, match=r"model\.foo "):
        checked_run_dir(train(written(tmp_path), "run.dir=r", "model.foo=1"), run_dir)
    wrong = written(tmp_path, SMALLEST.replace("steps", "step"))
    with pytest.raises(UserError, match=r"training\.step "):
        checked_run_dir(train(wrong, "run.dir=r"), run_dir)


def test_a_command_without_a_config_needs_the_run_directory(tmp_path):
    with pytest.raises(UserError, match="--run DIR"):
        checked_run_dir(["sh", "run.sh"], None)
    assert checked_run_dir(["sh", "run.sh"], tmp_path) == tmp_path


@pytest.mark.parametrize("text", ["machines: 2\nmodel: p5\n", None])
def test_beside_a_named_directory_the_yaml_of_another_program_is_left_alone(tmp_path, text):
    other = tmp_path / "cluster.yaml"
    if text is not None:
        other.write_text(text)
    assert checked_run_dir(["submit", str(other), "run.sh"], tmp_path) == tmp_path


SECRET = "correct-horse-battery"


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        (["env", f"HF_TOKEN={SECRET}", "llmtrain", "train"], "train"),
        (["env", f"HF_TOKEN=a {SECRET}", "llmtrain", "train"], "train"),
        ([f"HF_TOKEN={SECRET}", "llmtrain", "train"], "train"),
        (["docker", "run", f"--env=WANDB_API_KEY={SECRET}", "image"], "image"),
        (["env", f"GITLAB_TOKEN={SECRET}", "llmtrain", "train"], "train"),
        (["train.py", f"--x-token={SECRET}", "my.yaml"], "my.yaml"),
        (["train.py", f"--hub-token={SECRET}", "my.yaml"], "my.yaml"),
        (["train.py", "--hub-token", SECRET, "my.yaml"], "my.yaml"),
        (["sh", "-c", f"cd x; HF_TOKEN={SECRET} llmtrain train my.yaml"], "train my.yaml"),
        (["sh", "-c", f"export HF_TOKEN='a {SECRET}'; llmtrain train"], "llmtrain train"),
        (["sh", "-c", f'export HF_TOKEN="a {SECRET}"; llmtrain train'], "llmtrain train"),
        (["llmtrain", "train", f"model.config.hub_token={SECRET}", "run.seed=2"], "run.seed=2"),
    ],
)
def test_a_command_is_shown_without_what_is_given_to_the_name_of_a_secret(command, kept):
    found = shown(command)
    assert SECRET not in found
    assert "***" in found
    assert kept in found


def test_a_command_is_shown_without_secrets_of_the_environment_and_what_looks_like_one(monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "it's " + SECRET)
    assert shown(["train.py", "it's " + SECRET, "hf_" + "aB" * 17]) == "train.py '***' '***'"


def test_what_is_no_secret_is_shown_as_it_is():
    command = ["env", "A=1", "train", "my.yaml", "model.eos_token=x", "--name", "a b"]
    assert shown(command) == "env A=1 train my.yaml model.eos_token=x --name 'a b'"
