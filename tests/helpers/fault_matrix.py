"""Every scenario of faults, what a run of the tests made of it, and the page that lists both.

The tests of a scenario carry its id in their names: `test_f14_…`, or as the id of a parameter where
one function stands for several (`[f18_inodes]`).
"""

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
PAGE = ROOT / "docs" / "reference" / "faults.md"
SWEEP = "make test-faults"


class Scenario(NamedTuple):
    """What is injected, and what must hold. same: the final weights too, bit for bit."""

    injected: str
    expected: str
    same: bool = False


_OLDER = "the partial is never read; the checkpoint before it is used"
_DAMAGED = "found, reported, renamed; the checkpoint before it is used"
_CONTINUES = "an event; training continues; the old checkpoints are whole"
SCENARIOS = {
    "F01": Scenario("`kill` at `save.mkdir`", _OLDER, True),
    "F02": Scenario("`kill` at `save.create`", _OLDER, True),
    "F03": Scenario("`kill` at `save.write`, 70 % of a rank's share written", _OLDER, True),
    "F04": Scenario("`kill` at `save.fsync`", _OLDER, True),
    "F05": Scenario("`kill` at `save.vote2`", _OLDER, True),
    "F06": Scenario("`kill` at `save.manifest`", _OLDER, True),
    "F07": Scenario("`kill` at `save.rename`, before it", _OLDER, True),
    "F08": Scenario("`kill` at `save.parentsync`", "the new checkpoint is used", True),
    "F09": Scenario("`kill` of all ranks at `save.write`; 2 and 3 processes", _OLDER, True),
    "F10": Scenario("`kill` at `load.read`, during a resume", "the next start resumes", True),
    "F11": Scenario(
        "`kill` at `retain.trash` and `retain.delete`",
        "the deletion is finished at the next start; the newest is valid",
        True,
    ),
    "F12": Scenario("`kill` in the very first save", "begins again, with an event", True),
    "F13": Scenario(
        "background: training continues while a save is slow; `kill` then",
        "the files hold the state of their step; the old one is still there",
        True,
    ),
    "F14": Scenario(
        "no room: injected, a tmpfs that is full, a limit of a file's size", _CONTINUES, True
    ),
    "F15": Scenario("no room three times in a row", "exit 74; resumes once there is room", True),
    "F16": Scenario("`eio` at `save.fsync` on rank 1", "a failed vote; the partial is gone", True),
    "F17": Scenario("a write that is `short`", "the check of sizes or coverage fails it", True),
    "F18": Scenario("no inodes left on a tmpfs", _CONTINUES, True),
    "F19": Scenario("one bit of each file of the newest, one at a time", _DAMAGED, True),
    "F20": Scenario("each file cut, one byte longer, empty, deleted", _DAMAGED, True),
    "F21": Scenario(
        "manifest missing, no JSON, another digest; a newer `format`",
        "damaged; a newer format: exit 2, left in place",
    ),
    "F22": Scenario("every checkpoint damaged", "exit 2 with each reason; nothing is deleted"),
    "F23": Scenario("checkpoints removed, metrics kept", "exit 2"),
    "F24": Scenario("a directory that rank 1 sees late", "looked for again; saved", True),
    "F25": Scenario("`ESTALE` or `EIO` at `load.read`, once and always", "read again; 74"),
    "F26": Scenario("a directory that cannot be written, at the start and later", "exit 2; as F14"),
    "F27": Scenario("two runs in one directory", "the second: exit 2, names host and pid"),
    "F28": Scenario("a lock left over: dead pid, other boot, reused pid", "taken over, event"),
    "F29": Scenario("the lock of another host, its beat moving or still", "exit 2; taken over"),
    "F30": Scenario("clocks wrong by a day and a year, times of files shuffled", "no effect", True),
    "F31": Scenario(
        "foreign `step-99999999`, `step-9`, `step-10` beside ours", "not deleted, not preferred"
    ),
    "F32": Scenario("retention while a save is in flight", "two valid ones at every moment"),
    "F33": Scenario("the best checkpoint deleted by hand", "an event; the run ends well"),
    "F34": Scenario("`kill -9` of the launcher", "ranks end with a checkpoint", True),
    "F35": Scenario(
        "`kill -9` of a rank within a step; 2 and 3 processes, a real launcher",
        "the others end; `status.json` says 75",
        True,
    ),
    "F36": Scenario("a rank stopped, or hanging in `loop.micro`", "stacks with the phase; 75"),
    "F37": Scenario("a data worker killed, hanging, raising", "75, watchdog, 1, with its reason"),
    "F38": Scenario(
        "SIGTERM while loading, before step 1, within a step, a save, an evaluation",
        "exit 0 with a complete checkpoint",
        True,
    ),
    "F39": Scenario("SIGTERM to one rank, to all, 50 in a second", "one agreed stop"),
    "F40": Scenario("Ctrl-C twice; `STOP`, `SAVE`, `stop_after`", "as each of them promises"),
    "F41": Scenario("resumed on 2 → 1 → 3 → 2 processes, with kills", "same batches, losses 1e-5"),
    "F42": Scenario("DDP → FSDP2 → ZeRO-2 → ZeRO-3 → DDP", "same; files equal byte for byte"),
    "F43": Scenario("resumed with another seed, model, data or rate", "refused, with the keys"),
    "F44": Scenario("NaN on one rank, on all", "all skip the update; nothing changes"),
    "F45": Scenario("a bit of one replica's weight", "found before the next save; 75", True),
    "F46": Scenario(
        "supervised: crashes, exit 2, no progress", "finishes; not restarted; gives up"
    ),
    "F47": Scenario("resumed while a checkpoint is being copied in", "damaged, not fatal", True),
    "F48": Scenario("100 random kills in one training; 50 random faults", "ends well", True),
    "P": Scenario(
        "{DDP, FSDP2, ZeRO-2, ZeRO-3} × itself × 1, 2, 3 processes",
        "files equal byte for byte after load and save",
    ),
}


