"""Head and loss: our chunks against transformers' logits and torch's kernel, in time and memory.

    python benchmarks/head.py [--rounds 3] [--json FILE]

2,048 tokens, hidden 192, a vocabulary of 50,304: the forward and backward of head and loss alone,
in turns, in one thread. Times are the least CPU seconds of a thread; memory is what a process of
its own needs at its peak beyond its operands. Rows in bf16 have no goal where a timed product shows
that bf16 is not the faster precision of this machine.

The last rows are those of conversations, of whose tokens a half or a quarter is trained, against
the same loss with all of them trained, in the same turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _rows import Table, measure, one_core, peak_mb
from torch import Tensor
from torch.nn import functional as F

from llmtrain.distributed.engines.accelerator import cpu_rates
from llmtrain.model.cross_entropy import linear_cross_entropy
from llmtrain.types import NOT_TRAINED

TOKENS, HIDDEN, VOCABULARY = 2048, 192, 50_304
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GOALS = {"fp32": "≤ 0.76", "bf16": "≤ 0.50"}
MEMORY_GOAL = "≤ 0.15"
SHARES = {0.5: "≤ 0.58", 0.25: "≤ 0.33"}  # trained share of the tokens → time over that of all


def from_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As `ForCausalLMLoss` of transformers does it."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def by_torch(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """By the kernel of torch, with its own chunks."""
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum")


PATHS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "transformers": from_logits,
    "llmtrain": linear_cross_entropy,
    "torch": by_torch,
}


def some_trained(share: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return our loss of a share of the tokens, whose positions are known as they are in a run."""
    draw = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    trained = draw[: int(share * TOKENS)].sort().values

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        masked = torch.full_like(labels, NOT_TRAINED).index_copy_(0, trained, labels[trained])
        return linear_cross_entropy(hidden, weight, masked, trained=trained)

    return loss


def of_share(share: float) -> str:
    """Return the name of our path with a share of the tokens."""
    return f"llmtrain, {share:.0%} trained"


PATHS |= {of_share(share): some_trained(share) for share in SHARES}


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden and weight, leaves in fp32, and labels."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).mul_(0.02).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def once(path: str, precision: str) -> float:
    """Return the CPU seconds of one forward and backward."""
    hidden, weight, labels = operands()
    began = time.thread_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = PATHS[path](hidden, weight, labels)
    loss.backward()
    return time.thread_time() - began


def extra_mb(path: str, precision: str) -> float:
    """Return the MB that a forward and backward add to the peak of a process of its own."""
    found, wrong = measure("head.py", {"path": path, "precision": precision}, 300)
    if wrong:
        sys.exit(f"{path}: {wrong}")
    return float(found[-1]["extra_mb"])


def alone(path: str, precision: str) -> None:
    """Print the memory of one path, in a process of its own."""
    torch.set_num_threads(1)
    _ = operands()[1] @ torch.ones(HIDDEN)  # the libraries' own buffers
    before = peak_mb()
    once(path, precision)
    print(json.dumps({"extra_mb": peak_mb() - before}))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    table, rates = Table("head", asked.json), cpu_rates()
    table.say("products", None, note=str(rates))
    shape = f"{TOKENS} tokens, hidden {HIDDEN}, V {VOCABULARY}"
    for precision in DTYPES:
        counted = precision == "fp32" or rates.faster == "bf16"
        if not counted:
            table.say(f"{precision}", None, note=f"not the faster precision here: {rates}")
            continue
        best = dict.fromkeys(PATHS, float("inf"))
        for _ in range(asked.rounds):
            for path in PATHS:
                best[path] = min(best[path], once(path, precision))
        memory = {path: extra_mb(path, precision) for path in PATHS}
        for path in PATHS:
            more = {"shape": shape, "precision": precision, "threads": torch.get_num_threads()}
            table.say(f"{path}, {precision}", 1000 * best[path], "CPU ms", **more)
            table.say(f"{path}, {precision}: extra memory", memory[path], "MB", **more)
        time_ratio = best["llmtrain"] / best["transformers"]
        memory_ratio = memory["llmtrain"] / memory["transformers"]
        table.say(f"time over transformers, {precision}", time_ratio, "×", GOALS[precision])
        table.say(f"extra memory over transformers, {precision}", memory_ratio, "×", MEMORY_GOAL)
        for share, goal in SHARES.items():
            name = f"time with {share:.0%} trained over all, {precision}"
            table.say(name, best[of_share(share)] / best["llmtrain"], "×", goal)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        alone(**json.loads(sys.argv[1]))
    else:
        one_core()
        main()
