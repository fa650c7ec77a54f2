"""The beginnings of a conversation, rendered one after the other and each for itself."""

import numpy as np
import pytest
from helpers.chats import DEFAULTS, make, open_chat, talk
from hypothesis import given, settings, strategies as st

from llmtrain.data.chat import rendering
from llmtrain.data.chat.rendering import Text
from llmtrain.data.chat.rows import BadRowError, Example
from llmtrain.data.chat.template import Template, named_template
from llmtrain.errors import UserError

TOOLS = [{"type": "function", "function": {"name": "f", "description": "d"}}]
ONE = "<|{{ message.role }}|>{{ message.content }}<|end|>\n"
END = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
EACH = "{% for message in messages %}"
LAST_QUERY = """{%- set ns = namespace(last=messages|length - 1, go=true) %}
{%- for message in messages[::-1] %}
  {%- if ns.go and message.role == 'user' %}
    {%- set ns.last = messages|length - 1 - loop.index0 %}{% set ns.go = false %}
  {%- endif %}
{%- endfor %}"""

# Those with at least one loop of whose rounds some are left out.
LINEAR = {
    "plain": EACH + ONE + "{% endfor %}" + END,
    "position": EACH + "{{ loop.index }}{{ loop.index0 }}{{ loop.first }}" + ONE + "{% endfor %}",
    "is it the last": EACH + ONE + "{% if loop.last %}!{% endif %}{% endfor %}" + END,
    "the next one": EACH + ONE + "{{ loop.nextitem.role }}{% endfor %}" + END,
    "the one before": EACH + ONE + "{{ (loop.previtem or {}).content }}{% endfor %}" + END,
    "look back": EACH + "{% if loop.index0 and messages[loop.index0 - 1].role == message.role %}+"
    "{% endif %}" + ONE + "{% endfor %}" + END,
    "look ahead": EACH + ONE + "{% if loop.last or messages[loop.index0 + 1].role != 'user' %}."
    "{% endif %}{% endfor %}" + END,
    "two ahead": EACH + ONE + "{{ (messages[loop.index0 + 2] or {}).role }}{% endfor %}" + END,
    "state": "{% set ns = namespace(n=0, seen='') %}" + EACH + "{% set ns.n = ns.n + 1 %}"
    "{% if message.role == 'user' %}{% set ns.seen = message.content %}{% endif %}"
    "{{ ns.n }}" + ONE + "{% endfor %}{{ ns.seen }}" + END,
    "a new name in a namespace": "{% set ns = namespace() %}" + EACH + "{{ ns.last }}"
    "{% set ns.last = message.content %}" + ONE + "{% endfor %}{{ ns.last }}" + END,
    "an attribute called self": "{% set ns = namespace(self=1) %}" + EACH
    + "{% set ns.self = ns.self * 2 %}" + ONE + "{% endfor %}{{ ns.self }}",
    "without the first": "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{{ loop.index }}{{ rest[loop.index0].role }}" + ONE + "{% endfor %}"
    + END,
    "its own name again": "{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    + EACH + "{{ messages[loop.index0].content }}{{ system }}" + ONE + "{% endfor %}" + END,
    "two ways": "{% if tools %}{{ tools | tojson }}" + EACH + "T" + ONE + "{% endfor %}{% else %}"
    + EACH + ONE + "{% endfor %}{% endif %}" + END,
    "a macro": "{% macro line(message, n) %}{{ n }}" + ONE + "{% endmacro %}" + EACH
    + "{{ line(message, loop.index) }}{% endfor %}" + END,
    "a namespace of a round": "{% set ns = namespace(n=0) %}" + EACH
    + "{% set own = namespace(n=loop.index) %}{% set own.n = own.n * 2 %}"
    "{% set ns.n = ns.n + own.n %}{{ own.n }}" + ONE + "{% endfor %}{{ ns.n }}" + END,
    "a namespace of a macro": "{% macro line(message) %}{% set ns = namespace(text='') %}"
    "{% for letter in message.content %}{% set ns.text = letter + ns.text %}{% endfor %}"
    "{{ ns.text }}{% endmacro %}" + EACH + "{{ line(message) }}" + ONE + "{% endfor %}" + END,
    "breaks": EACH + "{% if loop.index == 7 %}{% break %}{% endif %}{% if loop.index == 2 %}"
    "{% continue %}{% endif %}" + ONE + "{% endfor %}" + END,
    "breaks without loop": EACH + "{% if message.content == 'stop' %}{% break %}{% endif %}" + ONE
    + "{% endfor %}" + END,
    "else": EACH + ONE + "{% else %}nothing{% endfor %}" + END,
    "the number at the end": EACH + ONE + "{% endfor %}{{ messages | length }}{{ messages[-1] }}",
    "a name in and outside": "{% set message = 'x' %}" + EACH + ONE + "{% endfor %}{{ message }}",
    "a loop inside": EACH + "{% for letter in message.content %}{{ letter }}{{ loop.revindex }}"
    "{% endfor %}" + ONE + "{% endfor %}" + END,
    "cycle": EACH + "{{ loop.cycle('a', 'b', 'c') }}" + ONE + "{% endfor %}" + END,
    "generation": EACH + "{% generation %}" + ONE + "{% endgeneration %}{% endfor %}" + END,
    "refuses two of a kind": "{% set ns = namespace(role='') %}" + EACH
    + "{% if ns.role == message.role %}{{ raise_exception('two of ' + message.role) }}{% endif %}"
    "{% set ns.role = message.role %}" + ONE + "{% endfor %}" + END,
    "fails in the middle": EACH + ONE + "{{ 1 / (5 - loop.index) }}{% endfor %}" + END,
    "fails at the last": EACH + ONE + "{% if loop.last %}{{ message.none.none }}{% endif %}"
    "{% endfor %}" + END,
}  # fmt: skip
OTHERS = {
    "the number of messages": EACH + "{{ messages | length }}" + ONE + "{% endfor %}" + END,
    "the length of the loop": EACH + "{{ loop.length }}" + ONE + "{% endfor %}" + END,
    "from the end": EACH + "{{ loop.revindex }}{{ loop.revindex0 }}" + ONE + "{% endfor %}" + END,
    "the last message": EACH + "{{ messages[-1].role }}" + ONE + "{% endfor %}" + END,
    "a number from before": "{% set n = messages | length %}" + EACH + "{{ n }}" + ONE
    + "{% endfor %}" + END,
    "as one, true and 1.0": "{% set n = messages | length %}{% if n == 1 %}{% set n = true %}"
    "{% elif n == 2 %}{% set n = 1.0 %}{% else %}{% set n = 1 %}{% endif %}" + EACH + "{{ n }}"
    + ONE + "{% endfor %}" + END,
    "the last question": LAST_QUERY + EACH + "{% if loop.index0 > ns.last %}?{% endif %}" + ONE
    + "{% endfor %}" + END,
    "a list of them": "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    + EACH + "{% if message == users[-1] %}!{% endif %}" + ONE + "{% endfor %}" + END,
    "kept in a namespace": "{% set ns = namespace(all=messages) %}" + EACH + "{{ ns.all | length }}"
    + ONE + "{% endfor %}" + END,
    "written before": "{{ messages | length }}" + EACH + ONE + "{% endfor %}" + END,
    "reversed": "{% for message in messages | reverse %}" + ONE + "{% endfor %}" + END,
    "filtered": "{% for message in messages if message.role != 'system' %}" + ONE + "{% endfor %}",
    "the prompt inside": EACH + ONE + "{% if loop.last and add_generation_prompt %}A{% endif %}"
    "{% endfor %}",
    "the prompt in a macro": "{% macro line(m) %}{{ add_generation_prompt }}{{ m.role }}"
    "{% endmacro %}" + EACH + "{{ line(message) }}{% endfor %}",
    "all of them in a macro": "{% macro line() %}{{ messages | length }}{% endmacro %}" + EACH
    + "{{ line() }}{% endfor %}",
    "a loop handed on": "{% macro line(l) %}{{ l.length }}{% endmacro %}" + EACH
    + "{{ line(loop) }}{% endfor %}",
    "changed": EACH + "{% if loop.changed(message.role) %}#{% endif %}" + ONE + "{% endfor %}",
    "cycler": "{% set c = cycler('a', 'b', 'c') %}" + EACH + "{{ c.next() }}" + ONE
    + "{% endfor %}{{ c.next() }}",
    "joiner": "{% set c = joiner(';') %}" + EACH + "{{ c() }}" + ONE + "{% endfor %}{{ c() }}",
    "a namespace in one": "{% set ns = namespace(inner=namespace(n=0)) %}" + EACH
    + "{% set deep = ns.inner %}{% set deep.n = deep.n + 1 %}{{ deep.n }}{% endfor %}"
    "{{ ns.inner.n }}",
    "a namespace of a round in one": "{% set ns = namespace(own=none) %}" + EACH
    + "{% if not ns.own %}{% set ns.own = namespace(n=0) %}{% endif %}"
    "{% set deep = ns.own %}{% set deep.n = deep.n + 1 %}{{ deep.n }}{% endfor %}{{ ns.own.n }}",
    "slices": EACH + "{{ messages[loop.index0:] | length }}" + ONE + "{% endfor %}" + END,
    "recursive": "{% for message in messages recursive %}" + ONE + "{% endfor %}" + END,
    "in a block": "{% block all %}" + EACH + ONE + "{% endfor %}{% endblock %}" + END,
    "as text": "{{ messages | tojson }}",
    "one by one": "{% for n in range(messages | length) %}{{ messages[n].content }}{% endfor %}",
}  # fmt: skip
TWICE = {
    "twice": "{% set ns = namespace(system='') %}" + EACH + "{% if message.role == 'system' %}"
    "{% set ns.system = message.content %}{% endif %}{% endfor %}{{ ns.system }}" + EACH + ONE
    + "{% endfor %}" + END,
    "twice, with namespaces of a round": EACH + "{% set a = namespace(n=1) %}{{ a.n }}{% endfor %}"
    + EACH + "{% set b = namespace(n=2) %}{{ b.n }}" + ONE + "{% endfor %}" + END,
    "twice, and it writes": EACH + "{{ message.role }}{% endfor %}" + EACH + ONE + "{% endfor %}",
}  # fmt: skip


