"""Tensor parallelism: the processes of a group share each matrix of a model.

A matrix is cut by its rows or by its columns, as the model's own plan says, so that a block needs
two sums over the group forwards and two backwards (Shoeybi et al. 2019, Megatron-LM, §3):

    colwise    x ─── f ─── x·Wᵗ, some of the outputs           W by rows
    rowwise    some of the inputs ─── x·Wᵗ ─── g ─── sum       W by columns
    embedding  ids ─── rows that are here, else 0 ─── g        W by rows

f does nothing forwards and sums gradients backwards; g sums forwards and does nothing backwards.
Each process has its part as an ordinary parameter. So DDP, FSDP2, optimizers and checkpoints over
the data ranks need not know of it. Parameters that are not cut are equal on all processes, since
their gradients are.
"""

import copy
import fnmatch
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from llmtrain.errors import Problem
from llmtrain.model.cross_entropy import VocabularyPart
from llmtrain.model.loss import LossModule
from llmtrain.types import Cut, split

KEY = "distributed.tensor_parallel"
_LEAST_CUT = 0.5  # of the weights of the blocks: below it each process computes most of the model
_Group = dist.ProcessGroup | None  # None: nothing is exchanged, as of a model on paper
_Function = Callable[[Tensor], Tensor]


def refusals(model: PreTrainedModel, size: int) -> Iterator[Problem]:
    """Yield why a model cannot be cut over `size` processes.

    model: may be on the meta device
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    styles = styles_of(model)
    if not styles:
        expected = f"1: transformers has no plan for {name}"
        yield Problem(KEY, size, expected, "distributed.pipeline_parallel, or fsdp2")
        return
    if unknown := sorted(set(styles.values()) - _STYLES.keys()):
        expected = f"1: the plan of {name} cuts by {', '.join(unknown)}, which is not offered"
        yield Problem(KEY, size, expected, "distributed.strategy=fsdp2 without it")
        return
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    of_blocks = [module for module in model.modules() if type(module).__name__ in kinds]
    inside = {id(one): one.numel() for block in of_blocks for one in block.parameters()}
    share = sum(inside.get(key, 0) for key in axes_of(model)) / max(1, sum(inside.values()))
    if share < _LEAST_CUT:
        expected = f"1: the plan of {name} cuts {share:.0%} of the weights of its blocks"
        yield Problem(KEY, size, expected, "distributed.strategy=fsdp2 without it")
        return
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if "rowwise" in styles.values() and (heads % size or config.num_attention_heads % size):
        most = max(n for n in range(1, size + 1) if not heads % n)
        expected = f"a divisor of the model's {heads} key and value heads"
        yield Problem(KEY, size, expected, f"{KEY}={most}")
    for key, value in config.to_dict().items():
        applied = "drop" in key and "classifier" not in key
        if applied and isinstance(value, int | float) and value > 0:
            remedy = f"model.config.{key}=0.0"
            why = "processes would draw the same numbers for other heads"
            yield Problem(f"model.config.{key}", value, f"0.0 with {KEY} = {size}: {why}", remedy)
    for path, style in styles.items():
        module = model.get_submodule(path)
        if style in _LINEAR and type(module) is not nn.Linear:
            expected = f"1: {path} is no linear layer but {type(module).__name__}"
            yield Problem(KEY, size, expected)
        elif style in ("colwise", "rowwise"):
            count = module.weight.shape[1 if style == "rowwise" else 0]
            if count % size:
                what = "inputs" if style == "rowwise" else "outputs"
                expected = f"a divisor of the {count} {what} of {path}"
                yield Problem(KEY, size, expected, f"{KEY}=1")
                return  # other blocks have the same


def cut_model(module: LossModule, group: dist.ProcessGroup) -> dict[str, Cut]:
    """Keep this process's part of a model, in place, and make its modules exchange what they need.

    module: its head's products are then whole, and its loss is computed by all of the group
    group: the processes that share the model, in the order of their parts

    Returns how each parameter is cut, by its name; those that are whole are left out. The
    optimizer has the old parameters then.
    """
    model = module.model
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    place = (dist.get_rank(group), dist.get_world_size(group))
    cutter, head = _Cutter(group, *place), model.get_output_embeddings()
    at_head = names[id(head.weight)][0]
    for path, style in styles_of(model).items():
        _STYLES[style](cutter, model.get_submodule(path), path)
    for first, *others in names.values():  # a tied weight was cut once for each of its names
        for other in others:
            owner, _, leaf = other.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(first))
            cutter.cuts.pop(other, None)
    if (cut := cutter.cuts.get(at_head)) is not None:
        part = VocabularyPart(group, cut.first(cutter.rank))
        module.share_vocabulary(part, cutter.copied)
    return cutter.cuts


def cut_on_paper(model: PreTrainedModel, size: int) -> dict[str, Cut]:
    """Keep the last process's part of a model without weights, in place, for a count of its memory.

    Its modules do what those of `cut_model` do, but exchange nothing. The head is cut, too.
    """
    cutter = _Cutter(None, size - 1, size)
    for path, style in styles_of(model).items():
        _STYLES[style](cutter, model.get_submodule(path), path)
    return cutter.cuts


def axes_of(model: PreTrainedModel) -> dict[int, int]:
    """Return the axis of each parameter that the model's plan cuts, by its id.

    Empty for a model that is not cut, of which `refusals` says why.
    """
    styles = styles_of(model)
    if not set(styles.values()) <= _STYLES.keys():
        return {}
    return {
        id(parameter): axis
        for path, style in styles.items()
        for leaf, axis in _AXES.get(style, {}).items()
        if (parameter := getattr(model.get_submodule(path), leaf, None)) is not None
    }


def styles_of(model: PreTrainedModel) -> dict[str, str]:
    """Return how each module that the model's plan names is cut, by its path."""
    return {
        path: style
        for path, _ in model.named_modules()
        for pattern, style in (model.tp_plan or {}).items()
        if fnmatch.fnmatchcase(path, pattern)
    }


