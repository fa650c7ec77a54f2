"""Small corpora in every format, and a tokenizer for them."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from llmtrain.config.binding import data_settings
from llmtrain.config.schema import Config
from llmtrain.data.manifest import DataManifest
from llmtrain.data.survey import freeze, survey
from llmtrain.data.tokens.tokenizer import open_tokenizer, train_bpe

WORDS = "der river flows past hills where old stones lie under moss and rain falls on quiet towns"


def articles(count: int, start: int = 0) -> list[dict]:
    """Documents of very uneven lengths; each names itself, so no two are equal."""
    words = WORDS.split()
    rows = []
    for n in range(start, start + count):
        length = (n * n * 7 + 3 * n) % 61 + 1
        text = " ".join(words[(n * 5 + i * (n % 7 + 1)) % len(words)] for i in range(length))
        rows.append({"id": str(n), "title": f"Article {n}", "text": f"Article {n}\n{text}."})
    return rows


def letters(lengths: list[int]) -> list[dict]:
    """Documents of so many tokens each, the end of text included: one letter, its own, repeated.

    No article holds these letters, so the tokenizer has nothing longer made of them.
    """
    assert len(lengths) <= 25
    return [
        {"id": str(n), "text": chr(ord("B") + n) * (length - 1)} for n, length in enumerate(lengths)
    ]


def write_parquet(path: Path, rows: list[dict], group: int = 10) -> Path:
    """Rows as a parquet file with row groups of `group` rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group, compression="zstd")
    return path


def write_lines(path: Path, lines: list[bytes], end: bytes = b"\n") -> Path:
    """Lines, compressed as the suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(line + end for line in lines)
    if path.suffix == ".gz":
        data = gzip.compress(data)
    if path.suffix == ".zst":
        data = zstandard.ZstdCompressor().compress(data)
    path.write_bytes(data)
    return path


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    """Rows as JSON lines."""
    return write_lines(path, [json.dumps(row, ensure_ascii=False).encode() for row in rows])


def write_tokenizer(directory: Path, entries: int = 300) -> Path:
    """A byte-level BPE trained on the articles."""
    directory.mkdir(parents=True)
    texts = [row["text"] for row in articles(100)]
    (directory / "tokenizer.json").write_text(train_bpe(texts, entries), "utf-8")
    settings = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return directory


def with_hole(directory: Path, last: int) -> Path:
    """The tokenizer, whose last entry has this id, far behind the others."""
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    entries = content["model"]["vocab"]
    entries[max(entries, key=entries.__getitem__)] = last
    path.write_text(json.dumps(content), "utf-8")
    return directory


def with_template(directory: Path, template: str, others: list[str] | None = None) -> Path:
    """The tokenizer with `<s>` as begin token, and what its post-processor puts around a text.

    others: further added tokens, none of them marked special.
    """
    from tokenizers import AddedToken, Tokenizer, processors

    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens([AddedToken(word, special=False) for word in others or ()])
    named = [word for word in template.split() if word != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(word, tokenizer.token_to_id(word)) for word in named]
    )
    tokenizer.save(str(path))
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"bos_token": "<s>"}))
    return directory


def config(*sources: Path | str | dict, **data: object) -> Config:
    """A config that trains on these sources."""
    described = [s if isinstance(s, dict) else {"path": str(s)} for s in sources]
    seed = data.pop("seed", 42)
    fields = {"seq_len": 16, "heldout": 0.0} | data
    return Config.model_validate(
        {"run": {"seed": seed}, "data": {"sources": described, **fields}, "training": {"steps": 10}}
    )


def manifest_of(tokenizer: Path, *sources: Path | str | dict, **data: object) -> DataManifest:
    """The manifest of a fresh run on these sources."""
    return freeze(survey(data_settings(config(*sources, **data)), 1), open_tokenizer(tokenizer))
