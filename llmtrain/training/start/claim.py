"""The claim of the run directory, which rank 0 makes before anything else is opened.

A directory belongs to the config that began it, and to one live process at a time. What can be
checked of a first start without torch is checked here, too, and reported together with the errors
of the config. A run that has begun has its own tokenizer and data manifest, which its start checks
instead.
"""

import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from llmtrain.checkpoint import disk, format as form
from llmtrain.config import schema, secrets
from llmtrain.config.binding import bind, changes, dump, refusals
from llmtrain.config.checks import Rule
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.data.sources.local import SAMPLE, is_glob, is_local, list_files, locate, on_hub
from llmtrain.distributed.launch import environment
from llmtrain.distributed.launch.named import number
from llmtrain.distributed.plan.memory import missing_package
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.model import untrusted
from llmtrain.rundir import contents, failures, record as jsonl
from llmtrain.rundir.lock import RunLock, writable
from llmtrain.rundir.status import kept_status, read_status, start_status
from llmtrain.training.stop import REGROUP, RESTARTS
from llmtrain.types import JsonMapping, ModelCut

T = TypeVar("T")

# Set for the processes of a restart: by torch's launcher and by `llmtrain supervise`.
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", RESTARTS)


@dataclass(frozen=True, slots=True)
class ClaimedRun:
    """The claimed run directory, and what it records about earlier starts; empty on ranks > 0.

    step: the last step that is known to be finished
    checkpoint: the newest checkpoint that the record names
    lock: held until the run is closed
    begun: whether an earlier start wrote its `start` line, just before its first step
    ended: the `status.json` of the start before, if that finished or was stopped
    steps: the length of the run, as the last start recorded it
    pace: seconds of the last save and of the last step, None unless both are recorded
    """

    run_id: str = ""
    step: int = 0
    checkpoint: str | None = None
    lock: RunLock | None = None
    begun: bool = False
    ended: bytes | None = None
    steps: int | None = None
    pace: tuple[float, float] | None = None


@contextmanager
def claim(
    config: Config,
    world_size: int,
    strategy: str | None,
    wait: Callable[[float], object] = time.sleep,
) -> Iterator[ClaimedRun]:
    """Make or reopen `run.dir`, take its lock, compare configs, record that the run is starting.

    wait: between two looks at the lock of another process; takes the seconds

    For rank 0. Raises UserError if the directory cannot be written, has a file or directory of the
    wrong kind in it, is in use by a live process or belongs to another config. Nothing is changed
    then, but the record of a run that has begun gains an event if its config is another one.
    """
    run_dir = config.run_dir
    with writable(run_dir):
        contents.check(run_dir)
        known = read_status(run_dir)
        run_id = known.get("run_id") or _last(_outline(run_dir), "start", "run_id", str)
        run_id = run_id or _find_saved_run(run_dir) or uuid.uuid4().hex
    with RunLock(run_dir, run_id, wait=wait, handed_over=REGROUP in os.environ) as lock:
        disk.probe_directory(run_dir)
        record = _outline(run_dir)
        started = any(line["kind"] == "start" for line in record)
        newest = known.get("checkpoint") or _last(record, "checkpoint", "name", str)
        try:
            if asked_resume(config.checkpoint.resume, os.environ) == "never":
                # Quarantined checkpoints count as something that was trained, too.
                names = form.names(run_dir / contents.CHECKPOINTS)
                stored = [name for name in reversed(names) if name.startswith("step-")]
                existing = newest or next(iter(stored), "its metrics.jsonl" if started else None)
                if existing:
                    expected = f"a run.dir in which no run has begun; {run_dir} holds {existing}"
                    remedy = "checkpoint.resume=auto to go on from there, or another run.dir"
                    raise UserError(Problem("checkpoint.resume", "never", expected, remedy))
            _settle_config(run_dir, config, begun=started or bool(_find_saved_run(run_dir)))
        except UserError as refused:
            if started:
                with closing(jsonl.Lines(run_dir)) as lines:
                    lines.refuse(known.get("step", 0), str(refused))
            raise
        failures.clear(run_dir, 0, world_size)
        ended = kept_status(run_dir) if started else None
        start_status(run_dir, run_id=run_id, strategy=strategy, world_size=world_size)
        steps = _last(record, "start", "steps", int)
        save, update = (_last(record, kind, "seconds", float) for kind in ("checkpoint", "train"))
        pace = (save, update) if save and update else None
        yield ClaimedRun(run_id, known.get("step", 0), newest, lock, started, ended, steps, pace)


