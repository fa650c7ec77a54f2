"""What `update` asks of a run, without the rest of one."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from llmtrain.distributed.engines.accelerator import Launched
from llmtrain.model.attention import backend
from llmtrain.model.loss import Head, LossModule, examine
from llmtrain.types import Flags, StepVector


def with_loss(bare: Any, whole: Any = None) -> LossModule:
    """The module that a run trains. whole: the model with its weights, if `bare` is on meta."""
    model = bare if whole is None else whole
    found = examine(model) if isinstance(model, PreTrainedModel) else ""
    return LossModule(bare, found if isinstance(found, Head) else None)


def run_of(
    launched: Launched,
    prepared: nn.Module,
    bare: nn.Module,
    send: Callable[[StepVector, Tensor], object],
    *,
    micro_batch_size: int,
    seq_len: int,
    max_grad_norm: float | None = 1.0,
    same_bits: bool = False,
) -> Any:
    """send: hears the summed vector and the norm of each update."""
    training = SimpleNamespace(same_bits=same_bits)
    manifest = SimpleNamespace(always_full=False, labels=("all",), packing="bestfit")
    return SimpleNamespace(
        ranks=launched.ranks,
        layout=launched.layout,
        device=launched.device,
        engine=launched.engine,
        model=prepared,
        config=SimpleNamespace(
            data=SimpleNamespace(seq_len=seq_len), training=training, run=SimpleNamespace(seed=0)
        ),
        data=SimpleNamespace(manifest=manifest, answers=None, reference=None),
        built=SimpleNamespace(
            model=bare,
            loss=next(part for part in prepared.modules() if isinstance(part, LossModule)),
            micro_batch_size=micro_batch_size,
            compiled="off",
            hiding=backend(bare) if isinstance(bare, PreTrainedModel) else None,
        ),
        max_grad_norm=max_grad_norm,
        feed=SimpleNamespace(error=None),
        step=0,
        signals=SimpleNamespace(reason=None),
        requests=SimpleNamespace(flags=lambda reason, look=True: Flags()),
        due=SimpleNamespace(anything=lambda step: False),
        meter=SimpleNamespace(send=send),
        checkpoints=SimpleNamespace(wait_snapshot=lambda: None, flags=dict),
    )
