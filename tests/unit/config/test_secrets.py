"""Secrets are refused in a config and hidden in texts; every one here is made up."""

import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.config import SMALLEST, loaded, problems, written
from helpers.rings import needs

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
    "OPENAI_KEY": "OPENAI_KEY",
    "credentials": "CREDENTIALS",
    "authorization": "AUTHORIZATION",
    "key_passphrase": "KEY_PASSPHRASE",
    "github_pat": "GITHUB_PAT",
    "connection_string": "CONNECTION_STRING",
    "pgpassword": "PGPASSWORD",
}
LOOKS = {
    HF: "HF_TOKEN",
    "sk-" + "aB3" * 16: "OPENAI_API_KEY",
    "sk-" + "0123456789abcdef" * 2: "OPENAI_API_KEY",
    "sk-proj-ab_cd-" + "xY1" * 14: "OPENAI_API_KEY",
    "sk-ant-api03-" + "x1" * 10: "ANTHROPIC_API_KEY",
    "ghp_" + "a1B2" * 9: "GITHUB_TOKEN",
    "github_pat_11ABCDEFG0" + "a1" * 10: "GITHUB_TOKEN",
    "glpat-" + "x1-y" * 5: "GITLAB_TOKEN",
    "xoxb-1234567890-abcdefghij": "SLACK_TOKEN",
    "AKIAIOSFODNN7EXAMPLE": "AWS_ACCESS_KEY_ID",
    "AIza" + "aB3-_" * 7: "GOOGLE_API_KEY",
    "npm_" + "a1B2" * 9: "NPM_TOKEN",
    "pypi-AgEIcHlwaS5vcmc" + "aB3-_" * 12: "PYPI_TOKEN",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.aB3-_xyz": "ACCESS_TOKEN",
    "Bearer eyJhbGciOiJIUzI1NiJ9": "ACCESS_TOKEN",
    "bearer 0a1b2c3d/4e5f+6789==": "ACCESS_TOKEN",
}
ADDRESSES = {
    "https://me:hunter2@host/data.jsonl": "https://***@host/data.jsonl",
    "https://me:hun@ter2@host/data.jsonl": "https://***@host/data.jsonl",
    "s3://me:hunter2@host/data.jsonl": "s3://***@host/data.jsonl",
    "redis://:hunter2@host": "redis://***@host",
    "https://hunter2@host/x": "https://***@host/x",
    "git+https://hunter2@host/x": "git+https://***@host/x",
    "https://host/x.jsonl?token=hunter2": "https://host/x.jsonl?***",
    "https://host/x.jsonl?a=1&access_token=hunter2&b=2": "https://host/x.jsonl?a=1&***&b=2",
    "https://host/x?X-Amz-Credential=hunter2&X-Amz-Signature=hunter2": "https://host/x?***&***",
    "https://host/x?sv=1&sig=hunter2": "https://host/x?sv=1&***",
    "https://host/x?key=hunter2": "https://host/x?***",
    "https://host/x#authtoken=hunter2": "https://host/x#***",
}
SPECIAL_TOKENS = ["<|assistant|>", "</s>", "[INST]", "[[UNK]]", "user", "assistant", "\u2581<EOT>"]
SPECIAL_TOKENS += ["<|im_start|>assistant", "### Answer 1:", "ASSISTANT:", "end_of_turn", "\n\n", 7]
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
    "abfss://container@account.dfs.core.windows.net/data",
    "https://host/x?part=1&page_tokens=3",
    "runs/hf_finetunedllamachatmodel",
    "runs/hf_finetunedllamachatmodelforslovakwikipedia2026",
    "/data/sk-slovakwikipediacorpus2026",
    "sk-proj-slovak-wikipedia-corpus-2026-deduplicated-and-filtered",
    "pypi-downloads-by-package-and-country-2026-deduplicated-and-filtered",
    "bearer of all the information",
]


@pytest.mark.parametrize(("name", "variable"), NAMES.items())
@pytest.mark.parametrize("place", ["", "model.config.", "model.config.inner.0.kwargs."])
def test_a_key_of_a_secret_is_refused_with_the_variable_to_use(tmp_path, name, variable, place):
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
def test_what_looks_like_a_secret_is_refused_anywhere(tmp_path, value, variable, key):
    path, last = key.rsplit(".", 1) if key.endswith(".1") else (key, "")
    found = problems(tmp_path, f"{path}=[a, see {value}]" if last else f"{path}=see {value}")
    assert key in found
    assert f"export {variable}=…" in found[key]
    assert value not in "".join(found.values())


@pytest.mark.parametrize(("address", "shown"), ADDRESSES.items())
def test_an_address_is_refused_if_something_of_it_would_be_hidden(tmp_path, address, shown):
    found = problems(tmp_path, f'data.sources.0.path="{address}"')
    assert list(found) == ["data.sources.0.path"]
    assert "hunter2" not in found["data.sources.0.path"]
    assert secrets.hider({})(f"got '{address}', no") == f"got '{shown}', no"


@pytest.mark.parametrize(
    "override",
    [
        "logging.wandb={api_key: mysecretpassw0rd, x: [}",
        "model.config={x: [}, 'client-secret' : mysecretpassw0rd}",
        'model.config={"\\"hub_token\\": \\"mysecretpassw0rd", x: [}',
        'model.config.password="mysecretpassw0rd',
        "model.config.api_key:mysecretpassw0rd",
        "logging.wandb={api_key: *mysecretpassw0rd}",
        "model.config.password=!mysecretpassw0rd x",
        "model.config.hub_token=!mysecretpassw0rd x",
        "modl='{api_key: mysecretpassw0rd'",
        "modl=[a long text before it, and a bit more, password, {password: mysecretpassw0rd}]",
    ],
)
def test_what_follows_the_name_of_a_secret_is_not_shown_of_broken_text(tmp_path, override):
    found = problems(tmp_path, override)
    assert found
    assert "mysecret" not in "".join([*found, *found.values()])


