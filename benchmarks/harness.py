"""What every benchmark shares: its command line, its rows with goals, processes of their own.

A program is a question. It has parts, functions of a `Bench`, and calls `main` with them:

    def speed(bench: Bench) -> None:
        bench.say("tokens/s over that of the other", ours / other, "×", "≥ 1.2")

    if __name__ == "__main__":
        main(__doc__, {"speed": speed}, {"rounds": (5, 1)})  # 5, or 1 with --quick

A row is a JSON object: `bench`, `part`, `name` (two spaces in front: it belongs to the row above),
`figure` (None: not measured), `unit`, `goal` as "≥ 1.2" or "≤ 0.6", whether it is `met`, the `load`
of the machine at that time, what it was measured on, and whatever else was measured. What is
compared takes turns, so that a machine that slows down slows all of it.

Nothing heavy is imported here: data workers import the main file again, and contenders run in
environments that lack llmtrain.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SAMPLE = ROOT / "llmtrain" / "data" / "sample"
LLMTRAIN = [sys.executable, "-m", "llmtrain"]
THREADS = "OMP_NUM_THREADS", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS"
PACKAGES = (
    *("torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "tiktoken"),
    *("numpy", "pyarrow", "safetensors", "xxhash"),
)
Size = int | float | str | tuple[Any, ...]
T = TypeVar("T")


def main(
    doc: str,
    parts: Mapping[str, Callable[[Bench], None]] | Callable[[Bench], None],
    sizes: Mapping[str, tuple[Size, Size]],
    *,
    paths: Mapping[str, bool] | None = None,
    child: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
    pinned: bool = True,
) -> None:
    """Measure all parts or those of `--only`, print their rows, and write them with `--json`.

    sizes: how much is measured, usually and with `--quick`; each is an option of its name
    paths: options that name a file or directory, and whether each has to be given
    child: what `measure` calls in a process of its own, by the argument `what` if there are
        several: it returns a row
    pinned: to one core, with one thread in every library
    """
    if child and len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        given = json.loads(sys.argv[1])
        found = (child[given.pop("what")] if isinstance(child, Mapping) else child)(**given)
        print(json.dumps(found), flush=True)
        return
    if pinned:
        one_core()
    named = parts if isinstance(parts, Mapping) else {"": parts}
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    for name, required in (paths or {}).items():
        parser.add_argument(f"--{name}", type=Path, required=required)
    for name, (size, _) in sizes.items():
        one, more = (size[0], {"nargs": "+"}) if isinstance(size, tuple) else (size, {})
        more |= {"metavar": name[0].upper(), "default": argparse.SUPPRESS}
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(one), **more)
    if len(named) > 1:
        parser.add_argument("--only", nargs="+", choices=named, default=list(named))
    parser.add_argument("--quick", action="store_true", help="a look whether it works")
    parser.add_argument("--json", type=Path, help="results; rows of parts left out stay in it")
    asked = parser.parse_args()
    chosen = {name: getattr(asked, name, two[asked.quick]) for name, two in sizes.items()}
    name = Path(sys.argv[0]).stem
    bench = Bench(name, asked, SimpleNamespace(**chosen), named, parser.error)
    for part in getattr(asked, "only", named):
        with tempfile.TemporaryDirectory(dir=getattr(asked, "dir", None)) as folder:
            bench.begin(part, Path(folder))
            named[part](bench)


def one_core() -> None:
    """Keep this process and its children on one core, with one thread in every library.

    The environment is read when libraries are imported, so the program starts itself again.
    """
    if "LLMTRAIN_ONE_CORE" in os.environ:
        return
    pin()
    os.environ |= {**dict.fromkeys(THREADS, "1"), "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"LLMTRAIN_ONE_CORE": "1", "CUDA_VISIBLE_DEVICES": ""}
    os.execv(sys.executable, [sys.executable, *sys.argv])


def pin(*, every: bool = False) -> None:
    """Keep this process and what it starts on one core, or let them use every core."""
    if hasattr(os, "sched_setaffinity"):
        cores = range(os.cpu_count() or 1)
        os.sched_setaffinity(0, cores if every else {min(os.sched_getaffinity(0))})


# Rows


class Bench:
    """The rows of a program, printed and written as they come, and what its parts are given.

    asked: the arguments; sizes: how much is measured; parts: their order in the file
    folder: a place for the files of a part, deleted at its end
    refuse: ends the program with 2 and a message; about: what every row has
    """

    def __init__(
        self, name: str, asked: Any, sizes: Any, parts: Iterable[str], refuse: Any = sys.exit
    ) -> None:
        self.asked, self.sizes, self.refuse = asked, sizes, refuse
        self.rows = read_rows(asked.json) if asked.json and asked.json.is_file() else []
        self.about, self.part = {"bench": name, **about()}, ""
        self._places = {part: place for place, part in enumerate(parts)}
        print(", ".join(f"{key} {value}" for key, value in self.about.items()), flush=True)

    def begin(self, part: str, folder: Path) -> None:
        """Begin a part: its earlier rows go with its first new one."""
        self.part, self.folder = part, folder
        self.rows = [row for row in self.rows if row.get("part", "") != part]

    def say(
        self, name: str, figure: float | None, unit: str = "", goal: str = "", **more: Any
    ) -> None:
        """Add a row. goal: "≥ 1.2" or "≤ 1"; none: a figure to compare with."""
        row = self.about | ({"part": self.part} if self.part else {})
        row |= {"name": name, "figure": figure, "unit": unit, "goal": goal}
        row |= {"met": is_met(figure, goal), "load": round(os.getloadavg()[0], 1), **more}
        print(line(row), flush=True)
        self.rows.append(row)
        self.rows.sort(key=lambda one: self._places.get(one.get("part", ""), 0))
        if self.asked.json:
            write_rows(self.asked.json, self.rows)


def shared(bench: Bench, *names: str) -> list[Path] | None:
    """Files of `--shared`; None, and a row that says so, where one is missing."""
    places = [(bench.asked.shared or ROOT.parent / "shared" / "data") / name for name in names]
    absent = [name for name, place in zip(names, places, strict=True) if not place.exists()]
    if absent:
        bench.say(f"{bench.part}: skipped, as --shared has no {', '.join(absent)}", None)
    return None if absent else [place.resolve() for place in places]


def beside_trl(bench: Bench, compare: Callable[..., None], *names: str) -> None:
    """Call `compare` with files of `--shared`, or add a row that says what is not there."""
    if (places := shared(bench, *names)) is None:
        return
    if bench.asked.trl is None:
        bench.say(f"{bench.part}: skipped, as no --trl names an environment with it", None)
    else:
        compare(bench, *places)


def is_met(figure: float | None, goal: str) -> bool | None:
    """Return whether a figure meets its goal; None where one of the two is missing."""
    if figure is None or not goal:
        return None
    sign, limit = goal.replace(",", "").split()
    return figure >= float(limit) if sign == "≥" else figure <= float(limit)


def line(row: dict[str, Any]) -> str:
    """Return the line of a row on the terminal, with three digits of its figure."""
    figure = "not measured "
    if row["figure"] is not None:
        digits = ",.0f" if abs(row["figure"]) >= 100 else ".3g"
        figure = f"{row['figure']:{digits}} {row['unit']}"
    verdict = {True: "met", False: "MISSED", None: ""}[row["met"]]
    note = f"  ({row['note']})" if row.get("note") else ""
    text = f"{row['name']:<70} {figure:>22} {row['goal']:<10} {verdict:<6} load {row['load']}"
    return f"{text}{note}"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file that has one a line."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(text) for text in file]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write an object a line, and return the path."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), "utf-8")
    return path


def about() -> dict[str, Any]:
    """Return what is measured on: the day, the machine, the commit and the packages."""
    info, command = Path("/proc/cpuinfo"), ["git", "describe", "--always", "--dirty=+"]
    lines = info.read_text().splitlines() if info.exists() else []
    model = (text.split(":")[1].strip() for text in lines if text.startswith("model name"))
    commit = None  # with a + if files were changed since; None outside a checkout
    with contextlib.suppress(FileNotFoundError):
        done = subprocess.run([*command, "--exclude=*"], cwd=HERE, capture_output=True, text=True)
        commit = done.stdout.strip() or None
    installed = {one.name: one.version for one in distributions()}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": next(model, platform.processor()),
        "cpus": os.cpu_count(),
        "machine": f"{platform.system()} {platform.machine()}",
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "git": commit,
        "python": platform.python_version(),
        **{name: installed[name] for name in PACKAGES if name in installed},
    }


# Contenders in processes of their own


def measure(
    script: str,
    asked: Mapping[str, Any],
    limit: float = 600,
    env: Mapping[str, str] | None = None,
    *,
    python: str = sys.executable,
) -> tuple[list[dict[str, Any]], str]:
    """Call a program's child in a process of its own, and end it after `limit` seconds.

    script: the program, usually its own `__file__`; asked: the arguments of its child
    python: the interpreter, which may be that of another environment

    Returns the rows that it printed, and what went wrong ("" = nothing).
    """
    process = subprocess.Popen(
        [python, script, json.dumps(asked)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
        start_new_session=True,  # so that its own children end with it
    )
    try:
        out, err = process.communicate(timeout=limit)
        lines = err.strip().splitlines() or ["it ended without a word"]
        wrong = "" if process.returncode == 0 else lines[-1].strip()[:200]
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        wrong = f"not finished after {limit:.0f} s"
    return [json.loads(text) for text in out.splitlines() if text.startswith('{"')], wrong


def apart(script: str, asked: Mapping[str, Any], limit: float = 600, **more: Any) -> dict[str, Any]:
    """Return the last row of `measure`. The program ends if anything goes wrong."""
    rows, wrong = measure(script, asked, limit, **more)
    if wrong:
        sys.exit(f"{Path(script).name} {json.dumps(asked)}: {wrong}")
    return rows[-1]


def ranks(script: str, asked: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the last row of each of so many ranks on this machine, started as torchrun would."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    launch = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    launch |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    places = [launch | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda place: apart(script, asked, env=place), places))


def contend(
    bench: Bench,
    asked: Mapping[T, Mapping[str, Any]],
    rounds: int,
    limit: float = 600,
    *,
    pythons: Mapping[T, Path] | None = None,
    told: Callable[[T, dict[str, Any]], str] | None = None,
) -> dict[T, list[dict[str, Any]]]:
    """Call this program's child for each contender in turns, each time in a process of its own.

    asked: the arguments of each, to which comes a `folder` of its own
    pythons: the interpreters of those that run in another environment
    told: what is printed of a contender and its row as soon as it is there

    Returns the rows of each.
    """
    found: dict[T, list[dict[str, Any]]] = {one: [] for one in asked}
    for turn, one in turns(asked, rounds):
        python = str((pythons or {}).get(one, sys.executable))
        with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
            row = apart(sys.argv[0], {**asked[one], "folder": folder}, limit, python=python)
        found[one].append(row)
        if told:
            print(f"    round {turn + 1}: {told(one, row)}", flush=True)
    return found


def turns(names: Iterable[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield (round, name): each once a round, which begins with another one each time."""
    listed = list(names)
    for turn in range(rounds):
        first = turn % len(listed)
        yield from ((turn, name) for name in (*listed[first:], *listed[:first]))


