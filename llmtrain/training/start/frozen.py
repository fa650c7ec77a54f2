"""What a run chooses once and keeps: its base, adapters, the loss's kernel, attention, compilation.

    set in the config ─► else as an earlier start froze it in `auto.json` ─► else chosen now

A base, which `model.from` names, is looked up and pinned by rank 0 at the first start, before the
plan, so that a later start, the tokenizer and every rank read the same:

    a run            its best checkpoint, else its newest    by the digest of its manifest
    a directory      as it is                                by names, sizes, edges of weight files
    a Hub id         what `model.revision` names now         by the commit

A run that has a checkpoint needs its base no more, unless it trains adapters: then a checkpoint
holds them alone, and the base is read again at each start, and must be the same.

Kernels of attention and compilation are frozen while the type of the device stays. Kernels are
decided before the plan, which counts what they keep. Whether to compile depends on the length of
the run, which is known once the data is open. The kernel of the loss is frozen for the run.

All that is frozen in `auto.json` are the fields of `rundir.status.FrozenChoices`; the config's keys
that must not change are in `config/binding.py`.
"""

import hashlib
import importlib.resources
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from llmtrain.agreement import agreed, from_rank_zero
from llmtrain.checkpoint import candidates, format as form, read
from llmtrain.checkpoint.read import ResumePoint
from llmtrain.config import schema
from llmtrain.config.binding import way_out
from llmtrain.data.chat.template import template_tokens
from llmtrain.data.sources.local import edges_digest
from llmtrain.distributed.engines.accelerator import Launched, on_cpu
from llmtrain.distributed.launch.environment import family
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.model import attention, compile as compiling, trainable, untrusted
from llmtrain.model.base import CONFIG, Base, check_code, pin
from llmtrain.model.loss import Head
from llmtrain.model.tokenizer import new_entries, special_tokens, token_ids
from llmtrain.rundir import contents
from llmtrain.rundir.contents import AUTO
from llmtrain.rundir.status import FrozenChoices, read_status
from llmtrain.training.guards import check_replicas
from llmtrain.training.run import Processes
from llmtrain.types import Compiled, Ranks, Spec

_log = logging.getLogger(__name__)

_LONG_RUN = 2000  # steps from which the minutes of compiling are repaid
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = (":4096:8", ":16:8")  # those with which cuBLAS gives equal bits; the first is faster


@dataclass(frozen=True, slots=True)
class Kernels:
    """Settings of torch that decide which kernels compute.

    attention: flash, cudnn, math, or auto: torch's own order
    compiled: what is compiled; None = it is not decided yet
    deterministic: whether only kernels run that give equal bits each time
    began_with: keys whose values an earlier start has chosen
    """

    attention: str
    compiled: Compiled | None
    deterministic: bool
    began_with: tuple[str, ...] = ()


def decide_kernels(config: schema.Config) -> Kernels:
    """Return the settings of the config, or those that an earlier start on such a device froze."""
    auto = FrozenChoices(config.run_dir, f"any/{'cpu' if on_cpu() else 'cuda'}/any")
    known = {attention.KEY: auto.attention_backend, compiling.KEY: auto.compile}
    asked = {attention.KEY: config.model.attention_backend, compiling.KEY: config.training.compile}
    chosen = {key: known[key] if value == "auto" else value for key, value in asked.items()}
    return Kernels(
        attention=chosen[attention.KEY] or "auto",
        compiled=cast("Compiled | None", chosen[compiling.KEY]),
        deterministic=config.training.deterministic,
        began_with=tuple(key for key, value in asked.items() if value == "auto" and known[key]),
    )


