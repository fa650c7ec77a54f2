"""List the checkpoints of a run, verify them, and delete those that its policy does not keep.

    look       names, sizes and why each is kept, from manifests, file sizes and headers alone
    verify     every byte, compared with its digest
    prune      what retention deletes after a save; without `yes` it is only listed

Nothing here needs torch. The first two write nothing, so they work on a live run and on a read-only
disk. The trap: the retention of a live run may delete a directory while it is being read. The third
holds the run's lock while it deletes. Before that, every byte of the checkpoints to keep is
verified: otherwise three damaged ones could be kept and an intact one deleted.
"""

import functools
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from llmtrain.checkpoint import candidates, format as form, read
from llmtrain.checkpoint.candidates import COMPLETE, kind_of
from llmtrain.config.load import load_config
from llmtrain.config.schema import CheckpointConfig
from llmtrain.errors import DISK_FAILED, Problem, RunError, UserError, raise_any
from llmtrain.rundir import contents, record
from llmtrain.rundir.lock import RunLock
from llmtrain.rundir.status import read_status
from llmtrain.types import JsonObject

FOREIGN, UNREADABLE, OTHER = "other run", "unreadable", "other"
SET_ASIDE, LEFT_OVER = ("damaged", "superseded"), (candidates.PARTIAL, candidates.TRASH)
LINK = "a link"  # a reason to keep a row
_POLICY = {"keep_last", "keep_every", "keep_best"}
_OF_A_RUN = (contents.CONFIG, contents.STATUS, contents.METRICS)

OnProgress = Callable[[str, int, int], object]  # name of a checkpoint, its bytes, bytes read so far
_LEAST_KEPT = 2


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One directory under `checkpoints/`.

    kind: `complete`; `other run` if it belongs to another run; `unreadable` if it belongs to the
        run but its manifest is not intact; `partial`, `damaged`, `superseded` or `trash` by its
        name; else `other`
    bytes: size on disk
    loss: the held-out loss of its step; None if that step was not evaluated
    last_loss: that of the newest evaluation up to its step, by which retention chooses
    kept: why retention keeps it; () if retention does not keep it, or does not consider it
    wrong: problems found by manifest, sizes and headers, as at a start; None if it was not checked

    A link has the values of its target, as for a resume; it is kept, as retention deletes no links.
    """

    name: str
    kind: str
    step: int | None
    bytes: int
    loss: float | None
    last_loss: float | None
    kept: tuple[str, ...]
    wrong: tuple[str, ...] | None

    @property
    def valid(self) -> bool | None:
        """Whether manifest, sizes and headers show no problem; None if it was not checked."""
        return None if self.wrong is None else not self.wrong


@dataclass(frozen=True, slots=True)
class Listing:
    """The checkpoints of a run.

    run_id: None if neither the status nor a manifest names it
    resumed_from: the checkpoint that the last start resumed
    policy: of the run's config; None if no config loads
    rows: oldest step first
    """

    root: Path
    run_id: str | None
    resumed_from: str | None
    policy: CheckpointConfig | None
    rows: tuple[CheckpointRow, ...]

    def to_json(self) -> JsonObject:
        """Return the object that `llmtrain checkpoints list --json` prints."""
        return {
            "run_id": self.run_id,
            "resumed_from": self.resumed_from,
            "policy": self.policy and self.policy.model_dump(include=_POLICY),
            "checkpoints": [{**asdict(row), "valid": row.valid} for row in self.rows],
        }


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of comparing one checkpoint byte by byte.

    bytes: size on disk
    seconds: time that the comparison took
    problems: each with the file as key, and what is wrong as value
    other_format: whether it is intact but in the format of another llmtrain; then the only
        problem names the format and the remedy
    sha256: of all weights and optimizer state, as hex, where it was asked for and nothing is wrong
    """

    name: str
    bytes: int
    seconds: float
    problems: tuple[Problem, ...]
    other_format: bool = False
    sha256: str | None = None

    def to_json(self) -> JsonObject:
        """Return one row of what `llmtrain checkpoints verify --json` prints."""
        wrong = [{"file": str(one.key), "wrong": str(one.value)} for one in self.problems]
        size = {"bytes": self.bytes, "seconds": round(self.seconds, 3)}
        digest = {} if self.sha256 is None else {"sha256": self.sha256}
        return {"name": self.name, "valid": not wrong, **size, "problems": wrong, **digest}


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """The directories that a path given by the user leads to.

    run_dir: None for checkpoints outside a run
    root: the directory of the checkpoints
    only: the name of the checkpoint, if the path is that of one
    """

    run_dir: Path | None
    root: Path
    only: str | None


