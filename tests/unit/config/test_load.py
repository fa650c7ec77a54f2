import itertools
import re
from pathlib import Path

import pytest
from helpers.config import SMALLEST, loaded, problems, written

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.config.yaml12 import parse
from llmtrain.errors import UserError
from llmtrain.training.start.claim import split_rule


def test_a_small_file_is_a_config_with_defaults(tmp_path):
    config = loaded(tmp_path)
    assert config.training.steps == 10
    assert config.training.global_batch_size == 256
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.model.config == {
        "model_type": "llama",
        "hidden_size": 8,
        "num_attention_heads": 2,
    }


def test_the_run_directory_is_named_after_the_file(tmp_path):
    assert loaded(tmp_path).run.dir == "runs/my"
    assert loaded(tmp_path, "run.dir=elsewhere").run.dir == "elsewhere"


def test_overrides_are_read_as_yaml_and_reach_into_lists(tmp_path):
    config = loaded(
        tmp_path,
        "optimizer.learning_rate=3e-4",
        "data.sources.0.weight=0.7",
        "model.config.hidden_size=16",
        "model.tokenizer={train: 300}",
        'evaluation.prompts=["The planet", on]',
        "training.max_grad_norm=null",
        "run.dir=",
    )
    assert config.optimizer.learning_rate == 3e-4
    assert config.data.sources[0].weight == 0.7
    assert config.model.config["hidden_size"] == 16
    assert config.model.tokenizer.train == 300
    assert config.evaluation.prompts == ("The planet", "on")
    assert config.training.max_grad_norm is None
    assert config.run.dir == "runs/my"


def test_the_last_of_two_overrides_counts(tmp_path):
    assert loaded(tmp_path, "training.steps=3", "training.steps=4").training.steps == 4


def test_a_section_that_is_all_comments_has_its_defaults(tmp_path):
    assert (
        loaded(tmp_path, text=SMALLEST + "logging:\n  # every_steps: 3\n").logging.every_steps == 10
    )


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("training.steps", "override training.steps"),
        ("=3", "override =3"),
        ("training..steps=3", "override training..steps=3"),
        ("data.sources.1.path=x", "data.sources.1.path"),
        ("data.sources.first.path=x", "data.sources.first.path"),
        ("training.steps.more=3", "training.steps.more"),
        ("model.tokenizer.train=300", "model.tokenizer.train"),
        ("data.sources.0.path=*.parquet", "data.sources.0.path"),
        ("data.sources=[", "data.sources"),
    ],
)
def test_an_override_that_leads_nowhere_is_a_problem(tmp_path, override, key):
    assert list(problems(tmp_path, override)) == [key]


def test_every_mistake_is_told_at_once(tmp_path):
    text = """\
model: {config: {model_type: llama, max_position_embeddings: 64}, tokenizer: sample}
data: {sources: [{path: sample, pth: x}, {weight: -1}], seq_len: 128.0}
training: {lerning_rate: 1e-3, global_batch_size: 10, micro_batch_size: 4}
optimizer: {warmup_steps: 12.5}
checkpoint: {keep_every: 7}
"""
    assert set(problems(tmp_path, text=text)) == {
        "data.sources.0.pth",
        "data.sources.1.path",
        "data.sources.1.weight",
        "data.seq_len",
        "training.lerning_rate",
        "optimizer.warmup_steps",
        "checkpoint.keep_every",
    }


