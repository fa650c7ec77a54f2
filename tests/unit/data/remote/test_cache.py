import json
import os

import pytest

from llmtrain.data.remote.cache import Cache, answer_path, load_answer, store_answer

ETAG = "a1b2c3"


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "llmtrain", 10_000)


def stored(root):
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def test_what_was_put_is_there_for_the_next_process(cache, tmp_path):
    cache.put(ETAG, 5, 9, b"wxyz")
    assert stored(tmp_path) == [f"llmtrain/{ETAG}/5-9"]
    assert Cache(tmp_path / "llmtrain", 10_000).get(ETAG, 5, 9) == b"wxyz"
    assert cache.get(ETAG, 5, 10) is None
    assert cache.get("other", 5, 9) is None


@pytest.mark.parametrize("damage", [b"", b"wx", b"wxyz12345678", b"wxyy"])
def test_a_damaged_range_is_deleted_and_never_used(cache, tmp_path, damage, caplog):
    cache.put(ETAG, 5, 9, b"wxyz")
    path = tmp_path / "llmtrain" / ETAG / "5-9"
    digest = path.read_bytes()[-8:]
    path.write_bytes(damage + digest * (damage == b"wxyy"))
    assert cache.get(ETAG, 5, 9) is None
    assert "damaged" in caplog.text
    assert not path.exists()


def test_an_etag_that_is_no_file_name_is_kept_under_its_digest(cache, tmp_path):
    for etag in ["../../up", "x" * 200, "a/b"]:
        cache.put(etag, 0, 3, etag[:3].encode())
        assert cache.get(etag, 0, 3) == etag[:3].encode()
    assert all(name.startswith("llmtrain/") for name in stored(tmp_path))
    assert len(stored(tmp_path)) == 3


def test_the_ranges_that_were_used_longest_ago_make_room(cache, tmp_path):
    for n in range(9):
        cache.put(ETAG, n * 1000, (n + 1) * 1000, bytes([n]) * 1000)
        path = tmp_path / "llmtrain" / ETAG / f"{n * 1000}-{(n + 1) * 1000}"
        os.utime(path, (n, n))
    assert cache.get(ETAG, 0, 1000) == bytes(1000)  # used just now
    again = Cache(tmp_path / "llmtrain", 10_000)
    for n in range(9, 12):
        again.put(ETAG, n * 1000, (n + 1) * 1000, bytes([n]) * 1000)
    again.put(ETAG, 20_000, 29_000 - 1000, bytes(8000))
    left = sum(path.stat().st_size for path in (tmp_path / "llmtrain").rglob("*-*"))
    assert left <= 9_100
    assert again.get(ETAG, 20_000, 28_000) == bytes(8000)
    assert again.get(ETAG, 1000, 2000) is None


def test_ranges_make_no_room_in_the_answers(cache, tmp_path):
    path = answer_path(tmp_path / "llmtrain", ["http://hub", "a/b", None, "train", None])
    store_answer(path, {"files": list(range(5000))})
    for n in range(4):
        cache.put(ETAG, n * 5000, (n + 1) * 5000, bytes(5000))
    assert load_answer(path) == {"files": list(range(5000))}


def test_what_does_not_fit_or_has_no_etag_is_not_kept(cache, tmp_path):
    cache.put(ETAG, 0, 20_000, bytes(20_000))
    cache.put("", 0, 3, b"abc")
    assert not (tmp_path / "llmtrain").exists()


def test_a_disk_that_cannot_be_written_is_said_once_and_survived(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "below", 10_000)
    cache.put(ETAG, 0, 3, b"abc")
    cache.put(ETAG, 3, 6, b"abc")
    assert cache.get(ETAG, 0, 3) is None
    assert len(caplog.records) == 1
    assert "nothing more is kept" in caplog.text


def test_an_answer_is_kept_by_everything_that_was_asked(tmp_path):
    one = answer_path(tmp_path, ["http://hub", "a/b", None, "train", None])
    other = answer_path(tmp_path, ["http://hub", "a/b", None, "train", "v2"])
    assert one != other
    assert load_answer(one) is None
    store_answer(one, {"root": "r"})
    assert load_answer(one) == {"root": "r"}
    one.write_text(json.dumps({"root": "r"})[:-3])
    assert load_answer(one) is None
