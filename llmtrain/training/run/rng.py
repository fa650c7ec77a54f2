"""The random states of one rank, so that a resumed run draws what an uninterrupted one draws."""

from __future__ import annotations

import base64
import ctypes
import random  # noqa: TID251  # not drawn from here; models and libraries may, so its state is kept
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from llmtrain.hashing import mix

G = TypeVar("G")

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
    return States(_python.state(), _numpy.state(), torch.get_rng_state(), there)


class _Kept(Generic[G]):
    """The state of a generator, which is asked for only if it is another one.

    Python and numpy make 625 numbers of a state, and in most models nobody draws from them. (Some
    do: BigBird's sparse attention does, so it is not enough to keep the state of the start.) So the
    words are compared in the memory of the generator, which takes 1 µs. Where they are not as
    expected, the generator is asked each time.

    generator: returns the generator that is in use now
    words: returns a view of its memory, (625,) uint32: 624 words and the position in them; None if
        it has no such words
    ask: returns its state, with the number that is kept beside the words last or None or 0
    """

    def __init__(
        self,
        generator: Callable[[], G],
        words: Callable[[G], np.ndarray | None],
        ask: Callable[[], Any],
    ) -> None:
        self._generator, self._words, self._ask = generator, words, ask
        self._owner: G | None = None
        self._memory: np.ndarray | None = None
        self._known = b""
        self._state: Any = None

    def state(self) -> Any:
        """Return what `ask` does."""
        owner = self._generator()
        if owner is not self._owner:
            self._owner, self._memory = owner, self._words(owner)
            self._known = b""
        if self._memory is None:
            return self._ask()
        words = self._memory.tobytes()
        if words != self._known:
            self._state = self._ask()
            # A normal number that is drawn, but not handed out, is a state beside the words.
            self._known = b"" if self._state[-1] else words
        return self._state

    def forget(self) -> None:
        """Ask the next time: the state was set."""
        self._known = b""


def _words_of_python(generator: random.Random) -> np.ndarray | None:
    """Return a view of the words in an object of CPython, which begins with its position."""
    begin, size = object.__basicsize__, 4 * 625
    if type(generator).__basicsize__ < begin + size:
        return None
    words = _view(id(generator) + begin)
    *state, position = generator.getstate()[1]
    return words if np.array_equal(words, [position, *state]) else None


def _words_of_numpy(generator: Any) -> np.ndarray | None:
    """Return a view of the words of an MT19937 generator, whose address it publishes."""
    if not isinstance(generator, np.random.MT19937):
        return None
    words = _view(generator.ctypes.state_address)
    state = generator.state["state"]
    return words if np.array_equal(words, [*state["key"], state["pos"]]) else None


def _view(address: int) -> np.ndarray:
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint32))
    return np.ctypeslib.as_array(pointer, (625,))


_python = _Kept(lambda: random._inst, _words_of_python, random.getstate)
_numpy = _Kept(np.random.get_bit_generator, _words_of_numpy, np.random.get_state)  # type: ignore[attr-defined]  # not in its stubs


def restore(states: States, device: torch.device) -> None:
    """Restore the states that `capture` returned."""
    random.setstate(states.python)
    np.random.set_state(states.numpy)
    _python.forget()
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
