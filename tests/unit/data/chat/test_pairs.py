"""Rows of preference data: every form says the same, and what cannot be a pair is told."""

import json

import pytest
from helpers.chats import talk
from helpers.vocabularies import shared

from llmtrain.data.chat.pairs import examples, to_judged, to_pair
from llmtrain.data.chat.rows import BadRowError, answers_of, form_of, needed_columns
from llmtrain.errors import UserError

KEY = "data.sources.0.columns"
U, A, B = talk("Hi?", "Yes.")[0], *({"role": "assistant", "content": c} for c in ("Yes.", "No."))
HISTORY = [*talk("One?", "1."), U]
GPT = [{"from": "gpt", "value": said} for said in ("Yes.", "No.")]
HUMAN = {"from": "human", "value": "Hi?"}
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def pair(row, form="pairs", **columns):
    return to_pair(json.dumps(row), form, columns)


def why(row, form="pairs"):
    read = to_judged if form == "feedback" else to_pair
    with pytest.raises(BadRowError) as error:
        read(json.dumps(row), form)
    return error.value.key, str(error.value)


def judged(row, **columns):
    return to_judged(json.dumps(row), "feedback", columns)


@pytest.mark.parametrize(
    ("columns", "form"),
    [
        (["prompt", "chosen", "rejected"], "pairs"),
        (["messages", "chosen", "rejected", "score"], "pairs"),
        (["conversations", "chosen", "rejected"], "pairs_sharegpt"),
        (["instruction", "input", "chosen", "rejected"], "pairs_alpaca"),
        (["instruction", "prompt", "chosen", "rejected"], "pairs"),
        (["input", "preferred_output", "non_preferred_output"], "pairs_openai"),
        (["prompt", "completion", "label"], None),
        (["messages"], None),
        (["text"], None),
    ],
)
def test_a_run_on_pairs_looks_for_forms_of_pairs_alone(columns, form):
    assert form_of(columns, KEY, {}, "pairs") == form
    assert answers_of(form) == (form and "pairs")


@pytest.mark.parametrize(
    ("columns", "form"),
    [
        (["prompt", "completion", "label"], "feedback"),
        (["messages", "label"], "feedback"),
        (["conversations", "label"], "feedback"),
        (["instruction", "output", "label"], "feedback"),
        (["label", "text"], None),
        (["messages"], None),
        (["prompt", "chosen", "rejected"], None),
    ],
)
def test_a_run_on_feedback_looks_for_labels_alone(columns, form):
    assert form_of(columns, KEY, {}, "feedback") == form
    assert answers_of(form) == form


def test_feedback_needs_the_columns_of_the_conversation_that_it_has():
    assert needed_columns("feedback", ["prompt", "completion"]) == ("prompt", "completion", "label")
    assert needed_columns("feedback", []) == ("messages", "label")


@pytest.mark.parametrize(
    ("columns", "loss"),
    [(["chosen", "rejected"], "dpo"), (["messages", "label"], "kto"), (["prompt", "completion",
      "kto_tag"], "kto"), (["messages", "chosen", "rejected"], "dpo"),
     (["input", "preferred_output"], "dpo")],
)  # fmt: skip
def test_without_a_loss_the_columns_are_refused_with_the_loss_to_set(columns, loss):
    """PT-18: bad answers are not trained as chat."""
    with pytest.raises(UserError, match=rf"preference\.loss={loss}"):
        form_of(columns, KEY)


