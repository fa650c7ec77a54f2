"""What people bring: rows, folders and files as other tools write them."""

import gzip
import json

import datasets
import pytest
from helpers import chats, corpus, hub

from llmtrain.config.binding import data_settings
from llmtrain.config.schema import Config
from llmtrain.data.audit.count import epoch
from llmtrain.data.audit.first_rows import check_first_rows
from llmtrain.data.audit.ledger import document_of, origins, replay
from llmtrain.data.chat.rows import BadRowError, to_example
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.heldout import training_texts
from llmtrain.data.lanes import default_chat_lanes
from llmtrain.data.manifest import load as load_manifest
from llmtrain.data.state import DataState
from llmtrain.data.survey import survey
from llmtrain.errors import UserError

USER = {"role": "user", "content": "Q?"}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def trained(row, form="messages"):
    """The answers of a row that are trained."""
    one = to_example(json.dumps(row), form)
    turns = enumerate(one.messages)
    return [m["content"] for n, m in turns if m["role"] == "assistant" and n not in one.untrained]


def texts(path, **more):
    """The documents of a source, in the order of its files and rows."""
    found = survey(data_settings(corpus.config({"path": str(path), **more}, heldout=0.0)), 1)
    (source,) = found.sources
    reader = Reader(found.reading)
    units = range(len(source.units))
    return [text for u in units for text in training_texts(source, u, 42, reader)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chats.make(tmp_path_factory.mktemp("brought") / "tokenizer", "chatml")


def test_a_weight_of_another_type_means_the_same_or_is_refused():
    """Numbers are on the page of rows."""
    messages = [USER, answer("No.", weight=False), USER, answer("Yes.", weight=1.0)]
    assert trained({"messages": messages}) == ["Yes."]
    messages = [USER, answer("x", weight="0"), USER, answer("y", train="true")]
    assert trained({"messages": messages}) == ["y"]
    for weight in (2, -1, "2", [1]):
        with pytest.raises(BadRowError, match="only 0"):
            trained({"messages": [USER, answer("x", weight=weight)]})


def test_a_run_that_began_with_all_files_keeps_its_manifest(tmp_path, tokenizer):
    for split in ("train", "test"):
        corpus.write_jsonl(tmp_path / "ds" / f"{split}.jsonl", corpus.articles(30))
    manifest, _ = chats.data_of(tokenizer, {"path": str(tmp_path / "ds" / "*.jsonl")})
    stored = json.loads(manifest.to_bytes())
    stored["sources"][0]["path"] = str(tmp_path / "ds")  # as before there were splits
    (tmp_path / "manifest.json").write_text(json.dumps(stored))
    config = corpus.config({"path": str(tmp_path / "ds")})
    found = load_manifest(tmp_path / "manifest.json", config.data.sources)
    assert [file.name for file in found.sources[0].files] == ["test.jsonl", "train.jsonl"]
    assert found.fingerprint == manifest.fingerprint


def test_the_history_of_alpaca_rows_comes_before_the_instruction():
    row = {
        "instruction": "And the second?",
        "input": "",
        "output": "Two.",
        "system": "Be brief.",
        "history": [["What is the first?", "One."]],
    }
    found = to_example(json.dumps(row), "alpaca").messages
    assert [(m["role"], m["content"]) for m in found] == [
        ("system", "Be brief."),
        ("user", "What is the first?"),
        ("assistant", "One."),
        ("user", "And the second?"),
        ("assistant", "Two."),
    ]
    two = {**row, "history": json.dumps([["A?", "a"], ["B?", "b"]]), "input": "more"}
    assert trained(two, "alpaca") == ["a", "b", "Two."]
    assert len(to_example(json.dumps({**row, "history": []}), "alpaca").messages) == 3
    for history in ([["one"]], "text", {"a": "b"}, ["ab"]):
        with pytest.raises(BadRowError, match="history"):
            trained({**row, "history": history}, "alpaca")


def test_an_older_function_call_is_a_tool_call():
    call = {"name": "get_weather", "arguments": '{"town": "Hue"}'}
    calls = [
        answer("Let me look.", function_call=call),
        answer(None, function_call=json.dumps(call)),
    ]
    row = {"messages": [USER, *calls], "functions": [{"name": "get_weather"}]}
    found = to_example(json.dumps(row), "messages")
    called = {"type": "function", "function": {"name": "get_weather", "arguments": {"town": "Hue"}}}
    assert [m.get("tool_calls") for m in found.messages] == [None, [called], [called]]
    assert found.tools == [{"type": "function", "function": {"name": "get_weather"}}]
    assert "function_call" not in found.messages[1]
    for bad in ("look", 5, {"arguments": "{}"}):
        with pytest.raises(BadRowError):
            trained({"messages": [USER, answer("x", function_call=bad)]})
    both = answer("x", function_call=call, tool_calls=[{"function": call}])
    with pytest.raises(BadRowError, match="both"):
        trained({"messages": [USER, both]})


def test_what_save_to_disk_wrote_is_read_directly(tmp_path):
    rows = corpus.articles(300)
    made = datasets.Dataset.from_list(rows)
    made.save_to_disk(tmp_path / "ds", num_shards=3)
    datasets.DatasetDict({"train": made, "test": made.select(range(50))}).save_to_disk(
        tmp_path / "dd"
    )
    expected = [row["text"] for row in rows]
    assert texts(tmp_path / "ds") == expected
    assert texts(tmp_path / "dd") == expected
    assert texts(tmp_path / "dd", split="test") == expected[:50]
    with pytest.raises(UserError, match=r"data\.sources\.0\.split = dev"):
        texts(tmp_path / "dd", split="dev")
    talks = datasets.Dataset.from_list(chats.rows_of(30))
    talks.save_to_disk(tmp_path / "talks")
    examples = [to_example(text, "messages") for text in texts(tmp_path / "talks")]
    assert [list(one.messages) for one in examples] == [
        row["messages"] for row in chats.rows_of(30)
    ]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.csv", "a.tsv", "a.csv.gz", "a.arrow"])
def test_tables_of_other_tools_have_the_rows_that_datasets_finds(tmp_path, name, monkeypatch):
    monkeypatch.setattr("llmtrain.data.file_parts.MIN_RANGE_BYTES", {False: 1000, True: 1000})
    rows = [{**row, "text": f'{row["text"]}\nan "odd", line\té'} for row in corpus.articles(200)]
    made, plain = datasets.Dataset.from_list(rows), tmp_path / name.removesuffix(".gz")
    match plain.suffix:
        case ".json":
            plain.write_text(json.dumps(rows, indent=2, ensure_ascii=False), "utf-8")
        case ".csv":
            made.to_csv(plain)
        case ".tsv":
            made.to_csv(plain, sep="\t")
        case ".arrow":
            made.save_to_disk(tmp_path / "saved")
            (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(plain)
    path = plain
    if name.endswith(".gz"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(plain.read_bytes()))
    assert texts(path) == [row["text"] for row in rows]
    found = survey(data_settings(corpus.config(path, heldout=0.0)), 1).sources[0]
    assert len(found.units) > 10 or name.endswith(".gz")
    assert found.id_column == "id"


@pytest.mark.parametrize("name", ["train.json", "train.csv", "train.tsv", "train.json.gz"])
def test_tables_of_other_tools_are_read_from_the_hub(tmp_path, name, monkeypatch):
    monkeypatch.setattr("llmtrain.data.file_parts.MIN_RANGE_BYTES", {False: 1000, True: 1000})
    rows = corpus.articles(200)
    plain = tmp_path / name.removesuffix(".gz")
    if plain.suffix == ".json":
        plain.write_text(json.dumps(rows, indent=1))
    else:
        datasets.Dataset.from_list(rows).to_csv(
            plain, sep={".csv": ",", ".tsv": "\t"}[plain.suffix]
        )
    content = plain.read_bytes()
    with hub.serving(
        {f"data/{name}": gzip.compress(content) if ".gz" in name else content}
    ) as server:
        hub.stand_in(monkeypatch, server, tmp_path / "home")
        assert texts(hub.ID) == [row["text"] for row in rows]
        with pytest.raises(UserError, match=r"data\.sources\.0\.document = file"):
            texts(hub.ID, document="file")


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.arrow", "notes"])
def test_the_documents_of_a_block_are_named_with_their_place(tmp_path, tokenizer, name):
    rows, path = corpus.articles(40), tmp_path / name
    match name:
        case "a.json":
            path.write_text(json.dumps(rows, indent=1))
        case "a.csv":
            datasets.Dataset.from_list(rows).to_csv(path)
        case "a.arrow":
            datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
            (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(path)
        case "notes":
            path.mkdir()
            for row in rows:
                (path / f"{row['id']}.md").write_text(row["text"])
    source = {"path": str(path), "document": "file" if name == "notes" else "line"}
    manifest, encoder = chats.data_of(tokenizer, source, lanes=2)
    reader, state = Reader(Reading(60)), DataState.fresh(manifest)
    spans = [
        (
            document_of(manifest, g, block, span),
            block.ids[span.at : span.at + span.stop - span.start],
        )
        for g, block in replay(manifest, encoder, reader, state, 0, 4)
        for span in block.spans
        if span.start == 0
    ]
    found = origins(manifest, reader, [document for document, _ in spans])
    assert len(found) > 5
    for document, ids in spans:
        origin, text = found[document], encoder.tokenizer.decode(ids)
        if name == "notes":
            row = rows[int(origin.file.removesuffix(".md"))]
        else:
            row = rows[int(origin.id)]
            assert origin.title == row["title"]
        assert (row["text"] + "<|endoftext|>").startswith(text)
        if name == "a.json":
            line = path.read_bytes()[origin.at :]
            assert json.JSONDecoder().raw_decode(line.decode())[0] == row


def test_a_json_array_of_conversations_is_chat(tmp_path, tokenizer):
    rows = [{"instruction": f"say {n}", "input": "", "output": str(n)} for n in range(200)]
    (tmp_path / "alpaca.json").write_text(json.dumps(rows, indent=2))
    manifest, encoder = chats.data_of(tokenizer, tmp_path / "alpaca.json", epochs=1)
    assert manifest.sources[0].form == "alpaca"
    state = DataState.fresh(manifest)
    assert epoch(manifest, encoder, Reading(60), (), state).documents == 200


def test_a_whole_file_is_a_document_where_that_is_asked(tmp_path):
    (tmp_path / "sub").mkdir()
    files = {
        "b.txt": "One.\n\nTwo.\n",
        "a.md": "\ufeff# Title\n\nText.",
        "sub/c.txt.gz": "Three\nlines\nmore.\n",
        "README.md": "# About\n",
        "empty.txt": "\n",
    }
    for name, text in files.items():
        data = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    names = ["README.md", "a.md", "b.txt", "sub/c.txt.gz"]
    assert texts(tmp_path, document="file") == [
        files[name].removeprefix("\ufeff") for name in names
    ]
    assert texts(tmp_path / "b.txt", document="line") == ["One.", "Two."]
    with pytest.raises(UserError, match=r"data\.sources\.0\.document=file"):
        texts(tmp_path)
    corpus.write_jsonl(tmp_path / "d.jsonl", corpus.articles(3))
    with pytest.raises(UserError, match=r"data\.sources\.0\.document=line"):
        texts(tmp_path, document="file")


@pytest.mark.parametrize("epochs", [1, 2])
def test_few_conversations_have_one_lane_and_each_is_trained_in_every_epoch(
    tmp_path, tokenizer, epochs
):
    rows = [
        {"messages": chats.talk(f"What is {n} plus {n}?", f"It is {n + n}.")} for n in range(60)
    ]
    for suffix in ("jsonl", "parquet"):
        write = corpus.write_jsonl if suffix == "jsonl" else corpus.write_parquet
        path = write(tmp_path / f"chat.{suffix}", rows)
        manifest, encoder = chats.data_of(tokenizer, path, epochs=epochs, seq_len=64)
        assert manifest.lanes == 1
        state = DataState.fresh(manifest)
        counted = epoch(manifest, encoder, Reading(60), (), state)
        blocks = list(replay(manifest, encoder, Reader(Reading(60)), state, 0, counted.until_end))
        assert all(block.trained.any() for _, block in blocks)
        assert sum(len(block.spans) for _, block in blocks) == 60 * epochs
        assert (counted.passes, counted.first) == (epochs, 0)


def test_the_number_of_lanes_is_that_of_the_data(tmp_path, tokenizer):
    few = corpus.write_jsonl(tmp_path / "few.jsonl", chats.rows_of(300))
    many = corpus.write_jsonl(tmp_path / "many.jsonl", chats.rows_of(6000))
    wide = [{**row, "notes": "not read " * 10_000} for row in chats.rows_of(40)]
    table = corpus.write_parquet(tmp_path / "wide.parquet", wide)
    for processes in (1, 2, 3):
        for path, lanes in ((few, 1), (table, 1), (many, 8)):
            settings = data_settings(corpus.config(path, heldout=0.0, seq_len=128))
            assert survey(settings, processes).lanes == lanes
    text = corpus.write_jsonl(tmp_path / "text.jsonl", corpus.articles(5))
    assert survey(data_settings(corpus.config(text)), 1).lanes == 24
    found = [default_chat_lanes(*asked) for asked in ((1, 63, 9e9), (1, 9**9, 255), (1, 64, 256))]
    assert found == [1, 1, 8]
    assert [default_chat_lanes(n, 10**6, 1e6) for n in (1, 3, 16)] == [8, 24, 16]
    assert default_chat_lanes(64, 100, 1e6) == 8
    both = [{"path": str(few), "max_epochs": 1}, {"path": str(text), "max_epochs": 1}]
    assert survey(data_settings(corpus.config(*both)), 1).lanes == 1  # it ends with its sources
    assert survey(data_settings(corpus.config(both[0], str(text))), 1).lanes == 24


def test_a_run_that_began_before_reads_its_rows_as_it_did(tmp_path, tokenizer):
    judged = {"messages": [USER, answer("No.", weight=0)], "label": False, "loss": 1}
    assert trained_before(judged) == ["No."]
    history = {"instruction": "b?", "output": "b", "history": [["a?", "a"]], "system_prompt": "s"}
    assert trained_before(history, "alpaca") == ["b"]
    assert trained_before({**history, "output": ["b", "c"]}, "alpaca") == ["bc"]
    path = corpus.write_parquet(tmp_path / "a.parquet", [{**judged, "weight": 1.0, "history": "x"}])
    columns = {"messages": "messages"}
    manifest, _ = chats.data_of(tokenizer, {"path": str(path), "columns": columns})
    stored = json.loads(manifest.to_bytes())
    assert stored["sources"][0].pop("reading") == 2
    (tmp_path / "manifest.json").write_text(json.dumps(stored))
    config = corpus.config({"path": str(path), "columns": columns})
    old = load_manifest(tmp_path / "manifest.json", config.data.sources)
    assert (old.sources[0].reading, manifest.sources[0].reading) == (1, 2)
    assert old.fingerprint != manifest.fingerprint
    units = [
        Reader(Reading(60)).rows(one, one.units[0]) for one in (old.sources[0], manifest.sources[0])
    ]
    assert [sorted(json.loads(rows.text(0)[0])) for rows in units] == [
        ["messages"],
        ["messages", "weight"],
    ]


def test_a_line_that_is_nested_too_deeply_is_a_bad_row_of_its_line(tmp_path, tokenizer):
    deep = '{"messages": ' + 100_000 * "[" + 100_000 * "]" + "}"
    good = json.dumps({"messages": [USER, answer("Yes.")]})
    (tmp_path / "a.jsonl").write_text("\n".join([good, good, deep, good]) + "\n")
    for skip in ("error", "skip"):
        config = Config.model_validate({
            "data": {"sources": [{"path": str(tmp_path / "a.jsonl")}], "heldout": 0.0},
            "chat": {"bad_rows": skip},
            "training": {"steps": 1},
        })  # fmt: skip
        found = survey(data_settings(config), 1)
        _, encoder = chats.data_of(tokenizer, tmp_path / "a.jsonl")
        if skip == "skip":
            assert check_first_rows(found, encoder)
            continue
        with pytest.raises(UserError, match=r"a\.jsonl, line 3\n.*not JSON"):
            check_first_rows(found, encoder)


def trained_before(row, form="messages"):
    one = to_example(json.dumps(row), form, reading=1)
    return [m["content"] for m in one.messages if m["role"] == "assistant" and not one.untrained]
