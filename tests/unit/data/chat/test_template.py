import json

import pytest
from helpers.chats import DEFAULTS, SAMPLE, library, make, open_chat, talk
from helpers.rings import needs
from jinja2 import UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from llmtrain.data.chat.rows import BadRowError
from llmtrain.data.chat.template import NAMED, _sandbox, named_template, open_template
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
    for sandbox in (_sandbox(), ImmutableSandboxedEnvironment):
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