SAME = [
    ("pairs", {"prompt": [U], "chosen": [A], "rejected": [B]}),
    ("pairs", {"prompt": "Hi?", "chosen": [A], "rejected": [B]}),
    ("pairs", {"prompt": [U], "chosen": "Yes.", "rejected": "No."}),
    ("pairs", {"prompt": [U], "chosen": A, "rejected": B}),
    ("pairs", {"chosen": [U, A], "rejected": [U, B]}),
    ("pairs", {"prompt": "Hi?", "chosen": [U, A], "rejected": [U, B], "messages": [U, A]}),
    ("pairs", {"prompt": [U], "chosen": [U, A], "rejected": [U, B]}),
    ("pairs", {"chosen": json.dumps([U, A]), "rejected": json.dumps([U, B])}),
    (
        "pairs",
        {
            "chosen": "\n\nHuman: Hi?\n\nAssistant: Yes.",
            "rejected": "\n\nHuman: Hi?\n\nAssistant: No.",
        },
    ),
    ("pairs", {"chosen": {"role": ["user", "assistant"], "content": ["Hi?", "Yes."]},
               "rejected": {"role": ["user", "assistant"], "content": ["Hi?", "No."]}}),
    ("pairs_sharegpt", {"conversations": [HUMAN], "chosen": GPT[0], "rejected": GPT[1]}),
    ("pairs_sharegpt", {"conversations": [HUMAN], "chosen": GPT[:1], "rejected": GPT[1:]}),
    ("pairs_alpaca", {"instruction": "Hi?", "input": "", "chosen": "Yes.", "rejected": "No."}),
    (
        "pairs_openai",
        {"input": {"messages": [U]}, "preferred_output": [A], "non_preferred_output": [B]},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("form", "row"), SAME)
def test_every_form_of_a_pair_says_the_same(form, row):
    chosen, rejected = pair(row, form)
    assert list(chosen.messages) == [U, A]
    assert list(rejected.messages) == [U, B]
    assert chosen.untrained == rejected.untrained == {0}
    assert chosen.text is rejected.text is None
    assert [one.messages for one in examples(json.dumps(row), form)] == [[U, A], [U, B]]


def test_strings_keep_their_prompt_and_get_no_template():
    chosen, rejected = pair({"prompt": "Hi?\n", "chosen": "Yes.", "rejected": "No."})
    assert (chosen.text, rejected.text) == (("Hi?\n", "Yes."), ("Hi?\n", "No."))
    assert not chosen.untrained


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("pairs", {"prompt": HISTORY, "chosen": [A], "rejected": [B]}),
        ("pairs", {"chosen": [*HISTORY, A], "rejected": [*HISTORY, B]}),
        ("pairs_alpaca", {"instruction": "Hi?", "history": [["One?", "1."]], "chosen": "Yes.",
                          "rejected": "No."}),
    ],
)  # fmt: skip
def test_answers_of_the_prompt_are_not_trained(form, row):
    for one in pair(row, form):
        assert list(one.messages[:3]) == HISTORY
        assert one.untrained == {0, 1, 2}
    for one in pair({**row, "system": "Be brief."}, form):
        assert one.messages[0] == {"role": "system", "content": "Be brief."}
        assert one.untrained == {1, 2, 3}


def test_tools_are_those_of_the_row_or_of_the_input():
    explicit = {"prompt": [U], "chosen": [A], "rejected": [B], "tools": json.dumps(TOOLS)}
    given = {"messages": [U], "tools": TOOLS, "parallel_tool_calls": True}
    openai = {"input": given, "preferred_output": [A], "non_preferred_output": [B]}
    assert [one.tools for one in pair(explicit)] == [TOOLS, TOOLS]
    assert [one.tools for one in pair(openai, "pairs_openai")] == [TOOLS, TOOLS]


def test_columns_of_other_names_are_read():
    row = {"question": "Hi?", "good": "Yes.", "bad": "No.", "rejected": "not this one"}
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    chosen, rejected = pair(row, **columns)
    assert (chosen.text, rejected.text) == (("Hi?", "Yes."), ("Hi?", "No."))


def test_fields_that_are_null_are_not_there():
    odd = {**U, "name": None}
    row = {"prompt": None, "chosen": [odd, A], "rejected": [U, B], "system": None, "tools": None}
    assert [list(one.messages) for one in pair(row)] == [[U, A], [U, B]]


