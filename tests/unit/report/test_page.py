import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from helpers import runs
from helpers.browser import MISSING, browser_path
from helpers.rings import diagonal
from helpers.runs import HOSTILE

from llmtrain.errors import UserError
from llmtrain.report.collect import collect
from llmtrain.report.page import number, size, verdict, warnings, write_report

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


def test_the_page_is_one_file_that_names_no_other(report):
    page = report.read_text(encoding="utf-8")
    assert report.name == "report.html"
    assert report.stat().st_size < 2.5e6
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!data:,)", own)
    assert "@import" not in own
    assert "url(" not in own


def test_every_script_is_allowed_by_its_hash_and_no_other_runs(report):
    page = report.read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page).group(1)
    policy = policy.replace("&#39;", "'")
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert len(scripts) == 2
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
    assert sum(HOSTILE in text for text in parser.texts) >= 5


class Texts(HTMLParser):
    def __init__(self):
        super().__init__()
        self.texts = []

    def handle_data(self, data):
        self.texts.append(data)


def test_a_long_run_stays_small(tmp_path):
    run = runs.write_run(tmp_path, runs.history(20_000, every=1, evaluate_every=50))
    assert write_report(run).stat().st_size < 2.5e6


def test_a_run_without_a_step_has_a_page(tmp_path):
    page = write_report(runs.write_run(tmp_path, [runs.start_line(0)])).read_text(encoding="utf-8")
    assert "There is no line of a step yet." in page
    assert "script-src 'none'" in page.replace("&#39;", "'")


def test_the_report_goes_where_it_is_asked_to(tmp_path):
    run = runs.write_run(tmp_path / "run", runs.history(20))
    assert write_report(run, tmp_path / "other.html") == tmp_path / "other.html"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "other.html"}
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ("finished", "Finished at step 300 of 300 (all steps are done)."),
        (
            "stopped",
            "Stopped at step 300 of 300 (all steps are done). The same command resumes the run.",
        ),
        ("failed", "Failed at step 300 of 300 with exit code 75 (all steps are done)."),
        (
            "running",
            "Running, or ended without writing its end: the last line is of step 300 of 300.",
        ),
        (None, "The run directory has no status; the last line is of step 300 of 300."),
    ],
)
def test_the_verdict_says_in_words_what_became_of_the_run(tmp_path, state, sentence):
    status = runs.status(state, exit_code=75)
    start, *lines = runs.history()
    run = runs.write_run(tmp_path, [start | {"steps": 300}, *lines], status)
    said = verdict(collect(run))
    assert said[0] == sentence
    assert said[1].startswith("The training loss went from 8.9")
    assert "the best is" in said[2]


def test_what_a_person_should_look_at_is_said(tmp_path):
    lines = [*runs.interrupted_history()[:-1], runs.eval_line(301, loss=9.0)]
    waiting = {"span_seconds": 4.0, "span_wait_seconds": 1.0}
    lines += [runs.train_line(step, **waiting) for step in range(310, 400, 10)]
    said = " ".join(warnings(collect(runs.write_run(tmp_path, lines))))
    for part in ("1 update was skipped", "1 restart", "rising", "data.workers"):
        assert part in said
    assert warnings(collect(runs.write_run(tmp_path, runs.history()))) == []


def test_the_share_of_waiting_is_that_of_all_steps_not_of_logged_ones(tmp_path):
    # Ten steps a line, of 0.4 s each; the step of the line itself happened to wait for 0.1 s.
    often = [runs.train_line(step, data_wait_seconds=0.1) for step in range(10, 200, 10)]
    assert warnings(collect(runs.write_run(tmp_path, [runs.start_line(0), *often]))) == []
    rarely = [runs.train_line(step, span_wait_seconds=0.4) for step in range(10, 200, 10)]
    (said,) = warnings(collect(runs.write_run(tmp_path, [runs.start_line(0), *rarely])))
    assert said == "The run waited for data 10% of the time: raise data.workers."


def test_the_start_of_the_data_workers_is_no_waiting_that_more_of_them_would_cure(tmp_path):
    opening = {"seconds": 9.0, "span_seconds": 9.0, "span_wait_seconds": 8.0}
    lines = [runs.start_line(0), runs.train_line(1, data_wait_seconds=8.0, **opening)]
    lines += [runs.train_line(step) for step in range(10, 60, 10)]
    assert warnings(collect(runs.write_run(tmp_path, lines))) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (float("nan"), "–"), (0.000123456, "0.0001235"), (2.34567891, "2.3457"),
     (12345.6, "12,346"), (3, "3")],
)  # fmt: skip
def test_numbers_have_five_digits(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (14_900_000, "14.2 MiB"), (None, "–"), (2**50, "1,024.0 TiB")],
)
def test_sizes_are_for_people(value, text):
    assert size(value) == text


def test_a_place_that_cannot_be_written_is_named_and_nothing_is_left_there(tmp_path):
    run_dir = runs.write_run(tmp_path / "run", runs.interrupted_history(), runs.status("stopped"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder"):
        write_report(run_dir, tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run"]


@pytest.fixture(scope="module")
def chromium():
    if browser_path() is None:
        pytest.skip(MISSING)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.mark.parametrize(("width", "scheme"), diagonal([1280, 390], ["light", "dark"]))
def test_in_a_browser_every_figure_has_ink_and_the_console_is_silent(
    report, chromium, width, scheme
):
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_function("Bokeh.documents.length === 1 && Bokeh.documents[0].is_idle")
    assert said == []  # before the canvases are read, which Chromium remarks on
    inked = page.evaluate(INK)
    assert len(inked) == 4
    assert min(inked) > 100
    assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert HOSTILE in page.locator("#samples").text_content()
    page.close()


# For each figure, how many pixels have a colour: curves do, axes and letters are grey.
INK = """
() => {
  const canvases = (node) => [
    ...node.querySelectorAll("canvas"),
    ...[...node.querySelectorAll("*")].flatMap((inner) =>
      inner.shadowRoot ? canvases(inner.shadowRoot) : []),
  ];
  const ink = (canvas) => {
    const all = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let pixels = 0;
    for (let i = 0; i < all.length; i += 4) {
      const [r, g, b, alpha] = all.slice(i, i + 4);
      if (alpha > 200 && Math.max(r, g, b) - Math.min(r, g, b) > 60) pixels += 1;
    }
    return pixels;
  };
  return [...document.querySelectorAll(".plot")].map((plot) => {
    const found = canvases(plot).filter((canvas) => canvas.width > 0 && canvas.height > 0);
    return Math.max(0, ...found.map(ink));
  });
}
"""
