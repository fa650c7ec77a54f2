"""What the parts of `data.py` share: a prepared run, its streams and lanes, and the table.

Nothing heavy is imported at the top: a data worker is spawned, and imports the main file again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEQ_LEN, BLOCKS = 1024, 32  # of a step


@dataclass(frozen=True)
class Sizes:
    """How much is measured: blocks are a round's."""

    rounds: int = 5
    blocks: int = 4096  # × 1,024 × 5 = 21 M tokens
    warm: int = 1536  # before: lanes opened, windows filled
    some: int = 1024  # through a worker
    slow: int = 512  # with `tokenizers`
    documents: int = 3000  # with `datasets`
    steps: int = 200
    units: int = 6000  # fewer, and the slope is noise


QUICK = Sizes(rounds=1, blocks=256, warm=32, some=128, slow=64, documents=1000, steps=10, units=60)


class Bench:
    """A prepared run: its tokenizer, and manifests of it in several forms."""

    def __init__(self, data: Path, tokenizer: Path, folder: Path, sizes: Sizes) -> None:
        from llmtrain.rundir.contents import TOKENIZER
        from llmtrain.training.start.prepare import prepare

        self.data, self.gpt2, self.folder, self.sizes = data, tokenizer, folder, sizes
        prepare(self.config(), folder, 1, None)
        self.tokenizer = folder / TOKENIZER
        self.table: list[dict[str, Any]] = []

    def config(self, **data: Any) -> Any:
        """A run of GPT-2 on this data."""
        import yaml

        from llmtrain import load_config

        path = self.folder / "run.yaml"
        keys = {
            "run": {"dir": str(self.folder)},
            "model": {"config": {"model_type": "gpt2"}, "tokenizer": str(self.gpt2)},
            "data": {"sources": [{"path": str(self.data)}], "seq_len": SEQ_LEN, **data},
            "training": {"steps": 1, "global_batch_size": BLOCKS},
        }
        path.write_text(yaml.safe_dump(keys))
        return load_config(path)

    def manifest(self, backend: str = "tiktoken", **data: Any) -> Any:
        """The data with this back end, packing, lanes …"""
        from llmtrain.config.binding import data_settings
        from llmtrain.data.survey import freeze, survey
        from llmtrain.data.tokens.tokenizer import open_tokenizer

        return freeze(
            survey(data_settings(self.config(**data)), 1), open_tokenizer(self.tokenizer, backend)
        )

    @contextmanager
    def stream(self, manifest: Any, workers: int = 0) -> Iterator[Any]:
        """All batches of one process."""
        from llmtrain.data.documents.reader import Reading
        from llmtrain.data.stream import open_stream

        stream = open_stream(
            manifest,
            self.tokenizer,
            blocks_per_step=BLOCKS,
            rank=0,
            world_size=1,
            workers=workers,
            reading=Reading(600),
        )
        try:
            yield stream
        finally:
            stream.close()

    def say(self, name: str, figure: float, unit: str, goal: str = "", /, **more: Any) -> None:
        """A line of the table. goal: "≥ 80" or "≤ 1"; none: a figure to compare with."""
        met = None
        if goal:
            sign, limit = goal.split()
            met = figure >= float(limit) if sign == "≥" else figure <= float(limit)
        row = {"bench": "data", "name": name, "figure": figure, "unit": unit, "goal": goal}
        self.table.append({**row, "met": met, **more})
        verdict = {True: "met", False: "MISSED", None: ""}[met]
        print(f"{name:<62} {figure:9.2f} {unit:<13} {goal:<8} {verdict}", flush=True)


def opened(bench: Bench, manifest: Any, g: int, cursors: Any) -> tuple[list[Any], Any]:
    """All lanes, as a process would open them from block g on, and their reader."""
    from llmtrain.data.documents.reader import Reader, Reading
    from llmtrain.data.lanes import Lane
    from llmtrain.data.packing import START
    from llmtrain.data.tokens.encode import open_encoder

    encoder = open_encoder(bench.tokenizer, manifest)
    reader = Reader(Reading(600))
    lanes = []
    for index in range(manifest.lanes):
        first = g + (index - g) % manifest.lanes
        at = [START] if cursors is None else [cursors[index]]
        lanes.append(Lane(manifest, encoder, reader, index, first, at))
    return lanes, reader
