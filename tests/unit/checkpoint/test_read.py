import ast
import errno
import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import damage
from helpers.checkpoints import RUN, SPEC, on_ranks, save, tensors, whole
from helpers.damage import flip, sign

from llmtrain.agreement import Alone
from llmtrain.checkpoint import format, format as form, read
from llmtrain.checkpoint.disk import Patience
from llmtrain.errors import RunError, UserError
from llmtrain.types import Piece, TensorSpec

PACKAGE = Path(form.__file__).parents[1]
NEWEST = "step-00000008"
MODEL = "model.safetensors"
FILES = [*SPEC, "config.json", form.STATE, form.MANIFEST]


@pytest.fixture
def root(tmp_path):
    """Two checkpoints, of steps 4 and 8."""
    save(tmp_path, 4)
    save(tmp_path, 8)
    return tmp_path


DAMAGES = damage.DAMAGES | {
    "first bit flipped": lambda path: flip(path, 0),
    "middle bit flipped": damage.flip_the_middle,
    "last bit flipped": lambda path: flip(path, -1, 7),
    "a link": lambda path: path.symlink_to(path.rename(path.parent.parent / "elsewhere")),
}


@dataclass(frozen=True)
class Search:
    """What `find` gave, and the events that it told: (event, checkpoint, reason)."""

    found: read.ResumePoint | None
    events: list[tuple[str, str, str]]

    @property
    def quarantined(self):
        assert all(event == "checkpoint_quarantined" for event, _, _ in self.events)
        return [(name, reason) for _, name, reason in self.events]


