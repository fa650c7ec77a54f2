"""What is known of a reference: whether it is enough, and the parts of a pass that was cut off."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from llmtrain.errors import UserError
from llmtrain.rundir.reference import Column, empty, load
from llmtrain.training.start.reference import _has_enough, _read_parts, _settle

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


@pytest.mark.parametrize(
    ("walked", "held", "enough"),
    [
        ({"data": "these", "steps": 8}, None, True),
        ({"data": "these", "steps": "all"}, None, True),
        ({"data": "these", "steps": 7}, None, False),
        ({"data": "others", "steps": "all"}, None, False),
        ({}, None, False),
        ({"data": "these", "steps": "all"}, (1, 2), True),
        ({"data": "these", "steps": "all"}, (1, 3), False),
    ],
)
def test_a_column_is_enough_for_the_data_the_steps_and_the_held_out_pairs_that_it_has(
    walked, held, enough
):
    keys = np.array([(1, 2)], np.uint64)
    column = replace(Column(keys, np.zeros((1, 2)), np.zeros(1, int), MADE_WITH), walked=walked)
    of_held = SimpleNamespace(keys=np.array([held], np.uint64)) if held else None
    heldout = SimpleNamespace(num_blocks=lambda _: 1, pairs_of=lambda *_: of_held)
    manifest = SimpleNamespace(fingerprint="these", seq_len=16)
    data = SimpleNamespace(manifest=manifest, heldout=heldout if held else None)
    assert _has_enough(column, SimpleNamespace(total_steps=8), data) is enough


def test_a_run_goes_on_with_the_column_that_its_checkpoint_names_and_with_no_other(tmp_path):
    path = tmp_path / "reference.safetensors"
    Column(np.array([(1, 2)], np.uint64), np.zeros((1, 2)), np.zeros(1, int), MADE_WITH).save(path)
    checkpoint, asked = SimpleNamespace(accept_changes=()), SimpleNamespace(reference="start")
    config = SimpleNamespace(checkpoint=checkpoint, preference=asked)
    own, other = (SimpleNamespace(state={"reference": one}) for one in (load(path).digest, "other"))
    _settle(config, path, MADE_WITH, own)
    for made_with, named, why in ((MADE_WITH, other, "another one"), ({"base": "b"}, own, "base")):
        with pytest.raises(UserError, match=why):
            _settle(config, path, made_with, named)
    assert path.exists()
