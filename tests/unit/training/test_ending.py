"""What the end of a run says of the documents that it met."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from helpers.tiny import lines

from llmtrain.training.ending import tell_of_documents
from llmtrain.training.run.journal import Journal


def told(folder, **met: int) -> dict[str, dict[str, Any]]:
    """Name of each event → its detail."""
    with closing(Journal(folder, 0)) as journal:
        tell_of_documents(journal, 8, "notes", met)
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


def test_held_out_documents_alone_are_no_event(tmp_path):
    assert told(tmp_path, heldout=5, left_over_tokens=7) == {}
