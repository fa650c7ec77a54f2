"""The newest valid checkpoint off the disk, the same one on all ranks.

    find     rank 0 offers a candidate, each rank verifies its share of the bytes, vote
    fill     ranges straight into the memory of the pieces

*Damage* (bytes that are not those written) is set aside under another name and the next older one
is offered. *Trouble* (the disk does not answer) is not damage: three tries, then the start fails
and nothing is renamed. The trap: what only rank 1 cannot see is trouble, since rank 0 saw it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from llmtrain import durable, faults, pulse
from llmtrain.checkpoint import check
from llmtrain.checkpoint import format as form
from llmtrain.checkpoint.format import DamagedError, Extent, Manifest, NewerFormatError, Place
from llmtrain.errors import DISK_FAILED, Problem, RunError, UserError
from llmtrain.types import Failure, Piece, Ranks, Spec, TensorSpec, failure

Wait = Callable[[float], object]
P = ParamSpec("P")
T = TypeVar("T")
Reason = tuple[str, str]  # name of a checkpoint, what is wrong with it

TRIES = 3
WAIT_SECONDS = 15.0
READ_BYTES = form.EXTENT_BYTES
_DAMAGED = ".damaged"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A verified checkpoint; state is its `trainer_state.json`."""

    path: Path
    name: str
    step: int
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Search:
    """The newest valid checkpoint, if any, and those set aside on the way: (name, reason)."""

    found: Found | None
    quarantined: tuple[Reason, ...]


def find(root: Path, run_id: str | None, ranks: Ranks, wait: Wait = time.sleep) -> Search:
    """The newest valid checkpoint of this run (None: of any) in `root`, agreed on all ranks.

    DamagedError ones are renamed by rank 0. Collective. Raises UserError for a newer format and if
    nothing but damaged ones is left, RunError 74 if the disk does not answer.
    """
    aside: list[Reason] = []
    damage: Reason | None = None
    while True:
        offer = _from_rank_0(ranks, _offer, root, run_id, damage, wait)
        aside += [(name, reason) for name, reason in offer["aside"]]
        _refuse_newer(root, offer["newer"])
        if offer["name"] is None:
            _refuse_all_damaged(root, offer["lost"])
            return Search(None, tuple(aside))
        path = root / offer["name"]
        damage = _verify_together(path, offer["manifest"], ranks, wait)
        if damage is None:
            found = Found(path, path.name, form.step_of(path.name) or 0, offer["state"])
            return Search(found, tuple(aside))


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
    except NewerFormatError as error:
        raise UserError(_newer(path, error.found)) from error
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
    return [_as_problem(path, wrong[name]) for name in manifest.files if name in wrong]


def fill(
    found: Found, spec: Spec, pieces: Iterable[Piece], ranks: Ranks, wait: Wait = time.sleep
) -> None:
    """Read a checkpoint's tensors into the memory of this rank's pieces.

    `spec` is the model's and optimizer's; files may be cut otherwise on disk. Collective. Raises
    UserError if names, dtypes or shapes differ, RunError 74 if the disk does not answer.
    """
    answer = _from_rank_0(ranks, _tried, wait, _stored, found.path)
    stored = {
        name: Place(file, offset, TensorSpec(dtype, tuple(shape)))
        for name, (file, offset, (dtype, shape)) in answer["places"].items()
    }
    _refuse_other_tensors(found, stored, spec)
    error: Exception | None = None
    try:
        for piece in pieces:
            _read_piece(found.path, stored[piece.name], piece, wait)
    except Exception as caught:  # the vote's edge: all ranks fail together
        error = _noted(caught)
    if failures := ranks.vote(error).failures:
        raise _trouble(found.path, failures)


def _offer(root: Path, run_id: str | None, damage: Reason | None, wait: Wait) -> dict[str, Any]:
    """Rank 0: set the damaged one aside, then look for the next candidate."""
    aside: list[Reason] = []
    if damage:
        aside.append(_tried(wait, _set_aside, root, *damage))
    offer: dict[str, Any] = {"name": None, "newer": None, "lost": [], "aside": aside}
    offer |= _tried(wait, _look, root, run_id, aside)
    if offer["name"] is None and offer["newer"] is None:
        offer["lost"] = _tried(wait, _set_aside_before, root)
    return offer


def _look(root: Path, run_id: str | None, aside: list[Reason]) -> dict[str, Any]:
    """The newest candidate that looks whole from outside; others are set aside on the way."""
    faults.hit("load.scan", path=root)
    for name in form.complete_names(root):
        path = root / name
        try:
            manifest = form.load(path)
            if run_id not in (None, manifest.run_id):
                continue
            for file in manifest.files:
                check.file(path, file, manifest)
            return {"name": name, "manifest": _as_json(manifest), "state": form.state(path)}
        except NewerFormatError as error:
            if run_id in (None, error.run_id):
                return {"newer": [name, error.found]}
        except DamagedError as error:
            if not _is_foreign(path, run_id):
                aside.append(_set_aside(root, name, str(error)))
    return {}


def _is_foreign(path: Path, run_id: str | None) -> bool:
    """Whether a checkpoint without an intact manifest still says that it is another run's."""
    try:
        return run_id is not None and form.state(path).get("run_id", run_id) != run_id
    except DamagedError:
        return False


