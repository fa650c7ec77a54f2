"""Whatever a person types or brings ends in a result or in one message, never in a traceback.

Seeded: `make test` tries a slice of the cases, `make test-slow` all of them.
"""

import contextlib
import io
import json
import shutil
import traceback
from itertools import product
from typing import Any

import numpy as np
import pytest
import yaml
from helpers import chats
from helpers.bases import save_base
from helpers.tiny import tiny_config, write_config
from hypothesis import settings

from llmtrain.config.binding import data_settings
from llmtrain.config.keys import all_keys
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.data.audit.first_rows import check_first_rows, count_unread
from llmtrain.data.chat.chat import Chat
from llmtrain.data.chat.rows import BadRowError
from llmtrain.data.chat.template import PROBES, named_template
from llmtrain.data.documents.reader import Reader
from llmtrain.data.survey import survey
from llmtrain.data.tokens.encode import DocumentEncoder, settings_of
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import RunError, UserError
from llmtrain.tools.plan import plan
from llmtrain.tools.use.generate import generate

pytestmark = pytest.mark.deeper

# As YAML on the command line.
VALUES = (
    *("", " ", "null", "true", "no", "auto", "none", "sample", "x", "x" * 5000, "ü", "🙂", "a\0b"),
    *("0", "1", "2", "-1", "3.5", "-0.0", "1e300", "-1e300", "1e-300", "1e23", "1" + "0" * 23),
    *(".nan", ".inf", "-.inf", str(2**31), str(2**63), "9" * 400, "0x10", "1_000", "2026-01-01"),
    *("[]", "[1]", "[1, 2]", "[[]]", "{}", "{a: 1}", "{train: 300}", "[null]", "['', x]"),
    *("../../x", "/dev/null", "/proc/self/mem", "~/x", ".", "/", "a/b/c", "[", "*", "&a", "!!x y"),
    *("'", '"', "\n", "\t", "%", "\u202e", "\x1b[31m", "${HOME}", "$(x)", "hf://x", "file://x"),
)
# In a row, a config or a header of a file.
JSON: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1e300, 10**30, 0.5, "", " ", "x" * 5000, "\ud800", "\0", "🙂"),
    *([], [None], [[]], [1, "a"], {}, {"a": 1}, {"role": "user"}, [{"role": 5}], "assistant"),
    *("<|im_end|>", "{{ x }}", "{", "[1]", '{"a": 1}', {"text": "x", "type": "text"}),
)
PASSES = (UserError, RunError)


