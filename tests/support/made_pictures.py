"""Make the pictures of the pages, light and dark: `python -m tests.support.made_pictures RUN NAME`.

NAME: `report`, the first screen of the report (RUN: docs/example); `startup`, that of starts (docs/startup.md);
`sweep`, the chart of a sweep (docs/sweeps.md); `bisect`, that of a bisection (docs/bisect.md); `results`, the page of
`harness results --format html`, a file in place of RUN (docs/results.md).
"""

import base64
import shutil
import sys
import tempfile
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from harness.base.files import ROOT
from tests.browser.conftest import FLAGS
from tests.support.command import harness

FIGURE = """const chart = document.querySelector("figure").getBoundingClientRect();
        return {x: chart.left, y: chart.top + scrollY, width: chart.width, height: chart.height}"""
READY = """return document.readyState == "complete" &&
        (document.body.dataset.charts || !document.querySelector("figure"))"""
CLIPS = {  # by picture: the width of the window, and what of the page it shows
    "startup": (1100, "return {x: 0, y: 0, width: 1100, height: Math.min(900, document.body.scrollHeight)}"),
    "report": (
        1100,
        """const chart = document.querySelector("figure").getBoundingClientRect();
        return {x: 0, y: 0, width: 1100, height: chart.bottom + 24}""",
    ),
    "sweep": (1180, FIGURE),
    "bisect": (1180, FIGURE),
    "results": (1180, "return {x: 0, y: 0, width: 1180, height: Math.min(760, document.body.scrollHeight)}"),
}


def main(run: str, picture: str) -> None:
    width, clip = CLIPS[picture]
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        if picture == "results":
            shutil.copy(run, page)
        else:
            page.write_text(harness("report", str(Path(run).resolve()), "--format", "html", cwd=Path(folder)).out)
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or "chromium"
        for flag in (*FLAGS, "--hide-scrollbars", f"--user-data-dir={folder}/profile"):
            options.add_argument(flag)
        with webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver"))) as chrome:
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            for scheme in ("light", "dark"):
                features = [{"name": "prefers-color-scheme", "value": scheme}]
                chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
                chrome.get(page.as_uri())
                WebDriverWait(chrome, 60).until(lambda b: b.execute_script(READY))
                area = {**chrome.execute_script(clip), "scale": 1}
                shot = {"format": "png", "captureBeyondViewport": True, "clip": area}
                data = chrome.execute_cdp_cmd("Page.captureScreenshot", shot)["data"]
                (ROOT / "docs" / "img" / f"{picture}-{scheme}.png").write_bytes(base64.b64decode(data))


if __name__ == "__main__":
    main(*sys.argv[1:])
