import re
import subprocess
import sys
from dataclasses import replace

import pytest
from helpers.chats import (
    DEFAULTS,
    SAMPLE,
    make,
    open_chat,
    plain,
    spans,
    talk,
    trained_ids,
    trained_texts,
)
from helpers.vocabularies import SMALL

from llmtrain.data.chat.chat import Chat
from llmtrain.data.chat.rendering import Conversation
from llmtrain.data.chat.rows import BadRowError, Example
from llmtrain.data.chat.template import PROBES
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import UserError

CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + HERE + '<|im_end|>\n' }}"
    "{% endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\nTHINK' }}{% endif %}"
)
TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    return make(tmp_path_factory.mktemp("chat") / "chatml", "chatml")


@pytest.fixture
def place(tmp_path):
    """A template that writes `here` as the content, and `think` behind the prompt."""

    def build(here, think="", source=SAMPLE):
        text = CHATML.replace("HERE", here).replace("THINK", think)
        return make(tmp_path / f"t{len(list(tmp_path.iterdir()))}", text, TOKENS, source)

    return build


def key_of(chat, messages, **more):
    with pytest.raises(BadRowError) as error:
        chat.sequences(Example(messages, **more))
    return error.value.key, str(error.value)


def test_masks_need_no_generation_tag(chatml):
    chat = open_chat(chatml)
    assert "generation %}" not in (chatml / "chat_template.jinja").read_text()
    assert trained_texts(chat, chatml, talk("Hi?", "Yes.")) == ["Yes.<|im_end|>"]


def test_a_mask_ends_with_its_turn(chatml):
    messages = [*talk("Hi?", "Yes.", "So?", "No."), *talk("more")]
    (one,) = open_chat(chatml).sequences(Example(messages)).sequences
    tokens = plain(chatml)
    said = [tokens.decode(ids, False) for _, ids in spans(one.ids, one.trained)]
    assert said == ["Yes.<|im_end|>", "No.<|im_end|>"]
    assert tokens.decode(one.ids[one.trained.index(True) + len("Yes.") :], False).count("user") == 1


def test_nothing_follows_the_end_of_turn(chatml):
    for messages in (talk("Hi?", "Yes."), talk("Hi?", "Yes.", "So?", "No.")):
        (one,) = open_chat(chatml).sequences(Example(messages)).sequences
        assert one.ids[-1] == open_chat(chatml).check().id
        assert plain(chatml).token_to_id("<|endoftext|>") not in one.ids


def test_a_turn_that_is_not_trained_has_no_trained_end(chatml):
    messages = talk("Hi?", "Yes.", "So?", "No.")
    chat = open_chat(chatml)
    assert trained_texts(chat, chatml, messages, untrained=frozenset({1})) == ["No.<|im_end|>"]
    last = open_chat(chatml, train_turns="last")
    assert trained_texts(last, chatml, messages) == ["No.<|im_end|>"]
    assert trained_texts(last, chatml, messages, untrained=frozenset({3})) == []
    assert last.sequences(Example(messages, untrained=frozenset({3}))).counts == {"untrained": 1}
    assert trained_texts(chat, chatml, messages, untrained=frozenset({3})) == ["Yes.<|im_end|>"]


def test_a_prompt_that_is_no_prefix_in_tokens_gets_a_sequence_of_its_own(place):
    """Qwen3.5 opens a think block that an answer without reasoning closes at once."""
    directory = place(r"(m.content if m.role == 'user' else '<think>\n\n</think>\n\n' + m.content)",
                      r"<think>\n")  # fmt: skip
    chat = open_chat(directory)
    assert chat.check().lead == "\n</think>\n\n"
    messages = talk("Hi?", "Yes.", "So?", "No.")
    found = chat.sequences(Example(messages))
    tokens = plain(directory)
    prompts = [ids for one in found.sequences for ids, _ in spans(one.ids, one.trained)]
    for turn, ids in zip((1, 3), prompts, strict=True):
        text = chat.render(messages[:turn], None, True) + chat.check().lead
        assert ids == tokens.encode(text, add_special_tokens=False).ids


# The prompt's last word goes on in the answer.
GOES_ON = ("('moss' if m.role == 'assistant' else '') + m.content", "moss")


