"""`llmtrain.plan`: what a config would take on machines that are here, and on some that are not."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from helpers.config import loaded
from helpers.on_paper import gpus

import llmtrain
from llmtrain.cli.plan_view import plan_lines
from llmtrain.distributed.engines import accelerator
from llmtrain.distributed.engines.accelerator import Rates
from llmtrain.distributed.launch.named import named_strategy, unsupported_problems
from llmtrain.distributed.plan.memory import PARTS, Hardware
from llmtrain.errors import UserError
from llmtrain.model.count import CannotCountError
from llmtrain.text import size
from llmtrain.tools.launch.file import (
    launch_values,
    read_launch_file,
    variables_of,
    write_launch_file,
)
from llmtrain.tools.plan import launch_file, plan, table
from llmtrain.training.start import planning
from llmtrain.types import ModelCut

GIB = 2**30
SMALL = """\
model:
  config: {model_type: llama, hidden_size: 64, intermediate_size: 160, num_hidden_layers: 3,
           num_attention_heads: 4, max_position_embeddings: 4096}
  tokenizer: sample
data: {sources: [{path: sample}], seq_len: 128}
training: {steps: 100, global_batch_size: 64, precision: bf16}
"""
# Head and activations of 8,192 tokens and 8 B parameters: nobody allocates any of it here.
LARGE = SMALL.replace("hidden_size: 64", "hidden_size: 4096").replace(
    "intermediate_size: 160, num_hidden_layers: 3",
    "intermediate_size: 14336, num_hidden_layers: 32",
)


def small(folder, *overrides):
    return loaded(folder, *overrides, text=SMALL)


def large(folder, *overrides):
    return loaded(folder, *overrides, text=LARGE)


def keys(error):
    return {problem.key for problem in error.value.problems}


BATCH, MICRO = "training.global_batch_size", "training.micro_batch_size=8"
GROWS = "training.global_batch_size=[{from_step: 1, size: 64}, {from_step: 41, size: 96}]"


def test_a_batch_that_grows_is_planned_with_each_size(tmp_path):
    """Its time is that of runs of one size: 40 steps of the one and 60 of the other."""
    machine = {"devices": 2, "device_memory_gb": 80}
    alone = [
        plan(small(tmp_path, MICRO, f"training.steps={steps}", f"{BATCH}={size}"), **machine)
        for steps, size in ((40, 64), (60, 96))
    ]
    grows = plan(small(tmp_path, MICRO, GROWS), **machine)
    assert grows.seconds == pytest.approx(sum(one.seconds for one in alone))
    (line,) = (one for one in plan_lines(grows) if one.startswith("work"))
    assert "64 blocks of 128 tokens a step; 96 from step 41" in line
    shown = grows.to_json()
    assert (shown["global_batch_size"], shown["batch_sizes"]) == (64, ((1, 64), (41, 96)))


def test_what_a_start_would_refuse_of_same_bits_is_refused_by_a_plan(tmp_path):
    exact = [
        f"training.{one}" for one in ("same_bits=true", "precision=fp32", "micro_batch_size=8")
    ]
    with pytest.raises(UserError) as refused:
        plan(small(tmp_path, *exact), devices=1, device_memory_gb=80)
    assert keys(refused) == {"training.deterministic"}
    assert plan(small(tmp_path, *exact), devices=1).chosen is not None  # a CPU needs no such key


def test_a_micro_batch_is_planned_that_divides_every_size(tmp_path):
    found = plan(small(tmp_path, GROWS.replace("96", "72")), devices=1, device_memory_gb=80)
    assert 8 % found.chosen.layout.micro_batch_size == 0
    assert found.rates == ()  # of which size?


def test_the_json_has_the_keys_of_the_contract(tmp_path):
    shown = json.loads(json.dumps(plan(small(tmp_path), devices=2).to_json()))
    assert list(shown) == [
        "chosen", "reason", "fits", "devices", "nodes", "tensor_parallel",
        "pipeline_parallel", "sequence_parallel", "device_bytes", "host_bytes", "seq_len",
        "global_batch_size", "parameters", "trainable_parameters", "strategies",
        "checkpoint_bytes", "disk_bytes", "tokens_per_second",
    ]  # fmt: skip
    for row in shown["strategies"]:
        assert list(row) == [
            "name", "chosen", "activation_checkpointing", "micro_batch_size", "accumulation",
            "parts", "total_bytes", "host_bytes", "fits", "missing_bytes", "remedy",
            "tokens_per_second",
        ]  # fmt: skip
        assert tuple(row["parts"]) == PARTS
        assert row["total_bytes"] == sum(row["parts"].values())
        assert row["micro_batch_size"] * row["accumulation"] * 2 == 64
    assert [row["name"] for row in shown["strategies"] if row["chosen"]] == [shown["chosen"]]
    assert (shown["devices"], shown["nodes"], shown["seq_len"]) == (2, 1, 128)


def test_a_notebook_shows_every_strategy(tmp_path):
    found = plan(small(tmp_path), devices=2)
    page = found._repr_html_()
    assert all(f"<td>{one.layout.strategy}" in page for one in found.choice.candidates)
    assert f"<td>{found.chosen.layout.strategy}, chosen</td>" in page


def test_the_public_name_is_this_function():
    assert llmtrain.plan is plan


def test_a_cpu_is_planned_as_a_rehearsal(tmp_path):
    found = plan(small(tmp_path), devices=2)
    assert found.hardware.cpu
    assert (found.work.precision, found.precision_why) == ("bf16", "asked for")
    assert found.chosen.layout.strategy == "ddp"
    assert found.chosen.memory.parts["reserve"] == 0
    assert found.chosen.tokens_per_second is None
    assert found.speeds == ()
    assert found.hardware.device_bytes == found.hardware.host_bytes // 2


def test_a_cpu_is_timed_for_a_plan_and_both_rates_are_said(monkeypatch, tmp_path):
    monkeypatch.setattr(accelerator, "cpu_rates", lambda: Rates(80.0, 9.0))
    found = plan(small(tmp_path, "training.precision=auto"), devices=2)
    why = "products on this CPU: fp32 80 and bf16 9 GFLOP/s"
    assert (found.work.precision, found.precision_why) == ("fp32", why)
    assert f"a step, fp32 ({why})" in " ".join(" ".join(plan_lines(found)).split())


def test_devices_that_are_not_here_are_named_after_their_memory(tmp_path):
    found = plan(small(tmp_path, "training.precision=auto"), devices=4, device_memory_gb=80)
    assert (found.hardware.device, found.assumed, found.hardware.cpu) == ("H100", True, False)
    assert found.hardware.host_bytes is None
    assert found.work.precision == "bf16"
    assert found.chosen.memory.parts["reserve"] > GIB
    assert found.chosen.tokens_per_second > 0
    assert [one.devices for one in found.speeds] == [1, 2, 4]
    assert found.speeds[0].efficiency == 1.0
    assert found.speeds[-1].tokens_per_second == found.chosen.tokens_per_second
    odd = plan(small(tmp_path), device_memory_gb=13)
    assert (odd.hardware.device, odd.speeds) == (None, ())


def test_nodes_multiply_devices(tmp_path):
    shown = plan(small(tmp_path), devices=4, nodes=2, device_memory_gb=80).to_json()
    assert (shown["devices"], shown["nodes"]) == (4, 2)
    assert {row["micro_batch_size"] * row["accumulation"] for row in shown["strategies"]} == {8}
    assert "hsdp" in {row["name"] for row in shown["strategies"]}


def test_machines_that_come_and_go_are_planned_for_the_most_that_divide_the_batch(tmp_path):
    config = small(tmp_path)  # of 8 blocks
    found = plan(config, devices=2, nodes="1:3", device_memory_gb=80)
    assert found.to_json()["nodes"] == 2
    assert [line for line in plan_lines(found) if "3 machines (6 processes)" in line]
    assert "2 of them train" in found.to_json()["waiting"][0]
    assert plan(config, devices=2, nodes="1:2", device_memory_gb=80).waiting == ()
    with pytest.raises(UserError, match="--nodes 3:3 × 2 processes"):
        plan(config, devices=2, nodes="3:3", device_memory_gb=80)
    with pytest.raises(UserError, match="1 ≤ MIN ≤ MAX"):
        plan(config, devices=2, nodes="2:1", device_memory_gb=80)


def test_a_large_model_is_sharded_or_offloaded_or_refused(tmp_path):
    config = large(tmp_path)
    assert plan(config, devices=8, device_memory_gb=80).chosen.layout.strategy == "fsdp2"
    one = plan(config, device_memory_gb=80, host_memory_gb=256)
    assert one.chosen.layout.strategy == "fsdp2_offload"
    assert plan(config, device_memory_gb=80, host_memory_gb=64).chosen is None


def test_a_refusal_says_which_change_fits(tmp_path):
    asked = ("training.micro_batch_size=8", "model.activation_checkpointing=none")
    refused = plan(large(tmp_path, "data.seq_len=4096", *asked), 8, device_memory_gb=80)
    assert refused.chosen is None
    shown = refused.to_json()
    assert (shown["chosen"], shown["fits"], shown["tokens_per_second"]) == (None, False, None)
    assert all(row["missing_bytes"] > 0 and row["remedy"] for row in shown["strategies"])
    (fsdp2,) = (row for row in shown["strategies"] if row["name"] == "fsdp2")
    key, _, value = fsdp2["remedy"].partition("=")
    assert key == "training.micro_batch_size"
    changed = (f"{key}={value}", "data.seq_len=4096", asked[1])
    assert plan(large(tmp_path, *changed), 8, device_memory_gb=80).chosen.layout.strategy == "fsdp2"


def test_where_nothing_fits_8_bit_moments_and_adapters_are_named(tmp_path):
    found = plan(large(tmp_path, "distributed.strategy=ddp"), device_memory_gb=24)
    said = " ".join(found.suggestions)
    eight_bit = ("distributed.strategy=ddp", "optimizer.name=adamw_8bit")
    less = plan(large(tmp_path, *eight_bit), device_memory_gb=24)
    assert "adamw_8bit" not in " ".join(less.suggestions)
    one, other = (made.choice.candidates[0].memory.parts for made in (found, less))
    assert other["optimizer"] < 0.27 * one["optimizer"]
    moments, lora = 3 * one["optimizer"] // 4, one["gradients"] + one["optimizer"]
    qlora = lora + 7 * one["parameters"] // 8
    assert f"optimizer.name=adamw_8bit would save {size(moments)} of ddp" in said
    assert f"adapter.kind=lora, which needs model.from, would save up to {size(lora)} of" in said
    assert f"adapter.kind=qlora, on CUDA, would save up to {size(qlora)} of ddp" in said


def test_an_optimizer_of_fewer_strategies_is_planned_for_those(tmp_path):
    found = plan(small(tmp_path, "optimizer.name=muon"), devices=2)
    assert {one.layout.strategy for one in found.choice.candidates} <= {"ddp", "fsdp2"}
    with pytest.raises(UserError, match=r"optimizer\.name = adamw_8bit"):
        plan(small(tmp_path, "optimizer.name=adamw_8bit", "distributed.strategy=fsdp2"))


def base(folder):
    """A model directory without weights, and a config that trains adapters on it."""
    (folder / "base").mkdir()
    fields = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 5000,
              "num_attention_heads": 4, "intermediate_size": 160}  # fmt: skip
    (folder / "base" / "config.json").write_text(json.dumps(fields))
    return f"model={{from: {folder / 'base'}, tokenizer: sample}}"


def test_a_plan_of_adapters_counts_what_is_trained_and_saved(tmp_path):
    asked = base(tmp_path)
    whole = plan(small(tmp_path, asked))
    found = plan(small(tmp_path, asked, "adapter.kind=lora", "adapter.r=2"))
    trained = 2 * 3 * (4 * (64 + 64) + 3 * (64 + 160))
    shown = found.to_json()
    assert shown["trainable_parameters"] == trained
    assert shown["parameters"] == whole.to_json()["parameters"] + trained
    assert shown["checkpoint_bytes"] == 12 * trained
    assert found.chosen.memory.parts["optimizer"] == 8 * trained
    assert found.chosen.memory.total_bytes < whole.chosen.memory.total_bytes


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen3", "num_attention_heads: 2"),  # their default is 32 heads of keys
        ("qwen2", "num_attention_heads: 2"),
        ("llama", "num_attention_heads: 4, num_key_value_heads: 3"),
    ],
)
def test_keys_that_queries_cannot_share_are_refused_by_name(tmp_path, caplog, kind, fields):
    text = SMALL.replace("llama", kind).replace("num_attention_heads: 4", fields)
    with pytest.raises(UserError) as error:
        plan(loaded(tmp_path, text=text), devices=1)
    (problem,) = error.value.problems
    assert problem.key == "model.config.num_key_value_heads"
    heads = fields.partition(": ")[2][0]
    assert f"a divisor of num_attention_heads, {heads}" in problem.expected
    assert problem.remedy == f"model.config.num_key_value_heads={heads}"
    assert caplog.records == []


def test_qlora_is_planned_for_a_gpu_alone_and_whole(tmp_path):
    asked = (base(tmp_path), "adapter.kind=qlora")
    with pytest.raises(UserError) as refused:
        plan(small(tmp_path, *asked))
    assert keys(refused) == {"adapter.kind"}
    found = plan(small(tmp_path, *asked), devices=2, device_memory_gb=80)
    assert [one.layout.strategy for one in found.choice.candidates] == ["ddp"]
    lora = plan(small(tmp_path, asked[0], "adapter.kind=lora", "distributed.strategy=ddp"),
                devices=2, device_memory_gb=80)  # fmt: skip
    sizes = [one.chosen.memory.parts["parameters"] for one in (lora, found)]
    linear = 3 * (4 * 64 * 64 + 3 * 64 * 160)
    assert sizes[0] - sizes[1] == pytest.approx(linear * (2 - 0.516), rel=0.01)


def test_a_plan_states_the_bytes_that_a_run_writes(tmp_path):
    config = small(tmp_path, "checkpoint.every_steps=10", "checkpoint.keep_every=20")
    found = plan(config)
    parameters = found.shape.count
    assert found.checkpoint_bytes == 12 * parameters  # weights and two moments in fp32
    # The three newest, the best, every twentieth of a hundred, one being written, one deleted.
    assert found.disk_bytes == (3 + 1 + 5 + 2) * found.checkpoint_bytes


def test_the_learning_rate_of_other_batches_is_by_both_rules(tmp_path):
    rates = {one.global_batch_size: one for one in plan(small(tmp_path)).rates}
    assert rates[256].linear == pytest.approx(4 * 3e-4)
    assert rates[256].root == pytest.approx(2 * 3e-4)
    assert rates[32].linear == pytest.approx(1.5e-4)


def test_a_directory_without_weights_is_enough(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    fields = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 5000,
              "num_attention_heads": 4, "intermediate_size": 160}  # fmt: skip
    (model / "config.json").write_text(json.dumps(fields))
    text = SMALL[SMALL.index("data:") :] + f"model: {{from: {model}, tokenizer: sample}}\n"
    found = plan(loaded(tmp_path, text=text))
    assert found.shape.vocabulary == 5000
    assert found.shape.blocks == 2


@pytest.mark.parametrize(
    ("overrides", "asked", "key"),
    [
        ([], {"devices": 3}, "training.global_batch_size"),
        (["training.micro_batch_size=64"], {"devices": 2}, "training.global_batch_size"),
        (["distributed.strategy=hsdp"], {"devices": 8}, "distributed.strategy"),
        (["distributed.strategy=hsdp"], {"nodes": 2}, "distributed.strategy"),
        ([], {"devices": 0}, "--devices"),
        ([], {"nodes": -1}, "--nodes"),
        ([], {"device_memory_gb": 0.0}, "--device-memory-gb"),
        ([], {"host_memory_gb": float("inf")}, "--host-memory-gb"),
        ([], {"device_memory_gb": float("nan")}, "--device-memory-gb"),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path, overrides, asked, key):
    with pytest.raises(UserError) as error:
        plan(small(tmp_path, *overrides), **asked)
    assert key in keys(error)


def test_all_wrong_options_are_named_at_once(tmp_path):
    with pytest.raises(UserError) as error:
        plan(small(tmp_path), devices=0, nodes=0, device_memory_gb=-1)
    assert keys(error) == {"--devices", "--nodes", "--device-memory-gb"}


def test_the_file_of_a_plan_is_written_and_read_by_the_launcher(tmp_path):
    from llmtrain.tools.launch.file import read_launch_file

    config = large(tmp_path)
    path = tmp_path / "new" / "accelerate.yaml"
    assert not launch_file(plan(config, devices=8, device_memory_gb=80), path)
    found = read_launch_file(path, None)
    assert (found.processes, found.values["mixed_precision"]) == (8, "bf16")
    assert found.values["distributed_type"] == "FSDP"
    assert launch_file(plan(config, devices=8, device_memory_gb=141), path)  # said: in place of it
    with pytest.raises(UserError):
        launch_file(plan(small(tmp_path)), tmp_path)


def test_where_a_forward_cannot_be_counted_the_rest_is_planned(tmp_path, monkeypatch):
    counted = plan(small(tmp_path), devices=2).to_json()["strategies"][0]["parts"]

    def refuse(*_):
        raise CannotCountError("its experts run in a loop")

    monkeypatch.setattr(planning, "count_saved", refuse)
    found = plan(small(tmp_path), devices=2)
    shown = found.to_json()
    assert shown["reason"] == "memory was not planned: its experts run in a loop"
    assert (shown["chosen"], shown["fits"]) == ("ddp", None)
    first = shown["strategies"][0]
    for name in ("parameters", "gradients", "optimizer", "head"):
        assert first["parts"][name] > 0
    for name in ("parameters", "gradients", "optimizer"):
        assert first["parts"][name] == counted[name]
    assert (first["parts"]["activations"], first["total_bytes"], first["fits"]) == (None,) * 3
    little = plan(small(tmp_path, "distributed.device_memory_gb=0.0001"))
    assert little.to_json()["strategies"][0]["fits"] is False
    assert plan(small(tmp_path), devices=2, device_memory_gb=80).speeds == ()


# Accelerate files of a plan, beside those in accelerate_configs/.
FILES = Path(__file__).parents[3] / "accelerate_configs"
CPU = Hardware(2**33, None, 2, 1, cpu=True)


@pytest.mark.parametrize(
    ("name", "strategy", "hardware", "precision"),
    [
        ("cpu", "ddp", CPU, "fp32"),
        ("single", "ddp", gpus(1, 80), "bf16"),
        ("ddp", "ddp", gpus(8, 80), "bf16"),
        ("ddp_multinode", "ddp", gpus(8, 80, nodes=2), "bf16"),
        ("fsdp2", "fsdp2", gpus(8, 80), "bf16"),
        ("fsdp2_offload", "fsdp2_offload", gpus(8, 80), "bf16"),
        ("hsdp_multinode", "hsdp", gpus(8, 80, nodes=2), "bf16"),
        ("zero2", "zero2", gpus(8, 80), "bf16"),
        ("zero3", "zero3", gpus(8, 80), "bf16"),
        ("zero3_offload", "zero3_offload", gpus(8, 80), "bf16"),
        ("zero3_multinode", "zero3", gpus(8, 80, nodes=2), "bf16"),
        ("tp", "ddp", gpus(8, 80, cut=ModelCut(tensor=8)), "bf16"),
        ("fsdp2_tp", "fsdp2", gpus(8, 80, cut=ModelCut(tensor=2)), "bf16"),
    ],
)
def test_the_values_are_those_of_the_file_for_the_same_devices(name, strategy, hardware, precision):
    shipped = yaml.safe_load((FILES / f"{name}.yaml").read_text(encoding="utf-8"))
    assert launch_values(strategy, hardware, precision) == shipped


def test_every_shipped_file_is_compared():
    marks = test_the_values_are_those_of_the_file_for_the_same_devices.pytestmark
    compared = {case[0] for case in marks[0].args[1]}
    assert compared == {path.stem for path in FILES.glob("*.yaml")}


@pytest.mark.parametrize(
    ("strategy", "cut", "sides"),
    [
        ("fsdp2", ModelCut(pipeline=2), {}),
        ("fsdp2", ModelCut(2, 2), {"dp_shard": 4, "tp": 2}),
        ("fsdp2", ModelCut(sequence=2), {"dp_shard": 8, "sp": 2}),
        ("fsdp2", ModelCut(sequence=16), {"sp": 16}),
        ("ddp", ModelCut(2, 2, 2), {"tp": 2, "sp": 2}),
        ("hsdp", ModelCut(2, 2), {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
    ],
)
def test_a_written_file_names_the_sides_that_a_rank_reads(strategy, cut, sides):
    values = launch_values(strategy, gpus(8, 80, nodes=2, cut=cut), "bf16")
    named = {f"parallelism_config_{side}_size": size for side, size in sides.items()}
    assert values.get("parallelism_config", {}) == named
    env = variables_of(values, 16)
    assert list(unsupported_problems(env, 16, cut)) == []
    assert named_strategy(env) in (strategy, None)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero1", "fsdp2_offload"])
@pytest.mark.parametrize("devices", [1, 4])
def test_a_written_file_is_one_that_the_launcher_takes(tmp_path, strategy, devices):
    path = tmp_path / "accelerate.yaml"
    assert not write_launch_file(path, launch_values(strategy, gpus(devices, 80), "bf16"))
    assert read_launch_file(path, None).processes == devices
    assert write_launch_file(path, launch_values("ddp", gpus(2, 80), "fp32"))
    found = read_launch_file(path, None)
    assert (found.processes, found.values["mixed_precision"]) == (2, "no")


def test_a_file_for_several_nodes_says_how_to_start_it(tmp_path):
    path = tmp_path / "accelerate.yaml"
    write_launch_file(path, launch_values("ddp", gpus(8, 80, nodes=2), "bf16"))
    assert f"accelerate launch --config_file {path} --rdzv_backend c10d" in path.read_text()


def row(name, **changes):
    parts = {"parameters": 3 * GIB, "gradients": 2 * GIB, "optimizer": 6 * GIB, "reserve": 0}
    return {
        "name": name, "chosen": False, "activation_checkpointing": "none", "micro_batch_size": 8,
        "accumulation": 4, "parts": parts, "total_bytes": 11 * GIB, "host_bytes": GIB,
        "fits": True, "missing_bytes": 0, "remedy": "", "tokens_per_second": 1234.6,
    } | changes  # fmt: skip


class Cells(HTMLParser):
    """The text of each cell, row by row, and every tag."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.tags = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows:
            self.rows[-1][-1] += data


