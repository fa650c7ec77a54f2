"""Muon: the momentum of each matrix is made orthogonal, and that is its update.

The algorithm, its settings and its state are those of `torch.optim.Muon`. Two things differ. On a
CPU the products of the orthogonalization are made in fp32, since a CPU without instructions for
bf16 multiplies 70 times more slowly in it. And a sharded matrix may have fewer rows than there are
ranks.

Method: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; size of an update: Liu et al.
2025, arXiv:2502.16982.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter


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
