"""Prove on this machine that a killed and resumed run equals a straight one, before a long run.

    straight    N + 2 steps of the config, in a directory of its own
    killed      the same; every process is killed (SIGKILL) in step N, after a checkpoint
    resumed     the same command again, or under another strategy or number of processes

The runs are launched as the real run is, on the disk that it would use. With the same strategy and
number of processes the last checkpoints must have the same bytes. Otherwise sums are computed in
another order: then the batches must be the same, and the losses equal within 1e-5. With dropout or
a router's loss more than rounding may differ, and only the batches are compared. The trap: a kill
before the first checkpoint would prove nothing, so it is checked that a checkpoint was resumed.

With `training.same_bits` a run on each of several numbers of processes is enough: the weights and
moments of all of them must have one SHA-256.
"""

import filecmp
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from llmtrain import faults
from llmtrain.checkpoint import format as form, read
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.distributed.launch.environment import model_cut, split_problems
from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError, raise_any
from llmtrain.rundir import contents, record
from llmtrain.rundir.status import FrozenChoices, read_status
from llmtrain.tools.launch.launch import has_gpu, launch, plain_launch_problems
from llmtrain.types import JsonObject

KILL_AT = 6
TOLERANCE = 1e-5  # of a loss, where sums are computed in another order
_ON_CPUS = 2  # processes
_FEWEST = 2  # lowest step to kill: an earlier step must have been saved
_DOCUMENTS = 8  # held-out documents that are evaluated
_TAIL_LINES = 12
_SHOWN = 5

OnProgress = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class RehearsedLaunch:
    """What a start recorded about itself."""

    strategy: str
    world_size: int
    micro_batch_size: int
    resumed_from: str | None

    def __str__(self) -> str:
        return f"{self.strategy}, {_words(self.world_size)}"


