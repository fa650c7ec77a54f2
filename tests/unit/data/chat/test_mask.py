import json
from functools import lru_cache

import numpy as np
import pytest
from helpers import vocabularies
from helpers.chats import (
    check_against_library,
    library,
    make,
    open_chat,
    plain,
    random_talk,
    spans,
    talk,
    trained_ids,
    trained_texts,
)
from helpers.vocabularies import SMALL, shared

from llmtrain.data.chat.chat import Chat
from llmtrain.data.chat.rows import BadRowError, Example, to_example
from llmtrain.data.tokens.tokenizer import open_tokenizer

CASES = ("thinking", "thinking off", "fallback", "bare", "chatml", "llama3", "gemma")
REAL = ("qwen3", "qwen3 without thinking", "mistral-v1")
OFF = ("thinking off", "qwen3 without thinking")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


@pytest.fixture(scope="session")
def places(tmp_path_factory):
    """The directory of a case: a small tokenizer, a named template on one, or a real tokenizer."""
    root = tmp_path_factory.mktemp("templates")

    @lru_cache
    def find(name):
        if name in REAL:
            return shared(f"tokenizers/{name.split()[0]}")
        if name == "bare":
            return vocabularies.saved(SMALL / name, root / name)
        if name == "gemma":
            return make(root / name, name, source=SMALL / "fallback")
        return make(root / name, name) if name in ("chatml", "llama3") else SMALL / name.split()[0]

    return find


@pytest.fixture(scope="session")
def chats(places):
    """The conversations of a case; opening a real tokenizer takes half a second."""
    return lru_cache(
        lambda name: open_chat(
            places(name), template_kwargs={"enable_thinking": False} if name in OFF else {}
        )
    )


def one_sequence(chat, messages, **more):
    (one,) = chat.sequences(Example(messages, **more)).sequences
    return one


def by_hand(place, tokens):
    """The ids of tokens, written with blanks between them."""
    entries = plain(place).get_vocab()
    return [entries[token] for token in tokens.split()]


USER, ASSISTANT = "<|im_start|> us er Ċ", "<|im_start|> ass ist ant Ċ"
EMPTY = "<think> Ċ Ċ </think> Ċ Ċ"


def test_by_hand_an_empty_thought_of_the_prompt(chats, places):
    one = one_sequence(chats("thinking off"), talk("Hi?", "Yes."))
    prompt = by_hand(places("thinking"), f"{USER} H i ? <|im_end|> Ċ {ASSISTANT} {EMPTY}")
    answer = by_hand(places("thinking"), "Y es . <|im_end|>")
    assert one.ids == [*prompt, *answer]
    assert one.trained == [False] * len(prompt) + [True] * 4


def test_by_hand_a_mark_in_front_of_words(chats, places):
    one = one_sequence(chats("fallback"), talk("Hi? 请", "Yes."))
    prompt = "<s> ▁ [ I N S T ] ▁H i ? ▁ <0xE8> <0xAF> <0xB7> ▁ [ / I N S T ]"
    assert one.ids == by_hand(places("fallback"), f"{prompt} ▁Y es. </s>")
    assert one.trained == [False] * len(prompt.split()) + [True] * 3


def test_by_hand_roles_that_are_words(chats, places):
    one = one_sequence(chats("bare"), talk("Hi?", "No."))
    prompt = "# # # Ġus er : Ċ H i ? Ċ Ċ # # # Ġas s ist an t : Ċ"
    assert one.ids == by_hand(places("bare"), f"{prompt} N o . <|endoftext|>")
    assert one.trained == [False] * len(prompt.split()) + [True] * 4


def test_by_hand_chatml(chats, places):
    one = one_sequence(chats("chatml"), talk("aB", "cD"))
    tokens = plain(places("chatml"))
    user, assistant = (tokens.encode(role).ids for role in ("user", "assistant"))
    start, end = by_hand(places("chatml"), "<|im_start|> <|im_end|>")
    newline, a, b, c, d = by_hand(places("chatml"), "Ċ a B c D")
    prompt = [start, *user, newline, a, b, end, newline, start, *assistant, newline]
    assert one.ids == [*prompt, c, d, end]
    assert one.trained == [False] * len(prompt) + [True] * 3


