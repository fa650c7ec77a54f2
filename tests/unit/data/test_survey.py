import json
import logging
import shutil
from dataclasses import replace
from importlib.metadata import version

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import chats, corpus, megatron
from helpers.reference_stream import is_heldout, unit_rows

from llmtrain.config.binding import data_settings
from llmtrain.config.schema import Config, SourceConfig
from llmtrain.data.manifest import load
from llmtrain.data.survey import (
    check,
    differing_tokenizer,
    evaluation_sources,
    freeze,
    survey,
    training_texts,
)
from llmtrain.data.tokens.encode import DocumentEncoder
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return open_tokenizer(corpus.write_tokenizer(tmp_path_factory.mktemp("units") / "tokenizer"))


@pytest.fixture
def place(tmp_path):
    corpus.write_parquet(tmp_path / "a" / "1.parquet", corpus.articles(95))
    corpus.write_parquet(tmp_path / "a" / "2.parquet", corpus.articles(20, 95), group=3)
    corpus.write_jsonl(tmp_path / "b.jsonl", corpus.articles(3000, 500))
    return tmp_path


def message(*sources, **data):
    with pytest.raises(UserError) as raised:
        survey(data_settings(corpus.config(*sources, **data)), 1)
    return str(raised.value)


def test_units_hold_every_row_once_and_are_four_a_lane(place):
    found = survey(data_settings(corpus.config(place / "a", lanes=6)), 1)
    (source,) = found.sources
    ids = [name for unit in source.units for name, _ in unit_rows(source, unit)]
    assert ids == [str(n) for n in range(115)]
    assert len(source.units) >= 24
    assert all(unit.stop > unit.start for unit in source.units)


def test_a_slice_has_at_least_one_row(place):
    (source,) = survey(data_settings(corpus.config(place / "a", lanes=100)), 1).sources
    assert len(source.units) == 115


def test_plain_lines_are_cut_into_ranges_that_cover_the_file(place):
    (source,) = survey(data_settings(corpus.config(place / "b.jsonl")), 1).sources
    ends = [0, *(unit.stop for unit in source.units)]
    assert [unit.start for unit in source.units] == ends[:-1]
    assert ends[-1] == (place / "b.jsonl").stat().st_size
    assert len(source.units) > 10
    ids = [name for unit in source.units for name, _ in unit_rows(source, unit)]
    assert ids == [str(n) for n in range(500, 3500)]


@pytest.mark.parametrize(("processes", "lanes"), [(1, 24), (2, 24), (5, 120), (16, 48)])
def test_lanes_follow_the_data_and_only_then_the_processes(place, processes, lanes):
    assert survey(data_settings(corpus.config(place / "a")), processes).lanes == lanes


def test_many_units_get_48_lanes(tmp_path):
    corpus.write_parquet(tmp_path / "a.parquet", corpus.articles(800), group=1)
    assert survey(data_settings(corpus.config(tmp_path / "a.parquet")), 1).lanes == 48


def test_tokenizer_texts_are_training_documents_of_all_sources_in_turn(place):
    config = corpus.config(place / "a", place / "b.jsonl", heldout=0.2)
    found = survey(data_settings(config), 1)
    texts = list(training_texts(found, 1 << 30))
    assert len(texts) == len(set(texts))
    held = {
        text
        for source in found.sources
        for u, unit in enumerate(source.units)
        for name, text in unit_rows(source, unit)
        if is_heldout(source, u, name, 42)
    }
    assert held
    assert not held & set(texts)
    assert len(held) + len(texts) == 3115
    few = list(training_texts(found, 20_000))
    assert sum(len(text.encode()) for text in few[:-1]) < 20_000
    assert {int(text.split()[1]) < 500 for text in few} == {True, False}
    assert few == texts[: len(few)]


def test_problems_of_all_sources_are_told_at_once(place):
    (place / "empty").mkdir()
    (place / "fake.parquet").write_bytes(b"PAR1 but not really")
    cut = (place / "a" / "1.parquet").read_bytes()[:-100]
    (place / "cut.parquet").write_bytes(cut)
    corpus.write_parquet(place / "other.parquet", [{"title": "x", "body": "y"}])
    pq.write_table(pa.table({"text": [1, 2]}), place / "numbers.parquet")
    told = message(
        place / "empty",
        place / "fake.parquet",
        place / "cut.parquet",
        place / "other.parquet",
        place / "missing.jsonl",
        place / "*.zst",
        place / "numbers.parquet",
    )
    assert told.startswith("7 problems")
    assert f"data.sources.0.path = {place / 'empty'}" in told
    assert f"data.sources.1.path = {place / 'fake.parquet'}" in told
    assert f"data.sources.2.path = {place / 'cut.parquet'}" in told
    assert "data.sources.3.text_column = text" in told
    assert f"a column of {place / 'other.parquet'}, which has: title, body" in told
    assert "data.sources.4.path" in told
    assert "data.sources.5.path" in told
    assert f"in {place / 'numbers.parquet'} it is int64" in told


