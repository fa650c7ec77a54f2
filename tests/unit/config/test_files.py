from pathlib import Path

import pytest

from llmtrain.config.load import load_config
from llmtrain.config.yaml12 import parse

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_in_the_repository_is_valid(path):
    config = load_config(path)
    assert config.run.dir == f"runs/{path.stem}"
    assert path.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("name", ["wikipedia_small", "wikipedia_124m"])
def test_the_hub_sources_are_pinned(name):
    for source in load_config(ROOT / "configs" / "pretrain" / f"{name}.yaml").data.sources:
        assert len(source.revision) == 40


@pytest.mark.parametrize(
    ("name", "parameters"), [("wikipedia_small", 5_310_720), ("wikipedia_124m", 123_551_232)]
)
def test_the_models_have_the_size_that_is_written_there(name, parameters):
    fields = load_config(ROOT / "configs" / "pretrain" / f"{name}.yaml").model.config
    vocabulary = {"wikipedia_small": 8192, "wikipedia_124m": 50257}[name]
    width, inner = fields["hidden_size"], fields["intermediate_size"]
    block = 4 * width * width + 3 * width * inner + 2 * width  # attention, MLP, two norms
    total = vocabulary * width + fields["num_hidden_layers"] * block + width
    assert total == parameters


@pytest.mark.parametrize(
    "path", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=lambda p: p.stem
)
def test_every_launch_file_means_the_same_in_both_yaml_versions(path):
    yaml = pytest.importorskip("yaml")
    text = path.read_text(encoding="utf-8")
    assert parse(text).value == yaml.safe_load(text)
