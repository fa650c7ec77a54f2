"""From the texts of a source to ids: of a text by the tokenizer, of a conversation by its template.

Lanes, the held-out set and the counts of documents all ask here, so that one has the same ids
everywhere.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from llmtrain.config.schema import ChatConfig
from llmtrain.data.chat.chat import Chat, EncodedChat, Settings, truncate, truncate_pair
from llmtrain.data.chat.mask import TokenSequence
from llmtrain.data.chat.pairs import Judged, to_judged, to_pair
from llmtrain.data.chat.rows import BadRowError, Example, answers_of, to_example
from llmtrain.data.manifest import ChatFacts, DataManifest, Source
from llmtrain.data.tokens.tokenizer import Tokenizer, open_tokenizer
from llmtrain.errors import Problem
from llmtrain.types import JsonMapping

NOTHING: Mapping[str, int] = {}
REJECTED = "rejected"
TOO_LONG = "too_long"
_NO_IDS = np.empty(0, np.int32)


class Encoded(NamedTuple):
    """The ids of a document.

    ids (n,) int32; none if a row has nothing to train on
    cuts: where the sequences of a conversation begin and end in ids; () = a text
    trained (n,) bool: which ids are trained; None = all
    counts: what happened to a conversation, as in `chat.EncodedChat`; of a pair or a judged answer
        also `pairs`, `desirable` and `undesirable`, and `equal` once truncated
    bad: why a row cannot be used
    second: where the second half of a pair begins in ids; 0 = it is no pair
    answer: where a judged answer begins in ids; 0 = it is none
    desirable: whether that is a good one
    """

    ids: np.ndarray
    cuts: tuple[int, ...] = ()
    trained: np.ndarray | None = None
    counts: Mapping[str, int] = NOTHING
    bad: BadRowError | None = None
    second: int = 0
    answer: int = 0
    desirable: bool = True


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
    apart: whether each half of a pair has half of a block (`data.packing: single`)
    """

    tokenizer: Tokenizer
    chat: Chat | None = None
    apart: bool = False

    def documents(self, source: Source, texts: Sequence[str]) -> list[Encoded]:
        """Encode documents of a source; a text gets its begin and end token."""
        if source.form is None:
            return [Encoded(ids) for ids in self.tokenizer.documents(texts)]
        return [self._row(text, source, source.form) for text in texts]

    def _row(self, text: str, source: Source, form: str) -> Encoded:
        chat, answers = self.chat, answers_of(form)
        assert chat is not None, "the manifest has the form of each source"
        try:
            if answers == "pairs":
                return self._pair(chat, to_pair(text, form, source.columns))
            if answers == "feedback":
                return _judged(chat, to_judged(text, form, source.columns))
            row = to_example(text, form, source.columns, source.reading)
            encoded = chat.sequences(row)
        except BadRowError as error:
            counts = {REJECTED: 1, f"{REJECTED}_{error.key}": 1}
            return Encoded(_NO_IDS, counts=counts, bad=error)
        if not encoded.sequences:
            return Encoded(_NO_IDS, counts=encoded.counts)
        ids, trained = _joined(encoded.sequences)
        cuts = np.cumsum([0, *(len(one.ids) for one in encoded.sequences)])
        return Encoded(ids, tuple(cuts.tolist()), trained, encoded.counts)

    def _pair(self, chat: Chat, examples: Sequence[Example]) -> Encoded:
        """Encode both halves of a pair, one behind the other. Raises BadRowError."""
        encoded = [_half(chat, one) for one in examples]
        if all(one.counts.get("untrained") for one in encoded):
            return Encoded(_NO_IDS, counts={"untrained": 1})
        if not all(one.sequences for one in encoded):
            if any(one.counts.get("untrained") for one in encoded):
                raise BadRowError("answer", "one of its answers is excluded from training")
            return Encoded(_NO_IDS, counts={TOO_LONG: 1})  # a prompt without room for an answer
        halves = chat.behind_one_prompt([one.sequences[0] for one in encoded])
        if halves[0] == halves[1]:
            raise BadRowError("equal", "chosen and rejected are equal, as the template writes them")
        counts = Counter(encoded[0].counts) + Counter(encoded[1].counts)
        room, lengths = chat.seq_len, [len(one.ids) for one in halves]
        if max(lengths) > room // 2 if self.apart else sum(lengths) > room:
            both = " + ".join(f"{length:,}" for length in lengths)
            most = f"{room // 2:,} each, half of" if self.apart else f"{room:,} together in"
            fits = _when_too_long(chat, f"{both} tokens, at most {most} data.seq_len")
            cut = truncate_pair(halves, room, apart=self.apart) if fits else None
            if cut is None or cut[0] == cut[1]:
                return Encoded(_NO_IDS, counts={TOO_LONG: 1, **({"equal": 1} if cut else {})})
            halves, counts["truncated"] = cut, 1
        return _kept(halves, counts)._replace(second=len(halves[0].ids))


