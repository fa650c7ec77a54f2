"""Run one training process, from the config to its exit code, and turn errors into messages.

The trap: a process that has trained with gloo must not finalise the interpreter. A worker thread of
gloo may still need the interpreter's lock, and would then abort the process although its work is
done. So a rank flushes its streams and exits by `os._exit`. Where the launcher forks its ranks, it
waits until they return, and it is `multiprocessing` that exits so.
"""

import contextlib
import errno
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from llmtrain.config import secrets
from llmtrain.errors import DISK_FAILED, PeerError, Problem, RunError, UserError, explained
from llmtrain.report import verdict
from llmtrain.report.collect import Tables, collect, column
from llmtrain.rundir import contents, failures
from llmtrain.text import count, duration, first_line, fit, fixed, harmless, percent, short
from llmtrain.tools.launch.child import repeat_after_launcher, write_exit_report
from llmtrain.training import stop

_RANK_0_SPEAKS_SECONDS = 2.0
_OF_A_PATH = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENXIO),
)


def train_here(config_file: str, overrides: Sequence[str]) -> NoReturn:
    """Train in this process, which may be one of several that a launcher started; then exit."""
    log, digest = None, None  # log file and digest of the config, once the run may have begun
    try:
        import llmtrain
        from llmtrain.config.binding import bind
        from llmtrain.config.load import load_config
        from llmtrain.training.start import claim

        stop.install()  # until the exit, also while the report is written, when the run has ended
        try:
            config = load_config(config_file, overrides)
        except UserError:
            # Reports these problems with those of the batch and of paths. If only the latter are
            # wrong, the run refuses them itself, so that `status.json` says so to `supervise`.
            rules = claim.rules_of_this_process(config_file, os.environ)
            load_config(config_file, overrides, rules)
            raise
        if sys.stderr.isatty() and not _rank():
            print("importing torch and transformers …", file=sys.stderr, flush=True)
        run_dir = config.run_dir
        log = contents.log_file(run_dir, _rank())
        config_digest = bind(config).digest
        if mark := failures.refused_before(run_dir, config_digest):
            # An earlier attempt of this launcher was refused.
            raise PeerError(mark.reason, mark.code, mark.rank)
        digest = config_digest
        result = llmtrain.train(config)
        code, message = result.exit_code, ""
        if not code:  # else the launcher forms another group, which no report is to delay
            message = _report(result.run_dir)
    except Exception as error:
        if digest is not None:
            _mark(run_dir, digest, error)
        _tell_launcher(error)
        code, message = describe(error, log)
        if _rank() and "torch" not in sys.modules:
            # When one rank ends, the launcher ends the others: let rank 0 print its message first.
            time.sleep(_RANK_0_SPEAKS_SECONDS)
    _leave(code, message)


def _mark(run_dir: Path, digest: str, error: Exception) -> None:
    """Write the file that tells why this rank failed, if it failed too early to have one.

    Rank 0 writes none here: the run directory may be in use by another process.
    """
    if _rank() and not failures.has(run_dir, _rank()):
        failures.leave(run_dir, _rank(), error, digest)


def _report(run_dir: Path) -> str:
    """Write the report and print its path, on rank 0 only; return a message if that fails.

    A failure of the report does not change the exit code of the run.
    """
    if _rank() != 0:
        return ""
    import shutil

    from llmtrain.report.page import write_report

    try:
        path = write_report(run_dir)
        width = shutil.get_terminal_size().columns if sys.stderr.isatty() else 160
        block = end_block(collect(run_dir), width)
        print("\n".join(harmless(line) for line in block), file=sys.stderr)
        sys.stderr.flush()  # the path comes last, wherever the two streams go
        print(path)
    except (UserError, OSError) as error:  # `tee` may have ended, so that nobody reads the stream
        return secrets.hider(os.environ)(f"the run is complete, its report is not: {error}")
    except Exception as error:  # a defect; it prints the traceback
        return f"the run is complete, its report is not: {describe(error)[1]}"
    return ""


def describe(error: BaseException, log: Path | None = None) -> tuple[int, str]:
    """Return the exit code of an error and its message, which may be empty.

    log: the log file of this process, if it has one

    The traceback of a defect is printed at once; the message says where it was raised. Nothing that
    is printed contains a secret. A mistake of the user is the same on every rank, or sent to all
    ranks as a `RunError` with the same code, so only rank 0 reports it.
    """
    who = f"rank {_rank()}: " if _rank() else ""
    hide = secrets.hider(os.environ)
    error = explained(error)
    if isinstance(error, UserError | RunError) and error.exit_code == UserError.exit_code:
        return error.exit_code, "" if who else hide(f"error: {error}")
    more = f"\n    log:      {log}" if log is not None and log.is_file() else ""
    if isinstance(error, RunError):
        return error.exit_code, hide(f"{who}error: {error}{more}")
    lines = harmless("".join(traceback.format_exception(error)), keep="\n\t")
    print(hide(lines), end="", file=sys.stderr)
    return 1, hide(
        f"{who}error: {type(error).__name__}: {first_line(error)}\n"
        f"    where:    {_where(error)}\n"
        "    next:     this is a defect of llmtrain or of a library; the traceback is above and in "
        f"the log{more}"
    )