def test_by_hand_two_turns(chats, places):
    """History is written without its empty think block, so each turn has its own sequence."""
    messages = talk("Hi?", "Yes.", "So?", "No.")
    first, second = chats("thinking").sequences(Example(messages)).sequences
    hi = f"{USER} H i ? <|im_end|> Ċ {ASSISTANT}"
    so = f"Ċ {USER} S o ? <|im_end|> Ċ {ASSISTANT}"
    yes, no = "Y es . <|im_end|>", "N o . <|im_end|>"
    assert first.ids == by_hand(places("thinking"), f"{hi} {EMPTY} {yes}")
    assert second.ids == by_hand(places("thinking"), f"{hi} {yes} {so} {EMPTY} {no}")
    for one in (first, second):
        assert one.trained == [False] * (len(one.ids) - 4) + [True] * 4
    one = one_sequence(chats("fallback"), messages)
    assert [ids for _, ids in spans(one.ids, one.trained)] == [
        by_hand(places("fallback"), answer) for answer in ("▁Y es. </s>", "▁N o. </s>")
    ]


def test_by_hand_a_tool_call(chats, places):
    messages = [*talk("1+2?"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    one = one_sequence(chats("thinking off"), messages)
    text = '\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'
    start, stop, end = by_hand(places("thinking"), "<tool_call> </tool_call> <|im_end|>")
    ((before, found),) = spans(one.ids, one.trained)
    assert found == [start, *plain(places("thinking")).encode(text).ids, stop, end]
    assert before[-6:] == by_hand(places("thinking"), EMPTY)


@pytest.mark.parametrize("name", CASES)
def test_ids_before_each_span_are_those_that_inference_feeds(name, chats, places):
    compare(name, chats, places, 25, seed=1)


@pytest.mark.parametrize("name", ["thinking", "chatml", "llama3"])
def test_the_faster_back_end_makes_the_same_sequences(name, chats, places):
    rng, chat = np.random.default_rng(7), chats(name)
    tokenizer = open_tokenizer(places(name), "tiktoken")
    fast = Chat(places(name), chat.settings, chat.seq_len, tokenizer)
    assert fast.check() == chat.check()
    assert fast.probe() == chat.probe()
    for _ in range(60):
        example = Example(random_talk(rng))
        assert fast.sequences(example) == chat.sequences(example)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *REAL])
def test_ids_before_each_span_on_a_thousand_conversations(name, chats, places):
    assert compare(name, chats, places, 1000, seed=2) > 1500


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *REAL])
def test_ids_before_each_span_on_real_rows(name, chats, places):
    lines = (shared("sft") / "heldout.jsonl").read_text("utf-8").splitlines()[:100]
    if "thinking" in name or name in ("qwen3", "chatml"):
        lines += real_calls()
    for line in lines:
        one = to_example(line, "messages")
        check_against_library(chats(name), places(name), list(one.messages), one.tools)


def real_calls():
    return (shared("sft") / "tools.jsonl").read_text("utf-8").splitlines()


def made_calls():
    """Conversations with one to three calls, some of them in one message, some after an answer."""
    for count in (1, 2, 3):
        calls = [
            {
                "type": "function",
                "function": {"name": f"find_{n}", "arguments": {"of": "Ulm", "n": n, "deep": [n]}},
            }
            for n in range(count)
        ]
        rows = [{"role": "user", "content": "What is in Ulm?"}]
        for some in ([calls], [[one] for one in calls])[count % 2]:
            rows.append({"role": "assistant", "content": "I look.", "tool_calls": some})
            rows.append({"role": "tool", "content": '{"towers": 1}'})
        rows.append({"role": "assistant", "content": "A tower."})
        yield json.dumps({"messages": rows})


@pytest.mark.parametrize(
    ("rows", "with_calls", "without"),
    [
        (made_calls, "thinking", "fallback"),
        pytest.param(real_calls, "qwen3", "mistral-v1", marks=pytest.mark.slow),
    ],
)
def test_every_call_of_a_tool_is_trained(rows, with_calls, without, chats, places):
    start, end = by_hand(places(with_calls), "<tool_call> <|im_end|>")
    for line in rows():
        example = to_example(line, "messages")
        calls = [one for m in example.messages for one in m.get("tool_calls", ())]
        found = chats(with_calls).sequences(example).sequences
        said = [ids for one in found for _, ids in spans(one.ids, one.trained)]
        assert sum(ids.count(start) for ids in said) == len(calls)
        assert all(ids[-1] == end for ids in said)
        with pytest.raises(BadRowError) as error:  # its template drops them
            chats(without).sequences(example)
        assert error.value.key in ("dropped", "template")


