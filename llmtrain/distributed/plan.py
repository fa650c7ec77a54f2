"""Bytes of a device for each way to spread a model out: arithmetic on plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmtrain.types import Saved

# Arithmetic of a forward, as `model.count` counts it: bf16 = parameters are bf16 while computing
# (FSDP2, ZeRO), autocast = fp32 parameters are cast on the way (DDP, one process).
Arithmetic = str
# (arithmetic, activation checkpointing) → what a forward keeps.
Count = Callable[[Arithmetic, str], Saved]

PARTS = ("parameters", "gradients", "optimizer", "working", "activations", "head", "reserve")


@dataclass(frozen=True, slots=True)
class Hardware:
    """Equal devices on equal nodes. host_bytes: of a node, None where it is not known.

    device: its name, for tables of speed; None or an unknown one: no speed is predicted. cpu: a
    rehearsal on processors.
    """

    device_bytes: int
    host_bytes: int | None
    devices_per_node: int
    nodes: int
    device: str | None = None
    cpu: bool = False

    @property
    def devices(self) -> int:
        """Of all nodes."""
        return self.devices_per_node * self.nodes


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes. None stands for `auto`; most_tokens: of a forward, where that is so."""

    seq_len: int
    global_batch_size: int
    micro_batch_size: int | None
    precision: str
    activation_checkpointing: str | None
    fsdp_sync: str | None
    most_tokens: int


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to do the work."""

    strategy: str
    activation_checkpointing: str
    micro_batch_size: int
    accumulation: int
    fsdp_sync: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one device by part (`PARTS`), and of a node's host memory."""

    parts: Mapping[str, int]
    host_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of the device."""
        return sum(self.parts.values())