def test_rules_between_keys_hold_beside_a_mistake_elsewhere(tmp_path):
    found = problems(
        tmp_path,
        "model.config.max_position_embeddings=64",
        "data.seq_len=128",
        "training.global_batch_size=10",
        "training.micro_batch_size=4",
        "loging.every_steps=3",
    )
    assert set(found) == {"loging", "data.seq_len", "training.global_batch_size"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.precision=fp16", "fp32 on GPUs older than Ampere"),
        ("training.precision=bfloat16", "bf16"),
        ("data.sources.0.revision=12345e6", 'put it in quotes: "12345e6"'),
        ("data.sources.0.revision=0012", 'put it in quotes: "0012"'),
        ("model.tokenizer=5", 'put it in quotes: "5"'),
        ("optimizer.learning_rate='3e-4'", "3e-4, without quotes"),
        ("training.steps=1_000", "1000, without quotes or underscores"),
        ("training.steps=1e3", "try:      1000"),
        ("training.steps=true", "a whole number ≥ 1"),
        ("optimizer.learning_rate=true", "a number > 0"),
        ("optimizer.learning_rate=.inf", "a number > 0"),
        ("optimizer.learning_rate=.nan", "a number > 0"),
        ("optimizer.weight_decay=null", "the default is 0.1"),
        ("checkpoint.keep_last=1", "a whole number ≥ 2"),
        ("data.lanes=many", "a whole number ≥ 1 or auto"),
        ("data.sources=sample", "a list"),
        ("data.sources=[]", "a list"),
        ("evaluation.prompts=['  ']", "not blank"),
        ("evaluation.prompts=The planet", "a list"),
        ("evaluation.prompts=[1]", "a list"),
        ("optimizer.betas=[0.9, '0.95']", "a list of 2"),
        ("training=3", "a mapping"),
        ("run.dir=''", "a string or null\n    try:      one that is not blank"),
        ("run.seed=9223372036854775808", "≤ 9223372036854775807"),
        ("model.config.rope_theta=.inf", "a finite number"),
        ("logging.trackers=[comet]", "tensorboard, wandb, mlflow or trackio"),
        ("distributed.strategy=fsdp", "zero3 or zero3_offload"),
    ],
)
def test_a_wrong_value_is_told_with_what_would_be_right(tmp_path, override, message):
    found = problems(tmp_path, override)
    (text,) = found.values()
    assert message in text
    assert next(iter(found)).startswith(override.partition("=")[0])


@pytest.mark.parametrize("value", ["[0.9]", "[]"])
def test_a_list_that_is_too_short_is_shown_and_has_a_default(tmp_path, value):
    with pytest.raises(UserError) as caught:
        loaded(tmp_path, f"optimizer.betas={value}")
    assert f"optimizer.betas = {value}\n    expected: a list of 2" in str(caught.value)
    assert "no default" not in str(caught.value)


@pytest.mark.parametrize("key", ["model.from_", "model.from_=x"])
def test_the_field_names_of_the_code_are_no_keys(tmp_path, key):
    assert problems(tmp_path, f"{key.partition('=')[0]}=x")["model.from_"]


def test_an_item_that_is_no_mapping_is_told_once(tmp_path):
    assert list(problems(tmp_path, "data.sources=[sample]")) == ["data.sources.0"]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.tokenizer={trian: 300}", "model.tokenizer"),
        ("model.tokenizer={train: 300, vocab: 3}", "model.tokenizer"),
        ("evaluation.sources=[sample]", "evaluation.sources.0"),
        ("evaluation.sources=[{path: 3}]", "evaluation.sources.0.path"),
    ],
)
def test_a_problem_inside_a_value_is_told_by_its_name_in_the_file(tmp_path, override, key):
    assert list(problems(tmp_path, override)) == [key]


def test_a_misspelt_key_of_an_evaluation_source_is_told_the_one_that_was_meant(tmp_path):
    found = problems(tmp_path, "evaluation.sources=[{path: sample, spilt: test}]")
    assert "did you mean evaluation.sources.0.split?" in found["evaluation.sources.0.spilt"]


def test_a_word_in_quotes_is_not_advised_without_them(tmp_path):
    assert "try:" not in problems(tmp_path, "training.steps='true'")["training.steps"]


def test_an_unknown_key_is_told_with_the_key_that_was_meant(tmp_path):
    found = problems(tmp_path, "training.lerning_rate=1e-3", "per_device_train_batch_size=4")
    lines = found["training.lerning_rate"].splitlines()
    assert lines[1] == "    unknown key; did you mean optimizer.learning_rate?"
    assert "did you mean training.micro_batch_size?" in found["per_device_train_batch_size"]
    assert problems(tmp_path, "foo=3")["foo"].splitlines()[1] == "    unknown key"


@pytest.mark.parametrize("name", ["data", "training", "model"])
def test_a_misspelt_section_is_the_only_problem(tmp_path, name):
    found = problems(tmp_path, text=SMALLEST.replace(f"{name}:", f"{name}e:"))
    assert list(found) == [f"{name}e"]
    assert found[f"{name}e"].splitlines()[1] == f"    unknown key; did you mean {name}?"


@pytest.mark.parametrize("override", ["trainig.steps=3", "trainig=3"])
def test_an_override_of_a_misspelt_section_is_told_the_section(tmp_path, override):
    found = problems(tmp_path, override)
    assert found["trainig"].splitlines()[1:] == ["    unknown key; did you mean training?"]


