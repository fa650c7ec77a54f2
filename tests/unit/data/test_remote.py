import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import formatdate

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import corpus, hub

from llmtrain.data import readers, remote, request
from llmtrain.data.ahead import Ranges
from llmtrain.data.readers import Reader, Reading
from llmtrain.data.request import HubFile
from llmtrain.data.units import survey
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
    reader = remote.Remote(timeout, stop or Patience())
    return reader.fetch(hub_file(server), start, end, reader.deadline())


def test_a_range_is_exactly_what_was_asked_for(server):
    assert fetched(server) == CONTENT[10:500]
    assert server.requests["range"] == 1


def test_a_long_range_goes_in_pieces(server, monkeypatch):
    monkeypatch.setattr(remote, "PIECE_BYTES", 100)
    assert fetched(server, 0, 950) == CONTENT[:950]
    assert server.requests["range"] == 10


def test_an_empty_range_is_never_asked_for(server):
    assert fetched(server, 7, 7) == b""
    assert not server.requests


@pytest.mark.parametrize("fault", ["503", "500", "408", "short", "shifted", "whole", "reset"])
def test_what_passes_is_tried_again(server, fault):
    patience = Patience()
    server.faults.extend([fault, fault])
    assert fetched(server, stop=patience) == CONTENT[10:500]
    assert server.requests["range"] == 3
    assert len(patience.waited) == 2
    assert patience.waited[0] <= 1
    assert patience.waited[1] <= 2


def test_the_wait_that_the_server_asks_for_is_kept(server):
    patience = Patience()
    server.faults.append("429 7")
    assert fetched(server, stop=patience) == CONTENT[10:500]
    assert patience.waited == [7.0]


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


def test_a_process_that_shall_end_does_not_wait(server):
    class Ending:
        def wait(self, timeout):
            return True

    server.faults.append("503")
    with pytest.raises(RunError, match="stopped"):
        fetched(server, stop=Ending())


def test_retry_after_may_be_a_date_or_a_limit():
    assert request.asked_wait({"retry-after": "12"}) == 12
    assert (
        50
        < request.asked_wait({"retry-after": formatdate(60 + datetime.now(UTC).timestamp())})
        <= 60
    )
    assert request.asked_wait({"ratelimit": '"api";r=0;t=55'}) == 55
    assert request.asked_wait({"ratelimit": '"api";r=9;t=55'}) == 0
    assert request.asked_wait({}) == 0


def test_a_range_file_reads_like_a_file():
    asked = []

    def ask(start, end):
        asked.append((start, end))
        return CONTENT[start:end]

    file = remote.RangeFile(len(CONTENT), ask)
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

    file = remote.RangeFile(len(CONTENT), ask)
    file.hold([(10, 100), (300, 400)])
    for start, end in [(10, 100), (350, 360), (20, 130)]:
        file.seek(start)
        assert file.read(end - start) == CONTENT[start:end]
    assert asked == [(10, 100), (300, 400), (100, 130)]


def test_errors_pass_through_pyarrow_as_they_are(server):
    server.faults.extend(["404"] * 3)
    file = Ranges(remote.Remote(60, Patience()), None).open(hub_file(server))
    with pytest.raises(UserError, match="HTTP 404"):
        pq.ParquetFile(pa.PythonFile(file, "r"))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.txt", "a.txt.zst"])
def test_units_read_over_the_network_are_those_of_the_local_file(tmp_path, name, monkeypatch):
    rows = corpus.articles(400)
    if name.endswith("parquet"):
        corpus.write_parquet(tmp_path / name, rows, group=50)
    else:
        corpus.write_jsonl(tmp_path / name, rows)
    local = survey(corpus.config(tmp_path / name, lanes=1), 1).sources[0]
    content = (tmp_path / name).read_bytes()
    with hub.serving({name: content}) as server:
        monkeypatch.setattr(readers, "web_url", lambda address: server.url(address.split("/")[-1]))
        file = local.files[0]._replace(etag=hub.etag(content))
        away = replace(local, remote=True, root=f"hf://datasets/{hub.ID}@{hub.SHA}", files=(file,))
        here, there = Reader(Reading(60)), Reader(Reading(60), Patience())
        for unit in local.units:
            assert there.rows(away, unit).texts.equals(here.rows(local, unit).texts)
        footer = name.endswith("parquet")
        assert server.requests["range"] == len(local.units) + footer


READ_ALL = """
import json, sys
from llmtrain.config.schema import Config
from llmtrain.data.readers import Reader, Reading
from llmtrain.data.units import survey
data = {"sources": [json.loads(sys.argv[1])], "heldout": 0.0, "lanes": 2}
found = survey(Config.model_validate({"data": data, "training": {"steps": 1}}), 1)
reader, (source,) = Reader(Reading(60)), found.sources
rows = [reader.rows(source, unit) for unit in source.units]
texts = [part.text(row)[0] for part in rows for row in range(len(part))]
print(json.dumps({"revision": source.revision, "label": source.label, "texts": texts}))
"""


README = """---
configs:
- config_name: 2023.en
  data_files:
  - {split: train, path: 2023.en/train-*}
- config_name: 2023.vi
  data_files:
  - {split: train, path: 2023.vi/train-*}
---
"""


def read_all(endpoint, home, source):
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [sys.executable, "-c", READ_ALL, json.dumps(source)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_data_set_of_the_hub_gives_the_documents_of_the_local_files(tmp_path):
    rows = corpus.articles(50)
    corpus.write_parquet(tmp_path / "hub" / "2023.en" / "train-0.parquet", rows[:30], group=7)
    corpus.write_parquet(tmp_path / "hub" / "2023.en" / "train-1.parquet", rows[30:], group=7)
    corpus.write_parquet(tmp_path / "hub" / "2023.vi" / "train-0.parquet", corpus.articles(1))
    (tmp_path / "hub" / "README.md").write_text(README)
    with hub.serving(hub.read_files(tmp_path / "hub")) as server:
        server.listing_faults.extend(["503"])
        server.faults.extend(["503", "short", "", "429 0", "reset"])
        done = read_all(server.endpoint, tmp_path / "home", {"path": hub.ID, "name": "2023.en"})
        missing = read_all(server.endpoint, tmp_path / "home", {"path": hub.ID, "name": "2023.de"})
        no_split = {"path": hub.ID, "name": "2023.en", "split": "test"}
        other = read_all(server.endpoint, tmp_path / "home", no_split)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["texts"] == [row["text"] for row in rows]
    assert (found["revision"], found["label"]) == (hub.SHA, "encyclopedia/2023.en")
    assert "UserError" in missing.stderr
    assert "2023.en" in missing.stderr.splitlines()[-1]
    assert "expected: one of: train" in other.stderr


def test_a_data_set_that_does_not_exist_is_a_mistake_of_the_user(tmp_path):
    with hub.serving({}) as server:
        done = read_all(server.endpoint, tmp_path, {"path": "someone/elses"})
    assert "UserError" in done.stderr
    assert "data.sources.0.path = someone/elses" in done.stderr
