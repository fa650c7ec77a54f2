"""Whole runs under every strategy: the same losses, and each goes on from what another wrote."""

import pytest
from helpers.tiny import lines, status, tiny_config, write_config

STEPS = 6
WORLD = {"hsdp": 4, "zero3": 3}


def config(run_dir, strategy, **changes):
    """Accumulation, a checkpoint in the middle, an evaluation and a sample behind it."""
    made = tiny_config(
        run_dir,
        training__steps=STEPS,
        checkpoint__every_steps=3,
        evaluation__every_steps=3,
        evaluation__prompts=["The planet"],
        # So that a shorter run is the beginning of a longer one.
        optimizer__schedule="constant",
        optimizer__warmup_steps=1,
        **changes,
    )
    made["distributed"] = {"strategy": strategy, "timeout_minutes": 2.0}
    return made


def run(server, folder, made, world, *more):
    path = write_config(folder, made)
    # The shard groups of hsdp are nodes: four processes stand for two nodes of two.
    env = {"LOCAL_WORLD_SIZE": str(min(world, 2))} if world == 4 else {}
    codes = server.run(["train", str(path), *more], world, folder, env)
    assert codes == [0] * world, (folder / "output.txt").read_text()[-4000:]


@pytest.fixture(scope="module")
def straight(server, tmp_path_factory):
    """Under DDP."""
    folder = tmp_path_factory.mktemp("ddp")
    run(server, folder, config(folder / "run", "ddp"), 2)
    return folder / "run"


@pytest.mark.parametrize(
    "strategy",
    [
        *("fsdp2", "hsdp", "zero2", "zero3"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero1", "zero3_offload")),
    ],
)
def test_a_run_under_any_strategy_is_the_run_under_ddp(server, tmp_path, straight, strategy):
    run_dir = tmp_path / "run"
    run(server, tmp_path, config(run_dir, strategy), WORLD.get(strategy, 2))
    assert status(run_dir)["strategy"] == strategy
    assert [line["strategy"] for line in lines(run_dir, "start")] == [strategy]
    same_losses(run_dir, straight)
    found, expected = lines(run_dir, "eval"), lines(straight, "eval")
    assert [one["tokens"] for one in found] == [one["tokens"] for one in expected]
    assert [one["loss"] for one in found] == pytest.approx([one["loss"] for one in expected], 1e-5)
    assert lines(run_dir, "sample")[0]["text"] == lines(straight, "sample")[0]["text"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(("fsdp2", "ddp"), ("ddp", "fsdp2"), ("zero2", "fsdp2")),
        *(
            pytest.param(*two, marks=pytest.mark.slow)
            for two in (("fsdp2", "zero3"), ("zero3", "ddp"))
        ),
    ],
)
def test_what_one_strategy_saved_another_goes_on_from(server, tmp_path, straight, first, second):
    run_dir = tmp_path / "run"
    run(server, tmp_path, config(run_dir, first), 2, "training.steps=3")
    run(server, tmp_path, config(run_dir, second), 2)
    assert [line["strategy"] for line in lines(run_dir, "start")] == [first, second]
    assert lines(run_dir, "start")[1]["resumed_from"] == "step-00000003"
    same_losses(run_dir, straight)


def same_losses(run_dir, expected):
    found, straight = lines(run_dir, "train"), lines(expected, "train")
    assert [one["batch_digest"] for one in found] == [one["batch_digest"] for one in straight]
    for one, other in zip(found, straight, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_a_plain_launch_takes_fsdp2_where_ddp_does_not_fit(server, tmp_path):
    """A model whose weights and moments are most of what it needs."""
    made = config(tmp_path / "ddp" / "run", "auto", training__micro_batch_size=1)
    made["model"]["config"] |= {
        "hidden_size": 192,
        "num_hidden_layers": 6,
        "intermediate_size": 512,
    }
    made["training"] |= {"steps": 2, "global_batch_size": 4}
    run(server, tmp_path / "ddp", made, 2)
    (start,) = lines(tmp_path / "ddp" / "run", "start")
    assert start["strategy"] == "ddp"
    needed = start["plan"]["total_bytes"] / 2**30
    made["run"]["dir"] = str(tmp_path / "less" / "run")
    made["distributed"]["device_memory_gb"] = 0.8 * needed
    run(server, tmp_path / "less", made, 2)
    (start,) = lines(tmp_path / "less" / "run", "start")
    assert start["strategy"] == status(tmp_path / "less" / "run")["strategy"] == "fsdp2"
    assert start["plan"]["total_bytes"] <= 0.8 * needed * 2**30
    assert "ddp" in start["plan"]["reason"]
    same_losses(tmp_path / "less" / "run", tmp_path / "ddp" / "run")


def test_a_plan_that_fits_nowhere_is_refused_with_what_would_help(server, tmp_path):
    made = config(tmp_path / "run", "auto", training__micro_batch_size=2)
    made["distributed"]["device_memory_gb"] = 1e-4
    path = write_config(tmp_path, made)
    assert server.run(["train", str(path)], 2, tmp_path) == [2, 2]
    said = (tmp_path / "output.txt").read_text()
    assert said.count("error:") == 1
    assert "Traceback" not in said
    assert "device memory" in said
    assert "fsdp2_offload" in said
    assert "nothing fits" in said
    assert status(tmp_path / "run")["exit_code"] == 2
    assert status(tmp_path / "run")["strategy"] is None


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_rank_that_would_end_a_sample_earlier_ends_it_with_the_others(server, tmp_path, strategy):
    """Each forward waits for all ranks; alone, rank 1 would have gone on to train."""
    made = config(tmp_path / "run", strategy)
    made["distributed"]["timeout_minutes"] = 0.2
    path = str(write_config(tmp_path, made))
    arguments = ["call", "helpers.odd_ranks", "with_bad_samples", "1", path]
    assert server.run(arguments, 2, tmp_path) == [0, 0], (tmp_path / "output.txt").read_text()
    found = lines(tmp_path / "run", "sample")
    assert [one["step"] for one in found] == [0, 3, 6]
    assert all(one["text"] for one in found)


def test_the_plan_is_compared_with_the_measured_peak(straight):
    (found,) = [one for one in lines(straight, "event") if one["event"] == "memory_compared"]
    (start,) = lines(straight, "start")
    planned = start["plan"]["total_bytes"] - start["plan"]["parts"]["reserve"]
    assert found["step"] == 3
    assert found["detail"]["planned_gb"] == round(planned / 2**30, 3) > 0
    measured = found["detail"]["measured_gb"]
    assert measured > 0
    assert found["detail"]["difference"] == pytest.approx(
        measured * 2**30 / planned - 1, abs=0.0006 * 2**30 / planned
    )
    log = (straight / "logs" / "rank-0.log").read_text()
    assert "memory compared" not in log  # resident memory is told to nobody
