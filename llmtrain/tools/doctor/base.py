"""Check that the weights of `model.from` are on this machine, where a start would find them.

A start downloads what is missing, which takes as long as it takes, on each machine; without a
network it fails. No weights are read or downloaded here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.checkpoint.disk_space import size
from llmtrain.data.remote.request import AttemptError, wait_for
from llmtrain.errors import RESTARTABLE, RunError
from llmtrain.tools.doctor.case import Case, Verdict, error, ok, warning
from llmtrain.tools.doctor.sources import MODEL_SECONDS, OFFLINE, quiet_hub

if TYPE_CHECKING:
    from llmtrain.model.base import Base

_WHOLE = "model.safetensors"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def base(case: Case, seconds: float = MODEL_SECONDS) -> Verdict:
    """Check that the weights of `model.from` are in a directory or in the Hub's cache.

    seconds: time limit, as the Hub may not answer

    Raises UserError for what is not a model that can be loaded, RunError without an answer.
    """
    assert case.config is not None
    if case.config.model.from_ is None:
        return ok("none: a new model begins with random weights")
    quiet_hub()
    try:
        return wait_for(lambda: _look(case), seconds, None)
    except AttemptError as late:
        raise RunError(f"model.from: {late}", RESTARTABLE, OFFLINE) from late


def _look(case: Case) -> Verdict:
    from llmtrain.training.start.base import check_unchanged, known_base
    from llmtrain.training.start.planning import config_of_newest_checkpoint

    assert case.config is not None
    if config_of_newest_checkpoint(case.config, case.run_dir):
        return ok("not read again: the run continues from a checkpoint of its own")
    found = known_base(case.config.model, case.run_dir)
    check_unchanged(found)
    there, missing = _on_hub(found) if found.revision else (_sizes_in(Path(found.path)), {})
    if not there and not missing:
        return error(f"{found} has no weights in safetensors", "a model that has them")
    if not missing:
        return ok(f"{found}: {size(sum(there.values()))} of weights, on this machine")
    facts = f"{found}: {len(missing)} files of weights are not in the cache"
    if total := sum(missing.values()):
        facts += f" ({size(total)})"
    download = f"`hf download {found.path} --revision {found.revision}` on each machine"
    return (error if _is_offline() else warning)(facts, f"{download}, before the run")


def _sizes_in(directory: Path) -> dict[str, int]:
    """Return the weight files in a directory and their sizes in bytes."""
    return _weights({path.name: path.stat().st_size for path in directory.iterdir()})


def _weights(sizes: dict[str, int]) -> dict[str, int]:
    """Return the weight files among all files: a single one, else the shards."""
    if _WHOLE in sizes:
        return {_WHOLE: sizes[_WHOLE]}
    return {name: count for name, count in sizes.items() if _SHARD.fullmatch(name)}


def _on_hub(found: Base) -> tuple[dict[str, int], dict[str, int]]:
    """Return the weight files in the Hub's cache and those that are not, with their sizes.

    Offline, sizes of missing files are not known, and 0.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    from llmtrain.model.untrusted import INDEX, read_json

    def cached(name: str) -> Path | None:
        path = try_to_load_from_cache(found.path, name, revision=found.revision)
        return Path(path) if isinstance(path, str) else None

    if not _is_offline():
        info = HfApi().model_info(found.path, revision=found.revision, files_metadata=True)
        wanted = _weights({one.rfilename: one.size or 0 for one in info.siblings or ()})
    elif index := cached(INDEX):
        wanted = dict.fromkeys(read_json(index)["weight_map"].values(), 0)
    else:
        wanted = {_WHOLE: 0}
    there = {name: path.stat().st_size for name in wanted if (path := cached(name))}
    return there, {name: count for name, count in wanted.items() if name not in there}


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
