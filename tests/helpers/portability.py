"""The portability matrix: each strategy and number of processes reads what each has written.

A form is a strategy, a number of processes and a precision. One launch opens the forms of one
number of processes, one after the other:

    written   train 3 steps, save; go on for 20 more, the straight run
    read      for each checkpoint: load it, save it at once, train 20 steps from it

The model has everything that is awkward to split: tied and frozen weights, sizes that nothing
divides, a parameter of one element, buffers of floats and of integers.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from helpers import uneven, zero
from helpers.ranks import Server, free_port
from helpers.updates import run_of, with_loss
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain.config.schema import DistributedConfig, OptimizerConfig
from llmtrain.distributed.engines import state
from llmtrain.distributed.engines.accelerator import close, make_accelerator
from llmtrain.model import attention
from llmtrain.training.optimizer import make_optimizer
from llmtrain.training.step import update

Found = dict[str, dict[str, Any]]  # reader → writer → what came of it

LIMIT = zero.LIMIT  # of the gradient norm
STRATEGIES = ("ddp", "fsdp2", "zero2", "zero3")
WORLDS = (1, 2, 3)
BEFORE, AFTER = 3, 20  # steps


@dataclass(frozen=True, slots=True)
class Form:
    """How a model is spread out."""

    strategy: str
    world_size: int
    precision: str = "fp32"
    fused: bool = True

    @property
    def name(self) -> str:
        """Of its checkpoints."""
        rest = "" if self.precision == "fp32" else f"-{self.precision}"
        return f"{self.strategy}-{self.world_size}{rest}{'' if self.fused else '-unfused'}"


@dataclass(frozen=True, slots=True)
class Work:
    """One form, and the checkpoints that it reads; none: it writes its own. steps: behind them."""

    form: Form
    sources: tuple[str, ...] = ()
    steps: int = AFTER


def forms(precision: str = "fp32") -> list[Form]:
    """All twelve."""
    return [Form(name, world, precision) for world in WORLDS for name in STRATEGIES]


def run(server: Server, root: Path, works: Sequence[Work]) -> Found:
    """Do the works, one launch for each number of processes; what came of each form, by its name.

    Of a form that reads: source → {"saved": digests, "numbers": …, "ended": digests}; of one that
    writes the same under its own name. Fails with the ranks' output.
    """
    found: Found = {}
    for world in sorted({work.form.world_size for work in works}):
        mine = [work for work in works if work.form.world_size == world]
        folder = root / f"launch-{world}"
        folder.mkdir(parents=True, exist_ok=True)
        ports = {free_port() for _ in range(3 * len(mine))}
        told = [{**asdict(one), "port": port} for one, port in zip(mine, ports, strict=False)]
        (folder / "works.json").write_text(json.dumps(told))
        arguments = ["call", "helpers.portability", "work_on_rank", str(root), str(folder)]
        codes = server.run(arguments, world, folder)
        assert codes == [0] * world, (folder / "output.txt").read_text()[-6000:]
        for work, result in zip(
            mine, json.loads((folder / "results.json").read_text()), strict=True
        ):
            found.setdefault(work.form.name, {}).update(result)
    return found


def work_on_rank(root: str, folder: str) -> None:
    """On every rank: the works, one after the other."""
    results = []
    for told in json.loads(Path(folder, "works.json").read_text()):
        if "LOCAL_RANK" in os.environ:
            os.environ["MASTER_PORT"] = str(told["port"])
        asked = Work(Form(**told["form"]), tuple(told["sources"]), told["steps"])
        results.append(work(Path(root), asked))
        close()
    if int(os.environ.get("RANK", "0")) == 0:
        Path(folder, "results.json").write_text(json.dumps(results))


def work(root: Path, asked: Work) -> dict[str, Any]:
    """On one rank: one form."""
    opened = Opened(asked.form)
    if not asked.sources:
        opened.train(0, BEFORE)
        saved = opened.save(root / asked.form.name, BEFORE)
        return {asked.form.name: {"saved": saved, **opened.go_on(root, asked.steps)}}
    found = {}
    for source in asked.sources:
        zero.load(opened.launched, opened.spec, root / source, BEFORE)
        through = root / f"{asked.form.name}-through"
        saved = opened.save(through, BEFORE)
        opened.remove(through)
        found[source] = {"saved": saved, **opened.go_on(root, asked.steps)}
    return found


class Opened:
    """A model under one form, with empty optimizer state."""

    def __init__(self, form: Form) -> None:
        self.name = form.name
        self.launched = make_accelerator(
            form.strategy,
            form.precision,
            DistributedConfig(timeout_minutes=2.0),
            max_grad_norm=LIMIT,
            largest_block=2000,
            fsdp_sync="last",
        )
        bare = awkward()
        attention.install(bare, uneven.SEQ_LEN)
        optimizer = make_optimizer(
            bare, OptimizerConfig(learning_rate=uneven.RATE), fused=form.fused
        )
        self.spec = state.spec(bare, optimizer, 1 << 30)
        prepared = self.launched.engine.prepare(with_loss(bare), bare, optimizer)
        self.launched.engine.create_state()
        self.sent: list[Any] = []
        self.fake = run_of(
            self.launched,
            prepared,
            bare,
            lambda sums, norm: self.sent.append((sums, float(norm))),
            micro_batch_size=_micro(form.world_size),
            seq_len=uneven.SEQ_LEN,
            max_grad_norm=LIMIT,
        )
        zero.discard(self.fake)

    def train(self, first: int, steps: int) -> list[dict[str, float]]:
        """Some updates; loss, norm and tokens of each."""
        self.sent.clear()
        ranks = self.launched.ranks
        for step in range(first, first + steps):
            batch = uneven.share(step, ranks.rank, ranks.world_size, False)
            update(self.fake, batch, 1.0)
        return [zero.numbers(sums, norm) for sums, norm in self.sent]

    def go_on(self, root: Path, steps: int) -> dict[str, Any]:
        """From step 3 on: the numbers, and the digests of the files at the end."""
        if not steps:
            return {}
        numbers = self.train(BEFORE, steps)
        end = root / f"{self.name}-end"
        ended = self.save(end, BEFORE + steps)
        self.remove(end)
        return {"numbers": numbers, "ended": ended}

    def save(self, root: Path, step: int) -> dict[str, str]:
        """A checkpoint; digests of its tensor files."""
        zero.save(self.launched, self.spec, root, step, "all")
        return zero.files(root)

    def remove(self, root: Path) -> None:
        """Once every rank has looked at it."""
        self.launched.ranks.vote(None)
        if self.launched.ranks.rank == 0:
            shutil.rmtree(root)
        self.launched.ranks.vote(None)


def _micro(world_size: int) -> int:
    """Of eight rows: two micro-batches on one process and on two; three ranks have 3, 3 and 2."""
    return {1: 4, 2: 2, 3: 3}[world_size]


class Gained(nn.Module):
    """A norm behind which stands one number, trained, and a buffer of integers that nobody uses."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("kept", torch.linspace(0.1, 0.9, 3))
        self.register_buffer("counted", torch.arange(5))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden) * self.gain