def test_characters_that_merge_across_the_border_do_not(place):
    directory = place(*GOES_ON)
    chat = open_chat(directory)
    seen = 0
    for answer in ("y", " and", "es", "\n", "."):
        messages = talk("Hi?", f"{answer}!", "So?", f"{answer}?")
        found = chat.sequences(Example(messages))
        seen += found.counts.get("straddles", 0)
        pairs = [pair for one in found.sequences for pair in spans(one.ids, one.trained)]
        for turn, (ids, said) in zip((1, 3), sorted(pairs, key=lambda p: len(p[0])), strict=True):
            assert ids == chat.prompt_ids(messages[:turn])
            assert plain(directory).decode(said, False) == messages[turn]["content"] + "<|im_end|>"
    assert seen > 0


def test_an_answer_that_is_encoded_apart_is_not_in_the_sequence_of_those_before_it(place):
    directory = place(*GOES_ON)
    chat = open_chat(directory)
    found = chat.sequences(Example(talk("Hi?", "!", "So?", "es!")))
    assert found.counts["straddles"] == 1
    said = [[plain(directory).decode(ids, False) for _, ids in spans(one.ids, one.trained)]
            for one in found.sequences]  # fmt: skip
    assert sorted(said) == [["!<|im_end|>"], ["es!<|im_end|>"]]
    assert all(one.trained[-1] for one in found.sequences)


def test_an_answer_that_is_encoded_apart_gets_no_mark_of_a_beginning_text(place):
    directory = place(*GOES_ON, source=SMALL / "fallback")
    found = open_chat(directory).sequences(Example(talk("Hi?", "ter!")))
    assert found.counts["straddles"] == 1
    ((_, ids),) = [pair for one in found.sequences for pair in spans(one.ids, one.trained)]
    tokens = [plain(directory).id_to_token(n) for n in ids]
    assert "".join(tokens) == "ter!<|im_end|>"


def test_an_answer_without_an_end_is_not_ended_by_the_prompt(tmp_path):
    text = (
        "{%- for m in messages %}{{ m.role + ':' + m.content }}"
        "{{ '<|im_end|>' if m.content != 'No.' }}{% endfor %}"
    )
    chat = open_chat(make(tmp_path / "t", text, TOKENS))
    assert len(chat.sequences(Example(talk("Hi?", "Yes."))).sequences) == 1
    key, why = key_of(chat, talk("Hi?", "No."))
    assert key == "end_of_turn"
    assert why.startswith("turn 1: no end-of-turn token after the answer")


def test_a_prompt_that_the_text_does_not_begin_with_is_a_bad_row(place):
    chat = open_chat(place("m.content", r"<think>\n"))
    key, why = key_of(chat, talk("Hi?", "Yes."))
    assert key == "prompt"
    assert why == (
        r"turn 1: generation prompt ends '<think>\n' but training text continues "
        r"'Yes.<|im_end|>\n'; try chat.template_kwargs"
    )


@pytest.mark.parametrize(
    ("here", "messages", "said"),
    [
        (
            "m.content.replace('Yes', '')",
            talk("Hi?", "Yes."),
            "turn 1: the template drops the assistant's text",
        ),
        (
            "m.content[:40]",
            *(talk("Hi?", " ".join(map(str, range(40)))), "drops the assistant's text"),
        ),
        ("(m.content if m.role != 'user' else '')", talk("Hi?", "Yes."), r"before it \(user\)"),
        (
            "(m.content if m.role != 'system' else '')",
            *(talk("Hi?", "Yes.", system="Brief."), r"before it \(system\)"),
        ),
        (
            "m.content",
            [
                *talk("Hi?"),
                {"role": "assistant", "content": "Yes.", "reasoning_content": "A greeting."},
            ],
            "the assistant's reasoning",
        ),
        (
            "m.content",
            [
                *talk("Hi?"),
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
            ],
            "the tool call 'f'",
        ),
    ],
)
def test_text_that_the_template_drops_makes_a_bad_row(place, here, messages, said):
    key, why = key_of(open_chat(place(here)), messages)
    assert key == "dropped"
    assert re.search(said, why)


def test_a_message_that_only_a_later_prompt_lacks_makes_a_bad_row(place):
    left = "messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list | length"
    chat = open_chat(place(f"(m.content if {left} < 3 else '')"))
    messages = talk("Hi?", "Yes.", "So?", "No.", "And?", "So.")
    assert len(chat.sequences(Example(messages[:4])).sequences) == 1
    key, why = key_of(chat, messages)
    text = "turn 3: the template drops the text of a message before it (user)"
    assert (key, why) == ("dropped", text)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_that_the_template_drops_makes_a_bad_row(chatml, name):
    said = {"role": "assistant", "content": "Yes.", name: "A greeting."}
    key, why = key_of(open_chat(chatml), [*talk("Hi?"), said])
    assert (key, why) == ("dropped", "turn 1: the template drops the assistant's reasoning")


