"""Train on the built-in sample with two CPU processes, and write a report, in two minutes."""

from __future__ import annotations

import json
import os
from pathlib import Path

from llmtrain.tools.launch.launch import Ended, launch
from llmtrain.tools.recipes import recipes

CONFIG = recipes()["quickstart"]
PROCESSES = 2


def quickstart(out: Path | None = None) -> Ended:
    """Train, or resume a run that was begun. out: the run directory; None = runs/quickstart."""
    # As JSON, in double quotes, any directory name is a string in YAML too.
    quoted = json.dumps(str(out), ensure_ascii=False)
    overrides = [f"run.dir={quoted}"] if out is not None else []
    cpu_only = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    return launch(str(CONFIG), overrides, processes=PROCESSES, env=cpu_only)
