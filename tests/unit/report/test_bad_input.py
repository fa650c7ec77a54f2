"""Whatever a run directory has in it, `llmtrain report` writes a page or says why it cannot."""

import re

import pytest
from helpers import runs
from helpers.ranks import ROOT
from helpers.runs import HOSTILE

from llmtrain.cli.main import main

CONFIG = (ROOT / "configs" / "quickstart.yaml").read_text()
START, ONE = runs.start_line(0), runs.train_line(1)
KEPT = ("kind", "time", "step")
TURNED = f"\u202eabc \u05d0\u05d1 {HOSTILE}"


def nulls(line):
    return {key: value if key in KEPT else None for key, value in line.items()}


def of(value):
    """Every number of a step that is not a count of steps."""
    names = ("loss", "learning_rate", "grad_norm", "memory_gb", "seconds", "span_seconds", "tokens")
    return dict.fromkeys(names, value)


# Name → the lines, what follows them in the file, the state of the run, what the page says.
CASES: dict[str, tuple[list[dict], bytes, str | None, str]] = {
    "empty": ([], b"", "finished", "There is no line of a step yet."),
    "cut in its last line": ([START, ONE], b'{"kind": "tr', "running", "every line was read"),
    "lines that are no JSON": (
        [START, ONE],
        b'\0\0\n\nnot json\n[1]\n{"kind": 3}\n' + b"x\n" * 20,
        "finished",
        "25 lines of metrics.jsonl could not be read",
    ),
    "nulls": (
        [nulls(line) for line in (START, ONE, runs.train_line(10), runs.eval_line(10))],
        b"",
        "finished",
        "No step has been recorded yet.",
    ),
    "no train line": (
        [START, runs.eval_line(0), runs.sample_line(0, "x")],
        b"",
        "running",
        "No step has been recorded yet.",
    ),
    "one point": ([START, ONE], b"", "running", "Training loss is"),
    "equal values": (
        [START, *(runs.train_line(step, **of(2.0)) for step in range(1, 40))],
        b"",
        "finished",
        "Training loss stayed at 2.000.",
    ),
    "1e30": (
        [
            START,
            *(runs.train_line(n + 1, **of(x)) for n, x in enumerate((1.0, 1e30, -1e30, 1e308))),
        ],
        b"",
        "finished",
        "1e+30",
    ),
    "numbers of 400 digits": (
        [
            START | {"parameters": 10**400},
            *(runs.train_line(n, loss=2.0) for n in (1, 2)),
            runs.train_line(3, span_seconds=10**400, span_wait_seconds=10**400, tokens=10**400),
            runs.checkpoint_line(3) | {"bytes": 10**400, "blocked_seconds": 10**400},
        ],
        b"",
        "finished",
        "Training loss",
    ),
    "clocks that go back": (
        [
            START | {"time": 2e9, "born": 2.1e9},
            *(runs.train_line(n, time=time) for n, time in ((1, 1e9), (2, 3e9), (3, -5.0))),
            runs.start_line(2) | {"time": 1.0},
            runs.end_line(3, time=-1.0),
        ],
        b'{"kind": "train", "time": 1e400, "step": 3}\n{"kind": "x", "time": 1, "step": '
        + b"9" * 400
        + b"}\n",
        "finished",
        "2 lines of metrics.jsonl could not be read",
    ),
    "still going, or killed without a word": (
        runs.history(50)[:-1],
        b"",
        "running",
        "Running, or ended without a word; the last line is of step 50",
    ),
    "no status": (runs.history(50)[:-1], b"", None, "There is no status; the last line is of"),
    "wrong types": (
        [
            START | {"versions": [1], "plan": [1], "set": [1], "device": [1], "vocabulary": [1]},
            ONE | dict.fromkeys(("sources", "tokens", "loss", "span_seconds"), "x"),
            runs.sample_line(1, "x") | {"text": {"a": 1}, "prompt": None},
            runs.checkpoint_line(1) | {"name": None, "bytes": "x", "reason": 7},
            runs.event_line(1, "e") | {"detail": [1], "event": None},
        ],
        b"",
        "finished",
        "Finished.",
    ),
    "hostile texts": (
        [
            *runs.interrupted_history()[:-1],
            runs.sample_line(300, TURNED, prompt=TURNED),
            runs.event_line(300, TURNED, **{TURNED: TURNED}),
            runs.checkpoint_line(300) | {"name": TURNED, "reason": TURNED},
        ],
        b"",
        "failed",
        "\u05d0\u05d1 &lt;/script&gt;",
    ),
}


def report(*arguments):
    """The exit code of `llmtrain report ARGUMENTS`."""
    try:
        main(("report", *map(str, arguments)))
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.fixture
def good(tmp_path):
    return runs.write_run(tmp_path / "good", runs.history(100), runs.status(), config=CONFIG)


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_or_odd_run_has_a_page_that_says_so(tmp_path, good, capsys, caplog, name):
    lines, rest, state, said = CASES[name]
    folder = runs.write_run(tmp_path / "odd", lines, config=CONFIG)
    if state is not None:
        status = runs.status(state, 50, reason=TURNED if state == "failed" else None)
        runs.write_run(folder, lines, status, config=CONFIG)
    else:
        (folder / "status.json").unlink()
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(rest)
    assert report(folder) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert said in page
    assert page.count('<span class="mark">') == 8
    assert not re.search(r"\b(nan|inf|NaN|Infinity|None|Undefined)\b", page[page.index("<body") :])
    assert "\u202e" not in page
    assert "<script>alert" not in page
    assert len(caplog.records) <= 7  # a message for each of the first lines, and how many more
    assert report(folder, good, "--out", tmp_path / "c.html") == 0
    assert (
        "ends lowest" in (tmp_path / "c.html").read_text()
        or "nothing can be compared" in (tmp_path / "c.html").read_text()
    )


def test_a_directory_that_is_no_run_and_several_runs_without_a_file_are_bad_input(
    tmp_path, good, capsys
):
    (tmp_path / "none").mkdir()
    assert report(tmp_path / "none") == 2
    said = capsys.readouterr().err
    assert "expected: a run directory, with metrics.jsonl in it" in said
    assert report(good, good) == 2
    said = capsys.readouterr().err
    assert "--out" in said
    assert "Traceback" not in said
    assert not list(good.glob("*.html"))


def test_a_run_compared_with_itself_ends_equal_and_the_page_says_that_it_is_the_same(
    tmp_path, capsys
):
    lines = [runs.start_line(0) | {"run_id": "a1"}, *runs.history(100)[1:]]
    run = runs.write_run(tmp_path / "run", lines, config=CONFIG)
    assert report(run, run, "--out", tmp_path / "c.html") == 0
    page = (tmp_path / "c.html").read_text(encoding="utf-8")
    assert "run and run (2) end equal: held-out loss" in page
    assert "The same run is here more than once." in page


@pytest.mark.parametrize("evaluated", [True, False])
def test_runs_with_other_tokenizers_are_compared_by_bits_per_byte(tmp_path, good, evaluated):
    lines = [line for line in runs.history(100) if evaluated or line["kind"] != "eval"]
    config = CONFIG.replace("tokenizer: sample", "tokenizer: {train: 512}")
    other = runs.write_run(tmp_path / "other", lines, config=config)
    assert report(good, other, "--out", tmp_path / "c.html") == 0
    page = (tmp_path / "c.html").read_text(encoding="utf-8")
    assert "The tokenizers differ" in page
    assert ("end equal: bits per byte" if evaluated else "nothing can be compared") in page
    assert "Training loss</h3>" not in page
