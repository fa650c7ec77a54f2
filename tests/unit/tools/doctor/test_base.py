"""Whether the weights that a run begins with are on this machine."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.bases import save_base
from helpers.cases import SMALL, case
from helpers.hub import read_files
from helpers.model_hub import MODEL, OLD, ModelHub, serving_model, take_for_hub
from huggingface_hub import hf_hub_download

from llmtrain.errors import RunError
from llmtrain.tools.doctor import run as checks
from llmtrain.tools.doctor.case import Case, Verdict, attempt

DATA = SMALL[SMALL.index("data:") :]


def begins_with(folder: Path, name: Path | str) -> Case:
    return case(folder, text=f"model: {{from: {name}, tokenizer: sample}}\n{DATA}")


def look(made: Case) -> Verdict:
    return attempt(lambda: checks.base(made))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), hidden_size=8, intermediate_size=12)


@pytest.fixture
def hub(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    with serving_model({OLD: read_files(made)}) as server:
        take_for_hub(monkeypatch, server, tmp_path / "home")
        yield server


def test_a_new_model_begins_with_nothing(tmp_path: Path) -> None:
    found = look(case(tmp_path, text=SMALL))
    assert (found.state, found.remedy) == ("ok", "")
    assert "random weights" in found.found


def test_a_directory_has_its_weights_here(tmp_path: Path, made: Path) -> None:
    found = look(begins_with(tmp_path, made))
    assert found.state == "ok"
    assert found.found.startswith(str(made))
    assert found.found.endswith("of weights, on this machine")


def test_a_directory_without_weights_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama"}')
    assert "has no weights" in look(begins_with(tmp_path, tmp_path / "empty")).found


def test_an_adapter_is_an_error_with_what_to_do(tmp_path: Path, made: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    found = look(begins_with(tmp_path, tmp_path / "adapter"))
    assert found.state == "error"
    assert "--merge-adapters" in found.remedy


def test_weights_that_are_still_on_the_hub_are_a_warning_until_they_are_in_the_cache(
    hub: ModelHub, tmp_path: Path
) -> None:
    found = look(begins_with(tmp_path, MODEL))
    assert found.state == "warning"
    assert "1 files of weights are not in the cache (" in found.found
    assert f"hf download {MODEL} --revision {OLD}" in found.remedy
    assert [name for _, name in hub.read] == ["config.json"]
    hf_hub_download(MODEL, "model.safetensors", revision=OLD)
    assert look(begins_with(tmp_path, MODEL)).state == "ok"


def test_of_shards_those_that_are_missing_are_counted_and_offline_they_are_an_error(
    hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    files = hub.commits[OLD]
    body = files.pop("model.safetensors")
    shards = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    files.update(dict.fromkeys(shards, body))
    index = {"weight_map": {f"weight {n}": name for n, name in enumerate(shards)}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    for name in ("model.safetensors.index.json", shards[0]):
        hf_hub_download(MODEL, name, revision=OLD)
    made = begins_with(tmp_path, MODEL)
    found = look(made)
    assert found.state == "warning"
    assert "2 files of weights" in found.found
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = look(made)
    assert found.state == "error"
    assert "2 files of weights are not in the cache" in found.found


def test_a_run_with_a_checkpoint_needs_no_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmtrain.training.start import planning

    monkeypatch.setattr(planning, "config_of_newest_checkpoint", lambda config, run_dir: object())
    found = look(begins_with(tmp_path, "someone/gone"))
    assert (found.state, found.found.partition(":")[0]) == ("ok", "not read again")


def test_a_hub_that_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_look", lambda case: threading.Event().wait(30))
    with pytest.raises(RunError, match=r"model\.from: no complete answer"):
        checks.base(begins_with(tmp_path, MODEL), seconds=0.3)
