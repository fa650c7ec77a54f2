"""How near does llmtrain come to what one GPU can do, beside a bare loop and the Trainer?

The same model, weights and blocks in bf16; 20 of 30 steps count. `mfu` counts attention over whole
rows, `mfu_causal` half of it, recomputation never. `memory` is the measured peak over the planned
one without its reserve. No GPU has run it yet: without one it ends with 2, and `--quick` rehearses
it on a CPU.
"""

import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from harness import Bench, around, config_of, fresh_model, llama, main, measure, one_core, peak_mb

STEPS, WARM, SAVES_AT = 30, 10, (4, 8)
RATE, BETAS = 1e-4, (0.9, 0.95)


class Shape(NamedTuple):
    """A model. blocks: layers, width of the heads together, parameters of a block in products;
    rows: blocks in a step; floor: of tokens a second on one H200.
    """

    config: dict[str, Any]
    blocks: tuple[int, int, int]
    seq_len: int
    rows: int
    floor: int = 0

    def flops(self, *, causal: bool) -> float:
        """The operations of a token: forward and backward, nothing recomputed."""
        layers, width, parameters = self.blocks
        count = layers * parameters + self.config["vocab_size"] * width
        return 6.0 * count + (6 if causal else 12) * layers * width * self.seq_len


def gpt2(layers: int, heads: int, width: int, rows: int, floor: int = 0) -> Shape:
    seq_len, vocabulary = (1024, 50_304) if floor else (64, 2048)
    config = {"model_type": "gpt2", "vocab_size": vocabulary, "n_positions": seq_len}
    config |= {"n_layer": layers, "n_head": heads, "n_embd": width}
    config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config |= {"activation_function": "gelu_pytorch_tanh"}  # gelu_new: the same in eight kernels
    return Shape(config, (layers, width, 12 * width**2), seq_len, rows, floor)


LLAMA_1B = {"model_type": "llama", "num_key_value_heads": 8, "bos_token_id": 0, "eos_token_id": 0}
LLAMA_1B |= {"pad_token_id": 0, **llama(2048, 16, 32, 8192, 128_256, 2048)}
A_BLOCK = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192
SHAPES = {
    "124M": gpt2(12, 12, 768, 64, 420_000),
    "llama-1b": Shape(LLAMA_1B, (16, 2048, A_BLOCK), 2048, 8, 52_000),
    "350M": gpt2(24, 16, 1024, 32, 160_000),
    "1.5B": gpt2(48, 25, 1600, 16, 45_000),
    "tiny": gpt2(2, 2, 64, 4),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llmtrain, blocks compiled": {"kind": "llmtrain", "compile": "blocks"},
    "bare, blocks compiled": {"kind": "bare", "compile": "blocks"},
    "Trainer": {"kind": "trainer"},
    "Trainer, torch_compile": {"kind": "trainer", "torch_compile": True},
    "llmtrain, eager": {"kind": "llmtrain"},
    "bare, eager": {"kind": "bare"},
}


def row(bench: Bench, name: str, shape: str, **asked: Any) -> dict[str, Any] | None:
    """Measure in a process of its own; None, and a row with the reason, if that fails."""
    asked |= {"shape": shape, "rows": SHAPES[shape].rows, "steps": bench.sizes.steps}
    with TemporaryDirectory() as folder:
        asked |= {"device": bench.sizes.device, "folder": folder}
        found, wrong = measure(__file__, asked, bench.sizes.limit)
    if not wrong:
        return found[-1]
    waited = asked.get("checked") and "synchroniz" in wrong
    bench.say(name, 1 if waited else None, "", "≤ 0" if waited else "", note=wrong)
    return None


def train(bench: Bench) -> None:
    peak = peak_of(bench)
    for shape in bench.sizes.shapes:
        rates: dict[str, float] = {}
        for variant, asked in VARIANTS.items():
            if found := row(bench, f"{shape}: {variant}", shape, **asked):
                rates[variant] = rate = found["tokens_per_second"]
                more = dict(found)
                for key, causal in (("mfu", False), ("mfu_causal", True)):
                    more[key] = rate * SHAPES[shape].flops(causal=causal) / peak if peak else None
                bench.say(f"{shape}: {variant}", rate, "tokens/s", **more)
        compare(bench, shape, rates)


def compare(bench: Bench, shape: str, rates: Mapping[str, float]) -> None:
    """Add the rows of goals; on a CPU the figures are a rehearsal, and none is judged."""
    ours = {mode: rates.get(f"llmtrain, {mode}") for mode in ("eager", "blocks compiled")}
    best = max((rate for rate in ours.values() if rate), default=None)
    floor = SHAPES[shape].floor
    rows = [("the better of llmtrain's", best, f"≥ {floor}")] if floor else []
    for mode, rate in ours.items():
        bare = rates.get(f"bare, {mode}")
        ratio = bare / rate if bare and rate else None
        rows.append((f"time of a step over the bare loop's, {mode}", ratio, "≤ 1.01"))
    for name, goal in (("Trainer", "≥ 1.3"), ("Trainer, torch_compile", "≥ 1.15")):
        ratio = best / rates[name] if best and name in rates else None
        rows.append((f"tokens/s of llmtrain over {name}", ratio, goal))
    for name, figure, goal in rows:
        note = {} if figure else {"note": "not all of it was measured"}
        bench.say(f"{shape}: {name}", figure, "", judged(bench, goal), **note)


