from collections import Counter
from itertools import islice
from typing import get_args

import numpy as np
import pytest
from helpers import corpus
from helpers.streams import Run
from hypothesis import given, strategies as st
from tokenizers import Tokenizer as Plain

from llmtrain.config.binding import data_settings
from llmtrain.config.schema import PackingName
from llmtrain.data.packing import (
    LEFT_OVER,
    START,
    Document,
    concat,
    fit,
    in_windows,
    open_packing,
    window_tokens,
)
from llmtrain.data.survey import freeze, survey
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import UserError
from llmtrain.hashing import mix, permutation
from llmtrain.types import Cursor

PAD = -1


def documents(lengths, start=0):
    """Documents of consecutive numbers as tokens."""
    token = 0
    for row, length in enumerate(lengths):
        if row >= start:
            ids = np.arange(token, token + length, dtype=np.int32)
            yield Document(0, 0, row, ids, Counter(dropped=row % 2))
        token += length


def ended(lengths, start=0):
    """The same documents and no more."""
    yield from documents(lengths, start)
    yield Document(1, 0, 0, np.empty(0, np.int32), Counter(heldout=2))


def best(lengths, size, cursor=START):
    """Blocks of `size` ids from a cursor on."""

    def walk(start, again):
        return ended(lengths, start.row)

    return in_windows(walk, size - 1, cursor, pad=PAD, order=(7, 4, 0, 0))


def all_of(packing):
    """The blocks, and what is returned behind them."""
    blocks = []
    while True:
        try:
            blocks.append(next(packing))
        except StopIteration as end:
            return blocks, end.value


def slow_fit(lengths, size):
    bins = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        filled = [sum(lengths[i] for i in one) for one in bins]
        room = [(-f, b) for b, f in enumerate(filled) if f + lengths[index] <= size]
        if room:
            bins[min(room)[1]].append(index)
        else:
            bins.append([index])
    return bins


def test_every_token_is_a_target_once():
    lengths = [1, 2, 3, 10, 1, 1, 25, 4, 50]
    blocks = list(islice(concat(documents(lengths), 4, START), 20))
    targets = [token for block in blocks for token in block.ids[1:].tolist()]
    assert targets == list(range(1, 81))


def test_a_cursor_names_the_last_token_of_its_block():
    lengths = [1, 2, 3, 10, 1, 1, 25, 4, 50]
    for number, block in enumerate(islice(concat(documents(lengths), 4, START), 20)):
        row, offset = block.cursor.row, block.cursor.offset
        assert sum(lengths[:row]) + offset == 4 * (number + 1) == block.ids[-1]
        assert offset < lengths[row]


def test_a_stream_opened_at_a_cursor_goes_on_the_same():
    lengths = [3, 1, 9, 2, 2, 7, 30, 1, 40]
    blocks = list(islice(concat(documents(lengths), 4, START), 18))
    for number, block in enumerate(blocks[:-1]):
        cursor = block.cursor
        again = concat(documents(lengths, cursor.row), 4, cursor)
        assert next(again).ids.tolist() == blocks[number + 1].ids.tolist()


def test_what_was_met_goes_with_the_block_that_first_needs_the_document():
    blocks = list(islice(concat(documents([2, 2, 2, 2, 20]), 4, START), 3))
    assert [block.counts["dropped"] for block in blocks] == [1, 1, 0]
    assert blocks[0].cursor == Cursor(0, 0, 2, 0)


def test_the_border_of_a_document_that_begins_with_the_last_id_is_known():
    blocks = list(islice(concat(documents([4, 4, 20]), 4, START), 3))
    assert [block.starts.tolist() for block in blocks] == [[0, 4], [0, 4], [0]]


def test_targets_that_fill_no_block_are_counted_where_documents_end():
    blocks, rest = all_of(concat(ended([7, 5]), 4, START))
    assert [block.ids.tolist() for block in blocks] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert rest == Counter({LEFT_OVER: 3, "heldout": 2})
    assert all_of(concat(ended([7, 5], 1), 4, blocks[-1].cursor)) == ([], rest)


