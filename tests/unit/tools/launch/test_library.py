"""`train(config, processes=N)`: what is launched, and what comes back."""

import json
import tempfile
import threading
from pathlib import Path

import pytest
from helpers.config import loaded, written
from helpers.tiny import tiny_config

import llmtrain
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.errors import Problem, UserError
from llmtrain.tools.launch import launch as module
from llmtrain.tools.launch.child import Ended, passing_signals_on


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """What was launched; `answer` is how that ends, and what the run writes into its status."""

    class Launched:
        answer = Ended(0, "", began=True)
        status = None

        def __call__(self, config_file, overrides, *, processes):
            self.path, self.overrides, self.processes = Path(config_file), overrides, processes
            self.text = self.path.read_text()
            self.config = load_config(config_file, overrides)
            if self.status:
                self.config.run_dir.mkdir(exist_ok=True)
                (self.config.run_dir / "status.json").write_text(json.dumps(self.status))
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    found = Launched()
    monkeypatch.setattr(module, "launch", found)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return found


def test_the_run_gets_the_resolved_config_and_its_end_is_returned(tmp_path, launched):
    given = {"training.steps": 7, "run.dir": str(tmp_path / "run")}
    config = load_config(written(tmp_path), given)
    launched.status = {"state": "finished", "exit_code": 0, "reason": "steps", "step": 7}
    result = llmtrain.train(config, processes=3)
    assert launched.processes == 3
    assert launched.config == config
    assert launched.config.origins == config.origins, "who set each key, and no default"
    assert (result.state, result.exit_code, result.reason) == ("finished", 0, "steps")
    assert (result.step, result.run_dir) == (7, tmp_path / "run")
    assert not launched.path.exists()


def test_a_config_made_from_a_dict_is_launched_too(tmp_path, launched):
    config = Config.model_validate(tiny_config(tmp_path / "run"))
    llmtrain.train(config, processes=2)
    assert launched.config == config


def test_a_part_of_a_list_that_a_person_has_set_is_launched(tmp_path, launched):
    config = loaded(tmp_path, "data.sources.0.weight=0.5", f"run.dir={tmp_path / 'run'}")
    llmtrain.train(config, processes=1)
    assert launched.config == config
    assert "data.sources.0.weight=0.5" in launched.overrides


def test_a_run_that_is_stopped_before_it_begins_is_not_the_one_before(tmp_path, launched):
    config = loaded(tmp_path, f"run.dir={tmp_path / 'run'}")
    (tmp_path / "run").mkdir()
    status = {"state": "finished", "exit_code": 0, "reason": None, "step": 5}
    (tmp_path / "run" / "status.json").write_text(json.dumps(status))
    launched.answer = Ended(0, "", asked_to_stop=True)
    result = llmtrain.train(config, processes=2)
    assert (result.state, result.reason, result.step) == ("stopped", "signal", 5)


@pytest.mark.parametrize(
    ("code", "kind"),
    [(2, llmtrain.UserError), (1, llmtrain.RunError), (74, llmtrain.RunError),
     (75, llmtrain.RunError)],
)  # fmt: skip
def test_the_code_of_the_run_decides_the_error_and_its_message_is_that_of_the_run(
    tmp_path, launched, code, kind
):
    launched.answer = Ended(code, "error: what happened\n    next:     what to do")
    with pytest.raises(kind) as raised:
        llmtrain.train(loaded(tmp_path, f"run.dir={tmp_path / 'run'}"), processes=2)
    assert raised.value.exit_code == code
    assert str(raised.value) == "what happened\n    next:     what to do"


def test_a_message_does_not_name_the_temporary_file(tmp_path, launched):
    config = loaded(tmp_path, f"run.dir={tmp_path / 'run'}")
    wrong = Problem("training.global_batch_size", 3, "a multiple of 2")

    def refuse(config_file, overrides, *, processes):
        raise UserError(wrong, where=config_file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "launch", refuse)
        with pytest.raises(UserError) as raised:
            llmtrain.train(config, processes=2)
    assert raised.value.problems == (wrong,)
    assert str(raised.value).startswith("1 problem in the config\n")


def test_a_secret_is_refused_before_anything_is_written(tmp_path, launched):
    tree = tiny_config(tmp_path / "run")
    tree["model"]["config"]["hub_token"] = "hf_" + "aB3" * 12
    with pytest.raises(UserError, match="no secret in a config"):
        llmtrain.train(Config.model_validate(tree), processes=2)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("processes", [0, -1, True, 2.0, "2"])
def test_a_number_of_processes_that_is_none_is_refused(tmp_path, launched, processes):
    config = loaded(tmp_path, f"run.dir={tmp_path / 'run'}")
    with pytest.raises(UserError, match="a whole number ≥ 1"):
        llmtrain.train(config, processes=processes)


def test_a_config_without_a_run_directory_is_refused(launched):
    tree = tiny_config(Path("run"))
    del tree["run"]
    with pytest.raises(UserError, match=r"run\.dir"):
        llmtrain.train(Config.model_validate(tree), processes=2)


def test_a_thread_can_launch_although_it_receives_no_signals():
    seen = []

    def work():
        with passing_signals_on() as forward:
            seen.append(forward)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(seen) == 1
