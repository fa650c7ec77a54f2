"""Files of prompts, against one prompt at a time."""

import json

import pytest
import torch
from helpers import chats, corpus, used
from helpers.checkpoints import RUN
from helpers.runs import status, write_run
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from llmtrain import generate
from llmtrain.errors import UserError
from llmtrain.rundir import contents
from llmtrain.tools.use import generate as writer, prompts as tool
from llmtrain.tools.use.generate import Sampling, complete
from llmtrain.tools.use.load import LoadedModel
from llmtrain.tools.use.target import Target

NEW = 12


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch):
    """A model is read from its files once in a test, not once for each prompt."""
    real, known = writer.open_model, {}

    def open_model(target, **options):
        key = str(target.directory)
        known[key] = known.get(key) or real(target, **options)
        return known[key]

    monkeypatch.setattr(writer, "open_model", open_model)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model directory: 64 positions."""
    folder = tmp_path_factory.mktemp("prompts")
    files = used.tokenizer(folder / "tokenizer", chat=True)
    return used.directory(folder / "model", used.model(rows=330), files)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of a run on conversations, and what encodes them."""
    run = write_run(tmp_path_factory.mktemp("trained") / "run", [], status(run_id=RUN))
    files = chats.make(run / contents.TOKENIZER, "chatml")
    rows = corpus.write_jsonl(run.parent / "chat.jsonl", chats.rows_of(5))
    manifest, encoder = chats.data_of(files, rows)
    (run / contents.MANIFEST).write_bytes(manifest.to_bytes())
    model = used.model(rows=2052, max_position_embeddings=512)
    return used.checkpoint(run, 4, model), encoder.chat


def written(model, file, folder, *, chat=False, **sampling):
    """The rows of OUT."""
    out = folder / "new" / "out.jsonl"
    asked = Sampling(**{"max_new_tokens": NEW, **sampling})
    found = tool.complete_file(
        model, file, out, asked, chat=chat, on_progress=lambda done, of: None
    )
    text = out.read_bytes().decode()
    rows = [json.loads(line) for line in text.split("\n")[:-1]]
    assert (found.out, found.prompts) == (out, len(rows))
    assert found.tokens == sum(row["tokens"] for row in rows)
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]
    return rows


def alone(model, prompt, **options):
    found = generate(model, prompt, max_new_tokens=NEW, **options)
    return {"completion": found.text, "tokens": found.tokens, "ended": found.ended}


def texts(count):
    """Of 1 to 60 tokens: the longest leave less room than NEW."""
    words = [*"abcdefghij", "river ", "hills ", "moss "]
    return [
        "".join(words[(n + 3 * k) % 13] for k in range(7 * n % 47 + 1)).strip()
        for n in range(count)
    ]


def test_a_hundred_prompts_are_completed_as_one_by_one(made, tmp_path):
    said = texts(100)
    rows = [{"id": f"{n}ë", "prompt": text, "more": [1, None]} for n, text in enumerate(said)]
    file = corpus.write_jsonl(tmp_path / "prompts.jsonl", rows)
    found = written(made, file, tmp_path)
    assert found == [row | alone(made, row["prompt"]) for row in rows]
    assert len({row["completion"] for row in found}) > 50
    assert min(row["tokens"] for row in found) < NEW  # the model's positions, or an end


def test_a_hundred_conversations_are_answered_as_one_by_one(trained, tmp_path):
    directory, chat = trained
    said = texts(100)
    rows = [{"messages": chats.talk(*said[n : n + 1 + 2 * (n % 3)])} for n in range(98)]
    tools = [{"type": "function", "function": {"name": "look"}}]
    rows += [{"prompt": chats.talk("Hi?"), "system": "Be brief.", "tools": tools}]
    rows += [{"prompt": "Hi?"}]
    file = corpus.write_jsonl(tmp_path / "prompts.jsonl", rows)
    found = written(directory, file, tmp_path, chat=True)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for row, answer in zip(rows, found, strict=True):
        messages = row.get("messages") or row["prompt"]
        messages = chats.talk(messages) if isinstance(messages, str) else messages
        if "system" in row:
            messages = [{"role": "system", "content": row["system"]}, *messages]
        ids = torch.tensor([chat.prompt_ids(messages, row.get("tools"))])
        new = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
        )[0, ids.shape[1] :]
        expected = {"completion": tokenizer.decode(new, skip_special_tokens=True)}
        assert answer == row | expected | {"tokens": len(new), "ended": answer["ended"]}
    assert found[-1]["completion"] == generate(directory, "Hi?", chat=True, max_new_tokens=NEW).text


