"""Against accelerate itself: what its own launcher exports for a file."""

from pathlib import Path

import pytest
from accelerate.commands import launch as accelerates
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from llmtrain.config.yaml12 import parse
from llmtrain.tools.launch.file import check_sections, variables_of

FILES = Path(__file__).parents[4] / "accelerate_configs"
OFTEN = {"distributed_type": "FSDP", "num_processes": 4}
DEEPSPEED = {"distributed_type": "DEEPSPEED", "num_processes": 4}


def theirs(path, monkeypatch):
    """The environment that accelerate 1.15 makes of a file."""
    parser = accelerates.launch_command_parser()
    args, defaults, _ = accelerates._validate_launch_command(
        parser.parse_args(["--config_file", str(path), "--main_process_port", "0", "train.py"])
    )
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        return prepare_deepspeed_cmd_env(args)[1]
    return prepare_multi_gpu_env(args)


def values(path):
    return parse(path.read_text(encoding="utf-8")).value


@pytest.mark.parametrize("path", sorted(FILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_rank_is_told_what_accelerate_tells_it(path, monkeypatch):
    ours = variables_of(values(path), 8)
    switches = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
    made = theirs(path, monkeypatch)
    for name in (*switches, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        assert (name in ours) == (name in made)
    launchers = {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}  # torch's launcher adds them
    assert {name: made.get(name) for name in ours.keys() - launchers} == {
        name: value for name, value in ours.items() if name not in launchers
    }


def test_other_values_are_told_as_accelerate_tells_them(tmp_path, monkeypatch):
    path = tmp_path / "fsdp.yaml"
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 4\n"
        "num_machines: 1\nmachine_rank: 0\nmixed_precision: bf16\ngpu_ids: all\nfsdp_config:\n"
        "  version: 2\n  offload_params: true\n  fsdp_transformer_layer_cls_to_wrap: Block\n"
        "  fsdp_activation_checkpointing: true\n  fsdp_reshard_after_forward: false\n"
        "dynamo_config: {dynamo_backend: inductor}\n"
    )
    ours, made = variables_of(values(path), 4), theirs(path, monkeypatch)
    assert ours["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Block"
    assert ours["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"
    for name in ours.keys() - {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}:
        assert ours[name] == made[name]


def test_processes_of_a_machine_are_its_share():
    found = variables_of({"num_machines": 2}, 8)
    assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("8", "4")
    assert not [name for name in found if "_USE_" in name]


@pytest.mark.parametrize(
    "key",
    [
        "fsdp_forward_prefetch",
        "fsdp_backward_prefetch",
        "fsdp_use_orig_params",
        "fsdp_sync_module_states",
        "fsdp_sharding_strategy",
        "sharding_strategy",  # accelerate adds the prefix
    ],
)
def test_a_key_of_fsdp1_is_refused(key):
    section = {"fsdp_version": 2, key: True}
    (problem,) = check_sections(OFTEN | {"fsdp_config": section})
    assert problem.key.endswith(key)
    assert "FSDP1" in problem.expected


@pytest.mark.parametrize(
    ("file", "key", "near"),
    [
        (
            OFTEN | {"fsdp_config": {"fsdp_ofload_params": True}},
            "fsdp_config.fsdp_ofload_params",
            "fsdp_offload_params",
        ),
        (DEEPSPEED | {"deepspeed_config": {"stage": 3}}, "deepspeed_config.stage", "zero_stage"),
        (
            DEEPSPEED | {"deepspeed_config": {"train_batch_size": 8}},
            "deepspeed_config.train_batch_size",
            "remove it",
        ),
        (
            OFTEN | {"parallelism_config": {"dp_shard_size": 2}},
            "parallelism_config.dp_shard_size",
            "parallelism_config_dp_shard_size",
        ),
        (OFTEN | {"deepspeed_config": {"zero_stage": 3}}, "deepspeed_config", "DEEPSPEED"),
        (
            {"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_version": 2}},
            "fsdp_config",
            "distributed_type: FSDP",
        ),
    ],
)
def test_what_accelerate_would_pass_over_is_refused(file, key, near):
    (problem,) = check_sections(file)
    assert problem.key == key
    assert near in str(problem)


def test_empty_sections_are_none():
    assert not list(check_sections(OFTEN | {"deepspeed_config": {}, "fsdp_config": None}))


@pytest.mark.parametrize(
    ("section", "fine"),
    [
        ({"deepspeed_multinode_launcher": "standard"}, True),
        ({"deepspeed_multinode_launcher": "pdsh"}, False),
        ({}, False),
    ],
)
def test_deepspeed_on_several_machines_needs_the_launcher_of_torch(section, fine):
    section = {"zero_stage": 3} | section
    file = DEEPSPEED | {"num_machines": 2, "deepspeed_config": section}
    assert [problem.key for problem in check_sections(file)] == (
        [] if fine else ["deepspeed_multinode_launcher"]
    )
