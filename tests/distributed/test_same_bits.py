"""One SHA-256 of weights and moments, whatever the processes, the strategy and the kills between.

The whole product, 50 steps each: `pytest tests/distributed/test_same_bits.py -m slow`.
"""

import json
import re
import subprocess
import sys
from functools import cache
from itertools import product

import pytest
import torch
from helpers import chats, corpus, preferred
from helpers.bases import ENTRIES, SHAPE, save_base, save_tokenizer
from helpers.ranks import ROOT, until
from helpers.tiny import lines, status, tiny_config, write_config
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from llmtrain.checkpoint.read import tensors_digest

STEPS, MANY = 6, 50
LAUNCHES = [("ddp", world) for world in (2, 3, 4, 6)] + [("fsdp2", w) for w in (2, 3, 4, 6)]
MODELS, DATA, TRAINED = ("llama", "qwen3"), ("text", "chat"), ("full", "lora")
PLAIN = ("llama", 0.0, "text", "full")
# Each value is on it once; with the launches that are compared with one process.
DIAGONAL = {
    PLAIN: [("ddp", 2), ("fsdp2", 3)],
    ("qwen3", 0.1, "text", "full"): [("ddp", 3), ("fsdp2", 2)],
    ("llama", 0.1, "chat", "lora"): [("ddp", 2), ("fsdp2", 2)],
}
QWEN3_FIELDS = {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True}
QWEN3 = {"model_type": "qwen3", **QWEN3_FIELDS}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A file of conversations, and weights to begin with, by the type of the model."""
    folder = tmp_path_factory.mktemp("sources")
    rows = corpus.write_jsonl(folder / "chat.jsonl", chats.rows_of(80))
    torch.manual_seed(3)
    qwen3 = Qwen3ForCausalLM(Qwen3Config(**SHAPE, **QWEN3_FIELDS, vocab_size=ENTRIES))
    qwen3.save_pretrained(folder / "qwen3")
    bases = {"llama": save_base(folder / "llama"), "qwen3": save_tokenizer(folder / "qwen3")}
    return {"chat": rows, **bases}


def config(run_dir, sources, model="llama", dropout=0.0, data="text", trained="full", **changes):
    """12 groups of two blocks a step, which 1, 2, 3, 4 and 6 processes divide."""
    made = tiny_config(run_dir, training__steps=STEPS, **changes)
    made["training"]["same_bits"] = True
    # So that a shorter run is the beginning of a longer one.
    made["optimizer"] |= {"schedule": "constant", "warmup_steps": 1}
    described = made["model"]["config"]
    described |= (QWEN3 if model == "qwen3" else {}) | {"attention_dropout": dropout}
    if data == "chat":
        made["data"] |= {"sources": [{"path": str(sources["chat"])}], "seq_len": 64}
        made["chat"] = {"template": "chatml", "too_long": "truncate"}
    if trained == "lora":
        made["model"] = {"from": str(sources[model])}
        made["adapter"] = {"kind": "lora", "r": 4, "alpha": 8, "dropout": dropout}
    return made


def sha(server, folder, made, strategy="ddp", world=1, *more):
    """Launch a run that ends well; the SHA-256 of its last checkpoint."""
    made["distributed"] = {"strategy": strategy, "timeout_minutes": 2.0}
    path = write_config(folder, made)
    codes = server.run(["train", str(path), *more], world, folder)
    assert codes == [0] * world, (folder / "output.txt").read_text()[-4000:]
    return last_sha(folder)


def last_sha(folder):
    """Of the checkpoint of the last step."""
    last = lines(folder / "run", "train")[-1]["step"]
    return tensors_digest(folder / "run" / "checkpoints" / f"step-{last:08d}")


@pytest.fixture(scope="module")
def alone(server, sources, tmp_path_factory):
    """The folder of a run on one process, by the kind of the run."""

    @cache
    def trained(*kind):
        folder = tmp_path_factory.mktemp("alone")
        sha(server, folder, config(folder / "run", sources, *kind))
        return folder

    return trained


def numbers(folder):
    """What is logged of each step and depends on the gradient or the loss."""
    seen = ("step", "loss", "grad_norm", "tokens", "batch_digest")
    return [[line[name] for name in seen] for line in lines(folder / "run", "train")]


@pytest.mark.parametrize(
    ("kind", "launch"),
    [
        pytest.param(kind, launch, id="-".join(map(str, (*kind, *launch))))
        for kind, launches in DIAGONAL.items()
        for launch in launches
    ],
)
def test_weights_moments_loss_and_norm_are_those_of_one_process(
    server, sources, alone, tmp_path, kind, launch
):
    found = sha(server, tmp_path, config(tmp_path / "run", sources, *kind), *launch)
    assert found == last_sha(alone(*kind))
    assert numbers(tmp_path) == numbers(alone(*kind))


def test_without_the_key_the_bits_are_others(server, sources, alone, tmp_path):
    """So the hash sees what rounding does."""
    found = {last_sha(alone(*PLAIN))}
    for world in (1, 2):
        folder = tmp_path / str(world)
        made = config(folder / "run", sources, *PLAIN)
        made["training"]["same_bits"] = False
        found.add(sha(server, folder, made, "ddp", world))
    assert len(found) == 3


def test_killed_on_four_processes_it_goes_on_on_three_and_then_on_one(server, sources, tmp_path):
    kind = ("qwen3", 0.1, "text", "full")
    longer = {"checkpoint__every_steps": 2}
    folder = tmp_path / "straight"
    expected = sha(server, folder, config(folder / "run", sources, *kind, **longer))
    folder = tmp_path / "killed"
    made = config(folder / "run", sources, *kind, **longer)
    made["distributed"] = {"strategy": "ddp", "timeout_minutes": 2.0}
    ranks = server.start(["train", str(write_config(folder, made))], 4, folder)
    saved = folder / "run" / "checkpoints" / "step-00000002"
    until(saved.is_dir, "the first checkpoint")
    ranks.kill()
    sha(server, folder, made, "fsdp2", 3, "training.steps=4")
    assert sha(server, folder, made, "ddp", 1) == expected
    starts = lines(folder / "run", "start")
    assert [one["world_size"] for one in starts] == [4, 3, 1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(product(MODELS, (0.0, 0.1), DATA, TRAINED)), ids=str)
def test_fifty_steps_have_one_hash_over_all_launches(server, sources, tmp_path, kind):
    found = {}
    for launch in [("ddp", 1), *LAUNCHES]:
        folder = tmp_path / "-".join(map(str, launch))
        made = config(folder / "run", sources, *kind)
        made["training"]["steps"] = MANY
        found[launch] = sha(server, folder, made, *launch), numbers(folder)[-1]
    assert len(set(map(str, found.values()))) == 1, found


@pytest.mark.parametrize(
    ("override", "world", "says"),
    [
        ("training.same_bits=false", 1, "training.same_bits = False"),
        ("training.micro_batch_size=4", 1, "training.micro_batch_size = 4"),
        ("training.threads=2", 1, "training.threads = 2"),
        ("training.steps=8", 5, "a multiple of 5 processes × micro-batch 2"),
    ],
)
def test_bad_input_what_would_change_the_bits_of_a_run_is_refused(
    server, alone, override, world, says
):
    folder = alone(*PLAIN)
    before = last_sha(folder)
    (folder / "output.txt").write_text("")
    arguments = ["train", str(folder / "config.yaml"), override]
    assert server.run(arguments, world, folder) == [2] * world
    said = (folder / "output.txt").read_text()
    assert says in said
    assert said.count("error: ") == 1
    assert "Traceback" not in said
    assert last_sha(folder) == before


def test_pairs_of_answers_have_one_hash_with_the_reference_of_the_start(server, tmp_path):
    found = set()
    for launch in (("ddp", 1), ("fsdp2", 3)):
        folder = tmp_path / "-".join(map(str, launch))
        sizes = {"training__global_batch_size": 12, "training__micro_batch_size": 2}
        made = preferred.config_of(folder, preferred.pairs(60), "dpo", **sizes)
        made["training"] |= {"same_bits": True, "steps": STEPS}
        found.add(sha(server, folder, json.loads(json.dumps(made)), *launch))
    assert len(found) == 1


def test_bad_input_a_gradient_too_large_for_the_grid_ends_all_ranks_with_its_name(
    server, sources, tmp_path
):
    base = tmp_path / "base"
    model = LlamaForCausalLM.from_pretrained(sources["llama"])
    model.model.norm.weight.data *= 1e6
    model.save_pretrained(base)
    made = config(tmp_path / "run", sources)
    made["model"] = {"from": str(base), "tokenizer": str(sources["llama"])}
    codes = server.run(["train", str(write_config(tmp_path, made))], 2, tmp_path)
    said = (tmp_path / "output.txt").read_text()
    assert codes == [1, 1], said
    assert "Traceback" not in said
    line = " ".join(said.split())
    assert re.search(r"the gradient of model\.\S+ is too large for training\.same_bits", line), said
    assert "optimizer.learning_rate" in said
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert status(tmp_path / "run")["exit_code"] == 1


GROWS = [{"from_step": 1, "size": 12}, {"from_step": 4, "size": 24}]
OTHERS = {
    "muon": {"optimizer": {"name": "muon"}},
    "a batch that grows": {"training": {"global_batch_size": GROWS}},
    "recomputed": {"model": {"activation_checkpointing": "full"}},
    "from logits": {"training": {"loss_kernel": "logits"}},
    "documents hidden": {"data": {"packing": "bestfit"}},
    "a document a row": {"data": {"packing": "single"}},
    "LayerNorm": {"model": {"config": {"model_type": "gpt2", "n_embd": 32, "n_head": 2}}},
    "frozen embeddings": {"model": {"freeze": ["*embed*"]}},
    "two threads": {"training": {"threads": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize("what", OTHERS)
def test_other_kinds_of_runs_have_one_hash_too(server, sources, tmp_path, what):
    found = set()
    launches = [("ddp", 1), ("ddp", 3)] + [("fsdp2", 2)] * (what != "muon")
    for launch in launches:
        folder = tmp_path / "-".join(map(str, launch))
        made = config(folder / "run", sources, "llama", 0.1)
        for section, fields in OTHERS[what].items():
            made[section] |= fields
        found.add(sha(server, folder, made, *launch))
    assert len(found) == 1


@pytest.mark.slow
def test_a_rehearsal_shows_one_hash(tmp_path):
    """The command of docs/guides/one-hash.md, with a smaller model."""
    command = [sys.executable, "-m", "llmtrain", "checkpoints", "rehearse"]
    command += [str(ROOT / "configs" / "quickstart.yaml"), "--same-bits", "1,2", "--json"]
    command += ["training.same_bits=true", "model.config.num_hidden_layers=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["same"], list(found["hashes"])) == (True, ["1", "2"])
