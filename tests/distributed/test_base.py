"""Runs that begin with weights: with more rows, under every strategy, and later without them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.bases import ENTRIES, save_base, save_tokenizer
from helpers.tiny import lines, status, tiny_config, write_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 3
MORE = 5  # tokens that the base has no rows for
# How the base writes: with end tokens that nothing else names.
GENERATION = {"eos_token_id": [1, 2, 3], "temperature": 0.7, "do_sample": True}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model, and beside it its tokenizer with some tokens more."""
    folder = tmp_path_factory.mktemp("bases")
    save_tokenizer(folder / "tokenizer", more=MORE)
    found = save_base(folder / "base")
    (found / "generation_config.json").write_text(json.dumps(GENERATION))
    return found


def generation(run_dir, step):
    """How a checkpoint writes."""
    file = run_dir / "checkpoints" / f"step-{step:08d}" / "generation_config.json"
    found: dict[str, Any] = json.loads(file.read_text())
    del found["transformers_version"]
    return found


def config(run_dir, base, strategy, **changes):
    made = tiny_config(
        run_dir, training__steps=STEPS, evaluation__every_steps=STEPS, checkpoint__every_steps=2
    )
    made["optimizer"] |= {"schedule": "constant", "warmup_steps": 1}
    made["model"] = {"from": str(base), "tokenizer": str(base.parent / "tokenizer"), **changes}
    made["distributed"] = {"strategy": strategy, "timeout_minutes": 2.0}
    return made


def run(server, folder, made, world=2):
    path = write_config(folder, made)
    codes = server.run(["train", str(path)], world, folder)
    assert codes == [0] * world, (folder / "output.txt").read_text()[-4000:]
    return folder / "run"


@pytest.fixture(scope="module")
def grown(server, tmp_path_factory, base):
    """Under DDP."""
    folder = tmp_path_factory.mktemp("ddp")
    return run(server, folder, config(folder / "run", base, "ddp"))


def test_a_run_that_grew_is_a_model_that_transformers_opens(grown, base):
    directory = grown / "checkpoints" / f"step-{STEPS:08d}"
    model, tokenizer = (
        kind.from_pretrained(directory) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert len(tokenizer) == model.config.vocab_size == ENTRIES + MORE
    assert model.get_input_embeddings().weight.shape[0] == ENTRIES + MORE
    assert generation(grown, STEPS) == GENERATION
    (start,) = lines(grown, "start")
    assert start["parameters"] == sum(p.numel() for p in model.parameters())
    kept = json.loads((grown / "auto.json").read_text())["run"]["base"]
    assert (kept["path"], kept["asked"]) == (str(base), [str(base), None])


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_base_that_grows_trains_the_same_under_every_strategy(
    server, tmp_path, base, grown, strategy
):
    found = run(server, tmp_path, config(tmp_path / "run", base, strategy))
    assert status(found)["strategy"] == strategy
    for one, other in zip(lines(found, "train"), lines(grown, "train"), strict=True):
        assert one["batch_digest"] == other["batch_digest"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
    step = Path("checkpoints", f"step-{STEPS:08d}", "model.safetensors")
    ours, theirs = load_file(found / step), load_file(grown / step)
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
    made = config(tmp_path / "run", base, strategy)
    made["training"]["steps"] = STEPS + 1
    run(server, tmp_path, made)  # a resume, which reads nothing of the base
    assert lines(found, "start")[-1]["resumed_from"] == f"step-{STEPS:08d}"
    assert [generation(found, n) for n in (2, STEPS, STEPS + 1)] == [GENERATION] * 3


def test_ranks_of_a_sharded_run_read_no_weights_but_one(server, tmp_path, base):
    path = write_config(tmp_path, config(tmp_path / "run", base, "fsdp2"))
    arguments = [
        "call",
        "helpers.odd_ranks",
        "noting_what_is_built",
        str(path),
        str(tmp_path / "seen"),
    ]
    assert server.run(arguments, 2, tmp_path) == [0, 0], (tmp_path / "output.txt").read_text()
    first, second = (json.loads((tmp_path / f"seen.{rank}").read_text()) for rank in (0, 1))
    assert [one.split("@")[0] for one in first["read"]] == [str(base)]
    assert (first["held"], first["whole"]) == (0, True)
    assert second == {"read": [], "held": 0, "whole": False}


def test_a_run_begins_with_another_and_resumes_without_it(server, tmp_path, grown):
    """Its base is the best checkpoint of a run, which is deleted after the first steps."""
    begun = Path(shutil.copytree(grown, tmp_path / "begun"))
    made = config(tmp_path / "run", begun, "ddp")
    made["model"]["tokenizer"] = "auto"
    made["training"]["steps"] = 2
    run_dir = run(server, tmp_path, made, 1)
    kept = json.loads((run_dir / "auto.json").read_text())["run"]["base"]
    assert kept["path"] == str(begun / "checkpoints" / f"step-{STEPS:08d}")
    before = lines(run_dir, "eval")[0]["loss"]  # of step 0
    assert before == pytest.approx(lines(grown, "eval")[-1]["loss"], abs=1e-5)
    shutil.rmtree(begun)
    made["training"]["steps"] = 4
    run(server, tmp_path, made, 1)
    assert lines(run_dir, "start")[-1]["resumed_from"] == "step-00000002"
    assert json.loads((run_dir / "auto.json").read_text())["run"]["base"] == kept
    assert [generation(run_dir, step) for step in (2, 4)] == [GENERATION] * 2


def test_weights_that_change_before_the_first_checkpoint_are_refused(server, tmp_path, base):
    """The run has begun, and its `auto.json` names what it began with."""
    copy = Path(shutil.copytree(base.parent, tmp_path / "bases")) / "base"
    made = config(tmp_path / "run", copy, "ddp")
    run_dir = run(server, tmp_path, made, 1)
    shutil.rmtree(run_dir / "checkpoints")
    fields = json.loads((run_dir / "status.json").read_text()) | {"checkpoint": None}
    (run_dir / "status.json").write_text(json.dumps(fields))
    record = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in record if json.loads(line)["kind"] == "start"]
    (run_dir / "metrics.jsonl").write_text("".join(kept))
    save_base(copy, seed=4)
    assert server.run(["train", str(tmp_path / "config.yaml")], 1, tmp_path) == [2]
    said = (tmp_path / "output.txt").read_text()
    assert "has other weights now" in said
    assert "Traceback" not in said