def _set_aside(root: Path, name: str, reason: str) -> Reason:
    """Rename a damaged checkpoint to `.damaged`, `.damaged-2`, …; nothing is deleted."""
    taken = set(form.names(root))
    target, count = f"{name}{_DAMAGED}", 1
    while target in taken:
        count += 1
        target = f"{name}{_DAMAGED}-{count}"
    (root / name).rename(root / target)
    durable.sync_directory(root)
    logger.warning("set %s aside as %s: %s", name, target, reason)
    return name, reason


def _set_aside_before(root: Path) -> list[Reason]:
    """All checkpoints that were ever set aside here, each with what is wrong with it."""
    return [
        (name, _what_is_wrong(root / name) or "nothing is wrong with it: rename it back")
        for name in form.names(root)
        if _DAMAGED in name and form.step_of(name.partition(_DAMAGED)[0]) is not None
    ]


def _verify_together(path: Path, files: dict[str, Any], ranks: Ranks, wait: Wait) -> Reason | None:
    """Each rank hashes its share of the extents; None, or what was found damaged.

    Raises RunError if the disk does not answer on some rank.
    """
    extents = [(name, Extent(*extent)) for name in sorted(files) for extent in files[name]]
    error: Exception | None = None
    try:
        for name, extent in extents[ranks.rank :: ranks.world_size]:
            _tried(wait, check.extent, path, name, extent)
    except Exception as caught:  # the vote's edge
        error = _noted(caught)
    failures = ranks.vote(error).failures
    if other := tuple(failed for failed in failures if failed.kind != DamagedError.__name__):
        raise _trouble(path, other)
    return (path.name, "; ".join(failed.text for failed in failures)) if failures else None


def _stored(path: Path) -> dict[str, Any]:
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


def _read_piece(path: Path, place: Place, piece: Piece, wait: Wait) -> None:
    """The bytes of one piece into its memory."""
    item = form.DTYPES[place.tensor.dtype][0]
    start = place.offset + piece.start * item
    for offset, block in _memory(piece):
        _tried(wait, _read_into, path / place.file, start + offset, block)


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
    pulse.beat("reading a checkpoint")
    faults.hit("load.read", step=form.step_of(path.parent.name), path=path)
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while block.nbytes:
            count = file.readinto(block)
            if not count:
                raise OSError(f"{path.name} ended at byte {file.tell()} while it was read")
            block = block[count:]


def _tried(wait: Wait, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `work`, which has three tries if the disk does not answer."""
    for _ in range(TRIES - 1):
        try:
            return work(*args, **kwargs)
        except OSError as error:
            logger.warning("reading failed, next try in %s s: %s", WAIT_SECONDS, error)
            wait(WAIT_SECONDS)
    return work(*args, **kwargs)


def _from_rank_0(
    ranks: Ranks, work: Callable[P, dict[str, Any]], *args: P.args, **kwargs: P.kwargs
) -> dict[str, Any]:
    """What rank 0's work returned, as JSON, on all ranks; RunError on all if it failed."""
    answer: dict[str, Any] = {}
    if ranks.rank == 0:
        try:
            answer = work(*args, **kwargs)
        except Exception as caught:  # the vote's edge
            answer = {"failure": asdict(failure(0, _noted(caught)))}
    answer = json.loads(ranks.broadcast(json.dumps(answer).encode()))
    if "failure" in answer:
        failed = Failure(**answer["failure"])
        raise _trouble(Path(failed.file or "the checkpoints"), (failed,))
    return answer


def _trouble(path: Path, failures: tuple[Failure, ...]) -> RunError:
    """What is raised on all ranks if the disk does not answer (74) or our own code failed (1)."""
    disk = all(failed.errno is not None or failed.kind == "OSError" for failed in failures)
    return RunError(
        f"could not read {path.name}: " + "; ".join(map(str, failures)),
        DISK_FAILED if disk else 1,
        "see that every node can read the run directory, then start again: nothing was changed"
        if disk
        else "the traceback is in the log of that rank",
    )


def _refuse_newer(root: Path, newer: tuple[str, int] | None) -> None:
    if newer:
        raise UserError(_newer(root / newer[0], newer[1]))


def _newer(path: Path, found: int) -> Problem:
    return Problem(
        str(path),
        f"format {found}",
        f"format {form.FORMAT}, the newest that this llmtrain reads",
        "use the llmtrain that wrote it, or move it away to go on from an older one",
    )


def _what_is_wrong(path: Path) -> str:
    return "; ".join(f"{problem.key}: {problem.value}" for problem in verify(path))


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


def _refuse_all_damaged(root: Path, lost: list[Reason]) -> None:
    if lost:
        expected = "at least one valid checkpoint; nothing was deleted"
        remedy = "repair one, or begin anew in another run.dir"
        raise UserError(*(Problem(str(root / name), why, expected, remedy) for name, why in lost))


def _as_json(manifest: Manifest) -> dict[str, Any]:
    return {name: list(entry.extents) for name, entry in manifest.files.items()}


def _noted(error: Exception) -> Exception:
    """The same error, in this rank's log; with its traceback unless it is plain damage."""
    traceback = None if isinstance(error, DamagedError) else error
    logger.warning("this rank could not read a checkpoint: %s", error, exc_info=traceback)
    return error
