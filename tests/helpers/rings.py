"""Which tests each command runs.

    make test        tests that launch nothing, and CORE: one launching test for each promise
    make test-all    the same, then every other launching test, and all of the matrices
    make test-slow   the sweeps

A test launches if it starts a Python interpreter, or ranks of a run. Whatever is in one of FOLDERS
does; anywhere else such a test carries the mark `launches`, and one without it that starts an
interpreter fails. Of a matrix of dear cases `make test` runs a diagonal; the mark `wide` leaves the
rest to `make test-all`.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from itertools import product
from multiprocessing import popen_forkserver, popen_spawn_posix
from pathlib import Path, PurePath
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings
from packaging.version import Version

FOLDERS = ("browser", "distributed", "docs", "faults")
TESTS = Path(__file__).parents[1]

# Promise → the tests of it that `make test` runs, below tests/.
CORE: dict[str, tuple[str, ...]] = {
    "the numbers of a loop by hand": (
        "distributed/test_reference.py::test_losses_and_norms_are_those_of_a_loop_by_hand",
        "distributed/test_reference.py::test_held_out_bits_per_byte_are_those_of_plain_logits",
    ),
    "the same batches on any number of processes": (
        "distributed/test_batches.py::"
        "test_steps_do_not_depend_on_processes_workers_or_micro_batch[1-2-4]",
        "distributed/test_batches.py::"
        "test_steps_do_not_depend_on_processes_workers_or_micro_batch[2-1-3]",
        "distributed/test_token_cache.py::test_batches_do_not_depend_on_processes_and_workers[2-0]",
    ),
    "every token weighs the same": (
        "distributed/test_update.py::test_uneven_masks_weigh_by_token_on_any_layout[2-4]",
        "distributed/test_sharding.py::test_uneven_masks_train_as_in_plain_pytorch[fsdp2 on 2]",
    ),
    "DDP = FSDP2 = ZeRO": (
        "distributed/test_strategies.py::test_a_run_under_any_strategy_is_the_run_under_ddp[fsdp2]",
        "distributed/test_strategies.py::test_a_run_under_any_strategy_is_the_run_under_ddp[zero2]",
    ),
    "one hash on any number of processes": (
        "distributed/test_same_bits.py::"
        "test_weights_moments_loss_and_norm_are_those_of_one_process[llama-0.0-text-full-fsdp2-3]",
    ),
    "resumed under another strategy": (
        "distributed/test_strategies.py::test_what_one_strategy_saved_another_goes_on_from"
        "[fsdp2-ddp]",
    ),
    "a lost rank ends the others, and the same command ends in equal bits": (
        "faults/test_frame.py::"
        "test_a_killed_rank_ends_the_other_and_the_same_command_resumes_and_says_so_first",
    ),
    "a kill in a save": (
        "faults/test_kills.py::test_f01_f02_f06_f07_f08_rank_0_killed_while_it_commits[f07_rename]",
    ),
    "a full disk": (
        "faults/test_saving.py::test_f14_no_room_is_an_event_and_training_goes_on",
        "faults/test_saving.py::test_f15_a_last_save_that_fails_ends_the_run_at_once",
    ),
    "damage": (
        "faults/test_damage.py::test_f19_a_flipped_bit_in_any_file_is_found_and_named",
        "faults/test_damage.py::test_f20_a_run_with_a_truncated_file_goes_on_from_the_older_one",
        "faults/test_damage.py::"
        "test_f22_all_damaged_is_refused_with_the_reason_of_each_and_nothing_is_deleted",
    ),
    "one run in a directory": (
        "faults/test_places.py::"
        "test_f27_a_second_run_in_a_directory_is_refused_and_the_first_is_unharmed",
    ),
    "a step that is not finite": (
        "faults/test_guards.py::test_f44_a_step_that_is_not_finite_is_as_if_it_had_not_been"
        "[ddp-one]",
    ),
    "SIGTERM and STOP": (
        "faults/test_stops.py::"
        "test_f39_signals_to_one_rank_or_to_all_once_or_fifty_times_are_one_agreed_stop",
        "faults/test_stops.py::test_f40_a_stop_file_ends_the_run_and_is_deleted",
    ),
    "refused launches": (
        "distributed/test_other_launchers.py::"
        "test_processes_that_each_think_they_are_alone_are_refused_in_each_of_them",
        "distributed/test_other_launchers.py::"
        "test_a_rank_of_a_wrong_launch_ends_with_one_message[FSDP asked, DDP wanted]",
        "distributed/test_refusals.py::test_bad_input_is_one_message_and_exit_code_2[unknown key]",
        "distributed/test_refusals.py::"
        "test_a_refused_start_leaves_a_finished_run_as_it_was[run.seed=7-42]",
    ),
    "which documents a step trained": (
        "distributed/test_which.py::test_every_step_is_found_whatever_start_made_it[6]",
    ),
    "files that transformers opens, and nothing unpickled": (
        "distributed/test_resume.py::test_weights_load_with_from_pretrained_as_they_lie",
        "distributed/test_safe_loading.py::"
        "test_a_resumed_run_unpickles_nothing_while_it_searches_and_loads[ddp]",
    ),
    "secrets": (
        "distributed/test_secrets.py::"
        "test_no_canary_stands_in_a_run_that_repeats_it_in_logs_errors_and_metrics[0]",
    ),
    "README's two-process command": (
        "docs/test_readme.py::test_the_two_process_command_begins_the_quickstart",
    ),
}


def mark(items: list[pytest.Item]) -> None:
    """Give each test the mark of its folder, and `core` where it is.

    The longest files come first, or one process would end with one of them while the other has
    nothing left.
    """
    core = {name for names in CORE.values() for name in names}
    for item in items:
        place = below_tests(item)
        if place.parts[0] in FOLDERS:
            item.add_marker("launches")
        if item.nodeid.removeprefix("tests/") in core:
            item.add_marker("core")
    items.sort(key=lambda item: below_tests(item).parts[0] != "faults")


def below_tests(item: pytest.Item) -> PurePath:
    """The file of a test."""
    return item.path.relative_to(TESTS)


def diagonal(*axes: Iterable[Any], beside: str = "wide") -> list[ParameterSet]:
    """Return every case of a matrix, those beside the diagonal with the mark `beside`.

    Case n of the diagonal has value n of each axis, and a shorter axis begins again at its end: so
    each value of each axis is on it.
    """
    values = [list(axis) for axis in axes]
    steps = range(max(map(len, values)))
    on = {tuple(step % len(axis) for axis in values) for step in steps}
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(values, places, strict=True)),
            marks=() if places in on else getattr(pytest.mark, beside),
        )
        for places in product(*(range(len(axis)) for axis in values))
    ]


def needs(package: str, release: str = "0") -> pytest.MarkDecorator:
    """Skip a test, or a case of one, by the name of what it needs and this environment lacks.

    package: one of an extra, or a library that llmtrain allows in an older release, too
    release: the lowest that the test is meant for: what it compares with is not in older ones
    """
    if importlib.util.find_spec(package) is None:
        return pytest.mark.skipif(True, reason=f"{package} is not installed")
    older = release != "0" and Version(metadata.version(package)) < Version(release)
    return pytest.mark.skipif(older, reason=f"{package} is older than {release}")


def dear(examples: int) -> settings:
    """For a property whose cases are dear: so many of them, and all in `make test-slow`."""
    everywhere = settings().max_examples
    few = everywhere <= settings.get_profile("default").max_examples
    return settings(max_examples=examples if few else everywhere)


def forbid_interpreters(patch: pytest.MonkeyPatch) -> None:
    """Fail whatever starts a Python interpreter, or a worker process of `multiprocessing`."""
    start = subprocess.Popen.__init__

    def refuse() -> None:
        pytest.fail("starts an interpreter: mark it with @pytest.mark.launches, or start none")

    def init(self: Any, args: Any, *more: Any, **options: Any) -> None:
        words = [args] if isinstance(args, str | bytes | PurePath) else [*args]
        if str(words[0]) == sys.executable and "-S" not in words:  # with it, one that is bare
            refuse()
        start(self, args, *more, **options)

    patch.setattr(subprocess.Popen, "__init__", init)
    for kind in (popen_spawn_posix.Popen, popen_forkserver.Popen):
        patch.setattr(kind, "_launch", lambda self, process: refuse())
