"""The table of docs/guides/stop-and-resume.md."""

from __future__ import annotations

import re

from helpers.ranks import ROOT

DOCS = ROOT / "docs"


def test_every_exit_code_has_its_row_and_no_other_page_says_what_it_asks_for() -> None:
    page = (DOCS / "guides" / "stop-and-resume.md").read_text("utf-8")
    table = page.partition("\n## What is started again\n")[2].partition("\n## ")[0]
    codes = re.findall(r"^\| (\d+) \|", (DOCS / "index.md").read_text("utf-8"), flags=re.M)
    assert set(re.findall(r"^\| [^|]+ \| (\d+)", table, flags=re.M)) == set(codes) != set()
    checkpoints = (DOCS / "understand" / "checkpoints.md").read_text("utf-8")
    assert "(../guides/stop-and-resume.md#what-is-started-again)" in checkpoints
    assert not re.search(r"^\| (74|75) \|", checkpoints, flags=re.M)