def test_a_row_that_is_not_to_be_trained_is_context_in_both_halves():
    row = {"prompt": [U], "chosen": [A], "rejected": [B], "train": False}
    assert [one.untrained for one in pair(row)] == [{0, 1}, {0, 1}]


LONGER = [A, *talk("So?", "So.")]


@pytest.mark.parametrize(
    ("row", "key", "said"),
    [
        ({"prompt": [U], "chosen": [A], "rejected": [A]}, "equal", "chosen and rejected are equal"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "equal", "chosen and rejected are equal"),
        ({"chosen": [U, A], "rejected": [U, A]}, "equal", "chosen and rejected are equal"),
        (
            {"prompt": [U], "chosen": [A], "rejected": LONGER},
            *("equal", "one of chosen and rejected is the beginning of the other"),
        ),
        (
            {"chosen": [U, *LONGER], "rejected": [U, A]},
            *("equal", "chosen and rejected are the beginning of one another"),
        ),
        ({"prompt": "a", "chosen": "b", "rejected": " \n"}, "answer", "rejected is blank"),
        ({"prompt": [U], "chosen": [], "rejected": [B]}, "answer", "chosen is blank"),
        ({"prompt": [U], "chosen": None, "rejected": [B]}, "answer", "chosen is null"),
        ({"prompt": [U], "rejected": [B]}, "answer", "chosen is null"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "answer", "rejected is null"),
        (
            {"prompt": [U], "chosen": [{**A, "content": " "}], "rejected": [B]},
            *("answer", "turn 1: the assistant's answer is blank"),
        ),
        (
            {"chosen": [U, A], "rejected": [{**U, "content": "Ho?"}, A]},
            *("difference", "chosen and rejected differ first in message 1, which is no answer"),
        ),
        (
            {"chosen": [U, A, U, A], "rejected": [U, A, {**U, "content": "Ho?"}, A]},
            *("difference", "chosen and rejected differ first in message 3, which is no answer"),
        ),
        (
            {"chosen": [A], "rejected": [B]},
            *("prompt", "it has no prompt before its answers"),
        ),
        (
            {"chosen": "Yes.", "rejected": "No."},
            "prompt",
            "chosen and rejected are strings without a prompt; name the prompt: a column `prompt`, "
            "or data.sources.N.columns",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "system": "d"},
            *("prompt", "'system' beside a prompt that is a string"),
        ),
        ({"prompt": [U], "chosen": 3, "rejected": [B]}, "messages", "chosen is 3, not a list"),
        (
            {"prompt": [U], "chosen": [A], "rejected": [B], "loss_weight": 1},
            *("mask", "the row has the key 'loss_weight'"),
        ),
    ],
)  # fmt: skip
def test_a_row_that_is_no_pair_says_what_is_wrong(row, key, said):
    found, text = why(row)
    assert found == key
    assert text.startswith(said)


def test_bad_rows_of_other_forms():
    row = {"instruction": "Hi?", "chosen": ["Yes."], "rejected": "No."}
    assert why(row, "pairs_alpaca") == ("content", "chosen is ['Yes.'], not a string")
    row = {"input": "Hi?", "preferred_output": [A], "non_preferred_output": [B]}
    assert why(row, "pairs_openai")[0] == "input"
    row["input"] = {"messages": []}
    assert why(row, "pairs_openai") == ("prompt", "it has no prompt before its answers")
    row = {"conversations": [HUMAN], "chosen": HUMAN, "rejected": GPT[1]}
    found = why(row, "pairs_sharegpt")
    assert found[0] == "difference"
    assert found[1] == "chosen begins with a message of role 'user', not with an answer"


JUDGED = [
    {"prompt": [U], "completion": [A]},
    {"messages": [U, A]},
    {"conversations": [HUMAN, GPT[0]]},
    {"instruction": "Hi?", "output": "Yes."},
]


