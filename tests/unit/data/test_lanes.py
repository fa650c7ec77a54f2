import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from helpers import corpus

from llmtrain.data.documents.reader import Reader, Reading, units_of
from llmtrain.data.lanes import START, Lane, Lanes, default_lanes
from llmtrain.data.tokens.encode import DocumentEncoder
from llmtrain.data.tokens.tokenizer import open_tokenizer


def test_what_was_met_is_counted_with_one_document_alone(tmp_path):
    """Several texts are tokenized in one call; what is met behind one of them is not its own."""
    rows = corpus.articles(40)
    for n in (10, 20, 21):
        rows[n]["text"] = " "
    path = corpus.write_parquet(tmp_path / "a.parquet", rows, group=40)
    tokenizer_dir = corpus.write_tokenizer(tmp_path / "tokenizer")
    source = {"path": str(path), "max_epochs": 1}
    manifest = corpus.manifest_of(tokenizer_dir, source, lanes=1, seq_len=64)
    parts = (manifest, DocumentEncoder(open_tokenizer(tokenizer_dir)), Reader(Reading(60)))
    documents = list(Lane(*parts, 0, 0, [START]).walk(0, START, again=False))
    assert len(documents) == 37 + 1
    assert sum(document.counts["dropped"] for document in documents) == 3


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_everything_is_counted_once_wherever_the_lanes_are_opened_again(tmp_path, packing):
    """What is met twice by a lane that is opened again, was counted before it was closed."""
    rows = corpus.articles(60)
    for n in (5, 6, 31, 59):
        rows[n]["text"] = " "
    lines = [json.dumps(row).encode() for row in rows]
    lines[12] = b'{"text": '
    lines[40] = lines[40].replace(b"river", b"ri\xffer").replace(b"towns", b"t\xffwns")
    for part in range(3):
        corpus.write_lines(tmp_path / "a" / f"{part}.jsonl", lines[20 * part : 20 * part + 20])
    corpus.write_jsonl(tmp_path / "few.jsonl", [{"text": "moss"}, {"text": ""}])
    tokenizer = corpus.write_tokenizer(tmp_path / "tokenizer")
    sources = [
        {"path": str(tmp_path / "a"), "max_epochs": 2},
        {"path": str(tmp_path / "few.jsonl"), "max_epochs": 1},
    ]
    data = {"lanes": 2, "heldout": 0.2, "packing": packing, "on_bad_unit": "skip"}
    manifest = corpus.manifest_of(tokenizer, *sources, **data)
    encoder = DocumentEncoder(open_tokenizer(tokenizer))

    def lanes(cursors, g):
        reader = Reader(Reading(60, run_dir=tmp_path, skip_bad_units=True))
        return Lanes(manifest, encoder, reader, cursors, g)

    straight, cursors = lanes(np.zeros((2, 2, 4), np.int64), 0), [np.zeros((2, 2, 4), np.int64)]
    blocks = []
    while [block.source for block in blocks[-2:]] != [-1, -1]:
        blocks.append(straight.take(len(blocks)))
        cursors.append(cursors[-1].copy())
        cursors[-1][(len(blocks) - 1) % 2] = blocks[-1].cursors
    total = {k: Counter() for k in (0, 1)}
    for block in blocks:
        for k, counts in block.counts.items():
            total[k].update(counts)
    left_over = total[0].pop("left_over_tokens", 0), total[1].pop("left_over_tokens", 0)
    assert (min(left_over) > 0) == (packing == "concat")
    heldout = total[0].pop("heldout")
    assert heldout % 2 == 0
    assert heldout > 2
    assert total[0] == {"dropped": 2 * 4, "skipped": 2, "replaced": 2}
    assert total[1] == {"dropped": 1}
    for g in range(0, len(blocks), 3):
        again = lanes(cursors[g], g)
        found = [again.take(n) for n in range(g, len(blocks))]
        assert [one.counts for one in found] == [one.counts for one in blocks[g:]], g
        assert all((a.ids == b.ids).all() for a, b in zip(found, blocks[g:], strict=True))


class Noting:
    """A reader of files here that notes which units a lane expects of a remote source."""

    def __init__(self):
        self.reading, self.units, self.expected = Reading(60), self, []
        self._reader = Reader(self.reading)

    def documents(self, source, unit, epoch, *, needed):
        return self._reader.documents(replace(source, remote=False), unit, epoch, needed=needed)

    def expect(self, source, unit):
        self.expected.append(unit)


def test_the_next_unit_is_expected_in_the_next_epoch_too_but_not_behind_the_last(tmp_path):
    path = corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(40), group=10)
    tokenizer = corpus.write_tokenizer(tmp_path / "tokenizer")
    source = {"path": str(path), "max_epochs": 2}
    manifest = corpus.manifest_of(tokenizer, source, lanes=1, seq_len=64)
    manifest = replace(manifest, sources=(replace(manifest.sources[0], remote=True),))
    reader = Noting()
    lane = Lane(manifest, DocumentEncoder(open_tokenizer(tokenizer)), reader, 0, 0, [START])
    documents = list(lane.walk(0, START, again=False))[:-1]
    read = list(dict.fromkeys((one.epoch, one.unit) for one in documents))
    assert len(read) == 8
    order = [units_of(manifest, 0, epoch, 0)[unit] for epoch, unit in read]
    assert reader.expected == [manifest.sources[0].units[u] for u in order[1:]]


def test_lanes_of_texts_are_a_multiple_of_24_or_48():
    assert [default_lanes(1, units) for units in (1, 767, 768)] == [24, 24, 48]
    assert [default_lanes(n, 10) for n in (5, 8, 16)] == [120, 24, 48]
