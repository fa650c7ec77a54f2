"""Runs on pairs of answers: the same on any number of processes, under each strategy, resumed."""

import json
import math
import shutil
from itertools import product
from pathlib import Path

import pytest
from helpers import chats, corpus, preferred
from helpers.tiny import lines, status, weights
from safetensors.numpy import load_file

from llmtrain.rundir import reference
from llmtrain.rundir.contents import REFERENCE, REFERENCE_PARTS

STEPS = preferred.STEPS
LORA = {"kind": "lora", "r": 4, "alpha": 8}
SEEN = ("loss", "margin", "chosen_reward", "rejected_reward", "accuracy")


def trained(server, folder, config, world_size=1, code=0, name="config.yaml", **env):
    """Run a config, and return the train lines."""
    path = preferred.write(folder, config, name)
    codes = server.run(["train", path], world_size, folder, env)
    assert codes == [code] * world_size, said(folder)
    return lines(Path(config["run"]["dir"]), "train")


def said(folder):
    """What a run has printed, without its line ends."""
    return " ".join((folder / "output.txt").read_text().split())


def check_equal(found, expected, within=1e-6):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one["batch_digest"] == other["batch_digest"]
        assert one["pairs"] == other["pairs"]
        for key in SEEN:
            assert one[key] == pytest.approx(other[key], abs=within), (one["step"], key)


@pytest.fixture(scope="module", params=["full", "lora"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def straight(server, tmp_path_factory, kind):
    """One process, with checkpoints on the way."""
    folder = tmp_path_factory.mktemp(kind)
    config = made(folder, kind, checkpoint__every_steps=2, checkpoint__keep_last=5)
    trained(server, folder, config)
    return folder


def made(folder, kind, loss="dpo", **changes):
    adapter = LORA if kind == "lora" else None
    return preferred.config_of(folder, preferred.pairs(60), loss, adapter=adapter, **changes)


def test_the_first_step_has_a_margin_of_exactly_zero(straight):
    first = lines(straight / "run", "train")[0]
    assert [first[key] for key in ("margin", "chosen_reward", "rejected_reward")] == [0.0] * 3
    assert first["accuracy"] == 0.5  # every pair is a tie
    assert first["loss"] == pytest.approx(0.6931471805599453, abs=1e-12)
    baseline = lines(straight / "run", "eval")[0]
    assert (baseline["step"], baseline["margin"]) == (0, 0.0)
    assert baseline["perplexity"] is None
    assert lines(straight / "run", "train")[-1]["margin"] > 0


STARTS = {
    "ddp on 2": (2, {"strategy": "ddp"}),
    "ddp on 3": (3, {"strategy": "ddp"}),
    "fsdp2 on 2": (2, {"strategy": "fsdp2"}),
    "zero2 on 2": (2, {"strategy": "zero2"}),
    "zero3 on 2": (2, {"strategy": "zero3"}),
}
CUTS = {
    "matrices": (2, {"tensor_parallel": 2}),
    "blocks": (2, {"pipeline_parallel": 2}),
    "rows": (2, {"sequence_parallel": 2}),
    "matrices beside fsdp2": (4, {"tensor_parallel": 2, "strategy": "fsdp2"}),
}
WHOLE = (*STARTS, "rows")


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        pytest.param(kind, start, marks=pytest.mark.slow if sweep else ())
        for kind, start in product(("full", "lora"), STARTS | CUTS)
        # The cuts are in `test_pairs.py` too, where they cost less.
        for sweep in (start not in (WHOLE if kind == "full" else ("ddp on 2", "zero3 on 2")),)
    ],
    indirect=["kind"],
)
def test_each_strategy_and_number_of_processes_sees_the_same(
    server, straight, tmp_path, kind, start
):
    world_size, keys = (STARTS | CUTS)[start]
    shutil.copytree(straight / "base", tmp_path / "base")
    config = made(tmp_path, kind)
    config["distributed"] = keys
    if kind == "lora" and "tensor_parallel" in keys:
        trained(server, tmp_path, config, world_size, code=2)
        assert "adapter.kind" in said(tmp_path)
        return
    found = trained(server, tmp_path, config, world_size)
    check_equal(found, lines(straight / "run", "train"))
    assert found[0]["margin"] == 0.0
    expected = lines(straight / "run", "eval")
    for one, other in zip(lines(tmp_path / "run", "eval"), expected, strict=True):
        for key in (*SEEN, "pairs"):
            assert one[key] == pytest.approx(other[key], abs=1e-6)
    own, first = (reference.load(one / "run" / REFERENCE) for one in (tmp_path, straight))
    assert own.of(first.keys) == pytest.approx(first.values, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("full", 3),
        ("lora", 4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("full", 4), ("full", 6), ("lora", 3), ("lora", 6))
        ),
    ],
    indirect=["kind"],
)
def test_a_run_that_is_killed_goes_on_with_equal_bits(server, straight, tmp_path, kind, step):
    shutil.copytree(straight / "base", tmp_path / "base")
    config = made(tmp_path, kind, checkpoint__every_steps=2, checkpoint__keep_last=5)
    trained(server, tmp_path, config, code=-9, LLMTRAIN_FAULTS=f"loop.step@step={step}=kill")
    trained(server, tmp_path, config)
    assert weights(tmp_path / "run", STEPS) == weights(straight / "run", STEPS)
    check_equal(lines(tmp_path / "run", "train"), lines(straight / "run", "train"), within=0)


