"""Write a checkpoint as a model directory of its own, and prove that it computes the same.

    DIR.partial   tensors shard by shard, config, tokenizer, card, all synced
    reload        another process loads it with transformers, and compares its loss with the run's
    DIR           renamed: it appears complete or not at all

No GPU is used, and no more of the model is in this process's memory than two files of the export.
"""

import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from llmtrain import system
from llmtrain.checkpoint import disk, format as form, read
from llmtrain.distributed.engines import state
from llmtrain.errors import Problem, needed_on_disk, raise_any
from llmtrain.model import tokenizer as tokenizers
from llmtrain.model.base import Base
from llmtrain.model.trainable import BASE_FILE
from llmtrain.model.untrusted import ADAPTER_CONFIG, INDEX
from llmtrain.rundir import record
from llmtrain.text import harmless
from llmtrain.tools.use import load, merge, proof
from llmtrain.tools.use.target import KEY, Target, find_target
from llmtrain.types import JsonMapping, JsonObject

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
# Files of a checkpoint that an export writes itself, or that belong to the run.
_OWN = {form.MANIFEST, form.STATE, "config.json", INDEX}
_SHOWN_VERSIONS = ("llmtrain", "torch", "transformers", "peft")
_UNKNOWN = "not stated; see those of the data and of the base"


@dataclass(frozen=True, slots=True)
class Exported:
    """A model directory that was written.

    files: name → size in bytes
    losses: of the export and of the run on the same blocks; None if they were not compared
    pushed: address on the Hub; None if it was not asked for
    """

    path: Path
    step: int
    files: Mapping[str, int]
    losses: proof.Losses | None
    pushed: str | None

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(self.files.values())

    def to_json(self) -> JsonObject:
        """Return the object that `llmtrain export --json` prints."""
        return {**asdict(self), "path": str(self.path), "bytes": self.bytes}


def export(
    run_or_checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str = "fp32",
    merge_adapters: bool = False,
    shard_gb: float = 4.0,
    push: str | None = None,
    verify: bool = True,
    on_progress: Callable[[str], object] = lambda doing: None,
) -> Exported:
    """Write the weights, config, tokenizer and card of a checkpoint to a new directory.

    run_or_checkpoint: a run (its best checkpoint, else the newest) or a checkpoint
    dtype: fp32, bf16 or fp16
    merge_adapters: write the model with its adapters merged into it; else they are written alone
    shard_gb: GiB of the largest weight file
    push: Hub id of a private repository to upload it to, with the token in HF_TOKEN
    verify: whether another process loads it and compares its loss with the run's
    on_progress: called with what is done next

    Raises UserError for bad input, RunError 74 if the disk fails, 1 if the export computes another
    loss than the run.
    """
    target, out = find_target(str(run_or_checkpoint)), Path(out)
    raise_any(_problems(target, out, dtype, merge_adapters, shard_gb, push))
    if push is not None:
        proof.check_repository(push)
    if target.is_adapter:
        load.base_directory(target.directory)  # it is there, or no work is begun
    on_progress(f"verifying {target.directory.name}")
    raise_any(read.verify(target.directory))
    partial = out.with_name(f"{out.name}.partial")
    listed = form.load(target.directory).files
    _write(target, partial, listed, dtype, shard_gb, merged=merge_adapters, on_progress=on_progress)
    losses = None
    if verify:
        on_progress("loading it in another process")
        losses = proof.compare(target, partial, dtype)
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    sizes = {p.relative_to(partial).as_posix(): p.stat().st_size for p in files}
    with needed_on_disk(out):
        system.sync_directory(*form.parents(partial, sizes))
        partial.rename(out)
        system.sync_directory(out.absolute().parent)
    assert target.step is not None
    address = None if push is None else proof.upload(out, push)
    return Exported(out, target.step, sizes, losses, address)