def template(text):
    return Template({"default": text}, {"bos_token": "<s>"}, DEFAULTS.date)


def conversation(rng, count):
    """Roles in any order: what a template does with them is its own affair."""
    roles, texts = (
        ("user", "assistant", "user", "assistant", "tool"),
        ("a", "b\n", "stop", "né ", ""),
    )
    front = ["system"] * int(rng.random() < 0.3)
    drawn = [*front, *(roles[n] for n in rng.integers(0, len(roles), count))][:count]
    if rng.random() < 0.4:
        drawn = [("user", "assistant")[n % 2] for n in range(count)]
    return [{"role": role, "content": texts[rng.integers(0, len(texts))]} for role in drawn]


def said(make_text):
    try:
        return str(make_text())
    except BadRowError as error:
        return error.why


def beginnings_are_alike(text, rng):
    messages = conversation(rng, int(rng.integers(1, 14)))
    tools = TOOLS if rng.random() < 0.3 else None
    one = template(text).beginnings(messages, tools)
    one.note(int(rng.integers(1, len(messages) + 1)))
    for count in rng.permutation(len(messages) + 1).tolist():
        for prompt in (True, False):
            alone = template(text).beginnings(messages[:count], tools)
            expected = said(lambda: alone.render(count, prompt))  # noqa: B023
            assert said(lambda: one.render(count, prompt)) == expected  # noqa: B023