def found(root, world_size=1, run_id=RUN, **asked):
    """The same on every rank."""

    def find(ranks):
        heard = []

        def log(event, detail):
            heard.append((event, detail["checkpoint"], detail["reason"]))

        quick = {"patience": Patience(wait=lambda seconds: None), **asked}
        return Search(read.find(root, run_id, ranks, log=log, **quick), heard)

    searches = on_ranks(world_size, find)
    assert all(search == searches[0] for search in searches)
    return searches[0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_newest_is_found_by_number_on_all_ranks(root, world_size):
    os.utime(root / "step-00000004", (2e9, 2e9))
    search = found(root, world_size)
    assert search.quarantined == []
    assert (search.found.name, search.found.step) == (NEWEST, 8)
    assert search.found.path == root / NEWEST
    assert search.found.state["run_id"] == RUN


@pytest.mark.parametrize("make", [False, True])
def test_nothing_is_found_in_a_new_run(tmp_path, make):
    root = tmp_path / "checkpoints"
    if make:
        root.mkdir()
    assert found(root, 2) == Search(None, [])


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", DAMAGES)
def test_each_damage_is_named_set_aside_and_the_older_one_used(root, file, how):
    DAMAGES[how](root / NEWEST / file)
    assert file in read.verify(root / NEWEST)[0].key
    search = found(root)
    assert search.found.step == 4
    [(name, reason)] = search.quarantined
    assert name == NEWEST
    assert file in reason
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == [
        "step-00000004",
        "step-00000008.damaged",
    ]


def test_damage_in_any_share_is_found_by_all_ranks(root):
    flip(root / NEWEST / "optimizer-00001-of-00001.safetensors", -1)
    search = found(root, 3)
    assert search.found.step == 4
    assert "optimizer-00001-of-00001.safetensors: the digest of bytes" in search.quarantined[0][1]


def digest_by_plain_code(held):
    """Of tensors by name, as `tensors_digest` describes it."""
    hasher = hashlib.sha256()
    kinds = {name: spec for part in SPEC.values() for name, spec in part.items()}
    for name in sorted(held):
        said = [name, kinds[name].dtype, list(kinds[name].shape)]
        hasher.update(json.dumps(said, separators=(",", ":")).encode())
        hasher.update(held[name].view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def test_the_digest_of_all_tensors_depends_on_each_bit_and_not_on_the_division_in_files(tmp_path):
    weights, moments = SPEC["model.safetensors"], SPEC["optimizer-00001-of-00001.safetensors"]
    first = {"a.weight": weights["a.weight"]}
    others = {name: tensor for name, tensor in weights.items() if name not in first}
    sharded = {"z.safetensors": first, "model-2.safetensors": others, "o.safetensors": moments}
    held = tensors(SPEC)
    for step, spec in enumerate((SPEC, sharded), 1):
        save(tmp_path, step, spec, whole(spec, held))
        found = read.tensors_digest(tmp_path / form.directory_name(step))
        assert found == digest_by_plain_code(held)
    for file in sharded:
        with damage.struck(tmp_path / "step-00000002" / file, lambda path: flip(path, -1)):
            assert read.tensors_digest(tmp_path / "step-00000002") != digest_by_plain_code(held)


def test_a_name_that_is_taken_gets_a_number(root):
    (root / f"{NEWEST}.damaged").mkdir()
    (root / f"{NEWEST}.damaged-2").mkdir()
    (root / NEWEST / "config.json").unlink()
    found(root)
    assert (root / f"{NEWEST}.damaged-3").is_dir()


def test_another_runs_checkpoints_are_not_looked_at(root):
    save(root, 99_999_999, run_id="another")
    sign(root / "step-99999999", format=2)
    save(root, 12, run_id="another")
    (root / "step-00000012" / MODEL).unlink()
    save(root, 16, run_id="another")
    (root / "step-00000016" / form.MANIFEST).unlink()  # its state still says whose it is
    for name in ("step-9", "step-10", "step-00000020.partial", ".trash-24"):
        (root / name).mkdir()
    before = sorted(path.name for path in root.iterdir())
    assert found(root).found.step == 8
    assert sorted(path.name for path in root.iterdir()) == before


def test_without_a_run_id_the_newest_of_any_run_is_found(root):
    save(root, 12, run_id="another")
    assert found(root, run_id=None).found.state["run_id"] == "another"


def test_a_checkpoint_under_another_steps_name_is_damaged(root):
    (root / NEWEST).rename(root / "step-00000012")
    search = found(root)
    assert search.found.step == 4
    assert "step 8" in search.quarantined[0][1]


def test_a_signed_file_that_is_no_safetensors_is_damaged(root):
    body = b"\xff" * 40
    (root / NEWEST / MODEL).write_bytes(body)
    extents = form.extents_of(body)
    files = json.loads((root / NEWEST / form.MANIFEST).read_bytes())["files"]
    sign(root / NEWEST, files=files | {MODEL: {"size": 40, "extents": extents}})
    assert found(root).quarantined[0][1].startswith(MODEL)


def failing(monkeypatch, error, times, only=MODEL):
    """`open` of one file fails so many times."""
    left, real = [times], Path.open

    def opened(self, *args, **kwargs):
        if self.name == only and left[0]:
            left[0] -= 1
            raise OSError(error, os.strerror(error), str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", opened)


def test_a_defect_beside_a_disk_that_does_not_answer_is_not_the_disks(root, monkeypatch):
    def broken(path, name, extent):
        raise OSError(errno.EIO, "Input/output error") if name == MODEL else ValueError("a defect")

    monkeypatch.setattr(format, "check_extent", broken)
    with pytest.raises(RunError, match="a defect") as caught:
        found(root, 3)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_disk_that_answers_at_the_third_try_is_no_trouble(root, monkeypatch, error):
    failing(monkeypatch, error, times=2)
    times = []
    search = found(root, patience=Patience(wait=times.append))
    assert (search.found.step, search.quarantined) == (8, [])
    assert sum(times) == 30.0


@pytest.mark.parametrize("file", [MODEL, form.MANIFEST])
def test_a_disk_that_does_not_answer_ends_the_start_and_renames_nothing(root, monkeypatch, file):
    failing(monkeypatch, errno.EIO, times=10**9, only=file)
    with pytest.raises(RunError, match="Input/output error") as caught:
        found(root, 2)
    assert caught.value.exit_code == 74
    monkeypatch.undo()
    assert found(root).found.step == 8


def test_a_file_that_only_another_rank_cannot_see_is_trouble(root, monkeypatch):
    real = format.check_extent
    manifest = form.load(root / NEWEST)
    count = len([extent for entry in manifest.files.values() for extent in entry.extents])
    seen = []

    def checked(path, name, extent):
        if not seen:
            seen.append(name)
            return real(path, name, extent)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path / name))

    monkeypatch.setattr(format, "check_extent", checked)
    assert count > 1
    with pytest.raises(RunError, match="No such file"):
        found(root, 2)
    assert (root / NEWEST).is_dir()


def test_our_own_mistake_is_no_damage(root, monkeypatch):
    monkeypatch.setattr(format, "check_extent", lambda *_: {}["missing"])
    with pytest.raises(RunError, match="KeyError") as caught:
        found(root, 2)
    assert caught.value.exit_code == 1
    assert (root / NEWEST).is_dir()


def test_what_was_written_is_read_back_bit_for_bit(root):
    into = tensors(SPEC, seed=77)
    read.load_tensors(found(root).found, SPEC, whole(SPEC, into), Alone())
    assert all(torch.equal(into[name], value) for name, value in tensors(SPEC, 8).items())


def test_ranges_are_read_into_the_pieces_of_each_rank(root):
    into = tensors(SPEC, seed=77)
    search = found(root)

    def fill(ranks):
        pieces = (
            Piece(name, start, value.view(-1)[start : start + 2])
            for name, value in into.items()
            for start in range(0, value.numel(), 2)
            if start // 2 % 2 == ranks.rank
        )
        read.load_tensors(search.found, SPEC, pieces, ranks)

    on_ranks(2, fill)
    assert all(torch.equal(into[name], value) for name, value in tensors(SPEC, 8).items())


def test_tensors_may_be_cut_into_files_otherwise(root):
    one = {"all": {**SPEC[MODEL], **SPEC["optimizer-00001-of-00001.safetensors"]}}
    into = tensors(one, seed=77)
    read.load_tensors(found(root).found, one, whole(one, into), Alone())
    assert all(torch.equal(into[name], value) for name, value in tensors(SPEC, 8).items())


def test_blocks_of_a_large_tensor_follow_each_other(root, monkeypatch):
    monkeypatch.setattr(read, "READ_BYTES", 8)
    into = tensors(SPEC, seed=77)
    read.load_tensors(found(root).found, SPEC, whole(SPEC, into), Alone())
    assert all(torch.equal(into[name], value) for name, value in tensors(SPEC, 8).items())


def test_another_model_is_refused_with_the_first_five_tensors(root):
    part = {f"b{i}": TensorSpec("F32", (2,)) for i in range(4)}
    spec = {MODEL: {"a.weight": TensorSpec("F32", (5, 4)), **SPEC[MODEL], **part}}
    spec[MODEL]["a.weight"] = TensorSpec("F32", (5, 4))
    values = {name: value.clone() for name, value in tensors(spec).items()}

    def fill(ranks):
        read.load_tensors(search.found, spec, whole(spec, values), ranks)

    search = found(root)
    with pytest.raises(UserError) as caught:
        on_ranks(2, fill)
    assert "6 of 9 tensors" in str(caught.value)
    assert [problem.key for problem in caught.value.problems] == [
        "a.weight",
        "b0",
        "b1",
        "b2",
        "b3",
    ]
    assert caught.value.problems[0].value == "F32 [5, 3]"
    assert "F32 [5, 4]" in caught.value.problems[0].expected
    assert caught.value.problems[1].value == "absent"
    assert all(torch.equal(values[name], value) for name, value in tensors(spec).items())


def optimizer_state(root, states):
    """A checkpoint whose optimizer had other tensors; what a run of AdamW says of it."""
    weight = {"a.weight": TensorSpec("F32", (4, 4))}
    other = {f"a.weight.{name}": tensor for name, tensor in states.items()}
    adamw = {f"a.weight.{name}": TensorSpec("F32", (4, 4)) for name in ("exp_avg", "exp_avg_sq")}
    save(root, 12, {MODEL: weight, "optimizer-00001-of-00001.safetensors": other})
    spec = {MODEL: weight, "optimizer-00001-of-00001.safetensors": adamw}
    with pytest.raises(UserError) as caught:
        read.load_tensors(found(root).found, spec, whole(spec, tensors(spec)), Alone())
    return {problem.key: (problem.value, problem.expected) for problem in caught.value.problems}


def test_the_state_of_another_optimizer_is_refused(root):
    said = optimizer_state(root, {"momentum_buffer": TensorSpec("F32", (4, 4))})
    assert said["a.weight.exp_avg"] == ("absent", "F32 [4, 4], as in the model")
    assert said["a.weight.momentum_buffer"] == ("F32 [4, 4]", "absent, as in the model")


def test_state_of_another_shape_than_its_parameter_is_refused(root):
    scales = {"exp_avg": TensorSpec("U8", (4, 4)), "absmax": TensorSpec("F32", (1,))}
    said = optimizer_state(root, scales)
    assert said["a.weight.exp_avg"] == ("U8 [4, 4]", "F32 [4, 4], as in the model")
    assert said["a.weight.absmax"] == ("F32 [1]", "absent, as in the model")


def test_adapters_are_no_checkpoint_of_a_whole_model(root):
    save(root, 12, {"adapter_model.safetensors": SPEC[MODEL]})
    with pytest.raises(UserError) as caught:
        read.load_tensors(found(root).found, SPEC, whole(SPEC, tensors(SPEC)), Alone())
    (problem,) = caught.value.problems
    assert problem.key.endswith("step-00000012")
    assert problem.value == "LoRA adapters (adapter_model.safetensors)"
    assert "the whole model" in problem.expected


def test_adapters_are_read_by_a_run_of_adapters(root):
    spec = {"adapter_model.safetensors": SPEC[MODEL]}
    save(root, 12, spec)
    values = {name: torch.zeros_like(one) for name, one in tensors(spec).items()}
    read.load_tensors(found(root).found, spec, whole(spec, values), Alone())
    assert all(torch.equal(values[name], one) for name, one in tensors(spec, 12).items())


def test_a_tensor_that_the_model_does_not_have_is_refused(root):
    spec = {MODEL: SPEC[MODEL]}
    with pytest.raises(UserError, match=r"a\.weight\.exp_avg") as caught:
        read.load_tensors(found(root).found, spec, whole(spec, tensors(spec)), Alone())
    assert "absent" in str(caught.value)


def test_a_disk_that_does_not_answer_while_filling_ends_all_ranks(root, monkeypatch):
    search = found(root)
    into = tensors(SPEC)
    failing(monkeypatch, errno.EIO, times=10**9)
    with pytest.raises(RunError, match="Input/output error") as caught:
        on_ranks(
            2,
            lambda ranks: read.load_tensors(
                search.found, SPEC, whole(SPEC, into), ranks, patience=Patience(wait=lambda _: None)
            ),
        )
    assert caught.value.exit_code == 74


def test_verify_lists_everything_that_is_wrong(root):
    (root / NEWEST / "config.json").unlink()
    flip(root / NEWEST / MODEL, -1)
    missing, flipped = read.verify(root / NEWEST)
    assert (missing.key, missing.value) == ("config.json", "is missing")
    assert (flipped.key, "digest of bytes" in str(flipped.value)) == (MODEL, True)
    assert read.verify(root / "step-00000004") == []


TORCH_FREE = """
import sys
from pathlib import Path
from llmtrain.checkpoint import candidates, format, read
from llmtrain.config.schema import CheckpointConfig
from llmtrain.rundir import lock
from llmtrain.agreement import Alone
root = Path(sys.argv[1])
assert read.verify(root / "step-00000008") == []
assert read.find(root, None, Alone()).step == 8
candidates.prune(root, CheckpointConfig(keep_last=2), "x", None)
print([name for name in ("torch", "transformers", "accelerate") if name in sys.modules])
"""


@pytest.mark.launches
def test_searching_verifying_and_clearing_need_no_torch(root):
    command = [sys.executable, "-c", TORCH_FREE, str(root)]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"[]\n"


NOTHING_UNPICKLED = """
import sys
from pathlib import Path
import torch, transformers
from helpers.checkpoints import SPEC, tensors, whole
from llmtrain.checkpoint import read
from llmtrain.config.schema import ModelConfig
from llmtrain.model.base import Base
from llmtrain.model.build import build, model_config
from llmtrain.model.tokenizer import SpecialTokens
from llmtrain.agreement import Alone
root, base = map(Path, sys.argv[1:])
shape = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
config = transformers.LlamaConfig(vocab_size=300, **shape)
transformers.LlamaForCausalLM(config).save_pretrained(base)
opened = []
sys.addaudithook(lambda event, _: opened.append(event) if event.startswith("pickle.") else None)
into = tensors(SPEC, seed=77)
read.load_tensors(read.find(root, None, Alone()), SPEC, whole(SPEC, into), Alone())
assert all(torch.equal(into[name], value) for name, value in tensors(SPEC, 8).items())
asked = ModelConfig.model_validate({"from": str(base)})
found = Base(str(base), None, None)
build(model_config(asked, SpecialTokens(300, 0, 0, 0), 16, found), asked, found)
print("unpickled:", opened)
"""


@pytest.mark.launches
def test_nothing_is_unpickled_by_the_load_of_a_checkpoint_and_of_a_model(root, tmp_path):
    command = [sys.executable, "-c", NOTHING_UNPICKLED, str(root), str(tmp_path / "base")]
    paths = os.pathsep.join([str(PACKAGE.parent), str(PACKAGE.parent / "tests")])
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert "unpickled: []" in run.stdout, run.stderr


def test_the_package_holds_no_pickle():
    forbidden = re.compile(
        r"^\s*(import|from) (pickle|cPickle|dill)\b|torch\.(save|load)\(|yaml\.load\(|"
        r"\b(allow_pickle|trust_remote_code) *= *(?!False)|weights_only *= *False|"
        r"\b(gather|broadcast|scatter|send|recv)_object",
        re.MULTILINE,
    )
    hits = [path for path in PACKAGE.rglob("*.py") if forbidden.search(path.read_text())]
    assert hits == []


def test_whatever_transformers_opens_it_opens_without_code_and_without_pickle():
    opened = [
        node
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("from_pretrained", "from_config")
        and ast.unparse(node.func.value).startswith("Auto")
    ]
    assert len(opened) >= 6
    for call in opened:
        said = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert said["trust_remote_code"] == "False", ast.unparse(call)
        if ast.unparse(call.func) == "AutoModelForCausalLM.from_pretrained":
            assert said["use_safetensors"] == "True"


def test_a_verification_reads_every_byte_of_what_has_its_size_and_says_how_far_it_is(root):
    path, heard = root / NEWEST, []
    assert read.verify(path, on_progress=heard.append) == []
    assert sum(heard) == sum(entry.size for entry in form.load(path).files.values())
    (path / MODEL).write_bytes((path / MODEL).read_bytes()[:-1])
    (wrong,) = read.verify(path, on_progress=lambda size: heard.append(-size))
    assert wrong.key == MODEL
    assert sum(heard) == form.load(path).files[MODEL].size
