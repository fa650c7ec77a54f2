"""Checkpoints that are damaged, gone, of a later llmtrain, or on a disk that does not answer."""

import shutil
from pathlib import Path

import pytest
from helpers.damage import DAMAGES, files_of, flip, flip_the_middle, sign, struck

from llmtrain.agreement import Alone
from llmtrain.checkpoint import format as form, read

NEWEST, OLDER = "step-00000024", "step-00000020"


def refused(run, *overrides, faults=""):
    """A start with one process that ends with code 2; what it said."""
    before = len(run.output())
    assert run.launch(faults, *overrides, world_size=1) == [2], run.output()
    said = run.output()[before:]
    assert "Traceback" not in said
    return said


def found_without(run, file, damage):
    """What a search finds while a file of the newest is damaged, and why it set that aside."""
    heard: list[str] = []
    with struck(run.checkpoints / NEWEST / file, damage):
        found = read.find(
            run.checkpoints,
            run.status()["run_id"],
            Alone(),
            log=lambda event, detail: heard.append(f"{event} {detail['reason']}"),
        )
        (run.checkpoints / f"{NEWEST}.damaged").rename(run.checkpoints / NEWEST)
    assert found is not None
    (said,) = heard
    return found.name, said


def test_f19_a_flipped_bit_in_any_file_is_found_and_named(finished):
    run = finished(2)
    files = files_of(run.checkpoints / NEWEST)
    assert len(files) >= 8
    places = (lambda path: flip(path, 0), flip_the_middle, lambda path: flip(path, -1, 7))
    for file in files:
        for damage in places:
            used, said = found_without(run, file, damage)
            assert (used, said.split()[0]) == (OLDER, "checkpoint_quarantined")
            assert file in said


def goes_on_from_the_older_one(run, file, straight):
    before = len(run.output())
    assert run.launch() == [0, 0], run.output()
    said = run.output()[before:].splitlines()
    (warning,) = (line for line in said if line.startswith("warning: "))
    assert f"{NEWEST}.damaged: {file}" in warning
    assert run.resumed()[-1] == OLDER
    (event,) = run.events("checkpoint_quarantined")
    assert event["checkpoint"] == NEWEST
    assert file in event["reason"]
    assert f"{NEWEST}.damaged" in run.names()
    assert run.outcome() == straight(2)


@pytest.mark.parametrize("file", ["optimizer-00001-of-00001.safetensors", form.MANIFEST])
def test_f19_a_run_with_a_flipped_bit_goes_on_from_the_older_one(finished, straight, file):
    run = finished(2)
    flip_the_middle(run.checkpoints / NEWEST / file)
    goes_on_from_the_older_one(run, file, straight)


@pytest.mark.parametrize("damage", DAMAGES)
def test_f20_a_file_of_another_length_is_found_and_named(finished, damage):
    run = finished(2)
    for file in files_of(run.checkpoints / NEWEST):
        used, said = found_without(run, file, DAMAGES[damage])
        assert used == OLDER
        assert file in said


def test_f20_a_run_with_a_truncated_file_goes_on_from_the_older_one(finished, straight):
    run = finished(2)
    DAMAGES["truncated"](run.checkpoints / NEWEST / form.STATE)
    goes_on_from_the_older_one(run, form.STATE, straight)


def test_f21_a_manifest_that_is_missing_or_wrong_is_damage(finished):
    run = finished(2)
    wrong = {
        "is missing": Path.unlink,
        "not JSON": lambda path: path.write_text("{"),
        "not a JSON object": lambda path: path.write_text("[]"),
        "its own digest differs": lambda path: path.write_text(
            path.read_text().replace('"step":24', '"step":23')
        ),
    }
    for reason, damage in wrong.items():
        used, said = found_without(run, form.MANIFEST, damage)
        assert used == OLDER
        assert f"{form.MANIFEST}: {reason}" in said


def test_f21_a_newer_format_ends_the_start_and_stays_where_it_is(finished):
    run = finished(2)
    sign(run.checkpoints / NEWEST, format=2)
    before = run.names()
    said = refused(run)
    assert f"{NEWEST} = format 2" in said
    assert "expected: format 1" in said
    assert run.names() == before


def test_f22_all_damaged_is_refused_with_the_reason_of_each_and_nothing_is_deleted(finished):
    run = finished(2)
    names = [name for name in run.names() if name.startswith("step-")]
    sizes = {name: len(files_of(run.checkpoints / name)) for name in names}
    for name in names:
        flip_the_middle(run.checkpoints / name / "model.safetensors")
    for _ in range(2):  # the second start says it again
        said = refused(run)
        for name in names:
            assert f"{name}.damaged = model.safetensors: the digest of bytes" in said
    assert len(run.events("checkpoint_quarantined")) == len(names)
    assert all(len(files_of(run.checkpoints / f"{n}.damaged")) > sizes[n] for n in names)


def test_f23_a_run_without_its_checkpoints_does_not_begin_anew(finished):
    run = finished(2)
    shutil.rmtree(run.checkpoints)
    assert f"{NEWEST}, which the record of the run names" in refused(run)
    (run.run_dir / "status.json").unlink()
    (run.run_dir / "auto.json").unlink()
    assert f"{NEWEST}, which the record of the run names" in refused(run)
    assert len(run.lines("start")) == 1


def test_f25_a_disk_that_answers_at_the_second_try_is_no_trouble(finished, straight):
    run = finished(2)
    shutil.rmtree(run.checkpoints / NEWEST)
    assert run.launch("load.read@rank=1@nth=1=eio;load.verify@rank=0@nth=2=eio") == [0, 0]
    assert run.resumed()[-1] == OLDER
    assert [event["used"] for event in run.events("checkpoint_missing")] == [OLDER]
    assert run.outcome() == straight(2)


@pytest.mark.slow  # it waits for half a minute, as the run does
@pytest.mark.parametrize("point", ["load.scan", "load.verify", "load.read"])
def test_f25_a_disk_that_does_not_answer_ends_the_start_with_74(finished, point):
    run = finished(2)
    before = run.names()
    assert run.launch(f"{point}=eio") == [74, 74]
    assert run.status()["exit_code"] == 74
    assert "Input/output error" in run.status()["reason"]
    assert run.names() == before
