import pytest

from llmtrain.config.schema import TrainingConfig
from llmtrain.errors import UserError
from llmtrain.model.loss import Head
from llmtrain.rundir.status import FrozenChoices
from llmtrain.training.start.frozen import asked_kernel, choose_kernel

CAPPED, WHY = Head(softcap=30.0), "it has no head"


def frozen(run_dir, **values):
    auto = FrozenChoices(run_dir, "")
    auto.run |= values
    auto.save()
    return run_dir


def test_a_new_run_chooses_and_a_begun_one_keeps_its_kernel(tmp_path):
    open_ = TrainingConfig(steps=1)
    assert asked_kernel(open_, None) == "auto"
    assert asked_kernel(open_, tmp_path) == "auto"
    assert asked_kernel(open_, frozen(tmp_path, precision="fp32", loss_kernel="torch")) == "torch"
    named = TrainingConfig(steps=1, loss_kernel="chunked")
    assert asked_kernel(named, tmp_path) == "chunked"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_auto_takes_chunks_where_the_head_is_plain(precision):
    assert choose_kernel("auto", CAPPED, precision, 1e-4) == ("chunked", CAPPED)
    assert choose_kernel("auto", WHY, precision, 1e-4) == ("logits", None)
    assert choose_kernel("logits", CAPPED, precision, 1e-4) == ("logits", None)


@pytest.mark.parametrize("asked", ["chunked", "torch"])
def test_a_kernel_that_the_model_rules_out_is_refused_with_the_reason(asked):
    with pytest.raises(UserError) as caught:
        choose_kernel(asked, WHY, "fp32", 0.0)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("training.loss_kernel", asked)
    assert WHY in problem.expected


def test_torchs_kernel_is_right_in_fp32_and_not_in_bf16():
    assert choose_kernel("torch", Head(), "fp32", 0.0) == ("torch", Head())
    with pytest.raises(UserError, match="in bf16 torch's kernel is wrong by"):
        choose_kernel("torch", Head(), "bf16", 0.0)
    for head, z_loss in ((CAPPED, 0.0), (Head(), 1e-4)):
        with pytest.raises(UserError, match="no scale, cap or z-loss"):
            choose_kernel("torch", head, "fp32", z_loss)
