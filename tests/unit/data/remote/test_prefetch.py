import threading
import time

import pytest
from helpers import hub

from llmtrain.data.remote import cache
from llmtrain.data.remote.cache import Cache, Range, Ranges
from llmtrain.data.remote.fetch import HubFile, Remote
from llmtrain.errors import RunError, UserError

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
    assert time.monotonic() - began < 2


def test_threads_that_read_ahead_end_with_the_process(server, file):
    stop = threading.Event()
    server.faults.extend(["hang", "drip"])
    found = ranges(stop=stop)
    found.expect(Range(file, 0, 100))
    found.expect(Range(file, 100, 200))
    eventually(lambda: server.requests["range"] == 2)
    stop.set()
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "ahead"])
