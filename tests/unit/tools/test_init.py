"""`llmtrain init DATA…`: what it finds out, what it writes, and what it refuses."""

from pathlib import Path

import pytest
from helpers import bases, brought, chats, corpus, preferred
from transformers import AutoTokenizer

from llmtrain.cli.main import main
from llmtrain.config.load import load_config
from llmtrain.tools.data.inspect import inspect
from llmtrain.tools.init import write_config
from llmtrain.training.start.data import FEW_STEPS


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def base(tmp_path):
    return bases.save_base(tmp_path / "base", max_position_embeddings=256)


def with_template(base, template, *tokens):
    """Give a base's tokenizer a chat template and the tokens of it."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(base)


def init(*words):
    """The exit code of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["init", *map(str, words)])
    code = ended.value.code
    return code if isinstance(code, int) else 0


def written(form, folder, *more, base=None):
    path = write_config([str(brought.FORMS[form](folder))], base and str(base), None, more)
    return load_config(path)


@pytest.mark.parametrize(
    ("form", "source"),
    [
        ("csv", {"text_column": "content"}),
        ("parquet", {"text_column": "body"}),
        ("pages", {"document": "file"}),
        ("messages", {}),
        ("alpaca", {}),
    ],
)
def test_form_column_and_document_are_found(tmp_path, form, source):
    (found,) = written(form, tmp_path).data.sources
    given = found.model_dump(exclude_unset=True)
    assert {key: value for key, value in given.items() if key != "path"} == source


@pytest.mark.parametrize("form", ["messages", "pages"])
def test_it_is_a_run_of_fifty_steps_or_more_with_held_out_documents(tmp_path, form):
    config = written(form, tmp_path)
    found = inspect(config, blocks=0)
    epochs, batch = config.training.epochs, config.training.global_batch_size
    assert epochs is not None
    assert found.steps_per_epoch * epochs >= FEW_STEPS
    assert found.few_steps is None
    assert batch >= 4
    assert sum(source.heldout for source in found.sources) >= 2
    assert config.evaluation.every_steps <= FEW_STEPS / 5


def test_the_base_gives_template_length_and_rate(tmp_path, base):
    config = written("messages", tmp_path, base=base)
    assert config.model.from_ == str(base)
    assert config.chat.template == "chatml"  # the base has none
    assert config.data.seq_len <= 256
    assert config.adapter.kind == "none"
    with_template(base, brought.TEMPLATE, "<|im_start|>", "<|im_end|>")
    other = tmp_path / "other"
    other.mkdir()
    path = write_config([str(brought.FORMS["messages"](other))], str(base), tmp_path / "own.yaml")
    assert load_config(path).chat.template is None


def test_adapters_are_trained_where_all_weights_do_not_fit(tmp_path):
    base = bases.save_base(tmp_path / "base", hidden_size=256, num_hidden_layers=4)
    small = "distributed.device_memory_gb=0.03"
    assert written("messages", tmp_path, small, base=base).adapter.kind == "lora"
    assert "does not fit this machine" in Path("chat.yaml").read_text()


def test_what_is_given_is_taken_as_it_is(tmp_path):
    config = written("messages", tmp_path, "training.epochs=2", "run.seed=7")
    assert (config.training.epochs, config.run.seed) == (2, 7)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_so_few_conversations_are_passed_over_until_there_are_fifty_steps(tmp_path, rows):
    path = write_config([str(corpus.write_jsonl(tmp_path / "few.jsonl", chats.rows_of(rows)))])
    assert inspect(load_config(path), blocks=0).few_steps is None


def test_conversations_that_were_not_looked_at_have_blocks_too(tmp_path):
    path = corpus.write_jsonl(tmp_path / "many.jsonl", chats.rows_of(6_000))
    written = write_config([str(path)], overrides=["data.packing=single"])
    assert written.read_text().startswith("# about ")
    assert load_config(written).training.global_batch_size >= 16


def test_a_mixture_has_a_source_for_each_of_its_places(tmp_path):
    places = [str(brought.FORMS[form](tmp_path)) for form in ("messages", "csv")]
    config = load_config(write_config(places))
    assert [source.path for source in config.data.sources] == places
    assert config.data.sources[1].text_column == "content"
    assert inspect(config, blocks=0).packing == "bestfit"


def test_the_command_ends_with_the_two_commands_to_give(tmp_path, capsys):
    assert init(brought.FORMS["csv"](tmp_path), "--out", "my run.yaml") == 0
    assert capsys.readouterr().out.splitlines() == [
        "my run.yaml",
        "  look at the data   llmtrain data inspect 'my run.yaml'",
        "  train              llmtrain train 'my run.yaml'",
    ]
    assert load_config("my run.yaml").run.dir == "runs/my run"


def two_forms(folder):
    rows = [*chats.rows_of(5), {"instruction": "Hi?", "output": "Yes."}]
    return corpus.write_jsonl(folder / "both.jsonl", rows)


