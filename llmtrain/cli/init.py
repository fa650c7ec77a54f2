"""`llmtrain init`: a config for some data, or a recipe."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from llmtrain.errors import Problem, UserError, harmless

_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z0-9_]+)+=")


def write(given: Sequence[str], base: str | None, recipe: str | None, out: Path | None) -> None:
    """Write the file, and print its path; for data, then the two commands to give.

    given: places of data, and `section.key=value`
    """
    from llmtrain.tools.recipes import write_recipe

    data = [one for one in given if not _OVERRIDE.match(one)]
    overrides = [one for one in given if _OVERRIDE.match(one)]
    if recipe is not None or not (data or base or overrides):
        if given or base is not None:
            expected = "left out beside data: a recipe is written as it is"
            raise UserError(Problem("--recipe", recipe, expected))
        print(write_recipe(recipe, out))
        return
    if not all(map(str.strip, data or [""])):
        expected = "files, folders or Hub ids to train on"
        raise UserError(Problem("DATA", None, expected, "llmtrain init chat.jsonl --from BASE"))
    if base is not None and not base.strip():
        expected = "a directory, a run, or a model of the Hub"
        raise UserError(Problem("--from", base, expected, "leave it out for a new model"))
    from llmtrain.tools.init import write_config

    path = write_config(data, base, out, overrides)
    command = shlex.quote(harmless(str(path)))
    print(path)
    print(f"  look at the data   llmtrain data inspect {command}")
    print(f"  train              llmtrain train {command}")
