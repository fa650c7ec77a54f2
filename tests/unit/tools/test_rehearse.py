import json
import os
import re
from pathlib import Path

import pytest
from helpers.checkpoints import SPEC, save, tensors, whole
from helpers.config import written
from helpers.runs import start_line, status, train_line, write_run

from llmtrain.config.load import load_config
from llmtrain.errors import RunError, UserError
from llmtrain.tools import rehearse as module
from llmtrain.tools.launch.child import Ended
from llmtrain.tools.rehearse import compare, rehearse, rehearse_sizes

SMALL = """\
run: {dir: runs/long}
model:
  config: {model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
           intermediate_size: 64}
  tokenizer: sample
data: {sources: [{path: sample}], seq_len: 32}
training: {epochs: 2, global_batch_size: 12}
evaluation: {every_steps: 50, prompts: ["Once"]}
checkpoint: {every_steps: 50, keep_every: 100, stop_after: 3h}
logging: {trackers: [tensorboard]}
"""
STEPS = range(1, 9)


def made_up(folder, starts, lines, *, values=None, step=8, state="finished"):
    """A run directory with one checkpoint of `values` (those drawn from the step, if None)."""
    run_dir = write_run(folder, [*starts, *lines], status(state, step))
    saved = whole(SPEC, tensors(SPEC, 1) if values is None else values)
    llama = {"config.json": b'{"model_type": "llama"}'}
    save(run_dir / "checkpoints", step, pieces=saved, small=llama)
    return run_dir


def straight(folder, **changes):
    return made_up(folder, [start_line(0)], [train_line(step) for step in STEPS], **changes)


def resumed(folder, *lines, start=None, **changes):
    """Killed in step 6, resumed at 4; `lines` come last, in place of others of their step."""
    again = [start or start_line(4, "step-00000004")]
    first = [train_line(step, loss=9.0, batch_digest="f" * 16) for step in (5, 6)]
    before = [start_line(0), *(train_line(step) for step in range(1, 5)), *first]
    after = [*(train_line(step) for step in range(5, 9)), *lines]
    return made_up(folder, [*before, *again], after, **changes)


def test_two_runs_of_the_same_bits_differ_in_nothing(tmp_path):
    found = compare(straight(tmp_path / "a"), resumed(tmp_path / "b"))
    assert found.differences == ()
    assert (found.steps, found.losses, found.largest_difference) == (8, 8, 0.0)
    assert found.files == tuple(sorted(SPEC))
    assert found.resumed.resumed_from == "step-00000004"


def test_one_other_bit_of_a_file_is_found_and_the_file_named(tmp_path):
    values = tensors(SPEC, 1)
    values["a.bias"][2] += 1
    (said,) = compare(straight(tmp_path / "a"), resumed(tmp_path / "b", values=values)).differences
    assert said == "model.safetensors of step-00000008 has other bytes"


def test_other_batches_and_losses_are_found_by_step(tmp_path):
    other = [train_line(7, batch_digest="0" * 16), train_line(8, loss=train_line(8)["loss"] + 2e-5)]
    found = compare(straight(tmp_path / "a"), resumed(tmp_path / "b", *other))
    assert found.differences == (
        "steps 7 had other batches",
        "steps 8 have losses further apart than 1e-05",
    )
    assert found.largest_difference == pytest.approx(2e-5)


def test_a_loss_that_is_not_finite_in_one_of_them_is_a_difference(tmp_path):
    nan = train_line(8, loss=None)
    assert compare(straight(tmp_path / "a"), resumed(tmp_path / "b", nan)).differences
    lines = [train_line(step) for step in range(1, 8)]
    both = made_up(tmp_path / "c", [start_line(0)], [*lines, nan])
    assert compare(both, resumed(tmp_path / "d", nan)).differences == ()


def test_steps_that_are_missing_are_a_difference(tmp_path):
    run_dir = made_up(tmp_path / "a", [start_line(0)], [train_line(step) for step in range(1, 8)])
    found = compare(run_dir, resumed(tmp_path / "b"))
    assert "steps 8 are in one of the runs" in found.differences


def test_a_kill_before_the_first_checkpoint_proves_nothing(tmp_path):
    found = compare(straight(tmp_path / "a"), resumed(tmp_path / "b", start=start_line(0)))
    assert found.differences == ("nothing was resumed: no checkpoint was complete",)