def test_another_document_than_the_cursors_is_refused():
    with pytest.raises(UserError, match="more than 9 tokens"):
        next(concat(documents([9, 8]), 4, Cursor(0, 0, 0, 9)))
    with pytest.raises(UserError, match="more than 2 tokens"):
        next(concat(documents([3, 8], 1), 4, Cursor(0, 0, 0, 2)))
    with pytest.raises(UserError, match="more than 3 blocks"):
        next(best([3, 8, 2], 5, Cursor(0, 0, 0, 3)))  # it has 3
    with pytest.raises(UserError, match="more than 2 blocks"):
        next(best([3], 5, Cursor(0, 0, 1, 2)))  # no document is left


def test_full_blocks_of_long_documents_come_before_bins_in_the_order_that_is_shuffled():
    blocks, _ = all_of(best([5, 13], 5))
    made = [list(range(5, 10)), list(range(9, 14)), list(range(13, 18)), list(range(5))]
    order = permutation(4, mix(7, 4, 0, 0, 0, 0, 0))
    assert [block.ids.tolist() for block in blocks] == [made[n] for n in order]


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40))
def test_best_fit_is_the_bins_of_the_slow_one(lengths, size):
    assert fit(lengths, size) == slow_fit(lengths, size)


def test_best_fit_lays_the_largest_first_into_the_fullest_bin_then_the_oldest():
    assert fit([3, 6, 4, 3, 4], 10) == [[1, 2], [4, 0, 3]]
    assert fit([6, 6, 4, 4, 4], 10) == [[0, 2], [1, 3], [4]]
    assert fit([5, 6, 4], 10) == [[1, 2], [0]]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=80), st.integers(3, 12))
def test_a_document_that_fits_is_never_cut_and_every_token_is_there(lengths, size):
    blocks, _ = all_of(best(lengths, size))
    pieces = Counter()
    for block in blocks:
        assert len(block.ids) == size
        filled = size
        if block.trained is not None:
            filled = int(block.trained.sum()) + 1
            assert set(block.ids[filled:].tolist()) == {PAD}
            assert block.trained.tolist() == [at < filled for at in range(1, size)]
        borders = [span.at for span in block.spans] + [filled] * (filled < size)
        assert block.starts.tolist() == borders
        for span in block.spans:
            pieces[span.row, span.start, span.stop] += 1
            begin = sum(lengths[: span.row])
            part = list(range(begin + span.start, begin + span.stop))
            assert block.ids[span.at : span.at + len(part)].tolist() == part
    expected = Counter()
    for row, length in enumerate(lengths):
        if length <= size:
            expected[row, 0, length] += 1
            continue
        for first in range(0, length - 1, size - 1):  # each of its targets once, an id before them
            expected[row, first, min(first + size, length)] += 1
    assert pieces == expected


@given(st.lists(st.integers(1, 30), min_size=1, max_size=200), st.integers(3, 6), st.data())
def test_a_window_opened_at_any_of_its_blocks_goes_on_the_same(lengths, size, data):
    blocks, rest = all_of(best(lengths, size))
    number = data.draw(st.integers(0, len(blocks) - 1))
    again, rest_again = all_of(best(lengths, size, blocks[number].cursor))
    assert [b.ids.tolist() for b in again] == [b.ids.tolist() for b in blocks[number + 1 :]]
    assert [b.cursor for b in again] == [b.cursor for b in blocks[number + 1 :]]
    assert [b.counts for b in again] == [b.counts for b in blocks[number + 1 :]]
    assert number == len(blocks) - 1 or rest == rest_again


