"""The splits of a directory, against `datasets`."""

import json
import logging

import datasets
import pytest
from helpers import corpus

from llmtrain.config.schema import SourceConfig
from llmtrain.data.sources.local import resolve
from llmtrain.errors import UserError

KEY = "data.sources.0.path"
README = """---
configs:
- config_name: words
  data_files:
  - split: train
    path: some/*.jsonl
  - split: held
    path: [other.jsonl]
- config_name: all
  data_files: "**/*.jsonl"
---
# About
"""


def write(root, *names):
    for n, name in enumerate(names):
        corpus.write_jsonl(root / name, [{"id": f"{n}", "text": f"of {name}"}])


def names(path, **more):
    return [file.name for file in resolve(SourceConfig(path=str(path), **more), KEY).files]


def problem(path, **more):
    with pytest.raises(UserError) as caught:
        names(path, **more)
    (found,) = caught.value.problems
    return found


@pytest.mark.parametrize(
    "files",
    [
        ("train.jsonl", "test.jsonl"),
        ("data/train-00000-of-00002.jsonl", "data/odd-00000-of-00001.jsonl"),
        ("a/train/1.jsonl", "a/train/2.jsonl", "a/dev/1.jsonl"),
        ("my_training_1.jsonl", "my-eval.jsonl", "validation 2.jsonl"),
        ("en.train.jsonl", "en.valid.jsonl", "en.testing.jsonl"),
    ],
)  # fmt: skip
def test_splits_are_those_of_datasets(tmp_path, monkeypatch, files):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    write(tmp_path / "ds", *files)
    theirs = datasets.load_dataset_builder(str(tmp_path / "ds")).config.data_files
    assert len(theirs) > 1
    for split, paths in theirs.items():
        relative = sorted(path.removeprefix(f"{tmp_path}/ds/") for path in paths)
        assert names(tmp_path / "ds", split=str(split)) == relative
    found = problem(tmp_path / "ds", split="nonsense")
    assert (found.key, found.value) == ("data.sources.0.split", "nonsense")
    assert found.expected == f"one of: {', '.join(map(str, theirs))}"


def test_a_directory_without_splits_is_read_whole_and_says_so(tmp_path, caplog):
    write(tmp_path, "b.jsonl", "trained.jsonl", "sub/latest.jsonl")
    every = ["b.jsonl", "sub/latest.jsonl", "trained.jsonl"]
    assert names(tmp_path) == every
    assert not caplog.records
    assert names(tmp_path, split="test") == every
    assert "has no splits: split test is not looked at" in caplog.text


def test_files_of_no_split_are_named(tmp_path, caplog):
    write(tmp_path, "train.jsonl", "extra.jsonl", "test.jsonl")
    with caplog.at_level(logging.WARNING):
        assert names(tmp_path) == ["train.jsonl"]
    assert "no split has these files: extra.jsonl" in caplog.text


def test_configs_of_a_readme_choose_files(tmp_path):
    write(tmp_path, "some/1.jsonl", "some/2.jsonl", "other.jsonl")
    (tmp_path / "README.md").write_text(README, "utf-8-sig")
    assert names(tmp_path, name="words") == ["some/1.jsonl", "some/2.jsonl"]
    assert names(tmp_path, name="words", split="held") == ["other.jsonl"]
    assert names(tmp_path, name="all") == ["other.jsonl", "some/1.jsonl", "some/2.jsonl"]
    for name in (None, "other"):
        found = problem(tmp_path, name=name)
        assert (found.key, found.value) == ("data.sources.0.name", name)
        assert found.expected == "one of: words, all"
    assert problem(tmp_path, name="words", split="dev").expected == "one of: train, held"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("data_files: https://example.org/a.jsonl", "files below"),
        ("data_files: ../a.jsonl", "files below"),
        ("data_files: /etc/a.jsonl", "files below"),
        ("data_files: missing.jsonl", "files that are there"),
        ("data_dir: ../elsewhere", "files below"),
        ("data_files: 5", "`configs` name the files"),
        ("data_files: [{split: a b, path: x}]", "`configs` name the files"),
    ],
)
def test_a_readme_that_names_other_files_is_refused(tmp_path, config, expected):
    write(tmp_path, "a.jsonl")
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  {config}\n---\n")
    assert expected in problem(tmp_path).expected


def test_a_name_without_configs_is_refused(tmp_path):
    write(tmp_path, "a.jsonl")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nconfigs: none\n")
    assert problem(tmp_path, name="20240101").key == "data.sources.0.name"


def test_what_save_to_disk_wrote_is_read_by_its_splits(tmp_path):
    made = datasets.Dataset.from_list(corpus.articles(30))
    made.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": made, "held": made.select(range(4))}).save_to_disk(
        tmp_path / "dict"
    )
    shards = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert names(tmp_path / "one") == shards
    assert names(tmp_path / "dict") == ["train/data-00000-of-00001.arrow"]
    assert names(tmp_path / "dict", split="held") == ["held/data-00000-of-00001.arrow"]
    assert problem(tmp_path / "dict", split="test").expected == "one of: train, held"
    state = tmp_path / "one" / "state.json"
    (tmp_path / "one" / "cache-0.arrow").write_bytes(b"left over by a map")
    assert names(tmp_path / "one") == shards
    for content in ("[]", "{", "{}", json.dumps({"_data_files": [{"filename": "../x.arrow"}]})):
        state.write_text(content)
        assert "one" in str(problem(tmp_path / "one"))


def test_a_saved_split_is_not_another_one(tmp_path, caplog):
    made = datasets.Dataset.from_list(corpus.articles(5))
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(tmp_path / "dict")
    assert names(tmp_path / "dict" / "test") == ["data-00000-of-00001.arrow"]
    assert names(tmp_path / "dict" / "test", split="test") == ["data-00000-of-00001.arrow"]
    assert "has no splits: split test is not looked at" in caplog.text
    one = datasets.Dataset.from_list(corpus.articles(5), split=datasets.Split.TRAIN)
    one.save_to_disk(tmp_path / "one")
    assert problem(tmp_path / "one", split="validation").expected == "one of: train"
    for path in (tmp_path / "dict", tmp_path / "one"):
        assert problem(path, name="words").key == "data.sources.0.name"
    write(tmp_path, "a.jsonl")
    assert names(tmp_path / "a.jsonl", split="test", name="words") == ["a.jsonl"]
    assert "has no splits and no configs: name: words and split: test" in caplog.text


def test_names_from_which_splits_cannot_be_told_are_refused(tmp_path):
    write(tmp_path, "data/train-clean-00000-of-00001.jsonl", "data/test-clean-00000-of-00001.jsonl")
    found = problem(tmp_path)
    assert "names of files from which the splits can be told" in found.expected
    assert "glob" in found.remedy


def test_a_path_with_brackets_has_splits_too(tmp_path):
    write(tmp_path / "a[1]", "train.jsonl", "test.jsonl")
    assert names(tmp_path / "a[1]", split="test") == ["test.jsonl"]
