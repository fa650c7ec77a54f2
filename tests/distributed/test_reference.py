"""A run's numbers against a loop written by hand with transformers and PyTorch alone."""

import json
import math

import pytest
import torch
from helpers.rings import needs
from helpers.tiny import STEPS, lines, optimizer_by_hand, rate_by_hand, tiny_config, write_config
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import llmtrain
from llmtrain.hashing import mix


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    made = tiny_config(folder / "run", training__steps=STEPS, evaluation__every_steps=10)
    made["evaluation"]["prompts"] = ["The planet"]
    return write_config(folder, made)


@pytest.fixture(scope="module")
def run_dir(server, config):
    folder = config.parent
    codes = server.run(["train", str(config)], 2, folder)
    assert codes == [0, 0], (folder / "output.txt").read_text()
    return folder / "run"


@pytest.fixture(scope="module")
def bare(config, run_dir):
    """Losses, norms and the model of the loop by hand, labels from `model(ids, labels=ids)`."""
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "tokenizer")
    special = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(42)
    llama = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, **special, **shape)
    model = AutoModelForCausalLM.from_config(llama, dtype=torch.float32).train()
    optimizer = optimizer_by_hand(model)
    losses, norms = [], []
    with llmtrain.open_stream(llmtrain.load_config(config)) as stream:
        for step in range(1, STEPS + 1):
            for group in optimizer.param_groups:
                group["lr"] = rate_by_hand(step)
            ids = torch.from_numpy(next(stream).ids).long()
            loss = model(ids, labels=ids).loss
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, norms, model


def test_losses_and_norms_are_those_of_a_loop_by_hand(run_dir, bare):
    found = lines(run_dir, "train")
    assert [line["loss"] for line in found] == pytest.approx(bare[0], abs=1e-5)
    assert [line["grad_norm"] for line in found] == pytest.approx(bare[1], rel=1e-4)
    assert [line["learning_rate"] for line in found] == pytest.approx(
        [rate_by_hand(step) for step in range(1, STEPS + 1)]
    )


def test_held_out_bits_per_byte_are_those_of_plain_logits(run_dir, bare):
    with safe_open(str(run_dir / "eval.safetensors"), framework="pt") as file:
        ids, scored = file.get_tensor("ids").long(), file.get_tensor("scored").bool()
        facts = json.loads(file.metadata()["heldout"])
    nll = 0.0
    model = bare[2].eval()
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 32):
            window, mask = ids[start : start + 33], scored[start + 1 : start + 33]
            chances = model(window[None, :-1]).logits[0].log_softmax(-1)
            nll -= chances.gather(1, window[1:, None])[:, 0][mask].sum().item()
    last = lines(run_dir, "eval")[-1]
    assert last["step"] == STEPS
    assert last["bits_per_byte"] == pytest.approx(nll / math.log(2) / facts["bytes"], abs=1e-4)
    assert last["loss"] == pytest.approx(nll / int(scored.sum()), abs=1e-4)
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    assert last["tokens"] == int(scored.sum())
    assert last["documents"] == facts["documents"] == 8


def test_the_base_line_is_the_logarithm_of_the_vocabulary(run_dir):
    first = lines(run_dir, "eval")[0]
    assert first["step"] == 0
    assert first["loss"] == pytest.approx(math.log(2048), abs=0.1)


@needs("tensorboard")
def test_evaluation_samples_and_trackers_change_no_bit_of_the_training(server, run_dir, tmp_path):
    made = tiny_config(tmp_path / "run", training__steps=STEPS, evaluation__every_steps=3)
    made["evaluation"]["prompts"] = ["A number", "The river", "One"]
    made["logging"] = {"every_steps": 7, "trackers": ["tensorboard"]}
    assert server.run(["train", str(write_config(tmp_path, made))], 2, tmp_path) == [0, 0]
    name = f"step-{STEPS:08d}"
    for file in (run_dir / "checkpoints" / name).glob("*.safetensors"):
        other = tmp_path / "run" / "checkpoints" / name / file.name
        assert file.read_bytes() == other.read_bytes(), file.name
    assert list(tmp_path.glob("run/tensorboard/events.*"))
    assert [line["step"] for line in lines(tmp_path / "run", "train")] == [1, 7, 14, 20]


def test_the_stream_digest_audits_the_whole_run(run_dir):
    import xxhash

    digest = 0
    for line in lines(run_dir, "train"):
        both = digest.to_bytes(8, "little") + int(line["batch_digest"], 16).to_bytes(8, "little")
        digest = xxhash.xxh3_64_intdigest(both)
    path = run_dir / "checkpoints" / f"step-{STEPS:08d}" / "trainer_state.json"
    assert json.loads(path.read_text())["data"]["stream_digest"] == f"{digest:016x}"


def test_seeds_of_ranks_differ_from_the_seed_of_the_weights():
    assert len({mix(42, 7, rank) for rank in range(8)} | {42}) == 9


def test_batch_digests_are_those_of_the_contract(config, run_dir):
    import xxhash

    with llmtrain.open_stream(llmtrain.load_config(config)) as stream:
        for line in lines(run_dir, "train")[:3]:
            batch = next(stream)
            total = sum(
                xxhash.xxh3_64_intdigest(ids.astype("<i4").tobytes(), seed=batch.first_block + k)
                for k, ids in enumerate(batch.ids)
            )
            assert line["batch_digest"] == f"{total % 2**64:016x}"
