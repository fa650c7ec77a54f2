"""The strategies of a plan as an HTML table, for a notebook: escaped, and without a script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from llmtrain.errors import gib

_HEAD = ("strategy", "memory of a device", "recomputed", "micro-batch", "accumulation", "tokens/s")
_UNKNOWN = "?"


def table(plan: Mapping[str, Any]) -> str:
    """Return the table. plan: as `Plan.to_json` returns it"""
    rows = "".join(_row(_cells(one), "td") for one in plan["strategies"])
    return (
        f"<table><caption>{escape(plan['reason'])}</caption>"
        f"<thead>{_row((*_HEAD, 'fits'), 'th')}</thead><tbody>{rows}</tbody></table>"
    )


def _cells(one: Mapping[str, Any]) -> Iterator[str]:
    """Yield the cells of a strategy, in the order of the head."""
    yield f"{one['name']}, chosen" if one["chosen"] else one["name"]
    yield _memory(one["total_bytes"], one["parts"])
    yield one["activation_checkpointing"]
    yield f"{one['micro_batch_size']:,}"
    yield f"{one['accumulation']:,}"
    yield _UNKNOWN if one["tokens_per_second"] is None else f"{one['tokens_per_second']:,.0f}"
    if one["fits"] is False:
        yield f"no; try {one['remedy']}" if one["remedy"] else "no"
    else:
        yield _UNKNOWN if one["fits"] is None else "yes"


def _memory(total: int | None, parts: Mapping[str, int | None]) -> str:
    """Return the memory of a device, and what most of it is for."""
    known = {name: size for name, size in parts.items() if size}
    largest = sorted(known, key=lambda name: -known[name])[:3]
    shown = ", ".join(f"{name} {gib(known[name])}" for name in largest)
    return f"{_UNKNOWN if total is None else gib(total)} ({shown})"


def _row(cells: Iterable[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
