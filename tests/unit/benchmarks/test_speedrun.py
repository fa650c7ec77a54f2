"""The arithmetic of benchmarks/speedrun.py, and the page that it reads."""

import json
import runpy
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import llmtrain

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reference" / "results.md").read_text("utf-8")
with pytest.MonkeyPatch.context() as patch:  # it imports what lies beside it
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    SPEEDRUN = runpy.run_path(str(ROOT / "benchmarks" / "speedrun.py"))


def run(bits_per_byte, *marks):
    return {
        "bits_per_byte": bits_per_byte,
        "marks": marks,
        "tokens": 2048,
        "whole_command_cpu_seconds": 99.0,
    }


def test_a_step_of_the_baseline_is_the_median_of_those_in_the_middle_of_its_pieces():
    """Steps of 9, 8, 1, 2, 7 and 9, 8, 4, 3, 7 seconds: the first two and the last are left out."""
    pieces = [[0.0, 9.0, 17.0, 18.0, 20.0, 27.0], [5.0, 14.0, 22.0, 26.0, 29.0, 36.0]]
    assert SPEEDRUN["step_seconds"](pieces) == 2.5


def test_the_seconds_of_a_seed_are_those_from_its_first_step_to_its_end():
    marks = [0.0, 1.0, 2.0, 4.0, 5.0]  # 300 steps of 2 seconds
    found = SPEEDRUN["summary"]([(run(2.2, 10.0, 30.0, 60.0), marks), (run(2.3, 5.0, 75.0), marks)])
    assert found["cpu_seconds_of_seeds"] == [50.0, 70.0]
    assert found["cpu_seconds"] == 60.0
    assert found["baseline_cpu_seconds"] == 600.0
    assert found["times_fewer"] == 10.0
    assert found["bits_per_byte"] == pytest.approx(2.25)
    assert found["level_reached"] is True


@pytest.mark.parametrize(("levels", "reached"), [((2.2, 2.4), False), ((2.283, 2.284), True)])
def test_the_mean_of_the_seeds_has_to_reach_the_level(levels, reached):
    found = SPEEDRUN["summary"]([(run(level, 0.0, 1.0), [0.0, 1, 2, 3, 4]) for level in levels])
    assert found["level_reached"] is reached


def test_each_record_is_a_config_that_loads_and_stands_on_the_page():
    assert SPEEDRUN["RECORDS"]
    for name, path in SPEEDRUN["RECORDS"].items():
        given = ["run.dir=run", "data.sources=[{path: articles}]"]
        assert llmtrain.load_config(path, given).checkpoint.resume == "auto"
        assert f"](../../benchmarks/speedruns/{name}.yaml)" in PAGE


def test_the_level_is_no_easier_than_what_the_convergence_check_reaches():
    """It stays when the check is run again: records are compared with each other."""
    reached = json.loads((ROOT / "benchmarks" / "results" / "convergence.json").read_text())
    above = reached["bits_per_byte"]["300"] - SPEEDRUN["LEVEL"]
    assert 0 <= above < 0.02


def test_the_articles_are_divided_once_for_all_seeds(tmp_path, monkeypatch):
    data = tmp_path / "data"
    data.mkdir()
    articles = {f"Article {n} tells of {n * 7} things." for n in range(4000)}
    pq.write_table(pa.table({"text": sorted(articles)}), data / "a.parquet", row_group_size=100)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    keys = SPEEDRUN["divide"](data, tmp_path)
    trained, held = (
        set(pq.read_table(tmp_path / name)["text"].to_pylist()) for name in ("train", "heldout")
    )
    assert len(held) >= 16
    assert trained | held == articles
    assert not trained & held
    config = llmtrain.load_config(
        ROOT / "benchmarks" / "speedruns" / "muon.yaml", [f"{k}={v}" for k, v in keys.items()]
    )
    assert [source.path for source in config.data.sources] == [str(tmp_path / "train")]
    assert [source.path for source in config.evaluation.sources] == [str(tmp_path / "heldout")]
