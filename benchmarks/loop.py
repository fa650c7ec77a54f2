"""What does the loop cost? CPU time of a step over a bare PyTorch loop, with an almost free model.

A hollow Llama (hidden 16, 4 layers, 16 tokens, a block a step). Contenders are threads that take
turns step by step, and must end in equal losses. `bare` is written as one does, `tuned` has one
list of parameters, the rate written and llmtrain's attention; the reference is the mean of two
tuned ones, as a thread's place in memory is worth 0.1 ms. Figures are medians.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import torch
from harness import ROOT, Bench, Contender, Turn, around, callback, config_of, llama, main
from transformers import Trainer, TrainingArguments

import llmtrain
from llmtrain.model import attention

TUNED = ("bare_tuned", "bare_tuned_again")
SHAPE = llama(16, 4, 2, 32, 0, 16)
SEQ_LEN, RATE, BETAS, DECAY, LIMIT = 16, 1e-5, (0.9, 0.95), 0.1, 1.0
OPTIMIZER = {"schedule": "constant", "warmup_steps": 1}
Batches = Iterator[torch.Tensor]


def steps(bench: Bench) -> None:
    """The CPU time of every step of every contender."""
    count, warm = bench.sizes.steps, bench.sizes.warm  # by then every lane is open
    if count <= warm:
        bench.refuse(f"--steps {count}: more than {warm}; the first {warm} are not counted")
    config = config_for(bench.folder, count)
    made = blocks(config, count)
    rows = [{"input_ids": ids[0], "labels": ids[0]} for ids in made]
    settings = {"max_steps": count, "per_device_train_batch_size": 1, "use_cpu": True}
    settings |= {"learning_rate": RATE, "lr_scheduler_type": "constant", "adam_beta2": BETAS[1]}
    settings |= {"weight_decay": DECAY, "max_grad_norm": LIMIT, "optim": "adamw_torch_fused"}
    work: dict[str, Contender] = {
        "bare": lambda turn, _: bare(turn, iter(made)),
        "bare_tuned": lambda turn, _: bare(turn, iter(made), tuned=True),
        "bare_tuned_again": lambda turn, _: bare(turn, iter(made), tuned=True),
        "bare_item": lambda turn, _: bare(turn, iter(made), tuned=True, item=True),
        "bare_data": lambda turn, _: with_data(turn, config, count),
        "accelerate": lambda turn, _: by_the_book(turn, iter(made)),
        "trainer": lambda turn, _: trainer(turn, fresh_model(), rows, bench.folder, **settings),
        "llmtrain": lambda turn, all_through: ours(turn, config, all_through),
    }
    seconds, losses = harness.step_by_step(work, count)
    ms = {name: [1000 * one for one in found[1 + warm :]] for name, found in seconds.items()}
    over = {}
    for name, own in ms.items():
        gaps = sorted(a - (b + c) / 2 for a, b, c in zip(own, *(ms[o] for o in TUNED), strict=True))
        over[name] = statistics.median(gaps)
        more = {"over_tuned_ms": over[name], "steps": len(own), "final_loss": losses[name]}
        more |= {"quartiles_ms": [gaps[len(gaps) // 4], gaps[3 * len(gaps) // 4]]}
        shape = {**SHAPE, "seq_len": SEQ_LEN, "rows": 1}
        bench.say(name, statistics.median(own), "ms", **more, shape=shape)
    bench.say("a step over the mean of two tuned loops", over["llmtrain"], "ms", "≤ 0.60")
    ratio = over["llmtrain"] / over["trainer"]
    bench.say("of what the Trainer costs over them", ratio, "×", "≤ 0.40")


def config_for(folder: Path, count: int) -> Any:
    """The hollow model's."""
    path = config_of(
        folder,
        SHAPE,
        steps=count,
        seq_len=SEQ_LEN,
        training={"micro_batch_size": 1, "max_grad_norm": LIMIT},
        optimizer=OPTIMIZER | {"learning_rate": RATE, "weight_decay": DECAY},
        checkpoint={"every_steps": 10 * count},
    )
    return llmtrain.load_config(path)


def blocks(config: Any, count: int) -> list[torch.Tensor]:
    """The ids of each step, (rows, T + 1)."""
    with llmtrain.open_stream(config) as stream:
        return [torch.from_numpy(next(stream).ids).long() for _ in range(count)]


