"""README's commands, exactly as they are written, in a folder with what a checkout has."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import pages, used
from helpers.ranks import ROOT
from helpers.tiny import lines, status

FOLDERS = ("configs", "accelerate_configs", "scripts")


def commands():
    """The lines of all bash fences."""
    fences = (fence for fence in pages.fences("README.md") if fence.language == "bash")
    return [line for fence in fences for line in pages.command_lines(fence.text)]


def command(word):
    (found,) = (line for line in commands() if word in line)
    return found


@pytest.fixture
def checkout(tmp_path):
    for name in FOLDERS:
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(line, folder):
    """As a person would who has activated the environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.slow  # all 500 steps; the first 20 are below
def test_the_two_process_command_trains_the_quickstart(checkout):
    ended = run(command("accelerate_configs/cpu.yaml"), checkout)
    assert ended.returncode == 0, ended.stderr
    run_dir = checkout / "runs" / "two"
    assert ended.stdout.splitlines()[-1] == "runs/two/report.html"
    assert (run_dir / "report.html").is_file()
    assert status(run_dir)["state"] == "finished"
    assert status(run_dir)["world_size"] == 2
    losses = [line["loss"] for line in lines(run_dir, "eval")]
    assert len(losses) == 6
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * losses[0]
    written = [line["prompt"] + line["text"] for line in lines(run_dir, "sample")[-2:]]
    assert known_words(" ".join(written)) >= 0.8, written


def test_the_two_process_command_begins_the_quickstart(checkout):
    line = f"{command('accelerate_configs/cpu.yaml')} training.steps=20 evaluation.every_steps=20"
    ended = run(line, checkout)
    assert ended.returncode == 0, ended.stderr
    run_dir = checkout / "runs" / "two"
    assert ended.stdout.splitlines()[-1] == "runs/two/report.html"
    assert (run_dir / "report.html").is_file()
    found = status(run_dir)
    assert (found["state"], found["step"], found["world_size"]) == ("finished", 20, 2)
    losses = [line["loss"] for line in lines(run_dir, "eval")]
    assert losses[-1] < losses[0] - 0.5


def known_words(text):
    """Share of a text's words that stand in the built-in encyclopedia."""
    import re

    import pyarrow.parquet as pq

    files = sorted((ROOT / "llmtrain" / "data" / "sample").glob("*.parquet"))
    corpus = " ".join(text for file in files for text in pq.read_table(file)["text"].to_pylist())
    words = re.findall(r"\w+", text)
    known = set(re.findall(r"\w+", corpus))
    assert len(words) > 5, text  # more than the prompts
    return sum(word in known for word in words) / len(words)


def test_own_text_trains_with_the_command_that_names_it(server, checkout):
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [f"Article {i} tells of {i * 7} things and {i % 13} more.\n" * 9 for i in range(3000)]
    pq.write_table(pa.table({"text": texts}), checkout / "my.parquet")
    shorter = "model.tokenizer.train=300 training.steps=2 training.global_batch_size=2"
    line = f"{command('my.parquet')} {shorter} training.micro_batch_size=1 data.seq_len=32"
    used.given(server, checkout, shlex.split(line + " optimizer.warmup_steps=1"))
    assert status(checkout / "runs" / "wikipedia_small")["step"] == 2
