"""The order of the data, over everything that must not matter to it.

`make test-slow` tries many more cases than the suite does.
"""

import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pytest
from helpers import corpus, reference_stream
from helpers.rings import dear
from hypothesis import event, given, settings, strategies as st

from llmtrain.data import stream
from llmtrain.data.batches import batch_of
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.lanes import Lane
from llmtrain.data.state import DataState, contribution, merge_cursors
from llmtrain.data.tokens import encode
from llmtrain.data.tokens.encode import DocumentEncoder
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.data.workers import Asked
from llmtrain.types import Cursor

pytestmark = pytest.mark.deeper


@dataclass(frozen=True)
class Start:
    """One start of a run. workers: data workers of each process; 0 = none."""

    world_size: int
    workers: int
    steps: int


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Three sources: uneven row groups, lines, and two documents that feed hardly any lane."""
    root = tmp_path_factory.mktemp("order")
    corpus.write_tokenizer(root / "tokenizer")
    corpus.write_parquet(root / "a" / "1.parquet", corpus.articles(43))
    corpus.write_parquet(root / "a" / "2.parquet", corpus.articles(7, 43), group=3)
    blanks = [{"id": "blank", "text": " \n"}, {"id": "none", "text": ""}]
    corpus.write_jsonl(root / "b.jsonl", [*corpus.articles(31, 500), *blanks])
    long = [row for row in corpus.articles(99, 900) if len(row["text"]) > 300]
    corpus.write_parquet(root / "c.parquet", long[:2])
    return root


@pytest.fixture(scope="module")
def frozen(place):
    """A manifest for each of a few seeds: the seed decides what is held out."""
    sources = (place / "a", place / "b.jsonl", place / "c.parquet")
    return [
        corpus.manifest_of(place / "tokenizer", *sources, lanes=6, heldout=0.1, seed=seed)
        for seed in (0, 42, 2**63 - 1)
    ]


@pytest.fixture(scope="module", autouse=True)
def _one_tokenizer():
    """Every virtual rank opens the tokenizer; here they share it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "open_tokenizer", lru_cache(open_tokenizer))
        patch.setattr(stream, "differing_tokenizer", lambda manifest, tokenizer: [])
        yield


def manifests(frozen, *, all_end):
    """One of the manifests with other lanes, packing, mixture …"""

    def made(draw):
        manifest = draw(st.sampled_from(frozen))
        chosen = draw(st.lists(st.sampled_from(range(3)), min_size=1, max_size=3, unique=True))
        limits = st.integers(1, 2) if all_end else st.sampled_from([None, None, 1, 3])
        sources = tuple(
            replace(
                manifest.sources[k],
                weight=draw(st.sampled_from([1.0, 0.2, 3.0])),
                max_epochs=draw(limits),
            )
            for k in chosen
        )
        packing = draw(st.sampled_from(["concat", "bestfit"]))
        return replace(
            manifest,
            sources=sources,
            lanes=draw(st.integers(1, 12)),
            packing=packing,
            document_mask=packing == "bestfit" or draw(st.booleans()),
            seq_len=draw(st.sampled_from([2, 5, 16, 40])),
        )

    return st.composite(made)()


def blocks_of(manifest, place, state, start, blocks):
    """(g, block) of each rank and step: [rank][step], as its DataLoader would deal them out."""
    found = []
    for rank in range(start.world_size):
        source = stream.Blocks(
            manifest,
            place / "tokenizer",
            next_block=state.next_block,
            rank=rank,
            world_size=start.world_size,
            cursors=state.cursors,
            reading=Reading(60),
            asked=Asked(2),
        )
        count = max(1, start.workers)
        workers = [source.virtual(worker, count) for worker in range(count)]
        g, taken, steps = state.next_block + rank, 0, []
        for step in range(start.steps):
            steps.append([])
            while g < state.next_block + (step + 1) * blocks:
                steps[-1].append((g, next(workers[taken % count])))
                g, taken = g + start.world_size, taken + 1
        found.append(steps)
    return found


def state_after(manifest, state, batches, next_block):
    """What a checkpoint holds and a resume reads."""
    world_size, shape = len(batches), state.cursors.shape[:2]
    parts = []
    for rank, steps in enumerate(batches):
        consumed = {}
        for batch in steps:
            consumed |= batch.cursors
        place = {"first_block": state.next_block, "next_block": next_block}
        part = contribution(consumed, shape, **place, rank=rank, world_size=world_size)
        parts.append(part)
    merged = merge_cursors(
        state.cursors, parts, first_block=state.next_block, next_block=next_block
    )
    after = replace(state, next_block=next_block, cursors=merged, stream_digest=0, counts={})
    return DataState.from_json(json.loads(json.dumps(after.to_json())))