def test_a_file_that_does_not_exist_is_told_with_its_neighbours(tmp_path):
    written(tmp_path)
    with pytest.raises(UserError, match="one of my\\.yaml"):
        load_config(tmp_path / "other.yaml")


def test_a_run_directory_is_told_where_its_config_is(tmp_path):
    (tmp_path / "config.yaml").write_text(SMALLEST)
    with pytest.raises(UserError, match="config\\.yaml"):
        load_config(tmp_path)


def test_a_file_that_is_not_utf_8_is_refused(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"run: {dir: \xe9}\n")
    with pytest.raises(UserError, match="UTF-8; byte 11"):
        load_config(path)


def test_a_file_that_cannot_be_read_is_refused():
    with pytest.raises(UserError, match="Input/output error"):
        load_config("/proc/self/mem")


@pytest.mark.parametrize("text", ["[1, 2]", "just words", "3"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    assert "a mapping of sections" in problems(tmp_path, text=text)["the file"]


def test_an_empty_file_lacks_what_has_no_default(tmp_path):
    assert set(problems(tmp_path, text="")) >= {"data", "training", "model"}


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    assert loaded(tmp_path, text="\ufeff" + SMALLEST).training.steps == 10


def test_values_that_overrides_replace_are_shown_as_given(tmp_path):
    text = SMALLEST.replace("steps: 10", "steps: 0x10")
    assert "[3, 4]" in problems(tmp_path, "training.steps=[3, 4]", text=text)["training.steps"]


@pytest.mark.parametrize("overrides", [("training.steps=null",), ("training.epochs=2",)])
def test_the_length_of_a_run_is_said_once(tmp_path, overrides):
    assert "exactly one" in problems(tmp_path, *overrides)["training.steps"]


def test_whoever_gives_steps_and_epochs_reads_how_to_have_either(tmp_path):
    said = problems(tmp_path, "training.epochs=1")["training.steps"]
    assert "training.steps = 10 and training.epochs = 1\n" in said
    by_epochs, by_steps = said.partition("try:")[2].split(", or ")
    for remedy in (by_epochs, by_steps):
        assert not problems(tmp_path, "training.epochs=1", *remedy.split())
    assert by_epochs.split() == ["training.steps=null", "training.epochs=1"]


def test_a_number_of_epochs_is_a_length(tmp_path):
    assert not problems(tmp_path, "training.steps=null", "training.epochs=0.5")


def test_bestfit_needs_the_document_mask(tmp_path):
    assert not problems(tmp_path, "data.packing=bestfit")
    wrong = problems(tmp_path, "data.packing=bestfit", "data.document_mask=false")
    assert list(wrong) == ["data.document_mask"]


def test_accept_changes_takes_names_of_keys_and_sections(tmp_path):
    names = "[data, data.sources.0.path, optimizer.learning_rate, model.config.hidden_size]"
    assert not problems(tmp_path, f"checkpoint.accept_changes={names}")
    wrong = problems(tmp_path, "checkpoint.accept_changes=[optimizer.learning_rat]")
    assert "optimizer.learning_rate" in wrong["checkpoint.accept_changes"]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("model:\n\tconfig: {}\n", "line 2, column 1"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1"),
        ("- model\n- data\n", "the file"),
        ("a: &a [1, *a]\n", "nesting"),
        ("!!set {a, b}\n", "the file (line 1)"),
    ],
)
def test_of_a_file_that_is_no_mapping_of_sections_only_that_is_reported(tmp_path, text, key):
    assert list(problems(tmp_path, "training.steps=", "nonsense=3", text=text)) == [key]


def test_a_config_knows_who_set_each_key_and_is_equal_whoever_did(tmp_path):
    given = loaded(tmp_path, "training.steps=10", "data.sources.0.weight=0.7")
    assert given.origins["training.steps"] == "command line"
    assert given.origins["data.sources.0.weight"] == "command line"
    assert given.origins["data.sources"] == "file"
    assert "training.precision" not in given.origins
    plain = loaded(tmp_path)
    assert plain.origins["training.steps"] == "file"
    assert loaded(tmp_path, "training.steps=10") == plain


def test_overrides_may_be_values_by_key(tmp_path):
    path = written(tmp_path)
    given = {"training.steps": 50, "evaluation.prompts": ["a: b"], "training.max_grad_norm": None}
    config = load_config(path, given)
    assert config.training.steps == 50
    assert config.evaluation.prompts == ("a: b",)
    assert config.training.max_grad_norm is None
    with pytest.raises(UserError, match=r"training\.stepz"):
        load_config(path, {"training.stepz": 5})


def numbers(schema, name=""):
    """Every number in a JSON schema, with the name of its key."""
    if isinstance(schema, list):
        for one in schema:
            yield from numbers(one, name)
    elif isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield name, schema
        for key, inner in schema.items():
            within = key in ("properties", "anyOf", "items", "prefixItems", "$defs")
            yield from numbers(inner, name if within else key)


def test_every_number_has_an_upper_bound():
    found = list(numbers(Config.model_json_schema()))
    assert len(found) > 40
    assert [name for name, one in found if not one.keys() & BOUNDS] == []


BOUNDS = {"maximum", "exclusiveMaximum"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("adapter.r=100000000000000000000000", "at most 65,536"),
        ("data.lanes=100000000000000000000000", "at most 65,536"),
        ("data.workers=1025", "at most 1,024"),
        ("checkpoint.shard_gb=1e300", "at most 1,048,576"),
        ("data.sources.0.weight=1e300", "at most 1,000,000,000"),
        ("distributed.timeout_minutes=1e23", "at most 5,256,000"),
        ("training.epochs=1e300", "at most 1,000,000"),
        ("training.steps=1000000000001", "at most 1,000,000,000,000"),
        ("model.tokenizer={train: 10000000000}", "at most 1,048,576"),
        ("optimizer.learning_rate=1e300", "at most 3e+38"),
        (f"run.dir={'x' * 5000}", "a path of at most 4,095 bytes, with 255 in each name"),
        (f"data.sources.0.path=a/{'x' * 256}", "a path of at most 4,095 bytes"),
        (f"model.tokenizer={'a/' * 3000}", "a path of at most 4,095 bytes"),
    ],
)
def test_what_is_too_large_for_anything_is_told_with_its_limit(tmp_path, override, message):
    key = override.partition("=")[0]
    found = problems(tmp_path, override)
    assert list(found) == [key]
    assert message in str(found[key])


ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_in_the_repository_is_valid(path):
    assert load_config(path).run.dir == f"runs/{path.stem}"
    assert path.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("name", ["wikipedia_small", "wikipedia_124m"])
