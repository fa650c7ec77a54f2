"""The one table, read both ways: what a plan writes is what a rank of that launch reads."""

import pytest
from helpers.on_paper import gpus

from llmtrain.distributed.launch.environment import family
from llmtrain.distributed.launch.named import (
    SECTIONS,
    STRATEGIES,
    has_values,
    named_strategy,
    value,
    variable,
)
from llmtrain.tools.launch.file import launch_values, variables_of

NAMED = [name for strategies in STRATEGIES.values() for name in strategies]


@pytest.mark.parametrize("strategy", NAMED)
def test_the_strategy_that_a_plan_writes_is_the_one_that_a_rank_reads(strategy):
    values = launch_values(strategy, gpus(8, 80, nodes=2), "bf16")
    env = variables_of(values, 16)
    assert named_strategy(env) == strategy
    assert has_values(env, STRATEGIES[family(strategy)][strategy])


@pytest.mark.parametrize("strategy", NAMED)
def test_a_plan_writes_no_key_that_the_table_lacks(strategy):
    values = launch_values(strategy, gpus(8, 80, nodes=2), "bf16")
    for name in SECTIONS.keys() & values.keys():
        assert values[name].keys() <= SECTIONS[name].variables.keys()


def test_no_key_stands_in_two_sections_and_no_variable_twice():
    keys = [key for section in SECTIONS.values() for key in section.variables]
    names = [variable(key) for key in keys if _reaches_a_rank(key)]
    assert len(set(keys)) == len(keys)
    assert len(set(names)) == len(names)


def test_a_key_for_the_launcher_alone_has_no_variable():
    with pytest.raises(ValueError, match="fsdp_min_num_params"):
        variable("fsdp_min_num_params")


def test_what_the_file_does_not_say_is_accelerates_default():
    assert value({}, "zero_stage") == "2"
    assert value({variable("zero_stage"): " 3 "}, "zero_stage") == "3"
    assert has_values({}, {"fsdp_offload_params": False, "offload_param_device": "none"})
    assert not has_values({}, {"fsdp_offload_params": True})


def _reaches_a_rank(key):
    return any(section.variables.get(key) for section in SECTIONS.values())
