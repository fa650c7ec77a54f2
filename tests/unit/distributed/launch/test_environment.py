"""The environments are those that accelerate 1.15 was seen to make by the launch beside them.

Only what decides something is kept of them.
"""

import os
import subprocess
import sys
from typing import get_args

import pytest
from accelerate import Accelerator
from helpers.config import loaded
from helpers.ranks import ROOT

from llmtrain.config.schema import DistributedConfig
from llmtrain.distributed.engines import accelerator
from llmtrain.distributed.launch import environment
from llmtrain.distributed.launch.environment import (
    allowed_strategies,
    awaited,
    check_docstrings,
    check_environment,
    launcher_problems,
    model_cut,
    verify_launch,
    world_size,
)
from llmtrain.errors import UserError
from llmtrain.types import ModelCut


def check(env, config):
    check_environment(env, config.distributed, config.training)


TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
NO = {"ACCELERATE_MIXED_PRECISION": "no"}

FINE = {
    "plain python": {},
    "torchrun --nproc_per_node 2": TORCHRUN,
    "MULTI_GPU + use_cpu": TORCHRUN | NO,
    "MULTI_GPU + use_cpu, ACCELERATE_USE_CPU=true": TORCHRUN | NO | {"ACCELERATE_USE_CPU": "true"},
    "MULTI_GPU, mixed_precision bf16": TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "bf16"},
    "distributed_type NO": NO | {"ACCELERATE_USE_CPU": "True"},
    "no config file": NO | {"ACCELERATE_USE_CPU": "False"},
    "MULTI_GPU inside srun": TORCHRUN | NO | {"PMI_SIZE": "4"},
}
REFUSED = {
    "--cpu --num_processes 2": (
        NO | {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        "MASTER_ADDR",
    ),
    "YAML MULTI_CPU": (
        NO | {"ACCELERATE_USE_CPU": "False", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        "MASTER_ADDR",
    ),
    "YAML FSDP without a version": (
        TORCHRUN | NO | {"ACCELERATE_USE_FSDP": "true"},
        "fsdp_version",
    ),
    "--use_fsdp over YAML DEEPSPEED": (
        TORCHRUN | NO | {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"},
        "fsdp_version",
    ),
    "YAML DEEPSPEED with a JSON": (
        TORCHRUN
        | {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"},
        "deepspeed_config_file",
    ),
    "YAML MEGATRON_LM": (TORCHRUN | {"ACCELERATE_USE_MEGATRON_LM": "true"}, "distributed_type"),
    "mixed_precision fp16": (TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision"),
    "mixed_precision fp8": (TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "fp8"}, "mixed_precision"),
    "parallelism_config with cp": (
        TORCHRUN
        | {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_CP_SIZE": "2",
        },
        "parallelism_config_cp_size",
    ),
    "stale WORLD_SIZE": ({"WORLD_SIZE": "2"}, "WORLD_SIZE"),
    "PMI_SIZE, one process": ({"PMI_SIZE": "2"}, "PMI_SIZE"),
    "mpirun": ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE"),
    "mvapich": ({"MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_SIZE"),
    "WORLD_SIZE is no number": ({"WORLD_SIZE": "two"}, "WORLD_SIZE"),
}


def refused(env, config):
    with pytest.raises(UserError) as caught:
        check(env, config)
    return {problem.key: str(problem) for problem in caught.value.problems}


@pytest.mark.parametrize("how", FINE)
def test_a_launch_that_trains_what_was_asked_for_is_accepted(tmp_path, how):
    check(FINE[how], loaded(tmp_path))


@pytest.mark.parametrize("how", REFUSED)
def test_a_launch_that_becomes_something_else_is_refused(tmp_path, how):
    env, key = REFUSED[how]
    assert list(refused(env, loaded(tmp_path))) == [key]


def test_the_simple_launcher_is_told_with_what_starts_two(tmp_path):
    found = refused(REFUSED["--cpu --num_processes 2"][0], loaded(tmp_path))
    assert "started one" in found["MASTER_ADDR"]
    assert "accelerate_configs/cpu.yaml" in found["MASTER_ADDR"]


@pytest.mark.parametrize(
    ("asked", "launched", "fine"),
    [
        ("fp32", "bf16", False),
        ("bf16", "bf16", True),
        ("auto", "bf16", True),
        ("fp32", "no", True),
        ("bf16", "no", True),  # accelerate says `no` where nobody said anything
        ("auto", None, True),
    ],
)
def test_only_an_explicit_precision_contradicts_the_file(tmp_path, asked, launched, fine):
    config = loaded(tmp_path, f"training.precision={asked}")
    env = {} if launched is None else {"ACCELERATE_MIXED_PRECISION": launched}
    if fine:
        check(env, config)
    else:
        assert list(refused(env, config)) == ["training.precision"]


def test_the_batch_is_split_over_the_processes_that_there_are(tmp_path):
    config = loaded(tmp_path, "training.global_batch_size=6", "training.micro_batch_size=2")
    check({}, config)
    assert (
        "2 processes × micro-batch 2 = 4" in refused(TORCHRUN, config)["training.global_batch_size"]
    )


def test_all_problems_of_a_launch_are_told_at_once(tmp_path):
    config = loaded(tmp_path, "training.global_batch_size=3")
    env = TORCHRUN | {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "fp16"}
    keys = {"fsdp_version", "mixed_precision", "training.global_batch_size"}
    assert set(refused(env, config)) == keys


@pytest.mark.parametrize(
    ("env", "key", "variable"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision", "ACCELERATE_MIXED_PRECISION"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend", "ACCELERATE_DYNAMO_BACKEND"),
        ({"ACCELERATE_USE_FSDP": "true"}, "fsdp_version", "ACCELERATE_USE_FSDP"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "4"},
            "zero_stage",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE",
        ),
    ],
)
def test_a_problem_that_a_variable_causes_names_it(tmp_path, env, key, variable):
    alone = refused(env, loaded(tmp_path))[key]
    assert f"it comes from the variable {variable}" in alone
    assert f"unset {variable}" in alone
    launched = refused(TORCHRUN | env, loaded(tmp_path))[key]
    assert f"it comes from the variable {variable}" in launched
    assert "unset" not in launched  # it may be the launcher's own


def test_every_process_thinks_it_is_alone_is_refused():
    with pytest.raises(UserError, match="thinks it is alone"):
        verify_launch(TORCHRUN, "auto", 1, "NO", "ddp")


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("ddp", "FSDP"),
        ("ddp", "DEEPSPEED"),
        ("ddp", "XLA"),
        ("fsdp2", "MULTI_CPU"),
        ("fsdp2_offload", "MULTI_GPU"),
        ("hsdp", "DEEPSPEED"),
        ("zero2", "MULTI_CPU"),
        ("zero3_offload", "FSDP"),
    ],
)
def test_an_accelerator_of_another_kind_is_refused(strategy, kind):
    with pytest.raises(UserError) as caught:
        verify_launch(TORCHRUN, "auto", 2, kind, strategy)
    text = str(caught.value)
    assert f"distributed_type = {kind}" in text
    assert strategy in text


@pytest.mark.parametrize(
    ("env", "processes", "kind", "strategy"),
    [
        ({}, 1, "NO", "ddp"),
        (TORCHRUN, 2, "MULTI_CPU", "ddp"),
        (TORCHRUN, 2, "MULTI_GPU", "ddp"),
        (TORCHRUN, 2, "FSDP", "fsdp2"),
        (TORCHRUN, 2, "FSDP", "hsdp"),
        (TORCHRUN, 2, "DEEPSPEED", "zero1"),
        ({}, 1, "DEEPSPEED", "zero3_offload"),
    ],
)
def test_what_was_launched_is_accepted(env, processes, kind, strategy):
    verify_launch(env, "auto", processes, kind, strategy)


FSDP = TORCHRUN | {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
MESH = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}
FOUR = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
TWO_NODES = TORCHRUN | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
ZERO = TORCHRUN | {"ACCELERATE_USE_DEEPSPEED": "true"}
TO_CPU = {f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_DEVICE": "cpu" for what in ("OPTIMIZER", "PARAM")}
NAMED = {
    "fsdp2": FSDP,
    "fsdp2_offload": FSDP | {"FSDP_OFFLOAD_PARAMS": "true"},
    "hsdp": FSDP | FOUR | MESH,
    "zero1": ZERO | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"},
    "zero2": ZERO,
    "zero3": ZERO | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
    "zero3_offload": ZERO | TO_CPU | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
}


def test_a_launch_of_fsdp_or_deepspeed_is_never_trained_as_ddp():
    for env in (FSDP, ZERO):
        with pytest.raises(UserError, match="strategy that is trained = ddp"):
            verify_launch(env, "auto", 2, "MULTI_CPU", "ddp")


@pytest.mark.parametrize("strategy", NAMED)
def test_a_launch_with_a_strategy_leaves_only_that_one_open(tmp_path, strategy):
    config = loaded(tmp_path)
    check(NAMED[strategy], config)
    assert allowed_strategies(NAMED[strategy], "auto") == (strategy,)


EXACT = ("training.same_bits=true", "training.precision=fp32", "training.micro_batch_size=2")


@pytest.mark.parametrize("strategy", NAMED)
def test_bad_input_a_launch_without_an_engine_for_the_same_bits_is_refused(tmp_path, strategy):
    config = loaded(tmp_path, *EXACT)
    if strategy == "fsdp2":
        check(NAMED[strategy], config)
    else:
        (said,) = refused(NAMED[strategy], config).values()
        assert f"the strategy of the launch = {strategy}" in said
        assert "ddp or fsdp2 with training.same_bits" in said
        assert "fsdp2.yaml" in said


@pytest.mark.parametrize("side", ["tp", "sp"])
def test_bad_input_a_launch_that_cuts_models_has_other_bits(tmp_path, side):
    names = {"USE_PARALLELISM_CONFIG": "true"}
    env = TORCHRUN | NO | {f"ACCELERATE_{name}": value for name, value in names.items()}
    env |= {f"PARALLELISM_CONFIG_{side.upper()}_SIZE": "2"}
    check(env, loaded(tmp_path))
    (key,) = refused(env, loaded(tmp_path, *EXACT))
    assert key == f"parallelism_config_{side}_size"


@pytest.mark.parametrize("launched", NAMED)
@pytest.mark.parametrize("asked", ["ddp", *NAMED])
def test_an_explicit_strategy_is_that_of_the_launch(tmp_path, launched, asked):
    config = loaded(tmp_path, f"distributed.strategy={asked}")
    if asked == launched:
        check(NAMED[launched], config)
    else:
        assert list(refused(NAMED[launched], config)) == ["distributed.strategy"]


@pytest.mark.parametrize("asked", ["ddp", *NAMED])
def test_a_plain_launch_contradicts_no_strategy(tmp_path, asked):
    check(TWO_NODES, loaded(tmp_path, f"distributed.strategy={asked}"))


def test_hsdp_takes_the_mesh_of_the_machines_where_the_launch_names_none(tmp_path):
    check(FSDP | TWO_NODES, loaded(tmp_path, "distributed.strategy=hsdp"))


@pytest.mark.parametrize(
    ("env", "instead"),
    [
        ({}, "fsdp2"),
        (TORCHRUN | FOUR, "fsdp2"),  # one machine
        (TORCHRUN | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, "ddp"),  # of one process each
        (FSDP | FOUR | MESH | {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1"}, "parallelism_config"),
        (FSDP | MESH | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "1"}, "ddp"),
    ],
)
def test_hsdp_on_a_mesh_with_a_side_of_1_is_refused_by_name(tmp_path, env, instead):
    found = refused(env, loaded(tmp_path, "distributed.strategy=hsdp"))
    assert instead in "".join(found.values())


def test_the_class_of_the_blocks_is_said_once(tmp_path):
    env = FSDP | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer"}
    check(env, loaded(tmp_path, "distributed.wrap_class=LlamaDecoderLayer"))
    found = refused(env, loaded(tmp_path))
    assert "wrap_class=LlamaDecoderLayer" in found["fsdp_transformer_layer_cls_to_wrap"]


@pytest.mark.parametrize(
    ("norm", "launched", "fine"),
    [
        ("1.0", "auto", True),
        ("1.0", "1.0", True),
        ("1.0", "1", True),
        ("1.0", "0.5", False),
        ("null", "1.0", False),
        ("null", "auto", True),
        ("1.0", "much", False),
    ],
)
def test_clipping_is_that_of_the_config(tmp_path, norm, launched, fine):
    config = loaded(tmp_path, f"training.max_grad_norm={norm}")
    env = ZERO | {"ACCELERATE_GRADIENT_CLIPPING": launched}
    if fine:
        check(env, config)
    else:
        assert list(refused(env, config)) == ["gradient_clipping"]


@pytest.mark.parametrize("env", [{}, TORCHRUN, TORCHRUN | NO])
def test_a_plain_launch_leaves_all_open_that_are_not_for_those_who_name_them(env):
    named_only = {"auto", "zero1", "zero2", "zero3"}
    literal = DistributedConfig.model_fields["strategy"].annotation
    open_ = allowed_strategies(env, "auto")
    assert open_[0] == "ddp"
    assert set(open_) == set(get_args(literal)) - named_only


@pytest.mark.parametrize("env", [{}, TORCHRUN])
def test_an_explicit_strategy_is_the_only_one(env):
    assert allowed_strategies(env, "zero2") == ("zero2",)


def test_without_a_launcher_there_is_one_process():
    assert world_size({}) == 1
    assert world_size(TORCHRUN) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": "0"}, "rank 1 at there:29500 (MASTER_ADDR, MASTER_PORT)"),
        ({"RANK": "1"}, "rank 0 at there:29500 (MASTER_ADDR, MASTER_PORT)"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "all of the ranks 1 to 3 at there:29500"),
        ({"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}, "its launcher at there:29500"),
    ],
)
def test_whom_a_process_waits_for_is_named(changes, said):
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "there", "MASTER_PORT": "29500"} | changes
    assert awaited(env).startswith(said)


def test_all_variables_that_a_launcher_left_are_named(tmp_path):
    left = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "there", "TORCHELASTIC_RUN_ID": "none"}
    (problem,) = launcher_problems({**left, "HOME": "/root"})
    names = "WORLD_SIZE RANK MASTER_ADDR TORCHELASTIC_RUN_ID"
    assert problem.remedy == f"unset {names}, or use accelerate launch"


def test_python_without_docstrings_is_refused_by_name():
    for optimize in (0, 1):
        check_docstrings(optimize)
    with pytest.raises(UserError, match="PYTHONOPTIMIZE = 2") as caught:
        check_docstrings(2)
    assert caught.value.problems[0].remedy == "unset PYTHONOPTIMIZE"


def test_bad_input_an_accelerator_with_settings_of_its_own_is_refused(tmp_path):
    try:
        Accelerator(cpu=True)  # as a comparison in one process has it
        check({}, loaded(tmp_path))
        accelerator.close()
        Accelerator(cpu=True, mixed_precision="bf16")
        with pytest.raises(UserError, match=r"(?s)Accelerator = NO, .*=bf16, .* processes=1"):
            check({}, loaded(tmp_path))
    finally:
        accelerator.close()
    check({}, loaded(tmp_path))


@pytest.mark.launches
@pytest.mark.parametrize("words", [["report", "runs/a"], ["train", "a.yaml"], ["plan", "a.yaml"]])
def test_every_command_refuses_it_before_anything_else(words):
    env = {**os.environ, "PYTHONOPTIMIZE": "2"}
    command = [sys.executable, "-m", "llmtrain", *words]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "PYTHONOPTIMIZE = 2" in done.stderr
    assert "Traceback" not in done.stderr


def cut_mesh(**sizes):
    """What a `parallelism_config` with these sides becomes."""
    named = {f"PARALLELISM_CONFIG_{side.upper()}_SIZE": str(n) for side, n in sizes.items()}
    return {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"} | named


@pytest.mark.parametrize(
    ("env", "overrides", "cut"),
    [
        (TORCHRUN | FOUR | cut_mesh(tp=2), (), ModelCut(tensor=2)),
        (TORCHRUN | FOUR | cut_mesh(sp=4), (), ModelCut(sequence=4)),
        (FSDP | FOUR | cut_mesh(dp_shard=2, tp=2), (), ModelCut(tensor=2)),
        (
            FSDP | FOUR | cut_mesh(dp_shard=2),
            ("distributed.pipeline_parallel=2",),
            ModelCut(pipeline=2),
        ),
        (
            TORCHRUN | FOUR | cut_mesh(tp=2),
            ("distributed.tensor_parallel=2", "distributed.pipeline_parallel=2"),
            ModelCut(tensor=2, pipeline=2),
        ),
        (TORCHRUN | FOUR | cut_mesh(), ("distributed.tensor_parallel=4",), ModelCut(tensor=4)),
        (
            TORCHRUN,
            ("distributed.sequence_parallel=2", "distributed.strategy=fsdp2"),
            ModelCut(sequence=2),
        ),
    ],
)
def test_a_file_and_the_keys_say_over_how_many_processes_a_model_is_cut(
    tmp_path, env, overrides, cut
):
    config = loaded(tmp_path, "training.global_batch_size=8", *overrides)
    check(env, config)
    assert model_cut(env, config.distributed) == cut


@pytest.mark.parametrize(
    ("env", "override", "words"),
    [
        (
            TORCHRUN | FOUR | cut_mesh(tp=2),
            "distributed.tensor_parallel=4",
            "2, as parallelism_config_tp_size in the accelerate file",
        ),
        (
            TORCHRUN | FOUR | cut_mesh(tp=4),
            "distributed.tensor_parallel=1",
            "4, as parallelism_config_tp_size in the accelerate file",
        ),
        (
            TORCHRUN | FOUR | cut_mesh(sp=2),
            "distributed.sequence_parallel=4",
            "2, as parallelism_config_sp_size in the accelerate file",
        ),
        (ZERO, "distributed.pipeline_parallel=2", "DeepSpeed shards whole models"),
        (ZERO, "distributed.tensor_parallel=2", "DeepSpeed shards whole models"),
        (ZERO, "distributed.sequence_parallel=2", "DeepSpeed shards whole models"),
        (FSDP, "distributed.tensor_parallel=2", "each holds another part already"),
        (TORCHRUN, "distributed.tensor_parallel=3", "a divisor of the number of processes, 2"),
        ({}, "distributed.pipeline_parallel=2", "a divisor of the number of processes, 1"),
    ],
)
def test_a_cut_that_does_not_go_with_the_launch_is_refused(tmp_path, env, override, words):
    key = override.partition("=")[0]
    found = refused(env, loaded(tmp_path, "training.global_batch_size=8", override))
    assert list(found) in ([key], ["distributed.strategy"])
    assert words in "".join(found.values())


def test_several_sizes_are_multiplied_for_the_processes(tmp_path):
    sizes = ("distributed.tensor_parallel=2", "distributed.pipeline_parallel=4")
    found = refused(TORCHRUN | {"WORLD_SIZE": "12"}, loaded(tmp_path, *sizes))
    text = found["distributed.tensor_parallel"]
    assert "2 × distributed.pipeline_parallel 4 = 8" in text
    assert "16 processes" in text


def test_the_batch_is_split_over_the_models(tmp_path):
    cut = "distributed.tensor_parallel=2"
    check(TORCHRUN | FOUR, loaded(tmp_path, "training.global_batch_size=2", cut))
    found = refused(TORCHRUN | FOUR, loaded(tmp_path, "training.global_batch_size=3", cut))
    assert "2 models" in found["training.global_batch_size"]


@pytest.mark.parametrize("option", [["--config_file", "{}"], ["--config-file={}"]])
@pytest.mark.parametrize("there", [True, False])
def test_a_rank_reads_what_its_launcher_ignored(tmp_path, monkeypatch, option, there):
    file = tmp_path / "launch.yaml"
    if there:
        file.write_text(
            "distributed_type: FSDP\nparallelism_config: {parallelism_config_pp_size: 2}"
        )
    command = ["accelerate", "launch", *(word.format(file) for word in option), "train.py"]
    monkeypatch.setattr(environment, "ancestors", lambda: [({}, ["sh"]), ({}, command)])
    launched = TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}
    config = loaded(tmp_path)
    check(TORCHRUN, config)  # not started by accelerate
    if there:
        assert list(refused(launched, config)) == ["parallelism_config_pp_size"]
    else:
        check(launched, config)


def test_a_rank_reads_what_accelerates_own_file_asks_and_is_ignored(tmp_path, monkeypatch):
    file = tmp_path / "accelerate" / "default_config.yaml"
    file.parent.mkdir()
    file.write_text("distributed_type: FSDP\nparallelism_config: {parallelism_config_pp_size: 2}")
    command = ["accelerate", "launch", "train.py"]
    monkeypatch.setattr(environment, "ancestors", lambda: [({}, command)])
    launched = TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no", "HF_HOME": str(tmp_path)}
    assert list(refused(launched, loaded(tmp_path))) == ["parallelism_config_pp_size"]
    check(launched | {"HF_HOME": str(tmp_path / "none")}, loaded(tmp_path))
