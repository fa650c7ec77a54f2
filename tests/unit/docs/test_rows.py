"""The tables of the page on rows: each row is tried, and becomes what the page says."""

import json
import re
from pathlib import Path

import pytest
from helpers import chats, corpus

from llmtrain.config.binding import data_settings
from llmtrain.config.schema import Config
from llmtrain.data.audit.first_rows import check_first_rows, count_unread
from llmtrain.data.chat.chat import Chat
from llmtrain.data.documents.reader import Reader
from llmtrain.data.heldout import training_texts
from llmtrain.data.survey import survey
from llmtrain.data.tokens.encode import DocumentEncoder, settings_of
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import UserError

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "rows.md"
LETTERS = {
    "U": '{"role": "user", "content": "Hi?"}',
    "A": '{"role": "assistant", "content": "Yes."}',
}
ROWS = re.findall(r"^\| `(\{.*\})` \| (.*) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
# As chatml, but with the names of the functions that are called.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokens = ("<|im_start|>", "<|im_end|>")
    return chats.make(tmp_path_factory.mktemp("rows") / "tokenizer", TEMPLATE, tokens)


def test_each_form_and_key_stands_on_the_page():
    assert len(ROWS) > 50
    text = PAGE.read_text("utf-8")
    for name in ("weight", "train", "history", "system", "function_call", "functions", "kto_tag"):
        assert f'"{name}"' in text


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(("row", "told"), ROWS, ids=[str(n) for n in range(len(ROWS))])
def test_a_row_becomes_what_the_page_says(tmp_path, tokenizer, row, told, suffix):
    for letter, message in LETTERS.items():
        row = re.sub(rf"(?<![\w\"]){letter}(?![\w\"])", lambda _, of=message: of, row)
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        corpus.write_parquet(path, [json.loads(row)])
    else:
        path.write_text(f"[{row}]" if suffix == "json" else f"{row}\n")
    config = Config.model_validate({
        "data": {"sources": [{"path": str(path)}], "seq_len": 512, "heldout": 0.0},
        "training": {"steps": 1},
    })  # fmt: skip
    chat = Chat(tokenizer, settings_of(config.chat, chats.DEFAULTS.date), 512)
    encoder = DocumentEncoder(open_tokenizer(tokenizer), chat)
    expected = re.findall("`([^`]+)`", told)
    if told.startswith("refused"):
        with pytest.raises(UserError) as caught:
            check_first_rows(survey(data_settings(config), 1), encoder)
        assert expected[0] in str(caught.value)
        return
    found = survey(data_settings(config), 1)
    (source,), reader = found.sources, Reader(found.reading)
    assert (source.form is None) is (told == "a document")
    if source.form is None:
        return
    check_first_rows(found, encoder)
    trained, _, unread = told.partition("; not read: ")
    assert sorted(count_unread(source, 42, reader, encoder)) == re.findall("`([^`]+)`", unread)
    (text,) = training_texts(source, 0, 42, reader)
    (encoded,) = encoder.documents(source, [text])
    said = []
    for begin, end in zip(encoded.cuts, encoded.cuts[1:], strict=False):
        ids, flags = encoded.ids[begin:end].tolist(), encoded.trained[begin:end].tolist()
        said += [chats.plain(tokenizer).decode(one, False) for _, one in chats.spans(ids, flags)]
    said = [re.sub(r"<\|(im_end|endoftext)\|>$", "", one) for one in said]
    expected = re.findall("`([^`]+)`", trained)
    calls = re.findall("a call of `([^`]+)`", trained)
    assert said == [f"[{one}]" if one in calls else one for one in expected]
