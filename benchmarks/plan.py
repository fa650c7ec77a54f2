"""The tables of docs/reference/plan-figures.md: what is chosen for four models; scaling.

    python benchmarks/plan.py [--docs docs/reference/plan-figures.md] [--json FILE]

Arithmetic alone: nothing is allocated, and no device is asked. --docs writes the tables into the
page, between its marks.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _published import MISSES, ROWS, error, predicted

from llmtrain.config.schema import Config
from llmtrain.distributed.plan.memory import Hardware
from llmtrain.distributed.plan.speed import device_by_memory
from llmtrain.tools.plan import Plan, plan_on
from llmtrain.training.start.planning import describe

GIB = 2**30
BATCH = 512
# hidden, MLP, blocks, heads, key-value heads, vocabulary, tied; tokens of a block
MODELS: dict[str, tuple[tuple[int, int, int, int, int, int, bool], int]] = {
    "124 M": ((768, 2048, 12, 12, 12, 50_257, True), 1024),
    "1 B": ((2048, 5632, 22, 32, 4, 32_000, False), 2048),
    "8 B": ((4096, 14336, 32, 32, 8, 128_256, False), 8192),
    "70 B": ((8192, 28672, 80, 64, 8, 128_256, False), 8192),
}
SIZES = [(devices, gib, 1) for gib in (24, 80, 141) for devices in (1, 2, 8)]
PLACES = {"124 M": SIZES, "1 B": SIZES, "8 B": SIZES, "70 B": [(8, 80, 8)]}


def config(name: str) -> Config:
    """Llama's kind of model, everything on auto, 512 blocks a step."""
    (hidden, mlp, blocks, heads, kv, vocabulary, tied), seq_len = MODELS[name]
    model = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": seq_len,
    }
    return Config.model_validate(
        {
            "model": {"config": model, "tokenizer": "sample"},
            "data": {"sources": [{"path": "sample"}], "seq_len": seq_len},
            "training": {"steps": 1000, "global_batch_size": BATCH},
        }
    )


def plans(names: Sequence[str] = tuple(PLACES)) -> Iterator[tuple[str, Plan]]:
    """Each model on each of its places."""
    for name in names:
        asked = config(name)
        places = [
            Hardware(gib * GIB, None, devices, nodes, device_by_memory(gib))
            for devices, gib, nodes in PLACES[name]
        ]
        model = describe(asked, places[0])
        for hardware in places:
            yield name, plan_on(asked, model, hardware, assumed=True)


def choices(found: Sequence[tuple[str, Plan]]) -> Iterator[str]:
    """What is chosen, and how near the simpler strategies come."""
    head = "model", "devices", "chosen", "recomputed", "micro × accum.", "GiB", "host GiB"
    yield "| " + " | ".join([*head, "tokens/s a device", "missing"]) + " |"
    yield "|---" * 9 + "|"
    for name, plan in found:
        hardware, one = plan.hardware, plan.chosen
        nodes = f"{hardware.nodes} × " if hardware.nodes > 1 else ""
        place = f"{nodes}{hardware.devices_per_node} × {hardware.device_bytes // GIB} GiB"
        misses = [
            f"{other.layout.strategy} {other.missing_bytes / GIB:.1f}"
            for other in plan.choice.candidates
            if not other.fits
        ]
        assert one is not None
        layout = one.layout
        sync = ", sync last" if layout.fsdp_sync == "last" else ""
        speed = (one.tokens_per_second or 0) / hardware.devices
        cells = [
            name,
            place,
            layout.strategy + sync,
            layout.activation_checkpointing,
            f"{layout.micro_batch_size} × {layout.accumulation}",
            f"{one.memory.total_bytes / GIB:.1f}",
            f"{one.memory.host_bytes / GIB:.1f}",
            f"{speed:,.0f}",
            ", ".join(misses) or "–",
        ]
        yield "| " + " | ".join(cells) + " |"


def parts(found: Sequence[tuple[str, Plan]]) -> Iterator[str]:
    """Every strategy of the 8 B model on eight devices of 80 GiB."""
    (plan,) = (
        one
        for name, one in found
        if name == "8 B" and one.hardware.devices == 8 and one.hardware.device == "H100"
    )
    names = list(plan.choice.candidates[0].memory.parts)
    yield "| GiB | recomputed | micro | " + " | ".join([*names, "total", "fits"]) + " |"
    yield "|---" * (len(names) + 5) + "|"
    for one in plan.choice.candidates:
        numbers = [*one.memory.parts.values(), one.memory.total_bytes]
        cells = [
            one.layout.strategy,
            one.layout.activation_checkpointing,
            f"{one.layout.micro_batch_size}",
            *(f"{number / GIB:.2f}" for number in numbers),
            "yes" if one.fits else "no",
        ]
        yield "| " + " | ".join(cells) + " |"


def scaling() -> Iterator[str]:
    """Published runs, the misses among them."""
    yield "| run | device | GPUs | predicted | published | error, points |"
    yield "|---" * 6 + "|"
    for row in (*ROWS, *MISSES):
        miss = "*miss:* " if row in MISSES else ""
        yield (
            f"| {miss}{row.source} | {row.device} | {row.gpus[0]} → {row.gpus[1]} "
            f"| {predicted(row):,.0f} | {row.published[1]:,} | {error(row):+.1f} |"
        )


def put(text: str, name: str, lines: Sequence[str]) -> str:
    """The page with these lines between the marks of that name."""
    mark, end = f"<!-- {name} -->\n", "\n<!-- end -->"
    assert mark in text, f"no mark {name}"
    between = re.compile(re.escape(mark) + ".*?" + re.escape(end), re.DOTALL)
    return between.sub(lambda _: mark + "\n" + "\n".join(lines) + "\n" + end, text, count=1)


def tables() -> dict[str, list[str]]:
    """Name of a mark → its lines."""
    found = list(plans())
    return {
        "choices": list(choices(found)),
        "parts": list(parts(found)),
        "scaling": list(scaling()),
    }


def rows() -> Iterator[dict[str, Any]]:
    """Everything as JSON, for --json."""
    for name, plan in plans():
        yield {"bench": "plan", "model": name, **plan.to_json()}
    for row in (*ROWS, *MISSES):
        yield {"bench": "scaling", "run": row.source, "device": row.device, "error": error(row)}


def main() -> None:
    """Reckon, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.json:
        asked.json.write_text("".join(json.dumps(row) + "\n" for row in rows()))
        return
    for name, lines in tables().items():
        if asked.docs:
            page = asked.docs.read_text(encoding="utf-8")
            asked.docs.write_text(put(page, name, lines), encoding="utf-8")
        else:
            print("\n".join([name, *lines, ""]))


if __name__ == "__main__":
    main()
