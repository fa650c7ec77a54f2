"""From the texts of a source to ids: of a text by the tokenizer, of a conversation by its template.

Lanes, the held-out set and the counts of documents all ask here, so that one has the same ids
everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from llmtrain.config.schema import ChatConfig
from llmtrain.data.chat.chat import Chat, Settings
from llmtrain.data.chat.rows import BadRowError, to_example
from llmtrain.data.manifest import ChatFacts, DataManifest, Source
from llmtrain.data.tokens.tokenizer import Tokenizer, open_tokenizer
from llmtrain.errors import Problem
from llmtrain.types import JsonMapping

NOTHING: Mapping[str, int] = {}
REJECTED = "rejected"
_NO_IDS = np.empty(0, np.int32)


class Encoded(NamedTuple):
    """The ids of a document.

    ids (n,) int32; none if a row has nothing to train on
    cuts: where the sequences of a conversation begin and end in ids; () = a text
    trained (n,) bool: which ids are trained; None = all
    counts: what happened to a conversation, as in `chat.EncodedChat`
    bad: why a row cannot be used
    """

    ids: np.ndarray
    cuts: tuple[int, ...] = ()
    trained: np.ndarray | None = None
    counts: Mapping[str, int] = NOTHING
    bad: BadRowError | None = None


class Encodes(Protocol):
    """What walks the lanes: `DocumentEncoder`, or what gives documents of the same lengths."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer."""

    def documents(self, source: Source, texts: Sequence[str]) -> list[Encoded]:
        """Encode documents of a source."""


@dataclass(frozen=True, slots=True)
class DocumentEncoder:
    """Encodes the documents of a manifest's sources.

    chat: None where all sources are texts
    """

    tokenizer: Tokenizer
    chat: Chat | None = None

    def documents(self, source: Source, texts: Sequence[str]) -> list[Encoded]:
        """Encode documents of a source; a text gets its begin and end token."""
        if source.form is None:
            return [Encoded(ids) for ids in self.tokenizer.documents(texts)]
        return [self._conversation(text, source) for text in texts]

    def _conversation(self, text: str, source: Source) -> Encoded:
        assert self.chat is not None, "the manifest has the form of each source"
        assert source.form is not None
        try:
            row = to_example(text, source.form, source.columns, source.reading)
            found = self.chat.sequences(row)
        except BadRowError as error:
            counts = {REJECTED: 1, f"{REJECTED}_{error.key}": 1}
            return Encoded(_NO_IDS, counts=counts, bad=error)
        if not found.sequences:
            return Encoded(_NO_IDS, counts=found.counts)
        ids = np.concatenate([np.array(one.ids, np.int32) for one in found.sequences])
        trained = np.concatenate([np.array(one.trained, np.bool_) for one in found.sequences])
        cuts = np.cumsum([0, *(len(one.ids) for one in found.sequences)])
        return Encoded(ids, tuple(cuts.tolist()), trained, found.counts)


def open_encoder(directory: Path, manifest: DataManifest) -> DocumentEncoder:
    """Open the tokenizer of a run, and its chat template if the manifest has conversations.

    Raises UserError as `open_tokenizer` does.
    """
    tokenizer = open_tokenizer(directory, manifest.tokenizer.backend)
    return DocumentEncoder(
        tokenizer, open_chat(directory, manifest.chat, manifest.seq_len, tokenizer)
    )


def open_chat(
    directory: Path, facts: ChatFacts | None, seq_len: int, tokenizer: Tokenizer | None = None
) -> Chat | None:
    """Return the template of a run with conversations. tokenizer: as in `Chat`"""
    if facts is None:
        return None
    return Chat(directory, Settings(**facts.settings), seq_len, tokenizer, calls=facts.calls)


def settings_of(config: ChatConfig, date: str) -> Settings:
    """Return what the section `chat` and the date of the run decide of conversations."""
    names = [field.name for field in fields(Settings) if field.name != "date"]
    return Settings(**{name: getattr(config, name) for name in names}, date=date)


def chat_facts(chat: Chat) -> ChatFacts:
    """Return what decides the ids and masks of conversations, for the manifest. Raises UserError.

    Prompts and completions that are strings need no template; then there is no end of turn.
    """
    end: JsonMapping | None = None
    template, arguments = "", "object"
    if chat.has_template:
        end, template, arguments = chat.check().to_json(), chat.digest, chat.arguments
    settings = asdict(chat.settings)
    settings["template_kwargs"] = dict(chat.settings.template_kwargs)
    return ChatFacts(template, settings, end, chat.probe(), arguments)


def differing_chat(manifest: DataManifest, encoder: DocumentEncoder) -> list[Problem]:
    """Return how the template differs from the manifest's, for every process that encodes."""
    if manifest.chat is None:
        return []
    assert encoder.chat is not None
    now, then = chat_facts(encoder.chat), manifest.chat
    remedy = "restore the run's tokenizer/, and the versions of tokenizers and jinja2 of its start"
    return [
        Problem(f"chat {name}", str(found), str(expected), remedy)
        for name, found, expected in (
            ("template", now.template, then.template),
            ("end of turn", now.end_of_turn, then.end_of_turn),
            ("arguments of calls", now.arguments, then.arguments),
            ("probe", now.probe, then.probe),
        )
        if found != expected
    ]
