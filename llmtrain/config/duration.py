"""Lengths of time as people write them: `3h50m`, `90m`, `45s`, `1d12h`."""

from __future__ import annotations

import re

GRAMMAR = "days, hours, minutes and seconds in this order, as 3h50m, 90m or 45s"
_PARTS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def seconds(text: str) -> int | None:
    """Return the seconds of a length of time; None if it is not a length of time, or is 0."""
    found = _PARTS.fullmatch(text.strip())
    if found is None:
        return None
    parts = (int(part or 0) for part in found.groups())
    return sum(n * unit for n, unit in zip(parts, (86400, 3600, 60, 1), strict=True)) or None
