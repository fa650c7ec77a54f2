"""What a run costs: at computed and at measured speed, and what a machine that dies costs it."""

import json
import math
import platform

import pytest
from helpers.config import loaded

from llmtrain.cli.plan_view import plan_lines
from llmtrain.errors import UserError
from llmtrain.tools.plan import plan

CONFIG = """\
model:
  config: {model_type: llama, hidden_size: 64, intermediate_size: 160, num_hidden_layers: 3,
           num_attention_heads: 4, max_position_embeddings: 4096}
  tokenizer: sample
data: {sources: [{path: sample}], seq_len: 128}
training: {steps: 1000, global_batch_size: 64, precision: bf16}
evaluation: {every_steps: 300}
checkpoint: {every_steps: 200, keep_best: 0}
"""
THIS_CPU = platform.processor() or platform.machine()
GPUS = {"devices": 2, "nodes": 2, "device_memory_gb": 80}


def config(folder, *overrides):
    return loaded(folder, f"run.dir={folder / 'run'}", *overrides, text=CONFIG)


def write_run(folder, *, steps=100, device=THIS_CPU, kind="cpu", world=1, more=()):
    """A run that took 1 s for its first step, 0.5 s for each other, and 30 s to start."""
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(CONFIG)
    start = {"device": device, "device_type": kind, "world_size": world, "born": 1000.0}
    written = [{"kind": "start", "step": 0, "time": 1020.0, "steps": 700, "epochs": 2.0, **start}]
    written.append({"kind": "eval", "step": 0, "split": "heldout", "seconds": 6.0, "time": 1026.0})
    now = 1031.0
    for step in range(1, steps + 1):
        span = 1.0 if step == 1 else 0.5
        now += span if step > 1 else 0.0
        written.append({"kind": "train", "step": step, "time": now, "span_seconds": span})
        for one in (one for one in more if one["step"] == step):
            now += one.get("seconds", 0) + one.get("blocked_seconds", 0)
            written.append({**one, "time": now})
    text = "".join(json.dumps(line) + "\n" for line in written)
    (folder / "run" / "metrics.jsonl").write_text(text)


def by_label(found, label):
    """The text behind a label, its further lines joined."""
    shown = [*plan_lines(found)]
    first = next(n for n, line in enumerate(shown) if line.startswith(label))
    assert all(len(line) <= 80 for line in shown)
    lines = [shown[first]]
    for line in shown[first + 1 :]:
        if not line.startswith(" "):
            break
        lines.append(line)
    return " ".join(" ".join(lines).split())


def test_hours_and_price_at_the_computed_speed(tmp_path):
    found = plan(config(tmp_path), **GPUS, price=2.0, price_node=0.5)
    cost = found.to_json()["cost"]
    seconds = 1000 * 64 * 128 / found.chosen.tokens_per_second
    assert cost["speed"] == "computed"
    assert cost["eur_per_hour"] == 4 * 2.0 + 2 * 0.5
    assert cost["hours"] == pytest.approx(seconds / 3600)
    assert cost["eur"] == pytest.approx(9.0 * seconds / 3600)
    assert (cost["evaluation_share"], cost["save_share"]) == (None, None)
    assert cost["lost_machine"]["hours"] == pytest.approx(100 * seconds / 1000 / 3600)
    assert cost["lost_machine"]["start_seconds"] is None
    text = by_label(found, "cost")
    assert "speed computed, not measured" in text
    assert "5 evaluations: not in it, as none was measured" in text  # at 0, 300, 600, 900, 1000
    assert "5 saves: not in it" in text
    assert "a start, which was not measured" in by_label(found, "lost")


def test_hours_and_price_at_the_measured_speed(tmp_path):
    """900 steps are left: evaluations at 300, 600, 900, 1000; saves at 200, 400, … 1000."""
    more = [
        {"kind": "eval", "step": 50, "split": "heldout", "seconds": 8.0},
        {"kind": "eval", "step": 50, "split": "source", "seconds": 1.0},
        {"kind": "sample", "step": 50, "seconds": 3.0},
        {"kind": "checkpoint", "step": 40, "blocked_seconds": 2.0},
        {"kind": "checkpoint", "step": 80, "blocked_seconds": 4.0},
    ]
    write_run(tmp_path, more=more)
    found = plan(config(tmp_path), price=3.0)
    cost = found.to_json()["cost"]
    evaluations, saves, steps = 4 * (6 + 8 + 1 + 3) / 2, 5 * 3.0, 900 * 0.5
    seconds = steps + evaluations + saves
    assert (cost["speed"], cost["measured_steps"], cost["steps_done"]) == ("measured", 99, 100)
    assert cost["seconds_per_step"] == pytest.approx(0.5)
    assert cost["hours"] == pytest.approx(seconds / 3600)
    assert cost["eur"] == pytest.approx(3.0 * seconds / 3600)
    assert cost["evaluation_share"] == pytest.approx(evaluations / seconds)
    assert cost["save_share"] == pytest.approx(saves / seconds)
    lost = cost["lost_machine"]
    assert lost["seconds_between_saves"] == pytest.approx(200 * 0.5)
    # Of the 31 s up to the first step's line 6 were an evaluation and 1 the step.
    assert lost["start_seconds"] == pytest.approx(24.0)
    assert lost["eur"] == pytest.approx(3.0 * (100 * 0.5 + 24) / 3600)
    text = by_label(found, "cost")
    assert "up to step 1,000, 100 of which are made" in text
    assert "speed measured on these devices over 99 steps" in text
    assert f"4 evaluations: {evaluations / seconds:.1%} of it" in text


