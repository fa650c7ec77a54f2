"""The table of docs/restarts.md."""

from __future__ import annotations

import re

from helpers.ranks import ROOT

DOCS = ROOT / "docs"


def test_every_exit_code_has_its_row_and_no_other_page_says_what_it_asks_for() -> None:
    page, index = (DOCS / "restarts.md").read_text("utf-8"), (DOCS / "index.md").read_text("utf-8")
    codes = re.findall(r"^\| (\d+) \|", index, flags=re.M)
    assert set(re.findall(r"^\| [^|]+ \| (\d+)", page, flags=re.M)) == set(codes) != set()
    checkpoints = (DOCS / "checkpoints.md").read_text("utf-8")
    assert "(restarts.md#what-is-started-again)" in checkpoints
    assert not re.search(r"^\| (74|75) \|", checkpoints, flags=re.M)
