"""Reward models: a score of each answer, as transformers' own class computes it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import answers
from helpers.bases import small_fields
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2ForSequenceClassification,
)

from llmtrain.config.schema import AdapterConfig, ModelConfig, OptimizerConfig, PreferenceConfig
from llmtrain.distributed.engines import state
from llmtrain.errors import UserError
from llmtrain.model import attention, build, count, scorer, shape, trainable
from llmtrain.model.base import Base
from llmtrain.model.loss import LossModule
from llmtrain.model.tokenizer import SpecialTokens
from llmtrain.pairs import PAIR_SLOTS
from llmtrain.training.optimizer import make_optimizer

VOCABULARY, SEQ_LEN = 61, 48
TOKENS = SpecialTokens(VOCABULARY, 1, 2, 0)
KINDS = ("llama", "gpt2", "qwen3")


def saved(folder: Path, kind: str = "llama", *, scores: bool = False, labels: int = 1) -> Base:
    torch.manual_seed(6)
    sizes = {"n_positions": 64} if kind == "gpt2" else {"max_position_embeddings": 64}
    noise = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    fields = small_fields(16, 2, 2, num_key_value_heads=2, vocab_size=VOCABULARY, **sizes)
    if kind == "gpt2":
        del fields["num_key_value_heads"], fields["intermediate_size"]
        fields |= noise
    config = AutoConfig.for_model(kind, **fields, pad_token_id=0, eos_token_id=2, bos_token_id=1)
    config.num_labels = labels
    made = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    made.from_config(config).save_pretrained(folder)
    return Base(str(folder), None, None)


def built(base: Base, seed: int = 0) -> Any:
    config = build.model_config(ModelConfig(), TOKENS, SEQ_LEN, base, scores=True)
    torch.manual_seed(seed)
    return build.build(config, ModelConfig(), base)


ROWS = [answers.pairs(2, VOCABULARY, seed) for seed in range(3)]
EVERY = [pair for row in ROWS for pair in row]


def last_tokens(rows: list[list[answers.Pair]]) -> torch.Tensor:
    found = []
    for row, own in enumerate(rows):
        at = row * SEQ_LEN
        for half in (half for pair in own for half in pair):
            at += len(half.ids)
            found.append(at - 1)
    return torch.tensor(found)


def given(model: Any, rows: list[list[answers.Pair]]) -> Any:
    pairs = answers.tensors(rows, last=last_tokens(rows))
    return answers.micro_batch(rows, SEQ_LEN, attention.backend(model), pairs)


def plain_scores(model: Any) -> torch.Tensor:
    """One sequence at a time."""
    halves = [half for pair in EVERY for half in pair]
    scores = [model(torch.tensor([half.ids]), use_cache=False).logits[0, 0] for half in halves]
    return torch.stack(scores).view(-1, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_answers_have_the_scores_of_transformers_class_and_its_gradients(tmp_path, kind):
    model = built(saved(tmp_path / "base", kind))
    model.save_pretrained(tmp_path / "reward")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    attention.install(model, SEQ_LEN)
    module = LossModule(model, None, preference=PreferenceConfig(loss="reward"))
    right = plain_scores(plain)
    with torch.no_grad():
        scores = module(**given(model, ROWS), each=True)
    assert scores.dtype == torch.float64
    torch.testing.assert_close(scores, right.detach().double(), rtol=1e-5, atol=1e-6)
    found = module(**given(model, ROWS))
    loss = -torch.nn.functional.logsigmoid(right[:, 0] - right[:, 1]).sum()
    assert found[0].item() == pytest.approx(loss.item(), rel=1e-6)
    slots = dict(zip(PAIR_SLOTS, found.tolist()[1:], strict=True))
    assert slots["chosen_reward"] == pytest.approx(right[:, 0].sum().item(), rel=1e-4, abs=1e-5)
    found[0].backward()
    loss.backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-5)


def test_a_score_is_new_and_seeded_and_the_decoder_is_that_of_the_causal_model(tmp_path):
    base = saved(tmp_path / "base")
    one, same, other = built(base), built(base), built(base, seed=1)
    assert type(one).__name__ == "LlamaForSequenceClassification"
    assert torch.equal(one.score.weight, same.score.weight)
    assert not torch.equal(one.score.weight, other.score.weight)
    causal = AutoModelForCausalLM.from_pretrained(base.path)
    for ours, theirs in zip(one.model.parameters(), causal.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_reward_checkpoint_is_read_with_its_score(tmp_path):
    base = saved(tmp_path / "reward", scores=True)
    right = AutoModelForSequenceClassification.from_pretrained(base.path)
    assert torch.equal(built(base).score.weight, right.score.weight)
    assert torch.equal(built(base, seed=5).score.weight, right.score.weight)


def test_a_stored_config_makes_the_same_class_again(tmp_path):
    model = built(saved(tmp_path / "base"))
    model.save_pretrained(tmp_path / "reward")
    config = build.stored_config(tmp_path / "reward")
    again = build.rebuild(config, ModelConfig())
    skeleton = build.skeleton(build.stored_config(tmp_path / "reward"), ModelConfig())
    names = [name for name, _ in model.named_parameters()]
    assert type(again) is type(skeleton) is type(model)
    assert [name for name, _ in skeleton.named_parameters()] == names
    assert names[-1] == "score.weight"


def test_a_model_from_scratch_scores_too():
    fields = {"model_type": "llama", **small_fields(16, 2, 2)}
    config = build.model_config(ModelConfig(config=fields), TOKENS, 16, scores=True)
    assert build.rebuild(config, ModelConfig()).score.weight.shape == (1, 16)


@pytest.mark.parametrize(("pad", "expected"), [(0, 0), (None, None), (2, None)])
def test_padding_is_never_taken_for_the_end_of_an_answer(tmp_path, pad, expected):
    """transformers scores the rightmost token that is no padding."""
    base, tokens = saved(tmp_path / "base"), SpecialTokens(VOCABULARY, 1, 2, pad)
    config = build.model_config(ModelConfig(), tokens, SEQ_LEN, base, scores=True)
    assert config.pad_token_id == expected


def test_a_classifier_of_another_kind_is_refused():
    fields = {"model_type": "bert", **small_fields(16, 2, 2)}
    config = build.model_config(ModelConfig(config=fields), TOKENS, 16, scores=True)
    with pytest.raises(UserError, match="whose score is one layer behind its decoder; Bert"):
        build.rebuild(config, ModelConfig())


def test_a_classifier_with_several_labels_is_refused(tmp_path):
    base = saved(tmp_path / "three", scores=True, labels=3)
    with pytest.raises(UserError, match=r"score.weight: \[3, 16\] in the files, \[1, 16\]"):
        built(base)


def test_a_reward_model_is_not_trained_on_texts(tmp_path):
    base = saved(tmp_path / "reward", scores=True)
    with pytest.raises(UserError, match="a language model; this one scores answers"):
        build.model_config(ModelConfig(), TOKENS, SEQ_LEN, base)


def test_an_architecture_without_such_a_class_is_refused():
    fields = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 2}
    with pytest.raises(UserError, match="no class for sequence classification of mamba"):
        build.model_config(ModelConfig(config=fields), TOKENS, 16, scores=True)


def test_its_memory_is_counted_and_its_shape_has_no_head(tmp_path):
    config = build.model_config(ModelConfig(), TOKENS, SEQ_LEN, saved(tmp_path / "b"), scores=True)
    described = shape.describe_parameters(config)
    assert (described.head, described.tied, described.blocks) == (0, False, 2)
    assert described.parameters[-1].shape == (1, 16)
    assert described.vocabulary == 1  # so that no logits are planned
    causal = build.model_config(ModelConfig(), TOKENS, SEQ_LEN, saved(tmp_path / "c"))
    ours, theirs = (
        count.count_saved(one, SEQ_LEN, "fp32", "none", (), None, ()) for one in (config, causal)
    )
    assert (ours.blocks, ours.once) == (theirs.blocks, theirs.once)
    assert ours.plain_head


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # by peft
def test_with_adapters_the_score_is_trained_and_saved_as_peft_names_it(tmp_path):
    from peft import PeftModel

    base = saved(tmp_path / "base")
    model = built(base)
    attention.install(model, SEQ_LEN)
    trainable.attach(model, AdapterConfig(kind="lora", r=2), dtype=torch.bfloat16)
    module = LossModule(model, None, preference=PreferenceConfig(loss="reward"))
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=1e-2))
    for _ in range(2):
        module(**given(model, ROWS))[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = state.named_tensors(model)
    assert "base_model.model.score.weight" in kept
    assert all("lora_" in name or "score" in name for name in kept)
    layer = scorer.score_layer(model)
    assert layer is not None
    assert layer.weight.dtype == torch.float32
    assert not torch.equal(layer.weight, model.score.original_module.weight.float())

    from safetensors.torch import save_file

    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(
        {name: one.detach().contiguous() for name, one in kept.items()}, folder / state.ADAPTER
    )
    for name, content in trainable.adapter_files(model, base).items():
        (folder / name).write_bytes(content)
    plain = AutoModelForSequenceClassification.from_pretrained(base.path, num_labels=1)
    opened = PeftModel.from_pretrained(plain.to(torch.bfloat16).float(), folder)
    with torch.no_grad():
        scores = module(**given(model, ROWS), each=True)
    right = plain_scores(opened)
    torch.testing.assert_close(scores, right.detach().double(), rtol=2e-2, atol=2e-2)


def test_rows_without_a_pair_have_a_loss_of_0_and_gradients_of_zeros(tmp_path):
    model = built(saved(tmp_path / "base"))
    module = LossModule(model, None, preference=PreferenceConfig(loss="reward"))
    pairs = answers.tensors([], last=torch.zeros(0, dtype=torch.int64))
    ids = torch.ones(2, 8, dtype=torch.int64)
    found = module(ids, torch.full_like(ids, -100), pairs=pairs)
    found[0].backward()
    assert found.tolist() == [0.0] * (1 + len(PAIR_SLOTS))
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_every_dropout_of_a_config_becomes_0():
    config = AutoConfig.for_model("gpt2", resid_pdrop=0.2, embd_pdrop=0.0)
    assert build.without_noise(config) == ["attn_pdrop", "resid_pdrop", "summary_first_dropout"]
    model = GPT2ForSequenceClassification(config)
    drops = [one.p for one in model.modules() if isinstance(one, torch.nn.Dropout)]
    assert drops
    assert not any(drops)
    assert build.without_noise(config) == []
    nested = AutoConfig.for_model("dbrx", attn_config={"attn_pdrop": 0.2}, resid_pdrop=0.1)
    assert build.without_noise(nested) == ["attn_config.attn_pdrop", "resid_pdrop"]
    assert (nested.attn_config.attn_pdrop, nested.resid_pdrop) == (0.0, 0.0)
