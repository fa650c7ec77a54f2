"""Converts a `tokenizer.json` to tiktoken, four to five times as fast, if that gives the same ids.

Only byte-level BPE is converted, and only in the forms that `obstacles` lets pass. For these,
tiktoken differs in one way: it merges any two neighbours whose union is an entry, and takes a word
that is an entry without merging, while `tokenizers` merges listed pairs only. The ids are the same
if and only if the merges lead from its bytes to every entry (`find_unreached`). The reason: when
tiktoken joins two neighbours, their bytes have been merged as they would be in the entry alone, and
there the last merge, the only one listed with this result, joins the same two. The two libraries
run patterns on different regular expression engines; whether these agree is tested on awkward
texts, not proved.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmtrain.types import JsonObject

if TYPE_CHECKING:
    import tiktoken
    import tokenizers


Description = JsonObject  # the content of a tokenizer.json

# The pattern by which ByteLevel cuts words (`use_regex`); no file contains it.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# A control token for tiktoken that is never allowed, so it is text wherever it appears. Without
# any such token, the call that returns arrays looks for one at every byte.
_NEVER = "\0<|never|>\0"
_GAP = "\uffff"  # no byte is written so


@dataclass(frozen=True, slots=True)
class Converted:
    """The back end `tiktoken`.

    encoding: encodes to ranks
    entries: id → bytes, of control tokens too
    ids: rank → id (n,); None if they are the same
    normalize: applied to texts that are not in form NFC; None = nothing
    """

    encoding: tiktoken.Encoding
    entries: dict[int, bytes]
    ids: np.ndarray | None
    normalize: Callable[[str], str] | None

    def encode(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """Yield the ids of each text."""
        return map(self.encode_part, texts)

    def encode_part(self, text: str) -> np.ndarray:
        """Return the ids (n,) int32 of a text or a later part of one: nothing is put in front."""
        # Python checks a character in 2–4 ns; normalizing it takes 60–120. If Python and tokenizers
        # know different versions of Unicode, the check at the first start notices it.
        if self.normalize and not text.isascii() and not unicodedata.is_normalized("NFC", text):
            text = self.normalize(text)
        # The same as `encode_ordinary`, without a Python integer for every token. The encoding has
        # one control token that nobody uses: with none, tiktoken looks for them at every byte.
        encoded = self.encoding.encode_to_numpy(text, disallowed_special=())
        ranks: np.ndarray = encoded.view(np.int32)
        return ranks if self.ids is None else self.ids[ranks]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids. Ids without an entry give no text."""
        return b"".join(self.entries.get(i, b"") for i in ids).decode("utf-8", "replace")


def convert(description: Description) -> Converted:
    """Convert a description that has no obstacles. Raises what tiktoken raises."""
    import tiktoken

    vocab: dict[str, int] = description["model"]["vocab"]
    names = [*byte_symbols(), *merge_results(description)]
    table = str.maketrans({symbol: chr(byte) for symbol, byte in byte_symbols().items()})
    keys = [name.encode("latin-1") for name in _GAP.join(names).translate(table).split(_GAP)]
    ids = [vocab[name] for name in names]
    # Ranks only have to be ordered, so they are the ids, unless these contradict the merges' order.
    ordered = ids[256:] == sorted(ids[256:])
    ranks = ids if ordered else range(len(ids))
    entries = dict(zip(ids, keys, strict=True))
    entries |= {token["id"]: token["content"].encode() for token in added_tokens(description)}
    return Converted(
        encoding=tiktoken.Encoding(
            "llmtrain",
            pat_str=_pattern(description),
            mergeable_ranks=dict(zip(keys, ranks, strict=True)),
            special_tokens={_NEVER: len(keys) + max(ids)},  # the run's own are text
        ),
        entries=entries,
        ids=None if ordered else np.array(ids, dtype=np.int32),
        normalize=shell(description, "normalizer").normalizer.normalize_str
        if _steps(description, "normalizer")
        else None,
    )


def obstacles(description: Description) -> Iterator[str]:
    """Yield reasons why this tokenizer cannot be converted. Only the first one is reliable."""
    model = description["model"]
    if model.get("type") != "BPE":
        yield f"its model is {model.get('type')}, not BPE"
    for name in (
        *("dropout", "byte_fallback", "unk_token"),
        *("continuing_subword_prefix", "end_of_word_suffix"),
    ):
        if model.get(name):
            yield f"its model has {name} = {model[name]!r}"
    yield from _obstacles_of_steps(description)
    yield from _obstacles_of_entries(description)