def compare(name, chats, places, count, seed):
    rng = np.random.default_rng(seed)
    talks = [random_talk(rng) for _ in range(count)]
    return sum(check_against_library(chats(name), places(name), messages) for messages in talks)


def test_masks_do_not_depend_on_offsets(chats, places):
    """Byte-level tokenizers give the tokens of one character the offsets (k, k)."""
    messages = talk("👩‍👩‍👧?", "☀️ 🇻🇳.", "é?", "请介绍。")
    one = one_sequence(chats("llama3"), messages)
    tokens = plain(places("llama3"))
    said = [tokens.decode(ids, False) for _, ids in spans(one.ids, one.trained)]
    assert said == ["☀️ 🇻🇳.<|eot_id|>", "请介绍。<|eot_id|>"]


def test_an_empty_think_block_of_the_template_is_not_trained(chats, places):
    end, chat = chats("thinking").check(), chats("thinking")
    (ended,) = by_hand(places("thinking"), "<|im_end|>")
    assert (end.text, end.id, end.lead) == ("<|im_end|>", ended, "<think>\n\n</think>\n\n")
    assert trained_texts(chat, places("thinking"), talk("Hi?", "Yes.")) == ["Yes.<|im_end|>"]
    assert chat.prompt_ids(talk("Hi?"))[-6:] == by_hand(places("thinking"), EMPTY)
    assert chats("thinking off").check().lead == ""


def test_reasoning_is_written_once_and_trained(chats, places):
    inside = talk("Hi?", "<think>\nA greeting.\n</think>\n\nYes.")
    beside = [*talk("Hi?"), {"role": "assistant", "content": "Yes.", "reasoning": "A greeting."}]
    wanted = ["<think>\nA greeting.\n</think>\n\nYes.<|im_end|>"]
    for messages in (inside, beside):
        found = trained_ids(chats("thinking"), messages)
        assert [library(places("thinking")).decode(ids, False) for ids in found] == wanted


def test_every_answer_is_trained_where_history_loses_its_reasoning(chats, places):
    messages = talk("a?", "<think>\nA.\n</think>\n\nYes.", "b?", "<think>\nB.\n</think>\n\nNo.")
    found = chats("thinking").sequences(Example(messages))
    said = [spans(one.ids, one.trained) for one in found.sequences]
    texts = [[library(places("thinking")).decode(ids, False) for _, ids in one] for one in said]
    assert texts == [
        ["<think>\nA.\n</think>\n\nYes.<|im_end|>"],
        ["<think>\nB.\n</think>\n\nNo.<|im_end|>"],
    ]
    assert found.counts["rewritten"] == 1
    assert found.counts["ids"] > found.counts["longest_ids"]


def test_answers_are_found_though_their_ids_differ_in_the_text(chats, places):
    """ "Yes." alone has the mark of a word in front, behind a prompt the blank has become it."""
    messages = talk("Hi?", "Yes.", "Hi?", "Yes.", "[/INST] Hi?", "Yes.")
    found = chats("fallback").sequences(Example(messages))
    assert "straddles" not in found.counts
    (one,) = found.sequences
    yes = by_hand(places("fallback"), "▁Y es. </s>")
    assert [ids for _, ids in spans(one.ids, one.trained)] == [yes] * 3


def test_the_blank_before_an_answer_belongs_to_it(chats, places):
    end = chats("fallback").check()
    assert (end.text, end.id, end.lead, end.header) == ("</s>", 2, "", " ")
    yes = by_hand(places("fallback"), "▁Y es. </s>")
    assert trained_ids(chats("fallback"), talk("Hi?", "Yes.")) == [yes]
    (last,) = by_hand(places("fallback"), "]")
    assert chats("fallback").prompt_ids(talk("Hi?"))[-1] == last  # without a blank


def test_the_terminator_of_gemma_is_trained(chats, places):
    end = chats("gemma").check()
    assert end.text == "<end_of_turn>"
    assert end.id != plain(places("gemma")).token_to_id("</s>")
    for ids in trained_ids(chats("gemma"), talk("Hi?", "Yes.", "So?", "No.")):
        assert ids.count(end.id) == 2
        assert ids[-1] == end.id
