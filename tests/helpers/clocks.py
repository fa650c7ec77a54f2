"""Ranks whose machine has another date."""

from __future__ import annotations

import datetime as dates
import time


def train(days: str, *arguments: str) -> None:
    """In a rank: `llmtrain train ARGUMENTS` where the date is so many days off.

    `time.time` and `datetime.now` are what Python asks for it; both ask the system, so neither
    follows the other.
    """
    from llmtrain.cli.main import main
    from llmtrain.rundir import lock, status

    off = dates.timedelta(days=float(days))
    real = time.time  # noqa: TID251

    class Date(dates.datetime):
        @classmethod
        def now(cls, tz: dates.tzinfo | None = None) -> dates.datetime:
            return dates.datetime.now(tz) + off

    time.time = lambda: real() + off.total_seconds()  # noqa: TID251
    lock.datetime = status.datetime = Date  # type: ignore[misc, assignment]
    main(["train", *arguments])
