"""A refusal is the last thing on the screen, also under a launcher that a person has started."""

import os
import subprocess
import sys

import pytest
from helpers.ranks import ROOT

RANK = """
import os, sys
from llmtrain.cli.rank import _leave
_leave(int(sys.argv[1]), "error: 1 problem")
"""
# A launcher waits for its ranks, prints its own lines and ends.
LAUNCHER = """
import subprocess, sys, time
code = subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]]).returncode
time.sleep(0.3)
print("ChildFailedError", file=sys.stderr, flush=True)
sys.exit(1)
"""


def shown(code: int, **env: str) -> list[str]:
    """What a launcher and its rank print; the pipe ends when the last of them has closed it."""
    words = [sys.executable, "-c", LAUNCHER, RANK, str(code)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", **env}
    done = subprocess.run(words, env=environ, stderr=subprocess.PIPE, text=True, timeout=60)
    return done.stderr.splitlines()


@pytest.mark.launches
def test_a_refusal_is_repeated_below_what_the_launcher_prints() -> None:
    said = shown(2, TORCHELASTIC_RUN_ID="none")
    assert said == ["error: 1 problem", "ChildFailedError", "error: 1 problem"]


@pytest.mark.launches
@pytest.mark.parametrize(
    ("code", "env"),
    [
        (1, {"TORCHELASTIC_RUN_ID": "none"}),
        (2, {}),
        (2, {"TORCHELASTIC_RUN_ID": "none"} | {"TORCHELASTIC_RESTART_COUNT": "1"}),
    ],
)
def test_nothing_else_is(code: int, env: dict[str, str]) -> None:
    assert shown(code, **env) == ["error: 1 problem", "ChildFailedError"]
