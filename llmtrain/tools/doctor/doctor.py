"""Check whether this machine is ready for a run: everything that a start or a run relies on.

The checks are independent. One that fails unexpectedly gives an error line, and the others still
run. Plan, model, data and run directory are asked for by the functions with which a start asks.
Nothing is written to the run's directory, but test files that are deleted at once, and no weights
are read or downloaded.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from llmtrain import system
from llmtrain.agreement import Alone
from llmtrain.checkpoint.disk import check_room, most_at_once, probe_directory
from llmtrain.config.binding import data_settings, worker_count
from llmtrain.config.checks import same_bits_in_words
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config, TrainTokenizer
from llmtrain.data.chat.template import NAMED
from llmtrain.data.sources.fetch import AttemptError, wait_for
from llmtrain.data.sources.local import is_local
from llmtrain.data.survey import Survey, survey
from llmtrain.distributed.launch.environment import model_cut, split_problems, strategy_problems
from llmtrain.distributed.plan.memory import checkpoint_bytes
from llmtrain.distributed.plan.speed import across_nodes
from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError, raise_any
from llmtrain.rundir import contents, lock
from llmtrain.rundir.words import strategy_in_words
from llmtrain.text import size
from llmtrain.tools.data.scratch import scratch_copy
from llmtrain.tools.doctor import machine
from llmtrain.tools.doctor.context import (
    DoctorContext,
    Verdict,
    error,
    join,
    ok,
    run_check,
    warning,
)
from llmtrain.tools.launch.file import read_launch_file
from llmtrain.tools.launch.launch import Nodes
from llmtrain.training.start import claim

if TYPE_CHECKING:
    from llmtrain.model.base import Base
    from llmtrain.model.tokenizer import SpecialTokens
    from llmtrain.training.start.planning import PaperModel

T = TypeVar("T")

_FORGETFUL = {
    "tmpfs": "memory: gone when the machine restarts",
    "ramfs": "memory: gone when the machine restarts",
    "overlay": "a container's own: gone with it",
}
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "vfat", "exfat", "ntfs3"}
_SHARED = re.compile(
    r"nfs\d?|lustre|gpfs|mmfs|beegfs|ceph|glusterfs|cifs|smb\d?|9p|virtiofs|wekafs|panfs|afs|"
    r"orangefs|ocfs2|gfs2|fuse\..+"
)
_MOST_SKEW = 2.0  # seconds between this machine's clock and the file system's
_MOST_DRIFT = 1.0
_OLDEST = 1.76e9  # 2025-10: before this code was written, so an earlier date is wrong
_LOCK_SECONDS = 30
# Tries to take a lock that this process holds. Exit code 1: it is held; 0: it was granted.
_TAKE = """
import errno, fcntl, sys
try:
    fcntl.flock(open(sys.argv[1], "rb"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError as error:
    sys.exit(1 if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else str(error))
"""


def directory(context: DoctorContext) -> Verdict:
    """Check the type of the file system, and that write, fsync, rename and lock work."""
    place = _existing(context.run.run_dir)
    if not place.is_dir():
        return error(f"{place} is a file, not a directory", "run.dir=DIR, elsewhere")
    kind = system.mounted(place).kind
    try:
        with tempfile.TemporaryDirectory(prefix=".llmtrain-doctor-", dir=place) as folder:
            start = time.perf_counter()
            probe_directory(Path(folder))
            seconds = time.perf_counter() - start
            held = _lock(Path(folder) / contents.LOCK, context)
    except OSError as failed:
        finding = f"{place} cannot be written: {failed.strerror or failed}"
        return error(finding, "change its permissions, make room, or set another run.dir")
    written = ok(f"a durable write and rename take {seconds * 1000:.1f} ms")
    existing = run_check(lambda: _run_there(context.run))
    return join([_kind(kind, place, context), written, held, existing])


def _existing(path: Path) -> Path:
    """Return the path if it exists, else its nearest existing parent."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())


def _kind(kind: str, place: Path, context: DoctorContext) -> Verdict:
    """Check whether the directory stays, and whether all machines share it.

    Rank 0 writes what the others read.
    """
    forgets, machines = _FORGETFUL.get(kind), context.machines
    finding = f"{place} on {kind or 'a file system of unknown type'}"
    finding += f" ({forgets})" if forgets else ""
    if machines == 1:
        return warning(finding, "run.dir=DIR on a disk that stays") if forgets else ok(finding)
    if _SHARED.fullmatch(kind):
        return ok(f"{finding}, which {machines} machines can share")
    remedy = f"run.dir=DIR on a file system that all {machines} machines mount (NFS, Lustre …)"
    if forgets or kind in _LOCAL:
        return error(f"{finding}: this machine's own, not shared by {machines}", remedy)
    return warning(f"{finding}: whether {machines} machines share it is not known", remedy)


def _lock(path: Path, context: DoctorContext) -> Verdict:
    """Check that another process sees a lock of this one."""
    import fcntl

    def without(finding: str) -> Verdict:
        remedy = "run.dir=DIR on a file system with locks (NFS: mount without nolock)"
        if context.come_and_go:
            return error(f"{finding}: machines of --nodes cannot meet", remedy)
        return warning(f"{finding}: two starts at once could both run", remedy)

    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as failed:
            return without(f"no locks ({failed.strerror})")
        command = [sys.executable, "-I", "-S", "-c", _TAKE, str(path)]
        taken = subprocess.run(
            command, capture_output=True, text=True, timeout=_LOCK_SECONDS, check=False
        )
    if taken.returncode == 1 and not taken.stderr:
        if context.machines > 1 and (option := lock.only_here(path.parent)):
            return without(f"locks hold on this machine alone (mounted with {option})")
        return ok("locks hold")
    if taken.returncode == 0:
        return without("a lock is granted twice")
    return without(f"a lock cannot be asked for ({taken.stderr.strip()})")


def _run_there(config: Config) -> Verdict:
    """Return what is in the directory. Raises UserError as a start would."""
    begun, holder = claim.check(config), lock.read(config.run_dir / contents.LOCK)
    if holder and lock.lives_here(holder):
        finding = f"a run is alive in it (pid {holder.pid} on {holder.host})"
        return warning(finding, "wait for it, or stop it: touch STOP in its directory")
    return ok("a run of this config began in it: it would be resumed" if begun else "")


def clocks(context: DoctorContext) -> Verdict:
    """Compare this machine's clocks with each other and with the run directory's file system."""
    drift = time.time() - context.wall - (time.monotonic() - context.steady)  # noqa: TID251  # compared with a time stamp
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(context.wall))
    verdicts = [ok(date), ok("no jump during this look")]
    if context.wall < _OLDEST:
        finding = f"the date is {date}: certificates of the Hub are refused"
        verdicts[0] = error(finding, "set the clock")
    if abs(drift) > _MOST_DRIFT:
        finding = f"the clock was set by {drift:+.1f} s during this look"
        verdicts[1] = warning(finding, "see that one service alone sets it (chrony or ntpd)")
    if context.config is not None:
        verdicts.append(_skew(_existing(context.run.run_dir)))
    return join(verdicts)


def _skew(place: Path) -> Verdict:
    """Compare the clock with the time stamp that the file system gives to a new file."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".llmtrain-doctor-", dir=place) as file:
            before = time.time()  # noqa: TID251  # a time stamp
            file.write(b"now")
            file.flush()
            os.fsync(file.fileno())
            after = time.time()  # noqa: TID251  # a time stamp
            stamp = Path(file.name).stat().st_mtime
    except OSError as failed:
        return warning(f"no file can be written in {place}: {failed.strerror}", "see directory")
    skew = stamp - min(max(stamp, before), after)
    finding = f"the clock of {place} differs by {abs(skew):.2f} s"
    if abs(skew) > _MOST_SKEW:
        return warning(finding, "synchronise both machines (chrony or ntpd): logs would not match")
    return ok(finding)


ANSWER_SECONDS = 30.0
MODEL_SECONDS = 60.0  # transformers repeats requests by itself, and imports take a while
_OFFLINE = "check network, proxy and HF_ENDPOINT; HF_HUB_OFFLINE=1 takes what was kept before"
_SLOW = "see that the disk answers, and try again"
_ABSENT = "see that it exists, here or on the Hub; check network, HF_ENDPOINT and HF_TOKEN"
_NOT_HERE = "see that it exists and can be read: it is a path of this machine"
_FROM_HUB = ("model.from", "model.tokenizer")
_SMALL_FILES = 10  # of a checkpoint: configs, tokenizer, state, manifest


def _in_time(work: Callable[[], T]) -> T:
    """Do `work`, for which transformers may ask the Hub, or raise RunError after a minute.

    Raises UserError with what to do if a model or tokenizer was not found.
    """
    _quiet_hub()
    try:
        return wait_for(work, MODEL_SECONDS, None)
    except UserError as wrong:
        problems = (
            replace(one, remedy=_NOT_HERE if is_local(str(one.value)) else _ABSENT)
            if one.key in _FROM_HUB and not one.remedy
            else one
            for one in wrong.problems
        )
        raise UserError(*problems, where=wrong.where) from wrong
    except AttemptError as late:
        raise RunError(f"model or tokenizer: {late}", RESTARTABLE, _OFFLINE) from late


def _quiet_hub() -> None:
    """Silence the Hub's logger permanently: threads that timed out continue to log."""
    from huggingface_hub.utils import logging as hub

    hub.set_verbosity(logging.CRITICAL)


def plan(context: DoctorContext) -> Verdict:
    """Check whether the run fits, and report its strategy, micro-batch and memory.

    Without a launch file, on all GPUs of this machine. Raises UserError for a config that cannot be
    planned, or does not fit.
    """
    return _in_time(partial(_plan, context))


def _plan(context: DoctorContext) -> Verdict:
    from llmtrain.training.start.frozen import decide_kernels
    from llmtrain.training.start.planning import work
    from llmtrain.training.start.processes import decide_precision, plan_here

    config, env = context.run, _rank(context)
    cut, processes = model_cut(env, config.distributed), int(env["WORLD_SIZE"])
    wrong = strategy_problems(config.distributed.strategy, processes, cut)
    raise_any([*wrong, *split_problems(config.training, processes, cut)])
    precision, _ = decide_precision(config, Alone())
    planned = plan_here(config, precision, decide_kernels(config), _base(config), 0, env)
    layout, hardware = planned.layout, planned.hardware
    if planned.memory is None:
        remedy = "watch the first step; training.micro_batch_size=1 if memory runs out"
        return warning(f"{planned.reason}; {layout.strategy} is taken", remedy)
    kind = "process" if hardware.cpu else "device"
    count = f"{hardware.devices} {kind}{'es' * hardware.cpu if hardware.devices > 1 else ''}"
    checkpoints = most_at_once(config.checkpoint, config.training.steps or 0)
    placed = strategy_in_words({"strategy": layout.strategy} | cut.to_json())
    fits = ok(
        f"{placed} on {count}, micro-batch {layout.micro_batch_size} × "
        f"{layout.accumulation}, activation checkpointing {layout.activation_checkpointing}: "
        f"{size(planned.memory.total_bytes)} of {size(hardware.device_bytes)} each; "
        f"{size(checkpoints * checkpoint_bytes(planned.shape))} of checkpoints at most"
    )
    if config.training.same_bits:
        fits = join([fits, ok(f"the same bits on {same_bits_in_words(config.training)}")])
    asked = work(config, precision, cpu=hardware.cpu)
    warned = across_nodes(planned.shape, asked, layout, hardware)
    return join([fits, warning(*warned)]) if warned else fits


def _rank(context: DoctorContext) -> Mapping[str, str]:
    """Return the variables of a rank that the plan reads."""
    if context.launch:
        return context.launch.environment
    count = str(machine.gpus(context) or 1)
    return {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}


def _base(config: Config) -> Base | None:
    from llmtrain.training.start.frozen import decide_base

    return decide_base(config.model, config.run_dir, Alone())


def model(context: DoctorContext) -> Verdict:
    """Describe the model and the tokenizer, and check that they agree on the end of a text."""
    described = _describe(context)
    if isinstance(described, Verdict):
        return described
    paper, tokens = described
    text, trained = paper.config.get_text_config(), context.run.model.tokenizer
    finding = (
        f"{paper.config.model_type}, {paper.shape.count:,} parameters, {text.vocab_size:,} rows; "
        f"a tokenizer of {tokens.length:,} entries"
        f"{', trained at the start' * isinstance(trained, TrainTokenizer)}"
    )
    ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    if ends in ([], [None]) or tokens.eos in ends:
        return ok(finding)
    finding += f" ends texts with {tokens.eos}, the model with {' or '.join(map(str, ends))}"
    return warning(finding, "model.tokenizer: the one that belongs to the model")


@lru_cache(maxsize=1)
def _describe(context: DoctorContext) -> tuple[PaperModel, SpecialTokens] | Verdict:
    """Describe model and tokenizer once, even if that fails: two checks use it."""
    from llmtrain.training.start.planning import describe, this_machine, tokens_of

    def work() -> tuple[PaperModel, SpecialTokens]:
        config, base = context.run, _base(context.run)
        paper = describe(config, this_machine(config, _rank(context)), config.run_dir, base)
        return paper, tokens_of(config, config.run_dir, base)

    return run_check(lambda: _in_time(work))


def disk(context: DoctorContext) -> Verdict:
    """Check the space for the checkpoints to keep. Raises UserError if there is too little."""
    described, run_dir = _describe(context), context.run.run_dir
    if isinstance(described, Verdict):
        return warning("a checkpoint's size is not known: the model is not", "see the line model")
    keep, steps = context.run.checkpoint, context.run.training.steps
    once = checkpoint_bytes(described[0].shape)
    count = once // int(keep.shard_gb * 2**30) + 1 + _SMALL_FILES
    needed = check_room(run_dir / contents.CHECKPOINTS, keep, steps or 0, once, count)
    free = shutil.disk_usage(_existing(run_dir)).free
    finding = f"{size(once)} a checkpoint, {size(needed)} still to be kept, {size(free)} free"
    if steps is None and keep.keep_every:
        remedy = f"allow {size(once)} for every {keep.keep_every} steps, or set steps"
        return warning(f"{finding}; training.epochs: how many are kept permanently is open", remedy)
    return ok(finding)


_WHOLE = "model.safetensors"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def base(context: DoctorContext) -> Verdict:
    """Check that the weights of `model.from` are in a directory or in the Hub's cache.

    Raises UserError for what is not a model that can be loaded, RunError without an answer.
    """
    if context.run.model.from_ is None:
        return ok("none: a new model begins with random weights")
    return _in_time(partial(_look_at_base, context.run))


def _look_at_base(config: Config) -> Verdict:
    from huggingface_hub import constants

    from llmtrain.training.start import frozen, planning

    if planning.config_of_newest_checkpoint(config, config.run_dir):
        return ok("not read again: the run continues from a checkpoint of its own")
    base = frozen.known_base(config.model, config.run_dir)
    frozen.check_unchanged(base)
    if base.revision:
        here, missing = _on_hub(base, offline=constants.HF_HUB_OFFLINE)
    else:
        sizes = {path.name: path.stat().st_size for path in Path(base.path).iterdir()}
        here, missing = _weights(sizes), {}
    if not here and not missing:
        return error(f"{base} has no weights in safetensors", "a model that has them")
    if not missing:
        return ok(f"{base}: {size(sum(here.values()))} of weights, on this machine")
    facts = f"{base}: {len(missing)} files of weights are not in the cache"
    if total := sum(missing.values()):
        facts += f" ({size(total)})"
    download = f"`hf download {base.path} --revision {base.revision}` on each machine"
    state = error if constants.HF_HUB_OFFLINE else warning
    return state(facts, f"{download}, before the run")


def _weights(sizes: dict[str, int]) -> dict[str, int]:
    """Return the weight files among all files: a single one, else the shards."""
    if _WHOLE in sizes:
        return {_WHOLE: sizes[_WHOLE]}
    return {name: count for name, count in sizes.items() if _SHARD.fullmatch(name)}


def _on_hub(base: Base, *, offline: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Return the weight files in the Hub's cache and those that are not, with their sizes.

    Offline, sizes of missing files are not known, and 0.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    from llmtrain.model.untrusted import INDEX, read_json

    def cached(name: str) -> Path | None:
        path = try_to_load_from_cache(base.path, name, revision=base.revision)
        return Path(path) if isinstance(path, str) else None

    if not offline:
        info = HfApi().model_info(base.path, revision=base.revision, files_metadata=True)
        wanted = _weights({one.rfilename: one.size or 0 for one in info.siblings or ()})
    elif index := cached(INDEX):
        wanted = dict.fromkeys(read_json(index)["weight_map"].values(), 0)
    else:
        wanted = {_WHOLE: 0}
    here = {name: path.stat().st_size for name in wanted if (path := cached(name))}
    return here, {name: count for name, count in wanted.items() if name not in here}


def data(context: DoctorContext, seconds: float = ANSWER_SECONDS) -> Verdict:
    """Check that all sources are found, and count their files and units.

    seconds: how long to wait for the Hub

    Returns an error if the time is over. Raises UserError for a problem of a source, RunError for
    a failure before that time.
    """
    _quiet_hub()
    config = context.run
    lanes_for = context.processes * max(1, worker_count(config.data))
    late = threading.Event()
    timer = threading.Timer(seconds, late.set)
    with scratch_copy(config.run_dir) as folder, collect_warnings() as messages:
        timer.start()
        try:
            surveyed = survey(data_settings(config), lanes_for, folder, stop=late)
        except RunError:
            if not late.is_set():
                raise
            asked = any(not is_local(one.path) for one in config.data.sources)
            remedy = _OFFLINE if asked else _SLOW
            return error("; ".join([f"no answer in {seconds:g} s", *messages[-1:]]), remedy)
        finally:
            timer.cancel()
        parts = [
            f"{source.label}: {len(source.files):,} files, {len(source.units):,} units"
            + (f" at {source.revision[:12]}" if source.revision else "")
            for source in surveyed.sources
        ]
        facts = f"{', '.join(parts)}; {surveyed.lanes} lanes"
        if surveyed.has_chat:
            template = _template(config, surveyed, folder / contents.TOKENIZER)
            if template is None:
                remedy = "chat.template=chatml, unless all prompts and completions are strings"
                return warning(f"{facts}; conversations, but the tokenizer has no template", remedy)
            facts += f"; {template}"
    if messages:
        return warning(f"{facts}; {'; '.join(messages)}", "see that this is meant")
    return ok(facts)


def _template(config: Config, surveyed: Survey, directory: Path) -> str | None:
    """Return what a start would write conversations with; None if there is no template.

    directory: a copy of the run's tokenizer, if it has one

    Raises UserError for a template that cannot be read, or does not end a turn.
    """
    from llmtrain.data.chat.chat import Chat
    from llmtrain.data.tokens.encode import settings_of
    from llmtrain.training.start.prepare import make_tokenizer

    asked = config.chat.template
    name = "the tokenizer's" if asked is None else asked if asked in NAMED else "its own"
    if isinstance(config.model.tokenizer, TrainTokenizer):  # there is nothing to try it with
        return asked and f"conversations by {name} template"
    if not (config.run_dir / contents.AUTO).is_file():  # a refused start has left it there
        shutil.rmtree(directory, ignore_errors=True)
    make_tokenizer(config, surveyed, directory, None)
    settings = settings_of(config.chat, datetime.now().isoformat())
    chat = Chat(directory, settings, config.data.seq_len)
    if not chat.has_template:
        return None
    ends = " or ".join(chat.check().texts)
    return f"conversations by {name} template, a turn ends with {ends}"


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Yield a list to which the warnings of our own code are added, instead of being shown."""
    texts: list[str] = []
    logger, handler = logging.getLogger("llmtrain"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


CONFIG = "config"
LAUNCH = "launch"
# Cheap checks first.
OF_MACHINE: dict[str, Callable[[DoctorContext], Verdict]] = {
    "devices": machine.devices,
    "memory": machine.memory,
    "limits": machine.limits,
    "versions": machine.versions,
    "compiler": machine.compiler,
    "extensions": machine.extensions,
    "environment": machine.environment,
    "accelerate": machine.default_file,
    "rendezvous": machine.rendezvous,
    "clocks": clocks,
}
OF_CONFIG: dict[str, Callable[[DoctorContext], Verdict]] = {
    "directory": directory,
    "base": base,
    "model": model,
    "plan": plan,
    "disk": disk,
    "data": data,
}
ALL_REDUCE = "all-reduce"
NAMES = (CONFIG, LAUNCH, *OF_MACHINE, *OF_CONFIG, ALL_REDUCE)


def doctor(
    config_file: str | None = None,
    overrides: Sequence[str] = (),
    accelerate_file: Path | None = None,
    skip: Collection[str] = (),
    env: Mapping[str, str] | None = None,
    on_progress: Callable[[str], None] = lambda name: None,
    nodes: Nodes | None = None,
) -> Iterator[tuple[str, Verdict]]:
    """Yield name and result of a check for everything that a start of this config relies on.

    config_file: None = only the machine is checked
    accelerate_file: the file that the run is to be launched with
    skip: names of checks that are left out
    env: the environment to check, in place of this process's
    on_progress: called with the name of each check before it runs, as some take a while
    nodes: the machines, if they may come and go

    Raises UserError at the call, for an unknown name in `skip`, and for overrides or `nodes`
    without a config. The iterator itself raises nothing.
    """
    expected = f"a name of a check: {', '.join(NAMES)}"
    raise_any(Problem("--skip", name, expected) for name in skip if name not in NAMES)
    if config_file is None and overrides:
        raise UserError(Problem("overrides", ", ".join(overrides), "a config that they change"))
    if config_file is None and nodes is not None:
        asked = f"{nodes.least}:{nodes.most}"
        raise UserError(Problem("--nodes", asked, "a config whose batch they divide"))
    read = None if config_file is None else partial(load_config, config_file, overrides)
    env = dict(os.environ if env is None else env)
    checks = _checks(read, accelerate_file, nodes, env, skip, on_progress)
    return ((name, verdict) for name, verdict in checks if name not in skip)


def _checks(
    read: Callable[[], Config] | None,
    accelerate_file: Path | None,
    nodes: Nodes | None,
    env: Mapping[str, str],
    skip: Collection[str],
    on_progress: Callable[[str], None],
) -> Iterator[tuple[str, Verdict]]:
    """Yield all checks. What depends on a config or file that does not load is not checked."""
    config = launch = None
    if read is not None:
        loaded = run_check(read)
        if isinstance(loaded, Config):
            config, loaded = loaded, ok(f"loads; the run lives in {loaded.run.dir}")
        yield CONFIG, loaded
    if nodes is not None:
        if config is not None:
            of_nodes = run_check(lambda: machine.look_at_nodes(config, accelerate_file, nodes, env))
            launch, verdict = (None, of_nodes) if isinstance(of_nodes, Verdict) else of_nodes
            yield LAUNCH, verdict
    elif accelerate_file is not None:
        read_file = partial(read_launch_file, accelerate_file, None)
        yield LAUNCH, run_check(lambda: machine.describe_launch(read_file(config)))
        file = run_check(read_file)  # without the config, which the file may contradict
        launch = None if isinstance(file, Verdict) else file
    wall, steady = time.time(), time.monotonic()  # noqa: TID251  # two clocks are compared
    context = DoctorContext(config, launch, nodes is not None, env, wall, steady)
    looks = OF_MACHINE | (OF_CONFIG if config else {}) | {ALL_REDUCE: machine.all_reduce}
    for name, look in looks.items():
        if name not in skip:
            on_progress(name)
            yield name, run_check(partial(look, context))
