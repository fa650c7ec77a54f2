"""The learning rate as a pure function of the step, so that a checkpoint need not store it."""

from __future__ import annotations

import math
from typing import assert_never

from llmtrain.config.schema import OptimizerConfig

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
            decay = min(steps - warmup, max(1, round(_DECAY_SHARE * steps)))
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
