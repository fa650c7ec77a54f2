"""Check that this tree still trains the bits that an older commit trains: `same_bits.py OLD`.

OLD is any name of a commit. It is checked out into a temporary git worktree; the tree that this
file is in, uncommitted changes included, is the new one. Both train a tiny model for 20 steps in
fp32, on the CPUs of this machine. What they train, and how; a row for each pair, `KIND-LAUNCH`:

    text      from scratch on the built-in sample       ddp1    one process
    dropout   the same, with dropout                    ddp2    two processes, DDP
    chat      a base on conversations                   fsdp2   two processes, FSDP2
    lora      an adapter of the base, on the same

Then the new tree resumes, from step 10, a run that the old one began (a copy of the old run without
its checkpoint of step 20: the same directory as after a kill). It must end like the straight run.

Compared, without any tolerance:

    of every step         batch digest, loss, gradient norm, learning rate, tokens
    of every evaluation   loss, tokens
    by SHA-256            every file of every checkpoint, the held-out set, the data manifest

Not compared: a checkpoint's manifest.json (the run's id, and digests of files compared here), the
fields `run_id`, `versions` and `rng` of trainer_state.json (what rng holds is drawn by dropout,
whose rows show it), the second at which a chat began, and what carries times: metrics.jsonl apart
from the numbers above, status.json, logs, the report.

Exit code 0: all the same. 1: something differs, or a run failed; the runs are kept and named. 2:
bad input.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS = 20
RESUMED_FROM = 10
SHOWN = 8  # differences of a row that are printed

# Name → how accelerate launches it, and the strategy.
LAUNCHES: dict[str, tuple[dict[str, Any], str]] = {
    "ddp1": ({"distributed_type": "NO", "num_processes": 1}, "ddp"),
    "ddp2": ({"distributed_type": "MULTI_GPU", "num_processes": 2}, "ddp"),
    "fsdp2": (
        {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}},
        "fsdp2",
    ),
}
ANY_LAUNCH = {
    "compute_environment": "LOCAL_MACHINE",
    "use_cpu": True,
    "mixed_precision": "no",
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_port": 0,  # a free one
}
SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
CONFIG: dict[str, Any] = {
    "run": {"dir": "run"},
    "model": {"config": SHAPE, "tokenizer": "sample"},
    "data": {"sources": [{"path": "sample"}], "seq_len": 64},
    "training": {
        "steps": STEPS,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "precision": "fp32",
    },
    "optimizer": {"learning_rate": 2e-3, "warmup_steps": 5},
    "checkpoint": {"every_steps": RESUMED_FROM},
    "evaluation": {"every_steps": RESUMED_FROM, "max_documents": 8},
    "logging": {"every_steps": 1},
}

# The sections of a kind that are not those of CONFIG.
CHAT: dict[str, Any] = {
    "model": {"from": "GIVEN/base"},
    "data": {"sources": [{"path": "GIVEN/chat.jsonl"}], "seq_len": 128, "heldout": 0.05},
    "chat": {"template": "chatml"},
}
KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "dropout": {"model": {"config": {**SHAPE, "attention_dropout": 0.1}, "tokenizer": "sample"}},
    "chat": CHAT,
    "lora": {**CHAT, "adapter": {"kind": "lora", "r": 4, "alpha": 8}},
}
# Writes what CHAT reads: conversations, and a base with the tokenizer of the sample.
PREPARE = """
import importlib.resources, json, random, torch, transformers
rng = random.Random(0)
words = "the capital of a country is its largest city and lies on river".split()
text = lambda: " ".join(rng.choices(words, k=rng.randrange(3, 10)))
with open("chat.jsonl", "w") as rows:
    for _ in range(300):
        roles = ("user", "assistant") * rng.randrange(1, 4)
        messages = [{"role": role, "content": text()} for role in roles]
        rows.write(json.dumps({"messages": messages}) + "\\n")
with importlib.resources.as_file(importlib.resources.files("llmtrain.data") / "sample") as sample:
    tokenizer = transformers.AutoTokenizer.from_pretrained(sample, trust_remote_code=False)
