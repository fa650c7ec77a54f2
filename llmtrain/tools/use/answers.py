"""Pairs of answers of any model: how often it prefers the chosen one, and by how much.

Each answer is scored alone behind its prompt, as `llmtrain evaluate MODEL --data PAIRS` does:

    MODEL      x c c c      x r r       Σ log p of both
    REFERENCE  x c c c      x r r       the same, once MODEL is out of memory; 0 without one

A pair whose answers have more tokens than the model has positions is left out and counted.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch

from llmtrain.config.binding import DataSettings, data_settings
from llmtrain.config.load import load_config
from llmtrain.config.schema import ChatConfig, Config, PreferenceConfig
from llmtrain.data import heldout
from llmtrain.data.chat.chat import Chat
from llmtrain.data.documents.reader import Reader, Reading, bad_row, reading_of
from llmtrain.data.manifest import Source
from llmtrain.data.survey import evaluation_sources
from llmtrain.data.tokens.encode import DocumentEncoder, Encoded, settings_of
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.errors import Problem, UserError
from llmtrain.model import attention
from llmtrain.model.loss import Head, LossModule, examine
from llmtrain.model.preference import loss_and_sums
from llmtrain.model.tokenizer import save_tokenizer
from llmtrain.pairs import PairTensors, pair_figures
from llmtrain.rundir import contents
from llmtrain.tools.use.load import LoadedModel, open_model
from llmtrain.tools.use.packed import OnProgress
from llmtrain.tools.use.target import Target, find_target, ids_of_probes
from llmtrain.training.step import target_keywords
from llmtrain.types import NOT_TRAINED, Evaluation, MicroBatch

_log = logging.getLogger(__name__)

REFERENCE_KEY = "--reference"
_POSITIONS = 8192  # of a batch, padding included; a single pair may have more


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the answers of pairs were compared.

    preference: name of the loss
    reference: with which model; None = by their log-probabilities alone, or by scores
    left_out: number of pairs that were too long for the model
    """

    preference: str
    beta: float
    reference: str | None
    left_out: int


def compare_answers(
    target: Target, given: str, reference: str | Path | None, on_progress: OnProgress
) -> tuple[Evaluation, Comparison]:
    """Score the pairs of a file, directory or data set by a model, then by its reference.

    The loss is that of the run that trained the model, else `dpo`; without a reference it is that
    of log-probabilities alone, `cpo`. given: as of `--data`

    Raises UserError for rows that are no pairs, and for a reference that has another tokenizer, or
    that the loss does not use.
    """
    start, run = perf_counter(), target.run_dir
    preference = target.preference
    asked = preference if preference.answers == "pairs" else PreferenceConfig(loss="dpo")
    if reference is not None and not asked.has_reference:
        expected = f"left out: preference.loss {asked.loss} of {target.given} has no reference"
        raise UserError(Problem(REFERENCE_KEY, reference, expected))
    if reference is None and asked.has_reference:
        asked = PreferenceConfig(loss="cpo", beta=asked.beta)
    config = run / contents.CONFIG if run else None
    chat = load_config(config).chat if config and config.is_file() else ChatConfig()
    opened = open_model(target)
    with TemporaryDirectory(prefix="llmtrain-") as folder:
        place = Path(folder)
        save_tokenizer(str(run / contents.TOKENIZER if run else target.directory), None, place)
        answers, left_out = read_answers(given, place, opened.positions, chat, asked)
    sums, known = score_answers(opened, answers, asked, on_progress), None
    if reference is not None:
        ids = ids_of_probes(opened.tokenizer)
        del opened  # one model at a time
        other = open_model(find_target(str(reference)))
        if ids != ids_of_probes(other.tokenizer):
            expected = f"a model with the tokenizer of {target.given}"
            remedy = "without --data, a run's pairs are compared with its own start"
            raise UserError(Problem(REFERENCE_KEY, reference, expected, remedy))
        known = score_answers(other, answers, asked, on_progress)
    figures = replace(_figures(answers, sums, known, asked), seconds=perf_counter() - start)
    named = None if reference is None else str(reference)
    return figures, Comparison(asked.loss, asked.beta, named, left_out)


def read_answers(
    given: str, tokenizer: Path, positions: int, chat: ChatConfig, preference: PreferenceConfig
) -> tuple[Sequence[Encoded], int]:
    """Read the pairs of a file, directory or data set, and count those too long for the model.

    tokenizer: directory with it and its chat template
    positions: the most tokens of an answer with its prompt

    Returns the pairs as tokens, the shortest first, and how many were left out. Raises UserError
    for rows that are no pairs, unless `chat.bad_rows` is skip.
    """
    settings, reading, sources = _sources(given, chat, preference)
    tokens = open_tokenizer(tokenizer)
    how = settings_of(chat.model_copy(update={"too_long": "drop"}), datetime.now().isoformat())
    encoder = DocumentEncoder(tokens, Chat(tokenizer, how, 2 * positions, tokens), apart=True)
    reader = Reader(reading)
    pairs, left_out, bad = [], 0, 0
    for source in sources:
        for u, row, text in heldout.held_out_rows(source, settings.seed, reader):
            try:
                encoded = encoder.documents(source, [text])[0]
            except UserError as error:
                expected = f"pairs for this model; {error.problems[0].key} has to be"
                expected += f" {error.problems[0].expected}"
                remedy = "--as RUN, which measures a model with the template of a run"
                raise UserError(Problem("--data", given, expected, remedy)) from error
            if encoded.bad is not None and not reading.skip_bad_rows:
                raise UserError(bad_row(source, u, row, reader, encoded.bad))
            if encoded.second:
                pairs.append(encoded)
            elif encoded.bad is None:
                left_out += 1
            else:
                bad += 1
    if bad:
        _log.warning("%s: %d rows are no pairs and are left out (chat.bad_rows: skip)", given, bad)
    if not pairs:
        raise UserError(Problem("--data", given, "at least one pair of answers that fits"))
    return sorted(pairs, key=lambda pair: len(pair.ids)), left_out


