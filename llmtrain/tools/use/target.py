"""Which weights a MODEL_OR_RUN means, and how a run would see a model.

    runs/a                             its best checkpoint, else the newest
    runs/a/checkpoints/step-00000300   that one
    DIR                                a model as `save_pretrained` writes it, or adapters for one
    owner/name                         a model of the Hub, downloaded into the Hub's cache

`evaluate BASE --as RUN` measures a model as the run saw the one that it began with:

    weights of BASE ─► a row for each entry of RUN's tokenizer, new ones the mean of the others
                    ─► RUN's attention ─► RUN's adapters, which are still without effect

These are the steps of a start, made by the same functions. So the figures of RUN's own base are
those of RUN's evaluation before its first step. With `adapter.kind: qlora` a run holds its weights
rounded to four bits, and its adapter corrects these, not those in the files. So they are rounded
here, too, and kept as ordinary numbers.
"""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from huggingface_hub import errors, snapshot_download
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llmtrain.checkpoint import candidates, format as form
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config, PreferenceConfig
from llmtrain.data.manifest import glance
from llmtrain.data.tokens.convert import PROBES
from llmtrain.errors import Problem, UserError
from llmtrain.model import tokenizer as tokenizers, trainable, untrusted
from llmtrain.model.base import Base
from llmtrain.rundir import contents
from llmtrain.rundir.status import FrozenChoices, read_status
from llmtrain.text import first_line
from llmtrain.tools.checkpoints import CheckpointPath, place_of
from llmtrain.training.start.frozen import kept_base, resolve_adapter, trained_tokens, what_changed
from llmtrain.types import JsonMapping, JsonObject

KEY = "MODEL_OR_RUN"
_EXPECTED = "a run, a checkpoint, a model directory, or a model of the Hub"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_MODEL_FILES = ("config.json", untrusted.ADAPTER_CONFIG)


