from pathlib import Path

import pytest
from accelerate.commands import launch as accelerates
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from helpers.config import loaded

from llmtrain.config.yaml12 import parse
from llmtrain.distributed.launch.environment import launch_problems
from llmtrain.distributed.launch.named import named_strategy
from llmtrain.errors import UserError
from llmtrain.tools.launch.file import check_sections, read_launch_file, variables_of

FILES = Path(__file__).parents[4] / "accelerate_configs"
ONE = "distributed_type: 'NO'\nnum_processes: 1\n"
TWO = "distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true\n"
NODES = (
    "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 4\n"
    "main_process_ip: 10.0.0.1\nmain_process_port: 29500\n"
)
FSDP = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"
HSDP = """parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
"""
ZERO = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 3\n"


def read(folder, text, processes=None):
    path = folder / "accelerate.yaml"
    path.write_text(text, encoding="utf-8")
    return read_launch_file(path, processes)


def refused(folder, text, processes=None):
    with pytest.raises(UserError) as caught:
        read(folder, text, processes)
    return {problem.key for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("name", "processes", "machines"),
    [
        ("cpu", 2, 1),
        ("single", 1, 1),
        ("ddp", 8, 1),
        ("ddp_multinode", 16, 2),
        ("fsdp2", 8, 1),
        ("fsdp2_offload", 8, 1),
        ("hsdp_multinode", 16, 2),
        ("zero2", 8, 1),
        ("zero3", 8, 1),
        ("zero3_offload", 8, 1),
        ("zero3_multinode", 16, 2),
        ("tp", 8, 1),
        ("fsdp2_tp", 8, 1),
    ],
)
def test_the_files_of_the_repository_start_what_they_say(tmp_path, name, processes, machines):
    config = loaded(tmp_path, "training.global_batch_size=32")
    file = read_launch_file(FILES / f"{name}.yaml", None)
    assert not launch_problems(file.environment, {}, config.distributed, config.training)
    assert (file.processes, file.machines) == (processes, machines)
    assert file.on_cpu == (name == "cpu")


def test_every_file_of_the_repository_names_its_strategy():
    strategies = {
        path.stem: named_strategy(read_launch_file(path, None).environment)
        for path in FILES.glob("*.yaml")
    }
    assert strategies == {
        **dict.fromkeys(("cpu", "single", "ddp", "ddp_multinode", "tp")),
        "fsdp2": "fsdp2",
        "fsdp2_tp": "fsdp2",
        "fsdp2_offload": "fsdp2_offload",
        "hsdp_multinode": "hsdp",
        "zero2": "zero2",
        "zero3": "zero3",
        "zero3_offload": "zero3_offload",
        "zero3_multinode": "zero3",
    }


def test_accelerate_reads_the_files_alike():
    from accelerate.commands.config.config_args import load_config_from_file

    for path in FILES.glob("*.yaml"):
        ours, theirs = read_launch_file(path, None), load_config_from_file(str(path))
        assert theirs.distributed_type.value == ours.values["distributed_type"]
        assert theirs.num_processes == ours.processes
        assert theirs.num_machines == ours.machines
        assert theirs.mixed_precision == ours.values["mixed_precision"]
        assert theirs.use_cpu == ours.on_cpu


def test_a_number_of_processes_replaces_that_of_the_file(tmp_path):
    assert read(tmp_path, TWO, 3).processes == 3


@pytest.mark.parametrize(
    ("text", "processes", "keys"),
    [
        ("distributed_type: MULTI_CPU\nnum_processes: 2\n", None, {"distributed_type"}),
        ("distributed_type: MEGATRON_LM\nnum_processes: 2\n", None, {"distributed_type"}),
        ("distributed_type: FSDP\nnum_processes: 2\n", None, {"fsdp_version"}),
        (FSDP + "  fsdp_use_orig_params: true\n", None, {"fsdp_use_orig_params"}),
        (FSDP + HSDP, None, {"parallelism_config"}),
        (FSDP + HSDP.replace("size: 2", "size: 4", 1), 4, {"parallelism_config"}),
        (FSDP + HSDP.replace("dp_shard", "cp"), 4, {"parallelism_config_cp_size"}),
        (ZERO + "  deepspeed_config_file: ds.json\n", None, {"deepspeed_config_file"}),
        (ZERO + "  gradient_accumulation_steps: 4\n", None, {"gradient_accumulation_steps"}),
        (
            ZERO + "  zero3_init_flag: true\n  offload_param_device: cpu\nfsdp_config: {a: 1}\n",
            None,
            {"zero3_init_flag", "offload_optimizer_device", "fsdp_config"},
        ),
        (ONE, 2, {"distributed_type"}),
        ("distributed_type: MULTI_GPU\n", None, {"num_processes"}),
        ("distributed_type: MULTI_GPU\nnum_processes: -1\n", None, {"num_processes"}),
        (TWO + "mixed_precision: fp16\n", None, {"mixed_precision"}),
        (TWO + "mixed_precision: fp8\n", None, {"mixed_precision"}),
        (
            TWO + "parallelism_config: {parallelism_config_dp_shard_size: 2}\n",
            None,
            {"parallelism_config"},
        ),
        (
            TWO + "parallelism_config: {parallelism_config_pp_size: 2}\n",
            None,
            {"parallelism_config_pp_size"},
        ),
        (
            ONE + "parallelism_config: {parallelism_config_tp_size: 2}\n",
            None,
            {"parallelism_config"},
        ),
        (TWO + "num_machines: none\n", None, {"num_machines"}),
        (NODES, 3, {"num_processes", "machine_rank"}),
        (NODES, None, {"machine_rank"}),
        (NODES + "machine_rank: 2\n", None, {"machine_rank"}),
        (NODES + "rdzv_backend: c10d\nsame_network: true\n", None, {"same_network"}),
        (
            NODES.replace("main_process_ip: 10.0.0.1\n", "machine_rank: 0\n"),
            None,
            {"main_process_ip"},
        ),
        ("- a\n", None, {"--accelerate"}),
        ("a: [\n", None, {"line 2, column 1"}),
    ],
)
def test_a_file_that_starts_something_else_is_refused(tmp_path, text, processes, keys):
    assert refused(tmp_path, text, processes) == keys


def test_a_mesh_is_that_of_the_processes(tmp_path):
    assert read(tmp_path, FSDP + HSDP, 4).environment["LOCAL_WORLD_SIZE"] == "4"


@pytest.mark.parametrize("more", ["machine_rank: 1\n", "rdzv_backend: c10d\n"])
def test_machines_that_find_each_other_are_accepted(tmp_path, more):
    assert read(tmp_path, NODES + more).machines == 2


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_launch_file(tmp_path / "none.yaml", None)


# Against accelerate itself: what its own launcher exports for a file.
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
