"""Failures of other libraries before the first step: skipping for hours, hangs, wrong input."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import corpus
from helpers.streams import Run

from llmtrain.config.binding import data_settings
from llmtrain.data.documents.reader import Reading
from llmtrain.data.stream import Blocks
from llmtrain.data.survey import survey
from llmtrain.errors import UserError

LANES = 24


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """96 units of eight documents of 40 tokens each: four units a lane, all alike."""
    root = tmp_path_factory.mktemp("start")
    corpus.write_tokenizer(root / "tokenizer")
    rows = corpus.letters([40] * 24) * 32
    corpus.write_parquet(root / "even.parquet", rows, group=8)
    return root


class Units:
    """The names of the units that are asked for."""

    def __init__(self):
        self.names = []

    def write(self, worker, name):
        self.names.append(name)

    def read(self, worker):
        return self.names[-1]


def units_read(run, state):
    """Units that are read until each lane has given a block."""
    asked = Units()
    blocks = Blocks(
        run.manifest,
        run.place / "tokenizer",
        next_block=state.next_block,
        rank=0,
        world_size=1,
        cursors=state.cursors,
        reading=Reading(60),
        asked=asked,
    )
    items = blocks.virtual(0, 1)
    for _ in range(LANES):
        next(items)
    return len(asked.names)


@pytest.mark.parametrize(("packing", "most"), [("concat", 1), ("bestfit", 3)])
def test_a_resume_at_step_a_million_skips_through_nothing(place, packing, most):
    manifest = corpus.manifest_of(
        place / "tokenizer", place / "even.parquet", lanes=LANES, packing=packing
    )
    assert len(manifest.sources[0].units) == 4 * LANES
    run = Run(manifest, place, blocks_per_step=LANES).start(1, 50)
    early = run.states[50]
    assert early.cursors[:, 0, 1].min() > 0  # no lane is in its first unit any more
    late = replace(early, next_block=LANES * 10**6, cursors=early.cursors.copy())
    late.cursors[:, :, 0] += 13_000  # epochs
    read = units_read(run, early)
    assert units_read(run, late) == read
    assert LANES <= read <= most * LANES


ASLEEP = """
import signal, threading

def test_that_hangs():
    threading.Thread(target=another, daemon=True).start()
    {first}
    threading.Event().wait()

def another():
    threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("first", "says"),
    [
        ("pass", ("Timeout (>", "def test_that_hangs", "in another")),
        # A call that never comes back to Python: no signal is handled any more.
        (
            "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})",
            ("Timeout (0:00:", "in test_that_hangs", "in another"),
        ),
    ],
)
@pytest.mark.launches
def test_a_test_that_hangs_ends_and_shows_the_stacks(tmp_path, pytestconfig, first, says):
    limits = {
        name: float(pytestconfig.getini(name)) for name in ("timeout", "faulthandler_timeout")
    }
    assert 0 < limits["timeout"] < limits["faulthandler_timeout"] <= 900
    (tmp_path / "test_asleep.py").write_text(ASLEEP.format(first=first))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(pytestconfig.inipath),
        "-p",
        "no:cacheprovider",
    ]
    command += ["-o", "timeout=0.5", "-o", "faulthandler_timeout=2", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode != 0
    said = result.stdout + result.stderr
    assert [word for word in says if word not in said] == []  # the stacks of both threads, too


def test_no_test_is_without_a_limit():
    tests = Path(__file__).parents[2]
    marked = [
        path.name
        for path in tests.rglob("*.py")
        if path != Path(__file__) and "mark.timeout" in path.read_text("utf-8")
    ]
    assert marked == []


def test_a_glob_without_a_match_says_what_is_there(tmp_path):
    corpus.write_jsonl(tmp_path / "text" / "train-00.jsonl", corpus.articles(3))
    (tmp_path / "text" / "heldout").mkdir()
    for pattern in ("text/*.parquet", "text/train-*/x.jsonl"):
        with pytest.raises(UserError) as raised:
            survey(data_settings(corpus.config(tmp_path / pattern)), 1)
        said = str(raised.value)
        assert "data.sources.0.path" in said
        assert str(tmp_path / pattern) in said
        assert "a glob that matches files" in said
        assert "heldout/, train-00.jsonl" in said
    with pytest.raises(UserError, match=f"{tmp_path} holds text/"):
        survey(data_settings(corpus.config(tmp_path / "txt" / "*.parquet")), 1)
