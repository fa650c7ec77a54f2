import os
from types import SimpleNamespace

import pytest
import torch
from helpers.rings import needs
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from llmtrain.config.schema import DistributedConfig, OptimizerConfig
from llmtrain.distributed.engines import fsdp, state
from llmtrain.distributed.engines.accelerator import close, make_accelerator
from llmtrain.distributed.engines.fsdp import with_common_statistics
from llmtrain.distributed.engines.state import local
from llmtrain.errors import UserError
from llmtrain.model.loss import LossModule, made_up_batch
from llmtrain.training.optimizer import make_optimizer
from llmtrain.types import SLOTS, StepVector

PARALLEL = "PARALLELISM_CONFIG_DP_"


@pytest.fixture
def launched():
    yield make_accelerator("fsdp2", "fp32", DistributedConfig(timeout_minutes=1.0))
    close()


def llama(tied=True):
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
    config = LlamaConfig(vocab_size=32, num_hidden_layers=2, tie_word_embeddings=tied, **shape)
    return LlamaForCausalLM(config).train()


def prepared(launched, model):
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=1e-2))
    root = launched.engine.prepare(LossModule(model), model, optimizer)
    launched.engine.create_state()
    return root, optimizer


def test_one_process_shards_on_a_cpu_and_leaves_the_environment_alone():
    before = dict(os.environ)
    launched = make_accelerator("fsdp2", "fp32", DistributedConfig(timeout_minutes=1.0))
    try:
        kind = launched.accelerator.distributed_type.value
        assert (kind, launched.accelerator.num_processes) == ("FSDP", 1)
        assert torch.distributed.get_backend() == "gloo"
        assert dict(os.environ) == before
        root, optimizer = prepared(launched, llama())
        assert all(isinstance(parameter, DTensor) for parameter in root.parameters())
        driven = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert driven == {id(p) for p in root.parameters()}
    finally:
        close()
    assert not torch.distributed.is_initialized()
    again = make_accelerator("ddp", "fp32", DistributedConfig(timeout_minutes=1.0))
    assert again.accelerator.distributed_type.value == "NO"
    close()


@needs("accelerate", "1.15")
def test_units_are_the_blocks_and_what_is_outside_of_them(launched):
    root, _ = prepared(launched, llama(tied=False))
    units = [name for name, part in root.named_modules() if isinstance(part, FSDPModule)]
    expected = ["", "model.lm_head", "model.model.embed_tokens", "model.model.norm"]
    assert sorted(units) == [
        *expected[:3],
        "model.model.layers.0",
        "model.model.layers.1",
        expected[3],
    ]


@needs("accelerate", "1.15")  # before it, nothing stays gathered after a forward
def test_an_evaluation_leaves_parameters_sharded_and_the_module_in_training(launched):
    root, _ = prepared(launched, llama())
    ids = made_up_batch(2, 9, 32, launched.device)
    with launched.engine.evaluating():
        assert not root.training
        root(ids[:, :-1], ids[:, 1:])
        assert not all(isinstance(parameter, DTensor) for parameter in root.parameters())
    assert root.training
    assert all(isinstance(parameter, DTensor) for parameter in root.parameters())


