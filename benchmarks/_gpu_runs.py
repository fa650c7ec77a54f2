"""One training row of `gpu.py`, in a process of its own.

    python benchmarks/_gpu_runs.py JSON

JSON: `kind` (bare, llmtrain, trainer), `shape`, `rows`, `device`, `steps`, `warm`, `folder`, and as
the kind takes them `compile`, `torch_compile`, `strategy`, `attention_backend`, `document_mask`,
`checked` (a wait for the device is an error), `saved` (two saves, and torch.save beside them).
Prints a JSON object.

All kinds begin with the same weights and train on the same blocks of the built-in sample.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _gpu_rows import CHECKED, SHAPES
from _rows import peak_mb

RATE, BETAS, SEED = 1e-4, (0.9, 0.95), 42
SAVES_AT = (4, 8)
SET_BY_ROWS = (
    ("training", "compile"),
    ("model", "attention_backend"),
    ("distributed", "strategy"),
    ("data", "document_mask"),
)


class Marks:
    """The beginnings of steps, and the end of the last one, on the clock of the device."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note the time; on a GPU when its work has come this far."""
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return the time of each step."""
        pairs = list(pairwise(self._marks))
        if not self._cuda:
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def config_of(asked: dict[str, Any]) -> Path:
    """Write the config of the run."""
    shape = SHAPES[asked["shape"]]
    keys: dict[str, Any] = {
        "run": {"dir": str(Path(asked["folder"]) / "run"), "seed": SEED},
        "model": {
            "config": shape.config,
            "tokenizer": "sample",
            "activation_checkpointing": "none",
        },
        "data": {"sources": [{"path": "sample"}], "seq_len": shape.seq_len, "heldout": 0.0},
        "training": {
            "steps": asked["steps"],
            "global_batch_size": asked["rows"],
            "micro_batch_size": asked["rows"],
            "precision": "bf16" if asked["device"] == "cuda" else "fp32",
        },
        "optimizer": {
            "learning_rate": RATE,
            "schedule": "constant",
            "warmup_steps": 1,
            "weight_decay": 0.0,
        },
        "checkpoint": {"every_steps": SAVES_AT[0], "keep_best": 0, "keep_last": 2},
    }
    for section, key in SET_BY_ROWS if asked["kind"] == "llmtrain" else ():
        if key in asked:
            keys.setdefault(section, {})[key] = asked[key]
    path = Path(asked["folder"]) / "run.json"
    path.write_text(json.dumps(keys))  # YAML is a superset
    return path


def blocks(asked: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the ids of each step of llmtrain, (rows, T + 1), read before the first step."""
    import llmtrain

    with llmtrain.open_stream(llmtrain.load_config(config_of(asked))) as stream:
        made = [torch.from_numpy(next(stream).ids).long() for _ in range(asked["steps"])]
    return iter([one.pin_memory() for one in made] if asked["device"] == "cuda" else made)


