"""Models of the updates on several ranks: tied, untied, of odd shapes, with parts rarely used."""

from types import SimpleNamespace
from typing import Any

import torch
from helpers import uneven
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from llmtrain.config.schema import ModelConfig
from llmtrain.model import build as model_building
from llmtrain.model.base import Base


class Block(nn.Module):
    """A residual block of which one part is used for some rows alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 5)
        self.down = nn.Linear(5, width, bias=False)
        self.rare = nn.Linear(width, width, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        hidden = hidden + self.down(torch.tanh(self.up(hidden * self.scale.to(hidden.dtype))))
        if chosen.any():
            hidden = hidden + chosen[:, None, None].to(hidden.dtype) * self.rare(hidden)
        return hidden


class Rare(nn.Module):
    """A causal model whose blocks leave parameters unused where no row wants them."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            tie_word_embeddings=False, get_text_config=SimpleNamespace, architectures=None
        )
        self.embed = nn.Embedding(uneven.VOCABULARY, 7)
        self.layers = nn.ModuleList(Block(7) for _ in range(2))
        self.head = nn.Linear(7, uneven.VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        hidden = self.embed(input_ids)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, input_ids[:, 0] % 4 == index)
        return SimpleNamespace(logits=self.head(hidden))

    @property
    def base_model(self) -> nn.Module:
        return self

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head


SHAPES: dict[str, dict[str, Any]] = {
    "tied": {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2},
    "untied": {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2},
    # The feed-forward part has matrices of one row or one column.
    "thin": {"hidden_size": 16, "intermediate_size": 1, "num_attention_heads": 2},
    # Three rows for four ranks (mlp), two (keys, values): some ranks hold nothing of them.
    "odd": {
        "hidden_size": 18,
        "intermediate_size": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "vocab_size": 67,
    },
}


def build(kind: str, frozen: tuple[str, ...] = (), seed: int = 3) -> Any:
    torch.manual_seed(seed)
    if kind == "rare":
        model: Any = Rare()
    else:
        shape = {"vocab_size": uneven.VOCABULARY, "num_hidden_layers": 2, **SHAPES[kind]}
        model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=kind == "tied", **shape))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)) if frozen else True)
    return model.train()


def build_from(directory: str) -> Any:
    asked = ModelConfig(**{"from": directory})
    base = Base(directory, None, None)
    return model_building.build(AutoConfig.from_pretrained(directory), asked, base)
