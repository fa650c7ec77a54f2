"""What a run that was killed twice has recorded: where its time went, a line for each record."""

import re
import shlex
import sys
from collections import Counter

import pytest
from helpers import launcher, tiny
from helpers.faults import KILLED, STEPS

from llmtrain.report import verdict
from llmtrain.report.collect import collect
from llmtrain.report.page import write_report
from llmtrain.report.svg import shares
from llmtrain.rundir import record

KINDS = ("train", "eval", "sample", "checkpoint")


@pytest.fixture
def killed_twice(faulty):
    """A finished run whose first two starts were killed some steps after a checkpoint."""
    run = faulty(1)
    run.config["evaluation"]["prompts"] = ["The planet\nof two lines", 'say "a = b"']
    assert run.launch("loop.step@step=7=kill") == [KILLED]
    assert run.launch("loop.step@step=16=kill") == [KILLED]
    assert run.launch() == [0], run.output()
    return run


def redone_steps(run_dir):
    """By hand: the steps with a line that the next start went back behind."""
    found, last = [], 0
    for line in record.record(run_dir):
        if line["kind"] == "start":
            if last > line["step"]:
                found.append((line["step"] + 1, last))
            last = line["step"]
        elif line["kind"] == "train":
            last = line["step"]
    return found


def test_a_run_that_was_killed_twice_accounts_for_each_second_and_logs_a_line_a_record(
    killed_twice,
):
    run = killed_twice
    tables = collect(run.run_dir)
    owned = {owner: share for owner, share, _ in shares(tables.stretches)}
    assert sum(owned.values()) == pytest.approx(1.0, abs=0.001)
    assert min(owned["redone"], owned["starting"], owned["training"]) > 0
    end = record.record(run.run_dir)[-1]
    assert verdict.goodput(tables) == pytest.approx(end["goodput"], abs=0.005)
    lost = redone_steps(run.run_dir)
    assert len(lost) == 2
    named = ", ".join(f"{first}–{last}" if first < last else f"{first}" for first, last in lost)
    page = write_report(run.run_dir).read_text(encoding="utf-8")
    assert f"2 restarts; done again: steps {named}" in page

    start, *_, rest = run.output().partition("ready  ")
    slow = re.compile(r", (\d+ min )?\d+ s$")  # what a busy machine adds about long stages
    assert sum(not slow.search(line) for line in start.splitlines()) <= 11
    end = rest[rest.index("\nfinished  ") :].strip().splitlines()
    assert len(end) <= 10
    assert end[-1].endswith("report.html")

    blocks = re.split(r"^ready .*\n", run.output(), flags=re.MULTILINE)[1:]
    assert len(blocks) == 3
    between = [re.split(r"^(?:run|finished) ", one, flags=re.MULTILINE)[0] for one in blocks]
    records = [shlex.split(line) for block in between for line in block.splitlines()]
    assert all("=" in part for one in records for part in one[1:]), records
    logged = Counter(one[0] for one in records if one[0] in KINDS)
    kinds = Counter(line["kind"] for line in record.record(run.run_dir) if line["kind"] in KINDS)
    assert logged == kinds
    assert kinds["sample"] >= 2 * STEPS // 8
    assert any(r"prompt=The planet\nof two lines" in one for one in records)


def test_the_last_lines_are_ours_what_where_what_to_do_and_the_log(faulty):
    """A defect on rank 1 under llmtrain's own launcher, whose torch prints tracebacks, too."""
    run = faulty(2)
    path = tiny.write_config(run.folder, run.config)
    command = [sys.executable, "-m", "llmtrain", "train", str(path), "--processes", "2"]
    ended = launcher.run(command, run.folder, LLMTRAIN_FAULTS="loop.step@step=7=raise")
    assert ended.returncode == 1
    what, where, todo, log = ended.stderr.splitlines()[-4:]
    assert what.startswith("error: InjectedError: ")
    assert re.match(r"    where:    rank 0, after step [56], llmtrain/faults.py, line \d+$", where)
    assert todo.startswith("    next:     this is a defect")
    assert log == f"    log:      {run.run_dir / 'logs' / 'rank-0.log'}"
    assert "ChildFailedError" not in ended.stderr
    assert "ChildFailedError" in (run.run_dir / "logs" / "launcher.log").read_text()
