"""README as the page of a package index shows it; everything else is in pyproject.toml.

An index shows README alone. There its links to files of this repository become their names, and its
pictures are left out.
"""

import re
from pathlib import Path

from setuptools import setup


def standing_alone(text: str) -> str:
    """Return the text of README without links to files that are not beside it."""
    text = re.sub(r"<picture>.*?</picture>\n\n?", "", text, flags=re.DOTALL)
    text = re.sub(r"(```\w+) \{[^\n]*\}\n", r"\1\n", text)  # how a test treats a block
    return re.sub(r"\[([^\]]+)\]\((?!https?://)([^)\s]+)\)", r"\1 (`\2`)", text)


README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(long_description=standing_alone(README), long_description_content_type="text/markdown")
