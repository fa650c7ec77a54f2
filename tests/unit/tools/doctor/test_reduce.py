import os
import re
import stat
import sys

import pytest
from helpers.cases import case

from llmtrain.tools.doctor import machine

QUIET = {"CUDA_VISIBLE_DEVICES": ""}


def python_that(tmp_path, body):
    """A stand-in for the interpreter of the ranks."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.launches
def test_two_real_processes_sum_and_say_how_fast():
    looked = machine.all_reduce(case(env=QUIET))
    assert looked.state == "ok", looked.found
    rate = re.search(r"\(gloo\) sum ([\d,]+) MB/s", looked.found)
    assert rate
    assert 10 < int(rate[1].replace(",", "")) < 1_000_000


def test_traces_of_a_launcher_do_not_reach_the_processes():
    stale = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "192.0.2.1", "LOCAL_RANK": "7"}
    assert not machine._environment(case(env=stale)).keys() & stale.keys()


@pytest.mark.launches
def test_a_network_that_is_not_there_is_an_error_with_what_gloo_says():
    looked = machine.all_reduce(case(env={**QUIET, "GLOO_SOCKET_IFNAME": "nowhere0"}))
    assert looked.state == "error"
    assert "nowhere0" in looked.found
    assert "GLOO_SOCKET_IFNAME" in looked.remedy


@pytest.mark.launches
def test_processes_that_hang_are_ended_and_said(tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    hanging = python_that(tmp_path, f"echo $$ >> {pids}; exec sleep 600")
    monkeypatch.setattr(sys, "executable", hanging)
    looked = machine.all_reduce(case(env=QUIET), allowed_seconds=1.0)
    assert looked.state == "error"
    assert "did not finish in 1 s" in looked.found
    for pid in map(int, pids.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.launches
def test_a_process_that_dies_is_said_with_its_last_words(tmp_path, monkeypatch):
    dying = python_that(tmp_path, "echo 'no CUDA-capable device is detected' >&2; exit 1")
    monkeypatch.setattr(sys, "executable", dying)
    looked = machine.all_reduce(case(env=QUIET))
    assert looked.state == "error"
    assert "rank 0 of 2 (gloo) failed: no CUDA-capable device is detected" in looked.found