def test_bad_files_of_one_source_are_listed_within_a_bound(place):
    for n in range(12):
        (place / "a" / f"fake{n:02}.parquet").write_bytes(b"x" * 100)
    told = message(place / "a")
    assert told.count("fake") == 8
    assert "4 more files" in told


def test_a_first_line_that_is_no_document_is_told_before_training(place):
    corpus.write_lines(place / "c.jsonl", [b'{"body": "x"}'])
    assert "c.jsonl, which has: body" in message(place / "c.jsonl")


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_file_that_is_none_is_refused_before_training(place, suffix):
    (place / f"c.jsonl.{suffix}").write_bytes(b"this was never compressed at all")
    told = message(place / f"c.jsonl.{suffix}")
    assert f"c.jsonl.{suffix}" in told
    assert "replace the file" in told


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.txt"])
def test_files_without_a_byte_are_refused(place, name):
    (place / name).write_bytes(b"")
    assert "all are empty" in message(place / name)


def test_an_id_column_that_the_user_named_must_be_there(place):
    assert survey(data_settings(corpus.config(place / "a")), 1).sources[0].id_column == "id"
    named = {"path": str(place / "a"), "id_column": "page"}
    assert "data.sources.0.id_column = page" in message(named)
    corpus.write_parquet(place / "c.parquet", [{"text": "x"}])
    assert survey(data_settings(corpus.config(place / "c.parquet")), 1).sources[0].id_column is None


@pytest.mark.parametrize("texts", [["", None, "  "], ["only one"]])
def test_a_source_without_a_training_document_is_refused(place, texts):
    corpus.write_parquet(place / "c.parquet", [{"text": text} for text in texts])
    told = message(place / "c.parquet", heldout=0.999999)
    assert "no training document is left after the held-out split" in told


def test_a_compressed_file_that_says_it_is_too_large_is_refused_at_start(place, monkeypatch):
    monkeypatch.setattr("llmtrain.data.documents.lines.DECODED_LIMIT", 100)
    path = corpus.write_jsonl(place / "c.jsonl.gz", corpus.articles(50))
    assert "a larger one" in message(path)


def test_a_manifest_comes_back_from_its_file_as_it_was(place, tokenizer):
    config = corpus.config(place / "a", place / "b.jsonl", heldout=0.1)
    manifest = freeze(survey(data_settings(config), 1), tokenizer)
    (place / "manifest.json").write_bytes(manifest.to_bytes())
    again = load(place / "manifest.json", config.data.sources)
    assert again == manifest
    assert again.fingerprint == manifest.fingerprint
    check(again, data_settings(config), DocumentEncoder(tokenizer))


def test_the_same_data_under_another_path_is_the_same_data(place, tokenizer):
    config = corpus.config(place / "a")
    manifest = freeze(survey(data_settings(config), 1), tokenizer)
    (place / "manifest.json").write_bytes(manifest.to_bytes())
    shutil.copytree(place / "a", place / "moved")
    shutil.rmtree(place / "a")
    moved = corpus.config(place / "moved")
    again = load(place / "manifest.json", moved.data.sources)
    check(again, data_settings(moved), DocumentEncoder(tokenizer))
    assert again.sources[0].root == str(place / "moved")
    assert again.fingerprint == freeze(survey(data_settings(moved), 1), tokenizer).fingerprint


def test_files_that_changed_since_the_run_began_are_named(place, tokenizer):
    config = corpus.config(place / "a", place / "b.jsonl")
    manifest = freeze(survey(data_settings(config), 1), tokenizer)
    with (place / "b.jsonl").open("ab") as file:
        file.write(b"\n")
    corpus.write_parquet(place / "a" / "2.parquet", corpus.articles(20, 1095), group=3)
    (place / "a" / "1.parquet").unlink()
    with pytest.raises(UserError) as raised:
        check(manifest, data_settings(config), DocumentEncoder(tokenizer))
    assert len(raised.value.problems) == 3
    assert "1.parquet" in str(raised.value)
    assert "a file of this name, as when the run began" in str(raised.value)


