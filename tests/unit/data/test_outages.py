"""Failures seen elsewhere with data sets of the Hub, and the whole list of what a server may do.

What is compared is always a whole stream: its blocks over the fake Hub and of the same files here.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from helpers import corpus, hub

from llmtrain.config.binding import data_settings
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.remote import fetch
from llmtrain.data.remote.fetch import HubFile, Remote
from llmtrain.data.sources import hub as resolving
from llmtrain.data.stream import open_stream
from llmtrain.data.survey import freeze, survey
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import RunError, UserError

STEPS, BLOCKS = 40, 12
PASSING = ["408", "429 0", "500", "502", "503", "504", "reset", "short", "long", "shifted", "whole"]
HANGING = ["hang", "drip", "drip-headers"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Sources of every kind, a tokenizer."""
    root = tmp_path_factory.mktemp("away")
    corpus.write_tokenizer(root / "tokenizer")
    corpus.write_parquet(root / "data" / "a" / "1.parquet", corpus.articles(60), group=3)
    corpus.write_parquet(root / "data" / "a" / "2.parquet", corpus.articles(15, 60), group=4)
    corpus.write_jsonl(root / "data" / "b.jsonl", corpus.articles(30, 500))
    corpus.write_jsonl(root / "data" / "c" / "1.jsonl.gz", corpus.articles(15, 600))
    corpus.write_jsonl(root / "data" / "c" / "2.txt.zst", corpus.articles(15, 700))
    return root


@pytest.fixture(scope="module")
def here(place):
    paths = [place / "data" / name for name in ("a", "b.jsonl", "c")]
    return corpus.manifest_of(place / "tokenizer", *paths, lanes=4, heldout=0.1)


@pytest.fixture(scope="module")
def expected(here, place):
    return blocks(here, place)


def away(manifest, place, files):
    """The same manifest, its files on the Hub."""
    sources = []
    for source in manifest.sources:
        below = os.path.relpath(source.root, place / "data").removeprefix(".")
        root = f"hf://datasets/{hub.ID}@{hub.SHA}/{below}".rstrip("/")
        named = [
            file._replace(etag=hub.etag(files[f"{below}/{file.name}".lstrip("/")]))
            for file in source.files
        ]
        sources.append(replace(source, root=root, remote=True, files=tuple(named)))
    return replace(manifest, sources=tuple(sources))


def opened(manifest, place, *, rank=0, world_size=1, reading=None):
    return open_stream(
        manifest,
        place / "tokenizer",
        blocks_per_step=BLOCKS,
        rank=rank,
        world_size=world_size,
        workers=0,
        reading=reading or Reading(60),
    )


def blocks(manifest, place, steps=STEPS, **more):
    """The ids of this rank's blocks."""
    stream = opened(manifest, place, **more)
    try:
        return [row for _ in range(steps) for row in next(stream).ids.tolist()]
    finally:
        stream.close()


@pytest.fixture
def server(place, tmp_path, monkeypatch):
    """The Hub; waiting and giving up are quick."""
    with hub.serving(hub.read_files(place / "data")) as serving:
        hub.stand_in(monkeypatch, serving, tmp_path / "home")
        monkeypatch.setattr(fetch, "MAX_WAIT_SECONDS", 0.02)
        monkeypatch.setattr(fetch, "ATTEMPT_SECONDS", 0.3)
        monkeypatch.setattr(fetch, "READ_SECONDS", 0.2)
        yield serving


@pytest.fixture
def there(here, place, server):
    return away(here, place, server.files)


def every(number, fault):
    """This fault for every `number`th request."""
    turns = count(1)
    return lambda: fault if next(turns) % number == 0 else ""


def test_the_order_over_the_network_is_that_of_the_files(there, place, server, expected):
    assert blocks(there, place) == expected
    assert server.requests["range"] > 20
    assert server.requests["api"] == 0


