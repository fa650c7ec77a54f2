"""Faults of a run whose model is cut over processes: it ends together, and resumes bit for bit."""

import pytest
from helpers.faults import EVERY, KILLED, STEPS
from helpers.striking import through
from transformers import AutoModelForCausalLM

from llmtrain.hashing import mix

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "tie_word_embeddings": False,
}
# name → processes, strategy, keys
CUTS = {
    "matrices beside fsdp2": (4, "fsdp2", {"tensor_parallel": 2}),
    "blocks beside ddp": (4, "ddp", {"pipeline_parallel": 2}),
    "blocks beside fsdp2": (4, "fsdp2", {"pipeline_parallel": 2}),
}
LAST_THAT_WRITES = {"blocks beside ddp": 1}  # the last stage of the first pipeline; else the last
BESIDE_DDP = (4, "ddp", {"tensor_parallel": 2})


def cut(faulty, how, name="a"):
    world_size, strategy, keys = CUTS.get(how, BESIDE_DDP)
    changes = {f"distributed__{key}": value for key, value in keys.items()}
    return faulty(world_size, strategy, name, model__config=LLAMA, **changes)


KILLED_UNDER = [
    "matrices beside fsdp2",
    pytest.param("blocks beside ddp", marks=pytest.mark.slow),
    pytest.param("blocks beside fsdp2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("how", KILLED_UNDER)
def test_a_cut_run_killed_at_random_steps_ends_in_equal_bits_and_opens_anywhere(faulty, how):
    straight, run = (cut(faulty, how, name) for name in ("straight", "killed"))
    assert straight.launch() == [0] * straight.world_size
    steps = sorted({EVERY + 1 + mix(46, k) % (STEPS - EVERY - 1) for k in range(3)})
    for step in steps:
        rank = mix(46, step) % run.world_size
        codes = run.launch(f"loop.micro@rank={rank}@step={step}@nth=1=kill")
        assert codes == [KILLED if one == rank else 75 for one in range(run.world_size)]
    assert run.launch() == [0] * run.world_size
    assert run.outcome() == straight.outcome()
    AutoModelForCausalLM.from_pretrained(run.newest())


@pytest.mark.parametrize("how", CUTS)
def test_a_signal_in_a_cut_step_and_a_stop_file_leave_complete_checkpoints(faulty, how):
    run = cut(faulty, how)
    last = run.world_size - 1
    assert run.launch(f"loop.micro@rank={last}@step=6@nth=2=term") == [0] * run.world_size
    assert run.status()["state"] == "stopped"
    assert run.status()["checkpoint"] in run.valid()
    assert run.launch(f"eval.batch@step=8@rank={last}=term") == [0] * run.world_size
    assert run.status()["checkpoint"] == "step-00000008"
    (run.run_dir / "STOP").touch()
    assert run.launch() == [0] * run.world_size
    assert run.status()["reason"] == "stop_file"
    assert run.status()["checkpoint"] in run.valid()


@pytest.mark.parametrize("how", CUTS)
def test_a_full_disk_of_one_rank_leaves_no_other_waiting(faulty, how):
    run = cut(faulty, how)
    rank = LAST_THAT_WRITES.get(how, run.world_size - 1)
    at = f"save.write@rank={rank}@step={EVERY}@bytes=10%=enospc"
    assert run.launch(at, f"training.steps={EVERY + 2}") == [0] * run.world_size
    (failed,) = run.events("save_failed")
    assert f"rank {rank}: OSError" in failed["failures"]
    assert run.valid() == [f"step-{EVERY + 2:08d}"]


@pytest.mark.parametrize(
    ("of", "ranks"), [("model.embed_tokens", [1, 3]), ("model.norm", [3])], ids=["cut", "whole"]
)
def test_a_flipped_bit_is_found_among_the_processes_that_hold_the_same(faulty, of, ranks):
    """Of what is not cut all four have a copy, so it is known which of them is wrong."""
    run = cut(faulty, "matrices beside ddp")
    assert run.launch(through=through(flip=[3], step=EVERY, of=of)) == [75] * 4
    (event,) = run.events("replicas_differ")
    found = [name for name in event["names"] if name.startswith(of)]
    assert event["step"] == EVERY
    assert found[0].startswith(f"{of}.weight (rank {', '.join(map(str, ranks))})")


def test_a_rank_that_cannot_send_its_part_leaves_no_other_waiting(faulty):
    run = cut(faulty, "matrices beside ddp")
    given = (f"training.steps={EVERY + 2}", "checkpoint.writers=rank0")
    assert run.launch("", *given, through=through(unsent=[1])) == [0] * 4
    (failed,) = run.events("save_failed")
    assert "rank 1: OSError: this piece cannot be read" in failed["failures"]
    assert run.valid() == [f"step-{EVERY + 2:08d}"]