def test_a_file_of_the_same_size_with_other_bytes_is_noticed(place, tokenizer):
    config = corpus.config(place / "b.jsonl")
    manifest = freeze(survey(data_settings(config), 1), tokenizer)
    data = (place / "b.jsonl").read_bytes()
    (place / "b.jsonl").write_bytes(data.replace(b"river", b"RIVER"))
    with pytest.raises(UserError, match="it has changed"):
        check(manifest, data_settings(config), DocumentEncoder(tokenizer))


def test_all_that_differs_at_a_later_start_is_told_at_once(place, tokenizer):
    manifest = freeze(survey(data_settings(corpus.config(place / "a")), 1), tokenizer)
    source = {"path": str(place / "a"), "text_column": "title", "id_column": "title"}
    other = corpus.config(source, seq_len=32, heldout=0.5, seed=7, lanes=3)
    small = open_tokenizer(corpus.write_tokenizer(place / "small", entries=280))
    with pytest.raises(UserError) as raised:
        check(manifest, data_settings(other), DocumentEncoder(small))
    keys = {problem.key for problem in raised.value.problems}
    assert keys == {
        "run.seed",
        "data.seq_len",
        "data.heldout",
        "data.lanes",
        "data.sources.0.text_column",
        "data.sources.0.id_column",
        "tokenizer digest",
        "tokenizer length",
        "tokenizer probe",
    }


def test_other_ids_than_when_the_run_began_name_the_versions(place, tokenizer):
    manifest = freeze(survey(data_settings(corpus.config(place / "a")), 1), tokenizer)
    assert differing_tokenizer(manifest, DocumentEncoder(tokenizer)) == []
    facts = replace(manifest.tokenizer, probe="0" * 16, versions="tokenizers 0.1, tiktoken 0.2")
    (problem,) = differing_tokenizer(replace(manifest, tokenizer=facts), DocumentEncoder(tokenizer))
    assert (problem.key, problem.value) == ("tokenizer probe", tokenizer.probe)
    assert "it began with: tokenizers 0.1, tiktoken 0.2" in problem.remedy
    assert f"here: {manifest.tokenizer.versions}" in problem.remedy
    assert f"tiktoken {version('tiktoken')}" in manifest.tokenizer.versions


def test_another_number_of_sources_is_refused(place, tokenizer):
    manifest = freeze(survey(data_settings(corpus.config(place / "a")), 1), tokenizer)
    (place / "manifest.json").write_bytes(manifest.to_bytes())
    with pytest.raises(UserError, match="2 sources"):
        load(place / "manifest.json", corpus.config(place / "a", place / "b.jsonl").data.sources)


def test_new_weights_change_no_fingerprint(place, tokenizer):
    config = corpus.config(place / "a", place / "b.jsonl")
    manifest = freeze(survey(data_settings(config), 1), tokenizer)
    (place / "manifest.json").write_bytes(manifest.to_bytes())
    heavier = {"path": str(place / "a"), "weight": 5.0}
    again = load(place / "manifest.json", corpus.config(heavier, place / "b.jsonl").data.sources)
    assert again.weights == (5.0, 1.0)
    assert again.fingerprint == manifest.fingerprint


def test_the_manifest_is_plain_json_without_paths_of_this_machine(place, tokenizer, monkeypatch):
    monkeypatch.chdir(place)
    manifest = freeze(survey(data_settings(corpus.config("a")), 1), tokenizer)
    (place / "manifest.json").write_bytes(manifest.to_bytes())
    text = (place / "manifest.json").read_text()
    stored = json.loads(text)
    assert str(place) not in text
    assert stored["version"] == 1
    assert stored["sources"][0]["files"][0]["name"] == "1.parquet"
    assert stored["sources"][0]["columns"] == {"text": "text", "id": "id"}


def test_the_built_in_sample_is_a_source_like_any_other():
    found = survey(data_settings(corpus.config("sample", heldout=0.005)), 2)
    (source,) = found.sources
    assert (source.label, source.id_column, found.lanes) == ("sample", "id", 24)
    assert len(source.units) >= 4 * found.lanes
    assert len(list(training_texts(found, 1 << 30))) > 1000


