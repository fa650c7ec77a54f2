"""Check that the weights of `model.from` are on this machine, where a start would find them.

A start downloads what is missing, which takes as long as it takes, on each machine; without a
network it fails. No weights are read or downloaded here.

Check the data, tokenizer and model of a config, found in the way a start would find them.

Nothing is written to the run's directory, and no weights are read.

Check the memory plan of a run, on this machine or on all machines of the launch file.

Check the run directory: its file system, its writes, renames and locks, and its clock.

No file of a run is changed. Test files are written in a temporary directory, inside the run
directory or its nearest existing parent, and deleted.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain import system
from llmtrain.checkpoint import files
from llmtrain.checkpoint.files import check_room
from llmtrain.config.binding import bind, changes, data_settings, refusals
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config, TrainTokenizer
from llmtrain.data.chat.template import NAMED, template_tokens
from llmtrain.data.remote.fetch import AttemptError, wait_for
from llmtrain.data.sources.local import is_local
from llmtrain.data.survey import Survey, survey
from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError
from llmtrain.rundir import contents, lock
from llmtrain.text import size
from llmtrain.tools.data.inspect import aside
from llmtrain.tools.doctor.case import Case, Verdict, attempt, error, join, ok, refusal, warning
from llmtrain.types import Spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmtrain.model.base import Base
    from llmtrain.model.tokenizer import SpecialTokens


def plan(case: Case) -> Verdict:
    """Check whether the run fits, and report its strategy, micro-batch and memory.

    Raises UserError for a config that cannot be planned.
    """
    from llmtrain.tools.plan import plan as make_plan

    local = case.processes // case.machines if case.launch else None
    found = make_plan(_as_launched(case), local, case.machines)
    if found.chosen is None:
        near = found.choice.nearest_miss
        remedy = near.remedy if near else "llmtrain plan CONFIG tells more"
        return error(found.choice.reason, remedy)
    if found.uncounted:
        remedy = "watch the first step; training.micro_batch_size=1 if memory runs out"
        return warning(f"{found.choice.reason}; {found.chosen.layout.strategy} is taken", remedy)
    layout, hardware = found.chosen.layout, found.hardware
    kind = "process" if hardware.cpu else "device"
    count = f"{hardware.devices} {kind}{'es' * hardware.cpu if hardware.devices > 1 else ''}"
    return ok(
        f"{layout.strategy} on {count}, micro-batch {layout.micro_batch_size} × "
        f"{layout.accumulation}, activation checkpointing {layout.activation_checkpointing}: "
        f"{size(found.chosen.memory.total_bytes)} of {size(hardware.device_bytes)} each; "
        f"{size(found.disk_bytes)} of checkpoints at most"
    )


def _as_launched(case: Case) -> Config:
    """Return the config; where its strategy is `auto`, with the one of the launch file, if any."""
    assert case.config is not None
    if not case.strategy or case.config.distributed.strategy != "auto":
        return case.config
    changed = case.config.distributed.model_copy(update={"strategy": case.strategy})
    return case.config.model_copy(update={"distributed": changed})


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


def directory(case: Case) -> Verdict:
    """Check the type of the file system, and that write, fsync, rename and lock work."""
    place = existing(case.run_dir)
    if not place.is_dir():
        return error(f"{place} is a file, not a directory", "run.dir=DIR, elsewhere")
    system = files.filesystem_kind(place)
    try:
        with tempfile.TemporaryDirectory(prefix=".llmtrain-doctor-", dir=place) as folder:
            probed = list(_probes(Path(folder)))
    except OSError as failed:
        found = f"{place} cannot be written: {failed.strerror or failed}"
        return error(found, "change its permissions, make room, or set another run.dir")
    return join([_kind(system, place, case), *probed, *_run_there(case)])


def existing(path: Path) -> Path:
    """Return the path if it exists, else its nearest existing parent."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())


