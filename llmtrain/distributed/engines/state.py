"""Model and optimizer as named, whole tensors: what a checkpoint is made of.

For one process and DDP every rank holds everything, so a piece is a whole tensor. FSDP2 gives each
rank some rows, so its piece is a range: of 5 rows of 3 over 3 ranks

    rank 0: [0, 6)    rank 1: [6, 12)    rank 2: [12, 15)

Names are those of the unwrapped transformers model, and a tied tensor appears once, under its first
name. The trap: `step` of AdamW is no tensor of the file; it is one integer for all parameters, and
state is made out of zeros, never by a step of the optimizer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from llmtrain.types import Piece, Spec, TensorSpec

MOMENTS = ("exp_avg", "exp_avg_sq")

_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ITEM_BYTES = {name: dtype.itemsize for dtype, name in _DTYPES.items()}


def spec(model: Module, optimizer: Optimizer, shard_bytes: int) -> Spec:
    """Files, tensors, dtypes and shapes of a checkpoint; equal on all ranks.

    No file holds more than `shard_bytes` of tensors unless one tensor alone does. Raises ValueError
    for a trainable weight that is not fp32, and for a dtype that no checkpoint holds.
    """
    weights = {name: _tensor_spec(name, tensor) for name, tensor in _weights(model).items()}
    moments = {
        f"{name}.{moment}": TensorSpec("F32", tuple(parameter.shape))
        for name, parameter in trained_parameters(model, optimizer).items()
        for moment in MOMENTS
    }
    return {
        **_files("model", weights, shard_bytes, numbered=False),
        **_files("optimizer", moments, shard_bytes, numbered=True),
    }


def pieces(
    model: Module, optimizer: Optimizer, spec: Spec, *, shards: bool = True, whole: bool = True
) -> Iterator[Piece]:
    """This rank's ranges, in the order of the spec: 1-D views, to be written from or read into.

    shards, whole: whether to give those of tensors that are split over ranks, and of the others.
    The optimizer must have its state (`create_state` makes it). Raises ValueError for a tensor
    whose memory is not contiguous, or that is split otherwise than by rows.
    """
    tensors = _weights(model)
    for name, parameter in trained_parameters(model, optimizer).items():
        tensors |= {f"{name}.{moment}": optimizer.state[parameter][moment] for moment in MOMENTS}
    for part in spec.values():
        for name in part:
            tensor = tensors[name].detach()
            if shards if isinstance(tensor, DTensor) else whole:
                yield piece(name, tensor)


def share_out(held: Iterable[Piece], names: Container[str], rank: int, of: int) -> Iterator[Piece]:
    """Of whole tensors that every rank holds, this rank's share: as many bytes for each of `of`.

    names: those that are shared out; equal on all ranks, as is the order. The others are given as
    they are. Tensors are cut where a share ends: one matrix may be most of a model.
    """
    pieces = list(held)
    total = sum(piece.data.nbytes for piece in pieces if piece.name in names)
    first, end = total * rank // of, total * (rank + 1) // of
    offset = 0  # of the piece, in bytes of all that is dealt
    for piece in pieces:
        if piece.name not in names:
            yield piece
            continue
        item, count = piece.data.element_size(), piece.data.numel()
        start, stop = (min(max(-(-(at - offset) // item), 0), count) for at in (first, end))
        if start < stop:
            yield Piece(piece.name, piece.start + start, piece.data[start:stop])
        offset += piece.data.nbytes


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the memory itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # else it is a view that belongs to a graph
        part: Tensor = tensor.to_local()
    return part


def create_state(optimizer: Optimizer, steps: int) -> None:
    """Give every parameter of the optimizer moments of zero, as if `steps` had been made.

    What the optimizer has already is replaced. No step is made, so nothing else changes.
    """
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            device = parameter.device if on_device else torch.device("cpu")
            optimizer.state[parameter] = {
                "step": torch.tensor(float(steps), dtype=torch.float32, device=device),
                **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
            }


def set_steps(optimizer: Optimizer, steps: int) -> None:
    """Set how many updates the optimizer has made, in place; its state must exist."""
    for state in optimizer.state.values():
        if isinstance(state["step"], Tensor):
            state["step"].fill_(float(steps))
        else:  # DeepSpeed's Adam for host memory counts in a Python number
            state["step"] = steps


def optimizer_steps(optimizer: Optimizer) -> int:
    """How many updates the optimizer has made: 0 without state. Waits for the device.

    A parameter that never had a gradient stays at 0, which decides nothing: its moments are zero.
    Raises ValueError if the others disagree: one integer could not store that.
    """
    made = [torch.as_tensor(state["step"]) for state in optimizer.state.values() if "step" in state]
    if not made:
        return 0
    counts = set(torch.stack([step.detach() for step in made]).tolist()) - {0.0}
    if len(counts) > 1:
        raise ValueError(f"parameters have made {sorted(counts)} updates, not equally many")
    return int(counts.pop()) if counts else 0


def bytes_of(spec: Spec) -> int:
    """Bytes of all tensors."""
    return sum(_bytes(tensor) for part in spec.values() for tensor in part.values())


def index(spec: Spec) -> dict[str, bytes]:
    """Make the file by which transformers finds a weight's shard; empty for a single file."""
    shards = {file: part for file, part in spec.items() if file.startswith("model-")}
    if not shards:
        return {}
    body = {
        "metadata": {"total_size": bytes_of(shards)},
        "weight_map": {name: file for file, part in shards.items() for name in part},
    }
    return {"model.safetensors.index.json": json.dumps(body, indent=2).encode() + b"\n"}


