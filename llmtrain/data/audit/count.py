"""Counts the documents of a source, or estimates their number from a sample, and so an epoch.

    size of a unit     known without reading it: its share of the text column, or of the file
    sampled units      ─►  documents, bytes of text
    some of their text ─►  tokens per byte of text
    tokens, packing    ─►  blocks of an epoch

A sample represents all units of the same format only, since rows of parquet, bytes of lines and
bytes of compressed files cannot be compared. Units are drawn at random, because neighbours are
alike (a dump's oldest pages are its longest). The trap: a few long documents can be half of the
text, so text is scaled by its known size, not by rows.

A run trains on conversations exactly as often as asked. So at its start their blocks are counted by
walking all lanes to their end, each conversation being tokenized once.
"""

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle, pairwise, repeat
from typing import NamedTuple

import numpy as np
import xxhash

from llmtrain import system
from llmtrain.data.audit.ledger import text_of
from llmtrain.data.documents.lines import MIB
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.documents.units import GROUP_LIMIT
from llmtrain.data.file_parts import text_size
from llmtrain.data.lanes import Lanes, document
from llmtrain.data.manifest import DataManifest, Source
from llmtrain.data.packing import START, Document, open_packing, window_tokens
from llmtrain.data.sources import token_cache as token_cache
from llmtrain.data.state import DataState
from llmtrain.data.tokens.encode import DocumentEncoder, Encoded
from llmtrain.hashing import mix, permutation

SAMPLED_UNITS = 64  # of each format of a source
SAMPLED_BYTES = MIB // 4  # tokenized from each of these units, unless a number of rows is asked for
COUNTED_BYTES = 16 * MIB  # a source of at most that much text is counted for an epoch
COUNTED_CHAT_BYTES = 512 * MIB  # of conversations, which end a run when they are used up
PACKED_WINDOWS = 4
BATCH = 64  # documents tokenized at once
NO_IDS = np.zeros(0, np.int32)
NO_ID = np.int32(0)


