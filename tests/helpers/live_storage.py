"""An oracle of memory: what a computation on fake tensors would hold at its peak.

Every tensor that an operation returns is looked at; its storage counts from then until Python
collects it. Nothing is computed and nothing is allocated, so models of any size fit.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from llmtrain.config.schema import PreferenceConfig
from llmtrain.distributed.engines.engine import trained_loss
from llmtrain.model import attention, shape
from llmtrain.model.loss import Head, LossModule
from llmtrain.pairs import PairTensors


class LiveStorage(TorchDispatchMode):
    """live, peak: bytes of all storages that exist, and the most there have been."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            size = storage.nbytes()
            self._known.add(storage._cdata)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._drop, storage._cdata, size)

    def _drop(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.live -= size


@contextmanager
def live_storage() -> Iterator[LiveStorage]:
    """Count what is made inside, on fake tensors of the CPU."""
    with FakeTensorMode(), LiveStorage() as count:
        yield count


def peak_of_two_steps(
    model_config: Any,
    micro: int,
    seq_len: int,
    arithmetic: str,
    checkpointing: str,
    head: Head | None = None,
    trained: float = 1.0,
    pairs: bool = False,
    frozen: bool = False,
) -> int:
    """The most bytes that two steps of two micro-batches hold on one unwrapped process.

    For models that take our attention. head: of the loss in chunks; None = from logits. trained:
    share of the tokens that have a loss. pairs: whether each row is a pair of answers. frozen:
    whether the head is.
    """
    with live_storage() as count:
        model, optimizer = fake_model(model_config, checkpointing, frozen=frozen)
        more = {"head": head, "trained": trained, "pairs": pairs}
        two_steps(model, optimizer, micro, seq_len, arithmetic, **more)
        return count.peak


def fake_model(
    model_config: Any, checkpointing: str, *, frozen: bool = False
) -> tuple[PreTrainedModel, torch.optim.Optimizer]:
    """As runs make them, but for the weights. Inside a fake mode."""
    AttentionInterface.register(attention.NAME, attention.attention)
    model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32).train()
    model.set_attn_implementation(attention.NAME)
    shape.apply_checkpointing(model, checkpointing)
    if frozen:
        model.get_output_embeddings().requires_grad_(False)
    trained = [one for one in model.parameters() if one.requires_grad]
    return model, torch.optim.AdamW(trained, fused=True)


def two_steps(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    micro: int,
    seq_len: int,
    arithmetic: str,
    before_forward: Callable[[], None] = lambda: None,
    head: Head | None = None,
    trained: float = 1.0,
    pairs: bool = False,
) -> None:
    """`TorchEngine`'s loop by hand: gradients add up, are measured, scaled down and applied."""
    asked = PreferenceConfig(loss="dpo") if pairs else None
    module = LossModule(model, head, preference=asked)
    parameters = [one for one in model.parameters() if one.requires_grad]
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=arithmetic == "autocast")
    for _ in range(2):
        for _ in range(2):
            ids = torch.zeros((micro, seq_len), dtype=torch.int64)
            before_forward()
            known: dict[str, Any] = {"all_trained": True}
            if trained < 1:
                known = {"trained": torch.arange(int(trained * ids.numel()))}
            if pairs:
                known["pairs"] = _pairs(micro, int(trained * seq_len))
            with autocast:
                loss = module(ids, ids, **known)
            (trained_loss(loss) * torch.ones(())).backward()
        gradients = [p.grad for p in parameters]
        norm = torch.stack(torch._foreach_norm(gradients, 2, torch.float64)).square().sum()
        torch._foreach_mul_(gradients, (1 / norm.sqrt()).clamp(max=1.0).float())
        del gradients
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _pairs(rows: int, length: int) -> PairTensors:
    """A pair a row, whose answers have a half of the trained tokens each."""
    half = length // 2
    lengths = torch.full((2 * rows,), half, dtype=torch.int64)
    sizes = torch.full((rows, 2), float(half), dtype=torch.float64)
    return PairTensors(lengths, sizes, torch.zeros_like(sizes))
