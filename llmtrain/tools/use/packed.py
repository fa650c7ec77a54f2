"""The held-out set of a run, scored as the run scores it.

Its documents are packed into blocks and cut at their borders. Precision, attention, micro-batches
and the order of all sums are those of the run, so the weights of a checkpoint give the `eval` line
of that step again:

    eval.safetensors ─► blocks ─► rank r takes the blocks g ≡ r (mod W) ─► sums of the W ranks
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from llmtrain.config.load import load_config
from llmtrain.config.schema import PreferenceConfig
from llmtrain.data import heldout
from llmtrain.data.manifest import glance
from llmtrain.errors import Problem, UserError
from llmtrain.model import attention, tokenizer as tokenizers
from llmtrain.model.loss import Head, LossModule, examine
from llmtrain.rundir import contents, record, reference
from llmtrain.rundir.status import FrozenChoices
from llmtrain.text import first_line
from llmtrain.tools.use.load import LoadedModel
from llmtrain.tools.use.target import ids_of_probes, with_other_tokenizer
from llmtrain.training.evaluate import result, rounds_of, score_blocks
from llmtrain.training.pairs import Scores, in_halves, pair_result, pair_tensors, pair_totals
from llmtrain.training.start.planning import launch_kind
from llmtrain.training.start.trials import Tried, bare_forward, find_hiding
from llmtrain.training.step import target_keywords
from llmtrain.types import Evaluation, JsonMapping, MicroBatch, cut_of, rank_layout

OnProgress = Callable[[int, int], object]  # done so far, of how many; 0 = not known
Model = Callable[..., torch.Tensor]  # called as `LossModule.forward`
Hidden = Callable[[np.ndarray, Sequence[np.ndarray]], MicroBatch]  # as `score_blocks` takes it


@dataclass(frozen=True, slots=True)
class HeldOutOfRun:
    """The held-out set of a run, and how the run scores it.

    packing: of its blocks
    document_mask: whether documents of a block are hidden from each other
    groups: how many processes, or groups that share a model, scored blocks of their own
    micro_batch_size: of the start that made the evaluation
    threads: of each of its processes; None = not known
    kernel: of attention, as `model.attention_backend` names it
    preference: how the answers of its pairs are compared; None = it has none
    """

    run_dir: Path
    held: heldout.HeldOut
    seq_len: int
    packing: str
    document_mask: bool
    precision: str
    groups: int
    micro_batch_size: int
    threads: int | None
    kernel: str
    preference: PreferenceConfig | None

    @property
    def hides_documents(self) -> bool:
        """Whether the model must hide the documents of a block from each other."""
        return self.document_mask and self.packing != "single"

    @property
    def has_chat(self) -> bool:
        """Whether there are conversations among the documents."""
        return any(part.chat for part in self.held.parts)


def heldout_of(run_dir: Path, step: int | None, key: str) -> HeldOutOfRun:
    """Read the held-out set of a run.

    step: of the evaluation to repeat; None = as the last start evaluates
    key: names the argument in a message

    Raises UserError if the run held nothing out.
    """
    manifest = run_dir / contents.MANIFEST
    try:
        held = heldout.load(run_dir / contents.HELDOUT)
    except SafetensorError as error:
        expected = f"a whole {contents.HELDOUT} ({error})"
        raise UserError(Problem(key, run_dir, expected, "the next start makes it again")) from error
    if held is None or not manifest.is_file():
        expected = f"a run that held documents out ({contents.HELDOUT} in it)"
        remedy = (
            "--data FILE scores other texts; held-out conversations are those of a run with "
            "data.heldout above 0"
        )
        raise UserError(Problem(key, run_dir, expected, remedy))
    facts = glance(manifest)
    start = _start_of(run_dir, step)
    device = start.get("device_type", "cpu")
    world_size, cut = start["world_size"], cut_of(start)
    kind = launch_kind(start.get("strategy", ""), device, world_size, cut)
    auto = FrozenChoices(run_dir, kind)
    has_pairs = held.pairs is not None
    return HeldOutOfRun(
        run_dir=run_dir,
        held=held,
        seq_len=facts["seq_len"],
        packing=facts["packing"],
        document_mask=facts["document_mask"],
        precision=auto.precision or "fp32",
        groups=world_size // cut.processes,
        micro_batch_size=start["micro_batch_size"],
        threads=auto.threads,
        kernel=auto.attention_backend or "auto",
        preference=load_config(run_dir / contents.CONFIG).preference if has_pairs else None,
    )


def score(opened: LoadedModel, measured: HeldOutOfRun, on_progress: OnProgress) -> Evaluation:
    """Score every held-out token, or pair of answers, of a run once.

    Raises UserError for a model that cannot hide documents from each other where the run does, or
    that has another tokenizer, and for pairs without the run's reference of them.
    """
    _check_tokenizer(opened, measured)
    start, device, seq_len = time.perf_counter(), opened.device, measured.seq_len
    single = measured.packing == "single"
    with torch.no_grad(), attention.kernels(measured.kernel), _threads(measured.threads):
        hiding = None
        if measured.hides_documents:
            forward = bare_forward(opened.model, device, measured.precision)
            tried = Tried(opened.model, forward, device, measured.precision, seq_len)
            hiding = find_hiding(tried, chat=measured.has_chat)
        module = _loss(opened, measured)

        def cast(**given: Any) -> torch.Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=measured.precision == "bf16"):
                each: torch.Tensor = module(**given)
                return each

        def hidden(labels: np.ndarray, starts: Sequence[np.ndarray]) -> MicroBatch:
            if hiding is not None:
                return attention.document_tensors(starts, seq_len, hiding, device)
            if single:
                by_length = attention.rope_change(opened.model) is not None
                return attention.padding_tensors(labels, device, by_length=by_length, routed=False)
            return {}

        how = (device, cast, hidden, on_progress)
        if measured.preference is None:
            evaluation = _score_tokens(measured, *how)
        else:
            evaluation = _score_pairs(measured, measured.preference, *how)
    return replace(evaluation, seconds=time.perf_counter() - start)


def _rounds(measured: HeldOutOfRun, on_progress: OnProgress) -> Iterator[tuple[int, list[int]]]:
    """Yield the rank and the blocks of each round of each rank of the run."""
    of = measured.groups
    for rank in range(of):
        rounds = rounds_of(measured.held, measured.seq_len, rank, of, measured.micro_batch_size)
        for number, blocks in enumerate(rounds, rank * len(rounds)):
            on_progress(number, of * len(rounds))
            yield rank, blocks


def _score_tokens(
    measured: HeldOutOfRun,
    device: torch.device,
    model: Model,
    hidden: Hidden,
    on_progress: OnProgress,
) -> Evaluation:
    held, seq_len, single = measured.held, measured.seq_len, measured.packing == "single"

    def shown(labels: np.ndarray) -> int:
        return attention.needed_rows(labels) if single else seq_len

    how = (device, rank_layout(0, 1), model, shown, hidden)
    scored = [
        reduce(torch.add, [score_blocks(held, blocks, seq_len, *how) for _, blocks in rounds])
        for _, rounds in groupby(_rounds(measured, on_progress), itemgetter(0))
    ]
    return result(reduce(torch.add, scored).tolist(), held)


def _score_pairs(
    measured: HeldOutOfRun,
    asked: PreferenceConfig,
    device: torch.device,
    model: Model,
    hidden: Hidden,
    on_progress: OnProgress,
) -> Evaluation:
    held, seq_len, single = measured.held, measured.seq_len, measured.packing == "single"
    column = _reference(measured.run_dir) if asked.has_reference else None
    scored = []
    for _, blocks in _rounds(measured, on_progress):
        examples = [held.block(g, seq_len) for g in blocks]
        ids, labels, starts = (list(one) for one in zip(*examples, strict=True))
        inputs, targets = np.stack(ids)[:, :-1].astype(np.int64), np.stack(labels)
        if single:
            inputs, targets = in_halves(inputs), in_halves(targets)
            behind = targets  # the last label, or, where a score is read behind it, that position
            if asked.loss == "reward":
                behind = np.concatenate([targets[:, :1], targets[:, :-1]], axis=1)
            width = attention.needed_rows(behind)
            inputs, targets = inputs[:, :width], targets[:, :width]
        pairs = held.pairs_of(blocks, seq_len)
        known = np.zeros((len(pairs.keys), 2)) if column is None else column.of(pairs.keys)
        arguments = (pairs, targets, slice(None), known, asked, device)
        row: MicroBatch = {"input_ids": attention.on_device(device, inputs)}
        row |= target_keywords(targets, device, whole=False) | hidden(targets, starts)
        row["pairs"] = pair_tensors(*arguments, halves=single)
        parts = torch.from_numpy(held.pair_parts(blocks, seq_len))
        scored.append(Scores(model(each=True, **row), row["pairs"], parts))
    sums = pair_totals(scored, asked, device, max(1, len(held.parts)), tells=True)
    return pair_result(sums.tolist(), held)


def _reference(run_dir: Path) -> reference.Column:
    """Return what the pairs of a run were worth to its reference."""
    path = run_dir / contents.REFERENCE
    starts = (line for line in record.record(run_dir) if line["kind"] == "start")
    digests = [line["reference"]["digest"] for line in starts if "reference" in line]
    try:
        column = reference.load(path)
        if not digests or column.continues(digests[-1]):
            return column
        why = f"its digest is {column.digest}, not {digests[-1]}"
    except (reference.DamagedColumnError, OSError) as error:
        why = first_line(error)
    expected = f"the reference of the run's pairs ({why})"
    remedy = "put the file back; --data PAIRS --reference MODEL compares without it"
    raise UserError(Problem(str(path), None, expected, remedy))


def _loss(opened: LoadedModel, measured: HeldOutOfRun) -> LossModule:
    """Return the module that computes the loss as the run does."""
    kernel = FrozenChoices(measured.run_dir, "").loss_kernel or "logits"
    examined = "" if kernel == "logits" else examine(opened.model)
    head = examined if isinstance(examined, Head) else None
    return LossModule(opened.model, head, kernel=kernel, preference=measured.preference)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Let torch compute with this many threads, which decide how sums are rounded."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _start_of(run_dir: Path, step: int | None) -> JsonMapping:
    """Return the `start` line of the start that evaluated at `step`, else the last one.

    A run without a record counts as one process that takes one block at a time.
    """
    last: JsonMapping = {"world_size": 1, "micro_batch_size": 1}
    evaluated = None
    for line in record.record(run_dir):
        if line["kind"] == "start":
            last = line
        elif line["kind"] == "eval" and line["step"] == step:
            evaluated = last
    return evaluated or last


def _check_tokenizer(opened: LoadedModel, measured: HeldOutOfRun) -> None:
    """Raise UserError if the run's tokenizer gives other ids than the model's, or larger ones."""
    run_tokenizer = tokenizers.load(str(measured.run_dir / contents.TOKENIZER), None)
    ids = [ids_of_probes(one) for one in (run_tokenizer, opened.tokenizer)]
    rows = opened.model.get_input_embeddings().weight.shape[0]
    if ids[0] != ids[1] or int(measured.held.ids.max()) >= rows:
        expected = f"a run with the tokenizer of {opened.target.given}"
        remedy = with_other_tokenizer(measured.run_dir)
        raise UserError(Problem("--data", measured.run_dir, expected, remedy))
