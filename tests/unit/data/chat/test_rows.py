import json
import re

import pytest

from llmtrain.data.chat.rows import (
    FORMS,
    BadRowError,
    as_text,
    columns_of,
    form_of,
    our_names,
    to_example,
)
from llmtrain.errors import UserError

KEY = "data.sources.0.columns"
ASKED = {"role": "user", "content": "Hi?"}
SAID = {"role": "assistant", "content": "Yes."}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}


def example(row, form="messages", **columns):
    return to_example(json.dumps(row), form, columns)


def why(row, form="messages"):
    with pytest.raises(BadRowError) as error:
        example(row, form)
    return error.value.key, str(error.value)


@pytest.mark.parametrize(
    ("columns", "form"),
    [
        (["id", "messages", "tools"], "messages"),
        (["conversations", "prompt", "completion"], "conversations"),
        (["prompt", "completion"], "prompt_completion"),
        (["instruction", "input", "output"], "alpaca"),
        (["prompt"], None),
        (["text"], None),
    ],
)
def test_the_form_is_the_first_whose_columns_are_there(columns, form):
    assert form_of(columns, KEY) == form
    assert form in (*FORMS, None)


def test_columns_are_read_under_our_names():
    columns = {"prompt": "question", "completion": "answer"}
    names = our_names(["id", "question", "answer", "prompt"], columns, KEY)
    assert names == ("id", "prompt", "completion")
    assert form_of(names, KEY) == "prompt_completion"
    found = example({"question": "Hi?", "answer": "Yes."}, "prompt_completion", **columns)
    assert found.text == ("Hi?", "Yes.")
    with pytest.raises(UserError, match=r"data\.sources\.0\.columns = question"):
        our_names(["prompt"], {"prompt": "question"}, KEY)


def test_optional_columns_are_read_where_they_are():
    assert columns_of("messages", ["tools", "messages", "x", "input"]) == ("messages", "tools")
    assert columns_of("alpaca", ["output", "input", "instruction", "system"]) == (
        *("instruction", "output", "input", "system"),
    )


def test_a_parquet_row_has_only_the_fields_that_are_not_null():
    row = {"messages": [{**ASKED, "tool_calls": None}, SAID], "tools": None}
    assert json.loads(as_text(row)) == {"messages": [ASKED, SAID]}
    assert "é" in as_text({"messages": "é"})


def test_the_four_forms_say_the_same():
    sharegpt = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}]
    pair = {"prompt": [ASKED], "completion": [SAID]}
    same = [
        example({"messages": [ASKED, SAID]}),
        example({"conversations": sharegpt}, "conversations"),
        example(pair, "prompt_completion"),
        example({"instruction": "Hi?", "output": "Yes."}, "alpaca"),
    ]
    assert all(list(one.messages) == [ASKED, SAID] for one in same)
    with_input = example({"instruction": "Add.", "input": "1, 2", "output": "3"}, "alpaca")
    assert with_input.messages[0]["content"] == "Add.\n\n1, 2"
    given = example({"messages": [ASKED, SAID], "system": "Be brief."})
    assert given.messages[0] == {"role": "system", "content": "Be brief."}


def test_the_answers_of_a_prompt_are_not_trained():
    row = {"prompt": [ASKED, SAID, ASKED], "completion": [SAID]}
    assert example(row, "prompt_completion").untrained == {0, 1, 2}
    assert example({**row, "system": "s"}, "prompt_completion").untrained == {1, 2, 3}


def test_train_false_excludes_messages_or_the_row():
    masked = example({"messages": [ASKED, {**SAID, "train": False}, ASKED, SAID], "system": "s"})
    assert masked.untrained == {2}
    assert "train" not in masked.messages[2]
    assert example({"messages": [ASKED, SAID], "train": False}).untrained == {0, 1}
    text = {"prompt": "a", "completion": "b", "train": False}
    assert example(text, "prompt_completion").untrained


