from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from llmtrain.agreement import Alone
from llmtrain.errors import UserError
from llmtrain.metrics import memory
from llmtrain.training.start import trials
from llmtrain.training.start.trials import Trial

CUDA = torch.device("cuda")


class Counting(nn.Module):
    """A buffer that each forward changes, as batch norm's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))


@pytest.fixture
def tried(monkeypatch):
    """A device that is not there: micro-batches over `fits` run out of memory in the backward."""
    seen = SimpleNamespace(
        sizes=[], peaks=[], cleared=0, emptied=0, fits=0, model=Counting(), ranks=Alone()
    )

    def one_pass(trial, rows, **_):
        torch.rand(3)
        trial.model.passes.add_(1)
        seen.sizes.append(rows)
        if rows > seen.fits:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    def clear():
        seen.cleared += 1

    def empty_cache():
        seen.emptied += 1

    def fitting(candidates):
        engine = SimpleNamespace(clear=clear)
        launched: Any = SimpleNamespace(engine=engine, ranks=seen.ranks, device=CUDA)
        return trials.fitting_micro_batch(Trial(seen.model, launched, 8, 5), candidates)

    seen.fitting = fitting
    monkeypatch.setattr(trials, "_pass", one_pass)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(memory, "reset_peak", lambda device: seen.peaks.append(device) or 0)
    return seen


def test_the_largest_micro_batch_that_runs_twice_is_taken(tried):
    tried.fits = 3
    assert tried.fitting([8, 4, 2, 1]) == 2
    assert tried.sizes == [8, 4, 2, 2]
    assert (tried.cleared, tried.emptied) == (3, 3)


def test_what_did_not_fit_is_not_in_the_peak_of_memory(tried):
    tried.fits = 2
    tried.fitting([8, 4, 2, 1])
    assert tried.peaks == [CUDA, CUDA]


def test_a_trial_leaves_buffers_alone(tried):
    tried.fits = 2
    tried.fitting([4, 2])
    assert tried.model.passes == 0


def test_none_that_fits_is_a_problem_of_the_config(tried):
    with pytest.raises(UserError, match=r"training\.micro_batch_size"):
        tried.fitting([2, 1])


def test_on_a_cpu_nothing_is_tried():
    launched: Any = SimpleNamespace(device=torch.device("cpu"))
    assert trials.fitting_micro_batch(Trial(nn.Module(), launched, 8, 5), [8, 4]) == 8