def test_units_that_come_next_are_read_ahead(there, place, expected, monkeypatch):
    asked, fetch = [], Remote.fetch

    def watched(self, file, start, end, deadline):
        asked.append(threading.current_thread().name)
        return fetch(self, file, start, end, deadline)

    monkeypatch.setattr(Remote, "fetch", watched)
    assert blocks(there, place) == expected
    opening = there.lanes * len(there.sources)  # of these nobody knew before
    assert asked.count("ahead") > (len(asked) - opening) / 2


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_changes_no_block(there, place, server, expected, fault):
    server.mixture = every(2, fault)
    assert blocks(there, place) == expected


@pytest.mark.parametrize(
    "fault", [HANGING[0], *(pytest.param(one, marks=pytest.mark.wide) for one in HANGING[1:])]
)
def test_hangs_and_drips_change_no_block(there, place, server, expected, fault):
    server.mixture = every(6, fault)
    assert blocks(there, place) == expected


@pytest.mark.parametrize("wait", ["429 7", "429 date 7", "429 ratelimit 7", "503 7"])
def test_a_server_that_asks_for_time_gets_it(server, place, wait):
    waited = []
    stop = SimpleNamespace(wait=lambda seconds: bool(seconds and waited.append(seconds)))
    name = "b.jsonl"
    content = server.files[name]
    server.faults.append(wait)
    reader = Remote(60, stop)
    file = HubFile(server.url(name), len(content), hub.etag(content))
    assert reader.fetch(file, 3, 99, reader.deadline()) == content[3:99]
    assert len(waited) == 1
    assert 6 <= waited[0] <= 8


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("redirected", [False, True])
def test_a_mix_of_nine_faults_changes_no_block(there, place, server, expected, seed, redirected):
    with hub.serving(server.files) as store:
        if redirected:
            server.store, store.uses = store, 3
            store.mixture = hub.mixture(seed + 100)
        server.mixture = hub.mixture(seed)
        assert blocks(there, place) == expected
        assert (store.requests["elsewhere"] > 0) == redirected


def test_an_outage_changes_no_block(there, place, server, expected):
    stream = opened(there, place)
    found = next(stream).ids.tolist()
    server.down = True
    threading.Timer(1.0, lambda: setattr(server, "down", False)).start()
    for _ in range(STEPS - 1):
        found += next(stream).ids.tolist()
    stream.close()
    assert found == expected
    assert server.requests["down"] > 3


