"""The manifest: the sources, their files, their units and what is held out.

The order of the data depends on it alone. Rank 0 writes it once, as `manifest.json`. Every later
start and every other rank reads it, and does not list, count or infer anything again. Paths of this
machine are not part of it: files are named relative to their source, so the same data under another
path is the same data.

    source ── files (sorted by path) ── units (in file order) ── rows
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import xxhash

from llmtrain.config.binding import DataSettings, changes, way_out
from llmtrain.config.schema import Answers, PackingName, SourceConfig
from llmtrain.data.chat.rows import READING, answers_of
from llmtrain.data.sources import local
from llmtrain.data.tokens.tokenizer import Backend
from llmtrain.errors import Problem, UserError
from llmtrain.types import JsonMapping, JsonObject

VERSION = 1
_PLAIN = (
    *("seq_len", "packing", "document_mask", "own_evaluation"),
    *("seed", "lanes", "made_with"),
)


ELEMENTS = -2


class Unit(NamedTuple):
    """A part of a file that is read at once.

    file: index in the source's files
    group: row group, of Arrow the record batch; −1 = a byte range of lines or rows of CSV, or a
        whole file, compressed or a document; ELEMENTS = a byte range of a JSON array
    start, stop: rows of the group, or bytes of the file

    In a token cache `file` is an `.idx`, `group` is 0, and the rows are documents.
    """

    file: int
    group: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Source:
    """One source, and where it is now.

    root: directory, or hf://datasets/ID@COMMIT
    id_column: None = the text is hashed instead of an id
    form: of its rows, one of those in `chat.rows.NEEDED`; None = its documents are texts
    columns: names of chat columns → the source's own, where these differ
    reading: how rows of conversations are read, as for `chat.rows.to_example`
    whole_files: whether each file is one document (`document: file`)
    threshold: a document of a unit in `heldout_units` is held out if its hash is below it
    """

    label: str
    path: str
    root: str
    remote: bool
    revision: str | None
    files: tuple[local.File, ...]
    text_column: str
    id_column: str | None
    weight: float
    max_epochs: int | None
    units: tuple[Unit, ...]
    heldout_units: tuple[int, ...] = ()
    threshold: int = 0
    form: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict, hash=False)
    reading: int = READING
    whole_files: bool = False

    @property
    def cached(self) -> bool:
        """Whether it is a token cache, not text. Its units are then documents of an `.idx`."""
        return any(local.is_index(file.name) for file in self.files)

    def where(self, file: int) -> str:
        """Return the path or hf:// address of a file."""
        return f"{self.root}/{self.files[file].name}"

    def to_json(self) -> JsonObject:
        """Return its entry of `manifest.json`."""
        chat = {"form": self.form, "names": self.columns, "reading": self.reading}
        return {
            "label": self.label,
            "path": self.path,
            "remote": self.remote,
            "root": self.root if self.remote else None,
            "revision": self.revision,
            "columns": {"text": self.text_column, "id": self.id_column},
            **(chat if self.form else {}),
            **({"document": "file"} if self.whole_files else {}),
            "weight": self.weight,
            "max_epochs": self.max_epochs,
            "heldout": {"units": self.heldout_units, "threshold": self.threshold},
            "files": [file._asdict() for file in self.files],
            "units": self.units,  # [file, row group or -1, start, stop]
        }

    @staticmethod
    def from_json(entry: JsonObject, root: str, weight: float) -> Source:
        """Return the source of an entry, with its place and weight as configured now."""
        return Source(
            **{key: entry[key] for key in ("label", "path", "remote", "revision", "max_epochs")},
            root=root,
            files=tuple(local.File(**file) for file in entry["files"]),
            text_column=entry["columns"]["text"],
            id_column=entry["columns"]["id"],
            form=entry.get("form"),
            columns=entry.get("names", {}),
            reading=entry.get("reading", 1) if "form" in entry else READING,
            whole_files=entry.get("document") == "file",
            weight=weight,
            units=tuple(Unit(*unit) for unit in entry["units"]),
            heldout_units=tuple(entry["heldout"]["units"]),
            threshold=entry["heldout"]["threshold"],
        )

    def format(self, file: int) -> local.Format:
        """Return how a file is read; a kind of "" if that is unknown."""
        return local.file_format(self.files[file].name) or local.Format("", None)


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """Facts of the tokenizer; all but `versions` must be the same at a later start.

    digest: of its files
    backend: the library that encodes
    probe: digest of the ids of probe texts
    length: ids are below it
    versions: of the libraries, for messages only; other versions that give the same ids are
        accepted
    """

    digest: str
    backend: Backend
    probe: str
    length: int
    versions: str


