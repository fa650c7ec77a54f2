"""What a process says that waits for others; that ranks meet is in tests/distributed."""

import os
from datetime import timedelta

import pytest
from helpers.ranks import free_port
from torch.distributed import DistError, HashStore, TCPStore

from llmtrain.distributed import ranks
from llmtrain.distributed.ranks import Meeting, meet


@pytest.mark.parametrize(
    ("rank", "other"), [(0, "rank 1"), pytest.param(1, "rank 0", marks=pytest.mark.wide)]
)
def test_a_process_that_waits_says_for_whom_where_and_what_to_unset(
    monkeypatch, caplog, capfd, rank, other
):
    port = free_port()
    env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistError):
        meet(timedelta(seconds=2), tell_after=0.1)
    said = caplog.text if rank == 0 else capfd.readouterr().err
    assert f"rank {rank} of 2 has waited 0.1 s for {other} at 127.0.0.1:{port}" in said
    assert said.count("unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT\n") == 1


def test_a_process_alone_waits_for_nobody(monkeypatch, caplog):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert meet(timedelta(seconds=2), tell_after=0).world_size == 1
    assert caplog.text == ""


def test_a_rank_that_is_ahead_mixes_nothing_up_and_rank_0_waits_until_all_have_read():
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    first, second = (Meeting(store, rank, 2) for rank in range(2))
    assert [second.gather(b"a"), second.gather(b"b")] == [[], []]
    assert [first.gather(b""), first.gather(b"c")] == [[b"", b"a"], [b"c", b"b"]]
    with pytest.raises(DistError):
        first.broadcast(b"plan")
    assert second.broadcast(b"") == b"plan"


def test_ranks_of_a_further_attempt_wait_for_the_port_of_that_attempt(monkeypatch):
    launchers = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(ranks, "_opened", [])

    def port(rank, attempt, seconds=60):
        monkeypatch.setattr(ranks, "_met", set())
        env = {"RANK": rank, "TORCHELASTIC_RESTART_COUNT": attempt, "MASTER_PORT": launchers.port}
        env |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": True}
        for name, value in env.items():
            monkeypatch.setenv(name, str(value))
        ranks.meet_again(timedelta(seconds=seconds))
        return os.environ["MASTER_PORT"]

    first = port(0, 1)
    assert port(1, 1) == first != str(launchers.port)
    with pytest.raises(DistError):
        port(1, 2, seconds=0.5)
    assert port(0, 2) == port(1, 2) != first
