"""The program of which `llmtrain eject` writes the parts that a config needs. It is not imported.

Lines between `#: if NAME` and `#: else` or `#: end` are written where NAME holds of the config, and
for `#: if not NAME` where it does not. Of the definitions only those that `main` needs are written;
the values of the constants become those of the config.
"""

import argparse
import json
import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

TOKENS = Path(__file__).with_suffix(".safetensors")
SEED = 42
STREAM = 0  # of SEED, for what a step draws
THREADS = 1  # others may round sums otherwise

CONFIG = {"model_type": "llama"}
WEIGHTS = "a directory or Hub id"
REVISION = "main"
ROWS = 512  # of the embeddings, one for each token
FROZEN: list[str] = []  # patterns of parameters that are not trained

TARGETS: list[str] = []  # ends of the names of the layers that get an adapter
RANK = 16
SCALING = 2.0  # of what an adapter adds
LORA_DROPOUT = 0.0
NEW_TOKENS: list[int] = []  # whose embeddings are trained beside the adapters

STEPS = 100  # of the whole run: the learning rate depends on them, the tokens may be of fewer
WARMUP = 10
DECAY = 20  # last steps, in which the rate falls
MICRO_BATCH = 8  # rows of a forward; their gradients add up to that of a step

LEARNING_RATE = 3e-4
MIN_LR_RATIO = 0.1  # the last rate as a share of the peak
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
# Pattern of names, their rate, their decay; None: as for all others. The first match counts.
GROUPS: list[tuple[str, float | None, float | None]] = []
MAX_NORM = 1.0  # larger gradients are scaled down to it

NOT_TRAINED = -100  # the label of a position without a loss
CHUNK = 256  # rows whose logits are in memory at once


def main() -> None:
    """Train from the first step, or from a checkpoint, to the last step that has tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--checkpoint", type=Path, help="of llmtrain: start behind its step")
    parser.add_argument("--save", type=Path, help="a new directory for the weights")
    asked = parser.parse_args()
    torch.set_num_threads(THREADS)
    #: if deterministic
    torch.use_deterministic_algorithms(True)
    #: end
    tokens = load_file(TOKENS)  # each (steps, rows, positions) int32
    model = build_model()
    optimizers = make_optimizers(model)
    done = read_checkpoint(asked.checkpoint, model, optimizers) if asked.checkpoint else 0
    if done >= (last := len(tokens["ids"])):
        raise SystemExit(f"{TOKENS.name} has the tokens of {last} steps, and {done} are made")
    for step in range(done + 1, last + 1):
        batch = {name: every[step - 1].long() for name, every in tokens.items()}
        loss, norm = update(model, optimizers, batch, step)
        print(json.dumps({"step": step, "loss": loss, "grad_norm": norm}), flush=True)
    if asked.save:
        save_weights(model, asked.save)


def update(
    model: PreTrainedModel,
    optimizers: list[torch.optim.Optimizer],
    batch: dict[str, Tensor],
    step: int,
) -> tuple[float, float]:
    """Make one update; return the loss and the norm of its gradient. batch: each (rows, T) int64"""
    #: if dropout
    torch.manual_seed(seed_of(step))  # so dropout depends on nothing before the step
    #: end
    # The loss of a step is the mean over its trained tokens, however these lie in micro-batches.
    trained = int((batch["labels"] != NOT_TRAINED).sum())
    scale, summed = torch.tensor(1 / trained), 0.0
    for first in range(0, len(batch["ids"]), MICRO_BATCH):
        rows = {name: one[first : first + MICRO_BATCH] for name, one in batch.items()}
        loss = summed_loss(model, rows)
        loss.backward(scale)
        summed += loss.item()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    # Squares are summed in fp64, so that the order does not show in the fp32 norm.
    norm = torch.tensor(math.sqrt(sum(one.double().square().sum().item() for one in gradients)))
    if not math.isfinite(summed) or not norm.isfinite():
        raise SystemExit(f"step {step}: the loss is {summed / trained}, the norm {norm}")
    #: if clip
    factor = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
    #: if muon
    for gradient in gradients:
        gradient.mul_(factor)
    #: else
    # The fused kernel divides by `grad_scale` as it reads a gradient; to multiply before would
    # save nothing and round otherwise.
    optimizers[0].grad_scale = factor.reciprocal() if factor < 1 else None
    #: end
    #: end
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * rate_factor(step)
        optimizer.step()
        optimizer.zero_grad()
    return summed / trained, norm.item()


def rate_factor(step: int) -> float:
    """Return the factor on each learning rate at step 1 … STEPS: a warm-up, then the schedule."""
    if step <= WARMUP:
        return step / WARMUP
    #: if cosine
    done = (step - WARMUP) / (STEPS - WARMUP)
    return MIN_LR_RATIO + (1 - MIN_LR_RATIO) * (1 + math.cos(math.pi * done)) / 2
    #: end
    #: if linear
    done = (step - WARMUP) / (STEPS - WARMUP)
    return 1 - (1 - MIN_LR_RATIO) * done
    #: end
    #: if constant
    return 1.0
    #: end
    #: if wsd
    return 1 - (1 - MIN_LR_RATIO) * max(0, step - STEPS + DECAY) / DECAY
    #: end


def seed_of(step: int) -> int:
    """Return the seed of what a step draws: splitmix64 of the run's stream and the step."""
    word = 2**64 - 1
    z = ((STREAM ^ step) + 0x9E3779B97F4A7C15) & word
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
    return z ^ (z >> 31)


