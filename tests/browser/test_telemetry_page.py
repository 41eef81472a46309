"""Host metrics in a real browser: panels of the timeline, events, the table."""

from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from harness.report.html import write_report
from tests.browser.test_report_page import complaints, keep, script, show
from tests.made_runs import watch
from tests.report_runs import write_run_directory

KINDS: dict[str, dict[str, Any]] = {"apu": {"hot": True}, "eight": {"gpus": 8}}
TITLES = ["requests", "tok/s", "KV cache, %", "busy, %", "memory, GiB", "power, W", "°C", "clock, MHz"]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    for kind, options in KINDS.items():
        folder: Path = tmp_path_factory.mktemp(kind)
        write_run_directory(folder, repeats=1, requests=100)
        watch(folder, **options)
        found[kind] = write_report(folder).as_uri()
    return found


@pytest.mark.parametrize(("kind", "scheme"), [("apu", "light"), ("eight", "dark")])
def test_the_panels_are_drawn_without_a_complaint(
    browser: webdriver.Chrome, pages: dict[str, str], kind: str, scheme: str
) -> None:
    show(browser, pages[kind], scheme=scheme)
    assert script(browser, "return document.body.dataset.charts") == "ready"
    titles = script(
        browser,
        "return [...document.querySelectorAll('#chart-timeline [class^=y][class$=title]')].map(e => e.textContent)",
    )
    assert titles == TITLES
    lines = script(browser, "return document.querySelectorAll('#chart-timeline .scatterlayer .js-line').length")
    assert lines > 10
    assert complaints(browser) == []
    assert len(keep(browser, f"telemetry-{kind}-{scheme}")) > 50_000


@pytest.mark.parametrize(("kind", "width"), [("eight", 1280), ("apu", 390), ("eight", 320)])
def test_no_text_lies_on_another_and_nothing_sticks_out(
    browser: webdriver.Chrome, pages: dict[str, str], kind: str, width: int
) -> None:
    show(browser, pages[kind], width=width, phone=width < 500)
    overlaps = """
        const texts = [...document.querySelectorAll("#chart-timeline text")]
            .filter((e) => e.textContent.trim() && !e.closest(".hoverlayer") && !e.matches(".annotation-text"));
        const boxes = texts.map((e) => e.getBoundingClientRect());
        const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
        return texts.flatMap((e, i) => texts.slice(0, i).filter((_, k) => over(boxes[i], boxes[k]))
            .map((other) => `${e.textContent} on ${other.textContent}`));
    """
    assert script(browser, overlaps) == []
    if width < 500:
        assert script(browser, "return document.documentElement.scrollWidth") == width
    keep(browser, f"telemetry-{kind}-{width}")


def test_a_gpu_of_the_legend_is_hidden_in_all_panels(browser: webdriver.Chrome, pages: dict[str, str]) -> None:
    show(browser, pages["eight"])
    shown = """
        return document.querySelector("#chart-timeline").data
            .filter((trace) => trace.name === "renderD131").map((trace) => trace.visible ?? true);
    """
    assert script(browser, shown) == [True] * 5
    entries = browser.find_elements(By.CSS_SELECTOR, "#chart-timeline .legend .traces")
    (entry,) = [one for one in entries if one.text == "renderD131"]
    script(browser, "document.getElementById('chart-timeline').scrollIntoView()")
    ActionChains(browser).move_to_element(entry.find_element(By.CSS_SELECTOR, ".legendtoggle")).click().perform()
    WebDriverWait(browser, 10).until(lambda b: script(b, shown) == ["legendonly"] * 5)


def test_heat_is_an_event_and_a_reason(browser: webdriver.Chrome, pages: dict[str, str]) -> None:
    show(browser, pages["apu"])
    reasons = browser.find_element(By.CSS_SELECTOR, ".reasons").text
    assert "the GPU renderD128 was throttled by heat (or PROCHOT) during 2.0 of" in reasons
    Select(browser.find_element(By.ID, "timeline-cell")).select_by_visible_text("r1-open-sequential")
    events = script(browser, "return [...document.querySelectorAll('td.bad')].map(e => e.textContent)")
    assert any(text.startswith("heat throttles the GPU renderD128, last seen at ") for text in events)


def test_the_table_says_what_was_measured(browser: webdriver.Chrome, pages: dict[str, str]) -> None:
    show(browser, pages["eight"])
    table = browser.find_element(By.CSS_SELECTOR, "#machine table")
    head = [cell.text for cell in table.find_elements(By.CSS_SELECTOR, "thead th")]
    assert head[1:3] == ["Energy per output token", "Power, mean and most"]
    missing = """
        return [...document.querySelectorAll("#machine thead a")]
            .filter((a) => !document.querySelector(a.getAttribute("href"))).map((a) => a.textContent);
    """
    assert script(browser, missing) == []
    lines = script(browser, "return document.querySelectorAll('#machine details tbody tr').length")
    assert lines == 6 * 8
