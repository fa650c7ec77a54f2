import math
import re
from itertools import pairwise

import pytest
import torch
from helpers.rings import needs
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from llmtrain.config.schema import AdapterConfig, GroupConfig, OptimizerConfig
from llmtrain.distributed.engines.state import create_state
from llmtrain.distributed.plan import memory
from llmtrain.errors import UserError
from llmtrain.model import trainable
from llmtrain.training.optimizer import (
    Muon,
    algorithms,
    arrange,
    learning_rate_factor,
    make_optimizer,
    orthogonalize,
    warmup_steps,
)


def tiny(tied, **changes):
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"vocab_size": 32, "intermediate_size": 12} | changes
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=tied, **shape))


def config(*groups, **values):
    return OptimizerConfig(groups=tuple(GroupConfig(**group) for group in groups), **values)


def settings(model, asked):
    """Name → algorithm, learning rate and weight decay of each parameter."""
    found = {
        id(parameter): (group["algorithm"], group["lr"], group["weight_decay"])
        for group in make_optimizer(model, asked).param_groups
        for parameter in group["params"]
    }
    return {name: found[id(p)] for name, p in model.named_parameters() if id(p) in found}


def decayed(model):
    found = settings(model, OptimizerConfig())
    return {name for name, (_, _, decay) in found.items() if decay}


def test_matrices_decay_and_norms_biases_embeddings_do_not():
    names = decayed(tiny(tied=False))
    assert "model.layers.0.mlp.up_proj.weight" in names
    assert "lm_head.weight" in names
    assert "model.embed_tokens.weight" not in names
    assert not any("norm" in name for name in names)
    gpt2 = decayed(GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2)))
    assert "transformer.h.0.mlp.c_fc.weight" in gpt2
    assert not any(name.endswith("bias") or "wte" in name or "wpe" in name for name in gpt2)


def test_a_tied_head_is_an_embedding():
    assert "model.embed_tokens.weight" not in decayed(tiny(tied=True))


def test_each_trainable_parameter_is_in_one_group_once():
    model = tiny(tied=True)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    optimizer = make_optimizer(model, OptimizerConfig(betas=(0.8, 0.9), learning_rate=0.5))
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert all(group["lr"] == 0.5 for group in optimizer.param_groups)
    assert all(group["betas"] == (0.8, 0.9) for group in optimizer.param_groups)
    assert optimizer.defaults["fused"] is True


@pytest.mark.parametrize("fused", [True, False])
def test_without_the_fused_kernel_each_element_is_updated_alike(fused):
    made = make_optimizer(tiny(tied=True), OptimizerConfig(), fused=fused).defaults
    assert bool(made["fused"]) is fused
    assert bool(made["foreach"]) is not fused


def test_without_groups_of_its_own_adamw_has_two_the_decayed_one_first():
    """The order decides in which order squares of gradients are summed."""
    model = tiny(tied=False)
    table = model.get_input_embeddings().weight
    first = [p for p in model.parameters() if p.ndim >= 2 and p is not table]
    second = [p for p in model.parameters() if p.ndim < 2 or p is table]
    optimizer = make_optimizer(model, OptimizerConfig())
    assert isinstance(optimizer, torch.optim.AdamW)
    for group, expected in zip(optimizer.param_groups, (first, second), strict=True):
        assert [id(p) for p in group["params"]] == [id(p) for p in expected]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


