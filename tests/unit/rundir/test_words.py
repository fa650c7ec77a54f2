import pytest

from llmtrain.rundir.words import strategy_in_words


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ({}, "?"),
        ({"strategy": "fsdp2"}, "fsdp2"),  # of an older llmtrain
        ({"strategy": "ddp", "tensor_parallel": 1, "pipeline_parallel": None}, "ddp"),
        (
            {"strategy": "hsdp", "tensor_parallel": 2, "pipeline_parallel": 4},
            "hsdp × tensor parallel 2 × pipeline parallel 4",
        ),
        ({"strategy": "ddp", "sequence_parallel": 8}, "ddp × sequence parallel 8"),
    ],
)
def test_a_strategy_is_named_with_what_cuts_its_models(start, words):
    assert strategy_in_words(start) == words