def has_pairs(given: str) -> bool:
    """Whether a file, directory or data set has pairs of answers."""
    try:
        _sources(given, ChatConfig(), PreferenceConfig(loss="dpo"))
    except UserError:
        return False
    return True


def config_of_data(given: str, **sections: ChatConfig | PreferenceConfig) -> Config:
    """Return a config whose data, and held-out data, is a file, directory or data set."""
    one = {"path": given}
    described = {"data": {"sources": [one]}, "evaluation": {"sources": [one]}}
    return Config.model_validate({**described, **sections, "training": {"steps": 1}})


def _sources(
    given: str, chat: ChatConfig, preference: PreferenceConfig
) -> tuple[DataSettings, Reading, Sequence[Source]]:
    settings = data_settings(config_of_data(given, chat=chat, preference=preference))
    reading = reading_of(settings, None)
    return settings, reading, evaluation_sources(settings, reading)


def score_answers(
    opened: LoadedModel,
    answers: Sequence[Encoded],
    preference: PreferenceConfig,
    on_progress: OnProgress,
) -> np.ndarray:
    """Return Σ log p of both answers of each pair, or their scores, (N, 2) fp64."""
    attention.rope_by_document(opened.model)
    by_length = attention.rope_change(opened.model) is not None
    examined = examine(opened.model)  # else the logits of a batch would be whole
    head = examined if isinstance(examined, Head) else None
    module = LossModule(opened.model, head, preference=preference)
    sums: list[np.ndarray] = []
    with torch.no_grad():
        for batch in _batches(answers):
            on_progress(sum(len(one) for one in sums), len(answers))
            (inputs, targets), device = _rows(batch), opened.device
            row: MicroBatch = {"input_ids": attention.on_device(device, inputs)}
            row |= target_keywords(targets, device, whole=False)
            row |= attention.padding_tensors(targets, device, by_length=by_length, routed=False)
            row["pairs"] = _asked(targets, device)
            sums.append(module(each=True, **row).double().cpu().numpy())
    return np.concatenate(sums)


def _figures(
    answers: Sequence[Encoded],
    sums: np.ndarray,
    reference: np.ndarray | None,
    preference: PreferenceConfig,
) -> Evaluation:
    """Return the figures of some pairs, as an `eval` line has them.

    sums, reference: (N, 2) fp64, as `score_answers` returns them
    """
    known = np.zeros_like(sums) if reference is None else reference
    sizes = np.array([[half.sum() for half in _trained(one)] for one in answers], np.float64)
    asked = PairTensors(
        lengths=torch.empty(0, dtype=torch.int64),
        sizes=torch.from_numpy(sizes),
        reference=torch.from_numpy(known),
    )
    loss, *others = loss_and_sums(torch.from_numpy(sums), asked, preference).tolist()
    count, tokens = len(answers), int(sizes.sum())
    return Evaluation(loss / count, None, None, tokens, 0, count, 0.0, pairs=pair_figures(others))


def _batches(pairs: Sequence[Encoded]) -> Iterator[Sequence[Encoded]]:
    """Yield neighbours that have at most `_POSITIONS` positions together."""
    first = 0
    for last in range(1, len(pairs) + 1):
        full = last == len(pairs) or 2 * (last + 1 - first) * _longest(pairs[last]) > _POSITIONS
        if full:
            yield pairs[first:last]
            first = last


def _halves(pair: Encoded) -> tuple[np.ndarray, np.ndarray]:
    return pair.ids[: pair.second], pair.ids[pair.second :]


def _trained(pair: Encoded) -> tuple[np.ndarray, np.ndarray]:
    assert pair.trained is not None, "answers have masks"
    return pair.trained[: pair.second], pair.trained[pair.second :]


def _longest(pair: Encoded) -> int:
    return max(map(len, _halves(pair)))


def _rows(batch: Sequence[Encoded]) -> tuple[np.ndarray, np.ndarray]:
    """Return a row for each answer, (2N, T) int64: ids, and labels that are shifted."""
    width = max(map(_longest, batch))
    ids = np.zeros((2 * len(batch), width), np.int64)
    labels = np.full_like(ids, NOT_TRAINED)
    halves = (half for one in batch for half in zip(_halves(one), _trained(one), strict=True))
    for row, (tokens, trained) in enumerate(halves):
        ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens) - 1] = np.where(trained[1:], tokens[1:], NOT_TRAINED)
    return ids, labels


def _asked(labels: np.ndarray, device: torch.device) -> PairTensors:
    """Return what is asked of the pairs in rows with these labels, (2N, T), one a half."""
    trained = labels != NOT_TRAINED
    lengths, width = trained.sum(axis=1), labels.shape[1]
    behind = width - trained[:, ::-1].argmax(axis=1)  # of each row, the last token of the answer
    return PairTensors(
        lengths=attention.on_device(device, lengths),
        sizes=attention.on_device(device, lengths.reshape(-1, 2).astype(np.float64)),
        reference=torch.zeros(len(labels) // 2, 2, dtype=torch.float64, device=device),
        last=attention.on_device(device, np.arange(len(labels)) * width + behind),
    )
