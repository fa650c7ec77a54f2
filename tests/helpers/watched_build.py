"""A rank that writes down what it builds of a model: what it reads, and what it holds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from llmtrain.model import build
from llmtrain.training.start import weights


def train(config: str, output: str) -> None:
    """Train; what was built goes to `output`.RANK before it is sharded."""
    read: list[str] = []
    load, make = build.build, weights._build

    def loaded(described: Any, asked: Any, base: Any) -> Any:
        read.append(str(base))
        return load(described, asked, base)

    def built(*args: Any) -> Any:
        made = make(*args)
        held = sum(p.numel() for p in made.bare.parameters() if not p.is_meta)
        seen = {"read": read, "held": held, "whole": made.whole is not None}
        Path(f"{output}.{os.environ['RANK']}").write_text(json.dumps(seen))
        return made

    build.build, weights._build = loaded, built
    from llmtrain.cli.rank import train_here

    train_here(config, [])
