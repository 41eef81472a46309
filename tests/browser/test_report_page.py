"""The HTML report in a real browser: charts, themes, phone, paper, keyboard, and texts that try to be code."""

import base64
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from harness.base.reason import because
from harness.failures.diagnosis import FailedRequests
from harness.numbers.summarize import read_summary
from harness.questions.report.page import render_html as render
from harness.report.charts.data import read_chart_data
from harness.report.charts.figures import MAX_CHART_DOTS
from tests.support.nightly import NIGHTLY
from tests.support.report_runs import HOSTILE, write_report, write_run_directory

CHARTS = [
    "throughput",
    "first-token",
    "trade-e2e",
    "cdf-ttft",
    "cdf-tpot",
    "cdf-e2e",
    "timeline",
    "dots-e2e",
    "startup",
]


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


OVERLAPS = """
    const kinds = ".xtick text, .ytick text, .y2tick text, .y3tick text, .y4tick text, .xtitle, .ytitle, .y2title,"
        + ".y3title, .y4title, .legendtext, .annotation-text, .scatterlayer .textpoint text";
    const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
    const overlaps = (elements, name) => {
        const boxes = elements.map((e) => e.getBoundingClientRect());
        return elements.flatMap((e, i) => elements.slice(0, i)
            .filter((other, k) => !e.contains(other) && !other.contains(e) && over(boxes[i], boxes[k]))
            .map((other) => `${name(e)} on ${name(other)}`));
    };
    const texts = [...document.querySelectorAll(".plot")].flatMap((plot) =>
        overlaps([...plot.querySelectorAll(kinds)].filter((e) => e.textContent.trim()), (e) => e.textContent));
    const parts = [...document.querySelectorAll("main > *, section > *, .pair > *, .triple > *, figure > *")]
        .filter((e) => e.offsetParent && !e.matches(".contents, .hidden"));
    return [...texts, ...overlaps(parts, (e) => e.tagName + "." + e.className)];
"""
STICKING_OUT = """
    const inside = (e) => e.closest(".scroll, .sheet, pre, .plot, .hidden, .skip, [popover], .contents, thead");
    const wide = [...document.querySelectorAll("body *")]
        .filter((e) => !inside(e) && e.getBoundingClientRect().right > innerWidth + 0.5);
    const cards = innerWidth < 500 ? [...document.querySelectorAll(".main tbody")] : [];
    const cut = cards.flatMap((card) => [...card.querySelectorAll("*")]
        .filter((e) => e.getBoundingClientRect().right > card.getBoundingClientRect().right));
    return [...wide, ...cut].map((e) => e.tagName + "." + e.className);
"""
WIDER = "const page = document.documentElement; return page.scrollWidth - page.clientWidth"

FLUSH = """
    const left = (e) => parseFloat(getComputedStyle(e).paddingLeft);
    const isHidden = (e) => e.closest("thead") && getComputedStyle(e.closest("thead")).position === "absolute";
    return [...document.querySelectorAll(".scroll .plain tr > :first-child")]
        .filter((e) => !e.closest(".chart") && !isHidden(e) && left(e) + left(e.parentElement) < 10)
        .map((e) => e.textContent);
"""
SHEET_SCROLLS = "const sheet = document.querySelector('.sheet'); return sheet.scrollWidth - sheet.clientWidth"


@pytest.mark.parametrize(
    ("scheme", "width"),
    [("dark", 1280), ("light", 768), ("light", 320), *([("light", 1280), ("light", 390)] if NIGHTLY else [])],
)
def test_all_charts_are_drawn_and_nothing_overlaps_or_sticks_out(
    browser: webdriver.Chrome, page: str, scheme: str, width: int
) -> None:
    show(browser, page, scheme=scheme, width=width, phone=width < 1000)
    assert script(browser, "return document.body.dataset.charts") == "ready"
    for chart in CHARTS:
        size = script(
            browser, f"return document.querySelector('#chart-{chart} .main-svg')?.getBoundingClientRect().width"
        )
        assert size > 200, chart
    assert width == 320 or script(browser, OVERLAPS) == []
    assert script(browser, STICKING_OUT) == []
    assert script(browser, FLUSH) == [], "a table has space to the edge of its card"
    assert script(browser, WIDER) == 0
    if width == 1280:
        assert script(browser, SHEET_SCROLLS) == 0, "the verdict is in view"
    assert complaints(browser) == []
    assert len(keep(browser, f"{scheme}-{width}")) > 50_000


