"""`llmtrain data tokenize` and `llmtrain data repack`: write data in another form, and go on later.

`tokenize` writes the documents of a config's sources as a token cache:

    DIR/NAME.bin, NAME.idx   all usable documents of a source, in order of the manifest
    DIR/NAME.json            where they come from, and which tokenizer was used
    DIR/tokenizer/           that tokenizer
    DIR/.tokenize/           config, manifest and finished parts: where the same command continues

After the command has finished, the config, the manifest and a copy of the tokenizer stay in
`.tokenize/`. The same command compares itself with them, finds everything done, and restores
DIR/tokenizer/ if it is missing. The lock stays too: if it were deleted, one command could hold the
deleted file while another creates a new one. Nothing is held out here: a run that trains on a cache
decides that itself, by document number.

`repack` rewrites data files of any format as parquet with small row groups. Training reads a row
group at a time, so small ones keep memory low and mix documents well; a compressed file of lines
can only be read as a whole.

Both run one function over many tasks, in spawned processes that never outlive the command and
import no torch.
"""

import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from llmtrain import system
from llmtrain.config import schema
from llmtrain.config.binding import Change, DataSettings, bind, changes, data_settings, dump
from llmtrain.config.load import load_config
from llmtrain.data.documents.reader import Reading, reading_of
from llmtrain.data.manifest import DataManifest
from llmtrain.data.repack import KINDS, Rewrite, finished_rows, made_of, rewrite
from llmtrain.data.sources.local import bounded, distinct, file_format, is_local, list_files, locate
from llmtrain.data.sources.token_cache import describe_tokenizer, dtype_code
from llmtrain.data.survey import check, survey
from llmtrain.data.token_writer import Task, counts_of, join, room_needed, total, write_part
from llmtrain.data.tokens.encode import DocumentEncoder
from llmtrain.data.tokens.tokenizer import Tokenizer, open_tokenizer
from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError, raise_any, usable
from llmtrain.rundir import contents
from llmtrain.rundir.lock import RunLock

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[int, int, int], None]  # tasks done, number of tasks, amount so far
_AHEAD = 2  # tasks that are submitted for each process


def each_left(
    function: Callable[[T], R],
    tasks: Sequence[T],
    known: Sequence[R | None],
    jobs: int,
    amount: Callable[[R], int],
    progress: Progress,
) -> int:
    """Run `each` over the tasks without a known result; return the amount of all results.

    known: for each task its result from an earlier command, or None
    jobs: processes
    amount: the number that a result adds to the amount
    progress: called before the first task and after each one
    """
    missing = [task for task, result in zip(tasks, known, strict=True) if result is None]
    done = len(tasks) - len(missing)
    total = sum(amount(result) for result in known if result is not None)
    progress(done, len(tasks), total)
    for result in each(function, missing, jobs):
        done, total = done + 1, total + amount(result)
        progress(done, len(tasks), total)
    return total


def each(function: Callable[[T], R], tasks: Sequence[T], jobs: int) -> Iterator[R]:
    """Yield the results as they are finished, in any order.

    jobs: processes; with 1 the tasks run in this process

    Raises what the function raises, and RunError if a process died; no further task is started
    then. An interrupt of this process ends the others at once.
    """
    if jobs == 1 or len(tasks) < 2:
        yield from map(function, tasks)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(jobs, len(tasks)), multiprocessing.get_context("spawn"), _start, (os.getpid(),)
    )
    try:
        left = iter(tasks)
        running: set[Future[R]] = set()
        while True:
            with _interrupts_held():  # the first task starts the processes
                for task in left:
                    running.add(pool.submit(function, task))
                    if len(running) >= _AHEAD * jobs:
                        break
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    except BrokenProcessPool as error:
        message = "a process of this command died (out of memory?)"
        remedy = "give the same command again, perhaps with fewer --jobs: it continues"
        raise RunError(message, RESTARTABLE, remedy) from error
    except KeyboardInterrupt:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()  # a task may take minutes, and its output is not in place yet
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hide interrupts from processes that are started inside; this process gets them afterwards.

    Before `_start` has run, an interrupt would end a new process with a traceback. New processes
    inherit the blocked signal. The trap: ignoring the signal would be inherited too, but an
    interrupt would then be lost for this process. The mask also holds for this thread only: if
    another thread receives the signal, Python runs the handler in the main thread, which may be
    starting a process. So the handlers only record the signal, and it is raised again at the end.
    """
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (numbers if main else ())
        if callable(signal.getsignal(number))
    }
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for one in received:
            signal.raise_signal(one)


def _start(parent: int) -> None:
    """Prepare a new process: ignore interrupts, which the command handles, and die with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    system.signal_on_death_of_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


