"""From raw articles to trained tokens: what do llmtrain and the Trainer make with their defaults?

A Llama (hidden 192, 4 layers, a tied vocabulary of 50,304), 8 rows a step, of 256 tokens in
`group_texts`, transformers' example, and llmtrain; most tutorials pad to 1,024. Honest rows
tokenize beforehand, which the rates leave out. A process each, in turns, on one core; trained
tokens a CPU second, the best of all rounds.
"""

import math
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from harness import Bench, Clock, config_of, contend, fresh_model, in_turns, llama, main, peak_mb

FASTER = 1.3  # from here on bf16 is worth its rounding; llmtrain's `auto` has the same limit
NAMES = {
    ("padded", "fp32"): "Trainer, padded to 1,024",
    ("by_length", "fp32"): "Trainer, group_by_length (honest)",
    ("trl", "fp32"): "TRL, packed, fp32 (honest)",
    ("trl", "bf16"): "TRL, packed, bf16 (honest)",
    ("grouped", "fp32"): "Trainer, group_texts, fp32 (its default)",
    ("grouped", "bf16"): "Trainer, group_texts, bf16",
    ("llmtrain", "auto"): "llmtrain, defaults",
    ("llmtrain", "fp32"): "llmtrain, fp32",
}
SHAPE = llama(192, 4, 3, 512, 50_304, 1024)
SEQ_LEN, ROWS, PADDED = 256, 8, 1024
PADDED_STEPS = 4  # at least, as articles differ in length
WARM = 2  # steps that are not counted; one where a step has four times the tokens
RATE, FIRST, PEAK = "tokens_per_cpu_second", "first_step_cpu_seconds", "peak_mb"
BEST = {RATE: max, FIRST: min, PEAK: min}  # of all rounds
Contender = tuple[str, str]
Figures = dict[Contender, dict[str, float]]


def product_rate(dtype: str) -> float:
    """Return the GFLOP/s of a 1024 × 768 × 768 product, the best of five."""
    import torch

    one = torch.randn(1024, 768, generator=torch.Generator().manual_seed(0))
    one = one.to(getattr(torch, dtype))
    other = one[:768, :768].contiguous()
    seconds = in_turns(5, {"": lambda: one @ other}, time.thread_time)[""]
    return 2 * 1024 * 768 * 768 / min(seconds) / 1e9


def contenders(bf16_over_fp32: float, trl: Path | None = None) -> list[Contender]:
    """Return who runs, in the order of the table. trl: None = TRL does not."""
    left_out = {("trl", "fp32")}  # it would take bf16, its default
    if bf16_over_fp32 < FASTER:
        left_out = {("grouped", "bf16"), ("llmtrain", "fp32"), ("trl", "bf16")}
    return [one for one in NAMES if one not in left_out and (trl or one[0] != "trl")]


def comparisons(figures: Figures, chosen: str) -> Iterator[tuple[str, float, str]]:
    """Yield (name, ratio, goal).

    figures: of each contender, the best over the rounds
    chosen: the precision that llmtrain's defaults resolved to
    """
    ours, plain = figures["llmtrain", "auto"], figures["grouped", "fp32"]
    fp32, same = figures.get(("llmtrain", "fp32"), ours), figures["grouped", chosen]
    yield "tokens/s, fp32, over group_texts in fp32", fp32[RATE] / plain[RATE], "≥ 1.2"
    if chosen == "bf16":
        yield "tokens/s, bf16, over group_texts in bf16", ours[RATE] / same[RATE], "≥ 1.8"
        yield "tokens/s, both with their defaults", ours[RATE] / plain[RATE], "≥ 2.4"
    padded, by_length = figures["padded", "fp32"], figures["by_length", "fp32"]
    yield "tokens/s over the padded default", ours[RATE] / padded[RATE], "≥ 4"
    yield "tokens/s over group_by_length", ours[RATE] / by_length[RATE], ""
    yield "peak memory over group_texts", ours[PEAK] / same[PEAK], "≤ 0.60"
    if packed := figures.get(("trl", chosen)):
        yield "tokens/s over TRL packed", ours[RATE] / packed[RATE], ""
    goal = "≤ 1.25" if chosen == "bf16" else "≤ 1.4"
    yield f"CPU to the first step over group_texts, {chosen}", ours[FIRST] / same[FIRST], goal


