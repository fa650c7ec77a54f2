import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain.config.schema import DistributedConfig, OptimizerConfig
from llmtrain.distributed.engines import fsdp
from llmtrain.distributed.engines.accelerator import close, make_accelerator
from llmtrain.distributed.engines.state import local
from llmtrain.model.loss import LossModule
from llmtrain.training.optimizer import make_optimizer


@pytest.fixture
def launched():
    yield make_accelerator("fsdp2", "fp32", DistributedConfig(timeout_minutes=1.0))
    close()


def llama():
    shape = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, num_hidden_layers=2, tie_word_embeddings=True, **shape)
    )
    model.model.register_buffer("seen", torch.tensor([True, False]))
    model.model.register_buffer("count", torch.tensor(7))
    model.model.aside = torch.arange(3.0)  # neither parameter nor buffer
    return model


@pytest.mark.parametrize("sent", [64 << 20, 100, 8], ids=["at once", "in pieces", "one by one"])
def test_a_skeleton_becomes_the_whole_model(launched, monkeypatch, sent):
    monkeypatch.setattr(fsdp, "_SENT", sent)
    whole = llama()
    with torch.device("meta"):
        bare = llama()
    optimizer = make_optimizer(bare, OptimizerConfig())
    sizes = [[p.shape for p in group["params"]] for group in optimizer.param_groups]
    assert launched.sharding is not None
    module = LossModule(bare)
    fsdp.prepare_empty(module, optimizer, launched.sharding)
    fsdp.share_weights(bare, whole, launched.device)
    prepared = launched.engine.prepare(module, bare, optimizer)
    assert isinstance(prepared, nn.Module)
    expected = dict(whole.named_parameters())
    assert [name for name, _ in bare.named_parameters()] == list(expected)
    for name, parameter in bare.named_parameters():
        assert torch.equal(local(parameter.detach()), expected[name])
    assert bare.lm_head.weight is bare.model.embed_tokens.weight
    for (name, one), (_, other) in zip(bare.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(one, other), name
        assert one.device.type == launched.device.type
    assert dict(bare.named_buffers()).keys() == dict(whole.named_buffers()).keys()
    assert bare.state_dict().keys() == whole.state_dict().keys()  # persistent or not, as before
    assert torch.equal(bare.model.aside, whole.model.aside)
    assert [[p.shape for p in group["params"]] for group in optimizer.param_groups] == sizes
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {
        id(p) for p in bare.parameters()
    }
