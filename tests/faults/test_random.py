"""Faults drawn from a seed, one after another in a single training, which ends in equal bits.

    pytest tests/faults/test_random.py                      a few kills
    pytest tests/faults/test_random.py -m slow              100 kills on 2 and on 3 processes, soak
    FAULTS_SEED=17 FAULTS_COUNT=8 pytest …                  the same faults again, and how many

Each start gets one fault. Where it strikes is asked for by LLMTRAIN_FAULTS, so that inside of a
save and inside of a load are certain; how it strikes (rank, step, background or not, one rank or
all) is drawn. The steps of the whole training are as many as the draws need.
"""

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from helpers.faults import EVERY, KILLED, FaultyRun

from llmtrain.hashing import mix

SAVE_OF_ALL = ("save.begin", "save.vote1", "save.vote2", "save.done")
SAVE_OF_RANK_0 = (
    *("save.mkdir", "save.small", "save.create", "save.write", "save.fsync", "save.manifest"),
    *("save.dirsync", "save.rename", "save.parentsync"),
)
STEP = ("loop.step", "loop.micro", "data.next")
EVALUATE_EVERY = 2 * EVERY
MOST_GAINED = EVERY  # a killed start goes on from one checkpoint, and commits one more at most
SOAK = (
    *("kill", "exit:1", "raise", "enospc", "eio", "hang", "term", "int", "usr1", "delay:0.5"),
    *("truncate", "flip"),
)
LONGEST = 2 * EVERY  # steps of a start of the soak
Make = Callable[..., FaultyRun]
Note = Callable[[str, object], None]


@dataclass(frozen=True)
class Draw:
    """What strikes one start. place: where, for the histogram."""

    place: str
    fault: str
    overrides: tuple[str, ...]


def seed_and_count(count):
    """Another seed each time, unless the environment gives one."""
    seed = int(os.environ.get("FAULTS_SEED", time.time_ns() % 10**9))
    return seed, int(os.environ.get("FAULTS_COUNT", count))


def pick(options, *key):
    return options[mix(*key) % len(options)]


def where(seed, number, resumed):
    """The kind of place, and the point with its condition but without its rank."""
    chance, extra = mix(seed, number, 1) % 100, mix(seed, number, 3)
    if resumed and chance < 16:
        verify, read = f"load.verify@nth={extra % 2 + 1}", f"load.read@nth={extra % 9 + 1}"
        return "load", pick((verify, read, read), seed, number, 2)
    if chance < 20:
        return "start", pick(("load.scan@nth=1", "data.next@nth=1"), seed, number, 2)
    if chance < 55:
        point = pick(SAVE_OF_RANK_0 + SAVE_OF_ALL, seed, number, 2)
        share = f"@bytes={extra % 100}%" if point == "save.write" else ""
        return "save", f"{point}@step={following(resumed, EVERY)}{share}"
    if chance < 60:
        return "evaluation", f"eval.batch@step={following(resumed, EVALUATE_EVERY)}"
    point = pick(STEP, seed, number, 2)
    second = "@nth=2" if point == "loop.micro" and mix(seed, number, 4) % 2 else ""
    return "step", f"{point}@step={resumed + 2 + extra % 6}{second}"


