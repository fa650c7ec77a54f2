"""Numbers as a report writes them for people."""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from typing import TypeGuard

_MOST = sys.float_info.max
_TURNING = re.compile(r"[\u202a-\u202e\u2066-\u2069]")


def number(value: object) -> str:
    """Format a number with four significant digits; a dash if there is none."""
    if not _is_number(value):
        return "–"
    if abs(value) >= 1e6 or 0 < abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def fixed(value: object, digits: int = 3) -> str:
    """Format a number with a fixed number of decimals, so that those in a column are aligned."""
    if not _is_number(value):
        return "–"
    return f"{value:,.{digits}f}" if abs(value) < 1e6 else f"{value:.3g}"


def count(value: object) -> str:
    """Format a whole number with commas between thousands."""
    return f"{value:,}" if isinstance(value, int) else "–"


def short(value: object) -> str:
    """Format a count or a rate with three significant digits: 14.8 k, 1.33 M."""
    if not _is_number(value):
        return "–"
    for unit, sign in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{sign}" if abs(value) < 1e15 else f"{value:.3g}"
    return f"{value:.3g}"


def size(value: object) -> str:
    """Format bytes in powers of 1,024."""
    if not _is_number(value):
        return "–"
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}" if amount < 1000 else f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:,.1f} TiB"


def percent(share: float) -> str:
    """Format a share: 94 %, 2.1 %, < 0.1 %, 0 %."""
    value = 100 * share
    if 0 < value < 0.05:
        return "< 0.1 %"
    return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.1f} %"


def seconds(value: float) -> str:
    """Format a duration: 28 ms, 4.2 s, 1 min 15 s, 2 h 10 min, 3 d 4 h."""
    if value < 1:
        return f"{max(0.0, value) * 1000:.0f} ms"
    if value < 10:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400:,} d {whole % 86400 // 3600} h"


def when(value: object) -> str:
    """Format a time stamp in UTC; a dash if it is none."""
    if not _is_number(value):
        return "–"
    try:
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # beyond the year 9999
        return "–"


def plural(how_many: int, one: str, more: str) -> str:
    """Return a count and the word for it."""
    return f"{count(how_many)} {one if how_many == 1 else more}"


def compact(value: object) -> str:
    """Format any value as one short line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return clip(text, 500)


def clip(text: object, characters: int = 4000) -> str:
    """Return at most that many characters of a text; an ellipsis shows that there were more.

    Signs that turn the direction of writing are replaced, since they would turn the words after
    the text, too. Arabic or Hebrew needs none of them.
    """
    whole = _TURNING.sub("\ufffd", str(text))
    return whole if len(whole) <= characters else whole[:characters] + " …"


def _is_number(value: object) -> TypeGuard[int | float]:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -_MOST < value < _MOST  # no inf, NaN or integer that no float holds
