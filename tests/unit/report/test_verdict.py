import math

import pytest
from helpers import runs

from llmtrain.cli.rank import end_block
from llmtrain.cli.watch import frame
from llmtrain.report import verdict
from llmtrain.report.collect import collect
from llmtrain.report.compare import render
from llmtrain.report.run import open_run
from llmtrain.rundir.goodput import goodput
from llmtrain.tools.watch import Watcher


def tables(folder, lines, status=None, **settings):
    text = "".join(f"{section}:\n  {key}: {value}\n" for (section, key), value in settings.items())
    return collect(runs.write_run(folder, lines, status or runs.status(), config=text or "a: {}\n"))


def check(found, name):
    (one,) = (one for one in verdict.checks(found) if one.name == name)
    return one


@pytest.mark.parametrize(
    ("state", "begins"),
    [
        ("finished", "Finished."),
        ("stopped", "Stopped at step 300 of 300 (all steps are done); the same command resumes"),
        ("failed", "Failed at step 300 of 300 with exit code 75 (all steps are done)."),
        ("running", "Running, or ended without a word; the last line is of step 300 of 300."),
        (None, "There is no status; the last line is of step 300 of 300."),
    ],
)
def test_the_sentence_says_what_became_of_the_run(tmp_path, state, begins):
    start, *lines = runs.history()
    found = tables(tmp_path, [start | {"steps": 300}, *lines], runs.status(state, exit_code=75))
    assert verdict.sentence(found).startswith(begins)


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        ([7.66, 3.0, 2.34], "Held-out loss fell from 7.660 to 2.340 and is still falling."),
        ([7.66, 2.341, 2.34], "Held-out loss fell from 7.660 to 2.340 and has levelled off."),
        ([7.66, 2.0, 2.34], "and is rising: 17 % above its best, 2.000."),
        ([2.0, 3.0], "Held-out loss rose from 2.000 to 3.000 and is rising"),
        ([2.0, 2.0], "Held-out loss stayed at 2.000."),
        ([], "Training loss fell from"),
    ],
)
def test_the_sentence_says_whether_it_learned(tmp_path, losses, ends):
    lines = [line for line in runs.history() if line["kind"] != "eval"]
    lines += [runs.eval_line(100 * n, loss=loss) for n, loss in enumerate(losses)]
    assert ends in verdict.sentence(tables(tmp_path, lines))


def test_there_are_eight_checks_each_with_a_mark_and_what_was_found(tmp_path):
    found = verdict.checks(tables(tmp_path, runs.history()))
    assert len(found) == 8
    assert {one.mark for one in found} <= {verdict.GOOD, verdict.LOOK, verdict.BAD}
    assert all(one.found for one in found)


def test_a_model_no_better_than_guessing_is_bad(tmp_path):
    start, *lines = runs.history(20)
    lines = [line for line in lines if line["kind"] != "eval"]
    for loss, mark in ((math.log(50) + 0.01, verdict.BAD), (3.0, verdict.GOOD)):
        whole = [start | {"vocabulary": 50}, *lines, runs.eval_line(20, loss=loss)]
        one = check(tables(tmp_path / str(loss), whole), "held-out loss")
        assert one.mark == mark
        assert "guessing 3.912" in one.found


def evaluated(folder, *losses, vocabulary=50, steps=20, events=()):
    """A run of 20 steps with these evaluations; one that is alone is of the last step."""
    start, *lines = runs.history(steps)
    lines = [line for line in lines if line["kind"] not in ("eval", "end")]
    at = [steps * n // max(1, len(losses) - 1) for n in range(len(losses))]
    at = at if len(losses) > 1 else [steps]
    lines += [runs.eval_line(step, loss=loss) for step, loss in zip(at, losses, strict=True)]
    whole = [start | {"vocabulary": vocabulary, "steps": steps}, *lines, *events]
    return tables(folder, whole, runs.status(step=steps))


WORSE = "worse than guessing (3.912)"


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([9.0, 5.0], f"Finished. Held-out loss went from 9.000 to 5.000, {WORSE}."),
        ([9.0, 5.0, 4.0], f"Finished. Held-out loss went from 9.000 to 4.000, {WORSE}."),
        (
            [9.0, 3.0, 4.0],
            f"Finished. Held-out loss went from 9.000 to 4.000, {WORSE}; its best was 3.000.",
        ),
        ([4.5], f"Finished. Held-out loss is 4.500, {WORSE}."),
        ([9.0, 3.9], "Finished. Held-out loss fell from 9.000 to 3.900 and is still falling."),
    ],
)
def test_a_loss_worse_than_guessing_is_the_headline_wherever_there_is_one(tmp_path, losses, said):
    found = evaluated(tmp_path / "a", *losses)
    bad = check(found, "held-out loss").mark == verdict.BAD
    assert bad == ("guessing" in said) == ("worse than guessing" in one_of(found))
    assert verdict.sentence(found) == said
    assert said in repr(open_run(tmp_path / "a"))
    block = [line for line in end_block(found) if line.startswith("wrong")]
    assert block == [f"wrong      {said.removeprefix('Finished. ')}"] * bad
    page = render([found, evaluated(tmp_path / "b", 9.0, 3.0)])
    assert (f"a: {said.removeprefix('Finished. ')}" in page) == bad


