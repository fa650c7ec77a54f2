"""A process that has imported and used the libraries, and forks ranks: a fork costs nothing.

It reads one JSON command a line: {"start": [{"argv", "env", "cwd", "output"}, …]} answers the pids;
{"wait": pid} answers the exit code once that rank has ended (negative: the signal that ended it).
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

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
    "transformers.models.llama.modeling_llama",
)


def use() -> None:
    """Do once what takes half a second in each fork and comes to the same in all of them.

    That is to count what the models of `helpers.tiny` and `helpers.faults` save.
    """
    from helpers.faults import faulty_config
    from helpers.tiny import tiny_config, write_config

    from llmtrain.config.load import load_config
    from llmtrain.distributed.plan.memory import Hardware
    from llmtrain.training.start.planning import describe

    with tempfile.TemporaryDirectory() as folder:
        for made in (tiny_config, faulty_config):
            config = load_config(write_config(Path(folder), made(Path(folder) / "run")))
            model = describe(config, Hardware(1 << 40, None, 1, 1, cpu=True))
            for arithmetic in ("fp32", "autocast"):
                model.count(arithmetic, "none")


def leave_out_reports() -> None:
    """Drawing one takes longer than these runs train. Those of a real launcher draw theirs."""
    from llmtrain.report import page

    page.write_report = lambda run_dir: run_dir / "report.html"


def start(one: dict) -> int:
    pid = os.fork()
    if pid:
        return pid
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
    try:
        work(one["argv"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(99)  # the command line never returns


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
