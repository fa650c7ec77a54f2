"""What a start decides and checks of its adapters."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.config import loaded
from helpers.corpus import with_hole, write_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from llmtrain.agreement import Alone
from llmtrain.checkpoint.read import ResumePoint
from llmtrain.data.chat.template import NAMED, template_text
from llmtrain.distributed.engines import state
from llmtrain.errors import RunError, UserError
from llmtrain.model import trainable
from llmtrain.model.base import Base
from llmtrain.model.tokenizer import add_template, token_ids
from llmtrain.rundir.status import FrozenChoices
from llmtrain.training.start.frozen import (
    adapter_files,
    check_base,
    resolve_adapter,
    trained_tokens,
)
from llmtrain.types import Piece

BASE = Base("a/b", "ab", None)


def config(folder, *overrides):
    return loaded(folder, f"model={{from: {folder / 'base'}}}", "adapter.kind=lora", *overrides)


def test_layers_that_auto_meant_when_a_run_began_are_meant_at_a_resume(tmp_path):
    auto = FrozenChoices(tmp_path, "")
    assert resolve_adapter(config(tmp_path), auto).targets == "auto"
    auto.run["adapter_targets"] = ["q_proj", "v_proj"]
    assert resolve_adapter(config(tmp_path), auto).targets == ("q_proj", "v_proj")
    named = config(tmp_path, "adapter.targets=[o_proj]")
    assert resolve_adapter(named, auto).targets == ("o_proj",)


def test_tokens_that_the_run_added_are_trained_or_those_that_are_named(tmp_path):
    write_tokenizer(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    length = len(tokenizer)
    tokenizer.add_tokens(["<|one|>", "<|two|>"], special_tokens=True)
    own = tmp_path / "own"
    tokenizer.save_pretrained(own)
    base = Base(str(tmp_path / "base"), None, None)
    assert trained_tokens(config(tmp_path), base, own) == (length, length + 1)
    assert trained_tokens(config(tmp_path), base, tmp_path / "base") == ()
    assert trained_tokens(config(tmp_path), base, None) == ()
    named = config(tmp_path, "adapter.train_tokens=['<|two|>', '<|endoftext|>']")
    assert trained_tokens(named, base, own) == (0, length + 1)
    assert trained_tokens(config(tmp_path, "adapter.train_tokens=[]"), base, own) == ()
    with pytest.raises(UserError, match=r"adapter\.train_tokens = <\|two\|>"):
        trained_tokens(named, base, None)  # by the tokenizer of the base, which does not have it
    sample = config(tmp_path, "model.tokenizer=sample", "adapter.train_tokens=['<|endoftext|>']")
    assert trained_tokens(sample, base, None) == (0,)


def test_tokens_that_a_named_template_will_add_have_the_ids_that_they_will_get(tmp_path):
    write_tokenizer(tmp_path / "base")
    write_tokenizer(tmp_path / "own")
    base, asked = Base(str(tmp_path / "base"), None, None), config(tmp_path, "chat.template=chatml")
    before = trained_tokens(asked, base, None)
    add_template(tmp_path / "own", *template_text("chatml"))
    assert trained_tokens(asked, base, tmp_path / "own") == before
    assert token_ids(tmp_path / "own", NAMED["chatml"]) == before
    assert len(before) == 2
    named = config(tmp_path, "chat.template=chatml", "adapter.train_tokens=['<|im_end|>']")
    assert trained_tokens(named, base, None) == trained_tokens(named, base, tmp_path / "own")
    assert set(trained_tokens(named, base, None)) < set(before)
    reserved = Base(str(tmp_path / "own"), None, None)  # a base that has them already
    assert trained_tokens(asked, reserved, None) == ()


def test_tokens_that_were_added_are_trained_by_the_ids_that_they_got(tmp_path):
    """Of a tokenizer that leaves out ids, these are not the ones behind its last."""
    for name in ("base", "own"):
        with_hole(write_tokenizer(tmp_path / name), 500)
    add_template(tmp_path / "own", *template_text("chatml"))
    base, asked = Base(str(tmp_path / "base"), None, None), config(tmp_path, "chat.template=chatml")
    found = trained_tokens(asked, base, tmp_path / "own")
    assert found == token_ids(tmp_path / "own", NAMED["chatml"])
    assert max(found) < 500


def test_a_run_without_adapters_trains_no_rows(tmp_path):
    plain = loaded(tmp_path, "adapter.train_tokens=[a]")
    assert trained_tokens(plain, None, tmp_path / "nowhere") == ()


def weights(folder, seed=0):
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **shape))
    model.save_pretrained(folder)
    return model


def test_the_base_of_a_checkpoint_is_that_of_the_run_or_the_start_is_refused(tmp_path):
    checkpoint = tmp_path / "step-00000004"
    checkpoint.mkdir()
    found = ResumePoint(checkpoint, checkpoint.name, 4, {})
    check_base(config(tmp_path), BASE, found)  # a checkpoint of whole weights is refused later
    (checkpoint / "adapter.json").write_text(json.dumps({"base": asdict(BASE)}))
    check_base(config(tmp_path), BASE, found)
    with pytest.raises(UserError, match="on which the adapter in step-00000004 was trained"):
        check_base(config(tmp_path), replace(BASE, revision="cd"), found)
    with pytest.raises(UserError, match=r"LoRA adapters \(adapter_config\.json\)"):
        check_base(loaded(tmp_path), None, found)


def llama():
    shape: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **shape))


def processes(model, differing=None):
    """One process whose engine holds the model as it is."""

    def pieces(_spec, *, writing):
        assert not writing
        held = state.named_parameters(model).items()
        return [Piece(name, 0, one.detach().view(-1)) for name, one in held]

    engine = SimpleNamespace(pieces=pieces, unequal_replicas=lambda *, base: differing or {})
    return SimpleNamespace(launched=SimpleNamespace(ranks=Alone(), engine=engine), base=BASE)


def test_an_adapter_without_values_is_noticed_before_it_trains_in_vain(tmp_path):
    model = llama()
    trainable.attach(model, config(tmp_path).adapter)
    files = adapter_files(config(tmp_path), processes(model), model, {})
    assert files.keys() == {"adapter_config.json", "adapter.json"}
    assert json.loads(files["adapter.json"])["base"] == asdict(BASE)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.lora_A.default.weight.zero_()
    with pytest.raises(RuntimeError, match=r"1 adapters have no values here, .*up_proj\.lora_A"):
        adapter_files(config(tmp_path), processes(model), model, {})


def test_replicas_of_the_base_that_differ_end_the_start(tmp_path):
    model = llama()
    trainable.attach(model, config(tmp_path).adapter)
    differing = {"lm_head.weight": [1]}
    with pytest.raises(RunError, match=r"different weights at step 0: lm_head\.weight \(rank 1\)"):
        adapter_files(config(tmp_path), processes(model, differing), model, {})


def test_a_run_of_all_weights_has_no_such_files(tmp_path):
    assert adapter_files(loaded(tmp_path), processes(llama()), llama(), {}) == {}
