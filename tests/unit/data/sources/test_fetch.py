import io
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import formatdate
from itertools import count, islice
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import corpus, hub

from llmtrain.batch_size import BatchSize
from llmtrain.config.binding import data_settings
from llmtrain.data.documents import lines, units
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.manifest import Unit
from llmtrain.data.sources import fetch, hub as resolving
from llmtrain.data.sources.cache import Ranges
from llmtrain.data.sources.fetch import HubFile, Remote
from llmtrain.data.stream import open_stream
from llmtrain.data.survey import freeze, survey
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import RunError, UserError

CONTENT = bytes(range(256)) * 40
NAME = "data/part.bin"


class Patience:
    """Takes the place of the event that waits are made on: remembers them, and never waits."""

    def __init__(self):
        self.waited = []

    def wait(self, timeout):
        if timeout:
            self.waited.append(timeout)
        return False


@pytest.fixture
def server():
    with hub.serving({NAME: CONTENT}) as serving:
        yield serving


def hub_file(server, content=CONTENT, name=NAME):
    return HubFile(server.url(name), len(content), hub.etag(content))


def fetched(server, start=10, end=500, timeout=60, stop=None):
    reader = fetch.Remote(timeout, stop or Patience())
    return reader.fetch(hub_file(server), start, end, reader.deadline())


def test_a_range_is_exactly_what_was_asked_for(server):
    assert fetched(server) == CONTENT[10:500]
    assert server.requests["range"] == 1


def test_a_long_range_goes_in_pieces(server, monkeypatch):
    monkeypatch.setattr(fetch, "PIECE_BYTES", 100)
    assert fetched(server, 0, 950) == CONTENT[:950]
    assert server.requests["range"] == 10


def test_an_empty_range_is_never_asked_for(server):
    assert fetched(server, 7, 7) == b""
    assert not server.requests


@pytest.mark.parametrize("wait", ["429 7", "429 date 7", "429 ratelimit 7", "503 7"])
def test_the_wait_that_the_server_asks_for_is_kept(server, wait):
    patience = Patience()
    server.faults.append(wait)
    assert fetched(server, stop=patience) == CONTENT[10:500]
    assert len(patience.waited) == 1
    assert 6 <= patience.waited[0] <= 8


def test_waits_are_random_and_grow_to_a_minute_at_most():
    far = fetch.Remote(10_000).deadline()
    for failures in range(20):
        waits = [fetch.back_off(failures, 0.0, far, "it", "why") for _ in range(50)]
        bound = min(60, 2**failures)
        assert 0 <= min(waits) < bound / 2 < max(waits) <= bound


def test_a_longer_wait_than_peers_have_ends_the_run_at_once(server):
    server.faults.append("429 500")
    with pytest.raises(RunError, match="asks to wait 500 s") as raised:
        fetched(server)
    assert raised.value.exit_code == 75


def test_a_network_that_stays_away_is_a_failure_that_a_restart_cures(server):
    server.faults.extend(["503"] * 100)
    with pytest.raises(RunError, match="HTTP 503") as raised:
        fetched(server, timeout=0)
    assert raised.value.exit_code == 75


@pytest.mark.parametrize("status", [401, 403, 404, 410, 416])
def test_what_the_hub_refuses_is_said_at_once(server, status):
    server.faults.append(str(status))
    with pytest.raises(UserError, match=f"HTTP {status}"):
        fetched(server)
    assert server.requests["range"] == 1


def test_a_file_that_was_replaced_is_refused(server):
    server.faults.append("changed")
    with pytest.raises(UserError, match="etag f00"):
        fetched(server)


def test_a_whole_file_may_come_without_a_range(server):
    server.faults.append("whole")
    assert fetched(server, 0, len(CONTENT)) == CONTENT
    assert server.requests["range"] == 1