WORK = ".tokenize"
PARTS = "parts"
_PUT_BACK = "put it back, or take another --out"


@dataclass(frozen=True, slots=True)
class Tokenized:
    """What is in DIR after the command.

    files: the `.idx` of each source, relative to DIR
    dropped: null, empty or blank documents, which are left out
    replaced: documents with invalid UTF-8, which are included
    skipped: bad units and lines that `data.on_bad_unit: skip` left out
    """

    files: tuple[str, ...]
    documents: int
    tokens: int
    dropped: int
    replaced: int
    skipped: int
    seconds: float


def tokenize(config: schema.Config, out: Path, jobs: int, progress: Progress) -> Tokenized:
    """Write the token cache of a config's sources to `out`, or continue one that was begun.

    jobs: processes

    The files are the same for any number of processes and after any interruption. Raises UserError
    for bad input and if `out` contains anything else, RunError for failures of the machine.
    """
    began = time.perf_counter()
    wanted = _what_counts(config)
    settings, work = data_settings(wanted), out / WORK
    _make(out, work)
    with RunLock(work, "tokenize"), room_needed():
        manifest, tokenizer = _begin(wanted, settings, out, work)
        paths = [out / f"{name}.idx" for name in file_names(manifest.labels)]
        _write(manifest, tokenizer, reading_of(settings, work), paths, jobs, progress)
        for folder in (PARTS, "footers"):
            shutil.rmtree(work / folder, ignore_errors=True)
    descriptions = [json.loads(path.with_suffix(".json").read_text("utf-8")) for path in paths]
    keys = ("documents", "tokens", "dropped", "replaced", "skipped")
    sums = {key: sum(one[key] for one in descriptions) for key in keys}
    files = tuple(path.name for path in paths)
    return Tokenized(files, seconds=time.perf_counter() - began, **sums)


