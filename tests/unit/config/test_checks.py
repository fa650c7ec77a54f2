from typing import get_args

import pytest
from helpers.config import loaded, problems

from llmtrain.config.binding import dump
from llmtrain.config.checks import check, check_batch
from llmtrain.config.schema import Config, PreferenceConfig
from llmtrain.errors import UserError


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("{from: gpt2}", set()),
        ("{from: gpt2, tokenizer: sample, revision: main}", set()),
        ("{config: {model_type: llama}, tokenizer: {train: 300}}", set()),
        ("{tokenizer: sample}", {"model"}),
        ("{}", {"model", "model.tokenizer"}),
        ("{from: gpt2, config: {model_type: llama}}", {"model.from"}),
        ("{config: {model_type: llama}}", {"model.tokenizer"}),
        ("{config: {model_type: 3}, tokenizer: sample}", {"model.config.model_type"}),
        ("{config: {model_type: ' '}, tokenizer: sample}", {"model.config.model_type"}),
        ("{config: {model_type: llama}, tokenizer: sample, revision: x}", {"model.revision"}),
        ("{from: gpt2, pad_vocab_to: 64}", set()),
        (
            "{config: {model_type: llama, vocab_size: 64}, tokenizer: sample, pad_vocab_to: 64}",
            {"model.pad_vocab_to"},
        ),
        (
            "{config: {model_type: llama, a: [{b: .nan}]}, tokenizer: sample}",
            {"model.config.a.0.b"},
        ),
    ],
)
def test_model_and_tokenizer_come_from_one_place(tmp_path, text, keys):
    assert set(problems(tmp_path, f"model={text}")) == keys


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions"])
def test_blocks_longer_than_the_model_are_refused(tmp_path, name):
    assert problems(tmp_path, f"model.config.{name}=128", "data.seq_len=128") == {}
    found = problems(tmp_path, f"model.config.{name}=128", "data.seq_len=129")
    assert f"{name} 128" in found["data.seq_len"]


@pytest.mark.parametrize(
    ("total", "micro", "nearest"),
    [(10, 4, "8 or 12"), (3, 4, "4"), (8, 4, None), (8, "auto", None)],
)
def test_a_batch_is_whole_micro_batches(tmp_path, total, micro, nearest):
    found = problems(
        tmp_path, f"training.global_batch_size={total}", f"training.micro_batch_size={micro}"
    )
    assert (nearest is None) == (found == {})
    assert nearest is None or nearest in found["training.global_batch_size"]


GROWING = "training.global_batch_size=[{from_step: %s, size: %s}, {from_step: %s, size: %s}]"


@pytest.mark.parametrize(
    ("asked", "key", "said"),
    [
        ((1, 8, 4, 16), None, ""),
        ((2, 8, 4, 16), "0.from_step", "1: the first size"),
        ((1, 8, 1, 16), "1.from_step", "a step behind 1"),
        ((1, 8, 4, 18), "1.size", "16 or 20"),
    ],
)
def test_a_batch_that_grows_does_so_in_order_and_by_whole_micro_batches(tmp_path, asked, key, said):
    found = problems(tmp_path, GROWING % asked, "training.micro_batch_size=4")
    assert list(found) == ([f"training.global_batch_size.{key}"] if key else [])
    assert key is None or said in found[f"training.global_batch_size.{key}"]


def test_each_size_of_a_batch_is_split_over_the_processes(tmp_path):
    training = loaded(tmp_path, GROWING % (1, 6, 3, 8), "training.micro_batch_size=2").training
    (found,) = check_batch(training, 3)
    assert (found.key, found.value) == ("training.global_batch_size.1.size", 8)
    assert "6 or 12" in found.remedy


@pytest.mark.parametrize("asked", ["[]", "[{from_step: 1}]", "[{from_step: 0, size: 4}]", "[4]"])
def test_a_batch_that_is_no_size_is_refused(tmp_path, asked):
    (said,) = problems(tmp_path, f"training.global_batch_size={asked}").values()
    assert "from_step" in said


