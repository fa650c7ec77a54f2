"""The card of an exported model (`README.md`): where it comes from, as far as the run knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from llmtrain.model.base import Base
from llmtrain.rundir import record
from llmtrain.text import harmless
from llmtrain.tools.use.load import base_of_adapter
from llmtrain.tools.use.target import Target
from llmtrain.types import JsonMapping

_SHOWN_VERSIONS = ("llmtrain", "torch", "transformers", "peft")
_UNKNOWN = "not stated; see those of the data and of the base"


def text(target: Target, dtype: str, *, merged: bool) -> str:
    """Return the card of an export.

    Files of this machine are named without their directories, since a card is made to be published.
    """
    from huggingface_hub import ModelCard, ModelCardData

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
    yield f"# {_name(target)}\n"
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
        return base_of_adapter(target.directory)
    frozen: JsonMapping = (target.state.get("auto") or {}).get("run") or {}
    base = frozen.get("base")
    return Base(base["path"], base["revision"], base["digest"]) if base else None


def _license(base: Base | None) -> str | None:
    """Return the licence on the base's own card, if it has one on this disk."""
    from huggingface_hub import ModelCard

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


def _name(target: Target) -> str:
    run = target.run_dir.name if target.run_dir else target.directory.name
    return _plain(run)


def _plain(text: str) -> str:
    """Return a name that cannot end a cell of the table."""
    return harmless(text).replace("|", "\\|")
