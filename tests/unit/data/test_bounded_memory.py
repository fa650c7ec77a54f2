"""Failures of other libraries over hours: memory that grows with what was read or tokenized."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import corpus

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MIB = 1 << 20
UNITS, UNIT_BYTES = 2000, 32 << 10
ROOT = Path(__file__).parents[3]

# What each prints: resident bytes after every tenth of the work, from a third of it on.
MEASURED = """
import json, os, sys
from pathlib import Path

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def measured(work, count):
    found = []
    for index in range(count):
        work(index)
        if index >= count // 3 and index % (count // 10) == 0:
            found.append(resident())
    print(json.dumps(found))
"""

READ = (
    MEASURED
    + """
from llmtrain.config.schema import Config
from llmtrain.data.manifest import load
from llmtrain.data.documents.reader import Reader, Reading

place = Path(sys.argv[1])
manifest = load(place / "manifest.json", Config.model_validate_json(sys.argv[2]).data.sources)
(source,) = manifest.sources
reader = Reader(Reading(60))

def read(index):
    rows = reader.rows(source, source.units[index])
    assert rows.text(0)[0]

measured(read, len(source.units))
"""
)

STREAMED = (
    MEASURED
    + """
from llmtrain.config.schema import Config
from llmtrain.data.manifest import load
from llmtrain.data.documents.reader import Reading
from llmtrain.batch_size import BatchSize
from llmtrain.data.stream import open_stream

place = Path(sys.argv[1])
manifest = load(place / "manifest.json", Config.model_validate_json(sys.argv[2]).data.sources)
stream = open_stream(manifest, place / "tokenizer", batch=BatchSize.constant(24), rank=0,
                     world_size=1, workers=0, reading=Reading(60))
cursors = {}

def read(index):
    cursors.update(next(stream).cursors)

measured(read, int(sys.argv[3]))
epochs = [cursor[0].epoch for cursor in cursors.values()]
assert min(epochs) >= 1, epochs  # all units were read
"""
)

ENCODED = (
    MEASURED
    + """
import random
from llmtrain.data.tokens.tokenizer import open_tokenizer

tokenizer = open_tokenizer(Path(sys.argv[1]) / "tokenizer", sys.argv[2])
draw = random.Random(1)

def text():
    letters = "abcdefghijklmnopqrstuvwxyzäöüß"
    return " ".join("".join(draw.choices(letters, k=9)) for _ in range(200))

measured(lambda _: tokenizer.encode(text()), 900)
"""
)


def growth(script, *arguments):
    """Bytes that the resident memory grew by, after a third of the work."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "2"}
    result = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found) >= 6
    return np.median(found[-3:]) - np.median(found[:3])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("memory")
    corpus.write_tokenizer(root / "tokenizer")
    return root


def prepared(place, name, **data):
    """The config and manifest of a file."""
    folder = place / name
    (folder / "tokenizer").symlink_to("../tokenizer")
    path = folder / "data.parquet"
    manifest = corpus.manifest_of(place / "tokenizer", path, **data)
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    return folder, corpus.config(path, **data).model_dump_json(by_alias=True)


@pytest.mark.launches
def test_memory_does_not_grow_with_the_units_read(place):
    folder = place / "large"
    folder.mkdir()
    schema = pa.schema([("id", pa.string()), ("text", pa.string())])
    with pq.ParquetWriter(folder / "data.parquet", schema, compression="none") as writer:
        for number in range(UNITS):
            text = os.urandom(UNIT_BYTES // 2).hex()
            writer.write_table(pa.table([[str(number)], [text]], schema=schema))
    folder, config = prepared(place, "large", lanes=48)
    # Kept, the units of the last half would be 30 MiB.
    assert growth(READ, folder, config) < 4 * MIB


@pytest.mark.launches
def test_memory_does_not_grow_over_an_epoch_of_the_stream(place):
    folder = place / "small"
    corpus.write_parquet(folder / "data.parquet", corpus.letters([20] * 20) * 100, group=1)
    folder, config = prepared(place, "small", lanes=24)
    assert growth(STREAMED, folder, config, 150) < 1 * MIB


@pytest.mark.parametrize("backend", ["tokenizers", "tiktoken"])
@pytest.mark.launches
def test_memory_does_not_grow_with_words_never_seen_before(place, backend):
    # 180,000 words; with one entry each a cache of theirs would be 20 MiB and more.
    assert growth(ENCODED, place, backend) < 2 * MIB
