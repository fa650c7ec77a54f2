"""Launchers that start something else than was asked for: refused, or made right.

What a launched process can see is tried with ranks that have the environment which accelerate 1.15
was seen to make; the rest with the launchers themselves.
"""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.launcher import ACCELERATE, LLMTRAIN, SCRIPT, launch_file, run
from helpers.ranks import Ranks, free_port, rank_environment
from helpers.rings import needs
from helpers.tiny import lines, status, tiny_config, write_config

FSDP = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
ZERO = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}
PLAIN = {"distributed_type": "MULTI_GPU"}
TWO_MACHINES = {
    **PLAIN,
    "num_machines": 2,
    "num_processes": 4,
    "main_process_ip": "127.0.0.1",
    "main_process_port": 29501,
}
MESH = "parallelism_config_{}_size"
AS_FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
AS_ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
AS_MESH = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
Ended = tuple[Path, subprocess.CompletedProcess[str]]


def tiny(folder, **changes):
    return write_config(folder, tiny_config(folder / "run", training__steps=2, **changes))


@pytest.fixture
def config(tmp_path):
    return tiny(tmp_path)


def accelerate(folder, values, *more):
    """The command of accelerate's own launcher with a file of these values."""
    file = launch_file(folder, values)
    return [*ACCELERATE, "--config_file", file, SCRIPT, str(folder / "config.yaml"), *more]


def one_message(said, folder, *words):
    """One message for a person, and nothing was trained."""
    assert said.count("error: ") == 1, said
    assert "Traceback" not in said
    assert "expected: " in said
    for word in words:
        assert word in said, said
    assert not lines(folder / "run", "train")


def trained(ended, folder, **start):
    """The run has finished as what `start` says."""
    assert status(folder / "run")["state"] == "finished", ended.stderr
    (line,) = lines(folder / "run", "start")
    assert {name: line[name] for name in start} == start


@needs("accelerate", "1.15")  # before it, such processes find each other
def test_processes_that_each_think_they_are_alone_are_refused_in_each_of_them(
    server, config, tmp_path
):
    arguments = ["call", "helpers.odd_ranks", "alone", str(config)]
    assert server.run(arguments, 2, tmp_path) == [2, 2]
    one_message((tmp_path / "output.txt").read_text(), tmp_path, "thinks it is alone", "WORLD_SIZE")


def test_the_simple_launcher_that_starts_one_of_two_is_refused(config, tmp_path):
    command = [*ACCELERATE, "--cpu", "--num_processes", "2", SCRIPT, str(config)]
    ended = run(command, tmp_path)
    assert ended.returncode != 0
    # Behind it stands the traceback of the launcher, which takes any code but 0 for its own error.
    own = ended.stderr.partition("Traceback")[0]
    one_message(own, tmp_path, "MASTER_ADDR", "the launcher started one", "cpu.yaml")


@pytest.mark.parametrize(("env", "strategy"), [(AS_FSDP, "fsdp2"), (AS_ZERO, "zero2")])
def test_ranks_of_fsdp_or_deepspeed_train_that_and_never_ddp(
    server, config, tmp_path, env, strategy
):
    assert server.run(["train", str(config)], 2, tmp_path, env) == [0, 0]
    (line,) = lines(tmp_path / "run", "start")
    assert (line["strategy"], line["world_size"]) == (strategy, 2)


