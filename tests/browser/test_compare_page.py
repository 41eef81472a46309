"""The page of `harness compare` in a real browser: values of both sides, charts, the theme switch, a phone."""

from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from harness.questions.compare.page import comparison_page, differences
from harness.questions.compare.sides import compare_runs, group_by_machine
from harness.records.manifest import Machine
from harness.report.html import render_page
from tests.browser.test_report_page import OVERLAPS, STICKING_OUT, WIDER, complaints, keep, script, show
from tests.support.made_runs import write_made_run

OTHER = Machine(name="a-machine-with-a-long-name-mi300x", kernel="6.8", cores=96)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    write_made_run(folder / "one", lambda cell: 1 + 0.001 * cell.repeat)
    write_made_run(folder / "two", lambda cell: 0.5, machine=OTHER)
    comparison = compare_runs(group_by_machine([folder / "one", folder / "two"]), about="machine")
    (folder / "page.html").write_text(render_page(comparison_page(comparison), "Comparison", ["comparison"]))
    plain = differences(comparison.differences, comparison.sides)
    (folder / "plain.html").write_text(render_page(plain, "Differences", ["differences"]))
    return folder


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light"), (320, "dark")])
def test_nothing_is_cut(browser: webdriver.Chrome, compared: Path, width: int, scheme: str) -> None:
    show(browser, (compared / "page.html").as_uri(), scheme=scheme, width=width, phone=width < 500)
    assert script(browser, "return document.body.dataset.charts") == "ready"
    assert script(browser, WIDER) == 0
    assert script(browser, STICKING_OUT) == []
    assert width == 320 or script(browser, OVERLAPS) == []
    values = script(browser, "return [...document.querySelectorAll('.main .k-before, .main .k-after')]"
                             ".slice(-2).map((e) => e.textContent.trim())")  # fmt: skip
    assert values == ["1.00 s", "0.500 s"]
    assert complaints(browser) == []
    keep(browser, f"compare-{width}-{scheme}")


@pytest.mark.parametrize("name", ["page", "plain"])
def test_every_page_has_the_theme_switch(browser: webdriver.Chrome, compared: Path, name: str) -> None:
    """Also a page without a chart."""
    browser.get((compared / f"{name}.html").as_uri())
    colour = "return getComputedStyle(document.body).backgroundColor"
    before = script(browser, colour)
    button = browser.find_element(By.ID, "theme")
    button.click()
    WebDriverWait(browser, 10).until(lambda b: script(b, colour) != before)
    if name == "page":
        WebDriverWait(browser, 60).until(lambda b: script(b, "return document.body.dataset.charts"))
    button.click()
    assert script(browser, colour) == before
    assert complaints(browser) == []