def test_a_line_of_text_is_a_prompt(made, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("one\r\ntwo \u2028 lines\nthrée".encode())
    found = written(made, file, tmp_path)
    assert [row["prompt"] for row in found] == ["one", "two \u2028 lines", "thrée"]
    assert found[2] == {"prompt": "thrée"} | alone(made, "thrée")


def test_a_seed_decides_what_is_drawn(made, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\none\ntwo\n")
    drawn = {"temperature": 1.5, "max_new_tokens": 20}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, again, other = (
        written(made, file, tmp_path / str(n), seed=seed, **drawn)
        for n, seed in enumerate((1, 1, 2))
    )
    assert one == again != other
    assert one[0] != one[1]  # the same prompt twice is drawn twice
    assert torch.equal(torch.get_rng_state(), before)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DENSE = SMALL | {"intermediate_size": 48}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
STATE = {"hidden_size": 32, "num_hidden_layers": 2}
# Kind → its config, and which rows may be in a batch.
FAMILIES = {
    "gpt2": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, "padded"),
    "opt": (SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32}, "padded"),
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 4}, "padded"),
    "gemma3_text": (
        DENSE
        | {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 16}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        "padded",
    ),
    "mamba": (STATE | {"state_size": 4}, "padded"),
    "rwkv": (STATE | {"attention_hidden_size": 32}, "alone"),
    "phi3": (DENSE | {"max_position_embeddings": 256, "rope_parameters": LONG}, "equal"),
}


def opened(kind, config, folder):
    """A random model of a kind, far enough from uniform to tell errors."""
    special = {"vocab_size": 320, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config, **special))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    made.generation_config.eos_token_id = 0
    tokenizer = AutoTokenizer.from_pretrained(used.tokenizer(folder / "tokenizer"))
    return LoadedModel(Target(kind, folder), made.eval(), tokenizer, torch.device("cpu"))


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_row_of_a_batch_gets_what_it_gets_alone_in_every_family(tmp_path, kind):
    config, together = FAMILIES[kind]
    model = opened(kind, config, tmp_path)
    draw = torch.Generator().manual_seed(1)
    sizes = [1, 2, 2, 7, 15, 16, 17, 24, 24, 30, 33, 40]
    rows = [torch.randint(1, 320, (n,), generator=draw).tolist() for n in sizes]
    assert tool.find_kind(model, rows) == together
    sampling, found = Sampling(max_new_tokens=NEW), {}
    for number, batch in enumerate(tool.batches(sizes, [NEW] * len(sizes), together)):
        new = complete(model, [rows[n] for n in batch], NEW, sampling, number)
        found |= zip(batch, new, strict=True)
    expected = [complete(model, [row], NEW, sampling, 0)[0] for row in rows]
    assert [found[n] for n in range(len(rows))] == expected
    assert len(set(map(tuple, expected))) > 6


def test_batches_hold_every_row_once_and_no_more_positions_than_fit():
    lengths = [5, 900, 3, 3, 900, 60, 4000, 1]
    limits = [200, 200, 200, 200, 200, 200, 96, 200]
    for kind in ("padded", "equal", "alone"):
        found = list(tool.batches(lengths, limits, kind))
        assert sorted(n for batch in found for n in batch) == list(range(len(lengths)))
        for batch in found:
            assert len({limits[n] for n in batch}) == 1
            assert kind == "padded" or len({lengths[n] for n in batch}) == 1
            assert kind != "alone" or len(batch) == 1
    many = list(tool.batches([300] * 100, [200] * 100, "padded"))
    assert max(map(len, many)) * 500 <= 16_384 < (max(map(len, many)) + 1) * 500
    assert list(tool.batches([100_000], [200], "padded")) == [[0]]


