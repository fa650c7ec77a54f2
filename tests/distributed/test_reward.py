"""Reward models: runs of `preference.loss: reward`, and what opens their checkpoints."""

import shutil

import pytest
import torch
from helpers import preferred
from helpers.tiny import lines, weights
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import llmtrain
from llmtrain.errors import UserError
from llmtrain.tools.use.export import export
from llmtrain.tools.use.generate import Sampling, open_writer
from llmtrain.tools.use.proof import Losses

STEPS = preferred.STEPS
LORA = {"kind": "lora", "r": 4, "alpha": 8}
SEEN = ("loss", "margin", "chosen_reward", "rejected_reward", "accuracy")
PAIRS = preferred.pairs(60)


def made(folder, kind, **changes):
    adapter = LORA if kind == "lora" else None
    return preferred.config_of(folder, PAIRS, "reward", adapter=adapter, **changes)


def trained(server, folder, config, world_size=1, code=0, **env):
    path = preferred.write(folder, config)
    codes = server.run(["train", path], world_size, folder, env)
    said = (folder / "output.txt").read_text()
    assert codes == [code] * world_size, said[-4000:]
    return " ".join(said.split())


def same(found, expected, within):
    for kind in ("train", "eval"):
        one, two = lines(found, kind), lines(expected, kind)
        assert len(one) == len(two) > 0
        for own, right in zip(one, two, strict=True):
            assert own["pairs"] == right["pairs"]
            assert own.get("batch_digest") == right.get("batch_digest")
            for key in SEEN:
                assert own[key] == pytest.approx(right[key], abs=within), (own["step"], key)


@pytest.fixture(scope="module", params=["full", "lora"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def straight(server, tmp_path_factory, kind):
    folder = tmp_path_factory.mktemp(kind)
    config = made(folder, kind, checkpoint__every_steps=2, checkpoint__keep_last=5)
    trained(server, folder, config)
    return folder


STARTS = {
    "ddp on 2": (2, "ddp"),
    "fsdp2 on 2": (2, "fsdp2"),
    "zero2 on 2": (2, "zero2"),
    "zero3 on 2": (2, "zero3"),
}


@pytest.mark.parametrize("start", STARTS)
def test_each_strategy_trains_the_same_scores(server, straight, tmp_path, kind, start):
    world_size, strategy = STARTS[start]
    shutil.copytree(straight / "base", tmp_path / "base")
    config = made(tmp_path, kind)
    config["distributed"] = {"strategy": strategy}
    trained(server, tmp_path, config, world_size)
    same(tmp_path / "run", straight / "run", 1e-6)


def test_a_killed_run_goes_on_with_equal_bits(server, straight, tmp_path, kind):
    shutil.copytree(straight / "base", tmp_path / "base")
    config = made(tmp_path, kind, checkpoint__every_steps=2, checkpoint__keep_last=5)
    trained(server, tmp_path, config, code=-9, LLMTRAIN_FAULTS="loop.step@step=4=kill")
    trained(server, tmp_path, config)
    assert weights(tmp_path / "run", STEPS) == weights(straight / "run", STEPS)
    same(tmp_path / "run", straight / "run", 0)


def scores(model, tokenizer, half):
    """Of each pair's chosen or rejected answers, one text at a time."""
    found = []
    for row in PAIRS:
        messages = [*row["prompt"], *row[half]]
        text = tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            found.append(model(ids).logits[0, 0].item())
    return torch.tensor(found)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # by peft
def test_a_run_opens_as_a_model_that_prefers_what_it_was_shown(straight):
    """All but six of the pairs were trained; untrained, about half would be right."""
    model, tokenizer = llmtrain.open_run(straight / "run").load()
    model = model.eval()
    right = scores(model, tokenizer, "chosen") > scores(model, tokenizer, "rejected")
    assert right.double().mean() > 0.9
    last = lines(straight / "run", "eval")[-1]
    assert last["accuracy"] > 0.5
    assert last["chosen_logp"] is None


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # by peft
def test_an_export_opens_with_the_class_for_sequence_classification(straight, tmp_path, kind):
    out = tmp_path / "out"
    done = export(straight / "run", out, merge_adapters=kind == "lora")
    assert isinstance(done.losses, Losses)
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert (type(model).__name__, model.num_labels) == ("LlamaForSequenceClassification", 1)
    with safe_open(out / "model.safetensors", "pt") as stored:
        assert "score.weight" in set(stored.keys())
    tokenizer = AutoTokenizer.from_pretrained(out)
    own, _ = llmtrain.open_run(straight / "run").load()
    own = own.eval()
    for half in ("chosen", "rejected"):
        one, two = scores(model.eval(), tokenizer, half), scores(own, tokenizer, half)
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_a_model_that_scores_writes_no_text(straight):
    with pytest.raises(UserError, match="a language model; this one scores answers"):
        open_writer(straight / "run", Sampling())


@pytest.mark.parametrize("key", ["tensor_parallel", "sequence_parallel", "pipeline_parallel"])
def test_a_model_that_scores_is_not_cut(server, tmp_path, key):
    config = made(tmp_path, "full")
    config["distributed"] = {key: 2}
    said = trained(server, tmp_path, config, 2, code=2)
    assert f"distributed.{key} = 2" in said
    assert "1 with preference.loss reward: a model that scores is not cut" in said
