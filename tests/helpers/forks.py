"""A rank that notes whoever forks in it."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path


def train(notes: str, *arguments: str) -> None:
    """In a rank: `llmtrain train ARGUMENTS`; each fork without exec adds its stack to `notes`."""
    from llmtrain.cli.main import main

    def hook(event: str, _arguments: object) -> None:
        if event in ("os.fork", "os.forkpty"):
            with Path(notes).open("a") as file:
                traceback.print_stack(file=file)

    sys.addaudithook(hook)
    main(["train", *arguments])
