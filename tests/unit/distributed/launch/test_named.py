"""The environments are what accelerate 1.15 exports to a rank, as far as it decides something."""

import ast
import sys
from pathlib import Path

import pytest
from helpers.on_paper import gpus

from llmtrain.distributed.launch import environment, named
from llmtrain.distributed.launch.environment import family
from llmtrain.distributed.launch.named import (
    SECTIONS,
    STRATEGIES,
    has_values,
    hsdp_mesh,
    ignored_problems,
    named_family,
    named_mesh,
    named_strategy,
    one_sided,
    unsupported_problems,
    value,
    variable,
)
from llmtrain.tools.launch.file import launch_values, variables_of
from llmtrain.types import ModelCut

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "false"}
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true"}
STAGE = "ACCELERATE_DEEPSPEED_ZERO_STAGE"
OPTIMIZER = "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"
PARAM = "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"
INIT = "ACCELERATE_DEEPSPEED_ZERO3_INIT"
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
TENSOR, PIPELINE = "parallelism_config_tp_size", "parallelism_config_pp_size"
JSON = "ACCELERATE_DEEPSPEED_CONFIG_FILE"


def mesh(replicas=1, shards=1, **sizes):
    """What a `parallelism_config` of a file becomes; sizes: tp, cp, sp."""
    sizes = {"dp_replicate": replicas, "dp_shard": shards, "tp": 1, "cp": 1, "sp": 1} | sizes
    found = {f"PARALLELISM_CONFIG_{kind.upper()}_SIZE": str(n) for kind, n in sizes.items()}
    return found | {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}


FINE = {
    "plain": ({}, None),
    "plain, bf16": ({"ACCELERATE_MIXED_PRECISION": "bf16"}, None),
    "plain, not compiled": ({"ACCELERATE_DYNAMO_BACKEND": "NO"}, None),
    "FSDP": (FSDP, "fsdp2"),
    "FSDP with offload": (FSDP | {"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp2_offload"),
    "FSDP with a mesh": (FSDP | mesh(2, 2), "hsdp"),
    "FSDP with a mesh of shards alone": (FSDP | mesh(1, 4), "fsdp2"),
    "a stale mesh that is switched off": (FSDP | {"PARALLELISM_CONFIG_TP_SIZE": "2"}, "fsdp2"),
    "DEEPSPEED": (ZERO, "zero2"),
    "DEEPSPEED, stage 1": (ZERO | {STAGE: "1"}, "zero1"),
    "DEEPSPEED, stage 3": (ZERO | {STAGE: "3", OPTIMIZER: "none", PARAM: "none"}, "zero3"),
    "DEEPSPEED, offload": (ZERO | {STAGE: "3", OPTIMIZER: "cpu", PARAM: "cpu"}, "zero3_offload"),
    "DEEPSPEED, auto": (ZERO | {ACCUMULATION: "auto", INIT: "true"}, "zero2"),
}
REFUSED = {
    "FSDP1": (FSDP | {"FSDP_VERSION": "1"}, {"fsdp_version"}),
    "FSDP without a version": ({"ACCELERATE_USE_FSDP": "true"}, {"fsdp_version"}),
    "FSDP with modules left out": (
        FSDP | {"FSDP_IGNORED_MODULES": "lm_head"},
        {"fsdp_ignored_modules"},
    ),
    "HSDP with offload": (
        FSDP | mesh(2, 2) | {"FSDP_OFFLOAD_PARAMS": "true"},
        {"fsdp_offload_params"},
    ),
    "context parallel": (FSDP | mesh(1, 2, cp=2), {"parallelism_config_cp_size"}),
    "context and tensor parallel": (FSDP | mesh(1, 1, tp=2, cp=2), {"parallelism_config_cp_size"}),
    "a mesh of another number": (FSDP | mesh(2, 4), {"parallelism_config"}),
    "a mesh that shards nothing": (FSDP | mesh(4, 1), {"parallelism_config"}),
    "a mesh of no numbers": (FSDP | mesh(2, -1), {"parallelism_config"}),
    "a mesh without FSDP": (mesh(2, 2), {"parallelism_config"}),
    "tensor parallel of no number": (
        mesh(tp="two", sp=-1),
        {"parallelism_config_tp_size", "parallelism_config_sp_size"},
    ),
    "a mesh of DeepSpeed": (ZERO | mesh(2, 2), {"parallelism_config"}),
    "stage 0": (ZERO | {STAGE: "0"}, {"zero_stage"}),
    "stage 4": (ZERO | {STAGE: "4"}, {"zero_stage"}),
    "stage 2 with offload": (ZERO | {STAGE: "2", OPTIMIZER: "cpu"}, {"offload_optimizer_device"}),
    "half of an offload": (ZERO | {STAGE: "3", OPTIMIZER: "cpu"}, {"offload_optimizer_device"}),
    "offload to a disk": (
        ZERO | {STAGE: "3", OPTIMIZER: "nvme", PARAM: "nvme"},
        {"offload_optimizer_device"},
    ),
    "accumulation of its own": (ZERO | {ACCUMULATION: "4"}, {"gradient_accumulation_steps"}),
    "a model partitioned as it is built": (ZERO | {STAGE: "3", INIT: "true"}, {"zero3_init_flag"}),
    "a JSON": (ZERO | {JSON: "ds.json"}, {"deepspeed_config_file"}),
    "experts": (
        ZERO | {"ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "Expert"},
        {"deepspeed_moe_layer_cls_names"},
    ),
    "Megatron-LM": ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {"distributed_type"}),
    "a compiler": ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {"dynamo_backend"}),
    "fp16": ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {"mixed_precision"}),
    "everything at once": (
        ZERO | mesh(1, 2, tp=2) | {"ACCELERATE_MIXED_PRECISION": "fp8", STAGE: "3", INIT: "true"},
        {"parallelism_config", "mixed_precision", "zero3_init_flag"},
    ),
}