def test_a_window_holds_at_least_32_blocks_of_tokens_and_its_cursor_names_its_start():
    blocks, _ = all_of(best([10] * 100, 5))
    rows = [sorted({span.row for span in block.spans}) for block in blocks]
    first = [block for block in blocks if block.cursor[:3] == (0, 0, 0)]
    behind = blocks[len(first)].cursor
    assert behind == Cursor(0, 0, 13, 0)  # 13 documents of 10 tokens are the first 128 or more
    assert sorted({row for one in rows[: len(first) + 1] for row in one}) == list(range(13))
    assert [block.cursor.offset for block in first] == list(range(1, len(first) + 1))


@pytest.mark.parametrize(
    ("seq_len", "tokens"), [(16, 512), (1024, 32768), (4096, 65536), (8192, 65536), (32768, 262144)]
)
def test_a_window_is_32_blocks_or_64_ki_tokens_but_never_fewer_than_8_blocks(seq_len, tokens):
    assert window_tokens(seq_len) == tokens


def test_the_blocks_of_a_window_leave_in_an_order_by_its_place():
    def order(start):
        def walk(cursor, again):
            return ended([5] * 64)

        packing = in_windows(walk, 4, start, pad=PAD, order=(7, 4, 0, 0))
        return [int(next(packing).ids[0]) // 5 for _ in range(26)]

    one, other = order(START), order(Cursor(0, 0, 1, 0))
    assert sorted(one) == sorted(other) == list(range(26))
    assert one != other != sorted(other) != one


def test_documents_behind_a_window_of_which_blocks_have_left_are_read_anew():
    """What was packed before is asked for as such; what follows may be left out again."""
    asked = []

    def walk(cursor, again):
        asked.append((cursor, again))
        return ended([10] * 100, cursor.row)

    blocks, _ = all_of(in_windows(walk, 4, Cursor(0, 0, 0, 2), pad=PAD, order=(7, 4, 0, 0)))
    assert asked == [(Cursor(0, 0, 0, 2), True), (Cursor(0, 0, 13, 0), False)]
    assert len(blocks) > 100


@pytest.mark.parametrize("name", get_args(PackingName))
def test_each_packing_of_the_config_is_opened_by_its_name(name):
    def walk(start, again):
        return ended([5, 3, 4], start.row)

    blocks, _ = all_of(open_packing(name, walk, 4, START, pad=PAD, order=(7, 4, 0, 0)))
    assert {len(block.ids) for block in blocks} == {5}
    assert sum(4 if block.trained is None else block.trained.sum() for block in blocks) >= 8


def test_single_gives_each_document_a_block_and_cuts_only_those_that_are_longer():
    def walk(start, again):
        return ended([3, 9, 5, 1, 2], start.row)

    blocks, _ = all_of(open_packing("single", walk, 4, START, pad=PAD, order=(7, 4, 0, 0)))
    of = {tuple(block.ids.tolist()): block for block in blocks}
    assert sorted(of) == [
        (0, 1, 2, PAD, PAD),
        (3, 4, 5, 6, 7),
        (7, 8, 9, 10, 11),
        (12, 13, 14, 15, 16),
        (17, PAD, PAD, PAD, PAD),
        (18, 19, PAD, PAD, PAD),
    ]
    assert all(len(block.spans) == 1 for block in blocks)
    padded = of[0, 1, 2, PAD, PAD]
    assert padded.starts.tolist() == [0, 3]
    assert padded.trained.tolist() == [True, True, False, False]
    assert of[12, 13, 14, 15, 16].trained is None


def test_single_gives_the_same_blocks_from_every_cursor():
    def walk(cursor, again):
        return ended([2, 4, 3, 5, 1] * 30, cursor.row)

    def blocks(cursor):
        found, _ = all_of(open_packing("single", walk, 4, cursor, pad=PAD, order=(7, 4, 0, 0)))
        return found

    whole = blocks(START)
    assert len(whole) == 150
    for at in range(0, 149, 7):
        rest = blocks(whole[at].cursor)
        assert [one.ids.tolist() for one in rest] == [one.ids.tolist() for one in whole[at + 1 :]]


# Failures of other libraries between text and blocks: borders, control tokens, targets.
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
