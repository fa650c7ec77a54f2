"""Commands that are killed at one of the points where their files become durable."""

import os
import resource
import signal
import sys

from llmtrain.cli.main import main


def command(*arguments: str) -> None:
    """`llmtrain ARGUMENTS`, with its exit code as that of a forked process."""
    try:
        main(arguments)
    except SystemExit as ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code or 0)


def killed(point: str, *arguments: str) -> None:
    """`llmtrain ARGUMENTS`, killed before the `point`-th fsync or rename (the first is 0)."""
    left = [int(point)]

    def counting(real):
        def called(*args, **kwargs):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return real(*args, **kwargs)

        return called

    for name in ("fsync", "rename", "replace"):
        setattr(os, name, counting(getattr(os, name)))
    command(*arguments)


def on_a_full_disk(largest: str, *arguments: str) -> None:
    """`llmtrain ARGUMENTS` where no file can grow beyond `largest` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest), int(largest)))
    command(*arguments)