class Amount(NamedTuple):
    """Usable documents, the UTF-8 bytes of their text, and their tokens with separators."""

    documents: float
    bytes: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Counted:
    """The numbers of a source.

    exact: every row was looked at; if not, all but `looked_at`, `duplicates` and `lengths` are
        estimates
    all: of all documents
    training: of documents that are not held out
    dropped: rows that are null, empty or blank
    replaced: documents with invalid UTF-8
    looked_at: rows
    duplicates: texts that were seen before
    lengths: tokens of a document → how many of the documents that were looked at
    chat: what happened to the conversations that were looked at, as in `encode.Encoded`
    answers: of each pair that was looked at, the tokens of its prompt and of both answers; of a
        judged answer, of its prompt and of the answer
    """

    exact: bool
    all: Amount
    training: Amount
    dropped: float
    replaced: float
    looked_at: int
    duplicates: int
    lengths: Counter[int]
    chat: Counter[str]
    answers: Sequence[tuple[int, ...]] = ()


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over the training documents of all sources.

    tokens: with those that separate documents
    blocks: of `seq_len` trained positions
    exact: whether they were counted, not estimated from a sample
    until_end: blocks until every source has ended; None = not counted, as are those below
    passes: over the source that is read most often until then
    first: number of the first block that is not padding; None = all are
    trained: tokens that are trained until then
    """

    documents: int
    tokens: int
    blocks: int
    exact: bool
    until_end: int | None = None
    passes: int | None = None
    first: int | None = None
    trained: int | None = None


def count_documents(
    manifest: DataManifest, k: int, encoder: DocumentEncoder, reader: Reader, limit: int | None
) -> Counted:
    """Count the documents of source k, or estimate their number from a sample.

    The same seed gives the same sample.

    limit: about how many documents to look at; 0 = all, None = `SAMPLED_BYTES` of each of at most
        `SAMPLED_UNITS` units of each format

    Raises as reading does.
    """
    source = manifest.sources[k]
    counter = _Counter(manifest, k, encoder, reader)
    formats = defaultdict(list)
    for u, unit in enumerate(source.units):
        formats[source.format(unit.file)].append(u)
    each = limit and -(-limit // len(formats))
    parts = [counter.count(units, each) for units in formats.values()]
    exact = all(part[0] for part in parts)
    whole = np.sum([part[1] for part in parts], axis=0).tolist()
    training = np.sum([part[2] for part in parts], axis=0).tolist()
    hashes, (dropped, replaced) = counter.hashes, whole[3:]
    return Counted(
        exact,
        Amount(*whole[:3]),
        Amount(*training[:3]),
        dropped,
        replaced,
        looked_at=len(hashes) + (round(dropped) if exact else 0),
        duplicates=len(hashes) - len(np.unique(hashes)),
        lengths=counter.lengths,
        chat=counter.chat,
        answers=counter.answers,
    )


def epoch(
    manifest: DataManifest,
    encoder: DocumentEncoder,
    reading: Reading,
    known: Sequence[Counted] = (),
    state: DataState | None = None,
) -> Epoch:
    """Count, or estimate, one epoch. Raises UserError or RunError as reading does.

    known: the numbers of each source; those that are exact are not counted again
    state: where a run is now, whose conversations are counted up to `until_end`; None = there is
        no run, and they are no more than text is
    """
    reader = Reader(reading)
    documents = tokens = blocks = 0.0
    exact = True
    for k, source in enumerate(manifest.sources):
        if source.cached:
            stream = token_cache.training_stream(source, manifest.seed)
            amount: tuple[float, float] = stream.num_documents, stream.tokens
        else:
            chat = state is not None and source.form is not None
            most = COUNTED_CHAT_BYTES if chat else COUNTED_BYTES
            one = known[k] if known and known[k].exact else None
            one = one or count_documents(manifest, k, encoder, reader, None)
            if not one.exact and one.training.bytes <= most:
                one = count_documents(manifest, k, encoder, reader, 0)
            amount, exact = one.training[::2], exact and one.exact
        documents, tokens = documents + amount[0], tokens + amount[1]
        blocks += amount[1] * _Counter(manifest, k, encoder, reader).blocks_a_token()
    whole = math.ceil(round(blocks, 6))  # 700 · (1 / 100) is a little more than 7
    estimate = Epoch(round(documents), round(tokens), max(1, whole), exact)
    passes = [one.max_epochs for one in manifest.sources if one.max_epochs is not None]
    if state is None or not exact or len(passes) < len(manifest.sources):
        return estimate
    if not any(one.form is not None for one in manifest.sources):
        return estimate
    first, until_end, trained = _extent(manifest, encoder, reader, state)
    return replace(estimate, until_end=until_end, passes=max(passes), first=first, trained=trained)


class _Document(NamedTuple):
    """A usable document.

    content: its text; in a token cache, what returns its ids
    size: bytes of the text, or number of ids
    held: whether it is held out
    """

    content: str | Callable[[], np.ndarray]
    size: int
    held: bool


class _Piece(NamedTuple):
    """Units that are decoded together, and therefore sampled as one.

    units: indices in their source
    size: of their text as the file stores it, in bytes; in a token cache, in tokens
    rows: 0 = unknown, as in all formats but parquet
    trained: share of the documents that is not held out
    """

    units: tuple[int, ...]
    size: float
    rows: int
    trained: float


class _Counter:
    """Looks at the documents of a source, and remembers what they are."""

    def __init__(
        self, manifest: DataManifest, k: int, encoder: DocumentEncoder, reader: Reader
    ) -> None:
        self.manifest, self.k, self.source = manifest, k, manifest.sources[k]
        self.encoder, self.reader = encoder, reader
        # The ids of a token cache already include separators; conversations have none.
        self.separators = 1 if encoder.tokenizer.bos is None else 2
        if self.source.cached or self.source.form is not None:
            self.separators = 0
        self.hashes: array[int] = array("Q")
        self.lengths: Counter[int] = Counter()
        self.chat: Counter[str] = Counter()
        self.answers: list[tuple[int, ...]] = []

    def count(self, units: Sequence[int], limit: int | None) -> tuple[bool, np.ndarray, np.ndarray]:
        """Look at pieces of these units in random order, and scale the result to all of them.

        Return whether every row was looked at, the numbers of all documents, and of those that are
        not held out: documents, bytes, tokens, dropped, replaced.
        """
        pieces = sorted(self._pieces(units), key=lambda piece: self._key(9, piece.units[0]))
        spread = min(SAMPLED_UNITS, len(pieces))
        met, held, before = np.zeros(5), np.zeros(5), len(self.hashes)
        exact, number = True, 0
        for number, piece in enumerate(pieces if limit is not None else pieces[:spread], 1):
            quota = limit
            if limit:
                left = limit - len(self.hashes) + before
                if left <= 0:
                    number, exact = number - 1, False
                    break
                quota = -(-left // max(1, spread - number + 1))
            exact = self._look(piece, quota, met, held) and exact
        chosen = pieces[:number]
        totals = self._scale(met, chosen, [(piece, 1) for piece in pieces])
        if exact and len(chosen) == len(pieces):
            return True, totals, totals - self._scale(held, pieces, [(p, 1) for p in pieces])
        return False, totals, self._scale(met, chosen, [(p, p.trained) for p in pieces])

    def _scale(
        self, met: np.ndarray, chosen: Sequence[_Piece], shares: Sequence[tuple[_Piece, float]]
    ) -> np.ndarray:
        """Return what `shares` have, if the chosen pieces have what was met.

        shares: pieces, with the share of each that counts

        Documents are scaled by rows where the number of rows is known, else by size, as text is.
        """
        size, rows = sum(piece.size for piece in chosen), sum(piece.rows for piece in chosen)
        by_size = sum(p.size * share for p, share in shares) / size if size else 1.0
        by_rows = sum(p.rows * share for p, share in shares) / rows if rows else by_size
        scaled: np.ndarray = met * (by_rows, by_size, by_size, by_rows, by_rows)
        scaled[2] += self.separators * scaled[0]
        return scaled

    def _look(self, piece: _Piece, limit: int | None, met: np.ndarray, held: np.ndarray) -> bool:
        """Read a piece and tokenize some of its documents; return whether it was all of them.

        limit: how many documents; 0 = all, None = about `SAMPLED_BYTES` of them
        met, held: increased by what all documents have, and those of them that are held out
        """
        documents: list[_Document] = []
        for u in piece.units:
            more, *odd = self._documents(u)
            documents += more
            met[3:] += odd
        sizes = [one.size for one in documents]
        order = permutation(len(documents), self._key(10, piece.units[0]))
        if limit is None:
            limit = 1 + int(np.searchsorted(np.cumsum(np.array(sizes)[order]), SAMPLED_BYTES))
        some = [documents[index] for index in order[: limit or None]]
        nbytes = tokens = 0
        for one, text, encoded in self._encode(some):
            raw, length = text.encode(), len(encoded.ids)
            nbytes, tokens = nbytes + len(raw), tokens + length - self.separators
            if one.held:
                held[:3] += 1, len(raw), length - self.separators
            self.hashes.append(xxhash.xxh3_64_intdigest(raw))
            self.chat.update(encoded.counts)
            if length:  # else `chat` counts why a conversation has none
                self.lengths[length] += 1
            if encoded.trained is not None and (encoded.second or encoded.answer):
                prompt = int(encoded.trained.argmax())  # up to the first token that is trained
                edges = [0, encoded.second, length] if encoded.second else [0, length]
                each = (stop - first - prompt for first, stop in pairwise(edges))
                self.answers.append((prompt, *each))
        size = sum(sizes)
        if self.source.cached:
            met[:3] += len(documents), size * nbytes / max(1, tokens), size
        else:
            met[:3] += len(documents), size, size * tokens / max(1, nbytes)
        return len(some) == len(documents)

    def blocks_a_token(self) -> float:
        """Return the number of blocks per token.

        Packings other than `concat` add padding, which is measured on a few windows.
        """
        manifest = self.manifest
        if manifest.packing == "concat":
            return 1 / manifest.seq_len
        wanted = PACKED_WINDOWS * window_tokens(manifest.seq_len)
        packed: list[Document] = []
        tokens = 0
        # The training documents, again and again: one pass may not fill a window.
        units = cycle(sorted(range(len(self.source.units)), key=partial(self._key, 9)))
        while tokens < wanted:
            documents, *_ = self._documents(next(units))
            # What is held out of a token cache is as long as the rest.
            some = [one for one in documents if self.source.cached or not one.held]
            for _, _, one in self._encode(some):
                if len(one.ids):
                    packed.append(document((0, 0, len(packed)), one, Counter()))
                    tokens += len(one.ids)
                if tokens >= wanted:  # the rest of a unit need not be tokenized
                    break
        end = Document(0, 0, len(packed), NO_IDS, Counter())
        blocks = open_packing(
            manifest.packing,
            lambda *_: chain(packed, repeat(end)),
            manifest.seq_len,
            START,
            pad=self.encoder.tokenizer.pad,
            order=(manifest.seed, 4, self.k, 0),
        )
        return sum(1 for _ in blocks) / tokens

    def _key(self, purpose: int, u: int) -> int:
        return mix(self.manifest.seed, purpose, self.k, u)

    def _pieces(self, units: Sequence[int]) -> Iterator[_Piece]:
        """Yield the pieces of these units.

        Slices of a row group are one piece: only the size of the group is known. If the group is
        too large to be decoded at once, each slice is a piece, as it is in Arrow, where slices are
        free.
        """
        source, reader = self.source, self.reader
        together: dict[tuple[int, ...], list[int]] = {}
        for u in units:
            unit = source.units[u]
            alone = unit.group < 0 or source.cached
            kind = source.format(unit.file).kind
            if not alone and kind != "arrow":
                alone = reader.units.groups(source, unit.file)[unit.group][1] > GROUP_LIMIT
            together.setdefault((*unit[:2], unit.start if alone else -1), []).append(u)
        for members in together.values():
            member_units = [source.units[u] for u in members]
            size = sum(text_size(source, unit, reader) for unit in member_units)
            rows = sum(unit.stop - unit.start for unit in member_units if unit.group >= 0)
            chosen = sum(u in source.heldout_units for u in members)
            held = source.threshold / 2**64 * chosen / len(members)
            yield _Piece(tuple(members), size, rows, 1 - held)

    def _documents(self, u: int) -> tuple[list[_Document], int, int]:
        """Return the usable documents of a unit, and how many are dropped and replaced."""
        source, seed = self.source, self.manifest.seed
        rows = self.reader.documents(source, source.units[u])
        documents: list[_Document] = []
        replaced = 0
        for row in range(len(rows)):
            content: str | Callable[[], np.ndarray] | None
            if isinstance(rows, token_cache.CachedRows):
                content = partial(rows.ids, row, self.encoder.tokenizer.length)
                size = rows.size(row)
            else:
                content, odd = rows.text(row)
                size, replaced = len((content or "").encode()), replaced + odd
            if size and content is not None:
                held = u in source.heldout_units and rows.hash(row, seed) < source.threshold
                documents.append(_Document(content, size, held))
        return documents, len(rows) - len(documents), replaced

    def _encode(self, documents: Sequence[_Document]) -> Iterator[tuple[_Document, str, Encoded]]:
        """Yield documents, their texts, and their ids."""
        tokenizer = self.encoder.tokenizer
        for start in range(0, len(documents), BATCH):
            some = documents[start : start + BATCH]
            texts = [one.content for one in some if isinstance(one.content, str)]
            if texts:
                encoded = self.encoder.documents(self.source, texts)
            else:
                encoded = [Encoded(one.content()) for one in some if callable(one.content)]
                texts = [text_of(tokenizer, one.ids) for one in encoded]
            yield from zip(some, texts, encoded, strict=True)


def _extent(
    manifest: DataManifest, encoder: DocumentEncoder, reader: Reader, state: DataState
) -> tuple[int | None, int, int]:
    """Return the numbers of the first block that is not padding, and of that behind the last one.

    The third number is that of the trained tokens in them. state: where to begin
    """
    lengths = _Lengths(encoder)
    lanes = Lanes(manifest, lengths, reader, state.cursors, state.next_block)
    first, last = None, state.next_block
    for g in range(state.next_block, state.next_block + manifest.lanes):
        lane = g - state.next_block + 1
        system.beat("counting the blocks of the run, by lane", lane, manifest.lanes)
        while lanes.take(g).source >= 0:
            first = g if first is None else min(first, g)
            last, g = max(last, g + 1), g + manifest.lanes
    return first, last, lengths.trained


class _Lengths:
    """Encodes each document once, and remembers where its sequences end; its ids are all equal.

    trained: tokens of all that was asked for
    """

    def __init__(self, encoder: DocumentEncoder) -> None:
        self.tokenizer = encoder.tokenizer
        self.trained = 0
        self._encoder = encoder
        self._known: dict[tuple[str, bytes], tuple[Encoded, int]] = {}

    def documents(self, source: Source, texts: Sequence[str]) -> list[Encoded]:
        """Return encoded documents as `DocumentEncoder` does, in their lengths."""
        keys = [(source.label, xxhash.xxh3_128_digest(text.encode())) for text in texts]
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._known}
        encoded = self._encoder.documents(source, list(new.values()))
        for key, one in zip(new, encoded, strict=True):
            # Judged answers that are equal must stay so: packing looks for one that differs.
            answer = one.ids[one.answer :].tobytes() if one.answer else b""
            same = NO_ID if not answer else np.uint32(xxhash.xxh32_intdigest(answer)).view(np.int32)
            ids = np.broadcast_to(same, len(one.ids))
            trained = len(one.ids) if one.trained is None else int(one.trained.sum())
            self._known[key] = one._replace(ids=ids, trained=None), trained
        asked = [self._known[key] for key in keys]
        self.trained += sum(trained for _, trained in asked)
        return [one for one, _ in asked]
