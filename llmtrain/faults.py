"""Named failpoints, with which tests kill a run, fill its disk or damage its files.

A kill inside a rename, or between two votes, would otherwise be a matter of luck. Nothing is
injected unless LLMTRAIN_FAULTS is set to one or more faults, joined by `;`:

    point[@step=N][@rank=R][@nth=K][@bytes=B][@p=0.01,seed=S]=action

    save.write@rank=1@bytes=70%=kill       rank 1 dies when it has written 70 % of its share
    save.create@nth=2=enospc;loop.micro@step=7=term

step: the step of the checkpoint that is written or read; at other points the current step (0 during
    the evaluation at the start, none before it)
nth: inject only when the other conditions hold for the K-th time in this process; without it, each
    time that they hold
bytes: how much of one checkpoint this rank has written, as a number or a percentage of its share

The caller carries out the action `short`; all others are carried out here.
"""

import errno
import hashlib
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "LLMTRAIN_FAULTS"
POINTS = (
    "save.begin",
    "save.mkdir",
    "save.small",
    "save.create",
    "save.vote1",
    "save.snapshot",
    "save.write",
    "save.fsync",
    "save.vote2",
    "save.manifest",
    "save.dirsync",
    "save.rename",
    "save.parentsync",
    "save.done",
    "retain.trash",
    "retain.delete",
    "loop.step",
    "loop.micro",
    "eval.batch",
    "data.next",
    "worker.block",
    "lock.taken",
    "reference.step",
    "load.scan",
    "load.verify",
    "load.read",
)
GRAMMAR = (
    "point[@step=N][@rank=R][@nth=K][@bytes=B or 70%][@p=0.01,seed=S]=action, joined by `;`; "
    "actions: kill, exit:CODE, raise, enospc, eio, hang[:SECONDS], delay:SECONDS, term, int, usr1, "
    "truncate, flip[:OFFSET], short"
)

_SIGNALS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    "usr1": signal.SIGUSR1,
}
_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}
_COUNT = re.compile(r"\d+").fullmatch
_POSITIVE = re.compile(r"0*[1-9]\d*").fullmatch
_NUMBER = re.compile(r"\d+(\.\d+)?").fullmatch
_CODE = re.compile(r"\d{1,2}|1\d\d|2[0-4]\d|25[0-5]").fullmatch
_SHARE = re.compile(r"0(\.\d+)?|1(\.0+)?").fullmatch
_CONDITIONS = {
    "step": _COUNT,
    "rank": _COUNT,
    "nth": _POSITIVE,
    "bytes": re.compile(r"\d+|\d+(\.\d+)?%").fullmatch,
    "p": _SHARE,
    "seed": _COUNT,
}
_BARE = (*_SIGNALS, *_ERRORS, "raise", "truncate", "short", "hang", "flip")
_NUMBERED = {"exit": _CODE, "delay": _NUMBER, "hang": _NUMBER, "flip": _COUNT}


class InjectedError(Exception):
    """The exception of the action `raise`, which a run treats as a defect."""


@dataclass(slots=True)
class Fault:
    """One fault to inject. seen: how often its conditions have held."""

    text: str
    point: str
    action: str
    argument: float | None
    conditions: Mapping[str, str]
    seen: int = 0


_faults: list[Fault] | None = None
_rank = 0
_step: int | None = None  # the current step, set at `loop.step`


def install(environ: Mapping[str, str]) -> None:
    """Install the faults of LLMTRAIN_FAULTS. Raises ValueError, whose text names the wrong part."""
    global _faults, _rank, _step
    text = environ.get(VARIABLE, "")
    _faults = [_parse(part.strip()) for part in text.split(";") if part.strip()] or None
    _step = None
    _rank = int(environ["RANK"]) if environ.get("RANK", "").isdigit() else 0