def sync(bench: Bench) -> None:
    peak_of(bench)
    for masked, what in ((False, "whole blocks"), (True, "document_mask")):
        name, shape = f"waits for the device in 20 steps: {what}", bench.sizes.shapes[0]
        asked = {"kind": "llmtrain", "checked": True, "document_mask": masked}
        if row(bench, name, shape, **asked) and judged(bench, "≤ 0"):
            bench.say(name, 0, "waits", "≤ 0")
        elif not judged(bench, "≤ 0"):
            bench.say(name, None, note="only CUDA can make a wait an error")


def save(bench: Bench) -> None:
    peak_of(bench)
    shape = bench.sizes.shapes[-1]
    if found := row(bench, f"{shape}: save", shape, kind="llmtrain", saved=True):
        for which, blocked in enumerate(found["blocked_seconds"], 1):
            size, ratio = found["bytes"], found["torch_save_seconds"] / blocked
            goal = judged(bench, "≤ 1")
            bench.say(f"{shape}: save {which}: blocked", blocked, "s", goal, bytes=size)
            goal = judged(bench, "≥ 10")
            bench.say(f"{shape}: torch.save over save {which}", ratio, "×", goal)


def memory(bench: Bench) -> None:
    peak_of(bench)
    for shape, strategy in product(bench.sizes.shapes, ("ddp", "fsdp2", "fsdp2_offload")):
        name = f"{shape}, {strategy}: measured peak over the plan's"
        if found := row(bench, name, shape, kind="llmtrain", strategy=strategy):
            ratio = found["measured_gb"] / found["planned_gb"]
            bench.say(name, ratio, "×", **found)


def judged(bench: Bench, goal: str) -> str:
    """The goal, which a rehearsal on a CPU does not have."""
    return "" if bench.about["device"] == "cpu" else goal


def peak_of(bench: Bench) -> float | None:
    """Name the device in all rows and return its peak; end with 2 where it is not there."""
    import torch

    from llmtrain.distributed.plan.speed import machine_of

    bench.about["device"] = bench.sizes.device
    if bench.sizes.device == "cpu":
        return None
    if not torch.cuda.is_available():
        print("not measured: no GPU (--quick rehearses it on a CPU)", file=sys.stderr)
        sys.exit(2)
    bench.about["device"] = torch.cuda.get_device_name()
    machine = machine_of(bench.about["device"])
    return machine.peak if machine else None


# One row, in a process of its own