@pytest.mark.parametrize(
    "text", [*(LINEAR | OTHERS | TWICE).values()], ids=[*LINEAR, *OTHERS, *TWICE]
)
def test_a_beginning_is_what_the_template_makes_of_it_alone(text):
    rng = np.random.default_rng(7)
    for _ in range(25):
        beginnings_are_alike(text, rng)


def rounds(text, count, monkeypatch):
    """How many rounds all beginnings of a conversation take."""
    runs = []
    own = rendering._Run.__init__

    def counted(run, *arguments):
        runs.append(run)
        own(run, *arguments)

    monkeypatch.setattr(rendering._Run, "__init__", counted)
    one = template(text).beginnings(talk(*["x"] * count), None)
    one.note(count)
    for index in range(1, count, 2):
        said(lambda: one.render(index, True))  # noqa: B023
        said(lambda: one.render(index + 1, False))  # noqa: B023
    return sum(run.rounds for run in runs)


@pytest.mark.parametrize(
    "name", [name for name in LINEAR if name not in ("fails in the middle", "breaks")]
)
def test_rounds_that_would_write_the_same_are_left_out(name, monkeypatch):
    """A loop of n rounds, and of each beginning the last few."""
    assert rounds(LINEAR[name], 400, monkeypatch) <= 7 * 400


