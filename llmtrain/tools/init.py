"""Write a config that fits some data: `llmtrain init DATA… [--from BASE]`.

    rows    ─► form, column, document         each source by itself
    base    ─► tokenizer, template, limits
    a draft ─► `data inspect`: lengths and blocks of an epoch ─► seq_len, batch, epochs
            ─► `plan`: does full training fit this machine? else adapters

Whatever refuses a start refuses the draft, with the same message, and then no file is written.
"""

import math
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from llmtrain.config.load import load_config
from llmtrain.config.schema import Answers, Config, ModelConfig, SourceConfig
from llmtrain.data.chat.rows import PreferenceDataError, answers_of
from llmtrain.data.chat.template import NAMED
from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.file_parts import cut, first_columns, inspect
from llmtrain.data.heldout import training_texts
from llmtrain.data.manifest import Source
from llmtrain.data.sources.hub import resolve
from llmtrain.data.sources.local import file_format, is_local
from llmtrain.data.survey import as_source, with_form
from llmtrain.errors import Problem, UserError
from llmtrain.model import tokenizer as tokenizers
from llmtrain.model.base import Base
from llmtrain.model.build import weights_config
from llmtrain.text import harmless
from llmtrain.tools import plan as plans
from llmtrain.tools.data.inspect import Inspection, inspect as look
from llmtrain.tools.recipes import refuse_existing, write_new
from llmtrain.training.start.data import FEW_STEPS
from llmtrain.training.start.frozen import find_base
from llmtrain.training.start.planning import does_not_fit
from llmtrain.types import JsonMapping, JsonObject

_KEY = "DATA"
_LONGEST = 2048  # positions of a block at most, unless the base has fewer
_SHORTEST = 64
_OF_TEXT = 512  # positions of a block of text
_SAMPLED = 20  # rows from which a column of texts is chosen
_STEPS = 200  # that an ordinary run of little data should have
_BATCHES = (4, 64)  # blocks of a step: the fewest and the most
_PASSES = 3  # over conversations, with a base
_FEW = 20_000  # conversations, from which on one pass is enough
_SCORED = 100  # held-out documents that are enough
_SHARES = (0.005, 0.1)  # held out: the least and the most
_MEGABYTE = 1 << 20
_MARGIN = 1.2  # since what is held out is not trained, and the last block of a lane is not full
_PATIENCE_SECONDS = 120.0  # for the Hub
# (bytes of text, entries of a tokenizer that is trained on it); with less that of the package.
_TOKENIZERS = ((64 * _MEGABYTE, 16_384), (4 * _MEGABYTE, 4_096), (0, None))

# (bytes of text, size of a new model): larger ones only learn their data by heart.
_SIZES = (
    (1024 * _MEGABYTE, (768, 12)),
    (64 * _MEGABYTE, (512, 8)),
    (4 * _MEGABYTE, (256, 6)),
    (0, (128, 4)),
)
# (parameters, rate): of new models, of whole bases, of adapters.
_NEW = ((100e6, 6e-4), (20e6, 1e-3), (0, 3e-3))
_WHOLE = ((1e9, 1e-5), (50e6, 5e-5), (0, 5e-4))
_ADAPTERS = ((200e6, 2e-4), (0, 2e-3))
# The same where answers are compared.
_WHOLE_ANSWERS = ((1e9, 5e-7), (50e6, 2e-6), (0, 2e-5))
_ADAPTER_ANSWERS = ((200e6, 5e-6), (0, 5e-5))
T = TypeVar("T")
Comments = dict[str, str]


@dataclass(frozen=True, slots=True)
class _SourceKind:
    """What was found out about the sources.

    sources: of the config
    chat: whether any of them has conversations
    answers: pairs, or feedback, where that is what they all have
    bytes: of their files, about
    """

    sources: list[JsonObject]
    chat: bool
    answers: Answers | None
    bytes: int


