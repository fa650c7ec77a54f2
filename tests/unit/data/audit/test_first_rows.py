"""The first conversations of a run: what is wrong with them is told before it begins."""

import pytest
from helpers import chats, corpus

from llmtrain.config.binding import data_settings
from llmtrain.config.schema import Config
from llmtrain.data.audit.first_rows import check_first_rows, share_filled, with_marks
from llmtrain.data.chat.chat import Chat
from llmtrain.data.survey import survey
from llmtrain.data.tokens.encode import DocumentEncoder, settings_of
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import UserError

# What a template writes of a message is CONTENT, and behind the prompt THINK.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + CONTENT + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\nTHINK' }}{% endif %}"
)
TOKENS = ("<|im_start|>", "<|im_end|>", "<think>")


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    return chats.make(tmp_path_factory.mktemp("first") / "chatml", "chatml")


@pytest.fixture
def check(tmp_path, chatml):
    """Tries rows as a start does; returns the first conversation."""

    def call(rows, tokenizer=chatml, suffix="jsonl", seq_len=64, **chat):
        write = corpus.write_jsonl if suffix == "jsonl" else corpus.write_parquet
        path = write(tmp_path / f"chat.{suffix}", rows)
        config = Config.model_validate({
            "data": {"sources": [{"path": str(path)}], "seq_len": seq_len, "heldout": 0.0},
            "chat": chat,
            "training": {"steps": 10},
        })  # fmt: skip
        settings = settings_of(config.chat, chats.DEFAULTS.date)
        encoder = DocumentEncoder(open_tokenizer(tokenizer), Chat(tokenizer, settings, seq_len))
        return check_first_rows(survey(data_settings(config), 1), encoder)

    return call


@pytest.fixture
def refused(check):
    """Tries rows that must be refused; returns the problems."""

    def call(rows, *options, **more):
        with pytest.raises(UserError) as caught:
            check(rows, *options, **more)
        return caught.value.problems

    return call


def rows_of(count, said="Yes."):
    return [{"messages": chats.talk("Hi?", said)} for _ in range(count)]


def test_good_rows_give_the_first_conversation(check):
    first, *_ = check(rows_of(3))
    assert (first.counts["sequences"], first.bad) == (1, None)


@pytest.mark.parametrize(("suffix", "third"), [("jsonl", "line 4"), ("parquet", "row 3 of row")])
def test_rows_with_the_same_mistake_are_one_problem(refused, suffix, third):
    rows = rows_of(12)
    for n in (3, 7):
        rows[n]["messages"][0]["role"] = "bot"
    (problem,) = refused(rows, suffix=suffix)
    assert f"chat.{suffix}, {third}" in problem.key
    assert "role 'bot'; allowed system, developer, user, assistant, tool" in problem.expected
    assert problem.expected.endswith("(also in line 8)" if suffix == "jsonl" else "group 0)")
    assert problem.remedy == "repair or remove the row, or chat.bad_rows=skip"


def test_of_many_rows_the_first_are_named(refused):
    (problem,) = refused(rows_of(8, said=" \n"))
    assert problem.key.endswith("line 1")
    assert "turn 1: the assistant's answer is blank" in problem.expected
    assert problem.expected.endswith("(also in line 2, line 3, line 4, line 5 and 3 more)")


def test_each_kind_of_mistake_is_a_problem_of_its_own(refused):
    rows = rows_of(6)
    rows[1]["messages"].pop()
    rows[1]["messages"][0]["content"] = None
    rows[2] = {"messages": "Hi?"}
    rows[4] = {"messages": chats.talk("Hi?", "moss " * 90)}
    found = {problem.key.rpartition(", ")[2]: problem.expected for problem in refused(rows)}
    assert found.keys() == {"line 2", "line 3", "line 5"}
    assert "the content of a message (user) is null" in found["line 2"]
    assert "messages" in found["line 3"]
    assert (
        "tokens, at most 64 (data.seq_len); chat.too_long=drop, truncate or split"
        in found["line 5"]
    )


