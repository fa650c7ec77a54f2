"""Finds which documents were in which blocks, by walking the lanes again.

    state at a save  ─►  replay: the lanes' blocks again  ─►  origins: file, row, id, title, url

Nothing is stored for it: a block is a pure function of the manifest, the lanes' cursors at some
earlier block, and the weights in force. So only the lanes in question are walked, and only from
that block on.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from llmtrain.data.documents.reader import DESCRIBING, Reader, row_order, rows_of, unit_at
from llmtrain.data.lanes import Block, Lanes
from llmtrain.data.manifest import DataManifest
from llmtrain.data.packing import Span
from llmtrain.data.sources import token_cache as token_cache
from llmtrain.data.state import DataState
from llmtrain.data.tokens.encode import DocumentEncoder
from llmtrain.data.tokens.tokenizer import Tokenizer


class LaneDocument(NamedTuple):
    """A document by its place in the order of a lane, as in `Span`.

    The documents of a token cache are numbered: row is the number, lane and unit are −1.
    """

    source: int
    lane: int
    epoch: int
    unit: int
    row: int


class Origin(NamedTuple):
    """Where a document was read, and the columns of its row that describe it.

    file: relative to its source
    group: the row group; None in files without row groups
    at: the row of that group, the byte of the file at which its line begins, or the document's
        number in a token cache
    id, title, url: None if the row has no such column; in a token cache the id is the document's
        number in the source
    """

    file: str
    group: int | None
    at: int
    id: str | None
    title: str | None
    url: str | None


def replay(
    manifest: DataManifest,
    encoder: DocumentEncoder,
    reader: Reader,
    state: DataState,
    first: int,
    stop: int,
) -> Iterator[tuple[int, Block]]:
    """Yield blocks first … stop − 1 with their numbers. Raises as reading does.

    state: the stream's state at block `first` or before it
    """
    lanes = Lanes(manifest, encoder, reader, state.cursors, state.next_block)
    for g in range(first, stop):
        yield g, lanes.take(g)


def document_of(manifest: DataManifest, g: int, block: Block, span: Span) -> LaneDocument:
    """Return the document to which a span of block g belongs."""
    k, lane = block.source, g % manifest.lanes
    source = manifest.sources[k]
    if not source.cached:
        return LaneDocument(k, lane, span.epoch, span.unit, span.row)
    if manifest.packing == "concat":
        return LaneDocument(k, -1, span.epoch, -1, span.row)
    u = unit_at(manifest, k, span.epoch, lane, span.unit)  # walked in lanes, like text
    numbers = token_cache.rows_of(source, source.units[u]).numbers
    row = row_order(manifest, k, u, span.epoch, len(numbers))[span.row]
    return LaneDocument(k, -1, span.epoch, -1, int(numbers[row]))


def is_whole(
    manifest: DataManifest, tokenizer: Tokenizer, document: LaneDocument, block: Block, span: Span
) -> bool:
    """Return whether a span that begins its document has all of the document.

    Sequences of a conversation are never cut. A text ends with the first end-of-text token, since
    nothing in it is encoded as one. Documents of a token cache may have any tokens, so their length
    decides.
    """
    source = manifest.sources[document.source]
    if source.form is not None:
        return True
    if not source.cached:
        return bool(block.ids[span.at + span.stop - span.start - 1] == tokenizer.eos)
    _, begin, end = token_cache.open_documents(source).span(document.row)
    return span.stop == end - begin


def text_of(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Return the text of a document's ids, or of a part of them, without begin and end token."""
    return tokenizer.decode(token_cache.text_ids(ids, tokenizer))


def origins(
    manifest: DataManifest, reader: Reader, documents: Collection[LaneDocument]
) -> dict[LaneDocument, Origin]:
    """Return where documents come from. Each unit that one of them is in is read again."""
    wanted: dict[tuple[int, int], list[LaneDocument]] = defaultdict(list)
    origin_of: dict[LaneDocument, Origin] = {}
    for document in documents:
        k, lane, epoch, position, row = document
        if manifest.sources[k].cached:
            file, at = token_cache.place_of(manifest.sources[k], row)
            origin_of[document] = Origin(file, None, at, str(row), None, None)
        else:
            wanted[k, unit_at(manifest, k, epoch, lane, position)].append(document)
    for (k, u), asked in wanted.items():
        source, unit = manifest.sources[k], manifest.sources[k].units[u]
        rows = rows_of(reader, source, unit)
        file, group = source.files[unit.file].name, unit.group if unit.group >= 0 else None
        described = (source.id_column or "id", *DESCRIBING)
        for document in asked:
            at, columns = rows[row_order(manifest, k, u, document.epoch, len(rows))[document.row]]
            origin_of[document] = Origin(file, group, at, *map(columns.get, described))
    return origin_of
