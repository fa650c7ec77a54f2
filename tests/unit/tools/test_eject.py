"""What `llmtrain eject` refuses, and how it takes a program's parts from the whole one."""

import ast
import itertools

import pytest
import torch
from helpers.tiny import tiny_config, write_config
from safetensors.torch import save_file
from torch import nn

from llmtrain.config.load import load_config
from llmtrain.config.schema import OptimizerConfig
from llmtrain.errors import UserError
from llmtrain.tools import eject as ejecting
from llmtrain.tools.eject import compose, eject, literal
from llmtrain.training.optimizer import decay_steps, learning_rate_factor

TEMPLATE = ejecting.TEMPLATE.read_text("utf-8")
NAMES = sorted(
    {line.split()[-1] for line in TEMPLATE.splitlines() if line.split()[:2] == ["#:", "if"]}
)
SCHEDULES = ("constant", "cosine", "linear", "wsd")


@pytest.fixture
def config(tmp_path):
    def make(*overrides):
        return load_config(write_config(tmp_path, tiny_config(tmp_path / "run")), overrides)

    return make


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("training.z_loss=0.1", "training.z_loss", "0.0"),
        ("training.precision=bf16", "training.precision", "fp32 or auto"),
        ("training.compile=blocks", "training.compile", "off or auto"),
        ("training.loss_kernel=torch", "training.loss_kernel", "chunked or logits or auto"),
        ("model.attention_backend=math", "model.attention_backend", "auto"),
        ("distributed.strategy=fsdp2", "distributed.strategy", "ddp or auto"),
        ("distributed.tensor_parallel=2", "distributed.tensor_parallel", "1 or auto"),
        ("distributed.pipeline_parallel=2", "distributed.pipeline_parallel", "1"),
        ("distributed.sequence_parallel=2", "distributed.sequence_parallel", "1 or auto"),
        ("optimizer.name=adamw_8bit", "optimizer.name", "adamw or muon"),
        ("training.same_bits=true", "training.same_bits", "false"),
        (
            "training.global_batch_size=[{from_step: 1, size: 2}, {from_step: 5, size: 4}]",
            "training.global_batch_size",
            "one size for all steps",
        ),
        ("preference.loss=orpo", "preference.loss", "none"),
    ],
)
def test_a_key_that_a_program_does_not_cover_is_named(config, tmp_path, override, key, expected):
    with pytest.raises(UserError) as refused:
        eject(config(override), tmp_path / "train_one.py")
    (problem,) = [one for one in refused.value.problems if one.key == key]
    assert problem.expected == f"{expected}: an ejected program covers nothing else"
    assert not list(tmp_path.glob("train_one.*"))


def test_all_keys_that_are_not_covered_are_named_at_once(config, tmp_path):
    adapted = ("model.from=base", "model.config={}", "model.tokenizer=auto")
    values = ("adapter.kind=dora", "optimizer.name=muon", "optimizer.groups=[{match: '*'}]")
    with pytest.raises(UserError) as refused:
        eject(config(*adapted, *values, "training.z_loss=1"), tmp_path / "train_one.py")
    found = [problem.key for problem in refused.value.problems]
    keys = {"adapter.kind", "optimizer.name", "optimizer.groups", "training.z_loss"}
    assert keys <= {*found}


@pytest.mark.parametrize("name", ["train_one.txt", "no/train_one.py", "here.py", "tokens.py"])
def test_a_place_that_cannot_be_written_is_refused_and_nothing_is_replaced(config, tmp_path, name):
    (tmp_path / "here.py").write_text("mine")
    (tmp_path / "tokens.safetensors").write_text("mine")
    with pytest.raises(UserError, match="--out"):
        eject(config(), tmp_path / name)
    assert (tmp_path / "here.py").read_text() == "mine"
    assert (tmp_path / "tokens.safetensors").read_text() == "mine"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lora", [False, True])
def test_every_choice_of_parts_is_a_program_without_an_unknown_or_unused_name(schedule, lora):
    """Each of the other conditions is once met and once not, with every schedule."""
    others = [name for name in NAMES if name not in (*SCHEDULES, "lora")]
    for shift, first in itertools.product(range(len(others)), (False, True)):
        flags = {name: (place + shift) % 3 == 0 or first for place, name in enumerate(others)}
        flags |= {name: name == schedule for name in SCHEDULES} | {"lora": lora}
        flags["token_rows"] &= lora
        flags["frozen"] &= not lora
        tree = ast.parse(compose(flags, {}, "A program.\n"))
        defined = [name for node in tree.body for name in ejecting.defined_names(node)]
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert len(defined) == len({*defined})
        assert {*defined} - used == set()


def composed(schedule, values):
    """The names of a program without a base."""
    flags = dict.fromkeys(NAMES, False) | {"new": True, schedule: True}
    program = {"__name__": "train_one", "__file__": "train_one.py"}
    exec(compose(flags, values, "A program.\n"), program)  # noqa: S102  # our own text
    return program


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rate_of_each_step_is_that_of_the_run(schedule):
    asked = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=3)
    values = {"STEPS": 20, "WARMUP": 3, "DECAY": decay_steps(asked, 20)}
    program = composed(schedule, values | {"MIN_LR_RATIO": asked.min_lr_ratio})
    found = [program["rate_factor"](step) for step in range(1, 21)]
    assert found == [learning_rate_factor(asked, 20, step) for step in range(1, 21)]


def test_a_program_goes_on_behind_the_updates_that_were_made(tmp_path):
    """A step that was skipped counts as a step, but made no update."""
    program = composed("cosine", {})
    model = nn.Linear(2, 2, bias=False)
    moments = {f"weight.{name}": torch.ones(2, 2) for name in ("exp_avg", "exp_avg_sq")}
    save_file({"weight": torch.zeros(2, 2), **moments}, tmp_path / "model.safetensors")
    (tmp_path / "trainer_state.json").write_text('{"step": 5, "optimizer_steps": 3}')
    optimizer = torch.optim.AdamW(model.parameters())
    assert program["read_checkpoint"](tmp_path, model, [optimizer]) == 5
    assert optimizer.state[model.weight]["step"] == 3
    assert not model.weight.any()


def test_a_condition_that_nobody_sets_is_an_error():
    with pytest.raises(KeyError):
        compose(dict.fromkeys(NAMES[1:], False), {}, "A program.\n")


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, 0.1, 1e-30, True, None, "", "it's \"quoted\"\\", "日本\n\t\x00", "a" * 300),
        *((), [], {}, (1,), [1, "b", None], {"a": {"b": [1.5] * 60}, "c d": "x" * 120}),
        *(list(range(500)), [("*.weight", None, 0.1)] * 5, "\udc80 of a path"),
    ],
)  # fmt: skip
def test_a_value_is_read_back_and_fits_a_line(value):
    written = f"NAME = {literal(value, 93)}"
    found = {}
    exec(written, found)  # noqa: S102  # our own text
    assert found["NAME"] == value
    assert type(found["NAME"]) is type(value)
    assert max(map(len, written.splitlines())) <= 100
    written.encode("utf-8")
