"""Footers of parquet files of the Hub, asked for once a run, and what they say about ranges.

    run.dir/footers/<etag>      a parquet file of nothing but the footer

Rank 0 reads them when it looks for units; every other process and every later start finds them in
the run directory and asks the Hub for nothing but units.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from llmtrain.data.cache import file_name, write

log = logging.getLogger(__name__)

MERGE_BYTES = 1 << 20  # two ranges that are nearer than this are one request


def stored(run_dir: Path | None, etag: str, ask: Callable[[], pq.FileMetaData]) -> pq.FileMetaData:
    """The footer that lies in the run directory; else what `ask` gives, which is then put there."""
    if run_dir is None or not etag:
        return ask()
    path = run_dir / "footers" / file_name(etag)
    try:
        return pq.read_metadata(io.BytesIO(path.read_bytes()))
    except OSError:  # not there yet, or not for us to see
        footer = ask()
    except pa.ArrowException as error:
        log.warning("%s is damaged, and read again: %s", path, error)
        footer = ask()
    content = io.BytesIO()
    footer.write_metadata_file(content)
    try:
        write(path, content.getvalue())
    except OSError as error:  # a run directory that is only looked at
        log.warning("%s is not kept: %s", path, error)
    return footer


def column_spans(group: pq.RowGroupMetaData, wanted: list[str]) -> list[tuple[int, int]]:
    """The byte ranges of a group that hold these columns; near ones are one."""
    spans: list[tuple[int, int]] = []
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema in wanted:
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
