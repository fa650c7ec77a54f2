"""Check the memory plan of a run, on this machine or on all machines of the launch file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.checkpoint.disk_space import size
from llmtrain.tools.doctor.case import Case, Verdict, error, ok, warning

if TYPE_CHECKING:
    from llmtrain.config.schema import Config


def plan(case: Case) -> Verdict:
    """Check whether the run fits, and report its strategy, micro-batch and memory.

    Raises UserError for a config that cannot be planned.
    """
    from llmtrain.tools.plan import plan as make_plan

    local = case.processes // case.machines if case.launch else None
    found = make_plan(_as_launched(case), local, case.machines)
    if found.chosen is None:
        near = found.choice.nearest_miss
        remedy = near.remedy if near else "llmtrain plan CONFIG tells more"
        return error(found.choice.reason, remedy)
    if found.uncounted:
        remedy = "watch the first step; training.micro_batch_size=1 if memory runs out"
        return warning(f"{found.choice.reason}; {found.chosen.layout.strategy} is taken", remedy)
    layout, hardware = found.chosen.layout, found.hardware
    kind = "process" if hardware.cpu else "device"
    count = f"{hardware.devices} {kind}{'es' * hardware.cpu if hardware.devices > 1 else ''}"
    return ok(
        f"{layout.strategy} on {count}, micro-batch {layout.micro_batch_size} × "
        f"{layout.accumulation}, activation checkpointing {layout.activation_checkpointing}: "
        f"{size(found.chosen.memory.total_bytes)} of {size(hardware.device_bytes)} each; "
        f"{size(found.disk_bytes)} of checkpoints at most"
    )


def _as_launched(case: Case) -> Config:
    """Return the config; where its strategy is `auto`, with the one of the launch file, if any."""
    assert case.config is not None
    if not case.strategy or case.config.distributed.strategy != "auto":
        return case.config
    changed = case.config.distributed.model_copy(update={"strategy": case.strategy})
    return case.config.model_copy(update={"distributed": changed})
