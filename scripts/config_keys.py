"""The keys of a config, for the file that fixes them, the reference page and completion.

python scripts/config_keys.py golden > tests/golden/config_keys.txt
python scripts/config_keys.py reference > docs/reference/config.md
python scripts/config_keys.py foreign > docs/reference/foreign-keys.md
python scripts/config_keys.py completion > llmtrain/config/keys.json
"""

from __future__ import annotations

import json
import sys

from llmtrain.config.keys import all_keys
from llmtrain.config.suggestions import foreign as foreign_names


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


def foreign() -> str:
    """The page of names that other trainers use, in Markdown."""
    lines = [
        "# Coming from another trainer",
        "",
        "The names are those of transformers' Trainer, TRL, axolotl, LLaMA-Factory, litgpt,",
        "torchtitan and Megatron. A config that has one of them is refused with the key of this",
        "table. Three things differ from most of them: the batch is the whole one",
        "(`training.global_batch_size`), whatever the number of devices; the same command resumes;",
        "and code from the Hub is never run.",
        "",
        "| you know | here | what differs |",
        "|---|---|---|",
    ]
    for name, found in sorted(foreign_names().items()):
        key = f"`{found.key}`" if found.key else "no key"
        lines.append(f"| `{name}` | {key} | {found.advice.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def completion() -> str:
    """The list from which a shell completes: key → default and other words, as JSON."""
    keys = {
        key.name: list(dict.fromkeys([*_default(key.default), *key.words])) for key in all_keys()
    }
    lines = (f'"{name}": {json.dumps(words, ensure_ascii=False)}' for name, words in keys.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _default(text: str) -> list[str]:
    """Return a default as YAML spells it; [] for a key without one."""
    if text == "required":
        return []
    value = json.loads(text)
    return [value if isinstance(value, str) else text]


if __name__ == "__main__":
    made = {"golden": golden, "reference": reference, "foreign": foreign, "completion": completion}
    print(made[sys.argv[1]](), end="")
