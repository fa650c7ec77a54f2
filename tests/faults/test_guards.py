"""Processes that hang, data that does not come, numbers that are none, replicas that differ."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import zero
from helpers.ranks import until
from helpers.striking import HUNG, through
from helpers.zero import Case

HURRIED = through(hurried=True)


def log(run, rank):
    return (run.run_dir / "logs" / f"rank-{rank}.log").read_text()


def test_f36_a_hang_is_told_with_its_stacks_and_ended_with_75(faulty):
    run = faulty(2)
    assert run.launch("loop.micro@rank=1@step=6@nth=2=hang", through=HURRIED) == [75, 75]
    for rank in (0, 1):
        assert "no progress for 90 s: " in log(run, rank)  # half of the time-out
        assert "no progress for 170 s: " in log(run, rank)
        assert log(run, rank).count("the stacks of all threads") == 2
    assert "90 s: a micro-batch" in log(run, 1)
    assert "in _strike" in log(run, 1).split("the stacks of all threads")[1]
    (event,) = run.events("no_progress")
    assert (event["seconds"], event["rank"]) == (90, 0)
    assert run.status()["exit_code"] == 75
    assert run.status()["reason"].startswith("no progress for 170 s: ")
    assert run.valid() == ["step-00000004"]


def test_f36_a_stopped_process_ends_its_peer_with_75_and_then_itself(faulty):
    run = faulty(2)
    ranks = run.start(through=HURRIED)
    until(lambda: any(line["step"] == 5 for line in run.lines("train")), "step 5")
    os.kill(ranks.pids[1], signal.SIGSTOP)
    (run.folder / HUNG).touch()
    until(lambda: run.status()["state"] == "failed", "the end of rank 0")
    assert run.status()["exit_code"] == 75
    assert run.status()["reason"].startswith("no progress for ")
    assert "the stacks of all threads" in log(run, 0)
    os.kill(ranks.pids[1], signal.SIGCONT)
    assert run.wait(ranks) == [75, 75]


@pytest.mark.parametrize(
    ("action", "code", "said", "way"),
    [
        ("kill", 75, "SIGKILL", ("train",)),
        pytest.param(
            *("raise", 1, "InjectedError: worker.block", ("train",)), marks=pytest.mark.slow
        ),
        pytest.param("hang", 75, "no progress for 170 s", HURRIED, marks=pytest.mark.slow),
    ],
)
def test_f37_data_that_a_worker_does_not_send(faulty, straight, action, code, said, way):
    """Its 40th block is the last of step 10 of its rank; a checkpoint was due at step 8.

    A killed one takes with it what it had read ahead.
    """
    run = faulty(2, data__workers=1)
    fault = f"worker.block@rank=1@nth=40={action}"
    ranks = run.start(fault, through=way)
    if action == "hang":  # of the worker, which the rank can only wait for
        until(lambda: any(line["step"] == 8 for line in run.lines("train")), "step 8")
        (run.folder / HUNG).touch()
    assert run.wait(ranks) == [code, code]
    assert (run.status()["state"], run.status()["exit_code"]) == ("failed", code)
    assert said in run.status()["reason"] + log(run, 1)
    if action == "raise":
        assert "Traceback" in log(run, 1)
        assert "in carry" in log(run, 1)  # the worker's own
    (run.folder / HUNG).unlink(missing_ok=True)
    assert run.launch() == [0, 0]
    assert run.resumed()[1] >= ("step-00000004" if action == "kill" else "step-00000008")
    assert run.outcome() == straight(2)


BAD_STEP = 2
STRATEGIES = ["ddp", "fsdp2", "zero1", "zero2", "zero3", "ddp, same bits", "fsdp2, same bits"]


def skipping(strategy, root):
    """One rank's loss is NaN in a step, every rank's is, and the step never was."""
    name, _, exact = strategy.partition(", ")
    asked = {"same_bits": True, "fused": False} if exact else {}
    case = Case(name, forbid="loss", bad_step=BAD_STEP, steps=4, **asked)
    cases = {
        "one": case,
        "all": replace(case, forbid="loss everywhere"),
        "never": replace(case, forbid="", left_out=BAD_STEP),
    }
    return {
        name: replace(case, micro=2, save=str(root / strategy / name))
        for name, case in cases.items()
    }


@pytest.fixture(scope="module")
def skipped(server, tmp_path_factory):
    """(strategy, who) → what it came to, and digests of its weights and moments."""
    root = tmp_path_factory.mktemp("skipped")
    cases = {
        (strategy, who): case
        for strategy in STRATEGIES
        for who, case in skipping(strategy, root).items()
    }
    four = {("hsdp", who): case for who, case in skipping("hsdp", root).items()}
    found = zero.run(server, root / "2", 2, list(cases.values()))
    found += zero.run(server, root / "4", 4, list(four.values()), LOCAL_WORLD_SIZE="2")
    cases |= four
    return {
        key: (one, zero.files(Path(case.save)))
        for (key, case), one in zip(cases.items(), found, strict=True)
    }


@pytest.mark.parametrize("who", ["one", "all"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "hsdp"])
def test_f44_a_step_that_is_not_finite_is_as_if_it_had_not_been(skipped, strategy, who):
    """Byte for byte, moments too, after one more step; wherever it was not finite."""
    (found, files), (never, expected) = skipped[strategy, who], skipped[strategy, "never"]
    assert files == expected
    assert len(files) == 2
    assert found["optimizer_steps"] == never["optimizer_steps"] == 3
    assert found["unequal_replicas"] == {}
    norms = [one["norm"] for one in found["numbers"]]
    assert not norms[BAD_STEP] < float("inf")
    del found["numbers"][BAD_STEP]
    assert found["numbers"] == never["numbers"]


@pytest.mark.slow  # the step itself, on every strategy, is above
def test_f44_a_run_goes_on_behind_such_a_step(faulty):
    runs = {name: faulty(2, name=name, training__steps=12) for name in ("one", "all", "never")}
    assert runs["never"].launch(through=through(never=10)) == [0, 0]
    for name, ranks in {"one": [1], "all": [0, 1]}.items():
        run = runs[name]
        assert run.launch(through=through(nan=ranks, step=10)) == [0, 0]
        assert run.outcome() == runs["never"].outcome()
        assert [line["step"] for line in run.lines("train") if line["skipped"]] == [10]
        before, bad, after = run.lines("train")[8:11]
        assert bad["loss"] is None
        assert before["tokens"] == bad["tokens"] < after["tokens"]


def test_f44_where_that_ends_the_run_nothing_is_saved_at_the_step_or_behind_it(faulty):
    run = faulty(2, training__on_nonfinite="stop")
    assert run.launch(through=through(nan=[1], step=8)) == [1, 1]
    assert run.valid() == ["step-00000004"]
    assert run.names() == ["step-00000004"]
    assert "diverged at step 8" in run.status()["reason"]


def test_f45_replicas_that_differ_are_not_saved(faulty, straight):
    run = faulty(2)
    assert run.launch(through=through(flip=[1], step=6)) == [75, 75]
    assert run.names() == ["step-00000004"]
    (event,) = run.events("replicas_differ")
    assert (event["step"], event["ranks"]) == (8, [0, 1])
    assert event["names"][0].startswith("transformer.wte.weight (rank 0, 1)")
    assert "replicas hold different weights at step 8" in run.status()["reason"]
    assert run.launch() == [0, 0]
    assert run.resumed() == [None, "step-00000004"]
    assert run.outcome() == straight(2)


def worker_dies(faulty, block):
    """A run on one process whose data worker dies before that block, and that nothing has saved."""
    asked = {"data__workers": 1, "checkpoint__every_steps": 1000, "checkpoint__keep_best": 0}
    return faulty(1, **asked), f"worker.block@nth={block}=kill"


@pytest.mark.slow  # F37 and F14 by themselves
def test_f37_a_step_that_cannot_be_saved_when_a_worker_dies_is_a_failed_store(faulty, straight):
    run, dies = worker_dies(faulty, 40)
    assert run.launch(f"{dies};save.create=enospc") == [74]
    assert run.status()["exit_code"] == 74
    assert "No space left" in run.status()["reason"]
    assert run.launch() == [0]
    assert run.outcome() == straight(1)


@pytest.mark.slow  # F37 and F38 by themselves
def test_f37_a_stop_in_the_step_whose_data_failed_is_served(faulty, straight):
    run, dies = worker_dies(faulty, 40)
    ranks = run.start(f"{dies};loop.step@step=10=delay:5")
    until(lambda: any(line["step"] == 8 for line in run.lines("train")), "step 8")
    (run.run_dir / "STOP").touch()
    assert run.wait(ranks) == [0]
    assert run.status()["reason"] == "stop_file"
    assert not (run.run_dir / "STOP").exists()
    assert run.launch() == [0]
    assert run.outcome() == straight(1)
