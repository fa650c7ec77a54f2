"""The random states of one rank, so that a resumed run draws what an uninterrupted one draws."""

from __future__ import annotations

import base64
import random  # noqa: TID251  # not drawn from here; models and libraries may, so its state is kept
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llmtrain.hashing import mix

_SEED_STREAM = 7  # for `mix`: dropout and all else that draws during training


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Seed this rank's generators: with equal seeds dropout would drop the same on every rank."""
    key = mix(seed, _SEED_STREAM, rank, step) if step else mix(seed, _SEED_STREAM, rank)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # the legacy state that libraries draw from
    torch.manual_seed(key)


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """The states of this process's generators. device: None without a GPU."""

    python: tuple[Any, ...]
    numpy: Any
    torch: Tensor
    device: Tensor | None

    def to_json(self) -> dict[str, Any]:
        """Return the states in the form of `trainer_state.json`."""
        version, numbers, following = self.python
        name, keys, position, has_gauss, gauss = self.numpy
        keys = np.asarray(keys).astype("<u4").tobytes()
        states: dict[str, Any] = {
            "python": [version, list(numbers), following],
            "numpy": [str(name), _text(keys), position, has_gauss, gauss],
            "torch": _text(self.torch.numpy().tobytes()),
        }
        if self.device is not None:
            states["device"] = _text(self.device.numpy().tobytes())
        return states

    @staticmethod
    def from_json(kept: dict[str, Any]) -> States:
        """Return the inverse of `to_json`."""
        version, numbers, following = kept["python"]
        name, keys, *rest = kept["numpy"]
        numpy = (name, np.frombuffer(base64.b64decode(keys), dtype="<u4"), *rest)
        device = _tensor(kept["device"]) if "device" in kept else None
        return States((version, tuple(numbers), following), numpy, _tensor(kept["torch"]), device)


def capture(device: torch.device) -> States:
    """Return the current states. Takes some microseconds and does not wait for a device."""
    there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return States(random.getstate(), np.random.get_state(), torch.get_rng_state(), there)


def restore(states: States, device: torch.device) -> None:
    """Restore the states that `capture` returned."""
    random.setstate(states.python)
    np.random.set_state(states.numpy)
    torch.set_rng_state(states.torch)
    if device.type == "cuda" and states.device is not None:
        torch.cuda.set_rng_state(states.device, device)


@contextmanager
def leaving_no_trace(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the buffers of a model and the random states after the block."""
    states = capture(device)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)
        restore(states, device)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
