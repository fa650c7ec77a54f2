"""What do chat data, adapters, export and sharded loading cost beside what one would use instead?

CPU time on one core, minima. Ids and masks stand beside a bare `tokenizers` encode of the same
texts, a LoRA step beside a loop of peft, exports beside a process that has imported the libraries,
the memory of an FSDP2 rank that loads beside its shard, whole runs on conversations beside TRL's
SFTTrainer (PYTHON has it) with the same weights, template and tokens.
"""

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import harness
from _trl import compare, contender
from harness import Bench, Contender, apart, config_of, llama, prepared, shared, turns

# Nothing heavy here: the parts import what they measure.

TRAIN, QWEN3, GPT2 = "sft/train.jsonl", "tokenizers/qwen3", "tokenizers/gpt2"
SIZES = {
    "rounds": (5, 1),  # times that rows are encoded
    "rows": (1_000_000, 300),  # of train.jsonl, at most
    "starts": (5, 1),  # processes of each kind that open a stream, or whose memory is measured
    "layers": (16, 2),  # of the model of 1 GB whose export and shards are measured
    "steps": (80, 12),  # of each loop of `step`; the first `warm` of them are not counted
    "warm": (10, 6),
    "turns": (2, 1),  # runs of each contender beside TRL, each of `first` steps and `after` more
    "first": (50, 2),
    "after": (10, 2),
}


# Conversations

BLOCKS, SEQ_LEN = 32, 1024
LONG = 1 << 14  # more ids than any row of the file has, so that `speed` counts whole rows
CHUNK = 64  # rows of a turn; a lane encodes as many at once


def conversations(bench: Bench, train: Path, tokenizer: Path) -> Path:
    """The config of a run on them."""
    return config_of(
        bench.folder,
        rows=BLOCKS,
        seq_len=SEQ_LEN,
        model={"config": {"model_type": "llama"}, "tokenizer": str(tokenizer)},
        data={"sources": [{"path": str(train)}]},
        chat={"too_long": "truncate"},
    )


def speed(bench: Bench) -> None:
    import tokenizers

    from llmtrain.data.tokens.encode import DocumentEncoder, open_chat
    from llmtrain.data.tokens.tokenizer import open_tokenizer

    if (places := shared(bench, TRAIN, QWEN3)) is None:
        return
    manifest, directory = prepared(conversations(bench, *places))
    opened = open_tokenizer(directory, manifest.tokenizer.backend)
    encoder = DocumentEncoder(opened, open_chat(directory, manifest.chat, LONG, opened))
    source = manifest.sources[0]
    rows = [row for row in places[0].read_text("utf-8").split("\n") if row.strip()]
    rows = rows[: bench.sizes.rows]
    chunks = [rows[first : first + CHUNK] for first in range(0, len(rows), CHUNK)]
    texts, found = texts_of(encoder, source, chunks)
    bare = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    bare.no_truncation()
    bare.no_padding()

    def encode(some: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in bare.encode_batch_fast(some, add_special_tokens=False)]

    works: dict[str, Callable[[int], object]] = {
        "ours": lambda n: encoder.documents(source, chunks[n]),
        "bare": lambda n: encode(texts[n]),
    }
    taken: dict[str, list[list[float]]] = {name: [[] for _ in chunks] for name in works}
    for _ in range(bench.sizes.rounds):
        for n, (name, work) in product(range(len(chunks)), works.items()):
            with harness.timed(taken[name][n]):
                work(n)
    seconds = {name: sum(map(min, each)) for name, each in taken.items()}
    ids = sum(len(one.ids) for one in found)
    again = sum(len(one) for chunk in texts for one in encode(chunk))
    more = {"rows": len(rows), "ids": ids, "ids_of_the_bare_encode": again}
    name = "rows to ids and masks, Qwen3"
    bench.say(name, ids / seconds["ours"], "tokens/s", "≥ 150,000", **more)
    ratio = seconds["bare"] / seconds["ours"]
    bench.say("  of a bare encode of the texts of the same sequences", ratio, "×", "≥ 0.4")
    bench.say("  that bare encode", again / seconds["bare"], "tokens/s")


