"""The model and the optimizer as named, whole tensors, which are the content of a checkpoint.

In a single process and under DDP every rank has all tensors, so a piece is a whole tensor. FSDP2
gives each rank some rows, so a piece is a range. A tensor of 5 rows and 3 columns on 3 ranks:

    rank 0: [0, 6)    rank 1: [6, 12)    rank 2: [12, 15)

Names are those of the unwrapped transformers model, and a tied tensor appears once, under its first
name. Of a model with adapters only what is trained is saved, under the names that peft gives it in
its files. The state of each optimizer is described in `distributed.plan.memory`. A count of
updates (`step`) is not a tensor of the files: a checkpoint has one integer for all parameters. The
state is created as zeros, never by a step.
"""

import itertools
import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from llmtrain.distributed.plan.memory import states
from llmtrain.distributed.ranks import lost_peer
from llmtrain.errors import RESTARTABLE, RunError
from llmtrain.text import first_line
from llmtrain.types import (
    DTYPES,
    Algorithm,
    Cut,
    Piece,
    Spec,
    StateSpec,
    TensorSpec,
    split,
    tensor_bytes,
)

ADAPTER = "adapter_model.safetensors"  # the file of an adapter's tensors, as peft calls it

_NAMES = {dtype: name for name, (_, dtype) in DTYPES.items()}  # torch's → safetensors'


def spec(model: Module, optimizer: Optimizer, shard_bytes: int) -> Spec:
    """Return the files, tensors, dtypes and shapes of a checkpoint; equal on all ranks.

    No file has more than `shard_bytes` of tensors, except for a single tensor that is larger, and
    except for adapters: peft reads only one file.

    Raises ValueError for a trainable weight that is not fp32, for an unsupported dtype, and if the
    optimizer was made before the model had all that it trains.
    """
    driven = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if driven != {id(parameter) for parameter in model.parameters() if parameter.requires_grad}:
        raise ValueError(
            "the optimizer changes other weights than the model trains; make it after adapters are "
            "attached and weights are frozen"
        )
    weights = {name: _tensor_spec(name, tensor) for name, tensor in named_tensors(model).items()}
    states = kept_states(optimizer)
    moments = {
        f"{name}.{key}": tensor
        for name, parameter in trained_parameters(model, optimizer).items()
        for key, tensor in states[id(parameter)].items()
    }
    adapter = {ADAPTER: weights} if has_adapters(model) else None
    return {
        **(adapter or files("model", weights, shard_bytes, numbered=False)),
        **files("optimizer", moments, shard_bytes, numbered=True),
    }


def pieces(
    model: Module, optimizer: Optimizer, spec: Spec, *, shards: bool = True, whole: bool = True
) -> Iterator[Piece]:
    """Yield this rank's ranges in the order of the spec, as 1-D views to write from or read into.

    shards: whether to yield ranges of the tensors that are split over ranks.
    whole: whether to yield the tensors that are not split.

    The optimizer must have its state (see `create_state`). Raises ValueError for a tensor that is
    not contiguous in memory, or that is not split by rows.
    """
    for name, _, tensor in held_tensors(model, optimizer, spec):
        if shards if isinstance(tensor, DTensor) else whole:
            yield piece(name, tensor)


