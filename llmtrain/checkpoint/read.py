"""Finds the newest valid checkpoint, the same one on all ranks, and reads it.

    find           rank 0 offers a candidate, each rank verifies its share of the bytes, all vote
    load_tensors   each rank reads ranges directly into the memory of its pieces

*Damage*: the bytes are not those written. The checkpoint is renamed and the next older one is
offered. *Trouble*: the disk does not answer. There are three tries, then the start fails and
nothing is renamed. The trap: a file that rank 0 sees and another rank does not is trouble, not
damage.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from llmtrain import faults, system
from llmtrain.agreement import captured, from_rank_zero, refuse
from llmtrain.checkpoint import candidates, format as form
from llmtrain.checkpoint.candidates import Event
from llmtrain.checkpoint.disk import Patience, StoppedError
from llmtrain.checkpoint.format import DamagedError, Extent, TensorLocation
from llmtrain.errors import DISK_FAILED, Problem, RunError, UserError, raise_any
from llmtrain.types import JsonObject, Piece, Ranks, Spec, TensorSpec

P = ParamSpec("P")
T = TypeVar("T")
Log = Callable[[str, Mapping[str, object]], object]  # the name of an event, its details

READ_BYTES = form.EXTENT_BYTES
_ADAPTER = "adapter_"  # the names of an adapter's files begin so
_PATIENCE = Patience()
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A verified checkpoint; state is its `trainer_state.json`."""

    path: Path
    name: str
    step: int
    state: JsonObject


def find(
    root: Path,
    run_id: str | None,
    ranks: Ranks,
    *,
    resume: str = "auto",
    verify: Literal["full", "sizes"] = "full",
    supersede: bool = False,
    log: Log = lambda event, detail: None,
    patience: Patience = _PATIENCE,
) -> ResumePoint | None:
    """Find the newest valid checkpoint of a run in `root`, or the one that is named.

    run_id: None = of any run
    resume: `auto`, or the name of a checkpoint
    verify: with `sizes`, only the digests of small files are compared
    supersede: whether checkpoints that are newer than the named one are renamed
    log: called on every rank for each checkpoint that rank 0 has renamed
        (`checkpoint_quarantined`, `checkpoint_superseded`)

    Collective. Raises UserError for what a person must decide (another format, only damaged ones, a
    name that cannot be used), RunError 74 if the disk does not answer, StoppedError if a stop was
    asked for.
    """
    damaged: tuple[str, str] | None = None
    while True:
        look = partial(_offer, root, run_id, resume, damaged, supersede=supersede)
        offer = _from_rank_0(ranks, patience, look, log)
        if offer is None:
            return None
        path = root / offer["name"]
        damage = _verify_together(path, offer["manifest"]["files"], verify, ranks, patience)
        if not damage:
            break
        damaged = path.name, damage
    newer: list[str] = offer["newer"]

    def make_way(renamed: list[Event]) -> None:
        reason = f"a start was told to resume from {path.name}"
        for name in newer:
            if (root / name).exists():
                renamed.append(candidates.rename(root, name, candidates.SUPERSEDED, reason))

    if newer:
        _from_rank_0(ranks, patience, make_way, log)
    return ResumePoint(path, path.name, form.step_of(path.name) or 0, offer["state"])


def verify(
    path: Path, jobs: int = 4, on_progress: Callable[[int], object] = lambda size: None
) -> list[Problem]:
    """Return everything that is wrong with a checkpoint directory; empty for a valid one.

    A problem's key is the file, its value what is wrong with it.

    jobs: threads that hash
    on_progress: called in this thread with the number of bytes that were hashed since its last call

    Raises OSError if the disk does not answer, UserError for a checkpoint of another format.
    """
    with candidates.of_our_format(path):
        try:
            manifest = form.load(path)
        except DamagedError as error:
            return [_as_problem(path, error)]
        # The first thing that is wrong with each file.
        checked = {name: _damage(form.check_file, path, name, manifest) for name in manifest.files}
        wrong = {name: damage for name, damage in checked.items() if damage}
        whole = [(name, entry) for name, entry in manifest.files.items() if name not in wrong]
        parts = [(name, extent) for name, entry in whole for extent in entry.extents]
        with ThreadPoolExecutor(jobs) as pool:
            damages = pool.map(lambda part: _damage(form.check_extent, path, *part), parts)
            for (name, extent), damage in zip(parts, damages, strict=True):
                on_progress(extent.length)
                if damage:
                    wrong.setdefault(name, damage)
        looks_whole = form.STATE in manifest.files and not wrong
        if looks_whole and (damage := _damage(candidates.state_of, path, manifest)):
            wrong[form.STATE] = damage
    return [_as_problem(path, wrong[name]) for name in manifest.files if name in wrong]


