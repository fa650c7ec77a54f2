"""What a start refuses before torch is imported, all of it in one message."""

import subprocess
import sys

import pytest
from helpers.config import SMALLEST, written

from llmtrain.config.load import load_config
from llmtrain.errors import UserError
from llmtrain.training.start.claim import rules_of_a_launch, rules_of_this_process

TWO = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def found(folder, *overrides, env=None):
    """Key → message of what is wrong with a start of this process."""
    path = written(folder)
    here = f"run.dir={folder / 'run'}"
    try:
        load_config(path, [here, *overrides], rules_of_this_process(str(path), env or {}))
    except UserError as error:
        return {problem.key: str(problem) for problem in error.problems}
    return {}


WRONG = (
    "data.sources.0.path=./missing.jsonl",
    "evaluation.sources=[{path: './*.none'}]",
    "model.tokenizer=./no/tokenizer",
    "model.config.num_hidden_layers=-3",
    "training.global_batch_size=3",
)
KEYS = {
    "data.sources.0.path",
    "evaluation.sources.0.path",
    "model.tokenizer",
    "model.config.num_hidden_layers",
    "training.global_batch_size",
}


def test_all_that_can_be_seen_without_torch_is_reported_in_one_start(tmp_path):
    assert set(found(tmp_path, *WRONG, env=TWO)) == KEYS
    beside = found(tmp_path, *WRONG, "loging.every_steps=3", env=TWO)
    assert set(beside) == KEYS | {"loging"}


def test_what_is_there_is_no_problem(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    sources = (
        f"data.sources=[{{path: '{tmp_path}/*.jsonl'}}, {{path: '{tmp_path}'}}, {{path: a/b}}]"
    )
    assert not found(tmp_path, sources, f"model.tokenizer={tmp_path}", env=TWO)
    assert not found(tmp_path, "model.tokenizer=nobody/none")


def test_weights_that_are_not_there_or_wrong_are_found(tmp_path):
    asked = f"model={{from: {tmp_path / 'weights'}, tokenizer: sample}}"
    assert set(found(tmp_path, asked)) == {"model.from"}
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text('{"hidden_size": "abc"}')
    assert set(found(tmp_path, asked)) == {f"{tmp_path}/weights/config.json: hidden_size"}


def test_of_a_run_to_begin_with_nothing_is_looked_at_here(tmp_path):
    (tmp_path / "weights" / "checkpoints").mkdir(parents=True)
    (tmp_path / "weights" / "eval.safetensors").touch()
    assert not found(tmp_path, f"model={{from: {tmp_path / 'weights'}, tokenizer: sample}}")


def test_a_run_that_has_begun_needs_none_of_them_again(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "auto.json").write_text("{}")
    assert set(found(tmp_path, *WRONG, env=TWO)) == {
        "model.config.num_hidden_layers",
        "training.global_batch_size",
    }


def test_on_several_machines_the_disk_is_left_to_their_ranks(tmp_path):
    env = TWO | {"WORLD_SIZE": "4"}
    assert set(found(tmp_path, *WRONG[:3], env=env)) == set()


def test_a_batch_that_no_process_could_split_is_reported_once(tmp_path):
    overrides = ("training.global_batch_size=10", "training.micro_batch_size=4")
    path = written(tmp_path)
    with pytest.raises(UserError) as caught:
        load_config(path, overrides, rules_of_a_launch(str(path), TWO, {}))
    assert [one.key for one in caught.value.problems] == ["training.global_batch_size"]


@pytest.mark.parametrize("more", [[], ["--processes", "2"]])
@pytest.mark.launches
def test_a_start_that_is_refused_imports_no_torch(tmp_path, more):
    path = written(tmp_path, SMALLEST)
    program = (
        "import sys\n"
        "from llmtrain.cli import main, rank\n"
        "def leave(code, message):\n"
        "    print('torch' in sys.modules, 'transformers' in sys.modules, code)\n"
        "    sys.exit(code)\n"
        "rank._leave = leave\n"
        "try:\n"
        "    main.main(sys.argv[1:])\n"
        "finally:\n"
        "    print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program, "train", str(path), *WRONG[:4], *more]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == "False False"


def test_a_run_of_adapters_needs_its_base_at_every_start(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "auto.json").write_text("{}")
    asked = f"model={{from: {tmp_path / 'weights'}}}"
    assert set(found(tmp_path, asked)) == set()
    assert set(found(tmp_path, asked, "adapter.kind=lora")) == {"model.from"}
