"""scripts/story.py in short: a tiny model, a few steps, own articles and conversations."""

import json

from helpers.chats import rows_of
from helpers.corpus import articles, write_jsonl, write_parquet
from helpers.ranks import ROOT
from helpers.tiny import lines

BASE = (
    *("model.tokenizer=sample", "model.config.hidden_size=64", "model.config.num_hidden_layers=2"),
    *("model.config.num_attention_heads=2", "model.config.intermediate_size=128"),
    *("data.seq_len=128", "training.steps=12", "training.global_batch_size=4"),
    *("optimizer.learning_rate=1e-2", "optimizer.warmup_steps=2", "evaluation.prompts=[]"),
    *("evaluation.every_steps=12", "checkpoint.every_steps=12", "training.precision=fp32"),
)
ADAPT = (
    *("data.seq_len=128", "chat.too_long=truncate", "training.steps=16"),
    *("training.global_batch_size=4", "optimizer.learning_rate=1e-2", "evaluation.every_steps=8"),
    "training.precision=fp32",  # where bf16 is the faster one, an evaluation in it differs by 1e-3
)
FIGURES = {
    *("articles_loss", "conversations_loss_before", "conversations_loss_after"),
    *("conversations_loss_of_the_export", "answers", "answers_that_end", "seconds"),
}


def test_a_model_is_pretrained_adapted_measured_exported_and_answers(server, tmp_path):
    write_parquet(tmp_path / "articles.parquet", articles(400))
    write_jsonl(tmp_path / "train.jsonl", rows_of(60))
    write_jsonl(tmp_path / "heldout.jsonl", rows_of(12, first=1000))
    data = ["--articles", "articles.parquet", "--conversations", "train.jsonl"]
    data += ["--heldout", "heldout.jsonl", "--out", "story", "--prompts", "2"]
    call = ["call", "helpers.stories", "tell", *data, "--base", *BASE, "--adapt", *ADAPT]
    codes = server.run(call, 1, tmp_path, {"PYTHONPATH": str(ROOT)})
    assert (tmp_path / "story" / "story.json").is_file(), (tmp_path / "output.txt").read_text()
    found = json.loads((tmp_path / "story" / "story.json").read_text())
    assert found.keys() == FIGURES
    before, after = found["conversations_loss_before"], found["conversations_loss_after"]
    assert after < before - 0.05
    assert abs(found["conversations_loss_of_the_export"] - after) <= 1e-5
    assert found["answers"] == 2
    assert codes == [0 if found["answers_that_end"] == 2 else 1]
    compare_with_the_plan(server, tmp_path, tmp_path / "story" / "tuned")


def compare_with_the_plan(server, folder, run_dir):
    """What `llmtrain plan` counts of the adapters is what the run trains and saves."""
    config = str(ROOT / "configs" / "finetune" / "chat_lora.yaml")
    words = ["plan", config, "model.from=story/base", "data.sources.0.path=train.jsonl", "--json"]
    out = folder / "plan.json"
    call = ["call", "helpers.used", "command", str(out), *words]
    assert server.run(call, 1, folder) == [0], (folder / "output.txt").read_text()
    planned = json.loads(out.read_text())
    (start,) = lines(run_dir, "start")
    assert planned["trainable_parameters"] == start["trainable_parameters"]
    newest = max((run_dir / "checkpoints").iterdir())
    size = sum(path.stat().st_size for path in newest.glob("*.safetensors"))
    assert abs(planned["checkpoint_bytes"] - size) <= 0.05 * size
