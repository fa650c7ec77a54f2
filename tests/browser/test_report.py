"""Reports in a real browser. Screenshots go to LLMTRAIN_TEST_SHOTS, if that names a directory."""

import os
from pathlib import Path

import pytest
from helpers import runs
from helpers.browser import MISSING, browser_path
from helpers.rings import diagonal
from helpers.runs import HOSTILE

from llmtrain.report.compare import write_comparison
from llmtrain.report.page import write_report

LINES = [
    *runs.interrupted_history()[:-1],
    runs.sample_line(300, HOSTILE, prompt=HOSTILE),
    runs.event_line(300, HOSTILE, **{HOSTILE: HOSTILE}),
    runs.end_line(300),
]
OVERLAPS = """
() => [...document.querySelectorAll(".plot")].flatMap((plot) => [".x b", ".y b"].flatMap((kind) => {
  const boxes = [...plot.querySelectorAll(kind)].map((one) => one.getBoundingClientRect())
    .filter((box) => box.width > 0);
  return boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) =>
    a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom).map(() => kind));
}))
"""
UNHINTED = """
() => [...document.querySelectorAll("*")].filter((one) => one.scrollWidth > one.clientWidth + 1
  && getComputedStyle(one).overflowX === "auto"
  && !getComputedStyle(one).backgroundImage.includes("gradient")).map((one) => one.outerHTML)
"""
SCROLLING = """
() => [...document.querySelectorAll(".scroll")].filter((one) => one.scrollWidth > one.clientWidth)
  .length
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    status = runs.status("failed", reason=HOSTILE, exit_code=75)
    hostile = runs.write_run(root / "<b>run", LINES, status, config=f"# {HOSTILE}\n")
    plain = runs.write_run(root / "plain", runs.history(3000))
    config = runs.PREFERENCE.format(loss="dpo", beta=0.1)
    answers = runs.preferred_history(falls=0.4)
    preferred = runs.write_run(root / "preferred", answers, config=config)
    few = runs.write_run(root / "few", [runs.start_line(0), runs.train_line(1, loss=1e30)])
    return {
        "hostile": write_report(hostile),
        "plain": write_report(plain),
        "few": write_report(few),
        "preferred": write_report(preferred),
        "compared": write_comparison([hostile, plain], root / "c.html"),
    }


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


def opened(browser, path, said, **options):
    page = browser.new_page(**options)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.on("request", lambda request: said.append(request.url) if ":" in request.url[:6]
            and not request.url.startswith(("data:", path.as_uri())) else None)  # fmt: skip
    page.goto(path.as_uri())
    return page


@pytest.mark.parametrize("name", ["hostile", "plain", "few", "preferred", "compared"])
@pytest.mark.parametrize(("width", "scheme"), diagonal([1280, 390], ["light", "dark"]))
def test_a_page_is_silent_fits_and_its_labels_do_not_overlap(pages, chromium, name, width, scheme):
    said = []
    view = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    page = opened(chromium, pages[name], said, **view)
    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate(UNHINTED) == []
    if (name, width) == ("compared", 390):
        assert page.evaluate(SCROLLING) >= 1
    if folder := os.environ.get("LLMTRAIN_TEST_SHOTS"):
        page.screenshot(path=Path(folder) / f"{name}-{width}-{scheme}.png", full_page=True)
    page.close()


@pytest.mark.parametrize("name", ["hostile", "plain", "few", "preferred", "compared"])
def test_with_scripts_off_every_figure_is_drawn_and_hostile_text_is_text(pages, chromium, name):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(pages[name].as_uri())
    drawn = page.locator("figure.figure").count()
    assert drawn >= 1
    for place in range(drawn):
        line = page.locator("figure.figure").nth(place).locator(".plot .line").first
        assert len(line.get_attribute("d")) > 5
        assert line.bounding_box()["width"] >= 0
    if name == "hostile":
        assert HOSTILE in page.locator("#samples").text_content()
        assert page.locator("#samples img").count() == 0
    context.close()


def test_hovering_changes_a_legend_dragging_an_axis_and_a_double_click_goes_back(pages, chromium):
    said = []
    page = opened(chromium, pages["plain"], said, viewport={"width": 1280, "height": 900})
    figure = page.locator("#figure-loss")
    output, svg = figure.locator(".entry output").first, figure.locator(".plot > svg")
    labels = lambda: figure.locator(".x b").all_text_contents()  # noqa: E731
    before, at_rest = labels(), output.text_content()
    box = svg.bounding_box()
    row = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.2 * box["width"], row)
    assert output.text_content() != at_rest
    assert figure.locator(".at").text_content().startswith("step 6")
    assert page.locator("#figure-grad_norm .at").text_content().startswith("step 6")
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], row)
    page.mouse.up()
    assert labels() != before
    assert page.locator("#figure-speed .plot > svg").get_attribute("viewBox") != "0 0 10000 3000"
    page.mouse.dblclick(box["x"] + 0.5 * box["width"], row)
    assert labels() == before
    assert said == []
    page.close()
