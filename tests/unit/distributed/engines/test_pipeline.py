"""What a pipeline refuses before it begins."""

import pytest
from helpers.tiny import tiny_config
from transformers import LlamaConfig

from llmtrain.config.schema import Config
from llmtrain.distributed.engines.pipeline import KEY, fill_problems, problems
from llmtrain.types import ModelCut

FOUR = ModelCut(pipeline=4)


def config(**changes):
    return Config.model_validate(tiny_config("runs/x", **changes))


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (1, []),
        (2, [("training.micro_batch_size", 2, "training.micro_batch_size=1")]),
        (4, [("training.global_batch_size", 8, "16, or distributed.pipeline_schedule=gpipe")]),
    ],
)
def test_the_rows_of_each_pipeline_fill_it(groups, expected):
    asked = config(training__global_batch_size=8, training__micro_batch_size=2)
    found = fill_problems(asked, FOUR, groups)
    assert [(one.key, one.value, one.remedy) for one in found] == expected


def test_each_stage_has_a_block():
    assert [*problems(config(), LlamaConfig(num_hidden_layers=4), FOUR)] == []
    (found,) = problems(config(), LlamaConfig(num_hidden_layers=3), FOUR)
    assert (found.key, found.value, found.remedy) == (KEY, 4, f"{KEY}=3")
