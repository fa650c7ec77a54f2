"""Texts that the model writes while it trains, without any effect on the training.

`generate` of transformers is not used, since it draws from the global random state. All ranks run
the same forwards together, so that sampling also works where each holds a part of the weights.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from llmtrain import heartbeat
from llmtrain.hashing import mix
from llmtrain.model.compile import uncompiled
from llmtrain.training.run.run import Run
from llmtrain.types import Sample

_NEW_TOKENS = 64
_TEMPERATURE = 0.5  # low, since a model that is still learning gives no token a high probability
_SEED_STREAM = 8  # for `mix`
_NOTHING = -1  # sent in place of a token's id to end the text


def sample(run: Run) -> list[Sample]:
    """Return one continuation of each of `evaluation.prompts`; [] if a stop was asked for.

    The last step does not count as a stop: people want to see what the finished model writes.
    """
    if run.due.stop_reason is not None:
        return []
    with run.engine.evaluating(), uncompiled():  # each token is another shape
        return [_sample(run, prompt) for prompt in run.config.evaluation.prompts]


def _sample(run: Run, prompt: str) -> Sample:
    start = time.perf_counter()
    text = _continue(run, prompt)
    return Sample(prompt, text, time.perf_counter() - start)


def _prompt(run: Run, prompt: str) -> tuple[list[int], set[int]]:
    """Return the ids of a prompt, and those that end a text.

    Where conversations are trained, the prompt is a message of the user.
    """
    tokenizer, chat = run.data.tokenizer, run.data.encoder.chat
    if chat is not None and chat.has_template:
        message = {"role": "user", "content": prompt}
        return chat.prompt_ids([message]), {tokenizer.eos, *chat.check().ids}
    start = tokenizer.eos if tokenizer.bos is None else tokenizer.bos
    return [start, *tokenizer.encode(prompt).tolist()], {tokenizer.eos}


def _continue(run: Run, prompt: str) -> str:
    ids, ends = _prompt(run, prompt)
    given = len(ids)
    generator = torch.Generator(run.device)
    generator.manual_seed(mix(run.config.run.seed, _SEED_STREAM, run.step))
    while len(ids) < given + _NEW_TOKENS:
        heartbeat.beat("a token of a sample", len(ids) - given + 1, _NEW_TOKENS)
        context = torch.tensor([ids[-run.config.data.seq_len :]], device=run.device)
        logits = run.model(context)[0] / _TEMPERATURE  # (V,)
        # Ranks whose logits differ by a bit could draw different tokens and end at different
        # lengths, but with sharded weights each forward needs all ranks. So rank 0 draws for all.
        drawn = _draw(logits, generator) if run.ranks.rank == 0 else _NOTHING
        token = int(run.ranks.broadcast(b"%d" % drawn))
        if token == _NOTHING or token in ends:
            break
        ids.append(token)
    return run.data.tokenizer.decode(ids[given:])


def _draw(logits: Tensor, generator: torch.Generator) -> int:
    """Draw a token; return _NOTHING if the model has diverged. logits: (V,)."""
    if not torch.isfinite(logits).all():
        return _NOTHING
    return int(torch.multinomial(logits.softmax(0), 1, generator=generator))
