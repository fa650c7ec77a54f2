"""Ranks whose machines are not alike: rank 1's has less memory, or lacks a package."""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace

import psutil


def train(config: str, host_bytes: str, package: str, *overrides: str) -> None:
    """`llmtrain train` on every rank. host_bytes: rank 1's memory, 0 = what there is · package: one
    that rank 1 does not have, or nothing.
    """
    if os.environ["RANK"] == "1":
        if int(host_bytes):
            psutil.virtual_memory = lambda: SimpleNamespace(total=int(host_bytes))
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *more: (
            None if name == package else find(name, *more)
        )
    from llmtrain.cli.main import main

    main(["train", config, *overrides])
