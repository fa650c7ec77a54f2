import io
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import formatdate

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import corpus, hub

from llmtrain.config.binding import data_settings
from llmtrain.data.documents import lines, units
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.manifest import Unit
from llmtrain.data.remote import fetch
from llmtrain.data.remote.cache import Ranges
from llmtrain.data.remote.fetch import HubFile
from llmtrain.data.survey import survey
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


@pytest.mark.parametrize("wait", ["7", "date 7", "ratelimit 7"])
def test_the_wait_that_the_server_asks_for_is_kept(server, wait):
    patience = Patience()
    server.faults.append(f"429 {wait}")
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
    assert time.monotonic() - began < 2


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


def test_a_range_file_reads_like_a_file():
    asked = []

    def ask(start, end):
        asked.append((start, end))
        return CONTENT[start:end]

    file = fetch.RangeFile(len(CONTENT), ask)
    assert file.seek(-5, io.SEEK_END) == len(CONTENT) - 5
    assert file.read(100) == CONTENT[-5:]
    assert file.read(1) == b""
    file.seek(3)
    assert (file.read(4), file.tell()) == (CONTENT[3:7], 7)
    assert file.readall() == CONTENT[7:]
    assert len(asked) == 3


def test_what_is_held_is_not_asked_for_again():
    asked = []

    def ask(start, end):
        asked.append((start, end))
        return CONTENT[start:end]

    file = fetch.RangeFile(len(CONTENT), ask)
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


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.txt", "a.txt.zst"])
def test_units_read_over_the_network_are_those_of_the_local_file(tmp_path, name, monkeypatch):
    rows = corpus.articles(400)
    if name.endswith("parquet"):
        corpus.write_parquet(tmp_path / name, rows, group=50)
    else:
        corpus.write_jsonl(tmp_path / name, rows)
    local = survey(data_settings(corpus.config(tmp_path / name, lanes=1)), 1).sources[0]
    content = (tmp_path / name).read_bytes()
    with hub.serving({name: content}) as server:
        monkeypatch.setattr(lines, "web_url", lambda address: server.url(address.split("/")[-1]))
        file = local.files[0]._replace(etag=hub.etag(content))
        away = replace(local, remote=True, root=f"hf://datasets/{hub.ID}@{hub.SHA}", files=(file,))
        here, there = Reader(Reading(60)), Reader(Reading(60), Patience())
        for unit in local.units:
            assert there.rows(away, unit).texts.equals(here.rows(local, unit).texts)
        footer = name.endswith("parquet")
        assert server.requests["range"] == len(local.units) + footer


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


def read_both(local, there, reading=None):
    here, reader = Reader(Reading(60)), Reader(reading or Reading(60), Patience())
    for unit in local.units:
        assert reader.rows(there, unit).texts.equals(here.rows(local, unit).texts)


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
    units = [range_at(local, start) for start in range(0, local.files[0].size, 200_000)]
    here, reader = Reader(Reading(60)), Reader(Reading(60), Patience())
    for unit in units:
        assert reader.rows(there, unit).texts.equals(here.rows(local, unit).texts)
    asked = sum(end - start for _, start, end in server.ranges)
    assert asked < 3 * local.files[0].size  # twice the margin each time, never the same bytes


def range_at(source, start):
    return Unit(0, -1, start, min(start + 200_000, source.files[0].size))
