import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers import chats, corpus, megatron
from helpers.config import SMALLEST
from helpers.ranks import until

from llmtrain.config.load import load_config
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import UserError
from llmtrain.tools.data.tokenize import WORK, file_names, tokenize
from llmtrain.training.start.prepare import prepare


def quiet(done, of, tokens):
    pass


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two sources of several units, one with documents that are none, and a config."""
    root = tmp_path_factory.mktemp("tokenize")
    corpus.write_parquet(root / "a" / "1.parquet", corpus.articles(43))
    corpus.write_parquet(root / "a" / "2.parquet", corpus.articles(7, 43), group=3)
    rows = corpus.articles(31, 500)
    rows[3]["text"] = " \n"
    rows[4]["text"] = None
    corpus.write_jsonl(root / "b.jsonl", rows)
    write_config(root / "config.yaml", root / "a", root / "b.jsonl")
    return root


def write_config(path, *sources, **changes):
    values = yaml.safe_load(SMALLEST)
    values["data"]["sources"] = [{"path": str(source)} for source in sources]
    for key, value in changes.items():
        section, name = key.split("__")
        values.setdefault(section, {})[name] = value
    path.write_text(yaml.safe_dump(values), "utf-8")
    return path


def call(server, folder, function, *arguments):
    return server.run(["call", "helpers.killing", function, *arguments], 1, folder)


@pytest.fixture(scope="module")
def straight(place):
    """What one uninterrupted command writes: name → bytes."""
    out = place / "straight"
    tokenize(load_config(place / "config.yaml"), out, 1, quiet)
    return contents(out)


def contents(out):
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def test_the_files_hold_the_documents_in_file_order_as_the_description_says(place, straight):
    tokenizer = open_tokenizer(place / "straight" / "tokenizer")
    code, documents = megatron.read(place / "straight" / "a.idx")
    texts = [row["text"] for row in corpus.articles(50)]
    assert code == 8
    assert [tokenizer.decode(ids) for ids in documents] == [f"{t}<|endoftext|>" for t in texts]
    assert all(ids[-1] == tokenizer.eos for ids in documents)
    assert [ids[:-1] for ids in documents] == [tokenizer.encode(text).tolist() for text in texts]


def test_the_description_says_what_was_written_and_with_what(place, straight):
    said = json.loads(straight["b.jsonl.json"])
    _, documents = megatron.read(place / "straight" / "b.jsonl.idx")
    tokenizer = open_tokenizer(place / "straight" / "tokenizer")
    assert said["documents"] == len(documents) == 29
    assert said["tokens"] == sum(map(len, documents))
    assert (said["dropped"], said["replaced"]) == (2, 0)
    assert said["tokenizer"] == tokenizer.digest
    assert said["probe"] == tokenizer.probe
    assert said["eos"] == tokenizer.eos
    assert said["source"] == "b.jsonl"


def test_megatrons_own_reader_reads_the_same(place, straight):
    indexed = pytest.importorskip(
        "megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed"
    )
    for name in ("a", "b.jsonl"):
        theirs = indexed.IndexedDataset(str(place / "straight" / name))
        _, ours = megatron.read(place / "straight" / f"{name}.idx")
        assert [theirs[i].tolist() for i in range(len(theirs))] == ours
        assert theirs.document_indices.tolist() == list(range(len(ours) + 1))


def test_nothing_but_the_result_is_left(place, straight):
    names = {"a.bin", "a.idx", "a.json", "b.jsonl.bin", "b.jsonl.idx", "b.jsonl.json"}
    assert straight.keys() == names
    work = {path.name for path in (place / "straight" / WORK).iterdir()}
    assert work == {"config.yaml", "manifest.json", "tokenizer", "lock"}


@pytest.mark.launches
def test_several_processes_write_the_same_bytes(place, straight, tmp_path):
    seen = []
    config = load_config(place / "config.yaml")
    done = tokenize(config, tmp_path / "out", 3, lambda *counts: seen.append(counts))
    assert contents(tmp_path / "out") == straight
    assert done.files == ("a.idx", "b.jsonl.idx")
    assert (done.documents, done.dropped) == (79, 2)
    units = seen[-1][1]
    assert [first for first, _, _ in seen] == list(range(units + 1))
    assert seen[-1] == (units, units, done.tokens)


def test_a_finished_cache_is_left_alone(place, straight, tmp_path):
    shutil.copytree(place / "straight", tmp_path / "out")
    files = [path for path in (tmp_path / "out").iterdir() if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in files}
    done = tokenize(load_config(place / "config.yaml"), tmp_path / "out", 1, quiet)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert done.documents == 79


@pytest.mark.launches
@pytest.mark.deeper
def test_killed_at_any_point_the_same_command_ends_with_the_same_bytes(
    place, straight, tmp_path, server, request
):
    deeper = "deeper" in request.config.getoption("markexpr")
    arguments = ["data", "tokenize", str(place / "config.yaml"), "--jobs", "1", "--out"]
    point, kills = 0, 0
    while True:
        out = tmp_path / str(point)
        code = call(server, tmp_path, "killed", str(point), *arguments, str(out))
        if code != [-signal.SIGKILL]:
            break
        kills += 1
        assert call(server, tmp_path, "command", *arguments, str(out)) == [0]
        assert contents(out) == straight
        early, late = (1, 7) if deeper else (2, 11)
        point += early if point < 8 else late
    assert code == [0]
    assert kills >= (12 if deeper else 7)


def test_whole_files_are_documents_where_that_is_asked(tmp_path):
    (tmp_path / "notes").mkdir()
    for n in range(3):
        (tmp_path / "notes" / f"{n}.md").write_text(f"# {n}\n\nTwo\nlines.\n")
    path = write_config(tmp_path / "config.yaml", tmp_path / "notes")
    config = load_config(path, ["data.sources.0.document=file"])
    assert tokenize(config, tmp_path / "out", 1, quiet).documents == 3


@pytest.mark.launches
def test_a_killed_command_leaves_no_process_and_goes_on(tmp_path):
    for n in range(12):
        rows = [{"text": row["text"] * 20} for row in corpus.articles(60, 60 * n)]
        corpus.write_parquet(tmp_path / "data" / f"{n:02}.parquet", rows, group=15)
    config, out = write_config(tmp_path / "config.yaml", tmp_path / "data"), tmp_path / "out"
    command = [sys.executable, "-m", "llmtrain", "data", "tokenize", str(config), "--jobs", "2"]
    first = subprocess.Popen(
        [*command, "--out", str(out)], stderr=subprocess.DEVNULL, start_new_session=True
    )
    until(lambda: any(out.glob(f"{WORK}/parts/*/part-*")), "a part")
    first.kill()
    first.wait()
    assert not list(out.glob("*.idx"))
    until(lambda: not processes_of(first.pid), "its processes end")
    subprocess.run([*command, "--out", str(out)], check=True, capture_output=True)
    tokenize(load_config(config), tmp_path / "straight", 1, quiet)
    assert contents(out) == contents(tmp_path / "straight")


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
@pytest.mark.launches
def test_an_interrupt_of_all_processes_is_one_line_and_code_75(tmp_path, number):
    for n in range(8):
        rows = [{"text": row["text"] * 20} for row in corpus.articles(60, 60 * n)]
        corpus.write_parquet(tmp_path / "data" / f"{n:02}.parquet", rows, group=15)
    config, out = write_config(tmp_path / "config.yaml", tmp_path / "data"), tmp_path / "out"
    command = [sys.executable, "-m", "llmtrain", "data", "tokenize", str(config), "--jobs", "2"]
    first = subprocess.Popen(
        [*command, "--out", str(out)], stderr=subprocess.PIPE, start_new_session=True, text=True
    )
    # Processes that begin: a traceback would be theirs, from the midst of an import.
    until(lambda: len(processes_of(first.pid)) >= 3, "processes")
    os.killpg(first.pid, number)
    _, said = first.communicate()
    assert first.returncode == 75, said
    assert said.splitlines()[-1] == "interrupted; the same command continues"
    assert all(line.startswith("tokenized 0 of") for line in said.splitlines()[:-1])
    until(lambda: not processes_of(first.pid), "its processes end")
    subprocess.run([*command, "--out", str(out)], check=True, capture_output=True)


def processes_of(session):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        found += [stat.parent.name] * (int(its) == session and state != "Z")
    return found


def full_while_joining(place, straight, server, folder):
    """Arguments of a command that wrote all parts, and for whose joined file there was no room."""
    config, out = str(place / "config.yaml"), folder / "out"
    arguments = ["data", "tokenize", config, "--out", str(out), "--jobs", "1"]
    assert call(server, folder, "killed", "16", *arguments) == [-signal.SIGKILL]
    assert any(out.glob(f"{WORK}/parts/0/part-*"))  # the tokenizer, a larger file, is there
    (folder / "output.txt").unlink()
    largest = str(len(straight["a.bin"]) - 1)
    assert call(server, folder, "on_a_full_disk", largest, *arguments) == [74]
    return arguments


@pytest.mark.launches
def test_a_full_disk_is_one_message_and_room_is_all_it_takes(place, straight, tmp_path, server):
    arguments = full_while_joining(place, straight, server, tmp_path)
    said = (tmp_path / "output.txt").read_text()
    assert re.search(r"error: cannot write \S+a\.bin\S*: File too large\n    next:     make ", said)
    assert said.count("error:") == 1
    assert "Traceback" not in said
    assert not list((tmp_path / "out").glob("*.idx"))
    assert call(server, tmp_path, "command", *arguments) == [0]
    assert contents(tmp_path / "out") == straight


@pytest.mark.launches
def test_a_damaged_part_is_found_and_written_anew(place, straight, tmp_path, server):
    arguments = full_while_joining(place, straight, server, tmp_path)
    part = sorted(tmp_path.glob(f"out/{WORK}/parts/0/part-*"))[2]
    data = bytearray(part.read_bytes())
    data[5] ^= 1
    part.write_bytes(data)
    assert call(server, tmp_path, "command", *arguments) == [75]
    assert "is not what was written" in (tmp_path / "output.txt").read_text()
    assert not part.exists()
    assert call(server, tmp_path, "command", *arguments) == [0]
    assert contents(tmp_path / "out") == straight


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model__tokenizer": {"train": 300}}, "model.tokenizer"),
        ({"data__sources": [{"path": "A"}, {"path": "B", "text_column": "title"}]}, "text_column"),
        ({"data__sources": [{"path": "A"}]}, "data.sources"),
    ],
)
def test_another_config_in_the_same_directory_is_refused(place, straight, tmp_path, change, key):
    shutil.copytree(place / "straight", tmp_path / "out")
    text = yaml.safe_dump(change)
    for name, path in (("A", place / "a"), ("B", place / "b.jsonl")):
        text = re.sub(rf"path: {name}\b", f"path: {path}", text)
    changed = yaml.safe_load(text)
    config = write_config(tmp_path / "c.yaml", place / "a", place / "b.jsonl", **changed)
    with pytest.raises(UserError) as refused:
        tokenize(load_config(config), tmp_path / "out", 1, quiet)
    assert any(key in problem.key for problem in refused.value.problems)
    assert contents(tmp_path / "out") == straight


def test_keys_that_change_no_token_may_change(place, straight, tmp_path):
    shutil.copytree(place / "straight", tmp_path / "out")
    changes = {
        "data__seq_len": 7,
        "run__seed": 3,
        "data__heldout": 0.5,
        "optimizer__learning_rate": 1e-5,
    }
    config = write_config(tmp_path / "c.yaml", place / "a", place / "b.jsonl", **changes)
    assert tokenize(load_config(config), tmp_path / "out", 1, quiet).documents == 79


def test_changed_data_is_refused(place, straight, tmp_path):
    shutil.copytree(place / "straight", tmp_path / "out")
    shutil.copytree(place / "a", tmp_path / "a")
    config = write_config(tmp_path / "c.yaml", tmp_path / "a", place / "b.jsonl")
    assert tokenize(load_config(config), tmp_path / "out", 1, quiet).documents == 79
    corpus.write_parquet(tmp_path / "a" / "1.parquet", corpus.articles(44))
    with pytest.raises(UserError, match=r"1\.parquet") as refused:
        tokenize(load_config(config), tmp_path / "out", 1, quiet)
    assert "another --out" in str(refused.value)


def test_a_directory_with_other_things_is_refused(place, tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="a new or empty directory"):
        tokenize(load_config(place / "config.yaml"), tmp_path, 1, quiet)
    with pytest.raises(UserError, match="there is a file of that name"):
        tokenize(load_config(place / "config.yaml"), tmp_path / "thesis.tex", 1, quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("template", [None, "chatml"])
def test_conversations_are_refused_and_nothing_is_written(tmp_path, template):
    talks = corpus.write_jsonl(tmp_path / "chat.jsonl", chats.rows_of(9))
    texts = corpus.write_jsonl(tmp_path / "text.jsonl", corpus.articles(20))
    config = write_config(tmp_path / "c.yaml", texts, talks, chat__template=template)
    with pytest.raises(UserError, match="cannot say which tokens of a turn") as refused:
        tokenize(load_config(config), tmp_path / "out", 1, quiet)
    (problem,) = refused.value.problems
    assert (problem.key, problem.value) == ("data.sources", str(talks))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [WORK]


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_answers_are_refused_and_nothing_is_written(tmp_path, loss):
    row = {"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."}
    if loss == "kto":
        row = {"prompt": "Hi?", "completion": "Yes.", "label": True}
    path = corpus.write_jsonl(tmp_path / "rows.jsonl", [row] * 9)
    config = write_config(tmp_path / "c.yaml", path, preference__loss=loss)
    with pytest.raises(UserError) as refused:
        tokenize(load_config(config), tmp_path / "out", 1, quiet)
    (problem,) = refused.value.problems
    assert (problem.key, problem.value) == ("data.sources", str(path))
    assert problem.expected == (
        "documents of text: a token cache cannot say which answer is the better one"
    )
    assert [one.name for one in (tmp_path / "out").iterdir()] == [WORK]


def test_a_run_that_reserves_the_tokens_of_a_template_takes_the_cache(tmp_path):
    texts = corpus.write_jsonl(tmp_path / "text.jsonl", corpus.articles(20))
    config = write_config(tmp_path / "c.yaml", texts, chat__template="chatml")
    tokenize(load_config(config), tmp_path / "out", 1, quiet)
    (tmp_path / "run").mkdir()
    model = {"model__tokenizer": str(tmp_path / "out" / "tokenizer"), "chat__template": "chatml"}
    run = write_config(tmp_path / "run.yaml", tmp_path / "out" / "text.jsonl.idx", **model)
    prepare(load_config(run), tmp_path / "run", 1)
    tokenizer = open_tokenizer(tmp_path / "run" / "tokenizer")
    assert tokenizer.length == open_tokenizer(chats.SAMPLE).length + 2


def test_two_commands_at_once_in_a_directory_are_refused(place, tmp_path):
    from llmtrain.rundir.lock import RunLock

    (tmp_path / WORK).mkdir()
    with RunLock(tmp_path / WORK, "other"), pytest.raises(UserError, match=r"in use|holds"):
        tokenize(load_config(place / "config.yaml"), tmp_path, 1, quiet)


@pytest.mark.launches
def test_a_bad_line_ends_it_with_its_place_from_another_process_too(place, tmp_path, server):
    lines = [b'{"text": "good"}'] * 3000 + [b"{bad"] + [b'{"text": "good"}'] * 3000
    path = corpus.write_lines(tmp_path / "x.jsonl", lines)
    config = write_config(tmp_path / "c.yaml", path)
    arguments = ["data", "tokenize", str(config), "--out", str(tmp_path / "out"), "--jobs", "2"]
    assert call(server, tmp_path, "command", *arguments) == [2]
    said = (tmp_path / "output.txt").read_text()
    assert "x.jsonl, line 3001" in said
    assert "Traceback" not in said


def test_a_tokenizer_is_trained_on_the_documents_if_the_config_says_so(place, tmp_path):
    config = write_config(
        tmp_path / "c.yaml", place / "a", place / "b.jsonl", model__tokenizer={"train": 300}
    )
    tokenize(load_config(config), tmp_path / "out", 1, quiet)
    tokenizer = open_tokenizer(tmp_path / "out" / "tokenizer")
    _, documents = megatron.read(tmp_path / "out" / "a.idx")
    assert tokenizer.length == 300
    assert tokenizer.decode(documents[7]) == corpus.articles(8)[7]["text"] + "<|endoftext|>"


def test_names_of_files_are_made_of_labels():
    labels = ("wikipedia/20231101.en", "*.parquet", "wikipedia-20231101.en", "…", "_x", "Ü.txt")
    found = file_names(labels)
    assert found == (
        "wikipedia-20231101.en",
        "parquet",
        "wikipedia-20231101.en-2",
        "source",
        "x",
        "Ü.txt",
    )


def test_a_token_cache_is_not_tokenized_again(place, straight, tmp_path):
    config = write_config(tmp_path / "c.yaml", place / "straight")
    with pytest.raises(UserError, match="documents of text"):
        tokenize(load_config(config), tmp_path / "out", 1, quiet)
    config = write_config(tmp_path / "c.yaml", place / "a")  # corrected, it goes on
    assert tokenize(load_config(config), tmp_path / "out", 1, quiet).documents == 50


def test_bad_lines_that_are_skipped_are_counted(tmp_path):
    lines = [b'{"text": "good"}'] * 3 + [b"{bad"] + [b'{"text": "good"}'] * 3
    path = corpus.write_lines(tmp_path / "x.jsonl", lines)
    config = write_config(tmp_path / "c.yaml", path, data__on_bad_unit="skip")
    done = tokenize(load_config(config), tmp_path / "out", 1, quiet)
    assert (done.documents, done.skipped) == (6, 1)
    assert (tmp_path / "out" / WORK / "skipped-units.jsonl").read_text().count("\n") == 1
