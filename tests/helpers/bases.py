"""A base to train adapters on: a directory of weights and a tokenizer, as from the Hub."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain.model.tokenizer import special_tokens

SAMPLE = Path(__file__).parents[2] / "llmtrain" / "data" / "sample"


def write_base(folder: Path, seed: int = 1) -> Path:
    """A tied Llama of 0.1 M parameters with the tokenizer of the built-in sample."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SAMPLE / name, folder / name)
    tokens = special_tokens(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokens.length,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        bos_token_id=tokens.bos,
        eos_token_id=tokens.eos,
        pad_token_id=tokens.pad,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