def find_unreached(description: Description, model: tokenizers.models.BPE) -> str | None:
    """Return the first entry that its own merges do not lead to, as written in the vocabulary.

    It takes a second for 150,000 entries, once per run.

    model: that of the opened tokenizer
    """
    vocab = description["model"]["vocab"]
    at_once, model.ignore_merges = model.ignore_merges, False
    try:
        for name in merge_results(description):
            if [token.id for token in model.tokenize(name)] != [vocab[name]]:
                return name
    finally:
        model.ignore_merges = at_once
    return None


def control_strings(description: Description) -> list[str]:
    """Return added tokens that the model itself would make from text."""
    model = description["model"]
    names = {token["content"] for token in added_tokens(description)}
    if model.get("type") == "BPE" and not model.get("ignore_merges"):
        return sorted(names.intersection(merge_results(description)))
    return sorted(names.intersection(vocabulary(description)))


def vocabulary(description: Description) -> dict[str, int]:
    """Return the entries of the model alone, as entry → id."""
    vocab = description["model"].get("vocab") or {}
    if isinstance(vocab, list):  # a Unigram model has pieces and their scores
        return {piece: index for index, (piece, _) in enumerate(vocab)}
    return dict(vocab)


def added_tokens(description: Description) -> list[JsonObject]:
    """Return the added tokens, each with its `id`, `content` and other keys."""
    return list(description.get("added_tokens") or ())


def merge_results(description: Description) -> list[str]:
    """Return the results of the merges, in order."""
    merges = description["model"].get("merges") or ()
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges)
    return ["".join(pair) for pair in pairs]


