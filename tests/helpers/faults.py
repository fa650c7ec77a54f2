"""A run that faults strike, and what must hold of it afterwards.

    def test_f05_a_kill_at_the_second_vote(faulty, straight):
        run = faulty(world_size=2)                         # its config; nothing has started yet
        codes = run.launch("save.vote2@step=8@rank=1=kill")
        assert codes[1] == KILLED
        assert run.valid() == ["step-00000004"]
        assert run.launch() == [0, 0]                      # the same command again
        assert run.outcome() == straight(2)                # bit for bit the uninterrupted run

`faulty` and `straight` are fixtures of `tests/faults/conftest.py`. Changes of the config are
`section__key=value`, as for `tiny_config`; `faulty(2, "fsdp2", checkpoint__writers="all")`. After
each test the frame checks every run that `faulty` made: no process, no `.partial`, no `.trash-*`,
no temporary file, a lock that can be taken. A test that fails prints the commands that replay it.
"""

import contextlib
import hashlib
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers import launcher, tiny
from helpers.ranks import PATIENCE_SECONDS, Ranks, Server, until

from llmtrain.checkpoint import format as form, read
from llmtrain.rundir.lock import RunLock

STEPS = 24
EVERY = 4
KILLED = -signal.SIGKILL
PLAIN = {"distributed_type": "MULTI_GPU"}
DROPOUT = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
}


def faulty_config(
    run_dir: Path, world_size: int = 2, strategy: str = "ddp", **changes: Any
) -> dict[str, Any]:
    """Accumulation 2, dropout 0.1, 24 steps, a checkpoint every 4 and an evaluation every 8."""
    config = tiny.tiny_config(
        run_dir,
        training__steps=STEPS,
        training__global_batch_size=4 * world_size,
        checkpoint__every_steps=EVERY,
        evaluation__every_steps=8,
        evaluation__max_documents=2,
    )
    config["model"]["config"] = dict(DROPOUT)
    config["distributed"] = {"strategy": strategy, "timeout_minutes": 3.0}
    for name, value in changes.items():
        section, key = name.split("__")
        config.setdefault(section, {})[key] = value
    return config


@dataclass(frozen=True)
class Outcome:
    """What a run ended with: digests of the last step's tensor files, and of every batch."""

    files: Mapping[str, str]
    batches: tuple[str, ...]


@dataclass(frozen=True)
class Launch:
    """One start of a run, as it can be given again."""

    faults: str
    overrides: tuple[str, ...]
    codes: list[int] = field(default_factory=list)


