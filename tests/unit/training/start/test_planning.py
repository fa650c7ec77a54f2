import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from helpers.tiny import tiny_config, write_config
from transformers import LlamaConfig

from llmtrain.config.load import load_config
from llmtrain.distributed.plan.memory import largest_block
from llmtrain.errors import UserError
from llmtrain.model.count import CannotCountError
from llmtrain.rundir.status import write_status
from llmtrain.training.start import planning
from llmtrain.types import ModelCut

CPU = {"ACCELERATE_USE_CPU": "true"}
TWO = {**CPU, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)


def config(folder, **changes):
    made = tiny_config(folder / "run")
    made["training"]["micro_batch_size"] = "auto"
    for name, value in changes.items():
        section, key = name.split("__")
        made.setdefault(section, {})[key] = value
    return load_config(write_config(folder, made))


def planned(made):
    return planning.plan_start(made, Path(str(made.run.dir)), "fp32")


def freeze(made, strategy="ddp", **frozen):
    """As if an earlier start had written it down."""
    run_dir = Path(str(made.run.dir))
    run_dir.mkdir()
    kind = planning.launch_kind(strategy, "cpu", 2)
    (run_dir / "auto.json").write_text(json.dumps({"run": {}, "launches": {kind: frozen}}))
    sample = Path(planning.__file__).parents[2] / "data" / "sample"
    (run_dir / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (run_dir / "tokenizer" / name).write_bytes((sample / name).read_bytes())


def test_ddp_where_it_fits_and_a_layout_that_makes_the_global_batch(tmp_path):
    found = planned(config(tmp_path))
    assert found.layout.strategy == "ddp"
    assert found.layout.micro_batch_size * found.layout.accumulation * 2 == 24
    assert found.layout.activation_checkpointing == "none"
    assert found.memory is not None
    assert found.memory.total_bytes < found.hardware.device_bytes


def test_parameters_are_those_of_the_model_that_is_built(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    made = config(tmp_path)
    fields = {k: v for k, v in made.model.config.items() if k != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**fields, vocab_size=4096))
    shape = planned(config(tmp_path, model__tokenizer={"train": 4096})).shape
    assert shape.count == sum(p.numel() for p in model.parameters())
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert largest_block(shape) == layer


def test_less_memory_shards_and_none_is_refused_with_every_strategy(tmp_path):
    wide = {"model_type": "llama", "hidden_size": 192, "num_hidden_layers": 6}
    wide |= {"num_attention_heads": 2, "intermediate_size": 512}
    changes = {"training__micro_batch_size": 1, "model__config": wide}
    needed = planned(config(tmp_path, **changes)).memory
    assert needed is not None
    gb = needed.total_bytes / 2**30
    less = planned(config(tmp_path, **changes, distributed__device_memory_gb=0.8 * gb))
    assert less.layout.strategy == "fsdp2"
    assert "ddp" in less.reason
    assert less.memory is not None
    assert less.memory.total_bytes <= 0.8 * needed.total_bytes
    with pytest.raises(UserError) as refused:
        planned(config(tmp_path, **changes, distributed__device_memory_gb=1e-5))
    (problem,) = refused.value.problems
    rows = [row.split() for row in problem.expected.splitlines()[1:]]
    assert {"ddp", "fsdp2", "zero3_offload"} <= {row[0] for row in rows}
    assert all(len(row) > 3 for row in rows)  # name, size, unit, what to do
    assert "nothing fits" in str(refused.value)


def test_what_was_frozen_for_a_launch_of_this_kind_stays(tmp_path):
    made = config(tmp_path)
    fresh = planned(made)
    assert fresh.layout.micro_batch_size != 3
    freeze(made, micro_batch_size=3, activation_checkpointing="full", fsdp_sync="every")
    found = planned(made)
    assert (found.layout.micro_batch_size, found.layout.accumulation) == (3, 4)
    assert found.layout.activation_checkpointing == "full"
    assert found.memory is not None
    assert fresh.memory is not None
    assert found.memory.parts["activations"] < fresh.memory.parts["activations"]
    assert found.reason.startswith("ddp with full activation checkpointing, micro-batch 3, as an")
    assert not found.decided_again
    asked = planned(config(tmp_path, training__micro_batch_size=2))
    assert asked.layout.micro_batch_size == 2


def test_what_was_frozen_but_fits_no_more_is_decided_anew(tmp_path):
    one = config(tmp_path, training__micro_batch_size=1, model__activation_checkpointing="full")
    least = planned(one).memory
    assert least is not None
    tight = 1.01 * least.total_bytes / 2**30
    made = config(tmp_path, distributed__device_memory_gb=tight, distributed__strategy="ddp")
    freeze(made, micro_batch_size=12, activation_checkpointing="none", fsdp_sync="every")
    found = planned(made)
    assert found.decided_again
    assert found.memory is not None
    assert found.memory.total_bytes <= found.hardware.device_bytes
    assert found.layout.micro_batch_size < 12
    taken, _, before = found.reason.partition(";")
    assert f"micro-batch {found.layout.micro_batch_size}," in taken
    assert "ddp, micro-batch 12, as an earlier start froze it (auto.json), misses" in before


def begun(tmp_path):
    """Of a run from another model, with two checkpoints: the newest has a config cut short."""
    fields = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 5000}
    fields |= {"num_attention_heads": 2, "intermediate_size": 64}
    made = config(tmp_path, model__from=str(tmp_path / "base"), model__config={})
    run_dir = Path(str(made.run.dir))
    texts = {"step-00000002": "{", "step-00000001": json.dumps(fields)}
    for name, text in texts.items():
        (run_dir / "checkpoints" / name).mkdir(parents=True)
        (run_dir / "checkpoints" / name / "config.json").write_text(text)
    return made