tokenizer.save_pretrained("base")
torch.manual_seed(0)
shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
shape |= {"intermediate_size": 64, "vocab_size": len(tokenizer), "tie_word_embeddings": True}
transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).save_pretrained("base")
"""

NUMBERS = {
    "train": ("batch_digest", "loss", "grad_norm", "learning_rate", "tokens"),
    "eval": ("loss", "tokens"),
}
RUN_FILES = ("eval.safetensors", "manifest.json")
NOT_OF_THE_STATE = {"run_id", "versions", "rng"}

# Variables of another launch, which would change these.
_STALE = ("ACCELERATE", "FSDP", "LLMTRAIN", "LOCAL_", "MASTER_", "PARALLELISM", "RANK", "WORLD_")


class BadInputError(Exception):
    """What was asked for cannot be compared."""


class FailedError(Exception):
    """A run did not end as it should."""


@dataclass(frozen=True)
class Result:
    """What is compared of a run directory.

    numbers: (kind, step) → the numbers of that line
    files: path in the run directory → SHA-256
    """

    numbers: dict[tuple[str, int], dict[str, Any]]
    files: dict[str, str]


def main(arguments: Sequence[str]) -> int:
    """Run the comparison; return the exit code."""
    parser = argparse.ArgumentParser(prog="same_bits.py")
    parser.add_argument("old", metavar="OLD", help="the commit to compare with")
    every = ",".join([*KINDS, *LAUNCHES])
    parser.add_argument("--only", metavar="NAMES", default="", help=f"rows with some of {every}")
    asked = parser.parse_args(arguments)
    try:
        names = rows_of(asked.only)
        commit = commit_of(asked.old)
    except BadInputError as error:
        print(f"same_bits.py: {error}", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="same-bits-"))
    with worktree(commit, folder / "old-tree") as old:
        differs = compare_trees(old, ROOT, names, folder)
    if differs:
        print(f"the bits differ; the runs are in {folder}")
        return 1
    shutil.rmtree(folder)
    print(f"the same bits as {commit[:12]}")
    return 0


def rows_of(text: str) -> list[str]:
    """The rows that `--only` asks for: those with one of its kinds and one of its launches."""
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in KINDS and name not in LAUNCHES]:
        raise BadInputError(f"--only: {unknown[0]!r} is none of {', '.join([*KINDS, *LAUNCHES])}")
    kinds = [name for name in KINDS if name in names] or KINDS
    launches = [name for name in LAUNCHES if name in names] or LAUNCHES
    return [f"{kind}-{launch}" for kind in kinds for launch in launches]


def commit_of(name: str) -> str:
    """The full hash of a commit."""
    command = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        raise BadInputError(f"{name!r} is no commit of {ROOT}")
    return found.stdout.strip()


@contextmanager
def worktree(commit: str, path: Path) -> Iterator[Path]:
    """Check a commit out beside the present tree, and remove it again."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True)
    try:
        yield path
    finally:
        subprocess.run([*git, "remove", "--force", str(path)], check=True)


def compare_trees(old: Path, new: Path, names: Sequence[str], folder: Path) -> bool:
    """Train with both trees, two runs at a time, and print a row for each pair.

    Returns whether anything differs.
    """
    differs = False
    (folder / "given").mkdir()
    prepare = [sys.executable, "-c", PREPARE]
    env = environment(new)
    subprocess.run(prepare, cwd=folder / "given", env=env, capture_output=True, check=True)
    with ThreadPoolExecutor(2) as pool:
        straight = {
            (side, name): pool.submit(train, tree, folder / side / name, name)
            for name in names
            for side, tree in (("old", old), ("new", new))
        }
        resumed = {
            name: pool.submit(resume, new, straight["old", name], folder / "resumed" / name, name)
            for name in names
        }
        pairs = {"straight": {name: straight["new", name] for name in names}, "resumed": resumed}
        for what, runs in pairs.items():
            for name, run in runs.items():
                try:
                    expected, found = straight["old", name].result(), run.result()
                    differences = compare(expected, found)
                    counts = count(found)
                except FailedError as error:
                    differences, counts = [str(error)], "failed"
                print(row(name, what, counts, differences), flush=True)
                differs = differs or bool(differences)
    return differs


def train(tree: Path, folder: Path, name: str) -> Result:
    """Train with this tree, in `folder/run`; what came out."""
    folder.mkdir(parents=True, exist_ok=True)
    kind, _, launched = name.partition("-")
    launch, strategy = LAUNCHES[launched]
    config = {**CONFIG, **KINDS[kind], "distributed": {"strategy": strategy}}
    # JSON is YAML. What all runs read is in one place: its path and times stand in their files.
    text = json.dumps(config, indent=2).replace("GIVEN", str(folder.parents[1] / "given"))
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    (folder / "launch.yaml").write_text(json.dumps({**ANY_LAUNCH, **launch}), encoding="utf-8")
    check_import(tree, folder)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "launch.yaml"]
    command += [str(tree / "scripts" / "train.py"), "config.yaml"]
    with (folder / "output.txt").open("a", encoding="utf-8") as output:
        ended = subprocess.run(
            command, cwd=folder, env=environment(tree), stdout=output, stderr=output, check=False
        )
    status = folder / "run" / "status.json"
    state = json.loads(status.read_text(encoding="utf-8"))["state"] if status.is_file() else None
    if ended.returncode or state != "finished":
        raise FailedError(f"exit code {ended.returncode}, see {folder / 'output.txt'}")
    return read(folder / "run")