@pytest.mark.parametrize(("kind", "fault"), [("full", "kill"), ("lora", "term")], indirect=["kind"])
def test_a_pass_of_the_reference_that_is_cut_off_goes_on(server, straight, tmp_path, kind, fault):
    shutil.copytree(straight / "base", tmp_path / "base")
    config = made(tmp_path, kind, checkpoint__every_steps=2, checkpoint__keep_last=5)
    code = -9 if fault == "kill" else 0
    trained(server, tmp_path, config, code=code, LLMTRAIN_FAULTS=f"reference.step@step=3={fault}")
    assert not (tmp_path / "run" / REFERENCE).exists()
    parts = list((tmp_path / "run" / REFERENCE_PARTS).glob("*.safetensors"))
    assert len(parts) == (0 if fault == "kill" else 1)
    trained(server, tmp_path, config)
    assert not (tmp_path / "run" / REFERENCE_PARTS).exists()
    assert weights(tmp_path / "run", STEPS) == weights(straight / "run", STEPS)
    one, two = (reference.load(path / "run" / REFERENCE) for path in (tmp_path, straight))
    assert one.keys.tolist() == two.keys.tolist()
    assert one.values.tolist() == two.values.tolist()


@pytest.mark.parametrize(
    ("kind", "harm"), [("full", "lost"), ("lora", "flipped")], indirect=["kind"]
)
def test_a_lost_or_flipped_reference_is_refused(server, straight, tmp_path, kind, harm):
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    config = made(tmp_path, kind, checkpoint__every_steps=2, checkpoint__keep_last=5)
    config["model"]["from"] = str(straight / "base")
    config["training"]["steps"] = STEPS + 2
    path = tmp_path / "run" / REFERENCE
    whole = path.read_bytes()
    if harm == "lost":
        path.unlink()
    else:
        path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    trained(server, tmp_path, config, code=2)
    assert "the reference that this run began with" in said(tmp_path)
    assert "checkpoint.accept_changes=[preference.reference]" in said(tmp_path)
    assert "Traceback" not in said(tmp_path)
    assert status(tmp_path / "run")["state"] == "finished"  # nothing was lost
    config["checkpoint"]["accept_changes"] = ["preference.reference"]
    trained(server, tmp_path, config)
    again = reference.load(path)
    path.write_bytes(whole)
    before = reference.load(path)
    # By the weights of the start, for what is left to train: in other blocks, so not in all bits.
    assert 0 < len(again) <= len(before)
    assert before.of(again.keys) == pytest.approx(again.values, abs=1e-4)


def test_a_reference_made_again_within_an_epoch_has_all_pairs_of_the_next(server, tmp_path):
    config = preferred.config_of(tmp_path, preferred.pairs(120))
    trained(server, tmp_path, config)
    (tmp_path / "run" / REFERENCE).unlink()
    config["checkpoint"]["accept_changes"] = [reference.KEY]
    config["training"]["steps"] = 4 * STEPS
    trained(server, tmp_path, config)
    assert reference.load(tmp_path / "run" / REFERENCE).walked["steps"] == "all"


