"""Keeps footers of parquet files of the Hub, so that they are requested once per run.

    run.dir/footers/<etag>      a parquet file of nothing but the footer

Rank 0 reads them when it looks for units. Every other process and every later start finds them in
the run directory, and requests only units from the Hub.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from llmtrain.data.remote.cache import file_name, write

_log = logging.getLogger(__name__)


def load_footer(
    run_dir: Path | None, etag: str, ask: Callable[[], pq.FileMetaData]
) -> pq.FileMetaData:
    """Return the footer kept in the run directory, or ask for it and keep it there."""
    if run_dir is None or not etag:
        return ask()
    path = run_dir / "footers" / file_name(etag)
    try:
        return pq.read_metadata(io.BytesIO(path.read_bytes()))
    except OSError:  # not there yet, or not readable
        footer = ask()
    except pa.ArrowException as error:
        _log.warning("%s is damaged, and read again: %s", path, error)
        footer = ask()
    content = io.BytesIO()
    footer.write_metadata_file(content)
    try:
        write(path, content.getvalue())
    except OSError as error:  # such as a run directory that may only be read
        _log.warning("%s is not kept: %s", path, error)
    return footer