def test_torchrun_trains_the_strategy_that_is_asked_for(config, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    asked = "distributed.strategy=fsdp2"
    ended = run([*torchrun, "--standalone", SCRIPT, str(config), asked], tmp_path)
    trained(ended, tmp_path, world_size=2, strategy="fsdp2")


def test_machines_that_would_wait_for_each_other_are_refused_before_they_start(config, tmp_path):
    file = launch_file(tmp_path, {**TWO_MACHINES, "machine_rank": None, "num_processes": 3})
    ended = run([*LLMTRAIN, "train", str(config), "--accelerate", file], tmp_path)
    assert ended.returncode == 2
    words = ["num_processes = 3", "num_machines 2", "2 or 4", "machine_rank", "0 … 1", "c10d"]
    one_message(ended.stderr, tmp_path, *words)


@pytest.mark.slow  # a launch for a line of the log
def test_accelerates_own_default_config_is_named_in_the_log(config, tmp_path):
    default = tmp_path / "home" / "accelerate"
    file = launch_file(default, {"distributed_type": "NO", "num_processes": 1})
    Path(file).rename(default / "default_config.yaml")
    trained(run([*ACCELERATE, SCRIPT, str(config)], tmp_path), tmp_path, world_size=1)
    assert "default_config.yaml" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()


@pytest.fixture(scope="module")
def beside_another(tmp_path_factory):
    """A plain launch whose port another process holds, and what nothing tells of its CPUs."""
    folder = tmp_path_factory.mktemp("beside")
    tiny(folder)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        return folder, run(accelerate(folder, {**PLAIN, "main_process_port": port}), folder)


def test_two_processes_that_nothing_tells_of_their_cpus_become_two(beside_another):
    folder, ended = beside_another
    trained(ended, folder, world_size=2, strategy="ddp")


def test_a_run_beside_one_that_holds_its_port_gets_a_port_of_its_own(beside_another):
    folder, ended = beside_another
    trained(ended, folder, world_size=2)
    assert len(lines(folder / "run", "train")) == 2


@pytest.mark.parametrize("name", ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_a_stale_size_in_the_environment_is_named_and_nothing_hangs(config, tmp_path, name):
    ended = run([sys.executable, SCRIPT, str(config)], tmp_path, **{name: "2"})
    assert ended.returncode == 2
    one_message(ended.stderr, tmp_path, f"unset {name}")


LAUNCHED_WRONG = {
    "FSDP1": (AS_FSDP | {"FSDP_VERSION": "1"}, [], ["fsdp_version = 1", "flat tensor"]),
    "FSDP asked, DDP wanted": (
        AS_FSDP,
        ["distributed.strategy=ddp"],
        ["distributed.strategy = ddp", "fsdp2", "distributed_type FSDP"],
    ),
    "DeepSpeed asked, FSDP wanted": (
        AS_ZERO,
        ["distributed.strategy=fsdp2"],
        ["distributed.strategy = fsdp2", "zero2", "distributed_type DEEPSPEED"],
    ),
    "a JSON of DeepSpeed": (
        AS_ZERO | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"},
        [],
        ["deepspeed_config_file = ds.json", "clipping", "zero3.yaml"],
    ),
    "context parallel": (
        AS_FSDP | AS_MESH | {"PARALLELISM_CONFIG_CP_SIZE": "2"},
        [],
        ["parallelism_config_cp_size = 2", "it means ring attention"],
    ),
    "hsdp on one machine": (
        {},
        ["distributed.strategy=hsdp"],
        ["distributed.strategy = hsdp, 1 × 2", "strategy=fsdp2"],
    ),
    "hsdp that shards nothing": (
        AS_FSDP | AS_MESH | {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"},
        [],
        ["parallelism_config = hsdp, 2 × 1", "strategy=ddp"],
    ),
    "a mesh of another number of processes": (
        AS_FSDP | AS_MESH | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "8"},
        [],
        ["parallelism_config", "a product of 2"],
    ),
    "a batch that processes cannot share": (
        AS_FSDP,
        ["training.global_batch_size=26"],
        ["training.global_batch_size = 26", "2 processes"],
    ),
    "all at once": (
        AS_FSDP | {"FSDP_VERSION": "1", "ACCELERATE_MIXED_PRECISION": "fp16"},
        ["distributed.strategy=zero3", "training.global_batch_size=26"],
        ["4 problems", "fsdp_version", "mixed_precision", "strategy = zero3", "batch_size = 26"],
    ),
}


@pytest.mark.parametrize("how", LAUNCHED_WRONG)
def test_a_rank_of_a_wrong_launch_ends_with_one_message(server, config, tmp_path, how):
    env, overrides, words = LAUNCHED_WRONG[how]
    assert server.run(["train", str(config), *overrides], 2, tmp_path, env) == [2, 2]
    one_message((tmp_path / "output.txt").read_text(), tmp_path, *words)


# Each refusal has a test of its own in tests/unit/tools: these are what a person sees of it.
FILES_WRONG = {
    "of another trainer": ({"distributed_type": "MEGATRON_LM"}, [], ["MEGATRON_LM", "DEEPSPEED"]),
    "accumulation and clipping of DeepSpeed": (
        {**ZERO, "deepspeed_config": {"gradient_accumulation_steps": 4, "gradient_clipping": 0.5}},
        [],
        ["2 problems", "gradient_accumulation_steps = 4", "gradient_clipping = 0.5"],
    ),
    "a strategy of another family": (
        FSDP,
        ["distributed.strategy=zero2"],
        ["distributed.strategy = zero2", "fsdp2"],
    ),
}


@pytest.mark.parametrize("how", FILES_WRONG)
def test_a_file_that_starts_something_else_is_refused_with_one_message(config, tmp_path, how):
    values, overrides, words = FILES_WRONG[how]
    file = launch_file(tmp_path, values)
    ended = run([*LLMTRAIN, "train", str(config), *overrides, "--accelerate", file], tmp_path)
    assert ended.returncode == 2
    one_message(ended.stderr, tmp_path, *words)


def test_a_model_that_does_not_name_its_blocks_is_told_which_key_does(server, tmp_path):
    changes = {"distributed": {"strategy": "fsdp2"}}
    values = tiny_config(tmp_path / "run", training__steps=2) | changes
    values["model"]["config"] = {"model_type": "ctrl", "n_embd": 32, "n_layer": 2, "n_head": 2}
    values["model"]["config"]["dff"] = 64
    path = write_config(tmp_path, values)
    assert server.run(["train", str(path)], 2, tmp_path) == [2, 2]
    one_message((tmp_path / "output.txt").read_text(), tmp_path, "distributed.wrap_class")


def each(server, folder, commands):
    """One rank with each of these commands; their exit codes."""
    port, output = free_port(), folder / "output.txt"
    ranks = [
        {
            "argv": command,
            "env": rank_environment(rank, len(commands), port),
            "cwd": str(folder),
            "output": str(output),
        }
        for rank, command in enumerate(commands)
    ]
    return Ranks(server, server.ask({"start": ranks}), output).wait()


@pytest.mark.parametrize(
    ("override", "key"),
    [("optimizer.learning_rate=0.1", "optimizer.learning_rate"), ("run.seed=7", "run.seed")],
)
def test_ranks_with_another_config_are_named(server, config, tmp_path, override, key):
    command = ["train", str(config)]
    assert each(server, tmp_path, [command, [*command, override]]) == [2, 2]
    one_message((tmp_path / "output.txt").read_text(), tmp_path, f"{key} on rank 1", "on rank 0")


def test_ranks_with_other_versions_are_named(server, config, tmp_path):
    arguments = ["call", "helpers.odd_ranks", "of_another_version", str(config)]
    assert server.run(arguments, 2, tmp_path) == [2, 2]
    one_message((tmp_path / "output.txt").read_text(), tmp_path, "tokenizers on rank 1 = 0.0.1")


def test_processes_are_enough_for_a_strategy_and_need_no_file(config, tmp_path):
    asked = ["distributed.strategy=zero2", "--processes", "2"]
    ended = run([*LLMTRAIN, "train", str(config), *asked], tmp_path)
    assert ended.returncode == 0, ended.stderr
    trained(ended, tmp_path, world_size=2, strategy="zero2")
