import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.config import written

from llmtrain.cli import doctor as module
from llmtrain.text import columns
from llmtrain.tools.doctor import doctor as tool
from llmtrain.tools.doctor.context import Verdict

ROOT = Path(__file__).parents[3]
FAST = ["--skip", "all-reduce", "--skip", "devices", "--skip", "compiler"]
CLEAN = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}


def run(*arguments, cwd=ROOT, env=None):
    command = [sys.executable, "-m", "llmtrain", "doctor", *arguments]
    own = CLEAN | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | (env or {})
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=own, check=False)


@pytest.mark.launches
def test_the_quickstart_is_ready_to_start(tmp_path):
    done = run(str(ROOT / "configs" / "quickstart.yaml"), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    checks = json.loads(done.stdout)["checks"]
    assert {"devices", "all-reduce", "directory", "model", "disk", "data"} <= {
        check["name"] for check in checks
    }
    assert all(check.keys() == {"name", "state", "found", "remedy"} for check in checks)
    assert {check["state"] for check in checks} <= {"ok", "warning"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.launches
def test_json_is_alone_on_stdout_and_an_error_is_code_2(tmp_path):
    path = str(written(tmp_path))
    done = run(path, "run.dir=/proc/run", "--json", *FAST, env={"PMI_SIZE": "2"})
    assert done.returncode == 2
    assert done.stdout.count("\n") == 1
    states = {check["name"]: check["state"] for check in json.loads(done.stdout)["checks"]}
    assert (states["directory"], states["environment"]) == ("error", "error")
    assert "Traceback" not in done.stderr


@pytest.mark.launches
def test_people_get_lines_of_80_columns_and_a_count(tmp_path):
    done = run(str(tmp_path / "none.yaml"), *FAST)
    assert done.returncode == 2
    assert done.stderr == ""
    *shown, last = done.stdout.splitlines()
    assert shown[0].startswith("error    config       ")
    assert all(columns(line) <= 80 for line in shown)
    assert last.endswith("1 error")
    assert "\033" not in done.stdout


def test_a_diagnosis_is_json_with_the_four_fields_and_fails_by_an_error_alone(monkeypatch, capsys):
    memory = ("memory", Verdict("warning", "little", "buy some"))
    disk = ("disk", Verdict("error", "full", "make room"))
    for checks, code in (((memory, disk), 2), ((memory,), 0)):
        monkeypatch.setattr(tool, "doctor", lambda *given, checks=checks, **options: iter(checks))
        assert module.show(None, [], None, [], as_json=True) == code
        shown = json.loads(capsys.readouterr().out)
        assert shown == {
            "checks": [
                {"name": "memory", "state": "warning", "found": "little", "remedy": "buy some"},
                {"name": "disk", "state": "error", "found": "full", "remedy": "make room"},
            ][: len(checks)]
        }


BAD = Verdict("error", "no room for \x1b[2J the run, " * 5, "free some")


def test_a_line_is_harmless_and_its_remedy_stands_below():
    shown = list(module.lines("disk", BAD, colours=False))
    assert shown[0].startswith("error    disk         no room")
    assert "\x1b" not in "".join(shown)
    assert shown[-1] == f"{'':22}try: free some"
    assert all(columns(line) <= 80 for line in shown)


def test_colours_are_for_terminals_without_no_color(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert module._in_colours()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not module._in_colours()
    coloured = "".join(module.lines("disk", BAD, colours=True))
    assert coloured.startswith("\x1b[31merror    \x1b[0m")


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (["ok", "ok"], "2 checks: all is well"),
        (["ok", "warning", "error", "error"], "4 checks: 2 errors, 1 warning"),
    ],
)
def test_the_last_line_counts(states, said):
    assert module.summary(states) == said