def test_each_strategy_is_a_row():
    rows = [
        row("ddp", fits=False, remedy="adapter.kind=lora"),
        row("fsdp2", chosen=True),
        row("zero2", total_bytes=None, fits=None, tokens_per_second=None),
    ]
    head, ddp, fsdp2, zero2 = Cells(table({"reason": "it fits", "strategies": rows})).rows
    assert len(head) == len(ddp) == len(fsdp2) == len(zero2)
    assert ddp[0] == "ddp"
    assert ddp[-1] == "no; try adapter.kind=lora"
    assert fsdp2[0] == "fsdp2, chosen"
    assert fsdp2[1].startswith("11 GiB (optimizer 6 GiB, parameters 3 GiB, gradients 2 GiB")
    assert fsdp2[2:] == ["none", "8", "4", "1,235", "yes"]
    assert zero2[1].startswith("? (")
    assert zero2[-2:] == ["?", "?"]


def test_text_stays_text():
    hostile = "<script>alert(1)</script><img src=x onerror=alert(2)>&"
    found = Cells(table({"reason": hostile, "strategies": [row(hostile, remedy=hostile)]}))
    assert not {"script", "img"} & set(found.tags)
    assert found.rows[1][0] == hostile


SEVENTY = """\
model:
  config: {model_type: llama, hidden_size: 8192, intermediate_size: 28672, num_hidden_layers: 80,
           num_attention_heads: 64, num_key_value_heads: 8, vocab_size: 128256,
           max_position_embeddings: 8192}
  tokenizer: sample
data: {sources: [{path: sample}], seq_len: 8192}
training: {steps: 100, global_batch_size: 64, precision: bf16}
distributed: {tensor_parallel: 8, pipeline_parallel: 4}
"""