def defaults(bench: Bench) -> None:
    asked, tokens = bench.asked, bench.sizes.tokens
    fp32, bf16 = product_rate("float32"), product_rate("bfloat16")
    bench.say("a product in fp32", fp32, "GFLOP/s")
    bench.say("a product in bf16", bf16, "GFLOP/s")
    given = {"data": str(asked.data.resolve()), "tokenizer": str(asked.tokenizer.resolve())}
    found = contend(
        bench,
        {
            (kind, precision): given | {"kind": kind, "precision": precision, "tokens": tokens}
            for kind, precision in contenders(bf16 / fp32, asked.trl)
        },
        bench.sizes.rounds,
        pythons={(kind, precision): asked.trl for kind, precision in NAMES if kind == "trl"},
        told=lambda one, row: f"{NAMES[one]:<42} {row[RATE]:8.0f} tokens/s",
    )
    figures = {
        one: {name: best(run[name] for run in runs) for name, best in BEST.items()}
        for one, runs in found.items()
    }
    for one, name in NAMES.items():
        if one not in figures:
            reason = f"bf16 products run at {bf16 / fp32:.2f} × the rate of fp32 here"
            bench.say(name, None, note="no --trl" if one[0] == "trl" and not asked.trl else reason)
            continue
        more = {"shape": "llama 192 × 4, V 50,304", "precision": one[1], "tokens": tokens}
        bench.say(name, figures[one][RATE], "tokens/CPU s", **more, runs=found[one])
        bench.say(f"  {name}: to the first step", figures[one][FIRST], "CPU s")
        bench.say(f"  {name}: peak memory", figures[one][PEAK], "MB")
    chosen = found["llmtrain", "auto"][0]["precision"]
    for name, ratio, goal in comparisons(figures, chosen):
        bench.say(name, ratio, "×", goal)


# One contender, in a process of its own


def contender(**asked: Any) -> dict[str, Any]:
    """Train. asked: kind, precision, data, tokenizer, tokens (to count), folder."""
    train = {"llmtrain": with_llmtrain, "trl": with_trl}.get(asked["kind"], with_trainer)
    return train(asked)


def figures_of(clock: Clock, warm: int) -> dict[str, Any]:
    """The figures; the first `warm` steps are not in the rate."""
    steps = len(clock.ends)
    found = {RATE: clock.rate(warm, steps), FIRST: clock.ends[0], PEAK: peak_mb()}
    return found | {"tokens": sum(clock.tokens[warm:steps]), "steps": steps - warm}


def open_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def with_trainer(asked: dict[str, Any]) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    kind, tokens = asked["kind"], asked["tokens"]
    clock, warm = Clock(), WARM if kind == "grouped" else 1
    steps = warm + math.ceil(tokens / (ROWS * SEQ_LEN))
    if kind == "padded":  # a step of it takes eight times as long
        steps = warm + max(PADDED_STEPS, math.ceil(tokens / (2 * ROWS * PADDED)))
    more = {"bf16": asked["precision"] == "bf16", "use_cpu": True, "report_to": "none"}
    if kind == "by_length":
        steps = warm + 8  # from the longest batch of one sorted part to its shortest
        more["train_sampling_strategy"] = "group_by_length"
    lengths: list[int] = []
    tokenizer, data = open_tokenizer(asked["tokenizer"]), articles(Path(asked["data"]))
    rows, collate = rows_of(kind, tokenizer, data, steps, lengths)
    arguments = TrainingArguments(asked["folder"], max_steps=steps, **more)
    model = fresh_model(**SHAPE)
    clock.train(Trainer(model, arguments, train_dataset=rows, data_collator=collate))
    if lengths:  # few steps are made: their rows count as the average of a thousand articles
        clock.tokens = [round(ROWS * sum(lengths) / len(lengths))] * steps
    return figures_of(clock, warm) | {"precision": asked["precision"]}