LOSSES = {
    "dpo": {"label_smoothing": 0.1},
    "dpo_norm": {},
    "robust": {"label_smoothing": 0.1},
    "ipo": {},
    "hinge": {},
    "apo_zero": {"sft_weight": 0.2},
    "orpo": {},
    "simpo": {"beta": 2.0, "gamma": 0.5},
    "cpo": {"sft_weight": 1.0},
}
ALONE = {"data__packing": "single", "data__seq_len": 192}  # a pair a block, in two padded rows


def test_each_loss_is_that_of_a_plain_program_in_double_precision(server, tmp_path):
    rows = preferred.strings(40)
    packings = [{"data__seq_len": 96}] * len(LOSSES)
    cases = [*zip(LOSSES.items(), packings, strict=True), (("ipo", {}), ALONE)]
    for number, ((loss, keys), packing) in enumerate(cases):
        folder = tmp_path / str(number)
        asked = {f"preference__{key}": value for key, value in keys.items()}
        config = preferred.config_of(folder, rows, loss, **packing, **asked)
        del config["chat"]
        found = trained(server, folder, config)
        order = preferred.order_of(folder / "run", STEPS)
        expected = preferred.by_hand(folder / "base", rows, order, loss, learning_rate=1e-3, **keys)
        for one, other in zip(found, expected, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-6), loss
            assert one["margin"] == pytest.approx(other["margin"], abs=1e-6), loss
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5), loss


def test_chosen_and_rejected_exchanged_turn_every_sign(server, tmp_path):
    rows = preferred.pairs(40)
    turned = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    for name, given in (("one", rows), ("two", turned)):
        trained(server, tmp_path / name, preferred.config_of(tmp_path / name, given))
    for split in ("one", "two"):
        assert lines(tmp_path / split / "run", "train")[-1]["margin"] > 0
    first, second = (lines(tmp_path / split / "run", "train")[0] for split in ("one", "two"))
    assert first["chosen_logp"] == pytest.approx(second["rejected_logp"], abs=1e-4)
    assert first["rejected_logp"] == pytest.approx(second["chosen_logp"], abs=1e-4)
    trained_on = [reference.load(tmp_path / one / "run" / REFERENCE) for one in ("one", "two")]
    straight, turned = (sorted(map(tuple, one.values.tolist())) for one in trained_on)
    turned = sorted((chosen, rejected) for rejected, chosen in turned)
    for one, other in zip(straight, turned, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize(("micro", "world_size"), [(1, 3), (2, 2), (4, 1)])
def test_micro_batches_and_processes_do_not_change_the_weights(server, tmp_path, micro, world_size):
    size = {"training__global_batch_size": 12}
    for name, each, count in (("one", 1, 1), ("other", micro, world_size)):
        folder = tmp_path / name
        config = preferred.config_of(
            folder,
            preferred.pairs(90),
            "ipo",
            training__micro_batch_size=each,
            **size,
            checkpoint__every_steps=STEPS,
        )
        trained(server, folder, config, count)
    one, other = (lines(tmp_path / name / "run", "train") for name in ("one", "other"))
    check_equal(other, one)
    places = [
        tmp_path / name / "run" / "checkpoints" / f"step-{STEPS:08d}" for name in ("one", "other")
    ]
    first, second = (load_file(place / "model.safetensors") for place in places)
    for name, tensor in first.items():
        assert second[name] == pytest.approx(tensor, abs=2e-5), name


def test_dropout_of_the_model_leaves_the_first_margin_at_zero(server, tmp_path):
    fields = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.2}
    config = preferred.config_of(tmp_path, preferred.pairs(40), fields=fields)
    found = trained(server, tmp_path, config)
    assert found[0]["margin"] == 0.0
    assert "dropout" in said(tmp_path)


def test_a_longer_run_computes_what_it_lacks_with_the_weights_it_began_with(server, tmp_path, kind):
    """Few steps see few of the pairs."""
    short, long = tmp_path / "short", tmp_path / "long"
    for folder in (short, long):
        config = made(folder, kind, training__global_batch_size=2, checkpoint__every_steps=2)
        if folder == short:
            config["training"]["steps"] = 2
            trained(server, folder, config)
            fewer = len(reference.load(folder / "run" / REFERENCE))
            config["training"]["steps"] = STEPS
            # Its only checkpoint names the column that had fewer pairs.
            killed = {"LLMTRAIN_FAULTS": "loop.step@step=3=kill"}
            trained(server, folder, config, code=-9, **killed)
        trained(server, folder, config)
    columns = [reference.load(folder / "run" / REFERENCE) for folder in (short, long)]
    assert fewer < len(columns[0])
    assert columns[0].of(columns[1].keys).tolist() == columns[1].values.tolist()
    assert weights(short / "run", STEPS) == weights(long / "run", STEPS)


