import errno
import socket
from contextlib import closing

import pytest
from helpers.cases import case

from llmtrain.errors import UserError
from llmtrain.tools.doctor import machine as launches

HERE = {"main_process_ip": "127.0.0.1", "num_machines": 1}


@pytest.fixture
def busy():
    """A port of this machine that somebody listens on."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


def free():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


def test_a_clean_environment_is_ok_with_and_without_a_config(tmp_path):
    assert launches.environment(case()).state == "ok"
    assert launches.environment(case(tmp_path)).state == "ok"


def test_a_variable_that_a_launcher_left_is_named(tmp_path):
    env = {"PMI_SIZE": "2"}
    looked = launches.environment(case(env=env))
    assert looked.state == "error"
    assert "PMI_SIZE = 2" in looked.found
    assert "unset PMI_SIZE" in looked.remedy
    with pytest.raises(UserError, match="PMI_SIZE"):
        launches.environment(case(tmp_path, env=env))


def test_what_contradicts_the_config_is_refused_as_at_a_start(tmp_path):
    env = {"ACCELERATE_MIXED_PRECISION": "fp16"}
    with pytest.raises(UserError, match="fp16"):
        launches.environment(case(tmp_path, env=env))


def test_under_a_launcher_it_says_so():
    looked = launches.environment(case(env={"LOCAL_RANK": "0", "WORLD_SIZE": "1"}))
    assert looked.state == "warning"
    assert "by itself" in looked.remedy


def test_variables_with_which_a_start_would_wait_for_others_are_an_error():
    env = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "PATH": "/bin"}
    env |= {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
    looked = launches.environment(case(env=env))
    assert looked.state == "error"
    assert "would wait for rank 0 at 10.0.0.7:29500" in looked.found
    assert "unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT;" in looked.remedy
    assert "by itself" in looked.remedy


def test_a_default_config_that_nobody_named_is_a_warning(tmp_path, monkeypatch):
    path = tmp_path / "default_config.yaml"
    module = "accelerate.commands.config.config_args.default_config_file"
    monkeypatch.setattr(module, str(path))
    assert launches.default_file(case()).state == "ok"
    path.write_text("num_processes: 8\n")
    looked = launches.default_file(case())
    assert looked.state == "warning"
    assert str(path) in looked.found
    assert "--config_file" in looked.remedy
    assert launches.default_file(case(launch=HERE)).state == "ok"


def test_what_a_file_starts_is_said():
    looked = launches.describe_launch(case(launch={"num_processes": 2}).launch)
    assert looked.state == "ok"
    assert looked.found == "accelerate.yaml: 2 processes on this machine, NO"


def test_a_free_port_is_found_and_answers():
    looked = launches.rendezvous(case())
    assert looked.state == "ok"
    assert "is free and answers" in looked.found


def test_a_machine_without_ports_is_an_error(monkeypatch):
    from llmtrain.tools.doctor.context import run_check

    def refuse(address, *rest):
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    broken = run_check(lambda: launches.rendezvous(case()))
    assert broken.state == "error"
    assert "Cannot assign requested address" in broken.found


def test_a_busy_port_of_the_file_is_an_error_and_a_free_one_is_not(busy):
    looked = launches.rendezvous(case(launch={**HERE, "main_process_port": busy}))
    assert looked.state == "error"
    assert f"127.0.0.1:{busy} cannot be bound: Address already in use" in looked.found
    looked = launches.rendezvous(case(launch={**HERE, "main_process_port": free()}))
    assert looked.state == "ok"
    assert "is this machine's, and free" in looked.found
    assert launches.rendezvous(case(launch={"main_process_port": busy})).state == "error"
    assert launches.rendezvous(case(launch={"main_process_port": 0})).state == "ok"


def test_the_loopback_address_cannot_join_two_machines():
    file = {"main_process_ip": "localhost", "main_process_port": 29500, "num_machines": 2}
    looked = launches.rendezvous(case(launch=file))
    assert looked.state == "error"
    assert "every machine's own loopback" in looked.found


def test_a_name_that_is_no_address_is_an_error():
    file = {"main_process_ip": "nowhere.invalid", "main_process_port": 29500}
    looked = launches.rendezvous(case(launch=file))
    assert looked.state == "error"
    assert "nowhere.invalid is no address" in looked.found


ELSEWHERE = {
    "main_process_ip": "192.0.2.1",  # set aside for documentation: no machine has it
    "main_process_port": 29500,
    "num_machines": 2,
    "num_processes": 4,
}


def answering(monkeypatch, error):
    """Another machine behaves like this when its port is knocked at."""
    real = socket.create_connection

    def connect(address, *rest):
        if address[0] != "192.0.2.1":
            return real(address, *rest)
        if error is not None:
            raise error
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)


@pytest.mark.parametrize(
    ("error", "state", "found"),
    [
        (None, "ok", "somebody listens there"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "ok", "nobody listens there yet"),
        (TimeoutError("timed out"), "error", "does not answer (timed out)"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "error", "No route to host"),
    ],
)
def test_another_machines_port_is_knocked_at(monkeypatch, error, state, found):
    monkeypatch.setattr(socket, "gethostname", lambda: "192.0.2.2")
    answering(monkeypatch, error)
    looked = launches.rendezvous(case(launch={**ELSEWHERE, "machine_rank": 1}))
    assert looked.state == state
    assert found in looked.found


def test_the_first_machine_must_have_the_address_that_the_file_names():
    looked = launches.rendezvous(case(launch={**ELSEWHERE, "machine_rank": 0}))
    assert looked.state == "error"
    assert "not an address of this machine" in looked.found


def test_a_name_of_this_machine_that_others_cannot_use_is_a_warning(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    answering(monkeypatch, None)
    elastic = {**ELSEWHERE, "rdzv_backend": "c10d"}
    looked = launches.rendezvous(case(launch=elastic))
    assert looked.state == "warning"
    assert "localhost means" in looked.found