def articles(data: Path) -> Any:
    """Return the articles of a directory of parquet files as a stream of `datasets`."""
    import datasets

    files = sorted(str(path) for path in data.glob("*.parquet"))
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)


def group_texts(rows: Any, tokenizer: Any, seq_len: int) -> Any:
    """Tokenize the column `text`, join it, cut it into rows of `seq_len` ids with labels.

    The ids behind the last whole row of a batch of articles are dropped.
    """
    tokenizer.model_max_length = 1 << 30  # longer documents are meant

    def group(columns: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain(*lists)) for name, lists in columns.items()}
        starts = range(0, len(joined["input_ids"]) // seq_len * seq_len, seq_len)
        result = {name: [ids[i : i + seq_len] for i in starts] for name, ids in joined.items()}
        return {**result, "labels": result["input_ids"].copy()}

    tokens = rows.map(
        lambda batch: tokenizer(batch["text"]), batched=True, remove_columns=rows.column_names
    )
    return tokens.map(group, batched=True)


def rows_of(
    kind: str, tokenizer: Any, data: Any, steps: int, lengths: list[int]
) -> tuple[Any, Callable[..., Any]]:
    """Return the rows and the collator of a Trainer.

    grouped: as transformers' example for language models; padded: as most tutorials; by_length: as
    many articles as make sorted parts of as many batches as there are steps, tokenized beforehand,
    as this needs their lengths
    lengths: of padded rows, becomes the trained tokens of each article that is tokenized
    """
    import datasets
    from transformers import DataCollatorForLanguageModeling, default_data_collator

    if kind == "grouped":
        return group_texts(data, tokenizer, SEQ_LEN), default_data_collator
    padding = "max_length" if kind == "padded" else False

    def tokenize(batch: dict[str, list[str]]) -> Any:
        made = tokenizer(batch["text"], truncation=True, max_length=PADDED, padding=padding)
        if padding:
            lengths.extend(sum(mask) - 1 for mask in made["attention_mask"])
        return made

    if kind == "by_length":
        some = data.shuffle(seed=42, buffer_size=2000).take(4 * ROWS * (steps - 1))
        data = datasets.Dataset.from_list(list(some))
    rows = data.map(tokenize, batched=True, remove_columns=data.column_names)
    return rows, DataCollatorForLanguageModeling(tokenizer, mlm=False)


def with_trl(asked: dict[str, Any]) -> dict[str, Any]:
    import datasets
    from _trl import sft_config
    from trl import SFTTrainer

    clock, steps = Clock(), WARM + math.ceil(asked["tokens"] / (ROWS * SEQ_LEN))
    some = articles(Path(asked["data"])).take(4 * ROWS * steps)
    rows = datasets.Dataset.from_list([{"text": one["text"]} for one in some])
    arguments = sft_config(asked, SEQ_LEN, ROWS, packing=True, max_steps=steps)
    tokenizer = open_tokenizer(asked["tokenizer"])
    model = fresh_model(**SHAPE)
    clock.train(SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer))
    return figures_of(clock, WARM) | {"precision": asked["precision"]}


def with_llmtrain(asked: dict[str, Any]) -> dict[str, Any]:
    """Train with llmtrain and its defaults; nothing is held out: the Trainer has no evaluation."""
    path = config_of(
        Path(asked["folder"]),
        steps=WARM + math.ceil(asked["tokens"] / (ROWS * SEQ_LEN)),
        rows=ROWS,
        seq_len=SEQ_LEN,
        model={"config": {"model_type": "llama", **SHAPE}, "tokenizer": asked["tokenizer"]},
        data={"sources": [{"path": asked["data"]}]},
        training={"precision": asked["precision"]},
    )
    clock = Clock()
    return clock.train_llmtrain(path, lambda: figures_of(clock, WARM))


if __name__ == "__main__":
    sizes = {"rounds": (3, 1), "tokens": (16_384, 1)}  # that are counted of each contender
    paths = {"data": True, "tokenizer": True, "trl": False}
    main(__doc__, defaults, sizes, paths=paths, child=contender)
