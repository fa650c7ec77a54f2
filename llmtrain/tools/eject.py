"""Write one file that trains the first steps of a config, and its tokens: no llmtrain needed.

    a start in a temporary directory ─► what a run decides ─► constants, parts of the program
                                     └► the blocks of the first steps ─► the file of tokens

The program is `train_one.py` beside this module, whole and checked like any other. `compose` keeps
the parts of it that a config needs. Losses are those of a run on one process on a CPU, to the bit,
so what the program does not cover is refused with the key's name instead of being left out.
"""

from __future__ import annotations

import ast
import copy
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.config.checks import check
from llmtrain.config.schema import Config
from llmtrain.errors import Problem, UserError, needed_on_disk, raise_any
from llmtrain.hashing import mix
from llmtrain.rundir import contents
from llmtrain.tools.data.scratch import scratch_copy
from llmtrain.types import JsonObject

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from llmtrain.training.run import Run

STEPS = 50
TEMPLATE = Path(__file__).with_name("train_one.py")
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Ejected:
    """What was written.

    steps: that the tokens are of
    lines: of the program
    token_bytes: size of the file of tokens
    """

    program: Path
    tokens: Path
    steps: int
    lines: int
    token_bytes: int

    def to_json(self) -> JsonObject:
        """Return the object that `llmtrain eject --json` prints."""
        return {**asdict(self), "program": str(self.program), "tokens": str(self.tokens)}


def eject(config: Config, out: Path, steps: int | None = None) -> Ejected:
    """Write the program and, beside it, the tokens of the first steps.

    out: the program, a new file
    steps: whose tokens are written; None = the first `STEPS`, or all of a shorter run

    Raises UserError, before anything is written, for a config that the program does not cover, and
    RunError (74) if the disk refuses a file.
    """
    from safetensors.torch import save

    tokens = out.with_suffix(".safetensors")
    raise_any([*check(config), *uncovered(config), *place_problems(out, tokens)])
    with open_alone(config) as run:
        raise_any(uncovered_by_model(run))
        if steps is not None and not 1 <= steps <= run.steps:
            expected = f"a whole number from 1 to {run.steps}, the steps of the run"
            raise UserError(Problem("--steps", steps, expected))
        batches = first_blocks(run, steps or min(STEPS, run.steps))
        count = len(batches["ids"])
        versions = " and ".join(f"{name} {version(name)}" for name in _USED)
        header = _HEADER.format(steps=count, versions=versions)
        program = compose(conditions(run), constants(run), header)
    for path, content in ((tokens, save(batches)), (out, program.encode())):
        with needed_on_disk(path):
            path.write_bytes(content)
    return Ejected(out, tokens, count, program.count("\n"), tokens.stat().st_size)


def place_problems(out: Path, tokens: Path) -> Iterator[Problem]:
    """Yield why a program and its tokens cannot be written there."""
    if out.suffix != ".py":
        yield Problem("--out", str(out), "a file whose name ends with .py", "--out train_one.py")
    elif not out.absolute().parent.is_dir() or not os.access(out.absolute().parent, os.W_OK):
        yield Problem("--out", str(out), "a file in a directory that exists and can be written")
    for path in (out, tokens):
        if path.exists() and out.suffix == ".py":
            expected = f"a name of its own: {path} exists, and nothing is replaced"
            yield Problem("--out", str(out), expected)


@contextmanager
def open_alone(config: Config) -> Iterator[Run]:
    """Start a run of the config on one CPU process, in a temporary directory, and yield it.

    What an earlier start of the config's run has made or chosen holds for this one, too. Nothing is
    written to that run.
    """
    from accelerate.utils import patch_environment

    from llmtrain.training.start.open import start_run

    run_dir = config.run_dir if config.run_dir.is_dir() else None
    with scratch_copy(run_dir) as folder, patch_environment(ACCELERATE_USE_CPU="true"):
        if (config.run_dir / contents.AUTO).is_file():
            shutil.copyfile(config.run_dir / contents.AUTO, folder / contents.AUTO)
        update = {
            "run": {"dir": str(folder)},
            "checkpoint": {"resume": "auto", "stop_after": None, "keep_every": 0, "keep_best": 0},
            "logging": {"trackers": (), "profile_steps": None},
        }
        sections = {
            name: getattr(config, name).model_copy(update=values) for name, values in update.items()
        }
        logging.disable(logging.INFO)  # a start describes a run that nobody sees
        try:
            with start_run(config.model_copy(update=sections)) as run:
                yield run
        finally:
            logging.disable(logging.NOTSET)


