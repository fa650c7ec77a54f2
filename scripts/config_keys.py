"""The keys of a config, for the file that fixes them and for the reference page.

python scripts/config_keys.py golden > tests/golden/config_keys.txt
python scripts/config_keys.py reference > docs/config.md
"""

from __future__ import annotations

import sys

from llmtrain.config.keys import all_keys


def golden() -> str:
    """One line a key: name, type, default."""
    width = max(len(key.name) for key in all_keys())
    lines = (f"{key.name:<{width}}  {key.takes}  [{key.default}]" for key in all_keys())
    return "\n".join(lines) + "\n"


def reference() -> str:
    """The reference page of all keys, in Markdown."""
    lines = [
        "# Config keys",
        "",
        "A config is a YAML file; `section.key=value` on the command line takes precedence. `*`",
        "stands for the number of a list's item, counted from 0. Expert keys are marked with †.",
    ]
    section = ""
    for key in all_keys():
        if key.name.partition(".")[0] != section:
            section = key.name.partition(".")[0]
            lines += ["", f"## {section}", "", "| key | takes | default | |", "|---|---|---|---|"]
        name = f"`{key.name}`{' †' if key.expert else ''}"
        takes = key.takes.replace("|", "\\|")
        lines.append(f"| {name} | {takes} | `{key.default}` | {key.description} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print({"golden": golden, "reference": reference}[sys.argv[1]](), end="")