def fresh_model(asked: dict[str, Any]) -> Any:
    """Return the model that llmtrain begins with, built by transformers alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = dict(SHAPES[asked["shape"]].config)
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def bare(asked: dict[str, Any]) -> dict[str, Any]:
    """Train in a loop as one writes it by hand, with llmtrain's attention and loss."""
    from llmtrain.model import attention

    shape, device = SHAPES[asked["shape"]], asked["device"]
    batches, model = blocks(asked), fresh_model(asked)
    attention.install(model, shape.seq_len)
    module = loss_module(model)
    if asked.get("compile") == "blocks":
        from llmtrain.model.compile import compile_blocks

        compile_blocks(model, "blocks")
    module.to(device)
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=BETAS, weight_decay=0.0, fused=True)
    marks, tokens = Marks(device), asked["rows"] * shape.seq_len
    loss = torch.zeros(())
    for _ in range(asked["steps"]):
        marks.mark()
        ids = next(batches).to(device, non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext():
            loss = module(ids[:, :-1], ids[:, 1:].contiguous()) / tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    marks.mark()
    return told(marks, asked, loss.item())


def loss_module(model: Any) -> Any:
    """Return the module whose forward is the loss, as a run makes it."""
    from llmtrain.model.loss import Head, LossModule, examine

    head = examine(model)
    return LossModule(model, head if isinstance(head, Head) else None)


def with_trainer(asked: dict[str, Any]) -> dict[str, Any]:
    """Train with transformers' Trainer on the same blocks."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    marks, batches = Marks(asked["device"]), blocks(asked)
    last: list[torch.Tensor] = []

    class Blocks(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            for step in batches:
                for ids in step:  # `shift_labels`: all T positions are trained, as in llmtrain
                    yield {"input_ids": ids[:-1], "labels": ids[:-1], "shift_labels": ids[1:]}

    class Watched(Trainer):  # type: ignore[misc]
        def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
            last[:] = [super().training_step(*given, **named)]
            return last[0]

    class Begins(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *given: Any, **named: Any) -> None:
            marks.mark()

    arguments = TrainingArguments(
        str(Path(asked["folder"]) / "trainer"),
        max_steps=asked["steps"],
        per_device_train_batch_size=asked["rows"],
        bf16=asked["device"] == "cuda",
        use_cpu=asked["device"] == "cpu",
        torch_compile="torch_compile" in asked,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta2=BETAS[1],
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    Watched(fresh_model(asked), arguments, train_dataset=Blocks(), callbacks=[Begins()]).train()
    marks.mark()
    return told(marks, asked, last[0].item())


def with_llmtrain(asked: dict[str, Any]) -> dict[str, Any]:
    """Train with llmtrain. It makes no checkpoint, as that of the last step takes minutes."""
    import llmtrain

    config = llmtrain.load_config(config_of(asked))
    from llmtrain.rundir import contents, record
    from llmtrain.training import loop, saving
    from llmtrain.training.start import weights

    marks, more = Marks(asked["device"]), {}
    begin, finish, save = loop.begin, loop.finish, loop.save
    checked = asked.get("checked") and asked["device"] == "cuda"

    def began(run: Any, step: int) -> None:
        if checked and step == asked["warm"] + 1:
            torch.cuda.set_sync_debug_mode("error")
        if checked and step == asked["warm"] + CHECKED + 1:
            torch.cuda.set_sync_debug_mode("default")
        marks.mark()
        begin(run, step)

    def finished(run: Any) -> Any:
        marks.mark()
        if asked.get("saved"):
            more.update(beside_torch_save(run, Path(asked["folder"])))
        return finish(run)

    def saved(run: Any, step: int) -> None:
        if asked.get("saved") and step in SAVES_AT:
            save(run, step)
        else:
            saving.commit(run)  # at the last step that of the one in flight

    loop.begin, loop.finish, loop.save = began, finished, saved
    weights.check_room = lambda *given: None  # there is room for the two saves, or none is made
    llmtrain.train(config)
    lines = record.read(config.run_dir / contents.METRICS)
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    if saves := [line for line in lines if line["kind"] == "checkpoint"]:
        more["blocked_seconds"] = [line["blocked_seconds"] for line in saves]
        more["bytes"] = saves[0]["bytes"]
    return told(marks, asked, losses[-1]) | more


def beside_torch_save(run: Any, folder: Path) -> dict[str, Any]:
    """Return the time of torch.save and fsync for the state that was saved."""
    shutil.rmtree(run.run_dir / "checkpoints")  # the disk may not hold a third
    optimizer = run.engine._optimizer
    began = time.perf_counter()
    with (folder / "torch.pt").open("wb") as file:
        state = {"model": run.built.bare.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, file)  # noqa: TID251  # what is compared with
        file.flush()
        os.fsync(file.fileno())
    return {"torch_save_seconds": time.perf_counter() - began}


def told(marks: Marks, asked: dict[str, Any], loss: float) -> dict[str, Any]:
    """Return the figures of a run."""
    seconds = marks.seconds()
    typical = statistics.median(seconds[asked["warm"] :])
    peak = torch.cuda.max_memory_allocated() / 1e6 if asked["device"] == "cuda" else peak_mb()
    return {
        "tokens_per_second": asked["rows"] * SHAPES[asked["shape"]].seq_len / typical,
        "step_seconds": typical,
        "slowest_step_seconds": max(seconds[asked["warm"] :]),
        "peak_mb": peak,
        "last_loss": loss,
        "rows": asked["rows"],
        "steps": asked["steps"],
    }


KINDS = {"bare": bare, "llmtrain": with_llmtrain, "trainer": with_trainer}


def main() -> None:
    """Train one row; out of memory is a result too, as fewer rows may fit."""
    asked = json.loads(sys.argv[1])
    try:
        found = KINDS[asked["kind"]](asked)
    except torch.OutOfMemoryError:
        found = {"out_of_memory": True}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