def held_tensors(
    model: Module, optimizer: Optimizer, spec: Spec
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the tensors of a checkpoint: name, name of the parameter, this rank's tensor.

    They come in the order of the spec. Of a tensor that is split, a DTensor knows the whole shape.
    """
    tensors, state_specs = named_tensors(model), kept_states(optimizer)
    held = {name: (name, tensor) for name, tensor in tensors.items()}
    for name, parameter in trained_parameters(model, optimizer).items():
        state = optimizer.state[parameter]
        held |= {f"{name}.{key}": (name, state[key]) for key in state_specs[id(parameter)]}
    for part in spec.values():
        for name in part:
            of, tensor = held[name]
            yield name, of, tensor.detach()


def share_out(held: Iterable[Piece], names: Container[str], rank: int, of: int) -> Iterator[Piece]:
    """Yield this rank's share of whole tensors that every rank has, equal in bytes for all ranks.

    held: the tensors of this rank, in the same order on all ranks.
    names: the tensors that are shared out, equal on all ranks; the others are yielded unchanged.
    of: the number of ranks.

    A tensor is cut where a share ends, since one matrix may be most of a model.
    """
    pieces = list(held)
    total = sum(piece.data.nbytes for piece in pieces if piece.name in names)
    first, end = total * rank // of, total * (rank + 1) // of
    offset = 0  # of the piece, in bytes of all tensors that are shared out
    for piece in pieces:
        if piece.name not in names:
            yield piece
            continue
        item, count = piece.data.element_size(), piece.data.numel()
        start, stop = (min(max(-(-(at - offset) // item), 0), count) for at in (first, end))
        if start < stop:
            yield Piece(piece.name, piece.start + start, piece.data[start:stop])
        offset += piece.data.nbytes


def with_moments(names: Container[str], spec: Spec) -> set[str]:
    """Return those of the spec's tensors that have one of these names, or are its moments."""
    every = (name for part in spec.values() for name in part)
    return {name for name in every if name in names or name.rpartition(".")[0] in names}


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without a copy."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # otherwise the view belongs to an autograd graph
        part: Tensor = tensor.to_local()
    return part


def names_of(optimizer: Optimizer, module: Module) -> list[list[str]]:
    """Return the names of the parameters that the optimizer changes, for each of its groups."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [[names[id(one)] for one in group["params"]] for group in optimizer.param_groups]


def replace_parameters(optimizer: Optimizer, module: Module, names: list[list[str]]) -> None:
    """Give the optimizer the parameters that now have these names, for each of its groups."""
    parameters = dict(module.named_parameters())
    for group, wanted in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [parameters[name] for name in wanted]


def algorithm_of(group: Mapping[str, Any]) -> Algorithm:
    """Return which optimizer updates a group of parameters."""
    algorithm: Algorithm = group.get("algorithm", "adamw")
    return algorithm


def kept_states(optimizer: Optimizer) -> dict[int, StateSpec]:
    """Return the tensors that the optimizer keeps for each of its parameters, by id."""
    return {
        id(parameter): states(algorithm_of(group), tuple(parameter.shape))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def create_state(optimizer: Optimizer) -> None:
    """Give every parameter the state that it has before any update.

    It replaces the optimizer's state. No step is made, so nothing else changes.
    """
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if algorithm_of(group) == "adamw_8bit":  # not all of it is zero
                optimizer.init_state(group, parameter, number, index)  # type: ignore[attr-defined]
            else:
                names = states(algorithm_of(group), tuple(parameter.shape))
                optimizer.state[parameter] = {name: torch.zeros_like(parameter) for name in names}
        if algorithm_of(group) == "adamw":  # Muon does not count its updates
            # Each parameter's count is an element of one tensor for all.
            parameters = group["params"]
            on_device = group.get("fused") or group.get("capturable")
            device = parameters[0].device if on_device else torch.device("cpu")
            counts = torch.zeros(len(parameters), dtype=torch.float32, device=device)
            for parameter, count in zip(parameters, counts.unbind(), strict=True):
                optimizer.state[parameter] = {"step": count} | optimizer.state[parameter]


def set_steps(optimizer: Optimizer, steps: int) -> None:
    """Set how many updates the optimizer has made, in place; its state must exist."""
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].fill_(float(steps))
        elif "step" in state:  # DeepSpeed's CPU Adam and bitsandbytes count in a Python number
            state["step"] = steps


def optimizer_steps(optimizer: Optimizer) -> int:
    """Return how many updates the optimizer has made, 0 without state. Waits for the device.

    A parameter that never had a gradient stays at 0 and is left out; its moments are zero. Raises
    ValueError if the other counts differ, because a checkpoint stores one integer.
    """
    made = [torch.as_tensor(state["step"]) for state in optimizer.state.values() if "step" in state]
    if not made:
        return 0
    counts = set(torch.stack([step.detach() for step in made]).tolist()) - {0.0}
    if len(counts) > 1:
        raise ValueError(f"parameters have made different numbers of updates: {sorted(counts)}")
    return int(counts.pop()) if counts else 0


def bytes_of(spec: Spec) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor_bytes(tensor) for part in spec.values() for tensor in part.values())


def index(spec: Spec) -> dict[str, bytes]:
    """Return transformers' index of the weight files by name; empty for a single file."""
    shards = {file: part for file, part in spec.items() if file.startswith("model-")}
    if not shards:
        return {}
    body = {
        "metadata": {"total_size": bytes_of(shards)},
        "weight_map": {name: file for file, part in shards.items() for name in part},
    }
    return {"model.safetensors.index.json": json.dumps(body, indent=2).encode() + b"\n"}


def piece(name: str, tensor: Tensor) -> Piece:
    """Return this rank's range of a tensor. Raises ValueError as `pieces` does."""
    part = local(tensor)
    if not part.is_contiguous():
        raise ValueError(f"{name} is not contiguous in memory")
    row = 0
    if isinstance(tensor, DTensor):  # FSDP2 splits like torch.chunk: last ranks may be empty
        cuts = [axis for axis, placement in enumerate(tensor.placements) if placement.is_shard()]
        if len(cuts) != 1 or not tensor.placements[cuts[0]].is_shard(0):
            raise ValueError(f"{name} is split as {tensor.placements}, expected its rows, once")
        rows = -(-tensor.shape[0] // tensor.device_mesh.size(cuts[0]))
        row = min(tensor.device_mesh.get_local_rank(cuts[0]) * rows, tensor.shape[0])
    return Piece(name, row * math.prod(tensor.shape[1:]), part.view(-1))


_EXCHANGED = 16 << 20  # bytes of a tensor that a process has whole rows of at once


def rows_for_columns(part: Piece, cut: Cut, group: dist.ProcessGroup) -> Iterator[Piece]:
    """Yield whole rows in exchange for columns: of the group's rows each process gets its share.

    part: the columns of some rows, which are the same rows on all processes of the group

    Collective: every process has to take all that is yielded. Raises RunError (75) if this process
    cannot take part any more: the others wait for it, and are not to be told by a vote.
    """
    rank, (columns, first, ends) = dist.get_rank(group), _rows_of(part, cut, dist.get_rank(group))
    most = max(1, _EXCHANGED // (cut.shape[1] * part.data.element_size()))
    longest = max(end - begin for begin, end in itertools.pairwise(ends))
    for at in range(0, longest, most):
        ranges = [
            (min(begin + at, end), min(begin + at + most, end))
            for begin, end in itertools.pairwise(ends)
        ]
        begin, end = ranges[rank]
        received = [(end - begin) * size for size in cut.sizes]
        given = [(last - start) * cut.sizes[rank] for start, last in ranges]
        try:
            sent = torch.cat([columns[start:last].reshape(-1) for start, last in ranges])
            flat = sent.new_empty(sum(received))
            dist.all_to_all_single(flat, sent, received, given, group=group)
            parts = zip(torch.split(flat, received), cut.sizes, strict=True)
            rows = torch.cat([one.view(end - begin, size) for one, size in parts], 1)
        except RuntimeError as error:
            if lost_peer(error):
                raise
            why = f"{part.name} could not be exchanged for a checkpoint: {first_line(error)}"
            raise RunError(why, RESTARTABLE, "start the same command again: it resumes") from error
        yield Piece(part.name, (first + begin) * cut.shape[1], rows.view(-1))


def columns_from_rows(part: Piece, cut: Cut, rank: int) -> Iterator[Piece]:
    """Yield memory for whole rows; what was read into it is then kept, but for other columns.

    part: the columns of some rows, which are filled
    """
    columns, first, _ = _rows_of(part, cut, rank)
    most = max(1, _EXCHANGED // (cut.shape[1] * part.data.element_size()))
    for at in range(0, len(columns), most):
        into = columns[at : at + most]
        rows = into.new_empty(len(into), cut.shape[1])
        yield Piece(part.name, (first + at) * cut.shape[1], rows.view(-1))
        into.copy_(cut.part(rows, rank))


def _rows_of(part: Piece, cut: Cut, rank: int) -> tuple[Tensor, int, list[int]]:
    """Return the columns (rows, n), the number of their first row, and where shares of rows end."""
    columns = part.data.view(-1, cut.sizes[rank])
    ends = itertools.accumulate(split(len(columns), len(cut.sizes)), initial=0)
    return columns, part.start // cut.sizes[rank], [*ends]


def named_tensors(model: Module) -> dict[str, Tensor]:
    """Return the weights of a checkpoint by their names in its files, a tied tensor once.

    Those are all parameters and persistent buffers; with adapters, only what is trained.
    """
    parameters: dict[str, Tensor] = {**named_parameters(model)}
    return parameters if has_adapters(model) else parameters | persistent_buffers(model)


def named_parameters(model: Module) -> dict[str, Parameter]:
    """Return the parameters among `named_tensors`."""
    named = dict(model.named_parameters())
    if not has_adapters(model):
        return named
    return {
        _in_adapter_file(name): weight for name, weight in named.items() if weight.requires_grad
    }


def has_adapters(model: Module) -> bool:
    """Whether peft has injected adapters into a model: it then keeps their settings in it."""
    return hasattr(model, "peft_config")


def _in_adapter_file(name: str) -> str:
    """Return the name that peft gives a parameter of an adapter in a file.

    There the adapter itself has no name, and the model is that of a wrapper:
    `q_proj.lora_A.default.weight` is `base_model.model.q_proj.lora_A.weight`.
    """
    head, _, last = name.rpartition(".")
    if last == "default":  # trained rows of an embedding
        return f"base_model.model.{head}"
    owner = head.removesuffix(".default").removesuffix(".modules_to_save")
    if owner.endswith(".lora_magnitude_vector"):  # peft keeps the format in which it was no module
        return f"base_model.model.{owner}"
    return f"base_model.model.{owner}.{last}"


def persistent_buffers(model: Module) -> dict[str, Tensor]:
    """Return the buffers that belong in a checkpoint, by name."""
    persistent = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def trained_parameters(model: Module, optimizer: Optimizer) -> dict[str, Parameter]:
    """Return the parameters that the optimizer changes, by name, in the order of the model."""
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: weight for name, weight in named_parameters(model).items() if id(weight) in ids}


def _tensor_spec(name: str, tensor: Tensor) -> TensorSpec:
    """Return the dtype and shape of a weight, as the spec has them."""
    dtype = _NAMES.get(str(tensor.dtype))
    if dtype is None or (tensor.requires_grad and dtype != "F32"):
        expected = "torch.float32" if tensor.requires_grad else "a dtype that a checkpoint holds"
        raise ValueError(f"{name} is {tensor.dtype}, expected {expected}")
    return TensorSpec(dtype, tuple(tensor.shape))


def files(
    kind: str, tensors: Mapping[str, TensorSpec], shard_bytes: int, *, numbered: bool
) -> dict[str, dict[str, TensorSpec]]:
    """Distribute tensors over files in order. Wide dtypes come first, so that all are aligned."""
    parts: list[dict[str, TensorSpec]] = []
    room = 0
    for name in sorted(tensors, key=lambda name: -DTYPES[tensors[name].dtype][0]):
        size = tensor_bytes(tensors[name])
        if not parts or (size > room and parts[-1]):
            parts.append({})
            room = shard_bytes
        parts[-1][name] = tensors[name]
        room -= size
    if len(parts) == 1 and not numbered:
        return {f"{kind}.safetensors": parts[0]}
    total = len(parts)
    return {f"{kind}-{i:05d}-of-{total:05d}.safetensors": part for i, part in enumerate(parts, 1)}
