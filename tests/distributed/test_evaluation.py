"""What a run does with its evaluations: by source, the best is saved, patience ends the run."""

import json

import pytest
from helpers import corpus
from helpers.tiny import lines, status, tiny_config, weights, write_config


def state(run_dir, step):
    path = run_dir / "checkpoints" / f"step-{step:08d}" / "trainer_state.json"
    return json.loads(path.read_text())


def run(server, folder, made, world_size, *more):
    path = write_config(folder, made)
    codes = server.run(["train", str(path), *more], world_size, folder)
    assert codes == [0] * world_size, (folder / "output.txt").read_text()[-4000:]
    return folder / "run"


def test_the_best_evaluation_so_far_is_saved_though_no_checkpoint_is_due(server, tmp_path):
    made = tiny_config(tmp_path / "run", training__steps=6, evaluation__every_steps=2)
    run_dir = run(server, tmp_path, made, 2)
    losses = {line["step"]: line["loss"] for line in lines(run_dir, "eval")}
    assert losses[0] > losses[2] > losses[4] > losses[6]
    saved = [(line["step"], line["reason"]) for line in lines(run_dir, "checkpoint")]
    assert saved == [(2, "best"), (4, "best"), (6, "end")]
    for step, _ in saved:
        found = state(run_dir, step)["evaluation"]
        assert found == {"step": step, "loss": losses[step], "best": losses[step]}


def bad_config(folder, **changes):
    """Steps so long that nothing behind the base line is as good."""
    return tiny_config(
        folder / "run",
        training__steps=40,
        evaluation__every_steps=2,
        logging__every_steps=100,
        optimizer__learning_rate=3.0,
        optimizer__warmup_steps=1,
        optimizer__schedule="constant",
        **changes,
    )


def test_patience_ends_a_run_and_its_count_survives_a_resume(server, tmp_path):
    folder = tmp_path / "resumed"
    made = bad_config(folder, evaluation__patience=2)
    run_dir = run(server, folder, made, 2)
    losses = [(line["step"], line["loss"]) for line in lines(run_dir, "eval")]
    assert [step for step, _ in losses] == [0, 2, 4]
    assert min(losses[1:], key=lambda one: one[1])[1] > losses[0][1]
    found = status(run_dir)
    assert (found["state"], found["reason"], found["step"]) == ("finished", "patience", 4)
    assert found["exit_code"] == 0
    assert lines(run_dir, "train")[-1]["step"] == 4
    assert [line["step"] for line in lines(run_dir, "checkpoint")] == [4]
    assert state(run_dir, 4)["patience"] == 2

    run(server, folder, made, 2)
    found = status(run_dir)
    assert (found["state"], found["reason"], found["step"]) == ("finished", "patience", 4)
    assert [line["step"] for line in lines(run_dir, "eval")] == [0, 2, 4]

    run(server, folder, made, 2, "evaluation.patience=4")
    assert status(run_dir)["step"] == 8
    assert state(run_dir, 8)["patience"] == 4
    straight = tmp_path / "straight"
    expected = run(server, straight, bad_config(straight, evaluation__patience=4), 2)
    assert status(expected)["step"] == 8
    assert weights(run_dir, 8) == weights(expected, 8)


def test_held_out_documents_of_several_sources_are_measured_by_source(server, tmp_path):
    path = corpus.write_jsonl(tmp_path / "a.jsonl", corpus.articles(60))
    made = tiny_config(tmp_path / "run", training__steps=2)
    made["data"]["sources"] = [{"path": "sample"}, {"path": str(path)}]
    run_dir = run(server, tmp_path, made, 2)
    by_split = {line["split"]: line for line in lines(run_dir, "eval") if line["step"] == 2}
    assert by_split.keys() == {"heldout", "heldout/sample", "heldout/a.jsonl"}
    whole = by_split.pop("heldout")
    for key in ("tokens", "bytes", "documents"):
        assert sum(line[key] for line in by_split.values()) == whole[key]
    nll = sum(line["loss"] * line["tokens"] for line in by_split.values())
    assert nll == pytest.approx(whole["loss"] * whole["tokens"], rel=1e-6)
    assert [line["step"] for line in lines(run_dir, "eval")] == [0, 0, 0, 2, 2, 2]
