"""Runs on conversations: the same batches on any number of processes, bad rows, ends of turns."""

import json
from typing import Any

import pytest
import torch
from helpers import chats, corpus, turns
from helpers.tiny import lines, status, tiny_config, write_config

from llmtrain.tools.data.which import which
from llmtrain.tools.use.export import export
from llmtrain.tools.use.generate import generate

STEPS = 8


def config_of(folder, rows, **changes):
    """A run on these rows with the sample's tokenizer and `chatml`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = corpus.write_jsonl(folder / "chat.jsonl", rows)
    asked = {"training__steps": STEPS, "evaluation__every_steps": STEPS}
    asked |= {"data__seq_len": 256, "data__heldout": 0.1, **changes}
    config = tiny_config(folder / "run", **asked)
    config["data"]["sources"] = [{"path": str(path)}]
    config["chat"] = {"template": "chatml"}
    return write_config(folder, config)


def digests(folder):
    return [line["batch_digest"] for line in lines(folder / "run", "train")]


@pytest.fixture(scope="module")
def straight(server, tmp_path_factory):
    """One process, with a checkpoint in the middle."""
    folder = tmp_path_factory.mktemp("chat")
    path = config_of(
        folder, chats.rows_of(80), checkpoint__every_steps=STEPS // 2, evaluation__prompts=["Hi?"]
    )
    codes = server.run(["train", str(path)], 1, folder)
    assert codes == [0], (folder / "output.txt").read_text()
    return folder


def test_a_resume_on_two_processes_has_the_same_batches_and_losses(server, straight, tmp_path):
    path = config_of(tmp_path, chats.rows_of(80), checkpoint__every_steps=STEPS // 2)
    half = f"training.steps={STEPS // 2}"
    schedule = "optimizer.schedule=constant"
    assert server.run(["train", str(path), half, schedule], 1, tmp_path) == [0]
    assert server.run(["train", str(path), schedule], 2, tmp_path) == [0, 0]
    assert digests(tmp_path) == digests(straight)
    other = tmp_path / "two"
    path = config_of(other, chats.rows_of(80), checkpoint__every_steps=STEPS // 2)
    assert server.run(["train", str(path)], 2, other) == [0, 0]
    assert digests(other) == digests(straight)
    for one, two in zip(
        lines(other / "run", "train"), lines(straight / "run", "train"), strict=True
    ):
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)
        assert one["tokens"] == two["tokens"]


def test_a_checkpoint_ends_at_the_end_of_a_turn(straight):
    (start,) = lines(straight / "run", "start")
    checkpoint = straight / "run" / "checkpoints" / f"step-{STEPS:08d}"
    settings = json.loads((checkpoint / "generation_config.json").read_text())
    tokenizer = chats.plain(checkpoint)
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    assert end in settings["eos_token_id"]
    assert "<|im_start|>" in (checkpoint / "chat_template.jinja").read_text()
    assert json.loads((checkpoint / "config.json").read_text())["vocab_size"] > end
    assert start["trainable_parameters"] > 0


@pytest.mark.parametrize(
    ("template", "ends"),
    [(turns.GPT_OSS, ("<|return|>", "<|call|>")), (turns.GLM, ("<|user|>", "<|observation|>"))],
    ids=["gpt-oss", "glm"],
)
def test_every_token_that_ends_a_turn_is_saved_and_ends_what_is_generated(
    server, tmp_path, template, ends
):
    files = chats.make(tmp_path / "tokenizer", template, turns.TOKENS[template])
    asked = {"model__tokenizer": str(files), "evaluation__prompts": ["Hi?"], "training__steps": 2}
    path = config_of(tmp_path, [turns.ROW] * 40, optimizer__schedule="constant", **asked)
    own = f"chat.template={files / 'chat_template.jinja'}"
    for steps in (2, 3):
        given = ["train", str(path), own, f"training.steps={steps}"]
        assert server.run(given, 1, tmp_path) == [0], (tmp_path / "output.txt").read_text()
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    exported = export(checkpoints[-1], tmp_path / "exported", verify=False).path
    tokenizer = chats.plain(files)
    expected = [tokenizer.token_to_id(one) for one in ("<|endoftext|>", *ends)]
    for directory in (*checkpoints, exported):
        settings = json.loads((directory / "generation_config.json").read_text())
        assert settings["eos_token_id"] == expected
    for end in ends:
        found = generate(writes(exported, tokenizer.token_to_id(end)), "Hi?", chat=True)
        assert (found.text, found.tokens, found.ended) == ("", 1, True)
    other = writes(exported, tokenizer.token_to_id("e"))
    found = generate(other, "Hi?", chat=True, max_new_tokens=5)
    assert (found.text, found.tokens, found.ended) == ("eeeee", 5, False)


def writes(directory, token):
    """A copy of a model of Llama's kind that writes this token and nothing else."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    config = AutoConfig.from_pretrained(directory, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_("norm" in name or "embed" in name)
        model.lm_head.weight[token] = 1
    model.generation_config = GenerationConfig.from_pretrained(directory)
    out = directory.with_name(f"writes-{token}")
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(directory).save_pretrained(out)
    return out


def test_the_evaluation_scores_answers_and_has_no_bits_per_byte(straight):
    *_, last = lines(straight / "run", "eval")
    assert last["bits_per_byte"] is None
    assert last["tokens"] > 0
    assert lines(straight / "run", "sample")[-1]["prompt"] == "Hi?"


