import re

import pytest
from helpers.cases import SMALL, case

from llmtrain.checkpoint.files import size
from llmtrain.errors import UserError
from llmtrain.model.count import CannotCountError
from llmtrain.tools.doctor.run import plan
from llmtrain.tools.plan import plan as make_plan
from llmtrain.training.start import planning


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_plan_that_fits_is_said_with_its_bytes(tmp_path):
    made = case(tmp_path, text=SMALL)
    looked = plan(made)
    assert looked.state == "ok"
    assert re.match(r"ddp on 1 process, micro-batch \d+ × \d+, activation", looked.found)
    expected = make_plan(made.config)
    assert size(expected.chosen.memory.total_bytes) in looked.found
    assert f"{size(expected.disk_bytes)} of checkpoints at most" in looked.found


def test_what_fits_nowhere_is_an_error_with_the_key_that_helps(tmp_path):
    looked = plan(case(tmp_path, "distributed.device_memory_gb=0.0001", text=SMALL))
    assert looked.state == "error"
    assert looked.remedy


def test_the_launch_file_says_how_many_and_which_strategy(tmp_path):
    file = {
        "distributed_type": "FSDP",
        "num_processes": 2,
        "fsdp_config": {"fsdp_version": 2},
    }
    looked = plan(case(tmp_path, text=SMALL, launch=file))
    assert looked.found.startswith("fsdp2 on 2 processes, ")


def test_what_cannot_be_planned_is_refused(tmp_path):
    with pytest.raises(UserError, match="vocab_size"):
        plan(case(tmp_path, "model.config.vocab_size=3", text=SMALL))


def test_what_cannot_be_counted_is_a_warning_with_the_reason(tmp_path, monkeypatch):
    def refuse(*_):
        raise CannotCountError("its experts run in a loop")

    monkeypatch.setattr(planning, "count_saved", refuse)
    looked = plan(case(tmp_path, text=SMALL))
    assert looked.state == "warning"
    assert "its experts run in a loop; ddp is taken" in looked.found
    assert looked.remedy
