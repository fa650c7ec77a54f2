"""`llmtrain data tokenize`: write the documents of a config's sources as a token cache.

    DIR/NAME.bin, NAME.idx   all usable documents of a source, in order of the manifest
    DIR/NAME.json            where they come from, and which tokenizer was used
    DIR/tokenizer/           that tokenizer
    DIR/.tokenize/           config, manifest and finished parts: where the same command continues

After the command has finished, the config, the manifest and a copy of the tokenizer stay in
`.tokenize/`. The same command compares itself with them, finds everything done, and restores
DIR/tokenizer/ if it is missing. The lock stays too: if it were deleted, one command could hold the
deleted file while another creates a new one.

Nothing is held out here: a run that trains on a cache decides that itself, by document number.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from llmtrain.config.binding import Change, bind, changes, data_settings, dump
from llmtrain.config.load import load_config
from llmtrain.config.schema import (
    ChatConfig,
    Config,
    DataConfig,
    RunConfig,
    SourceConfig,
    TrainingConfig,
    TrainTokenizer,
)
from llmtrain.data.documents.reader import Reading, reading_of
from llmtrain.data.manifest import Manifest, Source
from llmtrain.data.sources.local import distinct
from llmtrain.data.survey import check, survey
from llmtrain.data.token_cache.file import dtype_code
from llmtrain.data.token_cache.source import describe_tokenizer
from llmtrain.data.token_cache.write import Task, counts_of, join, room_needed, total, write_part
from llmtrain.data.tokens.encode import Encoder
from llmtrain.data.tokens.tokenizer import Tokenizer, open_tokenizer
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.rundir import contents
from llmtrain.rundir.lock import RunLock
from llmtrain.tools.data.pool import Progress, each_left
from llmtrain.training.start.prepare import load_manifest, write_data

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


def tokenize(config: Config, out: Path, jobs: int, progress: Progress) -> Tokenized:
    """Write the token cache of a config's sources to `out`, or continue one that was begun.

    jobs: processes

    The files are the same for any number of processes and after any interruption. Raises UserError
    for bad input and if `out` contains anything else, RunError for failures of the machine.
    """
    began = time.perf_counter()
    wanted = _what_counts(config)
    work = out / WORK
    _make(out, work)
    with RunLock(work, "tokenize"), room_needed():
        manifest, tokenizer = _begin(wanted, out, work)
        paths = [out / f"{name}.idx" for name in file_names(manifest.labels)]
        _write(manifest, tokenizer, reading_of(data_settings(wanted), work), paths, jobs, progress)
        for folder in (PARTS, "footers"):
            shutil.rmtree(work / folder, ignore_errors=True)
    said = [json.loads(path.with_suffix(".json").read_text("utf-8")) for path in paths]
    keys = ("documents", "tokens", "dropped", "replaced", "skipped")
    sums = {key: sum(one[key] for one in said) for key in keys}
    files = tuple(path.name for path in paths)
    return Tokenized(files, seconds=time.perf_counter() - began, **sums)


def file_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Return a different file name for each label, of letters, digits, dots and dashes."""
    return distinct(re.sub(r"[^\w.-]+", "-", label).strip("-._") or "source" for label in labels)


def _what_counts(config: Config) -> Config:
    """Return a config with only those values that can change a token; the rest is not set."""
    kept = {"path", "name", "split", "revision", "text_column", "columns", "document"}
    sources = tuple(
        SourceConfig(**source.model_dump(include=kept, exclude_unset=True))
        for source in config.data.sources
    )
    data = DataConfig(
        sources=sources,
        heldout=0.0,
        lanes=1,  # reading needs only one
        on_bad_unit=config.data.on_bad_unit,
        cache_gb=config.data.cache_gb,
    )
    trains = isinstance(config.model.tokenizer, TrainTokenizer)  # on documents chosen by the seed
    shape = {} if config.model.from_ else {"model_type": "llama"}  # unused, but must load
    return Config(
        run=RunConfig(seed=config.run.seed) if trains else RunConfig(),
        model=config.model.model_copy(update={"config": shape}),
        data=data,
        chat=ChatConfig(template=config.chat.template),  # which adds tokens
        training=TrainingConfig(steps=1),
        distributed=config.distributed,
    )


