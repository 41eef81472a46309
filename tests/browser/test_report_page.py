"""The HTML report in a real browser: charts, themes, phone, paper, keyboard, and texts that try to be code."""

import base64
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from harness.analysis.summarize import read_summary
from harness.report.charts.data import read_chart_data
from harness.report.charts.figures import MAX_CHART_DOTS
from harness.report.html import render, write_report
from harness.summary import Answers, FailedRequests, because
from tests.report_runs import HOSTILE, write_run_directory

CHARTS = [
    "throughput", "first-token", "trade-ttft", "trade-e2e", "cdf-ttft", "cdf-tpot", "cdf-e2e", "timeline", "dots-ttft",
    "dots-e2e", "startup",
]  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    write_run_directory(folder, repeats=2, requests=30, faults=3)
    return write_report(folder).as_uri()


def script(browser: webdriver.Chrome, text: str) -> Any:
    return browser.execute_script(text)


def complaints(browser: webdriver.Chrome) -> list[dict[str, Any]]:
    """The console's entries since the last call."""
    entries: list[dict[str, Any]] = browser.get_log("browser")  # type: ignore[no-untyped-call]
    # Chromium drops what it is loading when a network of the machine comes or goes, as Docker's do in other tests.
    return [entry for entry in entries if "net::ERR_NETWORK_CHANGED" not in entry["message"]]


def show(
    browser: webdriver.Chrome, page: str, *, width: int = 1280, scheme: str = "light", phone: bool = False
) -> None:
    """Open the page anew and wait for its charts."""
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": phone}
    )
    browser.get(page)
    WebDriverWait(browser, 60).until(lambda b: script(b, "return document.body.dataset.charts"))


def keep(browser: webdriver.Chrome, name: str) -> bytes:
    """A picture of the whole page; kept for people in the directory that SCREENSHOTS names."""
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
    picture = base64.b64decode(shot["data"])
    if folder := os.environ.get("SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.png").write_bytes(picture)
    return picture


def background(browser: webdriver.Chrome) -> tuple[str, str]:
    """The colours behind the page and behind its first chart."""
    chart = "document.querySelector('#chart-throughput .main-svg').style.background"
    body, drawn = script(browser, f"return [getComputedStyle(document.body).backgroundColor, {chart}]")
    return body, drawn


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_charts_are_drawn_without_a_complaint(browser: webdriver.Chrome, page: str, scheme: str) -> None:
    show(browser, page, scheme=scheme)
    assert script(browser, "return document.body.dataset.charts") == "ready"
    for chart in CHARTS:
        size = script(
            browser, f"return document.querySelector('#chart-{chart} .main-svg')?.getBoundingClientRect().width"
        )
        assert size > 200, chart
    assert complaints(browser) == []
    assert len(keep(browser, scheme)) > 50_000


def test_the_theme_follows_the_system_and_the_button(browser: webdriver.Chrome, page: str) -> None:
    show(browser, page, scheme="dark")
    script(browser, "localStorage.clear()")
    dark = background(browser)
    assert dark == ("rgb(16, 18, 20)", "rgb(23, 25, 28)")
    button = browser.find_element(By.ID, "theme")
    assert button.get_attribute("aria-label") == "Switch to the light theme"
    button.click()
    assert background(browser) == ("rgb(247, 247, 245)", "rgb(255, 255, 255)")
    show(browser, page, scheme="dark")
    assert background(browser)[0] == "rgb(247, 247, 245)"  # the choice is remembered
    browser.find_element(By.ID, "theme").click()
    assert background(browser) == dark
    script(browser, "localStorage.clear()")


@pytest.mark.parametrize("width", [320, 768, 1101])
def test_nothing_is_wider_than_the_screen(browser: webdriver.Chrome, page: str, width: int) -> None:
    show(browser, page, width=width, phone=True)
    assert script(browser, "return document.documentElement.scrollWidth") == width
    sticking_out = """
        const inside = (e) => e.closest(".scroll, .sheet, pre, .plot, .hidden, .skip, [popover], .contents, thead");
        return [...document.querySelectorAll("body *")]
            .filter((e) => !inside(e) && e.getBoundingClientRect().right > innerWidth + 0.5)
            .map((e) => e.tagName + "." + e.className);
    """
    assert script(browser, sticking_out) == []
    keep(browser, f"phone-{width}")