def file_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Return a different file name for each label, of letters, digits, dots and dashes."""
    return distinct(re.sub(r"[^\w.-]+", "-", label).strip("-._") or "source" for label in labels)


def _what_counts(config: schema.Config) -> schema.Config:
    """Return a config with only those values that can change a token; the rest is not set."""
    fields = {"path", "name", "split", "revision", "text_column", "columns", "document"}
    sources = tuple(
        schema.SourceConfig(**source.model_dump(include=fields, exclude_unset=True))
        for source in config.data.sources
    )
    data = schema.DataConfig(
        sources=sources,
        heldout=0.0,
        lanes=1,  # reading needs only one
        on_bad_unit=config.data.on_bad_unit,
        cache_gb=config.data.cache_gb,
    )
    # It is trained on documents that the seed chooses.
    trains = isinstance(config.model.tokenizer, schema.TrainTokenizer)
    shape = {} if config.model.from_ else {"model_type": "llama"}  # unused, but must load
    return schema.Config(
        run=schema.RunConfig(seed=config.run.seed) if trains else schema.RunConfig(),
        model=config.model.model_copy(update={"config": shape}),
        data=data,
        chat=schema.ChatConfig(template=config.chat.template),  # which adds tokens
        preference=config.preference,  # with one, no source is a text
        training=schema.TrainingConfig(steps=1),
        distributed=config.distributed,
    )


def _make(out: Path, work: Path) -> None:
    """Make the directory. Raises UserError if it contains anything that is not of this command."""
    if out.exists() and not out.is_dir():
        raise UserError(Problem("--out", out, "a directory; there is a file of that name"))
    if out.is_dir() and any(out.iterdir()) and not work.is_dir():
        expected = "a new or empty directory, or one that this command began"
        raise UserError(Problem("--out", out, expected))
    with usable("--out", out, "a directory that can be written"):
        work.mkdir(parents=True, exist_ok=True)


def _begin(
    config: schema.Config, settings: DataSettings, out: Path, work: Path
) -> tuple[DataManifest, Tokenizer]:
    """Return the manifest and tokenizer, new ones or those of the command that began here."""
    # It imports torch, which takes three seconds; `repack` and the processes need none.
    from llmtrain.training.start.prepare import load_manifest, write_data

    record = work / contents.CONFIG
    begun = record.exists() and (work / contents.MANIFEST).exists()
    if begun:
        _refuse(changes(bind(load_config(record)).binding, bind(config).binding), out)
    else:
        for entry in (work / contents.TOKENIZER, work / PARTS):
            shutil.rmtree(entry, ignore_errors=True)
        contents.write_atomically(record, dump(config).encode())
        surveyed = survey(settings, 1, work)
        # Raise UserError with every source that has no texts to tokenize.
        cached = "documents of text; a token cache is tokenized already"
        talks = "documents of text: a token cache cannot say which tokens of a turn are trained"
        if settings.preference.answers:
            talks = "documents of text: a token cache cannot say which answer is the better one"
        refused = (one for one in surveyed.sources if one.cached or one.form is not None)
        raise_any(Problem("data.sources", s.path, cached if s.cached else talks) for s in refused)
        write_data(config, surveyed, work, None)
    manifest = load_manifest(config, work)
    tokenizer = open_tokenizer(work / contents.TOKENIZER, manifest.tokenizer.backend)
    if begun:
        try:
            check(manifest, settings, DocumentEncoder(tokenizer))
        except UserError as error:  # its remedies are written for a run
            problems = [replace(problem, remedy=_PUT_BACK) for problem in error.problems]
            raise UserError(*problems) from error
    _copy(work / contents.TOKENIZER, out / contents.TOKENIZER)
    return manifest, tokenizer


def _refuse(changed: Sequence[Change], out: Path) -> None:
    expected = f"with which {out} began"
    raise_any([Problem(key, new, f"{old}, {expected}", _PUT_BACK) for key, old, new in changed])


def _copy(tokenizer: Path, path: Path) -> None:
    """Copy the tokenizer by a rename, so that the copy is complete or absent."""
    if not path.exists():
        partial = tokenizer.with_name(f"{tokenizer.name}.copy")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(tokenizer, partial)
        partial.rename(path)


def _write(
    manifest: DataManifest,
    tokenizer: Tokenizer,
    reading: Reading,
    paths: Sequence[Path],
    jobs: int,
    progress: Progress,
) -> None:
    """Write the `.bin` and `.idx` files of the sources that have none yet."""
    code, work = dtype_code(tokenizer.length), Path(str(reading.run_dir))
    missing = [k for k, path in enumerate(paths) if not path.exists()]
    for left_over in [*work.glob(f"{PARTS}/*/.*.partial"), *paths[0].parent.glob(".*.partial")]:
        left_over.unlink()
    tasks = [task for k in missing for task in _tasks(manifest, k, code, reading)]
    for folder in {task.path.parent for task in tasks}:
        folder.mkdir(parents=True, exist_ok=True)
    known = [counts_of(task.path, task.code) for task in tasks]
    each_left(write_part, tasks, known, jobs, attrgetter("tokens"), progress)
    for k in missing:
        parts = [task.path for task in _tasks(manifest, k, code, reading)]
        source = manifest.sources[k]
        origin = {"source": source.label, "path": source.path, "revision": source.revision}
        _join(parts, paths[k], code, describe_tokenizer(tokenizer) | origin)


def _tasks(manifest: DataManifest, k: int, code: int, reading: Reading) -> Iterator[Task]:
    source, backend = manifest.sources[k], manifest.tokenizer.backend
    work = Path(str(reading.run_dir))
    for u, unit in enumerate(source.units):
        # Only the unit's own part of the source, since each task is sent to a process.
        alone = replace(source, files=(source.files[unit.file],), units=())
        path = work / PARTS / f"{k}" / f"part-{u:08d}"
        tokenizer = work / contents.TOKENIZER
        yield Task(alone, unit._replace(file=0), path, code, tokenizer, backend, reading)


def _join(parts: Sequence[Path], path: Path, code: int, origin: dict[str, object]) -> None:
    """Write a source's description, and after it the `.bin` and `.idx` files."""
    description = origin | total(parts, code)._asdict()
    text = json.dumps(description, indent=2, ensure_ascii=False) + "\n"
    contents.write_atomically(path.with_suffix(".json"), text.encode())
    join(parts, path, code)
    shutil.rmtree(parts[0].parent)