def test_llama_70b_is_planned_over_eight_devices_and_four_stages(tmp_path):
    config = loaded(tmp_path, text=SEVENTY)
    found = plan(config, devices=8, nodes=4, device_memory_gb=80)
    shown = found.to_json()
    sizes = [shown[f"{kind}_parallel"] for kind in ("tensor", "pipeline", "sequence")]
    assert sizes == [8, 4, 1]
    (row,) = shown["strategies"]  # nothing is left to shard
    assert (row["name"], row["fits"], row["accumulation"]) == ("ddp", True, 64)
    # The first stage: embedding and 20 blocks, an eighth of each matrix, and whole norms.
    block = 2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 8192 * 28672
    first = (128_256 * 8192 + 20 * block) // 8 + 20 * 2 * 8192
    assert row["parts"]["gradients"] == 4 * first
    assert row["parts"]["optimizer"] == 8 * first
    assert row["parts"]["parameters"] - 4 * first < 10_000  # the angles of positions
    assert row["total_bytes"] / GIB == pytest.approx(76, abs=1)
    assert row["tokens_per_second"] == pytest.approx(15_700, rel=0.02)
    lines = " ".join(" ".join(plan_lines(found)).split())
    assert "parallel 8, pipeline parallel 4: one model on 32 devices; computed, not" in lines


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("distributed.strategy=zero3", "distributed.strategy", "DeepSpeed shards whole models"),
        ("distributed.strategy=fsdp2", "distributed.strategy", "holds another part already"),
        ("distributed.strategy=fsdp2_offload", "distributed.strategy", "parts on the host cannot"),
        ("distributed.pipeline_parallel=3", "distributed.tensor_parallel", "a divisor of"),
    ],
)
def test_a_cut_that_is_no_launch_is_no_plan_either(tmp_path, override, key, words):
    with pytest.raises(UserError, match=words) as refused:
        plan(loaded(tmp_path, override, text=SEVENTY), devices=8, nodes=4, device_memory_gb=80)
    assert keys(refused) == {key}


