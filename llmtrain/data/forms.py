"""What it means for a run that a source has conversations, and how that is found out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from llmtrain.config.schema import DataConfig
from llmtrain.data.chat.rows import BadRowError, contents, form_of, our_names, to_example
from llmtrain.data.documents.reader import Reader
from llmtrain.data.file_parts import first_columns
from llmtrain.data.manifest import Source
from llmtrain.errors import Problem


def with_form(source: Source, key: str, reader: Reader) -> Source:
    """Return the source with the form of its conversations, if its first file has one.

    Raises UserError for columns that the source lacks, and for judged answers (`form_of`).
    """
    there = first_columns(source, key, reader)
    if not there:
        return source
    columns = f"{key}.columns"
    ours = our_names(there, source.columns, columns)
    return replace(source, form=form_of(ours, columns, source.columns))


def unfit_packing(data: DataConfig, chat: bool) -> Iterator[Problem]:
    """Yield what of the packing does not go with conversations."""
    if chat and data.packing == "concat":
        expected = "bestfit, single or auto with conversations: concat would cut them anywhere"
        also = "" if data.document_mask is not False else " with data.document_mask=auto"
        yield Problem("data.packing", "concat", expected, f"data.packing=auto{also}")
    if chat and data.document_mask is False:
        expected = "true or auto with conversations: those of a block must not see each other"
        yield Problem("data.document_mask", False, expected, "data.document_mask=auto")


def max_epochs(source: Source, epochs: float | None) -> int | None:
    """Return the passes over a source: over conversations as many as the run has epochs."""
    if source.max_epochs is None and source.form is not None and epochs is not None:
        return math.ceil(epochs)
    return source.max_epochs


def plain(source: Source, texts: Iterable[str]) -> Iterator[str]:
    """Yield texts for a tokenizer: of a conversation what is said in it, not its JSON."""
    for text in texts:
        if source.form is None:
            yield text
            continue
        try:
            yield contents(to_example(text, source.form, source.columns, source.reading))
        except BadRowError:
            continue  # the first rows are checked, and later ones when they are read
