"""One machine's part of a run on MIN to MAX machines: torch's elastic agent, and where it meets.

    python -m llmtrain.tools.launch.elastic RUN SETTINGS --config_file FILE CONFIG [OVERRIDE …]

    this process, the agent ── rank, rank, …          RUN/rendezvous/1/  state, store
    the agents of other machines ─────────────────────┘

The agents meet in a shared folder, so that no machine is needed more than another. torch's state
machine decides who takes part; this module gives it a place, and does what it leaves open:

    a group is formed again     its ranks are told before they are signalled, and end with 75
    a person stops this agent   the rendezvous is closed, and with it the run ends everywhere
    SIGUSR1, no parent          this machine leaves, and the others continue
    a rank has died             torch signals the others without a note, and they end with 75, too
    a number of machines that does not divide the batch    some of them wait

Ranks are forked from a server that has imported what a rank imports (Python's `forkserver`). So a
new group trains after a second or two where the imports alone would take six, and the first group's
are done while the machines meet. On GPUs nothing is imported before the fork, as some libraries
look for devices when they are imported, and CUDA does not survive a fork.

The trap: torch's own backend for files appends each heartbeat to a log, 49 MB a day for two
machines and 355 MB for eight (measured). Here the state is one small file that is replaced.
"""

import fcntl
import json
import logging
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import TypeVar

from torch.distributed import (  # type: ignore[attr-defined]  # not in __all__
    DistStoreError,
    FileStore,
    PrefixStore,
)
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from llmtrain import system
from llmtrain.distributed.launch.named import is_true
from llmtrain.errors import DISK_FAILED, RESTARTABLE, Problem, RunError, UserError
from llmtrain.rundir import contents, failures
from llmtrain.rundir.lock import try_lock
from llmtrain.rundir.status import read_status
from llmtrain.tools.launch.child import read_exit_report, wait_until
from llmtrain.tools.launch.launch import AgentSettings
from llmtrain.tools.launch.launcher import LauncherLog
from llmtrain.training.stop import CLOSING, LAUNCHED, REGROUP, RESTARTS, STARTED
from llmtrain.types import JsonMapping

T = TypeVar("T")
_BACKEND = "llmtrain"
_KEEP_ALIVE_SECONDS = 1
_KEEP_ALIVE_ATTEMPTS = 4
_DROPPED_SECONDS = 6.0  # without a heartbeat: longer than torch waits for one
_ANSWER_SECONDS = 10.0  # for a disk to answer again
_STORE_SECONDS = 20.0  # for what a machine of a new group writes at once, unless it has died
_EXIT_SECONDS = 5.0  # for the machines of a group that has ended to see each other's end
_SETTLE_SECONDS = 30.0  # for rank 0 on another machine to record how the run has ended
_NEVER = 1_000_000  # restarts: torch counts changes of machines among them, see `Machines`


# What a rank imports: the loop, and what takes long on its way.
_IMPORTED = (
    "llmtrain.cli.main",
    "llmtrain.cli.rank",
    "llmtrain.training.loop",
    "llmtrain.report.page",
    "safetensors.torch",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
)


