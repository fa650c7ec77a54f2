"""UX-30: which documents were in step N? Asked of runs that were resumed with other weights."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import xxhash
from helpers import corpus
from helpers.tiny import lines, tiny_config, write_config

import llmtrain
from llmtrain.data.sources.local import EDGE_BYTES
from llmtrain.errors import UserError
from llmtrain.rundir import record as jsonl
from llmtrain.tools.data.which import which

SAMPLE = Path(llmtrain.__file__).parent / "data" / "sample"
SEQ_LEN, BLOCKS = 32, 24
NOTES = corpus.articles(1500, 1000)  # larger than what is checked at both ends of a file
EOS = PAD = tokenizers.Tokenizer.from_file(str(SAMPLE / "tokenizer.json")).token_to_id(
    "<|endoftext|>"
)


def write_sources(folder):
    rows = [row | {"url": f"https://example.org/{row['id']}"} for row in corpus.articles(120)]
    corpus.write_parquet(folder / "wiki" / "1.parquet", rows)
    corpus.write_jsonl(folder / "notes.jsonl", NOTES)


def config_of(folder, weights, steps, **more):
    config = tiny_config(folder / "run", training__steps=steps, checkpoint__every_steps=3, **more)
    config["data"]["sources"] = [
        {"path": str(folder / "wiki"), "weight": weights[0]},
        {"path": str(folder / "notes.jsonl"), "weight": weights[1]},
    ]
    return write_config(folder, config)


def trained(server, folder, **more):
    """4 steps on two processes; 5 more on one, with other weights; then 3 as at first."""
    write_sources(folder)
    for world_size, steps, weights in ((2, 4, (2.0, 1.0)), (1, 9, (1.0, 4.0)), (2, 12, (2.0, 1.0))):
        path = config_of(folder, weights, steps, **more)
        codes = server.run(["train", str(path)], world_size, folder)
        assert codes == [0] * world_size, (folder / "output.txt").read_text()
    return folder / "run"


@pytest.fixture(scope="module")
def run(server, tmp_path_factory):
    return trained(server, tmp_path_factory.mktemp("which"))


@pytest.fixture(scope="module")
def bestfit(server, tmp_path_factory):
    return trained(server, tmp_path_factory.mktemp("bestfit"), data__packing="bestfit")


def logged(run_dir):
    return {line["step"]: line["batch_digest"] for line in lines(run_dir, "train")}


def rebuilt_digest(run_dir, documents, *, bestfit):
    """The batch digest of exactly these parts of these documents, by the contract alone."""
    reference = tokenizers.Tokenizer.from_file(str(SAMPLE / "tokenizer.json"))
    texts = {row["id"]: row["text"] for row in [*corpus.articles(120), *NOTES]}
    total = 0
    for g in sorted({document["g"] for document in documents}):
        ids = np.full(SEQ_LEN + 1, PAD, "<i4")
        wanted = np.zeros(SEQ_LEN + 1, bool)
        for document in (one for one in documents if one["g"] == g):
            tokens = [*reference.encode(texts[document["id"]]).ids, EOS]
            start, stop = document["span"]
            ids[start:stop] = tokens[slice(*document["tokens"])]
            wanted[start + bestfit : stop] = True
        labels = np.where(wanted, ids, -100)[1:].astype("<i4")
        body = ids.tobytes() + (labels.tobytes() if (labels == -100).any() else b"")
        total += xxhash.xxh3_64_intdigest(body, seed=g)
    return f"{total % 2**64:016x}"


def test_the_command_names_the_documents_of_a_step(run):
    command = [sys.executable, "-m", "llmtrain", "data", "which", str(run), "--step", "7"]
    done = subprocess.run([*command, "--json", "--text"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["step"] == found["checked_at"] == 7
    assert found["batch_digest"] == logged(run)[7]
    assert rebuilt_digest(run, found["documents"], bestfit=False) == logged(run)[7]
    assert {document["source"] for document in found["documents"]} == {"wiki", "notes.jsonl"}
    texts = {row["id"]: row["text"] for row in [*corpus.articles(120), *NOTES]}
    for document in found["documents"]:
        number = document["id"]
        assert document["title"] == f"Article {number}"
        url = f"https://example.org/{number}" if document["source"] == "wiki" else None
        assert document["url"] == url
        assert document["text"] in texts[number]
    people = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert people[0] == f"step 7: 24 blocks, digest {logged(run)[7]}"
    assert len(people) == len(found["documents"]) + 4
    assert max(map(len, people)) <= 80


@pytest.mark.parametrize("step", [1, 3, 4, 5, 6, 9, 10, 12])
def test_every_step_is_found_whatever_start_made_it(run, step):
    found = json.loads(json.dumps(which(run, step).to_json()))
    assert found["batch_digest"] == logged(run)[step]
    assert sorted({one["g"] for one in found["documents"]}) == list(
        range((step - 1) * BLOCKS, step * BLOCKS)
    )
    assert rebuilt_digest(run, found["documents"], bestfit=False) == logged(run)[step]


@pytest.mark.parametrize("step", [2, 5, 8, 11])
def test_documents_of_best_fit_packing_are_found(bestfit, step):
    found = json.loads(json.dumps(which(bestfit, step).to_json()))
    assert found["batch_digest"] == logged(bestfit)[step]
    assert rebuilt_digest(bestfit, found["documents"], bestfit=True) == logged(bestfit)[step]


def test_the_run_is_not_changed(run):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    which(run, 2, text=True)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_no_torch_is_imported(run):
    code = (
        "import sys, pathlib\nfrom llmtrain.tools.data.which import which\n"
        f"which(pathlib.Path({str(run)!r}), 2)\n"
        "assert not {'torch', 'transformers', 'accelerate', 'datasets'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("step", [-1, 0, 13, 10**9])
def test_a_step_that_the_run_has_not_made_is_refused(run, step):
    with pytest.raises(UserError, match="1 to 12"):
        which(run, step)


def copied(run, folder):
    """The run and its data, to be spoilt."""
    for name in ("wiki", "run"):
        shutil.copytree(run.parent / name, folder / name)
    shutil.copyfile(run.parent / "notes.jsonl", folder / "notes.jsonl")
    return folder / "run"


def places(folder):
    return [f"data.sources.0.path={folder / 'wiki'}", f"data.sources.1.path={folder}/notes.jsonl"]


def test_data_that_was_moved_is_found_where_the_caller_says(run, tmp_path):
    moved = copied(run, tmp_path)
    assert which(moved, 5, overrides=places(tmp_path)) == which(run, 5)
    config = moved / "config.yaml"
    config.write_text(config.read_text().replace(str(run.parent), str(tmp_path / "gone")))
    with pytest.raises(UserError, match=r"data\.sources\.0\.path=…") as refused:
        which(moved, 5)
    assert str(tmp_path / "gone") in str(refused.value)
    assert which(moved, 5, overrides=places(tmp_path)) == which(run, 5)


def test_a_file_that_was_changed_inside_is_found_by_the_digest(run, tmp_path):
    spoilt = copied(run, tmp_path)
    path = tmp_path / "notes.jsonl"
    data = path.read_bytes()
    middle = data[EDGE_BYTES:-EDGE_BYTES].replace(b"river", b"rover")
    path.write_bytes(data[:EDGE_BYTES] + middle + data[-EDGE_BYTES:])
    command = [sys.executable, "-m", "llmtrain", "data", "which", str(spoilt), "--step", "7"]
    done = subprocess.run([*command, *places(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "batch_digest of step 7" in done.stderr
    assert logged(run)[7] in done.stderr
    assert "a file was changed inside" in done.stderr
    path.write_bytes(data)
    assert which(spoilt, 7, overrides=places(tmp_path)) == which(run, 7)


def test_a_file_that_was_changed_at_an_end_is_named(run, tmp_path):
    spoilt = copied(run, tmp_path)
    path = tmp_path / "notes.jsonl"
    path.write_bytes(path.read_bytes().replace(b"1000", b"9000", 1))
    with pytest.raises(UserError, match=r"notes\.jsonl\n.*the content that the run began with"):
        which(spoilt, 5, overrides=places(tmp_path))


def without(run_dir, steps):
    """As if `logging.every_steps` had left out the lines of these steps."""
    path = run_dir / "metrics.jsonl"
    kept = [
        line
        for line in map(json.loads, path.read_text().splitlines())
        if line["kind"] != "train" or line["step"] not in steps
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))


def test_a_step_that_was_not_logged_is_checked_at_the_next_that_was(run, tmp_path):
    thin = copied(run, tmp_path)
    without(thin, range(5, 8))
    found = which(thin, 6)
    assert found.checked_at == 8
    assert found.documents == which(run, 6).documents
    assert found.batch_digest == logged(run)[6]
    without(thin, range(5, 10))  # to the last step of that start: nothing to check it with
    assert which(thin, 6).checked_at is None


def test_without_a_save_before_it_a_step_is_replayed_from_the_beginning(run, tmp_path):
    thin = copied(run, tmp_path)
    (thin / "cursors.jsonl").unlink()
    assert which(thin, 4) == which(run, 4)
    with pytest.raises(UserError, match=r"cursors\.jsonl"):  # its blocks had other weights before
        which(thin, 7)


def test_a_step_before_a_change_that_was_accepted_cannot_be_recomputed(server, tmp_path):
    write_sources(tmp_path)
    path = config_of(tmp_path, (2.0, 1.0), 4)
    assert server.run(["train", str(path)], 1, tmp_path) == [0]
    path = config_of(tmp_path, (2.0, 1.0), 8, data__seq_len=16)
    more = "checkpoint.accept_changes=[data.seq_len]"
    assert server.run(["train", str(path), more], 1, tmp_path) == [0]
    for step in (5, 6, 8):
        assert which(tmp_path / "run", step).checked_at == step
    for step in (2, 4):
        with pytest.raises(UserError, match="a step after 4"):
            which(tmp_path / "run", step)


def test_steps_that_a_resume_has_undone_are_not_those_of_the_run(run, tmp_path):
    undone = copied(run, tmp_path)
    first = next(line for line in lines(undone, "start"))
    again = first | {"step": 9, "weights": [1.0, 1.0]}
    with (undone / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n")
    (undone / "status.json").write_text(json.dumps({"step": 9}))
    assert which(undone, 9) == which(run, 9)
    with pytest.raises(UserError, match="1 to 9"):
        which(undone, 10)


def test_cursors_that_a_resume_has_undone_are_not_used(run, tmp_path):
    """A start at 4 saved 6, and was undone by the one at 4 that saved no 6."""
    undone = copied(run, tmp_path)
    record = jsonl.read(undone / "metrics.jsonl")
    noted = [json.loads(line) for line in (undone / "cursors.jsonl").read_text().splitlines()]
    start = next(
        i for i, line in enumerate(record) if line["kind"] == "start" and line["step"] == 4
    )
    other = [
        record[start] | {"weights": [1.0, 1.0]},
        {"kind": "checkpoint", "time": 0.0, "step": 6},
    ]
    kept = [line for line in record if (line["kind"], line["step"]) != ("checkpoint", 6)]
    write_lines(undone / "metrics.jsonl", [*record[:start], *other, *kept[start:]])
    wrong = noted[-1] | {"step": 6}
    write_lines(undone / "cursors.jsonl", [wrong if one["step"] == 6 else one for one in noted])
    for step in (5, 7, 9, 10):
        assert which(undone, step, overrides=places(tmp_path)) == which(run, step)


def test_cursors_that_were_not_noted_again_are_not_those_of_the_start_before(run, tmp_path):
    """Both starts saved 6, but only the undone one noted it."""
    undone = copied(run, tmp_path)
    record = jsonl.read(undone / "metrics.jsonl")
    noted = [json.loads(line) for line in (undone / "cursors.jsonl").read_text().splitlines()]
    start = next(
        i for i, line in enumerate(record) if line["kind"] == "start" and line["step"] == 4
    )
    other = [record[start], {"kind": "checkpoint", "time": 0.0, "step": 6}]
    write_lines(undone / "metrics.jsonl", [*record[:start], *other, *record[start:]])
    wrong = noted[-1] | {"step": 6}
    write_lines(undone / "cursors.jsonl", [wrong if one["step"] == 6 else one for one in noted])
    assert which(undone, 8, overrides=places(tmp_path)) == which(run, 8)


def write_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def test_what_the_run_has_skipped_is_left_out_again(server, tmp_path):
    rows = [json.dumps(row) for row in corpus.articles(400)]
    for broken in range(3, 400, 5):
        rows[broken] = rows[broken][:-9]
    (tmp_path / "notes.jsonl").write_text("".join(row + "\n" for row in rows))
    config = tiny_config(tmp_path / "run", training__steps=4, data__on_bad_unit="skip")
    config["data"]["sources"] = [{"path": str(tmp_path / "notes.jsonl")}]
    path = write_config(tmp_path, config)
    assert server.run(["train", str(path)], 2, tmp_path) == [0, 0]
    skipped = (tmp_path / "run" / "skipped-units.jsonl").read_bytes()
    found = which(tmp_path / "run", 3, text=True)
    assert found.checked_at == 3
    texts = {row["id"]: row["text"] for row in corpus.articles(400)}
    assert all(
        one.id and one.text is not None and one.text in texts[one.id] for one in found.documents
    )
    assert not {one.id for one in found.documents} & {str(n) for n in range(3, 400, 5)}
    assert (tmp_path / "run" / "skipped-units.jsonl").read_bytes() == skipped


def test_other_overrides_than_places_are_refused(run):
    with pytest.raises(UserError, match=r"data\.seq_len=8"):
        which(run, 1, overrides=["data.seq_len=8"])


def test_what_is_no_run_is_refused(run, tmp_path):
    with pytest.raises(UserError, match="a run directory that exists"):
        which(tmp_path / "nowhere", 1)
    with pytest.raises(UserError, match=r"no config\.yaml"):
        which(tmp_path, 1)
    shutil.copyfile(run / "config.yaml", tmp_path / "config.yaml")
    with pytest.raises(UserError, match="before its data was prepared"):
        which(tmp_path, 1)
    shutil.copyfile(run / "manifest.json", tmp_path / "manifest.json")
    with pytest.raises(UserError, match="of a run that has made one"):
        which(tmp_path, 1)