def load_tensors(
    resume_point: ResumePoint,
    spec: Spec,
    pieces: Iterable[Piece],
    ranks: Ranks,
    *,
    patience: Patience = _PATIENCE,
) -> None:
    """Read a checkpoint's tensors into the memory of this rank's pieces.

    spec: of the model and the optimizer; on the disk, the tensors may be in other files

    Collective. Raises UserError if names, dtypes or shapes differ, RunError 74 if the disk does not
    answer, StoppedError if a stop was asked for (then only some pieces are filled).
    """
    answer = _from_rank_0(ranks, patience, lambda _: _find_tensors(resume_point.path))
    stored = {
        name: TensorLocation(file, offset, TensorSpec(dtype, tuple(shape)))
        for name, (file, offset, dtype, shape) in answer.items()
    }
    if not any(file.startswith(_ADAPTER) for file in spec):
        refuse_adapters(resume_point, (place.file for place in stored.values()))
    _refuse_other_tensors(resume_point, stored, spec)

    def read() -> None:
        import torch

        for number, piece in enumerate(pieces, 1):
            system.beat("reading a checkpoint, by tensor", number, len(stored))
            place = stored[piece.name]
            start = place.offset + piece.start * form.DTYPES[place.tensor.dtype][0]
            data = piece.data.detach().view(torch.uint8)
            for offset in range(0, data.numel(), READ_BYTES):
                block = data[offset : offset + READ_BYTES]
                on_host = block.device.type == "cpu"
                host = block if on_host else torch.empty_like(block, device="cpu")
                patience.retry(
                    _read_into, resume_point.path / place.file, start + offset, host.numpy().data
                )
                if host is not block:
                    block.copy_(host)

    _vote(ranks, captured(read).error, resume_point.name)


def _offer(
    root: Path,
    run_id: str | None,
    resume: str,
    damaged: tuple[str, str] | None,
    renamed: list[Event],
    *,
    supersede: bool,
) -> JsonObject | None:
    """Return the fields of the next candidate, or None after the last one; called on rank 0.

    damaged: name of the candidate before, and what is wrong with it; None = there was none
    """
    faults.hit("load.scan", path=root)
    if resume != "auto":
        if damaged:
            raise candidates.unusable(*damaged)
        return asdict(candidates.find_named(root, resume, run_id, supersede=supersede))
    if damaged and (root / damaged[0]).exists():
        renamed.append(candidates.rename(root, damaged[0], candidates.DAMAGED, damaged[1]))
    candidate = candidates.newest(root, run_id, renamed)
    return asdict(candidate) if candidate else None


def _verify_together(
    path: Path, files: JsonObject, verify: str, ranks: Ranks, patience: Patience
) -> str:
    """Verify a checkpoint, each rank its share of the extents. Return the damage, "" for none.

    Raises RunError if the disk does not answer on some rank, StoppedError if a stop was asked for.
    """
    extents = [
        (name, Extent(*extent))
        for name in sorted(files)
        for extent in files[name]["extents"]
        if verify == "full" or not name.endswith(form.TENSORS)
    ]

    def verify_share() -> None:
        share = extents[ranks.rank :: ranks.world_size]
        for number, (name, extent) in enumerate(share, 1):
            system.beat("verifying a checkpoint", number, len(share))
            patience.retry(form.check_extent, path, name, extent)

    damage = _vote(ranks, captured(verify_share).error, path.name, damage_is_answer=True)
    return "; ".join(damage)


def tensors_digest(path: Path) -> str:
    """Return the SHA-256, as hex, of all weights and all optimizer state of a checkpoint.

    It covers names, dtypes, shapes and every byte, in the order of the names. So it does not depend
    on how many files the tensors are divided into. The bytes are not compared with the manifest.

    Raises DamagedError for a file that is missing or has no valid header, OSError if the disk does
    not answer.
    """
    hasher, buffer = hashlib.sha256(), memoryview(bytearray(form.BLOCK_BYTES))
    for name, (file, offset, dtype, shape) in sorted(_find_tensors(path).items()):
        left = form.tensor_bytes(TensorSpec(dtype, shape))
        hasher.update(form.canonical([name, dtype, shape]))
        while left:
            block = buffer[:left]
            _read_into(path / file, offset, block)
            hasher.update(block)
            offset, left = offset + block.nbytes, left - block.nbytes
    return hasher.hexdigest()


def _find_tensors(path: Path) -> JsonObject:
    """Return where each tensor of a checkpoint is, by name."""
    places: dict[str, TensorLocation] = {}
    for file in sorted(form.load(path).files):
        if file.endswith(form.TENSORS):
            with (path / file).open("rb") as opened:
                start = 8 + int.from_bytes(opened.read(8), "little")
            places |= form.places_in(file, form.check_tensors(path, file), start)
    return {
        name: (file, offset, tensor.dtype, tensor.shape)
        for name, (file, offset, tensor) in places.items()
    }