def asked_resume(asked: str, environ: Mapping[str, str]) -> str:
    """Return what to resume from: `asked` at the first start of a launch, then `auto`.

    After a crash, a supervisor or the launcher repeats the same command. Such a restart continues
    from the newest checkpoint, since returning to an older one each time would lose the steps
    trained since. asked: `checkpoint.resume`.
    """
    restarts = (environ.get(name, "0") for name in _RESTARTS)
    return asked if all(count == "0" for count in restarts) else "auto"


def _outline(run_dir: Path) -> Sequence[JsonMapping]:
    """Return the record with no step but the newest."""
    return jsonl.short_record(run_dir, steps=False)[0]


def _last(record: Sequence[JsonMapping], kind: str, field: str, of: type[T]) -> T | None:
    """Return what the last line of this kind with a value of this type in `field` has there."""
    values = (line.get(field) for line in reversed(record) if line["kind"] == kind)
    return next((value for value in values if isinstance(value, of)), None)


def check(config: Config) -> bool:
    """Return whether a run of this config has begun in `run.dir`.

    For a command that does not train itself. Raises UserError if the directory belongs to another
    config or has a path of the wrong kind.
    """
    run_dir = config.run_dir
    contents.check(run_dir)
    started = any(line["kind"] == "start" for line in _outline(run_dir))
    begun = (run_dir / contents.CONFIG).exists() and bool(started or _find_saved_run(run_dir))
    if begun:
        _compare(run_dir, config)
    return begun


def _find_saved_run(run_dir: Path) -> str | None:
    """Return the id of the run in the newest intact checkpoint, for when `status.json` is lost."""
    root = run_dir / contents.CHECKPOINTS
    for name in form.complete_names(root):
        try:
            return form.load(root / name).run_id
        except (form.DamagedError, form.OtherFormatError):
            continue  # the search for a checkpoint reports what is wrong with it
    return None


def _settle_config(run_dir: Path, config: Config, *, begun: bool) -> None:
    """Write the config of a new run, or compare it with the config that began the run.

    A start that was refused has not begun the run: its config is replaced, and the choices made for
    it are deleted.
    """
    path = run_dir / contents.CONFIG
    if begun and path.exists():
        _compare(run_dir, config)
        return
    if not begun:
        for name in (contents.TOKENIZER, contents.STAGED):
            shutil.rmtree(run_dir / name, ignore_errors=True)
        for name in (contents.MANIFEST, contents.HELDOUT, contents.AUTO):
            (run_dir / name).unlink(missing_ok=True)
    # Secrets are hidden in prompts, the only free text that no later start compares or reads there.
    prompts = tuple(map(secrets.hider(os.environ), config.evaluation.prompts))
    evaluation = config.evaluation.model_copy(update={"prompts": prompts})
    hidden = config.model_copy(update={"evaluation": evaluation})
    contents.write_atomically(path, dump(hidden).encode())


def _compare(run_dir: Path, config: Config) -> None:
    began_with = load_config(run_dir / contents.CONFIG)
    changed = changes(bind(began_with).binding, bind(config).binding)
    accepted = config.checkpoint.accept_changes
    raise_any(refusals(changed, accepted, f"with which {run_dir} began"))


