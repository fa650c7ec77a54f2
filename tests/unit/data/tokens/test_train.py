"""Training a byte-level BPE."""

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest

from llmtrain.data.tokens.tokenizer import END_OF_TEXT, tokenizer_config, train_bpe
from llmtrain.errors import UserError

TEXTS = [f"The river number {n} flows past {n * n} houses; its water is cold." for n in range(300)]
ODD = "naïve 東京 🦊\r\n\t\x00 \u2028  <|endoftext|> e\u0301 don't 1234567\n\n"
PROGRAM = """
from llmtrain.data.tokens.tokenizer import train_bpe
texts = [f"The river number {n} flows past {n * n} houses; its water is cold." for n in range(300)]
print(train_bpe(texts, 400), end="")
"""


def directory(path, texts, entries):
    (path / "tokenizer.json").write_text(train_bpe(texts, entries), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(tokenizer_config(), encoding="utf-8")
    return path


def counts_of_pairs(words):
    counts: dict[tuple[str, str], int] = {}
    for word, times in words.items():
        for pair in pairwise(word):
            counts[pair] = counts.get(pair, 0) + times
    return counts


def merged(word, a, b):
    out: list[str] = []
    for symbol in word:
        if out and out[-1] == a and symbol == b:
            out[-1] = a + b
        else:
            out.append(symbol)
    return tuple(out)


def test_it_has_exactly_as_many_entries_as_asked_for_with_the_bytes_and_end_of_text():
    trained = json.loads(train_bpe(TEXTS, 300))
    vocabulary = trained["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(300))
    assert vocabulary[END_OF_TEXT] == 0
    assert sum(len(token) == 1 for token in vocabulary) == 256
    assert [token["content"] for token in trained["added_tokens"]] == [END_OF_TEXT]
    assert trained["added_tokens"][0]["special"] is True


def test_it_has_the_form_of_gpt2_and_adds_nothing_to_a_text():
    trained = json.loads(train_bpe(TEXTS, 300))
    pattern = trained["pre_tokenizer"]
    assert (pattern["type"], pattern["add_prefix_space"], pattern["use_regex"]) == (
        "ByteLevel",
        False,
        True,
    )
    assert trained["decoder"]["type"] == "ByteLevel"
    assert trained["normalizer"] is None
    assert trained["post_processor"] is None


def test_each_merge_is_a_most_frequent_pair():
    words = Counter(tuple(f"Ġ{word}") for word in ("low " * 50 + "lower " * 21).split())
    words += Counter(tuple(f"Ġ{word}") for word in ("newest " * 34 + "widest " * 13).split())
    text = "".join("".join(word).replace("Ġ", " ") * times for word, times in words.items())
    merges = json.loads(train_bpe([text], 257 + 8))["model"]["merges"]
    assert len(merges) == 8
    for a, b in merges:
        counts = counts_of_pairs(words)
        assert counts[a, b] == max(counts.values())
        words = Counter({merged(word, a, b): times for word, times in words.items()})


@pytest.mark.parametrize("threads", ["1", "4"])
@pytest.mark.launches
def test_another_process_with_any_number_of_threads_gives_the_same_bytes(threads):
    environment = os.environ | {
        "TOKENIZERS_PARALLELISM": "true",
        "RAYON_NUM_THREADS": threads,
        "PYTHONHASHSEED": threads,
    }
    there = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True
    )
    assert there.stdout.decode() == train_bpe(iter(TEXTS), 400)


def test_transformers_loads_it_and_every_text_comes_back(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory(tmp_path, TEXTS, 300))
    assert len(tokenizer) == 300
    assert tokenizer.eos_token == tokenizer.bos_token == tokenizer.pad_token == END_OF_TEXT
    assert tokenizer.eos_token_id == 0
    assert tokenizer.model_max_length > 2**60
    for text in (ODD, *TEXTS[:3]):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_text_too_small_is_refused_with_what_it_reaches():
    with pytest.raises(UserError) as refused:
        train_bpe(["a b c"], 300)
    (problem,) = refused.value.problems
    assert problem.key == "model.tokenizer"
    assert problem.value == "{train: 300}"
    reached = int(problem.remedy.split("}")[0].split(" ")[1])
    assert len(json.loads(train_bpe(["a b c"], reached))["model"]["vocab"]) == reached


def test_fewer_entries_than_bytes_are_refused():
    with pytest.raises(UserError, match="at least 257"):
        train_bpe(TEXTS, 256)
    assert len(json.loads(train_bpe([], 257))["model"]["vocab"]) == 257


@pytest.mark.launches
def test_importing_the_module_does_not_import_tokenizers():
    program = "import sys, llmtrain.data.tokens.tokenizer; sys.exit('tokenizers' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
