"""The same batches and losses, however a step is dealt out over processes and workers."""

import pytest
from helpers.tiny import lines, tiny_config, write_config

STEPS = 8
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
        run_dir,
        data__workers=workers,
        training__micro_batch_size=micro,
        training__steps=STEPS,
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
