"""Small data of every form that a person may bring, written where a test wants it."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from helpers import chats, corpus

COUNT = 60


def _said(n: int) -> tuple[str, str]:
    messages = chats.rows_of(1, n)[0]["messages"]
    return messages[0]["content"], messages[1]["content"]


def _rows(make: Callable[[str, str], dict[str, Any]]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        rows = [make(*_said(n)) for n in range(COUNT)]
        return corpus.write_jsonl(folder / "rows.jsonl", rows)

    return write


def _messages(folder: Path) -> Path:
    return corpus.write_jsonl(folder / "chat.jsonl", chats.rows_of(COUNT))


def _sharegpt(question: str, answer: str) -> dict[str, Any]:
    turns = [("human", question), ("gpt", answer)]
    return {"conversations": [{"from": who, "value": said} for who, said in turns]}


def _lists(question: str, answer: str) -> dict[str, Any]:
    user, assistant = chats.talk(question, answer)
    return {"prompt": [user], "completion": [assistant]}


def _pages(folder: Path) -> Path:
    for n, row in enumerate(corpus.articles(40)):
        path = folder / "pages" / f"{n}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# Page {n}\n\n{row['text']}\n", encoding="utf-8")
    return folder / "pages"


def _csv(folder: Path) -> Path:
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["title", "content"])
        writer.writerows([f"Page {n}", row["text"]] for n, row in enumerate(corpus.articles(80)))
    return folder / "rows.csv"


def _parquet(folder: Path) -> Path:
    """A table without the column `text`."""
    rows = corpus.articles(80)
    columns = {"number": list(range(80)), "summary": [row["text"][:20] for row in rows]}
    pq.write_table(
        pa.table(columns | {"body": [row["text"] for row in rows]}), folder / "t.parquet"
    )
    return folder / "t.parquet"


FORMS: dict[str, Callable[[Path], Path]] = {
    "messages": _messages,
    "sharegpt": _rows(_sharegpt),
    "strings": _rows(lambda q, a: {"prompt": q + "\n", "completion": a}),
    "lists": _rows(_lists),
    "alpaca": _rows(lambda q, a: {"instruction": q, "input": "", "output": a}),
    "pages": _pages,
    "csv": _csv,
    "parquet": _parquet,
}
CHAT = ("messages", "sharegpt", "strings", "lists", "alpaca")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