def test_sums_across_nodes_are_warned_of_with_their_cost(tmp_path):
    across = [*("model.config.num_key_value_heads=64", "distributed.tensor_parallel=16"),
              "distributed.pipeline_parallel=2"]  # fmt: skip
    found = plan(loaded(tmp_path, *across, text=SEVENTY), devices=8, nodes=4, device_memory_gb=80)
    lines = " ".join(" ".join(plan_lines(found)).split())
    assert "distributed.tensor_parallel = 16 crosses nodes of 8: its sums take" in lines
    assert "distributed.tensor_parallel=8, with distributed.pipeline_parallel" in lines


def test_the_remedy_of_what_does_not_fit_may_be_a_cut(tmp_path):
    fixed = ("training.micro_batch_size=1", "model.activation_checkpointing=full")
    overrides = ("distributed.strategy=ddp", "data.seq_len=4096", *fixed)
    (row,) = plan(large(tmp_path, *overrides), devices=8, device_memory_gb=48).to_json()[
        "strategies"
    ]
    assert not row["fits"]
    assert row["remedy"].startswith(("distributed.tensor_par", "distributed.pipeline_par"))
    cut = large(tmp_path, *overrides, row["remedy"])
    assert plan(cut, devices=8, device_memory_gb=48).chosen is not None