def test_the_hub_sources_are_pinned(name):
    for source in load_config(ROOT / "configs" / "pretrain" / f"{name}.yaml").data.sources:
        assert len(source.revision) == 40


@pytest.mark.parametrize(
    ("name", "parameters"), [("wikipedia_small", 5_310_720), ("wikipedia_124m", 123_551_232)]
)
def test_the_models_have_the_size_that_is_written_there(name, parameters):
    fields = load_config(ROOT / "configs" / "pretrain" / f"{name}.yaml").model.config
    vocabulary = {"wikipedia_small": 8192, "wikipedia_124m": 50257}[name]
    width, inner = fields["hidden_size"], fields["intermediate_size"]
    block = 4 * width * width + 3 * width * inner + 2 * width  # attention, MLP, two norms
    total = vocabulary * width + fields["num_hidden_layers"] * block + width
    assert total == parameters


@pytest.mark.parametrize(
    "path", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=lambda p: p.stem
)
def test_every_launch_file_means_the_same_in_both_yaml_versions(path):
    yaml = pytest.importorskip("yaml")
    text = path.read_text(encoding="utf-8")
    assert parse(text).value == yaml.safe_load(text)


# A hint is tried before a person does: it is refused neither by its own rule nor by another one.
BAD = {
    "batch and micro-batch": ("training.global_batch_size=10", "training.micro_batch_size=4"),
    "batch below the micro-batch": ("training.global_batch_size=4", "training.micro_batch_size=8"),
    "bestfit without a mask": ("data.packing=bestfit", "data.document_mask=false"),
    "checkpoints that are never written": ("checkpoint.keep_every=700",),
    "a broken warm-up": ("optimizer.warmup_steps=12.5",),
    "steps and epochs": ("training.epochs=2",),
    "no length": ("training.steps=null",),
    "the best of nothing": ("data.heldout=0", "checkpoint.keep_best=2"),
    "patience with nothing": ("data.heldout=0", "evaluation.patience=3"),
    "muon under zero": ("optimizer.name=muon", "distributed.strategy=zero2"),
    "eight bits, sharded": ("optimizer.name=adamw_8bit", "distributed.strategy=fsdp2"),
    "steps to profile": ("logging.profile_steps=[5, 3]",),
    "steps to profile behind the end": ("logging.profile_steps=[90, 120]",),
    "a whole model with a mask": ("training.compile=model", "data.document_mask=true"),
    "longer than the positions": ("model.config.max_position_embeddings=64", "data.seq_len=128"),
    "rows twice": ("model.pad_vocab_to=64", "model.config.vocab_size=64"),
    "fp16": ("training.precision=fp16",),
    "steps as a float": ("training.steps=1e3",),
    "steps with underscores": ("training.steps=1_000",),
    "a pattern that is no list": ("model.freeze=*embed*",),
    "patterns that are no list": ("model.freeze=[*embed*, *norm*]",),
    "targets without quotes": ("adapter.targets=*proj",),
    "a path without quotes": ("data.sources.0.revision=0012",),
    "no value": ("data.lanes=null",),
    "no targets": ("model={from: base}", "adapter={kind: lora, targets: []}"),
    "adapters beside frozen weights": (*("model={from: base, freeze: [a]}", "adapter.kind=lora"),),
    "qlora that is split": (
        *("model={from: base}", "adapter.kind=qlora", "distributed.strategy=fsdp2"),
    ),
    "an accepted change that is no key": ("checkpoint.accept_changes=[training.step]",),
}
_SETTING = re.compile(r"'?\b([a-z_]+(?:\.\w+)+)=(\[[^\]]*\]|\"[^\"]*\"|[^\s,;']+)")