def _kind(system: str, place: Path, case: Case) -> Verdict:
    """Check whether the directory stays, and whether all machines share it.

    Rank 0 writes what the others read.
    """
    forgets, machines = _FORGETFUL.get(system), case.machines
    found = f"{place} on {system or 'a file system of unknown type'}"
    found += f" ({forgets})" if forgets else ""
    if machines == 1:
        return warning(found, "run.dir=DIR on a disk that stays") if forgets else ok(found)
    if _SHARED.fullmatch(system):
        return ok(f"{found}, which {machines} machines can share")
    remedy = f"run.dir=DIR on a file system that all {machines} machines mount (NFS, Lustre …)"
    if forgets or system in _LOCAL:
        return error(f"{found}: this machine's own, not shared by {machines}", remedy)
    return warning(f"{found}: whether {machines} machines share it is not known", remedy)


def _probes(folder: Path) -> Iterator[Verdict]:
    """Test write, rename and lock in an empty directory. Raises OSError if a write fails."""
    start = time.perf_counter()
    for content in (b"one", b"two"):
        system.write_durably(folder / "file", content)
    milliseconds = (time.perf_counter() - start) / 2 * 1000
    if (folder / "file").read_bytes() == b"two" and not (folder / "file.partial").exists():
        yield ok(f"a durable write and rename take {milliseconds:.1f} ms")
    else:
        yield error("a rename does not replace the file", "run.dir=DIR on another file system")
    yield _lock(folder / contents.LOCK)


def _lock(path: Path) -> Verdict:
    """Check that another process sees a lock of this one."""
    import fcntl

    remedy = "run.dir=DIR on a file system with locks (NFS: mount without nolock)"
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as failed:
            found = f"no locks ({failed.strerror}): two starts at once could both run"
            return warning(found, remedy)
        command = [sys.executable, "-I", "-S", "-c", _TAKE, str(path)]
        taken = subprocess.run(
            command, capture_output=True, text=True, timeout=_LOCK_SECONDS, check=False
        )
    if taken.returncode == 1 and not taken.stderr:
        return ok("locks hold")
    if taken.returncode == 0:
        return warning("a lock is granted twice: two starts at once could both run", remedy)
    return warning(f"a lock cannot be asked for: {taken.stderr.strip()}", remedy)


def _run_there(case: Case) -> Iterator[Verdict]:
    """Check the run in the directory, if any: whether it is alive, and has this config."""
    assert case.config is not None
    try:
        contents.check(case.run_dir)
    except UserError as strange:
        yield refusal(strange.problems)
        return
    holder = lock.read(case.run_dir / contents.LOCK)
    if holder and lock.lives_here(holder):
        found = f"a run is alive in it (pid {holder.pid} on {holder.host})"
        yield warning(found, "wait for it, or stop it: touch STOP in its directory")
    began, record = case.run_dir / contents.CONFIG, case.run_dir / contents.METRICS
    if began.is_file() and record.is_file():
        found_changes = changes(bind(load_config(began)).binding, bind(case.config).binding)
        accepted = case.config.checkpoint.accept_changes
        if problems := refusals(found_changes, accepted, f"with which {case.run_dir} began"):
            yield refusal(problems)
        else:
            yield ok("a run of this config began in it: it would be resumed")


def clocks(case: Case) -> Verdict:
    """Compare this machine's clocks with each other and with the run directory's file system."""
    drift = time.time() - case.wall - (time.monotonic() - case.steady)  # noqa: TID251  # compared with a time stamp
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(case.wall))
    verdicts = [ok(date), ok("no jump during this look")]
    if case.wall < _OLDEST:
        found = f"the date is {date}: certificates of the Hub are refused"
        verdicts[0] = error(found, "set the clock")
    if abs(drift) > _MOST_DRIFT:
        found = f"the clock was set by {drift:+.1f} s during this look"
        verdicts[1] = warning(found, "see that one service alone sets it (chrony or ntpd)")
    if case.config is not None:
        verdicts.append(_skew(existing(case.run_dir)))
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
    found = f"the clock of {place} differs by {abs(skew):.2f} s"
    if abs(skew) > _MOST_SKEW:
        return warning(found, "synchronise both machines (chrony or ntpd): logs would not match")
    return ok(found)


