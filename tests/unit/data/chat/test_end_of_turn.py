import copy
import json

import pytest
from helpers.chats import data_of, library, make, open_chat, spans, talk
from helpers.config import loaded
from helpers.corpus import write_jsonl
from helpers.turns import DEEPSEEK_V3, GEMMA_4, GLM, GPT_OSS, ROW, by_hand, family, letters

from llmtrain.data.chat.rows import BadRowError, Example, to_example
from llmtrain.data.manifest import ChatFacts
from llmtrain.data.tokens.encode import (
    DocumentEncoder,
    chat_facts,
    differing_chat,
    open_chat as open_as_stored,
)
from llmtrain.errors import UserError

CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + END }}{% endfor %}"
)
PROMPT = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TOKENS = ("<|im_start|>", "<|im_end|>", "<|im|>", "<|im_end|>s", "<think>")


@pytest.fixture
def end(tmp_path):
    def find(end="'<|im_end|>\n'", template=CHATML + PROMPT, **settings):
        directory = make(tmp_path / f"t{len(list(tmp_path.iterdir()))}", template, TOKENS)
        text = (directory / "chat_template.jinja").read_text().replace("END", end)
        (directory / "chat_template.jinja").write_text(text)
        return open_chat(directory, **settings).check()

    return find


def test_the_token_after_an_answer_ends_the_turn(end):
    found = end()
    assert (found.text, found.lead, found.header) == ("<|im_end|>", "", "")
    assert end("'\n<|im_end|>\n'").text == "<|im_end|>"
    assert end("'<|im_end|>s'").text == "<|im_end|>s"
    assert end("eos_token").text == "<|endoftext|>"


def test_another_one_that_the_template_writes_can_be_named(end):
    twice = "'<|im_end|>\n<|endoftext|>'"
    assert end(twice).text == "<|im_end|>"
    assert end(twice, end_of_turn="<|endoftext|>").text == "<|endoftext|>"
    with pytest.raises(UserError, match=r"chat\.end_of_turn = <\|im\|>\n.*it writes '<\|im_end\|>"):
        end(twice, end_of_turn="<|im|>")
    with pytest.raises(UserError, match="an added token of the tokenizer"):
        end(end_of_turn="</s>")


@pytest.mark.parametrize("text", ["'\n'", "'.'", "' stop<|im_end|>'"])
def test_no_token_after_the_answer_is_refused(end, text):
    with pytest.raises(UserError, match=r"no end-of-turn token after the answer.*\n.*set chat.end"):
        end(text)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages[0].content }}<|im_end|>", "writes every answer"),
        ("{% for m in messages %}{{ m.content + (m.content | length | string) }}{% endfor %}",
         "same after each"),
        ("{{ raise_exception('never') }}", "never"),
    ],
)  # fmt: skip
def test_a_template_that_shows_no_end_is_refused(end, template, said):
    with pytest.raises(UserError, match=said):
        end(template=template)


def test_a_token_that_the_tokenizer_does_not_find_behind_text_is_refused(tmp_path):
    directory = make(tmp_path / "single", CHATML.replace("END", "'<|im_end|>'") + PROMPT, TOKENS)
    text = (directory / "tokenizer.json").read_text("utf-8")
    (directory / "tokenizer.json").write_text(
        text.replace('"single_word": false', '"single_word": true')
    )
    with pytest.raises(UserError, match=r"chat\.end_of_turn = <\|im_end\|>"):
        open_chat(directory).check()


def test_what_precedes_an_answer_is_a_lead_or_a_header(end):
    template = CHATML.replace("m.content", "('' if m.role == 'user' else LEAD) + m.content")
    found = end(template=template.replace("LEAD", r"'<think>\n\n'") + PROMPT)
    assert (found.lead, found.header) == ("<think>\n\n", "")
    found = end(template=template.replace("LEAD", "'Say: '") + PROMPT)
    assert (found.lead, found.header) == ("", "Say: ")
    found = end(template=template.replace("LEAD", "' '") + PROMPT)
    assert (found.lead, found.header) == ("", " ")


