"""A program that `llmtrain eject` has written trains as the run does, to the bit, without it."""

import ast
from itertools import chain

import pytest
import torch
from helpers import corpus, ejected
from helpers.bases import save_base, small_fields
from helpers.ranks import ROOT
from helpers.tiny import lines
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

STEPS = 50
SAVED = 20
CONFIGS = {
    "quickstart": ROOT / "configs/quickstart.yaml",
    "wikipedia_small": ROOT / "configs/pretrain/wikipedia_small.yaml",
    "text_full": ROOT / "configs/finetune/text_full.yaml",
    "chat_lora": ROOT / "configs/finetune/chat_lora.yaml",
}
FEW = [
    *(f"training.steps={STEPS}", "training.epochs=null", "training.precision=fp32"),
    *(f"checkpoint.every_steps={SAVED}", "checkpoint.keep_last=9", "logging.every_steps=1"),
    *("evaluation.every_steps=1000", "evaluation.max_documents=2", "evaluation.prompts=[]"),
]
SMALL = [f"model.config.{key}={value}" for key, value in small_fields(32, 2, 4).items()]
ALLOWED = {"torch", "transformers", "safetensors", "numpy"}


@pytest.fixture(scope="module")
def brought(tmp_path_factory):
    """Texts, conversations and weights."""
    folder = tmp_path_factory.mktemp("brought")
    corpus.write_parquet(folder / "my.parquet", corpus.articles(200))
    corpus.write_jsonl(folder / "chat.jsonl", [talk(n) for n in range(300)])
    save_base(folder / "base", num_attention_heads=4, num_key_value_heads=2)
    save_base(folder / "untied", tie_word_embeddings=False, attention_dropout=0.1)
    return folder


def talk(n):
    answer = f"It is {n}, " + "then " * (n % 9)
    messages = [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def overrides(name, brought):
    """What makes a config of ours small, and its data local."""
    texts, chat = (
        f"data.sources=[{{path: {brought / one}}}]" for one in ("my.parquet", "chat.jsonl")
    )
    base = f"model.from={brought / 'base'}"
    return (
        FEW
        + {
            "quickstart": [*SMALL, "data.seq_len=32"],
            "wikipedia_small": [*SMALL, texts, "model.tokenizer={train: 300}", "data.seq_len=32"],
            "text_full": [base, texts, "data.seq_len=32", "training.global_batch_size=8"],
            "chat_lora": [base, chat, "data.seq_len=64", "training.global_batch_size=8"],
        }[name]
    )


def train_and_eject(server, folder, config, values):
    """The directory of a run, and the program of the same config, which has not seen the run."""
    run_dir, program = folder / "run", folder / "train_one.py"
    eject = ["call", "helpers.ejected", "write", program]
    for words, place in ((["train"], run_dir), (eject, folder / "no-run")):
        words = [*map(str, [*words, config, *values]), f"run.dir={place}"]
        assert server.run(words, 1, folder) == [0], (folder / "output.txt").read_text()[-4000:]
    assert not (folder / "no-run").exists()
    return run_dir, program


def numbers(found):
    return [(one["step"], one["loss"], one["grad_norm"]) for one in found]


def check_program(program):
    """It is short, ruff has nothing to say of it, and it imports only what it may."""
    text = program.read_text("utf-8")
    assert text.count("\n") <= 400
    assert ejected.lint(text) == ""
    nodes = [*ast.walk(ast.parse(text))]
    imported = {one.module for one in nodes if isinstance(one, ast.ImportFrom)}
    imported |= {name.name for one in nodes if isinstance(one, ast.Import) for name in one.names}
    outside = {name.partition(".")[0] for name in imported} - {
        *("argparse", "collections", "fnmatch", "json", "math", "pathlib", "typing")
    }
    assert outside <= ALLOWED


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_are_those_of_the_run_to_the_bit_from_the_start_and_from_a_checkpoint(
    server, tmp_path, brought, name
):
    run_dir, program = train_and_eject(server, tmp_path, CONFIGS[name], overrides(name, brought))
    check_program(program)
    expected = numbers(lines(run_dir, "train"))
    assert len(expected) == STEPS
    assert numbers(ejected.run(server, program)) == expected
    saved = run_dir / "checkpoints" / f"step-{SAVED:08d}"
    found = ejected.run(server, program, "--checkpoint", str(saved), "--save", str(tmp_path / "w"))
    assert numbers(found) == expected[SAVED:]
    last = run_dir / "checkpoints" / f"step-{STEPS:08d}"
    (file,) = (tmp_path / "w").glob("*.safetensors")
    weights, of_run = load_file(file), load_file(last / file.name)
    assert weights.keys() == of_run.keys()
    assert all(torch.equal(weights[name], of_run[name]) for name in weights)
    if name != "chat_lora":
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / "w")
        assert torch.equal(opened.lm_head.weight, load_whole(last).lm_head.weight)

    words = ["call", "helpers.ejected", "start", program, tmp_path / "none.jsonl"]
    assert server.run([*map(str, words), "--checkpoint", str(last)], 1, tmp_path) != [0]
    said = (tmp_path / "output.txt").read_text()
    assert f"train_one.safetensors has the tokens of {STEPS} steps, and {STEPS} are made" in said


def test_no_more_steps_are_written_than_the_run_has(server, tmp_path, brought):
    program = tmp_path / "train_one.py"
    words = ["call", "helpers.ejected", "write_first", STEPS + 1, program, CONFIGS["quickstart"]]
    words += [*overrides("quickstart", brought), f"run.dir={tmp_path / 'run'}"]
    assert server.run([*map(str, words)], 1, tmp_path) != [0]
    assert f"a whole number from 1 to {STEPS}" in (tmp_path / "output.txt").read_text()
    assert not program.exists()


def load_whole(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint)


OTHERS = {
    "gpt2, dropout, logits": (
        "quickstart",
        [
            "model.config={model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 2}",
            "optimizer.groups=[]",
        ],
        ["training.loss_kernel=logits", "optimizer.schedule=cosine", "training.max_grad_norm=null"],
    ),
    "phi: a head with a bias": (
        "quickstart",
        [*SMALL, "model.config.model_type=phi", "model.freeze=['*layers.0.*']"],
        ["optimizer.schedule=constant", "data.document_mask=true", "training.micro_batch_size=4"],
    ),
    "conversations apart, new rows, untied, dropout": (
        "chat_lora",
        ["data.packing=single", "adapter.train_tokens=auto", "adapter.dropout=0.1"],
        ["adapter.kind=rslora", "training.micro_batch_size=2", "optimizer.schedule=wsd"],
    ),
    "all weights on conversations": (
        "chat_lora",
        ["adapter.kind=none", "optimizer.name=muon", "training.deterministic=true"],
        ["optimizer.weight_decay=0.1", "training.max_grad_norm=0.5"],
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_else_it_covers_has_the_bits_of_the_run(server, tmp_path, brought, case):
    name, *values = OTHERS[case]
    given = [*overrides(name, brought), *chain(*values), "training.steps=6"]
    given = [one for one in given if not (case.startswith("gpt2") and one in SMALL)]
    if "untied" in case:
        given.append(f"model.from={brought / 'untied'}")
    run_dir, program = train_and_eject(server, tmp_path, CONFIGS[name], given)
    check_program(program)
    expected = numbers(lines(run_dir, "train"))
    assert len(expected) == 6
    assert numbers(ejected.run(server, program)) == expected
