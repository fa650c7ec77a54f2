"""Under real launchers: a number of threads that a user has set is obeyed, theirs is replaced."""

import os
import subprocess
import sys

import pytest
import torch
from helpers.tiny import lines, tiny_config, write_config

import llmtrain

SCRIPT = """
import os
from llmtrain.system import decide_threads
# In one call: torchrun's processes do not buffer, and share a stream.
os.write(1, f"threads {decide_threads('auto', None, os.environ).count}\\n".encode())
"""
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--cpu", "--num_machines=1"]
ACCELERATE += ["--mixed_precision=no", "--dynamo_backend=no", "--num_processes=1"]


@pytest.mark.parametrize(
    ("launch", "omp", "expected"),
    [
        (TORCHRUN, None, 2),
        (TORCHRUN, "1", 1),
        (ACCELERATE, None, 4),
        (ACCELERATE, "1", 1),
        ([*ACCELERATE, "--num_cpu_threads_per_process=1"], None, 1),
        ([], "1", 1),
    ],
    ids=["torchrun", "torchrun, OMP", "accelerate", "accelerate, OMP", "an option", "none, OMP"],
)
def test_only_a_number_that_the_launcher_chose_is_replaced(tmp_path, launch, omp, expected):
    script = tmp_path / "script.py"
    four = "from llmtrain import system; system.cores = lambda: system.CpuCount(4, '4 cores')"
    script.write_text(four + SCRIPT)
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env |= {} if omp is None else {"OMP_NUM_THREADS": omp}
    command = [sys.executable, *launch, str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("threads")]
    assert set(said) == {f"threads {expected}"}


def test_a_resume_with_another_number_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    run_dir = tmp_path / "run"
    try:
        for steps, asked in ((1, 2), (2, 2), (3, "auto"), (4, "auto")):
            more = {"training__steps": steps, "training__threads": asked}
            llmtrain.train(
                llmtrain.load_config(write_config(tmp_path, tiny_config(run_dir, **more)))
            )
            assert torch.get_num_threads() == (2 if asked == 2 else 1)
    finally:
        torch.set_num_threads(before)
    told = [line for line in lines(run_dir, "event") if line["event"] == "threads_changed"]
    assert [(line["step"], line["detail"]) for line in told] == [
        (2, {"threads_before": 2, "threads": 1})
    ]
    assert [line["threads"] for line in lines(run_dir, "start")] == [2, 2, 1, 1]
