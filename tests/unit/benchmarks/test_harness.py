"""What the benchmarks share, their arithmetic and their page. They measure nothing here."""

import json
import math
import runpy
import statistics
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]
RESULTS = runpy.run_path(str(ROOT / "scripts" / "results.py"))


@pytest.fixture(autouse=True)
def _beside(monkeypatch):
    """The programs import what lies beside them, as when they are started."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in {"harness", "defaults", "gpu", "scaling", "plan"} - known:
        sys.modules.pop(name, None)


def load(name):
    return import_module(name)


def bench(path=None, parts=("",), **sizes):
    return load("harness").Bench("one", SimpleNamespace(json=path), SimpleNamespace(**sizes), parts)


@pytest.mark.parametrize(
    ("figure", "goal", "met"),
    [
        (1.2, "≥ 1.2", True),
        (1.19, "≥ 1.2", False),
        (0.6, "≤ 0.60", True),
        (0.61, "≤ 0.60", False),
        (150_000, "≥ 150,000", True),
        (3.0, "", None),
        (None, "≥ 1", None),
    ],
)
def test_a_goal_is_met_by_its_limit_and_by_what_is_better(figure, goal, met):
    assert load("harness").is_met(figure, goal) is met


def test_rows_are_on_disk_at_once_and_replace_those_of_their_part(tmp_path, capsys):
    path = tmp_path / "rows.json"
    first = bench(path, ("early", "late"))
    for part in ("late", "early"):
        first.begin(part, tmp_path)
        first.say(f"{part} one", 1.0, "s", "≤ 2")
        first.say(f"{part} other", 5.0, "s", "≤ 2")
    second = bench(path, ("early", "late"))
    second.begin("early", tmp_path)
    second.say("early one", None, note="no time was left")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [(row["name"], row["figure"], row["met"]) for row in rows] == [
        ("early one", None, None),
        ("late one", 1.0, True),
        ("late other", 5.0, False),
    ]
    assert {"date", "cpu", "git", "load", "torch"} <= rows[0].keys()
    printed = capsys.readouterr().out
    assert "MISSED" in printed
    assert "not measured" in printed


def test_sizes_are_options_and_quick_has_its_own(monkeypatch, tmp_path):
    found = {}

    def part(one):
        found.update(vars(one.sizes), folder=one.folder.is_dir())

    sizes = {"rounds": (5, 1), "rows": ((2, 4), (2,)), "device": ("cuda", "cpu")}
    monkeypatch.setattr(sys, "argv", ["one.py", "--quick", "--rows", "8", "9"])
    load("harness").main("doc", {"a": part, "b": part}, sizes, pinned=False)
    assert found == {"rounds": 1, "rows": [8, 9], "device": "cpu", "folder": True}


@pytest.mark.launches
def test_a_process_that_fails_or_hangs_is_told_with_its_reason(tmp_path):
    measure, script = load("harness").measure, tmp_path / "script.py"
    script.write_text(
        "import json, sys, time\n"
        "print(json.dumps({'done': 1}), flush=True)\n"
        "asked = json.loads(sys.argv[1])\n"
        "if asked['hang']: time.sleep(60)\n"
        "raise SystemExit('no such device')\n"
    )
    assert measure(str(script), {"hang": 0}, 20) == ([{"done": 1}], "no such device")
    assert measure(str(script), {"hang": 1}, 2) == ([{"done": 1}], "not finished after 2 s")
    with pytest.raises(SystemExit, match="no such device"):
        load("harness").apart(str(script), {"hang": 0}, 20)


def test_contenders_take_turns_and_each_round_begins_with_another():
    order = list(load("harness").turns(["a", "b", "c"], 2))
    assert [name for _, name in order] == ["a", "b", "c", "b", "c", "a"]


def test_step_by_step_every_contender_makes_a_step_a_round_and_its_own_time_counts():
    made = []

    def work(name):
        def contender(turn, all_through):
            turn()
            for step in range(3):
                made.append((step, name))
                turn()
            all_through()
            return float(len(made))

        return contender

    seconds, losses = load("harness").step_by_step({"a": work("a"), "b": work("b")}, 3)
    assert [step for step, _ in made] == [0, 0, 1, 1, 2, 2]
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 4, "b": 4}
    assert losses == {"a": 6.0, "b": 6.0}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_where_one_contender_fails_there_are_no_figures():
    def fails(turn, all_through):
        raise ValueError("no memory")

    def waits(turn, all_through):
        turn()
        turn()
        return 0.0

    with pytest.raises(SystemExit, match="a failed"):
        load("harness").step_by_step({"a": fails, "b": waits}, 1)


def figures(rate, first=10.0, peak=1000.0):
    return {"tokens_per_cpu_second": rate, "first_step_cpu_seconds": first, "peak_mb": peak}


def test_where_fp32_is_the_faster_precision_only_its_goals_are_judged():
    found = {
        ("padded", "fp32"): figures(200),
        ("by_length", "fp32"): figures(500),
        ("grouped", "fp32"): figures(800, first=8.0, peak=2000.0),
        ("llmtrain", "auto"): figures(1000, first=11.0, peak=1100.0),
    }
    rows = {name: ratio for name, ratio, _ in load("defaults").comparisons(found, "fp32")}
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
    rows = {name: rest for name, *rest in load("defaults").comparisons(found, "bf16")}
    assert rows["tokens/s, fp32, over group_texts in fp32"] == [1.25, "≥ 1.2"]
    assert rows["tokens/s, bf16, over group_texts in bf16"] == [2.0, "≥ 1.8"]
    assert rows["tokens/s, both with their defaults"] == [2.5, "≥ 2.4"]
    assert rows["peak memory over group_texts"] == [0.5, "≤ 0.60"]
    assert rows["CPU to the first step over group_texts, bf16"] == [1.125, "≤ 1.25"]


def test_bf16_runs_only_where_it_is_worth_it():
    contenders = load("defaults").contenders
    slow = {("padded", "fp32"), ("by_length", "fp32"), ("grouped", "fp32"), ("llmtrain", "auto")}
    assert set(contenders(1.29)) == slow
    assert set(contenders(1.31)) - slow == {("grouped", "bf16"), ("llmtrain", "fp32")}


def test_without_a_gpu_it_ends_with_2_and_one_line(monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        load("gpu").train(bench(device="cuda"))
    assert ended.value.code == 2
    assert capsys.readouterr().err == "not measured: no GPU (--quick rehearses it on a CPU)\n"


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
    shape = load("gpu").SHAPES[name]
    whole, causal = shape.flops(causal=False) / 1e9, shape.flops(causal=True) / 1e9
    assert whole == pytest.approx(matrices + attention, abs=1e-3)
    assert causal == pytest.approx(matrices + attention / 2, abs=1e-3)


@pytest.mark.parametrize("name", ["tiny", "124M", "llama-1b", "350M", "1.5B"])
def test_a_shape_counts_the_parameters_that_its_model_multiplies_by(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = load("gpu").SHAPES[name]
    keys = dict(shape.config)
    with torch.device("meta"):
        config = AutoConfig.for_model(keys.pop("model_type"), **keys)
        model = AutoModelForCausalLM.from_config(config)
    blocks = [p for n, p in model.named_parameters() if p.ndim == 2 and n.split(".")[2].isdigit()]
    layers, width, parameters = shape.blocks
    assert sum(p.numel() for p in blocks) == layers * parameters
    assert model.get_input_embeddings().weight.shape == (shape.config["vocab_size"], width)
    assert model.config.tie_word_embeddings


@pytest.mark.parametrize("device", ["NVIDIA H200", "cpu"])
def test_goals_of_a_shape_are_ratios_of_its_rows_and_a_rehearsal_judges_none(device):
    one = bench()
    rates = {
        "llmtrain, blocks compiled": 460_000,
        "llmtrain, eager": 400_000,
        "bare, blocks compiled": 464_600,
        "Trainer": 300_000,
    }
    one.about["device"] = device
    load("gpu").compare(one, "124M", rates)
    rows = {row["name"].removeprefix("124M: "): row for row in one.rows}
    met = True if device != "cpu" else None
    better = rows["the better of llmtrain's"]
    assert (better["figure"], better["met"]) == (460_000, met)
    over = rows["time of a step over the bare loop's, blocks compiled"]
    assert (over["figure"], over["met"]) == (pytest.approx(1.01), met)
    assert rows["tokens/s of llmtrain over Trainer"]["met"] is met
    absent = rows["tokens/s of llmtrain over Trainer, torch_compile"]
    assert (absent["figure"], absent["met"]) == (None, None)
    assert absent["note"]


def test_a_wait_for_the_device_is_a_missed_goal_and_another_failure_is_not_measured(monkeypatch):
    gpu, one = load("gpu"), bench(device="cuda", steps=30, limit=1)
    for name, wrong in (("a", "called a synchronizing CUDA operation"), ("b", "no pydantic")):
        monkeypatch.setattr(gpu, "measure", lambda *given, wrong=wrong: ([], wrong))
        assert gpu.row(one, name, "124M", checked=True) is None
    assert [(row["figure"], row["met"]) for row in one.rows] == [(1, False), (None, None)]


def test_slopes_and_their_errors_are_those_of_least_squares_by_hand():
    slope = load("scaling").slope
    assert slope({2.0**n: 3 * 4.0**n for n in range(5)}) == pytest.approx((2.0, 0.0), abs=1e-12)
    found = {1.0: 1.1, 2.0: 1.9, 4.0: 4.3, 8.0: 7.7}
    x, y = ([math.log(one) for one in half] for half in (found, found.values()))
    steep, start = statistics.linear_regression(x, y)
    rest = sum((b - start - steep * a) ** 2 for a, b in zip(x, y, strict=True))
    error = math.sqrt(rest / (len(x) - 2) / sum((a - statistics.fmean(x)) ** 2 for a in x))
    assert slope(found) == pytest.approx((steep, error))


def test_growth_along_a_run_compares_its_thirds():
    assert load("scaling").late_over_early([2.0, 9.0, 3.0, 3.0, 2.2, 8.0]) == pytest.approx(1.1)


@pytest.mark.wide  # seconds of arithmetic
@pytest.mark.parametrize("name", ["1 B", "70 B"])
def test_the_choices_of_the_results_are_those_of_the_plan(name):
    text = (ROOT / "benchmarks" / "results" / "plan.json").read_text("utf-8")
    rows = [row for row in map(json.loads, text.splitlines()) if row.get("model") == name]
    found = [(row["place"], row["figure"], choice(row["plan"])) for row in rows]
    planned = load("plan").planned(name)
    assert found == [(place, figure, choice(plan)) for place, figure, plan in planned]


def choice(plan):
    keys = ("name", "chosen", "activation_checkpointing", "micro_batch_size", "total_bytes")
    return [[one[key] for key in keys] for one in plan["strategies"]]


def test_the_page_is_written_from_the_results():
    page = RESULTS["page"](ROOT / "benchmarks" / "results")
    written = (ROOT / "docs" / "reference" / "results.md").read_text("utf-8")
    assert written == page, "if this is meant: python scripts/results.py"


ROW = {
    "cpus": 16,
    "machine": "Linux",
    "torch": "9",
    "date": "2026-11-23",
    "git": "abc",
    "load": 1.0,
    "unit": "tokens/s",
    "goal": "≥ 420000",
    "note": "",
}


def page_of(folder, name, *rows):
    lines = [json.dumps({**ROW, **row}) + "\n" for row in rows]
    (folder / f"{name}.json").write_text("".join(lines), "utf-8")
    return RESULTS["page"](folder)


def test_a_rehearsal_is_no_result_of_a_gpu(tmp_path):
    row = {"name": "tiny: bare", "figure": 1.0, "device": "cpu", "met": None}
    text = page_of(tmp_path, "gpu", row).partition("## One GPU")[2]
    assert "tiny" not in text
    assert "1,024 tokens a block|420,000, 463,000, 500,000|" in text


def test_a_result_of_a_gpu_stands_on_the_page_with_its_share_of_the_peak(tmp_path):
    row = {"name": "124M", "figure": 460_000.0, "met": True, "mfu": 0.397, "mfu_causal": 0.371}
    text = page_of(tmp_path, "gpu", row | {"device": "NVIDIA H200"})
    assert "|124M (mfu 39.7%; mfu_causal 37.1%)|460,000 tokens/s|≥ 420000|" in text
    assert "NVIDIA H200, 16 cores" in text


def test_a_missed_goal_is_marked_beside_the_row_it_belongs_to_and_of_sizes_the_worst_counts(
    tmp_path,
):
    save = {"name": "a save", "figure": 2.0, "unit": "GB/s", "goal": "", "met": None}
    over = {"name": "  over a write", "figure": 0.5, "unit": "×", "goal": "≥ 1", "met": False}
    sizes = [
        {"name": f"memory of {n} MiB", "figure": n / 10, "unit": "MiB", "goal": "≤ 9", "met": True}
        for n in (10, 50, 40)
    ]
    text = page_of(tmp_path, "checkpoint", save, over, *sizes).partition("## Checkpoints")[2]
    rows = [line for line in text.partition("## Growth")[0].splitlines() if line.startswith("|")]
    assert rows[2:] == [
        "|a save|2 GB/s||",
        "|— over a write|0.5 ×|≥ 1 **missed**|",
        "|memory of 50 MiB|5 MiB|≤ 9|",
    ]
    assert "Measured: 2026-11-23; at abc; load 1.0 to 1.0." in text
