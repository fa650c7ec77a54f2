import pytest

from llmtrain.config.keys import ITEM, all_keys, foreign, guess, near_section, sections


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("training.lerning_rate", "optimizer.learning_rate"),
        ("learning_rate", "optimizer.learning_rate"),
        ("seed", "run.seed"),
        ("traning.steps", "training.steps"),
        ("data.sources.1.pth", "data.sources.1.path"),
        ("data.text_column", "data.sources.0.text_column"),
        ("per_device_train_batch_size", "training.micro_batch_size"),
        ("per_device_train_batchsize", "training.micro_batch_size"),
        ("gradient_accumulation_steps", "training.global_batch_size"),
        ("training.num_train_epochs", "training.epochs"),
        ("max_steps", "training.steps"),
        ("max_seq_length", "data.seq_len"),
        ("block_size", "data.seq_len"),
        ("output_dir", "run.dir"),
        ("save_steps", "checkpoint.every_steps"),
        ("save_total_limit", "checkpoint.keep_last"),
        ("eval_steps", "evaluation.every_steps"),
        ("logging_steps", "logging.every_steps"),
        ("lr", "optimizer.learning_rate"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("lr_scheduler_type", "optimizer.schedule"),
        ("warmup_ratio", "optimizer.warmup_steps"),
        ("bf16", "training.precision"),
        ("fp16", "training.precision"),
        ("report_to", "logging.trackers"),
        ("optim", "optimizer.name"),
        ("early_stopping_patience", "evaluation.patience"),
        ("model_name_or_path", "model.from"),
        ("dataset_name", "data.sources.0.path"),
        ("data.num_workers", "data.workers"),
        ("model.hidden_size", "model.config.hidden_size"),
        ("Learning-Rate", "optimizer.learning_rate"),
        ("lora_r", "adapter.r"),
        ("target_modules", "adapter.targets"),
        ("adapter.lora_dropout", "adapter.dropout"),
        ("training.dropout", "model.config"),
        ("use_dora", "adapter.kind"),
        ("gradient_checkpointing", "model.activation_checkpointing"),
        ("eval_strategy", "evaluation.every_steps"),  # and not distributed.strategy
        ("training.local_batch_size", "training.micro_batch_size"),
        ("optimizer.eps", ""),  # and not training.steps
        ("tensor_parallel_size", "distributed.tensor_parallel"),
        ("pp_size", "distributed.pipeline_parallel"),
        ("context_parallel_size", "distributed.sequence_parallel"),
        ("training.dpo", "preference.loss"),
        ("training.grpo", ""),
        ("training.stage", ""),
        ("training.early_stopping", "evaluation.patience"),
        ("neftune_noise_alpha", ""),
        ("data.max_samples", "training.epochs"),
        ("finetuning_type", "adapter.kind"),
    ],
)
def test_what_was_meant_is_found(name, meant):
    assert guess(name).key == meant


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("training.dpo", "a name, such as dpo"),
        ("training.grpo", "llmtrain export, then trl"),
        ("stage", "of conversations the answers"),
        ("early_stopping", "without a lower loss end the run"),
        ("training.neftune", "adapter.dropout is what there is"),
        ("max_samples", "no rows are left out"),
    ],
)
def test_a_name_for_what_is_not_offered_says_what_there_is(name, said):
    assert said in guess(name).advice


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("trainig", "training"),
        ("modle", "model"),
        ("dta", "data"),
        ("optim", "optimizer"),
        ("eval", "evaluation"),
        ("checkpoints", "checkpoint"),
        ("distributed.dddp", "distributed.ddp"),
    ],
)
def test_a_misspelt_section_is_a_section(name, section):
    assert guess(name, is_section=True).key == section


@pytest.mark.parametrize("name", ["streaming", "foo", "distributed.fsdp", "lr"])
def test_what_is_like_no_section_is_none(name):
    assert near_section(name) == ""


@pytest.mark.parametrize("name", ["trainig", "training.stream", "run.time", "data.sampling"])
def test_a_name_of_other_trainers_has_to_be_nearly_the_same(name):
    assert not set(guess(name).advice.splitlines()) & {advice for _, advice in foreign().values()}


@pytest.mark.parametrize("name", ["training.foo", "optimizer.foo", "bar.baz"])
def test_where_nothing_is_near_the_keys_beside_it_are_named(name):
    found = guess(name)
    assert found.key == ""
    assert found.advice.startswith("one of ")


def test_only_names_that_many_people_type_are_known():
    assert 55 <= len(foreign()) <= 84


def test_foreign_names_lead_to_keys_that_exist():
    names = {key.name for key in all_keys()} | {""}
    for ours, advice in foreign().values():
        assert ours in names or ours.startswith("model.config.")
        assert advice


def test_no_foreign_name_is_one_of_ours():
    ours = {key.name.rpartition(".")[2] for key in all_keys()} | sections()
    assert ours & foreign().keys() == {"dropout"}  # mostly the model's is meant


def test_the_number_of_a_source_is_kept():
    assert ITEM not in guess("data.sources.3.colum").key
