"""The random states of one rank, so that a resumed run draws what an uninterrupted one draws."""

from __future__ import annotations

import base64
import ctypes
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
    return States(random.getstate(), _numpy.state(), torch.get_rng_state(), there)


class _Numpy:
    """The state of numpy's legacy generator, which is asked for only if it is another one.

    numpy takes 0.1 ms to tell it, in a loop over its 624 words, and in most models nobody draws
    from it. (Some do: BigBird's sparse attention does, so it is not enough to keep the state of
    the start.) So the words are compared where numpy keeps them, at the address that it publishes,
    which takes 1 µs. Where that is not as expected, numpy is asked each time.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._words: np.ndarray | None = None  # (625,) uint32: 624 words and the position in them
        self._known = b""
        self._state: Any = None

    def state(self) -> Any:
        """Return what `np.random.get_state` does."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in its stubs
        if generator is not self._generator:
            self._generator, self._words = generator, _words(generator)
            self._known = b""
        if self._words is None:
            return np.random.get_state()
        words = self._words.tobytes()
        if words != self._known:
            self._state = np.random.get_state()
            # A normal number that is drawn, but not handed out, is a state beside the words.
            self._known = b"" if self._state[3] else words
        return self._state

    def forget(self) -> None:
        """Ask numpy the next time: the state was set."""
        self._known = b""


def _words(generator: Any) -> np.ndarray | None:
    """Return a view of the words of an MT19937 generator, (625,) uint32; None for another one."""
    if not isinstance(generator, np.random.MT19937):
        return None
    address = ctypes.cast(generator.ctypes.state_address, ctypes.POINTER(ctypes.c_uint32))
    words = np.ctypeslib.as_array(address, (625,))
    state = generator.state["state"]
    return words if np.array_equal(words, [*state["key"], state["pos"]]) else None


_numpy = _Numpy()


def restore(states: States, device: torch.device) -> None:
    """Restore the states that `capture` returned."""
    random.setstate(states.python)
    np.random.set_state(states.numpy)
    _numpy.forget()
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