class Clock:
    """Takes the time of the last two thirds of the steps."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._asked, self._turns, self._began = asked, 0, 0.0
        self._warm, self._cuda = asked["steps"] * WARM // STEPS, asked["device"] == "cuda"

    def turn(self) -> None:
        """A step begins."""
        if self._turns == self._warm:
            self._began = self._now()
        self._turns += 1

    def _now(self) -> float:
        import torch

        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def found(self, loss: float) -> dict[str, Any]:
        import torch

        asked = self._asked
        seconds = (self._now() - self._began) / (asked["steps"] - self._warm)
        peak = torch.cuda.max_memory_allocated() / 1e6 if self._cuda else peak_mb()
        rate = asked["rows"] * SHAPES[asked["shape"]].seq_len / seconds
        about = {key: asked[key] for key in ("shape", "rows", "steps")}
        return {**about, "tokens_per_second": rate, "peak_mb": peak, "last_loss": loss}


def child(**asked: Any) -> dict[str, Any]:
    return {"bare": bare, "llmtrain": ours, "trainer": trainer}[asked["kind"]](asked)


def config_for(asked: dict[str, Any]) -> Any:
    from loop import OPTIMIZER

    import llmtrain

    shape, own = SHAPES[asked["shape"]], asked if asked["kind"] == "llmtrain" else {}
    precision = "bf16" if asked["device"] == "cuda" else "fp32"
    rows = asked["rows"] // (2 if "strategy" in own else 1)  # the plan is compared with two of them
    path = config_of(
        Path(asked["folder"]),
        steps=asked["steps"],
        rows=asked["rows"],
        seq_len=shape.seq_len,
        model={"config": shape.config, "tokenizer": "sample", "activation_checkpointing": "none"},
        data={"document_mask": own.get("document_mask", False)},
        distributed={key: own[key] for key in own if key == "strategy"},
        training={"micro_batch_size": rows, "precision": precision}
        | {key: own[key] for key in own if key == "compile"},
        optimizer=OPTIMIZER | {"learning_rate": RATE, "weight_decay": 0.0},
        checkpoint={"every_steps": SAVES_AT[0], "keep_best": 0, "keep_last": 2},
    )
    return llmtrain.load_config(path)


def bare(asked: dict[str, Any]) -> dict[str, Any]:
    """A loop as one writes it by hand, with llmtrain's attention and loss."""
    import torch
    from loop import blocks, by_hand

    from llmtrain.model import attention
    from llmtrain.model.compile import compile_blocks
    from llmtrain.model.loss import Head, LossModule, examine

    shape, cuda = SHAPES[asked["shape"]], asked["device"] == "cuda"
    batches, model = blocks(config_for(asked), asked["steps"]), fresh_model(**shape.config)
    attention.install(model, shape.seq_len)
    head = examine(model)
    module = LossModule(model, head if isinstance(head, Head) else None)
    if "compile" in asked:
        compile_blocks(model, "blocks")
    module.to(asked["device"])
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=BETAS, weight_decay=0.0, fused=True)

    def loss_of(module: Any, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext():
            return module(ids[:, :-1], ids[:, 1:].contiguous()) / (asked["rows"] * shape.seq_len)

    clock = Clock(asked)
    batches = [ids.pin_memory() for ids in batches] if cuda else batches
    moved = (ids.to(asked["device"], non_blocking=True) for ids in batches)
    loss = by_hand(clock.turn, moved, module, optimizer, parameters, RATE, loss_of=loss_of)
    return clock.found(loss)


def trainer(asked: dict[str, Any]) -> dict[str, Any]:
    """transformers' Trainer on the same blocks; all T positions are trained, as in llmtrain."""
    from loop import blocks, trainer as train

    clock, cpu = Clock(asked), asked["device"] == "cpu"
    rows = [
        {"input_ids": ids[:-1], "labels": ids[:-1], "shift_labels": ids[1:]}
        for step in blocks(config_for(asked), asked["steps"])
        for ids in step
    ]
    settings = {"max_steps": asked["steps"], "per_device_train_batch_size": asked["rows"]}
    settings |= {"bf16": not cpu, "use_cpu": cpu, "torch_compile": "torch_compile" in asked}
    settings |= {"learning_rate": RATE, "lr_scheduler_type": "constant", "adam_beta2": BETAS[1]}
    settings |= {"remove_unused_columns": False}
    model = fresh_model(**SHAPES[asked["shape"]].config)
    return clock.found(train(clock.turn, model, rows, asked["folder"], **settings))


def ours(asked: dict[str, Any]) -> dict[str, Any]:
    """llmtrain. It makes no checkpoint but those asked for: that of the last step takes minutes."""
    import torch

    import llmtrain
    from llmtrain.training import saving
    from llmtrain.training.start import weights

    config, clock = config_for(asked), Clock(asked)
    checked, more = asked.get("checked") and asked["device"] == "cuda", dict[str, Any]()

    def begin(original: Any, run: Any, step: int) -> None:
        clock.turn()
        if checked and step == WARM + 1:
            torch.cuda.set_sync_debug_mode("error")
        original(run, step)

    def finish(original: Any, run: Any) -> Any:
        if checked:
            torch.cuda.set_sync_debug_mode("default")
        more.update(clock.found(0.0))
        if asked.get("saved"):
            from checkpoint import torch_save

            shutil.rmtree(run.run_dir / "checkpoints")  # the disk may not hold a third
            optimizer = run.engine._optimizer.state_dict()
            state = {"model": run.built.model.state_dict(), "optimizer": optimizer}
            began = time.perf_counter()
            torch_save(run.run_dir / "torch.pt", state)
            more["torch_save_seconds"] = time.perf_counter() - began
        return original(run)

    def save(original: Any, run: Any, step: int) -> None:
        if asked.get("saved") and step in SAVES_AT:
            original(run, step)
        else:
            saving.commit(run)  # at the last step that of the one in flight

    weights.check_room = lambda *given: None  # there is room for the two saves, or none is made
    with around(begin=begin, finish=finish, save=save):
        llmtrain.train(config)
    run = llmtrain.open_run(config.run_dir)
    more["last_loss"] = run.metrics("train")[-1]["loss"]
    if saves := run.metrics("checkpoint"):
        more["blocked_seconds"] = [line["blocked_seconds"] for line in saves]
        more["bytes"] = saves[0]["bytes"]
    events = [line for line in run.metrics("event") if line["event"] == "memory_compared"]
    return more | (events[-1]["detail"] if events else {})


SIZES: dict[str, tuple[Any, Any]] = {
    "shapes": (("124M", "llama-1b", "350M", "1.5B"), ("tiny",)),
    "device": ("cuda", "cpu"),
    "steps": (STEPS, 12),
    "limit": (240, 120),  # seconds of a process
}

if __name__ == "__main__":
    if "--quick" in sys.argv:
        one_core()  # threads that wait for each other on a busy machine take minutes
    parts = {"train": train, "sync": sync, "save": save, "memory": memory}
    main(__doc__, parts, SIZES, child=child, pinned=False)
