"""Write docs/reference/results.md out of the results of the benchmarks and their docstrings.

    python scripts/results.py

A part is told by the rows of its newest commit: those with a goal, the row to which they belong,
and of some units what they are compared with. A rehearsal on a CPU is no result of a GPU.
"""

import ast
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "results.md"
HEAD = """\
# Results

What was measured, on what, and how to measure it again. `python scripts/results.py` writes this
page; every row, with the load of the machine at its time, is in `benchmarks/results/`. A program
says more with `--help`, and is tried out with `--quick`. A goal that was not met is marked. Unless
a section says otherwise: {machine}.
"""
SECTIONS = {  # program → title, what its command needs, units that are shown without a goal
    "loop": ("The loop", "", ["ms"]),
    "head": ("Head and loss", "", []),
    "defaults": (
        "Articles to trained tokens",
        " --data DIR --tokenizer DIR --trl PYTHON",
        ["tokens/CPU s"],
    ),
    "finetune": ("Fine-tuning", " --shared DIR --trl PYTHON", []),
    "preference": ("Preferences", " --shared DIR --trl PYTHON", []),
    "threads": ("Threads", "", []),
    "data": ("Data", " --data DIR --tokenizer DIR", ["tokens/s"]),
    "checkpoint": ("Checkpoints", "", ["GB/s"]),
    "parallel": ("Models in parts", "", ["B"]),
    "same_bits": ("One hash", "", []),
    "deaths": ("Machines that die", "", []),
    "scaling": ("Growth", "", []),
    "convergence": ("Convergence", " --data DIR", ["nats"]),
    "speedrun": ("Speedrun", " --data DIR --record muon", []),
    "report": ("Reports", " --quickstart runs/quickstart", []),
    "plan": ("Figures of the plan", "", ["points"]),
    "gpu": ("One GPU", "", ["tokens/s"]),
}
NOTES = {
    "defaults": "DIR: parquet files with a column `text`, the files of GPT-2's tokenizer.",
    "data": "On English Wikipedia of 2014, 95 MB of text. Beside other work on both cores (load 4 "
    "to 6) waiting was 4.4 % of the step, and opening 48 lanes with bestfit took 1.0 to 1.2 s.",
    "deaths": "An hour with 60 deaths at f152f8be (`benchmarks/results/deaths_hour.json`): goodput "
    "0.830, and 8.6, 7.2 and 11.5 s in the other rows. Each start read the whole record then, so "
    "that it took 1.7 s at first and 5 s behind 60,000 steps. Now it reads the newest of them.",
    "speedrun": "Target 12, stretch 16 times fewer. "
    "[`muon`](../../benchmarks/speedruns/muon.yaml): one layer, 230 steps of 8 × 256 tokens, Muon, "
    "bf16. On 2 such cores without AVX-512, in fp32, it took 164 CPU seconds, 11.4 times fewer. A "
    "new record is a config beside it. The articles are `wikipedia/20140304.en`.",
    "plan": "A cell is the strategy (c: all activations are recomputed, s: some), micro-batch × "
    "accumulation and tokens a second and device.",
}
UNMEASURED = """\
Not measured: no GPU. The goals on one H200:

|what|goal|
|---|---|
|tokens/s, floor, target, stretch: 124M, 1,024 tokens a block|420,000, 463,000, 500,000|
|Llama 1B, 2,048 tokens|52,000, 60,000, 66,000|
|350M, 1,024 tokens|160,000, 185,000, 200,000|
|1.5B, 1,024 tokens|45,000, 49,000, 52,000|
|a step over the bare loop's with the same parts|≤ 1.01 ×|
|waits for the device in 20 steps|0|
|tokens/s over `Trainer(bf16=True)`; over its `torch_compile=True`|≥ 1.3; ≥ 1.15 ×|
|1.5B: training held up by a save; torch.save over it|≤ 1 s; ≥ 10 ×|
|`head.py --device cuda`, V 128,256, 16 k tokens: memory; time|≤ 0.15; ≤ 1.10 ×|
"""
TESTED = """
## What tests hold instead

- Every strategy trains what a loop of torch and transformers alone trains: losses within 1e-5 in
  fp32 and 2e-2 in bf16, on 1 to 4 processes, whatever is masked, tied, frozen, odd or recomputed
  (`tests/distributed/test_sharding.py`, `tests/distributed/test_zero.py`).
- Every strategy on 1, 2 or 3 processes reads what any has written, writes the same bytes again, and
  goes on within 1e-5 (`tests/distributed/test_portability.py`).
- Help, completion and a wrong config import nothing heavy (`tests/unit/cli/test_main.py`).
"""
Row = dict[str, Any]


def page(results: Path) -> str:
    """Return the whole page."""
    files = {name: newest(results / f"{name}.json") for name in SECTIONS}
    machines = [machine(row) for rows in files.values() for row in rows]
    usual = max(set(machines), key=machines.count, default="")
    sections = [section(name, rows, usual) for name, rows in files.items()]
    return "".join([HEAD.format(machine=usual), *sections, TESTED])


