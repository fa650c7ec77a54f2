"""What rank 0 makes once for the data of a run: tokenizer and chat template, then the manifest.

A later start finds both and only checks them.
"""

import importlib.resources
import logging
import os
import shutil
import time
from datetime import datetime
from pathlib import Path

from llmtrain.config.binding import DataSettings, changes, data_settings, is_accepted
from llmtrain.config.schema import Config, TrainTokenizer
from llmtrain.data import manifest as manifests, survey
from llmtrain.data.audit import first_rows
from llmtrain.data.chat.chat import Chat, Settings
from llmtrain.data.chat.template import template_text
from llmtrain.data.documents.reader import Reader
from llmtrain.data.manifest import DataManifest
from llmtrain.data.sources.fetch import Stopping
from llmtrain.data.state import DataState, check
from llmtrain.data.tokens import tokenizer as tokenizers
from llmtrain.data.tokens.encode import DocumentEncoder, chat_facts, settings_of
from llmtrain.errors import UserError, raise_any
from llmtrain.model.base import Base
from llmtrain.model.build import model_config
from llmtrain.model.tokenizer import add_template, save_tokenizer, special_tokens
from llmtrain.rundir.contents import HELDOUT, MANIFEST, STAGED, TOKENIZER, write_atomically
from llmtrain.training.start.frozen import find_base
from llmtrain.training.start.small_trials import why_apart
from llmtrain.types import JsonMapping

_log = logging.getLogger(__name__)

_TOKENIZER_TEXT_BYTES = 64 << 20
_COMPARED_DOCUMENTS = 256  # tokenized with both back ends to choose one
_COMPARED_BYTES = 8 << 20
_ROWS = {"pairs": "pair", "feedback": "judged answer", None: "conversation"}


def prepare(
    config: Config,
    run_dir: Path,
    processes: int,
    base: Base | None = None,
    saved: DataState | None = None,
    stop: Stopping | None = None,
) -> None:
    """Write `tokenizer/` and `manifest.json`. For rank 0.

    Those of an earlier start are kept, unless their settings have changed and all changes are
    accepted.

    processes: ranks times data workers; the number of lanes should be a multiple of it
    base: what was decided for `model.from`; None = it is looked up if its tokenizer is needed
    saved: the checkpoint's state, which a new manifest must fit
    stop: ends a wait for the Hub (RunError, 75)

    Raises UserError for what is wrong with the data.
    """
    _take_over(run_dir)
    settings = data_settings(config)
    if not (run_dir / MANIFEST).exists():
        surveyed = survey.survey(settings, processes, run_dir, stop=stop)
        write_data(config, surveyed, run_dir, base)
        return
    changed = accepted_changes(config, settings, run_dir)
    if not changed:
        return
    _log.info("made again, as checkpoint.accept_changes asks: %s", ", ".join(changed))
    lanes = None
    if not any(key.startswith(("data.lanes", "data.sources")) for key in changed):
        lanes = manifests.glance(run_dir / MANIFEST)["lanes"]
    surveyed = survey.survey(settings, processes, run_dir, lanes, stop)
    partial = run_dir / f"{STAGED}.partial"  # the old ones are kept until these are accepted
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    if not any(key.startswith(("model.", "chat.template")) for key in changed):
        shutil.copytree(run_dir / TOKENIZER, partial / TOKENIZER)
    chat = manifests.glance(run_dir / MANIFEST).get("chat")
    write_data(config, surveyed, partial, base, chat and chat["settings"]["date"])
    if saved is not None:
        check(saved, load_manifest(config, partial), config.checkpoint.accept_changes)
    partial.rename(run_dir / STAGED)
    _take_over(run_dir)


def write_data(
    config: Config,
    surveyed: survey.Survey,
    directory: Path,
    base: Base | None,
    date: str | None = None,
) -> None:
    """Write tokenizer and manifest of these sources, as `prepare` does for a run without any.

    date: that of the run, for chat templates; None = now
    """
    make_tokenizer(config, surveyed, directory / TOKENIZER, base)
    documents = survey.some_texts(surveyed, _COMPARED_DOCUMENTS, _COMPARED_BYTES)
    tokenizer = tokenizers.choose_tokenizer(directory / TOKENIZER, documents)
    facts, apart = None, False
    if surveyed.has_chat:
        settings = settings_of(config.chat, date or datetime.now().isoformat(timespec="seconds"))
        place = directory / TOKENIZER
        tokenizer, chat = _open_chat(place, settings, config.data.seq_len, tokenizer)
        facts = chat_facts(chat)
        _tell_of_template(facts.end_of_turn or {})
        why = _why_apart(config, place, base) if config.data.packing == "auto" else ""
        apart = bool(why) or config.data.packing == "single"
        if apart and surveyed.settings.preference.answers:
            raise_any(survey.uneven(config.data.seq_len))
        encoder = DocumentEncoder(tokenizer, chat, apart)
        rows = first_rows.check_first_rows(surveyed, encoder)
        # Name what the rows of conversations have and nobody reads, once for a run.
        reader = Reader(surveyed.reading)
        for source in surveyed.sources:
            if counts := first_rows.count_unread(source, surveyed.settings.seed, reader, encoder):
                _log.warning(
                    "%s: nobody reads these keys of its first %d rows (in how many): %s",
                    *(source.label, first_rows.FIRST, first_rows.describe_unread(counts)),
                )
        what = _ROWS[surveyed.settings.preference.answers]
        if rows:
            shown = first_rows.with_marks(rows[0], tokenizer)
            _log.info("the first %s, trained in ⟦⟧: %s", what, shown)
        if why:
            filled = 100 * first_rows.share_filled(rows, config.data.seq_len)
            _log.info(
                "packing: single, as %s; %ss fill %.0f %% of a block, and rows are cut to the "
                "longest of a micro-batch",
                *(why, what, filled),
            )
    manifest = survey.freeze(surveyed, tokenizer, facts, apart=apart)
    write_atomically(directory / MANIFEST, manifest.to_bytes())


