"""Whole runs of a sharded model, which rank 0 alone builds: killed, and begun from weights."""

import pytest
from helpers.tiny import lines, tiny_config, write_config


def config(run_dir, strategy, **changes):
    made = tiny_config(
        run_dir,
        training__steps=6,
        training__global_batch_size=8,
        checkpoint__every_steps=3,
        evaluation__every_steps=3,
        **changes,
    )
    made["distributed"] = {"strategy": strategy, "timeout_minutes": 2.0}
    made["data"]["packing"] = "bestfit"  # documents are hidden, which is checked at every start
    return made


def train(server, folder, made):
    path = write_config(folder, made)
    assert server.run(["train", str(path)], 2, folder) == [0, 0], (
        folder / "output.txt"
    ).read_text()


def test_a_sharded_run_begins_with_the_weights_it_is_given(server, tmp_path):
    train(server, tmp_path / "base", config(tmp_path / "base" / "run", "ddp"))
    base = tmp_path / "base" / "run" / "checkpoints" / "step-00000006"
    found = {}
    for strategy in ("fsdp2", "ddp"):
        made = config(tmp_path / strategy / "run", strategy)
        made["model"] = {"from": str(base), "freeze": ["*.layers.0.*"]}
        train(server, tmp_path / strategy, made)
        found[strategy] = lines(tmp_path / strategy / "run", "train")
    last = lines(tmp_path / "base" / "run", "eval")[-1]["loss"]
    assert lines(tmp_path / "fsdp2" / "run", "eval")[0]["loss"] == pytest.approx(last, rel=1e-6)
    for one, other in zip(found["fsdp2"], found["ddp"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_rank_that_would_end_a_sample_earlier_ends_it_with_the_others(server, tmp_path, strategy):
    """Each forward waits for all ranks; alone, rank 1 would have gone on to train."""
    made = config(tmp_path / "run", strategy, evaluation__prompts=["The planet"])
    made["distributed"]["timeout_minutes"] = 0.2
    path = write_config(tmp_path, made)
    codes = server.run(
        ["call", "helpers.odd_ranks", "with_bad_samples", "1", str(path)], 2, tmp_path
    )
    assert codes == [0, 0], (tmp_path / "output.txt").read_text()
    found = lines(tmp_path / "run", "sample")
    assert [one["step"] for one in found] == [0, 3, 6]
    assert all(one["text"] for one in found)