class Clock:
    """Time that passes only while somebody waits; something happens at a moment of it."""

    def __init__(self, moment, happens):
        self.now = 1000.0
        self._moment = self.now + moment
        self._happens = happens

    def monotonic(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds
        if self.now > self._moment:
            self._happens()
        return False


@pytest.mark.parametrize("seconds", [60, 600])
def test_an_outage_of_minutes_is_waited_out(server, monkeypatch, seconds):
    clock = Clock(seconds, lambda: setattr(server, "down", False))
    monkeypatch.setattr(fetch, "time", clock)
    monkeypatch.setattr(fetch, "MAX_WAIT_SECONDS", 60.0)
    name, server.down = "b.jsonl", True
    content = server.files[name]
    reader = Remote(20 * 60, clock)
    file = HubFile(server.url(name), len(content), hub.etag(content))
    assert reader.fetch(file, 3, 99, reader.deadline()) == content[3:99]
    assert seconds <= clock.now - 1000 <= seconds + 60
    assert server.requests["down"] < 5 + seconds / 10  # full jitter: half a minute on average


def test_a_quarter_of_an_hour_without_a_network_ends_the_run(server, monkeypatch):
    clock = Clock(1e9, lambda: None)
    monkeypatch.setattr(fetch, "time", clock)
    monkeypatch.setattr(fetch, "MAX_WAIT_SECONDS", 60.0)
    server.down = True
    reader = Remote(20 * 60, clock)
    file = HubFile(server.url("b.jsonl"), 10_000, "")
    with pytest.raises(RunError, match="could not be read") as raised:
        reader.fetch(file, 3, 99, reader.deadline())
    assert raised.value.exit_code == 75
    assert "continues once the network is back" in raised.value.remedy
    assert 14 * 60 <= clock.now - 1000 <= 15 * 60


def test_an_outage_never_leaves_a_unit_out(there, place, server, tmp_path):
    server.down = True
    reading = Reading(0.5, tmp_path, skip_bad_units=True)
    stream = opened(there, place, reading=reading)
    with pytest.raises(RunError) as raised:
        next(stream)
    stream.close()
    assert raised.value.exit_code == 75
    assert not (tmp_path / "skipped-units.jsonl").exists()


@pytest.fixture
def listed(server, place, tmp_path):
    """What rank 0 does at a first start on a data set of the Hub."""
    server.files = {
        f"a/{name}": (place / "data" / "a" / name).read_bytes()
        for name in ("1.parquet", "2.parquet")
    }
    config = corpus.config({"path": hub.ID}, lanes=4, heldout=0.1)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    return lambda: freeze(
        survey(data_settings(config), 1, run_dir), open_tokenizer(place / "tokenizer")
    ), run_dir


def spans_of(manifest, run_dir):
    """The ranges that units lie in: (file, start, end)."""
    (source,) = manifest.sources
    reader = Reader(Reading(60, run_dir))
    return {
        (source.files[unit.file].name, *span)
        for unit in source.units
        for span in reader.units._spans(source, unit)
    }


def test_four_ranks_ask_for_no_more_than_one(listed, place, server):
    begin, run_dir = listed
    manifest = begin()
    reading = Reading(60, run_dir)
    counts = {}
    for world_size in (1, 4):
        server.requests.clear()
        server.ranges.clear()
        found = [
            blocks(manifest, place, 8, rank=rank, world_size=world_size, reading=reading)
            for rank in range(world_size)
        ]
        in_order = [block for turn in zip(*found, strict=True) for block in turn]
        counts[world_size] = sorted(server.ranges)
        assert set(server.requests) == {"range"}  # no listing, no footer
        assert set(server.ranges) <= spans_of(manifest, run_dir)
        if world_size == 1:
            alone = in_order
    assert in_order == alone
    assert counts[4] == counts[1]
    assert len(set(counts[1])) == len(counts[1]) > 4


def test_only_rank_0_of_a_first_start_lists_and_reads_footers(listed, server):
    begin, run_dir = listed
    manifest = begin()
    footers = sorted(p.name for p in (run_dir / "footers").iterdir())
    assert footers == sorted(file.etag for file in manifest.sources[0].files)
    asked = server.requests.total()
    (source,) = manifest.sources
    for _ in range(4):
        for file in range(len(source.files)):
            Reader(Reading(60, run_dir)).units.footer(source, file)
    assert server.requests.total() == asked


def test_a_first_answer_later_than_the_client_waits_is_waited_for(listed, server, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    server.listing_faults.extend(["late 1", "late 1"])
    began = time.monotonic()
    manifest = listed[0]()
    assert manifest.sources[0].revision == hub.SHA
    assert not server.listing_faults
    assert time.monotonic() - began < 30


def test_a_listing_that_never_comes_ends_the_start_and_says_so(listed, server, monkeypatch):
    monkeypatch.setattr(fetch, "ATTEMPT_SECONDS", 0.2)
    monkeypatch.setattr(resolving, "ASK_SECONDS", 0.5)
    server.listing_faults.extend(["hang"] * 99)
    with pytest.raises(RunError, match="no complete answer") as raised:
        listed[0]()
    assert raised.value.exit_code == 75
    assert hub.ID in str(raised.value)


@pytest.fixture
def offline(monkeypatch):
    from huggingface_hub import constants

    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_run_whose_bytes_are_all_in_the_cache_needs_no_network(
    there, place, server, expected, tmp_path, offline
):
    reading = Reading(60, tmp_path, cache_bytes=1 << 30)
    assert blocks(there, place, reading=reading) == expected
    asked = server.requests.total()
    offline()
    assert blocks(there, place, reading=reading) == expected
    assert server.requests.total() == asked


def test_a_second_epoch_comes_from_the_cache(there, place, server, tmp_path):
    reading = Reading(60, tmp_path, cache_bytes=1 << 30)
    blocks(there, place, 6 * STEPS, reading=reading)
    assert len(server.ranges) == len(set(server.ranges))


def test_a_range_that_the_cache_has_not_is_named_offline(there, place, server, tmp_path, offline):
    reading = Reading(60, tmp_path, cache_bytes=1 << 30)
    blocks(there, place, 1, reading=reading)
    offline()
    with pytest.raises(UserError, match=r"bytes \d+ to \d+ of http\S+ are not in the cache"):
        blocks(there, place, 6 * STEPS, reading=reading)


def test_a_first_start_offline_is_the_one_that_was_online(server, place, tmp_path, offline):
    server.files = {"a/1.parquet": (place / "data" / "a" / "1.parquet").read_bytes()}
    config = corpus.config({"path": hub.ID}, lanes=4, heldout=0.1, cache_gb=1)
    tokenizer = open_tokenizer(place / "tokenizer")
    (tmp_path / "one").mkdir()
    first = freeze(survey(data_settings(config), 1, tmp_path / "one"), tokenizer)
    asked = server.requests.total()
    offline()
    (tmp_path / "two").mkdir()
    assert freeze(survey(data_settings(config), 1, tmp_path / "two"), tokenizer) == first
    assert server.requests.total() == asked


def test_a_stream_that_is_closed_leaves_no_thread_that_reads_ahead(there, place, server):
    stream = opened(there, place)
    for _ in range(4):
        next(stream)
    server.mixture = lambda: "hang"
    threading.Timer(0.3, stream._stop.set).start()
    with pytest.raises(RunError, match="stopped"):
        list(islice(stream, 6 * STEPS))
    stream.close()
    wait_for(lambda: not [t for t in threading.enumerate() if t.name == "ahead"])


HANGS = """
import signal, sys
from pathlib import Path

from llmtrain.data.manifest import load
from llmtrain.data.documents.reader import Reading
from llmtrain.data.stream import open_stream
from llmtrain.config.schema import Config

def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    config = Config.model_validate_json(sys.argv[1])
    manifest = load(Path(sys.argv[2]) / "manifest.json", config.data.sources)
    stream = open_stream(manifest, Path(sys.argv[2]) / "tokenizer", blocks_per_step=4, rank=0,
                         world_size=1, workers=int(sys.argv[3]), reading=Reading(1200))
    try:
        print("reading", flush=True)
        next(stream)
    finally:
        stream.close()

if __name__ == "__main__":
    main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc to see that a read hangs")
@pytest.mark.parametrize(("where", "workers"), [("here", 1), ("away", 0), ("away", 1)])
@pytest.mark.launches
def test_a_process_ends_within_seconds_while_a_read_hangs(tmp_path, where, workers):
    corpus.write_tokenizer(tmp_path / "tokenizer")
    path = corpus.write_parquet(tmp_path / "data" / "a.parquet", corpus.articles(60))
    config = corpus.config(tmp_path / "data", lanes=4)
    with hub.serving(hub.read_files(tmp_path / "data")) as server:
        manifest = freeze(survey(data_settings(config), 1), open_tokenizer(tmp_path / "tokenizer"))
        if where == "away":
            manifest = away(manifest, tmp_path, server.files)
            config = corpus.config({"path": hub.ID}, lanes=4)
            server.mixture = lambda: "hang"
        else:
            path.unlink()
            os.mkfifo(path)  # whoever opens it to read waits for a writer
        (tmp_path / "manifest.json").write_bytes(manifest.to_bytes())
        (tmp_path / "hangs.py").write_text(HANGS)
        arguments = [config.model_dump_json(by_alias=True), str(tmp_path), str(workers)]
        environment = os.environ | {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path)}
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "hangs.py"), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout.readline() == "reading\n"
            if where == "away":
                wait_for(lambda: server.requests["range"] > 0)
            else:
                wait_for(lambda: is_open_by_a_child(process.pid))
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 143  # the reads hang for minutes
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def is_open_by_a_child(pid):
    """Does one of its children wait until the other end of a pipe is opened?"""
    places = [Path(f"/proc/{child.pid}/wchan") for child in psutil.Process(pid).children()]
    return any("wait_for_partner" in place.read_text() for place in places)