def texts_of(
    encoder: Any, source: Any, chunks: Sequence[Sequence[str]]
) -> tuple[list[list[str]], list[Any]]:
    """The texts of the sequences of each chunk, and the encoded rows of all."""
    from llmtrain.data.chat import mask
    from llmtrain.data.chat.encode import unmark

    texts, found, original = list[list[str]](), list[Any](), mask.to_sequences

    def to_sequences(encoder: Any, turns: Any, *more: Any) -> Any:
        texts[-1].append(unmark(str(turns[-1].text)))
        return original(encoder, turns, *more)

    with mock.patch.object(mask, "to_sequences", to_sequences):
        for chunk in chunks:
            texts.append([])
            found += encoder.documents(source, chunk)
    return texts, found


def opening(bench: Bench) -> None:
    import numpy as np

    if (places := shared(bench, TRAIN, QWEN3)) is None:
        return
    path = conversations(bench, *places)
    fill, steps = walk_epoch(path)
    middle, file = len(steps) // 2, bench.folder / "middle.npy"
    np.save(file, steps[middle - 1])
    resumed = f"that of a resume at step {middle} of {len(steps)}"
    asked: dict[str, dict[str, Any]] = {"the first batch": {"block": 0, "cursors": ""}}
    asked[resumed] = {"block": middle * BLOCKS, "cursors": str(file)}
    costs: dict[str, list[dict[str, float]]] = {name: [] for name in asked}
    for _, name in turns(asked, bench.sizes.starts):
        costs[name].append(apart(__file__, {"what": "open", "config": str(path), **asked[name]}))
    for name, found in costs.items():
        batch = [cost["batch"] for cost in found]
        both = [cost["batch"] + cost["tokenizer"] for cost in found]
        more = {"most": max(batch), "lanes": len(steps[0])}
        bench.say(f"{name}: {BLOCKS} blocks of {SEQ_LEN:,}", min(batch), "s", "≤ 1", **more)
        name = "  with its tokenizer and template, opened and checked"
        bench.say(name, min(both), "s", "≤ 1", most=max(both))
    blocks = len(steps) * BLOCKS
    bench.say("fill of the blocks of an epoch", fill, "", "≥ 0.97", blocks=blocks)


def walk_epoch(path: Path, seq_len: int = SEQ_LEN) -> tuple[float, list[Any]]:
    """Read blocks until every lane has finished its first epoch.

    Returns the share of positions that are not padding, and all cursors after each step.
    """
    import numpy as np

    from llmtrain.data.documents.reader import Reader, Reading
    from llmtrain.data.lanes import Lanes
    from llmtrain.data.tokens.encode import open_encoder

    manifest, directory = prepared(path)
    cursors = np.zeros((manifest.lanes, len(manifest.sources), 4), np.int64)
    reader, steps, filled = Reader(Reading(600)), list[Any](), 0
    lanes = Lanes(manifest, open_encoder(directory, manifest), reader, cursors.copy(), 0)
    while not (cursors[:, :, 0] > 0).all():
        for g in range(len(steps) * BLOCKS, (len(steps) + 1) * BLOCKS):
            block = lanes.take(g)
            filled += sum(span.stop - span.start for span in block.spans)
            cursors[g % manifest.lanes] = block.cursors
        steps.append(cursors.copy())
    return filled / (len(steps) * BLOCKS * (seq_len + 1)), steps


def open_once(config: str, block: int, cursors: str) -> dict[str, float]:
    """Open the stream, in a process that has imported what every run imports before."""
    import numpy as np

    from llmtrain.data import stream  # noqa: F401
    from llmtrain.data.survey import differing_tokenizer
    from llmtrain.data.tokens.encode import open_encoder

    manifest, directory = prepared(Path(config))
    began = time.process_time()
    encoder = open_encoder(directory, manifest)
    assert not differing_tokenizer(manifest, encoder)
    opened = time.process_time()
    place = {"next_block": block, "cursors": np.load(cursors) if cursors else None}
    with harness.stream_of(manifest, directory, BLOCKS, encoder=encoder, **place) as batches:
        next(batches)
        return {"tokenizer": opened - began, "batch": time.process_time() - opened}


# Runs of one step, from the same random weights

MIB = 1 << 20
SHARD_GB = 0.1
RANKS = 2
WIDE = llama(1024, 16, 16, 2816, 32_000, 256) | {"tie_word_embeddings": False}
LAYERS_OF_500_MB = 5
# All but the norms: a whole checkpoint, without gradients and moments of all weights in memory.
FROZEN = ["*embed*", "*proj*", "lm_head*"]