def check_kernels(kernels: Kernels) -> None:
    """Raise UserError for settings that this machine cannot have, whoever chose them."""
    cpu = on_cpu()
    problems = [
        *attention.kernel_problems(kernels.attention, cpu=cpu),
        *(compiling.problems(kernels.compiled, cpu=cpu) if kernels.compiled else ()),
    ]
    began = f"; {AUTO} has it from an earlier start: {{}}"
    problems = [
        replace(one, remedy=one.remedy + began.format(way_out(one.key)))
        if one.key in kernels.began_with
        else one
        for one in problems
    ]
    workspace = os.environ.get(_WORKSPACE, _WORKSPACES[0])
    if kernels.deterministic and workspace not in _WORKSPACES:
        expected = f"{' or '.join(_WORKSPACES)} with training.deterministic"
        problems.append(Problem(_WORKSPACE, workspace, expected, f"unset {_WORKSPACE}"))
    raise_any(problems)


@contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """Let torch use these kernels in the whole process. Enter it before CUDA computes anything."""
    with attention.kernels(kernels.attention):
        if not kernels.deterministic:
            yield
            return
        os.environ.setdefault(_WORKSPACE, _WORKSPACES[0])
        before = torch.are_deterministic_algorithms_enabled()
        settings: Any = torch.utils.deterministic
        filled = settings.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True)
        # Else every new tensor is filled, which only helps to find reads of memory never written.
        settings.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
            settings.fill_uninitialized_memory = filled


def decide_compile(config: schema.Config, processes: Processes, *, document_mask: bool) -> Compiled:
    """Return what to compile, and freeze it: `blocks` if that saves time in a run of this length.

    Collective: every rank must be able to. Raises UserError for a whole model with documents that
    are hidden from each other.
    """
    launched, mode = processes.launched, processes.auto.compile
    if launched.cut.processes > 1:  # also if the run began on whole models, and was compiled
        if mode not in (None, "off"):
            _log.info("nothing is compiled while a model is cut over processes")
        return "off"
    if mode is None:
        mode = "off"
        # DeepSpeed's own hooks inside the blocks cut their graphs into pieces.
        fits = family(launched.strategy) != "zero" and not config.training.same_bits
        long = config.total_steps >= _LONG_RUN and fits
        if long and launched.device.type == "cuda":
            if missing := compiling.missing_compiler(cpu=False):
                _log.warning("nothing is compiled, as torch lacks %s", missing)
            mode = "off" if launched.ranks.highest(int(bool(missing))) else "blocks"
        processes.auto.compile = mode
    cpu = launched.device.type == "cpu"
    problems = tuple(compiling.problems(mode, cpu=cpu, document_mask=document_mask))
    agreed(launched.ranks, lambda: raise_any(problems))
    return mode


LOSS_KERNEL_KEY = "training.loss_kernel"


# Relative differences from float64 within which a kernel's loss is right.
_WITHIN = {"fp32": 1e-5, "bf16": 1e-4}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def asked_kernel(training: schema.TrainingConfig, run_dir: Path | None) -> str:
    """Return the kernel that is asked for, or that the run began with: auto if it is open.

    run_dir: None = no run has begun.
    """
    if training.loss_kernel != "auto" or run_dir is None:
        return training.loss_kernel
    return FrozenChoices(run_dir, "").loss_kernel or "auto"


def choose_kernel(
    asked: str, head_or_reason: Head | str, precision: str, z_loss: float
) -> tuple[str, Head | None]:
    """Return the kernel, and the head that it computes the loss of; None for logits.

    head_or_reason: what `examine` returns for the model

    Raises UserError for a kernel that cannot compute this model's loss.
    """
    if asked == "logits":
        return "logits", None
    if isinstance(head_or_reason, str):
        if asked != "auto":
            expected = (
                f"logits or auto: the loss of this model needs its logits, as {head_or_reason}"
            )
            raise UserError(Problem(LOSS_KERNEL_KEY, asked, expected))
        _log.info("loss: from the model's logits, as %s", head_or_reason)
        return "logits", None
    if asked == "torch" and (reason := _why_not_torch(head_or_reason, precision, z_loss)):
        raise UserError(Problem(LOSS_KERNEL_KEY, asked, f"chunked, logits or auto: {reason}"))
    return "chunked" if asked == "auto" else asked, head_or_reason


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
    computed = F.linear_cross_entropy(hidden, weight, labels, reduction="sum")
    wrong = abs(float(computed) / float(exact) - 1)
    if wrong <= _WITHIN[precision]:
        return ""
    return f"in {precision} torch's kernel is wrong by {wrong:.0e} of the loss"