ANSWER_SECONDS = 30.0
MODEL_SECONDS = 60.0  # transformers repeats requests by itself, and imports take a while
OFFLINE = "check network, proxy and HF_ENDPOINT; HF_HUB_OFFLINE=1 takes what was kept before"
_SLOW = "see that the disk answers, and try again"
_ABSENT = "see that it exists, here or on the Hub; check network, HF_ENDPOINT and HF_TOKEN"
_NOT_HERE = "see that it exists and can be read: it is a path of this machine"
_FROM_HUB = ("model.from", "model.tokenizer")
_SMALL_FILES = 10  # of a checkpoint: configs, tokenizer, state, manifest


def data(case: Case, seconds: float = ANSWER_SECONDS) -> Verdict:
    """Check that all sources are found, and count their files and units.

    seconds: how long to wait for the Hub

    Returns an error if the time is over. Raises UserError for a problem of a source, RunError for
    a failure before that time.
    """
    assert case.config is not None
    quiet_hub()
    workers = 0 if case.config.data.workers == "auto" else case.config.data.workers
    ranks, late = case.processes * max(1, workers), threading.Event()
    timer = threading.Timer(seconds, late.set)
    with aside(case.run_dir) as folder, collect_warnings() as heard:
        timer.start()
        try:
            found = survey(data_settings(case.config), ranks, folder, stop=late)
        except RunError:
            if not late.is_set():
                raise
            asked = any(not is_local(one.path) for one in case.config.data.sources)
            remedy = OFFLINE if asked else _SLOW
            return error("; ".join([f"no answer in {seconds:g} s", *heard[-1:]]), remedy)
        finally:
            timer.cancel()
    parts = [
        f"{source.label}: {len(source.files):,} files, {len(source.units):,} units"
        + (f" at {source.revision[:12]}" if source.revision else "")
        for source in found.sources
    ]
    facts = f"{', '.join(parts)}; {found.lanes} lanes"
    if found.has_chat:
        template = _template(case, found)
        if template is None:
            remedy = "chat.template=chatml, unless all prompts and completions are strings"
            return warning(f"{facts}; conversations, but the tokenizer has no template", remedy)
        facts += f"; {template}"
    if heard:
        return warning(f"{facts}; {'; '.join(heard)}", "see that this is meant")
    return ok(facts)


def _template(case: Case, found: Survey) -> str | None:
    """Return what a start would write conversations with; None if there is no template.

    Raises UserError for a template that cannot be read, or does not end a turn.
    """
    from llmtrain.data.chat.chat import Chat
    from llmtrain.data.tokens.encode import settings_of
    from llmtrain.training.start.frozen import known_base
    from llmtrain.training.start.prepare import make_tokenizer

    config = case.config
    assert config is not None
    asked = config.chat.template
    name = "the tokenizer's" if asked is None else asked if asked in NAMED else "its own"
    if isinstance(config.model.tokenizer, TrainTokenizer):  # there is nothing to try it with
        return asked and f"conversations by {name} template"
    with tempfile.TemporaryDirectory(prefix="llmtrain-") as folder:
        directory = case.run_dir / contents.TOKENIZER
        begun = (case.run_dir / contents.AUTO).is_file() and directory.is_dir()
        if not begun:  # what a refused start left there is not its tokenizer
            directory = Path(folder) / contents.TOKENIZER
            asks_base = config.model.tokenizer == "auto"
            base = known_base(config.model, case.run_dir) if asks_base else None
            make_tokenizer(config, found, directory, base)
        settings = settings_of(config.chat, datetime.now().isoformat())
        chat = Chat(directory, settings, config.data.seq_len)
        if not chat.has_template:
            return None
        ends = " or ".join(chat.check().texts)
        return f"conversations by {name} template, a turn ends with {ends}"


def quiet_hub() -> None:
    """Silence the Hub's logger permanently: threads that timed out continue to log."""
    from huggingface_hub.utils import logging as hub

    hub.set_verbosity(logging.CRITICAL)


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Yield a list to which the warnings of our own code are added, instead of being shown."""
    heard: list[str] = []
    logger, handler = logging.getLogger("llmtrain"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def model(case: Case) -> Verdict:
    """Describe the model and the tokenizer, and check that they agree on the end of a text."""
    found = _described(case)
    return found if isinstance(found, Verdict) else found[0]


@lru_cache(maxsize=1)
def _described(case: Case) -> tuple[Verdict, Spec] | Verdict:
    """Describe a case's model once, even if that fails: two checks use it."""
    return attempt(lambda: describe(case))


