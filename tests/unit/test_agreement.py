import pytest
from helpers.checkpoints import on_ranks

from llmtrain import system
from llmtrain.agreement import (
    Alone,
    agreed,
    captured,
    count_votes,
    from_rank_zero,
    gathered,
    on_rank_zero,
)
from llmtrain.errors import DISK_FAILED, RESTARTABLE, PeerError, Problem, RunError, UserError


def refused(ranks, work):
    """What a rank raises."""
    with pytest.raises((UserError, RunError, KeyError)) as caught:
        agreed(ranks, lambda: work(ranks.rank))
    return caught.value


def raise_on(errors):
    """Work that raises on the ranks that `errors` names."""

    def work(rank):
        if rank in errors:
            raise errors[rank]

    return work


def test_an_attempt_keeps_the_value_or_the_exception():
    assert captured(lambda: 3).result() == 3
    assert captured(lambda: None).result() is None
    outcome = captured(lambda: {}["a"])
    with pytest.raises(KeyError):
        outcome.result()


def test_an_attempt_does_not_keep_an_interrupt():
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        captured(interrupt)


def test_all_ranks_get_their_own_result_where_none_fails():
    assert on_ranks(3, lambda ranks: agreed(ranks, lambda: ranks.rank * 2)) == [0, 2, 4]
    assert agreed(Alone(), lambda: 7) == 7


def test_a_failing_rank_raises_its_own_error_and_the_others_its_text_and_code():
    bad = UserError(Problem("a.key", 1, "two"))
    errors = on_ranks(3, lambda ranks: refused(ranks, raise_on({1: bad})))
    assert errors[1] is bad
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerError)
        assert (str(error), error.exit_code, error.rank) == (str(bad), 2, 1)


def test_a_cause_outranks_its_consequences():
    failed = {
        0: RunError("a peer is gone", RESTARTABLE, ""),
        1: KeyError("a defect"),
        2: RunError("the disk is full", DISK_FAILED, ""),
    }
    told = on_ranks(4, lambda ranks: refused(ranks, raise_on(failed)))[3]
    assert (told.exit_code, told.rank) == (DISK_FAILED, 2)


def test_rank_0_works_alone_and_all_get_its_value_as_json_keeps_it():
    worked = []

    def work():
        worked.append(1)
        return {"a": (1, None), "b": "ü"}

    assert (
        on_ranks(3, lambda ranks: from_rank_zero(ranks, work)) == [{"a": [1, None], "b": "ü"}] * 3
    )
    on_ranks(3, lambda ranks: on_rank_zero(ranks, work))
    assert len(worked) == 2


def test_what_fails_on_rank_0_fails_on_all():
    def work():
        raise RunError("no disk", DISK_FAILED, "")

    def code(ranks):
        with pytest.raises(RunError) as caught:
            from_rank_zero(ranks, work)
        return caught.value.exit_code

    assert on_ranks(3, code) == [DISK_FAILED] * 3


def test_values_are_gathered_at_rank_0_in_the_order_of_ranks():
    told = on_ranks(3, lambda ranks: gathered(ranks, {"rank": ranks.rank}))
    assert told == [[{"rank": 0}, {"rank": 1}, {"rank": 2}], [], []]


def test_a_vote_carries_bodies_to_rank_0_and_failures_to_all():
    def vote(ranks):
        error = OSError(28, "No space left", "weights") if ranks.rank == 1 else None
        return count_votes(ranks, error, b"body %d" % ranks.rank)

    votes = on_ranks(3, vote)
    assert votes[0].bodies == (b"body 0", b"body 1", b"body 2")
    assert [vote.failures for vote in votes] == [votes[0].failures] * 3
    (failed,) = votes[0].failures
    assert (failed.rank, failed.errno, failed.file) == (1, 28, "weights")


def test_the_phase_is_the_same_after_a_vote():
    system.beat("saving")
    count_votes(Alone(), None, b"")
    assert system.last_beat()[1] == "saving"
