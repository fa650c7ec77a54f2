"""Streamed articles as transformers' example for language models prepares them."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any


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
        end = len(joined["input_ids"]) // seq_len * seq_len
        result = {
            name: [ids[i : i + seq_len] for i in range(0, end, seq_len)]
            for name, ids in joined.items()
        }
        return {**result, "labels": result["input_ids"].copy()}

    def tokenize(batch: dict[str, list[str]]) -> Any:
        return tokenizer(batch["text"])

    tokens = rows.map(tokenize, batched=True, remove_columns=rows.column_names)
    return tokens.map(group, batched=True)