def write_config(
    data: Sequence[str],
    base: str | None = None,
    out: Path | None = None,
    overrides: Sequence[str] = (),
) -> Path:
    """Look at data and base, write a config that trains as it stands, and return its path.

    data: directories, files, globs or ids of the Hub
    base: as `model.from`; None = a new model
    out: by default a name after the first of the data, in this folder
    overrides: `section.key=value`, which take the place of what would be chosen

    Raises UserError for data, a base or a file that cannot be used; then nothing is written.
    """
    import yaml

    path = out or Path(f"{_name(data[0])}.yaml")
    refuse_existing(path)
    _refuse_inside(data, path)
    asked = ModelConfig.model_validate({"from": base})
    known = None if base is None else find_base(asked)
    reader = Reader(Reading(_PATIENCE_SECONDS))
    sources, forms, sizes = zip(*(_source(one, reader) for one in data), strict=True)
    kind = _SourceKind([*sources], any(forms), _answers(data, forms, base), sum(sizes))
    tree = _draft(kind, base, known, _run_dir(path.stem))
    with tempfile.TemporaryDirectory(prefix="llmtrain-") as folder:
        draft = Path(folder) / "draft.yaml"

        def loaded() -> Config:
            draft.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
            try:
                return load_config(draft, overrides)
            except UserError as error:  # an override, for which no file is to blame
                raise UserError(*error.problems) from None

        inspection = _inspected(tree, loaded, known)
        comments = _fit(tree, inspection, kind, new=known is None)
        _add_passes(tree, comments, loaded)
        _choose_weights(tree, comments, loaded)
        for key, value in (one.split("=", 1) for one in overrides):
            _set(tree, key.split("."), yaml.safe_load(value))
            comments[key] = "as asked"
        text = _text(tree, comments, path, inspection)
        draft.write_text(text, encoding="utf-8")
        load_config(draft)  # what is written is what was tried
    write_new(path, text)
    return path


def _refuse_inside(data: Sequence[str], path: Path) -> None:
    """Raise UserError if the config, or what its run writes, would be among the files of the data.

    path: of the config; its run is in this folder
    """
    for one in data:
        folder = Path(one).resolve()
        if folder.is_dir() and any(
            place.resolve().is_relative_to(folder) for place in (path, Path("runs"))
        ):
            expected = "a folder in which neither the config nor the run is written"
            remedy = f"give the command in another folder, or name files: {one.rstrip('/')}/*.jsonl"
            raise UserError(Problem(_KEY, one, expected, remedy))


def _set(tree: Any, parts: Sequence[str], value: object) -> None:
    """Set the value of a dotted key that `load_config` has accepted."""
    for part in parts[:-1]:
        tree = tree[int(part)] if isinstance(tree, list) else tree.setdefault(part, {})
    tree[parts[-1]] = value


def _name(data: str) -> str:
    """Return a name for the run on this data."""
    stem = Path(data.rstrip("/")).name.split(".")[0] if is_local(data) else data.split("/")[-1]
    return re.sub(r"[^\w-]+", "-", stem).strip("-") or "run"


def _run_dir(name: str) -> str:
    """Return a run directory that does not exist."""
    numbers = ("", *(f"-{n}" for n in range(2, 1000)))
    return next(f"runs/{name}{n}" for n in numbers if not Path(f"runs/{name}{n}").exists())


def _answers(data: Sequence[str], forms: Sequence[str | None], base: str | None) -> Answers | None:
    """Return what answers the sources have. Raises UserError for a mixture, or without a base."""
    kinds = {answers_of(form) for form in forms}
    (answers, *others) = kinds
    if others:
        expected = "one kind of rows: pairs of answers, judged answers, or conversations and texts"
        raise UserError(Problem(_KEY, ", ".join(data), expected, "a config for each kind"))
    if answers is not None and base is None:
        expected = "a base: which answers are better is learned by a model that answers already"
        raise UserError(Problem("--from", None, expected, "--from RUN, a directory or a Hub id"))
    return answers