def refused(error: BaseException) -> BaseException:
    """Return what a command, unlike a run, makes of an error of the operating system.

    A path that cannot be used is the user's to change (2), and a full disk (74) is no defect.
    """
    if not isinstance(error, OSError):
        return error
    if error.errno in _OF_A_PATH and error.filename:
        expected = f"a path that this command can use ({error.strerror})"
        return UserError(Problem(os.fsdecode(error.filename), None, expected))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(f"cannot write: {error}", DISK_FAILED, "make room, then try again")
    return error


def _where(error: BaseException) -> str:
    """Return the rank, what was noted on the error, and the innermost line of llmtrain's code."""
    package = Path(__file__).parents[1]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(package)]
    lines = [
        f"{Path(frame.filename).relative_to(package.parent)}, line {frame.lineno}"
        for frame in ours[-1:]
    ]
    return ", ".join([f"rank {_rank()}", *error.__dict__.get("__notes__", ()), *lines])


def _rank() -> int:
    """Return the rank in the environment: there may be no process group yet, or no longer."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


def _tell_launcher(error: Exception) -> None:
    """Give the error to torch's launcher, so that its own summary names it."""
    # If torch is not imported, the config is wrong, and importing torch would take seconds.
    if "torch" not in sys.modules or "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if isinstance(error, UserError | RunError):
        error.__cause__ = None  # messages to the user have no traceback, in the summary either
        error.__suppress_context__ = True
        error.__traceback__ = None
    get_error_handler().record_exception(error)
    written = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    text = written.read_text(encoding="utf-8")
    written.write_text(secrets.hider(os.environ)(text), encoding="utf-8")


def _leave(code: int, message: str) -> NoReturn:
    """Write the last message, flush and exit, without finalising the interpreter."""
    with contextlib.suppress(OSError, ValueError):  # the stream is closed, so nobody reads it
        if not write_exit_report(os.environ, code, message) and message:
            print(message, file=sys.stderr)
            if code == UserError.exit_code:
                repeat_after_launcher(os.environ, message)
        sys.stdout.flush()
        sys.stderr.flush()
    logging.shutdown()
    _unlink_semaphores()
    if not code and stop.is_awaited(os.environ):
        sys.exit(0)  # as a value: torch takes None for a failure
    os._exit(code)


def _unlink_semaphores() -> None:
    """Unlink semaphores, as `multiprocessing` does at a normal exit but not before `os._exit`.

    Otherwise its resource tracker, which outlives this process, would warn of them after our last
    line. The workers have ended, so nobody uses them. Deleting references is not enough, since the
    traceback of a failure refers to them too.
    """
    if "multiprocessing.util" in sys.modules:
        from multiprocessing import util

        util._run_finalizers(0)  # type: ignore[attr-defined]  # not in typeshed


def end_block(run: Tables, width: int = 160) -> Iterator[str]:
    """Yield at most ten lines, between how the run ended and the path of its report.

    width: of the terminal; the sample is cut there
    """
    if losses := column(run.evaluations, "loss"):
        best, lowest = min(losses, key=lambda point: point[1])
        first, last = fixed(losses[0][1]), fixed(losses[-1][1])
        last = verdict.NOT_FINITE if verdict.ended_not_finite(run) else last
        yield f"held-out   {first} → {last}, best {fixed(lowest)} at step {count(best)}"
    elif verdict.ended_not_finite(run):
        yield f"held-out   {verdict.NOT_FINITE} in every evaluation"
    elif trained := run.numbers("loss"):
        yield f"loss       {fixed(trained[0][1])} → {fixed(trained[-1][1])}"
    if tokens := run.numbers("tokens"):
        share = verdict.goodput(run)
        good = "" if share is None else f", goodput {percent(share)}"
        yield f"tokens     {short(tokens[-1][1])} in {duration(run.wall_seconds)}{good}"
    if run.samples:
        newest = run.samples[-1]
        text = " ".join(f"{newest.get('prompt')}{newest.get('text')}".split())
        yield fit(f"sample     {text}", width)
    yield from (f"wrong      {text}" for text in verdict.failures(run))
    if verdict.best_checkpoint(run):
        for command, word in zip(verdict.uses(run), ("use", ""), strict=False):
            yield f"{word:<11}{command}"
    if run.status.get("state") != "finished":
        yield "resume     give the same command again"
    yield f"compare    llmtrain report {verdict.where(run)} OTHER --out comparison.html"
