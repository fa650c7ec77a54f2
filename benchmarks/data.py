"""What does the stream cost beside what it cannot do without? Bare tokenizers, and `datasets`.

The whole path (read, permute, hold out, tokenize, pack, batch, digest) in CPU time of one core,
medians of five rounds, beside tokenizers alone on the very texts, and streaming `datasets`. The
cursors of step 1,000,000 are those of ten steps behind a fresh one.
"""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from defaults import articles, group_texts
from harness import Bench, config_of, main, pin, prepared, stream_of, timed

# Nothing heavy here: a data worker is spawned, and imports this file again.

SEQ_LEN, BLOCKS = 1024, 32  # of a step


class Prepared:
    """A prepared run of GPT-2 on the data: its tokenizer, and manifests of it in several forms."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.data = bench, bench.asked.data.resolve()
        given = bench.asked.tokenizer or self.data.parent.parent / "tokenizers" / "gpt2"
        self.gpt2 = given.resolve()
        _, self.tokenizer = prepared(self.config())

    def config(self, **data: Any) -> Path:
        data |= {"sources": [{"path": str(self.data)}], "seq_len": SEQ_LEN, "heldout": 0.005}
        model = {"config": {"model_type": "gpt2"}, "tokenizer": str(self.gpt2)}
        return config_of(self.bench.folder, rows=BLOCKS, model=model, data=data)

    def manifest(self, backend: str = "tiktoken", **data: Any) -> Any:
        from llmtrain import load_config
        from llmtrain.config.binding import data_settings
        from llmtrain.data.survey import freeze, survey
        from llmtrain.data.tokens.tokenizer import open_tokenizer

        found = survey(data_settings(load_config(self.config(**data))), 1)
        return freeze(found, open_tokenizer(self.tokenizer, backend))

    def stream(self, manifest: Any, workers: int = 0) -> Any:
        return stream_of(manifest, self.tokenizer, BLOCKS, workers)

    def lanes(self, manifest: Any, g: int, cursors: Any) -> tuple[list[Any], Any]:
        """Return all lanes, as a process would open them from block g on, and their reader."""
        from llmtrain.data.documents.reader import Reader, Reading
        from llmtrain.data.lanes import Lane
        from llmtrain.data.packing import START
        from llmtrain.data.tokens.encode import open_encoder

        encoder, reader = open_encoder(self.tokenizer, manifest), Reader(Reading(600))
        lanes = []
        for index in range(manifest.lanes):
            first = g + (index - g) % manifest.lanes
            at = [START] if cursors is None else [cursors[index]]
            lanes.append(Lane(manifest, encoder, reader, index, first, at))
        return lanes, reader


def speed(bench: Bench) -> None:
    sizes, made = bench.sizes, Prepared(bench)
    found = defaultdict[str, list[float]](list)
    concat, slow = made.manifest(), made.manifest("tokenizers")
    fit = made.manifest(packing="bestfit")
    fast_alone, slow_alone = bare_tiktoken(made), bare_tokenizers(made)

    with (
        made.stream(concat) as ours,
        made.stream(concat) as twin,
        made.stream(concat, 1) as ahead,
        made.stream(slow) as reference,
        made.stream(fit) as fitted,
    ):
        for stream in (ours, twin, ahead, reference, fitted):
            take(stream, sizes.warm)
        for _ in range(sizes.rounds):
            for name, share, stream, alone, blocks, chunk in (
                ("path", "of tiktoken", ours, fast_alone, sizes.blocks, 128),
                ("fit", "fit of tiktoken", fitted, fast_alone, sizes.blocks, 128),
                ("slow path", "of tokenizers", reference, slow_alone, sizes.slow, 32),
            ):
                path, bare = beside(stream, alone, blocks, chunk)
                found[name].append(blocks * SEQ_LEN / path)
                found[share].append(100 * bare / path)
            inside = own = worker = 0.0
            process = ahead._items.processes[0].pid
            for _ in range(sizes.some // 128):
                inside += take(twin, 128)  # the same blocks
                before = at_rest(process)
                own += take(ahead, 128)
                worker += at_rest(process) - before
            found["of inside"].append(100 * inside / (own + worker))
            found["hand-over"].append(1e6 * (own + worker - inside) / sizes.some)
            found["own"].append(1e3 * own / sizes.some)
            tokens, seconds = with_datasets(made)
            found["datasets"].append(tokens / seconds)
            found["of datasets"].append(found["path"][-1] * seconds / tokens)
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
        ends = f"{min(found[key]):.3g} … {max(found[key]):.3g}"
        bench.say(name, statistics.median(found[key]), unit, goal, range=ends)
    blocks = empty = 0
    lanes, _ = made.lanes(fit, 0, None)
    while blocks < sizes.some:
        for lane in lanes:
            trained = lane.take().trained
            empty += 0 if trained is None else int((~trained).sum())
            blocks += 1
    bench.say("padding with bestfit", 100 * empty / (blocks * SEQ_LEN), "%", "≤ 2.5")


def take(stream: Any, blocks: int) -> float:
    began = time.process_time()
    for _ in range(blocks // BLOCKS):
        next(stream)
    return time.process_time() - began


def at_rest(worker: int) -> float:
    """Return a worker's CPU seconds (Linux) once it has read ahead as far as it may."""
    used = -1.0
    while True:
        now = time.clock_gettime(~worker << 3 | 2)
        if now - used < 1e-4:
            return now
        used = now
        time.sleep(0.05)


