"""Let a model write: a continuation of a text, or the answers in a conversation.

transformers' `generate` with its defaults switched off, so that only what is asked for here has an
effect. It ends at the ids that `generation_config.json` names, in a chat model the end of a turn.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, TextStreamer
from transformers.generation.streamers import BaseStreamer

from llmtrain.data.chat.chat import Chat
from llmtrain.data.chat.rows import BadRowError, Message
from llmtrain.data.chat.template import Tools
from llmtrain.data.manifest import ChatFacts
from llmtrain.data.tokens.encode import open_chat
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.hashing import mix
from llmtrain.text import first_line
from llmtrain.tools.use.load import LoadedModel, check_writes, open_model
from llmtrain.tools.use.target import KEY, Target, find_target
from llmtrain.types import JsonObject

OnText = Callable[[str], object]  # gets the text as it is written
# Gets a conversation, its tools and the name of what is wrong, in a message; returns ids.
ChatIds = Callable[[Sequence[Message], Tools, str], list[int]]
_SEED_STREAM = 9  # for `mix`
_LEAST = 1e-6  # temperature
_SHOWN = 60  # characters
_LEAST_ROOM = 4  # what part of a model's positions a conversation leaves for an answer


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen.

    temperature: 0 = always the likeliest token
    top_p: the likeliest tokens that together have this probability are drawn from
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 42


@dataclass(frozen=True, slots=True)
class Generated:
    """A prompt and what the model wrote.

    tokens: number of new tokens, an end token included
    ended: whether the model ended the text itself
    """

    prompt: str
    text: str
    tokens: int
    ended: bool

    def to_json(self) -> JsonObject:
        """Return the object that `llmtrain generate --json` prints."""
        return asdict(self)


def generate(
    model_or_run: str | Path,
    prompt: str,
    *,
    chat: bool = False,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 42,
    on_text: OnText = lambda text: None,
) -> Generated:
    """Return what a model writes after a prompt, or with `chat` as the answer to it.

    model_or_run: as for `evaluate`
    on_text: called with each part of the text as soon as it is written

    Raises UserError for bad input.
    """
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    if chat:
        return next(converse(model_or_run, [prompt], sampling, on_text))
    return continue_text(model_or_run, prompt, sampling, on_text)


def continue_text(
    model_or_run: str | Path, prompt: str, sampling: Sampling, on_text: OnText
) -> Generated:
    """Return what a model writes after a text. Arguments: as of `generate`."""
    _check_text("PROMPT", prompt)
    opened = open_writer(model_or_run, sampling)
    return _write(opened, prompt, text_ids(opened, prompt), sampling, 0, on_text)


def _raise(error: UserError) -> None:
    raise error


def converse(
    model_or_run: str | Path,
    messages: Iterable[str],
    sampling: Sampling,
    on_text: OnText,
    forgot: Callable[[int], object] = lambda count: None,
    refused: Callable[[UserError], object] = _raise,
) -> Iterator[Generated]:
    """Yield the answer to each user message of one conversation.

    When the conversation has filled the model's positions, its oldest messages are left out.

    forgot: called with how many were left out before an answer
    refused: called with the error of a message that cannot be answered; if it returns, the
        conversation continues as if that had not been said

    The other arguments are those of `generate`.
    """
    opened = open_writer(model_or_run, sampling)
    ids_by_template = open_chat_prompts(opened)
    turns: list[Message] = []

    def ids_of(messages: Sequence[Message]) -> list[int]:
        return ids_by_template(messages, None, "--chat")

    for number, message in enumerate(messages):
        try:
            _check_text(f"message {number + 1}", message)
            asked = [*turns, {"role": "user", "content": message}]
            room = min(sampling.max_new_tokens, opened.positions // _LEAST_ROOM)
            remaining, ids = _shorten(asked, ids_of, opened.positions - room)
            if remaining < len(asked):
                forgot(len(asked) - remaining)
            answer = _write(opened, message, ids, sampling, number, on_text)
        except UserError as error:
            refused(error)
            continue
        yield answer
        turns = [*asked[-remaining:], {"role": "assistant", "content": answer.text}]


def _shorten(
    turns: Sequence[Message], ids_of: Callable[[Sequence[Message]], list[int]], most: int
) -> tuple[int, list[int]]:
    """Return how many of the last messages have at most so many ids, and these.

    The oldest question and answer are left out together. The last message is always kept.
    """
    remaining, ids = len(turns), ids_of(turns)
    while len(ids) > most and remaining > 1:
        remaining -= 2
        ids = ids_of(turns[-remaining:])
    return remaining, ids


def _check_text(name: str, text: str) -> None:
    """Raise UserError for a text with bytes that are not UTF-8, which Python has as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        expected = f"UTF-8; the character at position {error.start + 1} is not"
        raise UserError(Problem(name, ascii(text[:_SHOWN]), expected)) from error


def open_writer(model_or_run: str | Path, sampling: Sampling) -> LoadedModel:
    """Open a model to let it write, after the options have been checked. Raises UserError."""
    most, temperature, top_p = sampling.max_new_tokens, sampling.temperature, sampling.top_p
    is_fine = temperature == 0 or _LEAST <= temperature < math.inf
    finite = f"0 (greedy) or more; between 0 and {_LEAST:g} logits are not finite"
    checks = (
        ("--max-new-tokens", most, most >= 1, "at least 1"),
        ("--temperature", temperature, is_fine, finite),
        ("--top-p", top_p, 0 < top_p <= 1, "above 0, at most 1"),
    )
    raise_any(Problem(key, value, expected) for key, value, fine, expected in checks if not fine)
    opened = open_model(find_target(str(model_or_run)), small=True)
    check_writes(opened)
    return opened