def look(path: Path) -> Listing:
    """Return everything under `checkpoints/` of a run.

    path: the run, its `checkpoints/`, or one checkpoint

    Raises UserError if the path is anything else, RunError 74 if the disk cannot be read.
    """
    place = place_of(path)
    policy = None
    with suppress(UserError):  # a config that does not load
        policy = policy_of(place.run_dir) if place.run_dir else None
    checkpoints = listing(place, policy)
    rows = tuple(row for row in checkpoints.rows if place.only in (None, row.name))
    return replace(checkpoints, rows=rows)


def verify(
    path: Path,
    name: str | None = None,
    on_progress: OnProgress = lambda name, size, done: None,
    *,
    hashed: bool = False,
) -> Iterator[Verified]:
    """Compare every byte of each complete checkpoint, oldest first; or of `name`, of any kind.

    hashed: whether to compute `sha256`, too

    Renames and deletes nothing. A checkpoint that a live run deletes meanwhile is left out. Raises
    UserError if there is nothing to verify, RunError 74 if the disk cannot be read.
    """
    place = place_of(path)
    names = sorted(form.complete_names(place.root))
    asked = place.only if name is None else name
    if asked is not None and asked not in form.names(place.root):
        expected = f"the name of a checkpoint of {path}, not a path"
        raise UserError(Problem("NAME", asked, expected, f"there are {', '.join(names) or 'none'}"))
    if asked is None and not names:
        raise UserError(Problem("RUN", path, "a run with a complete checkpoint; it has none"))
    verified = verify_each(place.root, [asked] if asked else names, on_progress)
    if not hashed:
        return verified
    return (
        one if one.problems else replace(one, sha256=read.tensors_digest(place.root / one.name))
        for one in verified
    )


def place_of(path: Path) -> CheckpointPath:
    """Find out whether a path is a run, its `checkpoints/` or one checkpoint.

    Raises UserError if it is not one of these.
    """
    here = path.absolute() if path.name else path.resolve()
    if here.is_dir():
        inside = here / contents.CHECKPOINTS
        if inside.is_dir() or _is_run(here):
            return CheckpointPath(here, inside, None)
        if (here / form.STATE).is_file() or (here / form.MANIFEST).is_file() or kind_of(here.name):
            return CheckpointPath(_run_of(here.parent), here.parent, here.name)
        if here.name == contents.CHECKPOINTS or any(map(kind_of, form.names(here))):
            return CheckpointPath(_run_of(here), here, None)
    raise UserError(Problem("RUN", path, "a run directory, its checkpoints/, or one checkpoint"))


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in _OF_A_RUN)


def _run_of(root: Path) -> Path | None:
    return root.parent if root.name == contents.CHECKPOINTS and _is_run(root.parent) else None


def policy_of(run_dir: Path) -> CheckpointConfig:
    """Return the retention policy in a run's config. Raises UserError if no config loads."""
    return load_config(run_dir / contents.CONFIG).checkpoint


def listing(place: CheckpointPath, policy: CheckpointConfig | None) -> Listing:
    """Return all rows; those of the run's own checkpoints with the reasons to keep them."""
    try:
        run_id, lines = run_id_of(place), record.record(place.run_dir) if place.run_dir else []
        starts = [line for line in lines if line["kind"] == "start"]
        resumed_from = starts[-1].get("resumed_from") if starts else None
        all_rows = (_row(place.root / name, run_id) for name in form.names(place.root))
        rows = [row for row in all_rows if row is not None]
    except OSError as error:
        raise _no_answer(place.root, error) from error
    losses = {row.step: row.last_loss for row in rows if _is_ours(row) and row.step is not None}
    reasons = candidates.reasons_to_keep(losses, policy, resumed_from) if policy else {}
    rows = [
        replace(row, kept=reasons.get(row.step or 0, ())) if _is_ours(row) else row for row in rows
    ]
    rows.sort(key=lambda row: (row.step is None, row.step or 0, row.name))
    return Listing(place.root, run_id, resumed_from, policy, tuple(rows))


def _is_ours(row: CheckpointRow) -> bool:
    """Whether retention considers it: a complete checkpoint of the run, not a link."""
    return row.kind == COMPLETE and LINK not in row.kept


