import json

import pytest
from helpers import turns
from helpers.chats import DEFAULTS, SAMPLE, data_of, library, make, open_chat, spans, talk
from helpers.corpus import write_jsonl
from helpers.rings import needs
from helpers.turns import DEEPSEEK_V3, GEMMA_4, GLM, GPT_OSS, ROW, by_hand, family
from jinja2 import UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from llmtrain.data.chat.rows import BadRowError, to_example
from llmtrain.data.chat.template import NAMED, _Sandbox, named_template, open_template
from llmtrain.data.manifest import ChatFacts
from llmtrain.data.tokens.encode import (
    DocumentEncoder,
    chat_facts,
    differing_chat,
    open_chat as open_as_stored,
)
from llmtrain.errors import UserError

DATE = DEFAULTS.date
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "Größer <b>"}}]


@pytest.fixture
def place(tmp_path):
    def build(text, **config):
        return make(tmp_path / f"t{len(list(tmp_path.iterdir()))}", text, **config)

    return build


def written(directory, messages, tools=None, *, prompt=False, **kwargs):
    return open_template(directory, kwargs, DATE).render(messages, tools, prompt)


@pytest.mark.parametrize(
    ("name", "bos", "expected"),
    [
        (
            "chatml",
            "<|endoftext|>",
            "<|im_start|>system\nBrief. <|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n"
            "<|im_start|>assistant\n Yes.<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llama3",
            "<s>",
            "<s><|start_header_id|>system<|end_header_id|>\n\nBrief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "gemma",
            None,
            "<start_of_turn>user\nBrief. \n\nHi?<end_of_turn>\n"
            "<start_of_turn>model\nYes.<end_of_turn>\n<start_of_turn>model\n",
        ),
    ],
)
def test_named_templates_write_their_formats(place, name, bos, expected):
    directory = place(name, bos_token=bos)
    messages = talk("Hi?", " Yes.", system="Brief. ")
    assert written(directory, messages, prompt=True) == expected
    assert all(token in named_template(name) for token in NAMED[name])
    assert library(directory).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    ) == expected  # fmt: skip


