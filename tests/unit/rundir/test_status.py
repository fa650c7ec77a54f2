import json
from datetime import datetime, timedelta

import pytest

from llmtrain.errors import UserError
from llmtrain.rundir.contents import STATUS
from llmtrain.rundir.status import FrozenChoices, read_status, start_status, write_status

FIELDS = [
    "run_id",
    "state",
    "exit_code",
    "reason",
    "step",
    "checkpoint",
    "strategy",
    "world_size",
    "tensor_parallel",
    "pipeline_parallel",
    "sequence_parallel",
    "restarts",
    "updated",
]


def test_the_first_start_writes_every_field_of_the_contract(tmp_path):
    start_status(tmp_path, run_id="a", strategy="ddp", world_size=2)
    status = json.loads((tmp_path / STATUS).read_text())
    assert list(status) == FIELDS
    assert status["state"] == "running"
    assert (status["run_id"], status["step"], status["restarts"]) == ("a", 0, 0)
    assert (status["strategy"], status["world_size"]) == ("ddp", 2)


def test_a_start_that_has_no_strategy_yet_says_none_of_the_one_before(tmp_path):
    start_status(tmp_path, run_id="a", strategy="ddp", world_size=2)
    start_status(tmp_path, run_id="a", strategy=None, world_size=2)
    assert read_status(tmp_path)["strategy"] is None


def test_a_later_start_carries_the_run_over_and_counts_itself(tmp_path):
    start_status(tmp_path, run_id="a", strategy="ddp", world_size=2)
    write_status(
        tmp_path, step=40, checkpoint="step-00000040", state="failed", exit_code=75, reason="lost"
    )
    start_status(tmp_path, run_id="b", strategy="ddp", world_size=3)
    status = read_status(tmp_path)
    assert (status["run_id"], status["step"], status["checkpoint"]) == ("a", 40, "step-00000040")
    assert (status["state"], status["exit_code"], status["reason"]) == ("running", None, None)
    assert (status["world_size"], status["restarts"]) == (3, 1)
    start_status(tmp_path, run_id="c", strategy="ddp", world_size=3)
    assert read_status(tmp_path)["restarts"] == 2


def test_other_fields_stay_when_some_are_written(tmp_path):
    start_status(tmp_path, run_id="a", strategy="ddp", world_size=2)
    write_status(tmp_path, state="finished", exit_code=0)
    assert read_status(tmp_path)["strategy"] == "ddp"


def test_updated_is_utc(tmp_path):
    updated = datetime.fromisoformat(write_status(tmp_path, step=1)["updated"])
    assert updated.utcoffset() == timedelta(0)


def test_a_field_outside_the_contract_is_a_defect(tmp_path):
    with pytest.raises(ValueError, match="stepp"):
        write_status(tmp_path, stepp=1)


def test_a_replacement_that_fails_leaves_the_old_file(tmp_path):
    write_status(tmp_path, step=1)
    with pytest.raises(TypeError):
        write_status(tmp_path, reason=object())
    assert read_status(tmp_path)["step"] == 1
    write_status(tmp_path, step=2)
    assert [path.name for path in tmp_path.iterdir()] == [STATUS]


def test_a_directory_without_a_readable_status_has_none(tmp_path):
    assert read_status(tmp_path) == {}
    for damaged in (b"\0\0", b"[1]", b"[" * 100_000):
        (tmp_path / STATUS).write_bytes(damaged)
        assert read_status(tmp_path) == {}


def test_what_is_no_file_is_no_status(tmp_path):
    (tmp_path / STATUS).mkdir()
    assert read_status(tmp_path) == {}


def test_a_field_of_another_type_counts_as_missing_and_the_others_stay(tmp_path):
    strange = {"step": "x", "restarts": True, "checkpoint": 4, "state": None}
    (tmp_path / STATUS).write_text(json.dumps({"run_id": "mine", "reason": None} | strange))
    assert read_status(tmp_path) == {"run_id": "mine", "reason": None}
    told = start_status(tmp_path, run_id="other", strategy=None, world_size=1)
    kept = {key: told[key] for key in ("run_id", "step", "checkpoint", "restarts")}
    assert kept == {"run_id": "mine", "step": 0, "checkpoint": None, "restarts": 0}


def test_a_status_that_was_deleted_keeps_what_was_written_last(tmp_path):
    before = start_status(tmp_path, run_id="one", strategy="ddp", world_size=2)
    (tmp_path / STATUS).unlink()
    write_status(tmp_path, before, step=7)
    known = read_status(tmp_path)
    assert (known["run_id"], known["strategy"], known["step"]) == ("one", "ddp", 7)
    write_status(tmp_path, before, checkpoint="step-00000007")
    assert read_status(tmp_path)["step"] == 7  # where there is a file, it counts


def test_auto_keeps_what_is_frozen_for_the_run_and_for_each_kind_of_launch(tmp_path):
    one = FrozenChoices(tmp_path, "ddp/cpu/2")
    one.run["precision"] = "fp32"
    one.launch["micro_batch_size"] = 4
    one.save()
    same, other = FrozenChoices(tmp_path, "ddp/cpu/2"), FrozenChoices(tmp_path, "ddp/cpu/3")
    assert same.run == other.run == {"precision": "fp32"}
    assert same.launch == {"micro_batch_size": 4}
    assert other.launch == {}
    assert json.loads((tmp_path / "auto.json").read_text())["launches"] == {
        "ddp/cpu/2": {"micro_batch_size": 4}
    }


def test_a_choice_for_a_type_of_device_is_that_of_all_launches_on_it(tmp_path):
    one = FrozenChoices(tmp_path, "ddp/cuda/2")
    one.device["compile"] = "blocks"
    one.launch["threads"] = 4
    one.save()
    same, other = FrozenChoices(tmp_path, "fsdp2/cuda/16"), FrozenChoices(tmp_path, "ddp/cpu/2")
    assert same.device == {"compile": "blocks"}
    assert other.device == {}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "3",
        '{"run": 3}',
        '{"devices": {"cpu": 1}}',
        '{"launches": []}',
        '{"launches": {"ddp/cpu/1": null}}',
    ],
)
def test_a_damaged_auto_file_is_named(tmp_path, text):
    (tmp_path / "auto.json").write_text(text)
    with pytest.raises(UserError, match=r"auto\.json"):
        FrozenChoices(tmp_path, "ddp/cpu/1")