def disk(case: Case) -> Verdict:
    """Check the space for the checkpoints to keep. Raises UserError if there is too little."""
    from llmtrain.distributed.engines.state import bytes_of

    assert case.config is not None
    described = _described(case)
    if isinstance(described, Verdict):
        return warning("a checkpoint's size is not known: the model is not", "see the line model")
    _, spec = described
    keep, steps = case.config.checkpoint, case.config.training.steps
    root, once = case.run_dir / contents.CHECKPOINTS, bytes_of(spec)
    needed = check_room(root, keep, steps or 0, once, len(spec) + _SMALL_FILES)
    free = shutil.disk_usage(existing(case.run_dir)).free
    found = f"{size(once)} a checkpoint, {size(needed)} still to be kept, {size(free)} free"
    if steps is None and keep.keep_every:
        remedy = f"allow {size(once)} for every {keep.keep_every} steps, or set steps"
        return warning(f"{found}; training.epochs: how many are kept permanently is open", remedy)
    return ok(found)


def describe(case: Case, seconds: float = MODEL_SECONDS) -> tuple[Verdict, Spec]:
    """Return the line about model and tokenizer, and the files and tensors of its checkpoints.

    The model is built on the meta device. If a run began in the run directory, its model config and
    tokenizer are used.

    seconds: time limit, as the Hub may not answer

    Raises UserError for problems of the config, RunError after the time limit.
    """
    quiet_hub()
    try:
        return wait_for(lambda: _describe(case), seconds, None)
    except UserError as wrong:
        # If a model or tokenizer was not found, the Hub may be out of reach.
        problems = (
            replace(one, remedy=one.remedy or _absent(one)) if one.key in _FROM_HUB else one
            for one in wrong.problems
        )
        raise UserError(*problems) from wrong
    except AttemptError as late:
        raise RunError(f"model or tokenizer: {late}", RESTARTABLE, OFFLINE) from late


def _absent(problem: Problem) -> str:
    """Return what to do about a model or tokenizer that was not found, by where it was sought."""
    return _NOT_HERE if is_local(str(problem.value)) else _ABSENT


def _describe(case: Case) -> tuple[Verdict, Spec]:
    from llmtrain.distributed.engines import state
    from llmtrain.model import trainable
    from llmtrain.model.build import model_config
    from llmtrain.model.shape import on_meta
    from llmtrain.model.trainable import freeze
    from llmtrain.training.optimizer import make_optimizer
    from llmtrain.training.start.frozen import known_base, trained_tokens
    from llmtrain.training.start.planning import config_of_newest_checkpoint, own_tokens

    config = case.config
    assert config is not None
    tokens = own_tokens(config, case.run_dir)
    found = config_of_newest_checkpoint(config, case.run_dir)
    needed = config.model.from_ and not (tokens and found)
    base = known_base(config.model, case.run_dir) if needed else None
    tokens = tokens or _from_elsewhere(config, base)
    if found is None:
        found = model_config(config.model, tokens, config.data.seq_len, base)
    built = on_meta(found)
    freeze(built, config.model.freeze)
    trainable.attach(built, config.adapter, trained_tokens(config, base, None), meta=True)
    optimizer = make_optimizer(built, config.optimizer, fused=False)
    trained = isinstance(config.model.tokenizer, TrainTokenizer)
    spec = state.spec(built, optimizer, int(config.checkpoint.shard_gb * 2**30))
    return _line(built, tokens, trained=trained), spec


