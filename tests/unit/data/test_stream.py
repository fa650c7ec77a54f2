import array
import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
from helpers import corpus, reference_stream, vocabularies
from helpers.rings import dear
from hypothesis import given, settings, strategies as st

import llmtrain.data
from llmtrain.batch_size import BatchSize
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.documents.units import Units
from llmtrain.data.state import DataState, contribution, merge_cursors, roll
from llmtrain.data.stream import discard_factor, item_blocks, open_stream, prefetch_factor
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import RESTARTABLE, RunError, UserError

STEPS, BLOCKS = 5, 12


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two sources of uneven units, a tokenizer."""
    root = tmp_path_factory.mktemp("stream")
    corpus.write_tokenizer(root / "tokenizer")
    corpus.write_parquet(root / "a" / "1.parquet", corpus.articles(43))
    corpus.write_parquet(root / "a" / "2.parquet", corpus.articles(7, 43), group=3)
    corpus.write_jsonl(root / "b.jsonl", corpus.articles(31, 500))
    return root


@pytest.fixture(scope="module")
def mixed(place):
    sources = ({"path": str(place / "a"), "weight": 2.0}, {"path": str(place / "b.jsonl")})
    return corpus.manifest_of(place / "tokenizer", *sources, lanes=5, heldout=0.1)


@pytest.fixture(scope="module")
def single(place):
    return corpus.manifest_of(place / "tokenizer", place / "a", lanes=4)


def opened(manifest, place, *, rank=0, world_size=1, workers=0, **more):
    return open_stream(
        manifest,
        place / "tokenizer",
        batch=more.pop("batch", None) or BatchSize.constant(more.pop("blocks_per_step", BLOCKS)),
        rank=rank,
        world_size=world_size,
        workers=workers,
        reading=Reading(60),
        **more,
    )


def all_ranks(manifest, place, world_size, steps=STEPS, **more):
    """The batches of each rank, [rank][step]."""
    batches = []
    for rank in range(world_size):
        stream = opened(manifest, place, rank=rank, world_size=world_size, **more)
        batches.append([next(stream) for _ in range(steps)])
        stream.close()
    return batches


def interleaved(batches, world_size, step, blocks=BLOCKS):
    """The blocks of a step in order of g."""
    rows = [iter(batches[rank][step].ids.tolist()) for rank in range(world_size)]
    return [next(rows[(step * blocks + i) % world_size]) for i in range(blocks)]


def merged_cursors(manifest, batches, step, old, first_block, blocks=BLOCKS):
    world_size = len(batches)
    next_block = first_block + (step + 1) * blocks
    parts = []
    for rank in range(world_size):
        consumed = {}
        for batch in batches[rank][: step + 1]:
            consumed |= batch.cursors
        parts.append(
            contribution(
                consumed,
                old.shape[:2],
                first_block=first_block,
                next_block=next_block,
                rank=rank,
                world_size=world_size,
            )
        )
    return merge_cursors(old, parts, first_block=first_block, next_block=next_block)


def test_the_stream_gives_the_blocks_of_the_slow_reference(mixed, place):
    tokenizer = open_tokenizer(place / "tokenizer")
    expected = reference_stream.blocks(mixed, tokenizer, 20 * BLOCKS)
    stream = opened(mixed, place)
    found = [row for _ in range(20) for row in next(stream).ids.tolist()]
    assert found == [block.ids for block in expected]


def test_the_back_end_that_the_manifest_names_is_opened_and_gives_the_same_blocks(
    mixed, place, monkeypatch
):
    fast = open_tokenizer(place / "tokenizer", "tiktoken")
    facts = replace(mixed.tokenizer, backend="tiktoken", probe=fast.probe)
    slow = opened(mixed, place)
    expected = [next(slow).ids.tolist() for _ in range(STEPS)]
    monkeypatch.setattr(
        "llmtrain.data.tokens.tokenizer.Reference", None
    )  # would be called to open it
    stream = opened(replace(mixed, tokenizer=facts), place)
    assert [next(stream).ids.tolist() for _ in range(STEPS)] == expected


@pytest.mark.launches
def test_workers_refuse_a_back_end_that_gives_other_ids(mixed, place):
    facts = replace(mixed.tokenizer, backend="tiktoken", probe="0" * 16)
    stream = opened(replace(mixed, tokenizer=facts), place, workers=1)
    with closing(stream), pytest.raises(UserError, match="tokenizer probe"):
        next(stream)


def test_what_was_met_is_counted_once_whatever_the_world_size(mixed, place):
    def counted(world_size):
        total = Counter()
        for batches in all_ranks(mixed, place, world_size, steps=20):
            for batch in batches:
                for label, met in batch.counts.items():
                    total.update({(label, what): n for what, n in met.items()})
        return total

    assert counted(1) == counted(3)
    assert counted(1)["a", "heldout"] > 0


@pytest.mark.parametrize(("world_size", "workers"), [(1, 2), (2, 1)])
@pytest.mark.launches
def test_batches_do_not_depend_on_workers(mixed, place, world_size, workers):
    plain = all_ranks(mixed, place, world_size)
    ahead = all_ranks(mixed, place, world_size, workers=workers)
    for rank in range(world_size):
        for one, other in zip(plain[rank], ahead[rank], strict=True):
            assert one.digest == other.digest
            assert one.cursors == other.cursors
            assert np.array_equal(one.ids, other.ids)


@pytest.mark.deeper
@settings(dear(5), deadline=None)
@given(data=st.data())
def test_a_resume_at_any_step_with_any_world_size_goes_on_the_same(mixed, place, data):
    steps = 30
    straight = all_ranks(mixed, place, 1, steps)[0]
    done, next_block = 0, 0
    cursors = DataState.fresh(mixed).cursors
    while done < steps:
        world_size = data.draw(st.integers(1, 6), "world size")
        count = data.draw(st.integers(1, steps - done), "steps")
        start = {"next_block": next_block, "cursors": cursors}
        batches = all_ranks(mixed, place, world_size, count, **start)
        for step in range(count):
            expected = straight[done + step].ids.tolist()
            assert interleaved(batches, world_size, step) == expected
        cursors = merged_cursors(mixed, batches, count - 1, cursors, next_block)
        done, next_block = done + count, next_block + count * BLOCKS


def test_lanes_without_a_block_since_the_resume_keep_their_cursors(single, place):
    stream = opened(single, place, blocks_per_step=3)
    batch = next(stream)
    old = DataState.fresh(single).cursors
    merged = merged_cursors(single, [[batch]], 0, old, 0, blocks=3)
    assert sorted(batch.cursors) == [0, 1, 2]
    assert merged[3].tolist() == [[0, 0, 0, 0]]
    assert all(merged[lane, 0, 3] > 0 or merged[lane, 0, 2] > 0 for lane in range(3))
    again = opened(single, place, blocks_per_step=3, next_block=3, cursors=merged)
    assert np.array_equal(next(again).ids, next(stream).ids)


def test_blocks_are_the_articles_own_text_special_token_strings_too(tmp_path):
    corpus.write_tokenizer(tmp_path / "tokenizer")
    text = "before <|endoftext|> after"
    path = corpus.write_jsonl(tmp_path / "one.jsonl", [{"text": text}])
    manifest = corpus.manifest_of(tmp_path / "tokenizer", path, lanes=1)
    tokenizer = open_tokenizer(tmp_path / "tokenizer")
    stream = opened(manifest, tmp_path, blocks_per_step=6)
    ids = next(stream).ids[:, :-1].ravel()
    pieces = np.split(ids, np.flatnonzero(ids == tokenizer.eos) + 1)
    assert len(pieces) > 2
    assert all(tokenizer.decode(piece) == text + "<|endoftext|>" for piece in pieces[:-1])


def test_the_digest_is_the_sum_of_the_blocks_hashes(single, place):
    stream = opened(single, place, rank=1, world_size=2)
    next(stream)
    batch = next(stream)
    expected = 0
    for row, g in enumerate(range(BLOCKS + 1, 2 * BLOCKS, 2)):
        data = b"".join(int(i).to_bytes(4, "little") for i in batch.ids[row])
        expected += xxhash.xxh3_64_intdigest(data, seed=g)
    assert batch.digest == expected % 2**64
    assert batch.first_block == BLOCKS
    assert batch.trained_tokens == batch.labels.size == 6 * single.seq_len
    assert np.array_equal(batch.labels, batch.ids[:, 1:])


@pytest.mark.parametrize(("world_size", "blocks"), [(1, 12), (2, 12), (3, 3), (4, 4)])
def test_a_stream_ends_once_every_lane_of_this_rank_has_given_padding(
    single, place, world_size, blocks
):
    sources = tuple(replace(source, max_epochs=1) for source in single.sources)
    manifest = replace(single, sources=sources)
    expected = reference_stream.blocks(manifest, open_tokenizer(place / "tokenizer"), 2000)
    running = dict.fromkeys(range(4), 2000)  # the first padding of each lane
    for g in reversed(range(2000)):
        if expected[g].source < 0:
            running[g % 4] = g
    for rank in range(world_size):
        stream = opened(manifest, place, rank=rank, world_size=world_size, blocks_per_step=blocks)
        batch, shown = next(stream), set()
        own = {g % 4 for g in range(rank, 2000, world_size)}
        for step in range(1, 2000 // blocks):
            for g in range((step - 1) * blocks + rank, step * blocks, world_size):
                if expected[g].source < 0:
                    shown.add(g % 4)
            assert batch.ended == (shown == own)
            if batch.ended:
                break
            batch = next(stream)
        behind = next(stream)
        assert behind.ended
        assert (behind.sources, behind.trained_tokens) == ({}, 0)
        assert all(batch.cursors.get(lane, c) == c for lane, c in behind.cursors.items())


def test_items_read_ahead_are_bounded_by_number_and_bytes(single):
    assert prefetch_factor(single, blocks_per_step=1, workers=1, item_blocks=1) == 8
    assert prefetch_factor(single, blocks_per_step=60, workers=3, item_blocks=1) == 40
    assert prefetch_factor(single, blocks_per_step=60, workers=3, item_blocks=16) == 3
    long = replace(single, seq_len=1 << 17)  # 1 MiB a block, borders included
    assert prefetch_factor(long, blocks_per_step=512, workers=2, item_blocks=1) == 31
    assert prefetch_factor(long, blocks_per_step=512, workers=2, item_blocks=8) == 3
    longest = replace(single, seq_len=1 << 24)
    assert prefetch_factor(longest, blocks_per_step=8, workers=2, item_blocks=1) == 2


def test_a_worker_sends_as_many_blocks_at_once_as_a_step_takes_of_it(single):
    assert item_blocks(single, blocks_per_step=1, workers=1) == 1
    assert item_blocks(single, blocks_per_step=60, workers=3) == 20
    assert item_blocks(single, blocks_per_step=512, workers=2) == 32
    assert item_blocks(replace(single, seq_len=1 << 14), blocks_per_step=512, workers=2) == 1


def exhaust(stream, steps=100):
    for _ in range(steps):
        next(stream)


def reads_of_two_steps(manifest, place, cursors, next_block, monkeypatch):
    counts = []
    original = Reader.rows

    def counting(self, *arguments, **named):
        counts.append(arguments)
        return original(self, *arguments, **named)

    monkeypatch.setattr(Reader, "rows", counting)
    stream = opened(manifest, place, next_block=next_block, cursors=cursors)
    next(stream)
    return len(counts)


def test_opening_far_into_the_run_reads_no_more_units_than_at_its_start(single, place, monkeypatch):
    stream = opened(single, place)
    batches = [next(stream) for _ in range(10)]
    old = DataState.fresh(single).cursors
    early = merged_cursors(single, [batches], 9, old, 0)
    late = early.copy()
    late[:, :, 0] += 1_000_000
    late[:, :, 1:] = 0
    blocks = BLOCKS * 10
    few = reads_of_two_steps(single, place, early, blocks, monkeypatch)
    many = reads_of_two_steps(single, place, late, blocks * 10**6, monkeypatch)
    assert many <= few + single.lanes


@pytest.mark.launches
def test_a_bad_line_ends_the_workers_stream_with_the_same_error(tmp_path):
    corpus.write_tokenizer(tmp_path / "tokenizer")
    lines = [*[b'{"text": "fine words in a line of the first range"}'] * 400, b"[1]"]
    path = corpus.write_lines(tmp_path / "bad.jsonl", lines)
    manifest = corpus.manifest_of(tmp_path / "tokenizer", path, lanes=1)
    for workers in (0, 1):
        stream = opened(manifest, tmp_path, workers=workers, blocks_per_step=64)
        try:
            with pytest.raises(UserError, match=r"bad\.jsonl, line 401"):
                exhaust(stream)
        finally:
            stream.close()


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.launches
def test_a_worker_that_was_killed_ends_the_stream_at_once_with_its_unit(single, place, killed):
    stream = opened(single, place, workers=2)
    processes = stream._items.processes
    try:
        next(stream)
        processes[killed].kill()
        with pytest.raises(RunError, match=f"data worker {killed} .*SIGKILL.*memory") as raised:
            exhaust(stream, 10_000)
        assert re.search(r"its last unit: .*/a/[12]\.parquet, row group \d", str(raised.value))
        assert raised.value.exit_code == RESTARTABLE
        with pytest.raises(RunError, match="SIGKILL"):  # and ever after
            next(stream)
    finally:
        stream.close()
    assert not any(process.is_alive() for process in processes)


@pytest.mark.skipif(sys.platform != "linux", reason="asks how much lies in a pipe")
@pytest.mark.launches
def test_a_worker_that_was_killed_while_it_wrote_leaves_nobody_waiting(single, place):
    long = replace(single, seq_len=100_000)  # an item is larger than the pipe
    stream = opened(long, place, workers=2, blocks_per_step=2)
    try:
        next(stream)
        fill = array.array("i", [0])
        while fill[0] < 1 << 15:  # until a worker stands in the middle of a message
            fcntl.ioctl(stream._items.pipes[0].fileno(), termios.FIONREAD, fill)
            os.sched_yield()
        for process in stream._items.processes:
            process.kill()
        with pytest.raises(RunError, match="SIGKILL"):
            exhaust(stream)
    finally:
        stream.close()


@pytest.mark.launches
def test_a_worker_that_sends_nothing_is_a_failure_that_a_restart_cures(single, place):
    stream = opened(single, place, workers=1)
    worker = stream._items.processes[0]
    try:
        next(stream)
        stream._items.timeout_seconds = 0.2  # the first item may take longer
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(
            RunError, match=r"data worker 0 .* sent nothing.*1?2?\.parquet"
        ) as raised:
            exhaust(stream, 10_000)
        assert raised.value.exit_code == RESTARTABLE
    finally:
        stream.close()
    assert not worker.is_alive()


def test_whatever_is_raised_names_the_unit_that_was_read(single, place, monkeypatch):
    def broken(self, source, unit, left_out):
        raise ZeroDivisionError("by a test")

    monkeypatch.setattr(Units, "_rows_kept", broken)
    with pytest.raises(ZeroDivisionError) as raised:
        next(opened(single, place))
    assert any(
        re.search(r"/a/[12]\.parquet, row group \d", note) for note in raised.value.__notes__
    )


def test_another_tokenizer_than_the_manifests_is_refused(single, place, tmp_path):
    corpus.write_tokenizer(tmp_path / "tokenizer", entries=290)
    with pytest.raises(UserError, match="tokenizer digest"):
        next(opened(single, tmp_path))


def test_the_cost_of_a_world_size_that_does_not_divide_the_lanes_is_known():
    assert discard_factor(4, 0, 24) == 1
    assert discard_factor(2, 3, 24) == 1
    assert discard_factor(5, 1, 24) == 5
    assert discard_factor(9, 0, 24) == 3


def test_the_rolling_digest_is_the_hash_of_both_numbers():
    both = bytes([1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0])
    assert roll(1, 2) == xxhash.xxh3_64_intdigest(both)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_over_ten_thousand_steps(mixed, place):
    stream = opened(mixed, place, blocks_per_step=2)
    exhaust(stream, 2000)
    resident, arrow = resident_bytes(), pa.total_allocated_bytes()
    exhaust(stream, 10_000)
    assert resident_bytes() - resident < 8 << 20
    assert pa.total_allocated_bytes() - arrow < 1 << 20


@pytest.mark.launches
def test_workers_ignore_signals_and_end_when_the_stream_is_closed(single, place):
    stream = opened(single, place, workers=1)
    workers = stream._items.processes
    next(stream)
    if sys.platform == "linux":
        assert "libtorch" not in Path(f"/proc/{workers[0].pid}/maps").read_text()
    os.kill(workers[0].pid, signal.SIGTERM)  # a stop is the rank's business: workers go on
    next(stream)
    stream.close()
    stream.close()
    assert not any(worker.is_alive() for worker in workers)


ORPHAN = """
import json, sys, time
from pathlib import Path
from helpers import corpus
from llmtrain.data.documents.reader import Reading
from llmtrain.batch_size import BatchSize
from llmtrain.data.stream import open_stream

