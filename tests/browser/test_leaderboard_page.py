"""The leaderboard in a real browser: both themes, phone width, nothing on the console, no overflow."""

from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from harness.base.files import RESULTS
from harness.questions.results import add_result, board_page, collect_board
from harness.records.manifest import Machine
from harness.report.html import render_page
from tests.browser.test_report_page import SHEET_SCROLLS, complaints
from tests.support.made_runs import served_by, write_made_run
from tests.support.report_runs import HOSTILE


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("board")
    for name in ("strix", "a-machine-with-a-long-name.lab.example", HOSTILE):
        run = folder / f"run-{len(list(folder.iterdir()))}"
        image = {"image": "vllm/vllm-openai-rocm:v0.32.0", "image_digest": f"vllm@sha256:{'4f2a' * 16}"}
        write_made_run(run, machine=Machine(name=name), served=lambda _, image=image: served_by(**image))  # type: ignore[misc]
        add_result(run, folder / "results")
    page = folder / "board.html"
    page.write_text(render_page(board_page(collect_board(folder / "results", RESULTS)), "Leaderboard", []))
    return page.as_uri()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_it_fits_and_is_silent(browser: webdriver.Chrome, page: str, scheme: str, width: int, tmp_path: Path) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page)
    assert complaints(browser) == []
    assert browser.title == "Leaderboard · amd-llm-load", "texts from outside did not run"
    wider = browser.execute_script("const r = document.documentElement; return r.scrollWidth - r.clientWidth")
    assert wider == 0
    assert browser.execute_script(SHEET_SCROLLS) == 0 or width < 600
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(247, 247, 245)" if scheme == "light" else "rgb(16, 18, 20)")
    headings = [heading.text for heading in browser.find_elements(By.CSS_SELECTOR, "h1, h2")]
    assert len(headings) == 2 and headings[1] == "which · m"
    assert HOSTILE in browser.find_element(By.TAG_NAME, "body").text
    assert browser.save_screenshot(str(tmp_path / "board.png"))
