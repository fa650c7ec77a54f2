"""The configs and launch files that come with the package, and `quickstart`, which trains one.

They are the files of `configs/` and `accelerate_configs/` at the top of the repository. In a
checkout the folder `llmtrain/recipes` has links to these two; in an installed package, the files.

The quickstart takes two minutes: the built-in sample, two CPU processes, a report at the end.
"""

import json
import os
import textwrap
from pathlib import Path

from llmtrain.errors import Problem, UserError
from llmtrain.text import harmless
from llmtrain.tools.launch.child import Ended
from llmtrain.tools.launch.launch import launch

_FOLDER = Path(__file__).parents[1] / "recipes"
_LAUNCH = "accelerate_configs"
_OPTION = "--recipe"


def recipes() -> dict[str, Path]:
    """Return the recipes by name: `quickstart`, `chat_lora`, …, then launch files, as `fsdp2`."""
    paths = [*_FOLDER.glob("configs/**/*.yaml"), *_FOLDER.glob(f"{_LAUNCH}/*.yaml")]
    return {path.stem: path for path in sorted(paths, key=lambda path: (is_launch(path), path))}


def is_launch(recipe: Path) -> bool:
    """Whether a recipe is a file for `accelerate launch`, not a config of a run."""
    return recipe.parent.name == _LAUNCH


def write_recipe(name: str | None, out: Path | None = None) -> Path:
    """Write a recipe to a file, by default NAME.yaml in this folder, and return its path.

    Where a recipe's comments name its own file, they then name this one. Raises UserError for a
    name that is not known, and for a file that exists or cannot be written.
    """
    known = recipes()
    if name is None or name not in known:
        width = max(map(len, known))
        rows = [f"      {one:<{width}}  {summary(path)}" for one, path in known.items()]
        expected = "\n".join(["the name of a recipe", *rows])
        example = "llmtrain init --recipe quickstart"
        raise UserError(Problem(_OPTION, name, expected, f"{example}, then llmtrain train FILE"))
    recipe, path = known[name], out or Path(f"{name}.yaml")
    recipe_path = recipe.relative_to(_FOLDER).as_posix()
    text = recipe.read_text(encoding="utf-8").replace(recipe_path, harmless(str(path)))
    write_new(path, text)
    return path


def refuse_existing(path: Path) -> None:
    """Raise UserError for a file that exists."""
    if os.path.lexists(path):  # unlike `Path.exists`, false for a name with a NUL
        expected = "a file that does not exist: none is overwritten"
        raise UserError(Problem("--out", path, expected, "--out OTHER.yaml"))


def write_new(path: Path, text: str) -> None:
    """Write a file. Raises UserError if it exists or cannot be written."""
    refuse_existing(path)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        expected = f"a file that can be written ({reason})"
        raise UserError(Problem("--out", path, expected)) from None


def summary(recipe: Path) -> str:
    """Return the first sentence of a recipe's comment."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines[: lines.index("#")])
    return textwrap.shorten(comment.partition(". ")[0].rstrip("."), 90, placeholder=" …")


CONFIG = recipes()["quickstart"]
PROCESSES = 2


def quickstart(out: Path | None = None) -> Ended:
    """Train, or resume a run that was begun. out: the run directory; None = runs/quickstart."""
    # As JSON, in double quotes, any directory name is a string in YAML too.
    quoted = json.dumps(str(out), ensure_ascii=False)
    overrides = [f"run.dir={quoted}"] if out is not None else []
    cpu_only = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    return launch(str(CONFIG), overrides, processes=PROCESSES, env=cpu_only)