def nothing(folder):
    (folder / "nothing").mkdir()
    return folder / "nothing"


def numbers(folder):
    return corpus.write_jsonl(folder / "numbers.jsonl", [{"a": n, "b": [n]} for n in range(9)])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (nothing, "DATA = "),
        (two_forms, "both.jsonl, line 6"),
        (numbers, "or a column of texts; it has a, b"),
        (lambda folder: folder / "nowhere.csv", "nowhere.csv"),
    ],
)
def test_data_that_cannot_be_used_is_refused_and_nothing_is_written(tmp_path, capsys, make, said):
    assert init(make(tmp_path)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert list(tmp_path.glob("*.yaml")) == []


def test_a_base_whose_template_cannot_be_trained_is_told_a_named_one(tmp_path, base, capsys):
    with_template(base, "{% for m in messages %}{{ m.content }}{% endfor %}", "<|eot_id|>")
    rows = brought.FORMS["messages"](tmp_path)
    assert init(rows, "--from", base) == 2
    error = capsys.readouterr().err
    assert f"--from = {base}" in error
    assert "chat.template=llama3" in error
    assert list(tmp_path.glob("*.yaml")) == []
    assert init(rows, "chat.template=llama3", "--from", base) == 0
    assert load_config("chat.yaml").chat.template == "llama3"


def test_an_existing_file_is_never_replaced(tmp_path, capsys):
    rows = brought.FORMS["messages"](tmp_path)
    Path("chat.yaml").write_text("mine")
    assert init(rows) == 2
    assert "--out = chat.yaml" in capsys.readouterr().err
    assert Path("chat.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--from", "base"), "DATA"),
        ((" ",), "DATA"),
        (("chat.jsonl", "--from", ""), "--from = "),
        (("--recipe", "chat_lora", "chat.jsonl"), "--recipe = chat_lora"),
        (("--recipe", "chat_lora", "--from", "base"), "--recipe = chat_lora"),
    ],
)
def test_data_and_recipes_do_not_mix(words, said, capsys):
    assert init(*words) == 2
    assert said in capsys.readouterr().err


def test_a_config_or_run_among_the_files_of_the_data_is_refused(tmp_path, capsys):
    brought.FORMS["messages"](tmp_path)
    assert init(tmp_path) == 2
    assert "a folder in which neither the config nor the run is written" in capsys.readouterr().err
    assert list(tmp_path.glob("*.yaml")) == []


def test_a_wrong_value_is_refused_without_the_name_of_a_file_that_nobody_wrote(tmp_path, capsys):
    assert init(brought.FORMS["messages"](tmp_path), "training.epochs=many") == 2
    error = capsys.readouterr().err
    assert 'training.epochs = "many"' in error
    assert "draft" not in error


def test_names_are_written_as_a_person_reads_them(tmp_path):
    rows = brought.FORMS["csv"](tmp_path).rename(tmp_path / "thời tiết.csv")
    path = write_config([rows.name], out=tmp_path / "mine.yaml")
    assert "path: thời tiết.csv" in path.read_text(encoding="utf-8")
    assert load_config(path).data.sources[0].path == "thời tiết.csv"


def test_one_page_of_markdown_is_a_document(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n" + "The river flows past the hills. " * 200, encoding="utf-8")
    assert load_config(write_config([str(page)])).data.sources[0].document == "file"


@pytest.mark.parametrize(
    ("rows", "loss"),
    [(preferred.pairs(60), "dpo"), (preferred.strings(60), "dpo"), (preferred.feedback(60), "kto")],
)
def test_pairs_and_judged_answers_are_found(tmp_path, base, rows, loss):
    path = corpus.write_jsonl(tmp_path / "rows.jsonl", rows)
    config = load_config(write_config([str(path)], str(base)))
    assert (config.preference.loss, config.preference.beta) == (loss, 0.1)
    assert config.chat.too_long == "drop"
    assert (config.optimizer.schedule, config.optimizer.weight_decay) == ("linear", 0.0)
    found = inspect(config, blocks=0)
    assert found.few_steps is None
    assert sum(one.documents for one in found.sources) >= 50


def test_answers_without_a_base_and_in_a_mixture_are_refused(tmp_path, base, capsys):
    pairs = corpus.write_jsonl(tmp_path / "pairs.jsonl", preferred.pairs(20))
    assert init(pairs) == 2
    assert "expected: a base: which answers are better" in capsys.readouterr().err
    talks = corpus.write_jsonl(tmp_path / "talks.jsonl", chats.rows_of(20))
    judged = corpus.write_jsonl(tmp_path / "judged.jsonl", preferred.feedback(20))
    for other in (talks, judged):
        assert init(pairs, other, "--from", base) == 2
        assert "expected: one kind of rows" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.yaml"))