@dataclass(frozen=True, slots=True)
class Compared:
    """What was compared, and what differs.

    straight, resumed: the last start of each run
    steps: number of steps whose batches were compared, by digest
    losses: number of losses that were compared; 0 = none, for the reason in `note`
    largest_difference: between the two losses of a step
    files: weight and optimizer files of the last step that were compared by bytes; () = none
    differences: each in words
    """

    straight: RehearsedLaunch
    resumed: RehearsedLaunch
    steps: int
    losses: int
    largest_difference: float
    files: tuple[str, ...]
    differences: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The result of a rehearsal.

    folder: where both runs were kept because they differ; None if they were removed
    """

    compared: Compared
    killed_at: int
    folder: Path | None
    seconds: float

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.compared.differences

    def to_json(self) -> JsonObject:
        """Return the object that `llmtrain checkpoints rehearse --json` prints."""
        rest = {"folder": self.folder and str(self.folder), "seconds": round(self.seconds, 3)}
        fields = {"same": self.same, "killed_at": self.killed_at, **asdict(self.compared), **rest}
        return {key: record.finite(value) for key, value in fields.items()}


@dataclass(frozen=True, slots=True)
class RehearsedSizes:
    """The result of a rehearsal on several numbers of processes.

    steps: that each run made
    launches: of the runs, by number of processes
    hashes: SHA-256, as hex, of the weights and all optimizer state behind the last step
    folder: where the runs were kept because they differ; None if they were removed
    """

    steps: int
    launches: tuple[RehearsedLaunch, ...]
    hashes: tuple[str, ...]
    folder: Path | None
    seconds: float

    @property
    def same(self) -> bool:
        """Whether all runs have one hash."""
        return len(set(self.hashes)) == 1

    def to_json(self) -> JsonObject:
        """Return the object that `llmtrain checkpoints rehearse --same-bits … --json` prints."""
        sizes = [str(one.world_size) for one in self.launches]
        return {
            "same": self.same,
            "steps": self.steps,
            "strategies": {n: one.strategy for n, one in zip(sizes, self.launches, strict=True)},
            "hashes": dict(zip(sizes, self.hashes, strict=True)),
            "folder": self.folder and str(self.folder),
            "seconds": round(self.seconds, 3),
        }


def rehearse_sizes(
    config_file: str,
    overrides: Sequence[str] = (),
    sizes: Sequence[int] = (1, 2),
    on_progress: OnProgress = lambda text: None,
) -> RehearsedSizes:
    """Train the first steps of a run with `training.same_bits` on each number of processes.

    sizes: numbers of processes
    on_progress: called with a description of each run before it starts

    Raises UserError before anything is started, also for a config without `same_bits`, and
    RunError as `rehearse` does.
    """
    begun, steps = time.perf_counter(), KILL_AT + 2
    config, several = load_config(config_file, overrides), sorted(set(sizes))
    _check(KILL_AT, *((config, size) for size in several))
    if not config.training.same_bits:
        expected = "true: without it the bits depend on the number of processes"
        raise UserError(Problem("training.same_bits", False, expected, "training.same_bits=true"))
    if len(several) < 2:
        expected = "two numbers of processes or more, as 1,2,3"
        raise UserError(Problem("--same-bits", ",".join(map(str, sizes)), expected))
    folder, shared = _make_folder(config), [*overrides, *_short(config, KILL_AT)]
    with ExitStack() as later:
        later.callback(shutil.rmtree, folder)
        launches, hashes = list[RehearsedLaunch](), list[str]()
        for size in several:
            on_progress(f"{steps} steps, {_words(size)}")
            run_dir = folder / f"{size}"
            _start(later, config_file, f"{size}", run_dir, shared, size, {})
            launches.append(_last_start(run_dir))
            hashes.append(read.tensors_digest(_last(run_dir)))
        kept_folder = None if len(set(hashes)) == 1 else folder
        if kept_folder is not None:
            later.pop_all()  # the folder stays
    seconds = time.perf_counter() - begun
    return RehearsedSizes(steps, tuple(launches), tuple(hashes), kept_folder, seconds)


def rehearse(
    config_file: str,
    overrides: Sequence[str] = (),
    kill_at: int = KILL_AT,
    to: str | None = None,
    processes: int | None = None,
    on_progress: OnProgress = lambda text: None,
) -> Rehearsal:
    """Train one run straight, kill and resume another, and compare the two.

    kill_at: the step in which the processes are killed
    to: strategy of the resumed run; None = the same as before
    processes: of the resumed run; None = the same as before: one for each GPU, or two on CPUs
    on_progress: called with a description of each run before it starts

    Raises UserError before anything is started, and RunError, with the exit code, if a start ended
    otherwise than expected; the message names its directory, which is kept.
    """
    begun = time.perf_counter()
    config = load_config(config_file, overrides)
    world_size = _processes(config)
    again = processes or world_size
    other = [f"distributed.strategy={to}"] if to else []
    shared = [*overrides]
    if to or again != world_size:
        shared.append("training.precision=fp32")  # sums in another order stay within TOLERANCE
    first, second = load_config(config_file, shared), load_config(config_file, [*shared, *other])
    _check(kill_at, (first, world_size), (second, again))
    shared += _short(config, kill_at)
    fault = {faults.VARIABLE: f"loop.micro@step={kill_at}=kill"}
    folder = _make_folder(config)
    with ExitStack() as later:
        later.callback(shutil.rmtree, folder)
        straight, killed = folder / "straight", folder / "killed"
        start = partial(_start, later, config_file)
        on_progress(f"{kill_at + 2} steps straight, {_words(world_size)}")
        start("straight", straight, shared, world_size, {})
        # A CPU is timed, and twice may be answered otherwise.
        shared.append(f"training.precision={FrozenChoices(straight, '').precision}")
        on_progress(f"the same, killed in step {kill_at}")
        start("killed", killed, shared, world_size, fault)
        on_progress(f"the same, resumed{f' under {to}' * bool(to)}, {_words(again)}")
        start("resumed", killed, [*shared, *other], again, {})
        compared = compare(straight, killed)
        if compared.differences:
            later.pop_all()  # the folder stays
    kept_folder = folder if compared.differences else None
    return Rehearsal(compared, kill_at, kept_folder, time.perf_counter() - begun)


def compare(straight: Path, killed: Path) -> Compared:
    """Compare two run directories of the same config, of which the second was resumed."""
    one, other = _last_start(straight), _last_start(killed)
    differences = [] if other.resumed_from else ["nothing was resumed: no checkpoint was complete"]
    ours, theirs = _numbers(straight), _numbers(killed)
    if ours.keys() != theirs.keys():
        differences.append(f"steps {_some(ours.keys() ^ theirs.keys())} are in one of the runs")
    steps = sorted(ours.keys() & theirs.keys())
    if moved := [step for step in steps if ours[step][0] != theirs[step][0]]:
        differences.append(f"steps {_some(moved)} had other batches")
    note = _why_other_losses(straight, one, other)
    gaps = {} if note else {step: _gap(ours[step][1], theirs[step][1]) for step in steps}
    if far := [step for step, gap in gaps.items() if gap > TOLERANCE]:
        differences.append(f"steps {_some(far)} have losses further apart than {TOLERANCE:g}")
    files: tuple[str, ...] = ()
    if (one.strategy, one.world_size) == (other.strategy, other.world_size):
        left, right = _last(straight), _last(killed)
        files = tuple(_tensors(left))
        if left.name != right.name:
            differences.append(f"the last checkpoints are {left.name} and {right.name}")
        names = sorted({*files, *_tensors(right)})
        _, unequal, in_one = filecmp.cmpfiles(left, right, names, shallow=False)
        differences += [f"{name} is in one of the checkpoints {left.name}" for name in in_one]
        differences += [f"{name} of {left.name} has other bytes" for name in unequal]
    return Compared(
        straight=one,
        resumed=other,
        steps=len(steps),
        losses=len(gaps),
        largest_difference=max(gaps.values(), default=0.0),
        files=files,
        differences=tuple(differences),
        note=note,
    )


def _processes(config: Config) -> int:
    """Return the processes of a real run here: one for each GPU, or two on CPUs if they fit."""
    if has_gpu(os.environ):
        import torch

        return max(1, torch.cuda.device_count())
    cut = model_cut({}, config.distributed)
    return 1 if [*split_problems(config.training, _ON_CPUS, cut)] else _ON_CPUS


def _check(kill_at: int, *launches: tuple[Config, int]) -> None:
    """Raise UserError with every problem for which a launch of these configs would be refused."""
    launch_problems = [
        one for config, size in launches for one in plain_launch_problems(config, size, os.environ)
    ]
    problems = list(dict.fromkeys(launch_problems))
    if kill_at < _FEWEST:
        expected = f"at least {_FEWEST}: a step before it must have been saved"
        problems.append(Problem("--kill-at", kill_at, expected))
    raise_any(problems)


def _short(config: Config, kill_at: int) -> list[str]:
    """Return the overrides of a rehearsal: few steps, a save before the kill, no trackers."""
    return [
        f"training.steps={kill_at + 2}",
        "training.epochs=null",
        f"checkpoint.every_steps={kill_at // 2}",
        "checkpoint.every_minutes=null",
        "checkpoint.keep_every=0",
        "checkpoint.stop_after=null",
        "checkpoint.resume=auto",
        f"evaluation.every_steps={kill_at + 2}",
        f"evaluation.max_documents={min(_DOCUMENTS, config.evaluation.max_documents)}",
        "evaluation.prompts=[]",
        "logging.every_steps=1",
        "logging.trackers=[]",
    ]


def _make_folder(config: Config) -> Path:
    """Make a directory on the disk of the run directory."""
    beside = _beside(config.run_dir.absolute())
    try:
        return Path(tempfile.mkdtemp(prefix="rehearsal-", dir=beside))
    except OSError as error:
        expected = f"a place that can be written ({error.strerror}: {beside})"
        raise UserError(Problem("run.dir", config.run.dir, expected)) from error


def _beside(run_dir: Path) -> Path:
    """Return the nearest existing parent, or `run_dir` itself if it is a mount point."""
    if os.path.ismount(run_dir):
        return run_dir
    return next(path for path in run_dir.parents if path.is_dir())


def _start(
    later: ExitStack,
    config_file: str,
    name: str,
    run_dir: Path,
    overrides: Sequence[str],
    size: int,
    fault: dict[str, str],
) -> None:
    """Start one run, and write its output to a log file beside its directory.

    later: deletes all of it, unless it is to be looked at

    The run must reach the last step, or with a fault be killed. After Ctrl-C the ranks save and
    exit normally, or the launcher ends before it has ranks; then there is nothing to compare, and
    RunError is raised.
    """
    env = {key: text for key, text in os.environ.items() if key != faults.VARIABLE} | fault
    overrides = [*overrides, f"run.dir={json.dumps(str(run_dir), ensure_ascii=False)}"]
    log = run_dir.with_name(f"{name}.log")
    with log.open("wb") as output:
        ended = launch(config_file, overrides, processes=size, env=env, output=output)
    state = read_status(run_dir).get("state")
    if ended.asked_to_stop or state == "stopped":
        raise RunError("the rehearsal was stopped", RESTARTABLE, "the same command starts again")
    code = ended.exit_code
    as_meant = code == RESTARTABLE if fault else (code, state) == (0, "finished")
    if as_meant:
        return
    later.pop_all()  # the folder stays
    tail = log.read_text("utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    details = ended.message or "\n".join(tail)
    message = f"the {name} run of the rehearsal ended with code {code}\n{details}"
    raise RunError(message, code or 1, f"see {log}; {log.parent} was kept")


def _last_start(run_dir: Path) -> RehearsedLaunch:
    """Return what the last start of a run recorded about itself."""
    *_, last = (line for line in record.record(run_dir) if line["kind"] == "start")
    fields = ("strategy", "world_size", "micro_batch_size", "resumed_from")
    return RehearsedLaunch(*(last[name] for name in fields))


def _numbers(run_dir: Path) -> dict[int, tuple[str, float | None]]:
    """Return step → (batch digest, loss if it is finite); the last of a step trained twice."""
    return {
        line["step"]: (line["batch_digest"], line["loss"])
        for line in record.record(run_dir)
        if line["kind"] == "train"
    }


def _gap(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    return abs(one - other)


def _why_other_losses(run_dir: Path, one: RehearsedLaunch, other: RehearsedLaunch) -> str:
    """Return why losses cannot be compared; "" if they can.

    With dropout they depend on the number of ranks, with a router loss on the rows that are in a
    micro-batch together.
    """
    moved = one.world_size != other.world_size
    sizes = {one.micro_batch_size, other.micro_batch_size}
    routed = any("router_loss" in line for line in record.record(run_dir))
    if (moved or len(sizes) > 1) and sizes != {1} and routed:
        return (
            "losses were not compared: a router's loss depends on which blocks are in a "
            "micro-batch together, and these were others; with training.micro_batch_size=1 they "
            "are the same"
        )
    if not moved:
        return ""
    from transformers import AutoConfig

    values = AutoConfig.from_pretrained(_last(run_dir), trust_remote_code=False).to_dict()
    for key, value in values.items():
        if "drop" in key and isinstance(value, float) and value > 0:
            return f"losses were not compared: {key} draws otherwise with other processes"
    return ""


def _last(run_dir: Path) -> Path:
    """Return the directory of the newest checkpoint."""
    root = run_dir / contents.CHECKPOINTS
    return root / form.complete_names(root)[0]


def _tensors(checkpoint: Path) -> list[str]:
    """Return the names of the weight and optimizer files."""
    return sorted(path.name for path in checkpoint.glob(f"*{form.TENSORS}"))


def _some(steps: Iterable[int]) -> str:
    """Return the numbers of some steps as text; of many steps the first few, and how many."""
    numbers = [str(step) for step in sorted(steps)]
    return ", ".join(numbers[:_SHOWN]) + (f" … ({len(numbers)})" if len(numbers) > _SHOWN else "")


def _words(processes: int) -> str:
    return f"{processes} process{'es' * (processes > 1)}"
