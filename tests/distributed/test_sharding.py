"""FSDP2 and HSDP on real ranks: equal to DDP and plain PyTorch, where others were seen to fail."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers import sharded, uneven
from helpers.rings import diagonal
from helpers.sharded import Job
from helpers.sharded_models import build
from helpers.updates import with_loss
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from llmtrain.model.loss import Head

TWO_NODES = {"LOCAL_WORLD_SIZE": "2"}
SHARDED = [(2, "fsdp2"), (4, "hsdp")]
LAYOUTS = [
    pytest.param(1, Job("fsdp2", micro=8, steps=20), id="fsdp2 on 1"),
    pytest.param(2, Job("fsdp2", micro=4, steps=20), id="fsdp2 on 2"),
    pytest.param(4, Job("fsdp2", micro=2, steps=20), id="fsdp2 on 4"),
    pytest.param(4, Job("hsdp", micro=2, steps=20), id="hsdp 2x2"),
]


def train(server, folder, world_size, job, **env):
    output = folder / "result.json"
    if job.strategy == "hsdp":
        env = TWO_NODES | env
    arguments = ["call", "helpers.sharded", "work", str(output), job.text()]
    codes = server.run(arguments, world_size, folder, env)
    assert codes == [0] * world_size, (folder / "output.txt").read_text()
    return json.loads(output.read_text())


@cache
def plain(job):
    same_for_all = replace(job, strategy="ddp", sync="every", micro=8, checkpointing="none")
    return sharded.reference(same_for_all)


def same(found, expected):
    """Losses within 1e-5, norms within a relative 1e-5, weights after all updates."""
    assert len(found["numbers"]) == len(expected["numbers"])
    for one, other in zip(found["numbers"], expected["numbers"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["norm"] == pytest.approx(other["norm"], rel=1e-5)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, values in expected["weights"].items():
        torch.testing.assert_close(
            torch.tensor(found["weights"][name]), torch.tensor(values), rtol=0, atol=2e-5
        )


@pytest.mark.parametrize(("world_size", "job"), LAYOUTS)
def test_uneven_masks_train_as_in_plain_pytorch(server, tmp_path, world_size, job):
    found = train(server, tmp_path, world_size, job)
    same(found, plain(job))
    assert found["norm_type"] == "float"  # a DTensor would be logged as this rank's part


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize(
    ("strategy", "sync"), [("ddp", "every"), ("fsdp2", "every"), ("fsdp2", "last")]
)
def test_the_loss_in_chunks_trains_as_the_logits_of_plain_pytorch(
    server, tmp_path, strategy, sync, kind
):
    job = Job(strategy, kind, micro=1, sync=sync)  # three micro-batches without synchronisation
    assert with_loss(build(kind)).head == Head()
    same(train(server, tmp_path, 2, job), plain(job))


@pytest.mark.parametrize(("micro", "sync"), diagonal([4, 2, 1], ["every", "last"], beside="slow"))
def test_accumulation_changes_nothing(server, tmp_path, micro, sync):
    job = Job("fsdp2", micro=micro, sync=sync, steps=20)
    found = train(server, tmp_path, 2, job)
    same(found, plain(job))
    reductions = sharded.counted(found)["_reduce_scatter_base_", "torch.float32", 2]
    accumulation = 4 // micro if sync == "every" else 1
    assert reductions == 3 * accumulation  # two blocks, and the tied embedding with the norm


@pytest.mark.parametrize(
    ("checkpointing", "layout"), diagonal(["selective", "full"], SHARDED, beside="slow")
)
def test_blocks_that_are_computed_again_change_nothing(server, tmp_path, checkpointing, layout):
    world_size, strategy = layout
    job = Job(strategy, micro=1, steps=20, checkpointing=checkpointing)
    found = train(server, tmp_path, world_size, job)
    same(found, plain(job))
    assert found["passes"] == 2 * 20 * uneven.ROWS // world_size  # each micro-batch's, and again


def test_hidden_documents_are_checked_and_trained_under_fsdp2(server, tmp_path):
    job = Job("fsdp2", micro=2, steps=uneven.STEPS, hiding=True)
    found = train(server, tmp_path, 2, job)
    numbers, _ = uneven.reference(hiding=True)
    for one, other in zip(found["numbers"], numbers, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["norm"] == pytest.approx(other["norm"], rel=1e-4)  # each text was alone there


def test_shards_on_different_meshes_are_counted_and_clipped(server, tmp_path):
    output = tmp_path / "result.json"
    arguments = ["call", "helpers.reducing", "meshes", str(output)]
    assert server.run(arguments, 2, tmp_path) == [0, 0], (tmp_path / "output.txt").read_text()
    found = json.loads(output.read_text())
    assert found["meshes"] == 2
    assert found["norm"] == pytest.approx(found["expected"], rel=1e-6)
    assert found["clipped"] == pytest.approx(found["norm"] / 2, rel=1e-5)


@pytest.mark.parametrize(("world_size", "strategy"), [(2, "fsdp2"), (4, "hsdp")])
def test_tied_embeddings_stay_tied_and_are_saved_once(server, tmp_path, world_size, strategy):
    job = Job(strategy, micro=2, save=str(tmp_path / "saved"))
    found = train(server, tmp_path, world_size, job)
    same(found, plain(replace(job, save="")))
    assert found["tied"]
    with safe_open(tmp_path / "saved" / "step-00000004" / "model.safetensors", "pt") as file:
        assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118  # no mapping
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_masters_are_fp32_for_a_checkpoint_of_mixed_dtypes(server, tmp_path, precision):
    model = build("untied").to(torch.bfloat16)
    model.model.norm.to(torch.float32)
    model.save_pretrained(tmp_path / "base")
    job = Job("fsdp2", micro=2, steps=0, precision=precision, source=str(tmp_path / "base"))
    found = train(server, tmp_path, 2, job)
    assert found["dtypes"] == ["torch.float32"]
    for name, parameter in model.named_parameters():
        assert found["weights"][name] == parameter.float().flatten().tolist()


@pytest.mark.parametrize(("world_size", "strategy"), [(2, "fsdp2"), (4, "hsdp")])
def test_bf16_computes_in_bf16_and_reduces_in_fp32(server, tmp_path, world_size, strategy):
    job = Job(strategy, micro=2, precision="bf16", evaluate=True)  # which asserts that loss is fp32
    found = train(server, tmp_path, world_size, job)
    counted = sharded.counted(found)
    reduced = {dtype for name, dtype, _ in counted if "reduce" in name}
    gathered = {dtype for name, dtype, _ in counted if "allgather" in name}
    assert reduced == {"torch.float32", "torch.float64"}  # fp64: the step's vector
    assert gathered == {"torch.bfloat16"}
    ddp = train(server, tmp_path, world_size, replace(job, strategy="ddp"))
    assert found["dtypes"] == ddp["dtypes"] == ["torch.float32"]
    for one, other in zip(found["numbers"], ddp["numbers"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-2)
        assert one["norm"] == pytest.approx(other["norm"], rel=2e-2)


@pytest.mark.parametrize(
    ("sync", "precision"), diagonal(["every", "last"], ["fp32", "bf16"], beside="slow")
)
def test_parameters_unused_in_some_micro_batch_or_on_some_rank_train_as_in_plain_pytorch(
    server, tmp_path, sync, precision
):
    job = Job("fsdp2", "rare", micro=1, sync=sync, precision=precision)
    found = train(server, tmp_path, 2, job)
    if precision == "fp32":
        same(found, plain(job))
    expected = plain(replace(job, precision="fp32"))["numbers"]
    for one, other in zip(found["numbers"], expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-2)


@pytest.mark.parametrize(
    ("sync", "kind"), diagonal(["every", "last"], ["tied", "rare"], beside="slow")
)
def test_replicas_of_hsdp_reduce_once_a_step(server, tmp_path, sync, kind):
    job = Job("hsdp", kind, micro=1, sync=sync)
    found = train(server, tmp_path, 4, job)
    same(found, plain(job))
    counted, units = sharded.counted(found), 3 if kind == "tied" else 4
    assert counted["allreduce_", "torch.float32", 2] == units
    accumulation = 2 if sync == "every" else 1
    assert counted["_reduce_scatter_base_", "torch.float32", 2] == units * accumulation


def test_the_launchs_own_mesh_is_taken(server, tmp_path):
    mesh = {"DP_REPLICATE": "2", "DP_SHARD": "2"}
    env = {f"PARALLELISM_CONFIG_{key}_SIZE": size for key, size in mesh.items()}
    env |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "LOCAL_WORLD_SIZE": "4"}
    job = Job("hsdp", micro=2)
    found = train(server, tmp_path, 4, job, **env)
    same(found, plain(job))
    assert sharded.counted(found)["allreduce_", "torch.float32", 2] == 3


@pytest.mark.parametrize(("world_size", "strategy"), [(1, "fsdp2"), (2, "fsdp2"), (4, "hsdp")])
def test_parameter_names_are_those_of_the_model(server, tmp_path, world_size, strategy):
    job = Job(strategy, "untied", micro=2, steps=1, save=str(tmp_path / "saved"))
    found = train(server, tmp_path, world_size, job)
    names = [name for name, _ in build("untied").named_parameters()]
    assert found["names"] == names
    saved = tmp_path / "saved" / "step-00000004"
    with safe_open(saved / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(names)
    with safe_open(saved / "optimizer-00001-of-00001.safetensors", "pt") as file:
        moments = [f"{name}.{kind}" for name in names for kind in ("exp_avg", "exp_avg_sq")]
        assert sorted(file.keys()) == sorted(moments)


@pytest.mark.parametrize(
    ("world_size", "job"),
    [
        (2, Job("fsdp2", "tied", hiding=True)),
        (2, Job("fsdp2", "untied", frozen=("model.embed", "model.layers.1."))),
        (4, Job("fsdp2", "odd")),
        (2, Job("fsdp2", "rare")),
        (4, Job("hsdp", "rare")),
    ],
    ids=["tied", "frozen", "odd shapes", "persistent buffers", "hsdp"],
)
def test_what_rank_0_alone_has_built_is_what_all_ranks_train(server, tmp_path, world_size, job):
    job = replace(job, micro=2, evaluate=not job.hiding, save=str(tmp_path / "saved"))
    each = train(server, tmp_path, world_size, job)
    files = bytes_of(tmp_path / "saved")
    one = train(server, tmp_path, world_size, replace(job, apart=True, save=str(tmp_path / "one")))
    assert one == each
    assert bytes_of(tmp_path / "one") == files


def test_a_launch_that_asks_for_efficient_loading_loses_no_persistent_buffer(server, tmp_path):
    asked = {"VERSION": "2", "CPU_RAM_EFFICIENT_LOADING": "true", "SYNC_MODULE_STATES": "true"}
    asked |= {"AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "MIN_NUM_PARAMS": "3"}
    env = {f"FSDP_{key}": value for key, value in asked.items()} | {"ACCELERATE_USE_FSDP": "true"}
    job = Job("fsdp2", "rare", micro=2, save=str(tmp_path / "saved"))
    same(train(server, tmp_path, 2, job, **env), plain(replace(job, save="")))
    said = (tmp_path / "output.txt").read_text()
    assert "fsdp_cpu_ram_efficient_loading: true of the launch file is not used" in said
    assert "fsdp_auto_wrap_policy: SIZE_BASED_WRAP of the launch file is not used" in said
    with safe_open(tmp_path / "saved" / "step-00000004" / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("layers.1.scale"), torch.linspace(0.5, 1.5, 7))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "hsdp"])
def test_odd_shapes_and_fewer_rows_than_ranks_train_as_in_plain_pytorch(server, tmp_path, strategy):
    job = Job(strategy, "odd", micro=2, steps=20)
    assert min(p.shape[0] for p in build("odd").parameters()) < 4
    same(train(server, tmp_path, 4, job), plain(job))


@pytest.mark.parametrize(
    ("kind", "layout"),
    diagonal(["tied", "untied"], [(1, "ddp"), (2, "ddp"), *SHARDED], beside="slow"),
)
def test_frozen_parameters_have_no_gradient_no_state_and_do_not_move(
    server, tmp_path, kind, layout
):
    world_size, strategy = layout
    frozen = ("model.layers.0.", *(["model.embed"] if kind == "untied" else []))
    job = Job(strategy, kind, micro=2, steps=20, frozen=frozen)
    found = train(server, tmp_path, world_size, job)
    same(found, plain(job))
    still = [name for name in found["names"] if name.startswith(frozen)]
    assert still
    assert set(found["states"]) == set(found["names"]) - set(still)
    before = dict(build(kind).named_parameters())
    for name in still:
        assert found["weights"][name] == before[name].flatten().tolist()


@pytest.mark.parametrize("kind", ["tied", "odd", "rare"])
def test_files_and_what_is_computed_from_them_are_the_same_under_every_strategy(
    server, tmp_path, kind
):
    frozen = ("model.layers.0.self_attn",) if kind == "tied" else ()
    first = Job("ddp", kind, micro=2, frozen=frozen, evaluate=True, save=str(tmp_path / "0"))
    wanted = train(server, tmp_path, 2, first)
    layouts = [(2, "fsdp2"), (3, "fsdp2"), (4, "hsdp"), (1, "fsdp2"), (2, "ddp"), (1, "ddp")]
    for number, (world_size, strategy) in enumerate(layouts):
        here, there = str(tmp_path / str(number)), str(tmp_path / str(number + 1))
        job = replace(first, strategy=strategy, steps=0, seed=9, load=here, save=there)
        found = train(server, tmp_path, world_size, job)
        assert found["steps"] == 4
        assert found["evaluated"] == pytest.approx(wanted["evaluated"], rel=1e-6)
        assert bytes_of(Path(there)) == bytes_of(tmp_path / "0"), (world_size, strategy)


def bytes_of(root):
    return {f.name: f.read_bytes() for f in (root / "step-00000004").glob("*.safetensors")}


@pytest.mark.parametrize("micro", [4, 2, 1])
def test_ddp_reduces_four_bytes_a_trained_parameter_whatever_the_accumulation(
    server, tmp_path, micro
):
    output = tmp_path / "result.json"
    arguments = ["call", "helpers.reducing", "reduced", str(output), str(micro)]
    assert server.run(arguments, 2, tmp_path) == [0, 0], (tmp_path / "output.txt").read_text()
    found = json.loads(output.read_text())
    assert found["bytes"] == [4 * found["trained"]] * 3


@pytest.mark.parametrize(("cap", "reductions"), [(1, 8), (3, 3)])
def test_ddp_reduces_in_buckets_of_the_size_that_is_asked_for(server, tmp_path, cap, reductions):
    output = tmp_path / "result.json"
    arguments = ["call", "helpers.reducing", "buckets", str(output), str(cap)]
    assert server.run(arguments, 2, tmp_path) == [0, 0], (tmp_path / "output.txt").read_text()
    found = json.loads(output.read_text())
    assert sum(found) == 8 << 20
    assert len(found) == reductions, found


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (Job("hsdp"), "distributed.strategy=fsdp2"),
        (Job("fsdp2", wrap_class="Blok"), "distributed.wrap_class=LlamaDecoderLayer"),
    ],
    ids=["a mesh of one replica", "an unknown class to wrap"],
)
def test_what_cannot_be_sharded_is_refused_by_name(server, tmp_path, job, said):
    found = train(server, tmp_path, 2, job, LOCAL_WORLD_SIZE="2")
    assert said in found["refused"]


@pytest.mark.parametrize(("world_size", "strategy"), [(2, "fsdp2"), (4, "hsdp")])
def test_the_norm_is_that_of_all_shards_and_ddps(server, tmp_path, world_size, strategy):
    job = Job(strategy, micro=2)
    found = train(server, tmp_path, world_size, job)
    ddp = train(server, tmp_path, world_size, replace(job, strategy="ddp"))
    assert found["norm_type"] == "float"  # a DTensor would be logged as this rank's part
    for one, other in zip(found["numbers"], ddp["numbers"], strict=True):
        assert one["norm"] == pytest.approx(other["norm"], rel=1e-6)


def test_every_trainable_parameter_moves(server, tmp_path):
    job = Job("fsdp2", "untied", micro=2, steps=1)
    found = train(server, tmp_path, 2, job)
    before = build("untied")
    for name, parameter in before.named_parameters():
        moved = torch.tensor(found["weights"][name]) != parameter.flatten()
        assert moved.float().mean() > 0.4, name  # half of the rows of the table were not seen


def test_transformers_loads_what_four_shards_wrote(server, tmp_path):
    job = Job("fsdp2", micro=2, steps=1, save=str(tmp_path / "saved"))
    found = train(server, tmp_path, 4, job)
    directory = tmp_path / "saved" / "step-00000004"
    (directory / "config.json").write_text(build("tied").config.to_json_string())
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert isinstance(loaded, LlamaForCausalLM)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, parameter in loaded.named_parameters():
        assert parameter.flatten().tolist() == found["weights"][name]
