import json
import os
import threading
import time

import pyarrow.parquet as pq
import pytest
from helpers import corpus, hub

from llmtrain.data.sources import cache
from llmtrain.data.sources.cache import (
    Cache,
    Range,
    Ranges,
    answer_path,
    load_answer,
    load_footer,
    store_answer,
)
from llmtrain.data.sources.fetch import HubFile, Remote
from llmtrain.errors import RunError, UserError

ETAG = "a1b2c3"


@pytest.fixture
def store(tmp_path):
    return Cache(tmp_path / "llmtrain", 10_000)


def stored(root):
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def test_what_was_put_is_there_for_the_next_process(store, tmp_path):
    store.put(ETAG, 5, 9, b"wxyz")
    assert stored(tmp_path) == [f"llmtrain/{ETAG}/5-9"]
    assert Cache(tmp_path / "llmtrain", 10_000).get(ETAG, 5, 9) == b"wxyz"
    assert store.get(ETAG, 5, 10) is None
    assert store.get("other", 5, 9) is None


@pytest.mark.parametrize("damage", [b"", b"wx", b"wxyz12345678", b"wxyy"])
def test_a_damaged_range_is_deleted_and_never_used(store, tmp_path, damage, caplog):
    store.put(ETAG, 5, 9, b"wxyz")
    path = tmp_path / "llmtrain" / ETAG / "5-9"
    digest = path.read_bytes()[-8:]
    path.write_bytes(damage + digest * (damage == b"wxyy"))
    assert store.get(ETAG, 5, 9) is None
    assert "damaged" in caplog.text
    assert not path.exists()


def test_an_etag_that_is_no_file_name_is_kept_under_its_digest(store, tmp_path):
    for etag in ["../../up", "x" * 200, "a/b"]:
        store.put(etag, 0, 3, etag[:3].encode())
        assert store.get(etag, 0, 3) == etag[:3].encode()
    assert all(name.startswith("llmtrain/") for name in stored(tmp_path))
    assert len(stored(tmp_path)) == 3


def test_the_ranges_that_were_used_longest_ago_make_room(store, tmp_path):
    for n in range(9):
        store.put(ETAG, n * 1000, (n + 1) * 1000, bytes([n]) * 1000)
        path = tmp_path / "llmtrain" / ETAG / f"{n * 1000}-{(n + 1) * 1000}"
        os.utime(path, (n, n))
    assert store.get(ETAG, 0, 1000) == bytes(1000)  # used just now
    again = Cache(tmp_path / "llmtrain", 10_000)
    for n in range(9, 12):
        again.put(ETAG, n * 1000, (n + 1) * 1000, bytes([n]) * 1000)
    again.put(ETAG, 20_000, 29_000 - 1000, bytes(8000))
    left = sum(path.stat().st_size for path in (tmp_path / "llmtrain").rglob("*-*"))
    assert left <= 9_100
    assert again.get(ETAG, 20_000, 28_000) == bytes(8000)
    assert again.get(ETAG, 1000, 2000) is None


def test_ranges_make_no_room_in_the_answers(store, tmp_path):
    path = answer_path(tmp_path / "llmtrain", ["http://hub", "a/b", None, "train", None])
    store_answer(path, {"files": list(range(5000))})
    for n in range(4):
        store.put(ETAG, n * 5000, (n + 1) * 5000, bytes(5000))
    assert load_answer(path) == {"files": list(range(5000))}


def test_what_does_not_fit_or_has_no_etag_is_not_kept(store, tmp_path):
    store.put(ETAG, 0, 20_000, bytes(20_000))
    store.put("", 0, 3, b"abc")
    assert not (tmp_path / "llmtrain").exists()


def test_a_disk_that_cannot_be_written_is_said_once_and_survived(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    store = Cache(tmp_path / "file" / "below", 10_000)
    store.put(ETAG, 0, 3, b"abc")
    store.put(ETAG, 3, 6, b"abc")
    assert store.get(ETAG, 0, 3) is None
    assert len(caplog.records) == 1
    assert "nothing more is kept" in caplog.text


def test_an_answer_is_kept_by_everything_that_was_asked(tmp_path, caplog):
    one = answer_path(tmp_path, ["http://hub", "a/b", None, "train", None])
    assert one != answer_path(tmp_path, ["http://hub", "a/b", None, "train", "v2"])
    assert load_answer(one) is None
    store_answer(one, {"root": "r"})
    assert load_answer(one) == {"root": "r"}
    for damaged in (json.dumps({"root": "r"})[:-3], '["root"]', "[" * 100_000):
        one.write_text(damaged)
        caplog.clear()
        assert load_answer(one) is None
        assert str(one) in caplog.text


@pytest.fixture
def path(tmp_path):
    return corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(30), group=7)