@pytest.mark.parametrize("width", [1300, 400])
def test_a_long_word_breaks_instead_of_the_page(browser: webdriver.Chrome, tmp_path: Path, width: int) -> None:
    long = "W" * 250
    run = write_run_directory(tmp_path, repeats=1, requests=12, faults=1)
    summary = read_summary(tmp_path)
    failed = FailedRequests(
        server="open", load="sequential", kind="http", count=1, message=f"{long} said", cause=long, fix=long
    )
    summary = msgspec.structs.replace(
        summary,
        question=f"Is {long} fast?",
        failures=[failed],
        reasons=[because("text", text=long)],
        notes=[because("text", text=f"r1: {long}")],
        valid=False,
    )
    (tmp_path / "report.html").write_text(render(summary, run, read_chart_data(tmp_path)))
    show(browser, (tmp_path / "report.html").as_uri(), width=width, phone=width < 500)
    wider = "const page = document.documentElement; return page.scrollWidth - page.clientWidth"
    assert script(browser, wider) == 0


def test_the_verdict_of_structured_answers_needs_no_scrolling(browser: webdriver.Chrome, tmp_path: Path) -> None:
    run = write_run_directory(tmp_path, repeats=2, requests=30, faults=0)
    summary = read_summary(tmp_path)
    judged = Answers(checked=280, valid=280, valid_share=1.0, labelled=280, right=216, right_share=216 / 280)
    pooled = [msgspec.structs.replace(row.pooled, answers=judged) for row in summary.rows]
    rows = [msgspec.structs.replace(row, pooled=of) for row, of in zip(summary.rows, pooled, strict=True)]
    summary = msgspec.structs.replace(summary, rows=rows)
    (tmp_path / "report.html").write_text(render(summary, run, read_chart_data(tmp_path)))
    show(browser, (tmp_path / "report.html").as_uri())
    heads = [head.text for head in browser.find_elements(By.CSS_SELECTOR, ".main thead th")]
    assert "Valid answers" in heads and "Verdict" in heads
    assert script(browser, "const s = document.querySelector('.sheet'); return s.scrollWidth - s.clientWidth") == 0


@pytest.mark.parametrize("width", [1280, 390])
def test_no_text_of_a_chart_lies_on_another(browser: webdriver.Chrome, page: str, width: int) -> None:
    show(browser, page, width=width, phone=width < 500)
    overlaps = """
        const kinds = ".xtick text, .ytick text, .y2tick text, .y3tick text, .y4tick text, .xtitle, .ytitle, .y2title,"
            + ".y3title, .y4title, .legendtext, .annotation-text, .scatterlayer .textpoint text";
        const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
        return [...document.querySelectorAll(".plot")].flatMap((plot) => {
            const texts = [...plot.querySelectorAll(kinds)].filter((e) => e.textContent.trim());
            const boxes = texts.map((e) => e.getBoundingClientRect());
            return texts.flatMap((e, i) => texts.slice(0, i).filter((_, k) => over(boxes[i], boxes[k]))
                .map((other) => `${plot.id}: ${e.textContent} on ${other.textContent}`));
        });
    """
    assert script(browser, overlaps) == []


@pytest.mark.parametrize("width", [1280, 390])
def test_no_part_of_the_page_lies_on_another(browser: webdriver.Chrome, page: str, width: int) -> None:
    show(browser, page, width=width, phone=width < 500)
    overlaps = """
        const parts = [...document.querySelectorAll("main > *, section > *, .pair > *, .triple > *, figure > *")]
            .filter((e) => e.offsetParent && !e.matches(".contents, .hidden"));
        const boxes = parts.map((e) => e.getBoundingClientRect());
        const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
        return parts.flatMap((e, i) => parts.slice(0, i)
            .filter((other, k) => !e.contains(other) && !other.contains(e) && over(boxes[i], boxes[k]))
            .map((other) => `${e.tagName}.${e.className} on ${other.tagName}.${other.className}`));
    """
    assert script(browser, overlaps) == []


