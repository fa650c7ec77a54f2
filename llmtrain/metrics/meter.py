"""The numbers of a step: measured while it runs, received on the host one step later.

The reduced vector of step s is copied to the host after the step's own work, and the host *waits*
for it at the end of step s + 1. It never polls: ranks that poll would decide at different steps.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from llmtrain.pairs import PAIR_SLOTS, pair_figures
from llmtrain.types import SLOTS, STOPS, Numbers, RankLayout, StepVector

_LIMBS = SLOTS.index("digest_0")  # the first of four


class DataFailedError(Exception):
    """A rank's stream failed in `step`; the ranks then vote on the cause."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class _Sent(NamedTuple):
    step: int
    values: Callable[[], list[float]]
    seconds: float
    started: torch.cuda.Event | None = None
    arrived: torch.cuda.Event | None = None


class Meter:
    """Counts tokens and time over a run; `tokens` and `sources` leave out skipped steps.

    pairs: whether the run trains on pairs, so that the vectors have `PAIR_SLOTS`
    """

    def __init__(
        self,
        device: torch.device,
        labels: Sequence[str],
        learning_rate: Callable[[int], float],
        roll: Callable[[int, int], int],
        *,
        layout: RankLayout,
        sources: Mapping[str, int],
        stream_digest: int,
        pairs: bool = False,
    ) -> None:
        self._cuda = device.type == "cuda"
        self._labels = tuple(labels)
        self._learning_rate = learning_rate
        self._layout = layout
        self._pairs = pairs
        self._roll = roll  # (digest of all steps before, batch digest) → digest of all steps
        # Sources of an earlier start stay counted, even if the config no longer has them.
        self.sources = {**sources, **{label: sources.get(label, 0) for label in self._labels}}
        self.stream_digest = stream_digest
        self.step_seconds = 0.0  # of the last step whose numbers have arrived
        self._pending: list[_Sent] = []

    @property
    def tokens(self) -> int:
        """Trained tokens so far, over all ranks."""
        return sum(self.sources.values())

    def begin(self, step: int) -> None:
        """Start the clock of `step`."""
        self._step = step
        self._start = time.perf_counter()
        self._started = self._mark() if self._cuda else None

    def send(self, sums: StepVector, norm: Tensor | float) -> None:
        """Queue the copy of a step's numbers to the host.

        norm: before clipping, () fp32 on the device or a number
        """
        arrived = None
        if isinstance(norm, Tensor):
            packed = torch.cat([sums.data, norm.double().reshape(1)])
            if self._cuda:
                host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
                host.copy_(packed, non_blocking=True)
                packed, arrived = host, self._mark()
            values = packed.tolist
        else:
            values = partial(list, (*sums.values, norm))
        seconds = time.perf_counter() - self._start
        self._pending.append(_Sent(self._step, values, seconds, self._started, arrived))

    def receive(self, step: int, anything_due: Callable[[int], bool]) -> Iterator[Numbers]:
        """Yield the numbers of the previous step, and those of `step` if anything is due at it.

        anything_due: asked about `step` once the caller has seen the numbers before it

        Raises DataFailedError, on all ranks, for a step in which a rank had no data.
        """
        while self._pending and (self._pending[0].step < step or anything_due(step)):
            numbers = self._read(self._pending.pop(0))
            if numbers.data_failed:
                raise DataFailedError(numbers.step)
            yield numbers

    def _read(self, sent: _Sent) -> Numbers:
        seconds = sent.seconds
        if sent.arrived is not None and sent.started is not None:
            sent.arrived.synchronize()
            seconds = sent.started.elapsed_time(sent.arrived) / 1000
        self.step_seconds = seconds
        values = sent.values()
        slots = dict(zip(SLOTS, values, strict=False))
        after = len(SLOTS) + len(self._labels)
        tokens = [round(value) for value in values[len(SLOTS) : after]]
        step_tokens, norm, others = sum(tokens), values[-1], values[after:-1]
        added = len(PAIR_SLOTS) if self._pairs else 0
        figures = pair_figures(others[:added]) if self._pairs else None
        counted = step_tokens if figures is None else figures["pairs"]  # divides the loss
        failed = slots["data_failed"] > 0
        skipped = failed or slots["not_finite"] > 0 or not math.isfinite(norm) or not counted
        limbs = values[_LIMBS : _LIMBS + 4]
        digest = sum([round(limb) << (16 * k) for k, limb in enumerate(limbs)]) % 2**64
        if not failed:
            self.stream_digest = self._roll(self.stream_digest, digest)
        if not skipped:
            for label, count in zip(self._labels, tokens, strict=True):
                self.sources[label] += count
        losses = (slots["loss_sum"], *others[added:])
        loss, *router = (one / counted if counted else math.nan for one in losses)
        return Numbers(
            step=sent.step,
            loss=loss,
            learning_rate=self._learning_rate(sent.step),
            grad_norm=norm,
            tokens=self.tokens,
            step_tokens=step_tokens,
            seconds=seconds,
            data_wait_seconds=slots["wait_seconds"],
            batch_digest=digest,
            skipped=skipped,
            sources=dict(self.sources),
            data_failed=failed,
            padding_only=slots["padding_only"] == self._layout.data_size,
            ended=slots["ended"] == self._layout.data_size,
            stops=tuple(reason for reason in STOPS if slots[reason] > 0),
            save=slots["save_file"] > 0 or slots["minutes_due"] > 0,
            written=slots["writer_ready"] + slots["writer_failed"] == self._layout.world_size,
            router_loss=router[0] if router else None,
            real_tokens=round(slots["real_tokens"]),
            pairs=figures,
        )

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # no stub
        event.record()
        return event
