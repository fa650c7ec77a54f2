"""Sources of conversations: found by their columns, refused where something does not fit."""

import pytest
from helpers import chats, corpus

from llmtrain.config.binding import data_settings
from llmtrain.config.schema import Config
from llmtrain.data.survey import survey
from llmtrain.errors import UserError

QUESTIONS = [{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(20)]
PAIRS = [{"prompt": f"{n}?", "chosen": "Yes.", "rejected": "No."} for n in range(20)]


def find(*sources, **data):
    return survey(data_settings(corpus.config(*sources, **data)), 1)


def message(*sources, **data):
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
    said = message(path)
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
    said = message({"path": str(write(QUESTIONS)), "columns": columns})
    assert "data.sources.0.columns = reply" in said
    assert "columns of the source (question, answer)" in said


def test_a_name_that_is_none_of_ours_is_refused_with_ours(write):
    columns = {"prompt": "question", "reply": "answer"}
    said = message({"path": str(write(QUESTIONS)), "columns": columns})
    assert said.startswith("1 problem")
    assert "data.sources.0.columns = reply" in said
    assert "our names (completion, conversations, " in said
    assert "each with the source's column" in said


def test_columns_beside_a_text_column_are_refused(write):
    """A text has no such columns."""
    path, columns = str(write(QUESTIONS)), {"prompt": "question", "completion": "answer"}
    said = message({"path": path, "text_column": "answer", "columns": columns})
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
    said = message(write(corpus.articles(20), "text"), write(PAIRS))
    assert said.startswith("1 problem")
    assert "data.sources.1.columns = chosen, rejected" in said
    assert "preference data is not trained here; export, then trl" in said


def test_a_file_of_another_form_than_the_first_is_refused(tmp_path):
    corpus.write_jsonl(tmp_path / "all" / "a.jsonl", chats.rows_of(9))
    corpus.write_jsonl(tmp_path / "all" / "b.jsonl", QUESTIONS)
    said = message(tmp_path / "all")
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
    said = message(texts, talks, **data)
    assert said.startswith("1 problem")
    assert value in said
    assert f"try:      {value.partition(' ')[0]}=auto" in said
    find(texts, **data)
