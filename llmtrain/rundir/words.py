"""What `metrics.jsonl` and `status.json` hold, in words: for the report and reference pages."""

import json
from collections.abc import Mapping

from llmtrain.types import JsonMapping, cut_of

EVERY_LINE = {
    "kind": "one of the kinds below",
    "time": "when the line was written, in Unix seconds",
    "step": "the number of finished steps; one whose update was skipped counts",
}

# Kind of a line → when it is written.
KINDS = {
    "start": "once a start, when the model is built and the data is open",
    "train": "every `logging.every_steps` steps, at the first and last step of a start, and for "
    "every skipped update",
    "eval": "for each evaluation: the held-out documents, then each source of its own",
    "checkpoint": "when a checkpoint is complete",
    "sample": "for each prompt, when the model has continued it",
    "event": "when something happened that a person may want to know",
    "end": "once, when a start ends; a killed start does not write it",
}

# What lines of a run on pairs have beside the others, as `pair_figures` computes it.
OF_PAIRS = {
    "pairs": "number of pairs, or of judged answers; it and the fields down to `divergence` only "
    "with `preference.loss`",
    "accuracy": "share of the pairs whose chosen answer has the higher reward; a tie counts half",
    "margin": "mean reward of chosen answers less that of rejected ones",
    "chosen_reward": "mean: `preference.beta` times what log p has gained on the reference (of "
    "`reward`: the score)",
    "rejected_reward": "the same of rejected answers; of `kto` both are of good and bad ones",
    "chosen_logp": "mean log-probability of a chosen answer, in nats; null with `reward`",
    "rejected_logp": "the same of rejected answers",
    "chosen_loss": "−log p of chosen answers, in nats per token; null with `reward`",
    "divergence": "only of `kto`: how far the model is from its reference, in nats",
}

# Kind of a line → field → what it holds.
FIELDS = {
    "start": {
        "run_id": "the same for all starts of a run",
        "world_size": "number of processes",
        "strategy": "`ddp`, `fsdp2`, `zero3` …",
        "tensor_parallel": "processes that share each matrix of a model",
        "pipeline_parallel": "processes that share its blocks",
        "sequence_parallel": "processes that share the positions of each row",
        "threads": "of rank 0 on its CPUs",
        "device": "name of rank 0's device",
        "device_type": "`cuda` or `cpu`",
        "micro_batch_size": "blocks of a micro-batch",
        "accumulation": "micro-batches of the next step on one device",
        "batch_sizes": "[first step, blocks of a step], where the batch grows",
        "parameters": "of the whole model",
        "trainable_parameters": "those that are trained",
        "resumed_from": "name of the checkpoint; null at a beginning",
        "weights": "share of each source in the order of the data",
        "steps": "length of the run",
        "epochs": "`training.epochs` of this start; null if it gave steps",
        "versions": "of Python, llmtrain and the libraries",
        "plan": "the memory plan: layout, parts, reason",
        "host": "name of rank 0's machine",
        "born": "when rank 0's process began, in Unix seconds",
        "vocabulary": "number of tokens that the tokenizer knows",
        "set": "key → `file` or `command line`, for each key that somebody set",
        "reference": "the `digest` of the reference column, the number of its `pairs`, and the "
        "`seconds` that this start spent on it; only of a run on pairs that has one",
    },
    "train": {
        "loss": "nats per trained token, the mean over all trained tokens of the step, or the mean "
        "over its pairs; without the loss of a router",
        "router_loss": "what a mixture's router adds to it in training, per trained token or pair: "
        "its loss times its coefficient; only of models that train one",
        **OF_PAIRS,
        "learning_rate": "of this step",
        "grad_norm": "before clipping",
        "tokens": "trained so far, without skipped steps",
        "step_tokens": "trained tokens of this step",
        "seconds": "wall time of the step, from asking for the batch to the end of the update",
        "tokens_per_second": "`step_tokens` divided by `seconds`",
        "data_wait_seconds": "of `seconds`: waiting for the batch, the mean over the ranks",
        "batch_digest": "16 hex digits that depend on every token and label of the step",
        "skipped": "whether the update was skipped, as loss or gradient was not finite",
        "sources": "source → trained tokens so far",
        "memory_gb": "rank 0's peak in GiB: of the device, on a CPU resident memory",
        "mfu": "share of the device's peak; null where that is not known",
        "span_seconds": "sum of `seconds` since the `train` line before",
        "span_wait_seconds": "sum of `data_wait_seconds` since the `train` line before",
    },
    "eval": {
        "split": "`heldout`, or `heldout/LABEL` for one source",
        "loss": "nats per token, the mean over all scored tokens, or the mean over pairs",
        "perplexity": "e to the power of the loss; null in a run on pairs",
        "bits_per_byte": "comparable between tokenizers; null for conversations and pairs",
        **OF_PAIRS,
        "tokens": "that were scored",
        "bytes": "of the documents",
        "documents": "that were scored",
        "seconds": "wall time of the evaluation",
    },
    "checkpoint": {
        "name": "of its directory",
        "bytes": "of all its files",
        "seconds": "from its beginning until it is complete",
        "blocked_seconds": "of them: the training waited",
        "reason": "`period`, `asked`, `best`, `end`, or why the run was stopped",
    },
    "sample": {
        "prompt": "of `evaluation.prompts`",
        "text": "what the model wrote behind it",
        "seconds": "wall time of writing it",
    },
    "event": {
        "event": "its name, see below",
        "detail": "facts, by name",
        "device": "of `memory_compared` on a CPU alone",
    },
    "end": {
        "state": "`finished`, `stopped` or `failed`",
        "exit_code": "of the run",
        "reason": "why it ended",
        "seconds": "of this start",
        "goodput": "share of the time in which steps ran that were not done again",
    },
}

STATUS = {
    "run_id": "the same for all starts of a run",
    "state": "`running`, `finished`, `stopped` or `failed`",
    "exit_code": "of the run; null while it runs",
    "reason": "why it ended",
    "step": "the last step whose numbers have arrived",
    "checkpoint": "name of the newest complete checkpoint",
    "strategy": "`ddp`, `fsdp2`, `zero3` …; null until it is chosen",
    "world_size": "number of processes",
    "tensor_parallel": "processes that share each matrix; null until it is chosen",
    "pipeline_parallel": "processes that share the blocks; null until it is chosen",
    "sequence_parallel": "processes that share the positions; null until it is chosen",
    "restarts": "number of starts after the first",
    "updated": "when the file was written, ISO 8601, UTC",
}


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
    "rng_ignored": "An earlier llmtrain kept random states, which are drawn from seed and step now",
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


def strategy_in_words(start: JsonMapping) -> str:
    """Return the strategy of a `start` line, and over how many processes its models are cut."""
    sizes = cut_of(start).to_json().items()
    cuts = (
        f" × {key.replace('_', ' ')} {size}"
        for key, size in sizes
        if isinstance(size, int) and size > 1
    )
    return f"{start.get('strategy') or '?'}{''.join(cuts)}"


def in_words(event: JsonMapping) -> str:
    """Return a sentence for an `event` line; an unknown event is shown by its name."""
    name = str(event.get("event") or "an event without a name")
    sentence = WORDS.get(name, name)
    detail = event.get("detail")
    if not isinstance(detail, Mapping) or not detail:
        return f"{sentence}."
    facts = ", ".join(f"{str(key).replace('_', ' ')} {_short(one)}" for key, one in detail.items())
    return f"{sentence}: {facts}."


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 300 else text[:299] + "…"