def compare(batch, numbers, expected, manifest):
    """Ids, labels, borders and sources of one rank and step."""
    wanted = [expected[g] for g in numbers]
    assert batch.ids.tolist() == [block.ids for block in wanted]
    assert batch.labels.tolist() == [block.labels for block in wanted]
    assert batch.trained_tokens == sum(label != -100 for b in wanted for label in b.labels)
    if manifest.document_mask:
        assert [starts.tolist() for starts in batch.starts] == [block.starts for block in wanted]
    else:
        assert batch.starts is None
    tokens = Counter()
    for block in wanted:
        if block.source >= 0:
            tokens[manifest.labels[block.source]] += sum(label != -100 for label in block.labels)
    assert batch.sources == dict(tokens)


STARTS = st.builds(Start, st.integers(1, 8), st.integers(0, 2), st.integers(1, 4))


@settings(dear(20), deadline=None)
@given(data=st.data())
def test_any_number_of_processes_and_three_resumes_give_the_blocks_of_one(frozen, place, data):
    made = data.draw(manifests(frozen, all_end=False), "manifest")
    blocks = data.draw(st.integers(1, 12), "blocks a step")
    starts = data.draw(st.lists(STARTS, min_size=4, max_size=4), "starts")
    count = blocks * sum(start.steps for start in starts)
    expected = reference_stream.blocks(made, open_tokenizer(place / "tokenizer"), count)
    event(f"padding of ended lanes: {any(block.source < 0 for block in expected)}")
    state = DataState.fresh(made)
    alone = dict(blocks_of(made, place, state, Start(1, 0, 1), count)[0][0])
    for start in starts:
        dealt = blocks_of(made, place, state, start, blocks)
        batches = [
            [batch_of(one, made, first_block=0, wait_seconds=0.0, ended=False) for one in steps]
            for steps in dealt
        ]
        for step in range(start.steps):
            for rank in range(start.world_size):
                numbers = [g for g, _ in dealt[rank][step]]
                for g, block in dealt[rank][step]:
                    assert (block.cursors, block.counts) == (alone[g].cursors, alone[g].counts)
                    assert (block.source, block.spans) == (expected[g].source, alone[g].spans)
                compare(batches[rank][step], numbers, expected, made)
            first = state.next_block + step * blocks
            digests = [steps[step].digest for steps in batches]
            wanted = reference_stream.digest(expected[first : first + blocks], first)
            assert sum(digests) % 2**64 == wanted
        state = state_after(made, state, batches, state.next_block + start.steps * blocks)


@settings(dear(25), deadline=None)
@given(data=st.data())
def test_each_document_is_trained_on_once_an_epoch_and_no_held_out_one_ever(frozen, place, data):
    made = data.draw(manifests(frozen, all_end=True), "manifest")
    tokenizer, reader = open_tokenizer(place / "tokenizer"), Reader(Reading(60))
    names, targets, left_over = Counter(), Counter(), Counter()
    for index in range(made.lanes):
        lane = Lane(
            made,
            DocumentEncoder(tokenizer),
            reader,
            index,
            index,
            [Cursor(0, 0, 0, 0)] * len(made.sources),
        )
        placed = places(made, tokenizer, index)
        while True:
            block = lane.take()
            for k, met in block.counts.items():
                left_over[k] += met.get("left_over_tokens", 0)
            if block.source < 0:
                break
            trained = np.ones(made.seq_len, bool) if block.trained is None else block.trained
            targets[block.source] += int(trained.sum())
            for span in block.spans:
                name, ids = placed[block.source, *span[:3]]
                part = ids[span.start : span.stop]
                assert block.ids[span.at : span.at + len(part)].tolist() == part
                if span.stop == len(ids) and span.at + len(part) > 1:  # its end is a target
                    names[block.source, name] += 1
    for k, source in enumerate(made.sources):
        expected = Counter(reference_stream.training_documents(made, k) * source.max_epochs)
        found = Counter({name: n for (of, name), n in names.items() if of == k})
        if made.packing == "bestfit":
            assert found == expected
        else:
            assert found <= expected
            total = sum(
                max(0, sum(len(tokenizer.encode(d.text)) + 1 for d in lane) - 1)
                for lane in (
                    list(reference_stream.all_documents(made, k, i)) for i in range(made.lanes)
                )
            )
            assert targets[k] + left_over[k] == total


def places(manifest, tokenizer, lane):
    """(source, epoch, position, row) → name and ids, of every document that a lane has."""
    return {
        (k, *document[:3]): (
            document.name,
            [*tokenizer.encode(document.text).tolist(), tokenizer.eos],
        )
        for k in range(len(manifest.sources))
        for document in reference_stream.all_documents(manifest, k, lane)
    }
