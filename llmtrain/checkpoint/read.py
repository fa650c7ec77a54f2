"""The newest valid checkpoint off the disk, the same one on all ranks.

    find     rank 0 offers a candidate, each rank verifies its share of the bytes, vote
    fill     ranges straight into the memory of the pieces

*Damage* (bytes that are not those written) is set aside under another name and the next older one
is offered. *Trouble* (the disk does not answer) is not damage: three tries, then the start fails
and nothing is renamed. The trap: what only rank 1 cannot see is trouble, since rank 0 saw it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from llmtrain import faults, heartbeat
from llmtrain.agreement import Outcome, attempt, from_rank_zero, refuse
from llmtrain.checkpoint import candidates, check
from llmtrain.checkpoint import format as form
from llmtrain.checkpoint.candidates import Aside, Candidate
from llmtrain.checkpoint.format import DamagedError, Extent, OtherFormatError, Place
from llmtrain.checkpoint.retry import Patience, StoppedError
from llmtrain.errors import DISK_FAILED, Problem, RunError, UserError
from llmtrain.types import Failure, Piece, Ranks, Spec, TensorSpec

P = ParamSpec("P")
T = TypeVar("T")
Renamed = list[Aside]
Log = Callable[[str, Mapping[str, object]], object]  # the name of an event, its details

READ_BYTES = form.EXTENT_BYTES
_PATIENCE = Patience()
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A verified checkpoint; state is its `trainer_state.json`."""

    path: Path
    name: str
    step: int
    state: dict[str, Any]


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
) -> Found | None:
    """The newest valid checkpoint of this run (None: of any) in `root`, agreed on all ranks.

    resume: `auto`, or the name of one · verify: `sizes` compares the digests of small files alone ·
    supersede: what is newer than the one that is named is set aside · log: hears on every rank of
    what rank 0 has renamed (`checkpoint_quarantined`, `checkpoint_superseded`).

    Collective. Raises UserError for what a person must decide (another format, nothing but damaged
    ones, a name that cannot be used), RunError 74 if the disk does not answer, StoppedError.
    """
    damage: str | None = None
    offer: dict[str, Any] = {}
    while True:
        before = (offer["name"], damage) if damage else None
        look = partial(_offer, root, run_id, resume, before, supersede=supersede)
        offer = _from_rank_0(ranks, patience, log, look)
        if offer["name"] is None:
            return None
        path = root / offer["name"]
        damage = _verify_together(path, offer["extents"], verify, ranks, patience)
        if damage is None:
            break
    if offer["newer"]:
        make_way = partial(_make_way, root, offer["newer"], offer["name"])
        _from_rank_0(ranks, patience, log, make_way)
    return Found(path, path.name, form.step_of(path.name) or 0, offer["state"])


def verify(
    path: Path, jobs: int = 4, told: Callable[[int], object] = lambda size: None
) -> list[Problem]:
    """Everything that is wrong with a checkpoint directory; empty for a valid one.

    A problem's key is the file, its value what is wrong with it. jobs: threads that hash · told:
    hears, in this thread, how many more bytes were. Raises OSError if the disk does not answer,
    UserError for a format that is not ours.
    """
    try:
        manifest = form.load(path)
    except DamagedError as error:
        return [_as_problem(path, error)]
    except OtherFormatError as error:
        raise UserError(candidates.other_format(path, error)) from error
    wrong: dict[str, DamagedError] = {}  # the first thing of each file
    with ThreadPoolExecutor(jobs) as pool:
        for name in manifest.files:
            if damage := _damage(check.file, path, name, manifest):
                wrong[name] = damage
        parts = [
            (name, extent)
            for name, entry in manifest.files.items()
            if name not in wrong
            for extent in entry.extents
        ]
        found = pool.map(lambda part: _damage(check.extent, path, *part), parts)
        for (name, extent), damage in zip(parts, found, strict=True):
            told(extent.length)
            if damage:
                wrong.setdefault(name, damage)
    if form.STATE in manifest.files and not wrong:
        found_format = form.state(path).get("format")
        if found_format != form.FORMAT:
            other = OtherFormatError(found_format, manifest.run_id)
            raise UserError(candidates.other_format(path, other))
    return [_as_problem(path, wrong[name]) for name in manifest.files if name in wrong]


