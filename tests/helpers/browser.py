"""A system Chromium for tests, from LLMTRAIN_TEST_BROWSER or the path; nothing is downloaded."""

import os
import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = "no Chromium: set LLMTRAIN_TEST_BROWSER or put one on the path"


def browser_path() -> str | None:
    """The executable, or None."""
    named = os.environ.get("LLMTRAIN_TEST_BROWSER")
    return named or next(filter(None, map(shutil.which, NAMES)), None)
