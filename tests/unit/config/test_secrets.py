"""Secrets are refused in a config and hidden in texts; every one here is made up."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.config import SMALLEST, loaded, problems, written

from llmtrain.config import secrets
from llmtrain.config.checks import check
from llmtrain.config.keys import all_keys
from llmtrain.config.schema import Config

HF = "hf_" + "Canary" * 6
NAMES = {
    "token": "HF_TOKEN",
    "hub_token": "HF_TOKEN",
    "HF_TOKEN": "HF_TOKEN",
    "hfToken": "HF_TOKEN",
    "wandb_api_key": "WANDB_API_KEY",
    "api-key": "API_KEY",
    "apiKey": "API_KEY",
    "apikey": "APIKEY",
    "client_secret": "CLIENT_SECRET",
    "db_password": "DB_PASSWORD",
    "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY",
}
LOOKS = {
    HF: "HF_TOKEN",
    "sk-" + "aB3" * 16: "OPENAI_API_KEY",
    "sk-proj-ab_cd-" + "x1" * 10: "OPENAI_API_KEY",
    "sk-ant-api03-" + "x1" * 10: "ANTHROPIC_API_KEY",
    "ghp_" + "a1B2" * 9: "GITHUB_TOKEN",
    "github_pat_11ABCDEFG0" + "a1" * 10: "GITHUB_TOKEN",
    "glpat-" + "x1-y" * 5: "GITLAB_TOKEN",
    "xoxb-1234567890-abcdefghij": "SLACK_TOKEN",
    "AKIAIOSFODNN7EXAMPLE": "AWS_ACCESS_KEY_ID",
    "AIza" + "aB3-_" * 7: "GOOGLE_API_KEY",
    "npm_" + "a1B2" * 9: "NPM_TOKEN",
}
HARMLESS = [
    "sk-wiki-articles-2024-deduplicated",
    "task-sk-",
    "hf_hub_cache",
    "hf-internal-testing/tiny-random-LlamaForCausalLM",
    "risk-" + "a" * 40,
    "disk-0123456789abcdef0123456789",
    "0123456789abcdef" * 3,
    "datasets/hf_wikipedia_en_20231101",
    "https://host:8080/file",
    "https://host/a@b:c",
    "ssh://git@host/path",
    "s3://bucket/key@v1:2",
    "time 12:30@noon",
    "AKIA",
]


@pytest.mark.parametrize(("name", "variable"), NAMES.items())
@pytest.mark.parametrize("place", ["", "model.config.", "model.config.inner.0.kwargs."])
def test_bad_input_34_a_key_of_a_secret_is_refused_with_the_variable_to_use(
    tmp_path, name, variable, place
):
    inner = f"{{{name}: canary-7f3a}}"
    texts = {
        "": f"{name}=canary-7f3a",
        "model.config.": f"model.config.{name}=canary-7f3a",
        "model.config.inner.0.kwargs.": f"model.config.inner=[{{kwargs: {inner}}}]",
    }
    found = problems(tmp_path, texts[place])
    assert list(found) == [place + name]
    assert f"export {variable}=…" in found[place + name]
    assert "canary-7f3a" not in found[place + name]


@pytest.mark.parametrize(("value", "variable"), LOOKS.items())
@pytest.mark.parametrize("key", ["run.dir", "model.config.x.y.1", "data.sources.0.path", "nokey"])
def test_bad_input_34_what_looks_like_a_secret_is_refused_anywhere(tmp_path, value, variable, key):
    path, last = key.rsplit(".", 1) if key.endswith(".1") else (key, "")
    found = problems(tmp_path, f"{path}=[a, see {value}]" if last else f"{path}=see {value}")
    assert key in found
    assert f"export {variable}=…" in found[key]
    assert value not in "".join(found.values())


def test_bad_input_34_an_address_with_a_password_is_no_data_path(tmp_path):
    found = problems(tmp_path, "data.sources.0.path=https://me:hunter2@host/data.jsonl")
    assert list(found) == ["data.sources.0.path"]
    assert "hunter2" not in found["data.sources.0.path"]


def test_a_secret_is_not_shown_by_other_problems_of_its_value(tmp_path):
    """A key that does not exist, a value of the wrong kind, a text that is no YAML."""
    overrides = (f"run.seed={HF}", "modle.hub_token=canary-7f3a", 'model.config.token="canary-9')
    found = problems(tmp_path, *overrides)
    assert set(found) == {"run.seed", "modle.hub_token", "model.config.token", "modle"}
    for canary in (HF, "canary-7f3a", "canary-9"):
        assert canary not in "".join(found.values())


def test_a_config_made_in_python_is_looked_at_too():
    config = Config.model_validate(
        {
            "data": {"sources": [{"path": "sample"}]},
            "training": {"steps": 1},
            "model": {"tokenizer": "sample", "config": {"model_type": "llama", "api_key": "c"}},
        }
    )
    assert [problem.key for problem in check(config)] == ["model.config.api_key"]


@pytest.mark.parametrize("value", HARMLESS)
def test_plain_names_are_no_secrets(tmp_path, value):
    assert problems(tmp_path, f"run.dir={json.dumps(value)}") == {}
    assert secrets.without([])(value).replace("git@", "***@") in (value, "ssh://***@host/path")


def test_keys_that_only_sound_like_it_are_allowed(tmp_path):
    names = [f"{name}_token" for name in ("bos", "eos", "pad", "unk", "cls", "mask", "image")]
    text = ", ".join(f"{name}: <x>" for name in names)
    more = "max_tokens: 3, train_tokens: 4, pad_token_id: 0, num_experts_per_token: 2, token: null"
    config = loaded(tmp_path, f"model.config={{model_type: llama, {text}, {more}}}").model.config
    assert (config["bos_token"], config["max_tokens"]) == ("<x>", 3)


def test_no_key_of_ours_is_a_secret():
    assert [key.name for key in all_keys() if secrets.is_secret_name(key.name)] == []


def test_no_field_of_any_model_of_transformers_is_refused():
    """Names that match hold numbers and switches, or a piece of the vocabulary."""
    package = Path(importlib.util.find_spec("transformers").origin).parent
    texts = [path.read_text() for path in package.glob("models/*/configuration_*.py")]
    found = (re.findall(r"^ +(?:self\.)?[\"']?(\w+)[\"']?(?: \(|:| =)", t, re.M) for t in texts)
    names = {name for one in found for name in one}
    assert len(names) > 2000
    assert {"num_experts_per_tok", "pad_token_id", "samples_per_token", "cls_token"} <= names
    assert secrets.in_config({"model": {"config": dict.fromkeys(names, 4)}}) == []
    matching = {name for name in names if secrets.is_secret_name(name)}
    per_token = {f"{what}_per_token" for what in ("max_atoms", "num_experts", "samples")}
    assert matching <= per_token | {"n_token", "return_class_token"}


def test_texts_of_the_environment_are_hidden_in_every_spelling():
    value = 'pa"ss\\wörd/7&=x'
    hide = secrets.hider({"SOME_PASSWORD": value, "PATH": "/usr/bin"})
    spelled = [value, json.dumps(value), repr(value), json.dumps({"a": [value]})]
    spelled.append("https://host/?a=pa%22ss%5Cw%C3%B6rd%2F7%26%3Dx")
    for text in spelled:
        assert "rd" not in hide(text), text
    assert hide("/usr/bin stays") == "/usr/bin stays"


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("HF_TOKEN", True),
        ("WANDB_API_KEY", True),
        ("OPENAI_APIKEY", True),
        ("MY_SECRET", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("AWS_SESSION_TOKEN", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("HF_TOKEN_PATH", False),
        ("MONKEY", False),
    ],
)
def test_the_name_of_a_variable_says_whether_its_value_is_hidden(name, hidden):
    text = "it was canary-value here"
    shown = secrets.hider({name: "canary-value"})(text)
    assert shown == ("it was *** here" if hidden else text)


def test_short_values_of_variables_are_words_and_stay():
    assert secrets.hider({"MY_TOKEN": "sample", "A_SECRET": " "})("a sample") == "a sample"


def test_what_looks_like_a_secret_is_hidden_in_a_text_whatever_the_environment_holds():
    hide = secrets.hider({})
    for value in LOOKS:
        assert hide(f"got {value}, no") == "got ***, no"
    assert hide("https://me:hunter2@host/a?part=1&X-Amz-Signature=abcd") == (
        "https://***@host/a?part=1&***"
    )


def test_data_under_the_name_of_a_secret_is_hidden_too():
    config = {
        "model": {"from": "https://me:hunter2@host/model", "tokenizer": "sample"},
        "hf_token": "abc",
        "list": [{"password": "x"}, f"see {HF}"],
        "num_key_value_heads": 4,
    }
    assert secrets.hidden(config, secrets.hider({})) == {
        "model": {"from": "https://***@host/model", "tokenizer": "sample"},
        "hf_token": "***",
        "list": [{"password": "***"}, "see ***"],
        "num_key_value_heads": 4,
    }
    assert config["hf_token"] == "abc"


def test_bad_input_34_the_command_ends_with_2_and_shows_no_secret(tmp_path):
    path = written(tmp_path, SMALLEST)
    command = [sys.executable, "-m", "llmtrain", "train", str(path), f"model.config.hub_token={HF}"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2
    assert "model.config.hub_token" in ended.stderr
    assert "export HF_TOKEN=…" in ended.stderr
    assert HF not in ended.stdout + ended.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["my.yaml"]