@pytest.mark.parametrize("change", [{"strategy": "fsdp2"}, {"world_size": 1}])
def test_another_strategy_or_world_may_round_otherwise_but_within_a_bound(tmp_path, change):
    start = start_line(4, "step-00000004") | change
    near = train_line(8, loss=train_line(8)["loss"] + 9e-6)
    one, values = straight(tmp_path / "a"), tensors(SPEC, 2)
    found = compare(one, resumed(tmp_path / "b", near, start=start, values=values))
    assert (found.differences, found.files) == ((), ())
    assert found.largest_difference == pytest.approx(9e-6)
    far = train_line(8, loss=train_line(8)["loss"] + 1.1e-5)
    assert compare(one, resumed(tmp_path / "c", far, start=start)).differences


def test_with_dropout_another_world_is_compared_by_its_batches_alone(tmp_path):
    start = start_line(4, "step-00000004") | {"world_size": 3}
    far = train_line(8, loss=1.0)
    one, other = straight(tmp_path / "a"), resumed(tmp_path / "b", far, start=start)
    config = one / "checkpoints" / "step-00000008" / "config.json"
    config.write_text('{"model_type": "llama", "attention_dropout": 0.1}')
    found = compare(one, other)
    assert (found.differences, found.losses) == ((), 0)
    assert "attention_dropout" in found.note
    batch = train_line(8, batch_digest="0" * 16)
    assert compare(one, resumed(tmp_path / "c", batch, start=start)).differences


@pytest.mark.parametrize(
    ("change", "compared"),
    [
        ({"world_size": 1}, False),
        ({"strategy": "fsdp2", "micro_batch_size": 4}, False),
        ({"strategy": "fsdp2"}, True),
        ({}, True),
    ],
)
def test_with_a_router_loss_other_micro_batches_are_compared_by_their_batches_alone(
    tmp_path, change, compared
):
    def with_router(run_dir):
        path = run_dir / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        added = [
            line | {"router_loss": 0.02} if line["kind"] == "train" else line for line in lines
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in added))
        return run_dir

    far = train_line(8, loss=1.0)
    start = start_line(4, "step-00000004") | change
    one = with_router(straight(tmp_path / "a"))
    found = compare(one, with_router(resumed(tmp_path / "b", far, start=start)))
    assert bool(found.differences) == compared
    assert found.losses == (8 if compared else 0)
    assert ("a router's loss" in found.note) != compared
    batch = train_line(8, batch_digest="0" * 16)
    assert compare(one, with_router(resumed(tmp_path / "c", batch, start=start))).differences
    # A row by itself is the same in any split.
    for run_dir in (one, tmp_path / "b"):
        path = run_dir / "metrics.jsonl"
        path.write_text(
            re.sub(r'"micro_batch_size": \d', '"micro_batch_size": 1', path.read_text())
        )
    assert compare(one, tmp_path / "b").losses == 8


class Launches:
    """In place of the launcher: each start leaves what `rehearse` looks for."""

    def __init__(self, *codes, state="finished", values=None, asked_at=None):
        self.codes, self.state, self.values = list(codes), state, values
        self.asked_at, self.seen = asked_at, []

    def __call__(self, config_file, overrides, *, processes, env, output):
        config = load_config(config_file, overrides)
        self.seen.append((config, processes, env.get("LLMTRAIN_FAULTS")))
        code = self.codes.pop(0)
        output.write(b"what the ranks said\n")
        run_dir = Path(config.run.dir)
        if len(self.seen) == self.asked_at:  # before there was a rank: nothing is left behind
            return Ended(code, "", asked_to_stop=True)
        if len(self.seen) == 1:
            straight(run_dir, state=self.state)
            (run_dir / "auto.json").write_text('{"run": {"precision": "bf16"}}')
        elif len(self.seen) == 2:
            write_run(run_dir, [], status("running", 6))
        else:
            resumed(run_dir, values=self.values)
        return Ended(code, "error: as told" if code else "")


def rehearsed(monkeypatch, folder, launches, *overrides, **more):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(module, "launch", launches)
    monkeypatch.setattr(module, "has_gpu", lambda env: False)
    monkeypatch.setenv("LLMTRAIN_FAULTS", "loop.step=raise")
    return rehearse(str(written(folder, SMALL)), overrides, **more)


