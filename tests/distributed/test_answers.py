"""`evaluate` on the held-out pairs of a run gives the run's line again."""

import json

import pytest
from helpers import preferred, used
from helpers.tiny import lines

from llmtrain.rundir.contents import REFERENCE

CASES = {
    "dpo": (preferred.pairs, {}),
    "single": (preferred.pairs, {"data__packing": "single"}),
    "kto": (preferred.feedback, {}),
    "simpo": (preferred.pairs, {"preference__gamma": 0.5}),
    "reward": (preferred.pairs, {}),
}


@pytest.fixture(scope="module", params=CASES)
def run(request, server, tmp_path_factory):
    rows, changes = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    loss = "dpo" if request.param == "single" else request.param
    changes |= {"training__steps": 3, "evaluation__every_steps": 3}
    config = preferred.config_of(folder, rows(80), loss, **changes)
    codes = server.run(["train", preferred.write(folder, config)], 2, folder)
    assert codes == [0, 0], (folder / "output.txt").read_text()[-4000:]
    return folder / "run"


def evaluated(server, folder, *words):
    return json.loads(used.given(server, folder, ["llmtrain", "evaluate", *words, "--json"]))


def test_a_run_repeats_its_line(server, tmp_path, run):
    checkpoint = run / "checkpoints" / "step-00000003"
    (line,) = (one for one in lines(run, "eval") if one["step"] == 3)
    found = evaluated(server, tmp_path, str(checkpoint))
    assert found["pairs"] >= 4
    for key in line.keys() - {"time", "seconds"}:
        is_number = isinstance(line[key], float)
        assert found[key] == (pytest.approx(line[key], rel=1e-12) if is_number else line[key]), key


def test_its_base_is_measured_as_before_the_first_step(server, tmp_path, run):
    (line,) = (one for one in lines(run, "eval") if one["step"] == 0)
    if (run / REFERENCE).exists():
        found = evaluated(server, tmp_path, str(run.parent / "base"), "--as", str(run))
        assert found["margin"] == line["margin"]
        assert found["loss"] == pytest.approx(line["loss"], abs=1e-9)
        assert found["accuracy"] == line["accuracy"]