def test_a_damaged_newest_checkpoint_is_planned_by_the_next_one(tmp_path, caplog):
    assert planned(begun(tmp_path)).shape.vocabulary == 5000
    assert "step-00000002" in caplog.text


def test_a_checkpoint_of_another_run_is_not_planned_by(tmp_path):
    made = begun(tmp_path)
    run_dir = Path(str(made.run.dir))
    foreign = run_dir / "checkpoints" / "step-00000099"
    shutil.copytree(run_dir / "checkpoints" / "step-00000001", foreign)
    fields = json.loads((foreign / "config.json").read_text()) | {"vocab_size": 7000}
    (foreign / "config.json").write_text(json.dumps(fields))
    (foreign / "trainer_state.json").write_text('{"run_id": "another"}')
    write_status(run_dir, run_id="this one")
    assert planned(made).shape.vocabulary == 5000


def test_without_any_config_of_a_checkpoint_the_model_is_that_of_the_beginning(tmp_path):
    made = begun(tmp_path)
    older = Path(str(made.run.dir)) / "checkpoints" / "step-00000001" / "config.json"
    (tmp_path / "base").mkdir()
    fields = json.loads(older.read_text()) | {"vocab_size": 6000}
    (tmp_path / "base" / "config.json").write_text(json.dumps(fields))
    older.write_text("[]")
    assert planned(made).shape.vocabulary == 6000


def test_a_limit_of_control_groups_is_the_host(tmp_path, monkeypatch):
    from llmtrain.metrics import memory

    monkeypatch.setattr(memory, "limit_bytes", lambda: 3 * 2**30)
    hardware = planning.this_machine(config(tmp_path), TWO)
    assert (hardware.host_bytes, hardware.device_bytes) == (3 * 2**30, 3 * 2**29)


def test_deepspeed_is_no_step_of_the_ladder_where_it_is_not_installed(tmp_path, monkeypatch):
    small = {"distributed__device_memory_gb": 1e-5}
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "deepspeed" else found(name)
    )
    with pytest.raises(UserError) as refused:
        planned(config(tmp_path, **small))
    (problem,) = refused.value.problems
    rows = {row.split()[0]: row for row in problem.expected.splitlines()[1:]}
    assert {"ddp", "fsdp2", "fsdp2_offload", "zero3_offload"} == set(rows)
    assert "pip install 'deepspeed>=0.19.8,<0.20' on Linux" in rows["zero3_offload"]
    assert "iB" not in rows["zero3_offload"]
    named = config(tmp_path, distributed__strategy="zero3_offload")
    assert planned(named).layout.strategy == "zero3_offload"


