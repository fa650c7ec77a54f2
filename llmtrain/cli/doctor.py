"""Print what `llmtrain doctor` found: a line for each check, in 80 columns.

ok        memory       23.5 GiB of the machine's available
error     rendezvous   10.0.0.1:29500 cannot be bound: Address already in use
                       try: main_process_port: another one, or end what listens there
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.cli.escapes import WIDTH, clip, wrap
from llmtrain.cli.escapes import show as print_lines
from llmtrain.cli.progress import ProgressLine
from llmtrain.errors import harmless

if TYPE_CHECKING:
    from llmtrain.tools.doctor.doctor import Check

_STATE, _NAME = 9, 13  # columns
_COLOURS = {"ok": "32", "warning": "33", "error": "31"}


def show(
    config: str | None,
    overrides: Sequence[str],
    accelerate: Path | None,
    skip: Sequence[str],
    *,
    as_json: bool,
) -> int:
    """Run the checks, print each one as soon as it is finished, and return the exit code."""
    from llmtrain.tools.doctor.doctor import Diagnosis, doctor

    line = ProgressLine(wait=False)

    def tell(name: str) -> None:
        if line.moves:
            line.show(clip(f"looking at {name} …", WIDTH - 1))

    checks = []
    for check in doctor(config, overrides, accelerate, skip, told=tell):
        checks.append(check)
        line.clear()
        if not as_json:
            # Keeps the escapes of the colours; `lines` has already replaced all others.
            print_lines(lines(check, colours=_in_colours()), keep="\033")
    diagnosis = Diagnosis(tuple(checks))
    print_lines([json.dumps(diagnosis.to_json()) if as_json else summary(checks)])
    return 2 if diagnosis.failed else 0


def lines(check: Check, *, colours: bool) -> Iterator[str]:
    """Yield the lines of one check: what was found, and below it what to do."""
    indent = _STATE + _NAME
    name = f"{check.name:<{_NAME}}"
    state = f"{check.state:<{_STATE}}"
    if colours:
        state = f"\033[{_COLOURS[check.state]}m{state}\033[0m"
    first, *more = wrap(harmless(check.found), WIDTH - indent)
    yield f"{state}{name}{first}".rstrip()
    yield from (f"{'':{indent}}{line}" for line in more)
    if check.remedy:
        advice = wrap(f"try: {harmless(check.remedy)}", WIDTH - indent)
        yield from (f"{'':{indent}}{line}" for line in advice)


def summary(checks: Iterable[Check]) -> str:
    """Return the last line, with the numbers of errors and warnings."""
    states = [check.state for check in checks]
    parts = [
        f"{states.count(state)} {state}{'s' * (states.count(state) > 1)}"
        for state in ("error", "warning")
        if state in states
    ]
    return f"{len(states)} checks: {', '.join(parts) or 'all is well'}"


def _in_colours() -> bool:
    """Whether stdout is a terminal that should show colours."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain
