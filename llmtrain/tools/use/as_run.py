"""A model as a run saw the one that it began with: what `evaluate BASE --as RUN` measures.

    weights of BASE ─► a row for each entry of RUN's tokenizer, new ones the mean of the others
                    ─► RUN's attention ─► RUN's adapters, which are still without effect

These are the steps of a start, made by the same functions. So the figures of RUN's own base are
those of RUN's evaluation before its first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.data.manifest import glance
from llmtrain.data.tokens.probe_texts import PROBES
from llmtrain.errors import Problem, UserError
from llmtrain.model import tokenizer as tokenizers
from llmtrain.model.base import Base
from llmtrain.model.trainable import adapters
from llmtrain.rundir import contents
from llmtrain.rundir.auto import Auto
from llmtrain.tools.use import four_bits
from llmtrain.tools.use.target import KEY, Target, find
from llmtrain.training.start.adapters import resolve_adapter, trained_tokens
from llmtrain.training.start.base import kept_base, what_changed

OPTION = "--as"


@dataclass(frozen=True, slots=True)
class Seen:
    """A run, and what it does with the model that it begins with.

    config: the one that began it
    precision: of its forward
    """

    run_dir: Path
    config: Config
    precision: str

    @property
    def tokenizer(self) -> Path:
        """The directory of its tokenizer, with its chat template."""
        return self.run_dir / contents.TOKENIZER


def seen_by(run_dir: Path) -> Seen:
    """Read what a run does with its base. Raises UserError for a directory that is no run."""
    needed = (contents.CONFIG, contents.MANIFEST, contents.AUTO)
    if missing := [name for name in needed if not (run_dir / name).is_file()]:
        expected = f"a run that has begun, not a model or a checkpoint; no {', '.join(missing)}"
        raise UserError(Problem(OPTION, run_dir, expected))
    config = load_config(run_dir / contents.CONFIG, {"run.dir": str(run_dir)})
    precision = Auto(run_dir, "").run.get("precision", "fp32")
    return Seen(run_dir, config, precision)


def find_base(given: str, seen: Seen) -> Target:
    """Find a model. The base of the run is read at the commit that the run read.

    Raises UserError as `find` does, and for a model whose tokens are not those of the run.
    """
    kept = kept_base(seen.run_dir)
    is_own = kept is not None and kept.revision is not None and kept.path == given
    target = find(given, kept.revision if kept is not None and is_own else None)
    if kept is not None and kept.digest is not None:
        place = Base(str(target.directory), None, kept.digest)
        is_own = what_changed(place) is None
    if not is_own:  # else the run's tokenizer is the one that the run gave it
        _refuse_other_tokens(target, seen)
    return target


def _refuse_other_tokens(target: Target, seen: Seen) -> None:
    """Raise UserError unless each id means the same to a model as to a run.

    The run may have added tokens, for which the model has no rows yet.
    """
    own, other = (
        tokenizers.load(str(directory), None) for directory in (seen.tokenizer, target.directory)
    )
    entries, theirs = own.get_vocab(), other.get_vocab()
    by_id = {id: entry for entry, id in entries.items()}
    added = {str(token) for token in own.added_tokens_decoder.values()} - theirs.keys()
    differing = [entry for entry, id in theirs.items() if by_id.get(id, entry) != entry]
    differing += [entry for entry in entries if entry not in theirs and entry not in added]
    texts = [text for text in PROBES if not any(entry in text for entry in added)]
    ids = [one(texts, add_special_tokens=False).input_ids for one in (own, other)]
    if not differing and ids[0] == ids[1]:
        return
    said = "they split texts differently"
    if differing:
        said = f"{len(differing):,} entries differ ({', '.join(map(repr, sorted(differing)[:3]))})"
    expected = f"a model that can take the tokenizer of {seen.run_dir}: its own is another; {said}"
    raise UserError(Problem(KEY, target.given, expected, with_other_tokenizer(seen.run_dir)))


def with_other_tokenizer(run_dir: Path) -> str:
    """Return what to do with a model that does not have the tokenizer of a run."""
    if glance(run_dir / contents.MANIFEST).get("chat"):
        return "a model with that tokenizer: conversations are other tokens under another one"
    return "--data with a file or a config scores text, with any tokenizer; compare bits_per_byte"


def check_positions(target: Target, seen: Seen, config: Any) -> None:
    """Raise UserError for a model with fewer positions than a block of the run has."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    seq_len = seen.config.data.seq_len
    if longest is not None and seq_len > longest:
        expected = f"a model with the {seq_len:,} positions of a block of {seen.run_dir}"
        raise UserError(Problem(KEY, target.given, f"{expected}; it has {longest:,}"))


def attach_adapters(model: Any, base: Path, seen: Seen) -> None:
    """Give a model the adapters with which the run begins, and its base the run's precision.

    They are without effect, since one matrix of each pair is zero; but a base in bf16 or in four
    bits computes other numbers. base: the model's directory
    """
    import torch

    config, auto = seen.config, Auto(seen.run_dir, "")
    dtype = torch.bfloat16 if seen.precision == "bf16" else torch.float32
    asked = resolve_adapter(config, auto)
    state = {"config": {"adapter.kind": asked.kind}, "auto": {"run": auto.run}}
    if four_bits.are_held(state):
        four_bits.round_layers(model, state)
        asked = asked.model_copy(update={"kind": "lora"})  # the same matrices, on these weights
    tokens = trained_tokens(config, Base(str(base), None, None), seen.tokenizer)
    with torch.random.fork_rng(devices=[]):  # the other matrix of a pair is random
        adapters.attach(model, asked, tokens, dtype=dtype)