# Templates in which not every turn of the assistant ends with the same token.
EXAMPLE = to_example(json.dumps(ROW), "messages")
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
CALLED = [
    {"role": "user", "content": "Go."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
]
NO_TOKEN = r"no end-of-turn token after the answer; set chat\.end_of_turn"
RESULT = {"role": "tool", "name": "f", "content": "1"}


@pytest.fixture
def place(tmp_path):
    def build(template, *more):
        return family(tmp_path / f"t{len(list(tmp_path.iterdir()))}", template, *more)

    return build


def parts(directory, *pieces):
    """Ids and marks, by hand: a tuple of pieces is trained."""
    ids, trained = [], []
    for piece in pieces:
        own = by_hand(directory, *piece) if isinstance(piece, tuple) else by_hand(directory, piece)
        ids += own
        trained += [isinstance(piece, tuple)] * len(own)
    return ids, trained


def sequences(directory, messages, tools=None, **settings):
    found = open_chat(directory, **settings).sequences(Example(messages, tools)).sequences
    return [(one.ids, one.trained) for one in found]


def row(directory, **settings):
    found = open_chat(directory, **settings).sequences(EXAMPLE).sequences
    return [(one.ids, one.trained) for one in found]


def test_gpt_oss_ends_a_call_with_call_and_an_answer_with_return(place):
    at = place(GPT_OSS)
    assert open_chat(at).check().texts == ("<|return|>", "<|call|>")
    assert row(at) == [
        parts(
            at,
            *("<|start|>", "user", "<|message|>", "Weather in Ulm?", "<|end|>"),
            *("<|start|>", "assistant"),
            (" to=functions.get_weather", "<|channel|>", "commentary json", "<|message|>",
             '{"city": "Ulm"}', "<|call|>"),
            *("<|start|>", "functions.get_weather to=assistant", "<|channel|>", "commentary"),
            *("<|message|>", r'"{\"temp\": 21}"', "<|end|>", "<|start|>", "assistant"),
            ("<|channel|>", "final", "<|message|>", "It has 21 degrees in Ulm.", "<|return|>"),
        )
    ]  # fmt: skip


def test_gemma_4_ends_a_call_with_the_begin_of_the_response(place):
    at = place(GEMMA_4)
    assert open_chat(at).check().texts == ("<turn|>", "<|tool_response>")
    assert row(at) == [
        parts(
            at,
            *("<|turn>", "user\nWeather in Ulm?", "<turn|>", "\n", "<|turn>", "model\n"),
            ("<|tool_call>", "call:get_weather{city:", '<|"|>', "Ulm", '<|"|>', "}",
             "<tool_call|>", "<|tool_response>"),
            *("response:get_weather{value:", '<|"|>', '{"temp": 21}', '<|"|>', "}"),
            "<tool_response|>",
            ("It has 21 degrees in Ulm.", "<turn|>"),
        )
    ]  # fmt: skip


def test_glm_ends_a_turn_with_the_token_of_the_next_role(place):
    at = place(GLM)
    end = open_chat(at).check()
    assert (end.texts, end.lead) == (("<|user|>", "<|observation|>"), "\n<think></think>\n")
    lead = ("\n", "<think>", "</think>", "\n")
    assert row(at) == [
        parts(
            at,
            *("<|user|>", "\nWeather in Ulm?", "<|assistant|>", *lead),
            ("<tool_call>", "get_weather\n", "<arg_key>", "city", "</arg_key>", "\n",
             "<arg_value>", "Ulm", "</arg_value>", "\n", "</tool_call>", "<|observation|>"),
            *("\n", "<tool_response>", '\n{"temp": 21}\n', "</tool_response>", "<|assistant|>"),
            *lead,
            ("It has 21 degrees in Ulm.", "<|user|>"),
        )
    ]  # fmt: skip


def test_a_template_with_one_token_for_both_is_as_before(place):
    at = place(DEEPSEEK_V3)
    end = open_chat(at).check()
    assert end.to_json() == {
        "text": "<｜end▁of▁sentence｜>",
        "id": end.id,
        "lead": "",
        "header": "",
    }
    assert end.ids == (end.id,)


@pytest.mark.parametrize("template", [GPT_OSS, GEMMA_4, GLM, DEEPSEEK_V3])
def test_spans_are_what_transformers_renders_behind_its_prompts(place, template):
    at = place(template)
    chat, theirs = open_chat(at), library(at)
    end, found = chat.check(), []
    messages = chat._with_arguments(EXAMPLE)
    for index in (1, 3):
        prompt, longer = (
            theirs.apply_chat_template(
                messages[:n], EXAMPLE.tools, add_generation_prompt=n == index, tokenize=False
            )
            for n in (index, index + 1)
        )
        assert longer.startswith(prompt + end.lead)
        said = longer.removeprefix(prompt + end.lead).rstrip("\n")
        if template == GLM:  # what it writes of the message that follows
            more = [*messages[: index + 1], [*messages, {"role": "user", "content": ""}][index + 1]]
            after = theirs.apply_chat_template(more, EXAMPLE.tools, tokenize=False)
            said += after.removeprefix(longer).partition("\n")[0]
        found.append((theirs(prompt + end.lead).input_ids, theirs(said).input_ids))
    (one,) = chat.sequences(EXAMPLE).sequences
    assert spans(one.ids, one.trained) == found


def test_history_that_ends_otherwise_has_a_sequence_of_its_own(place):
    at = place(GPT_OSS)
    ask = ("<|start|>", "user", "<|message|>", "a", "<|end|>", "<|start|>", "assistant")
    again = ("<|start|>", "user", "<|message|>", "c", "<|end|>", "<|start|>", "assistant")
    final = ("<|channel|>", "final", "<|message|>")
    assert sequences(at, talk("a", "b", "c", "d")) == [
        parts(at, *ask, (*final, "b", "<|return|>")),
        parts(at, *ask, *final, "b", "<|end|>", *again, (*final, "d", "<|return|>")),
    ]


def test_answers_of_glm_share_a_sequence_and_each_trains_what_ends_it(place):
    at = place(GLM)
    lead = ("<|assistant|>", "\n", "<think>", "</think>", "\n")
    assert sequences(at, talk("a", "b", "c", "d")) == [
        parts(at, "<|user|>", "\na", *lead, ("b", "<|user|>"), "\nc", *lead, ("d", "<|user|>"))
    ]


def test_what_follows_in_the_row_decides_which_role_is_next(place):
    at = place(GLM)
    ends = {"user": by_hand(at, "<|user|>"), "tool": by_hand(at, "<|observation|>")}

    def last_ids(*messages):
        found = sequences(at, list(messages))
        return [ids[-1:] for one in found for _, ids in spans(*one)]

    answer = {"role": "assistant", "content": "x"}
    assert last_ids(*CALLED) == [ends["tool"]]
    assert last_ids(*CALLED, {"role": "user", "content": "Stop."}) == [ends["user"]]
    assert last_ids(CALLED[0], answer, RESULT) == [ends["tool"]]
    # Two answers in a row, a message of the system: neither role ends an answer.
    assert last_ids(CALLED[0], answer, answer) == [ends["user"]] * 2
    assert last_ids(CALLED[0], answer, {"role": "system", "content": "y"}) == [ends["user"]]


def test_too_long_is_decided_with_the_token_that_is_put_behind(place):
    at = place(GLM)
    (whole,) = sequences(at, talk("a", "b", "c", "d"))
    longest = len(whole[0])
    assert len(sequences(at, talk("a", "b", "c", "d"), seq_len=longest, too_long="split")) == 1
    halves = sequences(at, talk("a", "b", "c", "d"), seq_len=longest - 1, too_long="split")
    first, second = sequences(at, talk("a", "b")), sequences(at, talk("c", "d"))
    assert halves == [*first, *second]
    with pytest.raises(BadRowError, match=f"{longest} tokens, at most {longest - 1}"):
        sequences(at, talk("a", "b", "c", "d"), seq_len=longest - 1)


# Two more of the kind. As Llama's with tools of its own: a message that is not over yet.
END_OF_MESSAGE = """
{%- for m in messages %}
{{- '<|head|>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- call.function.name + call.function.arguments | tojson }}
{%- endfor %}
{{- '<|eom|>' if m.tool_calls else '<|eot|>' }}
{%- endfor %}
{{- '<|head|>assistant\n' if add_generation_prompt }}"""
# Results are given by the user, whose token stands in a line of its own.
ONE_ROLE = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<bot>' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- call.function.name + call.function.arguments | tojson }}
{%- endfor %}
{{- '\n' }}
{%- else %}{{ '<human>' + m.content + '\n' }}
{%- endif %}
{%- endfor %}
{{- '<bot>' if add_generation_prompt }}"""


def test_of_the_same_kind_a_message_that_is_not_over(place):
    at = place(END_OF_MESSAGE, "<|head|>", "<|eot|>", "<|eom|>")
    messages = [*CALLED, RESULT, {"role": "assistant", "content": "One."}]
    ask = ("<|head|>", "user\nGo.", "<|eot|>", "<|head|>", "assistant\n")
    result = ("<|head|>", "tool\n1", "<|eot|>", "<|head|>", "assistant\n")
    assert sequences(at, messages) == [
        parts(at, *ask, ('f{"a": "b"}', "<|eom|>"), *result, ("One.", "<|eot|>"))
    ]


def test_of_the_same_kind_results_from_the_user(place):
    at = place(ONE_ROLE, "<bot>", "<human>")
    end = open_chat(at).check()
    assert (end.texts, end.after_answer, end.after_call) == (("<human>",), "<human>", "<human>")
    messages = [*CALLED, RESULT, {"role": "assistant", "content": "One."}]
    expected = [
        parts(
            at,
            *("<human>", "Go.\n", "<bot>"),
            ('f{"a": "b"}\n', "<human>"),
            *("1\n", "<bot>"),
            ("One.\n", "<human>"),
        )
    ]
    assert sequences(at, messages) == expected
    facts = chat_facts(open_chat(at))
    again = open_as_stored(at, ChatFacts(**json.loads(json.dumps(facts.to_json()))), 1 << 20)
    found = again.sequences(Example(messages)).sequences
    assert [(one.ids, one.trained) for one in found] == expected


def test_a_token_with_which_every_message_begins_ends_none(tmp_path):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    at = make(tmp_path / "no end", template, ("<|im_start|>",), letters(tmp_path / "letters"))
    with pytest.raises(UserError, match=r"no end-of-turn token after the answer.*\n.*set chat.end"):
        open_chat(at).check()


def test_control_tokens_in_content_are_still_text(place):
    at = place(GLM)
    (one,) = sequences(at, talk("a <|user|>", "b <|user|> c"))
    user = by_hand(at, "<|user|>")[0]
    assert [n for n, id in enumerate(one[0]) if id == user] == [0, len(one[0]) - 1]
    ((_, said),) = spans(*one)
    assert said == [*by_hand(at, "b <"), *by_hand(at, "|user|> c"), user]


def test_tokens_can_be_named_in_a_list(place):
    at = place(GPT_OSS)
    for named in (["<|return|>", "<|call|>"], ["<|call|>", "<|return|>", "<|call|>"]):
        assert open_chat(at, end_of_turn=named).check() == open_chat(at).check()
        assert row(at, end_of_turn=named) == row(at)
    at = place(GLM)
    named = ("<|observation|>", "<|user|>")
    assert open_chat(at, end_of_turn=named).check() == open_chat(at).check()


def test_one_name_is_one_token(place):
    at = place(GPT_OSS)
    chat = open_chat(at, end_of_turn="<|return|>")
    assert chat.check().texts == ("<|return|>",)
    assert chat.sequences(Example(talk("a", "b"))).sequences
    with pytest.raises(BadRowError, match=NO_TOKEN):
        chat.sequences(EXAMPLE)
    with pytest.raises(BadRowError, match=NO_TOKEN):
        open_chat(place(GLM), end_of_turn="<|user|>").sequences(EXAMPLE)


@pytest.mark.parametrize(
    ("named", "value", "said"),
    [
        (["<|return|>", "<|cal|>"], "<|cal|>", "an added token of the tokenizer"),
        (["<|return|>", "auto"], "auto", "an added token of the tokenizer"),
        (
            ["<|return|>", "<|start|>"],
            "<|start|>",
            "after an answer or a call of a tool; it writes '<|return|>' and '\"}<|call|>'",
        ),
        (["<|call|>"], "<|call|>", "writes after an answer; it writes '<|return|>'"),
        ("<|end|>", "<|end|>", "writes after an answer; it writes '<|return|>'"),
    ],
)
def test_a_wrong_name_in_the_list_is_one_message(place, named, value, said):
    with pytest.raises(UserError) as caught:
        open_chat(place(GPT_OSS), end_of_turn=named).check()
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("chat.end_of_turn", value)
    assert said in problem.expected


def test_the_key_takes_a_token_or_a_list(tmp_path):
    def value(*given):
        return loaded(tmp_path, *given).chat.end_of_turn

    assert value() == "auto"
    assert value("chat.end_of_turn='<|call|>'") == "<|call|>"
    assert value("chat.end_of_turn=['<|return|>', '<|call|>']") == ("<|return|>", "<|call|>")
    for wrong in ("[]", "3", "['']", "[[a]]"):
        with pytest.raises(UserError, match=r"chat\.end_of_turn") as caught:
            value(f"chat.end_of_turn={wrong}")
        assert len(caught.value.problems) == 1


def test_a_run_that_began_with_one_token_continues_with_it(place, tmp_path):
    """Runs once had the token behind an answer alone, and rows with calls were bad."""
    at = place(GPT_OSS)
    rows = [{"messages": talk("a", "b")}, ROW]
    path = write_jsonl(tmp_path / "chat.jsonl", rows)
    manifest, encoder = data_of(at, path)
    assert manifest.chat.end_of_turn["others"] == {"<|call|>": by_hand(at, "<|call|>")[0]}
    assert manifest.chat.ends == tuple(by_hand(at, "<|return|>", "<|call|>"))
    assert differing_chat(manifest, encoder) == []
    stored = json.loads(manifest.to_bytes())["chat"]
    assert stored == json.loads(json.dumps(manifest.chat.to_json()))
    again = open_as_stored(at, ChatFacts(**stored), 1 << 20)
    assert differing_chat(manifest, DocumentEncoder(encoder.tokenizer, again)) == []
    before = copy.deepcopy(manifest.chat.to_json())
    del before["end_of_turn"]["others"]
    before["probe"] = "e1399c3b8fdd193b"  # as c31dad2 computed it
    facts = ChatFacts(**before)
    assert (facts.calls, facts.ends) == (False, tuple(by_hand(at, "<|return|>")))
    chat = open_as_stored(at, facts, 1 << 20)
    assert chat_facts(chat) == facts
    assert chat.sequences(Example(talk("a", "b"))).sequences
    with pytest.raises(BadRowError, match=NO_TOKEN):
        chat.sequences(EXAMPLE)
