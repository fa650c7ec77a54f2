"""The data of a start: how much is read and tokenized before the first step, counted."""

import math
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import bases, chats, corpus

from llmtrain.agreement import Alone
from llmtrain.config.schema import Config, RunConfig, TrainingConfig
from llmtrain.data.tokens import tokenizer
from llmtrain.data.tokens.tokenizer import Tokenizer, open_tokenizer
from llmtrain.tools.data.inspect import inspect
from llmtrain.training.start.data import FewSteps, few_steps, open_data
from llmtrain.types import rank_layout

BESTFIT: Any = SimpleNamespace(packing="bestfit", seq_len=64)  # what is read of a manifest
GROUP = 20  # documents of a row group
GROUPS = {"small": 96, "large": 480}  # four units a lane, and five times as many


def config_of(path):
    """A run that has more held-out documents than an evaluation scores, whatever the size."""
    made = corpus.config(path, heldout=0.05, seq_len=64)
    changes = {
        "model": {"tokenizer": "sample"},
        "evaluation": {"max_documents": 20},
        "training": {"steps": 10, "global_batch_size": 24},
    }
    return Config.model_validate(made.model_dump(by_alias=True, exclude_unset=True) | changes)


def write(path, size):
    """Documents of 2,000 characters, none like another."""
    path.parent.mkdir()
    draw = np.random.default_rng(7)
    count = GROUP * GROUPS[size]
    rows = [{"id": str(n), "text": draw.bytes(1000).hex()} for n in range(count)]
    if path.suffix == ".parquet":
        # The groups are so small that their statistics would be most of what is read.
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, path, row_group_size=GROUP, write_statistics=False)
    else:
        corpus.write_jsonl(path, rows)


