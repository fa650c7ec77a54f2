"""What `checkpoint.py` compares on a disk: writing, digests, verifying, reading.

Contenders take turns within a round, so that a machine that slows down slows all of them; a ratio
is the median of the rounds' ratios.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from xxhash import xxh3_128

from llmtrain.agreement import Alone
from llmtrain.checkpoint import format as form
from llmtrain.checkpoint import read, write
from llmtrain.checkpoint.background import Writer
from llmtrain.types import Piece, Spec, TensorSpec

RUN = "0123456789abcdef"
MIB = 1 << 20
BLOCK = 4 * MIB


def spec_of(parameters: int, width: int = 2048) -> Spec:
    """A model of square matrices, and AdamW's moments: 12 bytes a parameter."""
    count = max(parameters // width**2, 1)
    names = [f"layers.{i}.weight" for i in range(count)]
    moments = [f"{name}.{moment}" for name in names for moment in ("exp_avg", "exp_avg_sq")]
    one = TensorSpec("F32", (width, width))
    return {
        "model.safetensors": dict.fromkeys(names, one),
        "optimizer-00001-of-00001.safetensors": dict.fromkeys(moments, one),
    }


def values_of(spec: Spec) -> dict[str, torch.Tensor]:
    """Noise: no disk or file system can make less of it."""
    return {name: torch.randn(one.shape) for part in spec.values() for name, one in part.items()}


def pieces_of(values: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
    """Whole tensors."""
    return (Piece(name, 0, value.view(-1)) for name, value in values.items())


def bytes_of(spec: Spec) -> int:
    """Of all tensors."""
    return sum(form.tensor_bytes(one) for part in spec.values() for one in part.values())


def saved(root: Path, step: int, spec: Spec, values: Mapping[str, torch.Tensor]) -> Path:
    """Begin, pieces, commit, with as many small files as a run has."""
    state = form.canonical({"format": 1, "run_id": RUN, "step": step, "evaluation": None})
    small = {f"small-{i}.json": b"{}" * 500 for i in range(4)}
    small |= {"config.json": b"{}", form.STATE: state}
    begun = write.begin(root, step, spec, small, Alone(), RUN)
    assert isinstance(begun, write.Begun), begun
    done = write.commit(begun, write.write_pieces(begun, pieces_of(values)), None, Alone())
    assert isinstance(done, write.Committed), done
    return root / done.name


def plain(root: Path, values: Mapping[str, torch.Tensor]) -> None:
    """One file, from front to end, and fsync."""
    with (root / "plain").open("wb", buffering=0) as file:
        for value in values.values():
            data = value.view(-1).view(torch.uint8).numpy().data
            for first in range(0, data.nbytes, BLOCK):
                file.write(data[first : first + BLOCK])
        os.fsync(file.fileno())


def torch_save(root: Path, values: Mapping[str, torch.Tensor]) -> None:
    """`torch.save` and fsync: what is compared with."""
    with (root / "torch.pt").open("wb") as file:
        torch.save(dict(values), file)  # noqa: TID251  # what is compared with
        file.flush()
        os.fsync(file.fileno())


def save_file(root: Path, values: Mapping[str, torch.Tensor]) -> None:
    """`safetensors.torch.save_file` and fsync."""
    from safetensors.torch import save_file as save

    save(dict(values), root / "file.safetensors")
    with (root / "file.safetensors").open("rb") as file:
        os.fsync(file.fileno())


def dcp(root: Path, values: Mapping[str, torch.Tensor]) -> None:
    """torch's distributed checkpoint, which fsyncs by itself."""
    import torch.distributed.checkpoint as distributed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed.save(dict(values), checkpoint_id=root / "dcp", no_dist=True)


class Timed:
    """The digest of a save, which counts the seconds that are spent in it."""

    seconds = 0.0

    def __init__(self) -> None:
        self._inner = xxh3_128()

    def update(self, data: memoryview) -> None:
        """As xxhash's."""
        began = time.perf_counter()
        self._inner.update(data)
        Timed.seconds += time.perf_counter() - began

    def hexdigest(self) -> str:
        """As xxhash's."""
        return self._inner.hexdigest()


def digests_share(root: Path, spec: Spec, values: Mapping[str, torch.Tensor]) -> float:
    """Percent of a save's time that is spent in its digests."""
    with mock.patch.object(write, "xxh3_128", Timed):
        Timed.seconds, began = 0.0, time.perf_counter()
        saved(root, 2, spec, values)
        return 100 * Timed.seconds / (time.perf_counter() - began)


def read_all(directory: Path) -> None:
    """Every file from front to end into one buffer."""
    buffer = memoryview(bytearray(BLOCK))
    for path in sorted(directory.iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def verified(directory: Path) -> None:
    """As before a load."""
    assert read.verify(directory) == []


def forget(directory: Path) -> None:
    """Out of the page cache, as far as the system does what it is asked for."""
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def rounds(
    count: int, work: Mapping[str, Callable[[], object]], before: Callable[[], object]
) -> dict[str, list[float]]:
    """Seconds of each, turn by turn; `before` each turn, outside of the time."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(count):
        names = list(work)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            before()
            began = time.perf_counter()
            work[name]()
            found[name].append(time.perf_counter() - began)
    return found


def ratio(found: Mapping[str, list[float]], one: str, other: str) -> float:
    """How many times as fast `one` is as `other`."""
    pairs = zip(found[other], found[one], strict=True)
    return statistics.median(slow / fast for slow, fast in pairs)


def writing(bench: Any, folder: Path) -> None:
    """Write + digest + fsync, beside others and beside a plain write."""
    spec = spec_of(bench.sizes.parameters)
    values, size = values_of(spec), bytes_of(spec)
    root = folder / "root"

    def clear() -> None:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()

    found = rounds(
        bench.sizes.rounds,
        {
            "ours": lambda: saved(root, 1, spec, values),
            "plain": lambda: plain(root, values),
            "torch.save": lambda: torch_save(root, values),
            "save_file": lambda: save_file(root, values),
            "DCP": lambda: dcp(root, values),
        },
        clear,
    )
    clear()
    rate = {name: size / statistics.median(seconds) / 1e9 for name, seconds in found.items()}
    bench.say(
        f"a save of {size / 1e6:,.0f} MB: files, digests, fsync, commit", rate["ours"], "GB/s"
    )
    for name, more in [("plain", " sequential write"), ("torch.save", ""), ("save_file", "")]:
        bench.say(f"  {name}{more} + fsync", rate[name], "GB/s")
    bench.say("  DCP (it syncs by itself)", rate["DCP"], "GB/s")
    bench.say("  a save over a plain write", 100 * ratio(found, "ours", "plain"), "%", "≥ 70")
    bench.say("  a save over torch.save", ratio(found, "ours", "torch.save"), "times", "≥ 1.3")
    bench.say("  a save over save_file", ratio(found, "ours", "save_file"), "times")
    bench.say("  a save over DCP", ratio(found, "ours", "DCP"), "times")
    shares = [digests_share(root / str(i), spec, values) for i in range(bench.sizes.rounds)]
    bench.say("  digests, of the time of a save", statistics.median(shares), "%", "≤ 10")


def verifying(bench: Any, folder: Path) -> None:
    """Verify against a sequential read, from the page cache and from the disk."""
    spec = spec_of(bench.sizes.parameters)
    directory, size = saved(folder / "verify", 1, spec, values_of(spec)), bytes_of(spec)
    work = {"verify": lambda: verified(directory), "read": lambda: read_all(directory)}
    read_all(directory)
    warm = rounds(bench.sizes.rounds, work, lambda: None)
    cold = rounds(bench.sizes.rounds, work, lambda: forget(directory))
    for name, found in [("from the page cache", warm), ("from the disk", cold)]:
        rate = {one: size / statistics.median(seconds) / 1e9 for one, seconds in found.items()}
        bench.say(f"verifying {size / 1e6:,.0f} MB, {name}", rate["verify"], "GB/s")
        bench.say("  sequential read", rate["read"], "GB/s")
        percent = 100 * ratio(found, "verify", "read")
        bench.say("  verifying over reading", percent, "%", "≥ 70")
    shutil.rmtree(folder / "verify")


def beside(bench: Any, folder: Path) -> None:
    """A save beside other work that outlasts the copy, and one in line, of the same tensors."""
    spec = spec_of(bench.sizes.large)
    values, size = values_of(spec), bytes_of(spec)
    writer, root = Writer(), folder / "root"
    in_line, blocked, copied = [], [], []
    for turn in range(bench.sizes.saves + 1):
        shutil.rmtree(root, ignore_errors=True)
        began = time.perf_counter()
        saved(root, 1, spec, values)
        in_line.append(time.perf_counter() - began)
        waited, copying = _beside_work(root, writer, spec, values, 2 * max(copied, default=1.0))
        if turn:  # the first takes the memory for its copy
            blocked.append(waited)
        copied.append(copying)
    whole, waited = statistics.median(in_line), statistics.median(blocked)
    bench.say(f"a save of {size / 1e6:,.0f} MB in line", whole, "s")
    bench.say("  beside other work: blocked", waited, "s")
    goal, figure = ("≤ 5", 100 * waited / whole) if whole >= 1.5 else ("≤ 60", 1e3 * waited)
    name = "of the save in line" if whole >= 1.5 else "of it, in line below 1.5 s"
    bench.say(f"  {name}", figure, "%" if whole >= 1.5 else "ms", goal)
    bench.say("  the copy, beside that work", statistics.median(copied[1:]), "s")


def _beside_work(
    root: Path, writer: Writer, spec: Spec, values: Mapping[str, torch.Tensor], seconds: float
) -> tuple[float, float]:
    """One save as the loop makes it: (seconds blocked, seconds until the copy was made).

    seconds: of matrix products between the begin and the update, as forward and backward.
    """
    state = form.canonical({"format": 1, "run_id": RUN, "step": 2, "evaluation": None})
    began = time.perf_counter()
    begun = write.begin(root, 2, spec, {"config.json": b"{}", form.STATE: state}, Alone(), RUN)
    assert isinstance(begun, write.Begun), begun
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
    done = write.commit(begun, extents, error, Alone())
    assert isinstance(done, write.Committed), done
    return in_line + writer.release() + time.perf_counter() - began, copied
