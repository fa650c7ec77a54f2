import base64
import hashlib
import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers import runs
from helpers.ranks import ROOT
from helpers.runs import HOSTILE

import llmtrain.report
from llmtrain.cli.main import main
from llmtrain.errors import UserError
from llmtrain.report.collect import collect
from llmtrain.report.page import figures, inline, write_report
from llmtrain.rundir.goodput import OWNERS

HOSTILE_LINES = [
    *runs.interrupted_history()[:-1],
    runs.sample_line(300, HOSTILE, prompt=HOSTILE),
    runs.event_line(300, HOSTILE, **{HOSTILE: HOSTILE}),
    runs.eval_line(300, split=HOSTILE),
    runs.end_line(300),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs") / "<b>run & co"
    status = runs.status("failed", reason=HOSTILE, exit_code=75)
    return write_report(runs.write_run(root, HOSTILE_LINES, status, config=f"# {HOSTILE}\n"))


def test_the_page_is_one_small_file_that_names_no_other(report):
    page = report.read_text(encoding="utf-8")
    assert report.name == "report.html"
    assert report.stat().st_size < 80_000
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!data:,)", own)
    assert "@import" not in own
    assert "url(" not in own


def test_the_script_is_allowed_by_its_hash_and_no_other_runs(report):
    page = report.read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page).group(1)
    policy = policy.replace("&#39;", "'")
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert len(scripts) == 1
    assert re.findall(r"'sha256-([^']*)'", policy) == hashes
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe-eval" not in policy


def test_hostile_text_stays_text(report):
    page = report.read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "<b>run" not in page
    parser = Texts()
    parser.feed(page)
    assert sum(HOSTILE in text for text in parser.texts) >= 4


class Texts(HTMLParser):
    def __init__(self):
        super().__init__()
        self.texts = []

    def handle_data(self, data):
        self.texts.append(data)


def test_the_sections_come_in_the_order_of_a_readers_questions(report):
    page = report.read_text(encoding="utf-8")
    found = re.findall(r'<section id="(\w+)">', page)
    assert found == [
        "loss", "time", "training", "samples", "checkpoints", "events", "data", "config"
    ]  # fmt: skip


def test_a_long_run_stays_small(tmp_path):
    run = runs.write_run(tmp_path, runs.history(8_000, every=1, evaluate_every=50))
    assert write_report(run).stat().st_size < 350_000


def test_keys_are_shown_with_who_set_them(tmp_path):
    start = runs.start_line(0) | {"set": {"training.steps": "command line", "run.dir": "file"}}
    text = "training:\n  steps: 7\nrun:\n  dir: runs/mine\n"
    page = write_report(runs.write_run(tmp_path, [start], config=text)).read_text(encoding="utf-8")
    table = page[page.index('<section id="config">') : page.index("all keys, with")]
    assert re.search(r"training.steps</td>\s*<td class=\"text\">7</td><td>command line", table)


def test_a_key_that_somebody_set_is_not_shown_as_decided_too(tmp_path):
    start = runs.start_line(0) | {"set": {"training.precision": "file"}}
    run = runs.write_run(tmp_path, [start], config="training:\n  precision: fp32\n")
    (run / "auto.json").write_text('{"run": {"precision": "fp32", "lanes": 24}}')
    page = write_report(run).read_text(encoding="utf-8")
    table = page[page.index('<section id="config">') : page.index("all keys, with")]
    rows = re.findall(r"<tr><td>(.*?)</td><td class=\"text\">(.*?)</td><td>(.*?)</td>", table)
    assert rows == [("training.precision", "fp32", "file"), ("lanes", "24", "auto")]


@pytest.mark.parametrize(
    ("start", "event", "shown"),
    [
        ({"device": "arm", "device_type": "cpu"}, {"device": "cpu"}, False),
        ({"device": "NVIDIA H100", "device_type": "cuda"}, {}, True),
    ],
)
def test_memory_is_shown_with_its_plan_where_it_is_that_of_a_device(tmp_path, start, event, shown):
    plan = {"plan": {"total_bytes": 3 << 30, "device_bytes": 4 << 30}}
    _, *lines = runs.history(20)
    lines = [runs.start_line(0) | start | plan, *lines]
    lines.append(runs.event_line(4, "memory_compared", planned_gb=3.0) | event)
    found = {one.name: one for one in figures(collect(runs.write_run(tmp_path, lines)))}
    assert [name for name, _ in found["memory"].limits] == ["planned", "device"] * shown
    assert all(line.get("mfu") is None for line in lines), "the peak of many GPUs is not known"


def test_a_router_loss_has_a_figure_where_there_is_one(tmp_path):
    plain = runs.history()
    mixture = [line | {"router_loss": 0.02} if line["kind"] == "train" else line for line in plain]
    for lines, shown in ((plain, False), (mixture, True)):
        folder = tmp_path / str(shown)
        folder.mkdir()
        found = [one.name for one in figures(collect(runs.write_run(folder, lines)))]
        assert ("router_loss" in found) == shown


