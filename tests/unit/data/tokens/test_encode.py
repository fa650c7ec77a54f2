"""Pairs and judged answers as ids: behind the prompt of inference, and what is too long."""

import json
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import corpus, vocabularies
from helpers.chats import library, make, open_chat, plain, random_talk, talk
from helpers.vocabularies import SMALL

from llmtrain.data.chat.rows import NEEDED
from llmtrain.data.tokens.encode import DocumentEncoder
from llmtrain.data.tokens.tokenizer import open_tokenizer

CASES = ("thinking", "thinking off", "fallback", "bare", "chatml", "llama3", "gemma")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The directory of a case: a small tokenizer, or a named template on one."""
    root = tmp_path_factory.mktemp("templates")

    @lru_cache
    def find(name):
        if name == "bare":
            return vocabularies.saved(SMALL / name, root / name)
        if name == "gemma":
            return make(root / name, name, source=SMALL / "fallback")
        return make(root / name, name) if name in ("chatml", "llama3") else SMALL / name.split()[0]

    return find


def encoder_of(directory, seq_len=1 << 20, *, apart=False, **settings):
    chat = open_chat(directory, seq_len, **settings)
    return DocumentEncoder(open_tokenizer(directory), chat, apart)


def of_case(place, name, **more):
    off = {"template_kwargs": {"enable_thinking": False}} if name == "thinking off" else {}
    return encoder_of(place(name), **off, **more)


def encode(encoder, row, form="pairs"):
    source = SimpleNamespace(form=form, columns={}, reading=2)
    (found,) = encoder.documents(source, [json.dumps(row)])
    return found


def halves(found):
    """Ids and flags of both halves."""
    parts = slice(0, found.second), slice(found.second, None)
    return [(found.ids[p].tolist(), found.trained[p].tolist()) for p in parts]


def parts(ids, trained):
    """The ids before the answer, and its own: all that follows is trained."""
    first = trained.index(True)
    assert all(trained[first:])
    return ids[:first], ids[first:]


def row_of(rng):
    """A random conversation with two answers to it."""
    *prompt, chosen = random_talk(rng)
    rejected = random_talk(rng)[-1]
    if chosen == rejected:
        return row_of(rng)
    return {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]}


@pytest.mark.parametrize("name", CASES)
def test_both_answers_stand_behind_the_prompt_that_inference_feeds(place, name):
    """PT-01, PT-03: no second begin token, and no token across the border of an answer."""
    encoder, theirs = of_case(place, name), library(place(name))
    end, kwargs = encoder.chat.check(), dict(encoder.chat.settings.template_kwargs)
    rng = np.random.default_rng(7)
    straddling = 0
    for _ in range(60):
        row = row_of(rng)
        found = encode(encoder, row)
        assert found.bad is None
        asked = theirs.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=False, **kwargs
        )
        expected = theirs(asked + end.lead, add_special_tokens=False)["input_ids"]
        for half, (ids, trained) in zip(("chosen", "rejected"), halves(found), strict=True):
            prompt, answer = parts(ids, trained)
            assert prompt == expected == encoder.chat.prompt_ids(row["prompt"])
            messages = [*row["prompt"], *row[half]]
            whole = theirs.apply_chat_template(messages, tokenize=False, **kwargs)
            stop = whole.rindex(end.text) + len(end.text)
            both = theirs(whole[:stop], add_special_tokens=False)["input_ids"]
            straddling += both[: len(prompt)] != prompt
            if both[: len(prompt)] == prompt:
                assert answer == both[len(prompt) :]
            said = plain(place(name)).decode(answer, False)
            assert said.replace(" ", "") == whole[len(asked + end.lead) : stop].replace(" ", "")
            begin = theirs.bos_token_id
            assert ids.count(begin) == expected.count(begin) <= 1 or begin is None
    assert straddling == 0 or name not in ("chatml", "llama3", "gemma")


@pytest.mark.parametrize("name", CASES)
def test_each_half_ends_with_one_end_of_turn_that_is_trained(place, name):
    """PT-02: neither doubled nor missing, and nothing behind it."""
    encoder = of_case(place, name)
    ends = set(encoder.chat.check().ids)
    rng = np.random.default_rng(8)
    for _ in range(20):
        for ids, trained in halves(encode(encoder, row_of(rng))):
            _, answer = parts(ids, trained)
            assert answer[-1] in ends
            assert not ends & set(answer[:-1])


@pytest.mark.parametrize("begins", [False, True])
def test_strings_begin_with_one_begin_token_and_end_with_one_end_of_text(tmp_path, begins):
    """PT-01, PT-02: without a template, and where the first characters merge with the prompt."""
    directory = corpus.write_tokenizer(tmp_path / "tokenizer")
    if begins:
        corpus.with_template(directory, "<s> $A")
    tokenizer = plain(directory)
    encoder = encoder_of(directory)
    before = [tokenizer.token_to_id("<s>")] if begins else []
    end = tokenizer.token_to_id("<|endoftext|>")
    for prompt, chosen, rejected in (
        ("der river", " flows past hills", " is quiet"),
        ("der riv", "er flows", "et"),  # it straddles in one half alone
        ("a\n", "\nb", "c"),
    ):
        found = encode(encoder, {"prompt": prompt, "chosen": chosen, "rejected": rejected})
        asked = [*before, *tokenizer.encode(prompt, add_special_tokens=False).ids]
        for text, (ids, trained) in zip((chosen, rejected), halves(found), strict=True):
            head, answer = parts(ids, trained)
            assert head == asked
            assert answer[-1] == end
            assert end not in answer[:-1]
            assert tokenizer.decode(answer[:-1]) == text


def test_prompts_are_equal_where_one_answer_alone_takes_the_place_of_the_lead(place):
    """PT-03: reasoning stands where the template puts an empty block otherwise."""
    encoder = of_case(place, "thinking")
    chat = encoder.chat
    assert chat.check().lead
    thinking = {"role": "assistant", "content": "Yes.", "reasoning_content": "So it is."}
    row = {"prompt": talk("Hi?"), "chosen": [thinking], "rejected": talk("", "No.")[1:]}
    (one, other) = halves(encode(encoder, row))
    lead = plain(place("thinking")).encode(chat.check().lead, add_special_tokens=False).ids
    heads = [parts(*half)[0] for half in (one, other)]
    assert heads[0] == heads[1]
    assert [*heads[0], *lead] == chat.prompt_ids(talk("Hi?"))
    assert parts(*other)[1][: len(lead)] == lead
    same = {**row, "chosen": talk("", "Yes.")[1:]}
    assert parts(*halves(encode(encoder, same))[0])[0] == chat.prompt_ids(talk("Hi?"))


def test_an_answer_of_several_messages_is_one_sequence(place):
    encoder = of_case(place, "chatml")
    longer = [talk("", "Wait.")[1], *talk("And?", "Yes.")]
    found = encode(
        encoder, {"prompt": talk("Hi?"), "chosen": longer, "rejected": talk("", "No")[1:]}
    )
    ids, trained = halves(found)[0]
    spoken = [n for n, flag in zip(ids, trained, strict=True) if flag]
    assert plain(place("chatml")).decode(spoken, False) == "Wait.<|im_end|>Yes.<|im_end|>"
    assert not all(trained[trained.index(True) :])  # the question in between is context
    assert found.counts["pairs"] == 1


def test_an_answer_that_the_template_writes_in_two_ways_is_a_bad_row(place):
    encoder = of_case(place, "thinking")
    said = {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm."}
    longer = [said, *talk("And?", "Yes.")]
    row = {"prompt": talk("Hi?"), "chosen": longer, "rejected": talk("", "No.")[1:]}
    found = encode(encoder, row)
    assert found.bad.key == "rewritten_history"
    assert str(found.bad).endswith("and the template rewrites the first ones as history")
    assert found.counts == {"rejected": 1, "rejected_rewritten_history": 1}
    last = of_case(place, "thinking", rewritten_history="last")
    assert encode(last, row).bad.key == "prompt"  # that of the last message is another one


def test_answers_that_the_template_makes_equal_are_a_bad_row(place):
    row = {"prompt": talk("Hi?"), "chosen": talk("", "Yes.")[1:], "rejected": talk("", "Yes. ")[1:]}
    assert encode(of_case(place, "chatml"), row).bad is None
    found = encode(of_case(place, "llama3"), row)  # it takes white space off the ends
    assert str(found.bad) == "chosen and rejected are equal, as the template writes them"
    assert found.counts == {"rejected": 1, "rejected_equal": 1}


def test_rows_and_answers_that_are_context(place):
    encoder = of_case(place, "chatml")
    row = {"prompt": talk("Hi?"), "chosen": talk("", "Yes.")[1:], "rejected": talk("", "No.")[1:]}
    found = encode(encoder, {**row, "weight": 0})
    assert (len(found.ids), found.counts) == (0, {"untrained": 1})
    row["chosen"][0]["train"] = False
    assert str(encode(encoder, row).bad) == "one of its answers is excluded from training"


def forms_of(prompt, chosen, rejected):
    """A pair of strings in each form, as a row and the name of the form."""
    asked = talk(prompt)
    good, bad = ([{"role": "assistant", "content": one}] for one in (chosen, rejected))
    human = [{"from": "human", "value": prompt}]
    start = f"\n\nHuman: {prompt}\n\nAssistant: "
    yield "pairs", {"prompt": asked, "chosen": good, "rejected": bad}
    yield "pairs", {"prompt": asked, "chosen": chosen, "rejected": rejected}
    yield "pairs", {"chosen": asked + good, "rejected": asked + bad}
    yield "pairs", {"prompt": prompt, "chosen": asked + good, "rejected": asked + bad}
    yield "pairs", {"chosen": start + chosen, "rejected": start + rejected}
    yield (
        "pairs_sharegpt",
        {
            "conversations": human,
            "chosen": {"from": "gpt", "value": chosen},
            "rejected": {"from": "gpt", "value": rejected},
        },
    )
    yield "pairs_alpaca", {"instruction": prompt, "chosen": chosen, "rejected": rejected}
    given = {"messages": asked, "tools": [], "parallel_tool_calls": True}
    yield ("pairs_openai", {"input": given, "preferred_output": good, "non_preferred_output": bad})


TEXTS = [
    ("Hi?", "Yes.", "No."),
    ("Say  two\nlines.", "a\n b ", " c"),
    ("é 管理", "👩‍👩‍👧", "x = [1, 2]\n"),
]


@pytest.mark.parametrize("name", ["chatml", "thinking", "gemma"])
@pytest.mark.parametrize("texts", TEXTS)
def test_every_form_has_the_same_ids(place, name, texts):
    encoder = of_case(place, name)
    first, *others = (encode(encoder, row, form) for form, row in forms_of(*texts))
    assert first.second
    for one in others:
        assert one.bad is None
        assert one.ids.tolist() == first.ids.tolist()
        assert one.trained.tolist() == first.trained.tolist()
        assert one.second == first.second


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chatml", "thinking"])
def test_forms_found_in_the_wild_have_the_ids_of_their_pairs(place, name):
    folder, encoder = vocabularies.shared("preference"), of_case(place, name)

    def rows(path):
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]

    known = {encode(encoder, row).ids.tobytes() for row in rows(folder / "train.jsonl")}
    forms = {"sharegpt_ranking": "pairs_sharegpt", "alpaca_ranking": "pairs_alpaca"}
    forms |= {"openai": "pairs_openai"}
    for path in sorted((folder / "forms").glob("*.jsonl")):
        if path.stem.startswith("kto") or path.stem == "trl_explicit_text":
            continue
        for row in rows(path):
            found = encode(encoder, row, forms.get(path.stem, "pairs"))
            assert found.ids.tobytes() in known, path.stem


# What is too long: lengths by words of one token each.
def long_row(chosen, rejected):
    return {
        "prompt": talk("moss"),
        "chosen": talk("", "rain " * chosen + ".")[1:],
        "rejected": talk("", "river " * rejected + "!")[1:],
    }


@pytest.fixture(scope="module")
def sizes(place):
    """Tokens of a prompt, and of halves by the number of their words."""
    encoder = of_case(place, "chatml")

    def of(chosen, rejected):
        found = encode(encoder, long_row(chosen, rejected))
        return found.second, len(found.ids) - found.second

    prompt = len(encoder.chat.prompt_ids(talk("moss")))
    return prompt, of


def test_a_pair_that_is_too_long_is_bad_and_both_lengths_are_told(place, sizes):
    _, of = sizes
    lengths = of(10, 14)
    assert encode(of_case(place, "chatml", seq_len=sum(lengths)), long_row(10, 14)).bad is None
    found = encode(of_case(place, "chatml", seq_len=sum(lengths) - 1), long_row(10, 14))
    assert found.bad.key == "too_long"
    assert str(found.bad) == (
        f"{lengths[0]} + {lengths[1]} tokens, at most {sum(lengths) - 1} together in "
        "data.seq_len; chat.too_long=drop or truncate"
    )


def test_with_blocks_of_their_own_each_half_has_half_of_a_block(place, sizes):
    _, of = sizes
    lengths = of(2, 14)
    room = 2 * max(lengths)
    encoder = of_case(place, "chatml", seq_len=room, apart=True)
    assert encode(encoder, long_row(2, 14)).bad is None
    encoder = of_case(place, "chatml", seq_len=room - 2, apart=True)
    assert str(encode(encoder, long_row(2, 14)).bad) == (
        f"{lengths[0]} + {lengths[1]} tokens, at most {room // 2 - 1} each, half of "
        "data.seq_len; chat.too_long=drop or truncate"
    )
    encoder = of_case(place, "chatml", seq_len=room - 2, apart=True, too_long="truncate")
    assert [len(ids) for ids, _ in halves(encode(encoder, long_row(2, 14)))] == [
        lengths[0],
        room // 2 - 1,
    ]


def test_a_pair_is_left_out_and_counted(place, sizes):
    _, of = sizes
    encoder = of_case(place, "chatml", seq_len=sum(of(10, 14)) - 1, too_long="drop")
    found = encode(encoder, long_row(10, 14))
    assert (len(found.ids), found.bad, found.counts) == (0, None, {"too_long": 1})
    assert len(encode(encoder, long_row(10, 13)).ids)


def test_truncation_takes_the_end_of_the_longer_answer_and_never_the_prompt(place, sizes):
    """PT-04: no half without a trained token is left, and the counts add up."""
    prompt, of = sizes
    whole = {name: halves(encode(of_case(place, "chatml"), long_row(4, 20)))[n]
             for n, name in enumerate(("chosen", "rejected"))}  # fmt: skip
    lengths = of(4, 20)
    for room in range(2, sum(lengths) + 1):
        encoder = of_case(place, "chatml", seq_len=room, too_long="truncate")
        found = encode(encoder, long_row(4, 20))
        assert found.bad is None
        if not len(found.ids):
            assert found.counts["too_long"] == 1
            assert room // 2 <= prompt
            continue
        cut = halves(found)
        assert sum(len(ids) for ids, _ in cut) <= room
        for (ids, trained), (full, flags), other in zip(
            cut, whole.values(), lengths[::-1], strict=True
        ):
            assert ids == full[: len(ids)]
            assert trained == flags[: len(ids)]
            assert any(trained)
            assert len(ids) == min(len(full), max(room // 2, room - other))
        assert found.counts.get("truncated", 0) == (room < sum(lengths))
        assert found.counts["trained"] == int(found.trained.sum())


def test_answers_that_are_equal_once_cut_are_left_out_and_counted(place):
    same = "rain " * 20
    row = {"prompt": "moss", "chosen": f"{same}.", "rejected": f"{same}!"}
    found = encode(of_case(place, "chatml", seq_len=20, too_long="truncate"), row)
    assert (len(found.ids), found.counts) == (0, {"too_long": 1, "equal": 1})


def test_a_conversation_is_left_out_as_a_whole_and_counted(place):
    messages = talk("Hi?", "Yes.", "So?", "rain " * 30)
    size = len(open_chat(place("chatml")).sequences(SimpleNamespace(
        text=None, messages=messages, tools=None, untrained=frozenset(), with_strings=messages
    )).sequences[0].ids)  # fmt: skip
    row = {"messages": messages}
    encoder = of_case(place, "chatml", seq_len=size, too_long="drop")
    assert len(encode(encoder, row, "messages").ids) == size
    encoder = of_case(place, "chatml", seq_len=size - 1, too_long="drop")
    found = encode(encoder, row, "messages")
    assert (len(found.ids), found.bad, found.counts) == (0, None, {"too_long": 1})


def test_a_judged_answer_has_half_of_a_block(place):
    row = {"messages": talk("moss", "rain " * 10), "label": False}
    whole = encode(of_case(place, "chatml"), row, "feedback")
    prompt = of_case(place, "chatml").chat.prompt_ids(talk("moss"))
    assert whole.ids[: whole.answer].tolist() == prompt
    assert whole.trained.tolist() == [n >= whole.answer for n in range(len(whole.ids))]
    assert (whole.second, whole.desirable, whole.cuts) == (0, False, (0, len(whole.ids)))
    assert whole.counts["undesirable"] == 1
    size = len(whole.ids)
    assert encode(of_case(place, "chatml", seq_len=2 * size), row, "feedback").bad is None
    found = encode(of_case(place, "chatml", seq_len=2 * size - 1), row, "feedback")
    assert str(found.bad) == (
        f"{size} tokens, at most {size - 1}, half of data.seq_len, since the answer of another row "
        "has the other half; chat.too_long=drop or truncate"
    )
    dropped = of_case(place, "chatml", seq_len=2 * size - 1, too_long="drop")
    assert encode(dropped, row, "feedback").counts == {"too_long": 1}
    for room in range(2, 2 * size, 2):
        short = of_case(place, "chatml", seq_len=room, too_long="truncate")
        found = encode(short, row, "feedback")
        if len(found.ids):
            assert found.ids.tolist() == whole.ids[: room // 2].tolist()
            assert found.counts["truncated"] == 1
        else:
            assert room // 2 <= whole.answer
            assert found.counts == {"too_long": 1}


@pytest.mark.parametrize("form", [name for name in NEEDED if "pairs" in name or name == "feedback"])
def test_a_bad_row_is_counted_by_its_reason(place, form):
    found = encode(of_case(place, "chatml"), {}, form)
    assert found.bad is not None
    assert found.counts == {"rejected": 1, f"rejected_{found.bad.key}": 1}
