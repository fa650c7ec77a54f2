"""`data inspect` of conversations: what is trained is marked, and counted as by hand."""

import re
from itertools import pairwise

import pytest
from helpers import chats, corpus
from helpers.config import loaded

from llmtrain.cli.data import inspection
from llmtrain.tools.data.inspect import inspect

TOKENS = ("<|im_start|>", "<|im_end|>")
# Reasoning is written of the last message alone, so history is not what was answered.
REWRITES = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ '(' + m.reasoning_content + ') ' if m.reasoning_content and loop.last else '' }}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The blank behind the prompt merges with the first word of the answer.
STRADDLES = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
)


def rows_of(reasoning):
    """Conversations of one to three turns; every tenth cannot be used."""
    rows = []
    for n in range(30):
        texts = [f"{who} {n}.{turn}" for turn in range(n % 3 + 1) for who in ("Why", "the answer")]
        messages = chats.talk(*texts)
        if reasoning:
            for message in messages[1::2]:
                message["reasoning_content"] = f"thought {n}"
        if n % 10 == 5:
            messages[0]["role"] = "bot"
        rows.append({"messages": messages})
    return rows


def usable(reasoning=False):
    return [m for row in rows_of(reasoning) if (m := row["messages"])[0]["role"] == "user"]


@pytest.fixture
def look(tmp_path):
    """Inspects these rows with the sample's tokenizer and a template."""

    def call(template, reasoning=False, **options):
        tokenizer = chats.make(tmp_path / "tokenizer", template, TOKENS)
        path = corpus.write_jsonl(tmp_path / "chat.jsonl", rows_of(reasoning))
        given = [f"data.sources=[{{path: {path}}}]", f"model.tokenizer={tokenizer}"]
        given += ["data.seq_len=128", "data.heldout=0", "chat.bad_rows=skip"]
        return inspect(loaded(tmp_path, *given), documents=0, **options)

    return call


def test_answers_with_their_end_of_turn_are_marked(look):
    found = look("chatml", blocks=8)
    known = {m["content"] for messages in usable() for m in messages if m["role"] == "assistant"}
    expected = {f"{answer}<|im_end|>" for answer in known}
    seen = set()
    for block in found.blocks:
        assert block.conversations
        marked = [block.text[begin:end] for begin, end in block.trained]
        assert set(marked) <= expected
        documents = [block.text[a:b] for a, b in pairwise((0, *block.borders, None))]
        assert len(marked) == sum(one.count("<|im_start|>assistant") for one in documents)
        seen.update(marked)
    assert len(seen) > 5
    whole = [one for one in shown(found) if not one.endswith("characters)")]
    assert len(whole) > 3
    for text in whole:
        marked = re.findall("⟦(.*?)⟧", text)
        assert len(marked) == text.count("<|im_start|>assistant") == text.count("⟦")
        assert {squeezed(one) for one in marked} <= {squeezed(one) for one in expected}


def squeezed(text):
    """Without the blanks at which lines end."""
    return "".join(text.split())


def shown(found):
    """The documents of the blocks as they are printed; of a long one, the beginning."""
    lines = list(inspection(found))
    first = next(i for i, line in enumerate(lines) if line.startswith("block 0"))
    text = "".join(f"\n{one}" if one.startswith("block") else one[4:] for one in lines[first:])
    return re.split(r"-{8} (?:document border|\d+ more documents)|\nblock.*?padding", text)[1:]


def test_a_template_that_rewrites_history_is_counted_with_what_it_costs(look, tmp_path):
    found = look(REWRITES, True, blocks=0)
    encode = chats.plain(tmp_path / "tokenizer").encode
    lengths = []
    for messages in usable(True):
        turns, before = [], ""
        for ask, answer in zip(messages[::2], messages[1::2], strict=True):
            before += f"<|im_start|>user\n{ask['content']}<|im_end|>\n<|im_start|>assistant\n"
            said = f"({answer['reasoning_content']}) {answer['content']}<|im_end|>"
            turns.append(len(encode(before + said, add_special_tokens=False).ids))
            before += f"{answer['content']}<|im_end|>\n"
        lengths.append(turns)
    ids = sum(map(sum, lengths))
    assert found.sequences == sum(map(len, lengths))
    assert found.straddles == 0
    assert found.rejected == {"role": 3}
    assert found.rewriting == pytest.approx(ids / sum(map(max, lengths)))
    assert found.sources[0].tokens == ids
    lines = list(inspection(found))
    factor = f"{found.rewriting:.2f} tokens for each of whole conversations"
    assert f"chat      {found.sequences} sequences, {factor}, 0 cut in two" in lines
    assert "          3 rows rejected: role" in lines


def test_turns_whose_answer_merges_with_the_prompt_are_counted(look):
    found = look(STRADDLES, blocks=0)
    turns = sum(len(messages) // 2 for messages in usable())
    assert (found.sequences, found.straddles) == (turns, turns)
    assert found.rewriting is not None
    assert found.rewriting > 1.2


def test_the_steps_of_an_epoch_are_an_estimate(look):
    """A run counts them up to where its last lane ends."""
    assert "steps_per_epoch" in look("chatml", blocks=0).estimated
