"""What do head and loss cost in chunks, beside transformers' logits and torch's own kernel?

Forward and backward of 2,048 tokens, hidden 192, a vocabulary of 50,304, in one thread: the least
CPU seconds, and what a process of its own needs at its peak beyond the operands. Of conversations a
half or a quarter of the tokens is trained.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import Bench, apart, main, peak_mb, turns
from torch import Tensor
from torch.nn import functional as F

from llmtrain.distributed.engines.accelerator import cpu_rates
from llmtrain.model.cross_entropy import linear_cross_entropy
from llmtrain.types import NOT_TRAINED

GOALS = {"cpu": {"fp32": "≤ 0.76", "bf16": "≤ 0.50"}, "cuda": {"bf16": "≤ 1.10"}}  # of time
SHARES = {0.5: "≤ 0.58", 0.25: "≤ 0.33"}  # trained share of the tokens → time over that of all
Size = tuple[int, int, int]  # tokens, hidden, vocabulary
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def from_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def some_trained(share: float, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return our loss of a share of the tokens, whose positions are known as they are in a run."""
    draw = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    trained = draw[: int(share * len(labels))].sort().values
    masked = torch.full_like(labels, NOT_TRAINED).index_copy_(0, trained, labels[trained])
    return linear_cross_entropy(hidden, weight, masked, trained=trained)


PATHS: dict[str, Loss] = {
    "transformers": from_logits,
    "llmtrain": linear_cross_entropy,
    "torch": partial(F.linear_cross_entropy, reduction="sum"),  # with its own chunks
    **{f"llmtrain, {share:.0%} trained": partial(some_trained, share) for share in SHARES},
}


def operands(size: Size, device: str) -> tuple[Tensor, ...]:
    """Hidden and weight, leaves in fp32, and labels."""
    tokens, hidden, vocabulary = size
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, device=device).requires_grad_()
    weight = torch.randn(vocabulary, hidden, device=device).mul_(0.02).requires_grad_()
    return states, weight, torch.randint(vocabulary, (tokens,), device=device)


def seconds(path: str, precision: str, given: tuple[Tensor, ...]) -> float:
    """Of one forward and backward: CPU time, or the time of a GPU."""
    device = given[0].device.type

    def clock() -> float:
        if device == "cpu":
            return time.thread_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    began = clock()
    with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
        loss = PATHS[path](*given)
    loss.backward()
    return clock() - began


def extra_mb(path: str, precision: str, size: Size, device: str) -> dict[str, float]:
    """The MB that a forward and backward add to the peak of this process, or of the GPU."""

    def peak() -> float:
        return peak_mb() if device == "cpu" else torch.cuda.max_memory_allocated() / 1e6

    given = operands(size, device)
    _ = given[1] @ torch.ones(size[1], device=device)  # the libraries' own buffers
    before = peak()
    seconds(path, precision, given)
    return {"extra_mb": peak() - before}


def head(bench: Bench) -> None:
    sizes, rates = bench.sizes, cpu_rates()
    device, size = sizes.device, (sizes.tokens, sizes.hidden, sizes.vocabulary)
    bench.say("products", None, note=str(rates))
    shape = f"{size[0]} tokens, hidden {size[1]}, V {size[2]}"
    for precision, goal in GOALS[device].items():
        if precision not in sizes.precisions:
            continue
        if device == "cpu" and precision == "bf16" and rates.faster != "bf16":
            bench.say(precision, None, note=f"not the faster precision here: {rates}")
            continue
        best, memory = dict.fromkeys(PATHS, float("inf")), {}
        for _, path in turns(PATHS, sizes.rounds):
            best[path] = min(best[path], seconds(path, precision, operands(size, device)))
        for path in PATHS:
            asked = {"path": path, "precision": precision, "size": size, "device": device}
            memory[path] = apart(__file__, asked, 300)["extra_mb"]
            more = {"shape": shape, "precision": precision, "device": device}
            unit = "CPU ms" if device == "cpu" else "ms"
            bench.say(f"{path}, {precision}", 1000 * best[path], unit, **more)
            bench.say(f"{path}, {precision}: extra memory", memory[path], "MB", **more)
        ratio = best["llmtrain"] / best["transformers"]
        bench.say(f"time over transformers, {precision}", ratio, "×", goal)
        ratio = memory["llmtrain"] / memory["transformers"]
        bench.say(f"extra memory over transformers, {precision}", ratio, "×", "≤ 0.15")
        for share, limit in SHARES.items():
            ratio = best[f"llmtrain, {share:.0%} trained"] / best["llmtrain"]
            bench.say(f"time with {share:.0%} trained over all, {precision}", ratio, "×", limit)


SIZES: dict[str, tuple[Any, Any]] = {
    "rounds": (3, 1),
    "precisions": (("fp32", "bf16"), ("fp32",)),
    "tokens": (2048, 64),
    "hidden": (192, 192),
    "vocabulary": (50_304, 4096),
    "device": ("cpu", "cpu"),  # the goals of cuda are for 16,384 tokens, 2,048, 128,256
}

if __name__ == "__main__":
    main(__doc__, head, SIZES, child=extra_mb, pinned="cuda" not in sys.argv)