def fill(
    found: Found,
    spec: Spec,
    pieces: Iterable[Piece],
    ranks: Ranks,
    *,
    patience: Patience = _PATIENCE,
) -> None:
    """Read a checkpoint's tensors into the memory of this rank's pieces.

    `spec` is the model's and optimizer's; files may be cut otherwise on disk. Collective. Raises
    UserError if names, dtypes or shapes differ, RunError 74 if the disk does not answer,
    StoppedError (the pieces are filled in part then).
    """
    answer = _from_rank_0(ranks, patience, _log_nothing, partial(_stored, found.path))
    stored = {
        name: Place(file, offset, TensorSpec(dtype, tuple(shape)))
        for name, (file, offset, (dtype, shape)) in answer["places"].items()
    }
    _refuse_adapters(found, stored)
    _refuse_other_tensors(found, stored, spec)

    def read() -> None:
        for piece in pieces:
            _read_piece(found.path, stored[piece.name], piece, patience)

    _raise_trouble(found.path, ranks.vote(_noted(attempt(read).error)).failures)


def _log_nothing(_event: str, _detail: Mapping[str, object]) -> None:
    """For work that renames nothing."""


def _offer(
    root: Path,
    run_id: str | None,
    resume: str,
    damaged: tuple[str, str] | None,
    aside: Renamed,
    *,
    supersede: bool,
) -> dict[str, Any]:
    """Rank 0: the next candidate. damaged: what was offered before, and what is wrong with it."""
    faults.hit("load.scan", path=root)
    if resume != "auto":
        if damaged:
            raise UserError(candidates.unusable(*damaged))
        return _as_json(candidates.named(root, resume, run_id, supersede=supersede))
    if damaged and (root / damaged[0]).exists():
        aside.append(candidates.set_aside(root, damaged[0], candidates.DAMAGED, damaged[1]))
    return _as_json(candidates.newest(root, run_id, aside))


def _make_way(root: Path, newer: list[str], used: str, aside: Renamed) -> dict[str, Any]:
    """Rank 0: what is newer than the one that was named goes on under another name."""
    reason = f"a start was told to go on from {used}"
    for name in newer:
        if (root / name).exists():
            aside.append(candidates.set_aside(root, name, candidates.SUPERSEDED, reason))
    return {}


def _verify_together(
    path: Path, files: dict[str, Any], verify: str, ranks: Ranks, patience: Patience
) -> str | None:
    """Each rank hashes its share of the extents; None, or what was found damaged.

    Raises RunError if the disk does not answer on some rank, StoppedError.
    """
    extents = [
        (name, Extent(*extent))
        for name in sorted(files)
        for extent in files[name]
        if verify == "full" or not name.endswith(form.TENSORS)
    ]

    def verify_share() -> None:
        for name, extent in extents[ranks.rank :: ranks.world_size]:
            patience.tried(check.extent, path, name, extent)

    failures = ranks.vote(_noted(attempt(verify_share).error)).failures
    heartbeat.beat("looking for a checkpoint")
    damaged = [failed for failed in failures if failed.kind == DamagedError.__name__]
    _raise_trouble(path, tuple(failed for failed in failures if failed not in damaged))
    return "; ".join(failed.text for failed in damaged) if damaged else None


def _stored(path: Path, _aside: Renamed) -> dict[str, Any]:
    """Where each tensor of a checkpoint lies, by name."""
    found: dict[str, Place] = {}
    for file in sorted(form.load(path).files):
        if file.endswith(form.TENSORS):
            with (path / file).open("rb") as opened:
                start = 8 + int.from_bytes(opened.read(8), "little")
            found |= form.places_in(file, check.tensors(path, file), start)
    return {
        "places": {
            name: (place.file, place.offset, (place.tensor.dtype, place.tensor.shape))
            for name, place in found.items()
        }
    }


def _refuse_adapters(found: Found, stored: dict[str, Place]) -> None:
    """UserError for a checkpoint that does not hold the model itself."""
    files = sorted({place.file for place in stored.values()})
    adapters = [file for file in files if file.startswith("adapter_")]
    if adapters:
        expected = "the weights of the whole model, which this run trains"
        remedy = "the config that began that run, or another run.dir"
        value = f"LoRA adapters ({', '.join(adapters)})"
        raise UserError(Problem(str(found.path), value, expected, remedy))


def _refuse_other_tensors(found: Found, stored: dict[str, Place], spec: Spec) -> None:
    """UserError with the first five tensors that the checkpoint and the model do not share."""
    wanted = {name: tensor for part in spec.values() for name, tensor in part.items()}
    there = {name: place.tensor for name, place in stored.items()}
    every = [*wanted, *(name for name in there if name not in wanted)]
    other = [name for name in every if there.get(name) != wanted.get(name)]
    if other:
        raise UserError(
            *(
                Problem(
                    name, _shown(there.get(name)), f"{_shown(wanted.get(name))}, as in the model"
                )
                for name in other[:5]
            ),
            where=f"{found.name}: {len(other)} of {len(every)} tensors are not those of the model; "
            "restore the model and optimizer sections of the config that began the run",
        )