@pytest.mark.parametrize(
    ("loss", "limits", "names"),
    [
        ("dpo", ["ln 2: no preference"], ["chosen", "rejected"]),
        ("ipo", [], ["chosen", "rejected"]),
        ("kto", [], ["good", "bad"]),
    ],
)
def test_a_run_on_pairs_has_figures_of_its_answers(tmp_path, loss, limits, names):
    config = runs.PREFERENCE.format(loss=loss, beta=0.1)
    tables = collect(runs.write_run(tmp_path, runs.preferred_history(), config=config))
    found = {one.name: one for one in figures(tables)}
    assert list(found)[:4] == ["loss", "accuracy", "reward", "logp"]
    assert (found["loss"].unit, [name for name, _ in found["loss"].limits]) == (
        "nats a pair",
        limits,
    )
    assert [one.label for one in found["accuracy"].series] == ["training", "held-out"]
    assert found["accuracy"].limits == (("guessing", 50.0),)
    assert found["accuracy"].series[1].curve.mean[0] == 50.0
    assert [[one.label for one in found[name].series] for name in ("reward", "logp")] == [names] * 2


def test_figures_of_answers_are_left_out_where_there_are_none(tmp_path):
    config = runs.PREFERENCE.format(loss="reward", beta=0.1)
    none = {"chosen_logp": None, "rejected_logp": None, "chosen_loss": None}
    lines = [line | none if "pairs" in line else line for line in runs.preferred_history()]
    (tmp_path / "scores").mkdir()
    found = collect(runs.write_run(tmp_path / "scores", lines, config=config))
    assert [one.name for one in figures(found)][:3] == ["loss", "accuracy", "reward"]
    plain = collect(runs.write_run(tmp_path, runs.history()))
    assert not {"accuracy", "reward", "logp"} & {one.name for one in figures(plain)}


def test_the_notebooks_part_has_the_verdict_and_the_figure_and_no_script(tmp_path):
    part = inline(collect(runs.write_run(tmp_path, HOSTILE_LINES)))
    assert "Held-out loss" in part
    assert part.count("<svg") >= 1
    assert "<script" not in part


def test_the_report_goes_where_it_is_asked_to(tmp_path):
    run = runs.write_run(tmp_path / "run", runs.history(20))
    assert write_report(run, tmp_path / "other.html") == tmp_path / "other.html"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "other.html"}
    assert not (run / "report.html").exists()