@pytest.mark.parametrize("how", FINE)
def test_a_launch_names_one_strategy_or_none(how):
    env, strategy = FINE[how]
    assert named_strategy(env) == strategy
    assert list(unsupported_problems(env, 4)) == []


@pytest.mark.parametrize("how", REFUSED)
def test_what_is_not_offered_is_refused(how):
    env, keys = REFUSED[how]
    problems = list(unsupported_problems(env, 4))
    assert [problem.key for problem in problems] == list(dict.fromkeys(p.key for p in problems))
    assert {problem.key for problem in problems} == keys


def test_fsdp1_is_told_why():
    text = str(next(iter(unsupported_problems(FSDP | {"FSDP_VERSION": "1"}, 2))))
    assert "flat tensor" in text
    assert "fsdp_version: 2" in text


@pytest.mark.parametrize(
    ("env", "cut"),
    [
        (FSDP | mesh(1, 2, tp=2), ModelCut(tensor=2)),
        (FSDP | mesh(1, 2), ModelCut(pipeline=2)),
        (FSDP | mesh(1, 2, sp=2), ModelCut(sequence=2)),
        (mesh(tp=2), ModelCut(tensor=2)),
        (mesh(sp=4), ModelCut(sequence=4)),
    ],
)
def test_a_mesh_of_models_that_are_cut_is_that_of_the_processes(env, cut):
    assert list(unsupported_problems(env, 4, cut)) == []


def test_a_mesh_of_other_processes_is_told_how_many_hold_a_model():
    (problem,) = unsupported_problems(FSDP | mesh(1, 4, tp=2), 4, ModelCut(tensor=2))
    assert problem.value == "dp_replicate_size 1 × dp_shard_size 4 × 2 that hold one model"


def test_hsdp_shards_over_what_a_node_holds_of_each_part():
    two_nodes = {"LOCAL_WORLD_SIZE": "8"}
    assert hsdp_mesh(two_nodes, 16, ModelCut(tensor=2)) == (2, 4)
    assert hsdp_mesh(two_nodes, 16, ModelCut(tensor=2, pipeline=4)) == (2, 1)
    assert hsdp_mesh(mesh(2, 2, sp=2) | two_nodes, 16, ModelCut(tensor=2, sequence=2)) == (2, 4)
    (problem,) = one_sided("distributed.strategy", hsdp_mesh(two_nodes, 16, ModelCut(16)))
    assert "2 × 0 processes" in str(problem)


@pytest.mark.parametrize(
    ("values", "key", "said"),
    [
        (
            {"distributed_type": "FSDP", "parallelism_config": {PIPELINE: 2}},
            PIPELINE,
            "distributed.pipeline_parallel=2",
        ),
        ({"parallelism_config": {"parallelism_config_tp_size": 2}}, "parallelism_config", "tp"),
        (
            {"distributed_type": "NO", "parallelism_config": {"parallelism_config_tp_size": 1}},
            "",
            "",
        ),
        ({"distributed_type": "MULTI_GPU", "parallelism_config": None}, "", ""),
        ({}, "", ""),
    ],
)
def test_what_accelerate_ignores_of_a_file_is_refused_by_name(values, key, said):
    found = {problem.key: str(problem) for problem in ignored_problems(values)}
    assert list(found) == ([key] if key else [])
    assert said in "".join(found.values())


def test_a_mesh_without_shards_is_told_what_it_is():
    assert "ddp" in str(next(iter(unsupported_problems(FSDP | mesh(4, 1), 4))))


def test_families_and_meshes_are_those_of_the_launch():
    assert named_family({}) is None
    assert named_family(FSDP) == "fsdp"
    assert named_family(ZERO) == "zero"
    assert named_mesh(FSDP) is None
    assert named_mesh(FSDP | mesh(2, 3)) == (2, 3)


@pytest.mark.parametrize("module", [environment, named])
def test_only_the_standard_library_is_imported(module):
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    outside = {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names)
    assert outside == {"llmtrain"}


# The one table, read both ways: what a plan writes is what a rank of that launch reads.
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