def text_ids(opened: LoadedModel, text: str) -> list[int]:
    """Return the ids of a text to be continued.

    A checkpoint of a run was trained on texts that follow a begin token or an end of text, so one
    is put in front. Any other model gets what its tokenizer adds.
    """
    ids: list[int] = opened.tokenizer(text).input_ids
    if (opened.target.state or not ids) and ids[:1] != [opened.begin]:
        ids = [opened.begin, *ids]
    return ids


def open_chat_prompts(opened: LoadedModel) -> ChatIds:
    """Return what makes a conversation the ids up to where the answer begins.

    They are those of training, for a checkpoint of a run with conversations. Raises UserError for a
    model without a chat template; the function does for messages that the template refuses.
    """
    from jinja2 import TemplateError

    if not opened.tokenizer.chat_template:
        expected = "a model whose tokenizer has a chat template"
        remedy = "without --chat, and with `prompt` in place of `messages`, text is continued"
        raise UserError(Problem(KEY, opened.target.given, expected, remedy))
    template = _template_of(opened.target)

    def ids_of(turns: Sequence[Message], tools: Tools, name: str) -> list[int]:
        try:
            if template is not None:
                return template.prompt_ids(turns, tools)
            text = opened.tokenizer.apply_chat_template(
                list(turns), tools, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, BadRowError) as error:
            expected = f"messages that the chat template takes ({first_line(error)})"
            raise UserError(Problem(name, turns[-1]["content"], expected)) from error
        ids: list[int] = opened.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    return ids_of


def _template_of(target: Target) -> Chat | None:
    """Return the template of a checkpoint as its run used it; None for any other model."""
    if not (manifest := target.manifest):
        return None
    facts = manifest.get("chat")
    return open_chat(target.directory, ChatFacts(**facts) if facts else None, manifest["seq_len"])


def _write(
    opened: LoadedModel, prompt: str, ids: list[int], sampling: Sampling, turn: int, on_text: OnText
) -> Generated:
    """Let the model write after these ids. turn: number of the answer in a conversation."""
    limit = room_for(opened, ids, sampling, "PROMPT")
    streamer = TextStreamer(opened.tokenizer, skip_prompt=True, skip_special_tokens=True)
    streamer.on_finalized_text = lambda text, stream_end=False: on_text(text)
    (new,) = complete(opened, [ids], limit, sampling, turn, streamer)
    return as_generated(opened, prompt, new)


def room_for(opened: LoadedModel, ids: Sequence[int], sampling: Sampling, name: str) -> int:
    """Return how many tokens may follow these. Raises UserError, with `name`, if none may."""
    room = opened.positions - len(ids)
    if room < 1:
        expected = f"fewer than {opened.positions:,} tokens, the model's positions"
        raise UserError(Problem(name, f"{len(ids):,} tokens", expected))
    return min(sampling.max_new_tokens, room)


def complete(
    opened: LoadedModel,
    rows: Sequence[Sequence[int]],
    limit: int,
    sampling: Sampling,
    number: int,
    streamer: BaseStreamer | None = None,
) -> list[list[int]]:
    """Return the ids that a model writes after each row, with the one that ends it.

    rows: shorter ones are padded on the left
    limit: of new ids
    number: of the answer or batch, so that each draws other numbers
    streamer: of transformers, for a single row
    """
    ends, drawn = _end_ids(opened), sampling.temperature > 0
    # Nothing about drawing for the likeliest token; top_k 0 = not limited.
    drawing = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    # As the model's own config too: transformers takes what is not set from there.
    opened.model.generation_config = GenerationConfig(
        max_new_tokens=limit,
        do_sample=drawn,
        eos_token_id=ends,
        pad_token_id=ends[0],
        **(drawing if drawn else {}),
    )
    inputs, mask = left_padded(rows, ends[0], opened.device)
    devices = [opened.device] if opened.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(mix(sampling.seed, _SEED_STREAM, number) >> 1)
        out = opened.model.generate(inputs, attention_mask=mask, streamer=streamer)
    written = []
    for ids in out[:, inputs.shape[1] :].tolist():
        # Behind the first token that ends a text, a batch has padding.
        stop = next((place for place, id in enumerate(ids, 1) if id in ends), len(ids))
        written.append(ids[:stop])
    return written


def left_padded(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return rows of ids, padded on the left, and which of them are no padding: (B, T) int64."""
    longest = max(map(len, rows))
    inputs = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return inputs.to(device), mask.to(device)


def as_generated(opened: LoadedModel, prompt: str, new: Sequence[int]) -> Generated:
    """Return what was written. new: its ids"""
    text = opened.tokenizer.decode(new, skip_special_tokens=True)
    return Generated(prompt, text, len(new), bool(new) and new[-1] in _end_ids(opened))


def _end_ids(opened: LoadedModel) -> list[int]:
    """Return the ids that end a text: of `generation_config.json`, else the tokenizer's."""
    named = opened.model.generation_config.eos_token_id
    if named is None:
        return [int(opened.tokenizer.eos_token_id)]
    return [int(one) for one in (named if isinstance(named, list) else [named])]
