import json
import logging

import pytest
from helpers import corpus

from llmtrain.config.schema import Config
from llmtrain.training.prepare import MANIFEST, TOKENIZER, load_manifest, prepare


@pytest.fixture
def config(tmp_path):
    corpus.write_parquet(tmp_path / "data" / "0.parquet", corpus.articles(60))
    found = corpus.config(tmp_path / "data").model_dump(by_alias=True, exclude_unset=True)
    return Config.model_validate(found | {"model": {"tokenizer": "sample"}})


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_the_first_start_decides_the_back_end_and_says_so(config, run_dir, caplog):
    caplog.set_level(logging.INFO, "llmtrain")
    prepare(config, run_dir, 1, None)
    assert load_manifest(config, run_dir).tokenizer.backend == "tiktoken"
    assert "equal those of tokenizers on 60 documents" in caplog.text


def test_a_later_start_decides_nothing(config, run_dir, monkeypatch, caplog):
    prepare(config, run_dir, 1, None)
    stored = json.loads((run_dir / MANIFEST).read_text())
    stored["tokenizer"]["backend"] = "tokenizers"
    (run_dir / MANIFEST).write_text(json.dumps(stored))
    monkeypatch.setattr("llmtrain.training.prepare.choose_tokenizer", None)
    prepare(config, run_dir, 1, None)
    assert load_manifest(config, run_dir).tokenizer.backend == "tokenizers"
    assert (run_dir / TOKENIZER / "tokenizer.json").is_file()