class EndedError(Exception):
    """The run has ended, or can't go on, for all machines. code: the exit code of the run."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Folder:
    """The folder in which machines meet, with a number for each run of the launch.

        RUN/rendezvous/agents    locked (shared) by each agent while it lives
        RUN/rendezvous/1/        of an earlier launch, closed
        RUN/rendezvous/2/        state, store, settings

    The last agent removes it.
    """

    def __init__(self, root: Path) -> None:
        """Enter the folder; make it if it does not exist."""
        self._root = root
        while True:
            root.mkdir(parents=True, exist_ok=True)
            path = root / "agents"
            try:
                self._agents = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                continue  # the last agent has just removed the folder
            alone = try_lock(self._agents, fcntl.LOCK_EX)
            if alone and system.is_at(path, self._agents):
                for left in root.glob("[0-9]*"):  # by agents that were all killed
                    shutil.rmtree(left)
            fcntl.flock(self._agents, fcntl.LOCK_SH)
            if system.is_at(path, self._agents):
                break
            os.close(self._agents)
        numbers = [int(one.name) for one in root.iterdir() if one.name.isdecimal()]
        newest = max(numbers, default=1)
        self.path = root / str(newest + is_closed(root / str(newest)))
        self.path.mkdir(exist_ok=True)

    def leave(self) -> None:
        """Leave the folder, and remove it if no other agent is there."""
        if try_lock(self._agents, fcntl.LOCK_EX):
            # NFS keeps a name of the file that is still open; the next launch clears it away.
            shutil.rmtree(self._root, ignore_errors=True)
        os.close(self._agents)


def is_closed(folder: Path) -> bool:
    """Whether the launch that met in this folder has ended for all machines."""
    return (folder / "closed").exists()


class _SharedFile(dynamic.RendezvousBackend):
    """The state of a rendezvous in one file. Its token is the state itself.

    written: when this machine last wrote it, as it does with each heartbeat; by `time.monotonic`
    """

    def __init__(self, path: Path) -> None:
        self.written = time.monotonic()
        self._path = path

    @property
    def name(self) -> str:
        """See base class."""
        return _BACKEND

    def get_state(self) -> tuple[bytes, dynamic.Token] | None:
        """See base class."""
        return _patiently(self._read)

    def _read(self) -> tuple[bytes, dynamic.Token] | None:
        try:
            state = self._path.read_bytes()
        except FileNotFoundError:
            return None
        return state, state

    def set_state(
        self, state: bytes, token: dynamic.Token | None = None
    ) -> tuple[bytes, dynamic.Token, bool] | None:
        """See base class."""

        def replace() -> tuple[bytes, dynamic.Token, bool] | None:
            with locked(self._path.with_name("lock")):
                now = self._read()
                if now is None and token is not None:
                    return None
                if now is not None and now[1] != token:
                    return *now, False
                system.write_durably(self._path, state, sync=False)
            self.written = time.monotonic()
            return state, state, True

        return _patiently(replace)


def _patiently(work: Callable[[], T]) -> T:
    """Do what needs the shared folder, again and again for a while if the disk does not answer.

    On NFS, for instance, a file that another machine replaces may be stale for a moment. Raises
    RendezvousConnectionError.
    """
    end = time.monotonic() + _ANSWER_SECONDS
    while True:
        try:
            return work()
        except OSError as error:
            if time.monotonic() >= end:
                raise rendezvous.RendezvousConnectionError(str(error)) from error
        time.sleep(_ANSWER_SECONDS / 50)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock during the block. Raises OSError."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Brief(PrefixStore):
    """A store in which agents wait only briefly for each other's end.

    torch waits five minutes, also for an agent that a person has stopped.
    """

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a wait may take, but no longer than `_EXIT_SECONDS`."""
        super().set_timeout(min(timeout, timedelta(seconds=_EXIT_SECONDS)))


