"""Write the built-in sample encyclopedia and its tokenizer.

    python scripts/make_sample.py [--out DIR]

Articles in plain English, made from the tables of facts in `scripts/sample/`. Every choice (which
facts, in which order, in which words) is a hash of the article's name, so the same tables and the
same versions of pyarrow and tokenizers give the same bytes. The files look like those of
`wikimedia/wikipedia`: columns id, url, title, text; several parquet files of several row groups.
"""

import argparse
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from sample.facts import Row, Topic, key_of, load_topics, some
from sample.prose import fill

from llmtrain.data.tokens.tokenizer import tokenizer_config, train_bpe
from llmtrain.hashing import permutation

HERE = Path(__file__).resolve().parent
HOME = HERE.parent / "llmtrain" / "data" / "sample"
SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "url", "title", "text")])
NUM_FILES = 4
GROUPS_PER_FILE = 4
ENTRIES = 2048
ANOTHER = (
    "Another {kind} is {the}.",
    "{the} is another {kind}.",
    "Compare the article about {the}, another {kind}.",
    "Quite another {kind} is {the}.",
)
NAMING = {"name", "the", "it", "its", "this", "he", "his", "surname"}
EXACT = {"born", "year", "admitted", "hardness", "light"}  # else a comparison needs 10 % between


def main() -> None:
    """Write everything into the directory that the command line names."""
    parser = argparse.ArgumentParser(description="Rebuild the built-in sample encyclopedia.")
    parser.add_argument("--out", type=Path, default=HOME, help="directory to write to")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    articles = write_articles(load_topics(HERE / "sample"))
    texts = [article["text"] for article in articles]
    write_parquet(articles, out)
    (out / "tokenizer.json").write_text(train_bpe(texts, ENTRIES), encoding="utf-8")
    (out / "tokenizer_config.json").write_text(tokenizer_config(), encoding="utf-8")
    size = sum(len(text.encode()) for text in texts)
    print(f"{len(texts)} articles, {size:,} bytes of text, in {out}")


def write_articles(topics: dict[str, Topic]) -> list[Row]:
    """All articles in their final order: id, url, title, text."""
    named = Counter(row["title"] for topic in topics.values() for row in topic.rows)
    articles = []
    for topic in topics.values():
        for row in topic.rows:
            title = row["title"]
            if named[title] > 1:
                title = f"{title} ({row['this']})"
            path = f"{topic.kind}/{row['name']}".lower().replace(" ", "-")
            articles.append(
                {"url": f"sample://{path}", "title": title, "text": write_text(topic, row)}
            )
    order = permutation(len(articles), key_of("order of the articles")).tolist()
    return [{"id": str(number + 1)} | articles[i] for number, i in enumerate(order)]


def write_text(topic: Topic, row: Row) -> str:
    """The text of one article: an opening, facts in an order of its own, another thing like it."""
    key = key_of(topic.kind, row["name"])
    order = (1 + permutation(len(topic.slots) - 1, key)).tolist()
    body = say_facts(topic, row, [0, *order], 6 + key % 4, row["name"])
    lines = 3 + key_of("paragraph", key) % 3
    paragraphs = [body[i : i + lines] for i in range(0, len(body), lines)]
    if len(paragraphs) > 1 and len(paragraphs[-1]) == 1:
        alone = paragraphs.pop()
        paragraphs[-1] += alone
    if key_of("another", key) % 5:
        paragraphs.append(write_about_another(topic, row, order))
    return "\n\n".join(" ".join(paragraph) for paragraph in paragraphs)


def write_about_another(topic: Topic, row: Row, order: list[int]) -> list[str]:
    """A paragraph about another row of the topic."""
    rest = [other for other in topic.rows if other is not row]
    key = key_of("another row", topic.kind, row["name"])
    other = rest[key % len(rest)]
    opening = ANOTHER[key // len(rest) % len(ANOTHER)]
    first = fill(opening, {"the": other["the"], "kind": topic.kind}.__getitem__)
    telling = [slot for slot in order if all(fields_in(way) for way in topic.slots[slot])]
    return [first or "", *say_facts(topic, other, telling, 2 + key % 3, row["name"])]


def say_facts(topic: Topic, row: Row, slots: list[int], most: int, salt: str) -> list[str]:
    """Up to `most` sentences about `row`, each with something new in it."""
    said: set[str] = set()
    sentences: list[str] = []
    for slot in slots:
        ways = topic.slots[slot]
        why = (topic.kind, row["name"], slot, salt)
        for i in permutation(len(ways), key_of("way", *why)).tolist():
            fields = fields_in(ways[i])
            old = bool(fields) and fields <= said
            sentence = None if old else fill(ways[i], field_of(topic, row, why))
            if sentence and len(sentences) < most:
                sentences.append(sentence)
                said |= fields
                break
    return sentences


def fields_in(way: str) -> set[str]:
    """The fields of a template that say something."""
    return set(re.findall(r"\{([^{}:]+(?::[^{}?:]+)?)", way)) - NAMING


def field_of(topic: Topic, row: Row, why: tuple[object, ...]) -> Callable[[str], str]:
    """The look-up for a template about `row`: field → value, "" if there is none."""
    at = topic.rows.index(row)

    def lookup(field: str) -> str:
        name, _, column = field.partition(":")
        if name == "it":
            the = row["the"]
            return ("it", "it", the, f"this {row['this']}")[key_of("it", *why) % 4]
        if name == "its":
            return "its"
        if name in row:
            return row[name]
        if name == "previous":
            return topic.rows[at - 1]["the"] if at else ""
        if name == "next":
            return topic.rows[at + 1]["the"] if at + 1 < len(topic.rows) else ""
        found = others(topic, row, name, column)
        if name == "peers" and len(found) < 2:  # the sentences are about several
            return ""
        return some(found, 1 if name in ("more", "less") else 3, *why)

    return lookup


def others(topic: Topic, row: Row, name: str, column: str) -> list[str]:
    """Rows of the topic that stand in the relation `name` to `row`."""
    rest = [other for other in topic.rows if other is not row]
    if name == "others":
        return [other["the"] for other in rest]
    value = row.get(column, "")
    if not value or name not in ("peers", "more", "less"):
        return []
    rest = [other for other in rest if other.get(column)]
    if name == "peers":
        return [other["the"] for other in rest if other[column] == value]
    margin = 1.0 if column in EXACT else 1.1
    if name == "more":
        return [o["the"] for o in rest if float(o[column]) > float(value) * margin]
    return [o["the"] for o in rest if float(o[column]) * margin < float(value)]


def write_parquet(articles: list[Row], out: Path) -> None:
    """Write the articles as files of about equal size."""
    for file in range(NUM_FILES):
        part = articles[len(articles) * file // NUM_FILES : len(articles) * (file + 1) // NUM_FILES]
        pq.write_table(
            pa.Table.from_pylist(part, schema=SCHEMA),
            out / f"train-{file:05d}-of-{NUM_FILES:05d}.parquet",
            row_group_size=-(-len(part) // GROUPS_PER_FILE),
            compression="zstd",
            compression_level=9,
            use_dictionary=False,
        )


if __name__ == "__main__":
    main()
