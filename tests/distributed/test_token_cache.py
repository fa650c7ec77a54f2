"""Runs on a token cache: the same batches for any layout and resume, the documents' own text."""

import json

import pytest
from helpers.tiny import lines, tiny_config, write_config

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
