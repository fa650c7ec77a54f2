"""Whether a run finished, whether it learned, and whether it can be trusted: in words.

The checks decide. The sentence at the top of a report is what the bad ones say, so it cannot
contradict them; only where none is bad does it tell how the loss went.

Advice is given only where the run's own numbers support it: shares of time come from the sums over
all steps (`span_seconds`), never from the steps that happened to be logged.
"""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from llmtrain.report.collect import Line, Tables, column
from llmtrain.rundir.goodput import share_of_steps
from llmtrain.text import clip, count, duration, fixed, number, percent, plural, short

GOOD, LOOK, BAD = "✓", "!", "✗"
NOT_FINITE = "not finite"
_WAITS = 0.05  # the share of the step time from which waiting for data is worth a remark
_LEVEL = 0.003  # a last change of less than this share is none
_RISING = 0.01  # of the best loss, from which a loss above it is rising
_FALLEN = 0.2  # of their log-probability, from which it is said that chosen answers become unlikely
_SCORED = 20  # lines of steps, from which their ends are compared
_WORSE = "worse than guessing"
# Of those that the evaluations have, the first is a key figure.
_MEASURES = (("accuracy", percent), ("bits_per_byte", fixed), ("perplexity", number))


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a reader should know before trusting a run.

    mark: GOOD, LOOK or BAD
    found: what was found, in a few words
    said: the same as a sentence, if it is bad; "" if the state of the run says it already
    """

    mark: str
    name: str
    found: str
    said: str = ""


def sentence(tables: Tables) -> str:
    """Describe the run in a few sentences: its state, and what is wrong, else how the loss went."""
    findings = failures(tables) or [_learned(tables)]
    return " ".join([_state(tables), *findings, *_preferred(tables)])


def failures(tables: Tables) -> list[str]:
    """Return a sentence for each bad check."""
    return [one.said for one in checks(tables) if one.mark == BAD and one.said]


def figures(tables: Tables) -> list[tuple[str, str, str]]:
    """Return the four key figures: a name, a value and a remark each."""
    lost, name = ended_not_finite(tables), "held-out loss"
    losses = column(tables.evaluations, "loss")
    rows = []
    if losses:
        best = min(value for _, value in losses)
        last = NOT_FINITE if lost else fixed(losses[-1][1])
        remark = "the best" if losses[-1][1] <= best and not lost else f"best {fixed(best)}"
        rows.append((name, last, f"{remark}, from {fixed(losses[0][1])}"))
    elif lost:
        rows.append((name, NOT_FINITE, "in every evaluation"))
    elif trained := tables.numbers("loss"):
        rows.append(("training loss", fixed(trained[-1][1]), f"from {fixed(trained[0][1])}"))
    for measure, form in () if lost else _MEASURES:
        if values := column(tables.evaluations, measure).values:
            remark = f"from {form(values[0])}"
            rows.append((measure.replace("_", " "), form(values[-1]), remark))
            break
    if tokens := tables.numbers("tokens"):
        sums = tables.sums
        speed = sums.gained / sums.seconds if sums.seconds else None
        rows.append(("tokens", short(tokens[-1][1]), f"{short(speed)} a second"))
    share = goodput(tables)
    remark = "" if share is None else f"goodput {percent(share)}"
    rows.append(("time", duration(tables.wall_seconds), remark))
    return rows


def ended_not_finite(tables: Tables) -> bool:
    """Whether the loss of the last evaluation is no finite number, which the record has as null."""
    last = tables.evaluations[-1:]
    return bool(column(last, "tokens")) and not column(last, "loss")


def goodput(tables: Tables) -> float | None:
    """Return the share of the time in which steps ran that were not redone; None if none did."""
    return share_of_steps(tables.stretches) if tables.train else None


def checks(tables: Tables) -> list[Check]:
    """Return the eight checks, in a fixed order."""
    share = waiting_share(tables)
    waited, slow = f"{percent(share)} of the step time", share > _WAITS
    lines = plural(tables.unread, "line", "lines")
    unread = f"{lines} of metrics.jsonl could not be read" if tables.unread else ""
    return [
        _steps(tables),
        _heldout(tables),
        _interruptions(tables),
        _skipped(tables),
        Check(LOOK if slow else GOOD, "data wait", waited + ": raise data.workers" * slow),
        _memory(tables),
        _checkpoints(tables),
        Check(LOOK if unread else GOOD, "record", unread or "every line was read"),
    ]


def where(tables: Tables) -> str:
    """Return the run directory as the config names it, as one word of a command."""
    return shlex.quote(str(tables.settings.get("run.dir") or tables.name))


def uses(tables: Tables) -> list[str]:
    """Return the commands that let the model of a run write, the shortest first."""
    if tables.pair_loss == "reward":  # it writes nothing
        return [f"llmtrain evaluate {where(tables)}"]
    if tables.chat:
        return [f"llmtrain chat {where(tables)}", f'llmtrain generate --chat {where(tables)} "…"']
    return [f'llmtrain generate {where(tables)} "…"']


def last_step(tables: Tables) -> int:
    """Return the last finished step that the run's files know of."""
    known = tables.status.get("step")
    logged = int(tables.train[-1]["step"]) if tables.train else 0
    return max(logged, known if isinstance(known, int) else 0)


