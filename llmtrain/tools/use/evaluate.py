"""Measure a model: on the held-out set of its run, on other documents, on benchmark tasks.

Three figures, which differ:

    held-out set of a run     blocks, as the run scores them: its `eval` line again (`packed.py`);
                              with any model, as if the run began with it (`target.py`)
    any documents             each alone behind a begin token (without one, the end-of-text token),
                              so that its first token is scored too: the figure of lm-eval's tasks
                              of output type `loglikelihood_rolling`
    pairs of answers          each answer alone behind its prompt, by the model and by a reference
                              (`answers.py`)

A document longer than the model's positions is scored in windows:

    window 4, stride 4     [b 1 2 3] → 1 2 3 4     [4 5 6 7] → 5 6 7 8     [6 7 8 9] → 10
    window 4, stride 2     [b 1 2 3] → 1 2 3 4     [2 3 4 5] → 5 6         [4 5 6 7] → 7 8 …

A smaller stride gives more context to each token and costs more time. Every token counts once.

Tasks, of lm-eval's own collection or described in a file, are run by lm-eval. The trap: it lets a
tokenizer add its begin token to a text that it has put a begin token in front of already, and
scores the second one. So it is told to let the tokenizer add none.
"""

import importlib.util
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path

import torch
import yaml
from torch import Tensor

from llmtrain.config.binding import data_settings
from llmtrain.config.load import load_config
from llmtrain.data import heldout
from llmtrain.data.documents.reader import reading_of
from llmtrain.data.manifest import Source
from llmtrain.data.survey import evaluation_sources, survey
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.model import attention
from llmtrain.model.loss import LossModule
from llmtrain.rundir import contents, record
from llmtrain.text import first_line
from llmtrain.tools.use import answers, packed
from llmtrain.tools.use.load import LoadedModel, open_model
from llmtrain.tools.use.packed import HeldOutOfRun, OnProgress
from llmtrain.tools.use.target import KEY, OPTION, Target, find_base, find_target, seen_by
from llmtrain.training.evaluate import figures
from llmtrain.types import NOT_TRAINED, Evaluation, JsonMapping, JsonObject

Window = tuple[list[int], int]  # ids of inputs and the last target; number of targets to score

_LOGITS_BYTES = 256 << 20  # of a batch; a single window may have more


