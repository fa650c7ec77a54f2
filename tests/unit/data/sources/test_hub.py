import json
import os
import subprocess
import sys

import pytest
from helpers import corpus, hub

from llmtrain.config.schema import SourceConfig
from llmtrain.data.sources import fetch, hub as resolving
from llmtrain.data.sources.hub import resolve
from llmtrain.errors import RunError, UserError

KEY = "data.sources.3.path"
README = """---
configs:
- config_name: 2023.en
  data_files:
  - {split: train, path: 2023.en/train-*}
  - {split: test, path: 2023.en/test-*}
- config_name: 2023.vi
  data_files:
  - {split: train, path: 2023.vi/train-*}
---
"""


def parquet(path):
    return corpus.write_parquet(path, corpus.articles(5))


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """A data set of these files takes the place of the Hub."""
    with hub.serving({}) as server:
        hub.stand_in(monkeypatch, server, tmp_path / "home")
        monkeypatch.setattr(fetch, "pause", lambda seconds, stop: None)

        def serve(**files):
            for name, content in files.items():
                server.files[name.replace("__", "/").replace("_dot_", ".")] = content
            return server

        yield serve


@pytest.fixture
def encyclopedia(serve, tmp_path):
    data = parquet(tmp_path / "x.parquet").read_bytes()
    server = serve()
    for name in ["2023.en/train-1", "2023.en/train-0", "2023.en/test-0", "2023.vi/train-0"]:
        server.files[f"{name}.parquet"] = data + name.encode()
    server.files["README.md"] = README.encode()
    return server


def ask(path=hub.ID, keep=False, **more):
    return resolve(SourceConfig(path=path, **more), KEY, keep)


class Hurried:
    """In place of `time` where huggingface_hub waits between its own attempts."""

    def sleep(self, seconds):
        pass


def refused(**more):
    with pytest.raises(UserError) as raised:
        ask(**more)
    (problem,) = raised.value.problems
    return problem


def test_a_config_and_split_give_sorted_files_at_a_commit(encyclopedia):
    found = ask(name="2023.en")
    assert found.root == f"hf://datasets/{hub.ID}@{hub.SHA}"
    assert (found.remote, found.revision) == (True, hub.SHA)
    expected = ["2023.en/train-0.parquet", "2023.en/train-1.parquet"]
    assert [file.name for file in found.files] == expected
    contents = [encyclopedia.files[name] for name in expected]
    assert [file.size for file in found.files] == [len(content) for content in contents]
    assert [file.etag for file in found.files] == [hub.etag(content) for content in contents]
    assert [file.name for file in ask(name="2023.en", split="test").files] == [
        "2023.en/test-0.parquet"
    ]


def test_large_files_are_named_by_their_sha256(encyclopedia):
    name = "2023.vi/train-0.parquet"
    encyclopedia.lfs.add(name)
    assert ask(name="2023.vi").files[0].etag == hub.etag256(encyclopedia.files[name])


def test_a_listing_in_pages_is_read_to_its_end(serve):
    server = serve()
    server.page = 3
    server.files.update({f"data/train-{n:02}.txt": b"one\n%d\n" % n for n in range(10)})
    assert len(ask().files) == 10


@pytest.mark.parametrize("fault", ["503", "500", "429 0", "reset", "504"])
def test_a_listing_that_fails_for_a_while_is_asked_for_again(encyclopedia, monkeypatch, fault):
    encyclopedia.listing_faults.extend([fault])
    assert len(ask(name="2023.en").files) == 2


@pytest.mark.parametrize("position", range(8))
def test_no_fault_of_the_listing_looks_like_a_mistake(encyclopedia, monkeypatch, position):
    from huggingface_hub.utils import _http

    monkeypatch.setattr(_http, "time", Hurried())
    encyclopedia.listing_faults.extend([""] * position + ["reset", "503"])
    assert len(ask(name="2023.en").files) == 2


def test_a_hub_that_stays_away_is_a_failure_that_a_restart_cures(encyclopedia, monkeypatch):
    def gone(source, key):
        raise OSError("no route to host")

    monkeypatch.setattr(resolving, "_file_urls", gone)
    monkeypatch.setattr(resolving, "ASK_SECONDS", 0.0)
    with pytest.raises(RunError, match="no route to host") as raised:
        ask(name="2023.en")
    assert raised.value.exit_code == 75


