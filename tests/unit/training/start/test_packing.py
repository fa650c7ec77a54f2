"""Whether conversations can share blocks is found out from a model's config alone."""

import json

import pytest
import torch
from helpers import chats, corpus
from helpers.bases import small_fields
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmtrain.config.schema import Config
from llmtrain.errors import UserError
from llmtrain.model import attention
from llmtrain.rundir.contents import MANIFEST
from llmtrain.training.start.prepare import prepare
from llmtrain.training.start.trials import bare_forward, check_padding, small_model, why_apart

CPU = torch.device("cpu")
SMALL = small_fields(32, 2, 4, num_key_value_heads=2)
GPT_OSS = {
    **SMALL,
    "model_type": "gpt_oss",
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
}
LFM2 = {**SMALL, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
LLAMA = {**SMALL, "model_type": "llama"}


def config_of(folder, model, **data):
    path = corpus.write_jsonl(folder / "chat.jsonl", chats.rows_of(20))
    return Config.model_validate({
        "model": {"tokenizer": "sample", "config": model},
        "data": {"sources": [{"path": str(path)}], "seq_len": 512, "workers": 0, **data},
        "chat": {"template": "chatml"},
        "training": {"steps": 10},
    })  # fmt: skip


def packing_of(folder, model, **data):
    prepare(config_of(folder, model, **data), folder, 1)
    manifest = json.loads((folder / MANIFEST).read_text())
    return manifest["packing"], manifest["document_mask"]


@pytest.mark.parametrize(
    ("model", "packing"), [(GPT_OSS, "single"), (LFM2, "single"), (MAMBA, "single")]
)
def test_a_model_that_cannot_hide_documents_gets_one_a_block(tmp_path, caplog, model, packing):
    caplog.set_level("INFO", "llmtrain")
    assert packing_of(tmp_path, model) == (packing, True)
    assert f"packing: single, as with {model['model_type']} (attention: " in caplog.text
    assert "% of a block, and rows are cut to the longest of a micro-batch" in caplog.text


@pytest.mark.parametrize(
    ("model", "asked", "packing"),
    [(LLAMA, "auto", "bestfit"), (LLAMA, "single", "single"), (GPT_OSS, "bestfit", "bestfit")],
)
def test_others_share_blocks_and_what_the_user_says_counts(tmp_path, model, asked, packing):
    assert packing_of(tmp_path, model, packing=asked) == (packing, True)


def test_a_run_keeps_its_packing(tmp_path):
    assert packing_of(tmp_path, LLAMA) == ("bestfit", True)
    before = (tmp_path / MANIFEST).read_bytes()
    prepare(config_of(tmp_path, GPT_OSS), tmp_path, 1)
    assert (tmp_path / MANIFEST).read_bytes() == before


# The sizes of real models, of which small ones are built. Those of the second group hide documents.
APART = ["gpt_oss", "qwen3_next", "qwen3_5_text", "falcon_h1", "bamba", "granitemoehybrid"]
APART += ["nemotron_h", "olmo_hybrid", "kimi_linear", "mamba", "bloom", "mpt", "xglm", "minimax"]
APART += ["zamba2"]
TOGETHER = ["llama", "gpt2", "gemma3_text", "glm4_moe", "deepseek_v3", "mixtral", "cohere2"]
# The masks of one read tensors of the rows that are shown; the other's layers have unequal heads.
TOGETHER += ["gemma4_unified", "dots3_note_text"]


@pytest.mark.parametrize("kind", APART + TOGETHER)
def test_a_small_model_of_the_same_kinds_of_blocks_is_tried(kind):
    assert (why_apart(CONFIG_MAPPING[kind](), 64) != "") == (kind in APART)


@pytest.mark.parametrize("kind", APART + TOGETHER)
def test_padding_behind_a_document_changes_nothing_in_it(kind):
    """Measured: at most 4e-7 of the largest logit."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = small_model(CONFIG_MAPPING[kind]())
        assert model is not None
        assert sum(p.numel() for p in model.parameters()) < 70_000_000
        attention.install(model, 32)
        check_padding(model.eval(), bare_forward(model, CPU, "fp32"), CPU, "fp32", 32)


def test_a_model_that_sees_padding_is_refused():
    model = small_model(
        CONFIG_MAPPING["llama"](**{k: v for k, v in LLAMA.items() if k != "model_type"})
    )
    assert model is not None

    def forward(ids, **_):
        logits: torch.Tensor = model(ids, use_cache=False).logits
        return logits + ids.float().mean()  # of the whole micro-batch

    with torch.no_grad(), pytest.raises(UserError, match="does not see padding") as caught:
        check_padding(model.eval(), forward, CPU, "fp32", 32)
    assert caught.value.problems[0].key == "data.packing"


def test_a_model_that_trains_on_rows_of_one_length_is_refused():
    config = CONFIG_MAPPING["reformer"](
        is_decoder=True,
        attn_layers=["local"],
        hidden_size=32,
        attention_head_size=16,
        num_attention_heads=2,
        axial_pos_shape=[16, 8],
        axial_pos_embds_dim=[16, 16],
        local_attn_chunk_length=32,
        max_position_embeddings=128,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad(), pytest.raises(UserError, match="rows of any length: If training"):
        check_padding(model, bare_forward(model, CPU, "fp32"), CPU, "fp32", 128)
    assert not model.training