def one_step(bench: Bench, name: str, layers: int = 0, **sections: Any) -> Path:
    """The config of a run of one step. layers: 0 = as many as the sizes say."""
    layers = layers or bench.sizes.layers
    base = bench.folder / f"base-{layers}"
    if not base.exists():
        harness.base_of(base, WIDE | {"num_hidden_layers": layers})
    model = {"from": str(base), "activation_checkpointing": "none", **sections.pop("model", {})}
    return config_of(
        bench.folder / name,
        rows=RANKS,
        seq_len=32,
        model=model,
        training={"micro_batch_size": 1},
        optimizer={"warmup_steps": 1},
        **sections,
    )


def run_of(bench: Bench, name: str, **sections: Any) -> tuple[Path, float]:
    """The directory of such a run that has finished, and the MB of its base."""
    path = one_step(bench, name, **sections)
    subprocess.run([*harness.LLMTRAIN, "train", str(path)], check=True, stdout=subprocess.DEVNULL)
    bases = (bench.folder / f"base-{bench.sizes.layers}").glob("*.safetensors")
    return path.parent / "run", sum(path.stat().st_size for path in bases) / 1e6


def export(bench: Bench) -> None:
    whole, mb = run_of(bench, "whole", model={"freeze": FROZEN})
    adapted, _ = run_of(bench, "lora", adapter=harness.LORA)
    out = bench.folder / "exported"
    more = ["--out", str(out), "--shard-gb", str(SHARD_GB), "--no-verify"]
    commands = {"imports": [], "models": ["models"]}
    commands[f"export, a model of {mb:,.0f} MB"] = ["export", str(whole), *more]
    merged = ["export", str(adapted), "--merge-adapters", *more]
    commands[f"export --merge-adapters, on {mb:,.0f} MB"] = merged
    found: dict[str, list[float]] = {name: [] for name in commands}
    for _, name in turns(commands, bench.sizes.starts):
        row = apart(__file__, {"what": "memory", "command": commands[name]})
        found[name].append(row["peak_mb"] * 1e6 / MIB)
        shutil.rmtree(out, ignore_errors=True)
    imports, models = (statistics.median(found.pop(name)) for name in ("imports", "models"))
    goal = f"≤ {2 * SHARD_GB * 1024:.1f}"
    bench.say("a process that has imported torch and transformers", imports, "MiB")
    for name, peaks in found.items():
        peak, ends = statistics.median(peaks), f"{min(peaks):.0f} … {max(peaks):.0f}"
        bench.say(f"{name}: peak above that", peak - imports, "MiB", goal, peaks=ends)
        name = "  above one that has imported transformers' PreTrainedModel, too"
        bench.say(name, peak - models, "MiB", goal, models=models)


def memory_of(command: list[str]) -> dict[str, float]:
    """The peak of this process, which runs a command of llmtrain or imports the libraries.

    command: models = the base class of transformers' models is imported as well
    """
    if command in ([], ["models"]):
        import torch  # noqa: F401
        import transformers

        if command:  # it is imported when it is asked for
            assert transformers.PreTrainedModel
    else:
        from llmtrain.cli.main import main

        try:
            main(command)
        except SystemExit as ended:
            if ended.code:
                raise
    return {"peak_mb": harness.peak_mb()}


def shards(bench: Bench) -> None:
    """The memory of the ranks of a sharded run while they get their weights.

    The model is hardly larger than 500 MB, for which the goal is set: of a smaller shard, what the
    libraries take is a larger share.
    """
    layers = min(LAYERS_OF_500_MB, bench.sizes.layers)
    path = one_step(bench, "sharded", layers, distributed={"strategy": "fsdp2"})
    first, second = harness.ranks(__file__, {"what": "rank", "config": str(path)}, RANKS)
    sizes = [f"{second[key] / 1e6:,.0f}" for key in ("shard", "model")]
    name = f"rank 1 of {RANKS}, shard {' MB of '.join(sizes)}"
    above = {key: second[key] - second["before"] for key in ("peak", "after")}
    bench.say(f"{name}: peak while it loads", above["peak"] / second["shard"], "×", "≤ 1.2")
    bench.say("  once it is loaded", above["after"] / second["shard"], "×")
    top = (first["peak"] - first["before"]) / first["model"]
    bench.say("  rank 0, which reads the weights: peak over the whole model", top, "×")