def test_what_cannot_be_counted_is_said_and_trained_all_the_same(tmp_path, monkeypatch):
    def refuse(*_):
        raise CannotCountError("its experts run in a loop")

    monkeypatch.setattr(planning, "count_saved", refuse)
    found = planned(config(tmp_path))
    assert found.memory is None
    assert found.layout.strategy == "ddp"
    assert found.layout.micro_batch_size == 12
    assert "experts run in a loop" in found.reason
    assert found.to_json()["total_bytes"] is None


def test_ten_million_blocks_are_refused_by_one_of_them(tmp_path, monkeypatch):
    deep = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 2}
    deep |= {"num_hidden_layers": 10_000_000, "intermediate_size": 352}
    built: list[int] = []
    describe = planning.describe_parameters

    def watched(found, *freeze):
        built.append(found.num_hidden_layers)
        return describe(found, *freeze)

    monkeypatch.setattr(planning, "describe_parameters", watched)
    with pytest.raises(UserError) as refused:
        planned(config(tmp_path, model__config=deep))
    assert built == [1]
    (problem,) = refused.value.problems
    assert (problem.key, problem.value) == ("model.config.num_hidden_layers", 10_000_000)


def test_very_many_blocks_are_refused_under_the_name_that_the_architecture_has(tmp_path):
    deep = {"model_type": "gpt2", "n_embd": 128, "n_head": 2, "n_layer": 10_000_000}
    with pytest.raises(UserError) as refused:
        planned(config(tmp_path, model__config=deep))
    assert [problem.key for problem in refused.value.problems] == ["model.config.n_layer"]


def test_an_optimizer_leaves_the_strategies_that_it_works_under(tmp_path, monkeypatch):
    tried: list[tuple[str, ...]] = []
    choose = planning.choose_strategy

    def watched(*given):
        tried.append(given[4])
        return choose(*given)

    monkeypatch.setattr(planning, "choose_strategy", watched)
    planned(config(tmp_path, optimizer__name="muon"))
    planned(config(tmp_path, optimizer__name="adamw_8bit"))
    assert tried == [("ddp", "hsdp", "fsdp2"), ("ddp",)]


def test_a_launch_of_another_strategy_is_refused(tmp_path, monkeypatch):
    made = config(tmp_path, optimizer__name="adamw_8bit")
    monkeypatch.setattr(planning, "allowed_strategies", lambda *_: ("fsdp2",))
    with pytest.raises(UserError, match="adamw under fsdp2; adamw_8bit works only under ddp"):
        planned(made)


EXACT = {"training__same_bits": True, "training__micro_batch_size": 2}


def test_with_same_bits_two_strategies_are_left_and_each_micro_batch_is_reduced(
    tmp_path, monkeypatch
):
    made = config(tmp_path, **EXACT)
    assert planning.strategies_for(made, CPU) == ("ddp", "fsdp2")
    assert planning.work(made, "fp32", cpu=True).fsdp_sync == "every"
    muon = config(tmp_path, **EXACT, optimizer__name="muon")
    assert planning.strategies_for(muon, CPU) == ("ddp",)
    monkeypatch.setattr(planning, "allowed_strategies", lambda *_: ("fsdp2",))
    with pytest.raises(UserError, match="how tensors are divided"):
        planned(muon)


def test_bad_input_same_bits_on_cuda_needs_deterministic_kernels(tmp_path):
    made = config(tmp_path, **EXACT)
    shape = planned(made).shape
    assert not list(planning.exact_problems(made, shape, cpu=True))
    (problem,) = planning.exact_problems(made, shape, cpu=False)
    assert problem.key == "training.deterministic"
    sure = config(tmp_path, **EXACT, training__deterministic=True)
    assert not list(planning.exact_problems(sure, shape, cpu=False))


def test_bad_input_same_bits_of_a_mixture_of_experts_are_refused(tmp_path):
    mixture = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    mixture["num_key_value_heads"] = 2
    fields = tiny_config(tmp_path)["model"]["config"] | mixture
    planned(config(tmp_path, model__config=fields))
    with pytest.raises(UserError, match="mixture of experts") as refused:
        planned(config(tmp_path, **EXACT, model__config=fields))
    assert [problem.key for problem in refused.value.problems] == ["training.same_bits"]


