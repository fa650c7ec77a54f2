"""Opens the tokenizer that a run saved, and turns text into ids.

Text is only ever text: an article that contains `<|endoftext|>` gets the ids of these characters,
never the control token. The trap: `tokenizers` honours that for tokens marked special alone, so all
added tokens are marked so when the file is opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from llmtrain.errors import Problem, UserError

if TYPE_CHECKING:
    import tokenizers

PART_CHARACTERS = 1 << 20  # a longer document is encoded in parts
PROBES = (
    "",
    "a" * 300,
    " " * 70,
    "\n" * 70,
    "\t \n \r\n \r x",
    "no\u00a0break, line\u2028separator, next\u0085line, nul\x00, bom\ufeff",
    "👩\u200d👩\u200d👧\u200d👦 🇻🇳 ✊🏿",
    "e\u0301 a\u0323\u0306 o\u031b\u0301 \u1ec7 ﬁ ½ Å",
    "Tiếng Việt, 中文維基百科, العربية, हिन्दी, Ελληνικά, русский, 한국어, ไทย",
    "1234567890 ١٢٣ १२३ Ⅻ 3.14159 1,000,000",
    "I'll've DON'T 'S 'Re it's we'd 're",
    "<|endoftext|><|im_start|>user</s><s>[INST] <unk> <pad> <tool_call></think>",
    "def f(x):\n    return {'a': [x, *y]}  # why?\n\n\n",
    "http://example.org/a_b-c?d=%20&e#f  A.B.C.  …—–‑",
    "\U0001f600\U00020000\u0378\ue000",
)


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer of the back end `tokenizers`.

    eos, bos, pad: ids; bos is None unless the tokenizer itself puts one before a text; pad is the
    end-of-text id where there is none · length: ids are below it · digest: of its files.
    """

    eos: int
    bos: int | None
    pad: int
    length: int
    digest: str
    backend: str
    _tokenizer: tokenizers.Tokenizer = field(repr=False)

    def encode(self, text: str) -> np.ndarray:
        """The text's own ids (n,) int32: no begin or end token, no control tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text; 64 short ones at a time are a sixth faster than one by one."""
        return self._encode(texts, [], [])

    def documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Documents as they are trained on: begin token if there is one, text, end of text."""
        return self._encode(texts, [] if self.bos is None else [self.bos], [self.eos])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, control tokens written out."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))

    @property
    def probe(self) -> str:
        """Digest of the ids of a list of awkward strings: equal iff the ids are."""
        digest = xxhash.xxh3_64()
        for text in PROBES:
            ids = self.encode(text)
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i4").tobytes())
        return digest.hexdigest()

    def _encode(self, texts: Sequence[str], begin: list[int], end: list[int]) -> list[np.ndarray]:
        parts = [list(split_long(text, PART_CHARACTERS)) for text in texts]
        flat = [part for text in parts for part in text]
        encodings = iter(self._tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        found = []
        for text in parts:
            ids = begin + next(encodings).ids
            for _ in text[1:]:
                ids += next(encodings).ids
            found.append(np.array(ids + end, dtype=np.int32))
        return found


def open_tokenizer(directory: Path) -> Tokenizer:
    """Open `tokenizer.json` and `tokenizer_config.json`.

    Raises UserError if a file is missing, or the tokenizer has no end-of-text token.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else it takes a thread for every core
    import tokenizers

    description = _read(directory / "tokenizer.json")
    settings = _read(directory / "tokenizer_config.json")
    for token in description.get("added_tokens") or ():
        token["special"] = True
    opened = tokenizers.Tokenizer.from_str(json.dumps(description))
    opened.encode_special_tokens = True
    opened.no_truncation()
    opened.no_padding()
    eos = _token(opened, settings, "eos_token")
    if eos is None:
        expected = "a tokenizer with an end-of-text token (eos_token in tokenizer_config.json)"
        raise UserError(Problem("model.tokenizer", str(directory), expected))
    pad = _token(opened, settings, "pad_token")
    return Tokenizer(
        eos=eos,
        bos=_begin(opened, _token(opened, settings, "bos_token")),
        pad=eos if pad is None else pad,
        length=max(opened.get_vocab(with_added_tokens=True).values()) + 1,
        digest=xxhash.xxh3_64_hexdigest(
            json.dumps([description, eos, pad], sort_keys=True).encode()
        ),
        backend="tokenizers",
        _tokenizer=opened,
    )


def split_long(text: str, limit: int) -> Iterator[str]:
    """Parts of at most `limit` characters, cut before the last newline or space: a fixed rule."""
    start = 0
    while len(text) - start > limit:
        cut = max(text.rfind("\n", start, start + limit), text.rfind(" ", start, start + limit))
        cut = cut if cut > start else start + limit
        yield text[start:cut]
        start = cut
    yield text[start:]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        expected = f"a directory with {path.name}"
        raise UserError(Problem("model.tokenizer", str(path.parent), expected)) from None
    except ValueError as error:
        problem = Problem("model.tokenizer", str(path), f"JSON ({error})", "save it again")
        raise UserError(problem) from error
    if not isinstance(content, dict):
        raise UserError(Problem("model.tokenizer", str(path), "a JSON object"))
    return content


def _token(opened: tokenizers.Tokenizer, settings: dict[str, Any], name: str) -> int | None:
    token = settings.get(name)
    content = token.get("content") if isinstance(token, dict) else token
    found = None if content is None else opened.token_to_id(content)
    return None if found is None else int(found)


def _begin(opened: tokenizers.Tokenizer, bos: int | None) -> int | None:
    """The begin token, iff the post-processor puts it before a text."""
    ids = opened.encode("a", add_special_tokens=True).ids
    return bos if bos is not None and ids[:1] == [bos] else None
