import json

from helpers import runs

from llmtrain.report.collect import collect
from llmtrain.report.figures import draw, plan_figures


def planned(tmp_path, lines):
    return plan_figures(collect(runs.write_run(tmp_path, lines)))


def test_a_run_has_loss_rate_norm_and_speed(tmp_path):
    plans = planned(tmp_path, runs.history())
    assert [plan.name for plan in plans] == [
        "loss",
        "learning_rate",
        "grad_norm",
        "tokens_per_second",
    ]
    assert [series.label for series in plans[0].series] == ["training", "held-out"]


def test_what_has_no_numbers_has_no_figure(tmp_path):
    assert planned(tmp_path, [runs.start_line(0)]) == []
    nothing = {"grad_norm": None, "loss": None}
    plans = planned(tmp_path, [runs.start_line(0), runs.train_line(1, **nothing)])
    assert [plan.name for plan in plans] == ["learning_rate", "tokens_per_second"]


def test_zooming_one_figure_zooms_all(tmp_path):
    document, _ = draw(planned(tmp_path, runs.history()), restarts=(100,))
    ranges = {json.dumps(root["attributes"]["x_range"].get("id")) for root in document["roots"]}
    assert len(ranges) == 1


def test_a_restart_is_a_line_in_every_figure(tmp_path):
    plans = planned(tmp_path, runs.interrupted_history())
    text = json.dumps(draw(plans, restarts=(100,))[0])
    assert text.count('"name": "Span"') == len(plans)
