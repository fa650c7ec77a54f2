"""Models whose matrices are cut over processes train as on one process, and as every checkpoint."""

import json

import pytest
import torch
from helpers import cut
from helpers.tiny import tiny_config, write_config

CASES = (
    "llama",
    "llama double",
    "llama documents",
    "llama frozen",
    "llama logits",
    "llama z_loss",
    "qwen3",
    "qwen3 double",
    "gemma2",
    "mistral full",
    "llama selective",
    "phi",
    "olmo2",
)

APERTUS = {
    "model_type": "apertus",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}


def launch(server, folder, world_size, cases, strategy="ddp", tensor=1, *more, **env):
    folder.mkdir(exist_ok=True)
    output = folder / "result.json"
    call = ["call", "helpers.cut", "work", str(output), json.dumps(cases), strategy, str(tensor)]
    call += more
    codes = server.run(call, world_size, folder, env)
    assert codes == [0] * world_size, (folder / "output.txt").read_text()
    return json.loads(output.read_text())


def same(found, expected, case):
    loss, norm = (1e-12, 1e-12) if "double" in case else (1e-6, 1e-5)
    assert found["losses"] == pytest.approx(expected["losses"], abs=loss, rel=0)
    assert found["norms"] == pytest.approx(expected["norms"], rel=norm)
    assert found["each"] == pytest.approx(expected["each"], abs=1e-5)
    assert found["logits"] == pytest.approx(expected["logits"], abs=1e-5)
    assert found["tied"] == expected["tied"]
    assert found["unlike"] == []
    assert found["replicas"] == {}
    assert found["losses"][0] != found["losses"][-1]


def test_two_processes_that_share_each_matrix_train_as_one(server, tmp_path):
    expected = launch(server, tmp_path / "one", 1, CASES)
    found = launch(server, tmp_path / "two", 2, CASES, tensor=2)
    for case in CASES:
        same(found[case], expected[case], case)
        assert found[case]["held"] < 0.52 * expected[case]["held"]
    # In each micro-batch four of a block, of the embedding and of the head's input one, of the
    # loss two; and one of a step's numbers.
    blocks, micro_batches = cut.BASE["num_hidden_layers"], cut.ROWS // cut.MICRO
    assert found["llama"]["reductions"] == micro_batches * (4 * blocks + 4) + 1


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.wide)])
def test_groups_of_two_train_as_one_process_beside_data_parallelism(server, tmp_path, strategy):
    cases = ("llama", "qwen3", "llama documents")
    expected = launch(server, tmp_path / "one", 1, cases)
    found = launch(server, tmp_path / "four", 4, cases, strategy, tensor=2)
    for case in cases:
        same(found[case], expected[case], case)
        if strategy == "fsdp2":
            assert found[case]["held"] < 0.3 * expected[case]["held"]


def test_an_embedding_that_is_frozen_beside_unused_parameters_and_bf16(server, tmp_path):
    """bf16 rounds the sums of parts in another order: an update is a few units of its last bit."""
    cases = ("llama frozen",)
    for precision, loss, norm in (("fp32", 1e-6, 1e-5), ("bf16", 1e-3, 1e-2)):
        one, four = (tmp_path / f"{precision} on {n}" for n in (1, 4))
        expected = launch(server, one, 1, cases, "ddp", 1, precision)["llama frozen"]
        found = launch(server, four, 4, cases, "ddp", 2, precision, "unused")["llama frozen"]
        assert found["losses"] == pytest.approx(expected["losses"], abs=loss, rel=0)
        assert found["norms"] == pytest.approx(expected["norms"], rel=norm)
        assert found["unlike"] == []
        assert found["replicas"] == {}


@pytest.mark.slow
def test_eight_processes_train_as_one_under_hsdp(server, tmp_path):
    expected = launch(server, tmp_path / "one", 1, ("llama", "qwen3"))
    mesh = {"LOCAL_WORLD_SIZE": "4"}
    found = launch(server, tmp_path / "eight", 8, ("llama", "qwen3"), "hsdp", 2, **mesh)
    for case, numbers in expected.items():
        same(found[case], numbers, case)


@pytest.mark.parametrize("world_size", [2, 4])
def test_columns_become_whole_rows_which_are_written_once(server, tmp_path, world_size):
    output = tmp_path / "result.json"
    codes = server.run(["call", "helpers.cut", "exchange", str(output)], world_size, tmp_path)
    assert codes == [0] * world_size, (tmp_path / "output.txt").read_text()
    every = json.loads(output.read_text())
    for key in every[0]:
        rows, columns = map(int, key.split())
        whole = torch.zeros(rows * columns)
        for start, values in (piece for one in every for piece in one[key]):
            assert not whole[start : start + len(values)].any()
            whole[start : start + len(values)] = torch.tensor(values)
        assert torch.equal(whole, torch.arange(1.0, rows * columns + 1))


def test_a_model_that_its_own_plan_does_not_cut_rightly_is_refused(server, tmp_path):
    """An activation with weights of its own would get other gradients on each process."""
    made = tiny_config(tmp_path / "run", model__config=APERTUS)
    made["distributed"] = {"tensor_parallel": 2, "timeout_minutes": 1.0}
    path = write_config(tmp_path, made)
    assert server.run(["train", str(path)], 2, tmp_path) == [2, 2]
    said = (tmp_path / "output.txt").read_text()
    assert "distributed.tensor_parallel = 2" in said
    assert "cut by its own plan, ApertusForCausalLM has another gradient of" in said
    assert "Traceback" not in said
