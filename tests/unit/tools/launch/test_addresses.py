"""What a machine tells its launcher about the others."""

import socket

import pytest

from llmtrain.errors import UserError
from llmtrain.tools.launch.launch import meeting


def test_the_machine_that_all_meet_at_knows_itself() -> None:
    options, env = meeting("c10d", "127.0.0.1")
    assert options == ["--rdzv_backend", "c10d", "--rdzv_conf", "is_host=1"]
    assert env["PET_LOCAL_ADDR"] == "127.0.0.1"


def test_a_name_is_handed_on_as_the_others_know_it() -> None:
    options, env = meeting("c10d", "localhost")
    assert options[-1] == "is_host=1"
    assert env["PET_LOCAL_ADDR"] == "localhost"


def test_another_machine_gives_the_address_that_leads_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    class Routed(socket.socket):
        """A machine whose way to 10.1.0.1 begins at 10.1.0.2."""

        def connect(self, address: object) -> None:
            asked.append(address)

        def getsockname(self) -> tuple[str, int]:
            return "10.1.0.2", 40_000

    monkeypatch.setattr(socket, "socket", Routed)
    options, env = meeting("c10d", "10.1.0.1")
    assert options[-1] == "is_host=0"
    assert env["PET_LOCAL_ADDR"] == "10.1.0.2"
    assert asked == [("10.1.0.1", 9)]


def test_ranks_of_a_second_attempt_do_not_meet_the_addresses_of_the_first() -> None:
    assert meeting("c10d", "127.0.0.1")[1]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_static_machines_have_been_told_who_they_are() -> None:
    options, env = meeting("static", "10.1.0.1")
    assert options == ["--rdzv_backend", "static"]
    assert env == {}


def test_an_address_that_leads_nowhere_is_refused_by_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UserError, match=r"main_process_ip = node-7\n.*not known") as refused:
        meeting("c10d", "node-7")
    assert refused.value.exit_code == 2