@pytest.mark.parametrize("name", ["the number of messages", "the last question", "changed"])
def test_rounds_that_might_write_something_else_are_run(name, monkeypatch):
    assert rounds(OTHERS[name], 100, monkeypatch) > 100 * 100 / 3


@given(
    st.lists(st.sampled_from(sorted({*LINEAR, *OTHERS})), min_size=1, max_size=3, unique=True),
    st.integers(0),
)
@settings(max_examples=60, deadline=None)
def test_templates_one_after_the_other_are_no_exception(names, seed):
    """Namespaces, variables and what is written come from several loops."""
    text = "\n".join((LINEAR | OTHERS)[name] for name in names)
    beginnings_are_alike(text, np.random.default_rng(seed))


@pytest.mark.parametrize("cut", range(8))
def test_a_shared_text_is_cut_and_compared_like_a_string(cut):
    whole = Text("abcdefgh", 4, "xyz")
    assert (len(whole), str(whole)) == (7, "abcdxyz")
    assert str(whole.until(cut)) == "abcdxyz"[:cut]
    assert whole.startswith(whole.until(cut))
    for stop in range(cut, 8):
        assert whole.part(cut, stop) == "abcdxyz"[cut:stop]
    for other in ("abcdefg", "abcdx", "abcdxyz", "abcdxyzz", "abc", "b", ""):
        for shared in range(5):
            if other[:shared] == "abcdefgh"[:shared]:
                one = Text(whole.base, shared, other[shared:])
                assert whole.startswith(one) is "abcdxyz".startswith(other)
                assert one.startswith(whole) is other.startswith("abcdxyz")
        assert whole.startswith(Text("", 0, other)) is "abcdxyz".startswith(other)


ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}"
    "{% endfor %}",
    "lists in loops": "{% set all = range(99999) | list %}{% for a in all %}{% for b in all %}"
    "{% endfor %}{% endfor %}",
    "over the messages": EACH + "{% for a in range(99999) %}{% for m in messages %}{% endfor %}"
    "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "a recursive loop": "{% for a in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}"
    "{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("text", ENDLESS.values(), ids=list(ENDLESS))
def test_a_template_that_loops_without_end_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.setattr(rendering, "_ROUNDS", 200_000)
    chat = open_chat(make(tmp_path / "endless", named_template("chatml") + text))
    with pytest.raises(UserError, match=r"(?s)chat.template.*loops more than 20\d,000 times"):
        chat.check()


def test_a_long_conversation_makes_a_template_loop_for_long_and_it_may(tmp_path, monkeypatch):
    monkeypatch.setattr(rendering, "_ROUNDS", 1_000)
    every = "{% for a in range(messages | length) %}{% endfor %}"
    text = EACH + every + "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    text += "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    directory = make(tmp_path / "long", "chatml")
    (directory / "chat_template.jinja").write_text(text)
    (one,) = open_chat(directory).sequences(Example(talk(*["x"] * 60))).sequences
    assert sum(one.trained) > 30