def test_three_starts_of_a_short_run_are_made_and_the_second_is_killed(monkeypatch, tmp_path):
    launches = Launches(0, 75, 0)
    found = rehearsed(monkeypatch, tmp_path, launches, "data.seq_len=16")
    assert found.same
    assert found.folder is None
    assert [path.name for path in tmp_path.iterdir()] == ["my.yaml"]
    (one, *_), (two, *_), (three, *_) = launches.seen
    assert [(size, fault) for _, size, fault in launches.seen] == [
        (2, None),
        (2, "loop.micro@step=6=kill"),
        (2, None),
    ]
    assert one.run.dir != two.run.dir == three.run.dir
    for config in (one, two, three):
        assert (config.training.steps, config.training.epochs) == (8, None)
        assert (config.checkpoint.every_steps, config.checkpoint.keep_every) == (3, 0)
        assert config.checkpoint.stop_after is None
        assert config.logging.trackers == ()
        assert config.evaluation.max_documents == 8
        assert config.data.seq_len == 16  # what the real run will have
    # A timing that comes out otherwise must not make two runs of them.
    precisions = [config.training.precision for config in (one, two, three)]
    assert precisions == ["auto", "bf16", "bf16"]


def test_another_strategy_and_world_are_those_of_the_resumed_start_alone(monkeypatch, tmp_path):
    launches = Launches(0, 75, 0)
    rehearsed(monkeypatch, tmp_path, launches, kill_at=3, to="fsdp2", processes=3)
    made = [(config.distributed.strategy, size) for config, size, _ in launches.seen]
    assert made == [("auto", 2), ("auto", 2), ("fsdp2", 3)]
    assert launches.seen[0][0].training.precision == "fp32"
    assert launches.seen[1][2] == "loop.micro@step=3=kill"
    assert launches.seen[0][0].checkpoint.every_steps == 1


def test_what_differs_stays_to_be_looked_at(monkeypatch, tmp_path):
    launches = Launches(0, 75, 0, values=tensors(SPEC, 9))
    found = rehearsed(monkeypatch, tmp_path, launches)
    assert not found.same
    assert found.folder.parent == tmp_path  # on the disk of the run, whose parent is not there yet
    there = {path.name for path in found.folder.iterdir()}
    assert there == {"straight", "killed", "straight.log", "killed.log", "resumed.log"}
    assert json.loads(json.dumps(found.to_json()))["folder"] == str(found.folder)


@pytest.mark.parametrize(
    ("codes", "which", "code"),
    [
        ((2,), "straight", 2),
        ((0, 0), "killed", 1),
        ((0, 2), "killed", 2),
        ((0, 75, 1), "resumed", 1),
    ],
)
def test_a_start_that_ends_otherwise_is_an_error_that_names_its_log(
    monkeypatch, tmp_path, codes, which, code
):
    with pytest.raises(RunError, match=f"the {which} run of the rehearsal ended with") as caught:
        rehearsed(monkeypatch, tmp_path, Launches(*codes))
    assert caught.value.exit_code == code
    (kept,) = tmp_path.glob("rehearsal-*")
    assert str(kept / f"{which}.log") in str(caught.value)
    assert ("as told" if codes[-1] else "what the ranks said") in str(caught.value)


def test_a_stop_is_no_verdict(monkeypatch, tmp_path):
    with pytest.raises(RunError, match="was stopped") as caught:
        rehearsed(monkeypatch, tmp_path, Launches(0, state="stopped"))
    assert caught.value.exit_code == 75
    assert not list(tmp_path.glob("rehearsal-*"))


@pytest.mark.parametrize("which", [1, 2, 3])
def test_a_stop_before_there_is_a_rank_ends_the_rehearsal(monkeypatch, tmp_path, which):
    """The launcher ends with 0 then, or with 1 where the signal met its imports."""
    for code in (0, 1):
        launches = Launches(*(0, 75, 0)[: which - 1], code, asked_at=which)
        with pytest.raises(RunError, match="was stopped") as caught:
            rehearsed(monkeypatch, tmp_path, launches)
        assert (caught.value.exit_code, len(launches.seen)) == (75, which)
        assert not list(tmp_path.glob("rehearsal-*"))


