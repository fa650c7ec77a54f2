"""The rule of the choice, on models and machines that can be reckoned by hand."""

from dataclasses import replace

import pytest
from helpers.on_paper import GIB, LlamaCount, gpus, llama, work

from llmtrain.distributed.plan.memory import Hardware
from llmtrain.distributed.plan.speed import device_by_memory
from llmtrain.distributed.plan.strategy import LADDER, choose_strategy, possible, remedy
from llmtrain.errors import UserError
from llmtrain.types import ModelCut

MODELS = {  # hidden, MLP, layers, heads, kv heads, vocabulary, tied
    "124M": (768, 2048, 12, 12, 12, 50_257, True),
    "1B": (2048, 5632, 22, 32, 4, 32_000, False),
    "8B": (4096, 14336, 32, 32, 8, 128_256, False),
    "70B": (8192, 28672, 80, 64, 8, 128_256, False),
}


def choose(name, hardware, seq_len=1024, allowed=LADDER, global_batch_size=512, **asked):
    h, f, layers, heads, kv, vocabulary, tied = MODELS[name]
    shape = llama(h, f, layers, heads, kv, vocabulary, tied=tied)
    count = LlamaCount(h, f, layers, heads, kv, seq_len)
    return choose_strategy(
        shape, count, work(seq_len, global_batch_size, **asked), hardware, allowed
    )


def machine(devices, gib, nodes=1, host=None):
    return gpus(devices, gib, nodes=nodes, device=device_by_memory(gib), host=host)


def taken(choice):
    layout = choice.chosen.layout
    return layout.strategy, layout.activation_checkpointing


@pytest.mark.parametrize("seq_len", [1024, 8192])
@pytest.mark.parametrize(
    ("name", "devices", "gib"),
    [("124M", 1, 24), ("124M", 8, 24), ("1B", 1, 80), ("1B", 8, 80), ("1B", 2, 141)],
)
def test_what_fits_a_device_is_not_sharded(name, devices, gib, seq_len):
    assert taken(choose(name, machine(devices, gib), seq_len)) == ("ddp", "none")


@pytest.mark.parametrize("seq_len", [1024, 8192])
@pytest.mark.parametrize(("devices", "gib"), [(8, 80), (8, 141), (2, 141)])
def test_8b_is_sharded_where_its_states_do_not_fit(devices, gib, seq_len):
    assert choose("8B", machine(devices, gib), seq_len).chosen.layout.strategy == "fsdp2"


def test_a_model_that_cannot_be_computed_again_is_not_offered_it():
    h, f, layers, heads, kv, vocabulary, tied = MODELS["1B"]
    shape = replace(llama(h, f, layers, heads, kv, vocabulary, tied=tied), recomputes=False)
    known = LlamaCount(h, f, layers, heads, kv, 1024)

    def count(arithmetic, checkpointing, tensor):
        assert checkpointing == "none"
        return known(arithmetic, checkpointing)

    for gib in (80, 1):
        choice = choose_strategy(shape, count, work(1024, 512), machine(1, gib), LADDER)
        assert {one.layout.activation_checkpointing for one in choice.candidates} == {"none"}
        assert not any("checkpointing" in one.remedy for one in choice.candidates)
        assert (choice.chosen is not None) == (gib == 80)


def test_8b_on_one_device_is_offloaded_if_the_host_has_120_gib():
    assert taken(choose("8B", machine(1, 80, host=128))) == ("fsdp2_offload", "full")
    small = choose("8B", machine(1, 80, host=100))
    assert small.chosen is None
    offload = next(one for one in small.candidates if one.layout.strategy == "fsdp2_offload")
    assert offload.missing_bytes / GIB == pytest.approx(19.7, abs=0.1)
    assert offload.remedy == "a host with 120 GiB of memory for each node"


def test_a_host_of_unknown_size_is_no_reason_to_refuse_but_its_need_is_stated():
    chosen = choose("8B", machine(1, 80)).chosen
    assert chosen.layout.strategy == "fsdp2_offload"
    assert chosen.memory.host_bytes / GIB == pytest.approx(119.7, abs=0.1)


def test_70b_takes_all_64_devices_and_recomputes_everything_at_8192():
    choice = choose("70B", machine(8, 80, nodes=8), seq_len=8192)
    assert taken(choice) == ("fsdp2", "full")
    assert [one.layout.strategy for one in choice.candidates if one.fits][:1] == ["fsdp2"]
    missing = {one.layout.strategy: one.missing_bytes / GIB for one in choice.candidates}
    assert missing["ddp"] > 1000
    assert 50 < missing["hsdp"] < 150


