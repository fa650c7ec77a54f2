"""The shapes, rows and goals of `gpu.py`, and the rows that compare others. Nothing heavy here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from _rows import Table

STEPS, WARM = 30, 10
REHEARSED, REHEARSED_WARM = 6, 2  # on a CPU
CHECKED = 20  # steps without a wait for the device
_GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_pytorch_tanh",  # gelu_new is the same in eight kernels
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, and how it is trained.

    config: fields of its transformers config
    blocks: layers, width of the heads together, and parameters of a block in matrix products
    rows: blocks in a step, which is one micro-batch
    goals: floor, target and stretch on one H200, in tokens a second
    """

    config: dict[str, Any]
    vocabulary: int
    blocks: tuple[int, int, int]
    seq_len: int
    rows: int
    goals: tuple[int, int, int] | None = None

    def flops(self, *, causal: bool) -> float:
        """Return the operations of a token: forward and backward, nothing recomputed."""
        layers, width, parameters = self.blocks
        count = layers * parameters + self.vocabulary * width
        return 6.0 * count + (6 if causal else 12) * layers * width * self.seq_len


def _gpt2(
    layers: int, heads: int, width: int, vocabulary: int, seq_len: int, rows: int, *goals: int
) -> Shape:
    size = {"n_layer": layers, "n_head": heads, "n_embd": width, "n_positions": seq_len}
    config = _GPT2 | size | {"vocab_size": vocabulary}
    goal = (goals[0], goals[1], goals[2]) if goals else None
    return Shape(config, vocabulary, (layers, width, 12 * width**2), seq_len, rows, goal)


