"""Small models to use: a run with checkpoints that nobody trained, adapters that peft saved."""

import json
import os
import runpy
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from helpers import corpus
from helpers.checkpoints import RUN, save, whole
from helpers.ranks import ROOT, Server
from helpers.runs import eval_line, start_line, status, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig

from llmtrain.checkpoint import format as form
from llmtrain.config.schema import ModelConfig
from llmtrain.data import heldout
from llmtrain.data.documents.reader import Reading
from llmtrain.data.tokens.encode import DocumentEncoder
from llmtrain.data.tokens.tokenizer import open_tokenizer
from llmtrain.distributed.engines import state
from llmtrain.rundir import contents
from llmtrain.training.saving import model_files
from llmtrain.training.start.frozen import find_base
from llmtrain.types import TensorSpec

SEQ_LEN = 32
END_OF_TURN = "<|im_end|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_DTYPES = {"torch.float32": "F32", "torch.bool": "BOOL", "torch.uint8": "U8", "torch.int64": "I64"}


def tokenizer(directory: Path, *, bos: bool = False, chat: bool = False) -> Path:
    """A tokenizer with or without begin token, ChatML template and its two tokens."""
    corpus.write_tokenizer(directory)
    if bos:
        corpus.with_template(directory, "<s> $A")
    if chat:
        made = AutoTokenizer.from_pretrained(directory)
        made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END_OF_TURN]})
        made.chat_template = CHATML
        made.save_pretrained(directory)
    return directory


def model(kind: str = "llama", rows: int = 320, seed: int = 0, **fields: Any) -> Any:
    """A random model of a few thousand parameters, far enough from uniform to tell errors."""
    small: dict[str, Any] = {"vocab_size": rows, "bos_token_id": None, "eos_token_id": 0}
    if kind == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "max_position_embeddings": 64}
        tied = {"tie_word_embeddings": True}
        config: Any = LlamaConfig(**{**small, **sizes, **heads, **tied, **fields})
    else:
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
        config = GPT2Config(**{**small, **sizes, **fields})
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    made.config.architectures = [type(made).__name__]
    return made.eval()


def one_word(kind_of_end: int, rows: int = 320) -> Any:
    """A model that always writes the same token."""
    made = model("gpt2", rows)
    with torch.no_grad():
        made.transformer.ln_f.weight.zero_()
        made.transformer.ln_f.bias.copy_(100 * made.transformer.wte.weight[kind_of_end])
    return made