@dataclass(frozen=True, slots=True)
class Target:
    """The weights that somebody named, on this machine's disk.

    given: as they were named
    directory: where they are, with their config and tokenizer
    run_dir: the run that saved them; None if they are not in a run
    state: the checkpoint's `trainer_state.json`; empty for any other model
    """

    given: str
    directory: Path
    run_dir: Path | None = None
    state: JsonMapping = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The step of a checkpoint; None for any other model."""
        step: int | None = self.state.get("step")
        return step

    @property
    def preference(self) -> PreferenceConfig:
        """The section `preference` of the run that saved a checkpoint; else its defaults."""
        config, prefix = self.state.get("config") or {}, "preference."
        return PreferenceConfig.model_validate(
            {k.removeprefix(prefix): v for k, v in config.items() if k.startswith(prefix)}
        )

    @property
    def manifest(self) -> JsonMapping:
        """The data manifest of the run that saved them; {} if there is none."""
        path = self.run_dir / contents.MANIFEST if self.run_dir else None
        return glance(path) if path and path.is_file() else {}

    @property
    def is_adapter(self) -> bool:
        """Whether these are adapters, which need the model that they were trained on."""
        return (self.directory / untrusted.ADAPTER_CONFIG).is_file()


def find_target(given: str, revision: str | None = None) -> Target:
    """Find the weights. A model of the Hub is downloaded, unless it is in the Hub's cache.

    revision: branch, tag or commit of a model of the Hub; None = the default branch

    Raises UserError if there are none, RunError 74 if the disk cannot be read.
    """
    path = Path(given)
    if path.is_dir():
        try:
            place = place_of(path)
        except UserError:
            if not any((path / name).is_file() for name in _MODEL_FILES):
                raise UserError(Problem(KEY, given, _EXPECTED)) from None
            return Target(given, path)
        directory = place.root / (place.only or _best(given, place))
        if directory.suffix == ".partial":
            raise UserError(Problem(KEY, given, "a complete checkpoint; this one never is read"))
        return Target(given, directory, place.run_dir, _state(given, directory))
    if path.exists() or not is_hub_id(given):
        raise UserError(Problem(KEY, given, _EXPECTED))
    return Target(given, download(given, revision))


def is_hub_id(name: str) -> bool:
    """Whether this can be the name of a model of the Hub."""
    return _HUB_ID.fullmatch(name) is not None


def download(name: str, revision: str | None) -> Path:
    """Return the directory of a model of the Hub, or of a directory, which is returned as it is.

    revision: branch, tag or commit; None = the default branch

    Files in folders of the repository are left out: they are copies in other formats. Raises
    UserError if the Hub does not have it or cannot be reached.
    """
    if Path(name).is_dir():
        return Path(name)
    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        directory = snapshot_download(
            name, revision=revision, allow_patterns=wanted, ignore_patterns=["*/*"]
        )
    except refusals() as error:
        raise UserError(Problem(KEY, name, f"{_EXPECTED}: {first_line(error)}")) from error
    return Path(directory)


def refusals() -> tuple[type[Exception], ...]:
    """Return the errors with which the Hub refuses, or cannot be reached."""
    of_client = errors.HTTPError  # type: ignore[attr-defined]  # not in its list of names
    by_name = errors.HFValidationError, errors.RevisionResolutionError
    return errors.HfHubHTTPError, *by_name, of_client, OSError


def _best(given: str, place: CheckpointPath) -> str:
    """Return the name of the checkpoint that `model.from` would begin with, too."""
    known = read_status(place.run_dir).get("run_id") if place.run_dir else None
    name = candidates.best(place.root, known)
    if name is None:
        expected = "a run with a complete checkpoint; it has none"
        raise UserError(Problem(KEY, given, expected, "`llmtrain checkpoints list` shows them"))
    return name


def _state(given: str, directory: Path) -> JsonObject:
    """Return the state in a checkpoint; {} for a model that is no checkpoint of ours."""
    if not (directory / form.STATE).exists():
        return {}
    try:
        return form.state(directory)
    except form.DamagedError as error:
        raise UserError(Problem(KEY, given, f"a whole checkpoint; {error}")) from error


@contextmanager
def as_argument() -> Iterator[None]:
    """Name the command's argument in problems of code that also reads a config's `model.from`."""
    try:
        yield
    except UserError as error:
        keys = dict.fromkeys(("model.from", "model.tokenizer"), KEY)
        problems = (replace(one, key=keys.get(one.key, one.key)) for one in error.problems)
        raise UserError(*problems, where=error.where) from error


_KIND = "qlora"


def are_held(state: JsonMapping) -> bool:
    """Whether a checkpoint's run holds its base in four bits. state: its `trainer_state.json`.

    Raises UserError if it does, and bitsandbytes, which rounds them, is not installed.
    """
    if (state.get("config") or {}).get("adapter.kind") != _KIND:
        return False
    if importlib.util.find_spec("bitsandbytes") is None:
        expected, remedy = "an installed bitsandbytes", "pip install 'llmtrain[quantized]'"
        raise UserError(Problem("adapter.kind", _KIND, expected, remedy))
    return True


def round_layers(model: PreTrainedModel, state: JsonMapping) -> None:
    """Round the weights of a model in place, as `round_weight` does."""
    for name in trainable.linear_layers(model):
        weight = model.get_submodule(name).weight
        weight.data = round_weight(weight.data, state)


def round_weight(weight: Tensor, state: JsonMapping) -> Tensor:
    """Return a weight in fp32, rounded as in the run of a checkpoint. state: as for `are_held`."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    precision = ((state.get("auto") or {}).get("run") or {}).get("precision")
    before = weight.to(torch.bfloat16 if precision == "bf16" else torch.float32)
    packed, how = quantize_4bit(before, quant_type="nf4", compress_statistics=True)
    rounded: Tensor = dequantize_4bit(packed, how).float()
    return rounded


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
    precision = FrozenChoices(run_dir, "").precision or "fp32"
    return Seen(run_dir, config, precision)


