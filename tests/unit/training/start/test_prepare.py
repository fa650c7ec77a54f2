import json
import logging
from collections import Counter

import pytest
import torch
from helpers import chats, corpus
from helpers.bases import small_fields
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmtrain import system
from llmtrain.config.schema import Config
from llmtrain.data.chat.template import named_template
from llmtrain.data.state import DataState
from llmtrain.errors import UserError
from llmtrain.model import attention
from llmtrain.rundir.contents import HELDOUT, MANIFEST, TOKENIZER
from llmtrain.training.start.prepare import load_manifest, prepare
from llmtrain.training.start.small_trials import small_model, why_apart
from llmtrain.training.start.trials import Tried, bare_forward, check_padding


@pytest.fixture
def config(tmp_path):
    corpus.write_parquet(tmp_path / "data" / "0.parquet", corpus.articles(60))
    found = corpus.config(tmp_path / "data").model_dump(by_alias=True, exclude_unset=True)
    return Config.model_validate(found | {"model": {"tokenizer": "sample"}})


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_the_first_start_decides_the_back_end_and_says_so(config, run_dir, caplog):
    caplog.set_level(logging.INFO, "llmtrain")
    prepare(config, run_dir, 1, None)
    assert load_manifest(config, run_dir).tokenizer.backend == "tiktoken"
    assert "equal those of tokenizers on 60 documents" in caplog.text


def test_a_later_start_decides_nothing(config, run_dir, monkeypatch, caplog):
    prepare(config, run_dir, 1, None)
    stored = json.loads((run_dir / MANIFEST).read_text())
    stored["tokenizer"]["backend"] = "tokenizers"
    (run_dir / MANIFEST).write_text(json.dumps(stored))
    monkeypatch.setattr("llmtrain.data.tokens.tokenizer.choose_tokenizer", None)
    prepare(config, run_dir, 1, None)
    assert load_manifest(config, run_dir).tokenizer.backend == "tokenizers"
    assert (run_dir / TOKENIZER / "tokenizer.json").is_file()


def changed(config, accept, **data):
    """The config with other values of `data`, accepted."""
    tree = config.model_dump(by_alias=True, exclude_unset=True)
    tree["data"] |= data
    tree["checkpoint"] = {"accept_changes": accept}
    return Config.model_validate(tree)


