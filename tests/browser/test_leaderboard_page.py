"""The leaderboard in a real browser: both themes, phone width, nothing on the console, no overflow."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from harness.compare.board import collect
from harness.paths import RESULTS
from harness.report.board import write_board
from harness.report.publish import publish
from harness.rundir.manifest import Machine
from tests.browser.test_report_page import FLAGS, complaints
from tests.made_runs import served_by, write_made_run
from tests.report_runs import HOSTILE


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("board")
    for name in ("strix", "a-machine-with-a-long-name.lab.example", HOSTILE):
        run = folder / f"run-{len(list(folder.iterdir()))}"
        image = {"image": "vllm/vllm-openai-rocm:v0.32.0", "image_digest": f"vllm@sha256:{'4f2a' * 16}"}
        write_made_run(run, machine=Machine(name=name), served=lambda _, image=image: served_by(**image))  # type: ignore[misc]
        publish(run, folder / "results")
    return write_board(collect(folder / "results", RESULTS), folder / "page" / "board.html")[0].as_uri()


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    driver = shutil.which("chromedriver")
    assert driver is not None, "chromedriver is missing (Debian: apt install chromium-driver)"
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(driver))
    yield found
    found.quit()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_and_is_silent(chrome: webdriver.Chrome, page: str, scheme: str, width: int, tmp_path: Path) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    chrome.get(page)
    assert complaints(chrome) == []
    assert chrome.title == "Leaderboard · amd-llm-load", "texts from outside did not run"
    wider = chrome.execute_script("const r = document.documentElement; return r.scrollWidth - r.clientWidth")
    assert wider == 0
    background = chrome.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(247, 247, 245)" if scheme == "light" else "rgb(16, 18, 20)")
    headings = [heading.text for heading in chrome.find_elements(By.CSS_SELECTOR, "h1, h2")]
    assert headings == ["Best row of each machine and scenario", "which · m", "Third-party figures"]
    assert HOSTILE in chrome.find_element(By.TAG_NAME, "body").text
    assert chrome.save_screenshot(str(tmp_path / "board.png"))
