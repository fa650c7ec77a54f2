"""Open the blocks of a config without training, to inspect the data or for your own loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llmtrain.config.binding import data_settings
from llmtrain.config.schema import Config
from llmtrain.data.documents.reader import reading_of
from llmtrain.data.stream import Stream
from llmtrain.data.stream import open_stream as open_blocks
from llmtrain.rundir import contents
from llmtrain.tools.data.scratch import aside_unless_other
from llmtrain.training.start.prepare import load_manifest, prepare


@contextmanager
def open_stream(config: Config, *, rank: int = 0, world_size: int = 1) -> Iterator[Stream]:
    """Open the stream of batches that rank `rank` would train on: `with open_stream(config) as s:`.

    It begins with the first step; `next(s)` returns a `Batch` with this rank's blocks of one step.
    The manifest and tokenizer are those of `config.run.dir` if a run with the same sources began
    there; else they are made in a temporary directory. Nothing is written to `run.dir`. Raises
    UserError for problems of the data.
    """
    workers = 0 if config.data.workers == "auto" else config.data.workers
    with aside_unless_other(config) as directory:
        prepare(config, directory, world_size * max(1, workers))
        stream = open_blocks(
            load_manifest(config, directory),
            directory / contents.TOKENIZER,
            blocks_per_step=config.training.global_batch_size,
            rank=rank,
            world_size=world_size,
            workers=workers,
            reading=reading_of(data_settings(config), directory),
        )
        try:
            yield stream
        finally:
            stream.close()