def resolve_adapter(config: schema.Config, auto: FrozenChoices) -> schema.AdapterConfig:
    """Return the section `adapter`, with the layers that `auto` meant when the run began."""
    known = auto.adapter_targets
    if known is None or config.adapter.targets != "auto":
        return config.adapter
    return config.adapter.model_copy(update={"targets": tuple(known)})


def attach_adapters(
    config: schema.Config, processes: Processes, model: PreTrainedModel, *, meta: bool
) -> None:
    """Attach the adapters that the config asks for to a model; nothing if it asks for none."""
    auto = processes.auto
    asked = resolve_adapter(config, auto)
    tokens = trained_tokens(config, processes.base, config.run_dir / contents.TOKENIZER)
    trainable.attach(model, asked, tokens, meta=meta, dtype=_DTYPES[processes.precision])
    if asked.kind != "none":
        auto.adapter_targets = trainable.short_names(model)


def trained_tokens(
    config: schema.Config, base: Base | None, tokenizer: Path | None
) -> tuple[int, ...]:
    """Return the ids whose embeddings are trained with the adapters (`adapter.train_tokens`).

    base: what the run begins with
    tokenizer: the directory of the run's tokenizer; None = it is not written yet

    Raises UserError for an entry that the tokenizer does not have.
    """
    asked, named = config.adapter.train_tokens, config.model.tokenizer
    if config.adapter.kind == "none" or base is None:
        return ()
    added = template_tokens(config.chat.template)  # unless the tokenizer has them
    if asked == "auto":  # what this run's tokenizer has beyond that of the base
        if named != "auto":
            return ()
        if tokenizer is not None:
            return new_entries(tokenizer, base.path, base.revision)
        first = special_tokens(base.path, base.revision).length
        return tuple(range(first, special_tokens(base.path, base.revision, added).length))
    if tokenizer is not None:
        return token_ids(tokenizer, asked)
    if isinstance(named, schema.TrainTokenizer):
        return ()
    path, revision = named_tokenizer(named, base)
    return token_ids(path, asked, revision, added)


def named_tokenizer(named: str, base: Base | None) -> tuple[str, str | None]:
    """Return the directory or Hub id, and its revision, of a tokenizer that a config names.

    base: whose tokenizer is that of `auto`
    """
    if named == "sample":
        return str(importlib.resources.files("llmtrain.data").joinpath("sample")), None
    if named == "auto":
        assert base is not None
        return base.path, base.revision
    return named, None


def check_base(config: schema.Config, base: Base | None, resume_point: ResumePoint) -> None:
    """Refuse a base other than that on which a checkpoint's adapter was trained.

    In a run without adapters, refuse a checkpoint of adapters.
    """
    beside = resume_point.path / trainable.BASE_FILE
    if not beside.is_file():
        return
    if config.adapter.kind == "none" or base is None:
        read.refuse_adapters(resume_point, [untrusted.ADAPTER_CONFIG])
    else:
        trainable.refuse_other_base(beside.read_bytes(), base, resume_point.name)


def adapter_files(
    config: schema.Config, processes: Processes, model: PreTrainedModel, spec: Spec
) -> dict[str, bytes]:
    """Return the files beside an adapter's tensors, after checks of what every rank holds.

    Returns {} for a run of all weights. Collective. Raises RunError (75) if replicas of the base
    differ, which is compared only now, as it does not change.
    """
    launched, base = processes.launched, processes.base
    if config.adapter.kind == "none" or base is None:
        return {}
    agreed(launched.ranks, lambda: _check_filled(launched, spec))
    differing = launched.engine.unequal_replicas(base=True)
    check_replicas(differing, 0, lambda *_event, **_details: None)
    return trainable.adapter_files(model, base)