if __name__ == "__main__":
    place = Path(sys.argv[1])
    manifest = corpus.manifest_of(place / "tokenizer", place / "a", lanes=4)
    stream = open_stream(manifest, place / "tokenizer", batch=BatchSize.constant(4), rank=0,
                         world_size=1, workers=1, reading=Reading(60))
    next(stream)
    print(stream._items.processes[0].pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("last_line", ["", "raise SystemExit(3)"])
@pytest.mark.launches
def test_a_process_that_forgot_to_close_its_stream_ends_all_the_same(place, tmp_path, last_line):
    script = tmp_path / "forgetful.py"
    script.write_text(ORPHAN.replace("sys.stdin.read()", last_line or "pass"))
    done = subprocess.run([sys.executable, str(script), str(place)], env=paths(), timeout=100)
    assert done.returncode == (3 if last_line else 0)


def paths():
    """The environment of a script that imports the package and these helpers."""
    here = Path(__file__)
    both = os.pathsep.join(map(str, (here.parents[2], here.parents[3])))
    return os.environ | {"PYTHONPATH": both}


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.launches
def test_a_rank_that_is_killed_leaves_no_worker(place, tmp_path):
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    with subprocess.Popen(
        [sys.executable, str(script), str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=paths(),
    ) as process:
        worker = int(process.stdout.readline())
        assert is_running(worker)
        process.kill()
    deadline = time.monotonic() + 4
    while is_running(worker) and time.monotonic() < deadline:
        os.sched_yield()
    assert not is_running(worker)


def test_workers_leave_the_global_random_numbers_alone(single, place):
    before = torch.random.get_rng_state()
    stream = opened(single, place)
    next(stream)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", ["sample", pytest.param("20140304.en", marks=pytest.mark.slow)])
def test_a_hundred_blocks_of_articles_are_their_own_text(tmp_path, name):
    sample = Path(llmtrain.data.__file__).parent / "sample"
    articles = sample if name == "sample" else vocabularies.shared(f"wikipedia/{name}")
    tokenizer = open_tokenizer(corpus.write_tokenizer(tmp_path / "tokenizer"))
    manifest = corpus.manifest_of(tmp_path / "tokenizer", articles, seq_len=256, heldout=0.005)
    texts = ["<|endoftext|>"]
    for path in sorted(articles.glob("*.parquet")):
        texts += pq.read_table(path, columns=["text"])["text"].to_pylist()
    everything = b"\0".join(text.encode() for text in texts)
    stream = opened(manifest, tmp_path, blocks_per_step=100)
    for row in next(stream).ids:
        pieces = np.split(row, np.flatnonzero(row == tokenizer.eos) + 1)
        for piece in pieces:
            words = piece[:-1] if piece.size and piece[-1] == tokenizer.eos else piece
            # The first and last token of a block may hold a part of a character.
            assert tokenizer.decode(words).strip("\ufffd").encode() in everything
