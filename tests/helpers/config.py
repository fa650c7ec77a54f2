"""Small configs, as text and as values."""

from pathlib import Path

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.errors import UserError

SMALLEST = """\
model: {config: {model_type: llama, hidden_size: 8, num_attention_heads: 2}, tokenizer: sample}
data: {sources: [{path: sample}]}
training: {steps: 10}
"""


def written(folder: Path, text: str = SMALLEST) -> Path:
    """A config file with this text."""
    path = folder / "my.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def loaded(folder: Path, *overrides: str, text: str = SMALLEST) -> Config:
    """The smallest config with overrides."""
    return load_config(written(folder, text), overrides)


def problems(folder: Path, *overrides: str, text: str = SMALLEST) -> dict[str, str]:
    """Key → message of what is wrong; empty if nothing is."""
    try:
        loaded(folder, *overrides, text=text)
    except UserError as error:
        return {problem.key: str(problem) for problem in error.problems}
    return {}