def test_chatml_writes_tools_and_calls(place):
    directory = place("chatml")
    messages = [
        *talk("Hi?", system="S"),
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "2"},
    ]
    text = written(directory, messages, TOOLS)
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert text.startswith("<|im_start|>system\nS\n\nYou can call")
    assert text.count("S\n\n") == 1
    assert json.dumps(TOOLS[0], ensure_ascii=False) in text
    assert f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n<|im_start|>tool\n2<|im_end|>" in text
    said = {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]}
    assert f"Wait.\n{call}<|im_end|>" in written(directory, [*talk("Hi?"), said])


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_formats_without_tools_refuse_them(place, name):
    directory = place(name)
    called = [*talk("Hi?"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    for messages, tools in ((talk("Hi?"), TOOLS), (called, None)):
        with pytest.raises(BadRowError) as error:
            written(directory, messages, tools)
        assert error.value.key == "template"


def test_gemma_needs_alternating_roles(place):
    with pytest.raises(BadRowError, match="alternate"):
        written(place("gemma"), [*talk("Hi?"), *talk("Hi?")])


FEATURES = """
{%- set ns = namespace(n=0, self=1) %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.n = ns.n + 1 %}
    {%- generation %}
    {{- m.content }}{% set inner = 3 %}
    {%- endgeneration %}
{%- endfor %}
  {% if true %}
x
  {% endif %}
{{ dict(a=1) | tojson }} {{ tools | tojson(indent=1) if tools }} {{ ns.n }} {{ inner }}
{{ [bos_token, eos_token, unk_token, kind, documents, add_generation_prompt] }}
{{ messages[-1].thinking }} {{ messages[-1].reasoning_content }} {{ '<é>' | tojson }}
"""


@needs("transformers", "5.23")
def test_the_environment_is_that_of_transformers(place):
    directory = place(FEATURES, unk_token={"__type": "AddedToken", "content": "<u>"})
    messages = [*talk("a", system="s"), {"role": "assistant", "content": "b", "reasoning": "r"}]
    for prompt in (False, True):
        expected = library(directory).apply_chat_template(
            messages, TOOLS, add_generation_prompt=prompt, tokenize=False, kind="k"
        )
        assert written(directory, messages, TOOLS, prompt=prompt, kind="k") == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no such role') }}",
        "{{ messages[0].content + none }}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ raise_exception('no such role') }}",
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_a_template_that_fails_is_a_bad_row(place, template):
    with pytest.raises(BadRowError) as error:
        written(place(template), talk("Hi?"))
    assert error.value.key == "template"


def test_the_template_is_found_where_tokenizers_keep_it(tmp_path, place):
    in_config = place(None, chat_template="config {{ messages[0].content }}")
    assert written(in_config, talk("Hi?")) == "config Hi?"
    (in_config / "chat_template.jinja").write_text("file")
    assert written(in_config, talk("Hi?")) == "file"
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    several = place(None, chat_template=both)
    assert (written(several, talk("Hi?")), written(several, talk("Hi?"), TOOLS)) == (
        *("plain", "tools"),
    )
    (several / "chat_template.jinja").write_text("file")
    (several / "additional_chat_templates").mkdir()
    (several / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert (written(several, talk("Hi?")), written(several, talk("Hi?"), TOOLS)) == (
        *("file", "more"),
    )


def test_special_tokens_are_also_read_from_their_map(place):
    directory = place("{{ bos_token }}{{ sep_token }}", bos_token="<s>")
    (directory / "special_tokens_map.json").write_text('{"bos_token": "x", "sep_token": "<p>"}')
    assert written(directory, talk("Hi?")) == "<s><p>"


def test_no_template_and_a_wrong_one_are_refused(place):
    with pytest.raises(UserError, match=r"name one of chatml, llama3, gemma or a \.jinja file"):
        open_template(SAMPLE, {}, DATE)
    with pytest.raises(UserError, match=r"chat\.template\n.*line 1: "):
        open_template(place("{% if %}"), {}, DATE)
    assert not open_chat(SAMPLE).has_template


def test_the_clock_of_a_template_is_that_of_the_run(place):
    directory = place("{{ strftime_now('%d %b %Y %H:%M') }}{{ date_string }}")
    chat = open_chat(directory, date="2024-07-26T12:30:00", template_kwargs={"date_string": "!"})
    assert chat.render(talk("Hi?")) == "26 Jul 2024 12:30!"
    other = open_chat(directory, date="2025-01-02T03:04:05")
    assert other.render(talk("Hi?")) == "02 Jan 2025 03:04"


@pytest.mark.parametrize(
    "expression",
    [
        *("m.content", "m.absent is defined", "m.absent", "m['content']", "m.items()", "m.keys"),
        *("m.pop('content')", "m.update({})", "m.__class__", "m.content.__class__.mro()"),
        *(
            "m.content.upper()",
            "m.content._x",
            "'{0.__class__}'.format(m)",
            "l.append(1)",
            "l.copy()",
        ),
        *("range.__globals__", "ns.x", "ns.__class__", "m.content.format.__self__"),
    ],
)
def test_the_sandbox_with_a_short_way_allows_and_refuses_the_same(expression):
    found = []
    for sandbox in (_Sandbox, ImmutableSandboxedEnvironment):
        template = sandbox().from_string(f"{{% set ns = namespace(x=1) %}}{{{{ {expression} }}}}")
        for _ in range(2):  # what was allowed once is remembered
            message = {"content": "Yes", "items": "hidden", "__class__": "key", "x": 1}
            try:
                found.append(template.render(m=message, l=[1]).split(" at 0x")[0])
            except (SecurityError, UndefinedError) as error:
                found.append(str(error))
    assert found == [found[0]] * 4


def opened(folder, template):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return open_template(folder, {}, "2026-01-01T00:00:00")


HOSTILE = {
    "no items": ("{{ cycler() }}", "at least one item has to be provided"),
    "a huge string": ("{{ 'a' * 10000000000 }}", "a product of more than 10,000,000 items"),
    "a huge list": ("{{ 10000000000 * [1] }}", "a product of more than 10,000,000 items"),
    "a huge power": ("{{ 10 ** (10 ** 10) }}", "a power of more than 100,000 bits"),
    "half a character": (r"{{ '\ud800' }}", r"half a character: '\ud800'"),
    "half a character as it is": ("\ud800", r"half a character: '\ud800'"),
    "itself": ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
    "an infinity": ("{{ 1e999|int }}", "inf"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_template_makes_a_bad_row(tmp_path, case):
    template, said = HOSTILE[case]
    with pytest.raises(BadRowError) as caught:
        opened(tmp_path, template).render([{"role": "user", "content": "Hi"}], None, True)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "[" * 3000 + "]" * 3000 + " }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% if 1 %}" * 500 + "{% endif %}" * 500,
        "{% for a in messages %}" * 30 + "{% endfor %}" * 30,
    ],
)
def test_a_template_of_too_many_brackets_is_refused(tmp_path, template):
    with pytest.raises(UserError, match="a Jinja template that can be compiled"):
        opened(tmp_path, template)


@pytest.mark.parametrize("template", [5, True, [1], {"a": 1}, [{"name": "x"}], [{"name": 1}]])
def test_a_template_that_is_no_string_is_refused(tmp_path, template):
    with pytest.raises(UserError, match=r"chat\.template = ") as caught:
        opened(tmp_path, template)
    assert "a string, or a list of {name, template}" in str(caught.value)


def test_products_that_templates_need_are_as_before(tmp_path):
    template = opened(
        tmp_path, "{{ messages[0].content * 3 }}{{ 2 ** 8 }}{{ [1, 2] * 2 }}{{ 3 * 4 }}"
    )
    written = template.render([{"role": "user", "content": "Hi"}], None, True)
    assert written == "HiHiHi256[1, 2, 1, 2]12"


# Templates that take the arguments of calls as strings of JSON, as OpenAI stores them.


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
def built(tmp_path):
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


def test_deepseek_v3_writes_the_string_of_the_row(built):
    at = built(DEEPSEEK_V3)
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
def test_the_form_is_what_the_template_writes(built, template, wanted):
    chat = open_chat(built(template))
    assert chat.arguments == wanted
    facts = chat_facts(chat).to_json()
    assert facts.get("arguments", "object") == wanted
    assert ("arguments" in facts) == (wanted == "string")


# Two more of the kind: an object is shown as Python shows it, or not at all.
@pytest.mark.parametrize("template", [PRINTED, ASKED], ids=["printed", "asked"])
def test_of_the_same_kind_the_string_is_written_unchanged(built, template):
    at = built(template)
    for string in ('{"b":1,  "a" : [1.0, 1e5, true]}', '{"b": "\\u00fc"}', "{}"):
        expected = by_hand(at, BEGIN, f"f {string}", END, "<end>")
        assert said(at, asked(string)) == expected
        system = asked(string, system="Be brief.")  # a message more, in front
        assert said(at, system) == expected


def test_of_the_same_kind_an_object_becomes_the_string_that_openai_would_store(built):
    at = built(PRINTED)
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


def test_a_template_that_takes_objects_gets_what_the_string_means(built):
    at = built(AS_JSON)
    assert said(at, asked('{"b":1}')) == by_hand(at, BEGIN, 'f {"b": 1}', END, "<end>")
    example = to_example(json.dumps(asked('{"b":1}')), "messages")
    of = [
        m[1]["tool_calls"][0]["function"]["arguments"]
        for m in (example.messages, example.with_strings)
    ]
    assert of == [{"b": 1}, '{"b":1}']


@pytest.mark.parametrize("template", [PRINTED, AS_JSON])
def test_a_string_that_is_no_json_is_still_a_bad_row(built, template):
    with pytest.raises(BadRowError, match="arguments is a string that is not JSON") as caught:
        said(built(template), asked("{'b': 1}"))
    assert caught.value.key == "arguments"


def test_control_tokens_in_a_string_of_arguments_are_text(built):
    at = built(PRINTED)
    ids = said(at, asked('{"b": "<end>"}'))
    assert ids == by_hand(at, BEGIN, 'f {"b": "<', "end>", '"}', END, "<end>")


def test_prompts_of_inference_have_the_same_form(built):
    at = built(DEEPSEEK_V3)
    chat, example = open_chat(at), to_example(json.dumps(ROW), "messages")
    (one,) = chat.sequences(example).sequences
    ids = chat.prompt_ids(example.messages[:3], example.tools)
    assert one.ids[: len(ids)] == ids


def test_the_form_is_frozen_in_the_manifest_and_absent_means_objects(built, tmp_path):
    at = built(PRINTED)
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
