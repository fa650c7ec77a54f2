"""Runs on a token cache: the same batches for any layout and resume, the documents' own text."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash
from helpers.ranks import ROOT
from helpers.tiny import lines, tiny_config, write_config

from llmtrain.config.load import load_config
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.tools.data.inspect import open_stream

STEPS = 12


@pytest.fixture(scope="module")
def cache(server, tmp_path_factory):
    """The sample as tokens, written by the command."""
    folder = tmp_path_factory.mktemp("cache")
    config = write_config(folder, tiny_config(folder / "unused"))
    arguments = ["data", "tokenize", str(config), "--out", str(folder / "cache"), "--json"]
    code = server.run(["call", "helpers.killing", "command", *arguments], 1, folder)
    said = (folder / "output.txt").read_text()
    assert code == [0], said
    written = json.loads(said.splitlines()[-1])
    assert written["files"] == ["sample.idx"]
    return folder / "cache"


def write(folder, cache, **changes):
    """A run on the cache mixed with text."""
    config = tiny_config(folder / "run", training__steps=STEPS, **changes)
    config["model"]["tokenizer"] = str(cache / "tokenizer")
    if "sources" not in config["data"] or config["data"]["sources"] == [{"path": "sample"}]:
        config["data"]["sources"] = [{"path": str(cache), "weight": 2.0}, {"path": "sample"}]
    return write_config(folder, config)


def train(server, folder, config, world_size):
    codes = server.run(["train", str(config)], world_size, folder)
    assert codes == [0] * world_size, (folder / "output.txt").read_text()
    return lines(folder / "run", "train")


@pytest.fixture(scope="module")
def straight(server, cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return train(server, folder, write(folder, cache), 1)


def digests(found):
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    return [line["batch_digest"] for line in found]


@pytest.mark.parametrize(
    ("world_size", "workers"), [(2, 0), (2, 1), pytest.param(3, 2, marks=pytest.mark.slow)]
)
def test_batches_do_not_depend_on_processes_and_workers(
    server, cache, straight, tmp_path, world_size, workers
):
    found = train(server, tmp_path, write(tmp_path, cache, data__workers=workers), world_size)
    assert digests(found) == digests(straight)
    assert found[-1]["sources"] == straight[-1]["sources"]
    assert found[-1]["sources"].keys() == {"cache", "sample"}


def test_a_resume_on_another_number_of_processes_has_the_same_batches(
    server, cache, straight, tmp_path
):
    config = write(tmp_path, cache)
    for steps, world_size in ((5, 1), (8, 3), (STEPS, 2)):
        arguments = ["train", str(config), f"training.steps={steps}"]
        codes = server.run(arguments, world_size, tmp_path)
        assert codes == [0] * world_size, (tmp_path / "output.txt").read_text()
    assert digests(lines(tmp_path / "run", "train")) == digests(straight)


def test_the_blocks_that_a_run_trains_on_are_the_documents(cache, tmp_path):
    path = write(tmp_path, cache, data__sources=[{"path": str(cache)}])
    tokenizer = open_tokenizer(cache / "tokenizer")
    sample = sorted((ROOT / "llmtrain" / "data" / "sample").glob("*.parquet"))
    texts = [text for file in sample for text in pq.read_table(file)["text"].to_pylist()]
    joined = "<|endoftext|>".join([*texts, *texts[:1]])
    with open_stream(load_config(path)) as stream:
        batch = next(stream)
    assert batch.digest == sum(
        xxhash.xxh3_64_intdigest(row.astype("<i4").tobytes(), seed=g)
        for g, row in enumerate(batch.ids)
    ) % (1 << 64)
    for row in batch.ids:
        for piece in np.split(row, np.flatnonzero(row == tokenizer.eos) + 1):
            assert tokenizer.decode(piece).strip("\ufffd") in joined
