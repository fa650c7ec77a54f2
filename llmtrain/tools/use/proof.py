"""The proof of an export: another process loads it, and computes the loss of the run's own model.

    this process    8 blocks of the run's held-out set ─► stdin of this module as a program
    the other one   loads the run's model, then the export; prints both losses

    {"models": […], "ids": [[…]], "labels": [[…]], "state": {…}} ─► [loss, …]

The other process loads models as anybody would, and needs the memory of one. Whole models are
loaded by transformers and nothing else. Adapters are put by peft on the model that they name, which
is held as `state`, of the checkpoint, says. Its arithmetic is fp32, so only what was written can
make a difference.

An export that was proved may be uploaded, to a private repository of the Hub, with the token of the
environment.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from torch.nn import functional as F
from transformers import AutoConfig, PreTrainedModel

from llmtrain.data import heldout
from llmtrain.data.manifest import glance
from llmtrain.errors import Problem, RunError, UserError
from llmtrain.model.scorer import auto_class, is_scorer
from llmtrain.model.untrusted import ADAPTER_CONFIG
from llmtrain.rundir import contents
from llmtrain.text import first_line
from llmtrain.tools.use.target import Target, refusals
from llmtrain.types import NOT_TRAINED, JsonObject

_BLOCKS = 8
_MADE_UP = (2, 32)  # blocks and positions where a run held nothing out
# Nats a token, by dtype: weights of 16 bits are rounded, those of 32 are not.
_BOUNDS = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 1e-2}


@dataclass(frozen=True, slots=True)
class Losses:
    """What the run's model and the export compute of the same blocks.

    measure: loss, in nats a token; or score, the mean of the blocks' by a model that scores
    """

    run: float
    export: float
    measure: str = "loss"


def compare(target: Target, exported: Path, dtype: str) -> Losses:
    """Compare an export with the checkpoint that it was made of.

    Raises RunError 1 if the losses differ by more than the bound of the dtype, or it does not load.
    """
    models = [str(target.directory.absolute()), str(exported.absolute())]
    state = {key: target.state.get(key) for key in ("config", "auto")}
    body = {"models": models, "state": state, **_blocks(target)}
    command = [sys.executable, "-m", "llmtrain.tools.use.proof"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        command, input=json.dumps(body), capture_output=True, text=True, env=env, check=False
    )
    remedy = f"{exported} is left as it is, to be looked at"
    if done.returncode:
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RunError(f"the export cannot be loaded again: {message}", 1, remedy)
    run, export = json.loads(done.stdout.splitlines()[-1])
    measure = "score" if target.preference.scores else "loss"
    if not abs(run - export) <= _BOUNDS[dtype]:
        text = f"the export computes another {measure} than the run's: {export} instead of {run}"
        raise RunError(text, 1, remedy)
    return Losses(run, export, measure)


def _blocks(target: Target) -> JsonObject:
    """Return ids and labels of blocks of the run's held-out set; made-up ones if it has none."""
    held = heldout.load(target.run_dir / contents.HELDOUT) if target.run_dir else None
    if held is None or target.run_dir is None:
        rows, length = _MADE_UP
        ids = [[7 * row + step for step in range(length + 1)] for row in range(rows)]
        return {"ids": [row[:-1] for row in ids], "labels": [row[1:] for row in ids]}
    seq_len = glance(target.run_dir / contents.MANIFEST)["seq_len"]
    blocks = [held.block(g, seq_len) for g in range(min(_BLOCKS, held.num_blocks(seq_len)))]
    return {
        "ids": [ids[:-1].tolist() for ids, _, _ in blocks],
        "labels": [labels.tolist() for _, labels, _ in blocks],
    }


def main() -> None:
    """Read models and blocks from stdin, print the loss of each model as one line of JSON."""
    asked = json.load(sys.stdin)
    losses = [_loss(Path(path), asked) for path in asked["models"]]
    sys.stdout.write(f"{json.dumps(losses)}\n")


def _loss(directory: Path, asked: JsonObject) -> float:
    """Return the mean loss of a model on the blocks, in nats, or its mean score of them.

    The model is gone from memory then.
    """
    model, total, count = _load(directory, asked["state"]), 0.0, 0
    with torch.no_grad():
        for row, targets in zip(asked["ids"], asked["labels"], strict=True):
            logits = model(torch.tensor([row]), use_cache=False).logits[0]
            if is_scorer(model.config):
                total, count = total + float(logits), count + 1
                continue
            wanted = torch.tensor(targets)
            loss = F.cross_entropy(logits, wanted, ignore_index=NOT_TRAINED, reduction="sum")
            total += float(loss)
            count += int((wanted != NOT_TRAINED).sum())
    return total / max(1, count)


def _load(directory: Path, state: JsonObject) -> PreTrainedModel:
    if (directory / ADAPTER_CONFIG).is_file():
        from llmtrain.tools.use.load import open_model

        return open_model(Target(str(directory), directory, None, state)).model
    made = auto_class(AutoConfig.from_pretrained(directory, trust_remote_code=False))
    model: PreTrainedModel = made.from_pretrained(
        directory, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    return model.eval()


if __name__ == "__main__":
    main()


KEY = "--push"
_TOKEN = "HF_TOKEN"


def check_repository(name: str) -> None:
    """Raise UserError if there is no token, the name is not a Hub id, or the repository is public.

    It asks the Hub, before anything is written. A token in a file of the Hub's client is not used.
    """
    if not os.environ.get(_TOKEN):
        remedy = f"export {_TOKEN}=…, a token that may write"
        raise UserError(Problem(KEY, name, f"a token in {_TOKEN}", remedy))
    try:
        private = _api().model_info(name).private
    except RepositoryNotFoundError:
        return
    except refusals() as error:
        raise UserError(Problem(KEY, name, _expected(error))) from error
    if not private:
        raise UserError(Problem(KEY, name, "a private repository, or one that does not exist yet"))


def upload(directory: Path, name: str) -> str:
    """Make the repository if it does not exist, upload a directory, and return the address.

    Raises UserError if the Hub refuses; the directory stays as it is.
    """
    try:
        api = _api()
        made = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=directory)
    except refusals() as error:
        remedy = f"the export is complete: hf upload {name} {directory} uploads it"
        raise UserError(Problem(KEY, name, _expected(error), remedy)) from error
    return str(made)


def _api() -> HfApi:
    return HfApi(token=os.environ[_TOKEN])


def _expected(error: Exception) -> str:
    return f"a repository that this token may write to: {first_line(error)}"
