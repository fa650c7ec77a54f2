import copy
import json

import pytest
import torch
from helpers.checkpoints import RUN, save
from helpers.rings import needs
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from llmtrain.agreement import Alone
from llmtrain.checkpoint import read
from llmtrain.config.schema import AdapterConfig, OptimizerConfig
from llmtrain.distributed.engines import state
from llmtrain.model import trainable
from llmtrain.training.optimizer import make_optimizer
from llmtrain.types import Piece, TensorSpec

LLAMA = LlamaConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=3,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
)
GPT2 = GPT2Config(
    vocab_size=61,
    n_embd=24,
    n_layer=2,
    n_head=3,
    n_positions=32,
    tie_word_embeddings=False,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=1,
    eos_token_id=2,
)
LARGE = 4 << 30
SHARDS = 16_000


def built(config, seed=0, frozen=()):
    """A model and its fused AdamW, of which some parameters are not trained."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2, fused=True)


def trained(model, optimizer, steps):
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 61, (2, 16), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def written(root, model, optimizer, shard_bytes=LARGE):
    spec = state.spec(model, optimizer, shard_bytes)
    small = {"config.json": model.config.to_json_string().encode(), **state.index(spec)}
    return save(root, 4, spec, state.pieces(model, optimizer, spec), small=small)


def resumed(root, model, optimizer, steps):
    """The checkpoint's tensors in a new model and optimizer."""
    state.create_state(optimizer)
    state.set_steps(optimizer, steps)
    spec = state.spec(model, optimizer, LARGE)
    found = read.find(root, RUN, Alone())
    read.load_tensors(found, spec, state.pieces(model, optimizer, spec), Alone())


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["tied llama", "untied gpt2"])
@pytest.mark.parametrize("shard_bytes", [LARGE, SHARDS], ids=["one file", "shards"])
def test_transformers_loads_what_was_written_as_it_lies(tmp_path, config, shard_bytes):
    model, optimizer = built(config)
    trained(model, optimizer, 2)
    written(tmp_path, model, optimizer, shard_bytes)
    directory = tmp_path / "step-00000004"
    assert (directory / "model.safetensors").exists() == (shard_bytes == LARGE)
    loaded, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tied = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert tied == (config is LLAMA)
    expected, found = model.state_dict(), loaded.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(tensor.dtype == torch.float32 for tensor in found.values())


def test_saved_again_after_loading_the_files_are_the_same(tmp_path):
    model, optimizer = built(LLAMA)
    trained(model, optimizer, 2)
    written(tmp_path / "a", model, optimizer)
    other, its = built(LLAMA, seed=1)
    resumed(tmp_path / "a", other, its, 2)
    written(tmp_path / "b", other, its)
    for path in (tmp_path / "a" / "step-00000004").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "b" / "step-00000004" / path.name).read_bytes()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_weights_and_moments_from_shards(tmp_path):
    import torch.distributed.checkpoint as dcp

    model, optimizer = built(LLAMA)
    trained(model, optimizer, 2)
    written(tmp_path, model, optimizer, SHARDS)
    into = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    into |= {f"{name}.exp_avg_sq": torch.zeros_like(value) for name, value in into.items()}
    reader = dcp.HuggingFaceStorageReader(str(tmp_path / "step-00000004"))
    dcp.load(into, storage_reader=reader, no_dist=True)
    for name, parameter in model.named_parameters():
        assert torch.equal(into[name], parameter)
        assert torch.equal(into[f"{name}.exp_avg_sq"], optimizer.state[parameter]["exp_avg_sq"])


def test_optimizer_files_name_parameter_and_moment(tmp_path):
    model, optimizer = built(GPT2)
    trained(model, optimizer, 1)
    written(tmp_path, model, optimizer)
    path = tmp_path / "step-00000004" / "optimizer-00001-of-00001.safetensors"
    with safe_open(path, "pt") as file:
        names = [name for name, _ in model.named_parameters()]
        assert set(file.keys()) == {
            f"{name}.{moment}" for name in names for moment in ("exp_avg", "exp_avg_sq")
        }
        for name, parameter in model.named_parameters():
            found = file.get_tensor(f"{name}.exp_avg")
            assert torch.equal(found, optimizer.state[parameter]["exp_avg"])


def test_frozen_parameters_are_written_without_state():
    frozen = ("model.embed_tokens.weight", "model.norm.weight")
    model, optimizer = built(LLAMA, frozen=frozen)
    model.model.norm.to(torch.bfloat16)
    spec = state.spec(model, optimizer, LARGE)
    assert spec["model.safetensors"]["model.norm.weight"] == TensorSpec("BF16", (24,))
    moments = spec["optimizer-00001-of-00001.safetensors"]
    assert len(moments) == 2 * sum(p.requires_grad for p in model.parameters())
    assert not any(name.startswith(frozen) for name in moments)


