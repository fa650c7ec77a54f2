import json
import logging
import os

import datasets
import pytest
from helpers import corpus

from llmtrain.config.schema import SourceConfig
from llmtrain.data.sources.local import edges_digest, file_format, labels, resolve
from llmtrain.errors import UserError

KEY = "data.sources.0.path"


def found(path, **more):
    return resolve(SourceConfig(path=str(path), **more), KEY)


def names(resolved):
    return [file.name for file in resolved.files]


@pytest.fixture
def tree(tmp_path):
    rows = corpus.articles(3)
    for name in ("b/2.parquet", "b/1.parquet", "a.parquet"):
        corpus.write_parquet(tmp_path / "data" / name, rows)
    corpus.write_jsonl(tmp_path / "data" / "c.jsonl.gz", rows)
    (tmp_path / "data" / "README.md").write_text("about")
    (tmp_path / "data" / ".hidden").write_text("x")
    (tmp_path / "data" / "_SUCCESS").write_text("x")
    return tmp_path / "data"


def test_a_directory_gives_its_data_files_in_order_of_path_bytes(tree):
    resolved = found(tree)
    assert names(resolved) == ["a.parquet", "b/1.parquet", "b/2.parquet", "c.jsonl.gz"]
    assert (resolved.root, resolved.remote, resolved.revision) == (str(tree), False, None)
    assert resolved.files[0].size == (tree / "a.parquet").stat().st_size


def test_a_file_is_named_relative_to_its_directory(tree):
    assert names(found(tree / "b" / "1.parquet")) == ["1.parquet"]


def test_a_glob_names_files_relative_to_its_fixed_part(tree):
    assert names(found(tree / "*" / "*.parquet")) == ["b/1.parquet", "b/2.parquet"]
    assert names(found(tree / "**" / "*.parquet")) == ["a.parquet", "b/1.parquet", "b/2.parquet"]


def test_a_relative_path_is_the_same_source(tree, monkeypatch):
    monkeypatch.chdir(tree.parent)
    assert found("data") == found(tree)
    assert found("data/b/*.parquet") == found(tree / "b" / "*.parquet")


def test_a_file_with_wildcards_in_its_name_is_a_file(tmp_path):
    corpus.write_jsonl(tmp_path / "part[1].jsonl", [{"text": "x"}])
    assert names(found(tmp_path / "part[1].jsonl")) == ["part[1].jsonl"]


def test_the_sample_lies_in_the_package():
    assert found("sample").root.endswith("sample")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("nowhere/at/all.parquet", "holds data/"),
        ("./nowhere", "holds data/"),
        ("data/misspelt", "README.md, _SUCCESS, a.parquet, b/"),
        ("data/*.txt", "README.md, _SUCCESS, a.parquet, b/"),
        ("data/x*/y.txt", "README.md, _SUCCESS, a.parquet, b/"),
        ("not an id!", "a data set id of the Hub"),
    ],
)
def test_a_path_where_nothing_is_says_what_is_there(tree, monkeypatch, path, told):
    monkeypatch.chdir(tree.parent)
    with pytest.raises(UserError) as raised:
        found(path)
    assert f"{KEY} = {path}" in str(raised.value)
    assert told in str(raised.value)


def test_an_empty_directory_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="it holds nothing"):
        found(tmp_path / "empty")


def test_files_of_unknown_suffix_are_refused_all_at_once(tree):
    for n in range(10):
        (tree / f"table{n}.xlsx").write_text("a,b")
    with pytest.raises(UserError) as raised:
        found(tree)
    assert len(raised.value.problems) == 9
    assert "table7.xlsx" in str(raised.value)
    assert "2 more files" in str(raised.value)


def test_a_link_to_nothing_is_refused(tree, monkeypatch):
    (tree / "b" / "3.parquet").symlink_to("gone.parquet")
    monkeypatch.chdir(tree)
    for path in (tree, tree / "b" / "*.parquet", tree / "b" / "3.parquet", "b/3.parquet"):
        with pytest.raises(UserError, match=r"b/3\.parquet\n.* a link to gone\.parquet") as raised:
            found(path)
        assert len(raised.value.problems) == 1