def best_checkpoint(tables: Tables) -> Line | None:
    """Return the checkpoint in the run directory whose step has the least held-out loss.

    Without any, that is the newest that was not evaluated: one whose loss is not finite is no best.
    """
    losses = dict(column(tables.evaluations, "loss"))
    kept = tables.kept_checkpoints
    scored = [one for one in kept if one["step"] in losses]
    evaluated = {one["step"] for one in tables.evaluations}
    rest = [one for one in kept if one["step"] not in evaluated]
    return min(scored, key=lambda one: losses[one["step"]], default=rest[-1] if rest else None)


def _state(tables: Tables) -> str:
    known, where = tables.status, f"step {count(last_step(tables))}"
    if tables.steps:
        where += f" of {count(tables.steps)}"
    reason = f" ({clip(str(known['reason']), 500)})" if known.get("reason") else ""
    sentences = {
        "finished": "Finished.",
        "stopped": f"Stopped at {where}{reason}; the same command resumes the run.",
        "failed": f"Failed at {where} with exit code {known.get('exit_code')}{reason}.",
        "running": f"Running, or ended without a word; the last line is of {where}.",
    }
    without = f"There is no status; the last line is of {where}."
    return sentences.get(str(known.get("state")), without)


def _learned(tables: Tables) -> str:
    losses: Sequence[float] = [value for _, value in column(tables.evaluations, "loss")]
    name = "Held-out loss"
    if len(losses) < 2:
        losses = tables.numbers("loss").values
        name = "Training loss"
    if not losses:
        return "No step has been recorded yet."
    if len(losses) == 1:
        return f"{name} is {fixed(losses[0])}."
    first, last, best = losses[0], losses[-1], min(losses)
    way = "fell" if last < first else "rose" if last > first else "stayed"
    if way == "stayed":
        return f"{name} stayed at {fixed(last)}."
    ends = f"{name} {way} from {fixed(first)} to {fixed(last)}"
    if name == "Training loss":
        return f"{ends}."
    if _is_rising(losses):
        above = percent((last - best) / abs(best)) if best else fixed(last)
        return f"{ends} and is rising: {above} above its best, {fixed(best)}."
    change = losses[-2] - last
    level = abs(change) < _LEVEL * abs(last)
    trend = "has levelled off" if level else "is still falling" if change > 0 else "is about level"
    return f"{ends} and {trend}."


def _is_rising(losses: Sequence[float]) -> bool:
    """Whether the last loss is clearly above the best one; a loss of pairs may be below zero."""
    return losses[-1] - min(losses) > _RISING * abs(min(losses))


def _preferred(tables: Tables) -> Iterator[str]:
    """Say of a run on pairs how often it prefers the chosen answer, and what that has cost."""
    right = column(tables.evaluations, "accuracy").values
    if len(right) > 1:
        ends = f"to {percent(right[-1])} of the held-out pairs"
        yield f"Accuracy went from {percent(right[0])} {ends}."
    # The loss by token of chosen answers: of training steps, whose answers differ in length, the
    # mean of those at both ends.
    losses: Sequence[float] = [value for _, value in column(tables.evaluations, "chosen_loss")]
    if len(losses) < 2:
        steps = tables.numbers("chosen_loss").values
        share = len(steps) // 10
        enough = len(steps) >= _SCORED
        losses = [fmean(steps[:share]), fmean(steps[-share:])] if enough else []
    fallen = losses[-1] / losses[0] - 1 if losses and losses[0] > 0 else 0.0
    if fallen > _FALLEN:
        what = "preference.beta" if tables.pair_loss == "kto" else "preference.sft_weight"
        yield (
            f"The log-probability of chosen answers fell by {percent(fallen)} from its start "
            f"(likelihood displacement): a larger {what} or a lower learning rate holds it."
        )


def waiting_share(tables: Tables) -> float:
    """Return the share of the step time, logged or not, in which steps waited for data."""
    return tables.sums.waited / tables.sums.seconds if tables.sums.seconds else 0.0


def _steps(tables: Tables) -> Check:
    state = tables.status.get("state")
    mark = {"finished": GOOD, "failed": BAD}.get(str(state), LOOK)
    of = f" of {count(tables.steps)}" if tables.steps else ""
    summary = f"{count(last_step(tables))}{of}, {clip(state or 'state unknown', 80)}"
    few = [one for one in tables.events if one.get("event") == "few_steps"]
    if detail := few[-1].get("detail") if few else None:
        mark = LOOK if mark == GOOD else mark
        summary += f"; few: {short(detail['tokens'])} trained tokens"
        summary += f", try {clip(detail['remedy'], 80)}"
    return Check(mark, "steps", summary)