def test_tools_and_calls_are_parsed():
    calls = [{"function": {"name": "f", "arguments": '{"x": null}'}}]
    row = {
        "messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": calls}],
        "tools": '[{"name": "f"}]',
    }
    found = example(row)
    assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert found.tools == [{"name": "f"}]
    said = json.dumps({"name": "f", "arguments": {"x": None}})
    flat = [
        {"from": "human", "value": "?"},
        {"from": "function_call", "value": said},
        {"from": "observation", "value": "1"},
    ]
    found = example({"conversations": flat, "tools": []}, "conversations")
    assert found.messages[1]["tool_calls"] == [CALL]
    assert found.messages[2] == {"role": "tool", "content": "1"}
    assert found.tools is None


def test_half_a_surrogate_pair_is_replaced():
    line = r'{"messages": [{"role": "user", "content": "a\ud83d b\uD83D\uDE00"}]}'
    assert to_example(line, "messages").messages[0]["content"] == "a\ufffd b😀"
    line = r'{"messages": [], "tools": "[{\"name\": \"\\udc00\"}]"}'
    with pytest.raises(BadRowError, match="no messages"):
        to_example(line, "messages")
    calls = [{"function": {"name": "f", "arguments": r'{"x": "\udc00"}'}}]
    found = example({"messages": [ASKED, {**SAID, "tool_calls": calls}]})
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": "\ufffd"}


def test_text_parts_are_joined_and_null_fields_dropped():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = example({"messages": [{"role": "user", "content": parts, "name": None}, SAID]})
    assert found.messages[0] == {"role": "user", "content": "ab"}


@pytest.mark.parametrize(
    ("row", "key", "said"),
    [
        ({"messages": [{"role": "bot", "content": "x"}]}, "role", "role 'bot'; allowed system"),
        ({"messages": [{"content": "x"}]}, "role", "role null"),
        ({"messages": [{"role": "user", "content": None}]}, "content", "null"),
        ({"messages": [{"role": "user"}]}, "content", "null"),
        ({"messages": [{"role": "user", "content": 3}]}, "content", "3"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            *("content", "only text"),
        ),
        ({"messages": [ASKED, {**SAID, "content": " \n"}]}, "answer", "turn 1: .* blank"),
        (
            {"messages": [ASKED, {**SAID, "thinking": ["x"]}]},
            *("content", "thinking is .*not a string"),
        ),
        ({"messages": []}, "messages", "no messages"),
        ({"messages": None}, "messages", "null, not a list"),
        ({"messages": "Hi?"}, "messages", "string that is not JSON"),
        ({"messages": ["Hi?"]}, "messages", "not an object"),
        ({"messages": [{**ASKED, "train": "no"}, SAID]}, "train", "'no'"),
        ({"messages": [ASKED, {**SAID, "tool_calls": [{}]}]}, "tool_calls", "no name"),
        ({"messages": [ASKED, SAID], "tools": "{"}, "tools", "not JSON"),
        ({"messages": [ASKED, SAID], "tools": [3]}, "tools", "3, not an object"),
        ([1], "json", "not an object"),
    ],
)
def test_a_bad_row_says_what_is_wrong(row, key, said):
    found, text = why(row)
    assert found == key
    assert re.search(said, text)


def test_bad_prompts_and_completions():
    assert why({"prompt": "a", "completion": " "}, "prompt_completion")[0] == "answer"
    assert why({"prompt": "a", "completion": [SAID]}, "prompt_completion")[0] == "prompt"
    assert why({"prompt": "a", "completion": None}, "prompt_completion")[0] == "prompt"
    beside = {"prompt": "a", "completion": "b", "system": "c"}
    assert "'system' beside" in why(beside, "prompt_completion")[1]
    assert why({"instruction": None, "output": "x"}, "alpaca")[0] == "content"
    assert why({"instruction": "x", "output": None}, "alpaca")[0] == "content"
    with pytest.raises(BadRowError, match="not JSON"):
        to_example("{", "messages")