@pytest.mark.parametrize(
    ("total", "micro", "world", "advice"),
    [
        (250, 4, 8, "224 or 256"),
        (30, 8, 2, "16 or 32"),
        (24, 8, 2, "training.micro_batch_size=6"),
        (24, "auto", 3, None),
        (24, 4, 3, None),
        (10, "auto", 3, "9 or 12"),
        (16, 4, 1, None),
        (2, "auto", 3, "3"),
    ],
)
def test_a_batch_is_split_over_processes_and_micro_batches(tmp_path, total, micro, world, advice):
    config = loaded(tmp_path, f"training.global_batch_size={total}")
    training = config.training.model_copy(update={"micro_batch_size": micro})
    found = [*check_batch(training, world)]
    assert (advice is None) == (found == [])
    assert advice is None or advice in str(found[0])


def test_the_advised_micro_batch_splits_the_batch(tmp_path):
    for total in range(1, 40):
        for micro in range(1, 12):
            for world in (1, 2, 3, 4):
                config = loaded_batch(total, micro)
                for problem in check_batch(config.training, world):
                    head, _, size = problem.remedy.partition(", or training.micro_batch_size=")
                    for number in head.split(" or "):
                        assert splits(int(number), micro, world)
                    if size:
                        assert splits(total, int(size), world)


def splits(total, micro, world):
    return not any(check_batch(loaded_batch(total, micro).training, world))


def loaded_batch(total, micro):
    return Config.model_validate(
        {
            "data": {"sources": [{"path": "sample"}]},
            "training": {"steps": 1, "global_batch_size": total, "micro_batch_size": micro},
        }
    )


@pytest.mark.parametrize(
    ("stages", "schedule", "each", "key"),
    [
        (2, "interleaved", 2, None),
        (2, "1f1b", 1, None),
        (2, "interleaved", 1, "distributed.pipeline_schedule"),
        (2, "1f1b", 2, "distributed.pipeline_stages_per_rank"),
        (2, "gpipe", 2, "distributed.pipeline_stages_per_rank"),
        (1, "interleaved", 2, "distributed.pipeline_stages_per_rank"),
    ],
)
def test_several_stages_of_a_process_are_interleaved(tmp_path, stages, schedule, each, key):
    found = problems(
        tmp_path,
        f"distributed.pipeline_parallel={stages}",
        f"distributed.pipeline_schedule={schedule}",
        f"distributed.pipeline_stages_per_rank={each}",
    )
    assert set(found) == ({key} if key else set())


@pytest.mark.parametrize(("steps", "fine"), [(0.03, True), (1, True), (100, True), (12.5, False)])
def test_warmup_is_whole_steps_or_a_share(tmp_path, steps, fine):
    assert (problems(tmp_path, f"optimizer.warmup_steps={steps}") == {}) == fine


def test_a_warmup_longer_than_the_run_is_allowed(tmp_path):
    assert problems(tmp_path, "training.steps=3") == {}


@pytest.mark.parametrize(("every", "keep", "fine"), [(5, 0, True), (5, 10, True), (5, 12, False)])
def test_checkpoints_kept_for_ever_are_checkpoints(tmp_path, every, keep, fine):
    overrides = (f"checkpoint.every_steps={every}", f"checkpoint.keep_every={keep}")
    found = problems(tmp_path, *overrides)
    assert (found == {}) == fine
    if not fine:
        said = found["checkpoint.keep_every"]
        assert "checkpoint.keep_every = 12" in said
        assert "a multiple of checkpoint.every_steps 5, or 0" in said
        assert "10 or 15" in said


@pytest.mark.parametrize(
    ("key", "least", "value"),
    [
        *(("keep_last", 2, value) for value in (1, 0, -1)),
        *(("every_steps", 1, value) for value in (0, -5)),
    ],
)
def test_a_run_keeps_at_least_two_checkpoints_and_a_period_is_positive(tmp_path, key, least, value):
    said = problems(tmp_path, f"checkpoint.{key}={value}")[f"checkpoint.{key}"]
    assert f"checkpoint.{key} = {value}\n    expected: a whole number ≥ {least}" in said


