"""Failures of other libraries between text and blocks: borders, control tokens, targets."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from helpers import corpus
from helpers.streams import Run
from tokenizers import Tokenizer as Plain

from llmtrain.config.binding import data_settings
from llmtrain.data.packing import START, Document, concat, in_windows
from llmtrain.data.survey import freeze, survey
from llmtrain.data.tokens.tokenizer import open_tokenizer

SEQ_LEN = 16
LENGTHS = [9, 40, 5, 17, 2, 16, 33, 60, 12, 7, 3, 18, 25, 8]  # tokens, the end of text included


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    corpus.write_tokenizer(root / "tokenizer")
    corpus.write_parquet(root / "letters.parquet", corpus.letters(LENGTHS))
    return root


def once(place, name="letters", tokenizer="tokenizer", backend="tokenizers", **data):
    """A run over one pass of a file by one lane, and its tokenizer."""
    opened = open_tokenizer(place / tokenizer, backend)
    config = corpus.config(
        {"path": str(place / f"{name}.parquet"), "max_epochs": 1}, lanes=1, **data
    )
    home = place
    if tokenizer != "tokenizer":
        home = place / f"of-{tokenizer}"
        home.mkdir(exist_ok=True)
        (home / "tokenizer").unlink(missing_ok=True)
        (home / "tokenizer").symlink_to(f"../{tokenizer}")
    manifest = freeze(survey(data_settings(config), 1), opened)
    return Run(manifest, home, blocks_per_step=1).start(1, 80), opened


def without_ends(lengths):
    """Documents of ids in which nothing marks an end: each has one id, its number modulo 3."""
    for row, length in enumerate(lengths):
        yield Document(0, 0, row, np.full(length, row % 3, np.int32), Counter())
    yield Document(1, 0, 0, np.empty(0, np.int32), Counter())


def test_borders_are_not_looked_for_in_ids_that_lack_an_end_of_text():
    borders = np.cumsum(LENGTHS)
    blocks = list(islice(concat(without_ends(LENGTHS), SEQ_LEN, START), 12))
    for number, block in enumerate(blocks):
        first = number * SEQ_LEN
        inside = borders[(borders > first) & (borders <= first + SEQ_LEN)] - first
        assert block.starts.tolist() == [0, *inside.tolist()]
    packed = list(
        in_windows(lambda cursor, again: without_ends(LENGTHS), SEQ_LEN, START, pad=9, order=(1,))
    )
    assert sum(len(block.spans) for block in packed) > len(LENGTHS)
    for block in packed:
        for start, stop in zip(block.starts, [*block.starts[1:], SEQ_LEN + 1], strict=True):
            assert len(set(block.ids[start:stop].tolist())) == 1
        lengths = np.diff([*block.starts, SEQ_LEN + 1])[: len(block.spans)].tolist()
        assert lengths == [span.stop - span.start for span in block.spans]


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_borders_in_a_batch_are_those_of_the_documents(place, packing):
    run, tokenizer = once(place, packing=packing, document_mask=True)
    for row in run.rows:
        if row.labels == (-100,) * SEQ_LEN:
            continue  # behind the end
        changes = [
            at for at in range(1, SEQ_LEN) if row.ids[at - 1] == tokenizer.eos != row.ids[at]
        ]
        assert set(changes) <= set(row.starts)
        assert all(row.labels[at - 1] == -100 for at in row.starts[1:])


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_no_window_adds_control_tokens_and_no_target_stands_twice(place, packing, begin):
    name = "beginning" if begin else "tokenizer"
    if begin and not (place / name).exists():
        corpus.with_template(corpus.write_tokenizer(place / name), "<s> $A")
    run, tokenizer = once(place, tokenizer=name, packing=packing)
    targets = Counter(label for row in run.rows for label in row.labels)
    first = packing == "concat" or begin  # is a document's first letter ever a target?
    expected = Counter({tokenizer.eos: len(LENGTHS)})
    for number, length in enumerate(LENGTHS):
        expected[tokenizer.encode(chr(ord("B") + number))[0]] = length - 1 - (not first)
    if begin and packing == "concat":
        expected[tokenizer.bos] = len(LENGTHS) - 1  # nothing stands before the first
    del targets[-100]
    if packing == "concat":  # the very first token, and what fills no block
        rest = expected - targets
        assert not targets - expected
        assert rest.total() < SEQ_LEN + 1
    else:
        assert targets == expected


TEMPLATES = {
    "none": (None, False),
    "named": ("$A", False),  # a begin token is there, but nothing asks for it
    "before": ("<s> $A", True),
    "around": ("<s> $A <|endoftext|>", True),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_begin_token_is_neither_dropped_nor_put_over_a_token(place, name):
    template, begins = TEMPLATES[name]
    directory = corpus.write_tokenizer(place / f"template-{name}")
    if template:
        corpus.with_template(directory, template)
    rows = corpus.articles(12)
    corpus.write_parquet(place / "articles.parquet", rows, group=12)
    run, tokenizer = once(place, "articles", tokenizer=directory.name)
    plain = Plain.from_file(str(directory / "tokenizer.json"))
    before = [plain.token_to_id("<s>")] if begins else []
    assert tokenizer.bos == (before[0] if begins else None)
    texts = {
        (*before, *plain.encode(row["text"], add_special_tokens=False).ids, tokenizer.eos)
        for row in rows
    }
    stream = [token for row in run.rows if row.labels[0] != -100 for token in row.ids[:-1]]
    ends = np.flatnonzero(np.array(stream) == tokenizer.eos) + 1
    found = [tuple(piece.tolist()) for piece in np.split(np.array(stream), ends)[:-1]]
    assert len(found) >= len(rows) - 1  # the end of the last may fill no block
    assert set(found) <= texts
    assert len(set(found)) == len(found)


CONTROL = ("<|endoftext|>", "<s>", "<tool_call>", "<|endoftext|><|endoftext|>")


@pytest.mark.parametrize("backend", ["tokenizers", "tiktoken"])
def test_control_tokens_spelt_out_in_an_article_stay_text(place, backend):
    directory = corpus.write_tokenizer(place / f"controlled-{backend}")
    corpus.with_template(directory, "<s> $A", others=["<tool_call>"])
    texts = [f"{word}before {word} after{word}" for word in CONTROL]
    rows = [{"id": str(n), "text": text} for n, text in enumerate(texts)]
    corpus.write_parquet(place / "control.parquet", rows)
    run, tokenizer = once(
        place, "control", tokenizer=directory.name, backend=backend, packing="bestfit"
    )
    assert tokenizer.backend == run.manifest.tokenizer.backend == backend
    plain = Plain.from_file(str(directory / "tokenizer.json"))
    control = {plain.token_to_id(word) for word in CONTROL[:3]}
    for text in texts:
        ids = tokenizer.encode(text).tolist()
        assert not control & set(ids)
        assert tokenizer.decode(ids) == text
    targets = Counter(label for row in run.rows for label in row.labels)
    assert targets[tokenizer.eos] == len(texts)
    assert targets[tokenizer.bos] == targets[plain.token_to_id("<tool_call>")] == 0
