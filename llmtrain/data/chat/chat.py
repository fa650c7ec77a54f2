"""Chat data in a run: a conversation becomes ids, and for each id, whether it is trained.

`Chat` opens a run's `tokenizer/`: the tokenizer with its added tokens, and the chat template. What
it makes of a row depends on these and on its `Settings` alone, so all of them are in the manifest.
A conversation with more ids than a block has is cut, split or left out (`chat.too_long`).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal

import xxhash

from llmtrain.data.chat import encode, end_of_turn, mask
from llmtrain.data.chat.rendering import MANY
from llmtrain.data.chat.rows import BadRowError, Example, Message
from llmtrain.data.chat.template import PROBES, Template, Tools, has_template, open_template
from llmtrain.data.tokens.tokenizer import Tokenizer, open_tokenizer
from llmtrain.errors import Problem, UserError
from llmtrain.types import JsonMapping


def truncate(sequence: mask.TokenSequence, limit: int) -> mask.TokenSequence | None:
    """Return the start of a sequence, up to its last trained token; None if none is left.

    limit: the most ids that it may have
    """
    trained = sequence.trained[:limit]
    if not any(trained):
        return None
    last = len(trained) - trained[::-1].index(True)
    return mask.TokenSequence(sequence.ids[:last], trained[:last])


def split(messages: Sequence[Message], fits: Callable[[list[int]], bool]) -> list[list[int]]:
    """Return the pieces of a conversation, each as the indices of its messages.

    A piece has the system messages at the front, then as many whole exchanges as fit, but at least
    one. An exchange begins at a user message that does not follow another.

    fits: whether these messages are short enough
    """
    roles = [message["role"] for message in messages]
    size = next((n for n, role in enumerate(roles) if role not in ("system", "developer")), 0)
    front = list(range(size))
    begins = [n for n in range(size + 1, len(roles)) if roles[n] == "user" != roles[n - 1]]
    pieces: list[list[int]] = []
    for first, stop in pairwise([size, *begins, len(roles)]):
        exchange = range(first, stop)
        if pieces and fits([*pieces[-1], *exchange]):
            pieces[-1] += exchange
        else:
            pieces.append([*front, *exchange])
    return pieces


def truncate_pair(
    halves: Sequence[mask.TokenSequence], seq_len: int, *, apart: bool
) -> list[mask.TokenSequence] | None:
    """Return both halves of a pair, cut at their ends; None if one keeps no trained token.

    A half has the room that the other one leaves in a block, and half of the block in any case. So
    the longer answer is cut first, and prompts are never cut.

    apart: whether a half may have half of the block at most
    """
    sizes = [max(seq_len // 2, 0 if apart else seq_len - len(one.ids)) for one in halves[::-1]]
    cut = [truncate(one, size) for one, size in zip(halves, sizes, strict=True)]
    kept = [one for one in cut if one is not None]
    return kept if len(kept) == len(cut) else None


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides the ids and the mask of a row, besides the tokenizer and its template.

    template_kwargs: further variables of the template
    train_turns: all turns of the assistant, or the last one
    too_long: what becomes of sequences of more than `seq_len` ids
    rewritten_history: what becomes of turns that the template writes differently as history
    control_tokens: whether control tokens in content are text, or make a bad row
    end_of_turn: the token that ends a turn, or several; "auto" = they are detected
    date: what the template's clock says, an ISO date and time
    """

    template_kwargs: JsonMapping
    train_turns: Literal["all", "last"]
    too_long: Literal["error", "drop", "truncate", "split"]
    rewritten_history: Literal["split", "last", "error"]
    control_tokens: Literal["text", "error"]
    end_of_turn: str | Sequence[str]
    date: str


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """The sequences of a row, and what happened.

    counts: `sequences`, `ids` and `trained` (ids) in all of them · `longest_ids`, in the longest
        (of each piece, if the row was split): ids ÷ longest_ids is what rewriting costs ·
        `too_long`, 1 if the row was left out for its length ·
        `rewritten` groups of turns beyond the last · `straddles`, turns encoded in two pieces ·
        `truncated` sequences · `dropped` sequences, without a trained id once truncated · `split`
        pieces of a row that was too long · `untrained`, 1 if the row has no turn to train
    """

    sequences: tuple[mask.TokenSequence, ...]
    counts: Mapping[str, int]