def find_base(given: str, seen: Seen) -> Target:
    """Find a model. The base of the run is read at the commit that the run read.

    Raises UserError as `find_target` does, and for a model whose tokens are not those of the run.
    """
    base = kept_base(seen.run_dir)
    is_own = base is not None and base.revision is not None and base.path == given
    target = find_target(given, base.revision if base is not None and is_own else None)
    if base is not None and base.digest is not None:
        place = Base(str(target.directory), None, base.digest)
        is_own = what_changed(place) is None
    if not is_own:  # else the run's tokenizer is the one that the run gave it
        _refuse_other_tokens(target, seen)
    return target


def _refuse_other_tokens(target: Target, seen: Seen) -> None:
    """Raise UserError unless each id means the same to a model as to a run.

    The run may have added tokens, for which the model has no rows yet.
    """
    tokenizer, other = (
        tokenizers.load(str(directory), None) for directory in (seen.tokenizer, target.directory)
    )
    entries, theirs = tokenizer.get_vocab(), other.get_vocab()
    by_id = {id: entry for entry, id in entries.items()}
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()} - theirs.keys()
    differing = [entry for entry, id in theirs.items() if by_id.get(id, entry) != entry]
    differing += [entry for entry in entries if entry not in theirs and entry not in added]
    texts = [text for text in PROBES if not any(entry in text for entry in added)]
    ids = [ids_of_probes(one, texts) for one in (tokenizer, other)]
    if not differing and ids[0] == ids[1]:
        return
    why = "they split texts differently"
    if differing:
        why = f"{len(differing):,} entries differ ({', '.join(map(repr, sorted(differing)[:3]))})"
    expected = f"a model that can take the tokenizer of {seen.run_dir}: its own is another; {why}"
    raise UserError(Problem(KEY, target.given, expected, with_other_tokenizer(seen.run_dir)))


def ids_of_probes(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = PROBES
) -> list[list[int]]:
    """Return the ids of texts, by which two tokenizers are compared."""
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False).input_ids
    return ids


def with_other_tokenizer(run_dir: Path) -> str:
    """Return what to do with a model that does not have the tokenizer of a run."""
    if glance(run_dir / contents.MANIFEST).get("chat"):
        return "a model with that tokenizer: conversations are other tokens under another one"
    return "--data with a file or a config scores text, with any tokenizer; compare bits_per_byte"


def check_positions(target: Target, seen: Seen, config: PreTrainedConfig) -> None:
    """Raise UserError for a model with fewer positions than a block of the run has."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    seq_len = seen.config.data.seq_len
    if longest is not None and seq_len > longest:
        expected = f"a model with the {seq_len:,} positions of a block of {seen.run_dir}"
        raise UserError(Problem(KEY, target.given, f"{expected}; it has {longest:,}"))


def attach_adapters(model: PreTrainedModel, base: Path, seen: Seen) -> None:
    """Give a model the adapters with which the run begins, and its base the run's precision.

    They are without effect, since one matrix of each pair is zero; but a base in bf16 or in four
    bits computes other numbers. base: the model's directory
    """
    config, auto = seen.config, FrozenChoices(seen.run_dir, "")
    dtype = torch.bfloat16 if seen.precision == "bf16" else torch.float32
    asked = resolve_adapter(config, auto)
    state = {"config": {"adapter.kind": asked.kind}, "auto": {"run": auto.run}}
    if are_held(state):
        round_layers(model, state)
        asked = asked.model_copy(update={"kind": "lora"})  # the same matrices, on these weights
    tokens = trained_tokens(config, Base(str(base), None, None), seen.tokenizer)
    with torch.random.fork_rng(devices=[]):  # the other matrix of a pair is random
        trainable.attach(model, asked, tokens, dtype=dtype)
