"""Runs whose blocks torch's inductor has compiled, on two processes."""

from helpers.ranks import until
from helpers.tiny import lines, tiny_config, weights, write_config

STEPS = 60


def compiled_config(run_dir):
    """Samples at every evaluation, a checkpoint every four steps."""
    return tiny_config(
        run_dir,
        training__steps=STEPS,
        training__global_batch_size=8,
        training__compile="blocks",
        checkpoint__every_steps=4,
        evaluation__every_steps=20,
        evaluation__prompts=["The planet"],
    )


def test_compiled_blocks_resume_in_equal_bits_and_are_compiled_once(server, tmp_path):
    runs = {name: tmp_path / name / "run" for name in ("straight", "killed")}
    paths = {name: write_config(at.parent, compiled_config(at)) for name, at in runs.items()}
    command = ["train", str(paths["straight"])]
    assert server.run(command, 2, tmp_path / "straight") == [0, 0]

    command = ["train", str(paths["killed"])]
    ranks = server.start(command, 2, tmp_path / "killed")
    until(lambda: len(lines(runs["killed"], "train")) >= 6, "six steps")
    ranks.kill()
    assert lines(runs["killed"], "train")[-1]["step"] < STEPS, "it was killed on the way"
    assert server.run(command, 2, tmp_path / "killed") == [0, 0]

    assert lines(runs["killed"], "start")[-1]["resumed_from"], "it resumed"
    assert weights(runs["killed"], STEPS) == weights(runs["straight"], STEPS)
    for run_dir in runs.values():
        events = [line["event"] for line in lines(run_dir, "event")]
        assert "compiled_again" not in events
        assert [line["step"] for line in lines(run_dir, "sample")][-1] == STEPS
        log = (run_dir / "logs" / "rank-0.log").read_text()
        assert "compiling blocks (2 modules)" in log
