"""A run on one or two machines that come and go: `llmtrain train --nodes 1:2` in two namespaces.

Each test tells one story. It compares the digests of all steps with those of a run that nobody
interrupts, and counts steps that were trained twice.
"""

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.netns import Network
from helpers.ranks import until
from helpers.tiny import lines, status, tiny_config, write_config

from llmtrain.checkpoint.read import tensors_digest
from llmtrain.rundir import record

LLMTRAIN = [sys.executable, "-m", "llmtrain"]
STEPS = 4000  # more than any story takes: each is stopped by a person
SAVED_EVERY = 25


@dataclass
class Run:
    """A run and the commands that take part in it, the newest of each node."""

    network: Network
    folder: Path
    commands: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def start(
        self, node: int, *overrides: str, processes: int = 1, supervised: bool = False
    ) -> None:
        """Give the command on a machine."""
        words = [*LLMTRAIN, "train", str(self.folder / "config.yaml"), *overrides]
        words += ["--nodes", "1:2", "--processes-per-node", str(processes), "--last-call", "1"]
        command = [*LLMTRAIN, "supervise", "--", *words] if supervised else words
        self.commands[node] = self.network.start(node, command, self.output(node), {})

    def output(self, node: int) -> Path:
        return self.folder / f"node-{node}.txt"

    def said(self) -> str:
        """Everything that was printed, and what the launchers logged: for messages of failures."""
        log = self.run_dir / "logs" / "launcher.log"
        files = [self.output(0), self.output(1), log]
        return "\n".join(path.read_text()[-4000:] for path in files if path.exists())

    def worlds(self) -> list[int]:
        """The number of processes of each start that began to train."""
        return [one["world_size"] for one in self.lines("start")]

    def lines(self, kind: str) -> list[dict[str, Any]]:
        there = (self.run_dir / "metrics.jsonl").exists()
        return [one for one in record.record(self.run_dir) if one["kind"] == kind] if there else []

    def trains_on(self, processes: int, after: int) -> None:
        """Wait for three steps of a start with so many processes. after: starts before that one"""

        def trains() -> bool:
            started = self.lines("start")
            if len(started) <= after or started[-1]["world_size"] != processes:
                return False
            trained = self.lines("train")
            return bool(trained) and trained[-1]["step"] >= started[-1]["step"] + 3

        until(trains, f"training on {processes} after {after} starts\n{self.said()}")

    def changes(self, processes: int, change: Callable[[], object]) -> None:
        """Change the machines; wait until the run trains on another number of processes."""
        before = len(self.worlds())
        change()
        self.trains_on(processes, before)

    def agent(self, node: int) -> psutil.Process:
        family = psutil.Process(self.commands[node].pid).children(recursive=True)
        (found,) = [one for one in family if "llmtrain.tools.launch.elastic" in one.cmdline()]
        return found

    def ranks(self, node: int) -> list[psutil.Process]:
        (server,) = [
            one for one in self.agent(node).children() if "forkserver" in str(one.cmdline())
        ]
        return sorted(server.children(), key=lambda one: one.pid)

    def signal(self, node: int, number: signal.Signals) -> None:
        """Signal the command of a node."""
        self.commands[node].send_signal(number)

    def again(self) -> int:
        """How many steps were trained twice."""
        trained = Counter(one["step"] for one in self.lines("train"))
        assert sorted(trained) == list(range(1, max(trained) + 1))
        return sum(trained.values()) - len(trained)

    def digests(self) -> list[str]:
        return [one["batch_digest"] for one in lines(self.run_dir, "train")]


@pytest.fixture
def run(tmp_path):
    network = Network()
    config = tiny_config(
        tmp_path / "run",
        training__steps=STEPS,
        training__global_batch_size=8,
        training__same_bits=True,
        checkpoint__every_steps=SAVED_EVERY,
    )
    # So that a shorter run is the beginning of a longer one.
    config["optimizer"] |= {"schedule": "constant", "warmup_steps": 1}
    write_config(tmp_path, config)
    try:
        network.up()
        yield Run(network, tmp_path)
    finally:
        network.down()


def assert_straight(server, run):
    """Compare the run with one of one process that nobody interrupts: its tokens and its bits."""
    last, other = len(run.digests()), run.folder / "straight"
    words = ["train", str(run.folder / "config.yaml"), f"run.dir={other}", f"training.steps={last}"]
    assert server.run([*words, "evaluation.every_steps=10000"], 1, run.folder) == [0]
    assert run.digests() == [one["batch_digest"] for one in lines(other, "train")]
    name = f"step-{last:08d}"
    found, expected = (tensors_digest(one / "checkpoints" / name) for one in (run.run_dir, other))
    assert found == expected