def test_tools_that_are_nested_too_deeply_make_a_bad_row(chatml):
    tool = {}
    for _ in range(5000):
        tool = {"a": tool}
    assert key_of(open_chat(chatml), talk("Hi?", "Yes."), tools=[tool])[0] in ("json", "template")


def test_text_inside_json_is_there(place):
    directory = place("(m.content | tojson if m.role == 'tool' else m.content)")
    messages = [
        *talk("Hi?", "Wait."),
        {"role": "tool", "content": '{"a": "b\\n"}\n'},
        {"role": "assistant", "content": "Yes."},
    ]
    assert trained_texts(open_chat(directory), directory, messages) == [
        "Wait.<|im_end|>Yes.<|im_end|>"
    ]


def test_rewritten_history_is_split_left_out_or_refused(place):
    directory = place("(m.content if loop.last or m.role == 'user' else m.content + ' (old)')")
    messages = talk("a", "Yes.", "b", "No.", "c", "So.")
    ends = [f"{word}.<|im_end|>" for word in ("Yes", "No", "So")]
    assert trained_texts(open_chat(directory), directory, messages) == ends
    last = open_chat(directory, rewritten_history="last")
    assert trained_texts(last, directory, messages) == ends[-1:]
    assert last.sequences(Example(messages)).counts["rewritten"] == 2
    key, why = key_of(open_chat(directory, rewritten_history="error"), messages)
    assert key == "rewritten_history"
    assert "split or last" in why
    assert open_chat(directory, rewritten_history="error").sequences(Example(messages[:2]))


def test_strings_are_trained_without_a_template(chatml):
    for directory in (SAMPLE, chatml):
        chat, tokens = open_chat(directory), open_tokenizer(directory)
        example = Example((), text=("Say <|im_end|>", " yes<|endoftext|>"))
        (one,) = chat.sequences(example).sequences
        assert one.ids == [*tokens.encode("".join(example.text)), tokens.eos]
        first = len(tokens.encode("Say <|im_end|>"))
        assert one.trained == [n >= first for n in range(len(one.ids))]
    assert open_chat(SAMPLE).sequences(replace(example, untrained=frozenset({0}))).sequences == ()


def test_strings_that_merge_are_encoded_apart(chatml):
    chat, tokens = open_chat(chatml), open_tokenizer(chatml)
    found = chat.sequences(Example((), text=("The riv", "er flows.")))
    (one,) = found.sequences
    assert found.counts["straddles"] == 1
    prompt = tokens.encode("The riv").tolist()
    ((before, said),) = spans(one.ids, one.trained)
    assert before == prompt
    assert tokens.decode(said) == "er flows.<|endoftext|>"


def test_the_first_id_is_never_trained(chatml):
    (one,) = open_chat(chatml).sequences(Example((), text=("", "moss"))).sequences
    assert one.trained[0] is False
    assert one.trained[-1] is True


def test_a_first_message_of_the_assistant_has_no_prompt(chatml):
    chat = open_chat(chatml)
    assert trained_ids(chat, [{"role": "assistant", "content": "Hello."}]) == []
    messages = [{"role": "assistant", "content": "Hello."}, *talk("Hi?", "Yes.")]
    assert trained_texts(chat, chatml, messages) == ["Yes.<|im_end|>"]


def test_counts_add_up(chatml):
    found = open_chat(chatml).sequences(Example(talk("Hi?", "Yes.", "So?", "No.")))
    (one,) = found.sequences
    size = len(one.ids)
    assert found.counts == {
        "sequences": 1, "ids": size, "longest_ids": size, "trained": sum(one.trained),
    }  # fmt: skip


def test_the_probe_changes_with_what_decides_the_ids(chatml, tmp_path):
    assert len(PROBES) >= 20
    probe = open_chat(chatml).probe()
    assert probe == open_chat(chatml).probe()
    assert len(probe) == 16
    other = make(tmp_path / "other", (chatml / "chat_template.jinja").read_text() + " ", TOKENS)
    changed = [
        open_chat(chatml, train_turns="last").probe(),
        open_chat(chatml, 30, too_long="truncate").probe(),
        open_chat(other).probe(),
        open_chat(make(tmp_path / "llama3", "llama3")).probe(),
    ]
    assert len({probe, *changed}) == 5
    assert open_chat(chatml).digest != open_chat(other).digest


