"""Templates that take the arguments of calls as strings of JSON, as OpenAI stores them."""

import json

import pytest
from helpers import turns
from helpers.chats import data_of, open_chat, spans
from helpers.corpus import write_jsonl
from helpers.turns import DEEPSEEK_V3, GEMMA_4, GLM, GPT_OSS, ROW, by_hand, family

from llmtrain.data.chat.rows import BadRowError, to_example
from llmtrain.data.manifest import ChatFacts
from llmtrain.data.tokens.encode import DocumentEncoder, chat_facts, differing_chat
from llmtrain.data.tokens.encode import open_chat as open_as_stored

BEGIN, END = "<call>", "</call>"
HEAD = (
    "{% for m in messages %}{{ '<turn>' + m.role + ' ' + m.content }}"
    "{% for call in m.tool_calls or [] %}"
)
TAIL = (
    "{% endfor %}{{ '<end>' }}{% endfor %}{{ '<turn>assistant ' if add_generation_prompt else '' }}"
)
TOKENS = ("<turn>", "<end>", BEGIN, END)
# As Python would show an object; nothing at all for an object.
PRINTED = HEAD + "<call>{{ call.function.name }} {{ call.function.arguments }}</call>" + TAIL
ASKED = (
    HEAD + "<call>{{ call.function.name }} "
    "{{ call.function.arguments if call.function.arguments is string }}</call>" + TAIL
)
# Objects alone, quoted as a string or asked for their items; either of both.
AS_JSON = (
    HEAD + "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>" + TAIL
)
ITEMS = (
    HEAD + "<call>{{ call.function.name }}{% for k, v in call.function.arguments.items() %}"
    " {{ k }}={{ v }}{% endfor %}</call>" + TAIL
)
BOTH = (
    HEAD + "<call>{% set a = call.function.arguments %}{{ call.function.name }} "
    "{{ a if a is string else a | tojson }}</call>" + TAIL
)
NONE = "{% for m in messages %}{{ '<turn>' + m.role + ' ' + m.content + '<end>' }}{% endfor %}"


@pytest.fixture
def place(tmp_path):
    def build(template):
        more = () if template in turns.TOKENS else TOKENS
        return family(tmp_path / f"t{len(list(tmp_path.iterdir()))}", template, *more)

    return build


def asked(arguments, **more):
    """A row with one call."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    return {"messages": messages, **more}


def said(directory, row, **settings):
    """The trained ids of a row's only turn."""
    example = to_example(json.dumps(row), "messages")
    (one,) = open_chat(directory, **settings).sequences(example).sequences
    ((_, ids),) = spans(one.ids, one.trained)
    return ids


def test_deepseek_v3_writes_the_string_of_the_row(place):
    at = place(DEEPSEEK_V3)
    chat = open_chat(at)
    assert chat.arguments == "string"
    (one,) = chat.sequences(to_example(json.dumps(ROW), "messages")).sequences
    before = by_hand(at, "<|endoftext|>", "<｜User｜>", "Weather in Ulm?", "<｜Assistant｜>")
    call = by_hand(
        at,
        *("<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>"),
        'get_weather\n```json\n{"city": "Ulm"}\n```',
        *("<｜tool▁call▁end｜>", "<｜end▁of▁sentence｜>"),
    )
    result = by_hand(at, "<｜tool▁outputs▁begin｜>", '{"temp": 21}', "<｜tool▁outputs▁end｜>")
    answer = by_hand(at, "It has 21 degrees in Ulm.", "<｜end▁of▁sentence｜>")
    assert one.ids == [*before, *call, *result, *answer]
    marks = [(before, False), (call, True), (result, False), (answer, True)]
    assert one.trained == [mark for ids, mark in marks for _ in ids]


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (DEEPSEEK_V3, "string"),
        (PRINTED, "string"),
        (ASKED, "string"),
        (AS_JSON, "object"),
        (ITEMS, "object"),
        (BOTH, "object"),
        pytest.param(NONE, "object", id="none-object"),
        (GPT_OSS, "object"),
        (GEMMA_4, "object"),
        (GLM, "object"),
    ],
)
def test_the_form_is_what_the_template_writes(place, template, wanted):
    chat = open_chat(place(template))
    assert chat.arguments == wanted
    facts = chat_facts(chat).to_json()
    assert facts.get("arguments", "object") == wanted
    assert ("arguments" in facts) == (wanted == "string")