def _check_filled(launched: Launched, spec: Spec) -> None:
    """Raise RuntimeError if this rank's part of a matrix A is all zero: it would never train."""
    mine = launched.engine.pieces(spec, writing=False)
    matrices = (one for one in mine if one.name.endswith(".lora_A.weight") and one.data.numel())
    if empty := [one.name for one in matrices if not one.data.any()]:
        raise RuntimeError(f"{len(empty)} adapters have no values here, {empty[0]} among them")


_DIGITS = 32


def decide_base(model: schema.ModelConfig, run_dir: Path, ranks: Ranks) -> Base | None:
    """Return the base of a run, the same on all ranks; None without `model.from`. Collective.

    Raises UserError and RunError as `find_base` does.
    """
    if model.from_ is None:
        return None
    return Base(**from_rank_zero(ranks, lambda: asdict(known_base(model, run_dir))))


def known_base(model: schema.ModelConfig, run_dir: Path) -> Base:
    """Return the base that an earlier start of a run has kept, else what `model.from` names now."""
    frozen = FrozenChoices(run_dir, "").base
    same = frozen is not None and frozen.get("asked") == _asked_for(model)
    return (kept_base(run_dir) if same else None) or find_base(model)


def kept_base(run_dir: Path) -> Base | None:
    """Return what a run began with; None if it began without weights."""
    frozen = FrozenChoices(run_dir, "").base
    return Base(frozen["path"], frozen["revision"], frozen["digest"]) if frozen else None


def keep_base(auto: FrozenChoices, model: schema.ModelConfig, base: Base) -> None:
    """Freeze the base, with the keys that named it."""
    auto.base = {"asked": _asked_for(model), **asdict(base)}


def _asked_for(model: schema.ModelConfig) -> list[str | None]:
    return [model.from_, model.revision]


def find_base(model: schema.ModelConfig) -> Base:
    """Look up what `model.from` names now.

    Raises UserError for what is not weights that can be loaded, RunError (75) if the Hub does not
    answer.
    """
    assert model.from_ is not None
    place = Path(model.from_)
    if not place.exists():
        return pin(model.from_, model.revision)
    if model.revision is not None:
        expected = f"null, as model.from={model.from_} is a directory, which has no revisions"
        raise UserError(Problem("model.revision", model.revision, expected))
    if contents.is_run(place):
        root, run_id = place / contents.CHECKPOINTS, read_status(place).get("run_id")
        name = candidates.best(root, run_id)
        if name is None:
            expected, remedy = "a run that has a whole checkpoint", f"checkpoints list {place}"
            raise UserError(Problem(untrusted.KEY, place, expected, f"`llmtrain {remedy}`"))
        place = root / name
    untrusted.check(str(place))
    if (place / CONFIG).is_file():
        check_code(str(place), place / CONFIG)
    return Base(str(place.absolute()), None, _digest(place))


def check_unchanged(base: Base) -> None:
    """Raise UserError if a base is a directory that is gone, or has other weights than it had."""
    if base.digest is not None and (change := what_changed(base)):
        expected = f"the weights that this run began with ({base}); that directory {change}"
        remedy = "put them back, or begin in another run.dir"
        raise UserError(Problem(untrusted.KEY, base.path, expected, remedy))


def what_changed(base: Base) -> str | None:
    """Return what became of a directory that is a base; None if it has the same weights.

    Where no digest is known, any directory is the same.
    """
    place = Path(base.path)
    if not place.is_dir():
        return "is gone"
    same = base.digest is None or _digest(place) == base.digest
    return None if same else "has other weights now"


def _digest(place: Path) -> str:
    """Return a hash of the weights in a directory, for which no large file is read whole.

    The manifest of our checkpoints has the digest of every byte.
    """
    if (place / form.STATE).is_file() and (place / form.MANIFEST).is_file():
        return hashlib.sha256((place / form.MANIFEST).read_bytes()).hexdigest()[:_DIGITS]
    files = sorted(place.glob(f"*{form.TENSORS}"))
    listed: list[Any] = [[one.name, one.stat().st_size, edges_digest(one)] for one in files]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:_DIGITS]