def test_the_best_of_what_is_never_evaluated_is_refused(tmp_path):
    said = problems(tmp_path, "data.heldout=0", "checkpoint.keep_best=2")["checkpoint.keep_best"]
    assert "checkpoint.keep_best = 2" in said
    assert "0 without an evaluation: data.heldout is 0, evaluation.sources is empty" in said
    assert "checkpoint.keep_best=0, or data.heldout=0.005" in said


def test_the_best_is_kept_where_something_is_evaluated(tmp_path):
    own = "evaluation.sources=[{path: sample}]"
    config = loaded(tmp_path, "data.heldout=0", "checkpoint.keep_best=2", own)
    assert config.checkpoint.keep_best == 2


def test_without_an_evaluation_the_default_is_no_best_and_the_written_config_loads(tmp_path):
    config = loaded(tmp_path, "data.heldout=0")
    assert config.checkpoint.keep_best == 0
    assert loaded(tmp_path, text=dump(config)) == config
    assert loaded(tmp_path).checkpoint.keep_best == 1


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("checkpoint.stop_after=4 hours", "days, hours, minutes and seconds in this order"),
        ("checkpoint.stop_after=3m2h", "as 3h50m, 90m or 45s"),
        ("checkpoint.stop_after=14400", 'put it in quotes: "14400"'),
        ("checkpoint.shard_gb=4GB", "a number > 0"),
        ("checkpoint.shard_gb=0", "a number > 0"),
    ],
)
def test_what_does_not_parse_is_answered_with_the_grammar(tmp_path, override, says):
    key, _, value = override.partition("=")
    said = problems(tmp_path, override)
    assert list(said) == [key]
    assert value in said[key]
    assert says in said[key]


def test_a_model_directory_is_no_checkpoint_to_resume_from(tmp_path):
    (tmp_path / "model").mkdir()
    for value in (str(tmp_path / "model"), "runs/b/checkpoints/step-00000400"):
        said = problems(tmp_path, f"checkpoint.resume={value}")["checkpoint.resume"]
        assert f"checkpoint.resume = {value}" in said
        assert "auto, never, or the name of a checkpoint of this run" in said
        assert f"did you mean model.from={value}, which takes weights alone?" in said


def test_a_config_made_in_python_is_checked_alike():
    config = Config.model_validate(
        {"data": {"sources": [{"path": "sample"}]}, "training": {"steps": 1}}
    )
    assert {problem.key for problem in check(config)} == {"model", "model.tokenizer"}


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size", "n_layer"])
@pytest.mark.parametrize("value", ["-3", "0", "abc", "true", "1.5"])
def test_sizes_of_a_model_are_whole_numbers(tmp_path, name, value):
    found = problems(tmp_path, f"model.config.{name}={value}")
    assert list(found) == [f"model.config.{name}"]
    assert "a whole number ≥ 1" in found[f"model.config.{name}"]


def test_patience_without_an_evaluation_is_refused(tmp_path):
    said = problems(tmp_path, "data.heldout=0", "evaluation.patience=2")["evaluation.patience"]
    assert "null without an evaluation: data.heldout is 0, evaluation.sources is empty" in said
    assert problems(tmp_path, "evaluation.patience=0").keys() == {"evaluation.patience"}
    assert not problems(tmp_path, "evaluation.patience=2")


@pytest.mark.parametrize(
    ("optimizer", "strategy", "fine"),
    [
        ("adamw", "zero3_offload", True),
        ("muon", "auto", True),
        ("muon", "hsdp", True),
        ("muon", "zero2", False),
        ("muon", "fsdp2_offload", False),
        ("adamw_8bit", "ddp", True),
        ("adamw_8bit", "fsdp2", False),
        ("adamw_8bit", "zero1", False),
    ],
)
def test_an_optimizer_is_refused_under_a_strategy_that_cannot_run_it(
    tmp_path, optimizer, strategy, fine
):
    asked = (f"optimizer.name={optimizer}", f"distributed.strategy={strategy}")
    found = problems(tmp_path, *asked)
    assert found.keys() == (set() if fine else {"optimizer.name"})
    if not fine:
        said = found["optimizer.name"]
        assert f"optimizer.name = {optimizer}" in said
        assert f"adamw under {strategy}; {optimizer} works only under ddp" in said
        assert "optimizer.name=adamw" in said