@dataclass(frozen=True, slots=True)
class ChatFacts:
    """What decides the ids and masks of conversations; all of it must be the same later.

    template: digest of the chat template; "" = no template, where no form needs one
    settings: fields of `chat.Settings`, the date among them
    end_of_turn: its text and id, what the template puts before an answer, and further tokens that
        end a turn, if there are any; None = no template
    probe: digest of ids and masks of made-up conversations
    arguments: how the template takes the arguments of calls, `object` or `string`
    """

    template: str
    settings: JsonMapping
    end_of_turn: JsonMapping | None
    probe: str
    arguments: str = "object"

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a turn; none without a template."""
        end = self.end_of_turn
        return (end["id"], *end.get("others", {}).values()) if end else ()

    @property
    def calls(self) -> bool:
        """Whether calls of tools differ from answers in how they end or are written.

        A run that began before they were looked at has them as answers, and continues so.
        """
        end = self.end_of_turn or {}
        return self.arguments != "object" or "others" in end or "after_call" in end

    def to_json(self) -> JsonObject:
        """Return the fields; arguments that are objects are left out, as in manifests of old."""
        facts = asdict(self)
        if self.arguments == "object":
            del facts["arguments"]
        return facts


@dataclass(frozen=True)
class DataManifest:
    """Everything that decides which tokens are in block g.

    document_mask: documents of a block do not see each other, and no label crosses their border
    own_evaluation: `evaluation.sources` is set, so nothing is held out
    made_with: the config values from which the manifest was made, by key
    chat: None = no source has conversations
    """

    sources: tuple[Source, ...]
    tokenizer: TokenizerFacts
    seq_len: int
    packing: PackingName
    document_mask: bool
    own_evaluation: bool
    seed: int
    lanes: int
    made_with: Mapping[str, object]
    chat: ChatFacts | None = None

    @property
    def weights(self) -> tuple[float, ...]:
        """Shares of the sources, not normalised."""
        return tuple(source.weight for source in self.sources)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Names of the sources in metrics."""
        return tuple(source.label for source in self.sources)

    @property
    def answers(self) -> Answers | None:
        """What the rows of all sources are: pairs of answers, judged ones, or None for all else."""
        return answers_of(self.sources[0].form)

    @property
    def hides_documents(self) -> bool:
        """Whether a block may have several documents that the model must hide from each other."""
        return self.document_mask and self.packing != "single"

    @property
    def always_full(self) -> bool:
        """Whether every block has `seq_len` trained tokens, whatever is read."""
        endless = all(source.max_epochs is None for source in self.sources)
        return self.packing == "concat" and not self.document_mask and endless

    @property
    def parts(self) -> Mapping[str, str]:
        """The parts of the fingerprint by name, each as a short value that shows what differs."""
        sources = self.sources
        forms = [
            [source.form, dict(source.columns), *([source.reading] if source.reading > 1 else ())]
            for source in sources
        ]
        chat = {"chat": _short([self.chat.to_json(), forms])} if self.chat else {}
        return {
            **chat,
            "files": _short([[list(file) for file in source.files] for source in sources]),
            "units": _short([[list(unit) for unit in source.units] for source in sources]),
            "columns": _short([[source.text_column, source.id_column] for source in sources]),
            "held-out documents": _short([[s.heldout_units, s.threshold] for s in sources]),
            "tokenizer": self.tokenizer.digest,
            "tokenizer backend": self.tokenizer.backend,
            "tokenizer probe": self.tokenizer.probe,
            "seq_len": str(self.seq_len),
            "packing": self.packing,
            "document_mask": str(self.document_mask).lower(),
            "max_epochs": str([source.max_epochs for source in sources]),
            "evaluation.sources": str(self.own_evaluation).lower(),
            "seed": str(self.seed),
            "lanes": str(self.lanes),
        }

    @property
    def fingerprint(self) -> str:
        """Hash of `parts`, 16 hex digits. It is the same if and only if the blocks are the same."""
        return _short(self.parts)

    def to_bytes(self) -> bytes:
        """Return the content of `manifest.json`."""
        content = {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            **{key: getattr(self, key) for key in _PLAIN},
            "tokenizer": asdict(self.tokenizer),
            **({"chat": self.chat.to_json()} if self.chat else {}),
            "sources": [source.to_json() for source in self.sources],
        }
        return (json.dumps(content, separators=(",", ":")) + "\n").encode()