def some(cases, of):
    """This many of the cases, drawn with a seed; of these a slice unless all are asked for."""
    drawn = np.random.default_rng(43).permutation(len(cases))[:of]
    everything = settings().max_examples > settings.get_profile("default").max_examples
    return [cases[n] for n in (drawn if everything else drawn[: max(10, of // 40)])]


@pytest.fixture
def check():
    """Tries an action; in the end, fails if any raised something else than a message for people."""
    failures: list[str] = []
    yield lambda what, action: failures.extend(_failures(what, action))
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures)


def _failures(what, action):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            action()
    except PASSES as error:
        if not str(error).strip().encode():  # it can be printed anywhere
            yield f"{what!r}: no message"
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = str(error).splitlines()[:1]
        yield f"{what!r}: {type(error).__name__}: {said} ({place.filename}, line {place.lineno})"


def mutations(value, rng):
    """A copy of a JSON value in which one place is something else, or gone, or there twice."""
    places = list(_places(value))
    path = places[int(rng.integers(len(places)))]
    copy = json.loads(json.dumps(value))
    inner = copy
    for step in path[:-1]:
        inner = inner[step]
    match int(rng.integers(6)):
        case 0 if isinstance(inner, dict):
            del inner[path[-1]]
        case 1 if isinstance(inner, list):
            inner.append(inner[path[-1]])
        case _:
            inner[path[-1]] = JSON[int(rng.integers(len(JSON)))]
    return copy


def _places(value, path=()):
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield (*path, key)
        yield from _places(inner, (*path, key))


def test_config_values(tmp_path, check):
    path = write_config(tmp_path, tiny_config(tmp_path / "run"))
    names = [key.name.replace("*", "0") for key in all_keys()]
    for name, value in some(list(product(names, VALUES)), 4000):
        override = f"{name}={value}"

        def start(override=override):
            config = load_config(path, [override])
            plan(config)

        check(override, start)
    assert not (tmp_path / "run").exists()


CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
ROWS = (
    ("messages", {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "Hi?"}]},
            {"role": "assistant", "content": "", "tool_calls": [CALL], "train": True},
            {"role": "tool", "content": "1", "name": "f"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "r", "weight": 1},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }),
    ("conversations", {
        "conversations": [
            {"from": "human", "value": "Hi?"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
            {"from": "observation", "value": "1"},
            {"from": "gpt", "value": "Yes."},
        ],
        "system": "s",
    }),
    ("prompt_completion", {"prompt": "Hi?", "completion": "Yes."}),
    ("alpaca", {"instruction": "Hi?", "input": "", "output": "Yes.", "history": [["a", "b"]]}),
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chats.make(tmp_path_factory.mktemp("hostile") / "tokenizer", "chatml")


def test_rows(tmp_path, tokenizer, check):
    rng = np.random.default_rng(5)
    rows = [mutations(row, rng) for _, row in ROWS for _ in range(20)]
    opened = open_tokenizer(tokenizer)
    for n, row in enumerate(some(rows, 80)):
        good = next(one for form, one in ROWS if set(one) & set(row) or form == "messages")
        for name, skip in (("a.jsonl", "error"), ("a.json", "skip")):
            path = tmp_path / str(n) / name
            path.parent.mkdir(exist_ok=True)
            lines = [json.dumps(one) for one in (good, row, good)]
            text = "\n".join(lines) if name == "a.jsonl" else f"[{','.join(lines)}]"
            path.write_text(text)

            def start(path=path, skip=skip):
                config = Config.model_validate({
                    "data": {"sources": [{"path": str(path)}], "seq_len": 512, "heldout": 0.0},
                    "chat": {"bad_rows": skip},
                    "training": {"steps": 1},
                })  # fmt: skip
                found = survey(data_settings(config), 1)
                chat = Chat(tokenizer, settings_of(config.chat, chats.DEFAULTS.date), 512)
                encoder = DocumentEncoder(opened, chat)
                check_first_rows(found, encoder)
                count_unread(found.sources[0], 1, Reader(found.reading), encoder)

            check(row, start)


FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")


def test_model_directories(tmp_path, check):
    base = save_base(tmp_path / "base")
    rng = np.random.default_rng(7)
    for n in some(list(range(60)), 60):
        folder = tmp_path / f"model-{n}"
        shutil.copytree(base, folder)
        told = _damage(folder, n, rng)
        config = tiny_config(tmp_path / "run", model__config={}, model__tokenizer="auto")
        config["model"]["from"] = str(folder)
        path = write_config(tmp_path, config, f"{n}.yaml")
        check(told, lambda path=path: plan(load_config(path, [])))
        check(told, lambda folder=folder: generate(folder, "The", max_new_tokens=2))
        shutil.rmtree(folder)


def _damage(folder, n, rng):
    """Change one file of a model; return what was done."""
    name = (*FILES, "model.safetensors")[n % 5]
    path = folder / name
    if name == "model.safetensors":
        data = bytearray(path.read_bytes())
        cut = int(rng.integers(len(data)))
        match n // 5 % 4:
            case 0:
                del data[cut:]
            case 1:
                data[8 + cut % 200] ^= 1 << int(rng.integers(8))
            case 2:
                data[:8] = int(rng.integers(2**62)).to_bytes(8, "little")
            case _:
                data.clear()
        path.write_bytes(data)
        return f"{name} {n}, at {cut}"
    content = json.loads(path.read_text("utf-8")) if path.exists() else {"eos_token_id": 0}
    match n // 5 % 4:
        case 0:
            text = json.dumps(JSON[int(rng.integers(len(JSON)))])
        case 1:
            whole = json.dumps(content)
            text = whole[: int(rng.integers(len(whole)))]
        case _:
            text = json.dumps(mutations(content, rng))
    path.write_text(text, "utf-8", errors="surrogatepass")
    return f"{name}: {text[:300]}"


TEMPLATES = (
    "{% for i in range(10**9) %}{% for j in range(10**9) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ messages[99].content }}",
    "{{ cycler('a', 'b') }}",
    "{{ cycler() }}",
    "{{ lipsum(5) }}",
    "{{ messages | tojson(indent=10**8) }}",
    "{{ ''.__class__.__mro__ }}",
    "{% set ns = namespace(a=1) %}{{ ns._x }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% if " * 500,
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 1 // 0 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ raise_exception('no') }}",
    "{{ raise_exception() }}",
    "{{ strftime_now('%Q%') }}",
    "{% include 'x' %}",
    "{% extends 'x' %}",
    "{{ '\ud800' }}",
    "\0{{ messages }}",
    "{{ messages | map(attribute='content') | join }}",
    "{{ messages.append(1) }}",
    "{{ dict(a=1).update }}",
)


def test_templates(tmp_path, check):
    rng = np.random.default_rng(11)
    whole = named_template("chatml")
    cut = [whole[: int(at)] + whole[int(at) + 3 :] for at in rng.integers(len(whole), size=16)]
    for n, template in enumerate(some([*TEMPLATES, *cut], 40)):
        folder = chats.make(tmp_path / str(n), None, ("<|im_start|>", "<|im_end|>"))
        (folder / "chat_template.jinja").write_text(template, "utf-8", errors="surrogatepass")

        def start(folder=folder):
            chat = chats.open_chat(folder, 512)
            with contextlib.suppress(BadRowError):  # a row that the template cannot write
                chat.check()
                for example in PROBES:
                    chat.sequences(example)

        check(template[:200], start)


def test_configs_that_are_no_configs(tmp_path, check):
    good = yaml.safe_dump(tiny_config(tmp_path / "run"))
    rng = np.random.default_rng(13)
    texts = ["", "[]", "5", "a: &a [*a]", "a: 1\na: 2", "\t", "\0", "%YAML 9", "a: !!python/x y"]
    texts += [good[: int(n)] + good[int(n) + 2 :] for n in rng.integers(len(good), size=60)]
    for n, text in enumerate(some(texts, 69)):
        path = tmp_path / f"{n}.yaml"
        path.write_bytes(text.encode() if n % 7 else text.encode("utf-16"))
        check(text[:200], lambda path=path: load_config(path, []))
