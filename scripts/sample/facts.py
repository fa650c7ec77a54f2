"""The tables of the sample, and the facts that follow from them.

A topic is a kind of thing: a table of rows and slots of sentences. The `.txt` files hold them:

    # river | rivers | the          kind, plural, whether names take "the"; a fourth: "this city"
    name | length | countries       the columns; "; " separates the items of a list
    Nile | 6650 | Uganda; Egypt
    + name | origin                 more columns, for some of the rows
    + Nile | a Greek word
                                    a blank line; then slots, one fact each, the first one opens
    {the} is {length:,} km long.    the ways to say it
    {it} measures {length:,} km.

What can be reckoned (molar masses, divisors, days of the week, who lies next to whom) is reckoned
here and added to the rows as columns.
"""

import datetime
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sample.prose import in_words, listed

from llmtrain.hashing import mix, permutation

Row = dict[str, str]
ROMAN = (
    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"),
    (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
)  # fmt: skip
GROUP_FACTS = {
    "mammal": "Like most mammals, it gives birth to live young and feeds them with milk.",
    "bird": "Like all birds, it has feathers and lays eggs.",
    "reptile": "Like other reptiles, it has a dry skin with scales and breathes with lungs.",
    "amphibian": "Like most amphibians, it begins its life in water.",
    "fish": "Like other fish, it breathes with gills and swims with fins.",
    "insect": "Like all insects, it has six legs and a body in three parts.",
    "arachnid": "Like other arachnids, it has eight legs when it is grown.",
    "crustacean": "Like other crustaceans, it has a hard shell that it must shed as it grows.",
    "mollusc": "Like other molluscs, it has a soft body without bones.",
}
SORT_FACTS = {
    "tree": "A tree has a trunk of wood and can live for many years.",
    "fruit tree": "A fruit tree bears its flowers first and its fruit later.",
    "conifer": "Most conifers have needles or scales and bear their seeds in cones.",
    "shrub": "A shrub has several stems of wood and is smaller than a tree.",
    "cereal": "Cereals are grasses that people grow for their grain.",
    "vegetable": "Vegetables give people vitamins and minerals.",
    "flower": "Its flowers attract bees and other insects or are admired by people.",
    "vine": "A vine needs a tree, a wall or a frame to hold on to.",
    "palm": "Palms have no branches but a crown of large leaves at the top.",
    "succulent": "Succulents can live for a long time without rain.",
    "spore plant": "Plants of this sort had covered the land long before there were flowers.",
}
FAMILY_FACTS = {
    "string instrument": "Its sound begins when a string moves to and fro.",
    "woodwind instrument": "Its sound comes from a column of moving air.",
    "brass instrument": "The lips of the player make the air in the tube move to and fro.",
    "keyboard instrument": "The player presses keys with the fingers.",
    "percussion instrument": "It sounds when it is struck, shaken or scraped.",
}
ON = ("coasts", "cold coasts", "plains", "cold plains", "farms", "islands", "cliffs",
      "farms and grassland", "farms and hills", "farms and mountains", "rocks by the sea",
      "lakes and coasts", "walls and trees", "cliffs and towers", "sea ice",
      "riverbanks")  # fmt: skip
ON_THE = ("sea floor",)
IN_THE = ("ocean", "deep ocean", "soil", "desert", "rainforest", "mountains", "high mountains")
TOOL_PLACES = {
    "outdoors": "outdoors",
    "home": "at home",
    "school": "at school",
    "building site": "on the building site",
}
SURNAMES = {
    "Leonardo da Vinci": "Leonardo",
    "Dante Alighieri": "Dante",
    "Natsume Soseki": "Natsume",
    "Vincent van Gogh": "Van Gogh",
    "Vasco da Gama": "Vasco da Gama",
    "Marco Polo": "Marco Polo",
    "Gabriel García Márquez": "García Márquez",
    "John von Neumann": "Von Neumann",
}
COLOURS = (
    "black 000000, white ffffff, red ff0000, lime 00ff00, blue 0000ff, yellow ffff00, cyan 00ffff, "
    "magenta ff00ff, silver c0c0c0, grey 808080, maroon 800000, olive 808000, green 008000, "
    "purple 800080, teal 008080, navy 000080, orange ffa500, brown a52a2a, crimson dc143c, "
    "coral ff7f50, gold ffd700, khaki f0e68c, indigo 4b0082, violet ee82ee, plum dda0dd, "
    "orchid da70d6, lavender e6e6fa, salmon fa8072, tomato ff6347, sienna a0522d, peru cd853f, "
    "chocolate d2691e, tan d2b48c, wheat f5deb3, beige f5f5dc, ivory fffff0, linen faf0e6, "
    "turquoise 40e0d0, aquamarine 7fffd4, azure f0ffff, sky blue 87ceeb, royal blue 4169e1, "
    "steel blue 4682b4, slate grey 708090, sea green 2e8b57, spring green 00ff7f, pink ffc0cb, "
    "hot pink ff69b4, fire brick b22222, snow fffafa"
)


@dataclass(frozen=True, slots=True)
class Topic:
    """A kind of thing: its rows and the slots of sentences about one of them."""

    kind: str
    definite: bool  # names take "the"
    this: str  # "city" in "this city"
    rows: list[Row]
    slots: tuple[tuple[str, ...], ...]


def key_of(*parts: object) -> int:
    """A 64-bit key for a choice that depends on `parts` alone."""
    text = "\0".join(str(part) for part in parts).encode()
    return mix(
        len(text), *(int.from_bytes(text[i : i + 8], "little") for i in range(0, len(text), 8))
    )


def some(items: Iterable[str], most: int, *why: object) -> str:
    """Up to `most` of `items`, chosen by `why`, in their own order, as a list."""
    pool = list(dict.fromkeys(items))
    chosen = sorted(permutation(len(pool), key_of(*why))[:most].tolist())
    return "; ".join(pool[i] for i in chosen)


def load_topics(folder: Path) -> dict[str, Topic]:
    """All topics in the `.txt` files of `folder`, with everything that can be reckoned."""
    topics: dict[str, Topic] = {}
    for file in sorted(folder.glob("*.txt")):
        for section in re.split(r"^# ", file.read_text(encoding="utf-8"), flags=re.M)[1:]:
            topic = parse(section)
            topics[topic.kind] = topic
    make_rows({kind: topic.rows for kind, topic in topics.items()})
    for topic in topics.values():
        for row in topic.rows:
            finish(row, topic)
    add_facts({kind: topic.rows for kind, topic in topics.items()})
    return topics


def parse(section: str) -> Topic:
    """One topic from its text (the form is on top of the file)."""
    table, *slots = re.split(r"\n\n+", section.strip())
    header, *lines = table.split("\n")
    kind, _, article, *this = header.split(" | ")
    rows = read_rows([line for line in lines if not line.startswith("+")])
    by_name = {row["name"]: row for row in rows}
    for more in read_rows([line[2:] for line in lines if line.startswith("+")]):
        by_name[more["name"]].update(more)
    ways = tuple(tuple(slot.split("\n")) for slot in slots)
    return Topic(kind, article == "the", this[0] if this else kind, rows, ways)


def read_rows(lines: list[str]) -> list[Row]:
    """Rows from lines of cells; the first line names the columns."""
    if not lines:
        return []
    columns, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [dict(zip(columns, cells, strict=True)) for cells in rows]


def finish(row: Row, topic: Topic) -> None:
    """Add what every row has: `the`, a plain name, a title."""
    name = row["name"].removeprefix("the ")
    row["the"] = f"the {name}" if topic.definite else row["name"]
    row["name"] = name
    row.setdefault("title", name[0].upper() + name[1:])
    row.setdefault("this", topic.this)


def make_rows(rows: dict[str, list[Row]]) -> None:
    """Fill the topics that have no table: numbers, years, colours, capitals."""
    rows["number"] += [{"name": str(n), "title": f"Number {n}"} for n in range(1, 161)]
    rows["year"] += [{"name": str(n), "title": f"Year {n}"} for n in range(1850, 1931)]
    for entry in COLOURS.split(", "):
        name, _, code = entry.rpartition(" ")
        rows["colour"].append({"name": name, "hex": f"#{code}"})
    for country in rows["country"]:
        own = country["name"].removeprefix("the ")
        if country["capital"] and country["capital"] != own:
            shared = {k: country[k] for k in ("continent", "languages", "currency", "landlocked")}
            named = {"name": country["capital"], "country": country["name"]}
            rows["capital"].append(named | shared)
            country["capital_city"] = "yes"


def add_facts(rows: dict[str, list[Row]]) -> None:
    """Add to each topic what follows from its own table and from the others."""
    add_links(rows)
    for kind, add in (
        ("element", add_element), ("mineral", add_mineral), ("animal", add_animal),
        ("plant", add_plant), ("body part", add_body_part), ("person", add_person),
        ("number", add_number), ("year", add_year), ("colour", add_colour),
        ("polygon", add_polygon), ("letter", add_letter), ("American state", add_state),
        ("mountain", add_mountain), ("unit", add_unit), ("capital", add_capital),
    ):  # fmt: skip
        for index, row in enumerate(rows[kind]):
            add(row, index + 1)
    masses = {row["symbol"]: row for row in rows["element"]}
    for row in rows["compound"]:
        add_compound(row, masses)
    for index, row in enumerate(rows["Greek letter"]):
        row["number"] = str(index + 1)
    for index, row in enumerate(days := rows["day of the week"]):
        row["yesterday"], row["tomorrow"] = days[index - 1]["name"], days[(index + 1) % 7]["name"]
    for row in rows["river"]:
        row["the_river"] = row["the"] if "River" in row["name"] else f"the river {row['name']}"
    for row in rows["lake"]:
        row["boats"] = "" if row["name"] in ("Dead Sea", "Lake Eyre", "Great Salt Lake") else "yes"
    for row in rows["instrument"]:
        row["family_fact"] = FAMILY_FACTS.get(row["family"], "")
    for row in rows["programming language"]:
        row["decade"] = f"{row['year'][:3]}0s"
    for row in rows["tool"]:
        row["place_in"] = TOOL_PLACES.get(row["place"], f"in the {row['place']}")
    for row in rows["occupation"]:
        on = row["place"].endswith(("boat", "ship", "farm", "building site", "streets"))
        row["place_in"] = f"{'on' if on else 'in'} {row['place']}"
    for row in rows["month"]:
        row["short"] = "" if row["days"] else "yes"
        row["long"] = "yes" if row["days"] else ""
    for row in rows["language"]:
        row["one_script"] = "" if ";" in row["script"] else "yes"


def link(rows: dict[str, list[Row]], source: str, column: str, target: str, new: str) -> None:
    """Give each row of `target` the rows of `source` whose `column` names it."""
    for row in rows[target]:
        names = [other["the"] for other in rows[source] if row["the"] in other[column].split("; ")]
        row[new] = some(names, 4, target, row["name"], new)


def add_links(rows: dict[str, list[Row]]) -> None:
    """What one table says about the rows of another."""
    for source, column, target, new in (
        ("river", "countries", "country", "rivers"), ("lake", "countries", "country", "lakes"),
        ("mountain", "countries", "country", "mountains"),
        ("island", "owner", "country", "islands"), ("person", "country", "country", "people"),
        ("country", "languages", "language", "countries"),
        ("country", "continent", "continent", "countries"), ("sea", "part", "ocean", "seas"),
        ("river", "continent", "continent", "rivers"), ("lake", "continent", "continent", "lakes"),
        ("mountain", "continent", "continent", "mountains"), ("river", "city", "capital", "river"),
        ("moon", "planet", "planet", "moon_names"), ("person", "born", "year", "birth_people"),
        ("person", "died", "year", "death_people"), ("element", "year", "year", "discovered"),
        ("element", "number", "number", "element"),
    ):  # fmt: skip
        link(rows, source, column, target, new)
    countries = {row["the"]: row for row in rows["country"]}
    neighbours: dict[str, list[str]] = {name: [] for name in countries}
    for name, row in countries.items():
        for other in filter(None, row["borders"].split("; ")):
            neighbours[name].append(other)
            neighbours[other].append(name)
    for name, row in countries.items():
        row["borders"] = some(sorted(neighbours[name]), 5, "borders", name)
        row["many_borders"] = "yes" if ";" in row["borders"] else ""
        first = row["languages"].split("; ")[0]
        same = [
            o for o, r in countries.items() if o != name and first in r["languages"].split("; ")
        ]
        row["same_language"] = some(same, 3, "language", name) if first else ""
    for row in rows["capital"]:
        row["borders"] = countries[row["country"]]["borders"]
    for row in rows["letter"]:
        for kind, new in (("element", "elements"), ("country", "countries")):
            names = [r["the"] for r in rows[kind] if r["title"].startswith(row["name"])]
            row[new] = some(names, 4, new, row["name"])


def add_element(row: Row, number: int) -> None:
    """The place in the periodic table, and what comes from it."""
    starts = (1, 3, 11, 19, 37, 55, 87, 119)
    period = next(p for p in range(1, 8) if number < starts[p])
    row["period"] = str(period)
    place = number - starts[period - 1] + 1
    length = starts[period] - starts[period - 1]
    row["inner"] = "yes" if length == 32 and 3 <= place <= 17 else ""
    late = 18 - (length - place)
    group = place if place <= 2 and number != 2 else late
    row["group"] = "" if row["inner"] else str(group)
    row["lone_year"] = "yes" if row["year"] and not row["discoverer"] else ""
    row["radioactive"] = "yes" if number in (43, 61) or number > 83 else ""
    row["artificial"] = "yes" if number in (43, 61) or number > 92 else ""
    row["superheavy"] = "yes" if number > 103 else ""


def add_compound(row: Row, elements: dict[str, Row]) -> None:
    """Elements, atoms and molar mass from the formula."""
    counts: dict[str, int] = {}
    for symbol, count in re.findall(r"([A-Z][a-z]?)(\d*)", row["formula"]):
        counts[symbol] = counts.get(symbol, 0) + int(count or 1)
    names = {symbol: elements[symbol]["name"] for symbol in counts}
    row["elements"] = "; ".join(names.values())
    row["first_element"] = next(iter(names.values()))
    row["atoms"] = str(sum(counts.values()))
    row["mass"] = f"{sum(float(elements[s]['mass']) * n for s, n in counts.items()):.1f}"
    row["counts"] = listed(
        f"there {'is' if n == 1 else 'are'} {in_words(n)} atom{'s' * (n > 1)} of {names[s]}"
        for s, n in counts.items()
    )
    row["state_kind"] = {"gas": "gases", "liquid": "liquids", "solid": "solids", "": ""}[
        row["state"]
    ]
    for symbol in counts:
        have = elements[symbol].get("compounds", "")
        if have.count(";") < 4:
            elements[symbol]["compounds"] = "; ".join(filter(None, (have, row["name"])))


def add_mineral(row: Row, _: int) -> None:
    """Colours are said in two ways."""
    row["many_colours"] = "yes" if row["colour"] == "many colours" else ""
    row["plain_colour"] = "" if row["many_colours"] else "yes"


def add_animal(row: Row, _: int) -> None:
    """The group's plural and facts, and the preposition of its home."""
    group, home = row["group"], row["home"]
    row["group_plural"] = group if group == "fish" else f"{group}s"
    odd = row["name"] in ("platypus", "fire salamander")
    row["group_fact"] = "" if odd else GROUP_FACTS[group]
    the = "the " if home in (*IN_THE, *ON_THE) else ""
    row["home_in"] = f"{'on' if home in (*ON, *ON_THE) else 'in'} {the}{home}"
    row["this"] = "animal"


def add_plant(row: Row, _: int) -> None:
    """Number of the part that is used, and facts about the sort."""
    row["part_is"] = (
        "is" if row["part"] in ("wood", "sap", "fruit", "grain", "bark", "juice") else "are"
    )
    row["sort_fact"] = SORT_FACTS.get(row["sort"], "")
    row["leafy"] = "" if row["sort"] in ("spore plant", "succulent") else "yes"


def add_body_part(row: Row, _: int) -> None:
    """Whether blood reaches it, and the verb of its place."""
    outside = ("nail", "hair", "red blood cell", "white blood cell")
    row["blood"] = "" if row["name"] in outside else "yes"
    row["place_contains"] = "contain" if row["place"].endswith("lungs") else "contains"
    row["this"] = "part of the body"


def add_person(row: Row, _: int) -> None:
    """Surname, pronouns, age and century."""
    row["surname"] = SURNAMES.get(row["name"], row["name"].rpartition(" ")[2])
    row["he"], row["his"] = row["sex"], {"he": "his", "she": "her"}[row["sex"]]
    row["age"] = str(int(row["died"]) - int(row["born"])) if row["died"] and row["born"] else ""
    middle = row["born"] and int(row["born"]) + 30
    row["century"] = str((middle - 1) // 100 + 1) if middle else ""


def add_number(row: Row, n: int) -> None:
    """What arithmetic says about `n`."""
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    factors, rest = [], n
    for p in range(2, n + 1):
        while rest % p == 0:
            factors.append(str(p))
            rest //= p
    prime = len(divisors) == 2
    root, cube = round(n**0.5), round(n ** (1 / 3))
    triangle = round(((8 * n + 1) ** 0.5 - 1) / 2)
    fibonacci = [1, 2]
    while fibonacci[-1] < n:
        fibonacci.append(fibonacci[-2] + fibonacci[-1])
    facts = {
        "words": in_words(n), "before": str(n - 1), "after": str(n + 1),
        "parity": "odd" if n % 2 else "even", "prime": "yes" if prime else "",
        "composite": "yes" if len(divisors) > 2 else "", "factors": " times ".join(factors),
        "divisors": "; ".join(str(d) for d in divisors) if n > 1 else "",
        "square": f"{n * n:,}", "root": str(root), "is_square": "yes" if root**2 == n > 1 else "",
        "cube_root": str(cube), "is_cube": "yes" if cube**3 == n > 1 else "",
        "triangle": in_words(triangle),
        "is_triangle": "yes" if triangle * (triangle + 1) // 2 == n > 1 else "",
        "binary": f"{n:b}", "roman": roman(n), "half": str(n // 2) if n % 2 == 0 else "",
        "double": str(2 * n), "plus_ten": str(n + 10), "digit_sum": str(sum(map(int, str(n)))),
        "from_hundred": str(100 - n) if n < 100 else "",
        "next_prime": str(next(m for m in range(n + 1, 2 * n + 2) if is_prime(m))),
    }  # fmt: skip
    row.update(facts)
    if n in fibonacci[2:]:
        at = fibonacci.index(n)
        row |= {"is_fib": "yes", "fib_a": str(fibonacci[at - 2]), "fib_b": str(fibonacci[at - 1])}


def is_prime(n: int) -> bool:
    """Whether `n` ≥ 2 has no divisor but one and itself."""
    return all(n % d for d in range(2, int(n**0.5) + 1))


def roman(n: int) -> str:
    """`n` ≥ 1 in Roman numerals."""
    text = ""
    for value, sign in ROMAN:
        text += sign * (n // value)
        n %= value
    return text


def add_year(row: Row, _: int) -> None:
    """What the Gregorian calendar says about a year."""
    n = int(row["name"])
    leap = n % 4 == 0 and (n % 100 != 0 or n % 400 == 0)
    row |= {"leap": "a leap year" if leap else "a common year", "days": str(365 + leap)}
    row |= {"before": str(n - 1), "after": str(n + 1), "roman": roman(n)}
    row |= {"february": str(28 + leap), "century": str((n - 1) // 100 + 1)}
    dates = {"first_day": (1, 1), "last_day": (12, 31), "july": (7, 1), "christmas": (12, 25)}
    for field, (month, day) in dates.items():
        row[field] = f"{datetime.date(n, month, day):%A}"


def add_colour(row: Row, _: int) -> None:
    """The three values of a colour, and what they say about it."""
    parts = [int(row["hex"][i : i + 2], 16) for i in (1, 3, 5)]
    row |= dict(zip(("red", "green", "blue"), map(str, parts), strict=True))
    most = [n for n, p in zip(("red", "green", "blue"), parts, strict=True) if p == max(parts)]
    row["strongest"] = most[0] if len(most) == 1 else ""
    light = sum(share * part for share, part in zip((0.3, 0.59, 0.11), parts, strict=True))
    row["light"] = f"{light:.1f}"
    row["bright"], row["dark"] = "yes" * (light > 200), "yes" * (light < 60)
    row["grey"] = "yes" * (len(set(parts)) == 1 and 0 < light < 255)


def add_polygon(row: Row, _: int) -> None:
    """Angles and diagonals from the number of sides."""
    n = int(row["sides"])
    row["angles"] = str(180 * (n - 2))
    row["angle"] = "" if 360 % n else str(180 - 360 // n)
    row["diagonals"] = str(n * (n - 3) // 2)
    if n == 20:  # its forerunner in the table has eight sides fewer
        row["previous"] = ""


def add_letter(row: Row, number: int) -> None:
    """Number, code, vowel or consonant."""
    row |= {"number": str(number), "code": str(ord(row["name"]))}
    row["vowel"] = "yes" * (row["name"] in "AEIOU")
    row["consonant"] = "yes" * (row["name"] not in "AEIOUYW")
    row["the"] = f"the letter {row['name']}"


def add_state(row: Row, _: int) -> None:
    """Whether the capital is the largest city."""
    row["same_largest"] = "yes" * (row["largest"] == row["capital"])
    row["other_largest"] = "yes" * bool(row["largest"] and not row["same_largest"])


def add_mountain(row: Row, _: int) -> None:
    """Number of countries, snow, and the verb of the range."""
    row["one_country"] = "yes" * bool(row["countries"] and ";" not in row["countries"])
    row["two_countries"] = "yes" * (";" in row["countries"])
    row["snowy"] = "yes" * (int(row["height"]) >= 7000)
    many = row["range"].endswith(("as", "es", "ps", "ns"))
    row["range_verb"] = "include" if many else "includes"


def add_unit(row: Row, _: int) -> None:
    """The verb of the size."""
    row["make"] = "make" if row["size"].endswith("s") and row["size"][0].isdigit() else ""


def add_capital(row: Row, _: int) -> None:
    """Its first letter, its length, and whether one language is spoken."""
    row["initial"] = row["name"][0]
    row["letters"] = str(sum(c.isalpha() for c in row["name"]))
    row["one_language"] = "yes" * (";" not in row["languages"])
