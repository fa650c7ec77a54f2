"""A rank that notes what is unpickled while it looks for its checkpoint and loads its state."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmtrain.training.start import open as start

_inside: list[str] = []  # the stages that run now
_seen: list[str] = []
_stages: list[str] = []


def train(config: str, output: str) -> None:
    """Train; what was seen goes to `output`.RANK when the state is loaded."""
    sys.addaudithook(_heard)
    start.find_checkpoint = _watched("find", start.find_checkpoint)
    load = _watched("load", start.load_state)

    def loaded(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        body = {"stages": _stages, "unpickled": list(_seen), "heard": _hears()}
        Path(f"{output}.{os.environ['RANK']}").write_text(json.dumps(body))
        return result

    start.load_state = loaded
    from llmtrain.cli.rank import train_here

    train_here(config, [])


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if _inside and event == "pickle.find_class":
        _seen.append(f"{_inside[-1]}: {arguments}")


def _watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        _stages.append(name)
        _inside.append(name)
        try:
            return function(*args, **kwargs)
        finally:
            _inside.pop()

    return watched


def _hears() -> bool:
    """Whether the hook would have seen it."""
    before = len(_seen)
    _inside.append("check")
    sys.audit("pickle.find_class", "some.module", "SomeClass")
    _inside.pop()
    return len(_seen) > before