def _row(path: Path, run_id: str | None) -> CheckpointRow | None:
    """Return the row of one directory; None if it disappeared while it was read."""
    kind = kind_of(path.name) or OTHER
    size, loss, last_loss, wrong = _bytes(path), None, None, None
    if kind == COMPLETE or (kind not in LEFT_OVER and (path / form.MANIFEST).exists()):
        wrong, of = _whole(path)
        why = path / candidates.WHY  # sizes do not show everything that a start noted
        if kind == "damaged" and not wrong and why.is_file():
            wrong = tuple(why.read_text("utf-8", errors="replace").splitlines())
        loss, last_loss = _losses(path)
        if kind == COMPLETE and candidates.is_foreign(path, run_id):
            kind = FOREIGN
        elif kind == COMPLETE and of is None:
            kind = UNREADABLE
    step = form.step_of(path.name.partition(".")[0])
    reasons = (LINK,) if path.is_symlink() else ()
    row = CheckpointRow(path.name, kind, step, size, loss, last_loss, reasons, wrong)
    return row if path.is_dir() else None


def _whole(path: Path) -> tuple[tuple[str, ...], str | None]:
    """Return what is wrong by manifest, sizes and headers, and the run that the manifest names."""
    try:
        manifest = form.load(path)
    except (form.DamagedError, form.OtherFormatError) as error:
        return (str(error),), None
    wrong = []
    for name in manifest.files:
        try:
            form.check_file(path, name, manifest)
        except (form.DamagedError, FileNotFoundError) as error:
            wrong.append(str(error))
    return tuple(wrong), manifest.run_id


def _losses(path: Path) -> tuple[float | None, float | None]:
    """Return the held-out loss of the checkpoint's own step, and that of the newest evaluation."""
    with suppress(form.DamagedError):  # the row has this damage under `wrong`
        state = form.state(path)
        last, evaluation, step = candidates.loss_in(state), state.get("evaluation"), state["step"]
        is_own = isinstance(evaluation, dict) and evaluation.get("step", step) == step
        return (last if is_own else None), last
    return None, None


def _bytes(path: Path) -> int:
    """Return the size of all files; a file that disappears meanwhile is not counted."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(FileNotFoundError):
                total += (Path(folder) / name).lstat().st_size
    return total


def run_id_of(place: CheckpointPath) -> str | None:
    """Return the run's id: from its status, else from the newest intact manifest."""
    known = read_status(place.run_dir).get("run_id") if place.run_dir else None
    if known:
        return str(known)
    for name in form.complete_names(place.root):
        with suppress(form.DamagedError, form.OtherFormatError):
            return form.load(place.root / name).run_id
    return None


def verify_each(root: Path, names: Sequence[str], on_progress: OnProgress) -> Iterator[Verified]:
    """Compare every byte of these checkpoints. Raises RunError 74 if the disk cannot be read.

    A checkpoint that disappears meanwhile, as in a live run, is left out.
    """
    for name in names:
        path, size, start = root / name, _bytes(root / name), time.perf_counter()
        try:
            problems, other_format = _problems(path, functools.partial(on_progress, name, size))
        except OSError as error:
            if path.is_dir():
                raise _no_answer(path, error) from error
        if path.is_dir():
            yield Verified(name, size, time.perf_counter() - start, problems, other_format)


def _problems(path: Path, on_progress: Callable[[int], object]) -> tuple[tuple[Problem, ...], bool]:
    """Return the problems of a checkpoint, and whether it only has another format."""
    done = 0

    def more(size: int) -> None:
        nonlocal done
        done += size
        on_progress(done)

    try:
        return tuple(read.verify(path, on_progress=more)), False
    except UserError as error:
        return error.problems, True


def _no_answer(path: Path, error: OSError) -> RunError:
    message = f"could not read {error.filename or path} ({error.strerror or error})"
    remedy = "this says nothing about the checkpoint; try again when the disk answers"
    return RunError(message, DISK_FAILED, remedy)