class Odd(torch.nn.Module):
    """Persistent and other buffers, a shared parameter, dtypes of every width, odd shapes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scale", torch.tensor(3.0, dtype=torch.bfloat16))
        self.first = torch.nn.Linear(3, 5)
        self.second = torch.nn.Linear(3, 5, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor([4, 5], dtype=torch.int64))
        self.register_buffer("cache", torch.ones(4), persistent=False)
        self.single = torch.nn.Parameter(torch.ones(()))


def test_buffers_shared_parameters_and_narrow_dtypes_survive(tmp_path):
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters())
    state.create_state(optimizer)
    spec = state.spec(model, optimizer, LARGE)
    names = ["count", "single", "first.weight", "first.bias", "scale", "mask"]
    assert list(spec["model.safetensors"]) == names
    save(tmp_path, 4, spec, state.pieces(model, optimizer, spec))
    other = Odd()
    its = torch.optim.AdamW(other.parameters())
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.zero_()
    resumed(tmp_path, other, its, 0)
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


def test_created_state_is_what_fused_adamw_makes_itself():
    model, optimizer = built(LLAMA)
    trained(model, optimizer, 1)
    other, its = built(LLAMA)
    before = [parameter.clone() for parameter in other.parameters()]
    state.create_state(its)
    state.set_steps(its, 1)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        made, own = its.state[theirs], optimizer.state[mine]
        assert made.keys() == own.keys()
        for key, value in own.items():
            assert (made[key].dtype, made[key].shape, made[key].device) == (
                value.dtype,
                value.shape,
                value.device,
            )
            assert made[key].stride() == value.stride()
        assert torch.equal(made["step"], own["step"])
        assert not made["exp_avg"].any()
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


@pytest.mark.parametrize("fused", [True, False])
def test_a_created_state_of_step_0_changes_no_bit_of_the_training(fused):
    runs = []
    for create in (False, True):
        model, _ = built(LLAMA)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        if create:
            state.create_state(optimizer)
        runs.append(trained(model, optimizer, 3))
    assert runs[0] == runs[1]


def test_steps_are_one_integer():
    model, optimizer = built(LLAMA)
    assert state.optimizer_steps(optimizer) == 0
    trained(model, optimizer, 2)
    assert state.optimizer_steps(optimizer) == 2
    state.set_steps(optimizer, 9)
    assert state.optimizer_steps(optimizer) == 9
    first, second, *_ = model.parameters()
    optimizer.state[first]["step"].zero_()  # never had a gradient
    assert state.optimizer_steps(optimizer) == 9
    optimizer.state[second]["step"].fill_(8)
    with pytest.raises(ValueError, match="different numbers of updates"):
        state.optimizer_steps(optimizer)


def test_shards_hold_at_most_shard_bytes_and_the_index_names_each_weight():
    model, optimizer = built(LLAMA)
    spec = state.spec(model, optimizer, SHARDS)
    for file, part in spec.items():
        size = state.bytes_of({file: part})
        assert size <= SHARDS or len(part) == 1
    shards = sorted(file for file in spec if file.startswith("model"))
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    [body] = state.index(spec).values()
    found = json.loads(body)
    assert found["weight_map"].keys() == dict(model.named_parameters()).keys()
    assert sorted(set(found["weight_map"].values())) == shards
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert found["metadata"]["total_size"] == 4 * numbers
    assert state.bytes_of(spec) == 12 * numbers
    assert state.index(state.spec(model, optimizer, LARGE)) == {}


def test_a_tensor_larger_than_a_shard_has_a_file_of_its_own():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(9, 9))
    optimizer = torch.optim.AdamW(model.parameters())
    spec = state.spec(model, optimizer, 40)
    parts = [list(part) for file, part in spec.items() if file.startswith("model")]
    assert parts == [["0.weight"], ["1.weight"], ["1.bias"]]


def test_pieces_are_the_memory_itself():
    model, optimizer = built(LLAMA)
    state.create_state(optimizer)
    spec = state.spec(model, optimizer, LARGE)
    for piece in state.pieces(model, optimizer, spec):
        assert (piece.start, piece.data.dim(), piece.data.requires_grad) == (0, 1, False)
        piece.data.fill_(3)
    assert all((parameter == 3).all() for parameter in model.parameters())
    moments = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert all((moment == 3).all() for moment in moments)


def test_what_no_checkpoint_holds_is_refused():
    model = torch.nn.Linear(2, 2).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"weight is torch\.bfloat16, expected torch\.float32"):
        state.spec(model, optimizer, LARGE)
    model = torch.nn.Linear(3, 2)
    model.weight.data = torch.ones(3, 2).t()
    optimizer = torch.optim.AdamW(model.parameters())
    state.create_state(optimizer)
    with pytest.raises(ValueError, match="weight is not contiguous"):
        list(state.pieces(model, optimizer, state.spec(model, optimizer, LARGE)))


def test_an_optimizer_that_was_made_before_the_adapters_is_refused():
    model = AutoModelForCausalLM.from_config(LLAMA)
    early = make_optimizer(model, OptimizerConfig())
    trainable.attach(model, AdapterConfig(kind="lora"))
    with pytest.raises(ValueError, match="make it after adapters are attached"):
        state.spec(model, early, LARGE)
    state.spec(model, make_optimizer(model, OptimizerConfig()), LARGE)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.int64]))),
    st.integers(1, 5),
    st.data(),
)
def test_what_all_ranks_hold_is_dealt_once_and_evenly(shapes, ranks, data):
    held = [
        Piece(f"t{i}", 0, torch.arange(count, dtype=dtype))
        for i, (count, dtype) in enumerate(shapes)
    ]
    names = data.draw(st.sets(st.sampled_from([piece.name for piece in held]))) if held else set()
    shares = [list(state.share_out(held, names, rank, ranks)) for rank in range(ranks)]
    for piece in held:
        parts = [part for share in shares for part in share if part.name == piece.name]
        if piece.name not in names:
            assert [part.data.data_ptr() for part in parts] == [piece.data.data_ptr()] * ranks
            continue
        joined = torch.cat([piece.data[:0], *(part.data for part in parts)])
        assert torch.equal(joined, piece.data)
        assert all(part.start == int(part.data[0]) for part in parts)
    order = [piece.name for piece in held]
    for share in shares:
        assert [part.name for part in share] == [n for n in order if n in {p.name for p in share}]
    sizes = [sum(part.data.nbytes for part in share if part.name in names) for share in shares]
    assert max(sizes) - min(sizes) <= 2 * 8  # cut between elements


def optimized(config, name, seed=0):
    """A model and the optimizer of that name, as a run makes it."""
    model, _ = built(config, seed)
    return model, make_optimizer(model, OptimizerConfig(name=name, learning_rate=1e-2))


def states_of(model, optimizer):
    """Parameter and state tensor by name; counts of updates are left out."""
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
        if key != "step"
    }


OPTIMIZERS = ["adamw", "muon", pytest.param("adamw_8bit", marks=needs("bitsandbytes"))]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["tied llama", "untied gpt2"])
def test_any_optimizer_continues_bit_for_bit_from_its_checkpoint(tmp_path, config, name):
    wide = copy.deepcopy(config)  # so that some parameters have 4,096 elements
    wide.update({"vocab_size": 211})
    model, optimizer = optimized(wide, name)
    state.create_state(optimizer)
    trained(model, optimizer, 3)
    written(tmp_path, model, optimizer, SHARDS)
    steps = state.optimizer_steps(optimizer)
    assert steps == 3
    expected = trained(model, optimizer, 3)
    other, its = optimized(wide, name, seed=1)
    resumed(tmp_path, other, its, steps)
    assert trained(other, its, 3) == expected
    kept, found = states_of(model, optimizer), states_of(other, its)
    assert found.keys() == kept.keys()
    assert all(torch.equal(found[key], kept[key]) for key in kept)
    spec = state.spec(other, its, LARGE)
    assert spec["optimizer-00001-of-00001.safetensors"].keys() == kept.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_created_state_is_what_any_optimizer_makes_itself(name):
    runs = []
    for create in (False, True):
        model, optimizer = optimized(LLAMA, name)
        if create:
            state.create_state(optimizer)
        runs.append((trained(model, optimizer, 3), states_of(model, optimizer)))
    (first, made), (second, created) = runs
    assert first == second
    assert made.keys() == created.keys()
    assert all(torch.equal(made[key], created[key]) for key in made)


def test_of_adapters_only_what_is_trained_is_in_the_files_and_in_one_file():
    model, _ = built(LLAMA)
    trainable.attach(model, AdapterConfig(kind="lora", r=4, targets=["q_proj"]))
    optimizer = make_optimizer(model, OptimizerConfig())
    spec = state.spec(model, optimizer, 40)
    (weights,) = (part for file, part in spec.items() if file == "adapter_model.safetensors")
    assert set(spec) - {"adapter_model.safetensors"} == {
        f"optimizer-{n:05d}-of-00008.safetensors" for n in range(1, 9)
    }
    place = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    assert {name: one.shape for name, one in weights.items()} == {
        **{place.format(n, "A"): (4, 24) for n in range(2)},
        **{place.format(n, "B"): (24, 4) for n in range(2)},
    }
    state.create_state(optimizer)
    held = [piece.name for piece in state.pieces(model, optimizer, spec)]
    assert len(held) == 12
    assert state.index(spec) == {}
    assert list(state.trained_parameters(model, optimizer)) == list(weights)


def test_adapters_are_resumed_bit_for_bit(tmp_path):
    def adapted(seed):
        model, _ = built(LLAMA)  # one base
        torch.manual_seed(seed)
        trainable.attach(model, AdapterConfig(kind="dora", r=4))
        return model, make_optimizer(model, OptimizerConfig(learning_rate=1e-2))

    model, optimizer = adapted(0)
    trained(model, optimizer, 3)
    written(tmp_path, model, optimizer, SHARDS)
    steps = state.optimizer_steps(optimizer)
    expected = trained(model, optimizer, 4)
    other, its = adapted(1)
    resumed(tmp_path, other, its, steps)
    assert trained(other, its, 4) == expected