def test_every_chart_can_be_saved_in_both_formats(browser: webdriver.Chrome, page: str) -> None:
    show(browser, page)
    script(browser, "Plotly.downloadImage = (plot, how) => { (window.saved ??= []).push([plot.id, how]); };")
    for button in browser.find_elements(By.CSS_SELECTOR, "button[data-save]"):
        script(browser, f"document.querySelector('[aria-label=\"{button.get_attribute('aria-label')}\"]').click()")
    saved = script(browser, "return window.saved")
    assert [(name, how["format"]) for name, how in saved] == [
        (f"chart-{chart}", kind) for chart in CHARTS for kind in ("svg", "png")
    ]
    assert saved[14][1]["filename"].startswith("timeline-r1-")
    for kind, start in (("svg", "data:image/svg+xml,"), ("png", "data:image/png;base64,")):
        image = browser.execute_async_script(
            "Plotly.toImage('chart-throughput', {format: arguments[0]}).then(arguments[1], arguments[1])", kind
        )
        assert image.startswith(start) and len(image) > 2000
    assert complaints(browser) == []


def test_hovering_shows_numbers(browser: webdriver.Chrome, page: str) -> None:
    show(browser, page)
    for chart, said in (
        ("throughput", "tok/s"),
        ("trade-ttft", "ms p50"),
        ("dots-ttft", "sent at"),
        ("cdf-e2e", "within"),
    ):
        text = script(
            browser,
            f"const plot = document.getElementById('chart-{chart}');"
            "Plotly.Fx.hover(plot, [{curveNumber: 0, pointNumber: 0}]);"
            "return plot.querySelector('.hoverlayer').textContent;",
        )
        assert said in text, chart


def test_the_keyboard_reaches_everything(browser: webdriver.Chrome, page: str) -> None:
    show(browser, page)
    keys = ActionChains(browser)
    keys.send_keys(Keys.TAB).perform()
    focused = "return [document.activeElement.className, document.activeElement.textContent]"
    assert script(browser, focused) == ["skip", "Skip to the results"]
    assert script(browser, "return document.activeElement.getBoundingClientRect().left") >= 0
    keys.send_keys(Keys.ENTER).perform()
    assert script(browser, "return document.activeElement.id") == "results"
    keys.send_keys(Keys.TAB).perform()
    assert script(browser, "return document.activeElement.textContent.trim()") == "Server"
    assert script(browser, "return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    keys.send_keys(Keys.ENTER).perform()
    assert script(browser, "return document.getElementById('about-server').matches(':popover-open')") is True
    keys.send_keys(Keys.ESCAPE).perform()
    unreachable = """return [...document.querySelectorAll("summary, button, select, a")]
        .filter((e) => e.offsetParent && e.tabIndex < 0).length"""
    assert script(browser, unreachable) == 0


def test_cards_on_a_phone_hold_their_texts(browser: webdriver.Chrome, page: str) -> None:
    show(browser, page, width=390, phone=True)
    outside = """
        return [...document.querySelectorAll(".main tbody")].flatMap((card) => {
            const edge = card.getBoundingClientRect().right;
            return [...card.querySelectorAll("*")].filter((e) => e.getBoundingClientRect().right > edge)
                .map((e) => e.textContent);
        });
    """
    assert script(browser, outside) == []


def test_paper_has_every_chart_in_light_colours(browser: webdriver.Chrome, page: str, tmp_path: Path) -> None:
    show(browser, page, scheme="dark")
    script(
        browser,
        """addEventListener("beforeprint", () => { window.printed = {
            theme: document.documentElement.dataset.theme,
            widths: [...document.querySelectorAll(".plot .main-svg:first-child")].map((e) => e.clientWidth),
            open: document.querySelectorAll("details.printed:not([open])").length,
        }; });""",
    )
    result = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True, "preferCSSPageSize": True})
    assert base64.b64decode(result["data"]).startswith(b"%PDF")
    printed = script(browser, "return window.printed")
    assert (printed["theme"], printed["open"]) == ("light", 0)
    assert len(printed["widths"]) == len(CHARTS) and max(printed["widths"]) == 660
    assert script(browser, "return document.documentElement.dataset.theme") is None
    assert background(browser)[1] == "rgb(23, 25, 28)"
    if folder := os.environ.get("SCREENSHOTS"):
        (Path(folder) / "print.pdf").write_bytes(base64.b64decode(result["data"]))


