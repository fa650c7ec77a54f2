"""A file of prompts and a file of what a model writes after them: `generate --prompts … --out …`.

    rows of FILE ─► ids ─► batches ─► new ids ─► OUT, row by row in the order of FILE

A row gets what it gets alone. In a batch, shorter rows are padded on the left. Some models see
that padding, such as those that carry a state over it, or whose positions depend on the longest
row. So the shortest and the longest prompt are first tried together and alone, then two prompts of
one length; what a batch may be follows from that:

    padded     rows of any length      most models
    equal      rows of one length      LongRoPE, RecurrentGemma
    alone      one row                 RWKV, whose state is mixed up in a batch (transformers 5.23)
"""

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from transformers import GenerationConfig

from llmtrain import system
from llmtrain.data.chat.rows import BadRowError, Message, to_example
from llmtrain.data.chat.template import Tools
from llmtrain.errors import Problem, UserError, raise_any, usable
from llmtrain.model import attention
from llmtrain.text import first_line
from llmtrain.tools.use import generate
from llmtrain.tools.use.load import LoadedModel
from llmtrain.types import JsonMapping, JsonObject

Kind = Literal["padded", "equal", "alone"]

_OPTION, _OUT = "--prompts", "--out"
_WRITTEN = ("completion", "tokens", "ended")  # keys of what is added to a row
_BESIDE = ("tools", "functions", "system", "system_prompt")  # keys that belong to a conversation
_SHOWN = 60  # characters of a bad line
_PROBLEMS = 10  # of bad lines that are listed
_POSITIONS = 16_384  # of a batch, prompts and what is written: 2 GiB of keys and values at 8 B
_TRIED_TOKENS = 3
# Of the largest logit, by which those of a padded row may differ from those of the row alone.
_BOUNDS = {"torch.float32": 1e-4}
_ROUNDED = 2e-2  # in 16 bits


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a file.

    where: its file and line, in messages
    row: the line's object, which the output repeats
    text: to be continued; None = it is a conversation
    messages, tools: of a conversation
    """

    where: str
    row: JsonMapping
    text: str | None = None
    messages: Sequence[Message] = ()
    tools: Tools = None


@dataclass(frozen=True, slots=True)
class Completed:
    """What was written to a file. tokens: new ones, end tokens included"""

    out: Path
    prompts: int
    tokens: int
    seconds: float

    def to_json(self) -> JsonObject:
        """Return the object that `llmtrain generate --prompts … --json` prints."""
        return {**asdict(self), "out": str(self.out)}


def complete_file(
    model_or_run: str | Path,
    file: Path,
    out: Path,
    sampling: generate.Sampling,
    *,
    chat: bool,
    on_progress: Callable[[int, int], object],
) -> Completed:
    """Write what a model writes after each prompt of a file, as JSONL, to a new file.

    file: `.jsonl` with a `prompt` (a text, or messages) or `messages` in each row; `.txt` with a
        prompt in each line
    out: appears when it is complete. Each row is that of `file` with `completion`, `tokens`, and
        `ended`: whether the model ended it itself
    chat: whether a prompt that is a text is a message of the user
    on_progress: called with how many are done, and of how many

    With a temperature above 0, what is drawn depends on the whole file. Raises UserError for bad
    lines, which it names, and for an `out` that exists or cannot be written.
    """
    start = time.perf_counter()
    _check_out(out)
    prompts = read_prompts(file, chat=chat)
    opened = generate.open_writer(model_or_run, sampling)
    rows = list(_encode(opened, prompts))
    both = zip(rows, prompts, strict=True)
    limits = [generate.room_for(opened, ids, sampling, prompt.where) for ids, prompt in both]
    lengths = [len(ids) for ids in rows]
    written: dict[int, list[int]] = {}
    for number, batch in enumerate(batches(lengths, limits, find_kind(opened, rows))):
        on_progress(len(written), len(rows))
        limit = limits[batch[0]]
        new = generate.complete(opened, [rows[n] for n in batch], limit, sampling, number)
        written |= zip(batch, new, strict=True)
    lines = [_line(opened, prompt, written[n]) for n, prompt in enumerate(prompts)]
    system.write_durably(out, "".join(lines).encode(), shared=True)
    tokens = sum(map(len, written.values()))
    return Completed(out, len(rows), tokens, time.perf_counter() - start)


def _check_out(out: Path) -> None:
    """Raise UserError, before anything is computed, for a file that exists or cannot be made."""
    if out.is_symlink() or out.exists():
        expected = "a file that does not exist: none is overwritten"
        raise UserError(Problem(_OUT, out, expected, f"another {_OUT}"))
    with usable(_OUT, out, "a file that can be written"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass


def read_prompts(file: Path, *, chat: bool) -> list[Prompt]:
    """Return the prompts of a file. Raises UserError that names its bad lines."""
    if file.suffix not in (".jsonl", ".txt"):
        expected = "a .jsonl file of rows with prompt or messages, or a .txt file, a prompt a line"
        raise UserError(Problem(_OPTION, file, expected))
    with usable(_OPTION, file, "a file that can be read"):
        data = file.read_bytes()
    ends = rb"\n" if file.suffix == ".jsonl" else rb"\r\n|\r|\n"
    lines = re.split(ends, data.removeprefix(b"\xef\xbb\xbf"))
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise UserError(Problem(_OPTION, file, "at least one prompt; the file is empty"))
    prompts, problems = [], []
    for number, line in enumerate(lines, 1):
        where = f"{file}, line {number}"
        try:
            row = _object(line) if file.suffix == ".jsonl" else {"prompt": _text(line)}
            prompts.append(_prompt(where, row, chat=chat))
        except _BadLineError as error:
            shown = ascii(line[:_SHOWN].decode(errors="replace"))
            problems.append(Problem(where, shown, str(error)))
    more = len(problems) - _PROBLEMS
    many = f"the first bad lines; there are {more:,} more" if more > 0 else ""
    raise_any(islice(problems, _PROBLEMS), many)
    return prompts


class _BadLineError(Exception):
    """A line without a usable prompt: what was expected."""


def _text(line: bytes) -> str:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise _BadLineError(f"UTF-8; byte {error.start + 1} of the line is not") from error
    if not text.strip():
        raise _BadLineError("a prompt; the line is blank")
    return text


def _object(line: bytes) -> JsonObject:
    try:
        row = json.loads(_text(line))
        # Neither halves of a surrogate pair, which UTF-8 does not have, nor NaN could be written.
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise _BadLineError(f"a JSON object ({first_line(error)})") from error
    if not isinstance(row, dict):
        raise _BadLineError(f"a JSON object; it is {type(row).__name__}")
    if reserved := [key for key in _WRITTEN if key in row]:
        raise _BadLineError(f"a row without {', '.join(reserved)}, which {_OUT} has; rename it")
    return row


def _prompt(where: str, row: JsonMapping, *, chat: bool) -> Prompt:
    given = [key for key in ("prompt", "messages") if row.get(key) is not None]
    if len(given) != 1:
        raise _BadLineError("a row with prompt or with messages")
    (key,) = given
    value = row[key]
    if key == "prompt" and isinstance(value, str) and not chat:
        return Prompt(where, row, text=value)
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    beside = {name: row[name] for name in _BESIDE if name in row}
    try:
        example = to_example(json.dumps({**beside, "messages": messages}), "messages")
    except BadRowError as error:
        raise _BadLineError(f"messages, or a text as prompt: {error}") from error
    if example.messages[-1]["role"] == "assistant":
        raise _BadLineError("messages of which the last is not the assistant's")
    return Prompt(where, row, messages=example.messages, tools=example.tools)


def _encode(opened: LoadedModel, prompts: Sequence[Prompt]) -> Iterator[list[int]]:
    """Yield the ids of each prompt. Raises UserError for what the chat template refuses."""
    chat_ids: generate.ChatIds | None = None
    for prompt in prompts:
        if prompt.text is not None:
            yield generate.text_ids(opened, prompt.text)
        else:
            chat_ids = chat_ids or generate.open_chat_prompts(opened)
            yield chat_ids(prompt.messages, prompt.tools, prompt.where)


def batches(lengths: Sequence[int], limits: Sequence[int], kind: Kind) -> Iterator[list[int]]:
    """Yield the numbers of the rows of each batch, shorter rows first.

    lengths: ids of each row
    limits: new ids that each may get, the same in a batch: one that is close to the end of the
        model's positions gets fewer
    """
    batch: list[int] = []
    for n in sorted(range(len(lengths)), key=lambda n: (-limits[n], lengths[n])):
        if batch:
            first = batch[0]
            may = kind == "padded" or (kind == "equal" and lengths[n] == lengths[first])
            same = may and limits[n] == limits[first]
            if not same or (lengths[n] + limits[n]) * (len(batch) + 1) > _POSITIONS:
                yield batch
                batch = []
        batch.append(n)
    yield batch


def find_kind(opened: LoadedModel, rows: Sequence[Sequence[int]]) -> Kind:
    """Return which rows may be in a batch, so that each gets the logits that it gets alone.

    rows: ids of all prompts
    """
    short, long = min(rows, key=len), max(rows, key=len)
    vocabulary = opened.model.config.get_text_config().vocab_size
    if len(rows) == 1:
        return "alone"
    # Frequencies of a rope may change with the longest row, also once it is longer than a prompt.
    if attention.rope_change(opened.model) is None and _are_as_alone(opened, [short, long]):
        return "padded"
    other = [(id + 1) % vocabulary for id in short]
    return "equal" if _are_as_alone(opened, [short, other]) else "alone"


def _are_as_alone(opened: LoadedModel, rows: Sequence[Sequence[int]]) -> bool:
    """Whether rows get together the logits that each gets alone, but for rounding."""
    count = min(_TRIED_TOKENS, opened.positions - max(map(len, rows)))
    together = _logits(opened, rows, count)
    alone = [_logits(opened, [row], count)[0] for row in rows]
    bound = _BOUNDS.get(str(opened.model.dtype), _ROUNDED)
    both = zip(together, alone, strict=True)
    return all(float((a - b).abs().max()) <= bound * float(b.abs().max()) for a, b in both)


def _logits(opened: LoadedModel, rows: Sequence[Sequence[int]], count: int) -> list[torch.Tensor]:
    """Return the logits of the first `count` new tokens of each row, (count, V) fp32."""
    inputs, mask = generate.left_padded(rows, 0, opened.device)
    before = opened.model.generation_config  # has the end tokens, of which none ends this
    opened.model.generation_config = GenerationConfig(
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    with torch.no_grad():
        logits = opened.model.generate(inputs, attention_mask=mask).logits
    opened.model.generation_config = before
    return list(torch.stack(logits, 1).float())


def _line(opened: LoadedModel, prompt: Prompt, new: Sequence[int]) -> str:
    generated = generate.as_generated(opened, "", new)
    added = dict(zip(_WRITTEN, (generated.text, generated.tokens, generated.ended), strict=True))
    return json.dumps({**prompt.row, **added}, ensure_ascii=False) + "\n"
