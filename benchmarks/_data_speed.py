"""The rows of throughput of `data.py`, by CPU time."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from _data_bench import BLOCKS, SEQ_LEN, Bench, opened
from _group_texts import articles, group_texts


@contextmanager
def recorded(texts: list[str]) -> Iterator[None]:
    """Whatever the stream tokenizes is noted in `texts`."""
    from llmtrain.data.tokens.tokenizer import Tokenizer

    original = Tokenizer.documents

    def documents(self: Any, batch: Any) -> Any:
        texts.extend(batch)
        return original(self, batch)

    Tokenizer.documents = documents  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tokenizer.documents = original  # type: ignore[method-assign]


def cpu_of(process: int) -> float:
    """CPU seconds of another process, by its clock (Linux)."""
    return time.clock_gettime(~process << 3 | 2)


def take(stream: Any, blocks: int) -> float:
    """CPU seconds that this process needs for so many blocks."""
    began = time.process_time()
    for _ in range(blocks // BLOCKS):
        next(stream)
    return time.process_time() - began


def take_from_worker(stream: Any, blocks: int) -> tuple[float, float]:
    """The same through a worker: CPU seconds of (this process, the worker)."""
    worker = stream._items.processes[0].pid
    before = at_rest(worker)
    own = take(stream, blocks)
    return own, at_rest(worker) - before


def at_rest(worker: int) -> float:
    """A worker's CPU seconds once it has read ahead as far as it may."""
    used = cpu_of(worker)
    while True:
        time.sleep(0.05)
        now = cpu_of(worker)
        if now - used < 1e-4:
            return now
        used = now


def bare_tiktoken(bench: Bench) -> Callable[[list[str]], float]:
    """CPU seconds of `encode_ordinary` and `np.array`; made by tiktoken's own reader of files."""
    os.environ["TIKTOKEN_CACHE_DIR"] = ""
    import numpy as np
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    files = str(bench.gpt2 / "merges.txt"), str(bench.gpt2 / "vocab.json")
    ranks = data_gym_to_mergeable_bpe_ranks(*files)
    encoding = tiktoken.Encoding(
        "bare", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={}
    )

    def measure(texts: list[str]) -> float:
        began = time.process_time()
        for text in texts:
            np.array(encoding.encode_ordinary(text), dtype=np.int32)
        return time.process_time() - began

    return measure


def bare_tokenizers(bench: Bench) -> Callable[[list[str]], float]:
    """CPU seconds of `encode_batch_fast`, 64 texts a call, and of reading the ids."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(bench.tokenizer / "tokenizer.json"))

    def measure(texts: list[str]) -> float:
        began = time.process_time()
        for i in range(0, len(texts), 64):
            for encoding in tokenizer.encode_batch_fast(texts[i : i + 64]):
                encoding.ids  # noqa: B018  # makes the list
        return time.process_time() - began

    return measure


def beside(
    stream: Any, bare: Callable[[list[str]], float], blocks: int, chunk: int
) -> tuple[float, float]:
    """CPU seconds of (the path, the tokenizer alone) for so many blocks, in turns."""
    ours = alone = 0.0
    for _ in range(blocks // chunk):
        texts: list[str] = []
        with recorded(texts):
            ours += take(stream, chunk)
        alone += bare(texts)
    return ours, alone


def with_datasets(bench: Bench) -> tuple[int, float]:
    """(tokens, CPU seconds) of what transformers' example for language models does, streaming."""
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bench.tokenizer)
    rows = articles(bench.data).take(bench.sizes.documents)
    grouped = group_texts(rows, tokenizer, SEQ_LEN).with_format("torch")
    began = time.process_time()
    found = sum(batch["input_ids"].numel() for batch in DataLoader(grouped, batch_size=BLOCKS))
    return found, time.process_time() - began


def speed(bench: Bench) -> None:
    """The rows of throughput: rates are tokens a second of CPU time."""
    sizes, found = bench.sizes, {}
    concat, slow = bench.manifest(), bench.manifest("tokenizers")
    fit = bench.manifest(packing="bestfit")
    fast_alone, slow_alone = bare_tiktoken(bench), bare_tokenizers(bench)

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    with (
        bench.stream(concat) as ours,
        bench.stream(concat) as twin,
        bench.stream(concat, 1) as ahead,
        bench.stream(slow) as reference,
        bench.stream(fit) as fitted,
    ):
        for stream in (ours, twin, ahead, reference, fitted):
            take(stream, sizes.warm)
        for _ in range(sizes.rounds):
            path, alone = beside(ours, fast_alone, sizes.blocks, 128)
            note("path", sizes.blocks * SEQ_LEN / path)
            note("of tiktoken", 100 * alone / path)
            path, alone = beside(fitted, fast_alone, sizes.blocks, 128)
            note("fit", sizes.blocks * SEQ_LEN / path)
            note("fit of tiktoken", 100 * alone / path)
            path, alone = beside(reference, slow_alone, sizes.slow, 32)
            note("slow path", sizes.slow * SEQ_LEN / path)
            note("of tokenizers", 100 * alone / path)
            inside = own = worker = 0.0
            for _ in range(sizes.some // 128):
                inside += take(twin, 128)  # the same blocks
                one, other = take_from_worker(ahead, 128)
                own, worker = own + one, worker + other
            note("of inside", 100 * inside / (own + worker))
            note("hand-over", 1e6 * (own + worker - inside) / sizes.some)
            note("own", 1e3 * own / sizes.some)
            tokens, seconds = with_datasets(bench)
            note("datasets", tokens / seconds)
            note("of datasets", found["path"][-1] * seconds / tokens)
    said = {name: statistics.median(values) for name, values in found.items()}
    ends = {name: f"{min(values):.3g} … {max(values):.3g}" for name, values in found.items()}
    for key, name, unit, goal in (
        ("path", "in process, tiktoken, concat", "tokens/s", ""),
        ("of tiktoken", "  of bare encode_ordinary + np.array on these texts", "%", "≥ 80"),
        ("datasets", "datasets: streaming, map, map, DataLoader", "tokens/s", ""),
        ("of datasets", "  in process over that", "times", "≥ 25"),
        ("slow path", "in process, tokenizers, concat", "tokens/s", ""),
        ("of tokenizers", "  of bare encode_batch_fast on these texts", "%", "≥ 85"),
        ("fit", "in process, tiktoken, bestfit", "tokens/s", ""),
        ("fit of tiktoken", "  of bare encode_ordinary + np.array on these texts", "%", ""),
        ("of inside", "one worker: CPU time in process of that of both processes", "%", "≥ 75"),
        ("hand-over", "  hand-over, CPU time of both processes", "µs/block", "≤ 200"),
        ("own", "  CPU time of the main process, batches made", "ms/block", "≤ 0.17"),
    ):
        bench.say(name, said[key], unit, goal, range=ends[key])
    bench.say("padding with bestfit", 100 * padding(bench, fit), "%", "≤ 2.5")


def padding(bench: Bench, manifest: Any) -> float:
    """Share of targets that are padding."""
    blocks = empty = 0
    lanes, _ = opened(bench, manifest, 0, None)
    while blocks < bench.sizes.some:
        for lane in lanes:
            trained = lane.take().trained
            empty += 0 if trained is None else int((~trained).sum())
            blocks += 1
    return empty / (blocks * SEQ_LEN)
