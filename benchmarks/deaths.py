"""What does a death a minute cost a run on two machines that come and go?

Two network namespaces, each with `llmtrain supervise -- llmtrain train --nodes 1:2`. In turn a
rank, an agent and a whole machine is killed, first on one machine, then on the other. `supervise`
starts an agent again; a machine is on again after a few seconds. Afterwards the steps are compared
with those of one process that nobody interrupts. It needs the right to make namespaces.

    benchmarks/deaths.py --minutes 10 --json benchmarks/results/deaths.json
"""

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import LLMTRAIN, ROOT, Bench, main

SIZES = {"minutes": (10.0, 2.0), "every": (60.0, 30.0)}
KINDS = {"rank": 12, "agent": 15, "machine": 25}  # → seconds to the next new step, the goal
AWAY_SECONDS = 5.0  # until a machine is on again
SAVED_EVERY = 50
BATCH = 8


@dataclass(frozen=True)
class Death:
    """Something that was killed, in Unix seconds."""

    kind: str
    node: int
    time: float


def written(folder: Path) -> None:
    """Write the config of the run: a small model, the same bits on one and two processes."""
    from helpers.tiny import tiny_config, write_config

    config = tiny_config(
        folder / "run",
        training__steps=1_000_000,
        training__global_batch_size=BATCH,
        training__same_bits=True,
        data__seq_len=256,
        checkpoint__every_steps=SAVED_EVERY,
        checkpoint__keep_last=2,
    )
    config["model"]["config"] |= {"hidden_size": 64, "intermediate_size": 256}
    # So that a shorter run is the beginning of a longer one.
    config["optimizer"] |= {"schedule": "constant", "warmup_steps": 1}
    write_config(folder, config)