def test_a_footer_is_asked_for_once_a_run(tmp_path, path):
    asked = []

    def ask():
        asked.append(1)
        return pq.read_metadata(path)

    first = load_footer(tmp_path / "run", "abc", ask)
    again = load_footer(tmp_path / "run", "abc", ask)
    assert len(asked) == 1
    assert [p.name for p in (tmp_path / "run" / "footers").iterdir()] == ["abc"]
    assert again.num_row_groups == first.num_row_groups == 5
    assert again.schema.equals(first.schema)
    for group in range(5):
        assert again.row_group(group).to_dict() == first.row_group(group).to_dict()


def test_rows_can_be_read_with_a_stored_footer_alone(tmp_path, path):
    load_footer(tmp_path, "abc", lambda: pq.read_metadata(path))
    footer = load_footer(tmp_path, "abc", pytest.fail)
    with pq.ParquetFile(path, metadata=footer) as file:
        found = file.read_row_group(2, columns=["text"]).column("text").to_pylist()
    assert found == [row["text"] for row in corpus.articles(7, 14)]


def test_a_damaged_footer_is_asked_for_again(tmp_path, path, caplog):
    load_footer(tmp_path, "abc", lambda: pq.read_metadata(path))
    (tmp_path / "footers" / "abc").write_bytes(b"PAR1 nothing PAR1")
    assert load_footer(tmp_path, "abc", lambda: pq.read_metadata(path)).num_row_groups == 5
    assert "damaged" in caplog.text
    assert load_footer(tmp_path, "abc", pytest.fail).num_row_groups == 5


def test_a_directory_that_cannot_be_written_costs_only_the_footer(tmp_path, path, caplog):
    (tmp_path / "footers").write_text("a file in the way")
    assert load_footer(tmp_path, "abc", lambda: pq.read_metadata(path)).num_row_groups == 5
    assert "not kept" in caplog.text


def test_without_a_run_every_reader_asks(path):
    assert load_footer(None, "abc", lambda: pq.read_metadata(path)).num_row_groups == 5


CONTENT = bytes(range(256)) * 40
NAME = "data/part.bin"


@pytest.fixture
def server():
    with hub.serving({NAME: CONTENT}) as serving:
        yield serving


@pytest.fixture
def file(server):
    return HubFile(server.url(NAME), len(CONTENT), hub.etag(CONTENT))


def ranges(cache=None, timeout=60, stop=None):
    return Ranges(Remote(timeout, stop), cache, stop)


def read(found, file, start, end, again=False):
    opened = found.open(file, again=again)
    opened.seek(start)
    return opened.read(end - start)


def eventually(condition):
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_what_is_expected_is_there_when_it_is_asked_for(server, file):
    found = ranges()
    found.expect(Range(file, 100, 200))
    eventually(lambda: server.requests["range"] == 1)
    assert read(found, file, 100, 200) == CONTENT[100:200]
    assert server.requests["range"] == 1


def test_no_more_than_two_are_read_ahead(server, file):
    found = ranges()
    for start in range(0, 500, 100):
        found.expect(Range(file, start, start + 100))
    eventually(lambda: server.requests["range"] == 2)
    time.sleep(0.1)  # would be enough for a third
    assert server.requests["range"] == 2
    assert read(found, file, 0, 100) == CONTENT[:100]
    eventually(lambda: server.requests["range"] == 3)
    for start in range(100, 500, 100):
        assert read(found, file, start, start + 100) == CONTENT[start : start + 100]
    assert server.requests["range"] == 5
    assert sorted(server.ranges) == [(NAME, start, start + 100) for start in range(0, 500, 100)]


def test_what_is_waited_for_passes_what_is_expected(server, file):
    server.faults.extend(["hang", "hang"])
    found = ranges()
    for start in (0, 100, 200):
        found.expect(Range(file, start, start + 100))
    eventually(lambda: server.requests["range"] == 2)
    assert read(found, file, 200, 300) == CONTENT[200:300]
    assert read(found, file, 900, 950) == CONTENT[900:950]