def rules_of_this_process(config_file: str, env: Mapping[str, str]) -> list[Rule]:
    """Return the rules for a process that trains, as its launcher started it.

    With several machines, paths are not checked here: they may be missing only on some of the
    machines, which the ranks find out together.
    """
    rules, processes = rules_of_a_launch(config_file, env, env), environment.world_size(env)
    one_machine = processes == 1 or number(env, "LOCAL_WORLD_SIZE") == processes
    return rules if one_machine else rules[:2]


def rules_of_a_launch(
    config_file: str, env: Mapping[str, str], exported: Mapping[str, str]
) -> list[Rule]:
    """Return the rules for a launch on this machine. env, exported: as for `launch_problems`."""
    default = f"runs/{Path(config_file).stem}"
    on_disk = (partial(check, default) for check in (_source_problems, _model_problems))
    return [partial(environment.launch_problems, env, exported), _package_problems, *on_disk]


def check_start(
    config: schema.Config, processes: int, cut: ModelCut, more: Iterable[Problem] = ()
) -> None:
    """Apply all these rules to a valid config, once the run's status can record what they refuse.

    more: problems that need torch to be found

    Raises UserError with every problem.
    """
    problems = [
        *environment.split_problems(config.training, processes, cut),
        *_package_problems(config.optimizer),
        *_source_problems("", config.run, config.data, config.evaluation),
        *_model_problems("", config.run, config.model, config.adapter),
        *more,
    ]
    raise_any(problems)


def split_rule(processes: int) -> Rule:
    """Return the rule of a batch that is split over this many processes."""

    def split(
        training: schema.TrainingConfig, distributed: schema.DistributedConfig
    ) -> Iterable[Problem]:
        return environment.split_problems(
            training, processes, environment.model_cut({}, distributed)
        )

    return split


def _package_problems(optimizer: schema.OptimizerConfig) -> list[Problem]:
    """Check that the package of the optimizer is installed."""
    return missing_package(optimizer.name)


def _source_problems(
    default: str,
    run: schema.RunConfig,
    data: schema.DataConfig,
    evaluation: schema.EvaluationConfig,
) -> Iterator[Problem]:
    """Report sources whose paths do not exist on this machine, unless a run has begun."""
    if _has_begun(run, default):
        return
    named: list[tuple[str, schema.DocumentsConfig]] = [
        *((f"data.sources.{n}.path", one) for n, one in enumerate(data.sources)),
        *((f"evaluation.sources.{n}.path", one) for n, one in enumerate(evaluation.sources)),
    ]
    for name, source in named:
        if source.path == SAMPLE or on_hub(source.path):
            continue
        try:
            root = Path(locate(source, name))
            if is_glob(source.path):
                list_files(source.path, root, name)
        except UserError as error:
            yield from error.problems


def _model_problems(
    default: str, run: schema.RunConfig, model: schema.ModelConfig, adapter: schema.AdapterConfig
) -> Iterator[Problem]:
    """Report problems of the tokenizer's directory and of that of `model.from`.

    A run of adapters reads its base at every start.
    """
    begun, path = _has_begun(run, default), model.tokenizer
    is_named = isinstance(path, str) and path not in ("auto", SAMPLE)
    if not begun and is_named and _is_missing(str(path)):
        yield Problem("model.tokenizer", path, "a tokenizer directory that exists, or a Hub id")
    if model.from_ is None or (begun and adapter.kind == "none"):
        return
    if _is_missing(model.from_):
        yield Problem("model.from", model.from_, "a model directory that exists, or a Hub id")
    elif not contents.is_run(Path(model.from_)):  # its best checkpoint is looked up later
        try:
            untrusted.check(model.from_)
        except UserError as error:
            yield from error.problems


def _is_missing(path: str) -> bool:
    return is_local(path) and not os.path.exists(path)  # noqa: PTH110  # see `is_local`


def _has_begun(run: schema.RunConfig, default: str) -> bool:
    # Of a name that is too long or has a NUL it is false; the rules of paths report that.
    return os.path.exists(Path(run.dir or default) / contents.AUTO)  # noqa: PTH110
