"""Let a model write: a continuation of a text, or the answers in a conversation.

transformers' `generate` with its defaults switched off, so that only what is asked for here has an
effect. It ends at the ids that `generation_config.json` names, in a chat model the end of a turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmtrain.data.chat.chat import Chat
from llmtrain.data.chat.rows import BadRowError
from llmtrain.data.manifest import ChatFacts, glance
from llmtrain.data.tokens.encode import open_chat
from llmtrain.errors import Problem, UserError, first_line, raise_any
from llmtrain.hashing import mix
from llmtrain.rundir import contents
from llmtrain.tools.use.load import Opened, open_model
from llmtrain.tools.use.target import KEY, Target, find

Told = Callable[[str], object]  # gets the text as it is written
_SEED_STREAM = 9  # for `mix`
_LEAST = 1e-6  # temperature
_SHOWN = 60  # characters


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

    def to_json(self) -> dict[str, Any]:
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
    told: Told = lambda text: None,
) -> Generated:
    """Return what a model writes after a prompt, or with `chat` as the answer to it.

    model_or_run: as for `evaluate`
    told: called with each part of the text as soon as it is written

    Raises UserError for bad input.
    """
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    if chat:
        return next(converse(model_or_run, [prompt], sampling, told))
    return continue_text(model_or_run, prompt, sampling, told)


def continue_text(
    model_or_run: str | Path, prompt: str, sampling: Sampling, told: Told
) -> Generated:
    """Return what a model writes after a text. Arguments: as of `generate`."""
    _check_text("PROMPT", prompt)
    opened = _open(model_or_run, sampling)
    return _write(opened, prompt, _text_ids(opened, prompt), sampling, 0, told)


def converse(
    model_or_run: str | Path, messages: Iterable[str], sampling: Sampling, told: Told
) -> Iterator[Generated]:
    """Yield the answer to each user message of one conversation. Arguments: as of `generate`."""
    opened = _open(model_or_run, sampling)
    if not opened.tokenizer.chat_template:
        expected = "a model whose tokenizer has a chat template"
        raise UserError(Problem(KEY, model_or_run, expected, "leave --chat out: it continues text"))
    turns: list[dict[str, str]] = []
    for number, message in enumerate(messages):
        _check_text(f"message {number + 1}", message)
        turns.append({"role": "user", "content": message})
        ids = _chat_ids(opened, turns)
        answer = _write(opened, message, ids, sampling, number, told)
        yield answer
        turns.append({"role": "assistant", "content": answer.text})


def _check_text(name: str, text: str) -> None:
    """Raise UserError for a text with bytes that are not UTF-8, which Python has as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        expected = f"UTF-8; the character at position {error.start + 1} is not"
        raise UserError(Problem(name, ascii(text[:_SHOWN]), expected)) from error


def _open(model_or_run: str | Path, sampling: Sampling) -> Opened:
    """Open the model, after the options have been checked."""
    checks = (
        ("--max-new-tokens", sampling.max_new_tokens, sampling.max_new_tokens >= 1, "at least 1"),
        (
            "--temperature",
            sampling.temperature,
            sampling.temperature == 0 or _LEAST <= sampling.temperature < math.inf,
            f"0 (greedy) or more; between 0 and {_LEAST:g} logits are not finite",
        ),
        ("--top-p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0, at most 1"),
    )
    raise_any(Problem(key, value, expected) for key, value, fine, expected in checks if not fine)
    return open_model(find(str(model_or_run)), small=True)


def _text_ids(opened: Opened, text: str) -> list[int]:
    """Return the ids of a text to be continued.

    A checkpoint of a run was trained on texts that follow a begin token or an end of text, so one
    is put in front. Any other model gets what its tokenizer adds.
    """
    ids: list[int] = opened.tokenizer(text).input_ids
    if (opened.target.state or not ids) and ids[:1] != [opened.begin]:
        ids = [opened.begin, *ids]
    return ids


def _chat_ids(opened: Opened, turns: list[dict[str, str]]) -> list[int]:
    """Return the ids of a conversation up to where the answer begins.

    They are those of training, for a checkpoint of a run with conversations.
    """
    from jinja2 import TemplateError

    try:
        if template := _template_of(opened.target):
            return template.prompt_ids(turns)
        text = opened.tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, BadRowError) as error:
        expected = f"messages that the chat template takes ({first_line(error)})"
        raise UserError(Problem("--chat", turns[-1]["content"], expected)) from error
    ids: list[int] = opened.tokenizer(text, add_special_tokens=False).input_ids
    return ids


def _template_of(target: Target) -> Chat | None:
    """Return the template of a checkpoint as its run used it; None for any other model."""
    manifest = target.run_dir / contents.MANIFEST if target.run_dir else None
    if manifest is None or not manifest.is_file():
        return None
    stored = glance(manifest)
    facts = stored.get("chat")
    return open_chat(target.directory, ChatFacts(**facts) if facts else None, stored["seq_len"])


def _write(
    opened: Opened, prompt: str, ids: list[int], sampling: Sampling, turn: int, told: Told
) -> Generated:
    """Let the model write after these ids. turn: number of the answer in a conversation."""
    import torch
    from transformers import GenerationConfig, TextStreamer

    room = opened.positions - len(ids)
    if room < 1:
        expected = f"fewer than {opened.positions:,} tokens, the model's positions"
        raise UserError(Problem("PROMPT", f"{len(ids):,} tokens", expected))
    ends = _end_ids(opened)
    # As the model's own config too: transformers takes what is not set from there.
    opened.model.generation_config = GenerationConfig(
        max_new_tokens=min(sampling.max_new_tokens, room),
        do_sample=sampling.temperature > 0,
        eos_token_id=ends,
        pad_token_id=ends[0],
        **_drawing(sampling),
    )
    streamer = TextStreamer(opened.tokenizer, skip_prompt=True, skip_special_tokens=True)
    streamer.on_finalized_text = lambda text, stream_end=False: told(text)
    inputs = torch.tensor([ids], device=opened.device)
    devices = [opened.device] if opened.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(mix(sampling.seed, _SEED_STREAM, turn) >> 1)
        out = opened.model.generate(
            inputs, attention_mask=torch.ones_like(inputs), streamer=streamer
        )
    new = out[0, len(ids) :].tolist()
    text = opened.tokenizer.decode(new, skip_special_tokens=True)
    return Generated(prompt, text, len(new), bool(new) and new[-1] in ends)


def _drawing(sampling: Sampling) -> dict[str, Any]:
    """Return the options of drawing; none for the likeliest token. top_k 0 = not limited."""
    if sampling.temperature == 0:
        return {}
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}


def _end_ids(opened: Opened) -> list[int]:
    """Return the ids that end a text: of `generation_config.json`, else the tokenizer's."""
    named = opened.model.generation_config.eos_token_id
    if named is None:
        return [int(opened.tokenizer.eos_token_id)]
    return [int(one) for one in (named if isinstance(named, list) else [named])]
