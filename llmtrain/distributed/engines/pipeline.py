"""The engine of a pipeline: each process has some blocks of the model, and passes hidden states on.

The micro-batches of a step are those of the accumulation. A schedule of torch decides when each
stage runs the forward and the backward of which:

    1f1b, 2 stages, 4 micro-batches    stage 0: F0 F1 B0 F2 B1 F3 B2    B3
                                       stage 1:    F0 B0 F1 B1 F2 B2 F3 B3

The last stage has the losses. What FSDP2 and DDP do otherwise within a backward is done by hand
where they would not fit: without sharding, gradients are added up over the replicas behind the last
backward (torch's DDP fails under some schedules). A head that is tied to the embedding is held by
the first and by the last stage, whose gradients are added up on both: the same bits on both sides,
since a + b is b + a.

Evaluation and samples have no schedule: each process passes on what it has computed, and begins
with the next micro-batch while others still work on this one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from transformers import PreTrainedConfig

from llmtrain import system
from llmtrain.config.schema import Config
from llmtrain.distributed.engines import fsdp, stages, state
from llmtrain.distributed.engines.engine import TorchEngine, begin_micro_batch, trained_loss
from llmtrain.distributed.engines.sequence import compile_problems, router_problems
from llmtrain.distributed.plan.balance import can_fill, parts_of
from llmtrain.distributed.ranks import add_from_peer
from llmtrain.errors import Problem
from llmtrain.pairs import PAIR_SLOTS
from llmtrain.text import plural
from llmtrain.torch_private import flattened
from llmtrain.types import MicroBatch, ModelCut, ModelShape, Piece, Spec

_BUCKET = 25 << 20  # bytes of gradients that are added up at once


KEY = "distributed.pipeline_parallel"


def problems(config: Config, model: PreTrainedConfig, cut: ModelCut) -> Iterator[Problem]:
    """Yield why a run of this config cannot be a pipeline."""
    with_it, described = f"with {KEY} = {cut.pipeline}", model.get_text_config()
    if config.adapter.kind == "qlora":
        expected = f"lora or none {with_it}: weights in four bits are not sent"
        yield Problem("adapter.kind", "qlora", expected, "adapter.kind=lora")
    yield from compile_problems(config, with_it, "stages")
    yield from router_problems(described, with_it, "blocks together")
    blocks, total = described.num_hidden_layers, cut.pipeline * cut.stages
    if total > blocks:
        most = max(1, blocks // cut.stages)
        held = f", of which each process has {cut.stages}" if cut.stages > 1 else ""
        expected = f"at most {most}: {plural(blocks, 'block', 'blocks')} for {total} stages{held}"
        yield Problem(KEY, cut.pipeline, expected, f"{KEY}={most}")


def fill_problems(config: Config, cut: ModelCut, groups: int) -> Iterator[Problem]:
    """Yield why a step has no number of micro-batches that the schedule works with.

    groups: processes with other rows
    """
    schedule, rows = config.distributed.pipeline_schedule, config.training.batch.unit
    rows //= groups
    sizes = (size for size in range(rows, 0, -1) if rows % size == 0)
    largest = next((size for size in sizes if can_fill(rows // size, cut, schedule)), None)
    asked = config.training.micro_batch_size
    if largest is None:
        expected = f"at least {cut.pipeline} rows for each pipeline: a micro-batch for each stage"
        remedy = f"{cut.pipeline * groups}, or distributed.pipeline_schedule=gpipe"
        batch = config.training.batch.unit
        yield Problem("training.global_batch_size", batch, expected, remedy)
    elif asked != "auto" and not can_fill(rows // asked, cut, schedule):
        count = plural(rows // asked, "micro-batch", "micro-batches")
        count = f"the {rows} rows that a pipeline has of a step are {count}"
        expected = f"at most {largest} with {KEY} = {cut.pipeline} and {schedule}: {count}"
        remedy = f"training.micro_batch_size={largest}"
        yield Problem("training.micro_batch_size", asked, expected, remedy)


def trained_problems(shape: ModelShape, cut: ModelCut, seq_len: int) -> Iterator[Problem]:
    """Yield the problem of a process without a trained parameter: its optimizer would be empty."""
    for place, part in enumerate(parts_of(shape, cut, seq_len)):
        if not part.trainable:
            expected = (
                f"stages with a trained parameter each: process {place} of {cut.pipeline} has none"
            )
            yield Problem(KEY, cut.pipeline, expected, f"{KEY}=1, or train more of the model")
            return


class PipelineEngine(TorchEngine):
    """DDP, FSDP2 and HSDP between pipelines."""

    _adds_up = True

    def cut_into_stages(
        self,
        module: Any,
        optimizer: torch.optim.Optimizer,
        anatomy: stages.Anatomy,
        ranges: Sequence[range],
        schedule: str,
    ) -> None:
        """Keep this rank's stages, in place, before `prepare`.

        module: the `LossModule` around the whole model; what of it is left has the same names
        ranges: the blocks of each stage
        schedule: as `distributed.pipeline_schedule`
        """
        model, pipeline = module.model, self._pipeline
        ranks = dist.get_world_size(pipeline)
        self._ranges, self._schedule_name = ranges, schedule
        self._mine = {n: one for n, one in enumerate(ranges) if n % ranks == self._layout.stage}
        mine = [*self._mine.values()]
        own_ids = stages.own_tensors(model, anatomy, mine)
        named = {False: state.named_parameters(model), True: dict(model.named_parameters())}
        self._names = {base: [*parameters] for base, parameters in named.items()}
        tensors = state.named_tensors(model)
        self._own = {name for name, tensor in tensors.items() if id(tensor) in own_ids}
        ends = {0, ranks - 1}
        tie = stages.tied_weight(model)
        self._tie = tie if self._layout.stage in ends else None
        self._vocabulary: int = model.config.get_text_config().vocab_size
        self._passage = stages.cut(model, anatomy, mine)
        module.become_stage(self._passage.run)
        left = {id(parameter) for parameter in model.parameters()}
        for group in optimizer.param_groups:
            group["params"] = [one for one in group["params"] if id(one) in left]
        optimizer.param_groups[:] = [one for one in optimizer.param_groups if one["params"]]

    @property
    def _pipeline(self) -> dist.ProcessGroup:
        assert self._groups.pipeline is not None, "only a pipeline has this engine"
        return self._groups.pipeline

    def prepare(
        self, module: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> nn.Module:
        """See `Engine.prepare`. The module's forward has no gradients: `forward_backward` has."""
        self._part = super().prepare(module, model, optimizer)
        self._parts: list[_Part] = []
        self._schedule: Any = None
        self._count = 0  # of its micro-batches
        self._model = _Passing(self)
        return self._model

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], scale: Tensor
    ) -> Iterator[Tensor]:
        """See `Engine.forward_backward`. Yields losses on the last stage alone.

        The micro-batches of all steps have one shape. A step with another number of them than the
        one before makes a new schedule.
        """
        count = len(micro_batches)
        if self._schedule is None or self._count != count:
            self._schedule, self._count = self.schedule_of(count), count
        losses: list[Tensor | None] = [None] * count
        for part in self._parts:
            part.begin(micro_batches, losses)
        self._scale_of_step = scale
        numbers = torch.arange(count)
        is_last = self._layout.last_stage
        targets: dict[str, Any] = {"target": numbers, "losses": []} if is_last else {}
        try:
            self._schedule.step(number=numbers, return_outputs=False, **targets)
        except RuntimeError as error:
            # torch puts what a forward raises, such as that a peer is gone, into one of its own.
            raise error.__cause__ or error from None
        system.beat("the reduction of a step")
        self._reduce()
        yield from (loss for loss in losses if loss is not None)

    def schedule_of(self, micro_batches: int) -> Any:
        """Return the schedule of steps; the first makes one more pass, to find out what is sent."""
        device, total = self._accelerator.device, len(self._ranges)
        self._parts = [
            _Part(self._part, self._passage, blocks, last=number == total - 1)
            for number, blocks in self._mine.items()
        ]
        held = [
            _Stage(self, part, number, total, device)
            for number, part in zip(self._mine, self._parts, strict=True)
        ]
        how: dict[str, Any] = {
            "loss_fn": lambda output, _number: trained_loss(output) * self._scale_of_step,
            "scale_grads": False,
        }
        match self._schedule_name:
            case "interleaved":
                return pipelining.ScheduleInterleaved1F1B([*held], micro_batches, **how)
            case "gpipe":
                return pipelining.ScheduleGPipe(held[0], micro_batches, **how)
        return pipelining.Schedule1F1B(held[0], micro_batches, **how)

    def reduce_in_backward(self, *, last: bool) -> None:
        """Set what the next backward does, which is the last one of its stage or not."""
        if self._sharding:
            fsdp.reduce_in_backward(self._part, self._sharding, last=last)

    def _reduce(self) -> None:
        """Add up the gradients over replicas, and those of a tied weight over both its ends."""
        replicas = self._groups.replicas
        if replicas is not None and not self._sharding:
            for parameter in self._parameters:  # another replica may have used it
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            for bucket in _buckets(self._gradients(self._parameters)):
                flat = flattened(bucket)
                dist.all_reduce(flat, group=replicas)
                flat /= self._layout.replicas
                parts = torch.split(flat, [gradient.numel() for gradient in bucket])
                for gradient, part in zip(bucket, parts, strict=True):
                    gradient.copy_(part.view_as(gradient))
        if self._tie is not None:
            weight = dict(self._bare.named_parameters())[self._tie]
            if weight.grad is not None and (gradient := state.local(weight.grad)).numel():
                last = dist.get_world_size(self._pipeline) - 1
                here = gradient.to(self._accelerator.device)  # shards may be offloaded
                add_from_peer(here, self._pipeline, last - self._layout.stage)
                gradient.copy_(here)

    def _counted_parameters(self) -> list[nn.Parameter]:
        """See `TorchEngine`. A tied weight is counted by the first stage."""
        own_ids = {id(p) for n, p in state.named_parameters(self._bare).items() if n in self._own}
        return [one for one in super()._counted_parameters() if id(one) in own_ids]

    def pieces(
        self, spec: Spec, *, writing: bool, replicas_shared: bool = False
    ) -> Iterator[Piece]:
        """See `Engine.pieces`. Each stage writes its own tensors, and reads what it has."""
        names = self._own if writing else state.named_tensors(self._bare).keys()
        wanted = state.with_moments(names, spec)
        here = {
            file: {n: one for n, one in part.items() if n in wanted} for file, part in spec.items()
        }
        return super().pieces(here, writing=writing, replicas_shared=replicas_shared)

    def unequal_replicas(self, *, base: bool = False) -> dict[str, list[int]]:
        """See `TorchEngine`. Processes with the same stages are compared."""
        bare = self._bare
        held = dict(bare.named_parameters()) if base else state.named_parameters(bare)
        names, nothing = self._names[base], torch.empty(0, device=self._accelerator.device)
        return self._unequal(
            {name: state.local(held[name]) if name in held else nothing for name in names}
        )

    def infer(self, input_ids: Tensor, keywords: Mapping[str, Any]) -> Tensor:
        """Return what a whole `LossModule` does, without gradients.

        The losses are those of the last stage, and zeros on the others; logits are on all.
        """
        pipeline, last = self._pipeline, len(self._ranges) - 1
        ranks = dist.get_world_size(pipeline)
        positions = keywords.get("position_ids")
        shape = input_ids.shape if positions is None else positions.shape
        width = self._bare.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
        output: Tensor | None = None
        for number, blocks in self._mine.items():
            given: Tensor | None = None
            if number:
                # In fp32, whatever the stage before it computes in: it holds narrower values too.
                given = torch.empty(*shape, width, device=input_ids.device)
                dist.recv(given, group=pipeline, group_src=(number - 1) % ranks)
            with self._passage.through(blocks, given):
                output = self._part(input_ids, **keywords)
            if number < last:
                self._send(output.float().contiguous(), (number + 1) % ranks)
        if keywords.get("labels") is not None:
            if self._layout.last_stage:
                assert output is not None
                return output
            return _zeros(input_ids, keywords)
        if not self._layout.last_stage:
            rows = shape if keywords.get("all_logits") else shape[:1]
            output = torch.empty(*rows, self._vocabulary, device=input_ids.device)
        assert output is not None
        output = output.contiguous()
        dist.broadcast(output, group=pipeline, group_src=ranks - 1)
        return output

    def _send(self, hidden: Tensor, to: int) -> None:
        """Begin to send; the memory is kept until it is sent, and one at a time is on its way."""
        if self._sending is not None:
            self._sending[0].wait()
        work = dist.isend(hidden, group=self._pipeline, group_dst=to)
        self._sending = None if work is None else (work, hidden)

    _sending: tuple[dist.Work, Tensor] | None = None