def test_another_run_with_the_same_base_takes_the_column(server, straight, tmp_path, kind):
    shutil.copytree(straight / "base", tmp_path / "base")
    config = made(tmp_path, kind, preference__beta=0.5)
    config["preference"]["reference"] = str(straight / "run")
    trained(server, tmp_path, config)
    (start,) = lines(tmp_path / "run", "start")
    assert "0 of them new" in said(tmp_path)
    assert start["reference"]["pairs"] == len(reference.load(straight / "run" / REFERENCE))
    other = tmp_path / "other"
    config = made(other, kind)  # with a base of its own
    config["preference"]["reference"] = str(straight / "run")
    config["chat"]["template"] = "llama3"
    trained(server, other, config, code=2)
    assert "preference.reference" in said(other)
    assert "was made with another template" in said(other)
    config["chat"]["template"] = "chatml"
    config["model"]["pad_vocab_to"] = 3000  # other rows have a part in each probability
    trained(server, other, config, code=2)
    assert "was made with another vocabulary" in said(other)
    config["preference"]["reference"] = str(tmp_path / "base")
    trained(server, other, config, code=2)
    assert "has no reference.safetensors" in said(other)


@pytest.fixture(scope="module")
def judged(server, tmp_path_factory):
    """Feedback on one process."""
    folder = tmp_path_factory.mktemp("judged")
    trained(server, folder, preferred.config_of(folder, preferred.feedback(80), "kto"))
    return folder


@pytest.mark.parametrize(
    "start",
    [
        "ddp on 3",
        "blocks",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("zero3 on 2", "matrices", "rows")),
    ],
)
def test_feedback_is_the_same_on_any_number_of_processes(server, judged, tmp_path, start):
    world_size, keys = (STARTS | CUTS)[start]
    shutil.copytree(judged / "base", tmp_path / "base")
    config = preferred.config_of(tmp_path, preferred.feedback(80), "kto")
    config["distributed"] = keys
    other = trained(server, tmp_path, config, world_size)
    one = lines(judged / "run", "train")
    check_equal(other, one)
    assert one[0]["divergence"] == other[0]["divergence"] == 0.0
    assert [line["divergence"] for line in other] == pytest.approx(
        [line["divergence"] for line in one], abs=1e-6
    )
    assert any(line["divergence"] > 0 for line in one)


def test_a_killed_run_on_feedback_goes_on_with_equal_bits(server, judged, tmp_path):
    shutil.copytree(judged / "base", tmp_path / "base")
    config = preferred.config_of(tmp_path, preferred.feedback(80), "kto")
    config["checkpoint"]["every_steps"] = 2
    trained(server, tmp_path, config, code=-9, LLMTRAIN_FAULTS="loop.step@step=4=kill")
    trained(server, tmp_path, config)
    assert weights(tmp_path / "run", STEPS) == weights(judged / "run", STEPS)


def test_other_held_out_pairs_are_scored_before_the_run_goes_on(server, tmp_path):
    rows = preferred.pairs(70)
    config = preferred.config_of(tmp_path, rows[:50], evaluation__max_documents=20)
    config["evaluation"]["sources"] = [
        {"path": str(corpus.write_jsonl(tmp_path / "held.jsonl", rows[50:55]))}
    ]
    config["data"]["heldout"] = 0.0
    config["checkpoint"]["accept_changes"] = ["evaluation"]
    trained(server, tmp_path, config)
    other = corpus.write_jsonl(tmp_path / "other.jsonl", rows[55:])
    config["evaluation"]["sources"] = [{"path": str(other)}]
    config["training"]["steps"] = STEPS + 2
    config["evaluation"]["every_steps"] = STEPS + 2
    trained(server, tmp_path, config)
    assert lines(tmp_path / "run", "eval")[-1]["pairs"] == len(rows) - 55


def test_truncated_pairs_are_trained_with_a_finite_loss(server, tmp_path):
    config = preferred.config_of(tmp_path, preferred.pairs(60), data__seq_len=64)
    config["chat"]["too_long"] = "truncate"
    found = trained(server, tmp_path, config)
    assert all(math.isfinite(line["loss"]) and line["pairs"] for line in found)
    state = json.loads(
        (tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}" / "trainer_state.json").read_text()
    )
    assert state["data"]["counts"]["rows.jsonl"]["truncated"] > 0


