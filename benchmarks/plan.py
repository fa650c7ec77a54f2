"""What does the planner choose for four models, and does its speed predict published runs?

Arithmetic alone. Llama's kind of models, 512 blocks a step of 1,024 (124 M), 2,048 (1 B) and 8,192
tokens, bf16, the rest on `auto`. Of a published run the smaller number of GPUs gives the share of
the peak, the larger is predicted; points are percent of the first. Two constants were chosen while
looking at these runs: they prove nothing for other machines.
"""

import sys
from collections.abc import Iterator
from typing import Any

from harness import ROOT, Bench, llama, main

from llmtrain.config.schema import Config
from llmtrain.distributed.plan.memory import Hardware
from llmtrain.distributed.plan.speed import device_by_memory
from llmtrain.tools.plan import plan_on
from llmtrain.training.start.planning import describe

GIB = 2**30
# A Llama's hidden, blocks, heads, MLP and vocabulary; its key-value heads; whether its embeddings
# are tied; tokens of a block.
MODELS = {
    "124 M": ((768, 12, 12, 2048, 50_257), 12, True, 1024),
    "1 B": ((2048, 22, 32, 5632, 32_000), 4, False, 2048),
    "8 B": ((4096, 32, 32, 14336, 128_256), 8, False, 8192),
    "70 B": ((8192, 80, 64, 28672, 128_256), 8, False, 8192),
}
SIZES = [(devices, gib, 1) for gib in (24, 80, 141) for devices in (1, 2, 8)]
PLACES = {"124 M": SIZES, "1 B": SIZES, "8 B": SIZES, "70 B": [(8, 80, 8)]}


def planned(name: str) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Yield (place, tokens a second and device, plan): everything on auto, 512 blocks a step."""
    shape, kv, tied, seq_len = MODELS[name]
    model = {"model_type": "llama", **llama(*shape, seq_len)}
    model |= {"num_key_value_heads": kv, "tie_word_embeddings": tied}
    asked = Config.model_validate(
        {
            "model": {"config": model, "tokenizer": "sample"},
            "data": {"sources": [{"path": "sample"}], "seq_len": seq_len},
            "training": {"steps": 1000, "global_batch_size": 512},
        }
    )
    described = None
    for devices, gib, nodes in PLACES[name]:
        hardware = Hardware(gib * GIB, None, devices, nodes, device_by_memory(gib))
        described = described or describe(asked, hardware)
        plan = plan_on(asked, described, hardware, assumed=True)
        assert plan.chosen is not None
        place = f"{f'{nodes} × ' if nodes > 1 else ''}{devices} × {gib} GiB"
        yield place, (plan.chosen.tokens_per_second or 0) / hardware.devices, plan.to_json()


def plans(bench: Bench) -> None:
    for name in list(MODELS)[: bench.sizes.models]:
        for place, speed, plan in planned(name):
            more = {"model": name, "place": place, "plan": plan}
            bench.say(f"{name} on {place}", speed, "tokens/s a device", **more)


def scaling(bench: Bench) -> None:
    sys.path.append(str(ROOT / "tests"))  # which hold the predictions, too
    from helpers.published import MISSES, ROWS, error, predicted

    for row in (*ROWS, *MISSES):
        more: dict[str, Any] = {"gpu": row.device, "gpus": row.gpus, "miss": row in MISSES}
        more |= {"predicted": predicted(row), "published": row.published[1]}
        bench.say(f"{row.source}, {row.device}", error(row), "points", **more)


if __name__ == "__main__":
    main(__doc__, {"plans": plans, "scaling": scaling}, {"models": (4, 1)}, pinned=False)
