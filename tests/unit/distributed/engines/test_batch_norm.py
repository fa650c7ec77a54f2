from types import SimpleNamespace

import pytest
import torch
from torch import nn

from llmtrain.distributed.engines.fsdp import with_common_statistics
from llmtrain.errors import UserError


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batch_norm_has_the_statistics_of_all_ranks_or_is_refused(processes, device, caplog):
    caplog.set_level("INFO")
    where = SimpleNamespace(num_processes=processes, device=torch.device(device))
    module = Normed()
    weight = module.inner[1].weight
    if (processes, device) == (4, "cpu"):
        with pytest.raises(UserError, match=r"one process on a CPU.*inner\.1"):
            with_common_statistics(module, where)
        return
    made = with_common_statistics(module, where)
    expected = nn.SyncBatchNorm if processes == 4 else nn.BatchNorm1d
    assert type(made.inner[1]) is expected
    assert made.inner[1].weight is weight  # which the optimizer holds
    assert ("SyncBatchNorm" in caplog.text) == (processes == 4)
