"""`llmtrain evaluate`, `generate`, `chat`, `export` and `eject`: what uses a run or its config.

Only typer is imported here, as in `main.py`.
"""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.cli.options import AsJson, ConfigFile, Overrides, ProgressLine, busy, runs, show, tell
from llmtrain.errors import Problem, UserError
from llmtrain.text import harmless, size
from llmtrain.types import JsonObject

if TYPE_CHECKING:
    from llmtrain.tools.eject import Ejected
    from llmtrain.tools.use.answers import Comparison
    from llmtrain.tools.use.evaluate import Evaluated
    from llmtrain.tools.use.export import Exported

_MODEL = "A run, a checkpoint, a model directory or a Hub id."
Model = Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help=_MODEL, autocompletion=runs)]
_DATA = "Documents, pairs of answers, a config, or a run; its own run's held-out set."
Data = Annotated[str | None, typer.Option(metavar="PATH|CONFIG", help=_DATA)]
_AS = "Measure it as this run measured the model that it began with."
AsRun = Annotated[Path | None, typer.Option("--as", metavar="RUN", help=_AS, autocompletion=runs)]
_OTHER = "With pairs of answers as --data: the model to compare with."
Reference = Annotated[str | None, typer.Option(metavar="MODEL", help=_OTHER, autocompletion=runs)]
Tasks = Annotated[str | None, typer.Option(metavar="A,B", help="Tasks of lm-eval, or YAML files.")]
_STRIDE = "Tokens that a window of a long document scores."
Stride = Annotated[int | None, typer.Option(min=1, metavar="N", help=_STRIDE)]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", help="Tokens to write.")]
Temperature = Annotated[float, typer.Option(metavar="T", help="0 = the likeliest.")]
TopP = Annotated[float, typer.Option(metavar="P", help="Share of probability.")]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="For temperatures above 0.")]
_Drawn = tuple[int, float, float, int]  # the values of these four
_KEPT = "\n\t"  # not escaped in what a model writes


def evaluate(
    model: Model,
    data: Data = None,
    as_run: AsRun = None,
    reference: Reference = None,
    tasks: Tasks = None,
    stride: Stride = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Give tasks through the model's chat template.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure a model on held-out data, on documents, on tasks."""
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    if tasks is not None and not names:
        raise UserError(Problem("--tasks", tasks, "names of tasks, joined by commas"))
    with busy("loading torch and the model") as end:
        from llmtrain.tools.use.evaluate import evaluate as measure

        _hide_progress_of_transformers()
        line = ProgressLine(wait=True)

        def show_progress(done: int, of: int) -> None:
            end()
            if line.is_due():
                line.show(f"scored {done:,} of {of:,}" if of else f"scored {done:,} documents")

        how: JsonObject = {"reference": reference, "tasks": names, "stride": stride, "chat": chat}
        evaluated = measure(model, data, as_run=as_run, on_progress=show_progress, **how)
    line.clear()
    show([json.dumps(evaluated.to_json())] if as_json else evaluation(evaluated))


def generate(
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="A text; with --chat a message, or none."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="A conversation; each line of stdin is a message.")
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSONL with prompt or messages; or .txt, a line each."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --prompts: a new file, JSONL.")
    ] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 42,
    as_json: AsJson = False,
) -> None:
    """Continue a text, or answer in a conversation; Ctrl-C ends it with exit code 0."""
    drawn = (max_new_tokens, temperature, top_p, seed)
    if prompts is not None or out is not None:
        _complete(model, prompt, prompts, out, drawn, chat=chat, as_json=as_json)
    elif chat:
        _converse(model, prompt, drawn, as_json=as_json)
    elif prompt is None:
        raise UserError(Problem("PROMPT", None, "a text to continue, or --chat, or --prompts FILE"))
    else:
        _continue(model, prompt, drawn, as_json=as_json)