def _half(chat: Chat, example: Example) -> EncodedChat:
    """Return what is trained of an answer: a sequence, or none. Raises BadRowError for several."""
    encoded = chat.sequences(example, of_any_length=True)
    if len(encoded.sequences) > 1:
        why = "an answer has several messages, and the template rewrites the first ones as history"
        raise BadRowError("rewritten_history", why)
    return encoded


def _judged(chat: Chat, judged: Judged) -> Encoded:
    """Encode an answer with its prompt: half of what is trained of it. Raises BadRowError."""
    encoded = _half(chat, judged.example)
    if not encoded.sequences:
        counts = {"untrained": 1} if encoded.counts.get("untrained") else {TOO_LONG: 1}
        return Encoded(_NO_IDS, counts=counts)
    (one,), counts, room = encoded.sequences, Counter(encoded.counts), chat.seq_len // 2
    if len(one.ids) > room:
        why = f"{len(one.ids):,} tokens, at most {room:,}, half of data.seq_len, since the answer"
        fits = _when_too_long(chat, f"{why} of another row has the other half")
        cut = truncate(one, room) if fits else None
        if cut is None:
            return Encoded(_NO_IDS, counts={TOO_LONG: 1})
        one, counts["truncated"] = cut, 1
    counts["desirable" if judged.desirable else "undesirable"] = 1
    answer = one.trained.index(True)
    return _kept([one], counts)._replace(answer=answer, desirable=judged.desirable)


def _when_too_long(chat: Chat, why: str) -> bool:
    """Return whether a pair, or a judged answer, is cut; if not it is left out.

    Raises BadRowError where it must not be too long.
    """
    if chat.settings.too_long not in ("drop", "truncate"):
        raise BadRowError(TOO_LONG, f"{why}; chat.too_long=drop or truncate")
    return chat.settings.too_long == "truncate"


def _kept(halves: Sequence[TokenSequence], counts: Counter[str]) -> Encoded:
    """Return sequences that stay together."""
    ids, trained = _joined(halves)
    counts["pairs"] = 1
    counts["ids"] = counts["longest_ids"] = len(ids)
    counts["trained"] = int(trained.sum())
    return Encoded(ids, (0, len(ids)), trained, counts)


def _joined(sequences: Sequence[TokenSequence]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.concatenate([np.array(one.ids, np.int32) for one in sequences])
    return ids, np.concatenate([np.array(one.trained, np.bool_) for one in sequences])


def open_encoder(directory: Path, manifest: DataManifest) -> DocumentEncoder:
    """Open the tokenizer of a run, and its chat template if the manifest has conversations.

    Raises UserError as `open_tokenizer` does.
    """
    tokenizer = open_tokenizer(directory, manifest.tokenizer.backend)
    chat = open_chat(directory, manifest.chat, manifest.seq_len, tokenizer)
    return DocumentEncoder(tokenizer, chat, manifest.packing == "single")


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
    compared = (
        ("template", now.template, then.template),
        ("end of turn", now.end_of_turn, then.end_of_turn),
        ("arguments of calls", now.arguments, then.arguments),
        ("probe", now.probe, then.probe),
    )
    return [Problem(f"chat {name}", str(a), str(b), remedy) for name, a, b in compared if a != b]
