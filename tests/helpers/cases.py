"""What the doctor looks at, made up for a test."""

import os
import time
from pathlib import Path

from helpers.config import SMALLEST, loaded

from llmtrain.tools.doctor.context import DoctorContext, Verdict
from llmtrain.tools.launch.file import LaunchFile

SMALL = """\
model: {config: {model_type: llama, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 2,
                 intermediate_size: 16}, tokenizer: sample}
data: {sources: [{path: sample}], seq_len: 16}
training: {steps: 10, global_batch_size: 6, precision: fp32}
"""


def case(
    folder: Path | None = None,
    *overrides: str,
    text: str = SMALLEST,
    launch: dict | None = None,
    env: dict[str, str] | None = None,
    clock_was_set_by: float = 0.0,
    come_and_go: bool = False,
) -> DoctorContext:
    """folder: with a config there, whose run would live in it too; None = no config."""
    config = None
    if folder is not None:
        config = loaded(folder, f"run.dir={folder / 'run'}", *overrides, text=text)
    file = None
    if launch is not None:
        values = {"use_cpu": True, **launch}
        file = LaunchFile(Path("accelerate.yaml"), values.get("num_processes", 2), values)
    own = {**os.environ, **(env or {})}
    wall = time.time() - clock_was_set_by  # noqa: TID251  # a time stamp
    return DoctorContext(config, file, come_and_go, own, wall, time.monotonic())


def says(looked: Verdict, state: str, *found: str, remedy: str = "") -> None:
    """The line of a check has this state, and these words in what was found and in the remedy."""
    assert looked.state == state, looked.found
    for words in found:
        assert words in looked.found
    assert remedy in looked.remedy