GOOD = '{"prompt": "one"}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"a JSON object \(Expecting property name"),
        ("", "a prompt; the line is blank"),
        ("[1]", "a JSON object; it is list"),
        ("{}", "a row with prompt or with messages"),
        ('{"prompt": "a", "messages": []}', "a row with prompt or with messages"),
        ('{"prompt": 3}', "messages, or a text as prompt"),
        ('{"prompt": "a", "completion": "b"}', "a row without completion, which --out has"),
        ('{"prompt": "\\ud800"}', r"a JSON object \('utf-8' codec"),
        ('{"prompt": "a", "x": NaN}', r"a JSON object \(Out of range float"),
        ('{"messages": [{"role": "bot", "content": "a"}]}', "role 'bot'"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "the last is not the assistant"),
        ("[" * 10_000, "a JSON object"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(made, tmp_path, line, said):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(UserError, match=said) as caught:
        written(made, file, tmp_path)
    assert [one.key for one in caught.value.problems] == [f"{file}, line 2"]
    assert not list((tmp_path / "new").iterdir())


def test_bytes_that_are_not_utf_8_and_many_bad_lines_are_named(made, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"a\n" + b"b\xff\n" * 30)
    with pytest.raises(UserError, match="there are 20 more") as caught:
        written(made, file, tmp_path)
    keys = [one.key for one in caught.value.problems]
    assert keys == [f"{file}, line {n}" for n in range(2, 12)]
    assert "UTF-8; byte 2 of the line is not" in str(caught.value)


def test_a_prompt_that_is_too_long_is_named_before_anything_is_computed(
    made, tmp_path, monkeypatch
):
    monkeypatch.setattr(writer, "complete", None)
    file = corpus.write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b c " * 99}])
    with pytest.raises(UserError, match=r"p\.jsonl, line 2 = .* tokens\n.*the model's positions"):
        written(made, file, tmp_path)


def test_messages_need_a_template_and_what_it_refuses_is_named(trained, tmp_path):
    files = used.tokenizer(tmp_path / "plain")
    plain = used.directory(tmp_path / "model", used.model(), files)
    file = corpus.write_jsonl(tmp_path / "p.jsonl", [{"messages": chats.talk("Hi?")}])
    with pytest.raises(UserError, match="whose tokenizer has a chat template"):
        written(plain, file, tmp_path)
    (files / "chat_template.jinja").write_text("{{ raise_exception('not today') }}")
    refusing = used.directory(tmp_path / "refusing", used.model(), files)
    with pytest.raises(UserError, match=r"p\.jsonl, line 1 = Hi\?\n.*not today"):
        written(refusing, file, tmp_path)


@pytest.mark.parametrize("kind", ["file", "directory", "link", "dangling link", "below a file"])
def test_an_existing_out_is_refused_and_stays_as_it_is(made, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(writer, "open_writer", None)  # nothing is loaded before
    file, out = corpus.write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}]), tmp_path / "out"
    there = tmp_path / "there"
    there.write_text("kept")
    if kind == "directory":
        out.mkdir()
    elif kind == "file":
        out.write_text("kept")
    elif kind == "below a file":
        out = there / "out"
    else:
        out.symlink_to(there if kind == "link" else tmp_path / "absent")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UserError, match=r"--out = .*out\n"):
        tool.complete_file(
            made, file, out, Sampling(), chat=False, on_progress=lambda done, of: None
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert there.read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("p.json", b"{}", r"a \.jsonl file of rows .* or a \.txt file"),
        ("p.jsonl", b"", "the file is empty"),
        ("absent.jsonl", None, r"a file that can be read \(No such file"),
    ],
)
def test_a_file_without_prompts_is_refused(made, tmp_path, name, data, said):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=said) as caught:
        written(made, tmp_path / name, tmp_path)
    assert [one.key for one in caught.value.problems] == ["--prompts"]


def test_a_failure_in_the_middle_leaves_nothing(made, tmp_path, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(writer, "complete", fail)
    file = corpus.write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}])
    with pytest.raises(RuntimeError, match="the device is gone"):
        written(made, file, tmp_path)
    assert not list((tmp_path / "new").iterdir())