@pytest.mark.parametrize(
    ("content", "think", "said"),
    [
        ("m.content", r"<think>\n", r"turn 1: generation prompt ends '<think>\n' but"),
        ("m.content.replace('Yes', '')", "", "turn 1: the template drops the assistant's text"),
    ],
)
def test_a_template_that_does_not_fit_the_rows_is_refused(refused, tmp_path, content, think, said):
    template = TEMPLATE.replace("CONTENT", content).replace("THINK", think)
    (problem,) = refused(rows_of(3), chats.make(tmp_path / "other", template, TOKENS))
    assert said in problem.expected
    assert ("try chat.template_kwargs" in problem.expected) == bool(think)


def test_pairs_are_tried_and_the_first_is_shown_with_both_answers(tmp_path, chatml):
    def encoder(seq_len, too_long="error"):
        chat = chats.open_chat(chatml, seq_len, too_long=too_long)
        return DocumentEncoder(open_tokenizer(chatml), chat)

    def found(seq_len):
        return survey(data_settings(Config.model_validate({
            "data": {"sources": [{"path": str(path)}], "seq_len": seq_len, "heldout": 0.0},
            "preference": {"loss": "dpo"},
            "training": {"steps": 10},
        })), 1)  # fmt: skip

    answers = {"chosen": chats.talk("", "Yes.")[1:], "rejected": chats.talk("", "No.")[1:]}
    rows = [{"prompt": chats.talk("Hi?"), **answers}] * 3
    path = corpus.write_jsonl(tmp_path / "pairs.jsonl", rows)
    first, *_ = check_first_rows(found(64), encoder(64))
    text = "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"
    shown = with_marks(first, open_tokenizer(chatml))
    assert shown == f"{text}⟦Yes.<|im_end|>⟧\n--------\n{text}⟦No.<|im_end|>⟧"
    assert share_filled([first], 63) == len(first.ids) / 64
    with pytest.raises(UserError) as caught:
        check_first_rows(found(16), encoder(16, "drop"))
    (problem,) = caught.value.problems
    assert (problem.key, problem.value, problem.remedy) == ("data.seq_len", 16, "longer blocks")
    assert problem.expected == (
        "room for both answers of a pair, each with its prompt, which none of the first 3 rows of "
        "pairs.jsonl has"
    )
    corpus.write_jsonl(path, [*rows, {**rows[0], "rejected": answers["chosen"]}])
    with pytest.raises(UserError) as caught:
        check_first_rows(found(64), encoder(64))
    (problem,) = caught.value.problems
    assert problem.key == f"{path}, line 4"
    assert problem.expected == (
        "a pair of answers that can be trained on: chosen and rejected are equal"
    )
    assert problem.remedy == "repair or remove the row, or chat.bad_rows=skip"


def test_conversations_need_a_template(refused):
    (problem,) = refused(rows_of(3), chats.SAMPLE)
    assert problem.key == "chat.template"
    assert problem.expected == "a chat template: the tokenizer has none"
    assert problem.remedy == "name one of chatml, llama3, gemma or a .jinja file"


def test_rows_without_anything_to_train_are_refused(refused):
    (problem,) = refused([{**row, "train": False} for row in rows_of(4)])
    assert problem.key == "data.sources.0"
    assert "a turn of the assistant to train on in the first 4 rows" in problem.expected


def test_one_good_row_is_enough_where_bad_ones_are_skipped(check, refused):
    bad = {"messages": chats.talk("Hi?", "")}
    assert check([bad, *rows_of(1), bad], bad_rows="skip")[0].counts["sequences"] == 1
    assert len(refused([bad, bad], bad_rows="skip")) == 1


def test_blocks_that_no_answer_begins_in_are_told_apart_from_rows_without_one(refused):
    (problem,) = refused(rows_of(4, "Yes. " * 30), seq_len=8, too_long="truncate")
    assert (problem.key, problem.value, problem.remedy) == ("data.seq_len", 8, "longer blocks")
    (problem,) = refused([{"messages": chats.talk("Hi?")} for _ in range(4)], seq_len=8)
    assert problem.key == "data.sources.0"
