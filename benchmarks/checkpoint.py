"""What do saving, verifying and loading cost beside what one would use instead?

A save is all of it: files with their room, digests, fsync, manifest, rename; a plain write is the
same bytes and fsync. Memory is the peak above a process's own state. A ratio is the median of the
rounds' ratios; above 100 % it tells of others that fsync.
"""

import contextlib
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import Bench, apart, around, config_of, in_turns, llama, main, ranks, timed, timing

from llmtrain.agreement import Alone
from llmtrain.checkpoint import format as form, read, write
from llmtrain.checkpoint.background import Writer
from llmtrain.types import Piece, Spec, TensorSpec

RUN = "0123456789abcdef"
MIB = 1 << 20
BLOCK = 4 * MIB
WIDTH, RANKS = 1024, 2  # of the tensors whose memory is measured; processes that share them
Values = Mapping[str, torch.Tensor]


def spec_of(parameters: int, width: int = 2048) -> Spec:
    """Return a model of square matrices, and AdamW's moments: 12 bytes a parameter."""
    count = max(parameters // width**2, 1)
    names = [f"layers.{i}.weight" for i in range(count)]
    moments = [f"{name}.{moment}" for name in names for moment in ("exp_avg", "exp_avg_sq")]
    one = TensorSpec("F32", (width, width))
    return {
        "model.safetensors": dict.fromkeys(names, one),
        "optimizer-00001-of-00001.safetensors": dict.fromkeys(moments, one),
    }


def values_of(spec: Spec) -> dict[str, torch.Tensor]:
    """Return noise: no disk or file system can make less of it."""
    return {name: torch.randn(one.shape) for part in spec.values() for name, one in part.items()}


def model_of(parameters: int) -> tuple[Spec, dict[str, torch.Tensor], int]:
    """A model, its values, and their bytes."""
    spec = spec_of(parameters)
    values = values_of(spec)
    return spec, values, sum(value.nbytes for value in values.values())


def pieces_of(values: Values) -> Iterator[Piece]:
    return (Piece(name, 0, value.view(-1)) for name, value in values.items())


def begin(root: Path, step: int, spec: Spec, who: Any = None, files: int = 1) -> write.OpenSave:
    """Begin a save, with so many small files."""
    state = form.canonical({"format": 1, "run_id": RUN, "step": step, "evaluation": None})
    small = {f"small-{i}.json": b"{}" * 500 for i in range(files - 1)}
    small |= {"config.json": b"{}", form.STATE: state}
    begun = write.begin(root, step, spec, small, who or Alone(), RUN)
    assert isinstance(begun, write.OpenSave), begun
    return begun


def commit(begun: write.OpenSave, extents: Any, error: Any = None, who: Any = None) -> str:
    done = write.commit(begun, extents, error, who or Alone())
    assert isinstance(done, write.SavedCheckpoint), done
    return done.name


def saved(root: Path, step: int, spec: Spec, values: Values) -> Path:
    begun = begin(root, step, spec, files=5)
    return root / commit(begun, write.write_pieces(begun, pieces_of(values)))


def torch_save(path: Path, state: Any) -> None:
    """`torch.save` with fsync."""
    with path.open("wb") as file:
        torch.save(state, file)  # noqa: TID251  # what is compared with
        file.flush()
        os.fsync(file.fileno())


def ratio(found: Mapping[str, list[float]], one: str, other: str) -> float:
    """Return how many times as fast `one` is as `other`."""
    pairs = zip(found[other], found[one], strict=True)
    return statistics.median(slow / fast for slow, fast in pairs)


def writing(bench: Bench) -> None:
    root = bench.folder / "root"
    spec, values, size = model_of(bench.sizes.parameters)

    def clear() -> None:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()

    def plain() -> None:  # one file, from front to end
        with (root / "plain").open("wb", buffering=0) as file:
            for value in values.values():
                data = value.view(-1).view(torch.uint8).numpy().data
                for first in range(0, data.nbytes, BLOCK):
                    file.write(data[first : first + BLOCK])
            os.fsync(file.fileno())

    works = {
        "ours": lambda: saved(root, 1, spec, values),
        "plain": plain,
        "torch.save": lambda: torch_save(root / "torch.pt", values),
    }
    found = in_turns(bench.sizes.rounds, works, before=clear)
    rate = {name: size / statistics.median(seconds) / 1e9 for name, seconds in found.items()}
    name = f"a save of {size / 1e6:,.0f} MB: files, digests, fsync, commit"
    bench.say(name, rate["ours"], "GB/s")
    bench.say("  plain sequential write + fsync", rate["plain"], "GB/s")
    bench.say("  torch.save + fsync", rate["torch.save"], "GB/s")
    bench.say("  a save over a plain write", 100 * ratio(found, "ours", "plain"), "%", "≥ 70")
    bench.say("  a save over torch.save", ratio(found, "ours", "torch.save"), "times", "≥ 1.3")


def verifying(bench: Bench) -> None:
    spec, values, size = model_of(bench.sizes.parameters)
    directory = saved(bench.folder / "verify", 1, spec, values)

    def read_all() -> None:
        buffer = memoryview(bytearray(BLOCK))
        for path in sorted(directory.iterdir()):
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def verified() -> None:
        assert read.verify(directory) == []

    def forget() -> None:  # as far as the system does what it is asked for
        for path in directory.iterdir():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    read_all()
    for name, before in (("from the page cache", lambda: None), ("from the disk", forget)):
        works = {"verify": verified, "read": read_all}
        found = in_turns(bench.sizes.rounds, works, before=before)
        rate = {one: size / statistics.median(seconds) / 1e9 for one, seconds in found.items()}
        bench.say(f"verifying {size / 1e6:,.0f} MB, {name}", rate["verify"], "GB/s")
        bench.say("  sequential read", rate["read"], "GB/s")
        percent = 100 * ratio(found, "verify", "read")
        bench.say("  verifying over reading", percent, "%", "≥ 70")


def small(bench: Bench) -> None:
    found = {}
    for background in (False, True):
        steps = 6 * bench.sizes.rounds
        path = config_of(
            bench.folder / f"background-{background}",
            llama(96, 6, 4, 384) | {"tie_word_embeddings": False},  # 1 M parameters
            steps=steps,
            rows=2,
            data={"workers": 0, "heldout": 0.005},
            training={"micro_batch_size": 2},
            checkpoint={"every_steps": 6, "background": background, "keep_best": 0, "keep_last": 2},
            evaluation={"every_steps": 10_000, "max_documents": 8},
            logging={"every_steps": 1},
        )
        asked = {"what": "resume", "config": str(path), "steps": steps}
        found[background] = apart(__file__, asked)
    line, beside = found[False], found[True]
    model = "1 M parameters"
    milliseconds = 1e3 * statistics.median(one["seconds"] for one in line["saves"])
    name = f"a save of {model} ({line['saves'][0]['bytes'] / 1e6:.0f} MB) in line"
    bench.say(name, milliseconds, "ms", "≤ 150")
    bench.say("a resume of it: searching, verifying, loading", line["resuming"], "s", "≤ 1")
    bench.say("  that whole start, from `train` to its first step", line["start"], "s")
    blocked = 1e3 * statistics.median(one["blocked_seconds"] for one in beside["saves"])
    bench.say(f"a save of {model} beside the training: blocked", blocked, "ms", "≤ 60")


def resume(config: str, steps: int) -> dict[str, Any]:
    from llmtrain import load_config, open_run, train

    told, resuming = dict[str, Any](), list[float]()
    with contextlib.redirect_stdout(sys.stderr):
        train(load_config(config))
        began = time.perf_counter()

        def begins(original: Any, run: Any, step: int) -> None:
            told.setdefault("start", time.perf_counter() - began)
            original(run, step)

        resumed = timing(resuming, time.perf_counter)
        search, fill = partial(resumed, read.find), partial(resumed, read.load_tensors)
        with mock.patch.multiple(read, find=search, load_tensors=fill), around(begin=begins):
            again = load_config(config, [f"training.steps={steps + 1}"])
            train(again)
    saves = open_run(again.run_dir).metrics("checkpoint")
    return told | {"resuming": sum(resuming), "saves": saves}


def beside(bench: Bench) -> None:
    writer, root = Writer(), bench.folder / "root"
    spec, values, size = model_of(bench.sizes.large)
    in_line, blocked, copied = list[float](), list[float](), list[float]()
    for turn in range(bench.sizes.saves + 1):
        shutil.rmtree(root, ignore_errors=True)
        with timed(in_line, time.perf_counter):
            saved(root, 1, spec, values)
        waited, copying = beside_work(root, writer, spec, values, 2 * max(copied, default=1.0))
        if turn:  # the first takes the memory for its copy
            blocked.append(waited)
        copied.append(copying)
    whole, waited = statistics.median(in_line), statistics.median(blocked)
    bench.say(f"a save of {size / 1e6:,.0f} MB in line", whole, "s")
    bench.say("  beside other work: blocked", waited, "s")
    if whole >= 1.5:
        bench.say("  of the save in line", 100 * waited / whole, "%", "≤ 5")
    else:
        bench.say("  of it, in line below 1.5 s", 1e3 * waited, "ms", "≤ 60")
    bench.say("  the copy, beside that work", statistics.median(copied[1:]), "s")


def beside_work(
    root: Path, writer: Writer, spec: Spec, values: Values, seconds: float
) -> tuple[float, float]:
    """Make one save as the loop makes it.

    seconds: of matrix products between the begin and the update, as forward and backward

    Returns (seconds blocked, seconds until the copy was made).
    """
    began = time.perf_counter()
    begun = begin(root, 2, spec)
    in_line = time.perf_counter() - began
    writer.submit(begun, pieces_of(values), frozenset())
    started = time.perf_counter()
    one, copied = torch.randn(512, 512), 0.0
    while time.perf_counter() - started < seconds or writer.state == "writing":
        one = (one @ one).clamp(-1, 1)
        if not copied and writer._copied.is_set():
            copied = time.perf_counter() - started
        if time.perf_counter() - started >= seconds:
            writer.wait_snapshot()
    error, extents = writer.finish()
    began = time.perf_counter()
    commit(begun, extents, error)
    return in_line + writer.release() + time.perf_counter() - began, copied


def memory(bench: Bench) -> None:
    for what, name in (
        ("save", "a save in line"),
        ("load", "a load, with its verifying"),
        ("rank0", "a save of two ranks' halves by rank 0"),
    ):
        for parameters in bench.sizes.memory:
            place = str(bench.folder / f"memory-{parameters}")
            asked = {"what": "memory", "kind": what, "parameters": parameters, "folder": place}
            count = RANKS if what == "rank0" else 1
            row = ranks(__file__, asked, count)[0] if count > 1 else apart(__file__, asked)
            # Rank 0 of a sharded run holds one tensor of the others besides.
            limit = f"≤ {128 + (4 * WIDTH**2 / MIB if what == 'rank0' else 0):.0f}"
            name_ = f"memory of {name}, state of {12 * parameters / MIB:,.0f} MiB"
            bench.say(name_, row["above_bytes"] / MIB, "MiB", limit)


def above(kind: str, parameters: int, folder: str) -> dict[str, int]:
    """The peak of resident memory above what was resident with the state alone.

    Of a load above what is resident once it is loaded.
    """
    from llmtrain.metrics.memory import peak_bytes, reset_peak, resident_bytes

    cpu, root = torch.device("cpu"), Path(folder) / "root"

    def load(root: Path, spec: Spec) -> dict[str, torch.Tensor]:
        found = read.find(root, None, Alone())
        assert found is not None
        values = values_of(spec)
        read.load_tensors(found, spec, pieces_of(values), Alone())
        return values

    spec = spec_of(1, 64)  # what libraries take at their first use is no part of it
    warm = Path(folder) / f"warm-{kind}-{os.environ.get('RANK')}"
    saved(warm, 1, spec, values_of(spec))
    load(warm, spec)
    spec = spec_of(parameters, WIDTH)
    if kind == "rank0":
        held = sent(spec, Path(folder) / "sent")
    elif kind == "save":
        values = values_of(spec)
        held = reset_peak(cpu)
        saved(root, 1, spec, values)
    else:
        reset_peak(cpu)
        values = load(root, spec)
        held = resident_bytes()
    return {"above_bytes": peak_bytes(cpu) - held}


def sent(spec: Spec, root: Path) -> int:
    """Save halves of every tensor on two ranks, which rank 0 writes; the bytes held before."""
    from datetime import timedelta

    import torch.distributed as dist

    from llmtrain.distributed.ranks import RankGroup
    from llmtrain.metrics.memory import reset_peak

    dist.init_process_group("gloo")
    group, half = RankGroup(timedelta(minutes=5)), WIDTH**2 // RANKS
    names = [name for part in spec.values() for name in part]
    own = [Piece(name, half * group.rank, torch.randn(half)) for name in names]
    group.vote(None)
    held = reset_peak(torch.device("cpu"))
    begun = begin(root, 1, spec, group)
    commit(begun, write.collect_pieces(begun, own, group), None, group)
    dist.destroy_process_group()
    return held


SIZES = {
    "rounds": (5, 1),
    "parameters": (42_000_000, 4_200_000),  # written and verified
    "large": (160_000_000, 8_400_000),  # saved beside other work, `saves` times
    "saves": (5, 1),
    "memory": ((4 * MIB, 16 * MIB, 48 * MIB), (2 * MIB,)),
}

if __name__ == "__main__":
    parts = {"writing": writing, "verifying": verifying, "small": small, "beside": beside}
    parts |= {"memory": memory}
    children = {"resume": resume, "memory": above}
    main(__doc__, parts, SIZES, paths={"dir": False}, child=children, pinned=False)