def test_the_theme_follows_the_system_and_the_button(browser: webdriver.Chrome, page: str) -> None:
    show(browser, page, scheme="dark")
    script(browser, "localStorage.clear()")
    dark = background(browser)
    assert dark == ("rgb(16, 18, 20)", "rgb(23, 25, 28)")
    browser.find_element(By.ID, "theme").click()
    assert background(browser) == ("rgb(247, 247, 245)", "rgb(255, 255, 255)")

    def remembered(_: webdriver.Chrome) -> bool:
        show(browser, page, scheme="dark")
        return background(browser)[0] == "rgb(247, 247, 245)"

    WebDriverWait(browser, 60).until(remembered)  # Chromium stores the choice a moment later
    browser.find_element(By.ID, "theme").click()
    assert background(browser) == dark
    script(browser, "localStorage.clear()")


@pytest.mark.parametrize("width", [1300, 400])
def test_a_long_word_breaks_instead_of_the_page(browser: webdriver.Chrome, tmp_path: Path, width: int) -> None:
    long = "W" * 250
    run = write_run_directory(tmp_path, repeats=1, requests=12, faults=1)
    failed = FailedRequests(
        server="open", load="sequential", kind="http", count=1, message=f"{long} said", cause=long, fix=long
    )
    summary = msgspec.structs.replace(
        read_summary(tmp_path),
        question=f"Is {long} fast?",
        failures=[failed],
        reasons=[because("run_error", long)],
        notes=[because("run_error", f"r1: {long}")],
        valid=False,
    )
    (tmp_path / "report.html").write_text(render(summary, run, read_chart_data(tmp_path)))
    show(browser, (tmp_path / "report.html").as_uri(), width=width, phone=width < 500)
    assert script(browser, WIDER) == 0


def test_charts_can_be_saved_hovered_chosen_and_hidden(browser: webdriver.Chrome, page: str) -> None:
    show(browser, page)
    script(browser, "Plotly.downloadImage = (plot, how) => { (window.saved ??= []).push([plot.id, how]); };")
    script(browser, "for (const button of document.querySelectorAll('button[data-save]')) button.click()")
    saved = script(browser, "return window.saved")
    assert [(name, how["format"]) for name, how in saved] == [
        (f"chart-{chart}", kind) for chart in CHARTS for kind in ("svg", "png")
    ]
    image = browser.execute_async_script(
        "Plotly.toImage('chart-throughput', {format: 'svg'}).then(arguments[0], arguments[0])"
    )
    assert image.startswith("data:image/svg+xml,") and len(image) > 2000
    for chart, text in (
        ("throughput", "tok/s"),
        ("trade-e2e", "at once"),
        ("dots-e2e", "sent at"),
        ("cdf-e2e", "within"),
    ):
        hover = script(
            browser,
            f"const plot = document.getElementById('chart-{chart}');"
            "Plotly.Fx.hover(plot, [{curveNumber: 0, pointNumber: 0}]);"
            "return plot.querySelector('.hoverlayer').textContent;",
        )
        assert text in hover, chart
    last = "return document.getElementById('chart-timeline').data.at(-1).x.at(-1)"
    choice = Select(browser.find_element(By.ID, "timeline-cell"))
    assert choice.first_selected_option.text == "r1-open-sequential", "the first in which requests failed"
    before = script(browser, last)
    choice.select_by_visible_text("r1-limited-batch-10")
    assert before > 2 * script(browser, last)
    shown = """return [...document.querySelectorAll("[id^=chart-cdf-]")]
        .map((plot) => plot.data.filter((trace) => trace.visible !== false).length)"""
    for number in (5, 6):
        script(browser, "document.querySelector('button[data-row=\"2\"]').click()")
        assert script(browser, shown) == [number] * 3
    assert complaints(browser) == []


