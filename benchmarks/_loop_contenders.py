"""The loops that `loop.py` compares. Each prepares itself in its first turn, then makes its steps.

All train the same weights on the same blocks, one a step, with clipping at 1.0 and fused AdamW at a
constant rate, so their last losses must agree.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback
from transformers import TrainingArguments as Arguments

import llmtrain
from llmtrain.hashing import mix, permutation
from llmtrain.model import attention
from llmtrain.training import loop
from llmtrain.training.run.run import Run

SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}
SEQ_LEN, RATE, BETAS, DECAY, LIMIT = 16, 1e-5, (0.9, 0.95), 0.1, 1.0


class Turns:
    """Threads that take turns, in another order each round: a step pays for what ran before it."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._condition = threading.Condition()
        self._taken = 0  # turns so far
        self._failed = False
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self._began = 0.0

    def wait(self, name: str) -> None:
        """Sleep until it is this variant's turn; its clock starts."""
        self._until(lambda: self._next() == name)
        self._began = time.thread_time()

    def done(self, name: str) -> None:
        """The step is over: stop the clock, wake the next variant."""
        self.seconds[name].append(time.thread_time() - self._began)
        with self._condition:
            self._taken += 1
            self._condition.notify_all()

    def next(self, name: str) -> None:
        """End this turn and wait for the next one."""
        self.done(name)
        self.wait(name)

    def wait_for_all(self, turns: int) -> None:
        """Sleep until every variant has had its turns."""
        self._until(lambda: self._taken == turns * len(self._names))

    def fail(self) -> None:
        """One variant is dead: the others must not wait for it."""
        with self._condition:
            self._failed = True
            self._condition.notify_all()

    def _until(self, holds: Callable[[], bool]) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._failed or holds())
        if self._failed:
            raise RuntimeError("another variant failed")

    def _next(self) -> str:
        round_, position = divmod(self._taken, len(self._names))
        return self._names[permutation(len(self._names), mix(round_))[position]]


def fresh_model() -> Any:
    """The weights that llmtrain begins with, built by transformers alone."""
    torch.manual_seed(42)
    config = LlamaConfig(vocab_size=2048, bos_token_id=0, eos_token_id=0, pad_token_id=0, **SHAPE)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def fresh_optimizer(model: Any) -> torch.optim.Optimizer:
    """Fused AdamW; matrices other than the embedding are decayed."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=BETAS, fused=True)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """ids: (1, T + 1)."""
    logits = model(ids[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


Next = Callable[[], None]  # ends a step's turn and waits for the next one


def bare(turn: Next, batches: Iterator[torch.Tensor]) -> float:
    """A loop as one writes it by hand. Returns its last loss."""
    model = fresh_model()
    optimizer = fresh_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1.0)
    loss = torch.zeros(())
    turn()
    for ids in batches:
        loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        turn()
    return loss.item()


def tuned(turn: Next, batches: Iterator[torch.Tensor], *, item: bool = False) -> float:
    """The same: one list of parameters, the rate written, llmtrain's attention.

    item: whether the loss of each step is read, as most loops do to log it.
    """
    model = fresh_model()
    attention.install(model, SEQ_LEN)
    optimizer, parameters = fresh_optimizer(model), list(model.parameters())
    loss, read = torch.zeros(()), 0.0
    turn()
    for ids in batches:
        loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, LIMIT)
        for group in optimizer.param_groups:
            group["lr"] = RATE
        optimizer.step()
        optimizer.zero_grad()
        if item:
            read += loss.item()
        turn()
    return loss.item()


def by_the_book(turn: Next, batches: Iterator[torch.Tensor]) -> float:
    """Accelerate as its guide writes it."""
    from accelerate import Accelerator

    accelerator, plain = Accelerator(cpu=True), fresh_model()
    optimizer = fresh_optimizer(plain)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1.0)
    loader = torch.utils.data.DataLoader([ids[0] for ids in batches], batch_size=1)
    model, optimizer, loader, schedule = accelerator.prepare(plain, optimizer, loader, schedule)
    loss = torch.zeros(())
    turn()
    for ids in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, ids)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        turn()
    return loss.item()


class InOrder(Trainer):
    """Reads its blocks in order, and keeps the last loss."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *given: Any, **more: Any) -> torch.Tensor:
        """Keep the loss of a step."""
        self.last: torch.Tensor = super().training_step(*given, **more)
        return self.last


class AtEachStep(TrainerCallback):
    """Takes its turns: the preparation ends where the first step begins."""

    def __init__(self, turn: Next) -> None:
        self._turn = turn

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Everything is prepared."""
        self._turn()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """A step is over."""
        self._turn()


def trainer(turn: Next, batches: Iterator[torch.Tensor], folder: Path) -> float:
    """transformers' Trainer, which logs, saves and reports nothing."""
    rows = [{"input_ids": ids[0], "labels": ids[0]} for ids in batches]
    arguments = Arguments(
        output_dir=str(folder),
        max_steps=len(rows),
        per_device_train_batch_size=1,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta2=BETAS[1],
        weight_decay=DECAY,
        max_grad_norm=LIMIT,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    one = InOrder(fresh_model(), arguments, train_dataset=rows, callbacks=[AtEachStep(turn)])
    one.train()
    return one.last.item()


Stream = Callable[[], AbstractContextManager[Iterator[Any]]]


def with_data(turn: Next, stream: Stream, steps: int) -> float:
    """`bare`, whose blocks llmtrain's stream reads. It is opened in the first turn."""
    with stream() as batches:
        return bare(turn, (torch.from_numpy(next(batches).ids).long() for _ in range(steps)))


def ours(turn: Next, config: Any, wait_for_all: Callable[[], None]) -> float:
    """llmtrain's own `train`; a step lasts from one `begin` to the next.

    It resets accelerate's state when it closes, without which the other variants cannot go on.
    """
    original, finish = loop.begin, loop.finish

    def begin(run: Run, step: int) -> None:
        turn()
        original(run, step)

    def end(run: Run) -> Any:
        turn()
        wait_for_all()
        return finish(run)

    loop.begin, loop.finish = begin, end
    try:
        llmtrain.train(config)
    finally:
        loop.begin, loop.finish = original, finish
    lines = (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()
    return float([json.loads(line)["loss"] for line in lines if '"train"' in line][-1])