def _make(out: Path, work: Path) -> None:
    """Make the directory. Raises UserError if it contains anything that is not of this command."""
    if out.exists() and not out.is_dir():
        raise UserError(Problem("--out", out, "a directory; there is a file of that name"))
    if out.is_dir() and any(out.iterdir()) and not work.is_dir():
        expected = "a new or empty directory, or one that this command began"
        raise UserError(Problem("--out", out, expected))
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        expected = f"a directory that can be written ({error.strerror})"
        raise UserError(Problem("--out", out, expected)) from error


def _begin(config: Config, out: Path, work: Path) -> tuple[Manifest, Tokenizer]:
    """Return the manifest and tokenizer, new ones or those of the command that began here."""
    record = work / contents.CONFIG
    begun = record.exists() and (work / contents.MANIFEST).exists()
    if begun:
        _refuse(changes(bind(load_config(record)).binding, bind(config).binding), out)
    else:
        for entry in (work / contents.TOKENIZER, work / PARTS):
            shutil.rmtree(entry, ignore_errors=True)
        contents.write_atomically(record, dump(config).encode())
        found = survey(data_settings(config), 1, work)
        _check_texts(found.sources)
        write_data(config, found, work, None)
    manifest = load_manifest(config, work)
    tokenizer = open_tokenizer(work / contents.TOKENIZER, manifest.tokenizer.backend)
    if begun:
        try:
            check(manifest, data_settings(config), Encoder(tokenizer))
        except UserError as error:  # its remedies are written for a run
            problems = [replace(problem, remedy=_PUT_BACK) for problem in error.problems]
            raise UserError(*problems) from error
    _copy(work / contents.TOKENIZER, out / contents.TOKENIZER)
    return manifest, tokenizer


def _check_texts(sources: Sequence[Source]) -> None:
    """Raise UserError with every source that has no texts to tokenize."""
    cached = "documents of text; a token cache is tokenized already"
    talks = "documents of text: a token cache cannot say which tokens of a turn are trained"
    refused = (one for one in sources if one.cached or one.form is not None)
    raise_any(Problem("data.sources", s.path, cached if s.cached else talks) for s in refused)


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
    manifest: Manifest,
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
    _write_parts(tasks, jobs, progress)
    for k in missing:
        parts = [task.path for task in _tasks(manifest, k, code, reading)]
        source = manifest.sources[k]
        origin = {"source": source.label, "path": source.path, "revision": source.revision}
        _join(parts, paths[k], code, describe_tokenizer(tokenizer) | origin)


def _tasks(manifest: Manifest, k: int, code: int, reading: Reading) -> Iterator[Task]:
    source, backend = manifest.sources[k], manifest.tokenizer.backend
    work = Path(str(reading.run_dir))
    for u, unit in enumerate(source.units):
        # Only the unit's own part of the source, since each task is sent to a process.
        alone = replace(source, files=(source.files[unit.file],), units=())
        path = work / PARTS / f"{k}" / f"part-{u:08d}"
        tokenizer = work / contents.TOKENIZER
        yield Task(alone, unit._replace(file=0), path, code, tokenizer, backend, reading)


def _write_parts(tasks: Sequence[Task], jobs: int, progress: Progress) -> None:
    for folder in {task.path.parent for task in tasks}:
        folder.mkdir(parents=True, exist_ok=True)
    there = [counts_of(task.path, task.code) for task in tasks]
    each_left(write_part, tasks, there, jobs, attrgetter("tokens"), progress)


def _join(parts: Sequence[Path], path: Path, code: int, origin: dict[str, object]) -> None:
    """Write a source's description, and after it the `.bin` and `.idx` files."""
    description = origin | total(parts, code)._asdict()
    text = json.dumps(description, indent=2, ensure_ascii=False) + "\n"
    contents.write_atomically(path.with_suffix(".json"), text.encode())
    join(parts, path, code)
    shutil.rmtree(parts[0].parent)
