"""The benchmarks of speed: their arguments, tables and arithmetic. They measure nothing here."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
H200 = 989e12


@pytest.fixture(autouse=True)
def _beside(monkeypatch):
    """The programs import what lies beside them, as when they are started."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in {"_rows", "_gpu_rows", "defaults", "gpu", "page", "scaling"} - known:
        sys.modules.pop(name, None)


def load(name):
    from importlib import import_module

    return import_module(name)


def call(monkeypatch, name, *arguments):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    load(name).main()


@pytest.mark.parametrize(
    ("figure", "goal", "met"),
    [
        (1.2, "≥ 1.2", True),
        (1.19, "≥ 1.2", False),
        (0.6, "≤ 0.60", True),
        (0.61, "≤ 0.60", False),
        (3.0, "", None),
        (None, "≥ 1", None),
    ],
)
def test_a_goal_is_met_by_its_limit_and_by_what_is_better(figure, goal, met):
    assert load("_rows").is_met(figure, goal) is met


def test_rows_are_on_disk_at_once_and_replace_those_of_their_name(tmp_path, capsys):
    path = tmp_path / "rows.json"
    first = load("_rows").Table("speed", path)
    first.say("one", 1.0, "s", "≤ 2")
    first.say("other", 5.0, "s", "≤ 2")
    second = load("_rows").Table("speed", path)
    second.say("one", None, note="no time was left")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [(row["name"], row["figure"], row["met"]) for row in rows] == [
        ("other", 5.0, False),
        ("one", None, None),
    ]
    assert rows[0]["git"] == rows[1]["git"]
    printed = capsys.readouterr().out
    assert "MISSED" in printed
    assert "not measured" in printed


@pytest.mark.launches
def test_a_process_that_fails_or_hangs_is_a_row_with_its_reason(tmp_path, monkeypatch):
    rows = load("_rows")
    monkeypatch.setattr(rows, "HERE", tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys, time\n"
        "print(json.dumps({'done': 1}), flush=True)\n"
        "asked = json.loads(sys.argv[1])\n"
        "if asked['hang']: time.sleep(60)\n"
        "raise SystemExit('no such device')\n"
    )
    assert rows.measure("script.py", {"hang": 0}, 20) == ([{"done": 1}], "no such device")
    assert rows.measure("script.py", {"hang": 1}, 2) == ([{"done": 1}], "not finished after 2 s")


def figures(rate, first=10.0, peak=1000.0):
    return {"tokens_per_cpu_second": rate, "first_step_cpu_seconds": first, "peak_mb": peak}


def test_where_fp32_is_the_faster_precision_only_its_goals_are_judged():
    found = {
        ("padded", "fp32"): figures(200),
        ("by_length", "fp32"): figures(500),
        ("grouped", "fp32"): figures(800, first=8.0, peak=2000.0),
        ("llmtrain", "auto"): figures(1000, first=11.0, peak=1100.0),
    }
    rows = {row["name"]: row["figure"] for row in load("defaults").comparisons(found, "fp32")}
    assert rows == {
        "tokens/s, fp32, over group_texts in fp32": 1.25,
        "tokens/s over the padded default": 5.0,
        "tokens/s over group_by_length": 2.0,
        "peak memory over group_texts": 0.55,
        "CPU to the first step over group_texts, fp32": 1.375,
    }


def test_where_bf16_is_faster_each_precision_is_compared_with_its_own():
    found = {
        ("padded", "fp32"): figures(200),
        ("by_length", "fp32"): figures(500),
        ("grouped", "fp32"): figures(800),
        ("grouped", "bf16"): figures(1000, first=8.0, peak=2000.0),
        ("llmtrain", "auto"): figures(2000, first=9.0, peak=1000.0),
        ("llmtrain", "fp32"): figures(1000),
    }
    rows = {
        r["name"]: (r["figure"], r["goal"]) for r in load("defaults").comparisons(found, "bf16")
    }
    assert rows["tokens/s, fp32, over group_texts in fp32"] == (1.25, "≥ 1.2")
    assert rows["tokens/s, bf16, over group_texts in bf16"] == (2.0, "≥ 1.8")
    assert rows["tokens/s, both with their defaults"] == (2.5, "≥ 2.4")
    assert rows["peak memory over group_texts"] == (0.5, "≤ 0.60")
    assert rows["CPU to the first step over group_texts, bf16"] == (1.125, "≤ 1.25")


