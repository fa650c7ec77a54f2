from pathlib import Path

import pytest

from llmtrain.config.yaml12 import parse, write
from llmtrain.errors import UserError
from llmtrain.tools.launch_file import LaunchFile, read_launch_file

FILES = Path(__file__).parents[3] / "accelerate_configs"
ONE = "distributed_type: 'NO'\nnum_processes: 1\n"
TWO = "distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true\n"
NODES = (
    "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 4\n"
    "main_process_ip: 10.0.0.1\nmain_process_port: 29500\n"
)


def read(folder: Path, text: str, processes: int | None = None) -> LaunchFile:
    path = folder / "accelerate.yaml"
    path.write_text(text, encoding="utf-8")
    return read_launch_file(path, processes)


def refused(folder: Path, text: str, processes: int | None = None) -> set[str]:
    with pytest.raises(UserError) as caught:
        read(folder, text, processes)
    return {problem.key for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("name", "processes", "machines"),
    [("cpu", 2, 1), ("single", 1, 1), ("ddp", 8, 1), ("ddp_multinode", 16, 2)],
)
def test_the_files_of_the_repository_start_what_they_say(name, processes, machines):
    file = read_launch_file(FILES / f"{name}.yaml", None)
    assert (file.processes, file.machines) == (processes, machines)
    assert file.on_cpu == (name == "cpu")


def test_accelerate_reads_the_files_alike():
    from accelerate.commands.config.config_args import load_config_from_file

    for path in FILES.glob("*.yaml"):
        ours, theirs = read_launch_file(path, None), load_config_from_file(str(path))
        kind = ours.values["distributed_type"]
        assert theirs.distributed_type.value == kind
        assert theirs.num_processes == ours.processes
        assert theirs.num_machines == ours.machines
        assert theirs.mixed_precision == ours.precision
        assert theirs.use_cpu == ours.on_cpu


def test_a_number_of_processes_replaces_that_of_the_file(tmp_path):
    assert read(tmp_path, TWO, 3).processes == 3


@pytest.mark.parametrize(
    ("text", "processes", "keys"),
    [
        ("distributed_type: MULTI_CPU\nnum_processes: 2\n", None, {"distributed_type"}),
        ("distributed_type: FSDP\nnum_processes: 2\n", None, {"distributed_type"}),
        ("distributed_type: DEEPSPEED\nnum_processes: 2\n", None, {"distributed_type"}),
        (ONE, 2, {"distributed_type"}),
        ("distributed_type: MULTI_GPU\n", None, {"num_processes"}),
        ("distributed_type: MULTI_GPU\nnum_processes: -1\n", None, {"num_processes"}),
        (TWO + "mixed_precision: fp16\n", None, {"mixed_precision"}),
        (TWO + "mixed_precision: fp8\n", None, {"mixed_precision"}),
        (
            TWO + "parallelism_config: {parallelism_config_tp_size: 2}\n",
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


@pytest.mark.parametrize("more", ["machine_rank: 1\n", "rdzv_backend: c10d\n"])
def test_machines_that_find_each_other_are_accepted(tmp_path, more):
    assert read(tmp_path, NODES + more).machines == 2


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_launch_file(tmp_path / "none.yaml", None)


def test_a_written_file_is_what_was_asked_for(tmp_path):
    file = LaunchFile(None, 3, True, "no", {}).written_to(tmp_path / "a.yaml", write)
    again = read_launch_file(tmp_path / "a.yaml", None)
    assert (again.processes, again.on_cpu, again.precision) == (3, True, "no")
    assert again.values == file.values == parse((tmp_path / "a.yaml").read_text()).value
