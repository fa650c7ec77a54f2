import pytest
import torch

from llmtrain.training.optimizer import Muon, orthogonalize

SETTINGS = torch.optim.Muon([torch.zeros(2, 2)]).defaults
SHAPES = [(24, 24), (16, 40), (40, 16), (2, 9)]


def drawn(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_keeps_its_directions_and_its_singular_values_go_through_a_polynomial(shape):
    left, sizes, right = torch.linalg.svd(drawn(shape).double(), full_matrices=False)
    sizes = sizes / sizes.norm()
    for _ in range(5):
        sizes = 3.4445 * sizes - 4.775 * sizes**3 + 2.0315 * sizes**5
    made = orthogonalize(drawn(shape), SETTINGS)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made.double(), left @ sizes.diag() @ right, rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_what_torch_makes_in_bf16(shape):
    from torch.optim._muon import _zeropower_via_newtonschulz as in_bf16

    args = [SETTINGS[name] for name in ("ns_coefficients", "ns_steps", "eps")]
    theirs = in_bf16(drawn(shape), *args)
    torch.testing.assert_close(
        orthogonalize(drawn(shape), SETTINGS), theirs.float(), atol=0.04, rtol=0
    )


def test_only_a_cpu_makes_it_in_fp32():
    assert orthogonalize(torch.empty(4, 3, device="meta"), SETTINGS).dtype == torch.bfloat16


def test_a_gradient_of_zero_stays_zero():
    assert not orthogonalize(torch.zeros(4, 3), SETTINGS).any()


def test_all_but_the_orthogonalization_is_torchs_in_bits(monkeypatch):
    monkeypatch.setattr(
        "torch.optim._muon._zeropower_via_newtonschulz",
        lambda matrix, *_: orthogonalize(matrix, SETTINGS),
    )
    runs = []
    for kind, extra in ((Muon, {}), (torch.optim.Muon, {"adjust_lr_fn": "match_rms_adamw"})):
        matrices = [torch.nn.Parameter(drawn(shape)) for shape in SHAPES]
        optimizer = kind(matrices[:-1], lr=0.05, weight_decay=0.2, **extra)
        for step in range(3):
            optimizer.param_groups[0]["lr"] *= 0.5
            for matrix in matrices[:-1]:
                matrix.grad = drawn(tuple(matrix.shape), step)
            matrices[step].grad = None
            optimizer.step()
        runs.append([*matrices, *(s["momentum_buffer"] for s in optimizer.state.values())])
    assert len(runs[0]) == 2 * len(SHAPES) - 1
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