def _heldout(tables: Tables) -> Check:
    name, losses = "held-out loss", [value for _, value in column(tables.evaluations, "loss")]
    if ended_not_finite(tables):
        step = count(tables.evaluations[-1]["step"])
        statement = f"The held-out loss of step {step} is {NOT_FINITE}"
        statement += f"; its best was {fixed(min(losses))}." if losses else "."
        return Check(BAD, name, f"{NOT_FINITE} at step {step}, the last evaluation", statement)
    if not losses:
        return Check(LOOK, name, "nothing was evaluated")
    first, last, best = losses[0], losses[-1], min(losses)
    facts, mark, statement = [fixed(last)], GOOD, ""
    step, several = tables.evaluations[-1]["step"], len(losses) > 1
    if not step or _is_rising(losses) or (several and last >= first):
        mark = LOOK
    vocabulary = tables.last_start.get("vocabulary")
    if tables.pair_loss is None and isinstance(vocabulary, int) and vocabulary > 1:
        guessing = fixed(math.log(vocabulary))
        is_worse = bool(step) and last > math.log(vocabulary)
        facts.append(f"{_WORSE} {guessing}" if is_worse else f"guessing {guessing}")
        if is_worse:
            went = f"went from {fixed(first)} to" if several else "is"
            least = f"; its best was {fixed(best)}" if best < last else ""
            statement = f"Held-out loss {went} {fixed(last)}, {_WORSE} ({guessing}){least}."
            mark = BAD
    if trained := [value for _, value in tables.numbers("loss")[-10:]]:
        facts.append(f"last training losses {fixed(fmean(trained))}")
    if right := column(tables.evaluations, "accuracy"):
        facts.append(f"accuracy {percent(right[-1][1])}")
    return Check(mark, name, ", ".join(facts), statement)


def _interruptions(tables: Tables) -> Check:
    times = len(tables.restarts)
    if not times:
        return Check(GOOD, "interruptions", "none")
    summary = plural(times, "restart", "restarts")
    if tables.redone:
        ranges = [f"{count(a)}–{count(b)}" if a < b else count(a) for a, b in tables.redone[-5:]]
        more = ", …" if len(tables.redone) > 5 else ""
        summary += f"; done again: steps {', '.join(ranges)}{more}"
    return Check(LOOK, "interruptions", summary)


def skipped_steps(tables: Tables) -> tuple[int, ...]:
    """Return the steps whose update was skipped."""
    steps = {one["step"] for one in tables.events if one.get("event") == "update_skipped"}
    return tuple(sorted(steps))


def _skipped(tables: Tables) -> Check:
    steps = skipped_steps(tables)
    if not steps:
        return Check(GOOD, "skipped updates", "none")
    done = last_step(tables)
    mark = BAD if len(steps) > 0.01 * max(1, done) else LOOK
    summary = f"{count(len(steps))}: loss or gradient was not finite"
    statement = f"{plural(len(steps), 'update', 'updates')} of {count(done)} steps were skipped, "
    statement += "as loss or gradient was not finite."
    return Check(mark, "skipped updates", summary, statement)


def _memory(tables: Tables) -> Check:
    peaks = tables.numbers("memory_gb").values
    if not peaks:
        return Check(LOOK, "memory", "not recorded")
    summary, mark = f"{fixed(max(peaks), 2)} GiB at most", GOOD
    compared = [one for one in tables.events if one.get("event") == "memory_compared"]
    detail = compared[-1].get("detail") if compared else None
    if isinstance(detail, dict) and isinstance(planned := detail.get("planned_gb"), int | float):
        summary += f", planned {fixed(planned, 2)} GiB"
        mark = LOOK if max(peaks) > 1.1 * planned else GOOD
    if device := room(tables):
        summary += f", the device has {fixed(device, 1)} GiB"
    return Check(mark, "memory", summary)


def room(tables: Tables) -> float | None:
    """Return the GiB of the device, as the plan knew them; None if it did not."""
    plan = tables.last_start.get("plan")
    size = plan.get("device_bytes") if isinstance(plan, dict) else None
    return size / 2**30 if isinstance(size, int | float) and size > 0 else None


def _checkpoints(tables: Tables) -> Check:
    kept = tables.kept_checkpoints
    if not kept:
        return Check(LOOK, "checkpoints", "none is in the run directory")
    best = best_checkpoint(tables)
    summary = f"{count(len(kept))} kept, newest {kept[-1]['name']}"
    return Check(GOOD, "checkpoints", f"{summary}, best {best['name']}" if best else summary)
