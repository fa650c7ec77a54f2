import importlib.resources
from functools import lru_cache

import numpy as np
import pytest
from helpers import corpus, vocabularies
from helpers.vocabularies import SMALL, description, edited, library_ids, shared

from llmtrain.data.tokens.convert import PROBES, byte_symbols, convert, find_unreached, obstacles

REAL = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "qwen3")]
CONVERTIBLE = ["small", "sample", "thinking", "bare", *REAL]
QWEN = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return corpus.write_tokenizer(tmp_path_factory.mktemp("convert") / "small", entries=400)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of one of our tokenizers or of a real one, by its name, as a run saves it."""
    root = tmp_path_factory.mktemp("saved")

    @lru_cache
    def save(name):
        source = SMALL / name if (SMALL / name).is_dir() else shared(f"tokenizers/{name}")
        return vocabularies.saved(source, root / name)

    return save


@lru_cache(maxsize=2)
def converted_once(directory):
    """Its conversion, which takes a second or two for a real one."""
    return convert(description(directory))


@pytest.fixture(scope="module", params=CONVERTIBLE)
def convertible(request, small, saved):
    if request.param == "small":
        return small
    if request.param == "sample":
        return importlib.resources.files("llmtrain.data") / "sample"
    return saved(request.param)


def split(regex, **changes):
    step = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    steps = [step | changes, byte_level | {"trim_offsets": True}]
    return {"type": "Sequence", "pretokenizers": steps}


def model(**changes):
    return lambda found: found["model"].update(changes)


def whole(**changes):
    return lambda found: found.update(changes)


def without_a_byte(found):
    del found["model"]["vocab"]["~"]


def byte_level(**changes):
    return lambda found: found["pre_tokenizer"].update(changes)


def same_result_twice(found):
    first = "".join(found["model"]["merges"][0])
    found["model"]["merges"].append([first[0], first[1:]])


def end_of_text_by_merging(found):
    found["model"]["vocab"]["e<|"] = 9000
    found["added_tokens"].append({"id": 9000, "content": "e<|", "special": True})
    found["model"]["merges"].append(["e", "<|"])


def an_entry_without_a_merge(found):
    found["model"]["ignore_merges"] = True
    found["model"]["vocab"]["qqqq"] = found["model"]["vocab"].pop("<|endoftext|>")


REFUSED = {
    "WordLevel, not BPE": model(type="WordLevel"),
    "dropout = 0.1": model(dropout=0.1),
    "byte_fallback = True": model(byte_fallback=True),
    "unk_token = '<|endoftext|>'": model(unk_token="<|endoftext|>"),
    "continuing_subword_prefix = '##'": model(continuing_subword_prefix="##"),
    "end_of_word_suffix = '</w>'": model(end_of_word_suffix="</w>"),
    "lacks 1 of the 256 bytes, 0x7e first": without_a_byte,
    "two of its merges have the same result": same_result_twice,
    "its normalizer is Lowercase": whole(normalizer={"type": "Lowercase"}),
    "its normalizer is NFC + Strip": whole(
        normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]}
    ),
    "its pre-tokenizer is absent": whole(pre_tokenizer=None),
    "its pre-tokenizer is Metaspace": whole(pre_tokenizer={"type": "Metaspace"}),
    "its pre-tokenizer is Split + Split + ByteLevel": whole(
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [split(r"\p{N}")["pretokenizers"][0], *split(QWEN)["pretokenizers"]],
        }
    ),
    "add_prefix_space = True": byte_level(add_prefix_space=True),
    "its pre-tokenizer has no pattern": byte_level(use_regex=False),
    "does not split by a regular expression": whole(
        pre_tokenizer=split(QWEN, pattern={"String": " "})
    ),
    "behavior Removed": whole(pre_tokenizer=split(QWEN, behavior="Removed")),
    "its decoder is not ByteLevel": whole(decoder=None),
    "the control token 'e<|' of text": end_of_text_by_merging,
    "no merge leads to the entry 'qqqq'": an_entry_without_a_merge,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_each_obstacle_is_named(small, tmp_path, reason):
    directory = edited(small, tmp_path / "edited", REFUSED[reason])
    assert reason in next(obstacles(description(directory)))


def test_two_patterns_are_an_obstacle(small):
    found = description(small)
    found["pre_tokenizer"] = split(QWEN)
    found["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = True
    assert next(obstacles(found)) == "its pre-tokenizer has two patterns"


def test_the_same_ids_as_the_library_on_awkward_texts(convertible):
    assert list(obstacles(description(convertible))) == []
    converted = converted_once(convertible)
    for text in PROBES:
        assert converted.encode_part(text).tolist() == library_ids(convertible, text), repr(text)


@pytest.mark.parametrize(
    ("name", "language"),
    [
        *(("thinking", "sample"), ("bare", "sample")),
        *(
            pytest.param(name, language, marks=pytest.mark.slow)
            for name in ("gpt2", "qwen3")
            for language in ("20140304.en", "20210520.vi")
        ),
    ],
)
def test_the_same_ids_as_the_library_on_documents(saved, name, language):
    import tokenizers

    directory = saved(name)
    if language == "sample":
        texts = vocabularies.sample_texts(300)
    else:
        texts = vocabularies.real_texts(language, 300)

    library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    expected = [found.ids for found in library.encode_batch_fast(texts, add_special_tokens=False)]
    assert [ids.tolist() for ids in converted_once(directory).encode(texts)] == expected


def test_the_same_text_as_the_library_from_any_ids(convertible):
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(convertible / "tokenizer.json"))
    converted = converted_once(convertible)
    chosen = np.random.default_rng(0)
    for ids in chosen.integers(0, library.get_vocab_size() + 9, (200, 12)).tolist():
        assert converted.decode(ids) == library.decode(ids, skip_special_tokens=False)


def test_a_pattern_of_its_own_is_used(small, tmp_path):
    directory = edited(small, tmp_path / "edited", whole(pre_tokenizer=split(r"[ a]|[^ a]+")))
    text = "rain falls on quiet towns"
    ids = convert(description(directory)).encode_part(text).tolist()
    assert ids == library_ids(directory, text)
    assert ids != library_ids(small, text)


def test_ids_that_contradict_the_order_of_merges_are_looked_up(small, tmp_path):
    def turned_round(found):
        last = max(found["model"]["vocab"].values())
        found["model"]["vocab"] = {t: last - i for t, i in found["model"]["vocab"].items()}
        found["added_tokens"][0]["id"] = last

    directory = edited(small, tmp_path / "edited", turned_round)
    converted = convert(description(directory))
    assert converted.ids is not None
    for text in ("river under moss", *PROBES):
        assert converted.encode_part(text).tolist() == library_ids(directory, text)
        assert converted.decode(converted.encode_part(text).tolist()) == text


def test_ids_in_the_order_of_merges_need_no_lookup(small):
    assert min(description(small)["model"]["vocab"].values()) == 0  # the control token's
    assert convert(description(small)).ids is None


def test_texts_are_brought_to_form_nfc_where_the_tokenizer_does(small, tmp_path):
    directory = edited(small, tmp_path / "edited", whole(normalizer={"type": "NFC"}))
    converted = convert(description(directory))
    for text in ("e\u0301", "plain", "\u00e9", "Tiê\u0301ng Viê\u0323t", *PROBES):
        assert converted.encode_part(text).tolist() == library_ids(directory, text), ascii(text)
    assert converted.encode_part("e\u0301").tolist() == converted.encode_part("\u00e9").tolist()
    decomposed = convert(description(small)).encode_part("e\u0301")
    assert decomposed.tolist() != converted.encode_part("e\u0301").tolist()


def test_merges_may_be_written_as_pairs_or_as_strings(small, tmp_path):
    def as_strings(found):
        found["model"]["merges"] = [" ".join(pair) for pair in found["model"]["merges"]]

    directory = edited(small, tmp_path / "edited", as_strings)
    ids = convert(description(directory)).encode_part("river under moss").tolist()
    assert ids == library_ids(small, "river under moss")


def opened_model(directory):
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).model


def hidden_entry(found, **changes):
    """b + c comes first, so that a b c is never joined from a b + c."""
    symbols = {symbol: index for index, symbol in enumerate(byte_symbols())}
    merges = [["b", "c"], ["a", "b"], ["ab", "c"]]
    vocab = symbols | {"bc": 256, "ab": 257, "abc": 258}
    found["model"] |= {"vocab": vocab, "merges": merges} | changes
    found["added_tokens"][0]["id"] = 259


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_an_entry_that_merges_do_not_lead_to_is_found(small, tmp_path, ignore_merges):
    directory = edited(
        small, tmp_path / "edited", lambda d: hidden_entry(d, ignore_merges=ignore_merges)
    )
    found, model = description(directory), opened_model(directory)
    assert list(obstacles(found)) == []
    assert find_unreached(found, model) == "abc"
    assert model.ignore_merges is ignore_merges
    text = "xabc"  # no word is an entry here
    assert convert(found).encode_part(text).tolist() != library_ids(directory, text)


def test_trained_vocabularies_have_no_such_entry(convertible):
    assert find_unreached(description(convertible), opened_model(convertible)) is None
