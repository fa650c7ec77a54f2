"""A rank that would write other samples than its peers."""

import os

from llmtrain.cli.main import main
from llmtrain.training import evaluate


def diverged(rank: str, config: str) -> None:
    """`llmtrain train CONFIG`; one rank's logits are not finite, but only those of samples."""
    if os.environ["RANK"] == rank:
        evaluate._TEMPERATURE = float("nan")
    main(["train", config])
