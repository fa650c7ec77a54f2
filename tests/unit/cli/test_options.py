"""What a shell completes, asked as typer's own scripts for bash, zsh and fish ask."""

import time

import pytest
from helpers import runs
from helpers.config import loaded
from helpers.ranks import until

from llmtrain import system
from llmtrain.cli import options
from llmtrain.cli.main import app, main
from llmtrain.cli.options import ProgressLine, busy
from llmtrain.config.keys import all_keys

TRAIN = ["train", "a.yaml"]


@pytest.fixture
def complete(monkeypatch, capsys):
    """A function that returns what bash is offered in place of the last word."""

    def ask(*words, shell="complete_bash"):
        monkeypatch.setenv("_LLMTRAIN_COMPLETE", shell)
        monkeypatch.setenv("COMP_WORDS", "\n".join(["llmtrain", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", " ".join(["llmtrain", *words]))
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        with pytest.raises(SystemExit) as ended:
            main([])
        assert ended.value.code == 0
        return capsys.readouterr().out.rstrip("\n").split("\n")

    return ask


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with configs and runs, which is the current one."""
    for name in ("configs/quick.yaml", "configs/fine/lora.yaml", "mine.yaml", "other/far.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("runs/one", "runs/two", "sweep/three"):
        (tmp_path / name).mkdir(parents=True)
        runs.write_run(tmp_path / name, [runs.start_line(0)])
    (tmp_path / "runs" / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_is_offered(complete):
    names = {info.name or info.callback.__name__ for info in app.registered_commands}
    names |= {info.name for info in app.registered_groups}
    assert set(complete("")) == names
    assert complete("tr") == ["train"]
    assert complete("config", "") == ["show", "schema", "diff"]
    assert "--processes" in complete("train", "--")


def test_configs_are_offered_from_their_folder_and_from_the_one_typed(complete, place):
    assert complete("train", "co") == ["configs/fine/lora.yaml", "configs/quick.yaml"]
    assert complete("train", "m") == ["mine.yaml"]
    assert complete("plan", "./m") == ["./mine.yaml"]
    assert complete("data", "inspect", "other/") == ["other/far.yaml"]
    assert complete("train", "nothing/here/") == [""], "then the shell offers its files"


@pytest.mark.parametrize(
    "command", ["watch", "report", "evaluate", "generate", "export", "checkpoints list"]
)
def test_runs_are_offered(complete, place, command):
    words = command.split()
    assert complete(*words, "") == ["runs/one", "runs/two"]
    assert complete(*words, "sweep/") == ["sweep/three"]


def test_a_further_run_is_offered_after_the_first(complete, place):
    assert complete("report", "runs/one", "runs/t") == ["runs/two"]
    assert complete("config", "diff", "runs/one", "co") == [
        "configs/fine/lora.yaml",
        "configs/quick.yaml",
    ]


def test_every_key_is_offered_and_is_a_key(complete):
    offered = complete(*TRAIN, "")
    assert [key.replace(".0.", ".*.") for key in offered] == [f"{key.name}=" for key in all_keys()]


def test_bash_takes_an_equals_sign_for_a_word_of_its_own(complete):
    words = ["auto", "concat", "bestfit", "single"]
    assert complete(*TRAIN, "data.pack") == ["data.packing=", *(f"data.packing={w}" for w in words)]
    assert complete(*TRAIN, "data.packing", "=") == words
    assert complete(*TRAIN, "data.packing", "=", "b") == ["bestfit"]
    assert complete(*TRAIN, "data.packing", "=", "auto", "data.lan") == [
        "data.lanes=",
        "data.lanes=auto",
    ]
    assert len(complete(*TRAIN, "data.packing", "=", "auto", "")) == len(all_keys())


def test_other_shells_give_the_whole_word(complete):
    assert complete(*TRAIN, "data.packing=b", shell="complete_fish") == ["data.packing=bestfit"]
    assert '"data.packing=bestfit"' in complete(*TRAIN, "data.packing=b", shell="complete_zsh")[0]


def test_items_of_lists_have_the_number_that_was_typed(complete):
    assert complete(*TRAIN, "data.sources.3.wei") == [
        "data.sources.3.weight=",
        "data.sources.3.weight=1.0",
    ]


def test_what_no_key_begins_with_is_left_to_the_shell(complete):
    assert complete(*TRAIN, "no.such") == [""]
    assert complete(*TRAIN, "model.from", "=", "runs/") == [""]


@pytest.mark.parametrize("key", ["data.document_mask", "training.precision", "model.freeze"])
def test_a_value_that_is_offered_is_accepted(complete, tmp_path, key):
    import shlex

    for word in complete(*TRAIN, f"{key}=", shell="complete_fish")[1:]:
        (override,) = shlex.split(word)
        assert key in loaded(tmp_path, override).origins


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(("moves", "seconds"), [(True, 0.5), (False, 30.0)])
def test_a_line_is_due_now_and_then(clock, monkeypatch, moves, seconds):
    monkeypatch.setattr(options.sys.stderr, "isatty", lambda: moves, raising=False)
    line = ProgressLine(wait=False)
    assert line.is_due()
    clock[0] += seconds - 0.01
    assert not line.is_due()
    clock[0] += 0.02
    assert line.is_due()
    assert not ProgressLine(wait=True).is_due()


def test_on_a_terminal_a_line_replaces_the_one_before(monkeypatch, capsys):
    monkeypatch.setattr(options.sys.stderr, "isatty", lambda: True, raising=False)
    line = ProgressLine(wait=False)
    line.show("1 of 2")
    line.show("2 of 2\x1b[31m", last=True)
    line.clear()
    assert capsys.readouterr().err == "\r\033[K1 of 2\r\033[K2 of 2\\x1b[31m\n\r\033[K"


def test_elsewhere_each_line_stays_and_there_is_nothing_to_remove(capsys):
    line = ProgressLine(wait=False)
    line.show("1 of 2")
    line.clear()
    line.show("2 of 2", last=True)
    assert capsys.readouterr().err == "1 of 2\n2 of 2\n"


def test_a_command_shows_on_a_terminal_what_takes_long_and_then_removes_it(monkeypatch, capsys):
    monkeypatch.setattr(options.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(options, "_BUSY_AFTER_SECONDS", 0.0)
    monkeypatch.setitem(options._SECONDS_BETWEEN, True, 0.001)
    shown = []
    monkeypatch.setattr(ProgressLine, "show", lambda line, text, **_: shown.append(text))
    with busy("loading") as end:
        until(lambda: any(text == "loading, 0 s" for text in shown), "the first phase")
        system.beat("reading files", 3, 7)
        until(lambda: any("reading files (3 of 7), " in text for text in shown), "a count")
        end()
        count = len(shown)
    assert len(shown) == count  # the clearing, once
    assert shown[-1] == ""


def test_where_there_is_no_terminal_nothing_is_added(monkeypatch, capsys):
    monkeypatch.setattr(options, "_BUSY_AFTER_SECONDS", 0.0)
    with busy("loading") as end:
        end()
    assert capsys.readouterr().err == ""
