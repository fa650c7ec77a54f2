"""A process that has imported and used the libraries, and forks ranks: a fork costs nothing.

It reads one JSON command a line: {"start": [{"argv", "env", "cwd", "output"}, …]} answers the pids;
{"wait": pid} answers the exit code once that rank has ended (negative: the signal that ended it).
"""

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

# What the forks must not import again: the loop, and what a run imports on its way.
USED = (
    "llmtrain.training.loop",
    "llmtrain.cli.main",
    "llmtrain.cli.rank",
    "deepspeed",  # accelerate looks for its engine in any prepared model
    "peft",
    "safetensors.torch",
    "tiktoken",
    "torch._dynamo.repro.after_dynamo",  # with the next one: DeepSpeed compiles an optimizer
    "torch._inductor.compile_fx",  # that nobody here uses
    "torch.distributed.fsdp",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)
COUNTS = "counts.json"


def use() -> None:
    """Do once what takes half a second in each fork and comes to the same in all of them.

    That is to count what the models of `helpers.tiny` and `helpers.faults` save. A child counts,
    since it takes a backward: with a CUDA build of torch the first one starts autograd's threads,
    and torch refuses every backward in what is forked after that.
    """
    from llmtrain.model import count
    from llmtrain.types import Saved

    with tempfile.TemporaryDirectory() as folder:
        pid = os.fork()
        if not pid:
            leave(lambda: count_models(Path(folder)))
        assert wait(pid) == 0
        for (*key, trained), saved in json.loads((Path(folder) / COUNTS).read_text()):
            count._known[*key, tuple(trained)] = Saved(**saved)


def count_models(folder: Path) -> None:
    """Write the counts of the models of this process, and by what they are known."""
    from helpers.faults import faulty_config
    from helpers.tiny import tiny_config, write_config

    from llmtrain.config.load import load_config
    from llmtrain.distributed.plan.memory import Hardware
    from llmtrain.model import count
    from llmtrain.training.start.planning import describe

    for made in (tiny_config, faulty_config):
        config = load_config(write_config(folder, made(folder / "run")))
        model = describe(config, Hardware(1 << 40, None, 1, 1, cpu=True))
        for arithmetic in ("fp32", "autocast"):
            model.count(arithmetic, "none")
    known = [(key, dataclasses.asdict(saved)) for key, saved in count._known.items()]
    (folder / COUNTS).write_text(json.dumps(known))


def forbid_backward() -> None:
    """From now on, a backward of this process is an error; those of its forks are not."""
    from torch import autograd

    server, run = os.getpid(), autograd.graph._engine_run_backward

    def guarded(*arguments: object, **options: object) -> object:
        if os.getpid() == server:
            raise AssertionError(
                "no fork has a backward after one in the process it is forked from"
            )
        return run(*arguments, **options)

    autograd._engine_run_backward = autograd.graph._engine_run_backward = guarded


def leave_out_reports() -> None:
    """Drawing one takes longer than these runs train. Those of a real launcher draw theirs."""
    from llmtrain.report import page

    page.write_report = lambda run_dir: run_dir / "report.html"


def start(one: dict) -> int:
    return os.fork() or become(one)


def become(one: dict) -> NoReturn:
    """Be a rank, in a fork."""
    os.setsid()  # as torch's launcher does
    output = os.open(one["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(one["cwd"])
    os.environ.clear()
    os.environ.update(one["env"])
    if any(name.startswith("HF_") for name in one["env"]):
        read_environment_of_hub()
    leave(lambda: work(one["argv"]), code=99)  # the command line never returns


def leave(do: Callable[[], None], code: int = 0) -> NoReturn:
    """End a fork after it has done this, with 99 if that fails."""
    try:
        do()
    except BaseException:
        traceback.print_exc()
        code = 99
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def read_environment_of_hub() -> None:
    """huggingface_hub was imported under the environment of this server."""
    from huggingface_hub import constants

    importlib.reload(constants)


def work(argv: list[str]) -> None:
    """A command of llmtrain, or `call MODULE FUNCTION [ARGUMENT …]`."""
    if argv[0] == "call":
        getattr(importlib.import_module(argv[1]), argv[2])(*argv[3:])
        os._exit(0)
    sys.argv = ["llmtrain", *argv]
    from llmtrain.cli.main import main

    main(argv)


def wait(pid: int) -> int:
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def answer(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed talks; ours is for answers
        for name in USED:
            importlib.import_module(name)
        forbid_backward()
        use()
    leave_out_reports()
    gc.freeze()  # a collection in a fork would touch, and so copy, every page of the above
    answer("ready")
    running: set[int] = set()
    for line in sys.stdin:
        command = json.loads(line)
        if "start" in command:
            pids = [start(one) for one in command["start"]]
            running.update(pids)
            answer(json.dumps(pids))
        else:
            answer(json.dumps(wait(command["wait"])))
            running.discard(command["wait"])
    for pid in running:  # of a test that failed: nobody else ends them
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))  # for the functions of `call` and for `use`
    serve()