def test_links_to_files_and_hidden_links_to_nothing_are_no_harm(tree):
    (tree / "d.parquet").symlink_to("a.parquet")
    (tree / ".#lock").symlink_to("user@machine")
    assert names(found(tree))[-1] == "d.parquet"


def test_what_is_no_file_is_refused(tree):
    os.mkfifo(tree / "e.jsonl")
    (tree / "f.jsonl").symlink_to("e.jsonl")
    with pytest.raises(UserError) as raised:
        found(tree)
    assert len(raised.value.problems) == 2
    for name in ("e.jsonl", "f.jsonl"):
        with pytest.raises(UserError, match=rf"{name}\n.* it is a FIFO"):
            found(tree / name)


@pytest.mark.parametrize("name", [b"\xff\xfe.jsonl", b"\xff\xfe/a.jsonl"])
def test_a_name_that_is_not_utf_8_is_refused(tree, name):
    corpus.write_jsonl(tree / os.fsdecode(name), [{"text": "x"}])
    with pytest.raises(UserError) as raised:
        found(tree)
    message = str(raised.value).encode().decode()  # it can be written anywhere
    assert rf"{tree}/\xff\xfe" in message
    assert "rename the file" in message
    with pytest.raises(UserError) as raised:
        found(tree / "*.txt")
    assert str(raised.value).encode()


def test_a_suffix_chooses_format_and_compression():
    assert file_format("a.parquet") == ("parquet", None)
    assert file_format("a.b.jsonl.zst") == ("jsonl", "zstd")
    assert file_format("A.JSON.GZ") == ("jsonl", "gzip")
    assert file_format("a.txt") == ("text", None)
    assert file_format("a.tsv.gz") == ("csv", "gzip")
    for name in ("a.parquet.gz", "a.arrow.gz", "a.xlsx", "a.gz", "a", "parquet"):
        assert file_format(name) is None


def test_labels_are_the_last_part_of_the_path_with_name_and_number():
    paths = ["wikimedia/wikipedia", "x/texts/", "y/texts", "texts-2", "z/texts"]
    sources = [SourceConfig(path=path) for path in paths]
    sources[0] = SourceConfig(path=paths[0], name="20231101.en")
    expected = ("wikipedia/20231101.en", "texts", "texts-2", "texts-2-2", "texts-3")
    assert labels(sources) == expected


def test_the_digest_of_a_files_ends_sees_a_change_in_either(tmp_path):
    path = tmp_path / "big"
    data = bytearray(300_000)
    digests = set()
    for position in (None, 0, 65_535, 299_999, 300_000 - 65_536):
        changed = bytearray(data)
        if position is not None:
            changed[position] = 1
        path.write_bytes(changed)
        digests.add(edges_digest(path))
    assert len(digests) == 5