def refuse_adapters(resume_point: ResumePoint, files: Iterable[str]) -> None:
    """Raise UserError if a checkpoint has LoRA adapters instead of the model's weights.

    files: its files
    """
    if adapters := sorted({file for file in files if file.startswith(_ADAPTER)}):
        expected = "the weights of the whole model, which this run trains"
        remedy = "the config that began that run, or another run.dir"
        value = f"LoRA adapters ({', '.join(adapters)})"
        raise UserError(Problem(str(resume_point.path), value, expected, remedy))


def _refuse_other_tensors(
    resume_point: ResumePoint, stored: dict[str, TensorLocation], spec: Spec
) -> None:
    """Raise UserError with the first five tensors that differ between checkpoint and model."""
    wanted = {name: tensor for part in spec.values() for name, tensor in part.items()}
    saved = {name: place.tensor for name, place in stored.items()}
    every = [*wanted, *(name for name in saved if name not in wanted)]
    other = [name for name in every if saved.get(name) != wanted.get(name)]
    problems = [
        Problem(name, _describe(saved.get(name)), f"{_describe(wanted.get(name))}, as in the model")
        for name in other[:5]
    ]
    differs = f"{len(other)} of {len(every)} tensors are not those of the model"
    remedy = "restore the model and optimizer sections of the config that began the run"
    raise_any(problems, f"{resume_point.name}: {differs}; {remedy}")


def _describe(tensor: TensorSpec | None) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if tensor else "absent"


def _read_into(path: Path, offset: int, block: memoryview) -> None:
    """Fill `block` from a file; OSError if the file is too short."""
    system.beat_again()
    faults.hit("load.read", step=form.step_of(path.parent.name), path=path)
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while block.nbytes:
            count = file.readinto(block)
            if not count:
                raise OSError(f"{path.name} ended at byte {file.tell()} while it was read")
            block = block[count:]


def _from_rank_0(
    ranks: Ranks,
    patience: Patience,
    work: Callable[[list[Event]], T],
    log: Log = lambda event, detail: None,
) -> T:
    """Do `work` on rank 0 and return its result, sent as JSON, on all ranks.

    If it fails, raise on all ranks.

    work: appends an event for each checkpoint that it renames to the list that is its argument
    log: called for these events, even if the work fails afterwards
    """
    renamed: list[Event] = []
    outcome = captured(lambda: patience.retry(work, renamed) if ranks.rank == 0 else None)
    answer: list[Any] = from_rank_zero(ranks, lambda: [renamed, outcome.returned])
    for event, detail in answer[0]:
        log(event, detail)
    _vote(ranks, outcome.error, "the checkpoints")
    result: T = answer[1][0]
    return result


def _vote(
    ranks: Ranks, error: Exception | None, what: str, *, damage_is_answer: bool = False
) -> list[str]:
    """Share the errors of all ranks and raise on all ranks if there are any.

    error: this rank's error
    what: what was being read, for the message
    damage_is_answer: whether descriptions of damage are returned and not raised

    A stop comes before every other error: the next start will find that error again.
    """
    expected = isinstance(error, DamagedError | StoppedError)
    reported = isinstance(error, UserError) or (expected and ranks.rank == 0)
    if error is not None and not reported:
        traceback = None if expected else error
        _log.warning("this rank could not read a checkpoint: %s", error, exc_info=traceback)
    vote = ranks.vote(error)
    system.beat("looking for a checkpoint")
    for failed in vote.failures:
        if failed.kind == StoppedError.__name__:
            raise StoppedError(failed.text)
    if any(failed.exit_code == UserError.exit_code for failed in vote.failures):
        refuse(vote, error)
    kind = DamagedError.__name__ if damage_is_answer else ""
    damage = [one for one in vote.failures if one.kind == kind]
    trouble = [one for one in vote.failures if one not in damage]
    if trouble:
        disk = all(one.errno is not None or one.kind == "OSError" for one in trouble)
        raise RunError(
            f"could not read {what}: " + "; ".join(map(str, trouble)),
            DISK_FAILED if disk else 1,
            "see that every node can read the run directory, then start again: nothing was changed"
            if disk
            else "the traceback is in the log of that rank",
        )
    return [failed.text for failed in damage]


def _damage(check: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> DamagedError | None:
    """Return the damage that a check finds, or None."""
    try:
        check(*args, **kwargs)
    except DamagedError as error:
        return error
    return None


def _as_problem(path: Path, error: DamagedError) -> Problem:
    remedy = f"{path.name} is damaged: a run resumes from an older one"
    return Problem(error.file, error.reason, "what was written", remedy)