def _line(model: PreTrainedModel, tokens: SpecialTokens, *, trained: bool) -> Verdict:
    own = model.config.get_text_config()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    found = (
        f"{model.config.model_type}, {parameters:,} parameters, {own.vocab_size:,} rows; "
        f"a tokenizer of {tokens.length:,} entries{', trained at the start' * trained}"
    )
    ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    if ends in ([], [None]) or tokens.eos in ends:
        return ok(found)
    found += f" ends texts with {tokens.eos}, the model with {' or '.join(map(str, ends))}"
    return warning(found, "model.tokenizer: the one that belongs to the model")


def _from_elsewhere(config: Config, base: Base | None) -> SpecialTokens:
    """Return the special tokens of a tokenizer, saved to a temporary directory as a start does."""
    from llmtrain.model.tokenizer import save_tokenizer, special_tokens

    asked = config.model.tokenizer
    if asked == "auto":
        assert base is not None  # `auto` is the tokenizer of model.from
        path, revision = base.path, base.revision
    else:
        path, revision = str(asked), None
    with tempfile.TemporaryDirectory(prefix="llmtrain-") as folder:
        save_tokenizer(path, revision, Path(folder))
        return special_tokens(Path(folder), added=template_tokens(config.chat.template))


_WHOLE = "model.safetensors"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def base(case: Case, seconds: float = MODEL_SECONDS) -> Verdict:
    """Check that the weights of `model.from` are in a directory or in the Hub's cache.

    seconds: time limit, as the Hub may not answer

    Raises UserError for what is not a model that can be loaded, RunError without an answer.
    """
    assert case.config is not None
    if case.config.model.from_ is None:
        return ok("none: a new model begins with random weights")
    quiet_hub()
    try:
        return wait_for(lambda: _look(case), seconds, None)
    except AttemptError as late:
        raise RunError(f"model.from: {late}", RESTARTABLE, OFFLINE) from late


def _look(case: Case) -> Verdict:
    from llmtrain.training.start.frozen import check_unchanged, known_base
    from llmtrain.training.start.planning import config_of_newest_checkpoint

    assert case.config is not None
    if config_of_newest_checkpoint(case.config, case.run_dir):
        return ok("not read again: the run continues from a checkpoint of its own")
    found = known_base(case.config.model, case.run_dir)
    check_unchanged(found)
    there, missing = _on_hub(found) if found.revision else (_sizes_in(Path(found.path)), {})
    if not there and not missing:
        return error(f"{found} has no weights in safetensors", "a model that has them")
    if not missing:
        return ok(f"{found}: {size(sum(there.values()))} of weights, on this machine")
    facts = f"{found}: {len(missing)} files of weights are not in the cache"
    if total := sum(missing.values()):
        facts += f" ({size(total)})"
    download = f"`hf download {found.path} --revision {found.revision}` on each machine"
    return (error if _is_offline() else warning)(facts, f"{download}, before the run")


def _sizes_in(directory: Path) -> dict[str, int]:
    """Return the weight files in a directory and their sizes in bytes."""
    return _weights({path.name: path.stat().st_size for path in directory.iterdir()})


def _weights(sizes: dict[str, int]) -> dict[str, int]:
    """Return the weight files among all files: a single one, else the shards."""
    if _WHOLE in sizes:
        return {_WHOLE: sizes[_WHOLE]}
    return {name: count for name, count in sizes.items() if _SHARD.fullmatch(name)}


def _on_hub(found: Base) -> tuple[dict[str, int], dict[str, int]]:
    """Return the weight files in the Hub's cache and those that are not, with their sizes.

    Offline, sizes of missing files are not known, and 0.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    from llmtrain.model.untrusted import INDEX, read_json

    def cached(name: str) -> Path | None:
        path = try_to_load_from_cache(found.path, name, revision=found.revision)
        return Path(path) if isinstance(path, str) else None

    if not _is_offline():
        info = HfApi().model_info(found.path, revision=found.revision, files_metadata=True)
        wanted = _weights({one.rfilename: one.size or 0 for one in info.siblings or ()})
    elif index := cached(INDEX):
        wanted = dict.fromkeys(read_json(index)["weight_map"].values(), 0)
    else:
        wanted = {_WHOLE: 0}
    there = {name: path.stat().st_size for name in wanted if (path := cached(name))}
    return there, {name: count for name, count in wanted.items() if name not in there}


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
