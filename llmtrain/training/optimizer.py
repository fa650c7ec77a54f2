"""The optimizer of a run: what updates each parameter, at which learning rate, with which decay.

    adamw        AdamW for all parameters
    muon         Muon for the matrices inside of the model, AdamW for all others
    adamw_8bit   AdamW of bitsandbytes, which keeps its moments in 8 bits

Each group of the optimizer has an entry `algorithm`. It says which tensors the optimizer keeps for
a parameter of the group: see `distributed/plan/memory.py`. The schedule of the learning rate
(cosine, linear, constant or wsd: `learning_rate_factor`) is a pure function of the step, so that a
checkpoint need not store it.

AdamW is one call of torch's fused kernel for each group. `torch.optim.AdamW` finds out in each step
what does not change in a run: whether a parameter has its state, and which parameters are alike.
For a small model that takes longer than the update.

Muon makes the momentum of each matrix orthogonal, and that is its update. Algorithm, settings and
state are those of `torch.optim.Muon`. Two things differ. On a CPU the products are made in fp32,
since a CPU without instructions for bf16 multiplies 70 times more slowly in it. And a sharded
matrix may have fewer rows than there are ranks. Method: Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon; size of an update: Liu et al. 2025, arXiv:2502.16982.
"""

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter

from llmtrain.config.schema import GroupConfig, OptimizerConfig
from llmtrain.distributed.plan.memory import missing_package
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.model.trainable import no_match
from llmtrain.torch_private import add_to_each, fused_adamw, make_states
from llmtrain.types import Algorithm


class FusedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with `fused=True`, with the same bits.

    Its parameters have one device and one dtype. As in torch's, `grad_scale` divides the gradients,
    and `found_inf` at 1 forbids the update.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # it takes no closure
        """Update all parameters that have gradients."""
        for group in self.param_groups:
            parameters: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(parameters, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        if not all(states):
            make_states(self, group)
        counts = [state["step"] for state in states]
        beta1, beta2 = group["betas"]
        # `create_state` makes the counts of a group elements of one tensor. To add 1 to each of
        # them takes as long as the update of a small model.
        whole = counts[0]._base
        counted = counts if whole is None or len(counts) < whole.numel() else [whole]
        add_to_each(counted, 1)
        fused_adamw(
            parameters,
            [grad for parameter in parameters if (grad := parameter.grad) is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            counts,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )
        if self.found_inf is not None:
            add_to_each(counted, [self.found_inf] * len(counted), alpha=-1)


class Muon(torch.optim.Muon):
    """Muon whose updates have the size of AdamW's. Its parameters are matrices."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # it takes no closure
        """Update all matrices that have gradients. Collective where matrices are sharded."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        direction = orthogonalize(gradient.lerp(momentum, group["momentum"]), group)
        size = 0.2 * math.sqrt(max(parameter.shape))  # of AdamW's update: its root mean square
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"] * size)


def orthogonalize(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the matrix with its singular values moved to between 0.7 and 1.2.

    matrix: (m, n), or a DTensor of it, and so is the result; fp32 on a CPU, else bf16
    group: `eps`, `ns_steps` and `ns_coefficients`, as `torch.optim.Muon` names them
    """
    if isinstance(matrix, DTensor) and matrix.shape[0] < matrix.device_mesh.size():
        # torch 2.13 cannot multiply it: the product is whole, and some ranks have no row. It is
        # small: every rank makes the whole result and keeps its rows.
        whole = orthogonalize(matrix.full_tensor(), group)
        return distribute_tensor(whole, matrix.device_mesh, matrix.placements, src_data_rank=None)
    tall = matrix.shape[0] > matrix.shape[1]
    result = matrix.to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16)
    result = result.T if tall else result
    result = result / result.norm().clamp(min=group["eps"])
    first, third, fifth = group["ns_coefficients"]  # of the polynomial's odd powers
    for _ in range(group["ns_steps"]):
        square = result @ result.T
        factor = torch.addmm(square, square, square, beta=third, alpha=fifth)
        result = torch.addmm(result, factor, result, beta=first)
    return result.T if tall else result


# Parts of the names that peft gives to parameters. Rows of new tokens are part of an embedding; B
# starts at zero, and a magnitude is a length: to decay them is to undo the adapter.
_TOKEN_ROWS = "trainable_tokens_delta"
_NEVER_DECAYED = (_TOKEN_ROWS, "lora_B", "lora_magnitude_vector")
_DEFAULT = -1  # in place of the number of an entry of `optimizer.groups`


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, *, fused: bool = True
) -> torch.optim.Optimizer:
    """Make the optimizer for the trainable parameters of a bare model. It has no state yet.

    fused: whether to use torch's fused kernel. On a CPU it rounds the end of a tensor in another
        way than the rest, and shards have other ends; without it each element is updated alike.

    Raises UserError as `arrange` does, and if a package is missing.
    """
    groups = arrange(model, config)
    match config.name:
        case "adamw":
            return _adamw(groups, config.betas, fused=fused)
        case "muon":
            return MuonAndAdamW(groups, config.betas, fused=fused)
        case "adamw_8bit":
            raise_any(missing_package(config.name))
            from bitsandbytes.optim import AdamW8bit

            eight_bit: torch.optim.Optimizer = AdamW8bit(groups, betas=config.betas)
            return eight_bit
        case _:
            assert_never(config.name)


def _adamw(
    groups: list[dict[str, Any]], betas: tuple[float, float], *, fused: bool
) -> torch.optim.AdamW:
    if fused:
        return FusedAdamW(groups, betas=betas, fused=True)
    return torch.optim.AdamW(groups, betas=betas, foreach=True)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the groups whose `algorithm` is muon, and AdamW for the others, as one optimizer.

    An update of Muon has the size of one of AdamW, so that one learning rate serves both. The
    groups and the state are those of this optimizer, and each step hands them to both: accelerate
    replaces the groups.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], betas: tuple[float, float], *, fused: bool
    ) -> None:
        kinds: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
            "muon": Muon,
            "adamw": lambda members: _adamw(members, betas, fused=fused),
        }
        members = {name: [one for one in groups if one["algorithm"] == name] for name in kinds}
        self._parts = {name: make(members[name]) for name, make in kinds.items() if members[name]}
        # Their groups have all values that an update needs.
        super().__init__([one for part in self._parts.values() for one in part.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # it takes no closure
        """Update all parameters that have gradients."""
        for name, part in self._parts.items():
            part.param_groups = [one for one in self.param_groups if one["algorithm"] == name]
            part.state = self.state
            part.step()


def algorithms(config: OptimizerConfig, model: nn.Module) -> dict[int, Algorithm]:
    """Return what updates each trainable parameter, by the parameter's id. Raises as `arrange`."""
    groups = arrange(model, config)
    return {id(parameter): one["algorithm"] for one in groups for parameter in one["params"]}


def arrange(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Divide the trainable parameters into the groups of an optimizer.

    Each is in one, and a tied one counts once.

    A parameter belongs to the first entry of `optimizer.groups` that matches one of its names. What
    that entry leaves open is as for all others: parameters with fewer than two dimensions (norms,
    biases) are not decayed, nor are embeddings, even if the head is tied to them, nor what
    `_NEVER_DECAYED` names.

    model: the bare model, before it is split; it may be on meta.

    Raises UserError for an entry that no parameter belongs to, and for Muon without a matrix.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    entries = _entries([names[id(parameter)] for parameter in trained], config.groups)
    embeddings, matrices = _embeddings(model), _hidden_matrices(model)
    members: dict[tuple[int, Algorithm, bool], list[Parameter]] = {}
    for parameter, entry in zip(trained, entries, strict=True):
        algorithm = config.name
        if algorithm == "muon" and id(parameter) not in matrices:
            algorithm = "adamw"
        decays = parameter.ndim >= 2 and id(parameter) not in embeddings
        decays = decays and not any(part in names[id(parameter)][0] for part in _NEVER_DECAYED)
        members.setdefault((entry, algorithm, not decays), []).append(parameter)
    if config.name == "muon" and not any(algorithm == "muon" for _, algorithm, _ in members):
        expected = "adamw for a model whose trainable parameters include no matrix inside of it"
        raise UserError(Problem("optimizer.name", "muon", expected, "optimizer.name=adamw"))
    groups = []
    for entry, algorithm, undecayed in sorted(members):  # the decayed ones first
        rate, decay = config.learning_rate, 0.0 if undecayed else config.weight_decay
        if entry != _DEFAULT:
            asked = config.groups[entry]
            rate = rate if asked.learning_rate is None else asked.learning_rate
            decay = decay if asked.weight_decay is None else asked.weight_decay
        group = {"params": members[entry, algorithm, undecayed], "lr": rate, "weight_decay": decay}
        groups.append(group | {"algorithm": algorithm})
    return groups


def _entries(named: Sequence[Sequence[str]], groups: Sequence[GroupConfig]) -> list[int]:
    """Return the number of the entry that each parameter belongs to, or `_DEFAULT`.

    named: the names of each parameter
    """
    entries = [
        next((number for number, one in enumerate(groups) if _matches(names, one.match)), _DEFAULT)
        for names in named
    ]
    problems = []
    for number, one in enumerate(groups):
        key = f"optimizer.groups.{number}.match"
        if number in entries:
            continue
        if any(_matches(names, one.match) for names in named):
            expected = "a pattern with a parameter that no earlier entry matches"
            problems.append(Problem(key, one.match, expected, "put the narrower pattern first"))
        else:
            problems.append(no_match(key, one.match, [name for names in named for name in names]))
    raise_any(problems)
    return entries


def _matches(names: Sequence[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _embeddings(model: nn.Module) -> set[int]:
    """Return the ids of the embeddings' weights."""
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}


def _hidden_matrices(model: nn.Module) -> set[int]:
    """Return the ids of the matrices between embedding and head.

    One with a single row or column is a vector, on which Muon also fails if it is sharded.
    """
    from transformers import PreTrainedModel

    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    outside = _embeddings(model) | ({id(head.weight)} if head is not None else set())
    return {
        id(parameter)
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and min(parameter.shape) > 1
        if id(parameter) not in outside and _TOKEN_ROWS not in name
    }


_DECAY_SHARE = 0.2  # the part of all steps in which warmup-stable-decay decays


def learning_rate_factor(config: OptimizerConfig, steps: int, step: int) -> float:
    """Return the factor on each group's learning rate at `step` = 1 … `steps`: 0 to 1."""
    warmup = warmup_steps(config, steps)
    if step <= warmup:
        return step / warmup
    floor = config.min_lr_ratio
    done = (step - warmup) / (steps - warmup)
    match config.schedule:
        case "cosine":
            return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2
        case "linear":
            return 1 - (1 - floor) * done
        case "constant":
            return 1.0
        case "wsd":
            decay = decay_steps(config, steps)
            return 1 - (1 - floor) * max(0, step - steps + decay) / decay
        case _:
            assert_never(config.schedule)


def learning_rate(config: OptimizerConfig, steps: int, step: int) -> float:
    """Return the learning rate at `step` of `steps`."""
    return config.learning_rate * learning_rate_factor(config, steps, step)


def warmup_steps(config: OptimizerConfig, steps: int) -> int:
    """Return the warm-up in steps: `optimizer.warmup_steps` below 1 is a share of `steps`."""
    asked = config.warmup_steps
    whole = int(asked) if asked >= 1 else max(1, round(asked * steps))
    return min(whole, steps)


def decay_steps(config: OptimizerConfig, steps: int) -> int:
    """Return the last steps, in which warmup-stable-decay decays."""
    return min(steps - warmup_steps(config, steps), max(1, round(_DECAY_SHARE * steps)))
