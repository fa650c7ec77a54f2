"""Finds the bytes of a file on the Hub that a unit is read from.

row group     the chunks of the text and id columns; close ones are one range
lines         the unit's own bytes, one byte before them and a margin after them
rows of CSV, elements of an array    the unit's own bytes
compressed    the whole file
"""

from __future__ import annotations

from collections import Counter

import pyarrow.parquet as pq

from llmtrain.data.chat.rows import columns_of_form
from llmtrain.data.documents.lines import reach
from llmtrain.data.manifest import ELEMENTS, Source, Unit
from llmtrain.data.remote.prefetch import KEPT_BYTES
from llmtrain.data.remote.request import HubFile, web_url
from llmtrain.data.sources.local import file_format

MERGE_BYTES = 1 << 20  # two ranges that are closer than this are one request


def hub_file(source: Source, file: int) -> HubFile:
    """Return a file of a remote source."""
    known = source.files[file]
    return HubFile(web_url(source.where(file)), known.size, known.etag)


def columns_of(source: Source) -> list[str]:
    """Return the names of the columns that are read; files may lack optional ones of a form."""
    texts = [source.text_column]
    if source.form is not None:
        names = columns_of_form(source.form, source.reading)
        texts = [source.columns.get(name, name) for name in names]
    return [*texts, *([source.id_column] if source.id_column else [])]


def is_part_of(path_in_schema: str, column: str) -> bool:
    """Return whether a column of a parquet file is this one, or nested in it."""
    return path_in_schema == column or path_in_schema.startswith(f"{column}.")


def unit_spans(source: Source, unit: Unit, footer: pq.FileMetaData | None) -> list[tuple[int, int]]:
    """Return the byte ranges of a unit. footer: of its file if that is parquet, else None."""
    if footer is not None:
        return column_spans(footer.row_group(unit.group), columns_of(source))
    known = source.files[unit.file]
    if (file_format(known.name) or ("", None))[1] is not None:
        return [(0, known.size)]
    return [(unit.start, unit.stop) if has_whole_rows(source, unit) else reach(unit, known.size)]


def has_whole_rows(source: Source, unit: Unit) -> bool:
    """Return whether the bytes of a unit begin and end with a row, not anywhere in a line."""
    kind = (file_format(source.files[unit.file].name) or ("",))[0]
    return unit.group == ELEMENTS or kind == "csv" or source.whole_files


def column_spans(group: pq.RowGroupMetaData, wanted: list[str]) -> list[tuple[int, int]]:
    """Return the byte ranges of these columns in a row group; close ones are merged."""
    spans: list[tuple[int, int]] = []
    for index in range(group.num_columns):
        column = group.column(index)
        if any(is_part_of(column.path_in_schema, name) for name in wanted):
            first = column.data_page_offset
            if column.dictionary_page_offset:
                first = min(first, column.dictionary_page_offset)
            spans.append((first, first + column.total_compressed_size))
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start - merged[-1][1] < MERGE_BYTES:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def refetch_warning(source: Source, cache_bytes: int) -> str | None:
    """Return a warning for a remote source whose row groups are fetched several times an epoch.

    Slices of one group are separate units, and lanes read them at different times. The result is
    None if there are no slices, or if they fit into memory or the disk cache, judging by the sizes
    of the files.
    """
    parts = Counter((unit.file, unit.group) for unit in source.units if unit.group >= 0)
    sliced = {file for (file, _), count in parts.items() if count > 1}
    size = sum(source.files[file].size for file in sliced)
    if not source.remote or size <= (cache_bytes or KEPT_BYTES):
        return None
    factor = parts.total() / len(parts)
    return (
        f"source {source.label}: its row groups are read in {factor:.1f} slices on average, and "
        f"fetched from the Hub up to {factor:.1f} times an epoch; with data.cache_gb of at least "
        f"{size / 2**30 + 0.05:.1f} once, on each machine"
    )