def ids(name: str) -> list[str]:
    """The scenarios of a test: those of its parameter if that has some, else of its function."""
    function, _, parameter = name.rpartition("::")[2].partition("[")
    for text in (parameter, function):
        if found := re.findall(r"(?:^|[_\-])f(\d\d)(?=[_\-\]]|$)", text):
            return [f"F{number}" for number in found]
    return ["P"] if function.startswith("test_p_") else []


def names_of_tests() -> list[str]:
    """The names of all test functions."""
    return [
        node.name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def load() -> dict[str, Any]:
    """The results of the last run that wrote them."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def result(tests: list[Mapping[str, Any]]) -> str:
    """A scenario's cell of the table."""
    if not tests:
        return "not run"
    bad = [one for one in tests if one["outcome"] == "failed"]
    skipped = [one for one in tests if one["outcome"] == "skipped"]
    if bad:
        return f"**failed**: {len(bad)} of {len(tests)}"
    if len(skipped) == len(tests):
        return f"skipped: {skipped[0]['note']}"
    count = f"passed ({len(tests) - len(skipped)})"
    return f"{count}, skipped ({len(skipped)})" if skipped else count


def page(found: Mapping[str, Any]) -> str:
    """docs/reference/faults.md."""
    rows = [
        f"| {name} | {one.injected} | {one.expected}{'; =' if one.same else ''} "
        f"| {result(found['scenarios'].get(name, []))} |"
        for name, one in SCENARIOS.items()
    ]
    machine = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
    return _TEXT.format(rows="\n".join(rows), machine=machine, sweep=SWEEP)


_TEXT = """\
# Faults

What is done to a run, and what the tests saw. This page is written by

```bash
{sweep}
```

which runs every scenario, the long sweeps too (an hour on two cores), and keeps the results in
`benchmarks/results/faults.json`. `make test-all` runs all but the sweeps.

Each scenario strikes a run of a tiny model (accumulation 2, dropout 0.1, 24 steps, a checkpoint
every 4), then gives the same command again. `=` means: the weights and the optimizer's state of
the last step are those of the uninterrupted run, bit for bit. Behind each of them no process is
left, no unfinished file, and a lock that can be taken. In brackets: how many tests.

| | injected | expected | result |
|---|---|---|---|
{rows}

On: {machine}. The faults that F48 drew, and their seeds, are in the file of results.

## Strike a run yourself

`LLMTRAIN_FAULTS` names a point of the code, conditions and an action. Never set it for a run
that you need.

```bash
LLMTRAIN_FAULTS='save.write@rank=1@bytes=70%=kill' llmtrain train config.yaml --processes 2
llmtrain train config.yaml --processes 2        # the same command again: it resumes
```

A value that does not parse is refused with the grammar. A test that fails prints the line that
replays it; `FAULTS_SEED=17 FAULTS_COUNT=100` draws the same random faults again. The points stand
in `llmtrain/faults.py`.
"""
