"""The fields of `metrics.jsonl` and `status.json` in words, for the reference pages."""

from __future__ import annotations

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

# Kind of a line → field → what it holds.
FIELDS = {
    "start": {
        "run_id": "the same for all starts of a run",
        "world_size": "number of processes",
        "strategy": "`ddp`, `fsdp2`, `zero3` …",
        "threads": "of rank 0 on its CPUs",
        "device": "name of rank 0's device",
        "device_type": "`cuda` or `cpu`",
        "micro_batch_size": "blocks of a micro-batch",
        "accumulation": "micro-batches of a step on one device",
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
    },
    "train": {
        "loss": "nats per trained token, the mean over all trained tokens of the step; without the "
        "loss of a router",
        "router_loss": "what a mixture's router adds to it in training, per trained token: its "
        "loss times its coefficient; only of models that train one",
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
        "loss": "nats per token, the mean over all scored tokens",
        "perplexity": "e to the power of the loss",
        "bits_per_byte": "comparable between tokenizers; null for conversations",
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
    "restarts": "number of starts after the first",
    "updated": "when the file was written, ISO 8601, UTC",
}