def bytes_read():
    """Bytes that this process has read so far, by whatever call."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def chosen(directory, texts):
    """The comparison of back ends without its awkward texts, which take a second each time."""
    tokenizer = open_tokenizer(directory)
    tokenizer.encode_batch(list(texts))
    return tokenizer


def before_step_1(folder, name):
    """What a start reads and tokenizes up to its first batch."""
    config, seen = config_of(folder / name), Counter[str]()
    config = config.model_copy(update={"run": RunConfig(dir=str(folder / "run"))})
    config.run_dir.mkdir()
    encode = Tokenizer._encode

    def encoding(self, texts):
        seen.update(texts=len(texts), characters=sum(map(len, texts)))
        return encode(self, texts)

    launched = SimpleNamespace(ranks=Alone(), layout=rank_layout(0, 1), device=torch.device("cpu"))
    processes: Any = SimpleNamespace(launched=launched, base=None)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(Tokenizer, "_encode", encoding)
        patch.setattr(tokenizer, "choose_tokenizer", chosen)
        begun = bytes_read()
        data = open_data(config, processes, None, stack, Event().is_set)
        batch = next(data.stream)
        seen["bytes"] = bytes_read() - begun
    assert batch.trained_tokens == 24 * 64
    assert data.heldout is not None
    assert data.heldout.documents == 20
    return seen


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_nothing_more_is_read_before_step_1_of_a_larger_source(tmp_path, kind):
    found = {}
    imports = ["small"] if kind == "parquet" else []  # whose bytes must not count
    for size in (*imports, "small", "large"):
        folder = tmp_path / f"{size}{len(found)}"
        write(folder / f"data.{kind}", size)
        found[size] = before_step_1(folder, f"data.{kind}")
    small, large = found["small"], found["large"]
    assert small["texts"] > 24  # each lane tokenizes one at least
    # A unit of lines is longer where there are more of them, up to 4 MiB; a row group is as it is.
    for what in ("texts", "characters", *(["bytes"] if kind == "parquet" else [])):
        assert large[what] == pytest.approx(small[what], rel=0.2), what


def test_epochs_of_a_batch_that_grows_are_its_steps_added_up():
    """10 steps of 4 blocks, then 8 in each: 100 blocks end in step 18, half of them in step 11."""
    counted = {"blocks": 100, "tokens": 6400, "trained": 700, "passes": 1, "until_end": 100}
    growing = ({"from_step": 1, "size": 4}, {"from_step": 11, "size": 8})
    for epochs, steps in ((1, 18), (0.5, 11)):
        training = TrainingConfig(epochs=epochs, global_batch_size=growing)
        found = few_steps(training, counted, BESTFIT)
        assert found is not None
        assert found.steps == steps


@pytest.mark.parametrize(
    ("batch", "processes", "epochs", "blocks", "steps", "remedy"),
    [
        (24, 1, 1, 4_000, 167, None),
        (24, 1, 1, 480, 20, "training.global_batch_size=9"),
        (24, 2, 1, 480, 20, "training.global_batch_size=8"),
        (16, 1, 1, 54, 4, "training.global_batch_size=4 training.epochs=4"),
        (16, 8, 1, 54, 4, "training.global_batch_size=8 training.epochs=8"),
        (4, 1, 2, 100, 25, "training.epochs=4"),
        (4, 1, 0.5, 100, 25, "training.epochs=1"),
    ],
)
def test_epochs_of_few_steps_are_told_with_what_gives_fifty(
    batch, processes, epochs, blocks, steps, remedy
):
    """blocks: of all epochs"""
    whole = math.ceil(epochs)
    counted = {
        "blocks": round(blocks / epochs),
        "tokens": round(64 * blocks / epochs),
        "trained": 700 * whole,
        "passes": whole,
        "until_end": round(blocks * whole / epochs),
    }
    training = TrainingConfig(epochs=epochs, global_batch_size=batch)
    found = few_steps(training, counted, BESTFIT, processes)
    if remedy is None:
        assert found is None
        return
    *_, asked = (
        float(one[16:]) for one in (f"training.epochs={epochs}", *remedy.split()) if "epochs" in one
    )
    assert found == FewSteps(steps, round(700 * epochs), asked, remedy)
    assert (
        str(found) == f"this run is {steps} steps and {found.tokens:,} trained tokens; try {remedy}"
    )
    changed: dict[str, Any] = dict(
        one.removeprefix("training.").split("=") for one in remedy.split()
    )
    other = float(changed.get("epochs", epochs)) / epochs
    now = TrainingConfig(
        epochs=epochs * other, global_batch_size=int(changed.get("global_batch_size", batch))
    )
    whole = math.ceil(epochs * other)
    more = counted | {"until_end": blocks / epochs * whole, "passes": whole}
    assert few_steps(now, more, BESTFIT, processes) is None


def test_the_batch_that_is_told_can_be_divided_into_micro_batches():
    training = TrainingConfig(epochs=1, global_batch_size=48, micro_batch_size=6)
    counted = {"blocks": 480, "tokens": 64 * 480}
    found = few_steps(training, counted, BESTFIT, 2)
    assert found == FewSteps(10, 64 * 480, 2, "training.global_batch_size=12 training.epochs=2")


@pytest.mark.parametrize("packing", ["auto", "single"])
@pytest.mark.parametrize(("rows", "epochs", "batch"), [(2, 0.3, 1), (5, 2.5, 4), (60, 1, 16)])
def test_what_is_told_of_few_conversations_gives_fifty_steps(
    tmp_path, packing, rows, epochs, batch
):
    path = corpus.write_jsonl(tmp_path / "chat.jsonl", chats.rows_of(rows))
    given: dict[str, Any] = {
        "model": {"tokenizer": "sample", "config": {"model_type": "llama", **bases.SHAPE}},
        "data": {"sources": [{"path": str(path)}], "seq_len": 128, "packing": packing},
        "chat": {"template": "chatml", "too_long": "split"},
        "run": {"dir": str(tmp_path / "run")},
        "training": {"epochs": epochs, "global_batch_size": batch},
    }
    told = inspect(Config.model_validate(given), blocks=0).few_steps
    assert told is not None
    asked = (one.removeprefix("training.").split("=") for one in told.remedy.split())
    given["training"] |= {key: int(value) for key, value in asked}
    assert inspect(Config.model_validate(given), blocks=0).few_steps is None


def test_a_run_of_steps_or_without_conversations_has_no_more_to_say():
    counted = {"blocks": 100, "tokens": 6_400}
    assert few_steps(TrainingConfig(steps=3), counted, BESTFIT) is None
    found = few_steps(TrainingConfig(epochs=1, global_batch_size=20), counted, BESTFIT)
    assert found == FewSteps(5, 6_400, 2, "training.global_batch_size=4 training.epochs=2")