def load_as_rank(config: str) -> None:
    """Load a model as a rank of a run does, print its memory, and leave before the first step."""
    import torch

    from llmtrain.cli.rank import train_here
    from llmtrain.distributed.engines.state import local
    from llmtrain.metrics import memory
    from llmtrain.training.start import weights

    cpu, seen = torch.device("cpu"), dict[str, int]()
    build, prepare = weights._build, weights._prepare

    def built(*given: Any, **more: Any) -> Any:
        seen["before"] = memory.reset_peak(cpu)
        return build(*given, **more)

    def loaded(config: Any, model: Any, processes: Any, *more: Any) -> Any:
        prepare(config, model, processes, *more)
        seen["peak"], seen["after"] = memory.peak_bytes(cpu), memory.resident_bytes()
        seen["shard"] = sum(local(one).nbytes for one in model.model.parameters())
        seen["model"] = sum(one.nbytes for one in model.model.parameters())
        print(f"\n{json.dumps(seen)}", flush=True)
        processes.launched.ranks.vote(None)
        os._exit(0)

    weights._build, weights._prepare = built, loaded
    train_here(config, [])


# A LoRA run's step beside a loop of peft, as one writes it

SMALL = llama(256, 4, 4, 704, 2048, 128)
ROWS, RATE, SEED = 4, 1e-4, 42


def step(bench: Bench) -> None:
    from loop import OPTIMIZER, blocks, by_hand, ours

    import llmtrain

    steps, warm = bench.sizes.steps, bench.sizes.warm
    base = harness.base_of(bench.folder / "small", SMALL)
    path = config_of(
        bench.folder,
        steps=steps,
        rows=ROWS,
        seq_len=128,
        model={"from": str(base), "tokenizer": "sample", "activation_checkpointing": "none"},
        adapter=harness.LORA,
        training={"micro_batch_size": ROWS},
        optimizer=OPTIMIZER | {"learning_rate": RATE},
        checkpoint={"every_steps": 10 * steps},
    )
    config = llmtrain.load_config(path)
    batches = blocks(config, steps)
    work: dict[str, Contender] = {
        name: lambda turn, _, made=made: by_hand(turn, iter(batches), *made)
        for name, made in (("peft", peft_model(base)), ("peft again", peft_model(base)))
    }
    work["llmtrain"] = lambda turn, all_through: ours(turn, config, all_through)
    seconds, losses = harness.step_by_step(work, steps)
    counted = {name: found[1 + warm :] for name, found in seconds.items()}
    least = {name: min(found) for name, found in counted.items()}
    middle = {name: statistics.median(found) for name, found in counted.items()}
    more = {"last_losses": losses, "shape": {**SMALL, "seq_len": 128, "rows": ROWS}}
    bench.say("a LoRA step of peft, transformers and torch", 1e3 * least["peft"], "ms")
    ratio = least["llmtrain"] / least["peft"]
    bench.say("  llmtrain's over that, minima", ratio, "×", "≤ 1.05", **more)
    bench.say("  medians", middle["llmtrain"] / middle["peft"], "×")
    bench.say("  the same loop of peft over that, minima", least["peft again"] / least["peft"], "×")
    bench.say("  last loss, llmtrain's less that of peft", losses["llmtrain"] - losses["peft"], "")


def peft_model(base: Path) -> tuple[Any, Any, list[Any]]:
    """The model that the run trains, by transformers and peft; its optimizer and parameters."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(SEED)
    model = get_peft_model(plain, harness.peft_lora()).train()
    groups = [
        {"params": [p for n, p in model.named_parameters() if name in n], "weight_decay": decay}
        for name, decay in (("lora_A", 0.1), ("lora_B", 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)
    return model, optimizer, [p for p in model.parameters() if p.requires_grad]


if __name__ == "__main__":
    parts = {"speed": speed, "opening": opening, "export": export, "shards": shards}
    parts |= {"step": step, "trl": lambda bench: harness.beside_trl(bench, compare, TRAIN, GPT2)}
    children = {"open": open_once, "memory": memory_of, "rank": load_as_rank, "trl": contender}
    paths = {"shared": False, "trl": False}  # a folder of data; an interpreter that has TRL
    harness.main(__doc__, parts, SIZES, paths=paths, child=children)