def refusals(folder, overrides, processes):
    rules = [split_rule(processes)] if processes else []
    try:
        load_config(written(folder, SMALLEST), overrides, rules)
    except UserError as error:
        return list(error.problems)
    return []


def follow(overrides, problem, choice):
    """The overrides of somebody who does what the message proposes."""
    remedy = re.split(", without| on GPUs|; ", problem.remedy or problem.expected)[0]
    if "leave" in remedy or "remove" in remedy:
        return [one.replace("freeze: [a]", "") for one in overrides if given(one) != problem.key]
    if "did you mean" in remedy:
        return put(overrides, f"{problem.key}=[{remedy.split()[-1].rstrip('?')}]")
    found = _SETTING.findall(remedy) if "quote" in remedy else None
    told = re.split(r",? or |, and ", remedy)
    chosen = [one for one in told if "=" in one] or told
    found = found or _SETTING.findall(chosen[choice])
    if found:
        return put(overrides, *(f"{key}={value}" for key, value in found))
    value = re.sub(r"^.*quotes: |,.*quotes.*$", "", remedy if "[" in remedy else chosen[choice])
    return put(overrides, f"{problem.key}={value}")


def given(override):
    return override.partition("=")[0]


def put(overrides, *new):
    keys = {given(one) for one in new}
    return [*(one for one in overrides if given(one) not in keys), *new]


def lead_out(folder, overrides, processes, choice):
    seen: list[set[tuple[str, str]]] = []
    for _ in range(3):
        found = refusals(folder, overrides, processes)
        if not found:
            return
        now = {(problem.key, str(problem.value)) for problem in found}
        assert now not in seen, f"a circle: {overrides}: {[*map(str, found)]}"
        seen.append(now)
        for problem in found:
            overrides = follow(overrides, problem, choice)
    pytest.fail(f"{overrides}: still {[*map(str, found)]}")


@pytest.mark.parametrize("choice", [0, -1])
@pytest.mark.parametrize("processes", [0, 2, 3])
@pytest.mark.parametrize("case", BAD)
def test_a_hint_is_not_refused(tmp_path, case, processes, choice):
    overrides = list(BAD[case])
    assert refusals(tmp_path, overrides, processes)
    lead_out(tmp_path, overrides, processes, choice)


@pytest.mark.parametrize("choice", [0, -1])
@pytest.mark.parametrize("first", BAD)
def test_nor_is_it_beside_another_refusal(tmp_path, first, choice):
    for second in BAD.keys() - {first}:
        both = [*BAD[first], *BAD[second]]
        if len({given(one).partition(".")[0] for one in both}) == len(both):
            lead_out(tmp_path, both, 2, choice)


def test_there_is_a_case_of_each_kind():
    assert len(set(itertools.chain.from_iterable(BAD.values()))) > 30