_LLAMA_1B = Shape(
    {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "vocab_size": 128_256,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    },
    128_256,
    (16, 2048, 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192),
    2048,
    8,
    (52_000, 60_000, 66_000),
)
SHAPES = {
    "124M": _gpt2(12, 12, 768, 50_304, 1024, 64, 420_000, 463_000, 500_000),
    "llama-1b": _LLAMA_1B,
    "350M": _gpt2(24, 16, 1024, 50_304, 1024, 32, 160_000, 185_000, 200_000),
    "1.5B": _gpt2(48, 25, 1600, 50_304, 1024, 16, 45_000, 49_000, 52_000),
    "tiny": _gpt2(2, 2, 64, 2048, 64, 4),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A process of the table.

    part: what `--only` may name beside the shape
    script: that measures it, with `asked`
    seconds: that it is expected to take
    limit: seconds after which it is ended
    """

    name: str
    shape: str
    part: str
    script: str
    asked: dict[str, Any] = field(default_factory=dict)
    seconds: float = 40
    limit: float = 120


def rows_of(device: str) -> Iterator[Row]:
    """Yield the rows in the order in which they are measured."""
    shapes = ["tiny"] if device == "cpu" else ["124M", "llama-1b", "350M", "1.5B"]
    yield Row("ceiling at the start", shapes[0], "ceiling", "_gpu_parts.py", seconds=15)
    for shape in shapes:
        yield from _variants(shape)
        if shape == shapes[0]:
            yield from _once(shape, shapes[-1])
    yield Row("ceiling at the end", shapes[0], "ceiling", "_gpu_parts.py", seconds=15)


_COMPILED: dict[str, Any] = {"compile": "blocks"}


def _variants(shape: str) -> Iterator[Row]:
    for name, kind, asked, seconds in (
        ("llmtrain, blocks compiled", "llmtrain", _COMPILED, 50),
        ("bare, blocks compiled", "bare", _COMPILED, 50),
        ("Trainer", "trainer", {}, 30),
        ("Trainer, torch_compile", "trainer", {"torch_compile": True}, 60),
        ("llmtrain, eager", "llmtrain", {}, 30),
        ("bare, eager", "bare", {}, 30),
        (
            "llmtrain, blocks compiled, FSDP2 of one process",
            "llmtrain",
            _COMPILED | {"strategy": "fsdp2"},
            50,
        ),
    ):
        yield Row(
            f"{shape}: {name}",
            shape,
            "train",
            "_gpu_runs.py",
            {"kind": kind, **asked},
            seconds,
        )


def _once(shape: str, largest: str) -> Iterator[Row]:
    """Yield the rows that one shape is enough for."""
    again = {"kind": "bare"}
    yield Row(f"{shape}: bare, eager, again", shape, "train", "_gpu_runs.py", again, 30)
    for masked, name in ((False, "whole blocks"), (True, "document_mask")):
        asked = {"kind": "llmtrain", "checked": True, "document_mask": masked}
        yield Row(f"waits for the device: {name}", shape, "sync", "_gpu_runs.py", asked, 30)
    yield Row("loss", shape, "loss", "_gpu_parts.py", seconds=60)
    yield Row("attention", shape, "attention", "_gpu_parts.py", seconds=20)
    for backend in ("flash", "cudnn", "math"):
        asked = {"kind": "llmtrain", "attention_backend": backend}
        name = f"{shape}: llmtrain, eager, {backend} attention"
        yield Row(name, shape, "attention", "_gpu_runs.py", asked, 30)
    asked = {"kind": "llmtrain", "saved": True}
    yield Row(f"{largest}: save", largest, "save", "_gpu_runs.py", asked, 120, 240)


def compare(table: Table, shape: str, rates: Mapping[str, float], device: str) -> None:
    """Add the rows that compare the variants of a shape.

    rates: tokens a second by the name of the row; those that were not measured are missing
    device: on a CPU the figures are a rehearsal, and no goal is judged
    """
    ours = {mode: rates.get(f"{shape}: llmtrain, {mode}") for mode in ("eager", "blocks compiled")}
    best = max((rate for rate in ours.values() if rate), default=None)
    rehearsed = device == "cpu"

    def say(name: str, figure: float | None, unit: str, goal: str, **more: Any) -> None:
        note = {} if figure is not None else {"note": "a row that it needs was not measured"}
        goal = "" if rehearsed else goal
        table.say(f"{shape}: {name}", figure, unit, goal, device=device, **more, **note)

    if (goals := SHAPES[shape].goals) is not None:
        floor, target, stretch = goals
        more = {"floor": floor, "target": target, "stretch": stretch}
        say("the better of llmtrain's", best, "tokens/s", f"≥ {floor}", **more)
    for mode, rate in ours.items():
        bare = rates.get(f"{shape}: bare, {mode}")
        ratio = bare / rate if bare and rate else None
        say(f"time of a step over the bare loop's, {mode}", ratio, "×", "≤ 1.01")
    for name, goal in (("Trainer", "≥ 1.3"), ("Trainer, torch_compile", "≥ 1.15")):
        other = rates.get(f"{shape}: {name}")
        ratio = best / other if best and other else None
        say(f"tokens/s of llmtrain over {name}", ratio, "×", goal)


def compare_losses(table: Table, found: list[dict[str, Any]], device: str) -> None:
    """Add the rows that compare the paths of each size of the loss's ladder."""
    by_size: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for row in found:
        if row.get("seconds"):
            by_size.setdefault((row["vocabulary"], row["tokens"]), {})[row["path"]] = row
    for (vocabulary, tokens), paths in by_size.items():
        if not {"chunked", "transformers"} <= paths.keys():
            continue
        ours, theirs = paths["chunked"], paths["transformers"]
        judged = device != "cpu" and (vocabulary, tokens) == (128_256, 16_384)
        name = f"loss, V {vocabulary:,}, {tokens:,} tokens: chunked over transformers'"
        for what, kind, goal in (("time", "seconds", "≤ 1.10"), ("memory", "extra_mb", "≤ 0.15")):
            ratio = ours[kind] / theirs[kind] if theirs[kind] else None
            more = {} if ratio is not None else {"note": "too little to be seen"}
            goal = goal if judged else ""
            table.say(f"{name}, {what}", ratio, "×", goal, device=device, **more)
