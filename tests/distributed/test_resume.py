"""Killed or stopped anywhere, the same command goes on, and ends where a straight run ends."""

import json
from dataclasses import replace

import pytest
from helpers.ranks import until
from helpers.tiny import lines, tiny_config, weights, write_config

from llmtrain.checkpoint import format as form


def test_another_number_of_processes_sees_the_same_batches(server, tmp_path):
    config = tiny_config(tmp_path / "a" / "run", training__steps=32, checkpoint__every_steps=12)
    path = write_config(tmp_path / "a", config)
    assert server.run(["train", str(path)], 2, tmp_path / "a") == [0, 0]

    moved = tiny_config(tmp_path / "b" / "run", training__steps=32, checkpoint__every_steps=12)
    path = write_config(tmp_path / "b", moved)
    ranks = server.start(["train", str(path)], 2, tmp_path / "b")
    saved = tmp_path / "b" / "run" / "checkpoints" / "step-00000012"
    until(saved.is_dir, "a checkpoint")
    ranks.kill()
    add_to_state(saved, rng=[{"python": [3]}, {"python": [3]}])  # as earlier versions wrote it
    assert server.run(["train", str(path)], 3, tmp_path / "b") == [0, 0, 0]

    expected, found = (lines(tmp_path / name / "run", "train") for name in "ab")
    resumed = lines(tmp_path / "b" / "run", "start")[-1]
    assert resumed["resumed_from"] == "step-00000012"
    assert len(found) == len(expected) == 32
    for one, other in zip(found, expected, strict=True):
        assert one["batch_digest"] == other["batch_digest"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
    (ignored,) = (e for e in lines(tmp_path / "b" / "run", "event") if e["event"] == "rng_ignored")
    assert (ignored["step"], ignored["detail"]) == (12, {"checkpoint": "step-00000012"})


def add_to_state(checkpoint, **fields):
    """Rewrite `trainer_state.json` with these fields more, and its digest in the manifest."""
    file, manifest = checkpoint / "trainer_state.json", checkpoint / "manifest.json"
    body = json.dumps(json.loads(file.read_bytes()) | fields).encode()
    file.write_bytes(body)
    parsed = form.parse(manifest.read_bytes())
    entry = form.Entry(len(body), form.extents_of(body))
    parsed = replace(parsed, files={**parsed.files, file.name: entry})
    manifest.write_bytes(form.build(parsed))


def test_weights_load_with_from_pretrained_as_they_lie(server, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir = tmp_path / "run"
    path = write_config(tmp_path, tiny_config(run_dir, training__steps=4))
    assert server.run(["train", str(path)], 1, tmp_path) == [0]
    directory = run_dir / "checkpoints" / "step-00000004"
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer("The planet", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "The planet"
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))


def test_shares_of_sources_may_change_at_a_resume_and_the_record_says_from_which_block(
    server, tmp_path
):
    rows = "".join(f'{{"text": "number {i} of the second source"}}\n' for i in range(500))
    (tmp_path / "second.jsonl").write_text(rows)
    run_dir = tmp_path / "run"
    config = tiny_config(run_dir, training__steps=4)
    second = {"path": str(tmp_path / "second.jsonl"), "weight": 1.0}
    config["data"]["sources"] = [{"path": "sample", "weight": 1.0}, second]
    assert server.run(["train", str(write_config(tmp_path, config))], 2, tmp_path) == [0, 0]
    second["weight"] = 3.0
    config["training"]["steps"] = 8
    assert server.run(["train", str(write_config(tmp_path, config))], 2, tmp_path) == [0, 0]

    noted = [json.loads(line) for line in (run_dir / "cursors.jsonl").read_text().splitlines()]
    assert [(one["step"], one["weights"], one["weights_from"]) for one in noted] == [
        (4, [1.0, 1.0], 0),
        (8, [1.0, 3.0], 96),
    ]
    tokens = [line["sources"] for line in lines(run_dir, "train")]
    first, then = tokens[3], {label: tokens[7][label] - tokens[3][label] for label in tokens[3]}
    assert first["second.jsonl"] / sum(first.values()) == pytest.approx(0.5, abs=0.05)
    assert then["second.jsonl"] / sum(then.values()) == pytest.approx(0.75, abs=0.05)


def test_a_damaged_newest_checkpoint_is_one_warning_and_the_one_before_is_used(server, tmp_path):
    run_dir = tmp_path / "run"
    config = tiny_config(run_dir, training__steps=8, checkpoint__every_steps=4)
    path = write_config(tmp_path, config)
    assert server.run(["train", str(path)], 1, tmp_path) == [0]
    expected = weights(run_dir, 8)
    damaged = run_dir / "checkpoints" / "step-00000008" / "model.safetensors"
    body = bytearray(damaged.read_bytes())
    body[-5] ^= 1
    damaged.write_bytes(body)
    said = len((tmp_path / "output.txt").read_text())

    assert server.run(["train", str(path)], 1, tmp_path) == [0]
    shown = (tmp_path / "output.txt").read_text()[said:].splitlines()
    (warning,) = (line for line in shown if line.startswith("warning: "))
    assert "step-00000008.damaged: model.safetensors" in warning
    (begins,) = (line for line in shown if line.startswith("run "))
    assert ": resuming at step 4 from step-00000004, the newest valid one (" in begins
    assert [line["resumed_from"] for line in lines(run_dir, "start")] == [None, "step-00000004"]
    event = [e for e in lines(run_dir, "event") if e["event"] == "checkpoint_quarantined"]
    assert event[0]["detail"]["checkpoint"] == "step-00000008"
    assert "model.safetensors" in event[0]["detail"]["reason"]
    assert (run_dir / "checkpoints" / "step-00000008.damaged").is_dir()
    assert weights(run_dir, 8) == expected
