"""Check whether the processes of a run would find each other.

That depends on the environment, accelerate's files and the addresses in them.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path

from llmtrain.distributed.launch.environment import (
    awaited,
    check_environment,
    launcher_problems,
    launcher_variables,
    world_size,
)
from llmtrain.distributed.launch.keys import example
from llmtrain.tools.doctor.case import Case, Verdict, error, join, ok, refusal, warning
from llmtrain.tools.launch.file import LaunchFile

_REACH_SECONDS = 5.0
_HELLO = b"hello"


def environment(case: Case) -> Verdict:
    """Check for variables that a launcher left behind, or that contradict the config."""
    if "LOCAL_RANK" in case.env and (size := world_size(case.env)) > 1:
        found = (
            f"RANK = {case.env.get('RANK')}, WORLD_SIZE = {size}: a launcher started this, or left "
            f"its variables behind, and llmtrain train would wait for {awaited(case.env)}"
        )
        names = " ".join(launcher_variables(case.env))
        return error(found, f"unset {names}; under a launcher: start llmtrain doctor by itself")
    if "LOCAL_RANK" in case.env:
        found = f"LOCAL_RANK = {case.env['LOCAL_RANK']}: a launcher started this"
        return warning(found, "start llmtrain doctor by itself, once on each machine")
    if case.config is None or case.launch is not None:
        problems = launcher_problems(case.env)
        return refusal(problems) if problems else ok("no traces of a launcher")
    check_environment(case.env, case.config.distributed, case.config.training)
    return ok("nothing that contradicts the config, no traces of a launcher")


def default_file(case: Case) -> Verdict:
    """Check for the config file that accelerate uses when none is named."""
    from accelerate.commands.config.config_args import default_config_file

    path = Path(default_config_file)
    if not path.is_file():
        return ok("no default config of accelerate")
    if case.launch is not None:
        return ok(f"{path} is there; {case.launch.path} is named and takes its place")
    found = f"accelerate launch without --config_file takes {path}, which nobody named"
    return warning(found, f"name one: --config_file FILE, such as {example('ddp')}")


def describe_launch(file: LaunchFile) -> Verdict:
    """Return in words what a valid file of accelerate starts."""
    machines = f"on {file.machines} machines" if file.machines > 1 else "on this machine"
    count = f"{file.processes} process{'es' * (file.processes > 1)}"
    return ok(f"{file.path}: {count} {machines}, {file.values.get('distributed_type', 'NO')}")


def rendezvous(case: Case) -> Verdict:
    """Check whether ranks can meet: on a free port here, and at the launch file's address."""
    return join([_free_port(), *_own_name(case), *_named_address(case)])


def _free_port() -> Verdict:
    """Bind a free port of this machine and send some bytes through it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_REACH_SECONDS)
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), _REACH_SECONDS) as client:
            client.sendall(_HELLO)
            heard, _ = server.accept()
            with heard:
                heard.settimeout(_REACH_SECONDS)
                if heard.recv(len(_HELLO)) != _HELLO:
                    found = f"port {port} of 127.0.0.1 does not say what was sent"
                    return error(found, "look for a proxy or firewall on the loopback device")
    return ok(f"port {port} of 127.0.0.1 is free and answers")


def _own_name(case: Case) -> Iterator[Verdict]:
    """Warn if other machines cannot reach this one by its name, which accelerate gives to them."""
    if case.machines == 1:
        return
    name = socket.gethostname()
    addresses = _addresses(name)
    if not addresses or all(ipaddress.ip_address(one).is_loopback for one in addresses):
        meaning = ", ".join(addresses) or "nothing"
        found = f"this machine's name {name} means {meaning}, which no other machine can reach"
        remedy = f"launch by llmtrain train --accelerate FILE, or let {name} mean its address"
        yield warning(found, f"{remedy} (DNS or /etc/hosts)")


def _named_address(case: Case) -> Iterator[Verdict]:
    values = case.launch.values if case.launch else {}
    name, port = values.get("main_process_ip"), values.get("main_process_port")
    if name is None and not isinstance(port, int):
        return
    host = str(name) if name is not None else "127.0.0.1"
    addresses = _addresses(host)
    if not addresses:
        yield error(f"main_process_ip {host} is no address", "the first machine's name or address")
    elif case.machines > 1 and ipaddress.ip_address(addresses[0]).is_loopback:
        found = f"main_process_ip {host} ({addresses[0]}) is every machine's own loopback"
        yield error(found, "the address of the first machine that the others reach it by")
    elif isinstance(port, int):
        yield _port(host, addresses[0], port, case)


def _addresses(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))


def _port(host: str, address: str, port: int, case: Case) -> Verdict:
    """Bind the port if the address is this machine's; else try to connect to it."""
    place = f"{host}:{port}"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if port == 0:
        return ok(f"{host}: any free port")
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((address, port))
        except OSError as failed:
            if failed.errno == errno.EADDRNOTAVAIL:
                return _knock(place, address, port, case)
            found = f"{place} cannot be bound: {failed.strerror}"
            return error(found, "main_process_port: another one, or end what listens there")
    return ok(f"{place} is this machine's, and free")


def _knock(place: str, address: str, port: int, case: Case) -> Verdict:
    """Connect to a port of another machine: it must answer, but nothing needs to listen yet."""
    rank = case.launch.values.get("machine_rank") if case.launch else None
    if case.machines == 1 or (rank == 0 and case.launch and case.launch.rendezvous == "static"):
        found = f"{place} is not an address of this machine, where rank 0 would listen"
        return error(found, "main_process_ip: an address of this machine")
    try:
        socket.create_connection((address, port), _REACH_SECONDS).close()
    except ConnectionRefusedError:
        return ok(f"{place} is reached; nobody listens there yet")
    except OSError as failed:
        found = f"{place} does not answer ({failed.strerror or failed})"
        return error(found, "see that the machine is up, and open the port in its firewall")
    return ok(f"{place} is reached, and somebody listens there")
