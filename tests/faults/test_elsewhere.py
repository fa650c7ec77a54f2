"""A run that goes on elsewhere: on other numbers of processes, under other strategies, changed."""

import math

import pytest
from helpers.faults import DROPOUT, KILLED, FaultyRun, faulty_config

# Sums in another order differ in their last digits; dropout draws other masks.
EXACT = DROPOUT | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BLOCKS = 12  # of a step: one, two and three processes share them


@pytest.fixture(scope="module")
def unmoved(server, tmp_path_factory):
    """The run on two processes under DDP that nothing strikes, at its end."""
    folder = tmp_path_factory.mktemp("unmoved")
    asked = {"training__global_batch_size": BLOCKS, "model__config": EXACT}
    run = FaultyRun(server, folder, 2, faulty_config(folder / "run", 2, **asked))
    assert run.launch() == [0, 0], run.output()
    run.check_clean()
    return run


def agree(found, expected):
    """The same batches, and the same losses up to the order of sums."""
    assert found.outcome().batches == expected.outcome().batches
    one, other = ([line["loss"] for line in run.lines("train")] for run in (found, expected))
    assert len(one) == 24
    assert one == pytest.approx(other, abs=1e-5)


def names(*steps):
    """What the first start, and those behind it, resume from."""
    return [None, *(f"step-{step:08d}" for step in steps)]


def test_f41_on_two_processes_then_one_then_three_then_two(faulty, unmoved):
    run = faulty(2, training__global_batch_size=BLOCKS, model__config=EXACT)
    for world_size, last in ((2, 6), (1, 11), (3, 18)):
        fault = f"loop.step@step={last}=kill"
        assert run.launch(fault, world_size=world_size) == [KILLED] * world_size
    assert run.launch() == [0, 0]
    assert run.resumed() == names(4, 8, 16)
    assert [line["world_size"] for line in run.lines("start")] == [2, 1, 3, 2]
    agree(run, unmoved)


def test_f42_under_ddp_then_fsdp2_then_zero2_then_zero3_then_ddp(faulty, unmoved):
    """That files are the same bytes behind load and save is `test_portability`'s."""
    run = faulty(2, training__global_batch_size=BLOCKS, model__config=EXACT)
    way = (("ddp", 6), ("fsdp2", 10), ("zero2", 14), ("zero3", 18))
    for strategy, last in way:
        fault = f"loop.step@step={last}=kill"
        assert run.launch(fault, f"distributed.strategy={strategy}") == [KILLED, KILLED]
    assert run.launch() == [0, 0]
    assert run.resumed() == names(4, 8, 12, 16)
    said = [line["strategy"] for line in run.lines("start")]
    assert said == [*(strategy for strategy, _ in way), "ddp"]
    agree(run, unmoved)


MEANING = (
    "run.seed=7",
    "model.config.n_layer=3",
    "data.seq_len=16",
    "optimizer.learning_rate=1e-3",
)
FREE = ("logging.every_steps=2", "checkpoint.keep_last=5", "data.workers=0", "run.seed=42")


def test_f43_what_changes_the_run_is_refused_and_what_does_not_is_taken(faulty):
    run = faulty(1)
    assert run.launch("loop.step@step=6=kill") == [KILLED]
    before = run.names()

    assert run.launch("", *MEANING) == [2]
    for override in MEANING:
        key, _, value = override.partition("=")
        shown = "0.001" if value == "1e-3" else value
        assert f"{key} = {shown}\n" in run.output()
        assert f"checkpoint.accept_changes=[{key}]" in run.output()
    assert (run.names(), len(run.lines("start"))) == (before, 1)

    assert run.launch("loop.step@step=10=kill", *FREE) == [KILLED]
    assert run.events("changes_accepted") == []

    accepted = ("optimizer.learning_rate=1e-3", "checkpoint.accept_changes=[optimizer]")
    assert run.launch("", *accepted, "training.steps=28") == [0]
    assert run.resumed() == names(4, 8)
    assert run.events("changes_accepted")[0]["keys"] == ["optimizer.learning_rate"]
    rates = run.events("length_changed")[0]
    assert (rates["steps_before"], rates["steps"]) == (24, 28)
    assert rates["learning_rate_before"] == pytest.approx(cosine(24, 9))
    assert rates["learning_rate"] == pytest.approx(cosine(28, 9))
    line = next(line for line in run.lines("train") if line["step"] == 9)
    assert line["learning_rate"] == pytest.approx(cosine(28, 9))
    assert "the learning rate is 0.00" in run.output()


def cosine(steps, step):
    """From 1e-3 down to a tenth of it, behind five steps of warm-up."""
    share = (step - 5) / (steps - 5)
    return 1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2)
