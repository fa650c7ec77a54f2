"""The events of a run in words, for the report and the reference pages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

WORDS = {
    "auto_decided_anew": "Settings that are decided automatically were decided again",
    "begun_again": "The run began again, as there was no checkpoint to resume from",
    "changes_accepted": "Changed keys were accepted",
    "checkpoint_missing": "A checkpoint was missing",
    "checkpoint_quarantined": "A damaged checkpoint was renamed and an older one used",
    "checkpoint_superseded": "A checkpoint of steps that are undone was renamed",
    "compiled_again": "Blocks were compiled again after the warm-up",
    "cursors_not_noted": "The position in the data could not be noted",
    "dropped_documents": "Documents were left out",
    "evaluation_cut_off": "A stop interrupted the evaluation",
    "few_steps": "The run has few steps",
    "files_restored": "Deleted files of the run directory were written again",
    "leftovers_removed": "Remains of an earlier start were removed",
    "length_changed": "The length of the run was changed",
    "lock_lost": "Another process took the run directory",
    "lock_made_again": "The lock of the run directory had been removed and was made again",
    "lock_taken_over": "The lock of a run that had ended was taken over",
    "memory_compared": "Memory was compared with the plan",
    "no_progress": "The run made no progress",
    "nothing_held_out": "No document is held out, so nothing is evaluated",
    "nothing_to_train": "There was nothing left to train on",
    "other_versions": "Versions of libraries have changed",
    "profiled": "Steps were profiled",
    "profile_failed": "The profile could not be written",
    "replaced_characters": "Bytes that are not UTF-8 were replaced",
    "retention_failed": "Old checkpoints could not be deleted",
    "rng_reseeded": "Random numbers were seeded again for another number of processes",
    "save_failed": "A checkpoint could not be saved",
    "saving_in_line": "Checkpoints are saved while the training waits",
    "start_refused": "A start was refused, which changed nothing",
    "status_not_written": "status.json could not be written",
    "threads_changed": "Another number of threads computes, so the last bits may differ",
    "tracker_failed": "A tracker failed",
    "tracker_recovered": "A tracker works again",
    "untrained_blocks": "Blocks had no token to train",
    "update_skipped": "An update was skipped, as its loss or gradient was not finite",
}


def in_words(event: Mapping[str, Any]) -> str:
    """Return a sentence for an `event` line; an unknown event is shown by its name."""
    name = str(event.get("event") or "an event without a name")
    said = WORDS.get(name, name)
    detail = event.get("detail")
    if not isinstance(detail, Mapping) or not detail:
        return f"{said}."
    facts = ", ".join(f"{str(key).replace('_', ' ')} {_short(one)}" for key, one in detail.items())
    return f"{said}: {facts}."


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 300 else text[:299] + "…"
