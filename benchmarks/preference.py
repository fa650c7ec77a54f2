"""What does a run on pairs of answers cost beside a run on conversations, and beside TRL?

CPU time on one core. Head and loss stand beside those of conversations, a step beside one of a run
on the same answers as conversations, the pass for the reference beside a step, and whole epochs
beside TRL's DPOTrainer (PYTHON has it) with the same weights and pairs. `same` trains strings with
both, and compares their numbers.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import harness
from _trl_pairs import KEYS, contender, same, speed
from finetune import walk_epoch
from harness import Bench, config_of, llama, shared, timed

PAIRS, GPT2, QWEN3 = "preference/train.jsonl", "tokenizers/gpt2", "tokenizers/qwen3"
TOKENS, HIDDEN, VOCABULARY = 2048, 192, 8192
LARGE = 50_304  # entries, where memory is measured: beside little, code that is loaded is much
SHAPE = llama(192, 4, 3, 512, 0, 2048)
SIZES = {
    "rounds": (7, 2),  # of head and loss
    "tokens": (TOKENS, 128),
    "steps": (20, 2),  # of `same`
    "of_a_run": (17, 3),  # steps of each run of `step`
    "blocks": (1, 1),  # of a step
    "kinds": (("full", "LoRA"), ("full", "LoRA")),  # of `step` and `trl`
    "turns": (1, 1),  # runs of each
    "pairs": (32, 2),  # of `trl`, at most
}
FILL = 2048


def head(bench: Bench) -> None:
    """Forward and backward of head and loss, all positions trained, with a head that is or not."""
    tokens = bench.sizes.tokens
    for kind, goal in (("trained", "≤ 1.5"), ("frozen", "≤ 1.05")):
        works = {name: head_work(name, tokens, kind == "trained") for name in ("chat", "pairs")}
        found = harness.in_turns(bench.sizes.rounds, works, time.process_time)
        more = {"tokens": tokens, "hidden": HIDDEN, "vocabulary": VOCABULARY}
        name = f"head and loss of pairs over those of conversations, {kind} head"
        bench.say(name, min(found["pairs"]) / min(found["chat"]), "×", goal, **more)
        asked = {"what": "head", "name": "pairs", "tokens": tokens, "kind": kind}
        peak = harness.apart(__file__, asked)["mb"]
        bench.say("  peak of pairs", peak, "MB")
        planned = planned_mb(tokens, kind == "trained")
        bench.say("  over the plan's row", peak / planned, "×", "≤ 1", mb=planned)


def head_work(
    name: str, tokens: int, trained: bool, vocabulary: int = VOCABULARY
) -> Callable[[], None]:
    import torch

    from llmtrain.config.schema import PreferenceConfig
    from llmtrain.model.cross_entropy import linear_cross_entropy, log_probs
    from llmtrain.model.preference import loss_and_sums, sequence_sums
    from llmtrain.pairs import PairTensors

    torch.manual_seed(1)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = (torch.randn(vocabulary, HIDDEN) / HIDDEN**0.5).requires_grad_(trained)
    labels = torch.randint(vocabulary, (tokens,))
    lengths = torch.full((4,), tokens // 4)
    sizes = lengths.view(2, 2).double()
    asked = PairTensors(lengths, sizes, torch.zeros(2, 2, dtype=torch.float64))

    def work() -> None:
        hidden.grad = weight.grad = None
        if name == "chat":
            loss = linear_cross_entropy(hidden, weight, labels, all_trained=True)
        else:
            sums = sequence_sums(log_probs(hidden, weight, labels, all_trained=True), lengths)
            loss = loss_and_sums(sums, asked, PreferenceConfig(loss="dpo"))[0]
        loss.backward()

    return work


def head_alone(name: str, tokens: int, kind: str) -> dict[str, float]:
    """The memory that head and loss need beyond the operands, in a process of its own."""
    work = head_work(name, tokens, kind == "trained", LARGE)
    head_work(name, 64, kind == "trained", 64)()  # what torch loads and makes once
    before = harness.peak_mb()
    work()
    return {"mb": harness.peak_mb() - before}


def planned_mb(tokens: int, trained: bool) -> float:
    from types import SimpleNamespace

    from llmtrain.distributed.plan.memory import Layout, head_bytes
    from llmtrain.training.start.planning import chunk_of

    count = LARGE * HIDDEN
    shape: Any = SimpleNamespace(
        vocabulary=LARGE, hidden=HIDDEN, head=count, head_trained=trained, token_rows=0
    )
    saved: Any = SimpleNamespace(plain_head=True)
    work: Any = SimpleNamespace(seq_len=tokens, precision="fp32", chunk=chunk_of("cpu"))
    whole, _ = head_bytes(shape, saved, work, Layout("ddp", "none", 1, 1, "last"))
    return whole / 1e6


# Runs


def step(bench: Bench) -> None:
    if (places := shared(bench, PAIRS, GPT2)) is None:
        return
    rows = harness.read_rows(places[0])
    talks = [{"messages": [*row["prompt"], *row[key]]} for row in rows for key in KEYS]
    files = {
        "pairs": harness.write_rows(bench.folder / "pairs.jsonl", rows),
        "chat": harness.write_rows(bench.folder / "chat.jsonl", talks),  # of one answer each
    }
    base = harness.base_of(bench.folder / "base", SHAPE | {"vocab_size": 50_304}, places[1])
    asked = {"what": "run", "base": str(base)}
    asked |= {"steps": bench.sizes.of_a_run, "blocks": bench.sizes.blocks}
    for kind in bench.sizes.kinds:
        each = {
            name: asked | {"name": name, "lora": kind == "LoRA", "data": str(data)}
            for name, data in files.items()
        }
        found = harness.contend(bench, each, bench.sizes.turns, 1800)
        least = {name: min(run["of_a_token"] for run in runs) for name, runs in found.items()}
        name = f"{kind}: a step on pairs over one on conversations, by position that is no padding"
        bench.say(name, least["pairs"] / least["chat"], "×", "≤ 1.15", runs=found)
        took = {of: sum(run[of] for run in found["pairs"]) for of in ("of_the_pass", "of_a_block")}
        share = took["of_the_pass"] / took["of_a_block"]
        goal = "≤ 0.35" if kind == "full" else ""
        bench.say(f"{kind}: a block of the reference's pass over one of a step", share, "×", goal)


def run_of(
    name: str, lora: bool, data: str, base: str, folder: str, steps: int, blocks: int
) -> dict[str, float]:
    """Train, and return CPU seconds of a position and of a block, and of one of the pass.

    Reading and tokenizing are in none of them, nor the first step, of either kind. So a block of
    the pass and one of a step are means over the same blocks.
    """
    import llmtrain
    from llmtrain.training.start import reference

    path = config_of(
        Path(folder),
        steps=steps,
        rows=blocks,
        seq_len=FILL,
        model={"from": base, "activation_checkpointing": "none"},
        data={"sources": [{"path": data}]},
        chat={"too_long": "drop", "train_turns": "last"},
        training={"micro_batch_size": 1},
        optimizer={"learning_rate": 1e-5},
        **({"preference": {"loss": "dpo"}} if name == "pairs" else {}),
        **({"adapter": harness.LORA} if lora else {}),
    )
    spent, real, scored = list[float](), list[int](), list[float]()
    score = reference._Pass._score

    def timed_score(*given: Any) -> None:
        with timed(scored):
            score(*given)

    def update(original: Any, run: Any, batch: Any, factor: float) -> None:
        with timed(spent):
            original(run, batch, factor)
        real.append(batch.real_tokens)

    scoring = mock.patch.object(reference._Pass, "_score", timed_score)
    with scoring, harness.around(update=update, save=harness.unsaved):
        llmtrain.train(llmtrain.load_config(path))
    warm, of_pass, count = sum(spent[1:]), sum(scored[1:]), (steps - 1) * blocks
    means = {"of_a_block": warm / count, "of_the_pass": of_pass / count}
    return {"of_a_token": warm / sum(real[1:])} | means


def fill(bench: Bench) -> None:
    if (places := shared(bench, PAIRS, QWEN3)) is None:
        return
    path = config_of(
        bench.folder,
        rows=32,
        seq_len=FILL,
        model={"config": {"model_type": "llama"}, "tokenizer": str(places[1])},
        data={"sources": [{"path": str(places[0])}]},
        chat={"too_long": "drop"},
        preference={"loss": "dpo"},
    )
    share, steps = walk_epoch(path, FILL)
    name = f"fill of blocks of {FILL:,}, an epoch of the pairs, Qwen3's tokenizer"
    bench.say(name, share, "", "≥ 0.96", blocks=32 * len(steps))


if __name__ == "__main__":
    parts = {"head": head, "step": step, "fill": fill}
    parts["trl"] = lambda bench: harness.beside_trl(bench, speed, PAIRS, GPT2)
    parts["same"] = lambda bench: harness.beside_trl(bench, same)
    children = {"head": head_alone, "run": run_of, "trl": contender}
    paths = {"shared": False, "trl": False}  # a folder of data; an interpreter that has TRL
    harness.main(__doc__, parts, SIZES, paths=paths, child=children)
