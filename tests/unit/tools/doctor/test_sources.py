import json
import os
import subprocess
from importlib import resources
from pathlib import Path

import pytest
from helpers import chats, turns
from helpers.cases import SMALL, case
from helpers.corpus import articles, write_jsonl
from helpers.hub import ID, SHA, serving, stand_in

from llmtrain.distributed.engines.state import bytes_of
from llmtrain.errors import Problem, RunError, UserError
from llmtrain.tools.doctor import run
from llmtrain.tools.doctor.case import attempt


def spec_of(made):
    return run.describe(made)[1]


def from_hub(*overrides: str) -> list[str]:
    return [f"data.sources=[{{path: {ID}}}]", *overrides]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub with one data set of forty articles."""
    path = tmp_path / "files" / "train.jsonl"
    write_jsonl(path, articles(40))
    with serving({"train.jsonl": path.read_bytes()}) as server:
        stand_in(monkeypatch, server, tmp_path / "home")
        yield server


def test_the_sources_of_a_config_are_counted_and_nothing_is_written(tmp_path):
    made = case(tmp_path)
    looked = run.data(made)
    assert looked.state == "ok"
    assert looked.found.startswith("sample: 4 files, ")
    assert not made.run_dir.exists()


def test_a_data_set_of_the_hub_is_resolved_to_its_commit(tmp_path, hub):
    looked = run.data(case(tmp_path, *from_hub()))
    assert looked.state == "ok", looked.found
    assert looked.found.startswith(f"encyclopedia: 1 files, 1 units at {SHA[:12]}")
    assert hub.requests["api"] > 0


def test_a_hub_that_does_not_answer_is_an_error_and_no_hang(tmp_path, hub):
    hub.down = True
    looked = run.data(case(tmp_path, *from_hub()), seconds=1.0)
    assert looked.state == "error"
    assert "no answer in 1 s" in looked.found
    assert "HF_ENDPOINT" in looked.remedy


def test_offline_without_what_was_kept_is_refused(tmp_path, hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE") as caught:
        run.data(case(tmp_path, *from_hub()))
    assert caught.value.problems[0].remedy
    assert not hub.requests


def test_data_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="nothing-here"):
        run.data(case(tmp_path, "data.sources.0.path=./nothing-here"))


def test_another_failure_of_reading_passes(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise RunError("the disk is gone", 75, "look")

    monkeypatch.setattr(run, "survey", fail)
    with pytest.raises(RunError, match="the disk is gone"):
        run.data(case(tmp_path))


def test_what_the_data_warns_of_is_a_warning_of_the_line(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", articles(40))
    path = tmp_path / "a.jsonl"
    both = f"data.sources=[{{path: {path}}}, {{path: {path}}}]"
    looked = run.data(case(tmp_path, both))
    assert looked.state == "warning"
    assert str(path) in looked.found or "a.jsonl" in looked.found


def test_the_tokenizer_fits_the_model(tmp_path):
    looked = run.model(case(tmp_path, text=SMALL))
    assert looked.state == "ok"
    assert "2,048 rows; a tokenizer of 2,048 entries" in looked.found


def test_a_vocabulary_that_is_too_small_is_an_error_with_the_number(tmp_path):
    made = case(tmp_path, "model.config.vocab_size=100", text=SMALL)
    looked = run.model(made)
    assert looked.state == "error"
    assert "vocab_size = 100" in looked.found
    assert looked.remedy.startswith("2048")
    assert run.disk(made).state == "warning"


def test_a_model_that_ends_texts_otherwise_is_a_warning(tmp_path):
    made = case(tmp_path, "model.config.eos_token_id=5", text=SMALL)
    looked = run.model(made)
    assert looked.state == "warning"
    assert "ends texts with 0, the model with 5" in looked.found


def test_a_tokenizer_that_the_run_trains_is_known_by_its_size(tmp_path):
    looked = run.model(case(tmp_path, "model.tokenizer={train: 300}", text=SMALL))
    assert looked.state == "ok"
    assert "300 rows; a tokenizer of 300 entries, trained at the start" in looked.found


def test_a_pattern_that_freezes_nothing_is_an_error(tmp_path):
    looked = run.model(case(tmp_path, "model.freeze=[nothing]", text=SMALL))
    assert looked.state == "error"
    assert "model.freeze" in looked.found


def test_a_tokenizer_that_is_nowhere_says_where_to_look(tmp_path, hub):
    looked = run.model(case(tmp_path, "model.tokenizer=nobody/none", text=SMALL))
    assert looked.state == "error"
    assert "HF_ENDPOINT" in looked.remedy


def test_a_run_that_began_has_its_tokenizer_whatever_the_hub_says(tmp_path, hub):
    hub.down = True
    asked = case(tmp_path, "model.tokenizer=someone/gone", text=SMALL)
    (asked.run_dir / "tokenizer").mkdir(parents=True)
    sample = resources.files("llmtrain.data.sample")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (asked.run_dir / "tokenizer" / name).write_bytes((sample / name).read_bytes())
    (asked.run_dir / "auto.json").write_text("{}")
    looked = run.model(asked)
    assert looked.state == "ok"
    assert "2,048 entries" in looked.found


def test_a_model_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    import threading

    monkeypatch.setattr(run, "_describe", lambda case: threading.Event().wait(30))
    with pytest.raises(RunError, match="no complete answer"):
        run.describe(case(tmp_path), seconds=0.3)


# fp32 weights and two moments of: embedding and head 2,048 × 8 each, four attention matrices of
# 8 × 8, three of the mlp 8 × 16, two norms of a block and the last, 8 each.
BYTES = 3 * 4 * (2 * 2048 * 8 + 4 * 64 + 3 * 128 + 3 * 8)


def test_the_bytes_that_a_run_will_write_are_those_of_its_tensors(tmp_path):
    made = case(tmp_path, text=SMALL)
    assert bytes_of(spec_of(made)) == BYTES
    looked = run.disk(made)
    assert looked.state == "ok"
    assert f"{BYTES / 1024:.3g} KiB a checkpoint" in looked.found
    # 3 newest, the best, the one being written and the one being deleted
    assert f"{6 * BYTES / 2**20:.3g} MiB still to be kept" in looked.found


def test_frozen_parameters_have_no_moments_on_disk(tmp_path):
    frozen = "model.freeze=['*embed_tokens*']"
    spec = spec_of(case(tmp_path, frozen, text=SMALL))
    assert bytes_of(spec) == BYTES - 2 * 4 * 2048 * 8


def test_too_little_room_is_refused_with_what_is_needed(tmp_path, monkeypatch):
    real = os.statvfs

    def statvfs(path):
        fields = list(real(path))
        fields[4] = 5 * BYTES // fields[1]
        return os.statvfs_result(fields)

    made = case(tmp_path, text=SMALL)
    monkeypatch.setattr(os, "statvfs", statvfs)
    with pytest.raises(UserError, match="free for the checkpoints") as caught:
        run.disk(made)
    assert str(6 * BYTES) in str(caught.value)


def test_a_real_disk_that_is_too_small_is_refused(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root alone")
    try:
        made = case(tmp_path, f"run.dir={small / 'run'}", text=SMALL)
        with pytest.raises(UserError, match="free for the checkpoints"):
            run.disk(made)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_disk_without_inodes_is_refused(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m,nr_inodes=20", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root alone")
    try:
        made = case(tmp_path, f"run.dir={small / 'run'}", text=SMALL)
        with pytest.raises(UserError, match="inodes"):
            run.disk(made)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_epochs_leave_open_how_many_checkpoints_stay(tmp_path):
    text = SMALL.replace("steps: 10", "epochs: 2")
    made = case(tmp_path, "checkpoint.keep_every=500", text=text)
    looked = run.disk(made)
    assert looked.state == "warning"
    assert "for every 500 steps" in looked.remedy
    assert run.disk(case(tmp_path, text=text)).state == "ok"


def test_a_local_model_directory_is_described(tmp_path):
    from llmtrain.model.build import model_config
    from llmtrain.model.shape import on_meta
    from llmtrain.training.start.planning import own_tokens

    made = case(tmp_path, text=SMALL)
    (tmp_path / "model").mkdir()
    tokens = own_tokens(made.config, made.run_dir)
    hf = model_config(made.config.model, tokens, 16)
    hf.save_pretrained(tmp_path / "model")
    sample = Path(resources.files("llmtrain.data.sample"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((sample / name).read_bytes())
    text = SMALL.replace(SMALL[: SMALL.index("data:")], f"model: {{from: {tmp_path / 'model'}}}\n")
    looked = run.model(case(tmp_path, text=text))
    assert looked.state == "ok", looked.found
    count = sum(p.numel() for p in on_meta(hf).parameters())
    assert f"{count:,} parameters" in looked.found
    assert json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"] == 2048


def talks(folder: Path, *overrides: str):
    """A config whose one source has conversations."""
    path = write_jsonl(folder / "chat.jsonl", chats.rows_of(30))
    return case(folder, f"data.sources=[{{path: {path}}}]", *overrides, text=SMALL)


def test_the_line_of_the_data_names_the_template_of_conversations(tmp_path):
    looked = run.data(talks(tmp_path, "chat.template=chatml"))
    ends = "; conversations by chatml template, a turn ends with <|im_end|>"
    assert (looked.state, looked.found[-len(ends) :]) == ("ok", ends)
    assert not (tmp_path / "run").exists()
    own = chats.make(tmp_path / "own", "llama3")
    looked = run.data(talks(tmp_path, f"model.tokenizer={own}"))
    assert looked.found.endswith("by the tokenizer's template, a turn ends with <|eot_id|>")
    two = chats.make(tmp_path / "two", turns.GPT_OSS, turns.TOKENS[turns.GPT_OSS])
    looked = run.data(talks(tmp_path, f"model.tokenizer={two}"))
    assert looked.found.endswith("a turn ends with <|return|> or <|call|>")
    trained = ("model.tokenizer={train: 300}", "chat.template=gemma")
    assert run.data(talks(tmp_path, *trained)).found.endswith("by gemma template")


def test_conversations_without_a_template_are_a_warning(tmp_path):
    looked = run.data(talks(tmp_path))
    assert looked.state == "warning"
    assert looked.found.endswith("; conversations, but the tokenizer has no template")
    assert looked.remedy.startswith("chat.template=chatml")


def test_a_tokenizer_that_a_refused_start_left_behind_is_not_looked_at(tmp_path):
    asked = talks(tmp_path, "chat.template=chatml")
    chats.make(asked.run_dir / "tokenizer", None)
    assert run.data(asked).state == "ok"
    (asked.run_dir / "auto.json").write_text("{}")
    assert run.data(asked).state == "warning"  # in a run that has begun it is the run's own


def test_a_template_that_ends_no_turn_is_an_error(tmp_path):
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    asked = talks(tmp_path, f"chat.template={tmp_path / 'bad.jinja'}")
    looked = attempt(lambda: run.data(asked))
    assert looked.state == "error"
    assert "no end-of-turn token after the answer" in looked.found
    assert looked.remedy == "set chat.end_of_turn"


@pytest.mark.parametrize(
    ("value", "network"), [("./nowhere", False), ("/no/where", False), ("some/thing", True)]
)
def test_the_network_is_to_be_checked_only_if_one_was_asked(value, network):
    problem = Problem("model.tokenizer", value, "a tokenizer directory or a Hub id")
    assert ("network" in run._absent(problem)) is network
