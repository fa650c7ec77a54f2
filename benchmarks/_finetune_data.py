"""The parts `speed` and `opening` of `finetune.py`.

    python benchmarks/_finetune_data.py CONFIG BLOCK CURSORS

opens the stream of a prepared run at a block, and prints as JSON what its first batch costs.
CURSORS: a .npy file with the cursors at that block; "-" = the beginning of the data.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TRAIN, TOKENIZER = "sft/train.jsonl", "tokenizers/qwen3"
BLOCKS, SEQ_LEN = 32, 1024
LONG = 1 << 14  # more ids than any row of the file has, so that `speed` counts whole rows
CHUNK = 64  # rows of a turn; a lane encodes as many at once


def prepare_run(bench: Any) -> Path:
    """Return the config of a run on the conversations, with its tokenizer and manifest made."""
    from llmtrain import load_config
    from llmtrain.training.start.prepare import prepare

    path: Path = bench.folder / "chat.json"
    run_dir: Path = bench.folder / "chat"
    if path.exists():
        return path
    keys = {
        "run": {"dir": str(run_dir)},
        "model": {
            "config": {"model_type": "llama"},
            "tokenizer": str(bench.shared / TOKENIZER),
        },
        "data": {
            "sources": [{"path": str(bench.shared / TRAIN)}],
            "seq_len": SEQ_LEN,
            "heldout": 0.0,
        },
        "chat": {"too_long": "truncate"},
        "training": {"steps": 1, "global_batch_size": BLOCKS},
    }
    run_dir.mkdir()
    path.write_text(json.dumps(keys))  # YAML is a superset
    prepare(load_config(path), run_dir, 1)
    return path


def load(path: Path) -> tuple[Any, Path]:
    """Return the manifest of the prepared run, and the directory of its tokenizer."""
    from llmtrain import load_config
    from llmtrain.rundir import contents
    from llmtrain.training.start.prepare import load_manifest

    config = load_config(path)
    return load_manifest(config, config.run_dir), config.run_dir / contents.TOKENIZER


def speed(bench: Any) -> None:
    """Encode all rows, and the texts of the sequences that they become."""
    from llmtrain.data.tokens.encode import Encoder, open_chat
    from llmtrain.data.tokens.tokenizer import open_tokenizer

    manifest, directory = load(prepare_run(bench))
    opened = open_tokenizer(directory, manifest.tokenizer.backend)
    encoder = Encoder(opened, open_chat(directory, manifest.chat, LONG, opened))
    source = manifest.sources[0]
    rows = (bench.shared / TRAIN).read_text("utf-8").split("\n")
    rows = [row for row in rows if row.strip()][: bench.sizes.rows]
    chunks = [rows[first : first + CHUNK] for first in range(0, len(rows), CHUNK)]
    texts, longest, found = texts_of(encoder, source, chunks)
    all_texts, longest_alone = bare(directory), bare(directory)
    seconds = minima(
        bench.sizes.rounds,
        len(chunks),
        {
            "ours": lambda n: encoder.documents(source, chunks[n]),
            "bare": lambda n: all_texts(texts[n]),
            "longest": lambda n: longest_alone(longest[n]),
        },
    )
    ids = sum(len(one.ids) for one in found)
    once = sum(one.counts["longest_ids"] for one in found)
    again = sum(map(len, (one for chunk in texts for one in all_texts(chunk))))
    more = {"rows": len(rows), "ids": ids, "ids_of_the_bare_encode": again}
    name = "rows to ids and masks, Qwen3"
    bench.say(name, ids / seconds["ours"], "tokens/s", "≥ 150,000", **more)
    ratio = seconds["bare"] / seconds["ours"]
    bench.say("  of a bare encode of the texts of the same sequences", ratio, "×", "≥ 0.4")
    bench.say("  that bare encode", again / seconds["bare"], "tokens/s")
    name = "  where only the longest sequence of each row counts"
    bench.say(name, once / seconds["ours"], "tokens/s", ids=once)
    ratio = seconds["longest"] / seconds["ours"]
    bench.say("  of a bare encode of the texts of the longest", ratio, "×")


def minima(rounds: int, turns: int, work: dict[str, Callable[[int], Any]]) -> dict[str, float]:
    """Return the CPU seconds of each contender, the sum over turns of the least of all rounds."""
    best = {name: [float("inf")] * turns for name in work}
    for _ in range(rounds):
        for turn in range(turns):
            for name, make in work.items():
                began = time.process_time()
                make(turn)
                best[name][turn] = min(best[name][turn], time.process_time() - began)
    return {name: sum(seconds) for name, seconds in best.items()}


def bare(directory: Path) -> Callable[[Sequence[str]], list[list[int]]]:
    """Return a function that encodes texts with the library alone."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(texts: Sequence[str]) -> list[list[int]]:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    return encode


