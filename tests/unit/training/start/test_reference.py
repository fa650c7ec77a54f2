"""Parts of a pass that was cut off: whole sets go on, and nothing else."""

import numpy as np

from llmtrain.rundir.reference import Column, empty
from llmtrain.training.start.reference import _read_parts

MADE_WITH = {"base": "abc"}


def part(place, number, rank, world_size, made_with=None):
    keys = np.array([[number, rank]], np.uint64)
    values = np.array([[-1.0 * number, -1.0 * rank]])
    column = Column(keys, values, np.array([number]), made_with or MADE_WITH)
    column.save(place / f"part-{number}-{rank}-of-{world_size}.safetensors")


def read(place):
    found, number = _read_parts(place, empty(MADE_WITH))
    return sorted(tuple(key) for one in found for key in one.keys.tolist()), number


def test_sets_that_all_processes_have_written_are_taken(tmp_path):
    part(tmp_path, 1, 0, 2)
    part(tmp_path, 1, 1, 2)
    part(tmp_path, 2, 0, 3)  # by another number of processes
    part(tmp_path, 2, 1, 3)
    part(tmp_path, 2, 2, 3)
    assert read(tmp_path) == ([(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)], 2)


def test_a_set_that_a_killed_process_lacks_is_left_out(tmp_path):
    part(tmp_path, 1, 0, 2)
    part(tmp_path, 1, 1, 2)
    part(tmp_path, 2, 1, 2)
    assert read(tmp_path) == ([(1, 0), (1, 1)], 2)


def test_what_was_made_with_something_else_or_damaged_is_left_out(tmp_path):
    part(tmp_path, 1, 0, 1, {"base": "other"})
    part(tmp_path, 2, 0, 1)
    path = tmp_path / "part-2-0-of-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    (tmp_path / "part-x.safetensors").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("mine")
    assert read(tmp_path) == ([], 2)