def test_texts_from_outside_do_not_run(browser: webdriver.Chrome, page: str) -> None:
    show(browser, page)
    assert "hacked" not in browser.title
    said = browser.find_elements(By.CSS_SELECTOR, "#errors li")
    assert any(HOSTILE in element.text for element in said)


def test_the_policy_of_the_page_forbids_other_scripts(browser: webdriver.Chrome, page: str) -> None:
    show(browser, page)
    script(
        browser,
        """const other = document.createElement("script");
        other.textContent = "window.ran = true";
        document.head.append(other);""",
    )
    assert script(browser, "return window.ran") is None
    assert "Content Security Policy" in complaints(browser)[-1]["message"]


def test_another_run_can_be_chosen_in_the_timeline(browser: webdriver.Chrome, page: str) -> None:
    show(browser, page)
    last = "return document.getElementById('chart-timeline').data.at(-1).x.at(-1)"
    before = script(browser, last)
    choice = Select(browser.find_element(By.ID, "timeline-cell"))
    assert choice.first_selected_option.text == "r1-limited-batch-10"
    choice.select_by_visible_text("r2-open-sequential")
    assert script(browser, last) > 2 * before
    label = browser.find_element(By.ID, "chart-timeline").get_attribute("aria-label")
    assert label == "Timeline of r2-open-sequential; its numbers are in the table below"


def test_a_row_can_be_hidden_in_all_distributions(browser: webdriver.Chrome, page: str) -> None:
    show(browser, page)
    shown = """return [...document.querySelectorAll("[id^=chart-cdf-]")]
        .map((plot) => plot.data.filter((trace) => trace.visible !== false).length)"""
    assert script(browser, shown) == [6, 6, 6]
    script(browser, "document.querySelector('button[data-row=\"2\"]').click()")
    assert script(browser, shown) == [5, 5, 5]
    script(browser, "document.querySelector('button[data-row=\"2\"]').click()")
    assert script(browser, shown) == [6, 6, 6]


def test_every_number_has_its_formula_one_press_away(browser: webdriver.Chrome, page: str) -> None:
    show(browser, page)
    for button in browser.find_elements(By.CSS_SELECTOR, ".main thead button"):
        about = browser.find_element(By.ID, str(button.get_attribute("popovertarget")))
        assert not about.is_displayed()
        script(browser, f"document.querySelector('[popovertarget=\"{about.get_attribute('id')}\"]').click()")
        assert about.is_displayed() and about.find_element(By.TAG_NAME, "code").text
        script(browser, f"document.getElementById('{about.get_attribute('id')}').hidePopover()")


def test_what_a_screen_reader_finds(browser: webdriver.Chrome, page: str) -> None:
    show(browser, page, width=390, phone=True)
    tree = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = [node["role"]["value"] for node in tree if not node["ignored"]]
    names = [node.get("name", {}).get("value", "") for node in tree if not node["ignored"]]
    assert roles.count("main") == 1
    assert roles.count("rowheader") >= 6  # the table is still a table when it looks like cards
    assert "Throughput over concurrency" in " ".join(names)
    unnamed = [r for r, n in zip(roles, names, strict=True) if r in ("button", "link", "image", "combobox") and not n]
    assert unnamed == []


def test_it_reads_without_javascript(browser: webdriver.Chrome, page: str) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(page)
        text = browser.find_element(By.TAG_NAME, "body").text
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "The charts need JavaScript. The table below each one holds the same numbers." in text
    assert "4.2" in text


@pytest.mark.nightly
def test_a_large_run_opens_fast(browser: webdriver.Chrome, tmp_path: Path) -> None:
    write_run_directory(tmp_path, repeats=1, requests=16_667, chunks=8)
    page = write_report(tmp_path).as_uri()
    start = time.perf_counter()
    show(browser, page)
    drawn_s = script(browser, "return performance.getEntriesByName('charts')[0].startTime") / 1000
    print(f"100,000 requests: drawn {drawn_s:.2f} s after the page was asked for")
    dots = "return document.getElementById('chart-dots-e2e').data.reduce((sum, trace) => sum + trace.x.length, 0)"
    assert script(browser, dots) <= MAX_CHART_DOTS
    assert script(browser, "return performance.getEntriesByName('first-contentful-paint')[0].startTime") < 2000
    assert time.perf_counter() - start < 10  # all charts, on a machine that does other things as well
    keep(browser, "large")