def text(directory: Path) -> dict[str, bytes]:
    """The files of a directory by name."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def checkpoint(run_dir: Path, step: int, made: Any, loss: float | None = None) -> Path:
    """Save a whole model as the checkpoint of a step."""
    values = {**dict(made.named_parameters()), **state.persistent_buffers(made)}
    return _save(run_dir, step, "model.safetensors", values, model_files(made), loss)


def adapter_checkpoint(run_dir: Path, step: int, adapter: Path, loss: float | None = None) -> Path:
    """Save an adapter directory as the checkpoint of a step."""
    from safetensors.torch import load_file

    small = {n: b for n, b in text(adapter).items() if not n.endswith(form.TENSORS)}
    name = "adapter_model.safetensors"
    return _save(run_dir, step, name, load_file(adapter / name), small, loss)


def _save(
    run_dir: Path,
    step: int,
    file: str,
    values: dict[str, Any],
    small: dict[str, bytes],
    loss: float | None,
) -> Path:
    specs = {n: TensorSpec(_DTYPES[str(v.dtype)], tuple(v.shape)) for n, v in values.items()}
    spec = {file: specs}
    trainer_state = {
        "format": form.FORMAT,
        "run_id": RUN,
        "step": step,
        "tokens": 1000 * step,
        "evaluation": None if loss is None else {"step": step, "loss": loss, "best": loss},
        "versions": {"llmtrain": "0.1.0", "torch": "2.13.0"},
    }
    files = {**text(run_dir / contents.TOKENIZER), **small}
    files[form.STATE] = form.canonical(trainer_state)
    flat = {name: value.detach() for name, value in values.items()}
    save(run_dir / contents.CHECKPOINTS, step, spec, whole(spec, flat), small=files)
    return run_dir / contents.CHECKPOINTS / form.directory_name(step)


def run(folder: Path, *, bos: bool = False, chat: bool = False, **data: Any) -> Path:
    """A run directory with tokenizer, manifest and held-out set, and no checkpoint yet.

    Its one start had 2 processes and micro-batches of 3 blocks.
    """
    start = start_line(0) | {"world_size": 2, "micro_batch_size": 3}
    run_dir = write_run(folder, [start, eval_line(4), eval_line(8)], status(run_id=RUN))
    made = tokenizer(run_dir / contents.TOKENIZER, bos=bos, chat=chat)
    articles = corpus.write_parquet(folder / "articles.parquet", corpus.articles(120))
    manifest = corpus.manifest_of(made, articles, heldout=0.2, seq_len=SEQ_LEN, **data)
    (run_dir / contents.MANIFEST).write_bytes(manifest.to_bytes())
    heldout.prepare(
        manifest, DocumentEncoder(open_tokenizer(made)), run_dir / contents.HELDOUT, 20, Reading(60)
    )
    return run_dir


def adapter(folder: Path, base: Path, tokenizer_files: Path, **settings: Any) -> Path:
    """An adapter that peft saved, on a model directory, with what a checkpoint has beside it."""
    from peft import LoraConfig, get_peft_model

    fields: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    torch.manual_seed(5)
    bare = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with quiet():
        made = get_peft_model(bare, LoraConfig(**{**fields, **settings}))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name or "trainable_tokens" in name:
                parameter += 0.2 * torch.randn_like(parameter)
    made.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()  # peft's
    (folder / "adapter.json").write_text(
        json.dumps({"base": asdict(find_base(ModelConfig.model_validate({"from": str(base)})))})
    )
    for name in text(tokenizer_files):
        shutil.copy(tokenizer_files / name, folder / name)
    bare.generation_config.save_pretrained(folder)
    return folder


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of peft, which uses a deprecated name of transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def directory(folder: Path, made: Any, tokenizer_files: Path) -> Path:
    """A model directory as `save_pretrained` writes it."""
    made.save_pretrained(folder)
    for name in text(tokenizer_files):
        shutil.copy(tokenizer_files / name, folder / name)
    return folder


def logits(made: Any, rows: int = 300) -> torch.Tensor:
    """What a model computes for fixed ids, (2, 12, V)."""
    ids = (torch.arange(24).reshape(2, 12) * 17 + 5) % rows
    with torch.no_grad():
        found: torch.Tensor = made(ids).logits
    return found


def given(server: Server, folder: Path, words: list[str]) -> str:
    """What a command of llmtrain, given in a folder, prints; it must end with 0."""
    assert words[0] == "llmtrain"
    return called(server, folder, "command", *words[1:])


def called(server: Server, folder: Path, function: str, *words: str) -> str:
    """What a function of this module, called in a fork of the server, prints."""
    out = folder / "printed.txt"
    call = ["call", "helpers.used", function, str(out), *words]
    codes = server.run(call, 1, folder, {"PYTHONPATH": str(ROOT)})
    assert codes == [0], f"{words}\n{(folder / 'output.txt').read_text()}"
    return out.read_text()


def command(output: str, *arguments: str) -> None:
    """Give a command of llmtrain in a process of the rank server; its stdout goes to a file."""
    from llmtrain.cli.main import main

    _into(output, lambda: main(arguments))


def program(output: str, file: str) -> None:
    """Run a file as a program in a process of the rank server; its stdout goes to a file."""
    _into(output, lambda: runpy.run_path(file, run_name="__main__"))


def _into(output: str, work: Callable[[], object]) -> None:
    code = 0
    with Path(output).open("w", encoding="utf-8") as file:
        sys.stdout = file
        try:
            work()
        except SystemExit as ended:
            code = int(ended.code or 0)
    os._exit(code)
