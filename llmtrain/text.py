"""Text for people: numbers, sizes and lengths of time, cut to a width, without control characters.

A length of time is written as `2 h 10 min`, and read as people write it in a config: `3h50m`.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TypeGuard
from unicodedata import combining, east_asian_width

_MOST = sys.float_info.max
_TURNING = re.compile(r"[\u202a-\u202e\u2066-\u2069]")


def harmless(text: str, keep: str = "") -> str:
    """Escape every character that is not printable, since a terminal might act on it.

    File names and texts come from elsewhere. They could move the cursor or reverse the direction of
    writing.

    keep: characters that stay as they are, such as `\\n` in a message of several lines
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


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
        if (amount := abs(value) / unit) >= 0.9995 and abs(value) < 1e15:
            decimals = 0 if amount >= 99.95 else 1 if amount >= 9.995 else 2
            return f"{value / unit:.{decimals}f}{sign}"
    return f"{value:.3g}"


def size(value: object) -> str:
    """Format bytes in powers of 1,024."""
    if not _is_number(value):
        return "–"
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            if amount >= 100:
                return f"{amount:.1f} {unit}" if unit == "GiB" else f"{amount:.0f} {unit}"
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:,.1f} TiB"


def percent(share: float) -> str:
    """Format a share: 94 %, 2.1 %, < 0.1 %, 0 %."""
    value = 100 * share
    if 0 < value < 0.05:
        return "< 0.1 %"
    return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.1f} %"


def duration(value: float) -> str:
    """Format seconds: 28 ms, 4.2 s, 1 min 15 s, 2 h 10 min, 3 d 4 h."""
    if value < 1:
        return f"{max(0.0, value) * 1000:.0f} ms"
    if value < 10:
        return f"{value:.2g} s"
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


DURATION = "days, hours, minutes and seconds in this order, as 3h50m, 90m or 45s"
_PARTS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def parse_duration(text: str) -> int | None:
    """Return the seconds of a length of time; None if it is not a length of time, or is 0."""
    match = _PARTS.fullmatch(text.strip())
    if match is None:
        return None
    parts = (int(part or 0) for part in match.groups())
    return sum(n * unit for n, unit in zip(parts, (86400, 3600, 60, 1), strict=True)) or None


def first_few(names: Sequence[str], most: int = 8) -> str:
    """Return the first few names for a message, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def columns(text: str) -> int:
    """Return the width of a text on a terminal, in columns."""
    return sum(_columns(char) for char in text)


def fit(text: str, width: int) -> str:
    """Shorten a text to a width; an ellipsis marks that something was cut off.

    It is cut between words, unless a long word would take half of the width with it.
    """
    if columns(text) <= width:
        return text
    room, prefix = width - 1, ""
    for char in text:
        room -= _columns(char)
        if room < 0:
            break
        prefix += char
    words = prefix.rpartition(" ")[0]
    return (words if 2 * columns(words) > width else prefix) + "…"


def wrap(text: str, width: int) -> Iterator[str]:
    """Break a text into lines of at most this width, at spaces where there are any."""
    line, used, space = "", 0, -1
    for char in text:
        if used + _columns(char) > width:
            cut = space if space > 0 else len(line)
            yield line[:cut]
            line = line[cut:].removeprefix(" ")
            used, space = columns(line), line.rfind(" ")
        if char == " ":
            space = len(line)
        line, used = line + char, used + _columns(char)
    yield line


def _columns(char: str) -> int:
    if combining(char):
        return 0
    return 2 if east_asian_width(char) in "WF" else 1
