import pytest
from helpers import runs

from llmtrain.report import verdict
from llmtrain.report.collect import collect, column, final_history, thin


def test_lines_written_after_a_resume_count_and_what_they_undid_does_not():
    straight = final_history(runs.history())
    resumed = final_history(runs.interrupted_history())

    def losses(lines):
        return dict(column([line for line in lines if line["kind"] == "train"], "loss"))

    assert losses(resumed) == losses(straight) | {101: runs.loss_at(101)}


def test_steps_that_were_lost_and_not_redone_are_not_shown():
    lines = [
        runs.start_line(0),
        *(runs.train_line(step) for step in (10, 20, 30)),
        runs.checkpoint_line(30),
        runs.start_line(10),
        runs.train_line(11),
    ]
    kept = [
        (line["kind"], line["step"]) for line in final_history(lines) if line["kind"] != "start"
    ]
    assert kept == [("train", 10), ("train", 11)]


def test_events_of_all_starts_are_kept(tmp_path):
    tables = collect(runs.write_run(tmp_path, runs.interrupted_history()))
    assert [event["event"] for event in tables.events] == ["restart", "update_skipped"]
    assert [start["step"] for start in tables.starts] == [0, 100]


def test_the_plan_beside_a_measured_device_is_an_event_and_beside_a_cpu_it_is_not(tmp_path):
    gpu = runs.event_line(3, "memory_compared", planned_gb=1.0, measured_gb=1.1, difference=0.1)
    cpu = gpu | {"step": 103, "device": "cpu"}
    lines = [runs.start_line(0), gpu, runs.start_line(100), cpu]
    (event,) = collect(runs.write_run(tmp_path, lines)).events
    assert event["step"] == 3


def test_a_repeated_and_a_refused_start_leave_the_verdict_of_a_finished_run_as_it_was(tmp_path):
    once = collect(runs.write_run(tmp_path, runs.history(20), runs.status()))
    later = [runs.event_line(20, "start_refused"), runs.start_line(20), runs.end_line(20)]
    again = [line | {"time": line["time"] + 1e6} for line in later]
    twice = collect(runs.write_run(tmp_path, [*runs.history(20), *again], runs.status()))
    assert verdict.sentence(twice) == verdict.sentence(once)
    assert verdict.figures(twice) == verdict.figures(once)
    assert verdict.checks(twice) == verdict.checks(once)
    assert [event["event"] for event in twice.events] == ["start_refused"]


def test_a_checkpoint_that_retention_took_is_shown_as_removed(tmp_path):
    run = runs.write_run(tmp_path, runs.history())
    (run / "checkpoints" / "step-00000300").mkdir(parents=True)
    kept = {line["step"]: line["kept"] for line in collect(run).checkpoints}
    assert kept == {100: False, 200: False, 300: True}


def test_a_torn_last_line_and_a_damaged_config_do_not_matter(tmp_path):
    run = runs.write_run(tmp_path, runs.history(20), config="training: {steps: [")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')
    assert collect(run).train[-1]["step"] == 20
    assert collect(run).steps is None


@pytest.mark.parametrize("n", [0, 1, 7, 999, 1000, 1001, 2500, 100_000])
def test_thinning_keeps_range_and_mean_in_at_most_1000_buckets(n):
    points = [(step, runs.noise(step)) for step in range(n)]
    curve = thin(points)
    assert len(curve.steps) <= 1000
    assert curve.thinned == (n > 1000)
    assert list(curve.steps) == sorted(set(curve.steps))
    if n:
        values = [value for _, value in points]
        assert (min(curve.low), max(curve.high)) == (min(values), max(values))
        assert all(
            low <= mean <= high
            for low, mean, high in zip(curve.low, curve.mean, curve.high, strict=True)
        )


def test_a_short_column_is_not_changed():
    points = [(1, 5.0), (2, 4.0), (10, 3.0)]
    curve = thin(points)
    assert list(zip(curve.steps, curve.mean, strict=True)) == points


def test_null_is_no_number():
    assert column([{"step": 1, "loss": None}, {"step": 2, "loss": 1.0}], "loss") == [(2, 1.0)]


def test_an_evaluation_of_one_source_is_no_point_of_the_curve_of_all(tmp_path):
    lines = [runs.start_line(0), runs.eval_line(0), runs.eval_line(0, split="heldout/a", loss=9.0)]
    (found,) = collect(runs.write_run(tmp_path, lines)).evaluations
    assert found["split"] == "heldout"


def test_a_secret_in_a_config_of_an_earlier_version_is_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("HUB_TOKEN", "correct-horse-9-battery")
    config = "evaluation:\n  prompts: ['say correct-horse-9-battery']\n"
    found = collect(runs.write_run(tmp_path, runs.history(20), config=config))
    assert "battery" not in found.config
    assert found.settings["evaluation.prompts"] == ["say ***"]
