"""The parts `checkpoint`, `export` and `shards` of `finetune.py`: runs of a model of about 1 GB.

Each run starts from the same random weights and makes one step.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

MEMORY = Path(__file__).with_name("_finetune_memory.py")
MIB = 1 << 20
SHARD_GB = 0.1
RANKS = 2
SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LORA = {"kind": "lora", "r": 16, "alpha": 32}
LAYERS_OF_500_MB = 5
# All but the norms: a whole checkpoint, without gradients and moments of all weights in memory.
FROZEN = ["*embed*", "*proj*", "lm_head*"]


def base_of(bench: Any, layers: int | None = None) -> Path:
    """Return a directory with random weights and the sample's tokenizer.

    layers: of the model; None = as many as the sizes say
    """
    layers = layers or bench.sizes.layers
    directory: Path = bench.folder / f"base-{layers}"
    if directory.exists():
        return directory
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(num_hidden_layers=layers, **SHAPE)
    LlamaForCausalLM(config).save_pretrained(directory)
    sample = importlib.resources.files("llmtrain.data.sample")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((sample / name).read_bytes())
    return directory


def config_of(bench: Any, name: str, **sections: Any) -> Path:
    """Write the config of a run of one step, whose directory has this name."""
    keys: dict[str, Any] = {
        "run": {"dir": str(bench.folder / name)},
        "model": {"from": str(base_of(bench)), "activation_checkpointing": "none"},
        "data": {"sources": [{"path": "sample"}], "seq_len": 32, "heldout": 0.0},
        "training": {
            "steps": 1,
            "global_batch_size": RANKS,
            "micro_batch_size": 1,
            "precision": "fp32",
        },
        "optimizer": {"warmup_steps": 1},
    }
    for section, values in sections.items():
        keys[section] = keys.get(section, {}) | values
    path: Path = bench.folder / f"{name}.json"
    path.write_text(json.dumps(keys))  # YAML is a superset
    return path


def run_of(bench: Any, name: str, **sections: Any) -> Path:
    """Return the directory of a run that has finished; it is trained when it is first asked for."""
    directory: Path = bench.folder / name
    if not directory.exists():
        path = config_of(bench, name, **sections)
        command = [sys.executable, "-m", "llmtrain", "train", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return directory


def size_of(directory: Path) -> float:
    """Return the size of a model's tensors in MB."""
    return sum(tensor_bytes(path) for path in directory.glob("*.safetensors")) / 1e6


def tensor_bytes(path: Path) -> int:
    """Return the bytes of the tensors in a safetensors file, without its header."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header


def checkpoint(bench: Any) -> None:
    """Compare the size of an adapter's checkpoint with that of its tensors."""
    run_dir = run_of(bench, "lora", adapter=LORA)
    (directory,) = (run_dir / "checkpoints").glob("step-*")
    tokenizer = {path.name for path in (run_dir / "tokenizer").iterdir()}
    files = [path for path in directory.iterdir() if path.name not in tokenizer]
    tensors = sum(tensor_bytes(path) for path in files if path.suffix == ".safetensors")
    whole = sum(path.stat().st_size for path in files)
    name = f"LoRA (r = {LORA['r']}) checkpoint over its tensors, of {tensors / 1e6:.1f} MB"
    bench.say(name, whole / tensors, "×", "≤ 1.05", base_mb=size_of(base_of(bench)))
    bench.say("  headers, configs, state and manifest", (whole - tensors) / 1e3, "kB")


def export(bench: Any) -> None:
    """Compare the peak memory of exports with that of the libraries they need."""
    size = f"{size_of(base_of(bench)):,.0f} MB"
    whole = run_of(bench, "whole", model={"freeze": FROZEN})
    adapted = run_of(bench, "lora", adapter=LORA)
    commands = {
        "imports": ["imports"],
        "models": ["models"],
        f"export, a model of {size}": ["command", "export", whole],
        f"export --merge-adapters, on {size}": ["command", "export", adapted, "--merge-adapters"],
    }
    found: dict[str, list[int]] = {name: [] for name in commands}
    for _ in range(bench.sizes.starts):
        for name, arguments in commands.items():
            out = bench.folder / "exported"
            more = ["--out", out, "--shard-gb", SHARD_GB, "--no-verify"] * ("export" in arguments)
            command = [str(one) for one in (sys.executable, MEMORY, *arguments, *more)]
            done = subprocess.run(command, check=True, capture_output=True)
            found[name].append(int(done.stdout.splitlines()[-1]))
            shutil.rmtree(out, ignore_errors=True)
    imports, models = (statistics.median(found.pop(name)) / MIB for name in ("imports", "models"))
    goal = f"≤ {2 * SHARD_GB * 1024:.1f}"
    bench.say("a process that has imported torch and transformers", imports, "MiB")
    for name, peaks in found.items():
        peak = statistics.median(peaks) / MIB
        ends = f"{min(peaks) / MIB:.0f} … {max(peaks) / MIB:.0f}"
        bench.say(f"{name}: peak above that", peak - imports, "MiB", goal, peaks=ends)
        name = "  above one that has imported transformers' PreTrainedModel, too"
        bench.say(name, peak - models, "MiB", goal, models=models)


def shards(bench: Any) -> None:
    """Measure the memory of the ranks of a sharded run while they get their weights.

    The model is hardly larger than 500 MB, for which the goal is set: of a smaller shard, what the
    libraries take is a larger share.
    """
    base = base_of(bench, min(LAYERS_OF_500_MB, bench.sizes.layers))
    path = config_of(bench, "sharded", model={"from": str(base)}, distributed={"strategy": "fsdp2"})
    output = bench.folder / "seen"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launch = {
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_MIXED_PRECISION": "no",
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    command = [sys.executable, str(MEMORY), "rank", str(path), str(output)]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **launch, "RANK": f"{n}", "LOCAL_RANK": f"{n}"}
        )
        for n in range(RANKS)
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        sys.exit(f"ranks ended with {codes}")
    first, second = (json.loads(Path(f"{output}.{n}").read_text()) for n in range(RANKS))
    sizes = [f"{second[key] / 1e6:,.0f}" for key in ("shard", "model")]
    name = f"rank 1 of {RANKS}, shard {' MB of '.join(sizes)}"
    above = {key: second[key] - second["before"] for key in ("peak", "after")}
    bench.say(f"{name}: peak while it loads", above["peak"] / second["shard"], "×", "≤ 1.2")
    bench.say("  once it is loaded", above["after"] / second["shard"], "×")
    top = (first["peak"] - first["before"]) / first["model"]
    bench.say("  rank 0, which reads the weights: peak over the whole model", top, "×")