def piece(name: str, tensor: Tensor) -> Piece:
    """What this rank holds of a tensor. Raises ValueError as `pieces` does."""
    part = local(tensor)
    if not part.is_contiguous():
        raise ValueError(f"{name} is not contiguous in memory")
    return Piece(name, _first_row(name, tensor) * math.prod(tensor.shape[1:]), part.view(-1))


def _first_row(name: str, tensor: Tensor) -> int:
    """The first row of this rank: FSDP2 cuts as torch.chunk does, the last ranks may have none."""
    if not isinstance(tensor, DTensor):
        return 0
    cuts = [axis for axis, placement in enumerate(tensor.placements) if placement.is_shard()]
    if len(cuts) != 1 or not tensor.placements[cuts[0]].is_shard(0):
        raise ValueError(f"{name} is split as {tensor.placements}, expected its rows, once")
    ranks = tensor.device_mesh.size(cuts[0])
    rows = -(-tensor.shape[0] // ranks)
    return min(tensor.device_mesh.get_local_rank(cuts[0]) * rows, tensor.shape[0])


def _weights(model: Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, a tied tensor once."""
    return {**dict(model.named_parameters()), **persistent_buffers(model)}


def persistent_buffers(model: Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint holds, by name."""
    persistent = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def trained_parameters(model: Module, optimizer: Optimizer) -> dict[str, Parameter]:
    """The parameters that the optimizer changes, by name, in the order of the model."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: weight for name, weight in model.named_parameters() if id(weight) in own}


def _tensor_spec(name: str, tensor: Tensor) -> TensorSpec:
    """A weight as the spec names it."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or (tensor.requires_grad and dtype != "F32"):
        expected = "torch.float32" if tensor.requires_grad else "a dtype that a checkpoint holds"
        raise ValueError(f"{name} is {tensor.dtype}, expected {expected}")
    return TensorSpec(dtype, tuple(tensor.shape))


def _files(
    kind: str, tensors: Mapping[str, TensorSpec], shard_bytes: int, *, numbered: bool
) -> dict[str, dict[str, TensorSpec]]:
    """Deal tensors out over files in their order, wide dtypes first so that all are aligned."""
    parts: list[dict[str, TensorSpec]] = []
    room = 0
    for name in sorted(tensors, key=lambda name: -_ITEM_BYTES[tensors[name].dtype]):
        size = _bytes(tensors[name])
        if not parts or (size > room and parts[-1]):
            parts.append({})
            room = shard_bytes
        parts[-1][name] = tensors[name]
        room -= size
    if len(parts) == 1 and not numbered:
        return {f"{kind}.safetensors": parts[0]}
    total = len(parts)
    return {f"{kind}-{i:05d}-of-{total:05d}.safetensors": part for i, part in enumerate(parts, 1)}


def _bytes(tensor: TensorSpec) -> int:
    return math.prod(tensor.shape) * _ITEM_BYTES[tensor.dtype]