def newest(path: Path) -> list[Row]:
    """Return the rows of each part's newest commit; none without a file."""
    text = path.read_text("utf-8") if path.is_file() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    last = {row.get("part"): row.get("git") for row in rows}
    return [row for row in rows if row.get("git") == last[row.get("part")]]


def machine(row: Row) -> str:
    """Return what a row was measured on."""
    device = f"{row['device']}, " if row.get("device") not in (None, "cpu") else ""
    cpu = f" ({row['cpu']})" if "cpu" in row else ""
    return f"{device}{row['cpus']} cores{cpu}, {row['machine']}, torch {row['torch']}"


def section(name: str, rows: list[Row], usual: str) -> str:
    """Return what was measured by a program, and on what, where that is not as usual."""
    title, needed, beside = SECTIONS[name]
    program = ROOT / "benchmarks" / f"{name}.py"
    doc = ast.get_docstring(ast.parse(program.read_text("utf-8"))) or ""
    answer = doc.partition("\n\n")[2]  # behind the question
    command = f"python benchmarks/{name}.py{needed} --json benchmarks/results/{name}.json"
    note = f"{NOTES[name]}\n\n" if name in NOTES else ""
    head = f"\n## {title}\n\n{answer}\n\n```bash\n{command}\n```\n\n{note}"
    if name == "gpu":
        rows = [row for row in rows if row.get("device") not in (None, "cpu")]
    if not rows:
        return head + (UNMEASURED if name == "gpu" else "Not measured.\n")
    if name == "plan":
        head += choices([row for row in rows if row["part"] == "plans"])
        rows = [row for row in rows if row["part"] == "scaling"]
    else:
        head += origin(rows, usual)
    return f"{head}|what|figure|goal|\n|---|---|---|\n{''.join(map(line, shown(rows, beside)))}"


def shown(rows: list[Row], beside: list[str]) -> list[Row]:
    """Return the rows that stand on the page. Of several sizes in MiB it is the worst."""
    found: dict[tuple[str, str], Row] = {}
    heading = rows[0]
    for row in rows:
        inside = row["name"].startswith("  ")
        heading = heading if inside else row
        if not (row["goal"] or (row["unit"] in beside and not inside)):
            continue
        found.setdefault((heading["name"], heading["name"]), heading)
        if "MiB" in row["name"]:
            del found[row["name"], row["name"]]
            key = ("", re.sub(r"[\d,]+ MiB", "", row["name"]))
        else:
            key = (heading["name"], row["name"])
        if key not in found or row["figure"] > found[key]["figure"]:
            found[key] = row
    return list(found.values())


def origin(rows: list[Row], usual: str) -> str:
    """Return when, at which commit and under which load rows were measured."""
    dates = sorted({row["date"] for row in rows if "date" in row})
    commits = sorted({row["git"] for row in rows if row.get("git")})
    loads = [row["load"] for row in rows if row.get("load") is not None]
    said = [" and ".join(dates)] if dates else []
    said += [f"at {', '.join(commits)}"] if commits else []
    said += [f"load {min(loads):.1f} to {max(loads):.1f}"] if loads else []
    return f"Measured: {'; '.join([*said, *sorted({machine(row) for row in rows} - {usual})])}.\n\n"


def line(row: Row) -> str:
    """Return the line of a row."""
    name = row["name"].replace("  ", "— ", 1) if row["name"].startswith("  ") else row["name"]
    shares = [f"{key} {row[key]:.1%}" for key in ("mfu", "mfu_causal") if row.get(key)]
    notes = [*shares, *([row["note"]] if row.get("note") else [])]
    name += f" ({'; '.join(notes)})" if notes else ""
    figure, missed = row["figure"], " **missed**" if row["met"] is False else ""
    spelled = "not measured"
    if figure is not None:
        spelled = f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"
        spelled += f" {row['unit']}" if row["unit"] else ""
    return f"|{name}|{spelled}|{row['goal']}{missed}|\n"


def choices(rows: list[Row]) -> str:
    """Return what is chosen for each model on each place."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        (one,) = (some for some in row["plan"]["strategies"] if some["chosen"])
        mark = {"none": "", "selective": " s", "full": " c"}[one["activation_checkpointing"]]
        split = f"{one['micro_batch_size']} × {one['accumulation']}"
        text = f"{one['name']}{mark}, {split}: {row['figure']:,.0f}"
        cells.setdefault(row["place"], {})[row["model"]] = text
    models = list(dict.fromkeys(model for place in cells.values() for model in place))
    lines = [f"|devices|{'|'.join(models)}|\n|{'---|' * (len(models) + 1)}\n"]
    for place, found in cells.items():
        lines.append(f"|{place}|{'|'.join(found.get(model, '') for model in models)}|\n")
    return "".join([*lines, "\n"])


if __name__ == "__main__":
    PAGE.write_text(page(ROOT / "benchmarks" / "results"), "utf-8")
