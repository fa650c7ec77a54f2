"""A run is asked to stop, at any moment and by anybody: it leaves with 0, and nothing is lost."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from helpers.faults import Launch
from helpers.launcher import ACCELERATE, CONFIGS, SCRIPT
from helpers.ranks import ROOT, until
from helpers.tiny import write_config

from llmtrain.rundir import contents, record

# Seconds at the beginning of steps, in which a test can do something: for machines that are busy.
SLOW = ";".join(f"loop.step@step={step}=delay:2" for step in range(6, 14))


def stopped(run, codes, reason="signal"):
    """Check a stop that left a checkpoint; the step that it came behind."""
    assert codes == [0, 0], run.output()
    found = run.status()
    assert (found["state"], found["exit_code"], found["reason"]) == ("stopped", 0, reason)
    assert found["checkpoint"] == f"step-{found['step']:08d}"
    assert found["checkpoint"] in run.valid()
    assert run.left_over() == []
    trained = [
        line["step"]
        for line in record.read(run.run_dir / contents.METRICS)
        if line["kind"] == "train"
    ]
    assert trained == list(range(1, found["step"] + 1))  # each once, over all starts
    return int(found["step"])


def stopped_without_a_step(run, codes, before):
    """Check a stop before the first step of a start: the checkpoints are those of `before`."""
    assert codes == [0, 0], run.output()
    assert (run.status()["state"], run.status()["reason"]) == ("stopped", "signal")
    assert (run.names() if run.checkpoints.exists() else []) == before


def test_f38_a_stop_in_any_phase_leaves_a_complete_checkpoint_and_changes_no_bit(faulty, straight):
    """Eight starts of one run: what a stop loses or does twice would be seen in its last bits."""
    run = faulty(2)
    stopped_without_a_step(run, run.launch("eval.batch@step=0@rank=1=term"), [])
    assert run.lines("eval") == []
    assert stopped(run, run.launch("loop.step@step=1@rank=0=term")) <= 2
    assert stopped(run, run.launch("loop.micro@step=6@nth=2@rank=1=term")) in (6, 7)
    assert stopped(run, run.launch("save.write@step=8@rank=0=term")) in (8, 9, 10)
    assert "step-00000008" in run.valid()
    assert stopped(run, run.launch("eval.batch@step=16@rank=1=term")) == 16
    assert [line["step"] for line in run.lines("eval")] == [0, 8]
    before = run.names()
    stopped_without_a_step(run, run.launch("load.scan@rank=0=term"), before)
    stopped_without_a_step(run, run.launch("load.read@rank=1@nth=3=term"), before)
    assert run.status()["checkpoint"] == "step-00000016"
    assert run.launch() == [0, 0]
    assert run.resumed()[-1] == "step-00000016"
    assert [line["step"] for line in run.lines("eval")] == [0, 8, 16, 24]  # the missing one, too
    assert run.outcome() == straight(2)


def accelerate_launch(run, faults, *overrides):
    """The run under a real launcher, as the README starts it."""
    path = write_config(run.folder, run.config)
    run.launches.append(Launch(faults, overrides))
    options = ["--config_file", str(CONFIGS / "cpu.yaml"), "--main_process_port", "0"]
    with (run.folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [*ACCELERATE, *options, SCRIPT, str(path), *overrides],
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=run.folder,
            env={**os.environ, "LLMTRAIN_FAULTS": faults, "PYTHONPATH": str(ROOT)},
        )


def children(pid):
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_trained(run, step):
    logged = run.lines("train") if (run.run_dir / contents.METRICS).exists() else []
    return bool(logged) and int(logged[-1]["step"]) >= step


def ended(run):
    """Wait until no process of a launch is left; the run's own code, for as many ranks."""
    until(lambda: not run.processes(), "the end of all processes of the launch")
    return [run.status()["exit_code"]] * 2


def test_f34_the_ranks_of_a_killed_launcher_save_and_are_gone(faulty, straight):
    run = faulty(2)
    launcher = accelerate_launch(run, SLOW)
    until(lambda: has_trained(run, 4), "step 4")
    assert len(children(launcher.pid)) == 2
    launcher.kill()
    launcher.wait()
    stopped(run, ended(run), "launcher_lost")
    assert run.launch() == [0, 0]
    assert run.outcome() == straight(2)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=str
)
def test_f38_a_launcher_that_is_stopped_in_a_save_waits_for_it(faulty, straight, number):
    run = faulty(2)
    launcher = accelerate_launch(run, "save.write@step=4@rank=0@nth=1=delay:5;" + SLOW)
    until((run.checkpoints / "step-00000004.partial").is_dir, "a save")
    launcher.send_signal(number)
    launcher.wait()  # its own code is torch's
    assert stopped(run, ended(run)) >= 4
    assert "step-00000004" in run.valid()
    assert run.launch() == [0, 0]
    assert run.outcome() == straight(2)