def texts_of(
    encoder: Any, source: Any, chunks: Sequence[Sequence[str]]
) -> tuple[list[list[str]], list[list[str]], list[Any]]:
    """Return for each chunk the texts of all sequences, those of each row's longest, and all rows.

    The last sequence of a row is that of its last turn, so it has the whole conversation.
    """
    texts: list[list[str]] = []
    longest: list[list[str]] = []
    found: list[Any] = []
    for chunk in chunks:
        texts.append([])
        longest.append([])
        for row in chunk:
            with collected() as own:
                found += encoder.documents(source, [row])
            texts[-1] += own
            longest[-1] += own[-1:]
    return texts, longest, found


@contextmanager
def collected() -> Iterator[list[str]]:
    """Collect the texts of the sequences that are made meanwhile."""
    from llmtrain.data.chat import chat
    from llmtrain.data.chat.encode import unmark

    texts: list[str] = []
    original = chat.to_sequences

    def to_sequences(encoder: Any, turns: Any, *more: Any) -> Any:
        texts.append(unmark(turns[-1].text))
        return original(encoder, turns, *more)

    chat.to_sequences = to_sequences
    try:
        yield texts
    finally:
        chat.to_sequences = original


def opening(bench: Any) -> None:
    """Open the stream at its beginning and in the middle of an epoch, in turns."""
    import numpy as np

    path = prepare_run(bench)
    fill, steps = walk_epoch(path)
    middle, file = len(steps) // 2, bench.folder / "middle.npy"
    np.save(file, steps[middle - 1])
    places = {
        "the first batch": ("0", "-"),
        f"that of a resume at step {middle} of {len(steps)}": (str(middle * BLOCKS), str(file)),
    }
    costs: dict[str, list[dict[str, float]]] = {name: [] for name in places}
    for _ in range(bench.sizes.starts):
        for name, arguments in places.items():
            command = [sys.executable, __file__, str(path), *arguments]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            costs[name].append(json.loads(done.stdout))
    for name, found in costs.items():
        batch = [cost["batch"] for cost in found]
        both = [cost["batch"] + cost["tokenizer"] for cost in found]
        more = {"most": max(batch), "lanes": len(steps[0])}
        bench.say(f"{name}: {BLOCKS} blocks of {SEQ_LEN:,}", min(batch), "s", "≤ 1", **more)
        name = "  with its tokenizer and template, opened and checked"
        bench.say(name, min(both), "s", "≤ 1", most=max(both))
    blocks = len(steps) * BLOCKS
    bench.say("fill of the blocks of an epoch", fill, "", "≥ 0.97", blocks=blocks)


def walk_epoch(path: Path) -> tuple[float, list[Any]]:
    """Read blocks until every lane has finished its first epoch.

    Returns the share of positions that are not padding, and the cursors of all lanes after each
    step.
    """
    import numpy as np

    from llmtrain.data.documents.reader import Reader, Reading
    from llmtrain.data.lanes import Lanes
    from llmtrain.data.tokens.encode import open_encoder

    manifest, directory = load(path)
    cursors = np.zeros((manifest.lanes, len(manifest.sources), 4), np.int64)
    reader = Reader(Reading(600))
    lanes = Lanes(manifest, open_encoder(directory, manifest), reader, cursors.copy(), 0)
    steps: list[Any] = []
    filled = 0
    while not (cursors[:, :, 0] > 0).all():
        for g in range(len(steps) * BLOCKS, (len(steps) + 1) * BLOCKS):
            block = lanes.take(g)
            filled += sum(span.stop - span.start for span in block.spans)
            cursors[g % manifest.lanes] = block.cursors
        steps.append(cursors.copy())
    return filled / (len(steps) * BLOCKS * (SEQ_LEN + 1)), steps


def main() -> None:
    """Open the stream once, in a process that has imported what every run imports before."""
    import numpy as np

    from llmtrain.data.documents.reader import Reading
    from llmtrain.data.stream import open_stream
    from llmtrain.data.survey import differing_tokenizer
    from llmtrain.data.tokens.encode import open_encoder

    path, block, cursors = sys.argv[1:]
    manifest, directory = load(Path(path))
    began = time.process_time()
    encoder = open_encoder(directory, manifest)
    assert not differing_tokenizer(manifest, encoder)
    opened = time.process_time()
    stream = open_stream(
        manifest,
        directory,
        blocks_per_step=BLOCKS,
        rank=0,
        world_size=1,
        workers=0,
        next_block=int(block),
        cursors=None if cursors == "-" else np.load(cursors),
        reading=Reading(600),
        encoder=encoder,
    )
    next(stream)
    ended = time.process_time()
    stream.close()
    print(json.dumps({"tokenizer": opened - began, "batch": ended - opened}))


if __name__ == "__main__":
    main()