def test_the_log_shows_the_first_conversation(straight):
    log = (straight / "run" / "logs" / "rank-0.log").read_text()
    assert "the first conversation, trained in ⟦⟧" in log
    assert "<|im_end|>⟧" in log


@pytest.mark.parametrize("step", [1, STEPS // 2 + 1])
def test_the_conversations_of_a_step_are_named_and_checked(straight, step):
    found = which(straight / "run", step, text=True)
    assert found.checked_at == step
    assert found.batch_digest == digests(straight)[step - 1]
    assert len({one.g for one in found.documents}) == found.blocks == 24
    data = (straight / "chat.jsonl").read_bytes()
    for one in found.documents:
        row = json.loads(data[one.at :].split(b"\n")[0])
        said = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>" for m in row["messages"]]
        assert one.text == "\n".join(said)  # a row is one sequence, and never cut
        assert (one.source, one.file) == ("chat.jsonl", "chat.jsonl")
        assert one.tokens == (0, one.span[1] - one.span[0])


def test_a_later_bad_row_ends_all_ranks_with_its_line(server, tmp_path):
    rows = chats.rows_of(240)
    rows[190]["messages"][0]["role"] = "bot"
    path = config_of(tmp_path, rows, training__steps=200)
    assert server.run(["train", str(path)], 2, tmp_path) == [2, 2]
    said = (tmp_path / "output.txt").read_text()
    assert said.count("error: 1 problem") == 1, said
    assert "chat.jsonl, line 191" in said
    assert "role 'bot'" in said
    assert "Traceback" not in said
    assert status(tmp_path / "run")["exit_code"] == 2


def test_epochs_of_conversations_end_with_the_data(server, tmp_path):
    path = config_of(tmp_path, chats.rows_of(80), training__epochs=2, training__steps=None)
    assert server.run(["train", str(path)], 2, tmp_path) == [0, 0]
    assert status(tmp_path / "run")["state"] == "finished"
    trained = lines(tmp_path / "run", "train")[-1]["tokens"]
    longer = server.run(["train", str(path), "training.epochs=3"], 2, tmp_path)
    assert longer == [2, 2]
    assert "checkpoint.accept_changes=[training.epochs]" in (tmp_path / "output.txt").read_text()
    asked = ["training.epochs=4", "checkpoint.accept_changes=[training.epochs]"]
    assert server.run(["train", str(path), *asked], 2, tmp_path) == [0, 0]
    assert lines(tmp_path / "run", "train")[-1]["tokens"] == 2 * trained


def test_few_conversations_are_trained_in_each_epoch_without_an_empty_step(server, tmp_path):
    """As many steps as they fill, on any number of processes, and half of them in half an epoch."""
    rows = [
        {"messages": chats.talk(f"What is {n} plus {n}?", f"It is {n + n}.")} for n in range(60)
    ]
    asked = {"training__steps": None, "training__global_batch_size": 4, "data__heldout": 0.0}
    found: dict[tuple[int, float], list[dict[str, Any]]] = {}
    for processes, epochs in ((1, 1), (2, 1), (2, 2), (1, 0.5)):
        folder = tmp_path / f"{processes}-{epochs}"
        path = config_of(folder, rows, **asked, training__epochs=epochs, data__seq_len=64)
        codes = server.run(["train", str(path)], processes, folder)
        assert codes == [0] * processes, (folder / "output.txt").read_text()
        found[processes, epochs] = lines(folder / "run", "train")
    once = found[1, 1][-1]["tokens"]
    assert found[2, 2][-1]["tokens"] == 2 * once
    assert 0.35 * once < found[1, 0.5][-1]["tokens"] < 0.65 * once
    assert all(line["step_tokens"] > 0 for of in found.values() for line in of)
    one, two = ([line["batch_digest"] for line in found[n, 1]] for n in (1, 2))
    assert one == two


def test_a_run_that_would_train_nothing_is_refused(server, tmp_path):
    rows = [{"messages": chats.talk(f"{n}?", f"{n}.")} for n in range(60)]
    asked = {"data__lanes": 8, "training__global_batch_size": 2, "training__steps": None}
    path = config_of(tmp_path, rows, **asked, training__epochs=0.01, data__heldout=0.0)
    assert server.run(["train", str(path)], 1, tmp_path) == [2]
    said = (tmp_path / "output.txt").read_text()
    assert "training.epochs = 0.01 (1 steps)" in said
    assert "try:      data.lanes=1, or more epochs" in said
    steps = ["training.epochs=null", "training.steps=1", "data.sources.0.max_epochs=1"]
    assert server.run(["train", str(path), *steps, f"run.dir={tmp_path}/other"], 1, tmp_path) == [2]
    assert "at least one trained token in the whole run" in (tmp_path / "output.txt").read_text()


@pytest.mark.slow  # counted in tests/unit/data/test_chat_lanes.py
def test_bad_rows_are_skipped_and_counted_where_that_is_asked(server, tmp_path):
    rows = chats.rows_of(120)
    rows[110]["messages"][0]["role"] = "bot"
    path = config_of(tmp_path, rows, training__steps=20)
    assert server.run(["train", str(path), "chat.bad_rows=skip"], 1, tmp_path) == [0]
    (event,) = [
        line for line in lines(tmp_path / "run", "event") if line["event"] == "dropped_documents"
    ]
    assert event["detail"]["rejected"] >= 1