class _Cutter:
    """What the modules of one model share: the group, and the last tensor that f was applied to.

    rank, size: of this process in the group, and of the group
    """

    def __init__(self, group: _Group, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.cuts: dict[str, Cut] = {}
        self.last: tuple[Tensor, Tensor] | None = None  # x and f(x), until the backward of f

    def copied(self, x: Tensor) -> Tensor:
        """Return f(x), once for modules that get the same tensor, as q, k and v do.

        Their gradients are then added up before they are summed over the group.
        """
        if not torch.is_grad_enabled():
            return x
        if self.last is None or self.last[0] is not x:
            self.last = x, self.copy(x)
        return self.last[1]

    def copy(self, x: Tensor) -> Tensor:
        """Return f(x)."""

        def back(gradient: Tensor) -> Tensor:
            self.last = None
            return _sum(gradient, self.group)

        return _applied(x, lambda x: x.view_as(x), back)

    def keep(self, module: nn.Module, path: str, leaf: str, axis: int) -> Cut:
        """Replace a parameter by this process's part of it."""
        whole = getattr(module, leaf)
        cut = Cut(axis, split(whole.shape[axis], self.size), tuple(whole.shape))
        part = cut.part(whole.detach(), self.rank).clone(memory_format=torch.contiguous_format)
        setattr(module, leaf, nn.Parameter(part, requires_grad=whole.requires_grad))
        self.cuts[f"{path}.{leaf}"] = cut
        return cut


class _ThereAndBack(torch.autograd.Function):
    """A function whose gradient is another function of that of its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Function, back: _Function) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _applied(x: Tensor, there: _Function, back: _Function) -> Tensor:
    result: Tensor = _ThereAndBack.apply(x, there, back)  # type: ignore[no-untyped-call]  # torch has no stub for it
    return result


def add_up(x: Tensor, group: _Group) -> Tensor:
    """Return g(x), the sum of `x` over a group; it may be in the place of `x`."""
    return _applied(x, partial(_sum, group=group), lambda gradient: gradient)


def _sum(x: Tensor, group: _Group) -> Tensor:
    x = x.contiguous()
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def _gather(x: Tensor, group: _Group, sizes: tuple[int, ...]) -> Tensor:
    """Return the last axis of all processes."""
    # A collective has parts of one size, and the largest is at most 1 larger than the others.
    padded = F.pad(x, (0, max(sizes) - x.shape[-1])).contiguous()
    parts = [torch.empty_like(padded) for _ in sizes]
    if group is not None:
        dist.all_gather(parts, padded, group=group)
    return torch.cat([part[..., :n] for part, n in zip(parts, sizes, strict=True)], -1)


def _own_part(x: Tensor, group: _Group, sizes: tuple[int, ...]) -> Tensor:
    """Return this process's part of the last axis."""
    rank = len(sizes) - 1 if group is None else dist.get_rank(group)
    return x.narrow(-1, sum(sizes[:rank]), sizes[rank]).contiguous()


def colwise(cutter: _Cutter, module: Any, path: str) -> None:
    """Give each process some of the outputs."""
    _keep_outputs(cutter, module, path)
    plain = module.forward
    module.forward = lambda x: plain(cutter.copied(x))


def colwise_gather_output(cutter: _Cutter, module: Any, path: str) -> None:
    """The products are whole, as of a head, or where q and k have a norm over all heads."""
    cut = _keep_outputs(cutter, module, path)
    plain = module.forward
    how: dict[str, Any] = {"group": cutter.group, "sizes": cut.sizes}
    gather, part = partial(_gather, **how), partial(_own_part, **how)
    module.forward = lambda x: _applied(plain(cutter.copied(x)), gather, part)


def _keep_outputs(cutter: _Cutter, module: Any, path: str) -> Cut:
    """Keep some of the outputs of a linear layer."""
    cut = cutter.keep(module, path, "weight", 0)
    if module.bias is not None:
        cutter.keep(module, path, "bias", 0)
    module.out_features = cut.sizes[cutter.rank]
    return cut


def rowwise(cutter: _Cutter, module: Any, path: str) -> None:
    """Give each process some of the inputs; the products are summed."""
    cut = cutter.keep(module, path, "weight", 1)
    module.in_features = cut.sizes[cutter.rank]

    def forward(x: Tensor) -> Tensor:
        # A copy is summed: selective checkpointing keeps the product, and sums it again.
        products = add_up(F.linear(x, module.weight).clone(), cutter.group)
        return products if module.bias is None else products + module.bias  # once, not on each

    module.forward = forward


def rowwise_split_input(cutter: _Cutter, module: Any, path: str) -> None:
    """As rowwise, of an input that all processes have whole."""
    rowwise(cutter, module, path)
    plain, sizes = module.forward, cutter.cuts[f"{path}.weight"].sizes
    how: dict[str, Any] = {"group": cutter.group, "sizes": sizes}
    gather, part = partial(_gather, **how), partial(_own_part, **how)
    module.forward = lambda x: plain(_applied(x, part, gather))


def embedding_rowwise(cutter: _Cutter, module: Any, path: str) -> None:
    """Give each process some of the rows."""
    cut = cutter.keep(module, path, "weight", 0)
    first, count, plain = cut.first(cutter.rank), cut.sizes[cutter.rank], module.forward
    if module.padding_idx is not None:
        # It has no gradient, and moves with the rows: else another row would have none.
        here = 0 <= module.padding_idx - first < count
        module.padding_idx = module.padding_idx - first if here else None

    def forward(ids: Tensor) -> Tensor:
        here = (ids >= first) & (ids < first + count)
        rows = plain(torch.where(here, ids - first, 0)) * here.unsqueeze(-1)
        return add_up(rows, cutter.group)

    module.forward = forward


def replicated_with_grad_allreduce(cutter: _Cutter, module: Any, _path: str) -> None:
    """A norm of queries or keys, of which each process has some heads: its gradients are summed.

    Its parameter stays whole. The sum is part of the graph, so it is right after any number of
    micro-batches, as an all-reduce of the accumulated gradient would not be.
    """
    plain = copy.copy(module)  # with the same parameters, also once they are sharded

    def forward(x: Tensor) -> Tensor:
        parameters = {name: cutter.copy(one) for name, one in plain.named_parameters(recurse=False)}
        result: Tensor = torch.func.functional_call(plain, parameters, (x,))
        return result

    module.forward = forward


# The parameters of a module that each style cuts, and along which axis.
_OUTPUTS, _INPUTS = {"weight": 0, "bias": 0}, {"weight": 1}
_LINEAR = {
    "colwise": _OUTPUTS,
    "colwise_gather_output": _OUTPUTS,
    "rowwise": _INPUTS,
    "rowwise_split_input": _INPUTS,
}
_AXES = {**_LINEAR, "embedding_rowwise": {"weight": 0}}
_STYLES: dict[str, Callable[[_Cutter, Any, str], None]] = {
    "colwise": colwise,
    "colwise_gather_output": colwise_gather_output,
    "rowwise": rowwise,
    "rowwise_split_input": rowwise_split_input,
    "embedding_rowwise": embedding_rowwise,
    "replicated_with_grad_allreduce": replicated_with_grad_allreduce,
    "replicate": lambda _cutter, _module, _path: None,
}
