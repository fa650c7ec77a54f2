"""Bytes that a real forward, on real tensors, keeps for its backward: what autograd says it saves.

Independent of the product's count, which looks at fake storages that stay alive.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, PreTrainedModel

from llmtrain.config.schema import AdapterConfig
from llmtrain.model import attention, shape, trainable


class WeightCopies(TorchDispatchMode):
    """Addresses of what `_to_copy` made of a parameter."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self.weights, self.found = weights, set()
        self._held: list[Tensor] = []  # so that no address comes twice

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and address(args[0]) in self.weights:
            self.found.add(address(result))
            self._held.append(result)
        return result


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def real_model(config: Any, arithmetic: str, seq_len: int) -> PreTrainedModel:
    """As runs have it: our attention where the model can have it, parameters in bf16 for `bf16`."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    name = attention.install(model, seq_len)
    if arithmetic == "bf16":
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.set_attn_implementation(name)
    return model.train()


def saved_bytes(
    config: Any,
    ids: Tensor,
    arithmetic: str,
    checkpointing: str,
    patterns: tuple[str, ...] = (),
    adapter: AdapterConfig | None = None,
) -> tuple[int, int]:
    """What the decoder without its head keeps, and bf16 copies of weights among it.

    Of blocks that are computed again, what they are given counts: a checkpoint holds it.
    """
    model = real_model(config, arithmetic if adapter is None else "fp32", ids.shape[1])
    trainable.freeze(model, patterns)
    if adapter is not None:
        dtype = torch.float32 if arithmetic == "fp32" else torch.bfloat16
        trainable.attach(model, adapter, dtype=dtype)
        trainable.hold_base(model, dtype, trained=arithmetic == "bf16")
    shape.apply_checkpointing(model, checkpointing)
    return kept_by(model, ids, arithmetic, checkpointing)


def kept_by(
    model: PreTrainedModel, ids: Tensor, arithmetic: str, checkpointing: str = "none"
) -> tuple[int, int]:
    """The same of a model as it is."""
    weights = {address(one) for one in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}
    held = []

    def keep(tensor: Tensor) -> Tensor:
        if address(tensor) not in weights:
            kept[address(tensor)] = tensor.untyped_storage().nbytes()
            held.append(tensor)
        return tensor

    def keep_inputs(_module: Any, args: Any, keywords: Any) -> None:
        for leaf in tree_iter((args, keywords)):
            if isinstance(leaf, Tensor):
                keep(leaf)

    if checkpointing == "full":
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False) and module is not model.base_model:
                module.register_forward_pre_hook(keep_inputs, with_kwargs=True)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=arithmetic == "autocast")
    copies = WeightCopies(weights)
    with copies, saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        model.base_model(ids, **attention.model_keywords())
    cast = sum(size for key, size in kept.items() if key in copies.found)
    return sum(kept.values()) - cast, cast