def test_two_sources_may_take_other_columns_of_one_file(tmp_path):
    rows = [{"text": f"text {i}", "title": f"title {i}"} for i in range(40)]
    corpus.write_parquet(tmp_path / "both.parquet", rows)
    config = corpus.config(tmp_path / "both.parquet", tmp_path / "both.parquet", heldout=0.0)
    second = config.data.sources[1].model_copy(update={"text_column": "title"})
    sources = (config.data.sources[0], second)
    config = config.model_copy(update={"data": config.data.model_copy(update={"sources": sources})})
    texts = set(training_texts(survey(data_settings(config), 1), 1 << 20))
    assert texts == {row[name] for row in rows for name in ("text", "title")}


def test_a_parquet_file_with_a_damaged_footer_is_named(tmp_path):
    path = corpus.write_parquet(tmp_path / "hurt.parquet", corpus.articles(50))
    body = bytearray(path.read_bytes())
    size = int.from_bytes(body[-8:-4], "little")
    body[-8 - size : -8] = bytes(b ^ 0x5A for b in body[-8 - size : -8])
    path.write_bytes(body)
    assert "hurt.parquet" in message(path)


def test_a_source_of_text_files_says_once_that_each_line_is_a_document(place, caplog):
    for name in ("1.txt", "2.txt.gz"):
        texts = [row["text"].replace("\n", " ").encode() for row in corpus.articles(50)]
        corpus.write_lines(place / "books" / name, texts)
    with caplog.at_level(logging.INFO, "llmtrain.data"):
        survey(data_settings(corpus.config(place / "books", place / "a", place / "b.jsonl")), 1)
    (said,) = [text for text in caplog.messages if "document" in text]
    assert said.startswith("books: each line of a text file is a document of its own")