def _tell_of_template(end: JsonMapping) -> None:
    """Log what the template puts between a prompt and an answer. end: `ChatFacts.end_of_turn`"""
    how = {"lead": "ends every prompt and is not trained", "header": "is trained like the answer"}
    for part, what in how.items():
        if end.get(part):
            _log.info("the template puts %r before an answer: it %s", end[part], what)


def _why_apart(config: Config, tokenizer: Path, base: Base | None) -> str:
    """Return why the model cannot hide conversations from each other; "" if it can."""
    if base is None and config.model.from_ is not None:
        base = find_base(config.model)
    seq_len, how = config.data.seq_len, {"scores": config.preference.scores}
    tokens = special_tokens(tokenizer)
    return why_apart(model_config(config.model, tokens, seq_len, base, **how), seq_len)


def _open_chat(
    directory: Path, settings: Settings, seq_len: int, tokenizer: tokenizers.Tokenizer
) -> tuple[tokenizers.Tokenizer, Chat]:
    """Return the chat template of a new run, and the tokenizer that both texts and chat get.

    tokenizer: the one that was chosen for texts. It is replaced by that of `tokenizers` if it gives
        the made-up conversations other ids.
    """
    reference, chat = (Chat(directory, settings, seq_len, one) for one in (None, tokenizer))
    if chat.probe() == reference.probe():
        return tokenizer, chat
    _log.warning("tokenizing with tokenizers, as tiktoken gives conversations other ids")
    return tokenizers.open_tokenizer(directory), reference


def _take_over(run_dir: Path) -> None:
    """Replace tokenizer and manifest by the staged ones, if there are any.

    If this is interrupted by a kill, the next start completes it.
    """
    new = run_dir / STAGED
    if not new.exists():
        return
    (run_dir / HELDOUT).unlink(missing_ok=True)
    if (new / TOKENIZER).exists():
        shutil.rmtree(run_dir / TOKENIZER, ignore_errors=True)
        (new / TOKENIZER).rename(run_dir / TOKENIZER)
    if (new / MANIFEST).exists():
        (new / MANIFEST).replace(run_dir / MANIFEST)
    new.rmdir()


def accepted_changes(config: Config, settings: DataSettings, run_dir: Path) -> list[str]:
    """Return the keys that have changed since the manifest was made, if all of them are accepted.

    Returns [] if one is not: the check that follows on every rank refuses it.
    """
    made_with = manifests.glance(run_dir / MANIFEST)["made_with"]
    keys = [change.key for change in changes(made_with, survey.values_now(made_with, settings))]
    try:
        keys += [problem.key for problem in survey.changed_files(load_manifest(config, run_dir))]
    except UserError as error:
        keys += [problem.key for problem in error.problems]
    return sorted(set(keys)) if all(is_accepted(key, settings.accepted) for key in keys) else []


def load_manifest(config: Config, run_dir: Path) -> DataManifest:
    """Load the manifest that rank 0 wrote, with the paths of the sources from this config."""
    return manifests.load(run_dir / MANIFEST, config.data.sources)


def make_tokenizer(
    config: Config, surveyed: survey.Survey, directory: Path, base: Base | None
) -> None:
    """Write the run's tokenizer directory, with its chat template, completely or not at all.

    Raises UserError for a tokenizer or template that cannot be read.
    """
    if directory.exists():
        return
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    asked = config.model.tokenizer
    if isinstance(asked, TrainTokenizer):
        _log.info("training a tokenizer of %d entries on the training documents", asked.train)
        start = time.perf_counter()
        text = tokenizers.train_bpe(
            survey.training_texts(surveyed, _TOKENIZER_TEXT_BYTES), asked.train
        )
        (partial / "tokenizer.json").write_text(text, "utf-8")
        (partial / "tokenizer_config.json").write_text(tokenizers.tokenizer_config(), "utf-8")
        _log.info("trained the tokenizer in %.0f s", time.perf_counter() - start)
    elif asked == "sample":
        sample = importlib.resources.files("llmtrain.data") / "sample"
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (partial / name).write_bytes((sample / name).read_bytes())
    elif asked == "auto":
        base = base or find_base(config.model)
        save_tokenizer(base.path, base.revision, partial)
    else:
        save_tokenizer(asked, None, partial)
    if config.chat.template is not None:
        add_template(partial, *template_text(config.chat.template))
    for path in partial.rglob("*"):  # the manifest, which is synced too, depends on these files
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    partial.rename(directory)
