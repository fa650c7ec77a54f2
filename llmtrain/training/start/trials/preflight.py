"""Checks of a first start that need no torch, reported together with the errors of the config.

A run that has begun has its own tokenizer and data manifest, which its start checks instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from llmtrain.config import schema
from llmtrain.config.checks import Rule, check_batch, check_micro_batch
from llmtrain.data.sources.local import SAMPLE, is_glob, is_local, list_files, locate, on_hub
from llmtrain.distributed.launch.environment import launcher_problems, world_size
from llmtrain.distributed.launch.named import number
from llmtrain.distributed.optimizer_state import missing_package
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.model import untrusted
from llmtrain.rundir import contents


def rules_of_this_process(config_file: str, env: Mapping[str, str]) -> list[Rule]:
    """Return the rules for a process that trains, as its launcher started it.

    With several machines, paths are not checked here: they may be missing only on some of the
    machines, which the ranks find out together.
    """
    if launcher_problems(env):  # then the number of processes is not reliable
        return [check_micro_batch, *_on_disk(config_file)]
    processes = world_size(env)
    one_machine = processes == 1 or number(env, "LOCAL_WORLD_SIZE") == processes
    batch = split_rule(processes)
    return [batch, _package_problems, *(_on_disk(config_file) if one_machine else ())]


def rules_of_a_launch(config_file: str, processes: int | None) -> list[Rule]:
    """Return the rules for a launch on this machine.

    processes: None = the number in accelerate's config file, which is not read here
    """
    batch = split_rule(processes or 1)
    return [batch, _package_problems, *_on_disk(config_file)]


def check_start(config: schema.Config, processes: int, more: Iterable[Problem] = ()) -> None:
    """Apply all these rules to a valid config, once the run's status can record what they refuse.

    more: problems that need torch to be found

    Raises UserError with every problem.
    """
    problems = [
        *_split_problems(processes, config.training),
        *_package_problems(config.optimizer),
        *_source_problems("", config.run, config.data, config.evaluation),
        *_model_problems("", config.run, config.model, config.adapter),
        *more,
    ]
    raise_any(problems)


def split_rule(processes: int) -> Rule:
    """Return the rule of a batch that is split over this many processes."""
    return partial(_split_problems, processes)


def _on_disk(config_file: str) -> list[Rule]:
    default = f"runs/{Path(config_file).stem}"
    return [partial(_source_problems, default), partial(_model_problems, default)]


def _split_problems(processes: int, training: schema.TrainingConfig) -> list[Problem]:
    """Check that the batch can be split over the processes, and over micro-batches in each."""
    return check_micro_batch(training) if processes == 1 else check_batch(training, processes)


def _package_problems(optimizer: schema.OptimizerConfig) -> list[Problem]:
    """Check that the package of the optimizer is installed."""
    return missing_package(optimizer.name)


def _source_problems(
    default: str,
    run: schema.RunConfig,
    data: schema.DataConfig,
    evaluation: schema.EvaluationConfig,
) -> list[Problem]:
    if _has_begun(run, default):
        return []
    return [
        *_missing(data.sources, "data.sources"),
        *_missing(evaluation.sources, "evaluation.sources"),
    ]


def _missing(sources: Sequence[schema.DocumentsConfig], key: str) -> Iterator[Problem]:
    """Report sources whose paths do not exist on this machine."""
    for index, source in enumerate(sources):
        if source.path == SAMPLE or on_hub(source.path):
            continue
        name = f"{key}.{index}.path"
        try:
            root = Path(locate(source, name))
            if is_glob(source.path):
                list_files(source.path, root, name)
        except UserError as error:
            yield from error.problems


def _model_problems(
    default: str, run: schema.RunConfig, model: schema.ModelConfig, adapter: schema.AdapterConfig
) -> Iterator[Problem]:
    """Report problems of the tokenizer's directory and of that of `model.from`.

    A run of adapters reads its base at every start.
    """
    begun, path = _has_begun(run, default), model.tokenizer
    is_named = isinstance(path, str) and path not in ("auto", SAMPLE)
    if not begun and is_named and _is_missing(str(path)):
        yield Problem("model.tokenizer", path, "a tokenizer directory that exists, or a Hub id")
    if model.from_ is None or (begun and adapter.kind == "none"):
        return
    if _is_missing(model.from_):
        yield Problem("model.from", model.from_, "a model directory that exists, or a Hub id")
    elif not contents.is_run(Path(model.from_)):  # its best checkpoint is looked up later
        try:
            untrusted.check(model.from_)
        except UserError as error:
            yield from error.problems


def _is_missing(path: str) -> bool:
    return is_local(path) and not os.path.exists(path)  # noqa: PTH110  # see `is_local`


def _has_begun(run: schema.RunConfig, default: str) -> bool:
    # Of a name that is too long or has a NUL it is false; the rules of paths report that.
    return os.path.exists(Path(run.dir or default) / contents.AUTO)  # noqa: PTH110
