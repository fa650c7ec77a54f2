"""The first conversations of a run are tried before anything else is made of its data."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from llmtrain.data.chat import rows as chat_rows
from llmtrain.data.chat.pairs import ANSWERS
from llmtrain.data.documents.lines import columns_of
from llmtrain.data.documents.reader import OF_THE_SOURCE, Reader, bad_row, place_of_row
from llmtrain.data.heldout import training_rows, training_texts
from llmtrain.data.manifest import Source
from llmtrain.data.survey import Survey
from llmtrain.data.tokens.encode import DocumentEncoder, Encoded
from llmtrain.data.tokens.tokenizer import Tokenizer
from llmtrain.errors import Problem, raise_any
from llmtrain.text import harmless

FIRST = 100  # rows of each source
SHOWN = 5  # rows of a message
_WITH_MESSAGES = frozenset(("messages", "conversations", "prompt", "completion", *ANSWERS))


class _Row(NamedTuple):
    """A row in file order, and what became of it."""

    unit: int
    row: int
    encoded: Encoded


def check_first_rows(survey: Survey, encoder: DocumentEncoder) -> list[Encoded]:
    """Raise UserError if conversations cannot be trained on, with the rows and the reason.

    Where bad rows are skipped, one good row is enough. Returns those that are trained on.
    """
    reader = Reader(survey.reading)
    problems: list[Problem] = []
    encoded: list[Encoded] = []
    for k, source in enumerate(survey.sources):
        if source.form is not None:
            rows = list(islice(_rows(source, survey.settings.seed, reader, encoder), FIRST))
            seq_len = survey.settings.data.seq_len
            problems += _problems(source, f"data.sources.{k}", rows, reader, seq_len)
            encoded += [one.encoded for one in rows if one.encoded.trained is not None]
    raise_any(problems)
    return encoded


def share_filled(rows: Sequence[Encoded], seq_len: int) -> float:
    """Return the share of blocks that sequences of conversations fill, a block each.

    A judged answer has another one beside it, which is about as long.
    """
    pieces = ((row, first, stop) for row in rows for first, stop in pairwise(row.cuts))
    lengths = [(stop - first) * (2 if row.answer else 1) for row, first, stop in pieces]
    return sum(lengths) / max(1, len(lengths) * (seq_len + 1))


def count_unread(
    source: Source, seed: int, reader: Reader, encoder: DocumentEncoder
) -> Mapping[str, int]:
    """Return the keys of the first rows of conversations that nobody reads → how many rows.

    A key of a message is `messages.KEY`. Of a table every row has every column.
    """
    if source.form is None:
        return {}
    assert encoder.chat is not None
    written = encoder.chat.names
    units = enumerate(source.units)
    rows = ((unit, text) for u, unit in units for text in training_texts(source, u, seed, reader))
    counts: Counter[str] = Counter()
    read = set(columns_of(source))
    for unit, text in islice(rows, FIRST):
        with suppress(chat_rows.BadRowError):  # reported, or skipped and counted, as a bad row
            counts.update(set(_unread_keys(text, source.form, source.columns, written)))
        if unit.group >= 0:  # of a table only the columns of the form are in the text
            counts.update(set(reader.units.schema(source, unit.file).names) - read)
    del counts[source.id_column or ""]
    return counts


def _unread_keys(
    text: str, form: str, columns: Mapping[str, str], written: Collection[str]
) -> Iterator[str]:
    """Yield the keys of a row that nobody reads; those of its messages as `COLUMN.KEY`.

    text, form, columns: as for `rows.to_example`
    written: the names that the chat template reads
    Raises BadRowError for a row that is no object.
    """
    names = chat_rows.columns_of_form(form)
    read = {columns.get(name, name) for name in names}
    given = chat_rows.read_row(text).items()
    yield from (k for k, value in given if k not in read and value is not None)
    known = {*chat_rows.MESSAGE_KEYS, *written}
    if known.intersection(chat_rows.REASONING):
        known.update(chat_rows.REASONING)  # a message's reasoning goes in under each of these names
    ours = chat_rows.read_row(text, columns)
    for name in _WITH_MESSAGES.intersection(names):
        value = ours.get(name)
        for message in value if isinstance(value, list) else [value]:
            if isinstance(message, dict):
                keys = (key for key, value in message.items() if value is not None)
                yield from (f"{name}.{key}" for key in keys if key not in known)


def describe_unread(counts: Mapping[str, int]) -> str:
    """Return the result of `count_unread` in words."""
    return ", ".join(f"{harmless(key)} ({rows})" for key, rows in sorted(counts.items()))


def with_marks(encoded: Encoded, tokenizer: Tokenizer) -> str:
    """Return the first sequence of a conversation as text, what is trained of it in ⟦…⟧.

    Both halves of a pair are shown, with a line between them.
    """
    assert encoded.trained is not None
    stop = encoded.cuts[1]
    texts = []
    for begin, end in pairwise([0, encoded.second, stop] if encoded.second else [0, stop]):
        flags, ids = encoded.trained[begin:end], encoded.ids[begin:end]
        edges = [0, *(np.flatnonzero(np.diff(flags)) + 1).tolist(), end - begin]
        parts = [(tokenizer.decode(ids[a:b]), bool(flags[a])) for a, b in pairwise(edges)]
        texts.append("".join(f"⟦{text}⟧" if trained else text for text, trained in parts))
    return "\n--------\n".join(texts)


def _rows(source: Source, seed: int, reader: Reader, encoder: DocumentEncoder) -> Iterator[_Row]:
    for u in range(len(source.units)):
        for row, text in training_rows(source, u, seed, reader):
            yield _Row(u, row, encoder.documents(source, [text])[0])


def _problems(
    source: Source, key: str, rows: list[_Row], reader: Reader, seq_len: int
) -> Iterator[Problem]:
    good = [one for one in rows if one.encoded.bad is None]
    if good and all(one.encoded.trained is None for one in good):
        if any(not one.encoded.counts.get("untrained") for one in good):
            what = "a prompt and the beginning of its answer"
            if chat_rows.answers_of(source.form) == "pairs":
                what = "both answers of a pair, each with its prompt"
            expected = f"room for {what}, which none of the first {len(rows)} rows of "
            expected += f"{source.label} has"
            yield Problem("data.seq_len", seq_len, expected, "longer blocks")
            return
        expected = f"a turn of the assistant to train on in the first {len(rows)} rows"
        remedy = "look at them: llmtrain data inspect; see chat.train_turns and the keys `train`"
        yield Problem(key, source.path, expected, remedy)
    kinds: dict[str, list[_Row]] = defaultdict(list)
    for one in rows:
        if one.encoded.bad is not None:
            kinds[one.encoded.bad.key].append(one)
    if good and reader.reading.skip_bad_rows:
        kinds = {kind: bad for kind, bad in kinds.items() if kind in OF_THE_SOURCE}
    for bad in kinds.values():
        assert bad[0].encoded.bad is not None
        problem = bad_row(source, bad[0].unit, bad[0].row, reader, bad[0].encoded.bad)
        others = [place_of_row(source, one.unit, one.row, reader) for one in bad[1:SHOWN]]
        if others:
            more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
            expected = f"{problem.expected} (also in {', '.join(others)}{more})"
            problem = replace(problem, expected=expected)
        yield problem