def test_a_loss_of_pairs_has_the_rows_of_chat_and_a_pass_before_it(tmp_path):
    given = {"devices": 2, "device_memory_gb": 24}
    chat, pairs, judged, scored = (
        plan(small(tmp_path, *(f"preference.loss={loss}" for loss in one)), **given)
        for one in ((), ("dpo",), ("kto",), ("orpo",))
    )
    parts = [one.memory.parts for one in chat.choice.candidates]
    for other in (pairs, judged, scored):
        assert [one.memory.parts for one in other.choice.candidates] == parts
    assert (chat.reference, scored.reference) == (None, None)
    # By hand: the parameters in products, of which the head has 2,048 × 64; attention of 3 blocks.
    head, blocks = 2048 * 64, 3 * (4 * 64 * 64 + 3 * 64 * 160)
    attention = 3 * 64 * 128
    forward = 2 * (head + blocks) + 4 * attention
    assert pairs.reference == pytest.approx(forward / (3 * forward + 2 * head), rel=0.01)
    assert judged.reference == pytest.approx(forward / (4 * forward + 2 * head), rel=0.01)
    lines = " ".join(" ".join(plan_lines(pairs)).split())
    assert "one forward of each block of an epoch before step 1" in lines
    assert "40 B a pair in each process" in lines
    assert "and one more in each step" in " ".join(" ".join(plan_lines(judged)).split())
    assert not [line for line in plan_lines(chat) if line.startswith("reference")]
    assert pairs.to_json()["reference_share"] == pairs.reference


def test_the_head_of_pairs_is_computed_again_only_where_it_is_trained(tmp_path):
    given = {"devices": 2, "device_memory_gb": 24}
    rates = {
        (frozen, loss): plan(
            small(tmp_path, f"preference.loss={loss}", f"model.freeze=[{frozen}]"), **given
        ).chosen.tokens_per_second
        for frozen in ("", '"*lm_head*"')
        for loss in ("none", "orpo")
    }
    assert rates["", "orpo"] < rates["", "none"]
    assert rates['"*lm_head*"', "orpo"] == rates['"*lm_head*"', "none"]
