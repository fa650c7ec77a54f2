import json
import re

import pytest
from helpers.chats import make, open_chat, plain, spans, talk

from llmtrain.data.chat.rows import (
    FORMS,
    BadRowError,
    Example,
    as_text,
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


LONG = talk("moss " * 8, "rain " * 8, "moss " * 8, "rain " * 8, "moss " * 8, "rain " * 8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make(tmp_path_factory.mktemp("long") / "chatml", "chatml")


def sequences(directory, messages, seq_len, **settings):
    chat = open_chat(directory, seq_len, **settings)
    return chat.sequences(Example(messages))


def test_a_row_that_is_too_long_is_bad(directory):
    (one,) = sequences(directory, LONG, 1000).sequences
    size = len(one.ids)
    assert sequences(directory, LONG, size).sequences == (one,)
    with pytest.raises(BadRowError) as error:
        sequences(directory, LONG, size - 1)
    assert error.value.key == "too_long"
    assert str(error.value) == (
        f"{size} tokens, at most {size - 1} (data.seq_len); chat.too_long=drop, truncate or split"
    )


def test_truncation_keeps_the_start_and_its_mask(directory):
    (whole,) = sequences(directory, LONG, 1000).sequences
    for limit in range(1, len(whole.ids), 9):
        found = sequences(directory, LONG, limit, too_long="truncate")
        if not any(whole.trained[:limit]):
            continue
        (one,) = found.sequences
        assert one.ids == whole.ids[: len(one.ids)]
        assert one.trained == whole.trained[: len(one.ids)]
        assert one.trained[-1]
        assert not any(whole.trained[len(one.ids) : limit])
        assert found.counts["truncated"] == 1


def test_a_sequence_without_a_trained_token_is_dropped_and_counted(directory):
    found = sequences(directory, LONG, 5, too_long="truncate")
    assert found.sequences == ()
    assert found.counts == {"dropped": 1}


def test_a_split_keeps_the_system_message_and_whole_exchanges(directory):
    messages = [{"role": "system", "content": "Brief."}, *LONG]
    (whole,) = sequences(directory, messages, 1000).sequences
    found = sequences(directory, messages, len(whole.ids) - 1, too_long="split")
    texts = [plain(directory).decode(one.ids, False) for one in found.sequences]
    chat = open_chat(directory)
    pieces = [messages[:5], [messages[0], *messages[5:]]]
    assert [f"{text}\n" for text in texts] == [chat.render(piece) for piece in pieces]
    assert [len(spans(one.ids, one.trained)) for one in found.sequences] == [2, 1]
    assert found.counts["split"] == 2
    assert found.counts["longest_ids"] == found.counts["ids"]
    assert "truncated" not in found.counts


def test_an_exchange_that_is_too_long_alone_is_truncated(directory):
    messages = talk("Hi?", "Yes.", "moss " * 8, "rain " * 50, "Hi?", "No.")
    found = sequences(directory, messages, 40, too_long="split")
    assert found.counts["split"] == 3
    assert found.counts["truncated"] == 1
    assert [len(one.ids) <= 40 for one in found.sequences] == [True] * 3


def test_a_piece_without_a_trained_turn_is_left_out(directory):
    messages = talk("Hi?", "rain " * 10, "moss " * 8, "rain " * 10)
    found = sequences(directory, messages, 45, too_long="split", train_turns="last")
    assert len(found.sequences) == 1
    assert found.counts["split"] == 2


def test_exchanges_begin_at_a_user_message_that_follows_none(directory):
    said = {"role": "assistant", "content": "rain " * 6}
    messages = [said, *talk("a"), *talk("b", "rain " * 6), *talk("c"), said, said]
    found = sequences(directory, messages, 30, too_long="split")
    texts = [plain(directory).decode(one.ids, False) for one in found.sequences]
    assert ["\na<" in text and "\nb<" in text for text in texts] == [True, False]
    assert ["\nc<" in text for text in texts] == [False, True]


def test_strings_that_are_too_long_are_truncated(directory):
    chat = open_chat(directory, 6, too_long="split")
    found = chat.sequences(Example((), text=("a b", " c d e f g h i")))
    (one,) = found.sequences
    assert len(one.ids) == 6
    assert found.counts["truncated"] == 1
