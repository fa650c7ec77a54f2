"""Print what `llmtrain doctor` found: a line for each check, in 80 columns.

ok        memory       23.5 GiB of the machine's available
error     rendezvous   10.0.0.1:29500 cannot be bound: Address already in use
                       try: main_process_port: another one, or end what listens there
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.cli.options import WIDTH, ProgressLine, show as print_lines
from llmtrain.text import fit, harmless, plural, wrap

if TYPE_CHECKING:
    from llmtrain.tools.doctor.context import Verdict

_STATE, _NAME = 9, 13  # columns
_COLOURS = {"ok": "32", "warning": "33", "error": "31"}


def show(
    config: str | None,
    overrides: Sequence[str],
    accelerate: Path | None,
    skip: Sequence[str],
    nodes: str | None = None,
    processes_per_node: int | None = None,
    *,
    as_json: bool,
) -> int:
    """Run the checks, print each one as soon as it is finished, and return the exit code."""
    from llmtrain.tools.doctor.doctor import doctor
    from llmtrain.tools.launch.launch import parse_nodes

    asked = None if nodes is None else parse_nodes(nodes, processes_per_node)
    line = ProgressLine(wait=False)

    def show_progress(name: str) -> None:
        if line.moves:
            line.show(fit(f"looking at {name} …", WIDTH - 1))

    checks = {}
    found = doctor(config, overrides, accelerate, skip, on_progress=show_progress, nodes=asked)
    for name, check in found:
        checks[name] = check
        line.clear()
        if not as_json:
            # Keeps the escapes of the colours; `lines` has already replaced all others.
            print_lines(lines(name, check, colours=_in_colours()), keep="\033")
    report = {"checks": [{"name": name, **asdict(check)} for name, check in checks.items()]}
    states = [check.state for check in checks.values()]
    print_lines([json.dumps(report) if as_json else summary(states)])
    return 2 if "error" in states else 0


def lines(name: str, check: Verdict, *, colours: bool) -> Iterator[str]:
    """Yield the lines of one check: what was found, and below it what to do."""
    state, indent = f"{check.state:<{_STATE}}", " " * (_STATE + _NAME)
    if colours:
        state = f"\033[{_COLOURS[check.state]}m{state}\033[0m"
    first, *more = wrap(harmless(check.found), WIDTH - len(indent))
    if check.remedy:
        more += wrap(f"try: {harmless(check.remedy)}", WIDTH - len(indent))
    yield f"{state}{name:<{_NAME}}{first}".rstrip()
    yield from (indent + line for line in more)


def summary(states: Sequence[str]) -> str:
    """Return the last line, with the numbers of errors and warnings."""
    wrong = [state for state in ("error", "warning") if state in states]
    parts = [plural(states.count(state), state, f"{state}s") for state in wrong]
    return f"{len(states)} checks: {', '.join(parts) or 'all is well'}"


def _in_colours() -> bool:
    """Whether stdout is a terminal that should show colours."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain
