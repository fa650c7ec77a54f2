"""Models whose packed documents cannot be hidden from each other, tuned on conversations."""

import json
from typing import Any

import pytest
import torch
import transformers
from helpers import chats, corpus
from helpers.bases import small_fields
from helpers.tiny import (
    STEPS,
    lines,
    optimizer_by_hand,
    rate_by_hand,
    tiny_config,
    weights,
    write_config,
)
from transformers import AutoConfig, AutoModelForCausalLM

import llmtrain

SMALL = small_fields(32, 2, 4)
GROUPED = {**SMALL, "num_key_value_heads": 2}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
}
STATE = {
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_head": 8,
    "mamba_chunk_size": 16,
}
# Each with a layer of every kind that its family has.
KINDS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        **GROUPED,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
    },
    "qwen3_5_text": {**GROUPED, **DELTA},
    "qwen3_next": {
        **GROUPED,
        **DELTA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "lfm2": {**GROUPED, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "falcon_h1": {**GROUPED, **STATE, "mamba_d_ssm": 64},
    "granitemoehybrid": {
        **GROUPED,
        **STATE,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "nemotron_h": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layers_block_type": ["mamba", "attention", "mlp"],
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {k: v for k, v in SMALL.items() if k != "intermediate_size"},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
}
# falcon hides documents from transformers 5.24 on.
HIDES = {"falcon"} if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else set()


def config_of(folder, kind, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    path = corpus.write_jsonl(folder / "chat.jsonl", chats.rows_of(40))
    asked = {"training__steps": STEPS, "evaluation__every_steps": STEPS}
    asked |= {"training__global_batch_size": 8, "training__micro_batch_size": 4}
    asked |= {"data__seq_len": 256, "data__heldout": 0.1, "data__workers": 0, **changes}
    config = tiny_config(folder / "run", **asked)
    config["model"]["config"] = {"model_type": kind, **KINDS[kind]}
    config["data"]["sources"] = [{"path": str(path)}]
    config["chat"] = {"template": "chatml"}
    return write_config(folder, config)


def by_hand(path, run_dir):
    """The losses of a loop that shows the model each conversation alone, without padding."""
    config = AutoConfig.from_pretrained(run_dir / "checkpoints" / f"step-{STEPS:08d}")
    torch.manual_seed(42)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    optimizer = optimizer_by_hand(model)
    losses = []
    with llmtrain.open_stream(llmtrain.load_config(path)) as stream:
        for step in range(1, STEPS + 1):
            for group in optimizer.param_groups:
                group["lr"] = rate_by_hand(step)
            batch, total = next(stream), 0.0
            for ids, labels in zip(batch.ids, batch.labels, strict=True):
                trained = torch.from_numpy(labels)
                stop = int((trained != -100).nonzero()[-1]) + 1
                row = torch.from_numpy(ids[:stop]).long()
                logits = model(row[None], use_cache=False).logits[0].float()
                loss = torch.nn.functional.cross_entropy(logits, trained[:stop], reduction="sum")
                (loss / batch.trained_tokens).backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total / batch.trained_tokens)
    return losses


# One of them in each full run of the tests, and all in the longer sweep.
SOME = [pytest.param(kind, marks=() if kind == "lfm2" else pytest.mark.slow) for kind in KINDS]


def run(server, path, processes, faults=""):
    return server.run(["train", str(path)], processes, path.parent, {"LLMTRAIN_FAULTS": faults})


@pytest.mark.parametrize("kind", SOME)
def test_a_run_is_a_loop_that_shows_each_conversation_alone(server, tmp_path, kind):
    path = config_of(tmp_path / "one", kind, checkpoint__every_steps=STEPS // 2)
    run_dir = path.parent / "run"
    assert run(server, path, 1) == [0], (path.parent / "output.txt").read_text()
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["packing"] == ("bestfit" if kind in HIDES else "single")
    straight = lines(run_dir, "train")
    expected = by_hand(path, run_dir)
    assert [line["loss"] for line in straight] == pytest.approx(expected, abs=1e-6)

    path = config_of(tmp_path / "killed", kind, checkpoint__every_steps=STEPS // 2)
    assert run(server, path, 1, f"loop.step@step={STEPS - 4}=kill") != [0]
    assert run(server, path, 1) == [0]
    assert weights(path.parent / "run", STEPS) == weights(run_dir, STEPS)

    path = config_of(tmp_path / "two", kind)
    assert run(server, path, 2) == [0, 0]
    two = lines(path.parent / "run", "train")
    assert [line["batch_digest"] for line in two] == [line["batch_digest"] for line in straight]
    assert [line["loss"] for line in two] == pytest.approx(expected, abs=1e-5)
    ends = [lines(one, "eval")[-1]["loss"] for one in (run_dir, path.parent / "run")]
    assert ends[0] == pytest.approx(ends[1], abs=1e-5)
