"""Tokenizers of many kinds, small enough to build in a test, and the library's own answer."""

import importlib.resources
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tokenizers
from helpers import corpus
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SHARED = Path(__file__).parents[3] / "shared" / "data"
SMALL = Path(__file__).parents[1] / "tokenizers"  # scripts/make_test_tokenizers.py
SPECIAL = ["<unk>", "<s>", "</s>"]


def shared(name: str) -> Path:
    """A directory of real data; skips where there is none."""
    directory = SHARED / name
    if not directory.is_dir():
        pytest.skip(f"{directory} is not there")
    return directory


def saved(source: Path, directory: Path) -> Path:
    """A tokenizer, as a run saves it."""
    for file, data in _files(source).items():
        directory.mkdir(parents=True, exist_ok=True)
        (directory / file).write_bytes(data)
    return directory


@lru_cache
def _files(source: Path) -> dict[str, bytes]:
    """What a run saves of a tokenizer, which takes seconds for a large one."""
    from llmtrain.model.tokenizer import save_tokenizer

    with TemporaryDirectory() as folder:
        save_tokenizer(str(source), None, Path(folder))
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def sample_texts(count: int) -> list[str]:
    """Articles of the built-in sample."""
    import pyarrow.parquet as pq

    first = importlib.resources.files("llmtrain.data") / "sample" / "train-00000-of-00004.parquet"
    return pq.read_table(first, columns=["text"])["text"].to_pylist()[:count]


def real_texts(name: str, count: int) -> list[str]:
    """Articles of a real data set."""
    import pyarrow.parquet as pq

    first = sorted(shared(f"wikipedia/{name}").glob("*.parquet"))[0]
    return pq.ParquetFile(first).read_row_group(0)["text"].to_pylist()[:count]


def description(directory: Path) -> dict:
    """What `tokenizer.json` says."""
    return json.loads((directory / "tokenizer.json").read_text("utf-8"))


def edited(source: Path, directory: Path, change: Callable[[dict], object]) -> Path:
    """A copy of a tokenizer whose description `change` has edited."""
    found = description(source)
    change(found)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(found), "utf-8")
    settings = (source / "tokenizer_config.json").read_text("utf-8")
    (directory / "tokenizer_config.json").write_text(settings, "utf-8")
    return directory


def word_pieces(directory: Path, kind: str) -> Path:
    """A tokenizer that marks the beginning of words, as SentencePiece's do.

    kind: `unigram` or `bpe` (pre-tokenizer Metaspace), or `prepend` (a normalizer instead).
    """
    tokenizer = Tokenizer(models.Unigram() if kind == "unigram" else models.BPE(unk_token="<unk>"))
    if kind == "prepend":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    options = {"vocab_size": 200, "special_tokens": SPECIAL, "show_progress": False}
    if kind == "unigram":
        trainer = trainers.UnigramTrainer(**options, unk_token="<unk>")
    else:
        trainer = trainers.BpeTrainer(**options)
    texts = [row["text"] for row in corpus.articles(100)]
    tokenizer.train_from_iterator(texts, trainer=trainer)
    if kind == "prepend":
        tokenizer.pre_tokenizer = None
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "</s>", "bos_token": "<s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return directory


def library_ids(directory: Path, text: str) -> list[int]:
    """The ids that `tokenizers` itself gives a text in one go, added tokens being text."""
    return _library(directory).encode(text, add_special_tokens=False).ids


@lru_cache(maxsize=4)
def _library(directory: Path) -> tokenizers.Tokenizer:
    found = description(directory)
    for token in found["added_tokens"]:
        token["special"] = True
    opened = tokenizers.Tokenizer.from_str(json.dumps(found))
    opened.encode_special_tokens = True
    return opened