@pytest.mark.parametrize("row", JUDGED)
@pytest.mark.parametrize(
    ("label", "good"),
    [(True, True), (False, False), (1, True), (0, False), ("true", True), ("False", False)],
)
def test_every_form_of_feedback_says_the_same(row, label, good):
    example, desirable = judged({**row, "label": label})
    assert desirable is good
    assert list(example.messages) == [U, A]
    assert example.untrained == {0}


def test_of_feedback_the_last_answer_alone_is_judged():
    for row in ({"messages": [*HISTORY, A]}, {"prompt": HISTORY, "completion": [A]}):
        example, _ = judged({**row, "label": True, "system": "Be brief."})
        assert example.untrained | {0} == {0, 1, 2, 3}
        assert len(example.messages) == 5


def test_feedback_of_strings_and_of_other_columns():
    example, good = judged({"prompt": "Hi?", "completion": "No.", "label": False})
    assert example.text == ("Hi?", "No.")
    assert not good
    example, good = judged({"messages": [U, A], "kto_tag": "1"}, label="kto_tag")
    assert good
    row = {"messages": None, "prompt": "Hi?", "completion": "No.", "label": 1}  # as in parquet
    assert judged(row).example.text == ("Hi?", "No.")


@pytest.mark.parametrize(
    ("row", "key", "said"),
    [
        ({"messages": [U, A]}, "label", "label is null, not true or false"),
        ({"messages": [U, A], "label": 0.5}, "label", "label is 0.5, not true or false"),
        ({"messages": [U, A], "label": "good"}, "label", "label is 'good', not true or false"),
        ({"messages": [U], "label": 1}, "answer", "its last message is of role 'user'"),
        ({"prompt": "a", "completion": " ", "label": 1}, "answer", "the completion is blank"),
        ({"label": True}, "messages", "it has neither messages, conversations, prompt and"),
    ],
)
def test_bad_feedback_says_what_is_wrong(row, key, said):
    found, text = why(row, "feedback")
    assert found == key
    assert text.startswith(said)


FILES = {
    "trl_explicit_chat": "pairs",
    "trl_implicit_chat": "pairs",
    "ultrafeedback": "pairs",
    "hh_transcripts": "pairs",
    "sharegpt_ranking": "pairs_sharegpt",
    "alpaca_ranking": "pairs_alpaca",
    "openai": "pairs_openai",
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), FILES.items())
def test_forms_found_in_the_wild_are_the_pairs_that_they_were_made_of(name, form):
    folder = shared("preference/forms")

    def rows(of):
        return [json.loads(line) for line in (folder / f"{of}.jsonl").read_text().splitlines()]

    known = {
        (row["chosen"][0]["content"], row["rejected"][0]["content"]): row["prompt"]
        for row in rows("trl_explicit_chat")
    }
    found = rows(name)
    assert len(found) >= 12
    for row in found:
        assert form_of(row, KEY, {}, "pairs") == form
        chosen, rejected = pair(row, form)
        prompt = known[chosen.messages[-1]["content"], rejected.messages[-1]["content"]]
        assert list(chosen.messages[:-1]) == list(rejected.messages[:-1]) == prompt


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kto_messages", "kto_sharegpt"])
def test_forms_of_feedback_found_in_the_wild_are_the_same(name):
    folder = shared("preference/forms")
    chats, others, strings = (
        [json.loads(line) for line in (folder / f"{of}.jsonl").read_text().splitlines()]
        for of in ("kto_chat", name, "kto_text")
    )
    columns = {"label": "kto_tag"} if name == "kto_sharegpt" else {}
    for chat, other, string in zip(chats, others, strings, strict=True):
        one, same = judged(chat), judged(other, **columns)
        assert one == same
        text = judged(string)
        assert (text.desirable, text.example.text[1]) == (
            one.desirable,
            one.example.messages[-1]["content"],
        )