def _form(source: Source, reader: Reader) -> str | None:
    """Return the form of a source, which may be one of pairs or of feedback."""
    try:
        return with_form(source, _KEY, reader).form
    except PreferenceDataError:
        kinds: tuple[Answers, ...] = ("pairs", "feedback")
        for answers in kinds:
            if form := with_form(source, _KEY, reader, answers).form:
                return form
        raise


def _source(path: str, reader: Reader) -> tuple[JsonObject, str | None, int]:
    """Return a source of the config, its form if it has one, and the bytes of its files."""
    described: JsonObject = {"path": path}
    configured = SourceConfig(path=path)
    try:
        resolved = resolve(configured, _KEY)
    except UserError as error:
        described["document"] = "file"  # pages of Markdown are documents, not lines
        configured = SourceConfig(**described)
        try:
            resolved = resolve(configured, _KEY)
        except UserError:
            raise error from None
    source = as_source(configured, resolved, path)
    size = sum(file.size for file in source.files)
    if source.cached:
        return described, None, size
    kinds = [(file_format(file.name) or ("",))[0] for file in source.files]
    if all(kind in ("text", "") for kind in kinds):
        if len(kinds) > 1:
            described["document"] = "file"
        return described, None, size
    if (form := _form(source, reader)) is not None:
        return described, form, size
    columns = first_columns(source, _KEY, reader)
    if columns and "text" not in columns:
        described["text_column"] = _text_column(source, columns, reader)
    return described, None, size


def _text_column(source: Source, columns: Sequence[str], reader: Reader) -> str:
    """Return the column whose first texts are the longest. Raises UserError if none has texts."""
    lengths: dict[str, float] = {}
    for name in columns:
        one = replace(source, text_column=name)
        try:
            parts, _ = inspect(one, _KEY, reader)
            units = tuple(cut(parts, 1))
            texts = islice(training_texts(replace(one, units=units), 0, 0, reader), _SAMPLED)
            lengths[name] = fmean([len(text) for text in texts] or [0.0])
        except UserError:
            continue  # a column of numbers or lists is no column of texts
    if not any(lengths.values()):
        expected = (
            "conversations (messages, conversations, prompt and completion, instruction and "
            f"output), or a column of texts; it has {', '.join(map(harmless, columns))}"
        )
        raise UserError(Problem(_KEY, source.path, expected))
    return max(lengths, key=lambda name: lengths[name])


def _draft(kind: _SourceKind, asked: str | None, base: Base | None, run_dir: str) -> JsonObject:
    """Return a config with which the data can be looked at. asked: for `model.from`"""
    tree: JsonObject = {"run": {"dir": run_dir}}
    longest = _LONGEST
    template: str | None = "chatml"
    if base is None:
        width, layers = _by_size(_SIZES, kind.bytes)
        fields = {
            "model_type": "llama",
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": max(4, width // 64),
            "intermediate_size": 8 * width // 3 // 32 * 32,
        }
        entries = _by_size(_TOKENIZERS, kind.bytes)
        tree["model"] = {"config": fields, "tokenizer": {"train": entries} if entries else "sample"}
    else:
        tree["model"] = {"from": asked}
        described = weights_config(base).get_text_config()
        longest = min(longest, getattr(described, "max_position_embeddings", None) or longest)
        tokenizer = tokenizers.load(base.path, base.revision)
        template = None if tokenizer.chat_template else _named(tokenizer.get_vocab())
    tree["data"] = {"sources": kind.sources, "seq_len": longest}
    if kind.chat:
        tree["chat"] = {"template": template} if template else {}
        tree["chat"]["too_long"] = "drop" if kind.answers else "split"
    if kind.answers:
        tree["preference"] = {"loss": "kto" if kind.answers == "feedback" else "dpo"}
    tree["training"] = {"epochs": 1, "global_batch_size": 1}
    return tree


