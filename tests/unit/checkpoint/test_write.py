import errno
import itertools
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import (
    RUN,
    SPEC,
    Killed,
    broken_disk,
    divided,
    on_ranks,
    save,
    tensors,
    whole,
)
from helpers.rings import dear
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import load_file

from llmtrain import faults, system
from llmtrain.agreement import Alone
from llmtrain.checkpoint import disk, format as form, read, write
from llmtrain.types import Piece, TensorSpec

MODEL = "model.safetensors"


def files(directory):
    """Every file below a directory with its bytes, the manifest apart."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != form.MANIFEST
    }


def test_a_commit_leaves_one_complete_directory(tmp_path):
    committed = save(tmp_path, 300, small={"extra/template.jinja": b"{{ x }}"})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000300"]
    directory = tmp_path / "step-00000300"
    assert committed.name == directory.name
    assert committed.bytes == sum(path.stat().st_size for path in directory.rglob("*.*"))
    assert committed.seconds > 0
    assert (directory / "extra" / "template.jinja").read_bytes() == b"{{ x }}"
    assert read.verify(directory) == []


def test_the_files_hold_the_tensors(tmp_path):
    save(tmp_path, 300)
    values = tensors(SPEC, 300)
    for file, part in SPEC.items():
        found = load_file(tmp_path / "step-00000300" / file)
        assert found.keys() == part.keys()
        assert all(torch.equal(found[name], values[name]) for name in part)


def test_the_manifest_names_every_file_but_itself(tmp_path):
    save(tmp_path, 300)
    directory = tmp_path / "step-00000300"
    manifest = json.loads((directory / form.MANIFEST).read_bytes())
    assert manifest["files"].keys() == files(directory).keys()
    assert (manifest["format"], manifest["run_id"], manifest["step"]) == (1, RUN, 300)


@pytest.mark.deeper
@settings(dear(20), deadline=None)
@given(divided())
def test_the_bytes_do_not_depend_on_how_tensors_are_split(tmp_path_factory, case):
    spec, values, ranks = case
    root = tmp_path_factory.mktemp("root")
    save(root / "whole", 1, spec, whole(spec, values))
    saved = on_ranks(
        len(ranks), lambda own: save(root / "split", 1, spec, ranks[own.rank], ranks=own)
    )
    assert {type(outcome) for outcome in saved} == {write.SavedCheckpoint}
    assert files(root / "split/step-00000001") == files(root / "whole/step-00000001")
    assert read.verify(root / "split" / "step-00000001") == []


def test_ranges_that_follow_each_other_are_one_extent(tmp_path):
    save(tmp_path, 1)
    entry = form.load(tmp_path / "step-00000001").files[MODEL]
    head = len(form.header(SPEC[MODEL]))
    assert [extent.offset for extent in entry.extents] == [0, head]


def test_no_extent_is_longer_than_64_mib(tmp_path, monkeypatch):
    monkeypatch.setattr(form, "EXTENT_BYTES", 64)
    monkeypatch.setattr(form, "BLOCK_BYTES", 16)
    spec = {"model.safetensors": {"a": TensorSpec("F32", (101, 3))}}
    save(tmp_path, 1, spec)
    entry = form.load(tmp_path / "step-00000001").files[MODEL]
    head = len(form.header(spec[MODEL]))
    lengths = [extent.length for extent in entry.extents if extent.offset >= head]
    assert lengths == [64] * 18 + [60]
    assert read.verify(tmp_path / "step-00000001") == []


def test_a_link_that_leads_nowhere_has_a_checkpoints_name_too(tmp_path):
    (tmp_path / "step-00000300").symlink_to("nowhere")
    assert "it is not overwritten" in save(tmp_path, 300).failures[0].text
    assert (tmp_path / "step-00000300").is_symlink()


def test_a_file_that_grew_while_it_was_written_fails_the_save(tmp_path):
    begun = write.begin(tmp_path, 300, SPEC, {"config.json": b"{}"}, Alone(), RUN)
    extents = write.write_pieces(begun, whole(SPEC, tensors(SPEC, 300)))
    with (begun.partial / MODEL).open("ab") as file:
        file.write(b"x")
    failed = write.commit(begun, extents, None, Alone())
    assert "bytes instead of" in failed.failures[0].text
    assert list(tmp_path.iterdir()) == []


def test_an_older_partial_is_removed(tmp_path):
    (tmp_path / "step-00000004.partial").mkdir()
    (tmp_path / "step-00000004.partial" / "x").write_bytes(b"x")
    save(tmp_path, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_what_fails_on_one_rank_fails_the_save_on_all(tmp_path, caplog):
    save(tmp_path, 4)
    before = files(tmp_path)

    def fail(ranks):
        pieces = whole(SPEC, tensors(SPEC)) if ranks.rank == 0 else [Piece("?", 0, torch.ones(1))]
        return save(tmp_path, 8, pieces=pieces, ranks=ranks)

    outcomes = on_ranks(3, fail)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert [(failed.rank, failed.kind) for failed in outcomes[0].failures] == [
        (1, "ValueError"),
        (2, "ValueError"),
    ]
    assert files(tmp_path) == before
    assert any(record.exc_info for record in caplog.records)


def test_a_range_that_nobody_wrote_fails_the_save(tmp_path):
    pieces = [piece for piece in whole(SPEC, tensors(SPEC)) if piece.name != "a.bias"]
    outcome = save(tmp_path, 4, pieces=pieces)
    assert isinstance(outcome, write.FailedSave)
    assert "model.safetensors" in str(outcome.failures[0])
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_there_is_not_written_over(tmp_path):
    save(tmp_path, 4)
    before = files(tmp_path)
    outcome = save(tmp_path, 4, pieces=whole(SPEC, tensors(SPEC, 99)))
    assert outcome.failures[0].errno == errno.EEXIST
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", ["manifest.json", MODEL, "../x", "/x"])
def test_a_small_file_must_have_a_name_of_its_own(tmp_path, name):
    assert save(tmp_path, 4, small={name: b""}).failures[0].kind == "ValueError"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "piece",
    [
        Piece("unknown", 0, torch.ones(1)),
        Piece("a.bias", 0, torch.ones(3, dtype=torch.int32)),
        Piece("a.bias", 1, torch.ones(3)),
        Piece("a.bias", -1, torch.ones(3)),
    ],
)
def test_a_piece_that_is_not_of_the_spec_is_refused(tmp_path, piece):
    begun = write.begin(tmp_path, 4, SPEC, {}, Alone(), RUN)
    with pytest.raises(ValueError, match=piece.name):
        write.write_pieces(begun, [piece])


def test_a_write_that_takes_less_at_a_time_is_finished(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:7], at))
    save(tmp_path, 4)
    assert read.verify(tmp_path / "step-00000004") == []


def test_without_fallocate_files_still_get_their_size(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    assert isinstance(save(tmp_path / "a", 4), write.SavedCheckpoint)
    monkeypatch.delattr(os, "posix_fallocate")
    assert isinstance(save(tmp_path / "b", 4), write.SavedCheckpoint)


def test_all_is_durable_before_it_has_its_name_and_the_name_before_the_answer(
    tmp_path, monkeypatch
):
    paths, events = {}, []
    real_open, real_fsync, real_rename = os.open, os.fsync, os.rename

    def opened(path, *args, **kwargs):
        descriptor = real_open(path, *args, **kwargs)
        paths[descriptor] = Path(path).name
        return descriptor

    def fsync(descriptor):
        events.append(paths[descriptor])
        real_fsync(descriptor)

    def rename(source, target):
        events.append(("rename", Path(target).name))
        real_rename(source, target)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save(tmp_path / "root", 4, small={"sub/x": b"x"})
    monkeypatch.undo()
    assert events[-5:] == [
        "manifest.json.tmp",
        ("rename", "manifest.json"),
        "step-00000004.partial",
        ("rename", "step-00000004"),
        "root",
    ]
    # Tensor files twice: once made, once written.
    assert sorted(events[:-5]) == sorted(
        [
            tmp_path.name,
            *SPEC,
            *SPEC,
            "config.json",
            form.STATE,
            "x",
            "sub",
            "step-00000004.partial",
        ]
    )


def calls_of_a_save(root):
    save(root, 2)
    with broken_disk(10**9, Killed()) as calls:
        save(root, 4)
    return calls


def test_a_disk_that_fails_at_any_call_leaves_the_old_checkpoint_and_no_partial(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    calls = calls_of_a_save(tmp_path / "count")
    for nth in range(len(calls)):
        root = tmp_path / str(nth)
        save(root, 2)
        with broken_disk(nth, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) as made:
            outcome = save(root, 4)
        call = made[nth]  # fsyncs go on beside other calls, so their order differs
        names = sorted(path.name for path in root.iterdir())
        both = ["step-00000002", "step-00000004"]
        if isinstance(outcome, write.SavedCheckpoint):  # mkdir of what exists may fail
            assert (call, names) == ("mkdir", both)
            continue
        assert outcome.failures[0].errno == errno.ENOSPC, (nth, call)
        # Only after the last rename is the checkpoint complete; it stays then.
        late = nth > len(calls) - 1 - calls[::-1].index("rename")
        assert names == (both if late else both[:1]), (nth, call)
        assert all(read.verify(root / name) == [] for name in names)
        assert isinstance(save(root, 6), write.SavedCheckpoint)


def test_a_kill_at_any_call_leaves_a_valid_newest_checkpoint(tmp_path):
    for nth, call in enumerate(calls_of_a_save(tmp_path / "count")):
        root = tmp_path / str(nth)
        save(root, 2)
        with broken_disk(nth, Killed()), pytest.raises(Killed):
            save(root, 4)
        found = read.find(root, RUN, Alone())
        assert not list(root.glob("*.damaged*")), (nth, call)
        assert found.step in (2, 4), (nth, call)
        assert isinstance(save(root, 6), write.SavedCheckpoint), (nth, call)
        assert not list(root.glob("*.partial"))


FULL_DISK = """
import resource, sys
from pathlib import Path
from helpers.checkpoints import SPEC, save
from llmtrain.types import TensorSpec
root = Path(sys.argv[1])
save(root, 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
large = {"model.safetensors": {"a": TensorSpec("F32", (100_000,))}}
print(save(root, 4, large).failures[0].errno)
"""


@pytest.mark.launches
def test_a_file_that_the_system_refuses_to_grow_is_a_failed_save(tmp_path):
    helpers = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": helpers},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    assert read.verify(tmp_path / "step-00000002") == []


POINTS = [point for point in faults.POINTS if point.startswith("save.")]
IN_BACKGROUND = "save.snapshot"


@pytest.fixture
def inject():
    yield lambda text: faults.install({"LLMTRAIN_FAULTS": text})
    faults.install({})


def test_a_save_comes_by_every_point_in_the_order_of_the_protocol(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(faults, "hit", lambda point, **about: seen.append((point, about["step"])))
    save(tmp_path, 4)
    assert list(dict.fromkeys(seen)) == [
        (f"save.{point}", 4)
        for point in [
            *("begin", "mkdir", "create", "small", "vote1", "write", "fsync"),
            *("vote2", "manifest", "dirsync", "rename", "parentsync", "done"),
        ]
    ]
    assert {point for point, _ in seen} == {*POINTS} - {IN_BACKGROUND}


@pytest.mark.parametrize("point", sorted({*POINTS} - {IN_BACKGROUND, "save.done"}))
def test_an_error_at_any_point_is_a_failed_vote(tmp_path, inject, caplog, point):
    save(tmp_path, 2)
    inject(f"{point}@step=4=eio")
    outcomes = on_ranks(2, lambda own: save(tmp_path, 4, ranks=own))
    assert outcomes[0] == outcomes[1]
    assert {failed.errno for failed in outcomes[0].failures} == {errno.EIO}
    names = sorted(path.name for path in tmp_path.iterdir())
    late = point == "save.parentsync"  # it has its name: it is complete
    assert names == ["step-00000002", *(["step-00000004"] if late else [])]
    assert isinstance(save(tmp_path, 6), write.SavedCheckpoint)


def test_a_defect_behind_the_commit_is_raised(tmp_path, inject):
    inject("save.done=raise")
    with pytest.raises(faults.InjectedError):
        save(tmp_path, 4)
    assert read.verify(tmp_path / "step-00000004") == []


@pytest.mark.parametrize("nth", range(1, 6))
def test_a_write_that_was_too_short_fails_the_save(tmp_path, inject, nth):
    inject(f"save.write@nth={nth}=short")
    outcome = save(tmp_path, 4)
    assert [failed.kind for failed in outcome.failures] == ["ValueError"]
    assert list(tmp_path.iterdir()) == []


def test_a_fault_is_told_which_part_of_this_ranks_share_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(form, "BLOCK_BYTES", 16)
    seen = []

    def hit(point, **about):
        if point == "save.write":
            seen.append((about["path"].name, about["written"], about["of"]))

    monkeypatch.setattr(faults, "hit", hit)
    save(tmp_path, 4)
    blocks = [16, 16, 16, 12, 12, 2, 7], [16, 16, 16, 12]
    share = sum(map(sum, blocks))
    names = [file for file, sizes in zip(SPEC, blocks, strict=True) for _ in sizes]
    written = itertools.accumulate([*blocks[0], *blocks[1]])
    assert seen == [(name, done, share) for name, done in zip(names, written, strict=True)]


@pytest.mark.parametrize("point", ["save.small", "save.create", "save.write", "save.manifest"])
def test_a_bit_that_flips_while_a_save_is_written_is_found_by_verifying(tmp_path, inject, point):
    inject(f"{point}@nth=1=flip:9" if point != "save.write" else f"{point}@nth=5=flip:300")
    save(tmp_path, 4)
    assert read.verify(tmp_path / "step-00000004")


def test_a_file_that_this_machine_does_not_see_yet_is_waited_for(tmp_path, monkeypatch):
    begun = write.begin(tmp_path, 4, SPEC, {}, Alone(), RUN)
    opened, slept, clock = os.open, [], iter(range(1000))
    absent = iter([errno.ENOENT, errno.ESTALE, errno.ENOENT])

    def late(path, *args, **kwargs):
        if Path(path).name == MODEL and (number := next(absent, None)):
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", late)
    monkeypatch.setattr(disk.time, "sleep", slept.append)
    monkeypatch.setattr(disk.time, "monotonic", lambda: next(clock))
    extents = write.write_pieces(begun, whole(SPEC, tensors(SPEC)))
    assert len(slept) == 3
    assert isinstance(write.commit(begun, extents, None, Alone()), write.SavedCheckpoint)


def test_a_file_that_stays_away_for_thirty_seconds_is_an_error(tmp_path, monkeypatch):
    begun = write.begin(tmp_path, 4, SPEC, {}, Alone(), RUN)
    slept, clock = [], itertools.count()
    (begun.partial / MODEL).unlink()
    monkeypatch.setattr(disk.time, "sleep", slept.append)
    monkeypatch.setattr(disk.time, "monotonic", lambda: next(clock))
    with pytest.raises(FileNotFoundError):
        write.write_pieces(begun, whole(SPEC, tensors(SPEC)))
    assert len(slept) == 30


def test_another_error_of_opening_is_not_waited_out(tmp_path, monkeypatch):
    begun = write.begin(tmp_path, 4, SPEC, {}, Alone(), RUN)
    monkeypatch.setattr(disk.time, "sleep", lambda _: pytest.fail("waited"))
    with broken_disk(0, OSError(errno.EACCES, "no")), pytest.raises(PermissionError):
        write.write_pieces(begun, whole(SPEC, tensors(SPEC)))


def test_there_is_a_sign_of_life_at_every_64_mib(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "BEAT_BYTES", 32)
    monkeypatch.setattr(form, "BLOCK_BYTES", 16)
    spec = {"model.safetensors": {"a": TensorSpec("F32", (64,))}}
    before, _ = system.last_beat()
    save(tmp_path, 4, spec)
    after, phase = system.last_beat()
    assert after - before == 256 // 32 + 1  # and one before the fsync
    assert phase == "fsync of model.safetensors of step 4"
    thread = threading.Thread(target=save, args=(tmp_path, 8, spec))
    system.beat("the forward")
    thread.start()
    thread.join()
    assert system.last_beat() == (after + 1 + 9, "the forward")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_a_checkpoint_as_its_own_hugging_face_format(tmp_path):
    import torch.distributed.checkpoint as dcp

    save(tmp_path, 4)
    values = tensors(SPEC, 4)
    into = {name: torch.zeros_like(value) for name, value in values.items()}
    reader = dcp.HuggingFaceStorageReader(str(tmp_path / "step-00000004"))
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert all(torch.equal(into[name], values[name]) for name in values)


def test_numpy_opens_a_checkpoint_without_torch(tmp_path):
    save(tmp_path, 4)
    with safe_open(tmp_path / "step-00000004" / MODEL, "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert (file.get_tensor("a.weight") == tensors(SPEC, 4)["a.weight"].numpy()).all()