@dataclass(frozen=True, slots=True)
class Repacked:
    """What is in DIR after the command.

    files: in order of their names
    rows: of all files together
    """

    files: tuple[str, ...]
    rows: int
    seconds: float


def repack(
    path: str, out: Path, group_mb: float, text_column: str, jobs: int, progress: Progress
) -> Repacked:
    """Rewrite each file of `path`, a directory, file or glob, to `out`; keep complete files there.

    group_mb: MiB of decoded data in a row group
    text_column: the column for the lines of text files
    jobs: processes, each with one file at a time

    Raises UserError for bad input and if `out` contains other files, RunError if the disk fails.
    """
    began = time.perf_counter()
    tasks = _rewrites(path, out, int(group_mb * 2**20), text_column)
    # Raise UserError for files in `out` that this command did not write; delete partial ones.
    targets = [task.target for task in tasks]
    if out.exists() and not out.is_dir():
        raise UserError(Problem("--out", out, "a directory; there is a file of that name"))
    ours, left_over = set(targets), set(out.rglob(".*.partial"))
    existing = [file for file in sorted(out.rglob("*")) if file.is_file() and file not in left_over]
    others = [file for file in existing if file not in ours or made_of(file) is None]
    expected = "a directory with nothing but files that this command wrote from PATH"
    raise_any(bounded([Problem("--out", str(file), expected) for file in others], "--out"))
    for file in left_over:
        file.unlink()
    known = [finished_rows(task) for task in tasks]
    rows = each_left(rewrite, tasks, known, jobs, int, progress)
    files = tuple(task.target.relative_to(out).as_posix() for task in tasks)
    return Repacked(files, rows, time.perf_counter() - began)


def _rewrites(path: str, out: Path, group_bytes: int, text_column: str) -> list[Rewrite]:
    if not is_local(path):
        expected = "a file, a directory or a glob on this machine"
        remedy = f"of the Hub: hf download {path} --repo-type dataset --local-dir DIR, then DIR"
        raise UserError(Problem("PATH", path, expected, remedy))
    root = Path(locate(schema.SourceConfig(path=path), "PATH"))
    files = sorted(list_files(path, root, "PATH"))
    if out.resolve() == root.resolve() or any(_inside(file, out) for file in files):
        raise UserError(Problem("--out", out, f"a directory of its own, not that of {path}"))
    if Path(path).is_dir() and _inside(out, root):
        raise UserError(Problem("--out", out, f"a directory outside {path}"))
    unknown = [file for file in files if file_format(file.name, KINDS) is None]
    expected = ".parquet, .arrow, .jsonl, .json, .txt, .csv or .tsv; .gz or .zst after lines"
    remedy = "move it away, or name the files with a glob"
    raise_any(bounded([Problem("PATH", str(f), expected, remedy) for f in unknown], "PATH"))
    tasks: dict[Path, Rewrite] = {}
    for file in files:
        name = file.name if file.suffix == ".parquet" else f"{file.name}.parquet"
        target = (out / file.relative_to(root)).with_name(name)
        if target in tasks:
            expected = f"a name that does not lead to {target}, as {tasks[target].source} does"
            raise UserError(Problem("PATH", str(file), expected, "rename one of the two"))
        tasks[target] = Rewrite(file, target, group_bytes, text_column)
    return list(tasks.values())


def _inside(path: Path, directory: Path) -> bool:
    return path.resolve().is_relative_to(directory.resolve())