def test_token_rows_beside_an_adapter_do_not_move_the_reference(server, tmp_path):
    """The rows are trained, so the adapter switched off would not be what the run began with."""
    adapter = {**LORA, "train_tokens": ["Ġthe", "Ġriver"]}
    config = preferred.config_of(tmp_path, preferred.pairs(60), adapter=adapter)
    trained(server, tmp_path, config)
    path = tmp_path / "run" / REFERENCE
    before = reference.load(path)
    path.unlink()
    config["checkpoint"]["accept_changes"] = ["preference.reference"]
    config["training"]["steps"] = STEPS + 1
    trained(server, tmp_path, config)
    after = reference.load(path)
    assert before.of(after.keys) == pytest.approx(after.values, abs=1e-4)
    assert abs(lines(tmp_path / "run", "train")[-1]["chosen_reward"]) > 1e-2  # the model has moved


def test_the_record_of_a_run_on_pairs_is_json_with_its_figures(straight):
    for line in (straight / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
    (start, *_) = lines(straight / "run", "start")
    column = reference.load(straight / "run" / REFERENCE)
    assert start["reference"]["digest"] == column.digest
    state = json.loads(
        (straight / "run" / "checkpoints" / f"step-{STEPS:08d}" / "trainer_state.json").read_text()
    )
    assert state["reference"] == column.digest
    checkpoint = straight / "run" / "checkpoints" / f"step-{STEPS:08d}"
    if (checkpoint / "generation_config.json").exists():  # a tuned model stops
        ends = json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"]
        assert chats.plain(checkpoint).token_to_id("<|im_end|>") in ends


RARE = {"zero1 on 2": (2, {"strategy": "zero1"})}


@pytest.mark.slow
@pytest.mark.parametrize("start", [*STARTS, *RARE])
def test_twenty_steps_are_the_same_within_rounding(server, tmp_path, kind, start):
    world_size, keys = {**STARTS, **RARE}[start]
    size = {"training__steps": 20, "training__global_batch_size": 12}
    for name, count in (("one", 1), ("other", world_size)):
        config = made(tmp_path / name, kind, **size)
        config["distributed"] = keys if count > 1 else {"strategy": "ddp"}
        trained(server, tmp_path / name, config, count)
    one, other = (lines(tmp_path / name / "run", "train") for name in ("one", "other"))
    check_equal(other, one, within=1e-5)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_the_reference_is_no_second_model(server, tmp_path, strategy):
    """The base is read once, by rank 0, and the run's own module is what scores the pairs."""
    config = preferred.config_of(tmp_path, preferred.pairs(60))
    config["distributed"] = {"strategy": strategy}
    path = preferred.write(tmp_path, config)
    how = ["helpers.odd_ranks", "noting_what_is_built", path, str(tmp_path / "seen")]
    assert server.run(["call", *how], 2, tmp_path) == [0, 0], said(tmp_path)
    seen = [json.loads((tmp_path / f"seen.{rank}").read_text()) for rank in (0, 1)]
    expected = [1, 0] if strategy == "fsdp2" else [1, 1]
    assert [len(one["read"]) for one in seen] == expected
    assert (tmp_path / "run" / REFERENCE).exists()


def test_each_held_out_pair_counts_once_on_any_number_of_processes(server, tmp_path):
    """Seventeen of them, which no number of processes here divides."""
    rows = preferred.pairs(67)
    found = []
    for world_size in (1, 2, 3):
        folder = tmp_path / str(world_size)
        config = preferred.config_of(folder, rows[17:], evaluation__max_documents=100)
        held = corpus.write_jsonl(folder / "held.jsonl", rows[:17])
        config["evaluation"]["sources"] = [{"path": str(held)}]
        config["data"]["heldout"] = 0.0
        config["training"]["steps"] = 3
        trained(server, folder, config, world_size)
        found.append(lines(folder / "run", "eval")[-1])
    assert [line["pairs"] for line in found] == [17] * 3
    assert len({line["accuracy"] for line in found}) == 1
    for line in found[1:]:
        for key in ("loss", "margin", "chosen_reward", "rejected_reward"):
            assert line[key] == pytest.approx(found[0][key], abs=1e-6)