def test_a_listing_that_hangs_is_left_alone(encyclopedia, monkeypatch):
    import time

    calls = []

    def first_hangs(source, key):
        calls.append(key)
        if len(calls) == 1:
            time.sleep(1)  # longer than anybody waits for it
        return []

    monkeypatch.setattr(fetch, "ATTEMPT_SECONDS", 0.1)
    found = resolving._retry(lambda: first_hangs(None, KEY), "the listing", None)
    assert (found, len(calls)) == ([], 2)


@pytest.mark.parametrize(
    ("asked", "key", "there"),
    [
        ({"name": "2023.vii"}, "name", "one of: 2023.vi, 2023.en"),
        ({"name": "2023.en", "split": "tests"}, "split", "one of: test, train"),
    ],
)
def test_what_does_not_exist_is_told_what_there_is_nearest_first(encyclopedia, asked, key, there):
    problem = refused(**asked)
    assert (problem.key, problem.value) == (f"data.sources.3.{key}", asked[key])
    assert problem.expected == there


def test_a_config_that_must_be_chosen_is_asked_for(encyclopedia):
    problem = refused()
    assert problem.key == "data.sources.3.name"
    assert "2023.en" in problem.expected


def test_a_short_commit_is_asked_for_in_full(encyclopedia):
    problem = refused(name="2023.en", revision=hub.SHA[:7])
    assert (problem.key, problem.value) == ("data.sources.3.revision", hub.SHA[:7])
    assert "all 40 digits" in problem.expected


def test_a_revision_that_does_not_exist_is_named(encyclopedia):
    problem = refused(name="2023.en", revision="v9")
    assert (problem.key, problem.value) == ("data.sources.3.revision", "v9")
    assert f"/datasets/{hub.ID}/commits" in problem.remedy


@pytest.mark.parametrize("status", ["401", "403"])
def test_a_gated_data_set_is_told_with_a_link_to_its_page(encyclopedia, status):
    encyclopedia.listing_faults.extend([f"{status} code GatedRepo"] * 9)
    problem = refused(name="2023.en")
    assert "gated" in problem.expected
    assert f"{encyclopedia.endpoint}/datasets/{hub.ID}" in problem.remedy
    assert "HF_TOKEN" in problem.remedy


def test_a_private_or_missing_data_set_needs_a_token_or_another_name(serve):
    serve()
    problem = refused(path="someone/elses")
    assert problem.key == KEY
    assert "does not exist, or it is private and needs HF_TOKEN" in problem.remedy


def test_a_refusal_of_the_listing_is_said_at_once(encyclopedia):
    encyclopedia.listing_faults.extend(["403"] * 3)
    with pytest.raises(UserError, match="403"):
        ask(name="2023.en")


def test_scripts_are_refused_with_what_may_help(serve):
    serve(encyclopedia_dot_py=b"import datasets", train_dot_txt=b"x")
    problem = refused()
    assert "scripts are no longer supported" in problem.value
    assert "refs/convert/parquet" in problem.remedy


def test_other_builders_are_refused_by_name(serve):
    serve(data__train_dot_arrow=b"no matter what")
    problem = refused()
    assert problem.value == f"{hub.ID} (arrow)"
    assert "parquet, JSON, CSV or text" in problem.expected
    assert "llmtrain data repack" in problem.remedy


def test_options_of_a_builder_that_are_not_kept_are_refused(serve):
    readme = (
        b"---\nconfigs:\n- config_name: a\n  field: rows\n  data_files: train.json\n"
        b"- config_name: b\n  sample_by: paragraph\n  data_files: train.txt\n---\n"
    )
    serve(README_dot_md=readme, train_dot_json=b'{"rows": []}', train_dot_txt=b"x")
    assert "field: rows" in refused(name="a").value


def test_tables_of_csv_are_files_of_the_hub_and_other_separators_are_refused(serve):
    readme = b"---\nconfigs:\n- config_name: a\n  sep: ';'\n  data_files: data/train.csv\n---\n"
    server = serve(data__train_dot_csv=b"text\none\n")
    assert [file.name for file in ask().files] == ["data/train.csv"]
    server.files["README.md"] = readme
    assert "sep: ';'" in refused(name="a").value