# The contenders: each prepares itself in its first turn, then makes its steps, and returns the last
# loss. All train the same weights on the same blocks, one a step.


def fresh_model() -> Any:
    """The weights that llmtrain begins with, built by transformers alone."""
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    return harness.fresh_model(vocab_size=2048, **special, **SHAPE)


def fresh_optimizer(model: Any, rate: float = RATE) -> torch.optim.Optimizer:
    """Fused AdamW; matrices other than the embedding are decayed."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The mean loss. ids: (rows, T + 1)."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def bare(turn: Turn, batches: Batches, *, tuned: bool = False, item: bool = False) -> float:
    """By hand. item: whether the loss of each step is read, as most loops do to log it."""
    model = fresh_model()
    if not tuned:
        return by_hand(turn, batches, model, fresh_optimizer(model))
    attention.install(model, SEQ_LEN)
    parameters = list(model.parameters())
    return by_hand(turn, batches, model, fresh_optimizer(model), parameters, RATE, item=item)


def by_hand(
    turn: Turn,
    batches: Batches,
    model: Any,
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.Tensor] | None = None,
    rate: float | None = None,
    *,
    item: bool = False,
    loss_of: Callable[[Any, torch.Tensor], torch.Tensor] = loss_of,
) -> float:
    """The loop itself. parameters: None = they are asked for; rate: None = by LambdaLR."""
    schedule = None if rate else torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1.0)
    loss, read = torch.zeros(()), 0.0
    turn()
    for ids in batches:
        loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters or model.parameters(), LIMIT)
        if rate:
            for group in optimizer.param_groups:
                group["lr"] = rate
        optimizer.step()
        if schedule:
            schedule.step()
        optimizer.zero_grad()
        if item:
            read += loss.item()
        turn()
    return loss.item()


def with_data(turn: Turn, config: Any, count: int) -> float:
    """`bare`, whose blocks llmtrain's stream reads. It is opened in the first turn."""
    with llmtrain.open_stream(config) as stream:
        return bare(turn, (torch.from_numpy(next(stream).ids).long() for _ in range(count)))


def by_the_book(turn: Turn, batches: Batches) -> float:
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


class LastLoss(Trainer):
    """Keeps the last loss."""

    def training_step(self, *given: Any, **more: Any) -> torch.Tensor:
        self.last: torch.Tensor = super().training_step(*given, **more)
        return self.last


def trainer(turn: Turn, model: Any, rows: Sequence[Any], folder: Path, **settings: Any) -> float:
    """transformers' Trainer, which logs, saves and reports nothing. settings: its arguments."""
    quiet = {"logging_strategy": "no", "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    quiet["train_sampling_strategy"] = "sequential"
    arguments = TrainingArguments(output_dir=str(folder), **quiet, **settings)
    turning = callback(on_train_begin=turn, on_step_end=turn)
    one = LastLoss(model, arguments, train_dataset=rows, callbacks=[turning])
    one.train()
    return one.last.item()


def ours(turn: Turn, config: Any, all_through: Turn) -> float:
    """llmtrain's own `train`; a step lasts from one `begin` to the next.

    It resets accelerate's state when it closes, without which the other contenders cannot go on.
    """

    def begin(original: Any, run: Any, step: int) -> None:
        turn()
        original(run, step)

    def end(original: Any, run: Any) -> Any:
        turn()
        all_through()
        return original(run)

    with around(begin=begin, finish=end):
        llmtrain.train(config)
    return float(llmtrain.open_run(config.run_dir).metrics("train")[-1]["loss"])


def counts(bench: Bench) -> None:
    """What a step does, which no other work on a machine changes; a test holds it."""
    found = counted(bench.folder)
    bench.say("counts of a step", None, note=json.dumps(found), counts=found)


def counted(folder: Path) -> dict[str, dict[str, float]]:
    """Aten operations, reads of tensors by the host and calls, of llmtrain and of a tuned loop."""
    sys.path.append(str(ROOT / "tests"))
    from helpers.step_counts import STEPS, Counter

    config, own, beside = config_for(folder, STEPS), Counter(), Counter()
    bare(beside.turn, iter(blocks(config, STEPS)), tuned=True)
    ours(own.turn, config, lambda: None)
    return {"llmtrain": own.counts(), "bare_tuned": beside.counts()}


if __name__ == "__main__":
    parts = {"steps": steps, "counts": counts}
    main(__doc__, parts, {"steps": (1500, 20), "warm": (500, 10)})