@pytest.mark.parametrize("forbidden", [{"squares": float("nan")}, {"tokens": 0.0}])
def test_a_forbidden_step_changes_no_weight_moment_or_count(launched, forbidden):
    root, optimizer = prepared(launched, llama())

    def step(said):
        ids = made_up_batch(2, 9, 32, launched.device)
        with launched.engine.micro(last=True):
            launched.engine.backward(root(ids[:, :-1], ids[:, 1:]), torch.tensor(0.1))
        values = [said.get(slot, 0.0) for slot in SLOTS]
        vector = torch.tensor([*values, said.get("tokens", 8.0)], dtype=torch.float64)
        launched.engine.step(1.0, StepVector(vector))
        held = [*root.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
        assert all(parameter.grad is None for parameter in root.parameters())
        return [state.local(tensor.detach()).clone() for tensor in held]

    first = step({"squares": 1.0})
    again = step({"squares": 1.0, **forbidden})
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    allowed = step({"squares": 1.0})
    assert not all(torch.equal(one, other) for one, other in zip(first, allowed, strict=True))
    assert launched.engine.optimizer_steps() == 2


def test_parameters_on_meta_are_refused(launched):
    with torch.device("meta"):
        model = llama()
    with pytest.raises(ValueError, match=r"parameters are on meta, model\.model\.embed_tokens"):
        prepared(launched, model)


def test_tied_parameters_that_came_apart_are_noticed(launched):
    model = llama()
    module, optimizer = LossModule(model), make_optimizer(model, OptimizerConfig())
    prepare = launched.accelerator.prepare

    def parting(*args):
        result = prepare(*args)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return result

    launched.accelerator.prepare = parting
    with pytest.raises(ValueError, match="tied parameters came apart"):
        launched.engine.prepare(module, model, optimizer)


def test_a_parameter_that_the_optimizer_lost_is_noticed(launched):
    model = llama()
    module, optimizer = LossModule(model), make_optimizer(model, OptimizerConfig())
    optimizer.param_groups[1]["params"].pop()
    with pytest.raises(ValueError, match="the optimizer does not drive"):
        launched.engine.prepare(module, model, optimizer)


def test_a_master_that_is_not_fp32_is_noticed(launched):
    model = llama()
    model.model.norm.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is torch\.bfloat16"):
        prepared(launched, model)


def test_a_parameter_of_no_dimension_is_refused_by_name(launched):
    model = llama()
    model.model.gain = nn.Parameter(torch.ones(()))
    with pytest.raises(UserError, match=r"model\.model\.gain"):
        prepared(launched, model)


@pytest.mark.parametrize(
    ("env", "world_size", "sizes"),
    [
        ({"LOCAL_WORLD_SIZE": "8"}, 16, (2, 8)),
        ({"LOCAL_WORLD_SIZE": "2"}, 8, (4, 2)),
        (
            {
                "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
                f"{PARALLEL}REPLICATE_SIZE": "4",
                f"{PARALLEL}SHARD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "8",
            },
            8,
            (4, 2),
        ),
    ],
    ids=["two nodes", "four nodes", "the launch says it"],
)
def test_hsdp_replicates_over_nodes_unless_the_launch_says_otherwise(env, world_size, sizes):
    assert fsdp.mesh("hsdp", env, world_size) == sizes
    assert fsdp.mesh("fsdp2", env, world_size) == (1, world_size)


@pytest.mark.parametrize(
    ("local", "world_size", "said"),
    [("8", 8, "=fsdp2"), ("1", 4, "=ddp"), ("1", 1, "=fsdp2"), ("3", 7, "7 processes")],
    ids=["one node", "one process a node", "one process", "uneven nodes"],
)
def test_hsdp_without_a_mesh_is_refused(local, world_size, said):
    with pytest.raises(UserError, match=said):
        fsdp.mesh("hsdp", {"LOCAL_WORLD_SIZE": local}, world_size)


def test_blocks_are_named_by_the_model_or_the_config():
    model = llama()
    assert fsdp.wrap_classes(model, "auto") == ["LlamaDecoderLayer"]
    assert fsdp.wrap_classes(model, "LlamaMLP") == ["LlamaMLP"]
    assert fsdp.wrap_classes(GPT2LMHeadModel(GPT2Config(n_layer=1)), "auto") == ["GPT2Block"]
    for asked in ("Blok", "LlamaMLP,Blok"):
        with pytest.raises(UserError) as caught:
            fsdp.wrap_classes(model, asked)
        assert "distributed.wrap_class=LlamaDecoderLayer" in str(caught.value)


def test_a_model_that_names_no_blocks_is_refused_with_the_key_to_set():
    model = nn.Module()
    model.stack = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(UserError, match=r"distributed\.wrap_class=Linear"):
        fsdp.wrap_classes(model, "auto")


def test_bf16_is_computed_in_bf16_and_reduced_in_fp32():
    policy = fsdp.plugin("fsdp2", "bf16", {}, cpu=True).mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert policy.output_dtype is None
    policy = fsdp.plugin("fsdp2", "fp32", {}, cpu=True).mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (None, None)


def test_offload_is_for_devices_and_a_rehearsal_says_that_it_is_left_out(caplog):
    offloads = type(fsdp.plugin("fsdp2_offload", "bf16", {}, cpu=False).cpu_offload)
    assert offloads is torch.distributed.fsdp.CPUOffloadPolicy
    assert not caplog.records
    kept = type(fsdp.plugin("fsdp2_offload", "bf16", {}, cpu=True).cpu_offload)
    assert kept is torch.distributed.fsdp.OffloadPolicy
    assert "rehearsed without offload" in caplog.text


def test_what_the_launch_file_says_otherwise_is_said(caplog):
    usual = {"VERSION": "2", "AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    usual |= {"STATE_DICT_TYPE": "SHARDED_STATE_DICT", "CPU_RAM_EFFICIENT_LOADING": "false"}
    fsdp.plugin("fsdp2", "bf16", {f"FSDP_{k}": v for k, v in usual.items()}, cpu=False)
    assert not caplog.records
    other = usual | {"ACTIVATION_CHECKPOINTING": "true", "CPU_RAM_EFFICIENT_LOADING": "True"}
    other |= {"RESHARD_AFTER_FORWARD": "false"}
    made = fsdp.plugin("fsdp2", "bf16", {f"FSDP_{k}": v for k, v in other.items()}, cpu=False)
    assert len(caplog.records) == 2
    assert "model.activation_checkpointing decides" in caplog.text
    assert (made.activation_checkpointing, made.cpu_ram_efficient_loading) == (False, False)
    assert made.reshard_after_forward is False


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batch_norm_has_the_statistics_of_all_ranks_or_is_refused(processes, device, caplog):
    caplog.set_level("INFO")
    where = SimpleNamespace(num_processes=processes, device=torch.device(device))
    module = Normed()
    weight = module.inner[1].weight
    if (processes, device) == (4, "cpu"):
        with pytest.raises(UserError, match=r"one process on a CPU.*inner\.1"):
            with_common_statistics(module, where)
        return
    made = with_common_statistics(module, where)
    expected = nn.SyncBatchNorm if processes == 4 else nn.BatchNorm1d
    assert type(made.inner[1]) is expected
    assert made.inner[1].weight is weight  # which the optimizer holds
    assert ("SyncBatchNorm" in caplog.text) == (processes == 4)


def with_buffers():
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
    whole = with_buffers()
    with torch.device("meta"):
        bare = with_buffers()
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
