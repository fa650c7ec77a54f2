"""scripts/story.py in a process of the rank server: its commands are forks, not interpreters."""

import importlib.util
import os
import sys
from pathlib import Path

from helpers.ranks import ROOT
from helpers.used import command as end_with


def tell(*arguments: str) -> None:
    """Run the script with these arguments, and end with its exit code."""
    spec = importlib.util.spec_from_file_location("story", ROOT / "scripts" / "story.py")
    assert spec is not None
    assert spec.loader is not None
    story = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(story)
    story.command = command
    sys.argv = ["story.py", *arguments]
    code = story.main()
    sys.stdout.flush()
    os._exit(code)


def command(*words: str) -> str:
    """As the script's function of this name."""
    output = Path("stdout.txt")
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        end_with(str(output), *words)
    _, status = os.waitpid(pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        sys.exit(f"llmtrain {' '.join(words)} ended with {code}")
    return output.read_text("utf-8")