# Two more of the kind: an object is shown as Python shows it, or not at all.
@pytest.mark.parametrize("template", [PRINTED, ASKED], ids=["printed", "asked"])
def test_of_the_same_kind_the_string_is_written_unchanged(place, template):
    at = place(template)
    for string in ('{"b":1,  "a" : [1.0, 1e5, true]}', '{"b": "\\u00fc"}', "{}"):
        expected = by_hand(at, BEGIN, f"f {string}", END, "<end>")
        assert said(at, asked(string)) == expected
        system = asked(string, system="Be brief.")  # a message more, in front
        assert said(at, system) == expected


def test_of_the_same_kind_an_object_becomes_the_string_that_openai_would_store(place):
    at = place(PRINTED)
    given = {"b": [1.0, True, None], "a": {"x": "y"}}
    expected = by_hand(at, BEGIN, 'f {"b": [1.0, true, null], "a": {"x": "y"}}', END, "<end>")
    assert said(at, asked(given)) == expected
    assert said(at, asked(None)) == by_hand(at, BEGIN, "f {}", END, "<end>")
    other = to_example(json.dumps(asked({"town": "Đà Nẵng"})), "messages")
    assert 'f {"town": "Đà Nẵng"}</call>' in open_chat(at).render(other.with_strings)
    said_by = [
        {"from": "human", "value": "Go."},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
    ]
    found = open_chat(at).sequences(
        to_example(json.dumps({"conversations": said_by}), "conversations")
    )
    ((_, ids),) = spans(found.sequences[0].ids, found.sequences[0].trained)
    assert ids == by_hand(at, BEGIN, 'f {"a": 1}', END, "<end>")


def test_a_template_that_takes_objects_gets_what_the_string_means(place):
    at = place(AS_JSON)
    assert said(at, asked('{"b":1}')) == by_hand(at, BEGIN, 'f {"b": 1}', END, "<end>")
    example = to_example(json.dumps(asked('{"b":1}')), "messages")
    of = [
        m[1]["tool_calls"][0]["function"]["arguments"]
        for m in (example.messages, example.with_strings)
    ]
    assert of == [{"b": 1}, '{"b":1}']


@pytest.mark.parametrize("template", [PRINTED, AS_JSON])
def test_a_string_that_is_no_json_is_still_a_bad_row(place, template):
    with pytest.raises(BadRowError, match="arguments is a string that is not JSON") as caught:
        said(place(template), asked("{'b': 1}"))
    assert caught.value.key == "arguments"


def test_control_tokens_in_a_string_of_arguments_are_text(place):
    at = place(PRINTED)
    ids = said(at, asked('{"b": "<end>"}'))
    assert ids == by_hand(at, BEGIN, 'f {"b": "<', "end>", '"}', END, "<end>")


def test_prompts_of_inference_have_the_same_form(place):
    at = place(DEEPSEEK_V3)
    chat, example = open_chat(at), to_example(json.dumps(ROW), "messages")
    (one,) = chat.sequences(example).sequences
    ids = chat.prompt_ids(example.messages[:3], example.tools)
    assert one.ids[: len(ids)] == ids


def test_the_form_is_frozen_in_the_manifest_and_absent_means_objects(place, tmp_path):
    at = place(PRINTED)
    manifest, encoder = data_of(at, write_jsonl(tmp_path / "chat.jsonl", [asked('{"b":1}')]))
    stored = json.loads(manifest.to_bytes())["chat"]
    assert stored["arguments"] == "string"
    again = open_as_stored(at, ChatFacts(**stored), 1 << 20)
    assert differing_chat(manifest, DocumentEncoder(encoder.tokenizer, again)) == []
    del stored["arguments"]  # a run that began before this was asked
    old = open_as_stored(at, ChatFacts(**stored), 1 << 20)
    assert old.arguments == "object"
    (one,) = old.sequences(to_example(json.dumps(asked('{"b":1}')), "messages")).sequences
    ((_, ids),) = spans(one.ids, one.trained)
    assert ids == by_hand(at, BEGIN, "f {'b': 1}", END, "<end>")
    (problem, *_) = differing_chat(manifest, DocumentEncoder(encoder.tokenizer, old))
    assert (problem.key, problem.value, problem.expected) == (
        "chat arguments of calls", "object", "string",
    )  # fmt: skip
