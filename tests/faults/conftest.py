"""Runs to strike, straight runs to compare with, and what a failed test says."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.faults import FaultyRun, Outcome, faulty_config
from helpers.ranks import Server

_RUNS = pytest.StashKey[list[FaultyRun]]()

MakeRun = Callable[..., FaultyRun]


@pytest.fixture
def faulty(
    server: Server, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., FaultyRun]]:
    """`faulty(world_size=2, strategy="ddp", name="a", **changes)`: a run that has not started.

    Several in one test need several names. Behind the test each is checked, see `check_clean`.
    """
    runs = request.node.stash.setdefault(_RUNS, [])

    def make(
        world_size: int = 2, strategy: str = "ddp", name: str = "a", **changes: Any
    ) -> FaultyRun:
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
def straight_run(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, str], FaultyRun]:
    """`straight_run(2)`: a run that nothing has struck, from its first to its last step."""
    known: dict[tuple[int, str], FaultyRun] = {}

    def made(world_size: int = 2, strategy: str = "ddp") -> FaultyRun:
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
def straight(straight_run: Callable[[int, str], FaultyRun]) -> Callable[[int, str], Outcome]:
    """`straight(2)`, `straight(3, "fsdp2")`: what the run that nothing strikes ends with."""
    known: dict[tuple[int, str], Outcome] = {}

    def outcome(world_size: int = 2, strategy: str = "ddp") -> Outcome:
        key = (world_size, strategy)
        if key not in known:
            known[key] = straight_run(*key).outcome()
        return known[key]

    return outcome


@pytest.fixture
def finished(
    faulty: Callable[..., FaultyRun], straight_run: Callable[[int, str], FaultyRun]
) -> Callable[..., FaultyRun]:
    """`finished(2)`: a copy of the straight run's directory, to be damaged and started again."""

    def copied(world_size: int = 2, strategy: str = "ddp", **changes: Any) -> FaultyRun:
        run = faulty(world_size, strategy, **changes)
        shutil.copytree(straight_run(world_size, strategy).run_dir, run.run_dir)
        return run

    return copied


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failure says how to see it again."""
    report = yield
    runs = item.stash.get(_RUNS, [])
    if report.failed:
        report.sections.append(("replay", f"pytest '{item.nodeid}'"))
    for run in runs if report.failed else []:
        report.sections.append((f"replay of {run.folder.name}", run.replay()))
        report.sections.append((f"output of {run.folder.name}", run.output()[-6000:]))
    return report