def files(run_dir):
    return {path.name: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def test_what_is_made_anew_takes_the_place_of_the_old_as_a_whole(config, run_dir):
    prepare(config, run_dir, 1, None)
    saved = DataState.fresh(load_manifest(config, run_dir))
    (run_dir / HELDOUT).touch()
    other = changed(config, ["data.seq_len"], seq_len=32)
    prepare(other, run_dir, 1, None, saved)
    assert load_manifest(other, run_dir).seq_len == 32
    assert load_manifest(other, run_dir).lanes == saved.lanes
    assert {path.name for path in run_dir.iterdir()} == {MANIFEST, TOKENIZER}


@pytest.mark.parametrize(
    ("accept", "data"),
    [
        (["model.tokenizer"], {}),  # it is gone
        (["data.seq_len"], {"seq_len": 32, "packing": "bestfit"}),  # one is not accepted
    ],
)
def test_a_refused_change_leaves_everything_as_it_was(config, run_dir, tmp_path, accept, data):
    prepare(config, run_dir, 1, None)
    before = files(run_dir)
    saved = DataState.fresh(load_manifest(config, run_dir))
    other = changed(config, accept, **data)
    if not data:
        (tmp_path / "empty").mkdir()
        model = other.model.model_copy(update={"tokenizer": str(tmp_path / "empty")})
        other = other.model_copy(update={"model": model})
        with pytest.raises(UserError):
            prepare(other, run_dir, 1, None, saved)
    else:
        prepare(other, run_dir, 1, None, saved)  # what follows refuses it
    assert {name: body for name, body in files(run_dir).items() if name in before} == before
    prepare(config, run_dir, 1, None, saved)
    assert load_manifest(config, run_dir).fingerprint == saved.fingerprint


def test_another_set_of_sources_is_one_change(config, run_dir, tmp_path):
    tree = config.model_dump(by_alias=True, exclude_unset=True)
    tree["data"]["heldout"] = 0.1
    config = Config.model_validate(tree)
    prepare(config, run_dir, 1, None)
    saved = DataState.fresh(load_manifest(config, run_dir))
    corpus.write_parquet(tmp_path / "more" / "0.parquet", corpus.articles(40))
    sources = [*tree["data"]["sources"], {"path": str(tmp_path / "more")}]
    other = changed(config, ["data.sources"], sources=sources)
    prepare(other, run_dir, 1, None, saved)
    assert len(load_manifest(other, run_dir).sources) == 2


def test_a_kill_between_old_and_new_is_finished_by_the_next_start(config, run_dir):
    prepare(config, run_dir, 1, None)
    saved = DataState.fresh(load_manifest(config, run_dir))
    other = changed(config, ["data.seq_len"], seq_len=32)
    prepare(other, run_dir, 1, None, saved)
    whole = files(run_dir)
    # As a kill leaves it: the tokenizer has been moved, the manifest has not.
    (run_dir / "staged").mkdir()
    (run_dir / MANIFEST).rename(run_dir / "staged" / MANIFEST)
    (run_dir / MANIFEST).write_text("{}")
    prepare(other, run_dir, 1, None, saved)
    assert files(run_dir) == whole


def test_the_watchdog_sees_every_file_unit_and_text_that_is_looked_at(
    config, run_dir, tmp_path, monkeypatch
):
    phases = Counter()
    monkeypatch.setattr(system, "beat", lambda phase, *_: phases.update([phase]))
    for number in (1, 2):
        corpus.write_parquet(tmp_path / "data" / f"{number}.parquet", corpus.articles(60))
    tree = config.model_dump(by_alias=True, exclude_unset=True)
    prepare(
        Config.model_validate(tree | {"model": {"tokenizer": {"train": 300}}}), run_dir, 1, None
    )
    assert phases["looking into the files of the data"] == 3
    assert phases["reading a unit of the data"] >= 3
    assert 120 < phases["training a tokenizer"] <= 180  # a text each, but for those held out


def talks(tmp_path, **chat):
    """A config whose source has conversations."""
    path = corpus.write_jsonl(tmp_path / "chat.jsonl", chats.rows_of(20))
    tree = {
        "model": {"tokenizer": "sample", "config": {"model_type": "llama", "hidden_size": 64}},
        "data": {"sources": [{"path": str(path)}], "seq_len": 512},
        "chat": chat,
        "training": {"steps": 10},
    }
    return Config.model_validate(tree)


def test_conversations_without_a_template_are_refused(tmp_path, run_dir):
    with pytest.raises(UserError, match="a chat template: the tokenizer has none"):
        prepare(talks(tmp_path), run_dir, 1, None)
    assert not (run_dir / MANIFEST).exists()


def test_an_accepted_template_is_in_the_tokenizer_that_is_made_again(tmp_path, run_dir):
    first = talks(tmp_path, template="chatml")
    prepare(first, run_dir, 1, None)
    saved = DataState.fresh(load_manifest(first, run_dir))
    date = load_manifest(first, run_dir).chat.settings["date"]
    tree = first.model_dump(by_alias=True, exclude_unset=True) | {"chat": {"template": "gemma"}}

    def with_accepted(*keys):
        return Config.model_validate(tree | {"checkpoint": {"accept_changes": keys}})

    prepare(with_accepted(), run_dir, 1, None, saved)  # what follows refuses it
    with pytest.raises(UserError, match=r"accept_changes=\[model\.tokenizer\]"):  # new tokens
        prepare(with_accepted("chat.template"), run_dir, 1, None, saved)
    assert (run_dir / TOKENIZER / "chat_template.jinja").read_text() == named_template("chatml")
    other = with_accepted("chat.template", "model.tokenizer")
    prepare(other, run_dir, 1, None, saved)
    assert (run_dir / TOKENIZER / "chat_template.jinja").read_text() == named_template("gemma")
    tokenizer = chats.plain(run_dir / TOKENIZER)
    assert tokenizer.token_to_id("<end_of_turn>") is not None
    assert tokenizer.token_to_id("<|im_end|>") is None
    chat = load_manifest(other, run_dir).chat
    assert chat.end_of_turn["text"] == "<end_of_turn>"
    assert chat.settings["date"] == date


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("<|endoftext|>\n", r"'<|endoftext|>\n' before an answer: it ends every prompt"),
        (" ", "' ' before an answer: it is trained like the answer"),
        ("", None),
    ],
)
def test_what_a_template_puts_before_an_answer_is_logged(tmp_path, run_dir, caplog, before, said):
    caplog.set_level(logging.INFO, "llmtrain")
    template = (
        "{% for m in messages %}{{ m.role + ':' }}{{ BEFORE if m.role == 'assistant' else '' }}"
        "{{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    prepare(talks(tmp_path, template=template.replace("BEFORE", repr(before))), run_dir, 1, None)
    assert (said is None) == ("before an answer" not in caplog.text)
    assert (said or "") in caplog.text


# Whether conversations can share blocks is found out from a model's config alone.
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


def config_of_pairs(folder, model, **data):
    answers = {name: chats.talk("", said)[1:] for name, said in (("chosen", "Yes."),
               ("rejected", "No " * 20))}  # fmt: skip
    rows = [{"prompt": chats.talk(f"Hi {n}?"), **answers} for n in range(20)]
    path = corpus.write_jsonl(folder / "pairs.jsonl", rows)
    config = config_of(folder, model, **data).model_dump(by_alias=True, exclude_unset=True)
    config["data"]["sources"] = [{"path": str(path)}]
    return Config.model_validate({**config, "preference": {"loss": "dpo"}})


def test_pairs_of_a_model_that_cannot_hide_them_have_half_of_a_block_each(tmp_path, caplog):
    caplog.set_level("INFO", "llmtrain")
    prepare(config_of_pairs(tmp_path, MAMBA, seq_len=128), tmp_path, 1)
    assert json.loads((tmp_path / MANIFEST).read_text())["packing"] == "single"
    assert "; pairs fill " in caplog.text
    assert "the first pair, trained in ⟦⟧: " in caplog.text


@pytest.mark.parametrize(
    ("seq_len", "key", "said"),
    [
        (94, "line 1", "at most 47 each, half of data.seq_len; chat.too_long=drop or truncate"),
        (95, "data.seq_len", "an even number with data.packing single and preference.loss"),
    ],
)
def test_such_blocks_must_hold_two_answers(tmp_path, seq_len, key, said):
    fitting = config_of_pairs(tmp_path, LLAMA, seq_len=seq_len)
    prepare(fitting, tmp_path, 1)  # together they have 17 + 60 tokens or so
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(UserError) as caught:
        prepare(config_of_pairs(tmp_path, MAMBA, seq_len=seq_len), tmp_path, 1)
    (problem,) = caught.value.problems
    assert problem.key.endswith(key)
    assert said in problem.expected


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
        check_padding(Tried(model.eval(), bare_forward(model, CPU, "fp32"), CPU, "fp32", 32))


def test_a_model_that_sees_padding_is_refused():
    model = small_model(
        CONFIG_MAPPING["llama"](**{k: v for k, v in LLAMA.items() if k != "model_type"})
    )
    assert model is not None

    def forward(ids, **_):
        logits: torch.Tensor = model(ids, use_cache=False).logits
        return logits + ids.float().mean()  # of the whole micro-batch

    with torch.no_grad(), pytest.raises(UserError, match="does not see padding") as caught:
        check_padding(Tried(model.eval(), forward, CPU, "fp32", 32))
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
        check_padding(Tried(model, bare_forward(model, CPU, "fp32"), CPU, "fp32", 128))
    assert not model.training