def test_a_place_that_cannot_be_written_is_named_and_nothing_is_left_there(tmp_path):
    run_dir = runs.write_run(tmp_path / "run", runs.interrupted_history(), runs.status("stopped"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder"):
        write_report(run_dir, tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run"]


# Whatever a run directory has in it, `llmtrain report` writes a page or says why it cannot.
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


def exit_code(*arguments):
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
    assert exit_code(folder) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert said in page
    assert page.count('<span class="mark">') == 8
    assert not re.search(r"\b(nan|inf|NaN|Infinity|None|Undefined)\b", page[page.index("<body") :])
    assert "\u202e" not in page
    assert "<script>alert" not in page
    assert len(caplog.records) <= 7  # a message for each of the first lines, and how many more
    assert exit_code(folder, good, "--out", tmp_path / "c.html") == 0
    assert (
        "ends lowest" in (tmp_path / "c.html").read_text()
        or "nothing can be compared" in (tmp_path / "c.html").read_text()
    )


def test_a_directory_that_is_no_run_and_several_runs_without_a_file_are_bad_input(
    tmp_path, good, capsys
):
    (tmp_path / "none").mkdir()
    assert exit_code(tmp_path / "none") == 2
    said = capsys.readouterr().err
    assert "expected: a run directory, with metrics.jsonl in it" in said
    assert exit_code(good, good) == 2
    said = capsys.readouterr().err
    assert "--out" in said
    assert "Traceback" not in said
    assert not list(good.glob("*.html"))


def test_a_run_compared_with_itself_ends_equal_and_the_page_says_that_it_is_the_same(
    tmp_path, capsys
):
    lines = [runs.start_line(0) | {"run_id": "a1"}, *runs.history(100)[1:]]
    run = runs.write_run(tmp_path / "run", lines, config=CONFIG)
    assert exit_code(run, run, "--out", tmp_path / "c.html") == 0
    page = (tmp_path / "c.html").read_text(encoding="utf-8")
    assert "run and run (2) end equal: held-out loss" in page
    assert "The same run is here more than once." in page


@pytest.mark.parametrize("evaluated", [True, False])
def test_runs_with_other_tokenizers_are_compared_by_bits_per_byte(tmp_path, good, evaluated):
    lines = [line for line in runs.history(100) if evaluated or line["kind"] != "eval"]
    config = CONFIG.replace("tokenizer: sample", "tokenizer: {train: 512}")
    other = runs.write_run(tmp_path / "other", lines, config=config)
    assert exit_code(good, other, "--out", tmp_path / "c.html") == 0
    page = (tmp_path / "c.html").read_text(encoding="utf-8")
    assert "The tokenizers differ" in page
    assert ("end equal: bits per byte" if evaluated else "nothing can be compared") in page
    assert "Training loss</h3>" not in page


# The colours of a report: apart for everybody, and legible.
CSS = (Path(llmtrain.report.__file__).parent / "style.css").read_text(encoding="utf-8")
CURVES = ("c0", "c1", "c2", "c3")
# Machado, Oliveira and Fernandes (2009), severity 1.0, for linear RGB.
SIGHT = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def colours(scheme):
    """The variables of a scheme; the dark one comes second."""
    part = CSS.split("prefers-color-scheme: dark")[scheme == "dark"]
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6});", part))


def linear(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * one for one in colour[1:])
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    return [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]


def lab(rgb):
    """CIELAB of linear sRGB, D65."""
    r, g, b = (min(1.0, max(0.0, one)) for one in rgb)
    x = (0.4124564 * r + 0.3575761 * g + 0.1804375 * b) / 0.95047
    y = 0.2126729 * r + 0.7151522 * g + 0.0721750 * b
    z = (0.0193339 * r + 0.1191920 * g + 0.9503041 * b) / 1.08883

    def f(t):
        return t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116

    return 116 * f(y) - 16, 500 * (f(x) - f(y)), 200 * (f(y) - f(z))


def difference(one, other, sight):
    """ΔE*ab (CIE 1976) of two colours, as an eye of this kind sees them."""
    seen = [
        lab([sum(w * c for w, c in zip(row, linear(colour), strict=True)) for row in SIGHT[sight]])
        for colour in (one, other)
    ]
    return sum((a - b) ** 2 for a, b in zip(*seen, strict=True)) ** 0.5


def contrast(one, other):
    """The contrast ratio of WCAG."""
    lights = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(linear, (one, other))]
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def test_black_and_white_differ_by_a_hundred_for_every_eye():
    for sight in SIGHT:
        assert difference("#000000", "#ffffff", sight) == pytest.approx(100, abs=0.1)
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("names", "least"), [(CURVES, 20), (OWNERS, 11)], ids=["curves", "bands"])
def test_colours_stay_apart_under_three_kinds_of_colour_blindness(scheme, names, least):
    own = colours(scheme)
    for (one, other), sight in itertools.product(itertools.combinations(names, 2), SIGHT):
        assert difference(own[one], own[other], sight) >= least, (one, other, sight)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_curves_and_words_stand_out_from_the_page(scheme):
    own = colours(scheme)
    for name in CURVES:
        assert contrast(own[name], own["page"]) >= 3.5
    for name in ("ink", "soft", "good", "look", "bad", "accent"):
        assert contrast(own[name], own["page"]) >= 4.5, name


def test_the_head_of_a_page_names_what_cuts_the_model(tmp_path):
    start = runs.start_line(0) | {"strategy": "fsdp2", "tensor_parallel": 2}
    page = write_report(runs.write_run(tmp_path, [start])).read_text(encoding="utf-8")
    assert "fsdp2 × tensor parallel 2 on 2 × cpu" in page


def changed_machines():
    """One process, then two from step 100 on; the last line before that is of step 170."""
    lines, after = [], False
    for line in runs.interrupted_history():
        after = after or (line["kind"] == "start" and line["step"] == 100)
        size = {"world_size": 2 if after else 1} if line["kind"] == "start" else {}
        lines.append(line | size)
    return lines


def test_the_number_of_processes_is_drawn_over_the_time_if_it_changed(tmp_path):
    tables = collect(runs.write_run(tmp_path / "run", changed_machines()))
    (one,) = [figure for figure in figures(tables) if figure.name == "processes"]
    assert one.across in ("second", "minute")
    ((series),) = one.series
    assert series.curve.mean == (1.0, 1.0, 2.0, 2.0)
    assert list(series.curve.steps) == sorted(series.curve.steps)
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert re.search(r"<td>1 → 2</td><td>100</td><td>70</td>", page)


def test_a_restart_on_as_many_processes_has_a_row_and_no_figure(tmp_path):
    run_dir = runs.write_run(tmp_path / "run", runs.interrupted_history())
    assert "processes" not in {figure.name for figure in figures(collect(run_dir))}
    assert "1 restarts" not in (page := write_report(run_dir).read_text(encoding="utf-8"))
    assert "1 restart</summary>" in page
