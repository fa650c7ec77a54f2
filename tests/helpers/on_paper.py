"""Models and devices as plain values: what plans are made of, written down by hand.

    h hidden · f MLP · q, k = heads, kv heads × head size · a heads · per token and layer

The formulas of saved bytes are for Llama with torch's attention; they were compared with real runs.
"""

from llmtrain.distributed.plan.memory import Hardware, Work
from llmtrain.types import WHOLE, ModelCut, ModelShape, ParameterShape, Saved

GIB = 2**30


def llama(
    h: int, f: int, layers: int, heads: int, kv: int, vocabulary: int, *, tied: bool = False
) -> ModelShape:
    """Llama without biases, in the order of its parameters."""
    k = h // heads * kv

    block = [(h, h), (k, h), (k, h), (h, h), (f, h), (f, h), (h, f), (h,), (h,)]
    axes = [0, 0, 0, 1, 0, 0, 1, None, None]
    parameters = [ParameterShape((vocabulary, h), True, False, None, used=float(tied), axis=0)]
    for number in range(layers):
        parameters += [
            ParameterShape(one, True, len(one) == 2, number, used=len(one) - 1.0, axis=axis)
            for one, axis in zip(block, axes, strict=True)
        ]
    parameters.append(ParameterShape((h,), True, False, None, used=0.0))
    if not tied:
        parameters.append(ParameterShape((vocabulary, h), True, True, None, axis=0))
    return ModelShape(
        parameters=tuple(parameters),
        hidden=h,
        vocabulary=vocabulary,
        embedding=vocabulary * h,
        head=vocabulary * h,
        tied=tied,
        blocks=layers,
        block_class="LlamaDecoderLayer",
        attention=layers * h,
        buffers=0,
    )


class LlamaCount:
    """`Count` by formula for one sequence. kv: number of key and value heads."""

    def __init__(self, h: int, f: int, layers: int, heads: int, kv: int, seq_len: int) -> None:
        self.h, self.f, self.layers, self.a, self.seq_len = h, f, layers, heads, seq_len
        self.k = h // heads * kv
        self.cast = 2 * layers * (2 * h * h + 2 * self.k * h + 3 * f * h)

    def __call__(self, arithmetic: str, checkpointing: str, tensor: int = 1) -> Saved:
        h, f, q, k, a = self.h, *(size / tensor for size in (self.f, self.h, self.k, self.a))
        wide = 2 if arithmetic == "bf16" else 4
        whole = {
            "fp32": 4 * (6 * h + 2 * q + 2 * k + 4 * f) + 4 * a + 8,
            "bf16": 16 * h + 2 * (2 * q + 2 * k + 4 * f) + 4 * a + 8,
            "autocast": 26 * h + 2 * (2 * q + 2 * k + 4 * f) + 4 * a + 8,
        }[arithmetic]
        products = (4 if arithmetic == "fp32" else 2) * (2 * q + 2 * k + 2 * h + 2 * f) + 4 * a
        token = {"none": whole, "selective": wide * h + products, "full": wide * h}[checkpointing]
        again = 0 if checkpointing == "none" else whole * self.seq_len
        casts = self.cast // tensor if arithmetic == "autocast" else 0
        once = ((3 * wide) if wide == 2 else 8) * h + 12
        blocks = int(self.layers * token * self.seq_len)
        return Saved(blocks, once * self.seq_len, int(again), casts)


def work(seq_len: int, global_batch_size: int, **changed: object) -> Work:
    """bf16 with everything else on auto."""
    values = {
        "micro_batch_size": None,
        "precision": "bf16",
        "activation_checkpointing": None,
        "fsdp_sync": None,
        "most_tokens": 65_536,
    }
    return Work(seq_len, global_batch_size, **(values | changed))


def gpus(
    count: int,
    gib: float,
    *,
    nodes: int = 1,
    device: str | None = None,
    host: float | None = None,
    cut: ModelCut = WHOLE,
) -> Hardware:
    """Nodes with so many devices of so many GiB."""
    host_bytes = None if host is None else int(host * GIB)
    return Hardware(int(gib * GIB), host_bytes, count, nodes, device, cut=cut)
