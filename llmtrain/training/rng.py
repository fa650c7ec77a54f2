"""The random states of one rank as JSON, so that a resumed run draws what the straight one drew."""

from __future__ import annotations

import base64
import random  # noqa: TID251  # models and libraries may draw from it; its state is kept, not used
from typing import Any

import numpy as np
import torch

from llmtrain.hashing import mix

_SEED_STREAM = 7  # of `mix`: dropout and whatever else draws while training


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Give each rank numbers of its own (equal ones would drop the same units on every rank)."""
    key = mix(seed, _SEED_STREAM, rank, step) if step else mix(seed, _SEED_STREAM, rank)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # the legacy state that libraries draw from
    torch.manual_seed(key)


def capture(device: torch.device) -> dict[str, Any]:
    """python, numpy and torch states of this process and its device."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    version, numbers, following = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(numbers), following],
        "numpy": [str(name), _text(np.asarray(keys).tobytes()), position, has_gauss, gauss],
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
    }
    if device.type == "cuda":
        states["device"] = _text(torch.cuda.get_rng_state(device).numpy().tobytes())
    return states


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Put back what `capture` returned."""
    version, numbers, following = states["python"]
    random.setstate((version, tuple(numbers), following))
    name, keys, position, has_gauss, gauss = states["numpy"]
    state = (name, np.frombuffer(_bytes(keys), dtype=np.uint32), position, has_gauss, gauss)
    np.random.set_state(state)
    torch.set_rng_state(_tensor(states["torch"]))
    if device.type == "cuda" and "device" in states:
        torch.cuda.set_rng_state(_tensor(states["device"]), device)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_bytes(text)), dtype=torch.uint8)
