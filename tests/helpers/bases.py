"""Small models to begin with: directories as transformers saves them, with a tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SAMPLE = Path(__file__).parents[2] / "llmtrain" / "data" / "sample"
ENTRIES = 2048  # of the sample's tokenizer


def save_base(folder: Path, seed: int = 3) -> Path:
    """A tied Llama with random weights, and the sample's tokenizer."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=ENTRIES,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SAMPLE / name, folder / name)
    return folder
