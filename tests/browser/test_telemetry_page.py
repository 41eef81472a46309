"""Host metrics in a real browser: panels of the timeline, events, the table."""

from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.browser.test_report_page import OVERLAPS, WIDER, complaints, keep, script, show
from tests.support.made_runs import watch
from tests.support.report_runs import write_report, write_run_directory

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


@pytest.mark.parametrize(("kind", "scheme", "width"), [("apu", "light", 390), ("eight", "dark", 1280)])
def test_the_panels_are_drawn_and_no_text_lies_on_another(
    browser: webdriver.Chrome, pages: dict[str, str], kind: str, scheme: str, width: int
) -> None:
    show(browser, pages[kind], scheme=scheme, width=width, phone=width < 500)
    titles = script(
        browser,
        "return [...document.querySelectorAll('#chart-timeline [class^=y][class$=title]')].map(e => e.textContent)",
    )
    assert titles == TITLES
    assert script(browser, OVERLAPS) == []
    assert script(browser, WIDER) == 0
    assert complaints(browser) == []
    assert len(keep(browser, f"telemetry-{kind}-{scheme}")) > 50_000


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
    table = browser.find_element(By.CSS_SELECTOR, "#details table")
    head = [cell.text for cell in table.find_elements(By.CSS_SELECTOR, "thead th")]
    assert head[1:3] == ["Energy per output token", "Power, mean and most"]