class _Passing(nn.Module):
    """The module whose forward evaluation and samples call."""

    def __init__(self, engine: PipelineEngine) -> None:
        super().__init__()
        self.module = engine._part
        self._engine = engine

    def forward(self, input_ids: Tensor, **keywords: Any) -> Tensor:
        return self._engine.infer(input_ids, keywords)


class _Part(nn.Module):
    """One stage, as a schedule calls it: the number of a micro-batch → hidden states, or a loss."""

    def __init__(
        self, module: nn.Module, passage: stages.Passage, blocks: range, *, last: bool
    ) -> None:
        super().__init__()
        self.module = module
        self._passage, self._blocks, self._last = passage, blocks, last
        self._micro_batches: Sequence[MicroBatch] = ()
        self._losses: list[Tensor | None] = []

    def begin(self, micro_batches: Sequence[MicroBatch], losses: list[Tensor | None]) -> None:
        """Take the micro-batches of a step, and the list for their losses."""
        self._micro_batches, self._losses = micro_batches, losses

    def forward(self, hidden: Tensor | None = None, *, number: Tensor) -> Tensor:
        index = int(number)
        begin_micro_batch(index, len(self._micro_batches))
        if hidden is not None and hidden.requires_grad:
            # torch refuses to send a gradient that is not contiguous.
            hidden = hidden.view_as(hidden)
            hidden.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]  # no stub
        with self._passage.through(self._blocks, hidden):
            output: Tensor = self.module(**self._micro_batches[index])
        if self._last:
            self._losses[index] = output.detach()
        return output


class _Stage(pipelining.PipelineStage):
    """A stage whose backward knows whether it is the last one of a step."""

    def __init__(
        self, engine: PipelineEngine, part: _Part, number: int, of: int, device: torch.device
    ) -> None:
        super().__init__(part, number, of, device, group=engine._pipeline)
        self._engine = engine

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        self._engine.reduce_in_backward(last=last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


def _zeros(input_ids: Tensor, keywords: Mapping[str, Any]) -> Tensor:
    """Return zeros in place of what a `LossModule` returns for these keywords and labels."""
    each, pairs = keywords.get("each"), keywords.get("pairs")
    if pairs is None:
        return input_ids.new_zeros(input_ids.shape if each else (), dtype=torch.float32)
    shape = pairs.sizes.shape if each else (1 + len(PAIR_SLOTS),)
    return input_ids.new_zeros(shape, dtype=torch.float64)


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield some gradients at a time, of one dtype."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (size >= _BUCKET or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