def _named(entries: Mapping[str, int]) -> str:
    """Return the named template whose tokens a tokenizer has most of."""
    return max(NAMED, key=lambda name: sum(token in entries for token in NAMED[name]))


def _by_size(table: Sequence[tuple[float, T]], size: float) -> T:
    """Return the value of the first row whose size is reached."""
    return next(value for least, value in table if size >= least)


def _inspected(tree: JsonObject, loaded: Callable[[], Config], base: Base | None) -> Inspection:
    """Return what `data inspect` finds. A tokenizer that has too little text is left out.

    Raises UserError as it does; for a base whose template cannot be trained with one that can.
    """
    try:
        return look(loaded(), blocks=0)
    except UserError as error:
        (first, *_) = error.problems
        if first.key == "model.tokenizer" and isinstance(tree["model"].get("tokenizer"), dict):
            tree["model"]["tokenizer"] = "sample"
            return look(loaded(), blocks=0)
        if base is not None and first.key.startswith("chat.") and "template" not in tree["chat"]:
            named = _named(tokenizers.load(base.path, base.revision).get_vocab())
            expected = f"a base whose chat template can be trained; {first.key}: {first.expected}"
            remedy = f"chat.template={named}, behind the data: a named template in its place"
            raise UserError(Problem("--from", tree["model"]["from"], expected, remedy)) from error
        raise


