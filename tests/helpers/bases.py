"""Small models to begin with: directories as transformers saves them, with a tokenizer."""

import importlib.resources
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPE |= {"intermediate_size": 64}
ENTRIES = 2048  # of the sample's tokenizer


def small_fields(hidden: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """Fields of the config of a small model, and more of them."""
    small = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**small, "intermediate_size": 3 * hidden // 2, **more}


def save_base(folder: Path, rows: int = ENTRIES, seed: int = 3, **fields: Any) -> Path:
    """A Llama with random weights, and the sample's tokenizer."""
    torch.manual_seed(seed)
    config = LlamaConfig(**(SHAPE | {"tie_word_embeddings": True} | fields), vocab_size=rows)
    LlamaForCausalLM(config).save_pretrained(folder)
    return save_tokenizer(folder)


def save_tokenizer(folder: Path, more: int = 0) -> Path:
    """The sample's tokenizer, with this many more special tokens."""
    sample = importlib.resources.files("llmtrain.data") / "sample"
    with importlib.resources.as_file(sample) as found:
        tokenizer = AutoTokenizer.from_pretrained(found, trust_remote_code=False)
    tokenizer.add_tokens([f"<|more-{n}|>" for n in range(more)], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder
