"""Which checkpoint goes where: every strategy and number of processes reads what any has written.

    python benchmarks/portability.py [--json FILE] [--markdown FILE]

The sweep of `tests/distributed/test_portability.py`, with its figures: {DDP, FSDP2, ZeRO-2, ZeRO-3}
× itself × {1, 2, 3 processes}, in fp32 and in bf16. A form writes a checkpoint after 3 steps; each
form loads each of them and saves it at once (are the files the same bytes?), and in fp32 trains 20
steps more, which are compared with those of the writer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
from helpers.portability import AFTER, BEFORE, Pair, forms, whole
from helpers.ranks import Server

HEAD = f"""\
# Which checkpoint goes where

Written by `python benchmarks/portability.py`. A form is a strategy and a number of processes. Each
writes a checkpoint after {BEFORE} steps; each loads each of them, saves it at once and trains
{AFTER} steps more. The model is small and awkward to split: tied and frozen weights, sizes that
nothing divides, a parameter of one element, buffers. No dropout, gradients are clipped.

"""


def markdown(pairs: list[Pair]) -> str:
    """The page of the documentation."""
    trained = [one for one in pairs if one.worst_loss is not None]
    same = sum(one.same_files for one in pairs)
    bf16 = len(pairs) - len(trained)
    found = {(one.writer, one.reader): one for one in trained}
    names = [form.name for form in forms()]
    lines = [
        f"Weight and optimizer files are the same bytes behind load and save in {same} of",
        f"{len(pairs)} pairs: {len(trained)} in fp32, {bf16} in bf16, where what is computed with",
        "is made from the fp32 weights of the checkpoint.",
        "",
        f"The table is fp32: the largest difference of a loss over the {AFTER} steps, in",
        "millionths, from the straight run of the form that wrote the checkpoint. `=`: the same",
        "bits, losses, norms and files at the end. 10 is what is promised.",
        "",
        f"| written by ↓ read by → | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for writer in names:
        cells = [_cell(found[writer, reader]) for reader in names]
        lines.append(f"| {writer} | {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n"


def _cell(pair: Pair) -> str:
    return "=" if pair.same_bits else f"{1e6 * (pair.worst_loss or 0):.2f}"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    server = Server()
    with tempfile.TemporaryDirectory() as name:
        pairs = whole(server, Path(name))
    server.close()
    page = markdown(pairs)
    print(page)
    result = {
        "machine": f"{os.cpu_count()} × {platform.processor() or platform.machine()}, no GPU",
        "torch": torch.__version__,
        "pairs": [asdict(one) for one in pairs],
    }
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    if asked.markdown:
        asked.markdown.write_text(page)


if __name__ == "__main__":
    main()