@contextlib.contextmanager
def timed(seconds: list[float], clock: Callable[[], float] = time.process_time) -> Iterator[None]:
    """Append the seconds that what is inside takes."""
    began = clock()
    yield
    seconds.append(clock() - began)


def in_turns(
    rounds: int,
    work: Mapping[str, Callable[[], object]],
    clock: Callable[[], float] = time.perf_counter,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Return the seconds of each, turn by turn; `before` each turn, outside of the time."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for _, name in turns(work, rounds):
        before()
        with timed(found[name], clock):
            work[name]()
    return found


Turn = Callable[[], None]
Contender = Callable[[Turn, Turn], float]


def step_by_step(
    work: Mapping[str, Contender], steps: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Run contenders in threads of their own, a step of each in turn, in a new order each round.

    work: called with what ends a turn and waits for the next one, and with what waits until all are
    through; the first turn is the preparation. It returns the last loss

    Returns the CPU seconds of each turn of each, of its thread alone, and the last losses. The
    program ends if one of them fails.
    """
    from llmtrain.hashing import mix, permutation

    names, condition, failed = list(work), threading.Condition(), list[str]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}

    def is_next(name: str) -> bool:  # a step pays for what ran before it
        round_, place = divmod(sum(map(len, seconds.values())), len(names))
        return names[permutation(len(names), mix(round_))[place]] == name

    def all_through() -> bool:
        return all(len(taken) > steps for taken in seconds.values())

    def until(holds: Callable[[], bool]) -> None:
        with condition:
            condition.notify_all()
            condition.wait_for(lambda: failed or holds())
        if failed:
            raise RuntimeError("another contender failed")

    def take_part(name: str) -> None:
        began = 0.0

        def turn(ended: bool = True) -> None:
            nonlocal began
            if ended:
                seconds[name].append(time.thread_time() - began)
            last = len(seconds[name]) > steps
            until((lambda: True) if last else partial(is_next, name))
            began = time.thread_time()

        try:
            turn(ended=False)
            losses[name] = work[name](turn, partial(until, all_through))
        except BaseException:
            failed.append(name)
            with condition:
                condition.notify_all()
            raise

    threads = [threading.Thread(target=take_part, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise SystemExit(f"{failed[0]} failed; no figures")
    return seconds, losses


# Runs of llmtrain, and of the Trainer beside them


def llama(*sizes: int) -> dict[str, Any]:
    """Fields of the config of a Llama: hidden, layers, heads, MLP, and vocabulary, positions.

    Of the last two, those that are left out or 0 are as the run makes them.
    """
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    names += ("vocab_size", "max_position_embeddings")
    found = {name: size for name, size in zip(names, sizes, strict=False) if size}
    return {**found, "tie_word_embeddings": True}


def config_of(
    folder: Path,
    shape: Mapping[str, Any] | None = None,
    *,
    steps: int = 1,
    rows: int = 1,
    seq_len: int = 64,
    **sections: Mapping[str, Any],
) -> Path:
    """Write the config of a run in `folder`/run: on the built-in sample, in fp32.

    shape: of a Llama that begins with random weights; rows: blocks in a step
    sections: values that are laid over these, by section
    """
    keys: dict[str, Any] = {
        "run": {"dir": str(folder / "run")},
        "data": {"sources": [{"path": "sample"}], "seq_len": seq_len, "heldout": 0.0},
        "training": {"steps": steps, "global_batch_size": rows, "precision": "fp32"},
    }
    if shape:
        keys["model"] = {"config": {"model_type": "llama", **shape}, "tokenizer": "sample"}
    for section, values in sections.items():
        keys[section] = keys.get(section, {}) | dict(values)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    path.write_text(json.dumps(keys))  # YAML is a superset
    return path


# ChatML. TRL trains on what is between the tags, to us they say nothing: the end of a turn is in.
TEMPLATE = """{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}{% generation %}{{ message.content + '<|im_end|>' }}\
{% endgeneration %}{{ '\\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
LORA = {"kind": "lora", "r": 16, "alpha": 32}


def base_of(directory: Path, shape: Mapping[str, Any], tokenizer: Path | None = None) -> Path:
    """Write a Llama with random weights. tokenizer: gets ChatML; None = that of the sample."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    loaded = AutoTokenizer.from_pretrained(tokenizer or SAMPLE)
    if tokenizer:
        loaded.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        loaded.chat_template = TEMPLATE
    loaded.save_pretrained(directory)
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(directory)
    return directory


def fresh_model(**fields: Any) -> Any:
    """Return the model that llmtrain begins with, a Llama or that of `model_type`, in fp32.

    Transformers alone builds it. fields: of its config
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{"model_type": "llama", **fields})
    torch.manual_seed(42)  # the default of run.seed
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def peft_lora() -> Any:
    """Return the adapter LORA for peft."""
    from peft import LoraConfig

    r, alpha = LORA["r"], LORA["alpha"]
    return LoraConfig(task_type="CAUSAL_LM", r=r, lora_alpha=alpha, target_modules="all-linear")


def prepared(path: Path) -> tuple[Any, Path]:
    """Prepare the run of a config; return its manifest and the directory of its tokenizer."""
    from llmtrain import load_config
    from llmtrain.rundir import contents
    from llmtrain.training.start.prepare import load_manifest, prepare

    config = load_config(path)
    if not config.run_dir.exists():
        config.run_dir.mkdir()
        prepare(config, config.run_dir, 1)
    return load_manifest(config, config.run_dir), config.run_dir / contents.TOKENIZER


def stream_of(
    manifest: Any, directory: Path, blocks: int, workers: int = 0, **more: Any
) -> contextlib.closing[Any]:
    """Return the batches of one process, for a `with`. blocks: in a step; more: to `open_stream`"""
    from llmtrain.batch_size import BatchSize
    from llmtrain.data.documents.reader import Reading
    from llmtrain.data.stream import open_stream

    more |= {"rank": 0, "world_size": 1, "workers": workers, "reading": Reading(600)}
    return contextlib.closing(
        open_stream(manifest, directory, batch=BatchSize.constant(blocks), **more)
    )


@contextlib.contextmanager
def around(**functions: Callable[..., Any]) -> Iterator[None]:
    """Put functions around those of llmtrain's loop, the only place that knows of steps.

    functions: by the name of one in `llmtrain.training.loop`; called with it and its arguments
    """
    from llmtrain.training import loop

    made = {name: partial(one, getattr(loop, name)) for name, one in functions.items()}
    with mock.patch.multiple(loop, **made):
        yield


def timing(seconds: list[float], *clock: Callable[[], float]) -> Callable[..., Any]:
    """Return what calls its first argument and appends the seconds that takes: for `around`."""

    def call(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        with timed(seconds, *clock):
            return original(*given, **named)

    return call


def unsaved(_save: Any, _run: Any, _step: int) -> None:
    """Make no checkpoint: for `around`, where what is beside it makes none either."""


def callback(**functions: Callable[[], None]) -> Any:
    """Return a callback of transformers' Trainer. functions: by event, as on_step_end=…"""
    from transformers import TrainerCallback

    def event(call: Callable[[], None]) -> Callable[..., None]:
        return lambda *given, **named: call()

    return type("Called", (TrainerCallback,), {k: event(one) for k, one in functions.items()})()


class Clock:
    """Trained tokens of the steps, and CPU seconds, children included, at their ends."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ends: list[float] = []

    def end(self) -> None:
        """A step ends."""
        self.ends.append(cpu_seconds())

    def train(self, trainer: Any) -> float:
        """Note the steps of a Trainer, and the trained tokens of its batches. Returns its loss."""
        collate = trainer.data_collator

        def counted(batch: list[Any]) -> Any:
            made = collate(batch)
            self.tokens.append(int((made["labels"][:, 1:] != -100).sum()))
            return made

        trainer.data_collator = counted
        trainer.add_callback(callback(on_step_end=self.end))
        return float(trainer.train().training_loss)

    def train_llmtrain(self, path: Path, figures: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Note the steps of a run that makes no checkpoint.

        Returns what `figures` returns at its end, and the run's precision.
        """
        found: dict[str, Any] = {}
        import llmtrain

        def update(original: Any, run: Any, batch: Any, factor: float) -> None:
            self.tokens.append(batch.trained_tokens)
            original(run, batch, factor)
            self.end()

        def finish(original: Any, run: Any) -> Any:
            found.update(figures(), precision=run.processes.auto.run["precision"])
            return original(run)

        with around(update=update, finish=finish, save=unsaved):
            llmtrain.train(llmtrain.load_config(path))
        return found

    def rate(self, first: int, last: int) -> float:
        """Return the trained tokens a CPU second of steps `first` + 1 to `last`; 0: the start."""
        began = self.ends[first - 1] if first else 0.0
        return sum(self.tokens[first:last]) / (self.ends[last - 1] - began)


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children so far, ended or not."""
    import psutil

    own = psutil.Process()
    spent = float(sum(own.cpu_times()[:4]))  # with children that have ended
    for child in own.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            spent += sum(child.cpu_times()[:2])
    return spent


def peak_mb() -> float:
    """Return the peak of resident memory, in MB; of children what is theirs alone now (Linux)."""
    import psutil

    # Not `ru_maxrss`, which a process inherits.
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(text.split()[1]) * 1024 for text in lines if text.startswith("VmHWM"))
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            peak += child.memory_full_info().uss
    return peak / 1e6