@dataclass(eq=False)
class Chat:
    """A run's tokenizer and chat template.

    directory: the run's `tokenizer/`
    seq_len: ids that a sequence may have
    tokenizer: that tokenizer with the run's back end; None = it is opened with `tokenizers`
    calls: whether the template is asked how it writes calls of tools; if not, they end as answers
        do, and their arguments are objects
    """

    directory: Path
    settings: Settings
    seq_len: int
    tokenizer: Tokenizer | None = None
    calls: bool = field(default=True, kw_only=True)

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template. Prompts and completions as strings need none."""
        return has_template(self.directory)

    @property
    def names(self) -> frozenset[str]:
        """The names that the template reads, none without a template. Raises UserError."""
        return self._template.names if self.has_template else frozenset()

    def check(self) -> end_of_turn.EndOfTurn:
        """Return how turns end. Raises UserError if there is no usable template."""
        return self._end

    @property
    def arguments(self) -> end_of_turn.Arguments:
        """How the template takes the arguments of calls. Raises UserError."""
        return self._call.arguments

    @property
    def digest(self) -> str:
        """Digest of the template. Raises UserError."""
        return xxhash.xxh3_64_hexdigest(self._template.text.encode())

    def render(
        self, messages: Sequence[Message], tools: Tools = None, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of a conversation. Raises BadRowError if the template cannot write it."""
        return self._template.render(messages, tools, add_generation_prompt)

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Return the ids that inference feeds for the assistant's next turn.

        Raises BadRowError if the template cannot write it.
        """
        messages = self._with_arguments(Example(messages))
        messages, tools = self._mark_control(messages, tools, prompt=True)
        return self._encoder.encode(self.render(messages, tools, True) + self._end.lead).ids

    def sequences(self, example: Example, *, of_any_length: bool = False) -> EncodedChat:
        """Return what is trained of a row.

        Each span of trained ids is an answer and the token that ends its turn. Before it are the
        ids that inference feeds. Raises BadRowError.

        of_any_length: whether `chat.too_long` is left to the caller
        """
        counts: Counter[str] = Counter()
        try:
            whole: Sequence[Iterable[mask.TokenSequence]] = []
            if example.text is None:
                whole = self._of_messages(example, counts)
            elif not example.untrained:
                whole = [self._of_strings(*example.text, counts)]
            pieces = [
                [*piece] if of_any_length else self._shorten(piece, counts) for piece in whole
            ]
        except RecursionError:
            raise BadRowError("json", "its tools or tool calls are nested too deeply") from None
        if counts["too_long"]:
            return EncodedChat((), {"too_long": 1})
        sequences = tuple(one for piece in pieces for one in piece)
        counts["untrained"] += not pieces
        counts["sequences"] = len(sequences)
        counts["ids"] = sum(len(one.ids) for one in sequences)
        counts["trained"] = sum(sum(one.trained) for one in sequences)
        counts["longest_ids"] = sum(max((len(one.ids) for one in p), default=0) for p in pieces)
        return EncodedChat(sequences, +counts)

    def behind_one_prompt(
        self, halves: Sequence[mask.TokenSequence]
    ) -> Sequence[mask.TokenSequence]:
        """Return both halves of a pair, trained from the end of the prompt that they share.

        What the template puts before an answer is context only if it does so in both: reasoning in
        one of them takes the place of it. Raises BadRowError for prompts with different ids.
        """
        firsts = [one.trained.index(True) for one in halves]
        first = min(firsts)
        if halves[0].ids[:first] != halves[1].ids[:first]:
            raise BadRowError("prompt", "its two answers do not have the same prompt before them")
        if firsts[0] == firsts[1]:
            return halves
        lead = self._encoder.encode(self._end.lead).ids
        return [
            mask.TokenSequence(
                one.ids, [n >= first and (n < start or t) for n, t in enumerate(one.trained)]
            )
            if one.ids[first:start] == lead
            else one
            for one, start in zip(halves, firsts, strict=True)
        ]

    def probe(self) -> str:
        """Digest of the ids and masks of made-up conversations: equal if the data would be.

        Without a template there are none: strings have the ids of the run's `Tokenizer`.
        """
        digest = xxhash.xxh3_64()
        for example in PROBES if self.has_template else ():
            try:
                sequences = self.sequences(example).sequences
            except BadRowError as error:
                digest.update(error.key.encode())
                continue
            for one in sequences:
                digest.update(repr((one.ids, one.trained)).encode())
        return digest.hexdigest()

    @cached_property
    def _encoder(self) -> encode.OffsetEncoder:
        return encode.open_encoder(self.directory, self.tokenizer)

    @cached_property
    def _plain(self) -> Tokenizer:
        return self.tokenizer or open_tokenizer(self.directory)

    @cached_property
    def _template(self) -> Template:
        return open_template(self.directory, self.settings.template_kwargs, self.settings.date)

    @cached_property
    def _control(self) -> encode.Control:
        text = self._template.text if self.has_template else ""
        return encode.control_of(self._encoder.added.values(), text)

    @cached_property
    def _end(self) -> end_of_turn.EndOfTurn:
        tokens = {token.content: id for id, token in self._encoder.added.items()}
        end = end_of_turn.find_end_of_turn(
            self.render, tokens, self.settings.end_of_turn, self._call
        )
        for token, id in zip(end.texts, end.ids, strict=True):
            ends = [self._encoder.encode(f"{text}{token}").ids[-1] for text in ("Yes", "Yes.\n")]
            if ends != [id] * 2:
                expected = "a token that the tokenizer finds behind text"
                raise UserError(Problem("chat.end_of_turn", token, expected))
        return end

    @cached_property
    def _call(self) -> end_of_turn.Call:
        return end_of_turn.find_call(self.render) if self.calls else end_of_turn.NO_CALL

    def _with_arguments(self, example: Example) -> Sequence[Message]:
        """Return messages with the arguments of their calls as the template takes them."""
        return example.messages if self.arguments == "object" else example.with_strings

    def _of_messages(
        self, example: Example, counts: Counter[str]
    ) -> Sequence[Iterable[mask.TokenSequence]]:
        """Return the sequences of a conversation, of each piece if it is split."""
        # The indices of the messages to train. A first message has no prompt.
        turns = [n for n, one in enumerate(example.messages) if one["role"] == "assistant"]
        if self.settings.train_turns == "last":
            turns = turns[-1:]
        trained = [n for n in turns if n > 0 and n not in example.untrained]
        if not trained:
            return []
        messages = self._with_arguments(example)
        messages, tools = self._mark_control(messages, example.tools, prompt=False)
        if self.settings.too_long != "split":
            return [self._render_turns(messages, tools, trained, counts)]
        first: Counter[str] = Counter()
        sequences: list[mask.TokenSequence] = []
        for one in self._render_turns(messages, tools, trained, first):
            sequences.append(one)
            if len(one.ids) > self.seq_len:
                break
        else:
            counts.update(first)
            return [sequences]
        pieces = split(messages, lambda piece: self._fits([messages[n] for n in piece], tools))
        counts["split"] += len(pieces)
        inner = ([at for at, n in enumerate(piece) if n in trained] for piece in pieces)
        return [
            self._render_turns([messages[n] for n in piece], tools, inside, counts)
            for piece, inside in zip(pieces, inner, strict=True)
            if inside
        ]

    def _render_turns(
        self, messages: Sequence[Message], tools: Tools, trained: list[int], counts: Counter[str]
    ) -> Iterator[mask.TokenSequence]:
        # Whether the texts of the many messages before one are too long already. Its prompt is
        # longer still, whatever the template puts around them.
        ids = [0]  # of the texts before each message

        def is_hopeless(index: int) -> bool:
            if index < MANY:  # they cost more to look at than to render
                return False
            for message in messages[len(ids) - 1 : index]:
                text = mask.split_reasoning(message)[1].strip()
                more = len(self._encoder.encode(text, "glued").ids) - 1  # one may merge with others
                ids.append(ids[-1] + more)
            return ids[index] > self.seq_len

        truncated = self.settings.too_long == "truncate"
        if truncated and self.settings.rewritten_history != "last":
            last = next(filter(is_hopeless, trained), trained[-1])  # of its answer nothing is left
            within = trained[: trained.index(last) + 1]
        else:
            within = trained
        beginnings = self._template.beginnings(messages, tools)
        turns = mask.find_turns(beginnings, messages, within, self._end, is_hopeless)
        groups = mask.group(turns)
        counts["rewritten"] += len(groups) - 1
        if len(groups) > 1 and self.settings.rewritten_history == "error":
            why = "the template writes an answer differently as history; chat.rewritten_history="
            raise BadRowError("rewritten_history", why + "split or last")
        if self.settings.rewritten_history == "last":
            groups = groups[-1:]
        elif len(groups) > 1:  # else they would be the end of one that is truncated
            counts["dropped"] += len(trained) - len(turns)
        limit = self.seq_len if truncated else math.inf
        for turns in groups:
            yield from mask.to_sequences(self._encoder, turns, self._end, counts, limit)

    def _of_strings(
        self, prompt: str, completion: str, counts: Counter[str]
    ) -> list[mask.TokenSequence]:
        """Return the sequence of a prompt and a completion, both text and nothing else."""
        control = self._control.special.search(encode.unmark(prompt + completion))
        if control is not None and self.settings.control_tokens == "error":
            raise _control_token(control.group())
        tokenizer = self._plain
        texts = tokenizer.encode_batch([prompt, prompt + completion, "\n", "\n" + completion])
        asked, whole, newline, glued = (ids.tolist() for ids in texts)
        answer = whole[len(asked) :]
        if whole[: len(asked)] != asked:
            counts["straddles"] += 1
            begins = glued[: len(newline)] == newline
            answer = glued[len(newline) :] if begins else tokenizer.encode(completion).tolist()
        before = asked if tokenizer.bos is None else [tokenizer.bos, *asked]
        spoken = [*answer, tokenizer.eos]
        trained = [False] * len(before) + [True] * len(spoken)
        return [mask.token_sequence([*before, *spoken], trained)]

    def _mark_control(
        self, messages: Sequence[Message], tools: Tools, *, prompt: bool
    ) -> tuple[Sequence[Message], Tools]:
        """Return messages and tools with marks around their control tokens.

        The marks must not change what the template writes. If they do, only those of special tokens
        are set.
        """
        if self._control.find(messages, tools) is None:
            return messages, tools
        messages, tools = encode.without_marks(messages), encode.without_marks(tools)
        token = self._control.find(messages, tools)
        if token is not None and self.settings.control_tokens == "error":
            raise _control_token(token)
        plain = self.render(messages, tools, prompt)
        for special in (False, True):
            marked = self._control.mark(messages, tools, special=special)
            if encode.unmark(self.render(*marked, prompt)) == plain:
                return marked
        raise BadRowError("control_tokens", f"the template reads {token!r} in the content")

    def _fits(self, messages: Sequence[Message], tools: Tools) -> bool:
        text = self.render(messages, tools) + self._end.closing(messages[-1], None)
        stop = self._end.stop(text)
        return len(self._encoder.encode(text[:stop] if stop > 0 else text).ids) <= self.seq_len

    def _shorten(
        self, sequences: Iterable[mask.TokenSequence], counts: Counter[str]
    ) -> list[mask.TokenSequence]:
        """Return the sequences as `chat.too_long` says."""
        shortened = []
        for one in sequences:
            short: mask.TokenSequence | None = one
            if len(one.ids) > self.seq_len:
                if self.settings.too_long == "error":
                    why = f"{len(one.ids):,} tokens, at most {self.seq_len:,} (data.seq_len); "
                    raise BadRowError("too_long", why + "chat.too_long=drop, truncate or split")
                if self.settings.too_long == "drop":
                    counts["too_long"] = 1
                    return []
                short = truncate(one, self.seq_len)
                counts["dropped" if short is None else "truncated"] += 1
            if short is not None:
                shortened.append(short)
        return shortened


def _control_token(token: str) -> BadRowError:
    why = f"the content holds the control token {token!r}; chat.control_tokens=text keeps it text"
    return BadRowError("control_tokens", why)