def first_blocks(run: Run, steps: int) -> dict[str, Tensor]:
    """Return the blocks of the first steps, each tensor (steps, rows, positions) int32.

    They are fewer where the data ends before.
    """
    import numpy as np
    import torch

    blocks: dict[str, list[np.ndarray]] = {"ids": [], "labels": []}
    for step in range(1, steps + 1):
        run.feed.begin(step)
        batch = run.feed.next_batch()
        if run.feed.error is not None:
            raise run.feed.error
        if not batch.trained_tokens:
            break
        blocks["ids"].append(batch.ids[:, :-1])
        blocks["labels"].append(batch.labels)
        if batch.starts is not None:
            # From 0 with each document: where one begins, so that none sees another.
            place = np.arange(batch.labels.shape[1])
            begun = (np.maximum.accumulate(np.isin(place, row) * place) for row in batch.starts)
            blocks.setdefault("positions", []).append(np.stack([place - one for one in begun]))
    if not blocks["ids"]:
        expected = "a first step with something to train on"
        raise UserError(Problem("data.sources", None, expected, "llmtrain data inspect"))
    return {name: torch.from_numpy(np.stack(all).astype(np.int32)) for name, all in blocks.items()}


_ONLY = "an ejected program covers nothing else"
_COVERED: Mapping[str, tuple[object, ...]] = {
    "adapter.kind": ("none", "lora", "rslora"),
    "preference.loss": ("none",),
    "optimizer.name": ("adamw", "muon"),
    "training.precision": ("fp32", "auto"),
    "training.compile": ("off", "auto"),
    "training.loss_kernel": ("chunked", "logits", "auto"),
    "training.z_loss": (0.0,),
    "training.same_bits": (False,),
    "model.attention_backend": ("auto",),
    "distributed.strategy": ("ddp", "auto"),
    "distributed.tensor_parallel": (1, "auto"),
    "distributed.pipeline_parallel": (1,),
    "distributed.sequence_parallel": (1, "auto"),
}


def uncovered(config: Config) -> Iterator[Problem]:
    """Yield a problem for each key whose value the program does not cover."""
    for key, covered in _COVERED.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value not in covered:
            words = [str(one).lower() if isinstance(one, bool) else str(one) for one in covered]
            yield Problem(key, value, f"{' or '.join(words)}: {_ONLY}", f"{key}={words[0]}")
    if config.training.batch.grows:
        sizes = config.training.batch.sizes
        yield Problem("training.global_batch_size", sizes, f"one size for all steps: {_ONLY}")
    if config.adapter.kind != "none" and config.optimizer.name == "muon":
        yield Problem("optimizer.name", "muon", f"adamw with adapters: {_ONLY}")
    if config.adapter.kind != "none" and config.optimizer.groups:
        yield Problem("optimizer.groups", None, f"no groups with adapters: {_ONLY}")


def uncovered_by_model(run: Run) -> Iterator[Problem]:
    """Yield a problem for what is found to be not covered only when the run is open."""
    from torch import nn

    from llmtrain.model import attention, trainable
    from llmtrain.model.loss import Head
    from llmtrain.model.shape import on_meta

    built, model, base = run.built, run.built.model, run.processes.base
    kind = model.config.model_type
    key, named = ("model.from", base) if base else ("model.config.model_type", kind)
    if run.processes.precision != "fp32":
        precision = f"{run.config.training.precision} ({run.processes.precision} here)"
        yield Problem("training.precision", precision, f"fp32: {_ONLY}", "training.precision=fp32")
    if built.loss.has_router_loss:
        yield Problem(key, named, f"a model without a router's loss: {_ONLY}")
    if attention.rope_change(model) is not None:
        yield Problem(key, named, f"a rope that does not depend on the length: {_ONLY}")
    if built.loss.head not in (None, Head()):
        expected = f"logits, as the head of {kind} has a scale or a cap: {_ONLY}"
        yield Problem("training.loss_kernel", "auto", expected, "training.loss_kernel=logits")
    if built.hiding == attention.JOINED:
        expected = f"false, as {kind} hides documents only in rows joined end to end: {_ONLY}"
        yield Problem("data.document_mask", True, expected, "data.document_mask=false")
    fresh = type(model.config).from_dict(model.config.to_dict())
    backend = attention.backend(on_meta(fresh))
    if built.hiding is None and attention.backend(model) == attention.NAME and backend != "sdpa":
        yield Problem(key, named, f"a model whose own attention is sdpa, not {backend}: {_ONLY}")
    layers = [model.get_submodule(f"{name}.base_layer") for name in trainable.adapted_layers(model)]
    if any(type(layer) is not nn.Linear for layer in layers):
        yield Problem("adapter.targets", "auto", f"nothing but nn.Linear: {_ONLY}")
    if not {type(layer) for layer in _with_new_rows(model)} <= {nn.Embedding, nn.Linear}:
        yield Problem("adapter.train_tokens", None, f"[], as {kind} scales embeddings: {_ONLY}")


