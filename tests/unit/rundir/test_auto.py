import json

import pytest

from llmtrain.errors import UserError
from llmtrain.rundir.status import FrozenChoices


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
