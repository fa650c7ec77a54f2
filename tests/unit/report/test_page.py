import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from helpers import runs
from helpers.runs import HOSTILE

from llmtrain.errors import UserError
from llmtrain.report.collect import collect
from llmtrain.report.page import figures, inline, write_report

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


def test_a_run_without_a_step_has_a_page(tmp_path):
    page = write_report(runs.write_run(tmp_path, [runs.start_line(0)])).read_text(encoding="utf-8")
    assert "There is no line of a step yet." in page
    assert "script-src 'none'" in page.replace("&#39;", "'")


def test_only_a_directory_with_a_record_is_a_run(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        write_report(tmp_path)


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
        ({"device": "NVIDIA GeForce GT 9", "device_type": None}, {}, True),  # an older record
        ({"device": "x86_64", "device_type": None}, {"device": "cpu"}, False),
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
