from dataclasses import replace

import pytest

from llmtrain.config.schema import TrainingConfig
from llmtrain.errors import RunError, UserError
from llmtrain.training.guards import Guards, check_replicas
from llmtrain.types import Numbers


def numbers(step: int, *, skipped: bool, tokens: int = 8) -> Numbers:
    return Numbers(step, 1.0, 1.0, 1.0, 1, tokens, 1.0, 0.0, 0, skipped, {}, False)


def test_single_skips_are_counted_and_forgiven() -> None:
    guards = Guards(TrainingConfig(steps=9, max_skipped_in_a_row=3), 0)
    for step, skipped in enumerate([True, True, False, True, True], 1):
        guards.check(numbers(step, skipped=skipped))
    assert guards.skipped_in_a_row == 2


def test_too_many_skips_in_a_row_end_the_run_with_1() -> None:
    guards = Guards(TrainingConfig(steps=9, max_skipped_in_a_row=3), skipped_in_a_row=2)
    with pytest.raises(RunError, match="3 updates in a row") as raised:
        guards.check(numbers(7, skipped=True))
    assert raised.value.exit_code == 1


def test_stop_ends_the_run_at_the_first_one() -> None:
    guards = Guards(TrainingConfig(steps=9, on_nonfinite="stop"), 0)
    with pytest.raises(RunError, match="diverged at step 4"):
        guards.check(numbers(4, skipped=True))


def test_a_step_without_a_trained_token_is_the_users_to_mend() -> None:
    guards = Guards(TrainingConfig(steps=9), 0)
    with pytest.raises(UserError, match="trained token"):
        guards.check(numbers(4, skipped=True, tokens=0))


@pytest.mark.parametrize("what", ["ended", "padding_only"])
def test_a_step_behind_the_end_of_the_data_is_no_failure(what: str) -> None:
    guards = Guards(TrainingConfig(steps=9, on_nonfinite="stop"), 0)
    guards.check(replace(numbers(4, skipped=True, tokens=0), **{what: True}))
    assert guards.skipped_in_a_row == 0


def test_equal_replicas_are_no_event() -> None:
    check_replicas({}, 4, pytest.fail)


def test_replicas_that_differ_end_the_run_with_75_and_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[tuple[str, int, dict]] = []
    differing = {f"layer.{k}": [1] for k in range(6)} | {"head": [0, 1]}
    with pytest.raises(RunError, match=r"at step 8: layer\.0 \(rank 1\).* and 2 more") as raised:
        check_replicas(differing, 8, lambda *said, **more: told.append((*said, more)))
    assert raised.value.exit_code == 75
    names = [f"layer.{k} (rank 1)" for k in range(5)]
    assert told == [("replicas_differ", 8, {"ranks": [0, 1], "count": 7, "names": names})]
    assert "head (rank 0, 1)" in caplog.text
