"""Failpoints: what a test asks for happens, there and then, and nothing else ever does."""

import ast
import errno
import os
import re
import signal
import subprocess
import sys
import time
import timeit
from collections import Counter
from pathlib import Path

import pytest

import llmtrain
from llmtrain import UserError, faults
from llmtrain.config.schema import Config

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _inert_again():
    yield
    faults.install({})


def install(text, rank=None):
    faults.install({"LLMTRAIN_FAULTS": text} | ({} if rank is None else {"RANK": str(rank)}))


def struck(times, point="save.fsync", **of_hit):
    """Which of so many calls, from 1, raised."""
    found = []
    for call in range(1, times + 1):
        try:
            faults.hit(point, **of_hit)
        except OSError:
            found.append(call)
    return found


def ended(faults_text, code, **env):
    """A process that takes up the faults and then does `code`."""
    start = "import os; from llmtrain import faults; faults.install(os.environ)\n"
    env = {"PYTHONPATH": str(ROOT), "LLMTRAIN_FAULTS": faults_text, **env}
    return subprocess.run(
        [sys.executable, "-c", start + code], env=env, capture_output=True, text=True, check=False
    )


# What it costs, and what it does, when nobody asks.


@pytest.mark.parametrize("text", [None, "", " ", ";", " ; "])
def test_without_faults_no_point_does_anything(text):
    faults.install({} if text is None else {"LLMTRAIN_FAULTS": text})
    assert [faults.hit(point, step=1, written=9, of=9) for point in faults.POINTS] == (
        [None] * len(faults.POINTS)
    )


def test_a_hit_that_is_not_asked_for_costs_less_than_a_dictionary_of_a_step():
    faults.install({})
    mine = min(timeit.repeat(lambda: faults.hit("loop.micro"), number=1000, repeat=20))
    other = min(timeit.repeat(lambda: dict.fromkeys(range(32)), number=1000, repeat=20))
    assert mine < other


def test_a_fault_strikes_at_its_own_point_alone():
    install("save.fsync=eio")
    others = [point for point in faults.POINTS if point != "save.fsync"]
    assert [faults.hit(point) for point in others] == [None] * len(others)
    assert struck(1) == [1]


def test_installing_again_forgets_what_was_installed_before():
    install("save.fsync@nth=2=eio")
    assert struck(1) == []
    install("save.fsync@nth=2=eio")
    assert struck(1) == []
    install("save.vote1=eio")
    assert struck(3) == []


# Conditions.


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [("", [1, 2, 3, 4]), ("@nth=1", [1]), ("@nth=3", [3]), ("@nth=5", []), ("@nth=03", [3])],
)
def test_nth_is_one_call_and_without_it_every_call_is_struck(conditions, expected):
    install(f"save.fsync{conditions}=enospc")
    assert struck(4) == expected


def test_nth_counts_only_the_calls_at_which_the_other_conditions_hold():
    install("save.fsync@step=8@nth=2=eio")
    steps = [4, 4, 8, 12, 8, 8]
    assert [step for step in steps if struck(1, step=step)] == [8]
    assert struck(1, step=8) == []


def test_a_step_is_that_of_the_hit_or_the_one_under_way():
    install("loop.micro@step=7=eio;save.fsync@step=4=eio;eval.batch@step=0=eio")
    assert struck(1, "loop.micro") == []  # no step has begun
    assert struck(1, "eval.batch", step=0) == [1]
    for step in (6, 7, 8):
        faults.hit("loop.step", step=step)
        assert struck(1, "loop.micro") == ([1] if step == 7 else [])
        assert struck(1, "save.fsync", step=step - 4) == ([1] if step == 8 else [])


@pytest.mark.parametrize(("rank", "expected"), [(0, []), (1, [1]), (2, [])])
def test_a_rank_is_that_of_the_environment(rank, expected):
    install("save.fsync@rank=1=eio", rank)
    assert struck(1) == expected


def test_a_process_alone_is_rank_0():
    install("save.fsync@rank=0=eio")
    assert struck(1) == [1]


@pytest.mark.parametrize(
    ("wanted", "first"), [("150", 2), ("0", 0), ("50%", 5), ("100%", 10), ("12.5%", 2), ("1001", 0)]
)
def test_bytes_are_a_number_or_a_share_of_what_this_rank_writes(wanted, first):
    install(f"save.write@bytes={wanted}@nth=1=eio")
    hundreds = [
        done for done in range(11) if struck(1, "save.write", written=100 * done, of=1000) == [1]
    ]
    assert hundreds == ([] if wanted == "1001" else [first])


