"""The weights that a run begins with (`model.from`), pinned, so that every reader reads the same.

Models of the Hub are looked up here: the commit that a branch or tag names now, and whether its
files are weights that can be loaded. With HF_HUB_OFFLINE=1 the Hub's cache alone is read.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmtrain.errors import RESTARTABLE, Problem, RunError, UserError
from llmtrain.model import untrusted
from llmtrain.model.untrusted import KEY
from llmtrain.text import first_line

_log = logging.getLogger(__name__)

CONFIG = "config.json"
_REFUSED = (401, 403, 404)  # the Hub's answers that do not change by asking again


@dataclass(frozen=True, slots=True)
class Base:
    """The weights that a run begins with.

    path: a directory, absolute, or the id of a model on the Hub
    revision: the commit on the Hub; None for a directory
    digest: of what is in the directory; None for a model of the Hub, whose commit stands for it
    """

    path: str
    revision: str | None
    digest: str | None

    def __str__(self) -> str:
        pinned = self.revision or self.digest
        return f"{self.path}@{pinned[:12]}" if pinned else self.path


def pin(path: str, revision: str | None) -> Base:
    """Return a model of the Hub at the commit that `revision` names now. revision: None = main.

    Raises UserError for a model that does not exist, may not be read, needs its own code or has no
    weights of a whole model in safetensors; RunError (75) if the Hub does not answer.
    """
    from huggingface_hub import constants, errors

    of_client = errors.HTTPError  # type: ignore[attr-defined]  # not in its list of names
    try:
        from huggingface_hub import HfApi, hf_hub_download

        commit = HfApi().resolve_revision(path, revision=revision).resolved
        names = _files(path, commit)
        if untrusted.ADAPTER_CONFIG in names:
            file = Path(hf_hub_download(path, untrusted.ADAPTER_CONFIG, revision=commit))
            raise UserError(untrusted.adapter_problem(path, file))
        if kind := untrusted.other_kind(path, names):
            raise UserError(kind)
        if CONFIG in names:
            check_code(path, Path(hf_hub_download(path, CONFIG, revision=commit)))
        return Base(path, commit, None)
    except errors.GatedRepoError as error:
        expected = f"a model that you may read: {path} is gated"
        remedy = f"accept its terms on the page of {path} on the Hub, then set HF_TOKEN"
        raise UserError(Problem(KEY, path, expected, remedy)) from error
    except (errors.RevisionResolutionError, errors.HFValidationError, of_client, OSError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, errors.HFValidationError) or status in _REFUSED:
            expected = f"a directory, a run, or a model of the Hub: {first_line(error)}"
            raise UserError(Problem(KEY, path, expected)) from error
        if constants.HF_HUB_OFFLINE:
            raise UserError(_not_cached(path, revision)) from error
        message = f"the Hub does not answer for {KEY} = {path}: {first_line(error)}"
        remedy = "try again later, or HF_HUB_OFFLINE=1 if the model is in the Hub's cache"
        raise RunError(message, RESTARTABLE, remedy) from error


def _files(path: str, commit: str) -> set[str]:
    """Return the names of a model's files not in directories; offline, of those in the cache."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    if not constants.HF_HUB_OFFLINE:
        files = (one.rfilename for one in HfApi().model_info(path, revision=commit).siblings or ())
        return {name for name in files if "/" not in name}
    for name in (CONFIG, untrusted.ADAPTER_CONFIG):
        file = try_to_load_from_cache(path, name, revision=commit)
        if isinstance(file, str):
            return {entry.name for entry in Path(file).parent.iterdir()}
    raise UserError(_not_cached(path, commit))


def _not_cached(path: str, revision: str | None) -> Problem:
    asked = f"{path} --revision {revision}" if revision else path
    expected = "a directory, a run, or a model in the Hub's cache, as HF_HUB_OFFLINE is set"
    remedy = f"`hf download {asked}` where there is a network, into the same HF_HOME"
    return Problem(KEY, path, expected, remedy)


def check_code(path: str, file: Path) -> None:
    """Raise UserError if transformers does not have a model's type; warn of code that is not run.

    file: its config.json. Other mistakes in it are reported when the config is made.
    """
    try:
        fields = untrusted.read_json(file)
    except (ValueError, RecursionError) as error:
        expected = f"a config.json that can be read ({error})"
        raise UserError(Problem(KEY, path, expected)) from error
    kind, auto_map = fields.get("model_type"), fields.get("auto_map")
    if isinstance(kind, str) and kind.strip() and kind not in CONFIG_MAPPING:
        expected = f"a model whose type transformers has; it needs its own code (type '{kind}')"
        remedy = "only transformers' own code is run; a newer transformers may have that type"
        raise UserError(Problem(KEY, path, expected, remedy))
    if auto_map:
        names = auto_map if isinstance(auto_map, dict) else [auto_map]
        named = ", ".join(sorted(map(str, names)))
        _log.warning("%s names code of its own (%s), which is not run", path, named)
