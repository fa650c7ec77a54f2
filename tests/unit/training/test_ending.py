"""How a start ends before its first step, and what the end of a run says of its documents."""

from contextlib import closing

import pytest
import torch
from helpers.tiny import lines

from llmtrain.agreement import Alone, failure
from llmtrain.checkpoint.disk import StoppedError
from llmtrain.errors import RESTARTABLE, RunError, UserError
from llmtrain.rundir import failures
from llmtrain.rundir.status import read_status
from llmtrain.training.ending import StoppedEarlyError, record_end, report_documents, stoppable
from llmtrain.training.journal import Journal
from llmtrain.training.stop import Signals


class Asked(Signals):
    """Asked to stop, or not yet."""

    reason: str | None = None  # type: ignore[assignment]


@pytest.fixture
def journal(tmp_path):
    with closing(Journal(tmp_path, 1)) as journal:
        journal.step = 7
        yield journal


def test_a_stop_ends_the_start_in_front_of_the_next_stage(journal):
    signals = Asked()
    signals.reason = "SIGTERM"
    with pytest.raises(StoppedEarlyError) as stopped, stoppable(Alone(), signals, journal):
        pytest.fail("the stage began")
    assert (stopped.value.reason, stopped.value.step) == ("signal", 7)


def test_a_wait_that_a_stop_cut_short_ends_as_a_stop(journal):
    def wait():
        signals.reason = "launcher_lost"
        raise RunError("the Hub does not answer", RESTARTABLE, "wait")

    signals = Asked()
    with pytest.raises(StoppedEarlyError, match="launcher"), stoppable(Alone(), signals, journal):
        wait()
    with pytest.raises(StoppedEarlyError, match="signal"), stoppable(Alone(), Asked(), journal):
        raise StoppedError("signal")


@pytest.mark.parametrize("code", [1, RESTARTABLE])
def test_without_a_stop_the_error_of_a_stage_is_its_own(journal, code):
    with pytest.raises(RunError, match="no route"), stoppable(Alone(), Asked(), journal):
        raise RunError("no route", code, "wait")


def test_a_device_without_memory_is_recorded_as_what_a_person_can_correct(tmp_path):
    said = "CUDA out of memory. Tried to allocate 2.00 GiB."
    with (
        closing(Journal(tmp_path, 0)) as journal,
        pytest.raises(UserError, match="Tried to allocate"),
        record_end(journal, "digest"),
    ):
        raise torch.OutOfMemoryError(said)
    status = read_status(tmp_path)
    assert (status["state"], status["exit_code"]) == ("failed", 2)
    assert "training.micro_batch_size" in status["reason"]
    assert failures.read(tmp_path)[0].code == 2


def test_ranks_hear_that_a_peer_had_no_memory():
    found = failure(1, torch.OutOfMemoryError("CUDA out of memory."))
    assert found.exit_code == 2
    assert "activation_checkpointing=full" in found.text


def told(folder, **met):
    """Name of each event → its detail."""
    with closing(Journal(folder, 0)) as journal:
        report_documents(journal, 8, "notes", met)
    return {line["event"]: line["detail"] for line in lines(folder, "event")}


def test_documents_with_replaced_characters_were_trained_on_and_not_dropped(tmp_path):
    found = told(tmp_path, replaced=2, heldout=5)
    assert found == {"replaced_characters": {"source": "notes", "documents": 2}}


def test_what_was_dropped_and_what_was_replaced_are_two_events(tmp_path):
    found = told(tmp_path, dropped=3, replaced=2, skipped=1)
    assert found == {
        "dropped_documents": {"source": "notes", "dropped": 3, "skipped": 1},
        "replaced_characters": {"source": "notes", "documents": 2},
    }


def test_a_skipped_unit_alone_is_told(tmp_path):
    assert [*told(tmp_path, skipped=1)] == ["dropped_documents"]


def test_what_is_too_long_is_told(tmp_path):
    assert told(tmp_path, too_long=2)["dropped_documents"] == {"source": "notes", "too_long": 2}


def test_held_out_documents_alone_are_no_event(tmp_path):
    assert told(tmp_path, heldout=5, left_over_tokens=7) == {}


def test_blocks_without_a_trained_token_are_an_event_of_their_own(tmp_path):
    assert told(tmp_path, untrained_blocks=3, dropped=1) == {
        "dropped_documents": {"source": "notes", "dropped": 1},
        "untrained_blocks": {"source": "notes", "blocks": 3},
    }