def glance(path: Path) -> JsonObject:
    """Return the content of a stored manifest, without a look at the data.

    Raises UserError for a file with something else in it.
    """
    try:
        stored: JsonObject = json.loads(path.read_text("utf-8"))
    except ValueError:
        stored = {}
    if not isinstance(stored, dict) or not {*_PLAIN, "sources", "tokenizer"} <= stored.keys():
        expected = "the manifest of a run, as this program has written it"
        remedy = "restore it, or begin again in another run.dir"
        raise UserError(Problem(str(path), None, expected, remedy))
    return stored


def has_other_sources(path: Path, settings: DataSettings) -> bool:
    """Whether these settings have other sources than those that a stored manifest was made from.

    They differ if the number of sources or one of a source's keys differs, or if a path differs and
    other files are there. A source whose files were moved is the same source.
    """
    stored = glance(path)
    changed = changes(stored["made_with"], settings.values)
    if any(change.key.startswith("data.sources.") for change in changed):
        return True
    pairs = zip(stored["sources"], settings.data.sources, strict=True)
    return any(
        now.path != entry["path"] and not _was_moved(entry, now, f"data.sources.{k}.path")
        for k, (entry, now) in enumerate(pairs)
    )


def _was_moved(entry: JsonObject, now: SourceConfig, key: str) -> bool:
    """Whether the new path is on this machine and has exactly the files of a stored source."""
    if entry["remote"] or not (now.path == local.SAMPLE or local.is_local(now.path)):
        return False
    stored = tuple(local.File(**file) for file in entry["files"])
    try:
        root = Path(local.locate(now, key))
        existing = local.resolve(now, key).files
    except UserError:
        return False  # reported when the source is read
    # A run may have begun with all splits of a directory, see `sources/local.py`.
    moved = [root / file.name for file in stored]
    same = all(
        path.is_file() and (path.stat().st_size, local.edges_digest(path)) == file[1:]
        for path, file in zip(moved, stored, strict=True)
    )
    return same and {file.name for file in existing} <= {file.name for file in stored}


def load(path: Path, configured: Sequence[SourceConfig]) -> DataManifest:
    """Return the stored manifest, with paths and weights of its sources as configured now.

    Raises UserError if the number of sources differs or one of them no longer exists.
    """
    stored = glance(path)
    if len(stored["sources"]) != len(configured):
        expected = f"the {len(stored['sources'])} sources that the run began with"
        remedy = f"take the sources of the run's config.yaml, or {way_out('data.sources')}"
        raise UserError(Problem("data.sources", f"{len(configured)} sources", expected, remedy))
    sources = []
    for index, (entry, now) in enumerate(zip(stored["sources"], configured, strict=True)):
        root = entry["root"] if entry["remote"] else local.locate(now, f"data.sources.{index}.path")
        sources.append(Source.from_json(entry, root, now.weight))
    return DataManifest(
        sources=tuple(sources),
        tokenizer=TokenizerFacts(**stored["tokenizer"]),
        chat=ChatFacts(**stored["chat"]) if "chat" in stored else None,
        **{key: stored[key] for key in _PLAIN},
    )


def _short(value: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())