def test_half_of_a_secret_is_not_shown_where_a_value_is_cut_off(tmp_path):
    found = problems(tmp_path, f"modl=[{'a' * 30}, {HF}]")
    assert "hf_" not in "".join(found.values())


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
    assert secrets.without([])(value) == value


@pytest.mark.parametrize("value", SPECIAL_TOKENS)
@pytest.mark.parametrize("name", ["bos", "assistant", "end_of_turn", "tool_call", "any_other"])
def test_special_tokens_are_no_secrets_under_whatever_name(tmp_path, name, value):
    text = f"{{model_type: llama, kwargs: {{{name}_token: {json.dumps(value)}}}}}"
    config = loaded(tmp_path, f"model.config={text}").model.config
    assert config["kwargs"] == {f"{name}_token": value}
    assert secrets.hidden(config, secrets.hider({})) == config


@pytest.mark.parametrize("value", ["canary-7f3a", "mysecretpassw0rd", "aBcDeFgH", "a" * 24])
def test_under_a_name_that_may_be_a_field_the_value_decides(tmp_path, value):
    names = ["model.config.assistant_token", "model.config.sort_key", "model.config.some_pat"]
    found = problems(tmp_path, *(f"{name}={value}" for name in names))
    assert list(found) == names
    assert value not in "".join(found.values())
    assert problems(tmp_path, *(f"{name}=created_at" for name in names)) == {}


def test_numbers_of_tokens_are_no_secrets(tmp_path):
    more = "max_tokens: 3, train_tokens: 4, pad_token_id: 0, num_experts_per_token: 2, token: null"
    config = loaded(tmp_path, f"model.config={{model_type: llama, {more}}}").model.config
    assert config["max_tokens"] == 3


def test_no_key_of_ours_is_a_secret():
    assert [key.name for key in all_keys() if secrets.is_secret_name(key.name)] == []


@needs("transformers", "5.23")
def test_no_field_of_any_model_of_transformers_is_refused():
    """Those that match hold numbers, switches, words or a piece of the vocabulary."""
    package = Path(importlib.util.find_spec("transformers").origin).parent
    texts = [path.read_text() for path in package.glob("models/*/configuration_*.py")]
    found = (re.findall(r"^ +(?:self\.)?[\"']?(\w+)[\"']?(?: \(|:| =)", t, re.M) for t in texts)
    names = {name for one in found for name in one}
    assert len(names) > 2000
    assert {"num_experts_per_tok", "pad_token_id", "samples_per_token", "cls_token"} <= names
    for value in (4, True, "<|sep|>", "vision_config"):
        assert secrets.in_config({"model": {"config": dict.fromkeys(names, value)}}) == []


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
        ("OPENAI_KEY", True),
        ("MY_CREDENTIALS", True),
        ("AUTHORIZATION", True),
        ("SSH_PASSPHRASE", True),
        ("GITHUB_PAT", True),
        ("AZURE_STORAGE_CONNECTION_STRING", True),
        ("PGPASSWORD", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("HF_TOKEN_PATH", False),
        ("MONKEY", False),
    ],
)
def test_the_name_of_a_variable_says_whether_its_value_is_hidden(name, hidden):
    text = "it was canary-value here"
    shown = secrets.hider({name: "canary-value"})(text)
    assert shown == ("it was *** here" if hidden else text)


@pytest.mark.parametrize("value", ["sample", " ", "training", "Training", "TRAINING", "a1b2c3d"])
def test_words_and_short_values_of_variables_stay(value):
    assert secrets.hider({"SSH_TOKEN": value})(f"{value} went on") == f"{value} went on"


def test_a_short_value_of_a_variable_is_hidden_only_as_a_word():
    hide = secrets.hider({"MY_PASSWORD": "passw0rd", "MY_SECRET": "0123456789abcdef"})
    assert hide("mypassw0rd, passw0rds") == "mypassw0rd, passw0rds"
    assert hide("'passw0rd'=passw0rd_passw0rd") == "'***'=***_***"
    assert hide(json.dumps("x\npassw0rd") + "%20passw0rd") == '"x\\n***"%20***'
    assert hide("x0123456789abcdefx") == "x***x"


def test_what_looks_like_a_secret_is_hidden_in_a_text_whatever_the_environment_holds():
    hide = secrets.hider({})
    for value in LOOKS:
        assert hide(f"got {value}, no") == "got ***, no"


@pytest.mark.parametrize(
    "piece", ["hf_", "sk-", "sk-proj-", "eyJ-", "a-", "api_key", "https://", "a"]
)
def test_a_long_line_is_looked_through_in_one_pass(piece):
    """Ten times the text: about ten times as long, where passes from every place were a hundred."""
    hide = secrets.hider({"MY_PASSWORD": "passw0rd"})

    def seconds(text):
        started = time.process_time()
        hide(text)
        secrets.hide_unparsed(text)
        return time.process_time() - started

    short, long = piece * (4000 // len(piece)), piece * (40000 // len(piece))
    assert min(seconds(long) for _ in range(3)) < 40 * min(seconds(short) for _ in range(3))


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


@pytest.mark.launches
def test_the_command_ends_with_2_and_shows_no_secret(tmp_path):
    path = written(tmp_path, SMALLEST)
    command = [sys.executable, "-m", "llmtrain", "train", str(path), f"model.config.hub_token={HF}"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2
    assert "model.config.hub_token" in ended.stderr
    assert "export HF_TOKEN=…" in ended.stderr
    assert HF not in ended.stdout + ended.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["my.yaml"]