def _problems(
    target: Target, out: Path, dtype: str, merge_adapters: bool, shard_gb: float, push: str | None
) -> Iterator[Problem]:
    if target.step is None:
        expected = "a run or one of its checkpoints"
        yield Problem(KEY, target.given, expected, "a model directory can be used as it is")
    yield from _occupied(out)
    if dtype not in DTYPES:
        yield Problem("--dtype", dtype, f"one of {', '.join(DTYPES)}")
    if merge_adapters and not target.is_adapter:
        expected = "a checkpoint of adapters; this one is a whole model already"
        yield Problem("--merge-adapters", target.given, expected, "leave it out")
    alone = push is not None and target.is_adapter and not merge_adapters
    if alone and Path(base := load.base_of_adapter(target.directory).path).is_dir():
        expected = f"an adapter whose base is on the Hub; nobody else has {base}"
        yield Problem("--push", push, expected, "--merge-adapters")
    if not 0 < shard_gb < 1 << 20:
        yield Problem("--shard-gb", shard_gb, "a number of GiB above 0")


def _occupied(out: Path) -> Iterator[Problem]:
    """Yield a problem if `out` exists, cannot be made, or something else has its partial's name."""
    partial = out.with_name(f"{out.name}.partial") if out.name else out
    for path in (out, partial):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            yield Problem("--out", out, f"a directory that can be made ({why})")
            return
        if path == out:
            yield Problem("--out", out, "a directory that does not exist yet")
            return
        if not stat.S_ISDIR(mode):
            expected = f"a name for which {partial} is free while it is written"
            yield Problem("--out", out, expected)


def _write(
    target: Target,
    partial: Path,
    listed: Collection[str],
    dtype: str,
    shard_gb: float,
    *,
    merged: bool,
    on_progress: Callable[[str], object],
) -> None:
    """Write all files. What an export that was cut off left under this name is removed.

    listed: the files of the checkpoint; others in its directory are of somebody else
    """
    directory, kind = target.directory, DTYPES[dtype]
    alone = target.is_adapter and not merged
    weights = None if alone else _weights(target, listed, kind)
    on_progress(f"writing {partial}")
    with needed_on_disk(partial):
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    if weights is None:
        _write_adapter(directory, partial, kind)
    else:
        spec = state.files("model", weights.specs, int(shard_gb * 2**30), numbered=False)
        load.write(partial, spec, weights.read)
        config = weights.config.to_json_string(use_diff=True).encode()
        _write_small(partial, {"config.json": config, **state.index(spec)})
    _copy(directory, listed, partial, card(target, dtype, merged=merged))


def _weights(target: Target, listed: Collection[str], dtype: str) -> merge.Weights:
    if not target.is_adapter:
        return merge.whole(target.directory, listed, dtype)
    entries = tokenizers.length_of(tokenizers.load(str(target.directory), None))
    return merge.merged_weights(target, entries, dtype)


def _write_adapter(directory: Path, partial: Path, dtype: str) -> None:
    stored = load.Stored.of(directory, state.ADAPTER)
    specs = merge.cast_specs(stored.specs, dtype)
    spec = {state.ADAPTER: dict(sorted(specs.items()))}
    load.write(partial, spec, lambda name: merge.cast(stored.read(name), dtype))
    names = [name for name in (ADAPTER_CONFIG, BASE_FILE) if (directory / name).exists()]
    _write_small(partial, {name: (directory / name).read_bytes() for name in names})


def _copy(directory: Path, listed: Collection[str], partial: Path, readme: str) -> None:
    """Take the tokenizer's files and the generation config as they are; add the card."""
    ours = {ADAPTER_CONFIG, BASE_FILE, state.ADAPTER, *_OWN}
    taken = [name for name in listed if name not in ours and not name.endswith(form.TENSORS)]
    files = {name: (directory / name).read_bytes() for name in taken}
    _write_small(partial, {**files, "README.md": readme.encode()})


def _write_small(partial: Path, files: Mapping[str, bytes]) -> None:
    with needed_on_disk(partial), disk.sync_together() as sync:
        for name, body in files.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            sync(disk.new(partial / name, body, len(body)))


