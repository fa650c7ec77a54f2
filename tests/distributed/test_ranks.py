"""Votes and broadcasts between real processes."""

import json
import subprocess
import sys
from pathlib import Path

from helpers.ranks import ROOT
from helpers.talk import OPS

from llmtrain.distributed.ranks import lost_peer


def test_three_ranks_hear_the_same(server, tmp_path):
    output = tmp_path / "heard"
    codes = server.run(["call", "helpers.talk", "talk", str(output)], 3, tmp_path)
    assert codes == [0, 0, 0], (tmp_path / "output.txt").read_text()
    heard = [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(3)]
    assert heard[0]["gathered"] == ["", "x", "xx"]
    assert heard[0]["nothing"] == ["", "", ""]
    assert heard[0]["bodies"] == ["body 0", "body 1", "body 2"]
    for one in heard:
        assert one["broadcast"] == "from 0"
        assert one["zero"] == "zero"
        assert one["highest"] == 6
        assert one["failures"] == ["rank 1: OSError: No space left (weights)"]
        assert one["error"][1] == 2
        assert "key = 1" in one["error"][2]
    assert [one["error"][0] for one in heard] == ["peer", "peer", "own"]
    assert heard[1]["gathered"] == heard[1]["bodies"] == []


def test_a_lost_peer_is_known_by_what_any_collective_says(server, tmp_path):
    output = tmp_path / "heard"
    codes = server.run(["call", "helpers.talk", "lose", str(output)], 2, tmp_path)
    assert codes == [0, 9], (tmp_path / "output.txt").read_text()
    heard = json.loads(output.read_text())
    assert set(heard) == set(OPS)
    assert {name: said for name, (known, said) in heard.items() if not known} == {}


# Where torch is a CUDA build, ranks that are forked after a backward have none themselves.
COUNTED = """
import torch
from helpers import rank_server
from llmtrain.model import count

rank_server.forbid_backward()
rank_server.use()
print(len(count._known))
torch.ones(1, requires_grad=True).sum().backward()
"""


def test_the_server_of_the_ranks_has_counts_and_runs_no_backward():
    ended = subprocess.run(
        [sys.executable, "-c", COUNTED],
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert ended.stdout.splitlines()[-1:] == ["4"], ended.stderr
    assert ended.returncode == 1
    assert "no fork has a backward after one in the process it is forked from" in ended.stderr


def test_a_lost_peer_is_told_from_other_errors():
    assert lost_peer(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4242"))
    assert lost_peer(RuntimeError("Timed out waiting 20000ms for recv operation to complete"))
    assert lost_peer(RuntimeError("[gloo] Read error [10.0.0.2]:4242: No route to host"))
    assert not lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not lost_peer(ValueError("Connection closed by peer"))
