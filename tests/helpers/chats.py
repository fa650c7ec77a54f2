"""Tokenizers with chat templates, conversations made at random, and transformers' own answers."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

import llmtrain.data
from llmtrain.config.binding import data_settings
from llmtrain.config.schema import Config
from llmtrain.data.chat.chat import Chat, Settings
from llmtrain.data.chat.rows import Example, Message
from llmtrain.data.chat.template import NAMED, named_template
from llmtrain.data.manifest import DataManifest
from llmtrain.data.survey import freeze, survey
from llmtrain.data.tokens.encode import DocumentEncoder, chat_facts, settings_of
from llmtrain.data.tokens.tokenizer import open_tokenizer

SAMPLE = Path(llmtrain.data.__file__).parent / "sample"
DEFAULTS = Settings({}, "all", "error", "split", "text", "auto", "2024-07-26T12:00:00")
# Pieces of text where tokenizers differ from what one expects.
FRAGMENTS = (
    *("Hi", "42", "x = [1, 2]\n", "don't", "<b>", "a<|", "[INST]", "### ", "…", "ﬁ", "%"),
    *(" ", "  ", "\n", "\n\n", "\t", "\u00a0", "\u3000", " \n ", "   x"),
    *("请介绍", "管理。", "Đà Nẵng", "שלום", "مرحبا", "👩‍👩‍👧", "☀️", "é", "🇻🇳"),
)


def make(
    directory: Path,
    template: str | None,
    tokens: tuple[str, ...] = (),
    source: Path = SAMPLE,
    **config: Any,
) -> Path:
    """A copy of a tokenizer with a chat template, given by its name or its text.

    tokens: special tokens to add, besides those of the named template
    config: what else `tokenizer_config.json` says
    """
    full = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    full.add_special_tokens([*NAMED.get(template or "", ()), *tokens])
    directory.mkdir(parents=True)
    full.save(str(directory / "tokenizer.json"))
    found = json.loads((source / "tokenizer_config.json").read_text("utf-8"))
    found.pop("chat_template", None)
    (directory / "tokenizer_config.json").write_text(json.dumps({**found, **config}), "utf-8")
    if template is not None:
        text = named_template(template) if template in NAMED else template
        (directory / "chat_template.jinja").write_text(text, "utf-8")
    return directory


def open_chat(directory: Path, seq_len: int = 1 << 20, **changes: Any) -> Chat:
    return Chat(directory, replace(DEFAULTS, **changes), seq_len)


def talk(*texts: str, system: str | None = None) -> list[Message]:
    """Messages of these texts, the user's first."""
    front = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return [*front, *({"role": roles[n % 2], "content": text} for n, text in enumerate(texts))]


def random_talk(rng: np.random.Generator) -> list[Message]:
    """A conversation of one to four turns."""
    texts = [_text(rng) for _ in range(2 * int(rng.integers(1, 5)))]
    return talk(*texts, system=_text(rng) if rng.random() < 0.3 else None)


def _text(rng: np.random.Generator) -> str:
    while True:
        text = "".join(FRAGMENTS[n] for n in rng.integers(0, len(FRAGMENTS), rng.integers(1, 8)))
        if text.strip():
            return text


def spans(ids: list[int], trained: list[bool]) -> list[tuple[list[int], list[int]]]:
    """Each run of trained ids, with all ids before it."""
    found = []
    edges = np.flatnonzero(np.diff(np.array([False, *trained, False]).astype(int)))
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        found.append((ids[:first], ids[first:last]))
    return found


def trained_ids(chat: Chat, messages: list[Message], **more: Any) -> list[list[int]]:
    """The trained ids of each sequence."""
    return [
        [n for n, is_trained in zip(one.ids, one.trained, strict=True) if is_trained]
        for one in chat.sequences(Example(messages, **more)).sequences
    ]


def trained_texts(chat: Chat, directory: Path, messages: list[Message], **more: Any) -> list[str]:
    """The text of the trained ids of each sequence."""
    return [plain(directory).decode(ids, False) for ids in trained_ids(chat, messages, **more)]


@lru_cache(maxsize=8)
def plain(directory: Path) -> tokenizers.Tokenizer:
    """The tokenizer with its added tokens, as the library opens it."""
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


@lru_cache(maxsize=8)
def library(directory: Path) -> Any:
    """The tokenizer as transformers opens it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory))


def check_against_library(
    chat: Chat, directory: Path, messages: list[Message], tools: Any = None
) -> int:
    """Compare a conversation with transformers: prompts, answers and ends. Return the spans."""
    theirs, end = library(directory), chat.check()
    kwargs = dict(chat.settings.template_kwargs)
    expected = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = theirs.apply_chat_template(
            messages[:index], tools, add_generation_prompt=True, tokenize=False, **kwargs
        )
        whole = theirs.apply_chat_template(messages[: index + 1], tools, tokenize=False, **kwargs)
        assert whole.startswith(prompt + end.lead)
        stop = whole.rindex(end.text) + len(end.text)
        ids = theirs(prompt + end.lead, add_special_tokens=False)["input_ids"]
        assert ids == chat.prompt_ids(messages[:index], tools)
        both = theirs(whole[:stop], add_special_tokens=False)["input_ids"]
        expected.append((ids, both[len(ids) :] if both[: len(ids)] == ids else None))
    sequences = chat.sequences(Example(messages, tools)).sequences
    found = [span for one in sequences for span in spans(one.ids, one.trained)]
    assert sorted(ids for ids, _ in found) == sorted(ids for ids, _ in expected)
    answers = {tuple(ids): answer for ids, answer in expected}
    for ids, answer in found:
        assert answer[-1] == end.id
        assert end.id not in answer[:-1]
        assert answers[tuple(ids)] in (answer, None)  # None: it straddles
    for one in sequences:
        assert one.trained[-1]
    return len(found)


def rows_of(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Conversations of one to three turns, of very uneven lengths; each names itself."""
    words = [
        "der",
        "river",
        "flows",
        "past",
        "hills",
        "where",
        "old",
        "stones",
        "lie",
        "under",
        "moss",
    ]
    rows = []
    for n in range(first, first + count):
        turns = []
        for turn in range(n % 3 + 1):
            length = (n * n * 7 + 11 * turn + 3 * n) % 23 + 1
            said = " ".join(words[(n + i * (turn + 1)) % len(words)] for i in range(length))
            turns += [f"Question {n}.{turn}?", f"Answer {n}.{turn}: {said}."]
        rows.append({"messages": talk(*turns)})
    return rows


def data_of(
    tokenizer: Path,
    *sources: Path | dict[str, Any],
    chat: dict[str, Any] | None = None,
    loss: str = "none",
    epochs: float | None = None,
    **data: Any,
) -> tuple[DataManifest, DocumentEncoder]:
    """The manifest and encoder of a fresh run on these sources."""
    described = [one if isinstance(one, dict) else {"path": str(one)} for one in sources]
    config = Config.model_validate({
        "data": {"sources": described, "seq_len": 256, "heldout": 0.0, **data},
        "chat": chat or {},
        "preference": {"loss": loss},
        "training": {"steps": 10} if epochs is None else {"epochs": epochs},
    })  # fmt: skip
    found = survey(data_settings(config), 1)
    opened = open_tokenizer(tokenizer)
    settings = settings_of(config.chat, DEFAULTS.date)
    made = Chat(tokenizer, settings, config.data.seq_len) if found.has_chat else None
    manifest = freeze(found, opened, made and chat_facts(made))
    return manifest, DocumentEncoder(opened, made, manifest.packing == "single")
