"""Failures of other libraries that only whole runs show: ranks that end apart, steps lost, counts.

The strategies of today give every rank the whole model; where ranks are replicas of shards, tokens
are to be counted here in the same way.
"""

import json

import pytest
from helpers import corpus, reference_stream
from helpers.ranks import until
from helpers.tiny import lines, status, tiny_config, write_config

from llmtrain.config.load import load_config
from llmtrain.data.manifest import load
from llmtrain.data.tokens.tokenizer import open_tokenizer

DOCUMENTS = 401


def config_of(folder, source, **changes):
    """A run over one pass of a source; steps far beyond it unless `changes` say otherwise."""
    config = tiny_config(folder / "run", **{"training__steps": 10_000, **changes})
    config["data"]["sources"] = [{"path": str(source), "max_epochs": 1}]
    return config


def trained(server, folder, config, world_size):
    """The directory of a run that went through."""
    codes = server.run(["train", str(write_config(folder, config))], world_size, folder)
    assert codes == [0] * world_size, (folder / "output.txt").read_text()
    return folder / "run"


def data_state(run_dir, step):
    path = run_dir / "checkpoints" / f"step-{step:08d}" / "trainer_state.json"
    return json.loads(path.read_text())["data"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """401 documents, which three processes can not share evenly."""
    path = tmp_path_factory.mktemp("source") / "a.parquet"
    return corpus.write_parquet(path, corpus.articles(DOCUMENTS), group=20)


@pytest.fixture(scope="module")
def runs(server, tmp_path_factory, source):
    """One whole pass, packed and with documents held out, on 1 to 4 processes."""
    found = {}
    for world_size in (1, 2, 3, 4):
        folder = tmp_path_factory.mktemp(f"processes{world_size}")
        config = config_of(folder, source, data__packing="bestfit", data__lanes=12)
        config["data"] |= {"heldout": 0.05}
        config["training"] |= {"global_batch_size": 48, "micro_batch_size": 4}
        config["evaluation"] |= {"max_documents": 1000}
        found[world_size] = trained(server, folder, config, world_size)
    return found


def test_401_documents_on_three_processes_end_at_the_same_step_on_all(runs):
    for run_dir in runs.values():
        found = status(run_dir)
        assert (found["state"], found["reason"]) == ("finished", "data_ended")
        for kind in ("eval", "checkpoint"):
            assert lines(run_dir, kind)[-1]["step"] == found["step"]
    steps = {status(run_dir)["step"] for run_dir in runs.values()}
    assert len(steps) == 1
    assert min(steps) > 3


def test_evaluation_on_three_processes_scores_every_document_once(runs):
    scored = {
        world_size: [
            (line["step"], line["documents"], line["tokens"], line["bytes"])
            for line in lines(run_dir, "eval")
        ]
        for world_size, run_dir in runs.items()
    }
    assert scored[1] == scored[2] == scored[3] == scored[4]
    assert [step for step, *_ in scored[1]] == [0, status(runs[1])["step"]]
    held = scored[1][-1][1]
    assert held >= 16
    met = data_state(runs[3], status(runs[3])["step"])["counts"]["a.parquet"]
    assert met["heldout"] == held
    losses = [lines(run_dir, "eval")[-1]["loss"] for run_dir in runs.values()]
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-5)


def test_replicated_ranks_do_not_count_tokens_twice(runs):
    counted = {
        world_size: [
            (line["tokens"], line["step_tokens"], line["sources"])
            for line in lines(run_dir, "train")
        ]
        for world_size, run_dir in runs.items()
    }
    assert counted[1] == counted[2] == counted[4]
    # A document's text and its end are targets once each, its first token never.
    tokenizer = open_tokenizer(runs[4] / "tokenizer")
    manifest = load(runs[4] / "manifest.json", load_config(runs[4] / "config.yaml").data.sources)
    (source,) = manifest.sources
    lengths = [
        len(tokenizer.encode(text))
        for u, unit in enumerate(source.units)
        for name, text in reference_stream.unit_rows(source, unit)
        if not reference_stream.is_heldout(source, u, name, manifest.seed)
    ]
    assert len(lengths) == DOCUMENTS - lines(runs[4], "eval")[-1]["documents"]
    assert counted[4][-1][0] == sum(lengths)


def test_the_checkpoint_of_four_ranks_has_the_lanes_of_all(runs):
    states = [data_state(run_dir, status(run_dir)["step"]) for run_dir in runs.values()]
    assert all(state == states[0] for state in states[1:])
    assert all(sum(lane[0][:3]) > 0 for lane in states[0]["cursors"])


@pytest.mark.slow  # test_data_end resumes in later epochs
def test_a_resume_in_a_later_epoch_goes_on_to_the_last_step(server, tmp_path):
    """A stream that is over when what was seen is skipped would end the run as finished."""
    path = corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(40))
    changes = {"training__steps": 60, "checkpoint__every_steps": 15, "data__lanes": 6}
    digests = {}
    for name in ("straight", "killed"):
        folder = tmp_path / name
        config = config_of(folder, path, **changes)
        del config["data"]["sources"][0]["max_epochs"]
        config["data"]["seq_len"] = 16
        run_dir = folder / "run"
        if name == "killed":
            ranks = server.start(["train", str(write_config(folder, config))], 2, folder)
            until((run_dir / "checkpoints" / "step-00000030").is_dir, "a checkpoint")
            ranks.kill()
            assert min(lane[0][0] for lane in data_state(run_dir, 30)["cursors"]) >= 2  # epochs
        trained(server, folder, config, 2)
        assert status(run_dir)["step"] == 60
        digests[name] = [line["batch_digest"] for line in lines(run_dir, "train")]
    assert len(digests["straight"]) == 60
    assert digests["killed"] == digests["straight"]
    assert lines(tmp_path / "killed" / "run", "start")[-1]["resumed_from"] is not None


@pytest.mark.slow  # DF-05 with a packing
def test_packed_lengths_do_not_decide_the_steps_of_a_rank(server, tmp_path, source):
    """Steps are fixed at the start and the same on every rank, number of ranks and resume."""
    found = {}
    for world_size in (1, 3):
        folder = tmp_path / str(world_size)
        config = config_of(folder, source, data__packing="bestfit", data__lanes=12)
        del config["data"]["sources"][0]["max_epochs"], config["training"]["steps"]
        config["training"] |= {"epochs": 0.5, "global_batch_size": 24}
        run_dir = trained(server, folder, config, world_size)
        auto = json.loads((run_dir / "auto.json").read_text())["run"]["epoch"]
        digests = [line["batch_digest"] for line in lines(run_dir, "train")]
        found[world_size] = (status(run_dir)["step"], auto, digests)
        assert len(digests) == round(0.5 * auto["blocks"] / 24) > 3
    assert found[1] == found[3]