def test_a_start_that_ends_well_short_of_its_last_step_is_no_success(monkeypatch, tmp_path):
    with pytest.raises(RunError, match="the straight run of the rehearsal ended") as caught:
        rehearsed(monkeypatch, tmp_path, Launches(0, state="running"))
    assert caught.value.exit_code == 1


def test_the_folder_lies_on_the_disk_of_the_run(monkeypatch, tmp_path):
    assert module._beside(tmp_path / "a" / "b") == tmp_path
    assert module._beside(Path("/")) == Path("/")
    (tmp_path / "disk").mkdir()
    assert module._beside(tmp_path / "disk") == tmp_path
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "disk")
    assert module._beside(tmp_path / "disk") == tmp_path / "disk"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kill_at": 1}, "--kill-at = 1"),
        ({"processes": 5}, "a multiple of 5 processes"),
        ({"to": "fsdp3"}, "distributed.strategy"),
        ({"to": "hsdp"}, "at least 2 replicas"),
        ({"to": "hsdp", "processes": 5, "kill_at": 1}, "(?s)replicas.*5 processes.*--kill-at"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_before_anything_is_started(
    monkeypatch, tmp_path, more, message
):
    launches = Launches()
    with pytest.raises(UserError, match=message):
        rehearsed(monkeypatch, tmp_path, launches, **more)
    assert launches.seen == []
    assert [path.name for path in tmp_path.iterdir()] == ["my.yaml"]


def test_a_batch_that_two_processes_cannot_share_begins_with_one(monkeypatch, tmp_path):
    launches = Launches(0, 75, 0)
    rehearsed(monkeypatch, tmp_path, launches, "training.global_batch_size=3")
    assert [size for _, size, _ in launches.seen] == [1, 1, 1]


def test_the_environment_of_this_process_is_passed_on(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", "elsewhere")
    seen = []

    def note(*arguments, env, **more):
        seen.append(env)
        raise UserError

    with pytest.raises(UserError):
        rehearsed(monkeypatch, tmp_path, note)
    assert seen[0]["HF_HOME"] == "elsewhere"
    assert "LLMTRAIN_FAULTS" not in seen[0]
    assert os.environ["LLMTRAIN_FAULTS"]


def on_each_size(monkeypatch, values):
    """Starts that make a run with a checkpoint of these values, by number of processes."""

    def start(later, config_file, name, run_dir, overrides, size, fault):
        line = start_line(0) | {"world_size": size}
        made_up(run_dir, [line], [train_line(step) for step in STEPS], values=values[size])

    monkeypatch.setattr(module, "_start", start)


EXACT = [f"training.{one}" for one in ("same_bits=true", "precision=fp32", "micro_batch_size=2")]


def test_each_number_of_processes_is_told_with_its_hash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the run directory is relative
    other = tensors(SPEC, 1)
    other["a.bias"][2] += 1
    on_each_size(monkeypatch, {1: tensors(SPEC, 1), 2: tensors(SPEC, 1), 3: other})
    config = str(written(tmp_path, SMALL))
    said = []
    same = rehearse_sizes(config, EXACT, [2, 1, 2], said.append)
    assert same.same
    assert len(set(same.hashes)) == 1
    assert said == ["8 steps, 1 process", "8 steps, 2 processes"]
    assert not list(tmp_path.rglob("rehearsal-*"))
    differ = rehearse_sizes(config, EXACT, [1, 3])
    assert differ.folder is not None
    assert differ.folder.is_dir()
    shown = differ.to_json()
    assert not shown["same"]
    assert list(shown["hashes"]) == ["1", "3"]
    assert shown["hashes"]["1"] == same.hashes[0] != shown["hashes"]["3"]


@pytest.mark.parametrize(
    ("more", "sizes", "key"),
    [
        (["training.same_bits=false"], [1, 2], "training.same_bits"),
        ([], [2], "--same-bits"),
        ([], [1, 4], "training.global_batch_size"),
    ],
)
def test_a_rehearsal_of_sizes_that_proves_nothing_is_refused(tmp_path, more, sizes, key):
    with pytest.raises(UserError) as refused:
        rehearse_sizes(str(written(tmp_path, SMALL)), [*EXACT, *more], sizes)
    assert [one.key for one in refused.value.problems] == [key]