def test_hsdp_goes_before_fsdp2_where_a_node_holds_the_shards():
    near = choose("8B", machine(8, 80, nodes=2), seq_len=2048)
    assert near.chosen.layout.strategy == "hsdp"
    assert "simplest within 5 %" in near.reason
    # Over 32 devices FSDP2 has room for twice the micro-batch, and is more than 5 % faster.
    assert choose("8B", machine(8, 80, nodes=4)).chosen.layout.strategy == "fsdp2"


def test_8b_on_two_devices_recomputes_everything_at_4096():
    assert taken(choose("8B", machine(2, 80), seq_len=4096)) == ("fsdp2", "full")


def test_hsdp_and_fsdp2_are_not_offered_where_they_would_be_something_else():
    names = [one.layout.strategy for one in choose("124M", machine(1, 80)).candidates]
    assert names == ["ddp", "fsdp2_offload", "zero3_offload"]
    names = [one.layout.strategy for one in choose("124M", machine(2, 80)).candidates]
    assert names == ["ddp", "fsdp2", "fsdp2_offload", "zero3_offload"]


def test_offloading_waits_until_nothing_else_fits_even_where_it_would_be_faster():
    choice = choose("8B", machine(8, 24))
    speeds = {one.layout.strategy: one.tokens_per_second for one in choice.candidates}
    assert choice.chosen.layout.strategy == "fsdp2"
    assert speeds["fsdp2_offload"] > speeds["fsdp2"]


def test_a_named_strategy_is_the_only_candidate():
    for name in ("zero1", "zero2", "zero3", "fsdp2", "fsdp2_offload"):
        choice = choose("124M", machine(1, 80), allowed=(name,))
        assert [one.layout.strategy for one in choice.candidates] == [name]
        assert choice.chosen.layout.strategy == name


def test_zero_without_offload_is_never_chosen_by_itself():
    every = (*LADDER, "zero1", "zero2", "zero3")
    names = {one.layout.strategy for one in choose("8B", machine(8, 24), allowed=every).candidates}
    assert names.isdisjoint({"zero1", "zero2", "zero3"})


def test_a_micro_batch_that_was_asked_for_is_not_lowered():
    choice = choose("8B", machine(8, 80), seq_len=8192, micro_batch_size=32)
    assert choice.chosen is None
    fsdp2 = next(one for one in choice.candidates if one.layout.strategy == "fsdp2")
    assert fsdp2.layout.micro_batch_size == 32
    assert fsdp2.remedy == "training.micro_batch_size=2"
    assert choose("8B", machine(8, 80), 8192, micro_batch_size=2).chosen is not None


def test_auto_takes_the_largest_divisor_that_fits_and_is_not_too_much_at_once():
    layout = choose("124M", machine(1, 141), seq_len=1024, global_batch_size=96).chosen.layout
    assert (layout.micro_batch_size, layout.accumulation) == (48, 2)  # 96 × 1,024 > 65,536
    tight = choose("124M", machine(1, 24), seq_len=1024, global_batch_size=96).chosen
    assert (tight.layout.micro_batch_size, tight.layout.accumulation) == (16, 6)
    next_divisor = choose("124M", machine(1, 24), global_batch_size=96, micro_batch_size=24)
    assert "none" not in {
        one.layout.activation_checkpointing for one in next_divisor.candidates if one.fits
    }


def test_checkpointing_that_was_asked_for_is_kept():
    assert taken(choose("124M", machine(1, 80), activation_checkpointing="full")) == ("ddp", "full")
    choice = choose(
        "8B", machine(1, 80), activation_checkpointing="none", allowed=("fsdp2_offload",)
    )
    assert taken(choice) == ("fsdp2_offload", "none")


def test_whole_gradients_are_kept_where_there_is_room():
    wide = choose("8B", machine(8, 141), allowed=("fsdp2",)).chosen
    tight = choose("8B", machine(8, 80), allowed=("fsdp2",), micro_batch_size=4).chosen
    assert wide.layout.fsdp_sync == "last"
    assert tight.layout.fsdp_sync == "every"
    asked = choose("8B", machine(8, 141), allowed=("fsdp2",), fsdp_sync="every").chosen
    assert asked.layout.fsdp_sync == "every"
    assert asked.tokens_per_second < wide.tokens_per_second