class Machines:
    """The two machines of the run."""

    def __init__(self, network: Any, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.commands: dict[int, subprocess.Popen[bytes]] = {}

    def switch_on(self, node: int) -> None:
        train = [*LLMTRAIN, "train", str(self.folder / "config.yaml"), "--nodes", "1:2"]
        train += ["--processes-per-node", "1", "--last-call", "1"]
        command = [*LLMTRAIN, "supervise", "--", *train]
        output = self.folder / f"node-{node}.txt"
        self.commands[node] = self.network.start(node, command, output, {})

    def kill(self, kind: str, node: int) -> None:
        """Kill a rank, the agent or everything on a machine."""
        import psutil

        if kind == "machine":
            self.network.power_off(node)
            self.commands[node].wait()
            return
        for one in psutil.Process(self.commands[node].pid).children(recursive=True):
            if kind == "agent" and "llmtrain.tools.launch.elastic" in one.cmdline():
                one.kill()
            # Ranks are forked from the server, whose command they show.
            if kind == "rank" and "forkserver" in str(one.parent().cmdline()):
                one.kill()


def steps(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Return the lines of a kind in the record so far."""
    from llmtrain.rundir import record

    return [one for one in record.record(run_dir) if one["kind"] == kind]


def wait_for(condition: Any, seconds: float = 300.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the run does not train")
        time.sleep(0.2)


def trains_on_both(run_dir: Path) -> bool:
    """Whether the newest start runs on two processes and has made a step."""
    started, trained = steps(run_dir, "start"), steps(run_dir)
    if not started or started[-1]["world_size"] != 2 or not trained:
        return False
    return bool(trained[-1]["time"] > started[-1]["time"])


def run_and_kill(bench: Bench) -> list[Death]:
    """Run for the minutes asked for, with a death at every period; return the deaths."""
    from helpers.netns import Network

    written(bench.folder)
    run_dir, deaths, network = bench.folder / "run", list[Death](), Network()
    both = Machines(network, bench.folder)
    with ExitStack() as at_the_end:
        network.up()
        at_the_end.callback(network.down)
        both.switch_on(0)
        both.switch_on(1)
        wait_for(lambda: trains_on_both(run_dir))
        begun = time.monotonic()
        while True:
            due = begun + bench.sizes.every * (len(deaths) + 1)
            if due > begun + 60 * bench.sizes.minutes:
                break
            time.sleep(max(0.0, due - time.monotonic()))
            kind = list(KINDS)[len(deaths) % len(KINDS)]
            node = len(deaths) // len(KINDS) % 2
            now = time.time()  # noqa: TID251  # compared with the record of the run
            deaths.append(Death(kind, node, now))
            both.kill(kind, node)
            if kind == "machine":
                time.sleep(AWAY_SECONDS)
                both.switch_on(node)
        time.sleep(max(0.0, begun + 60 * bench.sizes.minutes - time.monotonic()))
        wait_for(lambda: not deaths or seconds_to_new_steps(deaths[-1:], run_dir) != [None])
        (run_dir / "STOP").touch()
        for command in both.commands.values():
            if command.wait() != 0:
                raise RuntimeError(f"see {bench.folder}: a machine ended with {command.returncode}")
    return deaths


def seconds_to_new_steps(found: list[Death], run_dir: Path) -> list[float | None]:
    """Return how long after each death the first step came that no start before had made."""
    started, trained = steps(run_dir, "start"), steps(run_dir)
    took: list[float | None] = []
    for death in found:
        again = next((one["time"] for one in started if one["time"] > death.time), math.inf)
        farthest = max(one["step"] for one in trained if one["time"] < again)
        after = (one["time"] for one in trained if one["time"] > again and one["step"] > farthest)
        new = next(after, None)
        took.append(None if new is None else float(new - death.time))
    return took


def straight(bench: Bench, last: int) -> Path:
    """Train so many steps in one process that nobody interrupts; return its directory."""
    path = bench.folder / "straight"
    words = [f"run.dir={path}", f"training.steps={last}"]
    words += ["evaluation.every_steps=1000000", "checkpoint.every_steps=1000000"]
    command = [*LLMTRAIN, "train", str(bench.folder / "config.yaml"), *words]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with (bench.folder / "straight.txt").open("wb") as output:
        subprocess.run(command, stdout=output, stderr=output, env=env, check=True)
    return path


def deaths(bench: Bench) -> None:
    """Kill something every minute, and compare the run with one that nobody interrupts."""
    import numpy as np
    from helpers.tiny import lines

    from llmtrain.checkpoint.read import tensors_digest
    from llmtrain.rundir import record
    from llmtrain.rundir.goodput import changes, share_of_steps, stretches

    found = run_and_kill(bench)
    run_dir, lost = bench.folder / "run", len(found)
    every = record.record(run_dir)
    goal = "≥ 0.85" if bench.sizes.every >= 60 else ""
    share = share_of_steps(stretches(every))
    again = sum(one.again for one in changes(every))
    bench.say("goodput", share, "", goal, deaths=lost, again=again, minutes=bench.sizes.minutes)
    for kind, most in KINDS.items():
        each = seconds_to_new_steps([one for one in found if one.kind == kind], run_dir)
        took = [one for one in each if one is not None]
        if took:
            name = f"death of {'an' if kind == 'agent' else 'a'} {kind} to the next new step, 95 %"
            high = float(np.quantile(took, 0.95, method="inverted_cdf"))
            bench.say(name, high, "s", f"≤ {most}", seconds=[round(one, 2) for one in took])
    last = steps(run_dir)[-1]["step"]
    other = straight(bench, last)
    pairs = zip(lines(run_dir, "train"), lines(other, "train"), strict=True)
    wrong = sum(one["batch_digest"] != two["batch_digest"] for one, two in pairs)
    bench.say("steps on other tokens than a straight run", wrong, f"of {last:,}", "≤ 0")
    name = f"step-{last:08d}"
    digests = {tensors_digest(one / "checkpoints" / name) for one in (run_dir, other)}
    bench.say("other SHA-256 of weights and moments", len(digests) - 1, "", "≤ 0")


if __name__ == "__main__":
    sys.path.append(str(ROOT / "tests"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the machines are switched off
    main(__doc__, deaths, SIZES, pinned=False)
