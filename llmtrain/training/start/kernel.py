"""Which kernel computes the loss. It is chosen once and frozen for the run.

A run that was begun before there was a choice continues from logits.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.nn import functional as F

from llmtrain.config.schema import TrainingConfig
from llmtrain.errors import Problem, UserError
from llmtrain.model.head import Head
from llmtrain.rundir.auto import Auto

KEY = "training.loss_kernel"
FROZEN = "loss_kernel"  # in `auto.json`

_log = logging.getLogger(__name__)

# Relative differences from float64 within which a kernel's loss is right.
_WITHIN = {"fp32": 1e-5, "bf16": 1e-4}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def asked_kernel(training: TrainingConfig, run_dir: Path | None) -> str:
    """Return the kernel that is asked for, or that the run began with: auto if it is open.

    run_dir: None = no run has begun.
    """
    frozen = {} if run_dir is None else Auto(run_dir, "").run
    if training.loss_kernel != "auto":
        return training.loss_kernel
    name: str = frozen.get(FROZEN, "logits" if "precision" in frozen else "auto")
    return name


def choose_kernel(
    asked: str, found: Head | str, precision: str, z_loss: float
) -> tuple[str, Head | None]:
    """Return the kernel, and the head that it computes the loss of; None for logits.

    found: what `examine` returns for the model

    Raises UserError for a kernel that cannot compute this model's loss.
    """
    if asked == "logits":
        return "logits", None
    if isinstance(found, str):
        if asked != "auto":
            expected = f"logits or auto: the loss of this model needs its logits, as {found}"
            raise UserError(Problem(KEY, asked, expected))
        _log.info("loss: from the model's logits, as %s", found)
        return "logits", None
    if asked == "torch" and (reason := _why_not_torch(found, precision, z_loss)):
        raise UserError(Problem(KEY, asked, f"chunked, logits or auto: {reason}"))
    return "chunked" if asked == "auto" else asked, found


def _why_not_torch(head: Head, precision: str, z_loss: float) -> str:
    """Return why torch's kernel cannot compute the loss; "" if it can."""
    if head != Head() or z_loss:
        return "torch's kernel has no scale, cap or z-loss"
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(size, generator=generator).to(_DTYPES[precision])
        for size in ((64, 32), (97, 32))
    )
    labels = torch.arange(64)
    exact = F.cross_entropy(F.linear(hidden.double(), weight.double()), labels, reduction="sum")
    found = F.linear_cross_entropy(hidden, weight, labels, reduction="sum")
    wrong = abs(float(found) / float(exact) - 1)
    if wrong <= _WITHIN[precision]:
        return ""
    return f"in {precision} torch's kernel is wrong by {wrong:.0e} of the loss"