class Adapted(nn.Module):
    """Trained parameters under the names that peft gives them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4).requires_grad_(False)
        one = {name: nn.ModuleDict({"default": nn.Linear(4, 4, bias=False)}) for name in "AB"}
        self.q_proj = nn.ModuleDict({f"lora_{name}": part for name, part in one.items()})
        self.q_proj.lora_magnitude_vector = nn.ParameterDict({"default": torch.ones(1, 4, 1)})
        self.token_adapter = nn.Module()
        self.token_adapter.trainable_tokens_delta = nn.ParameterDict({"default": torch.ones(2, 4)})


def test_of_an_adapter_only_a_is_decayed():
    assert decayed(Adapted()) == {"q_proj.lora_A.default.weight"}
    found = {name: one for name, (one, *_) in settings(Adapted(), config(name="muon")).items()}
    assert found == {
        "q_proj.lora_A.default.weight": "muon",
        "q_proj.lora_B.default.weight": "muon",
        "q_proj.lora_magnitude_vector.default": "adamw",
        "token_adapter.trainable_tokens_delta.default": "adamw",
    }


def test_the_first_entry_that_matches_a_name_decides():
    asked = config(
        {"match": "*mlp.up_proj*", "weight_decay": 0.5},
        {"match": "*mlp*", "learning_rate": 1e-5},
        {"match": "lm_head.*", "weight_decay": 0.3},  # the second name of the tied table
        learning_rate=1e-3,
    )
    found = settings(tiny(tied=True), asked)
    assert found["model.layers.0.mlp.up_proj.weight"] == ("adamw", 1e-3, 0.5)
    assert found["model.layers.0.mlp.down_proj.weight"] == ("adamw", 1e-5, 0.1)
    assert found["model.embed_tokens.weight"] == ("adamw", 1e-3, 0.3)
    assert found["model.norm.weight"] == ("adamw", 1e-3, 0.0)
    assert len(found) == len(list(tiny(tied=True).parameters()))


def test_what_an_entry_leaves_open_is_as_for_all_others():
    found = settings(tiny(tied=True), config({"match": "*.layers.0.*", "learning_rate": 2.0}))
    assert found["model.layers.0.mlp.up_proj.weight"] == ("adamw", 2.0, 0.1)
    assert found["model.layers.0.input_layernorm.weight"] == ("adamw", 2.0, 0.0)


def test_an_entry_without_a_parameter_is_refused():
    asked = config({"match": "*mlp*"}, {"match": "*up_proj*"}, {"match": "*.q_projj.*"})
    with pytest.raises(UserError) as refused:
        arrange(tiny(tied=True), asked)
    shadowed, unknown = refused.value.problems
    assert (shadowed.key, shadowed.value) == ("optimizer.groups.1.match", "*up_proj*")
    assert "no earlier entry matches" in shadowed.expected
    assert unknown.key == "optimizer.groups.2.match"
    assert "q_proj" in unknown.remedy
    frozen = tiny(tied=True)
    frozen.model.norm.weight.requires_grad_(False)
    with pytest.raises(UserError, match=r"groups\.0\.match"):
        arrange(frozen, config({"match": "model.norm.weight"}))


def test_muon_updates_matrices_between_embedding_and_head():
    found = {name: one for name, (one, *_) in settings(tiny(False), config(name="muon")).items()}
    muon = {name for name, one in found.items() if one == "muon"}
    assert muon == {name for name in found if re.search(r"_proj\.weight$", name)}
    tied = settings(tiny(True), config(name="muon"))
    assert tied["model.embed_tokens.weight"] == ("adamw", 3e-4, 0.0)
    assert tied["model.layers.0.mlp.up_proj.weight"] == ("muon", 3e-4, 0.1)
    model = tiny(True)
    kinds = algorithms(config(name="muon"), model)
    assert {name: kinds[id(p)] for name, p in model.named_parameters()} == {
        name: one for name, (one, *_) in tied.items()
    }


def test_a_matrix_of_one_row_or_column_is_adamws():
    found = settings(tiny(True, intermediate_size=1), config(name="muon"))
    for part in ("gate", "up", "down"):
        assert found[f"model.layers.0.mlp.{part}_proj.weight"] == ("adamw", 3e-4, 0.1)
    assert found["model.layers.0.self_attn.q_proj.weight"][0] == "muon"


def test_muon_without_a_matrix_is_refused():
    model = tiny(True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    with pytest.raises(UserError, match=r"optimizer\.name = muon"):
        make_optimizer(model, config(name="muon"))


def gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_muon_and_adamw_make_the_updates_that_both_make_alone():
    ours, theirs = tiny(False), tiny(False)
    asked = config({"match": "*norm*", "learning_rate": 0.5}, name="muon", learning_rate=0.01)
    together = make_optimizer(ours, asked)
    # As accelerate does, which leaves other groups than those that it was made with.
    together.load_state_dict(together.state_dict())
    named = dict(theirs.named_parameters())
    muon = [p for name, p in named.items() if "_proj" in name]
    groups = [
        {"params": [named["lm_head.weight"]], "weight_decay": 0.1},
        {"params": [named["model.embed_tokens.weight"]], "weight_decay": 0.0},
        {"params": [p for n, p in named.items() if "norm" in n], "weight_decay": 0.0, "lr": 0.5},
    ]
    alone = [
        Muon(muon, lr=0.01, weight_decay=0.1),
        torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True),
    ]
    for step, factor in enumerate((1.0, 0.5, 0.25)):
        for group in [g for one in (together, *alone) for g in one.param_groups]:
            group["lr"] = group.setdefault("peak_lr", group["lr"]) * factor
        gradients(ours, step)
        gradients(theirs, step)
        together.step()
        for one in alone:
            one.step()
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, named[name]), name


def test_an_update_of_muon_has_the_size_of_one_of_adamw():
    sizes = []
    for name in ("muon", "adamw"):
        model = tiny(True, hidden_size=64, intermediate_size=96)
        before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
        optimizer = make_optimizer(model, config(name=name, learning_rate=0.01, weight_decay=0.0))
        gradients(model, 0)
        optimizer.step()
        change = model.model.layers[0].mlp.up_proj.weight.detach() - before
        sizes.append(float(change.square().mean().sqrt()) / 0.01)
    assert sizes[0] == pytest.approx(0.2, rel=0.3)  # as AdamW's is in the middle of a training
    assert sizes[1] == pytest.approx(1.0, rel=0.01)  # its first step


def test_8_bit_adamw_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr(memory.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'llmtrain\[quantized\]'"):
        make_optimizer(tiny(True), config(name="adamw_8bit"))


@needs("bitsandbytes")
def test_8_bit_adamw_is_near_adamw():
    models = {}
    for name in ("adamw", "adamw_8bit"):
        models[name] = tiny(True, hidden_size=64, intermediate_size=96)
        optimizer = make_optimizer(models[name], config(name=name, learning_rate=0.01))
        for step in range(3):
            gradients(models[name], step)
            optimizer.step()
    pairs = zip(*(model.parameters() for model in models.values()), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=0.01)


def test_of_adapters_a_alone_decays():
    model = tiny(tied=True)
    trainable.attach(model, AdapterConfig(kind="dora", r=2), (3, 4))
    names = decayed(model)
    assert names
    assert all(name.endswith(".lora_A.default.weight") for name in names)
    optimizer = make_optimizer(model, OptimizerConfig())
    held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert held == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("scale", [None, 1.7])
@pytest.mark.parametrize("refused", [None, 0.0, 1.0])
@pytest.mark.parametrize("without", ["", "norm"])
def test_fused_adamw_has_the_bits_of_torchs_own(scale, refused, without):
    """without: parameters with this in their names have no gradient in the second step."""
    ours, theirs = tiny(False), tiny(False)
    own = make_optimizer(ours, config(learning_rate=0.01))
    create_state(own)
    groups = [{**group, "params": []} for group in own.param_groups]
    named = {id(p): dict(theirs.named_parameters())[n] for n, p in ours.named_parameters()}
    for group, kept in zip(groups, own.param_groups, strict=True):
        group["params"] = [named[id(p)] for p in kept["params"]]
    torchs = torch.optim.AdamW(groups, fused=True)
    for step in range(3):
        for model, optimizer in ((ours, own), (theirs, torchs)):
            gradients(model, step)
            if step == 1:
                optimizer.grad_scale = None if scale is None else torch.tensor(scale)
                optimizer.found_inf = None if refused is None else torch.tensor(refused)
                for name, parameter in model.named_parameters():
                    if without and without in name:
                        parameter.grad = None
            optimizer.step()
            optimizer.grad_scale = optimizer.found_inf = None
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
        kept = own.state[one]
        assert kept.keys() == torchs.state[other].keys()
        assert all(torch.equal(kept[key], torchs.state[other][key]) for key in kept)


SETTINGS = torch.optim.Muon([torch.zeros(2, 2)]).defaults
SHAPES = [(24, 24), (16, 40), (40, 16), (2, 9)]


def drawn(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_keeps_its_directions_and_its_singular_values_go_through_a_polynomial(shape):
    left, sizes, right = torch.linalg.svd(drawn(shape).double(), full_matrices=False)
    sizes = sizes / sizes.norm()
    for _ in range(5):
        sizes = 3.4445 * sizes - 4.775 * sizes**3 + 2.0315 * sizes**5
    made = orthogonalize(drawn(shape), SETTINGS)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made.double(), left @ sizes.diag() @ right, rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_what_torch_makes_in_bf16(shape):
    from torch.optim._muon import _zeropower_via_newtonschulz as in_bf16

    args = [SETTINGS[name] for name in ("ns_coefficients", "ns_steps", "eps")]
    theirs = in_bf16(drawn(shape), *args)
    torch.testing.assert_close(
        orthogonalize(drawn(shape), SETTINGS), theirs.float(), atol=0.04, rtol=0
    )


def test_only_a_cpu_makes_it_in_fp32():
    assert orthogonalize(torch.empty(4, 3, device="meta"), SETTINGS).dtype == torch.bfloat16


def test_a_gradient_of_zero_stays_zero():
    assert not orthogonalize(torch.zeros(4, 3), SETTINGS).any()


def test_all_but_the_orthogonalization_is_torchs_in_bits(monkeypatch):
    monkeypatch.setattr(
        "torch.optim._muon._zeropower_via_newtonschulz",
        lambda matrix, *_: orthogonalize(matrix, SETTINGS),
    )
    runs = []
    for kind, extra in ((Muon, {}), (torch.optim.Muon, {"adjust_lr_fn": "match_rms_adamw"})):
        matrices = [torch.nn.Parameter(drawn(shape)) for shape in SHAPES]
        optimizer = kind(matrices[:-1], lr=0.05, weight_decay=0.2, **extra)
        for step in range(3):
            optimizer.param_groups[0]["lr"] *= 0.5
            for matrix in matrices[:-1]:
                matrix.grad = drawn(tuple(matrix.shape), step)
            matrices[step].grad = None
            optimizer.step()
        runs.append([*matrices, *(s["momentum_buffer"] for s in optimizer.state.values())])
    assert len(runs[0]) == 2 * len(SHAPES) - 1
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


def factors(steps, **keys):
    config = OptimizerConfig.model_validate(keys)
    return [learning_rate_factor(config, steps, step) for step in range(1, steps + 1)]


def test_cosine_warms_up_peaks_and_ends_at_the_floor():
    found = factors(100, schedule="cosine", warmup_steps=10, min_lr_ratio=0.1)
    assert found[:10] == [pytest.approx(step / 10) for step in range(1, 11)]
    assert found[54] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 45 / 90)) / 2)
    assert found[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(found[9:]))


def test_linear_falls_by_equal_steps_to_the_floor():
    found = factors(11, schedule="linear", warmup_steps=1, min_lr_ratio=0.0)
    assert found == [pytest.approx(1 - k / 10) for k in range(11)]


def test_constant_stays_at_the_peak():
    assert factors(20, schedule="constant", warmup_steps=2)[1:] == [1.0] * 19


def test_wsd_is_flat_and_decays_over_the_last_fifth():
    found = factors(100, schedule="wsd", warmup_steps=10, min_lr_ratio=0.1)
    assert found[9:80] == [1.0] * 71
    assert found[80] == pytest.approx(1 - 0.9 / 20)
    assert found[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_a_factor_lies_in_0_to_1_whatever_the_lengths(schedule):
    for steps in (1, 2, 3, 10):
        for warmup in (1, 2, 10, 0.5):
            found = factors(steps, schedule=schedule, warmup_steps=warmup)
            assert all(0 < factor <= 1 for factor in found)


def test_a_fraction_of_warmup_is_a_share_of_the_steps():
    assert warmup_steps(OptimizerConfig(warmup_steps=0.03), 1000) == 30
    assert warmup_steps(OptimizerConfig(warmup_steps=0.03), 10) == 1
    assert warmup_steps(OptimizerConfig(warmup_steps=100), 30) == 30


def test_it_is_the_schedule_of_transformers():
    import torch
    from transformers import get_cosine_with_min_lr_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 10, 100, min_lr_rate=0.1)
    ours = factors(100, schedule="cosine", warmup_steps=10, min_lr_ratio=0.1)
    for step in range(100):
        optimizer.step()
        theirs.step()
        assert ours[step] == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-6)