# Sources of conversations: found by their columns, refused where something does not fit.
QUESTIONS = [{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(20)]
PAIRS = [{"prompt": f"{n}?", "chosen": "Yes.", "rejected": "No."} for n in range(20)]


def find(*sources, **data):
    return survey(data_settings(corpus.config(*sources, **data)), 1)


def refusal(*sources, **data):
    with pytest.raises(UserError) as raised:
        find(*sources, **data)
    return str(raised.value)


@pytest.fixture(params=["jsonl", "parquet"])
def write(request, tmp_path):
    """Writes rows in one of the formats."""
    kind = corpus.write_jsonl if request.param == "jsonl" else corpus.write_parquet
    return lambda rows, name="a": kind(tmp_path / f"{name}.{request.param}", rows)


def test_columns_of_no_form_are_refused_with_both_ways_out(write):
    path = write(QUESTIONS)
    said = refusal(path)
    assert said.startswith("1 problem")
    assert "data.sources.0.text_column = text" in said
    assert "which has: question, answer" in said
    assert "messages, conversations, prompt and completion, or instruction and output" in said
    assert "data.sources.0.columns={prompt: …, completion: …}" in said
    columns = {"prompt": "question", "completion": "answer"}
    assert find({"path": str(path), "columns": columns}).sources[0].form == "prompt_completion"
    assert not find({"path": str(path), "text_column": "answer"}).has_chat


def test_a_column_that_is_mapped_but_not_there_is_refused(write):
    columns = {"prompt": "question", "completion": "reply"}
    said = refusal({"path": str(write(QUESTIONS)), "columns": columns})
    assert "data.sources.0.columns = reply" in said
    assert "columns of the source (question, answer)" in said


def test_a_name_that_is_none_of_ours_is_refused_with_ours(write):
    columns = {"prompt": "question", "reply": "answer"}
    said = refusal({"path": str(write(QUESTIONS)), "columns": columns})
    assert said.startswith("1 problem")
    assert "data.sources.0.columns = reply" in said
    assert "our names (chosen, completion, " in said
    assert "each with the source's column" in said


def test_columns_beside_a_text_column_are_refused(write):
    """A text has no such columns."""
    path, columns = str(write(QUESTIONS)), {"prompt": "question", "completion": "answer"}
    said = refusal({"path": path, "text_column": "answer", "columns": columns})
    assert said.startswith("1 problem")
    assert "data.sources.0.columns" in said
    assert "left out beside text_column" in said
    asked = {"path": path, "columns": columns}
    config = Config.model_validate({
        "data": {"sources": [asked], "seq_len": 64},
        "evaluation": {"sources": [asked | {"text_column": "answer"}]},
        "training": {"steps": 1},
    })  # fmt: skip
    with pytest.raises(UserError, match=r"evaluation\.sources\.0\.columns"):
        survey(data_settings(config), 1)


def test_preference_pairs_are_refused_by_their_source(write):
    said = refusal(write(corpus.articles(20), "text"), write(PAIRS))
    assert said.startswith("1 problem")
    assert "data.sources.1.columns = chosen, rejected" in said
    assert "preference.loss=dpo, which trains on pairs of answers" in said


def test_a_file_of_another_form_than_the_first_is_refused(tmp_path):
    corpus.write_jsonl(tmp_path / "all" / "a.jsonl", chats.rows_of(9))
    corpus.write_jsonl(tmp_path / "all" / "b.jsonl", QUESTIONS)
    said = refusal(tmp_path / "all")
    assert "data.sources.0.path = messages" in said
    assert "b.jsonl, which has: question, answer" in said


@pytest.mark.parametrize(
    ("data", "value"),
    [
        ({"packing": "concat"}, "data.packing = concat"),
        ({"document_mask": False}, "data.document_mask = False"),
    ],
)
def test_a_packing_that_does_not_go_with_conversations_is_refused(tmp_path, data, value):
    talks = corpus.write_jsonl(tmp_path / "chat.jsonl", chats.rows_of(9))
    texts = corpus.write_jsonl(tmp_path / "text.jsonl", corpus.articles(20))
    said = refusal(texts, talks, **data)
    assert said.startswith("1 problem")
    assert value in said
    assert f"try:      {value.partition(' ')[0]}=auto" in said
    find(texts, **data)


# Runs on pairs of answers, or on judged ones.
LABELS = [{"messages": chats.talk(f"{n}?", "Yes."), "label": n % 2 == 0} for n in range(20)]
FOR_PAIRS = (
    "pairs of answers with preference.loss ipo: chosen and rejected, with a prompt; these are"
)
FOR_KTO = "answers with a label with preference.loss kto: prompt, completion and label; these are"


def config_for(loss, *sources, evaluation=(), **data):
    described = [one if isinstance(one, dict) else {"path": str(one)} for one in sources]
    return Config.model_validate({
        "data": {"sources": described, "seq_len": 64, "heldout": 0.0, **data},
        "evaluation": {"sources": [{"path": str(one)} for one in evaluation]},
        "preference": {"loss": loss},
        "training": {"epochs": 2},
    })  # fmt: skip


def problems_of(loss, *sources, **more):
    with pytest.raises(UserError) as raised:
        survey(data_settings(config_for(loss, *sources, **more)), 1)
    return [(one.key, one.value, one.expected, one.remedy) for one in raised.value.problems]


def test_a_run_with_a_loss_of_answers_finds_them_in_training_and_evaluation(write):
    pairs, judged = write(PAIRS, "pairs"), write(LABELS, "judged")
    for loss, path, form in (("dpo", pairs, "pairs"), ("reward", pairs, "pairs"),
                             ("kto", judged, "feedback")):  # fmt: skip
        settings = data_settings(config_for(loss, path, evaluation=[path]))
        found = survey(settings, 1)
        assert [one.form for one in found.sources] == [form]
        assert [one.max_epochs for one in found.sources] == [2]
        assert found.has_chat
        (held,) = evaluation_sources(settings, found.reading)
        assert held.form == form


@pytest.mark.parametrize(
    ("rows", "what", "remedy"),
    [
        (
            LABELS,
            "answers with a label",
            "preference.loss=kto, for sources that are all of this kind",
        ),
        (chats.rows_of(9), "conversations", "preference.loss=none; or name its columns: "),
        (corpus.articles(9), "documents of text", "preference.loss=none; or name its columns: "),
    ],
)
@pytest.mark.parametrize("where", ["data", "evaluation"])
def test_a_run_on_pairs_refuses_other_sources_by_their_kind(write, rows, what, remedy, where):
    pairs, other = write(PAIRS, "pairs"), write(rows, "other")
    if where == "data":
        found, key = problems_of("ipo", pairs, other), "data.sources.1"
    else:
        found, key = problems_of("ipo", pairs, evaluation=[other]), "evaluation.sources.0"
    if remedy.endswith(": "):
        remedy += f"{key}.columns={{…}}"
    assert found == [(f"{key}.path", str(other), f"{FOR_PAIRS} {what}", remedy)]


def test_a_run_on_feedback_refuses_pairs_and_all_else(write, tmp_path):
    pairs, judged = write(PAIRS, "pairs"), write(LABELS, "judged")
    lines = corpus.write_lines(tmp_path / "lines.txt", [b"One.", b"Two."])
    found = problems_of("kto", pairs, judged, write(chats.rows_of(9), "chat"), lines)
    assert [one[:3] for one in found] == [
        ("data.sources.0.path", str(pairs), f"{FOR_KTO} pairs of answers"),
        ("data.sources.2.path", found[1][1], f"{FOR_KTO} conversations"),
        ("data.sources.3.path", str(lines), f"{FOR_KTO} documents of text"),
    ]
    assert found[0][3] == "preference.loss=dpo, for sources that are all of this kind"


def test_a_column_that_is_read_as_text_is_no_pair(write):
    path = str(write(PAIRS))
    found = problems_of("ipo", {"path": path, "text_column": "prompt"})
    assert [one[:3] for one in found] == [
        ("data.sources.0.path", path, f"{FOR_PAIRS} documents of text")
    ]


def test_a_token_cache_has_no_answers(tmp_path):
    path = megatron.write(tmp_path / "cache.idx", [[[1, 2, 3]]])
    found = problems_of("ipo", path)
    said = f"{FOR_PAIRS} a token cache, whose tokens are texts"
    assert found == [("data.sources.0.path", str(path), said, "preference.loss=none")]


def test_the_label_may_have_another_name_in_files_of_one_source(tmp_path):
    rows = [{"conversations": [], "kto_tag": True}]
    assert find_answers(corpus.write_jsonl(tmp_path / "a" / "a.jsonl", rows)) == {
        "label": "kto_tag"
    }
    corpus.write_jsonl(tmp_path / "a" / "b.jsonl", LABELS)
    found = problems_of("kto", tmp_path / "a")
    assert [one[:2] for one in found] == [("data.sources.0.path", "kto_tag")]
    assert "b.jsonl, which has: messages, label" in found[0][2]


def find_answers(path):
    return survey(data_settings(config_for("kto", path)), 1).sources[0].columns


def test_a_file_of_feedback_without_a_conversation_is_refused(tmp_path):
    corpus.write_jsonl(tmp_path / "a" / "a.jsonl", LABELS)
    corpus.write_jsonl(tmp_path / "a" / "b.jsonl", [{"text": "x", "label": 1}])
    found = problems_of("kto", tmp_path / "a")
    assert [one[:2] for one in found] == [("data.sources.0.path", "messages")]


@pytest.mark.parametrize(
    ("data", "key", "expected", "remedy"),
    [
        (
            {"packing": "concat"},
            "data.packing",
            "bestfit, single or auto with preference.loss ipo: concat would cut them anywhere",
            "data.packing=auto",
        ),
        (
            {"document_mask": False},
            "data.document_mask",
            "true or auto with preference.loss ipo: the answers of a block must not see each other",
            "data.document_mask=auto",
        ),
        (
            {"packing": "single", "seq_len": 63},
            "data.seq_len",
            "an even number with data.packing single and preference.loss: each answer of a pair "
            "has half of a block",
            "data.seq_len=64",
        ),
    ],
)
def test_blocks_that_do_not_hold_two_answers_are_refused(tmp_path, data, key, expected, remedy):
    path = corpus.write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    ((found, _, *said),) = problems_of("ipo", path, **data)
    assert (found, *said) == (key, expected, remedy)


def test_a_run_keeps_the_kind_of_rows_that_it_began_with(tmp_path):
    tokenizer = chats.make(tmp_path / "tokenizer", "chatml")
    path = corpus.write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    manifest, encoder = chats.data_of(tokenizer, path, loss="dpo")
    (tmp_path / "manifest.json").write_bytes(manifest.to_bytes())
    again = load(tmp_path / "manifest.json", [SourceConfig(path=str(path))])
    assert (again.answers, again.fingerprint) == ("pairs", manifest.fingerprint)
    config = config_for("dpo", path, seq_len=256)
    config = config.model_copy(update={"training": config.training.model_copy(
        update={"epochs": None})})  # fmt: skip
    check(manifest, data_settings(config), encoder)
    other = config.model_copy(
        update={"preference": config.preference.model_copy(update={"loss": "kto"})}
    )
    with pytest.raises(UserError) as raised:
        check(manifest, data_settings(other), encoder)
    (problem,) = raised.value.problems
    assert problem.key == "preference.loss"
    assert problem.expected == "dpo, or another loss of pairs, as the run's data was read for"