class Machines(rendezvous.RendezvousHandler):
    """torch's rendezvous, with what a run needs between two groups.

    joined: whether this machine has been in a group
    state: what the machines share
    """

    def __init__(
        self, run_dir: Path, folder: Path, settings: AgentSettings, report: Path, regroup: Path
    ) -> None:
        """report: of rank 0, if it is here. regroup: a file; see `stop.REGROUP`."""
        self.joined = False
        self._run_dir, self._folder, self._settings = run_dir, folder, settings
        self._report, self._regroup = report, regroup
        self._groups = self._failed = self._world = 0
        self._before: JsonMapping = {}
        self._marks: dict[Path, tuple[int, int]] = {}
        params = rendezvous.RendezvousParameters(
            _BACKEND,
            str(folder),
            "llmtrain",
            settings.counts[0],
            settings.counts[-1],
            settings.address,
            last_call_timeout=settings.last_call,
            keep_alive_interval=_KEEP_ALIVE_SECONDS,
            keep_alive_max_attempt=_KEEP_ALIVE_ATTEMPTS,
        )
        store = FileStore(str(folder / "store"), -1)
        store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        self.state = _SharedFile(folder / "state")
        self._torchs = dynamic.create_handler(store, self.state, params)

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use a store of their agent; no, rank 0 opens one for each group."""
        return False

    def get_backend(self) -> str:
        """See base class."""
        return _BACKEND

    def get_run_id(self) -> str:
        """See base class."""
        return self._torchs.get_run_id()

    def is_closed(self) -> bool:
        """See base class."""
        return self._torchs.is_closed()

    def set_closed(self) -> None:
        """End the run for all machines. If the disk is away, they notice that this one has gone."""
        with suppress(OSError, rendezvous.RendezvousConnectionError):
            (self._folder / "closed").touch()
            self._torchs.set_closed()

    def shutdown(self) -> bool:
        """Stop taking part, and end the run of the others if it is over.

        It is not over for a machine that has only waited, or that met an error of its own.
        """
        met = sys.exception()  # torch calls this while it raises what its agent has met
        over = met is None or isinstance(
            met, (EndedError, rendezvous.RendezvousClosedError, ChildFailedError)
        )
        if self.joined and over:
            with suppress(OSError):
                (self._folder / "closed").touch()
            return self._torchs.shutdown()
        return True

    def num_nodes_waiting(self) -> int:
        """Return how many machines wait. If any does, the agent signals its ranks next.

        torch drops a machine whose heartbeat was late, as while the disk was away. It sends none
        from then on, and is only counted again in another group; so it waits for one, too.
        """
        if is_closed(self._folder):
            self._regroup.with_name(CLOSING).touch()  # see `Signals.reason_alone`
            return 0
        try:
            waiting = self._torchs.num_nodes_waiting()
        except rendezvous.RendezvousConnectionError as error:
            sys.stderr.write(f"warning: the other machines cannot be seen now: {error}\n")
            return 0  # the ranks go on as long as they can
        waiting += time.monotonic() - self.state.written > _DROPPED_SECONDS
        if waiting:
            self._regroup.touch()
        return waiting

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        """Form a group. Raises EndedError if that would not help."""
        self._judge()
        info = self._meet()
        if info.world_size != self._world:
            self._failed = 0
        self.joined, self._world = True, info.world_size
        self._groups += 1
        self.state.written = time.monotonic()
        self._before, self._marks = read_status(self._run_dir), failures.versions(self._run_dir)
        for file in (self._regroup, self._report):
            file.unlink(missing_ok=True)
        if info.rank == 0:
            groups = self._folder / "groups"
            so_far = int(groups.read_text()) if groups.exists() else 0
            system.write_durably(groups, str(so_far + 1).encode(), sync=False)
        store = _Brief("", info.store)
        used = self._used(info.world_size)
        return rendezvous.RendezvousInfo(store, info.rank, used, info.bootstrap_store_info)  # type: ignore[arg-type]  # as torch's own do

    def _meet(self) -> rendezvous.RendezvousInfo:
        """Wait until this machine is one of those that train."""
        while True:
            try:
                info = self._torchs.next_rendezvous()
            except rendezvous.RendezvousGracefulExitError as error:
                raise rendezvous.RendezvousClosedError(str(error)) from error
            except (rendezvous.RendezvousTimeoutError, DistStoreError):
                continue  # no machine has come yet, or one died while the group was formed
            used = self._used(info.world_size)
            if info.rank < used:
                return info
            sys.stderr.write(
                f"this machine waits: with {info.world_size} machines × {self._settings.processes} "
                f"processes the batch cannot be divided, so {used} of them train\n"
            )
            while not self._torchs.num_nodes_waiting():
                if self._torchs.is_closed():
                    raise rendezvous.RendezvousClosedError
                time.sleep(1.0)

    def _used(self, machines: int) -> int:
        """Return how many of so many machines train: the most that divide the batch."""
        return max(count for count in self._settings.counts if count <= machines)

    def _judge(self) -> None:
        """Raise EndedError if the ranks have ended in a way that another group would repeat.

        Counts failures in a row. A change of machines is none, and neither is a group that has made
        a step. How the run ends is written for the other machines, too.
        """
        if not self._groups:
            return
        reported, now = read_exit_report(self._report), read_status(self._run_dir)
        # A status that has not changed is that of an earlier group: rank 0 died before it had one.
        known = now if now != self._before else {}
        state, exit_code = known.get("state"), known.get("exit_code")
        code, message = reported or (RESTARTABLE, "")
        if reported is None and state in ("finished", "stopped") and exit_code == 0:
            code = 0  # as rank 0 says on another machine
        mark = failures.worst(failures.new_since(self._run_dir, self._marks))
        if mark is not None and mark.is_cause and code in (0, RESTARTABLE):
            code, message = mark.code, f"error: {mark}"
        if code not in (0, UserError.exit_code, DISK_FAILED):
            noted = self._regroup.exists() and state != "failed"
            orderly = code == RESTARTABLE and (
                noted or (state, exit_code) == ("stopped", RESTARTABLE)
            )
            progress = now.get("step") != self._before.get("step")
            self._failed = 0 if progress or orderly else self._failed + 1
            if self._failed <= self._settings.max_restarts:
                return
            why = f"{self._settings.max_restarts} restarts without a step"
            message = f"error: {why}; the last: {message or now.get('reason') or 'no message'}"
        with suppress(OSError):  # on a full disk the others fail as this machine has
            said_to_all = json.dumps([code, message]).encode()
            system.write_durably(self._folder / "closed", said_to_all, sync=False, shared=True)
        raise EndedError(code, message)


class AgentSignals:
    """The signals that the agent gets: whether this machine leaves, or the run ends everywhere."""

    def __init__(self, regroup: Path) -> None:
        self.leaves = False
        self._regroup, self._parent = regroup, os.getppid()
        signals = system.stop_signals()
        for number in signals:
            # The server ignores what it inherits so. Its group is that of this process, and gets
            # the signals that are meant for this one.
            signal.signal(number, signal.SIG_IGN)
        on_cpu = is_true(os.environ, "ACCELERATE_USE_CPU")
        multiprocessing.set_forkserver_preload(list(_IMPORTED if on_cpu else _IMPORTED[:1]))
        forkserver.ensure_running()
        for number in signals:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR1 or os.getppid() != self._parent:
            self.leaves = True
            self._regroup.touch()
        self._regroup.with_name(CLOSING).touch()
        kind = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM  # for the ranks
        raise SignalException(f"received {signal.Signals(number).name}", kind)


def main() -> None:
    """Run the agent of this machine, and write how the run has ended for it."""
    os.environ[STARTED] = str(time.monotonic())
    run_dir, text, *command = sys.argv[1:]
    settings = AgentSettings(**json.loads(text))
    command = command[2:]  # without --config_file FILE, which ranks look for in their ancestors
    log = LauncherLog(contents.launcher_log(Path(run_dir)))
    torchs = logging.getLogger("torch.distributed")
    torchs.handlers, torchs.propagate = [log], False
    report = Path(os.environ[LAUNCHED])
    try:
        code, message = _run(Path(run_dir), settings, report, command)
    except (UserError, RunError) as error:
        code, message = error.exit_code, f"error: {error}"
    finally:
        log.end(os.environ)
    system.write_durably(report, json.dumps([code, message]).encode(), sync=False)
    sys.exit(1 if code else 0)


def _run(
    run_dir: Path, settings: AgentSettings, report: Path, command: Sequence[str]
) -> tuple[int, str]:
    """Take part until the run has ended or this machine leaves; return exit code and message."""
    regroup = Path(os.environ.setdefault(REGROUP, str(report.with_name("regroup"))))
    # torch 2.13 keeps the addresses of ranks for the next group, and some would call dead ones.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    system.set_variables_of_torch(os.environ)
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # the same number of ranks on each machine
    signals = AgentSignals(regroup)
    folder = Folder(run_dir / contents.RENDEZVOUS)
    try:
        _agree(folder.path, settings)
        handler = Machines(run_dir, folder.path, settings, report, regroup)
        rendezvous.rendezvous_handler_registry.register(_BACKEND, lambda _params: handler)
        config = LaunchConfig(
            min_nodes=settings.counts[0],
            max_nodes=settings.counts[-1],
            nproc_per_node=settings.processes,
            run_id="llmtrain",
            rdzv_backend=_BACKEND,
            max_restarts=_NEVER,
            local_addr=settings.address,
            start_method="forkserver",
            signals_to_handle="SIGQUIT",  # the others are ours
        )
        try:
            # The others would wait for a machine that joins before its server has imported.
            ready = multiprocessing.get_context("forkserver").Process(target=len, args=("",))
            ready.start()
            ready.join()
            elastic_launch(config, rank)(folder.path / "groups", command)
        except SignalException:
            if signals.leaves:
                return RESTARTABLE, "this machine has left the run; the same command joins it again"
            if not handler.joined:
                return 0, "stopped before this machine took part"
            handler.set_closed()
        except EndedError as ended:
            return ended.code, str(ended)
        except (rendezvous.RendezvousClosedError, ChildFailedError):
            pass  # what the run says of its end counts
        except (rendezvous.RendezvousError, OSError) as error:
            message, remedy = f"this machine cannot take part: {error}", "give the command again"
            raise RunError(message, RESTARTABLE, remedy) from error
        return _outcome(run_dir, report, folder.path)
    finally:
        folder.leave()


def rank(groups: Path, words: Sequence[str]) -> None:
    """Be a rank, in a process that is forked for it: do what `python -m llmtrain train` does.

    groups: the file that counts the groups so far. words: config and overrides
    """
    os.setsid()  # signals to the agent's group are not meant for ranks
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)  # the server ignores them
    Thread(target=_follow_agent, args=(os.getppid(),), daemon=True).start()
    # The first machine writes the number before the others' ranks need it; only rank 0 does.
    earlier = int(groups.read_text()) - 1 if groups.exists() else 0
    os.environ[RESTARTS] = str(int(os.environ.get(RESTARTS, "0")) + earlier)
    sys.argv = ["llmtrain", "train", *words]
    runpy.run_module("llmtrain", run_name="__main__")


def _follow_agent(server: int) -> None:
    """When the agent ends, end the server, so that its ranks notice that their parent has gone."""
    agent = multiprocessing.parent_process()
    if agent is not None:
        agent.join()
    with suppress(ProcessLookupError):
        os.kill(server, signal.SIGKILL)


def _agree(folder: Path, settings: AgentSettings) -> None:
    """Check that the machine that came first has the same settings, or write them if this is it."""
    path = folder / "settings"
    with locked(folder / "lock"):
        if not path.exists():
            path.write_text(str(settings), encoding="utf-8")
        first = path.read_text(encoding="utf-8")
    if first != str(settings):
        expected = f"{first}, as on the machine that began this run"
        remedy = "the same command on every machine; to change it, stop the run and start it again"
        raise UserError(Problem("--nodes", str(settings), expected, remedy), where="the launch")


def _outcome(run_dir: Path, report: Path, folder: Path) -> tuple[int, str]:
    """Return how the run has ended: as rank 0 says, here or in `status.json`, or who ended it."""
    if (reported := read_exit_report(report)) and reported[0] != RESTARTABLE:
        return reported
    closed = folder / "closed"
    if closed.exists() and closed.stat().st_size and (ended := read_exit_report(closed)):
        return ended  # another machine gave up
    wait_until(lambda: read_status(run_dir).get("state") != "running", _SETTLE_SECONDS)
    status = read_status(run_dir)
    state, reason = status.get("state"), status.get("reason")
    if state in ("finished", "stopped"):  # also by the launcher, if a person closed the run then
        return 0, ""
    if state == "failed":
        return int(status["exit_code"]), f"error: failed at step {status.get('step')} ({reason})"
    return RESTARTABLE, "error: the run ended without a word of rank 0"


if __name__ == "__main__":
    main()
