import json
import threading

import pytest
from helpers import runs

import llmtrain
from llmtrain.errors import UserError
from llmtrain.report.run import open_run


@pytest.fixture
def run(tmp_path):
    folder = runs.write_run(tmp_path / "mine", runs.interrupted_history())
    for step in (100, 300):
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    return open_run(folder)


def test_a_run_shows_what_its_files_say(run):
    assert llmtrain.open_run is open_run
    assert run.name == "mine"
    assert run.status["state"] == "finished"
    assert run.checkpoints == ["step-00000100", "step-00000300"]
    assert run.best.name == "step-00000300"
    losses = {line["step"]: line["loss"] for line in run.metrics("train")}
    assert losses[170] == runs.loss_at(170), "of the final history"
    assert repr(run).startswith("<Run mine: Finished. Held-out loss fell")
    assert "<svg" in run._repr_html_()


def test_lines_are_followed_until_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("llmtrain.report.run._SECONDS", 0.01)
    folder = runs.write_run(tmp_path, [runs.start_line(0), runs.train_line(1)])
    seen, first = [], threading.Event()

    def follow():
        for line in open_run(folder).follow():
            seen.append(line["kind"])
            if line["kind"] == "train":
                first.set()

    reader = threading.Thread(target=follow)
    reader.start()
    assert first.wait(10)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            "".join(json.dumps(line) + "\n" for line in (runs.eval_line(1), runs.end_line(1)))
        )
    reader.join(10)
    assert seen == ["start", "train", "eval", "end"]


def test_what_is_no_run_or_has_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        open_run(tmp_path)
    empty = open_run(runs.write_run(tmp_path / "run", [runs.start_line(0)]))
    assert empty.best is None
    with pytest.raises(UserError, match="checkpoint"):
        empty.load()
