import json
from pathlib import Path

import pytest

from llmtrain.rundir.goodput import goodput

NOW = 1_800_000_000.0


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtrain.rundir.goodput.time.time", lambda: NOW)


def write(run_dir: Path, *lines: dict) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "metrics.jsonl").write_text(text)


def train(step: int, ago: float, seconds: float) -> dict:
    return {"kind": "train", "time": NOW - ago, "step": step, "span_seconds": seconds}


def start(step: int, ago: float) -> dict:
    return {"kind": "start", "time": NOW - ago, "step": step}


def test_a_run_without_a_step_has_none(tmp_path: Path) -> None:
    assert goodput(tmp_path) is None
    write(tmp_path, start(0, 10))
    assert goodput(tmp_path) is None


def test_it_is_step_seconds_over_wall_seconds(tmp_path: Path) -> None:
    write(tmp_path, start(0, 1000), train(10, 700, 200.0), train(20, 300, 300.0))
    assert goodput(tmp_path) == pytest.approx(0.5)


def test_redone_steps_and_gaps_are_lost_time(tmp_path: Path) -> None:
    write(
        tmp_path,
        start(0, 1000),
        train(10, 800, 200.0),
        train(20, 600, 200.0),  # behind the checkpoint of step 10: done again
        start(10, 300),
        train(15, 200, 50.0),
        train(20, 100, 50.0),
    )
    assert goodput(tmp_path) == pytest.approx(0.3)
