"""`llmtrain init --recipe`: the files that come with the package, written where a person is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.cli.main import main
from llmtrain.config.load import load_config
from llmtrain.tools import recipes as module
from llmtrain.tools.launch.child import Ended
from llmtrain.tools.launch.file import read_launch_file
from llmtrain.tools.recipes import is_launch, recipes, write_recipe

ROOT = Path(__file__).parents[3]
FILES = [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "accelerate_configs").glob("*.yaml")]


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*words):
    """The exit code of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["init", *words])
    return ended.value.code


def test_recipes_are_the_files_at_the_top_of_the_repository():
    found = recipes()
    assert len(found) == len(FILES)  # no two have one name
    for file in FILES:
        assert found[file.stem].read_bytes() == file.read_bytes()
        assert is_launch(found[file.stem]) == (file.parent.name == "accelerate_configs")


@pytest.mark.parametrize("name", recipes())
def test_a_written_recipe_names_only_what_is_there(name, capsys):
    assert init("--recipe", name) == 0
    assert capsys.readouterr().out == f"{name}.yaml\n"
    text = Path(f"{name}.yaml").read_text()
    assert re.findall(r"(?:configs|scripts)/\S+", text) == []
    if is_launch(recipes()[name]):
        assert f"{name}.yaml" in text
        assert "-m llmtrain train CONFIG" in text
    else:
        assert load_config(f"{name}.yaml").run.dir == f"runs/{name}"


@pytest.mark.parametrize("name", ["cpu", "ddp", "fsdp2", "zero2", "single"])
def test_a_written_launch_file_launches(name):
    assert read_launch_file(write_recipe(name), None).path == Path(f"{name}.yaml")


def test_it_goes_where_it_is_asked_to(empty, capsys):
    assert init("--recipe", "chat_lora", "--out", "my chat.yaml") == 0
    assert capsys.readouterr().out == "my chat.yaml\n"
    assert "llmtrain train my chat.yaml model.from" in (empty / "my chat.yaml").read_text()


def test_a_file_that_is_there_is_kept(empty, capsys):
    (empty / "quickstart.yaml").write_text("mine")
    (empty / "other.yaml").symlink_to("nowhere")
    for words in ([], ["--out", "other.yaml"], ["--out", "."]):
        assert init("--recipe", "quickstart", *words) == 2
        said = capsys.readouterr().err
        assert "expected: a file that does not exist: none is overwritten" in said
        assert "try:      --out OTHER.yaml" in said
    assert (empty / "quickstart.yaml").read_text() == "mine"
    assert sorted(path.name for path in empty.iterdir()) == ["other.yaml", "quickstart.yaml"]


@pytest.mark.parametrize("out", ["none/x.yaml", "a" * 300])
def test_a_file_that_cannot_be_written_is_one_message(out, capsys):
    assert init("--recipe", "quickstart", "--out", out) == 2
    assert "expected: a file that can be written (" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--recipe", "quikstart"], ["--recipe", ""]])
def test_the_names_are_listed_where_none_or_another_is_given(words, capsys, empty):
    assert init(*words) == 2
    said = capsys.readouterr().err
    assert "expected: the name of a recipe" in said
    for name in recipes():
        assert re.search(rf"^      {name} +[A-Z].{{20,}}$", said, flags=re.MULTILINE)
    assert max(map(len, said.splitlines())) < 120
    assert "try:      llmtrain init --recipe quickstart" in said
    assert list(empty.iterdir()) == []


def test_two_cpu_processes_train_the_packaged_config(monkeypatch):
    seen = {}

    def note(config_file, overrides, *, processes, env):
        seen.update(config=config_file, overrides=overrides, processes=processes, env=env)
        return Ended(0, "")

    monkeypatch.setattr(module, "launch", note)
    out = Path('a "b": [c]')
    assert module.quickstart(out) == Ended(0, "")
    assert seen["processes"] == 2
    assert seen["env"]["CUDA_VISIBLE_DEVICES"] == ""
    assert load_config(seen["config"], seen["overrides"]).run.dir == str(out)
    module.quickstart()
    assert load_config(seen["config"], seen["overrides"]).run.dir == "runs/quickstart"


@pytest.mark.launches
@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_the_quickstart_never_imports_deepspeed(tmp_path, strategy):
    """It is installed everywhere on Linux; its import takes seconds and looks for a compiler.

    Torch's module that builds extensions warns where there is a CUDA toolkit and no GPU.
    """
    program = (
        "import sys, llmtrain\n"
        "from llmtrain.tools.recipes import CONFIG\n"
        "assert 'deepspeed' not in sys.modules\n"
        "given = ['training.steps=1', 'run.dir=run', 'data.workers=0']\n"
        f"given.append('distributed.strategy={strategy}')\n"
        "assert llmtrain.train(llmtrain.load_config(CONFIG, given)).exit_code == 0\n"
        "sys.exit(bool({'deepspeed', 'torch.utils.cpp_extension'} & sys.modules.keys()))\n"
    )
    given = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **given}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