def test_a_link_to_a_directory_is_refused_and_not_passed_over(tree, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (tree / "b" / "more").symlink_to(elsewhere, target_is_directory=True)
    with pytest.raises(UserError, match=r"b/more\n.*links to directories are not followed"):
        resolve(SourceConfig(path=str(tree)), "data.sources.0.path")


def test_names_in_a_listing_are_written_as_escapes(tmp_path):
    (tmp_path / "a\x1b[31m\nb.xlsx").write_text("x")
    with pytest.raises(UserError) as caught:
        resolve(SourceConfig(path=f"{tmp_path}/*.jsonl"), "data.sources.0.path")
    assert r"a\x1b[31m\nb.xlsx" in str(caught.value)
    with pytest.raises(UserError) as caught:
        resolve(SourceConfig(path=str(tmp_path)), "data.sources.0.path")
    assert r"a\x1b[31m\nb.xlsx" in str(caught.value)


# The splits of a directory, against `datasets`.
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


def split_names(path, **more):
    return [file.name for file in resolve(SourceConfig(path=str(path), **more), KEY).files]


def problem(path, **more):
    with pytest.raises(UserError) as caught:
        split_names(path, **more)
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
        assert split_names(tmp_path / "ds", split=str(split)) == relative
    found = problem(tmp_path / "ds", split="nonsense")
    assert (found.key, found.value) == ("data.sources.0.split", "nonsense")
    assert found.expected == f"one of: {', '.join(map(str, theirs))}"


def test_a_directory_without_splits_is_read_whole_and_says_so(tmp_path, caplog):
    write(tmp_path, "b.jsonl", "trained.jsonl", "sub/latest.jsonl")
    every = ["b.jsonl", "sub/latest.jsonl", "trained.jsonl"]
    assert split_names(tmp_path) == every
    assert not caplog.records
    assert split_names(tmp_path, split="test") == every
    assert "has no splits: split test is not looked at" in caplog.text


def test_files_of_no_split_are_named(tmp_path, caplog):
    write(tmp_path, "train.jsonl", "extra.jsonl", "test.jsonl")
    with caplog.at_level(logging.WARNING):
        assert split_names(tmp_path) == ["train.jsonl"]
    assert "no split has these files: extra.jsonl" in caplog.text


def test_configs_of_a_readme_choose_files(tmp_path):
    write(tmp_path, "some/1.jsonl", "some/2.jsonl", "other.jsonl")
    (tmp_path / "README.md").write_text(README, "utf-8-sig")
    assert split_names(tmp_path, name="words") == ["some/1.jsonl", "some/2.jsonl"]
    assert split_names(tmp_path, name="words", split="held") == ["other.jsonl"]
    assert split_names(tmp_path, name="all") == ["other.jsonl", "some/1.jsonl", "some/2.jsonl"]
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
    assert split_names(tmp_path / "one") == shards
    assert split_names(tmp_path / "dict") == ["train/data-00000-of-00001.arrow"]
    assert split_names(tmp_path / "dict", split="held") == ["held/data-00000-of-00001.arrow"]
    assert problem(tmp_path / "dict", split="test").expected == "one of: train, held"
    state = tmp_path / "one" / "state.json"
    (tmp_path / "one" / "cache-0.arrow").write_bytes(b"left over by a map")
    assert split_names(tmp_path / "one") == shards
    for content in ("[]", "{", "{}", json.dumps({"_data_files": [{"filename": "../x.arrow"}]})):
        state.write_text(content)
        assert "one" in str(problem(tmp_path / "one"))


def test_a_saved_split_is_not_another_one(tmp_path, caplog):
    made = datasets.Dataset.from_list(corpus.articles(5))
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(tmp_path / "dict")
    assert split_names(tmp_path / "dict" / "test") == ["data-00000-of-00001.arrow"]
    assert split_names(tmp_path / "dict" / "test", split="test") == ["data-00000-of-00001.arrow"]
    assert "has no splits: split test is not looked at" in caplog.text
    one = datasets.Dataset.from_list(corpus.articles(5), split=datasets.Split.TRAIN)
    one.save_to_disk(tmp_path / "one")
    assert problem(tmp_path / "one", split="validation").expected == "one of: train"
    for path in (tmp_path / "dict", tmp_path / "one"):
        assert problem(path, name="words").key == "data.sources.0.name"
    write(tmp_path, "a.jsonl")
    assert split_names(tmp_path / "a.jsonl", split="test", name="words") == ["a.jsonl"]
    assert "has no splits and no configs: name: words and split: test" in caplog.text


def test_names_from_which_splits_cannot_be_told_are_refused(tmp_path):
    write(tmp_path, "data/train-clean-00000-of-00001.jsonl", "data/test-clean-00000-of-00001.jsonl")
    found = problem(tmp_path)
    assert "names of files from which the splits can be told" in found.expected
    assert "glob" in found.remedy


def test_a_path_with_brackets_has_splits_too(tmp_path):
    write(tmp_path / "a[1]", "train.jsonl", "test.jsonl")
    assert split_names(tmp_path / "a[1]", split="test") == ["test.jsonl"]
