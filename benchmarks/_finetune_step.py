"""The part `step` of `finetune.py`: a LoRA run's step beside a loop of peft, as one writes it.

Each variant runs in a thread of its own and takes its turn step by step, as in `loop.py`. The last
losses must agree, or the figures mean nothing.
"""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _finetune_runs import LORA
from _loop_contenders import Next, Turns, ours
from loop import take_part
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import llmtrain

SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 704,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
SEQ_LEN, ROWS, RATE, SEED = 128, 4, 1e-4, 42
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def base_of(folder: Path) -> Path:
    """Return a directory with random weights."""
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder / "small")
    return folder / "small"


def config_of(folder: Path, base: Path, steps: int) -> Any:
    """Return the config of the run, on the built-in sample."""
    path = folder / "step.json"
    keys = {
        "run": {"dir": str(folder / "step"), "seed": SEED},
        "model": {
            "from": str(base),
            "tokenizer": "sample",
            "activation_checkpointing": "none",
        },
        "adapter": LORA,
        "data": {"sources": [{"path": "sample"}], "seq_len": SEQ_LEN, "heldout": 0.0},
        "training": {
            "steps": steps,
            "global_batch_size": ROWS,
            "micro_batch_size": ROWS,
            "precision": "fp32",
        },
        "optimizer": {"learning_rate": RATE, "schedule": "constant", "warmup_steps": 1},
        "checkpoint": {"every_steps": 10 * steps},
    }
    path.write_text(json.dumps(keys))  # YAML is a superset
    return llmtrain.load_config(path)


def peft_model(base: Path) -> Any:
    """Return the model that the run trains, made by transformers and peft alone."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(SEED)
    settings = LoraConfig(
        task_type="CAUSAL_LM", r=LORA["r"], lora_alpha=LORA["alpha"], target_modules=LINEAR
    )
    return get_peft_model(model, settings).train()


def with_peft(turn: Next, model: Any, batches: Iterator[torch.Tensor]) -> float:
    """Train as one does by hand. Returns the last loss."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for n, p in trained.items() if "lora_A" in n], "weight_decay": 0.1},
        {"params": [p for n, p in trained.items() if "lora_B" in n], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1.0)
    parameters = list(trained.values())
    loss = torch.zeros(())
    turn()
    for ids in batches:
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        turn()
    return loss.item()


def step(bench: Any) -> None:
    """Measure all variants, a step of each in turn."""
    steps, warm = bench.sizes.steps, bench.sizes.warm
    base = base_of(bench.folder)
    config = config_of(bench.folder, base, steps)
    with llmtrain.open_stream(config) as stream:
        batches = [torch.from_numpy(next(stream).ids).long() for _ in range(steps)]
    models = {name: peft_model(base) for name in ("peft", "peft again")}
    turns = Turns([*models, "llmtrain"])
    losses: dict[str, float] = {}
    work: dict[str, Callable[[Next], float]] = {
        name: lambda turn, model=model: with_peft(turn, model, iter(batches))
        for name, model in models.items()
    }
    work["llmtrain"] = lambda turn: ours(turn, config, lambda: turns.wait_for_all(steps + 1))
    threads = [
        threading.Thread(target=take_part, args=(turns, name, one, steps, losses))
        for name, one in work.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(losses) < len(work):
        raise SystemExit("a variant failed; no figures")
    counted = {name: seconds[1 + warm :] for name, seconds in turns.seconds.items()}
    least = {name: min(seconds) for name, seconds in counted.items()}
    middle = {name: statistics.median(seconds) for name, seconds in counted.items()}
    more = {"last_losses": losses, "shape": {**SHAPE, "seq_len": SEQ_LEN, "rows": ROWS}}
    bench.say("a LoRA step of peft, transformers and torch", 1e3 * least["peft"], "ms")
    ratio = least["llmtrain"] / least["peft"]
    bench.say("  llmtrain's over that, minima", ratio, "×", "≤ 1.05", **more)
    bench.say("  medians", middle["llmtrain"] / middle["peft"], "×")
    bench.say("  the same loop of peft over that, minima", least["peft again"] / least["peft"], "×")
    bench.say("  last loss, llmtrain's less that of peft", losses["llmtrain"] - losses["peft"], "")
