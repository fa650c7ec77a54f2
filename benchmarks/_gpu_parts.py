"""The rows of `gpu.py` that train nothing, in a process of their own.

    python benchmarks/_gpu_parts.py JSON

JSON: `part` (ceiling, loss, attention), `device`. Prints a JSON object for each row. All numbers
are random, as products of zeros are faster.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional as F

ROUNDS = 5


def timed(work: Callable[[], object], device: str) -> float:
    """Return the seconds of one call, the median of five after one to warm up."""
    found = []
    for _ in range(ROUNDS + 1):
        if device == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            torch.cuda.synchronize()
            found.append(first.elapsed_time(last) / 1e3)
        else:
            began = time.perf_counter()
            work()
            found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def ceiling(device: str) -> None:
    """Print what the device multiplies and copies."""
    cuda = device == "cuda"
    size, dtype = (8192, torch.bfloat16) if cuda else (1024, torch.float32)
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    into = torch.empty_like(one)
    seconds = timed(lambda: torch.mm(one, other, out=into), device)
    elements = 2**30 if cuda else 2**25
    source = torch.randn(elements // 4, device=device).repeat(4)
    copy = torch.empty_like(source)
    copying = timed(lambda: copy.copy_(source), device)
    tell(tflops=2 * size**3 / seconds / 1e12, terabytes_per_second=8 * elements / copying / 1e12)


def loss(device: str) -> None:
    """Print time and extra memory of head and loss, forward and backward."""
    cuda = device == "cuda"
    width = 2048 if cuda else 64
    for vocabulary in (32_000, 50_304, 128_256) if cuda else (2048, 4096):
        for tokens in (4096, 16_384) if cuda else (256,):
            hidden = torch.randn(tokens, width, device=device, requires_grad=True)
            weight = torch.randn(vocabulary, width, device=device) / width**0.5
            weight.requires_grad_()
            labels = torch.randint(vocabulary, (tokens,), device=device)
            for path, function in PATHS.items():
                about = {"path": path, "vocabulary": vocabulary, "tokens": tokens, "width": width}
                try:
                    found = one_loss(function, hidden, weight, labels, device)
                except (AttributeError, ImportError, RuntimeError, TypeError) as error:
                    found = {"note": reason(error)}  # what this version lacks, or no memory
                tell(**about, **found)
            del hidden, weight, labels


def one_loss(
    function: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    device: str,
) -> dict[str, float]:
    """Return the seconds, the extra memory in MB and the mean loss of one path."""
    from llmtrain.metrics import memory

    values: list[torch.Tensor] = []

    def work() -> None:
        hidden.grad = weight.grad = None
        with torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext():
            values[:] = [function(hidden, weight, labels)]
        values[0].backward()

    seconds = timed(work, device)
    hidden.grad = weight.grad = None
    before = memory.reset_peak(torch.device(device))
    work()
    extra = memory.peak_bytes(torch.device(device)) - before
    return {"seconds": seconds, "extra_mb": extra / 1e6, "loss": values[0].item()}


def by_transformers(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return the mean loss as transformers' models compute it."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits = F.linear(hidden, weight)[None]
    return ForCausalLMLoss(logits, labels[None], weight.shape[0], shift_labels=labels[None])


def chunked(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss by llmtrain's kernel."""
    from llmtrain.model.cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, labels) / len(labels)


def by_torch(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss by torch's own kernel, which autocast does not cast for."""
    if torch.is_autocast_enabled("cuda") and hidden.is_cuda:
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
    return F.linear_cross_entropy(hidden, weight, labels)


PATHS = {"transformers": by_transformers, "chunked": chunked, "torch": by_torch}


def attention(device: str) -> None:
    """Print the time of causal attention, forward and backward, by each of torch's kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cuda = device == "cuda"
    for size in ((64, 12, 1024, 64), (8, 32, 2048, 64)) if cuda else ((4, 2, 64, 32),):
        dtype = torch.bfloat16 if cuda else torch.float32
        heads = [torch.randn(size, device=device, dtype=dtype) for _ in range(3)]
        for one in heads:
            one.requires_grad_()
        batch, number, seq_len, width = size
        for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):

            def work(heads: list[torch.Tensor] = heads, name: str = name) -> None:
                with sdpa_kernel([getattr(SDPBackend, name)]):
                    F.scaled_dot_product_attention(*heads, is_causal=True).sum().backward()

            try:
                seconds = timed(work, device)
            except RuntimeError as error:
                tell(backend=name, size=size, note=reason(error))
                continue
            operations = 3.5 * 2 * batch * number * seq_len**2 * width  # causal; flash recomputes
            tell(backend=name, size=size, seconds=seconds, tflops=operations / seconds / 1e12)


def reason(error: Exception) -> str:
    """Return the first line of an error."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]


def tell(**found: Any) -> None:
    """Print a row."""
    print(json.dumps(found), flush=True)


PARTS = {"ceiling": ceiling, "loss": loss, "attention": attention}


def main() -> None:
    """Measure one part."""
    asked = json.loads(sys.argv[1])
    torch.manual_seed(0)
    PARTS[asked["part"]](asked["device"])


if __name__ == "__main__":
    main()
