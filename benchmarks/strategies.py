"""Does every strategy train the same? Losses and norms of 20 steps, against plain PyTorch.

    python benchmarks/strategies.py [--json FILE] [--markdown FILE]

A Llama of 3 layers (hidden 64, GQA 4/2, vocabulary 512), 16 × 64 tokens a step with uneven masks,
AdamW, clipping at 1.0, on CPU processes over gloo. The reference is a loop of torch and
transformers alone: one process, one micro-batch, `F.cross_entropy` with its mean and
`clip_grad_norm_`. bf16 is compared with the same loop under autocast. Then: what it saves to reduce
gradients once in a step of eight micro-batches instead of after each (two processes under DDP, turn
by turn).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from _strategy_rank import EVEN, ROWS, STEPS, Case, accumulate, model_of, rows, train

import llmtrain.training.loop  # noqa: F401  # what the forked ranks shall not import again

BASE = [
    *(Case("ddp", processes, 1) for processes in (1, 2, 4)),
    *(Case("ddp", 2, micro) for micro in (2, 8)),
    *(Case("fsdp2", processes, 2) for processes in (1, 2, 4)),
    *(Case("fsdp2", 2, micro) for micro in (1, 8)),
    Case("fsdp2", 2, 4, fsdp_sync="last"),
    Case("hsdp", 4, 2),
    Case("hsdp", 4, 4, fsdp_sync="last"),
    *(Case(f"zero{stage}", 2, 2) for stage in (1, 2, 3)),
    *(Case(f"zero{stage}", 2, 8) for stage in (1, 2, 3)),
    *(Case(f"zero{stage}", 4, 1) for stage in (1, 2, 3)),
    Case("zero3", 1, 2),
    Case("zero3_offload", 2, 2),
]
SPREAD = [Case(strategy, 2, 2) for strategy in ("ddp", "fsdp2", "zero1", "zero2", "zero3")]
CASES = [
    *BASE,
    *(replace(one, model=kind) for kind in ("tied", "frozen", "odd") for one in SPREAD),
    *(replace(one, recompute=mode) for mode in ("selective", "full") for one in SPREAD),
    *(replace(one, precision="bf16") for one in SPREAD),
    Case("hsdp", 4, 2, precision="bf16"),
]


def reference(kind: str, precision: str) -> list[tuple[float, float]]:
    """Loss and norm of each step by torch and transformers alone."""
    model = model_of(Case("ddp", 1, 1, model=kind))
    model.set_attn_implementation("sdpa")
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in trained if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in trained if p.ndim < 2 or "embed" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    found = []
    for step in range(STEPS):
        ids, labels = (torch.from_numpy(part).long() for part in rows(step, model.vocab_size))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 5)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def launch(processes: int, work: Callable[[Path], None], output: Path) -> None:
    """Fork ranks with what torchrun would give them; they leave by themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children = []
    for rank in range(processes):
        child = os.fork()
        if not child:
            _rank(rank, processes, port, work, output)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(f"ranks ended with {codes}")


def _rank(rank: int, processes: int, port: str, work: Callable[[Path], None], out: Path) -> None:
    os.environ |= {
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        # The shard group of hsdp is a node: two nodes of two processes.
        "LOCAL_WORLD_SIZE": str(min(processes, 2)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    if processes == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    warnings.simplefilter("ignore")  # the table is what is printed
    code = 1
    try:
        work(out)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def compared(case: Case, steps: list[list[float]], expected: list[list[float]]) -> dict:
    """The largest differences of a case from the reference."""
    pairs = list(zip(steps, expected, strict=True))
    loss = max(abs(one[0] - other[0]) for one, other in pairs)
    norm = max(abs(one[1] / other[1] - 1) for one, other in pairs)
    return {**asdict(case), "loss": loss, "norm": norm}


def measure(cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    """Run the cases one after the other."""
    references: dict[tuple[str, str], list[list[float]]] = {}
    found = []
    for number, case in enumerate(cases):
        output = folder / f"{number}.json"
        launch(case.processes, lambda path, case=case: train(case, path), output)
        key = (case.model, case.precision)
        if key not in references:
            # In a process of its own: with a CUDA build of torch, what is forked after a backward
            # has none.
            alone = folder / "reference.json"
            launch(1, lambda path, key=key: path.write_text(json.dumps(reference(*key))), alone)
            references[key] = json.loads(alone.read_text())
        found.append(compared(case, json.loads(output.read_text())["steps"], references[key]))
        print(line(found[-1]), flush=True)
    return found


def line(one: dict[str, Any]) -> str:
    """A row of the table."""
    kind = "" if one["model"] == "even" else one["model"]
    recompute = "" if one["recompute"] == "none" else f"recompute {one['recompute']}"
    sync = "sync last" if one["fsdp_sync"] == "last" else ""
    what = ", ".join(part for part in (kind, recompute, sync) if part) or "–"
    split = f"{one['processes']} × {one['micro']}"
    name, precision = one["strategy"], one["precision"]
    return f"| {name} | {split} | {precision} | {what} | {one['loss']:.1e} | {one['norm']:.1e} |"


def markdown(found: list[dict[str, Any]]) -> str:
    """The table of the documentation."""
    head = "| strategy | processes × micro-batches | precision | model | Δ loss | rel. Δ norm |"
    return "\n".join([head, "|---|---|---|---|---|---|", *map(line, found)]) + "\n"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--only", default="", help="strategies to run, separated by commas")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # as the ranks; threads that wait would take the cores from them
    only = asked.only.split(",") if asked.only else []
    with tempfile.TemporaryDirectory() as name:
        found = measure([one for one in CASES if not only or one.strategy in only], Path(name))
        output = Path(name) / "accumulate.json"
        launch(2, accumulate, output)
        seconds = json.loads(output.read_text())
    ratios = [each / once for once, each in zip(seconds["once"], seconds["each"], strict=True)]
    faster = statistics.median(ratios)
    print(f"eight micro-batches: reducing once is {faster:.2f} × as fast as after each")
    result = {
        "machine": f"{os.cpu_count()} × {platform.processor() or platform.machine()}, no GPU",
        "torch": torch.__version__,
        "blocks": ROWS,
        "model": EVEN,
        "cases": found,
        "accumulation_times_faster": faster,
    }
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    if asked.markdown:
        asked.markdown.write_text(markdown(found))


if __name__ == "__main__":
    main()