def _fit(tree: JsonObject, inspection: Inspection, kind: _SourceKind, *, new: bool) -> Comments:
    """Choose length, batch, epochs and what is held out; return why, by key.

    The draft has blocks of the greatest length, one of them a step. new: whether there is no base
    """
    data, training = tree["data"], tree["training"]
    greatest = data["seq_len"]
    longest = inspection.lengths[-1].most if inspection.lengths else greatest
    if kind.answers == "feedback":
        longest *= 2  # an answer of another row has the other half of a block
    if kind.chat:
        data["seq_len"] = min(greatest, max(_SHORTEST, 1 << (longest - 1).bit_length()))
        what = "pair" if kind.answers else "document"
        comment = f"tokens of a block; the longest {what} seen has at most {longest:,}"
    else:
        data["seq_len"] = min(greatest, _OF_TEXT)
        comment = "tokens of a block"
    comments = {"data.seq_len": comment}
    share = _SCORED / max(1, sum(one.documents for one in inspection.sources))
    data["heldout"] = round(min(_SHARES[1], max(_SHARES[0], share)), 3)
    comments["data.heldout"] = "share that is never trained on, and scored instead"
    tokens = sum(one.tokens for one in inspection.sources) * (1 - data["heldout"])
    alone = inspection.packing == "single"  # then few blocks are full, whatever their length
    blocks = inspection.steps_per_epoch if alone else tokens / data["seq_len"]
    few = sum(one.documents for one in inspection.sources) < _FEW
    epochs = _PASSES if kind.chat and few and not new and not kind.answers else 1
    batch = 1 << max(0, math.floor(math.log2(max(1.0, blocks * epochs / _STEPS))))
    batch = min(_BATCHES[1], max(_BATCHES[0], batch))
    needed = math.ceil(_MARGIN * FEW_STEPS * batch / blocks)
    comments["training.epochs"] = "passes over the data"
    if needed > epochs:
        epochs = needed
        _say_passes(comments, epochs)
    training |= {"epochs": epochs, "global_batch_size": batch}
    steps = max(1, round(blocks * epochs / batch))
    comments["training.global_batch_size"] = f"blocks of a step; about {steps:,} steps in all"
    tree["optimizer"] = {"warmup_steps": 0.05}
    if kind.answers:
        tree["optimizer"] = {"schedule": "linear", "weight_decay": 0.0, "warmup_steps": 0.1}
        comments["preference.loss"] = "how strongly it is held to its start: preference.beta"
    comments["optimizer.warmup_steps"] = "a share of all steps"
    tree["evaluation"] = {"every_steps": max(5, steps // 10)}
    tree["checkpoint"] = {"every_steps": max(10, steps // 5)}
    return comments


def _add_passes(tree: JsonObject, comments: Comments, loaded: Callable[[], Config]) -> None:
    """Add passes if a run of few documents has few steps all the same.

    Which documents are held out is known only now. What is asked for is left as it is.
    """
    training, config = tree["training"], loaded()
    chosen = {key: getattr(config.training, key) for key in ("epochs", "global_batch_size")}
    if training["global_batch_size"] > _BATCHES[0] or chosen != training:
        return
    if few := look(config, blocks=0).few_steps:
        training["epochs"] = round(few.epochs)
        _say_passes(comments, training["epochs"])


def _say_passes(comments: Comments, epochs: int) -> None:
    comment = f"passes over the data; there is little of it, so {epochs} for {FEW_STEPS} steps"
    comments["training.epochs"] = comment


def _choose_weights(tree: JsonObject, comments: Comments, loaded: Callable[[], Config]) -> None:
    """Choose whether the weights themselves are trained, or adapters, and how fast.

    Raises UserError if nothing fits this machine.
    """
    new = "from" not in tree["model"]
    plan = plans.plan(loaded())
    fits = plan.chosen is not None and not plan.chosen.layout.strategy.endswith("_offload")
    answers = "preference" in tree
    whole, adapters = (_WHOLE_ANSWERS, _ADAPTER_ANSWERS) if answers else (_WHOLE, _ADAPTERS)
    table: Sequence[tuple[float, float]] = _NEW if new else whole
    if not fits and not new:
        tree["adapter"] = {"kind": "lora", "r": 16}
        table, plan = adapters, plans.plan(loaded())
        if plan.chosen is None and not plan.hardware.cpu:
            tree["adapter"]["kind"] = "qlora"
            plan = plans.plan(loaded())
        comments["adapter.kind"] = "training all weights does not fit this machine (llmtrain plan)"
    if plan.chosen is None:
        raise does_not_fit(plan.choice, plan.hardware, {})
    rate = _by_size(table, plan.shape.count)
    tree["optimizer"] = {"learning_rate": rate, **tree["optimizer"]}
    of = "a new model" if new else "a base" if table is whole else "adapters"
    comments["optimizer.learning_rate"] = f"usual for {of} of {plan.shape.count:,} parameters"
    tree["training"]["precision"] = "auto"
    comments["training.precision"] = f"{plan.work.precision} here: {plan.precision_why}"


def _text(tree: JsonMapping, comments: Comments, path: Path, inspection: Inspection) -> str:
    """Return the config as YAML, with a comment behind each value that was chosen."""
    documents = sum(one.documents for one in inspection.sources)
    tokens = sum(one.tokens for one in inspection.sources)
    about = "about " if any(one.estimated for one in inspection.sources) else ""
    command = shlex.quote(harmless(str(path)))
    lines = [
        f"# {about}{documents:,} documents of {tokens:,} tokens, packing {inspection.packing}.",
        "#",
        f"#   llmtrain data inspect {command}",
        f"#   llmtrain train {command}",
    ]
    for section, values in tree.items():
        lines += ["", f"{section}:"]
        for key, value in values.items():
            if isinstance(value, list):
                lines += [f"  {key}:", *(f"    - {_flow(one)}" for one in value)]
                continue
            written = f"  {key}: {_flow(value)}"
            comment = comments.get(f"{section}.{key}")
            lines.append(f"{written:<32}# {comment}" if comment else written)
    return "\n".join(lines) + "\n"


def _flow(value: object) -> str:
    """Return a value as YAML on one line."""
    import yaml

    if isinstance(value, float):
        return f"{value:g}" if value >= 1e-3 or not value else f"{value:.1e}"
    written = yaml.safe_dump(
        value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True
    )
    return written.split("\n...")[0].strip()
