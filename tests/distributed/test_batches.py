"""The same batches and losses, however a step is dealt out over processes and workers."""

import pytest
from helpers.tiny import lines, tiny_config, write_config

from llmtrain.tools.data.which import which

STEPS = 8
KILL = {"LLMTRAIN_FAULTS": "loop.step@step=6=kill"}
# (processes, data workers, micro-batch)
LAYOUTS = [
    *[(1, 0, 24), (1, 1, 12), (1, 2, 4)],
    *[(2, 0, 4), (2, 1, 3), (2, 2, 12)],
    *[(3, 0, 8), (3, 1, 1), (3, 2, 2)],
    *[(4, 0, 2), (4, 1, 6), (4, 2, 3)],
]
# Each number of processes, of workers and of micro-batches that leave a rest or none.
SOME = [(1, 2, 4), (2, 1, 3), (2, 2, 12), (3, 0, 8), (4, 0, 2)]


@pytest.fixture(scope="module")
def reference(server, tmp_path_factory):
    """One process, one micro-batch, no worker."""
    return train(server, tmp_path_factory.mktemp("reference"), *LAYOUTS[0])


def train(server, folder, world_size, workers, micro):
    run_dir = folder / "run"
    config = tiny_config(
        run_dir, data__workers=workers, training__micro_batch_size=micro, training__steps=STEPS
    )
    path = write_config(folder, config)
    codes = server.run(["train", str(path)], world_size, folder)
    assert codes == [0] * world_size, (folder / "output.txt").read_text()
    return lines(run_dir, "train")


@pytest.mark.parametrize(
    ("world_size", "workers", "micro"),
    [pytest.param(*one, marks=[] if one in SOME else pytest.mark.slow) for one in LAYOUTS[1:]],
)
def test_steps_do_not_depend_on_processes_workers_or_micro_batch(
    server, tmp_path, reference, world_size, workers, micro
):
    found = train(server, tmp_path, world_size, workers, micro)
    assert len(found) == len(reference) == STEPS
    for one, other in zip(found, reference, strict=True):
        assert one["batch_digest"] == other["batch_digest"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        assert one["tokens"] == other["tokens"]
        assert one["sources"] == other["sources"]


SIZES = ((1, 12), (4, 24), (6, 48))
GROWING = [{"from_step": step, "size": size} for step, size in SIZES]


def test_a_batch_that_grows_is_the_same_on_any_processes_and_behind_a_kill(server, tmp_path):
    """One process for all steps; two that are killed in step 6, then three that go on from 4."""
    runs = {}
    for name, launches in {"straight": [(1, {})], "moved": [(2, KILL), (3, {})]}.items():
        run_dir, folder = tmp_path / name / "run", tmp_path / name
        config = tiny_config(
            run_dir,
            training__global_batch_size=GROWING,
            training__micro_batch_size=2,
            training__steps=STEPS,
            checkpoint__every_steps=4,
        )
        path = write_config(folder, config)
        codes = [server.run(["train", str(path)], size, folder, env) for size, env in launches]
        assert codes[-1] == [0] * launches[-1][0], (folder / "output.txt").read_text()
        runs[name] = lines(run_dir, "train")
        starts = lines(run_dir, "start")
        assert [start["step"] for start in starts] == [0, 4][: len(launches)]
        assert starts[-1]["batch_sizes"] == [list(one) for one in SIZES]
    assert len(runs["moved"]) == STEPS
    for one, other in zip(runs["moved"], runs["straight"], strict=True):
        assert one["batch_digest"] == other["batch_digest"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
    tokens = [line["tokens"] // 32 for line in runs["straight"]]
    assert tokens == [12, 24, 36, 60, 84, 132, 180, 228]
    made = which(tmp_path / "moved" / "run", 7)
    assert (made.blocks, made.checked_at) == (48, 7)
    assert {one.g for one in made.documents} == set(range(132, 180))


def test_a_batch_may_grow_later_in_a_run_that_has_begun(server, tmp_path):
    """The steps that were made have the sizes that they had, so the data goes on."""
    lengths = {"straight": [(GROWING, 6)], "later": [(12, 3), (GROWING, 6)]}
    digests = {}
    for name, launches in lengths.items():
        for sizes, steps in launches:
            config = tiny_config(tmp_path / name / "run", training__steps=steps)
            config["training"]["global_batch_size"] = sizes
            config["checkpoint"]["accept_changes"] = ["training.global_batch_size"]
            path = write_config(tmp_path / name, config)
            assert server.run(["train", str(path)], 1, tmp_path / name) == [0]
        digests[name] = [one["batch_digest"] for one in lines(tmp_path / name / "run", "train")]
    assert digests["later"] == digests["straight"]