def test_keyboard_and_screen_reader_reach_everything(browser: webdriver.Chrome, page: str) -> None:
    show(browser, page)
    keys = ActionChains(browser)
    keys.send_keys(Keys.TAB).perform()
    focused = "return [document.activeElement.className, document.activeElement.textContent]"
    assert script(browser, focused) == ["skip", "Skip to Results"]
    keys.send_keys(Keys.ENTER).perform()
    keys.send_keys(Keys.TAB).perform()
    assert script(browser, "return document.activeElement.textContent.trim()") == "Server"
    assert script(browser, "return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    keys.send_keys(Keys.ENTER).perform()
    about = browser.find_element(By.ID, "about-results-server")
    assert about.is_displayed() and about.find_element(By.TAG_NAME, "code").text, "its formula is one press away"
    keys.send_keys(Keys.ESCAPE).perform()
    unreachable = """return [...document.querySelectorAll("summary, button, select, a")]
        .filter((e) => e.offsetParent && e.tabIndex < 0).length"""
    assert script(browser, unreachable) == 0
    show(browser, page, width=390, phone=True)
    tree = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    nodes = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if not n["ignored"]]
    roles = [role for role, _ in nodes]
    assert roles.count("main") == 1
    assert roles.count("rowheader") >= 6, "the table is still a table when it looks like cards"
    assert [role for role, name in nodes if role in ("button", "link", "image", "combobox") and not name] == []


def test_paper_has_every_chart_in_light_colours(browser: webdriver.Chrome, page: str) -> None:
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
    assert background(browser)[1] == "rgb(23, 25, 28)", "and then dark again"
    if folder := os.environ.get("SCREENSHOTS"):
        (Path(folder) / "print.pdf").write_bytes(base64.b64decode(result["data"]))


def test_neither_texts_from_outside_nor_other_scripts_run(browser: webdriver.Chrome, page: str) -> None:
    show(browser, page)
    assert "hacked" not in browser.title
    errors = browser.find_elements(By.CSS_SELECTOR, "#errors li")
    assert any(HOSTILE in element.text for element in errors)
    script(
        browser,
        """const other = document.createElement("script");
        other.textContent = "window.ran = true";
        document.head.append(other);""",
    )
    assert script(browser, "return window.ran") is None
    assert "Content Security Policy" in complaints(browser)[-1]["message"]


def test_it_reads_without_javascript(browser: webdriver.Chrome, page: str) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(page)
        text = browser.find_element(By.TAG_NAME, "body").text
        rates = [cell.text for cell in browser.find_elements(By.CSS_SELECTOR, "#results-table td.k-rate")]
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "The charts need JavaScript. The table below each one holds the same numbers." in text
    assert len(rates) == 6 and all(rate and float(rate) > 0 and rate in text for rate in rates)


@pytest.mark.nightly
def test_a_large_run_shows_its_text_before_its_charts(browser: webdriver.Chrome, tmp_path: Path) -> None:
    write_run_directory(tmp_path, repeats=1, requests=16_667, chunks=8)
    page = write_report(tmp_path).as_uri()
    show(browser, page)
    begun_ms, drawn_ms = (
        script(browser, f"return performance.getEntriesByName('{name}')[0].startTime")
        for name in ("first-contentful-paint", "charts")
    )
    print(f"100,000 requests: text after {begun_ms:.0f} ms, charts after {drawn_ms:.0f} ms")
    assert begun_ms < drawn_ms
    dots = "return document.getElementById('chart-dots-e2e').data.reduce((sum, trace) => sum + trace.x.length, 0)"
    assert script(browser, dots) <= MAX_CHART_DOTS
    keep(browser, "large")