def test_a_group_names_its_parameters(tmp_path):
    assert not problems(tmp_path, "optimizer.groups=[{match: '*norm*', weight_decay: 0.1}]")
    found = problems(tmp_path, "optimizer.groups=[{learning_rate: 0}, {match: ' ', decay: 1}]")
    assert found.keys() == {
        "optimizer.groups.0.match",
        "optimizer.groups.0.learning_rate",
        "optimizer.groups.1.match",
        "optimizer.groups.1.decay",
    }


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["model={from: gpt2}"], set()),
        (["model={from: gpt2}", "distributed.strategy=zero3"], set()),
        ([], {"adapter.kind"}),
        (["model={from: gpt2, freeze: ['*.wte.*']}"], {"model.freeze"}),
        (["adapter.kind=qlora", "model={from: gpt2}"], set()),
        (
            ["adapter.kind=qlora", "model={from: gpt2}", "distributed.strategy=fsdp2"],
            {"distributed.strategy"},
        ),
        (["model={from: gpt2}", "adapter.targets=q_proj", "adapter.train_tokens=[a]"], set()),
        (["model={from: gpt2}", "adapter.targets=[q_proj, '*.mlp.*']"], set()),
        (["model={from: gpt2}", "adapter.targets=[]", "adapter.r=0"], {"adapter.r"}),
        (["model={from: gpt2}", "adapter={kind: lora, targets: []}"], {"adapter.targets"}),
        (["model={from: gpt2}", "adapter.dropout=1"], {"adapter.dropout"}),
        (["model={from: gpt2}", "adapter.lora_alpha=3"], {"adapter.lora_alpha"}),
    ],
)
def test_adapters_have_a_base_that_is_frozen_as_a_whole(tmp_path, overrides, keys):
    assert set(problems(tmp_path, "adapter.kind=lora", *overrides)) == keys


def test_qlora_that_would_be_split_is_refused_with_what_to_do(tmp_path):
    asked = ("adapter.kind=qlora", "model={from: gpt2}", "distributed.strategy=zero2")
    said = problems(tmp_path, *asked)["distributed.strategy"]
    assert "distributed.strategy = zero2" in said
    assert "not split" in said
    assert "adapter.kind=lora" in said


@pytest.mark.parametrize(
    ("overrides", "fine"),
    [
        (["training.compile=model", "data.document_mask=true"], False),
        (["training.compile=model", "data.document_mask=false"], True),
        (["training.compile=blocks", "data.document_mask=true"], True),
    ],
)
def test_bad_input_a_whole_model_is_not_compiled_with_a_document_mask(tmp_path, overrides, fine):
    found = problems(tmp_path, *overrides)
    assert [*found] == ([] if fine else ["training.compile"])
    assert fine or "training.compile=blocks" in found["training.compile"]


@pytest.mark.parametrize("given", ["[5, 3]", "[1, 11]", "[0, 2]", "[1]", "7"])
def test_steps_to_profile_are_a_range_within_the_run(tmp_path, given):
    assert "logging.profile_steps" in problems(tmp_path, f"logging.profile_steps={given}")
    assert loaded(tmp_path, "logging.profile_steps=[3, 5]").logging.profile_steps == (3, 5)


# Key of `preference`, another value than its default, and the losses that use it.
USERS = {
    "beta": ("0.2", "dpo dpo_norm robust ipo hinge apo_zero orpo simpo cpo kto"),
    "label_smoothing": ("0.1", "dpo dpo_norm robust simpo cpo"),
    "gamma": ("0.5", "simpo"),
    "sft_weight": ("0.5", "dpo dpo_norm robust ipo hinge apo_zero orpo simpo cpo"),
    "desirable_weight": ("2.0", "kto"),
    "undesirable_weight": ("2.0", "kto"),
    "reference": ("runs/other", "dpo dpo_norm robust ipo hinge apo_zero kto"),
}
LOSSES = get_args(PreferenceConfig.model_fields["loss"].annotation)