def test_the_bytes_that_are_read_ahead_have_a_budget(server, file, monkeypatch):
    monkeypatch.setattr(cache, "AHEAD_BYTES", 150)
    found = ranges()
    found.expect(Range(file, 0, 100))
    found.expect(Range(file, 100, 200))  # together too much
    found.expect(Range(file, 200, 400))  # never
    eventually(lambda: server.requests["range"] == 1)
    time.sleep(0.1)
    assert server.requests["range"] == 1
    assert read(found, file, 0, 100) == CONTENT[:100]
    eventually(lambda: server.requests["range"] == 2)
    assert read(found, file, 100, 200) == CONTENT[100:200]
    time.sleep(0.1)
    assert server.requests["range"] == 2


def test_what_is_not_asked_for_after_all_makes_room(server, file):
    found = ranges()
    for start in (0, 100, 200, 300):
        found.expect(Range(file, start, start + 100))
    eventually(lambda: server.requests["range"] == 2)
    found.forget(Range(file, 200, 300))
    found.forget(Range(file, 0, 100))
    eventually(lambda: server.requests["range"] == 3)
    assert read(found, file, 300, 400) == CONTENT[300:400]
    assert sorted(start for _, start, _ in server.ranges) == [0, 100, 300]


def test_a_read_ahead_that_failed_is_asked_for_by_who_needs_it(server, file):
    server.faults.extend(["404", "", "404", "404"])
    found = ranges()
    found.expect(Range(file, 0, 100))
    eventually(lambda: server.requests["range"] == 1)
    assert read(found, file, 0, 100) == CONTENT[:100]
    found.expect(Range(file, 100, 200))
    eventually(lambda: server.requests["range"] == 3)
    with pytest.raises(UserError, match="HTTP 404"):
        read(found, file, 100, 200)


def test_slices_of_one_group_cost_one_request(server, file):
    found = ranges()
    for _ in range(3):
        assert read(found, file, 0, 1000, again=True) == CONTENT[:1000]
    assert server.requests["range"] == 1


def test_what_is_kept_in_memory_has_a_limit(server, file, monkeypatch):
    monkeypatch.setattr(cache, "KEPT_BYTES", 250)
    found = ranges()
    for start in (0, 100, 200, 0):
        read(found, file, start, start + 100, again=True)
    assert server.requests["range"] == 4  # the first had made room
    read(found, file, 200, 300, again=True)
    assert server.requests["range"] == 4


def test_what_the_disk_holds_is_asked_for_once_a_machine(server, file, tmp_path):
    for _ in range(3):
        assert read(ranges(Cache(tmp_path, 10_000)), file, 5, 50, again=True) == CONTENT[5:50]
    assert server.requests["range"] == 1


def test_a_damaged_range_of_the_cache_is_read_again(server, file, tmp_path):
    read(ranges(Cache(tmp_path, 10_000)), file, 5, 50)
    (stored,) = tmp_path.rglob("5-50")
    stored.write_bytes(stored.read_bytes()[::-1])
    assert read(ranges(Cache(tmp_path, 10_000)), file, 5, 50) == CONTENT[5:50]
    assert server.requests["range"] == 2


def test_a_full_cache_needs_no_network_and_a_hole_in_it_is_named(
    server, file, tmp_path, monkeypatch
):
    from huggingface_hub import constants

    read(ranges(Cache(tmp_path, 10_000)), file, 5, 50)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = ranges(Cache(tmp_path, 10_000))
    assert read(offline, file, 5, 50) == CONTENT[5:50]
    with pytest.raises(UserError, match=r"bytes 50 to 90 of .* not in the cache"):
        read(offline, file, 50, 90)
    assert server.requests["range"] == 1


def test_who_waits_for_a_read_ahead_ends_with_the_process(server, file):
    stop = threading.Event()
    server.faults.append("hang")
    found = ranges(stop=stop)
    found.expect(Range(file, 0, 100))
    threading.Timer(0.2, stop.set).start()
    began = time.monotonic()
    with pytest.raises(RunError, match="stopped"):
        read(found, file, 0, 100)
    assert time.monotonic() - began < 10


def test_threads_that_read_ahead_end_with_the_process(server, file):
    stop = threading.Event()
    server.faults.extend(["hang", "drip"])
    found = ranges(stop=stop)
    found.expect(Range(file, 0, 100))
    found.expect(Range(file, 100, 200))
    eventually(lambda: server.requests["range"] == 2)
    stop.set()
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "ahead"])