def test_no_template_is_refused_where_one_is_needed():
    chat = open_chat(SAMPLE)
    assert chat.probe() == open_chat(SAMPLE).probe()
    for ask in (chat.check, lambda: chat.sequences(Example(talk("Hi?", "Yes.")))):
        with pytest.raises(UserError, match=r"chat\.template"):
            ask()


def test_a_long_conversation_is_encoded_once(chatml, monkeypatch):
    chat = open_chat(chatml)
    chat.check()
    encoded = []
    engine = chat._encoder._engine
    noting = replace(engine, whole=lambda texts: encoded.extend(texts) or engine.whole(texts))
    monkeypatch.setattr(chat._encoder, "_engine", noting)
    texts = [f"moss and rain {n}" for n in range(60)]
    (one,) = chat.sequences(Example(talk(*texts))).sequences
    assert len(spans(one.ids, one.trained)) == 30
    assert sum(map(len, encoded)) < 3 * len(chat.render(talk(*texts)))


@pytest.mark.launches
def test_neither_torch_nor_transformers_is_imported(chatml):
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from llmtrain.data.chat.chat import Chat, Settings\n"
        f"settings = Settings({{}}, 'all', 'error', 'split', 'text', 'auto', {DEFAULTS.date!r})\n"
        f"Chat(Path({str(chatml)!r}), settings, 1024).probe()\n"
        "assert not {'torch', 'transformers', 'accelerate', 'datasets'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert Chat


LONG = talk(*(f"{who}{n}" for n in range(5000) for who in "qa"))
REWRITES = """{%- set ns = namespace(last=messages | length - 1) %}{% for message in messages -%}
<|im_start|>{{ message.role }}
{% if loop.index0 == ns.last and message.role == 'assistant' %}<think>
{% endif %}{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture
def rendered(monkeypatch):
    """How many characters were written for each text that was asked for."""
    written = []
    own = Conversation.render

    def render(conversation, *arguments):
        found = own(conversation, *arguments)
        written.append(len(found.own))
        return found

    monkeypatch.setattr(Conversation, "render", render)
    return written


def test_a_conversation_of_5000_turns_takes_a_time_linear_in_them(tmp_path, rendered):
    directory = make(tmp_path / "chatml", "chatml")
    chat = open_chat(directory)
    chat.check()
    rendered.clear()
    (one,) = chat.sequences(Example(LONG)).sequences
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in LONG)
    assert one.ids == plain(directory).encode(text, add_special_tokens=False).ids[:-1]
    answers = [ids for _, ids in spans(one.ids, one.trained)]
    assert len(answers) == 5000
    encode = plain(directory).encode
    assert answers[::1234] == [encode(f"a{n}<|im_end|>").ids for n in range(0, 5000, 1234)]
    assert len(rendered) == 10_000
    assert sum(rendered) < 10_000 * 100  # of each text, about two messages


@pytest.mark.parametrize("template", ["chatml", REWRITES], ids=["chatml", "one that rewrites"])
def test_of_a_conversation_that_is_truncated_no_more_is_rendered_than_fits(
    tmp_path, rendered, template
):
    directory = make(tmp_path / "truncated", template, TOKENS)
    chat = open_chat(directory, seq_len=600, too_long="truncate")
    found = chat.sequences(Example(LONG))
    assert len(rendered) < 300
    assert sum(rendered) < 300 * 5000
    assert found.sequences == chat.sequences(Example(LONG[:400])).sequences
    assert max(len(one.ids) for one in found.sequences) <= 600
    if template == REWRITES:
        assert found.counts["dropped"] + len(found.sequences) == 5000


@pytest.mark.parametrize("template", ["chatml", REWRITES], ids=["chatml", "one that rewrites"])
def test_a_conversation_that_is_too_long_is_refused_or_split_as_soon(tmp_path, rendered, template):
    directory = make(tmp_path / "long", template, TOKENS)
    with pytest.raises(BadRowError, match="at most 600"):
        open_chat(directory, seq_len=600, too_long="error").sequences(Example(LONG))
    if template == REWRITES:
        assert sum(rendered) < 300 * 5000
    rendered.clear()
    pieces = open_chat(directory, seq_len=600, too_long="split").sequences(Example(LONG[:1200]))
    assert sum(len(spans(one.ids, one.trained)) for one in pieces.sequences) == 600
    assert sum(rendered) < 3000 * 5000
