"""The commands and programs of every page, run in order in one folder, and what they print.

tests/unit/docs/test_pages.py checks those that are not run here.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import pages, runs, used
from helpers.chats import rows_of
from helpers.corpus import articles, write_jsonl, write_parquet
from helpers.pages import prints
from helpers.ranks import ROOT

from llmtrain.rundir import contents, record, words

FOLDERS = ("configs", "accelerate_configs", "scripts")
QUICKSTART = ("train", "configs/quickstart.yaml", "training.steps=20", "evaluation.every_steps=20")
# The commands that import little; the server of ranks saves the others the imports.
LIGHT = ("report", "watch", "config", "doctor", "quickstart", "supervise")
PAGES = [page for page in pages.by_hand() if any(fence.runs for fence in pages.fences(page))]


@pytest.fixture(scope="module")
def quickstart(server, tmp_path_factory):
    """A run of configs/quickstart.yaml: 20 steps, checkpoints after 10 and 20."""
    folder = tmp_path_factory.mktemp("quickstart")
    (folder / "configs").symlink_to(ROOT / "configs")
    words = [*QUICKSTART, "checkpoint.every_steps=10"]
    assert server.run(words, 1, folder) == [0], (folder / "output.txt").read_text()
    return folder / "runs" / "quickstart"


def finished(folder):
    """The record of a run that nobody trained."""
    seed = 42 if folder.name == "a" else 7
    config = (ROOT / "configs" / "quickstart.yaml").read_text("utf-8")
    text = config.replace("dir: runs/quickstart", f"dir: runs/{folder.name}\n  seed: {seed}")
    runs.write_run(folder, runs.history(), config=text)


# What a page may name without making it.
GIVEN: dict[str, Callable[[Path], object]] = {
    "my.parquet": lambda path: write_parquet(path, articles(200)),
    "my-data": lambda path: write_jsonl(path / "a.jsonl.gz", articles(20)),
    "chat.jsonl": lambda path: write_jsonl(path, rows_of(60)),
    "runs/a": finished,
    "runs/b": finished,
}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_shows(page, server, tmp_path, request):
    fences = pages.fences(page)
    text = "\n".join(fence.text for fence in fences if fence.runs)
    for name in FOLDERS:
        (tmp_path / name).symlink_to(ROOT / name)
    for name, make in GIVEN.items():
        if name in text:
            make(tmp_path / name)
    trains_it = r"train configs/quickstart\.yaml(?!.*run\.dir=)"
    if "runs/quickstart" in text and not re.search(trains_it, text):
        made = request.getfixturevalue("quickstart")
        shutil.copytree(made, tmp_path / "runs" / "quickstart")
    printed = ""
    for number, fence in enumerate(fences):
        if fence.runs:
            printed = give(server, tmp_path, fence)
        elif fence.language == "text" and number and fences[number - 1].runs:
            check(fence, printed)


def test_a_run_has_the_files_and_fields_of_the_reference(quickstart):
    named = {path.partition("/")[0] for path in contents.WORDS}
    assert {path.name for path in quickstart.iterdir()} <= named
    found: dict[str, set[str]] = {}
    for line in record.record(quickstart):
        found.setdefault(line["kind"], set()).update(line.keys() - words.EVERY_LINE.keys())
    expected = {kind: set(names) for kind, names in words.FIELDS.items()}
    expected["train"].remove("router_loss")  # of mixtures alone
    expected["start"] -= {"reference", "batch_sizes"}  # of runs on pairs; of a batch that grows
    for kind in ("train", "eval"):
        expected[kind] -= words.OF_PAIRS.keys()
    assert found == expected


def give(server, folder, fence):
    """Run a fence; what it printed."""
    if fence.language == "python":
        (folder / "program.py").write_text(fence.text, "utf-8")
        return used.called(server, folder, "program", str(folder / "program.py"))
    printed = ""
    for line in pages.command_lines(fence.text):
        trains = re.search(r"llmtrain train |scripts/train\.py ", line)
        added = fence.options.get("add", "") if trains else ""
        printed += command(server, folder, f"{line} {added}")
    return printed


def command(server, folder, line):
    """Give a line of a page, and return what it prints; it must end with 0."""
    words = shlex.split(line)
    launches = {"--processes", "--accelerate", "--"} & set(words) or set("|&;<>$") & set(line)
    if words[0] == "llmtrain" and words[1] not in LIGHT and not launches:
        return used.given(server, folder, words)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        ["bash", "-ec", line], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check(fence, printed):
    """Compare what a page shows with what was printed."""
    compare = fence.options.get("compare", "")
    if compare != "no" and not prints(fence.text, printed, exact=compare == "exact"):
        pytest.fail(f"{fence} shows\n{fence.text}\nprinted was\n{printed}")
