"""Upload an export to a private repository of the Hub, with the token of the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from llmtrain.errors import Problem, UserError, first_line

KEY = "--push"
_TOKEN = "HF_TOKEN"


def check(name: str) -> None:
    """Raise UserError if there is no token, the name is not a Hub id, or the repository is public.

    It asks the Hub, before anything is written. A token in a file of the Hub's client is not used.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    if not os.environ.get(_TOKEN):
        remedy = f"export {_TOKEN}=…, a token that may write"
        raise UserError(Problem(KEY, name, f"a token in {_TOKEN}", remedy))
    try:
        private = _api().model_info(name).private
    except RepositoryNotFoundError:
        return
    except _refusals() as error:
        raise UserError(Problem(KEY, name, _expected(error))) from error
    if not private:
        raise UserError(Problem(KEY, name, "a private repository, or one that does not exist yet"))


def upload(directory: Path, name: str) -> str:
    """Make the repository if it does not exist, upload a directory, and return the address.

    Raises UserError if the Hub refuses; the directory stays as it is.
    """
    try:
        api = _api()
        made = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=directory)
    except _refusals() as error:
        remedy = f"the export is complete: hf upload {name} {directory} uploads it"
        raise UserError(Problem(KEY, name, _expected(error), remedy)) from error
    return str(made)


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(token=os.environ[_TOKEN])


def _refusals() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is of its client
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
    )

    return HfHubHTTPError, HFValidationError, HTTPError, OSError


def _expected(error: Exception) -> str:
    return f"a repository that this token may write to: {first_line(error)}"