def test_groups_that_do_not_fit_are_refused_before_there_are_weights(tmp_path):
    made = config(tmp_path, optimizer__groups=[{"match": "*q_projj*"}])
    with pytest.raises(UserError, match=r"optimizer\.groups\.0\.match") as refused:
        planned(made)
    assert "q_proj" in refused.value.problems[0].remedy


def test_the_plan_counts_the_state_of_the_optimizer_that_is_asked_for(tmp_path):
    found = {name: planned(config(tmp_path, optimizer__name=name)) for name in ("adamw", "muon")}
    shape = found["muon"].shape
    hidden = [p for p in shape.parameters if p.block is not None and len(p.shape) == 2]
    assert {p.algorithm for p in hidden} == {"muon"}
    saved = 4 * sum(p.shape[0] * p.shape[1] for p in hidden)
    plans = {name: one.memory for name, one in found.items() if one.memory}
    assert plans["adamw"].parts["optimizer"] - plans["muon"].parts["optimizer"] == saved > 0


def test_adapters_that_cannot_be_are_refused_before_a_weight_is_read(tmp_path):
    (tmp_path / "base").mkdir()  # where there is none
    fields = tiny_config(tmp_path)["model"]["config"] | {"vocab_size": 5000}
    (tmp_path / "base" / "config.json").write_text(json.dumps(fields))
    found = {}
    for kind, targets in (("lora", ["q_projj", "o_proj"]), ("qlora", ["q_proj"])):
        base = {"model__from": str(tmp_path / "base"), "model__config": {}}
        made = config(tmp_path, **base, adapter__kind=kind, adapter__targets=targets)
        with pytest.raises(UserError) as refused:
            planned(made)
        (found[kind],) = refused.value.problems
    assert (found["lora"].key, found["lora"].value) == ("adapter.targets", "q_projj")
    assert found["lora"].remedy.startswith("nearest: q_proj")
    assert (found["qlora"].key, found["qlora"].value) == ("adapter.kind", "qlora")
    assert "a CUDA device" in found["qlora"].expected


TENSOR, PIPELINE = ModelCut(tensor=2), ModelCut(pipeline=2)
CANNOT_BE_CUT = [
    (TENSOR, "optimizer.name", "muon"),
    (TENSOR, "optimizer.name", "adamw_8bit"),
    (TENSOR, "training.compile", "blocks"),
    (TENSOR, "training.loss_kernel", "torch"),
    (TENSOR, "checkpoint.background", True),
    (TENSOR, "adapter.kind", "lora"),
    (TENSOR, "adapter.kind", "qlora"),
    (PIPELINE, "training.compile", "blocks"),
    (PIPELINE, "adapter.kind", "qlora"),
]


@pytest.mark.parametrize(("cut", "key", "value"), CANNOT_BE_CUT)
def test_what_does_not_work_on_parts_of_a_model_is_refused_by_its_key(tmp_path, cut, key, value):
    kind = "tensor_parallel" if cut == TENSOR else "pipeline_parallel"
    changes = {key.replace(".", "__"): value, f"distributed__{kind}": 2}
    if key == "adapter.kind":
        base = tmp_path / "base"
        LlamaConfig(vocab_size=8).save_pretrained(base)
        changes["model__from"], changes["model__config"] = str(base), {}
    made = config(tmp_path, **changes)
    described = LlamaConfig(num_attention_heads=4, hidden_size=64)
    (found,) = planning.cut_problems(made, described, cut)
    assert (found.key, found.value) == (key, value)
    assert f"distributed.{kind} = 2" in found.expected
    assert [*planning.cut_problems(made, described, ModelCut())] == []


def test_each_kind_of_cut_has_frozen_choices_of_its_own():
    kinds = {
        planning.launch_kind("ddp", "cpu", 8, cut)
        for cut in (ModelCut(), ModelCut(2), ModelCut(4), ModelCut(2, 2), ModelCut(1, 2))
    }
    assert len(kinds) == 5
    assert "ddp/cpu/8" in kinds
