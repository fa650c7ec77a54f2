"""Runs to strike, straight runs to compare with, and what a failed test says.

With FAULTS_REPORT=1 what became of each scenario is written down: `benchmarks/results/faults.json`
and docs/reference/faults.md. Scenarios that were not run keep what they had on this machine.
"""

import datetime
import json
import os
import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from helpers import fault_matrix
from helpers.faults import FaultyRun, Outcome, faulty_config

_RUNS = pytest.StashKey[list[FaultyRun]]()
_RESULTS: dict[str, dict[str, Any]] = {}  # by test


@pytest.fixture
def faulty(server, tmp_path, request):
    """`faulty(world_size=2, strategy="ddp", name="a", **changes)`: a run that has not started.

    Several in one test need several names. Behind the test each is checked, see `check_clean`.
    """
    runs = request.node.stash.setdefault(_RUNS, [])

    def make(world_size=2, strategy="ddp", name="a", **changes):
        folder = tmp_path / name
        config = faulty_config(folder / "run", world_size, strategy, **changes)
        runs.append(FaultyRun(server, folder, world_size, config))
        return runs[-1]

    yield make
    try:
        for run in runs:
            run.check_clean()
    finally:
        for run in runs:
            run.end()


@pytest.fixture(scope="session")
def straight_run(server, tmp_path_factory):
    """`straight_run(2)`: a run that nothing has struck, from its first to its last step."""
    known: dict[tuple[int, str], FaultyRun] = {}

    def made(world_size=2, strategy="ddp"):
        key = (world_size, strategy)
        if key not in known:
            folder = tmp_path_factory.mktemp(f"straight-{world_size}-{strategy}")
            config = faulty_config(folder / "run", world_size, strategy)
            run = FaultyRun(server, folder, world_size, config)
            assert run.launch() == [0] * world_size, run.output()
            run.check_clean()
            known[key] = run
        return known[key]

    return made


@pytest.fixture(scope="session")
def straight(straight_run):
    """`straight(2)`, `straight(3, "fsdp2")`: what the run that nothing strikes ends with."""
    known: dict[tuple[int, str], Outcome] = {}

    def outcome(world_size=2, strategy="ddp"):
        key = (world_size, strategy)
        if key not in known:
            known[key] = straight_run(*key).outcome()
        return known[key]

    return outcome


@pytest.fixture
def finished(faulty, straight_run):
    """`finished(2)`: a copy of the straight run's directory, to be damaged and started again."""

    def copied(world_size=2, strategy="ddp", **changes):
        run = faulty(world_size, strategy, **changes)
        shutil.copytree(straight_run(world_size, strategy).run_dir, run.run_dir)
        return run

    return copied


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A failure says how to see it again."""
    report = yield
    runs = item.stash.get(_RUNS, [])
    if report.failed:
        name = item.nodeid.removesuffix("@faults")  # the group that xdist puts behind it
        report.sections.append(("replay", f"pytest '{name}'"))
    for run in runs if report.failed else []:
        report.sections.append((f"replay of {run.folder.name}", run.replay()))
        report.sections.append((f"output of {run.folder.name}", run.output()[-6000:]))
    return report


def pytest_runtest_logreport(report):
    """Keep what became of a test of a scenario; a failure in any phase counts."""
    if not fault_matrix.ids(report.nodeid):
        return
    known = _RESULTS.setdefault(
        report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0, "note": ""}
    )
    known["seconds"] = round(known["seconds"] + report.duration, 1)
    if report.outcome != "passed":
        known["outcome"] = report.outcome
    if report.skipped and isinstance(report.longrepr, tuple):
        known["note"] = report.longrepr[2].removeprefix("Skipped: ")
    known["note"] = dict(report.user_properties).get("histogram", known["note"])


def pytest_terminal_summary(terminalreporter):
    """What random faults struck."""
    for one in _RESULTS.values():
        if one["outcome"] == "passed" and one["note"]:
            terminalreporter.write_line(f"{one['test']}\n{one['note']}")


def pytest_sessionfinish(session):
    """Write results and page, where that is asked for."""
    if os.environ.get("FAULTS_REPORT") != "1" or hasattr(session.config, "workerinput"):
        return
    here, path = _machine(), fault_matrix.RESULTS
    before = fault_matrix.load() if path.exists() else {"machine": {}, "scenarios": {}}
    same = all(here[key] == before["machine"].get(key) for key in ("cpu", "cpus", "torch"))
    scenarios: dict[str, list[dict[str, Any]]] = {}
    for one in _RESULTS.values():
        for name in fault_matrix.ids(one["test"]):
            scenarios.setdefault(name, []).append(one)
    kept = before["scenarios"] if same else {}
    found = {"machine": here, "scenarios": dict(sorted((kept | scenarios).items()))}
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    fault_matrix.PAGE.write_text(fault_matrix.page(found), encoding="utf-8")


def _machine():
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": model or platform.processor(),
        "cpus": os.cpu_count(),
        "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
    }