Alone = Callable[[list[str]], None]


def bare_tiktoken(made: Prepared) -> Alone:
    """`encode_ordinary` and `np.array`; made by tiktoken's own reader of files."""
    os.environ["TIKTOKEN_CACHE_DIR"] = ""
    import numpy as np
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    files = str(made.gpt2 / "merges.txt"), str(made.gpt2 / "vocab.json")
    ranks = data_gym_to_mergeable_bpe_ranks(*files)
    encoding = tiktoken.Encoding(
        "bare", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={}
    )

    def encode(texts: list[str]) -> None:
        for text in texts:
            np.array(encoding.encode_ordinary(text), dtype=np.int32)

    return encode


def bare_tokenizers(made: Prepared) -> Alone:
    """`encode_batch_fast`, 64 texts a call, and reading the ids."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(made.tokenizer / "tokenizer.json"))

    def encode(texts: list[str]) -> None:
        for i in range(0, len(texts), 64):
            for encoding in tokenizer.encode_batch_fast(texts[i : i + 64]):
                encoding.ids  # noqa: B018  # makes the list

    return encode


def beside(stream: Any, bare: Alone, blocks: int, chunk: int) -> tuple[float, float]:
    """CPU seconds of (the path, the tokenizer alone) for so many blocks, in turns."""
    from llmtrain.data.tokens.tokenizer import Tokenizer

    ours, alone = 0.0, list[float]()
    original = Tokenizer.documents
    for _ in range(blocks // chunk):
        texts: list[str] = []

        def documents(self: Any, batch: Any, texts: list[str] = texts) -> Any:
            texts.extend(batch)
            return original(self, batch)

        with mock.patch.object(Tokenizer, "documents", documents):
            ours += take(stream, chunk)
        with timed(alone):
            bare(texts)
    return ours, sum(alone)


def with_datasets(made: Prepared) -> tuple[int, float]:
    """(tokens, CPU seconds) of what transformers' example for language models does, streaming."""
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made.tokenizer)
    rows = articles(made.data).take(made.bench.sizes.documents)
    grouped = group_texts(rows, tokenizer, SEQ_LEN).with_format("torch")
    began = time.process_time()
    found = sum(batch["input_ids"].numel() for batch in DataLoader(grouped, batch_size=BLOCKS))
    return found, time.process_time() - began


def waiting(bench: Bench) -> None:
    pin(every=True)
    made = Prepared(bench)
    with made.stream(made.manifest(), 1) as stream:
        for _ in range(10):
            next(stream)
        began = time.perf_counter()
        for _ in range(40):
            next(stream)
        seconds = 2 * (time.perf_counter() - began) / 40
        time.sleep(1)
        taking, working, began = [], [], time.perf_counter()
        for _ in range(bench.sizes.steps):
            at, used = time.perf_counter(), time.process_time()
            next(stream)
            taking.append(time.perf_counter() - at)
            working.append(time.process_time() - used)
            time.sleep(seconds)
        whole = time.perf_counter() - began
    name = "waiting: share of a step that is twice as long as its data takes"
    more = {"step_ms": 1e3 * seconds, "median_ms": 1e3 * statistics.median(taking)}
    bench.say(name, 100 * (sum(taking) - sum(working)) / whole, "%", "≤ 1", **more)
    bench.say("  own work: unpacking blocks, making batches", 100 * sum(working) / whole, "%")
    pin()


