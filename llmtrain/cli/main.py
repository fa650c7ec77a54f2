"""The command line: parse arguments, call a function, print its result.

Only typer is imported here, so that help takes a tenth of a second. Each command imports what else
it needs.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from llmtrain.cli import checkpoints, config, data, options, use
from llmtrain.errors import NOT_ON_WINDOWS, Problem, UserError

if TYPE_CHECKING:
    from llmtrain.tools.launch.child import Ended

_SUMMARY = "Train language models: exact, resumable, any number of devices."
_OPTIONS = "--version  --help  --install-completion"


class _Grouped(options.CommandGroup):
    """A group of commands whose help has a heading for each `rich_help_panel`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the whole help page to the formatter, which collects its lines."""
        formatter.write(f"{_SUMMARY}\n\n")
        heading = None
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", "")
            shown = panel if panel != heading else ""
            formatter.write(f"{shown:<10} {name:<13} {command.help}\n")
            heading = panel
        formatter.write(f"\n{'Options':<10} {_OPTIONS}\n")


app = options.App(_Grouped)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"llmtrain {version('llmtrain')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if sys.flags.optimize > 1:
        from llmtrain.distributed.launch.environment import check_docstrings

        check_docstrings(sys.flags.optimize)


@app.command(rich_help_panel="Start", help="train a small model on the built-in sample, 2 minutes")
def quickstart(
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run directory instead of runs/quickstart.")
    ] = None,
) -> None:
    """Train on the built-in sample with two CPU processes."""
    from llmtrain.tools.recipes import quickstart as start

    _end(start(out))


@app.command(
    rich_help_panel="Start",
    help="write a config that fits your data, or a recipe",
    epilog="Example: llmtrain init chat.jsonl --from Qwen/Qwen3-0.6B; "
    "llmtrain init --recipe chat_lora --out mine.yaml",
)
def init(
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DATA|KEY=VALUE]…",
            help="Files, folders, globs or Hub ids; and values to take as they are.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--from", metavar="BASE", help="A model's directory, Hub id or run to tune."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Which one; without: the list.", autocompletion=options.recipes
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of NAME.yaml in this folder.")
    ] = None,
) -> None:
    """Write a config and say what to do with it; an existing file is never replaced.

    With DATA it fits these rows, BASE and this machine; with --recipe it is one of the package's.
    """
    config.write(data or [], base, recipe, out)


_WITHOUT = "A YAML file; without: the machine."
_CONFIG = typer.Argument(metavar="CONFIG", help=_WITHOUT, autocompletion=options.configs)


@app.command(rich_help_panel="Start", help="is this machine ready for this config?")
def doctor(
    config: Annotated[str | None, _CONFIG] = None,
    overrides: options.Overrides = None,
    accelerate: options.AccelerateFile = None,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Leave a check out; repeatable.")
    ] = None,
    nodes: options.Nodes = None,
    processes_per_node: options.ProcessesPerNode = None,
    as_json: options.AsJson = False,
) -> None:
    """Look at everything that a start and a run rely on; exit code 2 if anything is an error."""
    from llmtrain.cli.doctor import show

    if nodes is None:
        without = "no such option without --nodes MIN:MAX"
        options.refuse({"--processes-per-node": processes_per_node}, without)
    machines = (nodes, processes_per_node)
    code = show(config, overrides or [], accelerate, skip or [], *machines, as_json=as_json)
    raise typer.Exit(code)


@app.command(rich_help_panel="Start", help="memory, strategy and speed before you pay for them")
def plan(
    config: options.ConfigFile,
    overrides: options.Overrides = None,
    devices: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Devices of a node; as there are here.")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="M", help="Nodes, or MIN:MAX as for train; 1.")
    ] = None,
    device_memory_gb: Annotated[
        float | None,
        typer.Option(metavar="G", help="GiB of a device that is not here, as it is sold."),
    ] = None,
    host_memory_gb: Annotated[
        float | None, typer.Option(metavar="H", help="GiB of memory of a node's host.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(metavar="EUR", help="Price of a device for an hour.")
    ] = None,
    price_node: Annotated[
        float | None, typer.Option(metavar="EUR", help="Price of a node for an hour, besides.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the config for accelerate launch.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Plan memory and speed of a run on some devices; exit code 2 if it fits nowhere."""
    from llmtrain.cli.plan_view import show_plan

    machines = int(nodes) if nodes and nodes.isdecimal() else nodes
    asked = (devices, machines, device_memory_gb, host_memory_gb, price, price_node)
    raise typer.Exit(show_plan(config, overrides or [], asked, write, as_json=as_json))