def test_bf16_runs_only_where_it_is_worth_it():
    contenders = load("defaults").contenders
    slow = {("padded", "fp32"), ("by_length", "fp32"), ("grouped", "fp32"), ("llmtrain", "auto")}
    assert set(contenders(1.29)) == slow
    assert set(contenders(1.31)) - slow == {("grouped", "bf16"), ("llmtrain", "fp32")}


def test_contenders_take_turns_and_each_round_begins_with_another(monkeypatch, capsys):
    defaults, order = load("defaults"), []

    def measured(script, asked, limit):
        order.append(asked["contender"])
        return [{"tokens_per_cpu_second": 1.0}], ""

    monkeypatch.setattr(defaults, "measure", measured)
    asked = argparse.Namespace(rounds=2, data=Path(), tokenizer=Path(), tokens=10)
    found = defaults.rounds(asked, [("padded", "fp32"), ("llmtrain", "auto")])
    assert order == ["padded", "llmtrain", "llmtrain", "padded"]
    assert [len(runs) for runs in found.values()] == [2, 2]


def test_every_default_that_differs_is_named():
    ours, theirs = {"seed": 42, "rate": 3e-4}, {"seed": 42, "rate": 5e-5}
    lines = load("defaults").differing(ours, theirs)
    assert lines == ["rate: llmtrain 0.0003, Trainer 5e-05"]


def test_without_a_gpu_it_ends_with_2_and_one_line(monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, "gpu")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "not measured: no GPU (--device cpu rehearses it)\n"


@pytest.mark.parametrize(
    ("name", "matrices", "attention"),
    [
        ("124M", 0.741, 0.113),
        ("350M", 2.121, 0.302),
        ("1.5B", 9.330, 0.944),
        ("llama-1b", 7.414, 0.805),
    ],
)
def test_operations_of_a_token_are_those_of_the_published_shapes(name, matrices, attention):
    shape = load("_gpu_rows").SHAPES[name]
    whole, causal = shape.flops(causal=False) / 1e9, shape.flops(causal=True) / 1e9
    assert whole == pytest.approx(matrices + attention, abs=1e-3)
    assert causal == pytest.approx(matrices + attention / 2, abs=1e-3)


