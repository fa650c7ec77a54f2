"""Photograph the top of a run's report, light and dark: `report_picture.py RUN docs/images`.

    make quickstart && .venv/bin/python scripts/report_picture.py runs/quickstart docs/images

It writes `report-light.png` and `report-dark.png`, down to the end of the loss figure. It needs the
extra `dev` and a Chromium, from LLMTRAIN_TEST_BROWSER or the path.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Literal

from playwright.sync_api import sync_playwright

WIDTH, MARGIN = 900, 24
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def main(run: Path, out: Path) -> None:
    """Write both pictures into a directory."""
    page = (run / "report.html").resolve().as_uri()
    browser = os.environ.get("LLMTRAIN_TEST_BROWSER") or shutil.which("chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for scheme in SCHEMES:
            tab = chromium.new_page(viewport={"width": WIDTH, "height": 800}, color_scheme=scheme)
            tab.goto(page)
            box = tab.locator("#figure-loss .plot").bounding_box()
            assert box is not None, "the report has no loss figure"
            height = box["y"] + box["height"] + MARGIN
            tab.screenshot(
                path=out / f"report-{scheme}.png",
                full_page=True,
                clip={"x": 0, "y": 0, "width": WIDTH, "height": height},
            )
        chromium.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