def test_without_a_known_speed_the_order_of_the_ladder_decides():
    choice = choose("8B", gpus(8, 80))
    assert taken(choice) == ("fsdp2", "none")
    assert choice.chosen.tokens_per_second is None
    cpu = choose("124M", Hardware(8 * GIB, None, 2, 1, "H100", cpu=True), precision="fp32")
    assert taken(cpu)[0] == "ddp"
    assert cpu.chosen.tokens_per_second is None


def test_devices_that_are_small_on_paper_make_a_plain_launch_fall_back():
    """What `distributed.device_memory_gb` rehearses on a CPU."""
    room = choose("124M", Hardware(3 * GIB, None, 2, 1, cpu=True), precision="fp32", seq_len=128)
    assert room.chosen.layout.strategy == "ddp"
    tight = choose(
        "124M", Hardware(19 * GIB // 10, None, 2, 1, cpu=True), precision="fp32", seq_len=128
    )
    assert tight.chosen.layout.strategy == "fsdp2"
    tighter = choose(
        "124M", Hardware(12 * GIB // 10, None, 2, 1, cpu=True), precision="fp32", seq_len=128
    )
    assert tighter.chosen.layout.strategy == "fsdp2_offload"


def test_a_reason_is_one_sentence_with_what_the_others_miss():
    reason = choose("8B", machine(8, 80)).reason
    assert reason.startswith("fsdp2, micro-batch 4, fits; ddp lacks 64.")
    assert reason.count(". ") == 0
    assert "simplest that fits" in choose("124M", gpus(8, 80)).reason


def test_where_nothing_fits_the_nearest_miss_is_named_with_what_would_help():
    choice = choose("70B", machine(2, 24, host=64))
    assert choice.chosen is None
    assert choice.reason.startswith("nothing fits 24 GiB: ")
    assert choice.nearest_miss.missing_bytes == min(one.missing_bytes for one in choice.candidates)
    assert all(one.remedy and one.missing_bytes > 0 for one in choice.candidates)


@pytest.mark.parametrize(
    ("name", "seq_len", "micro", "checkpointing", "expected"),
    [
        ("124M", 1024, 64, "none", "training.micro_batch_size=16"),
        ("1B", 2048, 1, "none", "model.activation_checkpointing=full"),
        ("124M", 32_768, 1, "full", "data.seq_len=16384"),
        ("8B", 1024, 1, "full", "a device with 145 GiB (distributed.device_memory_gb)"),
    ],
)
def test_a_remedy_is_the_key_that_makes_it_fit(name, seq_len, micro, checkpointing, expected):
    asked = {"micro_batch_size": micro, "activation_checkpointing": checkpointing}
    choice = choose(name, machine(1, 24), seq_len, allowed=("ddp",), **asked)
    assert choice.chosen is None
    assert choice.candidates[0].remedy == expected


@pytest.mark.parametrize(
    ("over_gib", "expected"), [(0.001, "training.micro_batch_size=8"), (30, "a device with 54 GiB")]
)
def test_a_run_that_needed_more_than_its_plan_gets_a_remedy_for_what_it_needed(over_gib, expected):
    name, hardware = "124M", machine(1, 24)
    h, f, layers, heads, kv, vocabulary, tied = MODELS[name]
    shape = llama(h, f, layers, heads, kv, vocabulary, tied=tied)
    count = LlamaCount(h, f, layers, heads, kv, 1024)
    asked = {"micro_batch_size": 16}
    chosen = choose(name, hardware, allowed=("ddp",), **asked).chosen
    needed = hardware.device_bytes + over_gib * GIB
    beyond = int(needed) - chosen.memory.total_bytes
    told = remedy(
        shape, count, work(1024, 512, **asked), chosen.layout, hardware, lambda _: False, beyond
    )
    assert told.removesuffix(" (distributed.device_memory_gb)") == expected


def test_more_devices_are_a_remedy_where_tensors_are_sharded_only():
    choice = choose("70B", machine(8, 80), seq_len=1024)
    remedies = {one.layout.strategy: one.remedy for one in choice.candidates}
    assert remedies["fsdp2"] == "32 devices"
    assert remedies["ddp"].startswith("a device with 1")
    assert choose("70B", machine(8, 80, nodes=4), seq_len=1024).chosen.layout.strategy == "fsdp2"


def unnamed(allowed=LADDER, **asked):
    """A model of 8 B that says nothing of its blocks, on devices that it fills."""
    h, f, layers, heads, kv, vocabulary, tied = MODELS["8B"]
    known = llama(h, f, layers, heads, kv, vocabulary, tied=tied)
    shape = replace(known, block_class=None, listed="Block")
    count = LlamaCount(h, f, layers, heads, kv, 1024)
    hardware = machine(8, 80, nodes=2)
    return choose_strategy(shape, count, work(1024, 512, **asked), hardware, allowed)


def test_blocks_that_nobody_names_are_not_sharded_by_fsdp():
    names = [one.layout.strategy for one in unnamed().candidates]
    assert names == ["ddp", "zero3_offload"]
    names = [one.layout.strategy for one in unnamed(wrap_class="Block").candidates]
    assert names == ["ddp", "hsdp", "fsdp2", "fsdp2_offload", "zero3_offload"]


@pytest.mark.parametrize("name", ["fsdp2", "hsdp", "fsdp2_offload"])
def test_fsdp_by_name_for_blocks_that_nobody_names_says_which_class_it_needs(name):
    with pytest.raises(UserError) as refused:
        unnamed((name,))
    (problem,) = refused.value.problems
    assert problem.key == "distributed.wrap_class"
    assert problem.remedy.startswith("distributed.wrap_class=Block")
    assert unnamed((name,), wrap_class="Block").candidates
    assert unnamed(("zero3",)).candidates


def cut_choice(name, hardware, cuts=lambda _cut: True, batch=64, allowed=LADDER, **asked):
    h, f, layers, heads, kv, vocabulary, tied = MODELS[name]
    shape = llama(h, f, layers, heads, kv, vocabulary, tied=tied)
    count = LlamaCount(h, f, layers, heads, kv, 1024)
    return choose_strategy(shape, count, work(1024, batch, **asked), hardware, allowed, cuts)


@pytest.mark.parametrize(
    ("hardware", "expected"),
    [
        (gpus(8, 80, cut=ModelCut(8)), ("ddp",)),
        (gpus(8, 80, cut=ModelCut(2)), ("ddp", "fsdp2")),
        (gpus(8, 80, cut=ModelCut(1, 1, 8)), ("ddp", "fsdp2", "fsdp2_offload")),
        (gpus(8, 80, nodes=2, cut=ModelCut(2)), ("ddp", "hsdp", "fsdp2")),
        (gpus(8, 80, nodes=2, cut=ModelCut(2, 4)), ("ddp", "fsdp2")),
    ],
)
def test_models_that_are_cut_leave_what_has_something_to_shard(hardware, expected):
    shape = llama(64, 160, 4, 8, 8, 512)
    assert possible(shape, work(1024, 64), hardware, LADDER) == expected


def test_micro_batches_fill_a_pipeline():
    hardware = gpus(8, 80, cut=ModelCut(pipeline=4))
    chosen = cut_choice("124M", hardware).chosen.layout
    assert (chosen.micro_batch_size, chosen.accumulation) == (8, 4)
    gpipe = cut_choice("124M", hardware, pipeline_schedule="gpipe").chosen.layout
    assert (gpipe.micro_batch_size, gpipe.accumulation) == (32, 1)


def test_where_nothing_fits_a_cut_that_would_is_named():
    tight = {"micro_batch_size": 1, "activation_checkpointing": "full"}
    small = gpus(8, 40)
    (found,) = cut_choice("8B", small, allowed=("ddp",), **tight).candidates
    key, size = found.remedy.split("=")
    assert key == "distributed.tensor_parallel"
    fits = {}
    for tensor in (2, 4, 8):
        cut = replace(small, cut=ModelCut(tensor))
        fits[tensor] = cut_choice("8B", cut, allowed=("ddp",), **tight).chosen is not None
    assert int(size) == min(tensor for tensor, fit in fits.items() if fit)
    only = cut_choice("8B", small, lambda cut: cut.tensor == 1, allowed=("ddp",), **tight)
    assert only.candidates[0].remedy.startswith("distributed.pipeline_parallel=")
    never = cut_choice("8B", small, lambda _cut: False, allowed=("ddp",), **tight)
    assert "distributed.tensor" not in never.candidates[0].remedy