def awkward() -> LlamaForCausalLM:
    """Tied; of odd sizes; the feed-forward part of the first layer is frozen."""
    torch.manual_seed(5)
    shape = LlamaConfig(
        vocab_size=uneven.VOCABULARY + 3,
        hidden_size=6,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=2,
        intermediate_size=7,
        tie_word_embeddings=True,
    )
    bare = LlamaForCausalLM(shape).train()
    bare.model.norm = Gained(bare.model.norm)
    bare.model.layers[0].mlp.requires_grad_(False)
    return bare


def worst(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The largest difference between the losses of two runs, step by step."""
    pairs = zip(one["numbers"], other["numbers"], strict=True)
    return max(abs(a["loss"] - b["loss"]) for a, b in pairs)


def different_files(written: Found, read: Found, names: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs (writer, reader) whose files differ behind load and save; empty is what is promised."""
    return [
        (writer, reader)
        for reader in names
        for writer, one in read[reader].items()
        if one["saved"] != written[writer][writer]["saved"]
    ]


@dataclass(frozen=True, slots=True)
class Pair:
    """One writer and one reader. worst_loss: None where nothing was trained behind the load.

    same_bits: the reader trained to the bits of the writer's own straight run.
    """

    writer: str
    reader: str
    same_files: bool
    worst_loss: float | None
    same_bits: bool


def whole(server: Server, root: Path) -> list[Pair]:
    """All pairs: those of fp32 with twenty steps behind the load, those of bf16 written again."""
    fp32, bf16 = forms(), forms("bf16")
    written = run(server, root, [*map(Work, fp32), *(Work(form, steps=0) for form in bf16)])
    works = [Work(form, tuple(one.name for one in fp32)) for form in fp32]
    works += [Work(form, tuple(one.name for one in bf16), steps=0) for form in bf16]
    read = run(server, root, works)
    return [
        _pair(writer.name, reader.name, written, read)
        for kind in (fp32, bf16)
        for writer in kind
        for reader in kind
    ]


def _pair(writer: str, reader: str, written: Found, read: Found) -> Pair:
    straight, one = written[writer][writer], read[reader][writer]
    trained = "numbers" in one
    return Pair(
        writer,
        reader,
        one["saved"] == straight["saved"],
        worst(one, straight) if trained else None,
        trained and (one["numbers"], one["ended"]) == (straight["numbers"], straight["ended"]),
    )
