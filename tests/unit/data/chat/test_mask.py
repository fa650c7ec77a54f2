import numpy as np
import pytest
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
)

from llmtrain.data.chat.chat import Chat
from llmtrain.data.chat.rows import BadRowError, Example, to_example
from llmtrain.data.tokens.tokenizer import open_tokenizer

NO_THINKING = {"enable_thinking": False}
CASES = ("qwen3", "qwen3 without thinking", "mistral-v1", "chatml", "llama3", "gemma")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


@pytest.fixture(scope="session")
def places(shared_data, tmp_path_factory):
    """Real tokenizers as they lie, and named templates on tokenizers of two kinds."""
    root = tmp_path_factory.mktemp("templates")
    real = shared_data / "tokenizers"
    return {
        "qwen3": real / "qwen3",
        "qwen3 without thinking": real / "qwen3",
        "mistral-v1": real / "mistral-v1",
        "chatml": make(root / "chatml", "chatml"),
        "llama3": make(root / "llama3", "llama3"),
        "gemma": make(root / "gemma", "gemma", source=real / "mistral-v1"),
    }


@pytest.fixture(scope="session")
def chats(places):
    """One of each: opening a tokenizer of 150,000 entries takes half a second."""
    kwargs = {"qwen3 without thinking": NO_THINKING}
    found = {
        name: open_chat(place, template_kwargs=kwargs.get(name, {}))
        for name, place in places.items()
    }
    found["qwen3 without thinking"].__dict__["_encoder"] = found["qwen3"]._encoder
    return found


def one_sequence(chat, messages, **more):
    (one,) = chat.sequences(Example(messages, **more)).sequences
    return one


def test_by_hand_qwen3_without_thinking(chats):
    one = one_sequence(chats["qwen3 without thinking"], talk("Hi?", "Yes."))
    assert one.ids == [
        *(151644, 872, 198, 13048, 30, 151645, 198),  # <|im_start|>user ⏎ Hi ? <|im_end|> ⏎
        *(151644, 77091, 198, 151667, 271, 151668, 271),  # … assistant ⏎ <think> ⏎⏎ </think> ⏎⏎
        *(9454, 13, 151645),  # Yes . <|im_end|>
    ]
    assert one.trained == [False] * 14 + [True] * 3


def test_by_hand_mistral_v1(chats):
    one = one_sequence(chats["mistral-v1"], talk("Hi?", "Yes."))
    assert one.ids == [
        *(1, 733, 16289, 28793, 15359, 28804),  # <s> ▁[ INST ] ▁Hi ?
        *(733, 28748, 16289, 28793),  # ▁[ / INST ]
        *(5592, 28723, 2),  # ▁Yes . </s>
    ]
    assert one.trained == [False] * 10 + [True] * 3


def test_by_hand_chatml(chats, places):
    one = one_sequence(chats["chatml"], talk("aB", "cD"))
    tokens = plain(places["chatml"])
    start, end = (tokens.token_to_id(f"<|im_{name}|>") for name in ("start", "end"))
    newline, user = tokens.token_to_id("Ċ"), ids_of(tokens, "user")
    assistant = ids_of(tokens, "assistant")
    a, b, c, d = (tokens.token_to_id(letter) for letter in "aBcD")
    prompt = [start, *user, newline, a, b, end, newline, start, *assistant, newline]
    assert one.ids == [*prompt, c, d, end]
    assert one.trained == [False] * len(prompt) + [True] * 3