def _with_new_rows(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers, as peft found them, of which the rows of some tokens are trained."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    return [end.original_module for end in ends if hasattr(end, "original_module")]


def conditions(run: Run) -> dict[str, bool]:
    """Return what holds of the run: the names behind `#: if` in the template."""
    from llmtrain.model import attention, build

    config, built, model = run.config, run.built, run.built.model
    base, ends, adapted = run.processes.base, _with_new_rows(model), config.adapter.kind != "none"
    rows = model.config.get_text_config().vocab_size
    before = build.weights_config(base).get_text_config().vocab_size if base else rows
    noisy = build.without_noise(copy.deepcopy(model.config))
    return {
        "new": base is None,
        "grown": rows > before,
        "frozen": bool(config.model.freeze),
        "lora": adapted,
        "lora_dropout": config.adapter.dropout > 0,
        "token_rows": bool(ends),
        "head_rows": len(ends) > 1,
        "tied": len({id(one.weight) for one in ends}) < len(ends),
        "hidden": built.hiding is not None,
        "by_document": built.hiding == attention.NAME,
        "single": run.data.manifest.packing == "single",
        "chunked": built.loss.head is not None,
        "muon": config.optimizer.name == "muon",
        "groups": bool(config.optimizer.groups),
        "clip": config.training.max_grad_norm is not None,
        "dropout": bool(noisy) or (adapted and config.adapter.dropout > 0),
        "deterministic": config.training.deterministic,
        **{name: name == config.optimizer.schedule for name in _SCHEDULES},
    }


_SCHEDULES = ("cosine", "linear", "constant", "wsd")
_NOT_OF_THE_MODEL = ("transformers_version", "architectures", "dtype")


def constants(run: Run) -> dict[str, object]:
    """Return the values of the template's constants."""
    from llmtrain.model import trainable
    from llmtrain.training.optimizer import decay_steps, warmup_steps
    from llmtrain.training.step import DRAWS

    config, base, model = run.config, run.processes.base, run.built.model
    optimizer, adapter = config.optimizer, config.adapter
    tokens: Sequence[int] = []
    if adapter.kind != "none":
        rows = model.peft_config["default"].trainable_token_indices or []
        tokens = next(iter(rows.values())) if isinstance(rows, dict) else rows
    fields = model.config.to_diff_dict()
    return {
        "SEED": config.run.seed,
        "STREAM": mix(config.run.seed, DRAWS, 0),
        "THREADS": run.processes.threads.count,
        "CONFIG": {key: fields[key] for key in fields if key not in _NOT_OF_THE_MODEL},
        "WEIGHTS": base.path if base else "",
        "REVISION": (base.revision if base else None) or "main",
        "ROWS": model.config.get_text_config().vocab_size,
        "FROZEN": list(config.model.freeze),
        "TARGETS": trainable.short_names(model),
        "RANK": adapter.r,
        "SCALING": adapter.alpha / (adapter.r if adapter.kind == "lora" else math.sqrt(adapter.r)),
        "LORA_DROPOUT": adapter.dropout,
        "NEW_TOKENS": list(tokens),
        "STEPS": run.steps,
        "WARMUP": warmup_steps(optimizer, run.steps),
        "DECAY": decay_steps(optimizer, run.steps),
        "MICRO_BATCH": run.built.micro_batch_size,
        "LEARNING_RATE": optimizer.learning_rate,
        "MIN_LR_RATIO": optimizer.min_lr_ratio,
        "BETAS": optimizer.betas,
        "WEIGHT_DECAY": optimizer.weight_decay,
        "GROUPS": [(one.match, one.learning_rate, one.weight_decay) for one in optimizer.groups],
        "MAX_NORM": config.training.max_grad_norm,
    }


_USED = ("torch", "transformers")
_HEADER = """\
Train the first {steps} steps of a language model: written by `llmtrain eject`, yours to change.

    python THIS_FILE [--checkpoint RUN/checkpoints/step-…] [--save DIR]

The tokens are in the file of the same name with .safetensors. Every loss equals to the bit the
one that llmtrain logs on one process with as many threads, on a CPU, with
{versions}.
Left out are evaluations, samples, and checkpoints that a run could resume from.
"""


def compose(flags: Mapping[str, bool], values: Mapping[str, object], header: str) -> str:
    """Return the program for a config: parts of the template, with these values and docstring.

    flags: the names behind `#: if`
    values: of constants, by name
    """
    lines = [*choose_lines(TEMPLATE.read_text("utf-8").splitlines(), flags)]
    for place, line in enumerate(lines):
        match = re.fullmatch(r"([A-Z_]+)(?:: [^=]+)? = .*?(?:  (# .*))?", line)
        if match and match[1] in values:
            written = f"{match[1]} = {literal(values[match[1]], room=_WIDTH - len(match[1]) - 3)}"
            one = f"{written}  {match[2] or ''}".rstrip()
            above = f"{match[2]}\n{written}" if match[2] else written
            lines[place] = one if len(one) <= _WIDTH and "\n" not in one else above
    return f'"""{header}"""\n' + drop_unneeded("\n".join(lines))


def choose_lines(lines: Sequence[str], flags: Mapping[str, bool]) -> Iterator[str]:
    """Yield the lines whose conditions hold, without the conditions."""
    holds = [True]
    for line in lines:
        match line.split():
            case ["#:", "if", *words]:
                holds.append(flags[words[-1]] != (words[0] == "not"))
            case ["#:", "else"]:
                holds[-1] = not holds[-1]
            case ["#:", "end"]:
                holds.pop()
            case _ if all(holds):
                yield line


def drop_unneeded(text: str) -> str:
    """Return a program behind its docstring, without what its last statement does not need.

    A definition takes with it the comment above.
    """
    nodes, lines = ast.parse(text).body, text.splitlines()
    defined = {name: node for node in nodes for name in defined_names(node)}
    needed, pending = {nodes[-1]}, [nodes[-1]]
    used: set[str] = set()
    while pending:
        used |= {one.id for one in ast.walk(pending.pop()) if isinstance(one, ast.Name)}
        pending += (new := {defined[name] for name in used & defined.keys()} - needed)
        needed |= new
    program: list[str] = []
    blank: list[str] = []  # lines, those of what was left out too
    for before, node in pairwise(nodes):
        gap = lines[before.end_lineno : node.lineno - 1]
        blank = max(blank, [line for line in gap if not line], key=len)
        if node not in needed:
            continue
        statement = lines[node.lineno - 1 : node.end_lineno]
        if isinstance(node, ast.ImportFrom):
            names = [one for one in node.names if (one.asname or one.name) in used]
            statement = [ast.unparse(ast.ImportFrom(node.module, names, level=0))]
        program += [*blank, *(line for line in gap if line), *statement]
        blank = []
    return "\n".join([*program, ""])


def defined_names(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [one.asname or one.name for one in names]
    return []


def literal(value: object, room: int = _WIDTH, indent: str = "") -> str:
    """Return a value as Python that is formatted as ruff does it.

    room: characters up to the end of the first line
    indent: of the line that it begins in
    """
    inner = f"{indent}    "
    match value:
        case str():
            if len(quoted := _quoted(value)) <= room:
                return quoted
            size = (_WIDTH - len(inner)) // 2  # an escape may be longer than its character
            parts = (value[at : at + size] for at in range(0, len(value), size))
            written = "".join(f"{inner}{_quoted(one)}\n" for one in parts)
            return f"(\n{written}{indent})"
        case dict():
            ends = "{}"
            items = [(f"{_quoted(str(key))}: ", one) for key, one in value.items()]
        case list() | tuple():
            ends = "[]" if isinstance(value, list) else "()"
            items = [("", one) for one in value]
        case _:
            return repr(value)
    flat = ", ".join(f"{key}{literal(one)}" for key, one in items)
    flat += "," * (isinstance(value, tuple) and len(value) == 1)
    if "\n" not in flat and len(flat) + 2 <= room:
        return f"{ends[0]}{flat}{ends[1]}"
    each = (
        f"{inner}{key}{literal(one, _WIDTH - len(inner) - len(key) - 1, inner)},\n"
        for key, one in items
    )
    return f"{ends[0]}\n{''.join(each)}{indent}{ends[1]}"


def _quoted(text: str) -> str:
    """Return a string in double quotes, as Python reads it."""
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted.encode("utf-8", "backslashreplace").decode("utf-8")  # bytes of a path may not be