def resume(tree: Path, begun: Any, folder: Path, name: str) -> Result:
    """Finish with this tree a run that the other one began; what came out.

    begun: the future of the old tree's straight run, which was submitted before this call.
    """
    begun.result()
    shutil.copytree(folder.parents[1] / "old" / name, folder)
    shutil.rmtree(folder / "run" / "checkpoints" / f"step-{STEPS:08d}")
    found = train(tree, folder, name)
    start = [line for line in lines(folder / "run") if line["kind"] == "start"][-1]
    if start["step"] != RESUMED_FROM:
        raise FailedError(f"began at step {start['step']}, not at {RESUMED_FROM}")
    return found


def environment(tree: Path) -> dict[str, str]:
    """Of a launch: this tree's package, CPUs alone, one thread, nothing of another launch."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(_STALE)}
    return {**kept, "PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def check_import(tree: Path, folder: Path) -> None:
    """Refuse a comparison in which an installed llmtrain hides the one of the tree."""
    command = [sys.executable, "-c", "import llmtrain; print(llmtrain.__file__)"]
    env = environment(tree)
    found = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    if not Path(found.stdout.strip()).resolve().is_relative_to(tree.resolve()):
        raise FailedError(f"llmtrain is imported from {found.stdout.strip()!r}, not from {tree}")


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def read(run_dir: Path) -> Result:
    """What is compared of a run; of a step that was trained twice, the last line."""
    numbers = {
        (line["kind"], line["step"]): {key: line.get(key) for key in NUMBERS[line["kind"]]}
        for line in lines(run_dir)
        if line["kind"] in NUMBERS
    }
    manifest = json.loads((run_dir / "manifest.json").read_text(encoding="utf-8"))
    chat = manifest.get("chat")
    # A chat's templates know the second of the start, and so does the fingerprint of its data.
    of_the_start = [chat["settings"]["date"], manifest["fingerprint"]] if chat else []

    def digest(content: bytes) -> str:
        for one in of_the_start:
            content = content.replace(one.encode(), b"of the start")
        return hashlib.sha256(content).hexdigest()

    files = {name: digest((run_dir / name).read_bytes()) for name in RUN_FILES}
    root = run_dir / "checkpoints"
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        if path.name == "trainer_state.json":
            state = json.loads(path.read_text(encoding="utf-8"))
            if chat:
                of_the_start.append(state["data"]["parts"]["chat"])
            # A hash for each field: a difference names it.
            for field in state.keys() - NOT_OF_THE_STATE:
                name = f"{path.relative_to(run_dir)}: {field}"
                files[name] = digest(json.dumps(state[field]).encode())
        elif path.name != "manifest.json":
            files[str(path.relative_to(run_dir))] = digest(path.read_bytes())
    return Result(numbers, files)


def compare(old: Result, new: Result) -> list[str]:
    """What differs, a sentence each; empty if nothing does."""
    found = []
    for (kind, step), expected, got in both(old.numbers, new.numbers):
        if expected is None or got is None:
            found.append(f"{kind} line of step {step}: only in the {'new' if got else 'old'} run")
            continue
        found += [
            f"{kind} line of step {step}: {key} {expected[key]!r} → {got[key]!r}"
            for key in expected
            if expected[key] != got[key]
        ]
    for name, expected, got in both(old.files, new.files):
        if expected is None or got is None:
            found.append(f"{name}: only in the {'new' if got else 'old'} run")
        elif expected != got:
            found.append(f"{name}: sha256 {expected[:12]} → {got[:12]}")
    return found


def both(old: dict[Any, Any], new: dict[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Every key of either, sorted, with both values; None where it is missing."""
    for key in sorted(old.keys() | new.keys()):
        yield key, old.get(key), new.get(key)


def count(result: Result) -> str:
    """How much was compared."""
    kinds = [kind for kind, _ in result.numbers]
    files = {name.partition(":")[0] for name in result.files}
    return f"{kinds.count('train')} steps, {kinds.count('eval')} evaluations, {len(files)} files"


def row(name: str, what: str, counts: str, differences: Sequence[str]) -> str:
    """A line of the table, and a line for each of the first differences."""
    verdict = f"differs in {len(differences)}" if differences else "same"
    more = [f"    and {len(differences) - SHOWN} more"] * (len(differences) > SHOWN)
    shown = [f"    {one}" for one in differences[:SHOWN]]
    return "\n".join([f"{name:15}{what:10}{counts:38}{verdict}", *shown, *more])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