def test_f39_signals_to_one_rank_or_to_all_once_or_fifty_times_are_one_agreed_stop(
    faulty, straight
):
    run = faulty(2)
    assert stopped(run, run.launch("loop.micro@step=3@nth=1@rank=1=usr1")) <= 4
    assert stopped(run, run.launch("loop.micro@step=9@nth=2=term")) <= 10
    fifty = ";".join(["loop.micro@step=14@nth=1=term", "loop.micro@step=14@nth=1=int"] * 25)
    assert stopped(run, run.launch(fifty)) <= 15
    assert len(run.lines("end")) == 3
    assert run.launch() == [0, 0]
    assert run.outcome() == straight(2)


@pytest.mark.slow
def test_f39_a_hang_up_of_the_launcher_reaches_the_data_workers_too_and_none_dies(faulty, straight):
    """A launcher signals the process group of each rank."""
    run = faulty(2, data__workers=1)
    launcher = accelerate_launch(run, SLOW)
    until(lambda: has_trained(run, 4), "step 4")
    ranks = children(launcher.pid)
    assert [len(children(rank)) for rank in ranks] == [2, 2]  # a worker, and Python's tracker
    launcher.send_signal(signal.SIGHUP)
    launcher.wait()
    stopped(run, ended(run))
    assert run.launch() == [0, 0]
    assert run.outcome() == straight(2)


def test_f40_a_second_interrupt_ends_a_run_that_hangs_without_a_checkpoint(faulty, straight):
    """Seconds lie between the two: one press may be heard twice."""
    run = faulty(2)
    faults = (
        "loop.step@step=6=int;loop.step@step=6=int;"
        "loop.step@step=7=delay:2.5;loop.step@step=7=int;loop.step@step=7=hang"
    )
    assert run.launch(faults) == [75, 75]
    assert run.output().count("interrupted again: ending without a checkpoint") == 2
    assert run.valid() == ["step-00000004"]
    assert run.launch() == [0, 0]
    assert run.outcome() == straight(2)


def test_f40_a_stop_file_ends_the_run_and_is_deleted(faulty, straight):
    run = faulty(2)
    ranks = run.start(SLOW)
    until(lambda: has_trained(run, 4), "step 4")
    (run.run_dir / "STOP").touch()
    stopped(run, run.wait(ranks), "stop_file")
    assert not (run.run_dir / "STOP").exists()
    assert run.launch() == [0, 0]
    assert run.outcome() == straight(2)


def test_f40_a_stop_file_left_over_stops_the_next_start_before_its_first_step(faulty):
    run = faulty(2)
    run.run_dir.mkdir(parents=True)
    (run.run_dir / "STOP").touch()
    assert run.launch() == [0, 0]
    assert (run.status()["state"], run.status()["checkpoint"]) == ("stopped", None)
    assert run.lines("train") == []


@pytest.mark.slow  # every other run that ends asks for its code
@pytest.mark.deeper
def test_runs_that_start_and_end_exit_with_0_every_time(faulty, request):
    """A hundred in `make test-slow`: one in forty aborted where the interpreter was finalised."""
    for cycle in range(100 if "deeper" in request.config.getoption("markexpr") else 5):
        run = faulty(2, name=f"run-{cycle}", training__steps=1)
        assert run.launch() == [0, 0], run.output()
        shutil.rmtree(run.run_dir)


def asked_for(run):
    """The steps that were saved although no period said so."""
    return [line["step"] for line in run.lines("checkpoint") if line["reason"] == "asked"]


def test_f40_clocks_and_the_save_file_save_and_stop(faulty, straight):
    run = faulty(2, checkpoint__every_steps=1000)
    minutes = "checkpoint.every_minutes=0.0001"  # less than a step takes
    assert stopped(run, run.launch("loop.step@step=6@rank=0=term", minutes)) <= 7
    assert len(asked_for(run)) >= 2  # the wish of a step is known behind the next one

    # How far it comes depends on how long a start takes here.
    codes = run.launch("loop.step@step=9=delay:6", "checkpoint.stop_after=5s")
    assert 6 <= stopped(run, codes, "stop_after") <= 10
    before = asked_for(run)

    (run.run_dir / "SAVE").touch()
    assert run.launch() == [0, 0]
    assert not (run.run_dir / "SAVE").exists()
    first = [line["step"] for line in run.lines("start")][-1] + 1
    (at_once,) = asked_for(run)[len(before) :]
    assert at_once in (first, first + 1)
    assert run.outcome() == straight(2)


def test_f38_a_stop_during_a_background_save_completes_it_and_saves_where_it_stops(
    faulty, straight
):
    run = faulty(2, checkpoint__background=True)
    faults = "save.write@step=4@rank=0@nth=1=delay:2;loop.step@step=5@rank=1=term"
    assert stopped(run, run.launch(faults)) in (5, 6)
    assert run.valid()[0] == "step-00000004"
    saved = {line["step"]: line for line in run.lines("checkpoint")}
    assert saved[4]["seconds"] > 2 > saved[4]["seconds"] - saved[4]["blocked_seconds"]
    assert stopped(run, run.launch("save.write@step=12@rank=0@nth=1=term")) in (12, 13, 14, 15, 16)
    assert "step-00000012" in run.valid()
    assert run.launch() == [0, 0]
    assert run.outcome() == straight(2)
