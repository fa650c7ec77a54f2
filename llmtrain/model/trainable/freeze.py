"""`model.freeze`: parameters that are not trained and keep their initial values.

A tied parameter has several names, and any of them freezes it.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from llmtrain.errors import Problem, UserError

KEY = "model.freeze"


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Set requires_grad to False for all parameters whose names match a pattern (`*`, `?`).

    model: the bare model, which may be on meta. Raises UserError for each pattern that matches
    nothing, and if nothing would be left to train.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    names = [name for name, _ in named]
    unmatched = [pattern for pattern in patterns if not any(fnmatchcase(n, pattern) for n in names)]
    if unmatched:
        raise UserError(*(no_match(KEY, pattern, names) for pattern in unmatched))
    frozen = [p for name, p in named if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if {id(p) for p in frozen} == {id(p) for _, p in named}:
        asked = ", ".join(patterns)
        raise UserError(Problem(KEY, asked, f"something left to train of {len(names)} parameters"))
    for parameter in frozen:
        parameter.requires_grad = False


def no_match(key: str, pattern: str, names: Sequence[str]) -> Problem:
    """Return the problem of a pattern that matches none of these parameter names."""
    near = difflib.get_close_matches(pattern.strip("*?."), names, n=3, cutoff=0.3)
    inside = [name for name in names if pattern.strip("*?.") in name][:3]  # without stars
    shown = ", ".join(inside or near or names[:3])
    return Problem(key, pattern, "a pattern that matches a parameter's name", f"like {shown}")