@dataclass
class FaultyRun:
    """A run in `folder`: `run/` is its directory, `config.yaml` and `output.txt` lie beside it.

    view: where this process sees the run's file system, if it is not its own (`small_disk`) ·
    patience_seconds: far beyond what a start takes.
    """

    server: Server
    folder: Path
    world_size: int
    config: dict[str, Any]
    launches: list[Launch] = field(default_factory=list)
    view: Path = Path("/")
    patience_seconds: float = PATIENCE_SECONDS

    @property
    def run_dir(self) -> Path:
        return self.view / self.config["run"]["dir"].lstrip("/")

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    def start(
        self,
        faults: str = "",
        *overrides: str,
        world_size: int | None = None,
        env: Mapping[str, str] | None = None,
        through: Sequence[str] = ("train",),
    ) -> Ranks:
        """Start every rank with these faults, and return at once. See `wait`.

        through: what the rank server runs in place of `train`, see `small_disk.through`.
        """
        path = tiny.write_config(self.folder, self.config)
        self.launches.append(Launch(faults, overrides))
        asked = {**(env or {}), **({"LLMTRAIN_FAULTS": faults} if faults else {})}
        size = world_size or self.world_size
        return self.server.start([*through, str(path), *overrides], size, self.folder, asked)

    def wait(self, ranks: Ranks) -> list[int]:
        """Exit codes of the ranks that `start` made; negative: the signal that ended one.

        A hang is killed after minutes, and fails the test.
        """
        try:
            until(lambda: not ranks.alive(), "the end of every rank", self.patience_seconds)
        finally:
            codes = ranks.kill()
            self.launches[-1].codes[:] = codes
        return codes

    def launch(
        self,
        faults: str = "",
        *overrides: str,
        world_size: int | None = None,
        env: Mapping[str, str] | None = None,
        through: Sequence[str] = ("train",),
    ) -> list[int]:
        """Start every rank with these faults and wait; the exit codes by rank."""
        ranks = self.start(faults, *overrides, world_size=world_size, env=env, through=through)
        return self.wait(ranks)

    def accelerate(self, faults: str = "", *overrides: str) -> subprocess.CompletedProcess[str]:
        """The same through a real `accelerate launch`, which takes seconds to import."""
        path = tiny.write_config(self.folder, self.config)
        file = launcher.launch_file(self.folder, {"num_processes": self.world_size} | PLAIN)
        command = [*launcher.ACCELERATE, "--config_file", file, launcher.SCRIPT, str(path)]
        env = {"LLMTRAIN_FAULTS": faults} if faults else {}
        ended = launcher.run([*command, *overrides], self.folder, **env)
        self.launches.append(Launch(faults, overrides, [ended.returncode]))
        with (self.folder / "output.txt").open("a", encoding="utf-8") as output:
            output.write(ended.stdout + ended.stderr)
        return ended

    def outcome(self) -> Outcome:
        """Of a run that has ended."""
        directory = self.checkpoints / form.directory_name(self.config["training"]["steps"])
        files = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(directory.glob("*.safetensors"))
        }
        assert files, f"{directory.name} is not there:\n{self.output()}"
        batches = tuple(line["batch_digest"] for line in self.lines("train"))
        return Outcome(files, batches)

    def names(self) -> list[str]:
        """Everything in `checkpoints/`."""
        return sorted(path.name for path in self.checkpoints.iterdir())

    def valid(self) -> list[str]:
        """The names of complete checkpoints whose every byte is right, oldest first."""
        found = sorted(path for path in self.checkpoints.glob("step-*") if path.name[5:].isdigit())
        return [path.name for path in found if not read.verify(path)]

    def newest(self) -> Path:
        """The directory of the newest checkpoint."""
        return max(path for path in self.checkpoints.glob("step-*") if path.name[5:].isdigit())

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Lines of `metrics.jsonl`; of a step that was trained again, the last."""
        return tiny.lines(self.run_dir, kind)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The details of the events of this name, each with its step."""
        found = [line for line in self.lines("event") if line["event"] == name]
        return [{"step": line["step"], **line["detail"]} for line in found]

    def resumed(self) -> list[str | None]:
        """The checkpoint that each start resumed from."""
        return [line["resumed_from"] for line in self.lines("start")]

    def status(self) -> dict[str, Any]:
        return tiny.status(self.run_dir)

    def output(self) -> str:
        """What all ranks of all starts have printed."""
        path = self.folder / "output.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def processes(self) -> list[int]:
        """Everything that runs for this run, its data workers too: it works in `folder`."""
        return [pid for pid in _all_pids() if pid != os.getpid() and _works_in(pid, self.folder)]

    def left_over(self) -> list[str]:
        """Files that no finished run may leave behind."""
        patterns = ("*.partial", ".trash-*", "*.tmp", ".probe-*")
        found = {path for pattern in patterns for path in self.run_dir.rglob(pattern)}
        return sorted(str(path.relative_to(self.run_dir)) for path in found)

    def check_clean(self) -> None:
        """No process, no unfinished file, and a lock that can be taken."""
        until(lambda: not self.processes(), "the end of every process of the run")
        if not self.launches or not self.run_dir.is_dir():
            return
        left = self.left_over()
        assert not left, f"left over: {left}"
        with RunLock(self.run_dir, "after the test"):
            pass

    def end(self) -> None:
        """Kill what a failed test has left."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def replay(self) -> str:
        """The starts so far as commands, each with the codes that it ended with."""
        return "\n".join(self._command(one) for one in self.launches)

    def _command(self, launch: Launch) -> str:
        faults = f"LLMTRAIN_FAULTS={shlex.quote(launch.faults)} " if launch.faults else ""
        arguments = shlex.join([str(self.folder / "config.yaml"), *launch.overrides])
        size = f" --processes {self.world_size}" if self.world_size > 1 else ""
        return f"{faults}llmtrain train {arguments}{size}   # exit codes {launch.codes}"


def _all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _works_in(pid: int, folder: Path) -> bool:
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(folder)  # noqa: PTH115
    except OSError:  # it has ended, a zombie too, or is not ours
        return False
