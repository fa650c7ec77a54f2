"""`llmtrain.train` in a program of one's own: what a run leaves behind in its process."""

import json
import sys
from pathlib import Path

import pytest
from helpers import launcher
from helpers.tiny import lines, tiny_config, write_config

NOTEBOOK = """
import json, llmtrain
config = llmtrain.Config.model_validate(json.load(open("config.json")))
result = llmtrain.train(config, processes=2)
print(json.dumps([str(result.run_dir), result.state, result.exit_code, result.step]))
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1"])
def test_a_run_that_failed_leaves_nothing_in_the_way_of_the_next(server, tmp_path, strategy):
    path = write_config(tmp_path, tiny_config(tmp_path / "run", training__steps=1))
    arguments = ["call", "helpers.library", "fail_and_go_on", str(path), strategy, "said.json"]
    codes = server.run(arguments, 1, tmp_path)
    assert codes == [0], (tmp_path / "output.txt").read_text()
    failed, *others = json.loads((tmp_path / "said.json").read_text())
    assert "nowhere.jsonl" in failed["ended"]
    assert [one["ended"] for one in others] == ["finished", "finished"]
    assert not any(one["group"] for one in (failed, *others))
    names = {name for one in (failed, *others) for name in one["changed"]}
    assert not [name for name in names if "RANK" in name or name.startswith(("ACC", "MASTER"))]


def test_processes_are_started_where_there_is_no_program_to_start_again(tmp_path):
    config = tiny_config(Path("run"), training__steps=2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = launcher.run([sys.executable, "-c", NOTEBOOK], tmp_path, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["run", "finished", 0, 2]
    (start,) = lines(tmp_path / "run", "start")
    assert start["world_size"] == 2
    assert not list(tmp_path.glob("llmtrain-*")), "temporary files are gone"