def ids_of(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids if isinstance(ids, list) else ids.ids


def test_by_hand_two_turns(chats):
    """Qwen3 writes history without its empty think block, so each turn has its own sequence."""
    messages = talk("Hi?", "Yes.", "So?", "No.")
    first, second = chats["qwen3"].sequences(Example(messages)).sequences
    hi = [151644, 872, 198, 13048, 30, 151645, 198, 151644, 77091, 198]
    think = [151667, 271, 151668, 271]
    yes, no = [9454, 13, 151645], [2753, 13, 151645]
    so = [198, 151644, 872, 198, 4416, 30, 151645, 198, 151644, 77091, 198]
    assert first.ids == [*hi, *think, *yes]
    assert second.ids == [*hi, *yes, *so, *think, *no]
    for one in (first, second):
        assert one.trained == [False] * (len(one.ids) - 3) + [True] * 3
    one = one_sequence(chats["mistral-v1"], messages)
    assert [ids for _, ids in spans(one.ids, one.trained)] == [[5592, 28723, 2], [1770, 28723, 2]]


def test_by_hand_a_tool_call(chats, places):
    messages = [*talk("1+2?"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    one = one_sequence(chats["qwen3 without thinking"], messages)
    text = '\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'
    tokens = library(places["qwen3"])
    ((before, found),) = spans(one.ids, one.trained)
    assert found == [151657, *ids_of(tokens, text), 151658, 151645]  # <tool_call> … </tool_call>
    assert before[-4:] == [151667, 271, 151668, 271]


@pytest.mark.parametrize("name", CASES)
def test_ids_before_each_span_are_those_that_inference_feeds(name, chats, places):
    compare(name, chats, places, 25, seed=1)


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_the_faster_back_end_makes_the_same_sequences(name, chats, places):
    rng, chat = np.random.default_rng(7), chats[name]
    tokenizer = open_tokenizer(places[name], "tiktoken")
    fast = Chat(places[name], chat.settings, chat.seq_len, tokenizer)
    assert fast.check() == chat.check()
    assert fast.probe() == chat.probe()
    for _ in range(60):
        example = Example(random_talk(rng))
        assert fast.sequences(example) == chat.sequences(example)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ids_before_each_span_on_a_thousand_conversations(name, chats, places):
    assert compare(name, chats, places, 1000, seed=2) > 1500


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ids_before_each_span_on_real_rows(name, chats, places, shared_data):
    lines = (shared_data / "sft" / "heldout.jsonl").read_text("utf-8").splitlines()[:100]
    if name in ("qwen3", "qwen3 without thinking", "chatml"):
        lines += (shared_data / "sft" / "tools.jsonl").read_text("utf-8").splitlines()
    for line in lines:
        one = to_example(line, "messages")
        check_against_library(chats[name], places[name], list(one.messages), one.tools)


def test_real_calls_of_tools_are_trained(chats, shared_data):
    lines = (shared_data / "sft" / "tools.jsonl").read_text("utf-8").splitlines()
    for line in lines[:40]:
        example = to_example(line, "messages")
        calls = [one for m in example.messages for one in m.get("tool_calls", ())]
        found = chats["qwen3"].sequences(example).sequences
        said = [ids for one in found for _, ids in spans(one.ids, one.trained)]
        assert sum(ids.count(151657) for ids in said) == len(calls)
        assert all(ids[-1] == 151645 for ids in said)
        with pytest.raises(BadRowError) as error:  # its template drops them
            chats["mistral-v1"].sequences(example)
        assert error.value.key in ("dropped", "template")


def compare(name, chats, places, count, seed):
    rng = np.random.default_rng(seed)
    talks = [random_talk(rng) for _ in range(count)]
    return sum(check_against_library(chats[name], places[name], messages) for messages in talks)


def test_ft_18_masks_do_not_depend_on_offsets(chats, places):
    """Byte-level tokenizers give the tokens of one character the offsets (k, k)."""
    messages = talk("👩‍👩‍👧?", "☀️ 🇻🇳.", "é?", "请介绍。")
    one = one_sequence(chats["llama3"], messages)
    tokens = plain(places["llama3"])
    said = [tokens.decode(ids, False) for _, ids in spans(one.ids, one.trained)]
    assert said == ["☀️ 🇻🇳.<|eot_id|>", "请介绍。<|eot_id|>"]


def test_ft_11_an_empty_think_block_of_the_template_is_not_trained(chats):
    end = chats["qwen3"].check()
    assert (end.text, end.id, end.lead) == ("<|im_end|>", 151645, "<think>\n\n</think>\n\n")
    assert trained_ids(chats["qwen3"], talk("Hi?", "Yes.")) == [[9454, 13, 151645]]
    assert chats["qwen3"].prompt_ids(talk("Hi?"))[-4:] == [151667, 271, 151668, 271]
    assert chats["qwen3 without thinking"].check().lead == ""


def test_ft_09_reasoning_is_written_once_and_trained(chats, places):
    inside = talk("Hi?", "<think>\nA greeting.\n</think>\n\nYes.")
    beside = [*talk("Hi?"), {"role": "assistant", "content": "Yes.", "reasoning": "A greeting."}]
    wanted = ["<think>\nA greeting.\n</think>\n\nYes.<|im_end|>"]
    for messages in (inside, beside):
        found = trained_ids(chats["qwen3"], messages)
        assert [library(places["qwen3"]).decode(ids, False) for ids in found] == wanted


def test_ft_10_every_answer_is_trained_where_history_loses_its_reasoning(chats, places):
    messages = talk("a?", "<think>\nA.\n</think>\n\nYes.", "b?", "<think>\nB.\n</think>\n\nNo.")
    found = chats["qwen3"].sequences(Example(messages))
    said = [spans(one.ids, one.trained) for one in found.sequences]
    texts = [[library(places["qwen3"]).decode(ids, False) for _, ids in one] for one in said]
    assert texts == [
        ["<think>\nA.\n</think>\n\nYes.<|im_end|>"],
        ["<think>\nB.\n</think>\n\nNo.<|im_end|>"],
    ]
    assert found.counts["rewritten"] == 1
    assert found.counts["ids"] > found.counts["longest_ids"]


def test_ft_12_answers_are_found_though_their_ids_differ_in_the_text(chats):
    """Mistral's "Yes" alone is not the token that it is behind a prompt."""
    messages = talk("Hi?", "Yes.", "Hi?", "Yes.", "[/INST] Hi?", "Yes.")
    found = chats["mistral-v1"].sequences(Example(messages))
    assert "straddles" not in found.counts
    (one,) = found.sequences
    assert [ids for _, ids in spans(one.ids, one.trained)] == [[5592, 28723, 2]] * 3


def test_ft_35_the_blank_before_an_answer_belongs_to_it(chats):
    end = chats["mistral-v1"].check()
    assert (end.text, end.id, end.lead, end.header) == ("</s>", 2, "", " ")
    assert trained_ids(chats["mistral-v1"], talk("Hi?", "Yes.")) == [[5592, 28723, 2]]
    assert chats["mistral-v1"].prompt_ids(talk("Hi?"))[-1] == 28793  # "]", without a blank


def test_ft_13_the_terminator_of_gemma_is_trained(chats, places):
    end = chats["gemma"].check()
    assert end.text == "<end_of_turn>"
    assert end.id != plain(places["gemma"]).token_to_id("</s>")
    for ids in trained_ids(chats["gemma"], talk("Hi?", "Yes.", "So?", "No.")):
        assert ids.count(end.id) == 2
        assert ids[-1] == end.id
