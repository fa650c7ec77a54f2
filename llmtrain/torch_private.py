"""Everything that torch does not promise to keep and llmtrain uses all the same.

No other module has a private name of torch. `tests/unit/test_torch_private.py` has a test for each
of them, whose name says what breaks without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.attention.varlen  # registers torch.ops.torch_attn

# Tensors without memory, whose forward is counted; and real tensors within such a forward.
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

# A look at each operation that a forward makes; and a function without any of them.
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["FakeTensorMode", "TorchDispatchMode", "unset_fake_temporarily"]

# One call for many tensors, as torch's own optimizers make them.
add_to_each = torch._foreach_add_
multiply_each = torch._foreach_mul_
norm_of_each = torch._foreach_norm
fused_adamw = torch._fused_adamw_
flattened = torch._C._nn.flatten_dense_tensors

GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default  # experts of a mixture
CAST = torch.ops.aten._to_copy.default
# What selective activation checkpointing keeps besides products.
ATTENTIONS = [
    torch.ops.torch_attn._varlen_attn.default,  # attention of documents
    *(
        getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
        for kernel in (
            "flash_attention",
            "flash_attention_for_cpu",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
        )
    ),
]


def without_modes(function: Any) -> Any:
    """Return the function as it is where no dispatch mode is active."""
    return _disable_current_modes()(function)


def fsdp_groups(module: FSDPModule) -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers together for a module."""
    groups: list[Any] = module._get_fsdp_state()._fsdp_param_groups
    return groups


def make_states(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Make the states that the parameters of a group of AdamW do not have yet."""
    optimizer._init_group(group, [], [], [], [], [], [])  # type: ignore[attr-defined]


def build_directory(extension: str) -> Path:
    """Return where torch builds an extension. It depends on the versions of Python and torch."""
    # Here, because it logs a warning where there is a CUDA toolkit and no GPU.
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(extension, verbose=False))