@dataclass(frozen=True, slots=True)
class Pruned:
    """What prune deletes and what it keeps.

    goes: to be deleted
    stays: to be kept
    deleted: whether `goes` has been deleted already
    """

    goes: tuple[CheckpointRow, ...]
    stays: tuple[CheckpointRow, ...]
    deleted: bool

    @property
    def lost(self) -> bool:
        """Whether a start would find checkpoints of the run, but no valid one.

        Judged by manifests and sizes; before a deletion every byte is verified as well.
        """
        if any(row.kind == COMPLETE and row.valid for row in self.stays):
            return False
        return any(row.kind in (UNREADABLE, *SET_ASIDE) for row in (*self.stays, *self.goes))

    @property
    def bytes(self) -> int:
        """The size of everything that is deleted."""
        return sum(row.bytes for row in self.goes)

    def to_json(self) -> JsonObject:
        """Return the object that `llmtrain checkpoints prune --json` prints."""
        stays = [{"name": row.name, "kind": row.kind, "kept": row.kept} for row in self.stays]
        goes = [{"name": row.name, "kind": row.kind, "bytes": row.bytes} for row in self.goes]
        head = {"deleted": self.deleted, "lost": self.lost, "bytes": self.bytes}
        return {**head, "goes": goes, "stays": stays}


def prune(
    path: Path,
    keep_last: int | None = None,
    *,
    yes: bool = False,
    set_aside: bool = False,
    on_progress: OnProgress = lambda name, size, done: None,
) -> Pruned:
    """Find checkpoints that a run's policy does not keep, and the left-overs of earlier starts.

    keep_last: in place of the config's value
    yes: delete what was found
    set_aside: damaged and superseded checkpoints are deleted too, if a valid one is left. Those of
        other runs and directories of an unknown kind are always kept

    Raises UserError, and deletes nothing, if the run is alive or a checkpoint to keep is not valid;
    RunError 74 if the disk fails.
    """
    place = place_of(path)
    if place.run_dir is None or place.only is not None:
        raise UserError(Problem("RUN", path, "a run directory: its config says what is kept"))
    policy = policy_of(place.run_dir)
    if keep_last is not None:
        if keep_last < _LEAST_KEPT:
            expected = f"at least {_LEAST_KEPT}: a damaged one must not be the last"
            raise UserError(Problem("--keep-last", keep_last, expected))
        policy = policy.model_copy(update={"keep_last": keep_last})
    lock = RunLock(place.run_dir, run_id_of(place) or "")
    if not yes:
        lock.check()
        return _plan(listing(place, policy), set_aside)
    with lock:
        listed = listing(place, policy)
        plan = _plan(listed, set_aside)
        if plan.goes:
            stays = [row.name for row in plan.stays if row.kind == COMPLETE]
            verified = verify_each(listed.root, stays, on_progress)  # every byte
            _refuse((one.name, [f"{p.key}: {p.value}" for p in one.problems]) for one in verified)
            _delete(listed, plan.goes)
    return replace(plan, deleted=True)


def _plan(listing: Listing, set_aside: bool) -> Pruned:
    """Decide what is deleted. Raises UserError if the sizes of one to keep are wrong."""
    valid = any(row.kind == COMPLETE and row.valid for row in listing.rows)
    kinds = (COMPLETE, *LEFT_OVER, *(SET_ASIDE if set_aside and valid else ()))
    goes = tuple(row for row in listing.rows if not row.kept and row.kind in kinds)
    stays = tuple(row for row in listing.rows if row not in goes)
    _refuse((row.name, row.wrong or ()) for row in stays if row.kind == COMPLETE)
    return Pruned(goes, stays, deleted=False)


def _refuse(looked_at: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Raise UserError if there are problems for any of these names."""
    expected = "valid, since it is to stay; nothing was deleted"
    raise_any(
        Problem(name, "; ".join(wrong), expected, f"rename it to {name}.damaged, then prune again")
        for name, wrong in looked_at
        if wrong
    )


def _delete(listing: Listing, goes: Sequence[CheckpointRow]) -> None:
    """Delete as retention does. Raises RunError if anything of it is still there afterwards."""
    assert listing.policy is not None
    candidates.prune(listing.root, listing.policy, listing.run_id or "", listing.resumed_from)
    candidates.clean_up(listing.root)
    for row in goes:
        if row.kind in SET_ASIDE:
            shutil.rmtree(listing.root / row.name, ignore_errors=True)  # checked below
    planned = {row.name for row in goes}
    left = [one for one in form.names(listing.root) if one in planned or one.startswith(".trash-")]
    if left:
        raise RunError(
            f"could not delete {', '.join(left)} in {listing.root}",
            DISK_FAILED,
            "see who owns it and whether the disk can be written, then give the same command again",
        )