def hit(
    point: str, *, step: int | None = None, path: Path | None = None, written: int = 0, of: int = 0
) -> str | None:
    """Inject the faults that are installed for this point, if any.

    step: step of the checkpoint or of the run; None = the current step
    path: the file that is written or read, for `truncate` and `flip`
    written: bytes of this rank's share that are written so far
    of: bytes of this rank's whole share

    Returns `short` if the caller must write only a part of its data, otherwise None. Raises OSError
    or InjectedError if the fault asks for it.
    """
    global _step
    if _faults is None:
        return None
    if point == "loop.step":
        _step = step
    step = _step if step is None else step
    for fault in _faults:
        if fault.point == point and _holds(fault, step, written, of):
            done = _strike(fault, path)
            if done:
                return done
    return None


def _parse(part: str) -> Fault:
    head, equals, action = part.rpartition("=")
    if not equals:
        raise ValueError(f"{part}: it lacks =action")
    point, *conditions = head.split("@")
    if point not in POINTS:
        raise ValueError(f"{part}: no failpoint {point!r}")
    name, colon, argument = action.partition(":")
    if name not in _BARE and name not in _NUMBERED:
        raise ValueError(f"{part}: no action {name!r}")
    fits = name in _NUMBERED and _NUMBERED[name](argument) if colon else name in _BARE
    if not fits:
        raise ValueError(f"{part}: {action!r} is not understood")
    pairs = [pair.partition("=") for one in conditions for pair in one.split(",")]
    for key, _, value in pairs:
        if key not in _CONDITIONS or not _CONDITIONS[key](value):
            raise ValueError(f"{part}: {key}={value} is not understood")
    values = {key: value for key, _, value in pairs}
    if len(values) < len(pairs) or ("seed" in values and "p" not in values):
        raise ValueError(f"{part}: a condition twice, or a seed without p")
    return Fault(part, point, name, float(argument) if colon else None, values)


def _holds(fault: Fault, step: int | None, written: int, of: int) -> bool:
    wanted = fault.conditions
    if "step" in wanted and step != int(wanted["step"]):
        return False
    if "rank" in wanted and _rank != int(wanted["rank"]):
        return False
    if "bytes" in wanted and written < _threshold(wanted["bytes"], of):
        return False
    fault.seen += 1
    if "nth" in wanted and fault.seen != int(wanted["nth"]):
        return False
    return "p" not in wanted or _draw(fault) < float(wanted["p"])


def _threshold(value: str, of: int) -> float:
    return of * float(value[:-1]) / 100 if value.endswith("%") else float(value)


def _draw(fault: Fault) -> float:
    """Return a number in [0, 1) that is the same whenever the run is repeated."""
    key = f"{fault.conditions.get('seed', 0)} {fault.point} {_rank} {fault.seen}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7]) / 2**56


def _strike(fault: Fault, path: Path | None) -> str | None:
    match fault.action:
        case "kill" | "term" | "int" | "usr1":
            os.kill(os.getpid(), _SIGNALS[fault.action])
        case "exit":
            os._exit(int(fault.argument or 0))
        case "raise":
            raise InjectedError(fault.text)
        case "enospc" | "eio":
            number = _ERRORS[fault.action]
            raise OSError(number, os.strerror(number), str(path) if path else None)
        case "hang" if fault.argument is None:
            while True:
                time.sleep(3600)
        case "hang" | "delay":
            time.sleep(fault.argument or 0)
        case "truncate" | "flip":
            _damage(fault, path)
        case _:
            return fault.action
    return None


def _damage(fault: Fault, path: Path | None) -> None:
    """Truncate a file to half its size, or flip a bit of the byte at the offset (or the middle)."""
    if path is None:
        raise InjectedError(f"{fault.text}: there is no file at this point")
    size = path.stat().st_size
    if fault.action == "truncate":
        return os.truncate(path, size // 2)
    offset = size // 2 if fault.argument is None else int(fault.argument)
    if offset >= size:
        raise InjectedError(f"{fault.text}: {path.name} has {size} bytes")
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    return None