def test_saves_by_the_minute_and_at_the_best_evaluation_are_counted(tmp_path):
    best = "checkpoint.keep_best=1"
    assert plan(config(tmp_path, best), **GPUS, price=1.0).cost.saves == 7  # none of step 0
    write_run(tmp_path)
    given = config(tmp_path, best, "checkpoint.every_minutes=0.5")
    cost = plan(given, price=1.0).to_json()["cost"]
    # By steps 200, 300, 400, 600, 800, 900, 1000. Between them 50 s or 100 s: after each 30 s.
    assert cost["saves"] == 7 + 5 * 1 + 2 * 3
    assert cost["lost_machine"]["seconds_between_saves"] == 30.0


@pytest.mark.parametrize(
    "other",
    [{"steps": 20}, {"device": "another"}, {"kind": "cuda"}, {"world": 2}],
    ids=["19 steps", "device", "kind", "number"],
)
def test_a_cpu_without_20_steps_of_its_own_has_no_invented_figure(tmp_path, other):
    write_run(tmp_path, **other)
    found = plan(config(tmp_path), price=1.0)
    cost = found.to_json()["cost"]
    unknown = ("speed", "seconds_per_step", "hours", "eur", "evaluation_share", "save_share")
    assert [cost[name] for name in unknown] == [None] * len(unknown)
    assert cost["lost_machine"]["eur"] is None
    needs = "it needs 20 steps of this config on these devices, in its run directory"
    assert by_label(found, "cost") == f"cost not known at EUR 1.00 an hour; {needs}"


def test_a_run_of_another_model_is_no_measurement(tmp_path):
    write_run(tmp_path, steps=21)  # 20 behind the first
    assert plan(config(tmp_path), price=1.0).cost.speed == "measured"
    other = config(tmp_path, "model.config.hidden_size=128")
    assert (plan(other, price=1.0).cost.speed, plan(other, price=1.0).cost.done) == (None, 0)


def test_a_gpu_is_known_by_its_name_and_number(tmp_path):
    write_run(tmp_path, device="NVIDIA H100 80GB HBM3", kind="cuda", world=4)
    assert plan(config(tmp_path), **GPUS, price=1.0).cost.speed == "measured"
    fewer = plan(config(tmp_path), devices=2, device_memory_gb=80, price=1.0).cost
    assert (fewer.speed, fewer.done) == ("computed", 100)
    whole = plan(config(tmp_path), devices=2, device_memory_gb=80).seconds
    assert fewer.hours == pytest.approx(0.9 * whole / 3600)


def test_epochs_are_counted_by_the_run_or_what_is_lacking_is_said(tmp_path):
    epochs = ("training.steps=null", "training.epochs=2")
    found = plan(config(tmp_path, *epochs), **GPUS, price=1.0)
    assert "it needs training.steps, or a start" in by_label(found, "cost")
    write_run(tmp_path)
    cost = plan(config(tmp_path, *epochs), price=1.0).to_json()["cost"]
    assert (cost["steps"], cost["speed"]) == (700, "measured")
    assert cost["hours"] > 600 * 0.5 / 3600
    other = plan(config(tmp_path, "training.steps=null", "training.epochs=3"), price=1.0).cost
    assert (other.steps, other.hours) == (None, None)


def test_a_batch_that_grows_takes_longer_steps(tmp_path):
    """99 measured steps of 64 blocks took 49.5 s; 100 more of them are left, and 800 of 128."""
    grows = "training.global_batch_size=[{from_step: 1, size: 64}, {from_step: 201, size: 128}]"
    write_run(tmp_path)
    path = tmp_path / "run" / "config.yaml"
    sizes = "[{from_step: 1, size: 64}, {from_step: 201, size: 128}]"
    path.write_text(CONFIG.replace("global_batch_size: 64", f"global_batch_size: {sizes}"))
    cost = plan(config(tmp_path, grows, "data.heldout=0"), price=1.0).cost
    assert cost.step_seconds * 900 == pytest.approx(100 * 0.5 + 800 * 1.0)


def test_a_start_that_resumes_is_what_a_lost_machine_costs(tmp_path):
    """Of 13 s up to its first line 1 was the step; the first start took longer."""
    write_run(tmp_path)
    path = tmp_path / "run" / "metrics.jsonl"
    text = path.read_text()
    start = json.loads(text.partition("\n")[0]) | {"resumed_from": "step-00000100", "step": 100}
    again = start | {"born": 2000.0, "time": 2010.0}
    trained = {"kind": "train", "step": 101, "time": 2013.0, "span_seconds": 1.0}
    path.write_text(f"{text}{json.dumps(again)}\n{json.dumps(trained)}\n")
    assert plan(config(tmp_path), price=1.0).cost.restart == pytest.approx(12.0)


def test_a_run_that_is_finished_costs_nothing_more(tmp_path):
    write_run(tmp_path)
    found = plan(config(tmp_path, "training.steps=100"), price=1.0)
    assert (found.cost.hours, found.cost.evaluations, found.cost.saves) == (0.0, 0, 0)
    assert "EUR 0.00" in by_label(found, "cost")


@pytest.mark.parametrize("key", ["price", "price_node"])
@pytest.mark.parametrize("value", [-1.0, 0.0, math.nan, math.inf, 1e12])
def test_a_price_that_is_none_is_refused(tmp_path, key, value):
    with pytest.raises(UserError) as refused:
        plan(config(tmp_path), **{key: value})
    (problem,) = refused.value.problems
    assert problem.key == f"--{key.replace('_', '-')}"
    assert problem.expected == "a number of EUR above 0, for an hour"


def test_without_a_price_there_is_no_cost(tmp_path):
    found = plan(config(tmp_path))
    assert found.cost is None
    assert "cost" not in found.to_json()