def test_machines_join_leave_and_die_and_every_step_is_trained_as_in_a_straight_run(server, run):
    """Orderly changes train no step twice; a death trains at most those since the last save."""
    run.changes(1, lambda: run.start(0))
    run.changes(2, lambda: run.start(1))
    assert run.again() == 0

    run.changes(1, lambda: run.signal(1, signal.SIGUSR1))  # leaves
    assert run.commands[1].wait() == 75
    run.changes(2, lambda: run.start(1))
    run.changes(2, lambda: run.ranks(1)[0].kill())
    run.changes(1, lambda: run.network.power_off(0))  # the first machine, with rank 0
    run.changes(2, lambda: run.start(0))
    orderly = run.again()
    assert orderly <= 2 * SAVED_EVERY

    run.changes(1, lambda: run.agent(1).kill())
    assert run.commands[1].wait() == 75
    assert run.again() == orderly, "an agent that dies leaves ranks that save"

    (run.run_dir / "STOP").touch()
    assert run.commands[0].wait() == 0
    assert (status(run.run_dir)["state"], status(run.run_dir)["reason"]) == ("stopped", "stop_file")
    assert run.worlds() == [1, 2, 1, 2, 2, 1, 2, 1]
    assert not (run.run_dir / "rendezvous").exists()
    assert_straight(server, run)


def interrupt(run):
    run.signal(1, signal.SIGINT)  # Ctrl-C at the machine that has no rank 0


def cancel(run):
    """What `scancel` does: SIGTERM to every process of a job."""
    for node in (0, 1):
        command = psutil.Process(run.commands[node].pid)
        for one in [command, *command.children(recursive=True)]:
            one.terminate()


def touch_stop(run):
    (run.run_dir / "STOP").touch()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "reason"), [(interrupt, "signal"), (cancel, "signal"), (touch_stop, "stop_file")]
)
def test_a_person_stops_all_machines_from_any_of_them(run, stop, reason):
    run.start(0)
    run.changes(2, lambda: run.start(1))
    stop(run)
    assert [run.commands[node].wait() for node in (0, 1)] == [0, 0], run.said()
    found = status(run.run_dir)
    assert (found["state"], found["exit_code"], found["reason"]) == ("stopped", 0, reason)
    assert found["checkpoint"] == f"step-{found['step']:08d}"
    assert run.again() == 0
    assert not (run.run_dir / "rendezvous").exists()


@pytest.mark.slow
def test_a_rank_that_dies_stops_no_neighbour_on_its_machine(run):
    """torch signals the neighbour as a person would; also before the two have met."""
    run.start(0, processes=2)
    run.trains_on(2, 0)
    first = run.ranks(0)

    def kill_twice():
        first[1].kill()
        until(lambda: len(run.ranks(0)) == 2 and run.ranks(0)[1] not in first, "another group")
        run.ranks(0)[1].kill()

    run.changes(2, kill_twice)
    touch_stop(run)
    assert run.commands[0].wait() == 0, run.said()
    ends = [(one["state"], one["reason"]) for one in run.lines("end")]
    assert ends[-1] == ("stopped", "stop_file")
    assert {state for state, _ in ends[:-1]} == {"failed"}, ends


@pytest.mark.slow
def test_a_person_stops_machines_that_have_not_met(run):
    """Rank 0 waits for ranks that do not come, and hears of the end by a note of its launcher."""
    run.start(0)
    run.trains_on(1, 0)
    run.start(1)
    run.network.power_off(0)
    time.sleep(2.0)
    run.start(0)
    until(lambda: run.ranks(1), "ranks")
    interrupt(run)
    assert [run.commands[node].wait(90) for node in (0, 1)] == [0, 0], run.said()


@pytest.mark.slow
def test_a_machine_whose_supervisor_is_killed_leaves_the_run_to_the_others(run):
    run.start(0)
    run.changes(2, lambda: run.start(1, supervised=True))
    run.changes(1, lambda: run.commands[1].kill())
    assert run.again() == 0
    touch_stop(run)
    assert run.commands[0].wait() == 0, run.said()


@pytest.mark.slow
def test_a_machine_that_waits_is_stopped_alone(run):
    """The run has all the machines that it takes: a third one waits, and may give up."""
    run.start(0)
    run.changes(2, lambda: run.start(1))
    both = dict(run.commands)
    run.start(1)
    time.sleep(20.0)
    run.signal(1, signal.SIGINT)
    assert run.commands[1].wait() == 0, run.said()
    before = run.lines("train")[-1]["step"]
    until(lambda: run.lines("train")[-1]["step"] > before + 5, "further steps")
    assert [both[node].poll() for node in (0, 1)] == [None, None]
    assert run.worlds()[-1] == 2
    touch_stop(run)
    assert [both[node].wait() for node in (0, 1)] == [0, 0]


@pytest.mark.slow
def test_a_bad_row_ends_all_machines_with_2(run):
    """Another group would only meet it again."""
    rows = run.folder / "rows.jsonl"
    rows.write_text('{"text": "the cat sat on the mat"}\n' * 400 + "no JSON\n")
    words = [f'data.sources=[{{"path": "{rows}"}}]']
    run.start(0, *words)
    run.start(1, *words)
    assert [run.commands[node].wait() for node in (0, 1)] == [2, 2], run.said()
    assert "rows.jsonl" in run.said()
    assert not (run.run_dir / "rendezvous").exists()