def opening(bench: Bench) -> None:
    from llmtrain.types import Cursor

    made = Prepared(bench)
    for packing in ("concat", "bestfit"):
        manifest = made.manifest(lanes=48, packing=packing)
        for step in (10, 1_000_000):
            # Ten steps behind the place in the data where it should be, in an epoch as if all units
            # were equally long (20,959 blocks of the whole text): no run of a million was made.
            first = (step - 10) * BLOCKS
            start = dict.fromkeys(range(48), Cursor(first // 20_959, 0, 0, 0))
            walked, _ = made.lanes(manifest, first, start)
            for g in range(first, step * BLOCKS):
                walked[g % 48].take()
            cursors = {index: lane.cursors[0] for index, lane in enumerate(walked)}
            seconds, reads = list[float](), 0
            for _ in range(bench.sizes.rounds):
                lanes, reader = made.lanes(manifest, step * BLOCKS, cursors)
                with timed(seconds):
                    for lane in lanes:
                        lane.take()
                reads = reader.units.reads
            name = f"opening 48 lanes at step {step:,}, {packing}"
            bench.say(name, statistics.median(seconds), "s", "≤ 1", units_read=reads)


def memory(bench: Bench) -> None:
    import psutil

    pin(every=True)
    made, lanes = Prepared(bench), 24
    manifest = made.manifest(lanes=lanes)
    units = len(manifest.sources[0].units)
    with made.stream(manifest, 1) as stream:
        worker = psutil.Process(stream._items.processes[0].pid)
        samples: list[tuple[float, Any]] = []
        read, began = 0.0, time.perf_counter()
        while read < bench.sizes.units:
            cursors = next(stream).cursors.values()
            if time.perf_counter() - began > len(samples):
                samples.append((time.perf_counter() - began, worker.memory_full_info()))
            read = sum(c.epoch * units / lanes + c.unit for (c,) in cursors)
            read *= lanes / len(cursors)
        samples.append((time.perf_counter() - began, worker.memory_full_info()))
    late = samples[len(samples) // 3 :]
    minutes = [seconds / 60 for seconds, _ in late]
    private = [used.uss / 1e6 for _, used in late]
    slope = statistics.linear_regression(minutes, private).slope if len(late) > 1 else 0.0
    goal = f"≤ {350 + 6 * lanes}"
    bench.say(f"memory of a worker with {lanes} lanes, private", max(private), "MB", goal)
    resident = max(used.rss for _, used in late) / 1e6
    bench.say("  resident, with shared pages", resident, "MB", goal)
    more = {"units_read": round(read), "seconds": round(samples[-1][0]), "private_mb": private}
    bench.say(f"  growth over {read:,.0f} units at full speed", slope, "MB/min", "≤ 1", **more)
    pin()


def order(bench: Bench) -> None:
    from llmtrain.hashing import mix, permutation

    seconds: list[float] = []
    for epoch in range(bench.sizes.rounds):
        with timed(seconds):
            permutation(1_000_000, mix(42, 1, 0, epoch))
    bench.say("order of a million units", statistics.median(seconds), "s", "≤ 0.5")


SIZES = {
    "rounds": (5, 1),
    "blocks": (4096, 256),  # of a round: × 1,024 × 5 = 21 M tokens
    "warm": (1536, 32),  # before: lanes opened, windows filled
    "some": (1024, 128),  # through a worker
    "slow": (512, 64),  # with `tokenizers`
    "documents": (3000, 1000),  # with `datasets`
    "steps": (200, 10),
    "units": (6000, 60),  # fewer, and the slope is noise
}

if __name__ == "__main__":
    parts = {"speed": speed, "waiting": waiting, "opening": opening, "memory": memory}
    main(__doc__, parts | {"order": order}, SIZES, paths={"data": True, "tokenizer": False})