def summed_loss(model: PreTrainedModel, rows: dict[str, Tensor]) -> Tensor:
    """Return the cross-entropy of some rows in nats, summed over the trained positions: ()."""
    #: if single
    rows = without_padding(rows)
    #: end
    where = {"use_cache": False}
    #: if hidden
    where["position_ids"] = rows["positions"]  # from 0 with each document
    #: end
    #: if by_document
    flat = rows["positions"].flatten()
    ends = torch.tensor([len(flat)])
    where["cu_seq_lens_q"] = torch.cat([(flat == 0).nonzero()[:, 0], ends])
    #: end
    #: if chunked
    hidden = model.base_model(rows["ids"], **where)[0]
    head = model.get_output_embeddings()
    return ChunkedLoss.apply(hidden, head.weight, head.bias, rows["labels"])
    #: else
    logits = model(rows["ids"], **where).logits.flatten(0, 1)
    labels = rows["labels"].flatten()
    return F.cross_entropy(logits, labels, ignore_index=NOT_TRAINED, reduction="sum")
    #: end


def without_padding(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cut rows behind the longest one, rounded up to 64 positions."""
    (trained,) = (rows["labels"] != NOT_TRAINED).any(0).nonzero(as_tuple=True)
    longest = int(trained[-1]) + 1 if len(trained) else 1
    return {name: one[:, : -(-longest // 64) * 64] for name, one in rows.items()}


class ChunkedLoss(torch.autograd.Function):
    """The summed cross-entropy of a linear head, without the logits of a whole batch.

    A chunk's logits become its loss and its gradient before those of the next chunk are made. So
    the gradients are made in the forward, and the backward only scales them.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        """Return the loss, (). hidden: (B, T, h), weight: (V, h), bias: (V,), labels: (B, T)"""
        flat, targets = hidden.flatten(0, 1), labels.reshape(-1, 1)
        losses = flat.new_zeros(len(flat), 1)
        d_hidden = torch.zeros_like(flat)
        d_weight = d_bias = None
        for at in (targets[:, 0] != NOT_TRAINED).nonzero()[:, 0].split(CHUNK):
            x, target = flat[at], targets[at]
            logits = x @ weight.T
            if bias is not None:
                logits += bias
            largest, chosen = logits.amax(1, keepdim=True), logits.gather(1, target)
            p = logits.softmax(1)
            # max − log max p is logsumexp: one softmax serves the loss and its gradient.
            losses[at] = largest - chosen - p.amax(1, keepdim=True).log()
            p.scatter_(1, target, -1.0, reduce="add")  # now the gradient of the logits
            d_hidden[at] = p @ weight
            if ctx.needs_input_grad[1]:
                d_weight = p.T @ x if d_weight is None else d_weight.addmm_(p.T, x)
            if ctx.needs_input_grad[2]:
                d_bias = p.sum(0) if d_bias is None else d_bias + p.sum(0)
        ctx.gradients = d_hidden.view_as(hidden), d_weight, d_bias
        return losses.sum()

    @staticmethod
    def backward(ctx, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias."""
        return *(None if one is None else one * scale for one in ctx.gradients), None


def build_model() -> PreTrainedModel:
    """Return the model with the weights that the run begins with."""
    #: if new
    torch.manual_seed(SEED)  # the weights are drawn
    config = AutoConfig.for_model(**CONFIG)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    #: else
    model = AutoModelForCausalLM.from_pretrained(
        WEIGHTS,
        revision=REVISION,
        dtype=torch.float32,
        trust_remote_code=False,
        use_safetensors=True,
    )
    #: end
    #: if grown
    grow(model)
    #: end
    #: if by_document
    AttentionInterface.register("by_document", attend)
    model.set_attn_implementation("by_document")
    #: end
    #: if frozen
    for name, weight in model.named_parameters(remove_duplicate=False):
        if any(fnmatchcase(name, pattern) for pattern in FROZEN):
            weight.requires_grad = False
    #: end
    #: if lora
    torch.manual_seed(SEED)  # the adapters are drawn
    add_adapters(model)
    #: end
    model.train()
    return model


def grow(model: PreTrainedModel) -> None:
    """Add rows for new tokens to embeddings and head; each is the mean of the old ones."""
    old = {id(one.weight): one.weight.detach() for one in ends_of(model)}
    model.resize_token_embeddings(ROWS, mean_resizing=False)  # draws the new rows
    with torch.no_grad():
        for one, before in zip(ends_of(model), list(old.values()) * 2, strict=False):
            sums = torch.stack([part.double().sum(0) for part in before.split(8192)])
            one.weight[len(before) :] = (sums.sum(0) / len(before)).float()


def ends_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the embeddings and the head, which may have the same weight."""
    return [model.get_input_embeddings(), model.get_output_embeddings()]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **keywords,
) -> tuple[Tensor, None]:
    """Attend causally inside of each document: one after the other, so Σ length² and no mask.

    query, key, value: (B, heads, T, size); keywords: `cu_seq_lens_q`, where documents begin in the
    rows joined end to end, and where the last one ends. Returns (B, T, heads, size).
    """
    lengths = keywords["cu_seq_lens_q"].diff().tolist()

    def documents(heads: Tensor) -> Iterator[Tensor]:  # each (1, heads, length, size)
        for one in heads.transpose(1, 2).flatten(0, 1).split(lengths):
            yield one.transpose(0, 1)[None]

    grouped = query.shape[1] != key.shape[1]  # several queries share a key
    outs = [
        F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        for q, k, v in zip(documents(query), documents(key), documents(value), strict=True)
    ]
    joined = torch.cat([out[0].transpose(0, 1) for out in outs])
    return joined.view(query.shape[0], query.shape[2], query.shape[1], -1), None


class Adapted(nn.Module):
    """A frozen linear layer and a product of two small matrices beside it (LoRA)."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, base_layer.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))  # drawn twice, as peft does
        nn.init.zeros_(self.lora_B.weight)  # so training begins with the output of the base

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output and what the adapter adds."""
        out = self.base_layer(x)
        #: if lora_dropout
        x = F.dropout(x, LORA_DROPOUT, self.training)
        #: end
        return out + self.lora_B(self.lora_A(x)) * SCALING


class NewRows(nn.Module):
    """Embeddings, or the head tied to them, of which the rows of some tokens are trained."""

    def __init__(self, base_layer: nn.Module, rows: nn.Parameter | None = None) -> None:
        super().__init__()
        self.base_layer = base_layer
        if rows is None:
            rows = nn.Parameter(self.base_layer.weight[NEW_TOKENS])
        self.trainable_tokens_delta = rows

    @property
    def weight(self) -> Tensor:
        """All rows, those of the tokens in their places."""
        index = torch.tensor(NEW_TOKENS)
        return self.base_layer.weight.index_copy(0, index, self.trainable_tokens_delta)

    def forward(self, x: Tensor) -> Tensor:
        """Return embeddings of ids, or logits of hidden states."""
        if isinstance(self.base_layer, nn.Embedding):
            return F.embedding(x, self.weight, self.base_layer.padding_idx)
        return F.linear(x, self.weight)


def add_adapters(model: PreTrainedModel) -> None:
    """Freeze a model and put adapters beside its linear layers, in place."""
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if any(f".{name}".endswith(f".{target}") for target in TARGETS):
            model.set_submodule(name, Adapted(layer))
    #: if token_rows
    embedding, head = ends_of(model)
    rows = NewRows(embedding)
    model.set_input_embeddings(rows)
    #: if head_rows
    #: if tied
    model.set_output_embeddings(NewRows(head, rows.trainable_tokens_delta))
    #: else
    model.set_output_embeddings(NewRows(head))
    #: end
    #: end
    #: end


def make_optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Return what updates the trained weights; norms, biases and embeddings are not decayed."""
    #: if lora
    drawn = {id(one.lora_A.weight) for one in model.modules() if isinstance(one, Adapted)}
    #: else
    embeddings = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    #: end
    #: if groups
    names: dict[int, list[str]] = {}  # a tied weight has several
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    #: end
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}  # by rate and decay
    #: if muon
    matrices: dict[tuple[float, float], list[nn.Parameter]] = {}  # between embeddings and head
    ends = {*embeddings, id(model.get_output_embeddings().weight)}
    #: end
    for weight in model.parameters():
        if not weight.requires_grad:
            continue
        #: if lora
        decays = id(weight) in drawn  # B begins at zero: to decay it is to undo the adapter
        #: else
        decays = weight.ndim >= 2 and id(weight) not in embeddings
        #: end
        rate, decay = LEARNING_RATE, WEIGHT_DECAY if decays else 0.0
        #: if groups
        for pattern, own_rate, own_decay in GROUPS:
            if any(fnmatchcase(name, pattern) for name in names[id(weight)]):
                rate = rate if own_rate is None else own_rate
                decay = decay if own_decay is None else own_decay
                break
        #: end
        #: if muon
        inside = weight.ndim == 2 and min(weight.shape) > 1 and id(weight) not in ends
        (matrices if inside else groups).setdefault((rate, decay), []).append(weight)
        #: else
        groups.setdefault((rate, decay), []).append(weight)
        #: end
    #: if muon
    adamw = torch.optim.AdamW(as_torch_has_them(groups), betas=BETAS, fused=True)
    return [adamw, Muon(as_torch_has_them(matrices), {})]
    #: else
    return [torch.optim.AdamW(as_torch_has_them(groups), betas=BETAS, fused=True)]
    #: end


def as_torch_has_them(groups: dict[tuple[float, float], list[nn.Parameter]]) -> list[dict]:
    """Return groups of weights in the form that an optimizer takes."""
    return [
        {"params": weights, "lr": rate, "peak": rate, "weight_decay": decay}
        for (rate, decay), weights in groups.items()
    ]


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal: Jordan et al. 2024."""

    @torch.no_grad()
    def step(self) -> None:
        """Update all matrices."""
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault(
                    "momentum_buffer", torch.zeros_like(weight)
                )
                momentum.lerp_(weight.grad, 0.05)
                direction = orthogonal(weight.grad.lerp(momentum, 0.95))
                # An update of this size is as large as one of AdamW: one learning rate for both.
                size = 0.2 * math.sqrt(max(weight.shape))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(direction, alpha=-group["lr"] * size)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the matrix with its singular values moved to between 0.7 and 1.2."""
    tall = matrix.shape[0] > matrix.shape[1]
    result = matrix.T if tall else matrix
    result = result / result.norm().clamp(min=1e-7)
    for _ in range(5):  # a polynomial of odd powers moves them there
        square = result @ result.T
        factor = torch.addmm(square, square, square, beta=-4.775, alpha=2.0315)
        result = torch.addmm(result, factor, result, beta=3.4445)
    return result.T if tall else result


def named_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of a file of weights: a tied one once; beside adapters nothing else."""
    #: if lora
    return {
        f"base_model.model.{name}".replace(".trainable_", ".token_adapter.trainable_"): weight
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    #: else
    buffers = {name: one for name, one in model.named_buffers() if name in model.state_dict()}
    return {**dict(model.named_parameters()), **buffers}
    #: end


def read_checkpoint(
    path: Path, model: PreTrainedModel, optimizers: list[torch.optim.Optimizer]
) -> int:
    """Read weights and moments from a checkpoint of llmtrain; return the steps that it has made."""
    saved: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        saved |= load_file(file)
    state = json.loads((path / "trainer_state.json").read_text("utf-8"))
    names = {}
    with torch.no_grad():
        for name, weight in named_weights(model).items():
            weight.copy_(saved.pop(name))
            names[id(weight)] = name
    for optimizer in optimizers:
        for weight in (one for group in optimizer.param_groups for one in group["params"]):
            of = f"{names[id(weight)]}."
            moments = {
                key.removeprefix(of): one for key, one in saved.items() if key.startswith(of)
            }
            made = torch.tensor(float(state["optimizer_steps"]))
            optimizer.state[weight] = {"step": made, **moments}
    return int(state["step"])


def save_weights(model: PreTrainedModel, path: Path) -> None:
    """Write the weights to a new directory, in the format of llmtrain's checkpoints."""
    path.mkdir(parents=True)
    weights = {name: one.detach().contiguous() for name, one in named_weights(model).items()}
    #: if lora
    save_file(weights, path / "adapter_model.safetensors", {"format": "pt"})
    #: else
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(path)
    #: end


if __name__ == "__main__":
    main()