def following(step, every):
    """The next step behind `step` at which something is due."""
    return (step // every + 1) * every


def draw(seed, number, resumed, world_size):
    """The kill of start `number`, which goes on from step `resumed` (0: from the beginning)."""
    place, point = where(seed, number, resumed)
    rank = mix(seed, number, 5) % (world_size + 1)  # world_size: all of them
    if point.split("@")[0] in (*SAVE_OF_RANK_0, "load.scan"):
        rank = 0
    struck = "" if rank == world_size else f"@rank={rank}"
    background = "true" if mix(seed, number, 6) % 2 else "false"
    return Draw(place, f"{point}{struck}=kill", (f"checkpoint.background={background}",))


def newest_step(run):
    """What the next start goes on from; 0: from the beginning."""
    names = run.names() if run.checkpoints.is_dir() else []
    return max((int(name[5:]) for name in names if name[5:].isdigit()), default=0)


def long_run(make, world_size, steps, name="struck"):
    """A run of so many steps."""
    run = make(world_size, name=name, training__steps=steps, evaluation__every_steps=EVALUATE_EVERY)
    run.config["distributed"]["timeout_minutes"] = 1.0  # how long peers of a killed one may wait
    run.patience_seconds = 3600.0
    return run


def compare(make, run, seed):
    """With the same training that nothing strikes."""
    expected = long_run(make, run.world_size, run.config["training"]["steps"], "straight")
    assert expected.launch() == [0] * run.world_size
    assert run.outcome() == expected.outcome(), f"FAULTS_SEED={seed}"


def kills(make, note, world_size, wanted):
    """A training in which each start was killed, as often as wanted, and that was finished then."""
    seed, count = seed_and_count(wanted)
    note("replay", f"FAULTS_SEED={seed} FAULTS_COUNT={count}")
    run = long_run(make, world_size, MOST_GAINED * count + 4 * EVERY)
    drawn = []
    for number in range(count):
        drawn.append(draw(seed, number, newest_step(run), world_size))
        codes = run.launch(drawn[-1].fault, *drawn[-1].overrides)
        assert KILLED in codes, f"kill {number} of seed {seed} did not strike: {codes}"
        assert set(codes) <= {KILLED, 75}, f"kill {number} of seed {seed}: {codes}"
    assert run.launch() == [0] * world_size
    note("histogram", histogram(seed, drawn))
    compare(make, run, seed)
    return drawn


def behind_first_step(drawn):
    """How many struck when their start had finished a step."""
    return sum(one.place in ("step", "save", "evaluation") for one in drawn)


def histogram(seed, drawn):
    """How many struck where."""
    places, points = Counter(one.place for one in drawn), Counter(point(one) for one in drawn)
    head = ", ".join(f"{place} {times}" for place, times in sorted(places.items()))
    lines = [f"  {name:16} {times}" for name, times in sorted(points.items())]
    later = f"behind the first step of its start {behind_first_step(drawn)}"
    return "\n".join([f"seed {seed}, {len(drawn)} faults: {head}; {later}", *lines])


def point(one):
    return one.fault.split("@")[0]


def test_f48_a_few_random_kills_end_in_the_bits_of_a_straight_run(faulty, record_property):
    kills(faulty, record_property, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_f48_a_hundred_random_kills_end_in_the_bits_of_a_straight_run(
    faulty, record_property, world_size
):
    drawn = kills(faulty, record_property, world_size, 100)
    if len(drawn) == 100:
        places = Counter(one.place for one in drawn)
        assert places["save"] >= 20
        assert places["load"] >= 10
        assert behind_first_step(drawn) >= 50


def soaking(seed, number, resumed, world_size):
    """An action and the faults of a start, which ends with an agreed stop if not before."""
    action = pick(SOAK, seed, number, 1)
    rank = mix(seed, number, 2) % world_size
    step = resumed + 2 + mix(seed, number, 3) % 4
    stop = f"loop.step@step={resumed + LONGEST}@rank=0=term"
    match action:
        case "truncate" | "flip":  # done to the newest checkpoint before the start
            return action, stop
        case "enospc" | "eio":
            at = pick(SAVE_OF_RANK_0, seed, number, 4)
            fault = f"{at}@step={following(resumed, EVERY)}@rank=0@nth=1={action}"
        case "hang":
            fault = f"loop.micro@step={step}@rank={rank}@nth=1=hang"
        case _:
            at = pick(STEP, seed, number, 4)
            fault = f"{at}@step={step}@rank={rank}@nth=1={action}"
    return action, f"{fault};{stop}"


def damage(run, action, *key):
    """Flip a bit of one file of the newest checkpoint, or cut it in half; its name."""
    files = sorted(path for path in run.newest().rglob("*") if path.is_file())
    path = files[mix(*key, 5) % len(files)]
    body = bytearray(path.read_bytes())
    if action == "flip":
        body[mix(*key, 6) % len(body)] ^= 1 << mix(*key, 7) % 8
    path.write_bytes(body if action == "flip" else body[: len(body) // 2])
    return str(path.relative_to(run.checkpoints))


@pytest.mark.slow
def test_f48_a_soak_of_faults_of_any_kind_ends_in_the_bits_of_a_straight_run(
    faulty, record_property
):
    note = record_property
    seed, count = seed_and_count(50)
    note("replay", f"FAULTS_SEED={seed} FAULTS_COUNT={count}")
    run = long_run(faulty, 2, (LONGEST + 1) * count)
    actions: Counter[str] = Counter()
    for number in range(count):
        action, fault = soaking(seed, number, newest_step(run), 2)
        struck = action in ("flip", "truncate") and len(run.valid()) > 1
        file = damage(run, action, seed, number) if struck else ""
        codes = run.launch(fault)
        what = f"fault {number} of seed {seed}, {action} {file}: {codes}"
        assert set(codes) <= allowed(action), what
        assert not struck or run.events("checkpoint_quarantined"), what
        actions[action] += 1
    assert run.launch() == [0, 0]
    note("histogram", f"seed {seed}, {count} faults: {dict(sorted(actions.items()))}")
    compare(faulty, run, seed)


def allowed(action):
    """The codes that ranks may end with."""
    match action:
        case "kill":
            return {KILLED, 75}
        case "exit:1" | "raise":
            return {1, 75}
        case "hang":
            return {75}
        case _:
            return {0}