@app.command(
    rich_help_panel="Train",
    help="run a config; the same command resumes",
    epilog="Example: llmtrain train mine.yaml training.steps=50; `llmtrain init` writes a config",
)
def train(
    config: options.ConfigFile,
    overrides: options.Overrides = None,
    accelerate: options.AccelerateFile = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Start accelerate launch with N processes."),
    ] = None,
    nodes: options.Nodes = None,
    processes_per_node: options.ProcessesPerNode = None,
    last_call: Annotated[
        int | None,
        typer.Option(min=1, metavar="SECONDS", help="How long MIN machines wait for more; 5."),
    ] = None,
    max_restarts: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Failures in a row, without a step; 3.")
    ] = None,
) -> None:
    """Train in this process, or start several that do."""
    of_nodes = {
        "--processes-per-node": processes_per_node,
        "--last-call": last_call,
        "--max-restarts": max_restarts,
    }
    if nodes is not None:
        from llmtrain.tools.launch.launch import launch_on_machines

        options.refuse({"--processes": processes}, "no such option beside --nodes")
        places = (nodes, processes_per_node, last_call, max_restarts)
        _end(launch_on_machines(config, overrides or [], accelerate, *places))
    options.refuse(of_nodes, "no such option without --nodes MIN:MAX")
    if accelerate is None and processes is None:
        from llmtrain.cli.rank import train_here

        train_here(config, overrides or [])
    else:
        from llmtrain.tools.launch.launch import launch

        _end(launch(config, overrides or [], accelerate, processes))


@app.command(rich_help_panel="Train", help="look at a run while it runs")
def watch(
    run: options.RunDir,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show the progress of a run, from its files alone; nothing is written."""
    from llmtrain.cli.watch import watch as start

    start(run, once=once, as_json=as_json)


@app.command(
    rich_help_panel="Train",
    help="run a command and restart what can be restarted",
    context_settings={"allow_interspersed_args": False},
)
def supervise(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="What starts the run, behind `--`.")
    ],
    run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The run directory; else that of COMMAND's config."),
    ] = None,
) -> None:
    """Run a command; start it again while that may help. Exit code: that of the run."""
    from llmtrain.tools.launch.supervise import supervise as start

    ended = start(command, run, lambda line: options.tell(f"supervise: {line}"))
    raise typer.Exit(ended.exit_code)


@app.command(rich_help_panel="Train", help="write report.html")
def report(
    run: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Run directories.", autocompletion=options.runs),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of RUN/report.html.")
    ] = None,
) -> None:
    """Write the report of a run, or compare several, and print the path of the page."""
    from llmtrain.report.compare import write_comparison
    from llmtrain.report.page import write_report

    if len(run) == 1:
        print(write_report(run[0], out))
    elif out is None:
        expected = "a file for the comparison, as it belongs to none of the runs"
        raise UserError(Problem("--out", None, expected, "--out comparison.html"))
    else:
        print(write_comparison(run, out))


for _command, _help in (
    (use.evaluate, "a run's held-out loss again, other documents, tasks"),
    (use.generate, "continue a text, or answer in a conversation"),
    (use.chat, "a conversation in the terminal"),
    (use.export, "a model directory, proved to compute the same"),
    (use.eject, "the first steps of a config as one file of plain torch"),
):
    app.command(rich_help_panel="Use", help=_help)(_command)

for _group, _name, _help in (
    (data.app, "data", "inspect · which · tokenize · repack"),
    (checkpoints.app, "checkpoints", "list · verify · prune · rehearse"),
    (config.app, "config", "show · schema · diff"),
):
    app.add_typer(_group, name=_name, rich_help_panel="Look after", help=_help)


def _end(ended: Ended) -> NoReturn:
    """Print the message of a launched run, after its launcher's output, and exit with its code."""
    if ended.message:
        options.tell(ended.message, keep="\n")
    raise typer.Exit(ended.exit_code)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit. arguments: without the program's name; None = sys.argv."""
    if sys.platform == "win32":  # before anything else that it may lack
        print(f"error: {NOT_ON_WINDOWS}", file=sys.stderr)
        sys.exit(UserError.exit_code)
    if logging.lastResort is not None:  # it prints the warnings of libraries to the terminal
        logging.lastResort.setFormatter(options.LogLine())
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed: the command still does its work
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    try:
        app(args=arguments, prog_name="llmtrain")
    except Exception as error:
        from llmtrain.cli.rank import describe, refused

        code, message = describe(refused(error))
        print(message, file=sys.stderr)
        sys.exit(code)
