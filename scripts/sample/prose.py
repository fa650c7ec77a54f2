"""English for the sample: numbers in words, articles, plurals, lists, and filling in templates.

A template is a sentence with fields in braces. `{field}` is the field's value, a list as
"a, b and c"; `{field:filter}` changes it; `{peers:field}`, `{more:field}` and `{less:field}` name
other rows of the same topic. A template whose fields are not all there is not used.

    {name:a}            an oak               {name:-}         nothing, but the field must be there
    {moons:n moon}      two moons            {uses:?is|are}   is, or are if it is a list
    {order:ord}         third                {uses:first}     the first of a list
    {sides:word}        six                  {length:,}       6,650
"""

import re
from collections.abc import Callable, Iterable

_ONES = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
]
_TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
_PLURALS = {"person": "people", "foot": "feet"}
_AN_IN_SPITE = ("hour", "honest", "X-ray")
_A_IN_SPITE = ("uni", "eu", "one", "use", "uk", "ur", "Eu", "Uni")
_FIELD = re.compile(r"\{([^{}]+)\}")
_START = re.compile(r"(^|[.?!] )([^\W\d_])")


def in_words(n: int) -> str:
    """A whole number from 0 to 999 in words."""
    if n >= 100:
        rest = f" and {in_words(n % 100)}" if n % 100 else ""
        return f"{_ONES[n // 100]} hundred{rest}"
    if n < 20:
        return _ONES[n]
    return _TENS[n // 10] + (f"-{_ONES[n % 10]}" if n % 10 else "")


def ordinal(n: int) -> str:
    """A whole number from 1 to 99 as an ordinal in words."""
    head, dash, last = in_words(n).rpartition("-")
    if last in _ORDINALS:
        last = _ORDINALS[last]
    else:
        last = last[:-1] + "ieth" if last.endswith("y") else last + "th"
    return head + dash + last


def with_article(noun: str) -> str:
    """`noun` with "a" or "an", by its sound."""
    vowel = noun[0] in "aeiouAEIO" and not noun.startswith(_A_IN_SPITE)
    return f"{'an' if vowel or noun.startswith(_AN_IN_SPITE) else 'a'} {noun}"


def plural(noun: str) -> str:
    """The plural of the last word of `noun`."""
    head, space, last = noun.rpartition(" ")
    if last in _PLURALS:
        return head + space + _PLURALS[last]
    if last.endswith("y") and last[-2] not in "aeiou":
        return head + space + last[:-1] + "ies"
    return noun + ("es" if last.endswith(("s", "x", "ch", "sh")) else "s")


def listed(items: Iterable[str]) -> str:
    """Items as a list in a sentence: "a, b and c"."""
    *firsts, last = items
    return f"{', '.join(firsts)} and {last}" if firsts else last


def counted(value: str, noun: str) -> str:
    """A number with its noun: "one moon", "no moons", "1,250 moons"."""
    n = int(value)
    number = "no" if n == 0 else in_words(n) if n <= 12 else f"{n:,}"
    return f"{number} {noun if n == 1 else plural(noun)}"


def filtered(value: str, how: str) -> str:
    """`value` as the filter `how` of a template asks (see the top of the file)."""
    items = value.split("; ")
    match how.split(" ")[0]:
        case "":
            return listed(items)
        case "a":
            return with_article(listed(items))
        case "n":
            return counted(value, how[2:])
        case ",":
            return f"{int(value):,}"
        case "ord":
            return ordinal(int(value))
        case "word":
            return in_words(int(value))
        case "first":
            return items[0]
        case "-":
            return ""
        case _ if how.startswith("?"):
            return how[1:].split("|")[len(items) > 1]
    raise ValueError(f"no filter {how!r}")


def fill(template: str, lookup: Callable[[str], str]) -> str | None:
    """`template` with its fields filled in, or None if `lookup` gives "" for one of them."""
    missing = False

    def replace(match: re.Match[str]) -> str:
        nonlocal missing
        field, _, how = match[1].partition(":")
        if field in ("peers", "more", "less"):
            column, _, how = how.partition(":")
            field = f"{field}:{column}"
        value = lookup(field)
        missing = missing or not value
        return filtered(value, how) if value else ""

    text = _FIELD.sub(replace, template)
    return None if missing else _START.sub(lambda m: m[1] + m[2].upper(), text)