def test_a_redirect_is_followed_without_the_token(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with hub.serving({NAME: CONTENT}) as store:
        server.faults.append(f"redirect {store.endpoint}")
        assert fetched(server) == CONTENT[10:500]
        assert store.requests["elsewhere"] == 1
        assert store.tokens == [None]
    fetched(server)
    assert server.tokens == ["Bearer hf_secret"]


def test_a_signed_address_is_kept_until_it_expires(server):
    with hub.serving({NAME: CONTENT}) as store:
        server.store, store.uses = store, 3
        reader = fetch.Remote(60, Patience())
        for start in range(8):
            found = reader.fetch(hub_file(server), start, start + 5, reader.deadline())
            assert found == CONTENT[start : start + 5]
    assert server.requests["range"] == 3  # of the Hub: one for each address
    assert store.requests["elsewhere"] == 8 + 2  # two were refused


def test_a_store_that_fails_is_asked_by_a_new_address(server):
    with hub.serving({NAME: CONTENT}) as store:
        server.store = store
        store.faults.extend(["404", "416", "401", "reset"])
        assert fetched(server) == CONTENT[10:500]
    assert server.requests["range"] == 5


def test_addresses_with_signatures_stand_nowhere(server, caplog):
    with hub.serving({NAME: CONTENT}) as store:
        server.store = store
        store.faults.extend(["503", "reset", "short"] * 40)
        with pytest.raises(RunError) as raised:
            fetched(server, timeout=4)
    assert server.url(NAME) in caplog.text
    assert "signature" not in caplog.text + str(raised.value)
    assert str(store.server_port) not in caplog.text + str(raised.value)


def test_a_file_of_another_size_was_replaced(server):
    with hub.serving({NAME: CONTENT}) as store:
        server.store = store
        longer = replace(hub_file(server), size=len(CONTENT) + 1)
        reader = fetch.Remote(60, Patience())
        with pytest.raises(UserError, match=f"a file of {len(CONTENT) + 1} bytes"):
            reader.fetch(longer, 0, 5, reader.deadline())


def test_redirects_in_a_circle_end(server):
    server.faults.extend([f"redirect {server.endpoint}"] * 1000)
    with pytest.raises(RunError, match="more than 5 redirects"):
        fetched(server, timeout=0)


def test_what_is_not_there_elsewhere_is_no_mistake_of_the_user(server):
    server.faults.append("redirect http://127.0.0.1:9")  # nothing listens there
    assert fetched(server) == CONTENT[10:500]


def test_a_process_that_shall_end_does_not_wait(server):
    class Ending:
        def wait(self, timeout):
            return True

    server.faults.append("503")
    with pytest.raises(RunError, match="stopped"):
        fetched(server, stop=Ending())


@pytest.mark.parametrize("fault", ["hang", "drip", "drip-headers"])
def test_a_process_that_shall_end_leaves_a_hanging_request_alone(server, fault):
    ending = threading.Event()
    server.faults.append(fault)
    threading.Timer(0.2, ending.set).start()
    began = time.monotonic()
    with pytest.raises(RunError, match="stopped"):
        fetched(server, 0, len(CONTENT), stop=ending)
    assert time.monotonic() - began < 10


def test_failed_attempts_are_said_now_and_then(server, caplog):
    server.faults.extend(["503"] * 5)
    assert fetched(server) == CONTENT[10:500]
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"bytes 10 to 500 of {server.url(NAME)}: HTTP 503, trying again in" in line


def test_retry_after_may_be_a_date_or_a_limit():
    assert fetch.asked_wait({"retry-after": "12"}) == 12
    date = formatdate(60 + datetime.now(UTC).timestamp())
    assert 50 < fetch.asked_wait({"retry-after": date}) <= 60
    assert fetch.asked_wait({"retry-after": "soon"}) == 0
    assert fetch.asked_wait({"ratelimit": '"api";r=0;t=55'}) == 55
    assert fetch.asked_wait({"ratelimit": '"api";r=9;t=55'}) == 0
    assert fetch.asked_wait({}) == 0


def test_huggingface_hub_asks_for_nothing_of_its_own(server, monkeypatch, tmp_path):
    """Even where another package imported it first."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _detect_agent

    monkeypatch.setattr(_detect_agent, "_registry", None)
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "none.json"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    fetch.web_url("hf://datasets/a/b@main/c")
    assert fetched(server) == CONTENT[10:500]
    assert set(server.requests) == {"range"}


def test_nothing_is_asked_for_offline(server, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    file = Ranges(fetch.Remote(60, Patience()), None).open(hub_file(server))
    with pytest.raises(UserError, match=f"bytes 0 to {len(CONTENT)} of {server.url(NAME)}"):
        file.readall()
    assert not server.requests


def asking():
    """A file whose ranges are asked for, and those that were."""
    asked = []

    def ask(start, end):
        asked.append((start, end))
        return CONTENT[start:end]

    return fetch.RangeFile(len(CONTENT), ask), asked


def test_a_range_file_reads_like_a_file():
    file, asked = asking()
    assert file.seek(-5, io.SEEK_END) == len(CONTENT) - 5
    assert file.read(100) == CONTENT[-5:]
    assert file.read(1) == b""
    file.seek(3)
    assert (file.read(4), file.tell()) == (CONTENT[3:7], 7)
    assert file.readall() == CONTENT[7:]
    assert len(asked) == 3


def test_what_is_held_is_not_asked_for_again():
    file, asked = asking()
    file.hold([(10, 100), (300, 400)])
    for start, end in [(10, 100), (350, 360), (20, 130)]:
        file.seek(start)
        assert file.read(end - start) == CONTENT[start:end]
    assert asked == [(10, 100), (300, 400), (100, 130)]


def test_errors_pass_through_pyarrow_as_they_are(server):
    server.faults.extend(["404"] * 3)
    file = Ranges(fetch.Remote(60, Patience()), None).open(hub_file(server))
    with pytest.raises(UserError, match="HTTP 404"):
        pq.ParquetFile(pa.PythonFile(file, "r"))


@pytest.fixture
def away(tmp_path, monkeypatch):
    """A local file as a source, and the same one on the Hub."""

    def away(path, lanes=1):
        local = survey(data_settings(corpus.config(path, lanes=lanes)), 1).sources[0]
        content = path.read_bytes()
        server.files[path.name] = content
        monkeypatch.setattr(lines, "web_url", lambda address: server.url(address.split("/")[-1]))
        file = local.files[0]._replace(etag=hub.etag(content))
        root = f"hf://datasets/{hub.ID}@{hub.SHA}"
        return local, replace(local, remote=True, root=root, files=(file,)), server

    with hub.serving({}) as server:
        yield away


def read_both(local, there, units=()):
    here, reader = Reader(Reading(60)), Reader(Reading(60), Patience())
    for unit in units or local.units:
        assert reader.rows(there, unit).texts.equals(here.rows(local, unit).texts)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.txt", "a.txt.zst"])
def test_units_read_over_the_network_are_those_of_the_local_file(tmp_path, away, name):
    rows, parquet = corpus.articles(400), name.endswith("parquet")
    if parquet:
        corpus.write_parquet(tmp_path / name, rows, group=50)
    else:
        corpus.write_jsonl(tmp_path / name, rows)
    local, there, server = away(tmp_path / name)
    read_both(local, there)
    assert server.requests["range"] == len(local.units) + parquet  # one for the footer


def test_slices_of_a_group_cost_one_request_together(tmp_path, away):
    path = corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(400), group=100)
    local, there, server = away(path, lanes=8)
    assert len(local.units) == 32
    backwards = sorted(local.units, key=lambda unit: unit.stop - 100 * unit.group)
    reader = Reader(Reading(60))
    for unit in backwards:  # by slice, so that no decoded group is still there
        reader.units._decoded.clear()
        reader.rows(there, unit)
    assert server.requests["range"] == 4 + 1


def test_slices_of_a_group_that_is_never_decoded_at_once_cost_one_request(
    tmp_path, away, monkeypatch
):
    path = corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(400), group=200)
    local, there, server = away(path, lanes=2)
    monkeypatch.setattr(units, "GROUP_LIMIT", 1000)
    read_both(local, there)
    assert server.requests["range"] == 2 + 1


def test_a_group_that_is_not_held_at_once_is_read_in_pieces(tmp_path, away, monkeypatch):
    path = corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(400), group=200)
    local, there, server = away(path, lanes=2)
    monkeypatch.setattr(units, "GROUP_LIMIT", 1000)
    monkeypatch.setattr(units, "HELD_BYTES", 1000)
    monkeypatch.setattr(units, "PIECE_BYTES", 2000)
    read_both(local, there)
    assert max(end - start for _, start, end in server.ranges[1:]) < 8000


def test_a_line_beyond_the_margin_costs_only_what_was_not_read(tmp_path, away):
    rows = [{"text": str(n) * 300_000} for n in range(9)] + corpus.articles(9)
    path = corpus.write_jsonl(tmp_path / "a.jsonl", rows)
    local, there, server = away(path)
    size = local.files[0].size
    starts = range(0, size, 200_000)
    read_both(local, there, [Unit(0, -1, at, min(at + 200_000, size)) for at in starts])
    asked = sum(end - start for _, start, end in server.ranges)
    assert asked < 3 * size  # twice the margin each time, never the same bytes


# Failures seen elsewhere with data sets of the Hub, and the whole list of what a server may do.
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


def on_the_hub(manifest, place, files):
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
        batch=BatchSize.constant(BLOCKS),
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
def quick_hub(place, tmp_path, monkeypatch):
    """The Hub; waiting and giving up are quick."""
    with hub.serving(hub.read_files(place / "data")) as serving:
        hub.stand_in(monkeypatch, serving, tmp_path / "home")
        monkeypatch.setattr(fetch, "MAX_WAIT_SECONDS", 0.02)
        monkeypatch.setattr(fetch, "ATTEMPT_SECONDS", 0.3)
        monkeypatch.setattr(fetch, "READ_SECONDS", 0.2)
        yield serving


@pytest.fixture
def there(here, place, quick_hub):
    return on_the_hub(here, place, quick_hub.files)


def every(number, fault):
    """This fault for every `number`th request."""
    turns = count(1)
    return lambda: fault if next(turns) % number == 0 else ""


def test_the_order_over_the_network_is_that_of_the_files(there, place, quick_hub, expected):
    assert blocks(there, place) == expected
    assert quick_hub.requests["range"] > 20
    assert quick_hub.requests["api"] == 0


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
def test_what_passes_changes_no_block(there, place, quick_hub, expected, fault):
    quick_hub.mixture = every(2, fault)
    assert blocks(there, place) == expected


@pytest.mark.parametrize(
    "fault", [HANGING[0], *(pytest.param(one, marks=pytest.mark.wide) for one in HANGING[1:])]
)
def test_hangs_and_drips_change_no_block(there, place, quick_hub, expected, fault):
    quick_hub.mixture = every(6, fault)
    assert blocks(there, place) == expected


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("redirected", [False, True])
def test_a_mix_of_nine_faults_changes_no_block(there, place, quick_hub, expected, seed, redirected):
    with hub.serving(quick_hub.files) as store:
        if redirected:
            quick_hub.store, store.uses = store, 3
            store.mixture = hub.mixture(seed + 100)
        quick_hub.mixture = hub.mixture(seed)
        assert blocks(there, place) == expected
        assert (store.requests["elsewhere"] > 0) == redirected


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
def test_an_outage_of_minutes_is_waited_out(quick_hub, monkeypatch, seconds):
    clock = Clock(seconds, lambda: setattr(quick_hub, "down", False))
    monkeypatch.setattr(fetch, "time", clock)
    monkeypatch.setattr(fetch, "MAX_WAIT_SECONDS", 60.0)
    name, quick_hub.down = "b.jsonl", True
    content = quick_hub.files[name]
    reader = Remote(20 * 60, clock)
    file = hub_file(quick_hub, content, name)
    assert reader.fetch(file, 3, 99, reader.deadline()) == content[3:99]
    assert seconds <= clock.now - 1000 <= seconds + 60
    assert quick_hub.requests["down"] < 5 + seconds / 10  # full jitter: half a minute on average


def test_a_quarter_of_an_hour_without_a_network_ends_the_run(quick_hub, monkeypatch):
    clock = Clock(1e9, lambda: None)
    monkeypatch.setattr(fetch, "time", clock)
    monkeypatch.setattr(fetch, "MAX_WAIT_SECONDS", 60.0)
    quick_hub.down = True
    reader = Remote(20 * 60, clock)
    file = HubFile(quick_hub.url("b.jsonl"), 10_000, "")
    with pytest.raises(RunError, match="could not be read") as raised:
        reader.fetch(file, 3, 99, reader.deadline())
    assert raised.value.exit_code == 75
    assert "continues once the network is back" in raised.value.remedy
    assert 14 * 60 <= clock.now - 1000 <= 15 * 60


def test_an_outage_never_leaves_a_unit_out(there, place, quick_hub, tmp_path):
    quick_hub.down = True
    reading = Reading(0.5, tmp_path, skip_bad_units=True)
    stream = opened(there, place, reading=reading)
    with pytest.raises(RunError) as raised:
        next(stream)
    stream.close()
    assert raised.value.exit_code == 75
    assert not (tmp_path / "skipped-units.jsonl").exists()


@pytest.fixture
def listed(quick_hub, place, tmp_path):
    """What rank 0 does at a first start on a data set of the Hub."""
    quick_hub.files = {
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


def test_four_ranks_ask_for_no_more_than_one(listed, place, quick_hub):
    begin, run_dir = listed
    manifest = begin()
    reading = Reading(60, run_dir)
    counts = {}
    for world_size in (1, 4):
        quick_hub.requests.clear()
        quick_hub.ranges.clear()
        found = [
            blocks(manifest, place, 8, rank=rank, world_size=world_size, reading=reading)
            for rank in range(world_size)
        ]
        in_order = [block for turn in zip(*found, strict=True) for block in turn]
        counts[world_size] = sorted(quick_hub.ranges)
        assert set(quick_hub.requests) == {"range"}  # no listing, no footer
        assert set(quick_hub.ranges) <= spans_of(manifest, run_dir)
        if world_size == 1:
            alone = in_order
    assert in_order == alone
    assert counts[4] == counts[1]
    assert len(set(counts[1])) == len(counts[1]) > 4


def test_a_first_answer_later_than_the_client_waits_is_waited_for(listed, quick_hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    quick_hub.listing_faults.extend(["late 1", "late 1"])
    began = time.monotonic()
    assert listed[0]().sources[0].revision == hub.SHA
    assert not quick_hub.listing_faults
    assert time.monotonic() - began < 30


def test_a_listing_that_never_comes_ends_the_start_and_says_so(listed, quick_hub, monkeypatch):
    monkeypatch.setattr(fetch, "ATTEMPT_SECONDS", 0.2)
    monkeypatch.setattr(resolving, "ASK_SECONDS", 0.5)
    quick_hub.listing_faults.extend(["hang"] * 99)
    with pytest.raises(RunError, match="no complete answer") as raised:
        listed[0]()
    assert raised.value.exit_code == 75
    assert hub.ID in str(raised.value)


@pytest.fixture
def offline(monkeypatch):
    from huggingface_hub import constants

    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_second_epoch_comes_from_the_cache(there, place, quick_hub, tmp_path):
    reading = Reading(60, tmp_path, cache_bytes=1 << 30)
    blocks(there, place, 6 * STEPS, reading=reading)
    assert len(quick_hub.ranges) == len(set(quick_hub.ranges))


def test_a_first_start_offline_is_the_one_that_was_online(quick_hub, place, tmp_path, offline):
    quick_hub.files = {"a/1.parquet": (place / "data" / "a" / "1.parquet").read_bytes()}
    config = corpus.config({"path": hub.ID}, lanes=4, heldout=0.1, cache_gb=1)
    tokenizer = open_tokenizer(place / "tokenizer")
    (tmp_path / "one").mkdir()
    first = freeze(survey(data_settings(config), 1, tmp_path / "one"), tokenizer)
    asked = quick_hub.requests.total()
    offline()
    (tmp_path / "two").mkdir()
    assert freeze(survey(data_settings(config), 1, tmp_path / "two"), tokenizer) == first
    assert quick_hub.requests.total() == asked


def test_a_stream_that_is_closed_leaves_no_thread_that_reads_ahead(there, place, quick_hub):
    stream = opened(there, place)
    for _ in range(4):
        next(stream)
    quick_hub.mixture = lambda: "hang"
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
from llmtrain.batch_size import BatchSize
from llmtrain.data.stream import open_stream
from llmtrain.config.schema import Config

def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    config = Config.model_validate_json(sys.argv[1])
    manifest = load(Path(sys.argv[2]) / "manifest.json", config.data.sources)
    stream = open_stream(manifest, Path(sys.argv[2]) / "tokenizer", rank=0, world_size=1,
                         batch=BatchSize.constant(4), workers=int(sys.argv[3]),
                         reading=Reading(1200))
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
    with hub.serving(hub.read_files(tmp_path / "data")) as quick_hub:
        manifest = freeze(survey(data_settings(config), 1), open_tokenizer(tmp_path / "tokenizer"))
        if where == "away":
            manifest = on_the_hub(manifest, tmp_path, quick_hub.files)
            config = corpus.config({"path": hub.ID}, lanes=4)
            quick_hub.mixture = lambda: "hang"
        else:
            path.unlink()
            os.mkfifo(path)  # whoever opens it to read waits for a writer
        (tmp_path / "manifest.json").write_bytes(manifest.to_bytes())
        (tmp_path / "hangs.py").write_text(HANGS)
        arguments = [config.model_dump_json(by_alias=True), str(tmp_path), str(workers)]
        environment = os.environ | {"HF_ENDPOINT": quick_hub.endpoint, "HF_HOME": str(tmp_path)}
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "hangs.py"), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout.readline() == "reading\n"
            if where == "away":
                wait_for(lambda: quick_hub.requests["range"] > 0)
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