def one_of(found):
    return check(found, "held-out loss").found


def test_every_bad_check_is_in_the_headline(tmp_path):
    events = [runs.event_line(step, "update_skipped") for step in (3, 4)]
    found = evaluated(tmp_path, 9.0, 3.0, events=events)
    assert check(found, "skipped updates").mark == verdict.BAD
    skipped = "2 updates of 20 steps were skipped, as loss or gradient was not finite."
    assert verdict.sentence(found) == f"Finished. {skipped}"
    found = evaluated(tmp_path, 9.0, 5.0, events=events)
    assert verdict.sentence(found).endswith(f"{WORSE}. {skipped}")
    for one in verdict.checks(found):  # the state of a failed run is the headline already
        assert one.mark != verdict.BAD or one.said


def test_a_loss_that_did_not_fall_is_not_marked_as_good(tmp_path):
    assert check(evaluated(tmp_path / "a", 3.0, 3.01), "held-out loss").mark == verdict.LOOK
    assert check(evaluated(tmp_path / "b", 3.0, 3.0), "held-out loss").mark == verdict.LOOK


def test_before_the_first_step_a_loss_is_no_result(tmp_path):
    start = runs.start_line(0) | {"vocabulary": 50}
    found = tables(tmp_path, [start, runs.eval_line(0, loss=4.0)], runs.status("running", step=0))
    one = check(found, "held-out loss")
    assert (one.mark, one.found) == (verdict.LOOK, "4.000, guessing 3.912")
    assert verdict.sentence(found).endswith("No step has been recorded yet.")


def test_redone_steps_are_named_and_the_goodput_is_that_of_the_record(tmp_path, monkeypatch):
    lines = runs.interrupted_history()
    found = tables(tmp_path, lines)
    assert check(found, "interruptions").found == "1 restart; done again: steps 101–170"
    monkeypatch.setattr("llmtrain.rundir.goodput.time.time", lambda: 0.0)
    assert verdict.goodput(found) == pytest.approx(goodput(tmp_path))


def test_advice_about_data_comes_from_all_steps_and_not_from_logged_ones(tmp_path):
    # Ten steps a line, of 0.4 s each; the step of the line itself happened to wait for 0.1 s.
    often = [runs.train_line(step, data_wait_seconds=0.1) for step in range(10, 200, 10)]
    one = check(tables(tmp_path / "a", [runs.start_line(0), *often]), "data wait")
    assert (one.mark, one.found) == (verdict.GOOD, "0.5 % of the step time")
    rarely = [runs.train_line(step, span_wait_seconds=0.4) for step in range(10, 200, 10)]
    one = check(tables(tmp_path / "b", [runs.start_line(0), *rarely]), "data wait")
    assert (one.mark, one.found) == (verdict.LOOK, "10 % of the step time: raise data.workers")
    opening = {"seconds": 9.0, "span_seconds": 9.0, "span_wait_seconds": 8.0}
    lines = [runs.start_line(0), runs.train_line(1, data_wait_seconds=8.0, **opening)]
    lines += [runs.train_line(step) for step in range(10, 60, 10)]
    assert check(tables(tmp_path / "c", lines), "data wait").mark == verdict.GOOD


def test_skipped_updates_and_lines_that_cannot_be_read_are_counted(tmp_path):
    lines = [*runs.history(), runs.event_line(150, "update_skipped")]
    runs.write_run(tmp_path, lines)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\0\0\0\n{"kind": 3}\n[1]\n{"kind": "train", "st')
    found = collect(tmp_path)
    assert check(found, "skipped updates").found == "1: loss or gradient was not finite"
    assert check(found, "record").found == "3 lines of metrics.jsonl could not be read"


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [runs.start_line(0)],
        [runs.train_line(1)],
        [runs.eval_line(0)],
        [runs.start_line(0), runs.train_line(1, loss=None, tokens=None, span_seconds=None)],
        [runs.train_line(1, loss=1e30), runs.train_line(2, loss=-1e30)],
        [runs.start_line(0), runs.train_line(5, time=1.0), runs.train_line(6, time=0.0)],
        [runs.start_line(0), runs.train_line(1), runs.train_line(2, loss=2), runs.start_line(0)],
    ],
    ids=["empty", "start", "one step", "one eval", "nulls", "huge", "clock", "undone"],
)
def test_whatever_a_record_holds_there_is_a_verdict(tmp_path, lines):
    found = tables(tmp_path, lines)
    assert verdict.sentence(found)
    assert len(verdict.checks(found)) == 8
    assert verdict.figures(found)