@pytest.mark.parametrize("name", ["tiny", "124M", "llama-1b", "350M", "1.5B"])
def test_a_shape_counts_the_parameters_that_its_model_multiplies_by(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = load("_gpu_rows").SHAPES[name]
    keys = dict(shape.config)
    with torch.device("meta"):
        config = AutoConfig.for_model(keys.pop("model_type"), **keys)
        model = AutoModelForCausalLM.from_config(config)
    blocks = [p for n, p in model.named_parameters() if p.ndim == 2 and n.split(".")[2].isdigit()]
    layers, width, parameters = shape.blocks
    assert sum(p.numel() for p in blocks) == layers * parameters
    assert model.get_input_embeddings().weight.shape == (shape.vocabulary, width)
    assert model.config.tie_word_embeddings


def table_of(tmp_path):
    return load("_rows").Table("gpu", tmp_path / "gpu.json")


def test_goals_of_a_shape_are_ratios_of_its_rows(tmp_path):
    table = table_of(tmp_path)
    rates = {
        "124M: llmtrain, blocks compiled": 460_000,
        "124M: llmtrain, eager": 400_000,
        "124M: bare, blocks compiled": 464_600,
        "124M: Trainer": 300_000,
    }
    load("_gpu_rows").compare(table, "124M", rates, "cuda")
    rows = {row["name"].removeprefix("124M: "): row for row in table.rows}
    assert rows["the better of llmtrain's"]["figure"] == 460_000
    assert rows["the better of llmtrain's"]["met"]
    over = rows["time of a step over the bare loop's, blocks compiled"]
    assert over["figure"] == pytest.approx(1.01)
    assert rows["tokens/s of llmtrain over Trainer"]["met"]
    absent = rows["tokens/s of llmtrain over Trainer, torch_compile"]
    assert (absent["figure"], absent["met"]) == (None, None)
    assert absent["note"]


def test_a_rehearsal_judges_no_goal(tmp_path):
    table = table_of(tmp_path)
    rates = {"tiny: llmtrain, eager": 1.0, "tiny: bare, eager": 2.0, "tiny: Trainer": 3.0}
    load("_gpu_rows").compare(table, "tiny", rates, "cpu")
    assert {row["met"] for row in table.rows} == {None}


def test_the_ladder_compares_each_size_and_judges_the_largest_alone(tmp_path):
    table = table_of(tmp_path)
    found = [
        {"path": path, "vocabulary": v, "tokens": 16_384, "seconds": s, "extra_mb": mb}
        for v in (32_000, 128_256)
        for path, s, mb in (("transformers", 2.0, 1000.0), ("chunked", 2.1, 110.0))
    ]
    load("_gpu_rows").compare_losses(table, found, "cuda")
    assert [row["figure"] for row in table.rows] == pytest.approx([1.05, 0.11] * 2)
    assert [row["met"] for row in table.rows] == [None, None, True, True]


def test_names_of_rows_are_unique_and_all_parts_are_rehearsed():
    rows_of = load("_gpu_rows").rows_of
    for device in ("cpu", "cuda"):
        names = [row.name for row in rows_of(device)]
        assert len(names) == len(set(names))
    parts = [{row.part for row in rows_of(device)} for device in ("cpu", "cuda")]
    assert parts[0] == parts[1] == {"ceiling", "train", "sync", "loss", "attention", "save"}
    assert {row.shape for row in rows_of("cpu")} == {"tiny"}


@pytest.mark.slow
@pytest.mark.launches
def test_the_rehearsal_on_a_cpu_has_every_row_or_says_why_not(tmp_path):
    path = tmp_path / "gpu.json"
    program = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu"]
    asked = ["--only", "tiny", "--seconds", "280", "--json", str(path)]
    subprocess.run([*program, *asked], check=True, timeout=300)
    found = {row["name"]: row for row in load("_rows").read_rows(path)}
    expected = {row.name for row in load("_gpu_rows").rows_of("cpu") if row.part != "save"}
    assert expected - {"loss", "attention"} <= found.keys()
    assert {f"loss, V {v}, 256 tokens: chunked" for v in ("2,048", "4,096")} <= found.keys()
    assert all(row["note"] for row in found.values() if row["figure"] is None)
    losses = [row["last_loss"] for row in found.values() if "last_loss" in row]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)


def test_a_row_is_left_out_when_its_time_does_not_fit():
    rows, gpu = load("_gpu_rows"), load("gpu")
    row = rows.Row("one", "124M", "train", "_gpu_runs.py", seconds=40)
    assert gpu.why_not(row, "cuda", 41) == ""
    assert gpu.why_not(row, "cuda", 39) == "left out: it takes about 40 s, 39 s are left"
    flash = rows.Row("one", "tiny", "attention", "", {"attention_backend": "flash"})
    assert "without CUDA" in gpu.why_not(flash, "cpu", 100)


def test_out_of_memory_halves_the_rows_of_a_step(tmp_path, monkeypatch):
    gpu, rows, sizes = load("gpu"), load("_gpu_rows"), []
    done = {"tokens_per_second": 1000.0, "step_seconds": 1.0}

    def measured(script, asked, limit):
        sizes.append(asked["rows"])
        return [{"out_of_memory": True} if asked["rows"] > 16 else done], ""

    monkeypatch.setattr(gpu, "measure", measured)
    session = gpu.Session(table_of(tmp_path), "cuda", "NVIDIA H200", math.inf, H200)
    session.run(rows.Row("124M: bare", "124M", "train", "_gpu_runs.py", {"kind": "bare"}))
    assert sizes == [64, 32, 16]
    (row,) = session.table.rows
    assert row["mfu"] == pytest.approx(1000 * 0.8547e9 / H200, rel=1e-3)
    assert row["mfu_causal"] < row["mfu"]