def test_a_data_set_without_data_says_so(serve):
    serve(README_dot_md=b"nothing yet")
    problem = refused()
    assert problem.key == KEY
    assert "parquet, JSON, CSV or text" in problem.expected


def test_files_of_other_types_beside_those_that_are_read_are_listed(serve, tmp_path, caplog):
    data = parquet(tmp_path / "x.parquet").read_bytes()
    lines = b'{"text": "one"}\n'
    server = serve(LICENSE_dot_txt=b"free", README_dot_md=b"# about")
    server.files |= {"data/train-0.parquet": data, "data/train-1.jsonl": lines}
    assert [file.name for file in ask().files] == ["data/train-0.parquet"]
    ours = [one for one in caplog.records if one.name.endswith("sources.hub")]
    (line,) = [one.getMessage() for one in ours]
    assert line.endswith("files of other types are not read: data/train-1.jsonl")


def test_a_start_offline_uses_the_answer_that_was_kept(encyclopedia, monkeypatch):
    from huggingface_hub import constants

    found = ask(name="2023.en", keep=True)
    asked = encyclopedia.requests.total()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert ask(name="2023.en", keep=True) == found
    assert encyclopedia.requests.total() == asked
    assert "HF_HUB_OFFLINE" in refused(name="2023.vi", keep=True).expected
    assert "HF_HUB_OFFLINE" in refused(name="2023.en").expected


def test_the_kept_answer_is_plain_json(encyclopedia, tmp_path):
    ask(name="2023.vi", keep=True)
    (path,) = (tmp_path / "home" / "llmtrain" / "sources").iterdir()
    kept = json.loads(path.read_text())
    assert kept["revision"] == hub.SHA
    assert [name for name, _, _ in kept["files"]] == ["2023.vi/train-0.parquet"]


def test_a_path_of_this_machine_is_never_asked_for(serve, tmp_path):
    server = serve()
    path = parquet(tmp_path / "a.parquet")
    assert not resolve(SourceConfig(path=str(path)), KEY).remote
    assert not server.requests


READ_ALL = """
import json, sys
from llmtrain.config.binding import data_settings
from llmtrain.config.schema import Config
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.survey import survey
data = {"sources": [json.loads(sys.argv[1])], "heldout": 0.0, "lanes": 2}
found = survey(data_settings(Config.model_validate({"data": data, "training": {"steps": 1}})), 1)
reader, (source,) = Reader(Reading(60)), found.sources
rows = [reader.rows(source, unit) for unit in source.units]
texts = [part.text(row)[0] for part in rows for row in range(len(part))]
print(json.dumps({"revision": source.revision, "label": source.label, "texts": texts}))
"""


@pytest.mark.launches
def test_a_fresh_process_asks_the_endpoint_of_its_environment(tmp_path):
    rows = corpus.articles(50)
    corpus.write_parquet(tmp_path / "hub" / "2023.en" / "train-0.parquet", rows[:30], group=7)
    corpus.write_parquet(tmp_path / "hub" / "2023.en" / "train-1.parquet", rows[30:], group=7)
    corpus.write_parquet(tmp_path / "hub" / "2023.vi" / "train-0.parquet", corpus.articles(1))
    (tmp_path / "hub" / "README.md").write_text(README.replace("- {split: test", "# {split: test"))
    with hub.serving(hub.read_files(tmp_path / "hub")) as server:
        server.faults.extend(["503", "short", "", "429 0", "reset"])
        environment = os.environ | {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path)}
        environment |= {"HF_TOKEN": "hf_secret"}
        source = json.dumps({"path": hub.ID, "name": "2023.en"})
        done = subprocess.run(
            [sys.executable, "-c", READ_ALL, source],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["texts"] == [row["text"] for row in rows]
    assert (found["revision"], found["label"]) == (hub.SHA, "encyclopedia/2023.en")
    assert set(server.tokens) == {"Bearer hf_secret"}
    assert "hf_secret" not in done.stderr