@pytest.mark.parametrize("key", USERS)
def test_a_key_that_the_loss_of_pairs_does_not_use_is_refused(tmp_path, key):
    value, users = USERS[key]
    for loss in LOSSES:
        found = problems(tmp_path, f"preference.loss={loss}", f"preference.{key}={value}")
        if loss in users.split():
            assert found == {}, loss
        else:
            assert set(found) == {f"preference.{key}"}, loss
            assert f"with preference.loss {loss}, which does not use it" in found.popitem()[1]


def test_keys_of_preference_with_their_defaults_are_in_the_config_of_every_run(tmp_path):
    config = loaded(tmp_path, "preference.loss=reward")
    again = loaded(tmp_path, text=dump(config))
    assert again == config


@pytest.mark.parametrize("value", ["0", "-0.1", ".nan"])
def test_beta_is_above_zero(tmp_path, value):
    found = problems(tmp_path, "preference.loss=dpo", f"preference.beta={value}")
    assert "expected: a number > 0" in found["preference.beta"]


@pytest.mark.parametrize(
    ("override", "loss", "reason"),
    [
        ("training.z_loss=0.0001", "dpo", "a loss of answers, not of tokens"),
        (
            "chat.too_long=split",
            "dpo",
            "error, drop or truncate with preference.loss dpo: an answer",
        ),
        ("training.loss_kernel=torch", "kto", "auto or chunked with preference.loss kto"),
        ("evaluation.prompts=[a]", "reward", "a model that scores answers writes none"),
    ],
)
def test_what_a_loss_of_pairs_does_not_have_is_refused(tmp_path, override, loss, reason):
    assert problems(tmp_path, override) == {}
    found = problems(tmp_path, override, f"preference.loss={loss}")
    assert set(found) == {override.partition("=")[0]}
    assert reason in found.popitem()[1]


def test_prompts_are_continued_in_a_run_on_pairs(tmp_path):
    assert problems(tmp_path, "evaluation.prompts=[a]", "preference.loss=dpo") == {}


EXACT = ("training.same_bits=true", "training.precision=fp32", "training.micro_batch_size=2")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("training.micro_batch_size=auto", "a whole number"),
        ("training.precision=auto", "fp32"),
        ("training.precision=bf16", "not measured"),
        ("training.compile=blocks", "not measured"),
        ("distributed.strategy=zero2", "ddp or fsdp2"),
        ("distributed.strategy=hsdp", "ddp or fsdp2"),
        ("distributed.strategy=fsdp2_offload", "ddp or fsdp2"),
        ("distributed.fsdp_sync=last", "auto or every"),
        ("distributed.tensor_parallel=2", "cut"),
        ("distributed.pipeline_parallel=2", "cut"),
        ("distributed.sequence_parallel=2", "cut"),
        ("optimizer.name=adamw_8bit", "muon under ddp"),
        ("preference.loss=kto", "mean over all answers"),
    ],
)
def test_what_depends_on_the_number_of_processes_is_refused_with_same_bits(
    tmp_path, override, reason
):
    assert loaded(tmp_path, *EXACT).training.same_bits is True
    with pytest.raises(UserError) as caught:
        loaded(tmp_path, *EXACT, override)
    [problem] = caught.value.problems
    assert problem.key == override.partition("=")[0]
    assert reason in problem.expected
    assert "with training.same_bits" in problem.expected
    loaded(tmp_path, *EXACT, override, "training.same_bits=false")


def test_muon_needs_whole_matrices_for_the_same_bits(tmp_path):
    asked = (*EXACT, "optimizer.name=muon")
    loaded(tmp_path, *asked, "distributed.strategy=ddp")
    with pytest.raises(UserError, match="how tensors are divided"):
        loaded(tmp_path, *asked, "distributed.strategy=fsdp2")