def chat(
    model: Model,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 42,
    as_json: AsJson = False,
) -> None:
    """Talk with a model: at a prompt in a terminal, else each line of stdin is a message."""
    _converse(model, None, (max_new_tokens, temperature, top_p, seed), as_json=as_json)


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT", help="A run, or one checkpoint.", autocompletion=runs
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A directory to be made.")],
    dtype: Annotated[str, typer.Option(metavar="fp32|bf16|fp16", help="Of the weights.")] = "fp32",
    merge_adapters: Annotated[
        bool, typer.Option("--merge-adapters", help="Write one model, adapters merged into it.")
    ] = False,
    shard_gb: Annotated[
        float, typer.Option(metavar="G", help="GiB of the largest weight file.")
    ] = 4.0,
    push: Annotated[
        str | None, typer.Option(metavar="ID", help="Upload it, private; the token is HF_TOKEN.")
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not load it again in another process.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a model directory, and prove that it computes the same."""
    from llmtrain.tools.use.export import export as write

    _hide_progress_of_transformers()

    exported = write(
        run,
        out,
        dtype=dtype,
        merge_adapters=merge_adapters,
        shard_gb=shard_gb,
        push=push,
        verify=not no_verify,
        on_progress=tell,
    )
    show([json.dumps(exported.to_json())] if as_json else exportation(exported))


def eject(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The program, a new file; ends with .py.")
    ] = Path("train_one.py"),
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps whose tokens are written; 50.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one file that trains the first steps of a config without llmtrain, and its tokens.

    The file is for you to read and change: a plain loop in torch and transformers. On a CPU its
    losses are those of the run on one process, to the bit.
    """
    from llmtrain.config.load import load_config

    loaded = load_config(config, overrides or [])
    with busy("loading torch and the model"):
        from llmtrain.tools.eject import eject as write

        _hide_progress_of_transformers()
        ejected = write(loaded, out, steps)
    show([json.dumps(ejected.to_json())] if as_json else ejection(ejected))


def ejection(found: Ejected) -> Iterator[str]:
    """Yield what was written, and how it is started."""
    yield f"{found.program}  {found.lines} lines"
    yield f"{found.tokens}  the tokens of {found.steps:,} steps, {size(found.token_bytes)}"
    yield f"start it with: python {shlex.quote(str(found.program))}"


def evaluation(found: Evaluated) -> Iterator[str]:
    """Yield what was measured, a line for each kind of figure and for each metric of a task."""
    step = "" if found.step is None else f", step {found.step:,}"
    yield f"model      {found.model}{step}"
    if figures := found.figures:
        bits = "" if figures.bits_per_byte is None else f"  bits/byte {figures.bits_per_byte:.4f}"
        run = "" if found.as_run is None else f" of {found.as_run}, as before its first step"
        yield f"data       {found.split}{run}"
        if figures.pairs is not None:
            yield from _of_pairs(figures.loss, figures.pairs, found.compared)
        else:
            yield f"loss       {figures.loss:.4f}  perplexity {figures.perplexity:.4g}{bits}"
        counts = f"{figures.tokens:,} tokens of {figures.documents:,} documents"
        yield f"scored     {counts} in {figures.seconds:.1f} s"
    for task, metrics in found.tasks.items():
        for name, value in metrics.items():
            yield f"{task:<10} {name} {value:.4f}"


def _of_pairs(
    loss: float, pairs: Mapping[str, float | None], compared: Comparison | None
) -> Iterator[str]:
    """Yield the figures of pairs of answers, a line for each kind. loss: of a pair, in nats"""
    shown = {key: "–" if value is None else f"{value:.4f}" for key, value in pairs.items()}
    how = "" if compared is None else f"  ({compared.preference}, beta {compared.beta:g})"
    yield f"loss       {loss:.4f}{how}"
    yield f"accuracy   {shown['accuracy']}  margin {shown['margin']}"
    for name in ("reward", "logp"):
        yield f"{name:<10} chosen {shown[f'chosen_{name}']}  rejected {shown[f'rejected_{name}']}"
    if compared is None:
        return
    if compared.reference is not None:
        yield f"reference  {compared.reference}"
    elif compared.preference != "reward":
        yield "reference  none: accuracy and margin compare log p alone; --reference MODEL"
    if compared.left_out:
        yield f"left out   {compared.left_out:,} pairs, too long for the model"


def exportation(found: Exported) -> Iterator[str]:
    """Yield the files, the comparison, and where it is."""
    for name, count in found.files.items():
        yield f"{name:<40}{size(count):>11}"
    if losses := found.losses:
        apart = abs(losses.run - losses.export)
        yield f"{losses.measure} {losses.export:.6f}, {apart:.1e} from the run's on the same blocks"
    if found.pushed:
        yield f"uploaded to {found.pushed}"
    yield f"{found.path}"


def _hide_progress_of_transformers() -> None:
    """Switch off the bars that it shows while it loads weights."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _continue(model: str, prompt: str, drawn: _Drawn, *, as_json: bool) -> None:
    """Print what a model writes after a text."""
    with _until_ctrl_c(), busy("loading torch and the model") as loaded:
        from llmtrain.tools.use import generate as tool

        _hide_progress_of_transformers()
        on_text = _quietly(loaded) if as_json else _behind(prompt, loaded)
        generated = tool.continue_text(model, prompt, tool.Sampling(*drawn), on_text)
        show([json.dumps(generated.to_json()) if as_json else ""])


def _converse(model: str, message: str | None, drawn: _Drawn, *, as_json: bool) -> None:
    """Print the answers of one conversation. message: the only one; None = those of stdin"""
    typed = message is None and not as_json and sys.stdin.isatty() and sys.stdout.isatty()
    with _until_ctrl_c(), busy("loading torch and the model") as loaded:
        from llmtrain.tools.use import generate as tool

        _hide_progress_of_transformers()
        messages = iter([message]) if message is not None else _messages(loaded, typed=typed)
        on_text = _quietly(loaded) if as_json else _behind("", loaded)
        options = {"refused": lambda error: tell(f"error: {error}", keep="\n")} if typed else {}
        sampling = tool.Sampling(*drawn)
        for answer in tool.converse(model, messages, sampling, on_text, _show_forgotten, **options):
            show([json.dumps(answer.to_json()) if as_json else ""])


def _complete(
    model: str,
    prompt: str | None,
    prompts: Path | None,
    out: Path | None,
    drawn: _Drawn,
    *,
    chat: bool,
    as_json: bool,
) -> None:
    """Write what a model writes after the prompts of a file to another file."""
    if prompts is None or out is None:
        lacking, given = ("--prompts", "--out") if prompts is None else ("--out", "--prompts")
        raise UserError(Problem(lacking, None, f"a file: {given} needs both"))
    if prompt is not None:
        raise UserError(Problem("PROMPT", prompt, "none here: the prompts are those of --prompts"))
    with busy("loading torch and the model") as loaded:
        from llmtrain.tools.use.generate import Sampling
        from llmtrain.tools.use.prompts import complete_file

        _hide_progress_of_transformers()
        line = ProgressLine(wait=True)

        def show_progress(done: int, of: int) -> None:
            loaded()
            if line.is_due():
                line.show(f"completed {done:,} of {of:,} prompts")

        how = Sampling(*drawn)
        completed = complete_file(model, prompts, out, how, chat=chat, on_progress=show_progress)
    line.clear()
    counts = f"{completed.prompts:,} prompts, {completed.tokens:,} tokens written"
    text = [f"{counts} in {completed.seconds:.1f} s", str(completed.out)]
    show([json.dumps(completed.to_json())] if as_json else text)


@contextmanager
def _until_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the block, and the command with exit code 0."""
    try:
        yield
    except KeyboardInterrupt:
        print()
        raise typer.Exit(0) from None


def _messages(loaded: Callable[[], None], *, typed: bool) -> Iterator[str]:
    """Yield the messages that are typed, or the lines of stdin, without blank ones.

    loaded: called before the first line is read
    """
    loaded()
    if isinstance(sys.stdin, io.TextIOWrapper):  # bytes that are not UTF-8 are refused by name
        sys.stdin.reconfigure(errors="surrogateescape")
    for line in _typed() if typed else sys.stdin:
        if line.strip():
            yield line.rstrip("\r\n")


def _typed() -> Iterator[str]:
    """Yield the lines that are typed at a prompt, until Ctrl-D."""
    import readline  # noqa: F401  # `input` edits lines with it, and remembers them

    print("Each line is a message; Ctrl-D ends the conversation.")
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        yield line


def _show_forgotten(count: int) -> None:
    note = f"the oldest {count} messages are left out: the conversation fills the model's positions"
    tell(f"({note})")


def _write(text: str) -> None:
    sys.stdout.write(harmless(text, keep=_KEPT))
    sys.stdout.flush()


def _behind(prompt: str, loaded: Callable[[], None]) -> Callable[[str], None]:
    """Return a function that writes parts of a text, and the prompt before the first of them.

    loaded: called before anything is written
    """
    waiting = [prompt]

    def write(text: str) -> None:
        loaded()
        _write("".join([*waiting, text]))
        waiting.clear()

    return write


def _quietly(loaded: Callable[[], None]) -> Callable[[str], None]:
    """Return a function that writes nothing. loaded: as for `_behind`"""
    return lambda text: loaded()