def _shown(tensor: TensorSpec | None) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if tensor else "absent"


def _read_piece(path: Path, place: Place, piece: Piece, patience: Patience) -> None:
    """The bytes of one piece into its memory."""
    item = form.DTYPES[place.tensor.dtype][0]
    start = place.offset + piece.start * item
    for offset, block in _memory(piece):
        patience.tried(_read_into, path / place.file, start + offset, block)


def _memory(piece: Piece) -> Iterator[tuple[int, memoryview]]:
    """A piece's memory as (offset in bytes, at most 64 MiB of bytes); filled once taken back.

    On a device the bytes go over a host buffer and are copied when the next block is asked for.
    """
    import torch

    data = piece.data.detach().view(torch.uint8)
    for offset in range(0, data.numel(), READ_BYTES):
        block = data[offset : offset + READ_BYTES]
        host = block if block.device.type == "cpu" else torch.empty_like(block, device="cpu")
        yield offset, host.numpy().data
        if host is not block:
            block.copy_(host)


def _read_into(path: Path, offset: int, block: memoryview) -> None:
    """Fill `block` from a file; OSError if the file ends before."""
    heartbeat.beat("reading a checkpoint")
    faults.hit("load.read", step=form.step_of(path.parent.name), path=path)
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while block.nbytes:
            count = file.readinto(block)
            if not count:
                raise OSError(f"{path.name} ended at byte {file.tell()} while it was read")
            block = block[count:]


def _from_rank_0(ranks: Ranks, patience: Patience, log: Log, work: Callable[[Renamed], T]) -> T:
    """Return what rank 0's work returned, as JSON keeps it; if it failed, raise on all ranks.

    The work appends what it renames to the list that it is given. `log` learns of that even if the
    work fails afterwards.
    """
    renamed: Renamed = []
    outcome: Outcome[Any] = Outcome((None,))
    if ranks.rank == 0:
        outcome = attempt(lambda: patience.tried(work, renamed))
    error = outcome.error
    _tell(log, from_rank_zero(ranks, lambda: [asdict(one) for one in renamed]))
    vote = ranks.vote(error if isinstance(error, UserError) else _noted(error))
    heartbeat.beat("looking for a checkpoint")
    if any(failed.exit_code == UserError.exit_code for failed in vote.failures):
        refuse(vote, error)
    where = next((failed.file for failed in vote.failures if failed.file), "the checkpoints")
    _raise_trouble(Path(where), vote.failures)
    answer: T = from_rank_zero(ranks, outcome.result)
    return answer


def _tell(log: Log, renamed: list[dict[str, Any]]) -> None:
    for one in (Aside(**fields) for fields in renamed):
        damaged = candidates.DAMAGED in one.now
        event = "checkpoint_quarantined" if damaged else "checkpoint_superseded"
        log(event, {"checkpoint": one.name, "now": one.now, "reason": one.reason})


def _raise_trouble(path: Path, failures: tuple[Failure, ...]) -> None:
    """Raise, on all ranks, what their failed votes mean.

    A stop ends the start whatever else there was: the next start finds it again.
    """
    if stopped := [failed for failed in failures if failed.kind == StoppedError.__name__]:
        raise StoppedError(stopped[0].text)
    if not failures:
        return
    disk = all(failed.errno is not None or failed.kind == "OSError" for failed in failures)
    raise RunError(
        f"could not read {path.name}: " + "; ".join(map(str, failures)),
        DISK_FAILED if disk else 1,
        "see that every node can read the run directory, then start again: nothing was changed"
        if disk
        else "the traceback is in the log of that rank",
    )


def _damage(check: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> DamagedError | None:
    """What a check finds damaged."""
    try:
        check(*args, **kwargs)
    except DamagedError as error:
        return error
    return None


def _as_problem(path: Path, error: DamagedError) -> Problem:
    remedy = f"{path.name} is damaged: a run goes on from an older one"
    return Problem(error.file, error.reason, "what was written", remedy)


def _as_json(candidate: Candidate | None) -> dict[str, Any]:
    if candidate is None:
        return {"name": None}
    extents = {name: list(entry.extents) for name, entry in candidate.manifest.files.items()}
    found = {"name": candidate.name, "state": candidate.state, "newer": list(candidate.newer)}
    return {**found, "extents": extents}


def _noted(error: Exception | None) -> Exception | None:
    """The same error, in this rank's log; with its traceback where it was not to be expected."""
    if error is not None:
        expected = isinstance(error, DamagedError | StoppedError)
        traceback = None if expected else error
        logger.warning("this rank could not read a checkpoint: %s", error, exc_info=traceback)
    return error