def without_figures(step):
    return runs.eval_line(step) | {"loss": None, "perplexity": None, "bits_per_byte": None}


@pytest.mark.parametrize("diverged", [[300], [100, 200, 300], [0, 100, 200, 300]])
def test_a_run_whose_last_evaluation_is_not_finite_says_so_everywhere(tmp_path, diverged):
    lines = runs.history(300, evaluate_every=100)
    lines = [
        without_figures(line["step"])
        if line["kind"] == "eval" and line["step"] in diverged
        else line
        for line in lines
    ]
    lines = [line for line in lines if line["kind"] != "eval" or line["step"] or len(diverged) < 4]
    found = tables(tmp_path / "a", lines)
    finite = [line["loss"] for line in lines if line["kind"] == "eval" and line["loss"]]
    assert "The held-out loss of step 300 is not finite" in verdict.sentence(found)
    (figure,) = (one for one in verdict.figures(found) if one[0] == "held-out loss")
    assert figure[1] == "not finite"
    assert {name for name, *_ in verdict.figures(found)} == {"held-out loss", "tokens", "time"}
    assert check(found, "held-out loss").mark == verdict.BAD
    (tmp_path / "a" / "checkpoints" / "step-00000300").mkdir(parents=True)
    assert open_run(tmp_path / "a").best is None  # the only one kept is not finite
    (shown,) = (line for line in end_block(found) if line.startswith("held-out"))
    view = Watcher(tmp_path / "a").look()
    assert "held-out not finite" in "\n".join(frame(view, 80, 24))
    page = render([found, tables(tmp_path / "b", runs.history(300))])
    assert "The last held-out loss of a is not finite." in page
    assert "b ends lowest" not in page
    assert "a ends lowest" not in page
    if finite:
        best = f"{min(finite):.3f}"
        assert f"its best was {best}" in verdict.sentence(found)
        assert figure[2].startswith(f"best {best}")
        assert f"→ not finite, best {best} at step" in shown
    else:
        assert shown == "held-out   not finite in every evaluation"


def preferred(folder, loss="dpo", beta=0.1, **how):
    config = runs.PREFERENCE.format(loss=loss, beta=beta)
    return collect(runs.write_run(folder, runs.preferred_history(**how), config=config))


def test_of_a_run_on_pairs_the_accuracy_is_told(tmp_path):
    found = preferred(tmp_path)
    said = verdict.sentence(found)
    assert said.startswith("Finished. Held-out loss fell from 0.693 to 0.48")
    assert said.endswith("Accuracy went from 50 % to 70 % of the held-out pairs.")
    assert [name for name, *_ in verdict.figures(found)][:2] == ["held-out loss", "accuracy"]
    (one,) = [one for one in verdict.checks(found) if one.name == "held-out loss"]
    assert "guessing" not in one.found
    assert "accuracy 70 %" in one.found


@pytest.mark.parametrize("evaluated", [True, False])
@pytest.mark.parametrize(
    ("loss", "falls", "remedy"),
    [
        ("dpo", 0.1, None),
        ("dpo", 0.5, "preference.sft_weight"),
        ("kto", 0.5, "preference.beta"),
        ("dpo", -0.5, None),
    ],
)
def test_it_is_told_when_chosen_answers_become_unlikely(tmp_path, loss, falls, remedy, evaluated):
    said = verdict.sentence(preferred(tmp_path, loss, evaluated=evaluated, falls=falls))
    assert (remedy is None) == ("likelihood displacement" not in said)
    if remedy:
        share = "50 %" if evaluated else "39 %"
        assert f"The log-probability of chosen answers fell by {share} from its start" in said
        assert f"a larger {remedy} or a lower learning rate" in said


def test_a_loss_below_zero_is_rising_where_it_is_higher(tmp_path):
    lines = [line for line in runs.preferred_history() if line["kind"] != "eval"]
    for losses, rising in (((0.5, -1.0, -0.995), False), ((0.5, -1.0, -0.9), True)):
        own = [runs.eval_line(100 * n, loss=loss) for n, loss in enumerate(losses)]
        said = verdict.sentence(tables(tmp_path / str(rising), [*lines, *own]))
        assert ("is rising: 10 % above its best, -1.000" in said) == rising


def test_a_model_that_scores_is_used_by_no_command_that_writes(tmp_path):
    assert verdict.uses(preferred(tmp_path, "reward")) == ["llmtrain evaluate runs/preferred"]