def score_rolling(
    opened: LoadedModel, texts: Iterable[str], stride: int | None, on_progress: OnProgress
) -> Evaluation:
    """Score each text alone. bits_per_byte: over the UTF-8 bytes of the texts.

    stride: tokens that a window after the first scores; None = as many as the model has positions

    Raises UserError for a stride that is larger than that, and if no token can be scored.
    """
    size = opened.positions
    if stride is not None and not 1 <= stride <= size:
        expected = f"1 to {size}, the model's positions"
        raise UserError(Problem("--stride", stride, expected))
    start = time.perf_counter()
    nll = torch.zeros((), dtype=torch.float64, device=opened.device)
    documents = num_bytes = tokens = 0

    def count_windows() -> Iterator[Window]:
        nonlocal documents, num_bytes, tokens
        for text in texts:
            on_progress(documents, 0)
            ids = opened.tokenizer.encode(text, add_special_tokens=False, verbose=False)
            documents, tokens = documents + 1, tokens + len(ids)
            num_bytes += len(text.encode())
            yield from windows(ids, opened.begin, size, stride or size)

    attention.rope_by_document(opened.model)
    by_length = attention.rope_change(opened.model) is not None
    module, vocabulary = LossModule(opened.model), opened.model.config.get_text_config().vocab_size
    with torch.no_grad():
        for batch in _batches(count_windows(), max(1, _LOGITS_BYTES // (4 * vocabulary))):
            inputs, targets, positions = (one.to(opened.device) for one in _tensors(batch))
            nll += module(inputs, targets, position_ids=positions if by_length else None)
    if not tokens:
        raise UserError(Problem("--data", None, "at least one document that is not empty"))
    evaluation = figures((float(nll), tokens), documents, num_bytes)
    return replace(evaluation, seconds=time.perf_counter() - start)


def windows(ids: Sequence[int], begin: int, size: int, stride: int) -> Iterator[Window]:
    """Yield windows of up to `size` inputs in which every id is scored once.

    begin: the id in front of them
    """
    line = [begin, *ids]
    done = 0
    while done < len(ids):
        count = min(stride if done else size, len(ids) - done)
        done += count
        yield line[max(0, done - size) : done + 1], count


def _batches(all_windows: Iterable[Window], limit: int) -> Iterator[list[Window]]:
    """Group consecutive windows so that a batch has at most `limit` positions, padding included."""
    batch: list[Window] = []
    longest = 0
    for window in all_windows:
        longest = max(longest, len(window[0]) - 1)
        if batch and longest * (len(batch) + 1) > limit:
            yield batch
            batch, longest = [], len(window[0]) - 1
        batch.append(window)
    if batch:
        yield batch


def _tensors(batch: Sequence[Window]) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, targets and positions, (B, T) int64.

    Padding is on the right, where causal attention does not see it. It has no target, and position
    0, so that it makes no window longer.
    """
    longest = max(len(line) for line, _ in batch) - 1
    inputs = torch.zeros((len(batch), longest), dtype=torch.int64)
    targets, positions = torch.full_like(inputs, NOT_TRAINED), torch.zeros_like(inputs)
    for row, (line, count) in enumerate(batch):
        end = len(line) - 1
        inputs[row, :end] = torch.tensor(line[:-1])
        targets[row, end - count : end] = torch.tensor(line[-count:])
        positions[row, :end] = torch.arange(end)
    return inputs, targets, positions


TASKS_KEY = "--tasks"
_SPLITS = ("test_split", "validation_split", "training_split", "fewshot_split")
_YAML = (".yaml", ".yml")
_BATCH_SIZE = 8


def check_tasks(names: Sequence[str]) -> None:
    """Raise UserError if lm-eval is missing or a task file cannot work. It is fast."""
    if names and importlib.util.find_spec("lm_eval") is None:
        expected, remedy = "an installed lm-eval", "pip install 'llmtrain[eval]'"
        raise UserError(Problem(TASKS_KEY, ", ".join(names), expected, remedy))
    raise_any(problem for name in names if name.endswith(_YAML) for problem in _problems(name))


def run_tasks(opened: LoadedModel, names: Sequence[str], *, chat: bool) -> dict[str, JsonObject]:
    """Return task → metric → value.

    names: lm-eval's names of tasks or groups, or YAML files with a task
    chat: whether the tasks' texts go through the model's chat template

    Raises UserError for a task that does not exist, or whose data cannot be read, and with `chat`
    for a model without a chat template.
    """
    if chat and not opened.tokenizer.chat_template:
        expected = "a model whose tokenizer has a chat template"
        raise UserError(Problem("--chat", opened.target.given, expected, "leave --chat out"))
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    files = [Path(name) for name in names if name.endswith(_YAML)]
    settings = [_settings(name) if name.endswith(_YAML) else {"task": name} for name in names]
    asked = [str(one.get("group") or one.get("task")) for one in settings]
    manager = TaskManager(
        include_path=sorted({str(file.parent) for file in files}),
        include_defaults=len(files) < len(names),  # reading all of them takes seconds
    )
    if unknown := [name for name in asked if name not in manager.all_tasks]:
        raise UserError(Problem(TASKS_KEY, ", ".join(unknown), "tasks of lm-eval, or YAML files"))
    logging.getLogger(HFLM.__module__).setLevel(logging.ERROR)  # it warns of any loaded model
    model = HFLM(
        pretrained=opened.model,
        tokenizer=opened.tokenizer,
        backend="causal",
        add_bos_token=False,
        batch_size=_BATCH_SIZE,
    )
    try:
        output = simple_evaluate(
            model=model,
            tasks=asked,
            task_manager=manager,
            apply_chat_template=chat,
            log_samples=False,
        )
    except OSError as error:  # also of the network
        expected = f"tasks whose data can be read: {first_line(error)}"
        raise UserError(Problem(TASKS_KEY, ", ".join(names), expected)) from error
    return {name: _numbers(values) for name, values in output["results"].items()}


def _numbers(values: JsonMapping) -> JsonObject:
    """Return the metrics of a task; lm-eval names them with their filter, `acc,none`."""
    numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
    return {key.removesuffix(",none"): value for key, value in numbers.items()}


def _problems(name: str) -> Iterator[Problem]:
    """Yield what makes lm-eval fail on a task file, with a better message than its own."""
    settings = _settings(name)
    if not settings.get("task") and not settings.get("group"):
        yield Problem(TASKS_KEY, name, "a YAML file with a task (`task: NAME`)")
    files = (settings.get("dataset_kwargs") or {}).get("data_files")
    asked = [str(settings[key]) for key in _SPLITS if settings.get(key)]
    if files is None:
        return
    split = asked[0] if asked else "test"
    expected = f"a mapping that has each split of the task ({', '.join(asked) or 'none is named'})"
    if not isinstance(files, dict) or not {*asked} <= files.keys():
        remedy = f"data_files: {{{split}: FILE}} and test_split: {split}"
        yield Problem(f"{name}: dataset_kwargs.data_files", files, expected, remedy)


def _settings(name: str) -> JsonObject:
    """Read a task file; lm-eval's own tags (`!function`) count as strings."""

    class Loader(yaml.SafeLoader):
        """Reads plain values alone."""

    Loader.add_multi_constructor("!", lambda loader, suffix, node: str(node.value))
    try:
        with Path(name).open(encoding="utf-8") as file:
            document = Loader(file).get_single_data()
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        expected = f"a YAML file with a task ({first_line(error)})"
        raise UserError(Problem(TASKS_KEY, name, expected)) from error
    return document if isinstance(document, dict) else {}


DATA_KEY = "--data"


def documents_of(given: str) -> Iterator[str]:
    """Yield the documents of files or a data set, or those that a config holds out.

    given: what `data.sources.path` may be; or a config, whose evaluation.sources or held-out
        documents are meant, at most its evaluation.max_documents

    Raises UserError for what cannot be read, for conversations, and for a token cache, which has
    no text.
    """
    if given.endswith(_YAML):
        config = load_config(given)
        limit: int | None = config.evaluation.max_documents
    else:
        config, limit = answers.config_of_data(given), None
    settings = data_settings(config)
    reading = reading_of(settings, None)
    try:
        sources: Sequence[Source] = evaluation_sources(settings, reading)
        sources = sources or survey(settings, 1).sources
    except UserError as error:
        key = "evaluation.sources.0.path"
        problems = (replace(p, key=DATA_KEY if p.key == key else p.key) for p in error.problems)
        raise UserError(*problems, where=error.where) from error
    for source in sources:
        if source.cached:
            raise UserError(Problem(DATA_KEY, source.path, "documents of text, not a token cache"))
        if source.form is not None:
            remedy = (
                "--data RUN scores the held-out conversations of a run that has some, also with "
                "other models of its tokenizer"
            )
            expected = "documents of text, not conversations"
            raise UserError(Problem(DATA_KEY, source.path, expected, remedy))
    return islice(heldout.texts(sources, settings.seed, reading), limit)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What was measured.

    model: the directory of the weights
    step: of a checkpoint; None for any other model
    split: `heldout`, or what `--data` named
    figures: None if only tasks were asked for
    tasks: task → metric → value
    as_run: the run as whose base the model was measured; None = as a model by itself
    compared: how the answers of pairs in files were compared
    """

    model: Path
    step: int | None
    split: str
    figures: Evaluation | None
    tasks: Mapping[str, JsonMapping] = field(default_factory=dict)
    as_run: Path | None = None
    compared: answers.Comparison | None = None

    def to_json(self) -> JsonObject:
        """Return the object that `llmtrain evaluate --json` prints."""
        fields: JsonObject = {"model": str(self.model), "step": self.step}
        if self.as_run is not None:
            fields["as"] = str(self.as_run)
        if self.figures is not None:
            fields |= {"kind": "eval", "split": self.split, **_fields(self.figures)}
            if self.figures.sources:
                each = self.figures.sources.items()
                fields["sources"] = {label: _fields(one) for label, one in each}
        if self.compared is not None:
            fields |= asdict(self.compared)
        shown = fields | ({"tasks": self.tasks} if self.tasks else {})
        return {key: record.finite(value) for key, value in shown.items()}


def _fields(figures: Evaluation) -> JsonObject:
    """Return the figures as an `eval` line has them."""
    fields = asdict(figures)
    del fields["sources"]
    return fields | (fields.pop("pairs") or {})


def evaluate(
    model_or_run: str | Path,
    data: str | Path | None = None,
    *,
    as_run: str | Path | None = None,
    reference: str | Path | None = None,
    tasks: Sequence[str] = (),
    stride: int | None = None,
    chat: bool = False,
    on_progress: OnProgress = lambda done, of: None,
) -> Evaluated:
    """Measure a model, without training anything and without writing to its run.

    model_or_run: a run (its best checkpoint, else the newest), a checkpoint, a model directory or a
        Hub id
    data: a run, whose held-out set is scored; a file, directory or data set with documents, or with
        pairs of answers; or a config, whose held-out documents are scored. None = the held-out set
        of its own run, unless there are tasks
    as_run: a run; its held-out set is scored as the run scored it before its first step, had it
        begun with this model: with its tokenizer, rows for the tokens that it added, its adapters
    reference: a model with which this one is compared on pairs of answers in `data`
    tasks: names of lm-eval's tasks, or YAML files that describe one
    stride: tokens that a window of a long document scores; None = the model's positions
    chat: whether tasks go through the model's chat template
    on_progress: called with how much is done, and of how much (0 = not known)

    Raises UserError for bad input, RunError if the disk or the network fails.
    """
    if as_run is not None:
        named = {"--data": data, answers.REFERENCE_KEY: reference, "--stride": stride}
        other = named | {"--tasks": ",".join(tasks), "--chat": chat}
        expected = f"left out: {OPTION} scores the held-out set of that run"
        raise_any(Problem(key, value, expected) for key, value in other.items() if value)
        return _evaluate_as(str(model_or_run), Path(as_run), on_progress)
    target = find_target(str(model_or_run))
    check_tasks(tasks)
    if chat and not tasks:
        expected = "false here: it gives tasks (--tasks) through the chat template"
        raise UserError(Problem("--chat", True, expected))
    measured = _heldout(target, data, wanted=not tasks)
    _check_use(data, measured, stride, reference)
    figures, compared = None, None
    if measured is not None:
        opened = open_model(target, precision=measured.precision, seq_len=measured.seq_len)
        figures = packed.score(opened, measured, on_progress)
    elif data is not None:
        figures, compared = _on_documents(target, str(data), reference, stride, on_progress)
    scores = run_tasks(open_model(target), tasks, chat=chat) if tasks else {}
    split, place = "heldout" if data is None else str(data), (target.directory, target.step)
    return Evaluated(*place, split, figures, scores, compared=compared)


def _check_use(
    data: str | Path | None,
    measured: HeldOutOfRun | None,
    stride: int | None,
    reference: str | Path | None,
) -> None:
    """Raise UserError for what the held-out set of a run has no use for."""
    of_run = data is None or measured is not None
    if stride is not None and of_run:
        expected = "null here: a stride is for documents (--data FILE), not for a held-out set"
        raise UserError(Problem("--stride", stride, expected))
    if reference is not None and (of_run or str(data).endswith(_YAML)):
        expected = "left out here: it is for pairs of answers (--data FILE); a run has its own"
        raise UserError(Problem(answers.REFERENCE_KEY, reference, expected))


def _on_documents(
    target: Target,
    given: str,
    reference: str | Path | None,
    stride: int | None,
    on_progress: OnProgress,
) -> tuple[Evaluation, answers.Comparison | None]:
    """Score documents that are in no run, or pairs of answers. The arguments: as of `evaluate`."""
    texts = None
    try:
        texts = documents_of(given) if reference is None else None
    except UserError as error:
        of_columns = any(problem.key.endswith(".columns") for problem in error.problems)
        if not of_columns or given.endswith(_YAML) or not answers.has_pairs(given):
            raise
    if texts is not None:
        return score_rolling(open_model(target), texts, stride, on_progress), None
    if stride is not None:
        expected = "left out with pairs of answers, which are scored whole"
        raise UserError(Problem("--stride", stride, expected))
    return answers.compare_answers(target, given, reference, on_progress)


def _evaluate_as(given: str, run_dir: Path, on_progress: OnProgress) -> Evaluated:
    seen = seen_by(run_dir)
    measured = packed.heldout_of(run_dir, 0, OPTION)
    target = find_base(given, seen)
    opened = open_model(target, precision=seen.precision, seq_len=measured.seq_len, seen=seen)
    figures = packed.score(opened, measured, on_progress)
    return Evaluated(target.directory, target.step, "heldout", figures, as_run=run_dir)


def _heldout(target: Target, data: str | Path | None, *, wanted: bool) -> HeldOutOfRun | None:
    """Return the held-out set to score; None if other documents are, or tasks alone.

    wanted: whether it is scored if `data` names nothing
    """
    if data is not None:
        run_dir = Path(data)
        is_run = (run_dir / contents.MANIFEST).is_file() and (run_dir / contents.CONFIG).is_file()
        if not is_run:
            return None
        is_own = target.run_dir is not None and target.run_dir.samefile(run_dir)
        return packed.heldout_of(run_dir, target.step if is_own else None, "--data")
    if not wanted:
        return None
    if target.run_dir is None:
        expected = "a run, or --data FILE|CONFIG|RUN, or --tasks NAMES: this model has no own data"
        raise UserError(Problem(KEY, target.given, expected))
    return packed.heldout_of(target.run_dir, target.step, KEY)
