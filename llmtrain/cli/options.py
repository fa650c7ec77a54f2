"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value]...", help="Values in place of the file's."),
]
AccelerateFile = Annotated[
    Path | None,
    typer.Option("--accelerate", metavar="FILE", help="The accelerate config to launch with."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