def byte_symbols() -> dict[str, int]:
    """Return the character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = sorted(set(range(256)) - set(shown))
    symbols = {chr(byte): byte for byte in shown}
    return symbols | {chr(256 + n): byte for n, byte in enumerate(hidden)}


def shell(description: Description, *parts: str, **others: object) -> tokenizers.Tokenizer:
    """Return a tokenizer without entries that has these parts of a description, and `others`."""
    import json

    import tokenizers

    named = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None}
    empty = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {}, "merges": []},
        **named,
        **{part: description.get(part) for part in parts},
        **others,
    }
    return tokenizers.Tokenizer.from_str(json.dumps(empty))


def _obstacles_of_steps(description: Description) -> Iterator[str]:
    """Yield obstacles in the normalizer, the pre-tokenizer and the decoder."""
    kinds = [step["type"] for step in _steps(description, "normalizer")]
    if kinds not in ([], ["NFC"]):
        yield f"its normalizer is {' + '.join(kinds)}"
    steps = _steps(description, "pre_tokenizer")
    kinds = [step["type"] for step in steps]
    if kinds not in (["ByteLevel"], ["Split", "ByteLevel"]):
        yield f"its pre-tokenizer is {' + '.join(kinds) or 'absent'}"
        return
    byte_level, split = steps[-1], steps[0] if len(steps) == 2 else None
    if byte_level.get("add_prefix_space", True):
        yield "its pre-tokenizer has add_prefix_space = True"
    if byte_level.get("use_regex", True) == (split is not None):
        yield f"its pre-tokenizer has {'two patterns' if split else 'no pattern'}"
    if split and ("Regex" not in split["pattern"] or split["invert"]):
        yield "its pre-tokenizer does not split by a regular expression"
    if split and split["behavior"] != "Isolated":
        yield f"its pre-tokenizer splits with behavior {split['behavior']}"
    if (description.get("decoder") or {}).get("type") != "ByteLevel":
        yield "its decoder is not ByteLevel"


def _obstacles_of_entries(description: Description) -> Iterator[str]:
    vocab, results, symbols = vocabulary(description), merge_results(description), byte_symbols()
    missing = [f"0x{byte:02x}" for symbol, byte in symbols.items() if symbol not in vocab]
    if missing:
        yield f"its vocabulary lacks {len(missing)} of the 256 bytes, {missing[0]} first"
    names = set(results)
    if len(names) < len(results) or not symbols.keys().isdisjoint(names):
        yield "two of its merges have the same result"
    if names.difference(vocab) or not symbols.keys() >= set("".join(results)):
        for name in results:
            if name not in vocab or not symbols.keys() >= set(name):
                yield f"the merged entry {name!r} is not in its vocabulary, or not made of bytes"
    controls = control_strings(description)
    if controls:
        yield f"its model makes the control token {controls[0]!r} of text"
    if description["model"].get("ignore_merges"):
        added = {token["content"] for token in added_tokens(description)}
        for name in vocab.keys() - symbols.keys() - names - added:
            yield f"no merge leads to the entry {name!r}"


def _pattern(description: Description) -> str:
    first = _steps(description, "pre_tokenizer")[0]
    return str(first["pattern"]["Regex"]) if first["type"] == "Split" else GPT2_PATTERN


def _steps(description: Description, part: str) -> list[JsonObject]:
    """Return the steps of a normalizer or pre-tokenizer."""
    step = description.get(part)
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return list(step["normalizers" if part == "normalizer" else "pretokenizers"])


PROBES = (
    "",
    "a" * 300,
    "ab" * 600,
    "=" * 1000,
    " " * 70,
    " " * 1200 + "x",
    "\n" * 70,
    "x\n" + " \n" * 400 + "  y",
    "\t \n \r\n \r x",
    "\r\r\n\n\r \u00a0\u2003 \x0b\x0c\x1c\x1d\x1e\x1f\x85 x",
    "no\u00a0break, line\u2028separator\u2029, next\u0085line, nul\x00, bom\ufeff",
    "zero\u200bwidth\u200c\u200d\u2060 soft\u00adhyphen \u180e \u3000ideographic\u1680ogham",
    "👩\u200d👩\u200d👧\u200d👦 🇻🇳 ✊🏿 1\ufe0f\u20e3 ❤\ufe0f",
    "e\u0301 a\u0323\u0306 o\u031b\u0301 \u1ec7 ﬁ ½ Å \u212b \u2126 \u0344 \u0958",
    "a\u0301\u0316\u0323\u0301 \u0301start \u1100\u1161\u11a8 \uac00\u11a8 \u0f73\u0f71",
    # Compositions that came with Unicode 15 and 16: two versions may know different ones.
    "\U000105d2\u0307 \U00011382\U000113c9 \U0001611e\U0001611e \U00016d67\U00016d67",
    # Letters, marks, digits and signs of Unicode 13 to 17.
    "\u0870\u0898\u1b4c\u2c2f\ua7cb\ua7da\ua7f1\U00010ec2\U00011240\U00011f50\U0001e4d0\U00031350",
    "\U0001e5f0\U0001ccf0\U0001ccf9\U00010d40\U00016d71\U00011bf1\U0002ebf0\U00032000\U0001fae9",
    "Tiếng Việt, 中文維基百科, العربية, हिन्दी, Ελληνικά, русский, 한국어, ไทย",
    "မြန်မာ ខ្មែរ བོད་ཡིག தமிழ் עברית ქართული አማርኛ ᏣᎳᎩ ꦗꦮ 𐎠𐎡 𝒳𝔸 ǅ ʰ ªº",
    "1234567890 ١٢٣ १२३ Ⅻ 3.14159 1,000,000 ²³ ①② 𝟘𝟙 ৴ 0x1F 1e-9",
    "I'll've DON'T 'S 'Re it's we'd 're 'ſ 'K d’s D'LL'M x'\u0301s ''s",
    "<|endoftext|><|im_start|>user</s><s>[INST] <unk> <pad> <tool_call></think>",
    "def f(x):\n    return {'a': [x, *y]}  # why?\n\n\n\tif  a==b :\n\t\t pass\n",
    "http://example.org/a_b-c?d=%20&e#f  A.B.C.  …—–‑ «»‹›„“ $€₫ ©®™ ±×÷ ^`¨ _‿",
    "\U0001f600\U00020000\u0378\ue000\ufffd\uffff\U0010ffff\x00\x01\x7f\x80",
    "camelCaseWords HTTPServer iPhone XMLHttpRequest.newInstance() ALLCAPS MiXeD",
)


def long_runs(characters: int) -> list[str]:
    """Return texts of one repeated character, which may overflow a regular expression's stack."""
    return [run * (characters - 1) + "x" for run in (" ", "\n", "中")]
