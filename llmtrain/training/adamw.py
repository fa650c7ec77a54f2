"""AdamW as one call of torch's fused kernel for each group of parameters.

`torch.optim.AdamW` finds out in each step what does not change in a run: whether a parameter has
its state, and which parameters are alike. For a small model that takes longer than the update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
            # It makes the states that are not there.
            self._init_group(group, [], [], [], [], [], [])  # type: ignore[no-untyped-call]  # no stub
        counts = [state["step"] for state in states]
        beta1, beta2 = group["betas"]
        # `create_state` makes the counts of a group elements of one tensor. To add 1 to each of
        # them takes as long as the update of a small model.
        whole = counts[0]._base
        counted = counts if whole is None or len(counts) < whole.numel() else [whole]
        torch._foreach_add_(counted, 1)
        torch._fused_adamw_(
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
            torch._foreach_sub_(counted, [self.found_inf] * len(counted))