def test_chance_strikes_about_as_often_as_it_says_and_always_at_the_same_calls():
    install("save.fsync@p=0.1,seed=5=eio")
    once = struck(5000)
    assert 400 < len(once) < 600
    install("save.fsync@p=0.1,seed=5=eio")
    assert struck(5000) == once
    install("save.fsync@p=0.1,seed=6=eio")
    assert struck(5000) != once
    install("save.fsync@p=0.1,seed=5=eio", rank=1)
    assert struck(5000) != once


@pytest.mark.parametrize(
    ("p", "expected"), [("0", []), ("1", [1, 2, 3]), ("0.0", []), ("1.0", [1, 2, 3])]
)
def test_chance_has_its_ends(p, expected):
    install(f"save.fsync@p={p}=eio")
    assert struck(3) == expected


def test_all_conditions_hold_together_and_several_faults_beside_each_other():
    install("save.write@rank=1@step=8@bytes=50%@nth=2=eio ; save.fsync=enospc", rank=1)
    at = [(4, 9), (8, 4), (8, 5), (8, 9), (8, 10)]
    found = [one for one in at if struck(1, "save.write", step=one[0], written=one[1], of=10)]
    assert found == [(8, 9)]
    assert struck(1) == [1]


# Actions.


@pytest.mark.parametrize(("action", "number"), [("enospc", errno.ENOSPC), ("eio", errno.EIO)])
def test_a_disk_error_carries_its_number_and_its_file(action, number, tmp_path):
    install(f"save.fsync={action}")
    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as caught:
        faults.hit("save.fsync", path=tmp_path / "model.safetensors")
    assert caught.value.errno == number
    assert caught.value.filename == str(tmp_path / "model.safetensors")


def test_raise_is_a_defect_that_names_its_fault():
    install("loop.step@step=3=raise")
    with pytest.raises(faults.InjectedError, match=r"loop\.step@step=3=raise"):
        faults.hit("loop.step", step=3)


@pytest.mark.parametrize(
    ("action", "code"),
    [("kill", -signal.SIGKILL), ("exit:75", 75), ("exit:0", 0), ("exit:255", 255)],
)
@pytest.mark.launches
def test_a_process_ends_at_once_with_no_handler_and_no_clean_up(action, code):
    body = "try:\n faults.hit('loop.step', step=1)\nfinally:\n print('cleaned up', flush=True)"
    done = ended(f"loop.step={action}", body)
    assert (done.returncode, done.stdout) == (code, "")


@pytest.mark.parametrize("action", ["term", "int", "usr1"])
@pytest.mark.launches
def test_a_signal_reaches_the_handler_and_the_process_goes_on(action):
    name = f"SIG{action.upper()}"
    body = f"""
import signal
heard = []
signal.signal(signal.{name}, lambda number, frame: heard.append(number))
print(faults.hit('loop.step', step=1), [signal.Signals(n).name for n in heard])
"""
    done = ended(f"loop.step={action}", body)
    assert (done.returncode, done.stdout.strip()) == (0, f"None ['{name}']")


@pytest.mark.parametrize("action", ["delay:0.05", "hang:0.05"])
def test_a_delay_and_a_short_hang_take_their_time_and_go_on(action):
    install(f"save.write={action}")
    began = time.perf_counter()
    assert faults.hit("save.write") is None
    assert time.perf_counter() - began >= 0.05