def test_a_wait_for_the_device_is_a_missed_goal_and_another_failure_is_not_measured(
    tmp_path, monkeypatch
):
    gpu, rows = load("gpu"), load("_gpu_rows")
    session = gpu.Session(table_of(tmp_path), "cuda", "NVIDIA H200", math.inf, H200)
    for name, wrong in (("a", "called a synchronizing CUDA operation"), ("b", "no pydantic")):
        monkeypatch.setattr(gpu, "measure", lambda *given, wrong=wrong: ([], wrong))
        session.run(rows.Row(name, "124M", "sync", "_gpu_runs.py"))
    assert [(row["figure"], row["met"]) for row in session.table.rows] == [(1, False), (None, None)]


def test_slopes_and_their_errors_are_those_of_numpy():
    np = pytest.importorskip("numpy")
    slope = load("scaling").slope
    assert slope({2.0**n: 3 * 4.0**n for n in range(5)}) == pytest.approx((2.0, 0.0), abs=1e-12)
    found = {1.0: 1.1, 2.0: 1.9, 4.0: 4.3, 8.0: 7.7}
    x, y = np.log(list(found)), np.log(list(found.values()))
    (expected, _), covariance = np.polyfit(x, y, 1, cov=True)
    assert slope(found) == pytest.approx((expected, covariance[0, 0] ** 0.5))


def test_growth_along_a_run_compares_its_thirds():
    assert load("scaling").late_over_early([2.0, 9.0, 3.0, 3.0, 2.2, 8.0]) == pytest.approx(1.1)


def test_the_page_is_written_from_the_results():
    page = load("page").page(ROOT / "benchmarks" / "results")
    assert (ROOT / "docs" / "reference" / "speed.md").read_text("utf-8") == page


def test_the_loop_stands_on_the_page_with_its_goals(tmp_path):
    rows = [
        {"variant": "llmtrain", "cpu_ms_median": 5.1234},
        {"goal": "ms over", "at_most": 0.6, "figure": 0.55, "met": True},
        {"counts": {}},
    ]
    load("_rows").write_rows(tmp_path / "loop.json", rows)
    text = load("page").page(tmp_path)
    assert "| `llmtrain` | 5.123 | ms | | |\n| ms over | 0.550 | | ≤ 0.6 | met |\n\n" in text


def test_a_rehearsal_is_no_result_of_a_gpu(tmp_path):
    write, page = load("_rows").write_rows, load("page").page
    row = {"name": "tiny: bare", "figure": 1.0, "unit": "tokens/s", "device": "cpu"}
    write(tmp_path / "gpu.json", [row])
    text = page(tmp_path)
    assert "tiny" not in text.partition("## One GPU")[2].partition("| what")[2]
    assert (
        "| 124M, 1,024 tokens a block | not measured: no GPU | 420,000 / 463,000 / 500,000 |"
        in text
    )


def test_a_result_of_a_gpu_stands_on_the_page_with_its_share_of_the_peak(tmp_path):
    row = dict.fromkeys(("torch", "transformers", "accelerate", "python"), "9") | {
        "date": "2026-11-23",
        "git": "abc",
        "cpus": 16,
        "cpu": "Xeon",
        "machine": "Linux",
        "device": "NVIDIA H200",
        "load": 1.0,
        "name": "124M: llmtrain",
        "figure": 460_000.0,
        "unit": "tokens/s",
        "goal": "≥ 420000",
        "met": True,
        "mfu": 0.397,
        "mfu_causal": 0.371,
    }
    load("_rows").write_rows(tmp_path / "gpu.json", [row])
    text = load("page").page(tmp_path)
    assert "| 124M: llmtrain (mfu 39.7%; mfu_causal 37.1%) | 460,000 | tokens/s |" in text
    assert "on NVIDIA H200, 16 cores" in text
