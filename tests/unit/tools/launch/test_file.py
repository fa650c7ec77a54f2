from pathlib import Path

import pytest
from helpers.config import loaded

from llmtrain.distributed.launch.environment import launch_problems
from llmtrain.distributed.launch.named import named_strategy
from llmtrain.errors import UserError
from llmtrain.tools.launch.file import read_launch_file

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
        **dict.fromkeys(("cpu", "single", "ddp", "ddp_multinode")),
        "fsdp2": "fsdp2",
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
        kind = ours.values["distributed_type"]
        assert theirs.distributed_type.value == kind
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
        (FSDP + HSDP.replace("dp_shard", "tp"), 4, {"parallelism_config_tp_size"}),
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
            TWO + "parallelism_config: {parallelism_config_tp_size: 2}\n",
            None,
            {"parallelism_config_tp_size", "parallelism_config"},
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("distributed_type: MULTI_CPU\nnum_processes: 2\n", ["MULTI_CPU", "MULTI_GPU"]),
        ("distributed_type: FSDP\nnum_processes: 2\n", ["fsdp_version = 1", "flat tensor"]),
        (FSDP + "  fsdp_use_orig_params: true\n", ["fsdp_use_orig_params", "FSDP1"]),
        (ZERO + "  deepspeed_config_file: ds.json\n", ["config of the run"]),
        (FSDP + HSDP.replace("shard_size: 2", "shard_size: 1"), ["hsdp, 2 × 1", "strategy=ddp"]),
    ],
)
def test_a_refusal_says_what_was_found_and_what_to_do(tmp_path, text, words):
    with pytest.raises(UserError) as caught:
        read(tmp_path, text)
    for word in words:
        assert word in str(caught.value)


def test_a_mesh_is_that_of_the_processes(tmp_path):
    assert read(tmp_path, FSDP + HSDP, 4).environment["LOCAL_WORLD_SIZE"] == "4"


@pytest.mark.parametrize(
    ("override", "text", "key"),
    [
        ("distributed.strategy=ddp", FSDP, "distributed.strategy"),
        ("distributed.strategy=zero3", FSDP, "distributed.strategy"),
        ("distributed.strategy=fsdp2_offload", FSDP, "distributed.strategy"),
        ("distributed.strategy=hsdp", FSDP, "distributed.strategy"),
        ("distributed.strategy=hsdp", TWO, "distributed.strategy"),
        ("distributed.strategy=fsdp2", ZERO, "distributed.strategy"),
        ("training.max_grad_norm=2.0", ZERO + "  gradient_clipping: 1.0\n", "gradient_clipping"),
        ("training.precision=fp32", TWO + "mixed_precision: bf16\n", "training.precision"),
        ("training.global_batch_size=3", TWO, "training.global_batch_size"),
    ],
)
def test_a_config_that_the_file_contradicts_is_refused(tmp_path, override, text, key):
    env, config = read(tmp_path, text).environment, loaded(tmp_path, override)
    (problem,) = launch_problems(env, {}, config.distributed, config.training)
    assert problem.key == key


@pytest.mark.parametrize("more", ["machine_rank: 1\n", "rdzv_backend: c10d\n"])
def test_machines_that_find_each_other_are_accepted(tmp_path, more):
    assert read(tmp_path, NODES + more).machines == 2


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_launch_file(tmp_path / "none.yaml", None)