@pytest.mark.launches
def test_a_hang_lasts_until_the_process_is_ended():
    start = "import os; from llmtrain import faults; faults.install(os.environ)\n"
    body = "print('before', flush=True); faults.hit('loop.step'); print('after', flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", start + body],
        env={"PYTHONPATH": str(ROOT), "LLMTRAIN_FAULTS": "loop.step=hang"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "before\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    process.kill()
    assert process.communicate()[0] == ""


def test_truncate_leaves_half_of_the_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    install("load.read=truncate")
    assert faults.hit("load.read", path=path) is None
    assert path.read_bytes() == bytes(range(50))


@pytest.mark.parametrize(("action", "at"), [("flip", 50), ("flip:0", 0), ("flip:99", 99)])
def test_flip_changes_one_bit(tmp_path, action, at):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    install(f"load.read={action}")
    faults.hit("load.read", path=path)
    changed = path.read_bytes()
    assert [i for i in range(100) if changed[i] != i] == [at]
    assert (changed[at] ^ at).bit_count() == 1


@pytest.mark.parametrize("action", ["flip", "flip:100", "truncate"])
def test_damage_without_a_byte_to_damage_is_a_defect_of_the_test(tmp_path, action):
    (tmp_path / "file").write_bytes(b"\0" * (0 if action == "flip" else 100))
    install(f"load.scan={action}")
    with pytest.raises(faults.InjectedError, match=r"load\.scan"):
        faults.hit("load.scan", path=None if action == "truncate" else tmp_path / "file")


def test_short_is_told_to_the_caller_behind_what_else_strikes_there(tmp_path):
    (tmp_path / "file").write_bytes(b"\0\0")
    install("save.write=truncate;save.write@step=4=short")
    assert faults.hit("save.write", step=8, path=tmp_path / "file") is None
    assert faults.hit("save.write", step=4, path=tmp_path / "file") == "short"
    assert (tmp_path / "file").read_bytes() == b""


# The grammar.


@pytest.mark.parametrize("point", faults.POINTS)
@pytest.mark.parametrize("action", ["kill", "exit:1", "raise", "enospc", "eio", "hang", "hang:0.5"])
def test_every_point_takes_every_kind_of_action(point, action):
    install(f"{point}@step=4@rank=1@nth=2@bytes=70%@p=0.01,seed=3={action}")


@pytest.mark.parametrize(
    "action", ["delay:2", "term", "int", "usr1", "truncate", "flip", "flip:7", "short"]
)
def test_the_other_actions_are_understood(action):
    install(f"save.write={action}")


@pytest.mark.parametrize(
    "wrong",
    [
        "save.write",
        "=kill",
        "kill",
        "save.wrote=kill",
        "save.write=",
        "save.write=Kill",
        "save.write=kill:9",
        "save.write=exit",
        "save.write=exit:256",
        "save.write=exit:-1",
        "save.write=exit:x",
        "save.write=delay",
        "save.write=delay:-1",
        "save.write=delay:nan",
        "save.write=hang:soon",
        "save.write=flip:-1",
        "save.write=flip:1.5",
        "save.write@=kill",
        "save.write@step=kill",
        "save.write@step==kill",
        "save.write@step=-1=kill",
        "save.write@step=4.0=kill",
        "save.write@steps=4=kill",
        "save.write@rank=x=kill",
        "save.write@nth=0=kill",
        "save.write@bytes=70.5=kill",
        "save.write@bytes=%=kill",
        "save.write@bytes=nan%=kill",
        "save.write@p=1.5=kill",
        "save.write@p=0.1,seed=x=kill",
        "save.write@seed=1=kill",
        "save.write@nth=1@nth=2=kill",
        "save.write kill",
        "save.fsync=eio;save.write=boom",
    ],
)
def test_what_is_not_understood_is_refused_and_named(wrong):
    part = wrong.rpartition(";")[2]
    with pytest.raises(ValueError, match=re.escape(part)):
        install(wrong)


def test_a_part_without_an_action_is_told_that_it_lacks_one():
    with pytest.raises(ValueError, match=r"^save\.write: it lacks =action$"):
        install("save.write")


def test_faults_that_do_not_parse_are_refused_with_the_grammar(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMTRAIN_FAULTS", "save.wrote@step=4=kill")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    wrong = Config.model_validate(
        {
            "run": {"dir": None},
            "model": {"config": {"model_type": "gpt2"}, "tokenizer": "sample"},
            "data": {"sources": [{"path": "sample"}]},
            "training": {"steps": 4},
        }
    )
    with pytest.raises(UserError) as refused:
        llmtrain.train(wrong)
    assert refused.value.exit_code == 2
    text = str(refused.value)
    assert "run.dir" in text  # all problems at once
    assert "LLMTRAIN_FAULTS = save.wrote@step=4=kill: no failpoint 'save.wrote'" in text
    assert faults.GRAMMAR in text


# The package.


def hits():
    """The point of each `faults.hit` in the package."""
    return [
        node.args[0].value
        for path in (ROOT / "llmtrain").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "faults.hit"
        if isinstance(node.args[0], ast.Constant)
    ]


def test_each_hit_in_the_package_is_a_point_that_the_grammar_knows():
    assert set(hits()) <= set(faults.POINTS)


def test_a_failpoint_stands_in_the_code_once():
    assert [point for point, times in Counter(hits()).items() if times > 1] == []
