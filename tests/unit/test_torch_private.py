"""What torch does not promise: each name's test says what breaks without it."""

import torch
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import fully_shard

from llmtrain import torch_private
from llmtrain.torch_private import FakeTensorMode, TorchDispatchMode, unset_fake_temporarily


def test_an_update_and_a_clip_are_one_call_for_all_gradients():
    first, second = torch.tensor([3.0, 4.0]), torch.tensor([1.0])
    torch_private.multiply_each([first, second], torch.tensor(2.0))
    torch_private.add_to_each([second], 1)
    torch_private.add_to_each([second], [torch.tensor(0.5)], alpha=-1)
    assert (first.tolist(), second.tolist()) == ([6.0, 8.0], [2.5])
    norms = torch_private.norm_of_each([first, second], 2, torch.float64)
    assert [(one.item(), one.dtype) for one in norms] == [
        (10.0, torch.float64),
        (2.5, torch.float64),
    ]


def test_the_gradient_norm_joins_small_tensors_in_one_copy():
    parts = [torch.arange(4.0).reshape(2, 2), torch.ones(3)]
    assert torch_private.flattened(parts).tolist() == [0, 1, 2, 3, 1, 1, 1]


def test_adamw_makes_its_states_without_a_step_and_updates_as_torchs_own_does():
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 5)) for _ in range(2))
    made = torch.optim.AdamW([ours], fused=True)
    expected = torch.optim.AdamW([theirs], fused=True)
    ours.grad, theirs.grad = torch.ones(5), torch.ones(5)
    torch_private.make_states(made, made.param_groups[0])
    state, group = made.state[ours], made.param_groups[0]
    assert {name: float(value.sum()) for name, value in state.items()} == {
        "step": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0,
    }  # fmt: skip
    state["step"] += 1
    torch_private.fused_adamw(
        [ours], [ours.grad], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
        lr=group["lr"], beta1=0.9, beta2=0.999, weight_decay=group["weight_decay"], eps=1e-8,
        amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
    )  # fmt: skip
    expected.step()
    assert torch.equal(ours, theirs)


def test_a_forward_is_counted_on_tensors_without_memory_and_masks_are_made_on_real_ones():
    with FakeTensorMode():
        fake = torch.empty(1 << 40)
        with unset_fake_temporarily():
            real = torch.ones(2)
    assert (type(fake).__name__, fake.numel(), real.sum()) == ("FakeTensor", 1 << 40, 2)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.operations.append(operation)
        return operation(*args, **(kwargs or {}))


def test_each_operation_of_a_forward_is_seen_but_not_what_deepspeed_gathers():
    with Seen() as seen:
        torch.ones(2).to(torch.float64)
        torch_private.without_modes(torch.ones)(3)
    assert seen.operations == [torch.ops.aten.ones.default, torch_private.CAST]


def test_storages_of_tensors_without_memory_are_told_from_each_other():
    with FakeTensorMode():
        one, other = torch.empty(4), torch.empty(4)
        ids = [id(t.untyped_storage()) for t in (one, one[1:], other)]
    assert ids[0] == ids[1] != ids[2]


def test_selective_checkpointing_keeps_the_attention_of_this_machine():
    query = torch.ones(1, 1, 4, 8, requires_grad=True)
    with Seen() as seen:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert set(seen.operations) & set(torch_private.ATTENTIONS)
    assert torch_private.GROUPED_PRODUCT.name() == "aten::_grouped_mm"


def test_unused_parameters_of_a_sharded_group_are_found(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        module = nn.Linear(3, 5)
        fully_shard(module, mesh=device_mesh.init_device_mesh("cpu", (1,)))
        (group,) = torch_private.fsdp_groups(module)
        shapes = [one.sharded_param.shape for one in group.fsdp_params]
        assert shapes == [torch.Size([5, 3]), torch.Size([5])]
        assert [one.unsharded_accumulated_grad for one in group.fsdp_params] == [None, None]
    finally:
        torch.distributed.destroy_process_group()


def test_the_doctor_looks_where_torch_builds_deepspeeds_extension(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert torch_private.build_directory("cpu_adam") == tmp_path / "cpu_adam"
