from dataclasses import replace

import numpy as np
import pytest
from helpers import vocabularies
from helpers.chats import FRAGMENTS, SAMPLE, make, plain
from tokenizers import AddedToken, Tokenizer

from llmtrain.data.chat import encode as module
from llmtrain.data.chat.encode import OffsetEncoder, of_back_end, of_library, open_encoder
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import UserError


def with_tokens(source, *tokens):
    full = Tokenizer.from_file(str(source / "tokenizer.json"))
    full.add_tokens([one for one in tokens if not one.special])
    full.add_special_tokens([one for one in tokens if one.special])
    return full


def token(content, **options):
    return AddedToken(content, **{"normalized": False, "special": True, **options})


PLAIN = (token("<|a|>"), token("<|a|><|b|>"), token("<|b|>"))
ODD = (
    *PLAIN,
    token("<r>", rstrip=True),
    token("<l>", lstrip=True),
    token("<w>", single_word=True),
    token("<n>", normalized=True, special=False),
    token("\n\n"),
)
NAMES = [one.content for one in ODD]


def random_texts(count):
    rng = np.random.default_rng(3)
    pieces = (*FRAGMENTS, *NAMES, *NAMES)
    for _ in range(count):
        yield "".join(pieces[n] for n in rng.integers(0, len(pieces), rng.integers(0, 12)))


@pytest.fixture(scope="module", params=["sample", "unigram", "bpe", "prepend"])
def source(request, tmp_path_factory):
    if request.param == "sample":
        return SAMPLE
    directory = tmp_path_factory.mktemp("pieces") / request.param
    return vocabularies.word_pieces(directory, request.param)


def ids_of(full, text):
    return full.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("tokens", [PLAIN, ODD, ()], ids=["plain", "odd", "none"])
def test_the_parts_have_the_ids_of_the_whole(source, tokens):
    full = with_tokens(source, *tokens)
    encoder = OffsetEncoder(of_library(full))
    assert (encoder._cuts.search("<|b|>") is not None) == bool(tokens)
    for text in random_texts(150):
        assert encoder.encode(text).ids == ids_of(full, text)


@pytest.mark.parametrize("tokens", [PLAIN, ODD], ids=["plain", "odd"])
def test_a_boundary_is_where_the_ids_of_a_prompt_end(source, tokens):
    full = with_tokens(source, *tokens)
    encoder = OffsetEncoder(of_library(full))
    found = set()
    for text in random_texts(25):
        encoded = encoder.encode(text)
        inside = {
            part.start + n
            for part in encoded.parts
            for n in range(1, len(part.text))
            if part.text in NAMES
        }
        for place in sorted({*range(len(text) + 1)} - inside):
            alone = ids_of(full, text[:place])
            clean = encoded.ids[: len(alone)] == alone
            assert encoder.boundary(encoded, place) == (len(alone) if clean else None)
            found.add(clean)
    assert found == {True, False}


def test_a_part_is_encoded_once():
    calls = []
    engine = of_library(with_tokens(SAMPLE, *PLAIN))
    encoder = OffsetEncoder(
        replace(engine, whole=lambda texts: calls.extend(texts) or engine.whole(texts))
    )
    calls.clear()
    for _ in range(3):
        encoder.encode("<|a|>user<|b|>moss and rain<|a|>")
    assert calls.count("<|a|>moss and rain") + calls.count("<|a|><|b|>moss and rain") <= 1
    assert sum("moss" in text for text in calls) == 1


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "CACHE_CHARACTERS", 100)
    encoder = OffsetEncoder(of_library(with_tokens(SAMPLE, *PLAIN)))
    for n in range(60):
        encoder.encode(f"<|a|>{n} " + "moss " * 4)
    assert len(encoder._known) < 20


def test_a_control_token_that_the_model_makes_of_text_is_cut_in_two(tmp_path):
    source = vocabularies.word_pieces(tmp_path / "unigram", "unigram")
    encoder = open_encoder(source)
    assert 2 in encoder.encode("a</s>b").ids
    ids = encoder.encode("a\U000f0000</s>\U000f0001b").ids
    assert 2 not in ids


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        open_encoder(tmp_path)


def test_truncation_and_padding_of_the_file_do_not_count(tmp_path):
    directory = make(tmp_path / "short", None)
    full = Tokenizer.from_file(str(directory / "tokenizer.json"))
    full.enable_truncation(3)
    full.enable_padding(length=8)
    full.save(str(directory / "tokenizer.json"))
    text = "moss and rain and stones, moss and rain"
    assert open_encoder(directory).encode(text).ids == ids_of(plain(SAMPLE), text)


def save(directory, *tokens):
    """The sample's tokenizer with these tokens, opened with both back ends."""
    directory = make(directory, None)
    with_tokens(SAMPLE, *tokens).save(str(directory / "tokenizer.json"))
    return directory, open_tokenizer(directory, "tiktoken")


def test_the_faster_back_end_gives_the_same_ids_and_boundaries(tmp_path):
    directory, tokenizer = save(tmp_path / "plain", *PLAIN)
    fast, slow = open_encoder(directory, tokenizer), open_encoder(directory)
    assert fast._engine.by_parts
    assert not slow._engine.by_parts
    assert {k: str(v) for k, v in fast.added.items()} == {k: str(v) for k, v in slow.added.items()}
    rng = np.random.default_rng(5)
    for text in random_texts(150):
        literal = "".join(f"{text}\U000f0000{name}\U000f0001" for name in rng.choice(NAMES, 2))
        for kind in ("first", "behind", "glued"):
            for one in (text, literal):
                found, expected = fast.encode(one, kind), slow.encode(one, kind)
                assert found == expected
        for place in range(0, len(text), 3):
            assert fast.boundary(fast.encode(text), place) == slow.boundary(
                slow.encode(text), place
            )


@pytest.mark.parametrize("odd", ODD[3:], ids=lambda one: one.content.strip())
def test_tokens_at_which_a_text_cannot_be_cut_need_the_library(tmp_path, odd):
    _, tokenizer = save(tmp_path / "odd", *PLAIN, odd)
    assert of_back_end(tokenizer) is None


def test_the_library_is_no_faster_back_end(tmp_path):
    assert of_back_end(open_tokenizer(make(tmp_path / "t", "chatml"))) is None