def card(target: Target, dtype: str, *, merged: bool) -> str:
    """Return the card of an export.

    Files of this machine are named without their directories, since a card is made to be published.
    """
    base, scores = _base(target), target.preference.loss == "reward"
    sources: Sequence[JsonMapping] = target.manifest.get("sources", ())
    data = ModelCardData(
        base_model=_hub_id(base.path) if base else None,
        datasets=[source["path"] for source in sources if source["remote"]] or None,
        license=_license(base),
        library_name="peft" if target.is_adapter and not merged else "transformers",
        pipeline_tag="text-classification" if scores else "text-generation",
        tags=["llmtrain"],
    )
    body = "\n".join(_lines(target, base, sources, dtype, data.license))
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n"))


def _lines(
    target: Target,
    base: Base | None,
    sources: Sequence[JsonMapping],
    dtype: str,
    license_: str | None,
) -> Iterator[str]:
    yield f"# {_plain((target.run_dir or target.directory).name)}\n"
    yield "Trained with llmtrain.\n"
    yield "| | |\n|---|---|"
    if base:
        commit = f" at {base.revision}" if base.revision else ""
        yield f"| base | {_plain(_hub_id(base.path) or Path(base.path).name)}{commit} |"
    if (asked := target.preference).answers:
        beta = "" if asked.loss == "reward" else f", beta {asked.beta:g}"
        yield f"| preference loss | {asked.loss}{beta} |"
    for source in sources:
        where = source["path"] if source["remote"] else Path(source["path"]).name
        at = f" at {source['revision']}" if source.get("revision") else ""
        yield f"| data | {_plain(where)}{at} |"
    yield f"| licence | {license_ or _UNKNOWN} |"
    yield f"| step | {target.step:,} |"
    if tokens := target.state.get("tokens"):
        yield f"| trained tokens | {tokens:,} |"
    for name, loss in _losses(target):
        yield f"| {name} | {loss:.4f} |"
    yield f"| weights | {dtype} |"
    versions = target.state.get("versions") or {}
    known = [f"{name} {versions[name]}" for name in _SHOWN_VERSIONS if name in versions]
    yield f"| versions | {', '.join(known)} |"


def _losses(target: Target) -> Iterator[tuple[str, float]]:
    """Yield the training loss of the step, and the held-out loss that the checkpoint has."""
    lines = record.record(target.run_dir) if target.run_dir else []
    trained = [line for line in lines if line["kind"] == "train" and line["step"] == target.step]
    if trained and isinstance(trained[-1].get("loss"), float):
        yield "training loss", trained[-1]["loss"]
    evaluation = target.state.get("evaluation") or {}
    if isinstance(evaluation.get("loss"), float):
        yield f"held-out loss (step {evaluation.get('step', '?')})", evaluation["loss"]


def _base(target: Target) -> Base | None:
    """Return the model that training started from; None for one trained from scratch."""
    if target.is_adapter:
        return load.base_of_adapter(target.directory)
    frozen: JsonMapping = (target.state.get("auto") or {}).get("run") or {}
    base = frozen.get("base")
    return Base(base["path"], base["revision"], base["digest"]) if base else None


def _license(base: Base | None) -> str | None:
    """Return the licence on the base's own card, if it has one on this disk."""
    path = Path(base.path) / "README.md" if base else None
    if path is None or not path.is_file():
        return None
    try:
        license_ = ModelCard(path.read_text("utf-8", errors="replace")).data.get("license")
    except ValueError:  # no valid card: its licence is not known
        return None
    return license_ if isinstance(license_, str) else None


def _hub_id(path: str) -> str | None:
    """Return a Hub id; None for a directory of this machine."""
    return None if Path(path).exists() or path.startswith((".", "/", "~")) else path


def _plain(text: str) -> str:
    """Return a name that cannot end a cell of the table."""
    return harmless(text).replace("|", "\\|")
