"""The tab and the page of a live load in a real browser: charts, themes, phone, texts that try to be code."""

import json
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from harness.base.files import ROOT
from harness.base.process import free_port
from tests.browser.test_report_page import complaints, keep, script
from tests.support import prefork
from tests.support.command import PATIENCE_S, going, until, write
from tests.support.fake_gpus import gpu, host
from tests.support.fake_server import answering, serving, whole
from tests.support.http_double import Handler, listening
from tests.support.simulated import spawned

HOSTILE = "<script>document.title=1</script><img src=x onerror=document.title=1>${alert(1)}"
CHARTS = [
    "TTFT, ms", "TPOT, ms", "E2E, ms", "Output tokens, tok/s", "Requests, /s",
    "Users and requests in flight", "Oldest request without a token, s", "Server's queue, requests",
    "KV cache in use, %", "GPU busy, %", "GPU memory, GiB", "GPU power, W",
]  # fmt: skip


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the UI of `harness live`, with an engine, and two GPUs that are files."""
    folder = tmp_path_factory.mktemp("live")
    host(folder / "machine")
    gpu(folder / "machine", 128, busy=93, watts=287)
    gpu(folder / "machine", 129, busy=12, watts=41)
    load = {"user": "chat", "users": 4, "requests": 6, "output_tokens": 7, "turns": 2, "think_s": [0.1, 0.4]}
    path = write(
        folder,
        loads={"talk": load},
        servers={"one": {"template": "simulated", "container": False, "variables": {"preset": "instant"}}},
        checks=["goodput(ttft<=500ms, tpot<=200ms) >= 50%"],
    )
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    env = {"AMD_LLM_LOAD_TELEMETRY_ROOT": str(folder / "machine")}
    with going("live", path.name, "--port", str(port), "--runs", "runs", cwd=folder, env=env) as command:
        until(lambda: answers(url))
        yield url
        command.interrupt()
        command.end()


def screen(browser: webdriver.Chrome, *, width: int = 1280, scheme: str = "light") -> None:
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def wait(browser: webdriver.Chrome, text: str, timeout_s: float = PATIENCE_S) -> Any:
    return WebDriverWait(browser, timeout_s).until(lambda b: script(b, text))


def start(browser: webdriver.Chrome, live: str) -> None:
    """Start the load with the form, unless it runs.

    Chromium drops the requests of a page when a network of the machine comes or goes, as Docker's do in other tests.
    The form's request is sent once, so the page is opened again where it shows no load.
    """
    for _ in range(6):
        browser.get(live)
        with suppress(TimeoutException):
            wait(browser, "return document.querySelector('input[name=userCount], [role=tab]') !== null", 30)
            if script(browser, "return document.querySelector('[role=tab]') === null"):
                button = "[...document.querySelectorAll('button')].find((b) => /^start/i.test(b.textContent))"
                script(browser, f"{button}.click()")
            wait(browser, "return document.querySelector('[role=tab]') !== null", 30)
            return
    raise AssertionError("the page shows no load")


def test_the_form_proposes_the_scenario_and_shows_what_is_wrong(browser: webdriver.Chrome, live: str) -> None:
    screen(browser)
    browser.get(live)
    wait(browser, "return document.querySelector('input[name=userCount]') !== null")
    # The parameters are in a part of the form that is folded at first.
    script(browser, "document.querySelectorAll('.MuiAccordionSummary-root').forEach((e) => e.click())")
    named = "return Object.fromEntries([...document.querySelectorAll('form [name]')].map((e) => [e.name, e.value]))"
    values = wait(browser, named + " ?? null")
    keys = ("userCount", "outputTokens", "turns", "think", "check", "arrivals", "output", "stream", "promptTokens")
    assert [values.get(key) for key in keys] == [
        "4", "7", "2", "0.1 0.4", "goodput(ttft<=500ms, tpot<=200ms) >= 50%", "", "fixed", "yes", "8",
    ]  # fmt: skip
    assert complaints(browser) == []
    users = browser.find_element(By.CSS_SELECTOR, "input[name=userCount]")
    users.send_keys(Keys.CONTROL, "a")
    users.send_keys("99999999")
    script(browser, "[...document.querySelectorAll('button')].find((b) => /^start/i.test(b.textContent)).click()")
    alert = wait(browser, "return document.querySelector('form [role=alert]')?.textContent")
    assert alert.startswith("--users: ") and "'99999999'" in alert
    assert script(browser, "return document.querySelector('[role=tab]') === null"), "the form is still there"
    keep(browser, "live-form-refused")
    (status,) = complaints(browser)  # which the browser writes of every 4xx
    assert "/swarm - Failed to load resource: the server responded with a status of 400" in status["message"]


def test_the_tab_has_table_and_charts_and_follows_the_theme(browser: webdriver.Chrome, live: str) -> None:
    screen(browser)
    start(browser, live)
    tabs = {tab.text: tab for tab in browser.find_elements(By.CSS_SELECTOR, "[role=tab]")}
    tabs["LLM"].click()
    inside = "window.llmLive?.shadowRoot"
    wait(browser, f"return window.llmLive?.dataset.charts === '{len(CHARTS)}'")
    rows = "[...document.querySelectorAll('main > div tbody tr, main tbody tr')]"
    row = f"{rows}.find((e) => e.cells[0].textContent === 'ChatUser')"  # next to it is the warm-up
    texts = f"return [...({row}?.cells ?? [])].map((e) => e.textContent)"
    full = "Number(cells[1]) > 130 && cells.slice(5).every((cell) => Number(cell) > 0 || cell === '–')"
    cells = wait(browser, f"const cells = (() => {{ {texts} }})(); return {full} ? cells : null")
    assert cells[0] == "ChatUser" and cells[2] == "0" and len(cells) == 15
    assert 0 <= int(cells[3]) <= 4
    assert script(browser, f"return {inside}.getElementById('notes').textContent").startswith("SIMULATED ENGINE: ")
    assert browser.find_elements(By.TAG_NAME, "iframe") == []  # no page of the UI may be framed
    assert script(browser, f"return getComputedStyle({inside}.querySelector('h1')).display") == "none"
    assert complaints(browser) == []
    keep(browser, "live-tab-light")
    for theme in ("dark", "light"):  # Locust's own button
        buttons = "[...document.querySelectorAll('header button')].filter((b) => b.querySelector('svg'))"
        script(browser, f"{buttons}.at(-1).click()")
        wait(browser, f"return window.llmLive.dataset.theme === '{theme}'")
    script(browser, "localStorage.removeItem('theme')")
    screen(browser, width=390)
    assert wait(browser, "return window.llmLive.scrollWidth <= 390")
    screen(browser)
    tabs["STATISTICS"].click()
    wait(browser, "return getComputedStyle(window.llmLive).display === 'none'")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (320, "dark")])
def test_the_page_of_its_own(browser: webdriver.Chrome, live: str, width: int, scheme: str) -> None:
    screen(browser, width=width, scheme=scheme)
    start(browser, live)
    browser.get(f"{live}llm")
    wait(browser, f"return document.body.dataset.charts === '{len(CHARTS)}'")
    titles = script(browser, "return [...document.querySelectorAll('figcaption b')].map((e) => e.textContent)")
    assert titles == CHARTS
    assert script(browser, "return document.documentElement.scrollWidth") == script(
        browser, "return document.documentElement.clientWidth"
    )
    overlaps = """
        const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
        return [...document.querySelectorAll("svg")].flatMap((svg) => {
            const texts = [...svg.querySelectorAll("text")], boxes = texts.map((e) => e.getBoundingClientRect());
            return texts.flatMap((e, i) => texts.slice(0, i).filter((_, k) => over(boxes[i], boxes[k]))
                .map((other) => `${e.textContent} on ${other.textContent}`));
        });
    """
    assert script(browser, overlaps) == []
    background = script(browser, "return getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(250, 250, 250)", "dark": "rgb(18, 18, 18)"}[scheme]
    keep(browser, f"live-page-{width}-{scheme}")
    assert complaints(browser) == []


def test_the_page_moves_on_and_its_controls_work(browser: webdriver.Chrome, live: str) -> None:
    screen(browser)
    start(browser, live)
    browser.get(f"{live}llm")
    path = "document.querySelector('.course').getAttribute('d')"
    before = wait(browser, f"return document.body.dataset.charts && {path}")
    wait(browser, f"return {path} !== {before!r}")
    now = script(browser, "return document.querySelector('#classes td').textContent")
    button = browser.find_element(By.CSS_SELECTOR, "[data-span=whole]")
    button.send_keys(Keys.ENTER)
    assert button.get_attribute("aria-pressed") == "true"
    whole = script(browser, "return document.querySelector('#classes td').textContent")
    assert int(whole) >= int(now) > 0
    tiles = script(browser, "return [...document.querySelectorAll('.tile span')].map((e) => e.textContent)")
    assert {"in flight", "goodput", "server: running", "GPU renderD128", "GPU renderD129"} <= set(tiles)
    wide = script(browser, "return [...document.querySelectorAll('.tile.wide b')].map((e) => e.textContent)")
    assert wide == ["93 % · 8 GiB · 287 W", "12 % · 8 GiB · 41 W"]
    assert script(browser, "return document.querySelector('#notes').textContent").endswith("requests do not.")
    assert complaints(browser) == []


class Refuses(Handler):
    """Answers every completion with an error that quotes code."""

    def do_GET(self) -> None:
        self.answer(200, '{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.05)
        self.answer(500, f'{{"error": {{"message": "{HOSTILE}"}}}}')


@contextmanager
def stock_locust(server: str) -> Iterator[tuple[str, int]]:
    """Stock Locust with a locustfile that ships; the address of its UI, and its process."""
    port = free_port()
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "locustfiles/chat.py"), "--host", server]
    child = prefork.Popen(
        [*command, "--think", "0.1", "--web-port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}/"))
        yield f"http://127.0.0.1:{port}/", child.pid
    finally:
        child.terminate()
        child.wait(20)


def swarm(url: str, **form: object) -> None:
    urllib.request.urlopen(f"{url}swarm", urllib.parse.urlencode(form).encode()).close()


def live_json(url: str) -> Any:
    with urllib.request.urlopen(f"{url}llm/live.json") as answer:
        return json.load(answer)


def test_texts_of_a_server_are_text(browser: webdriver.Chrome) -> None:
    with listening(Refuses) as server, stock_locust(server) as (url, _):
        screen(browser)
        browser.get(f"{url}llm")
        wait(browser, "return document.getElementById('state').textContent === 'not started, 0 users'")
        assert script(browser, "return document.getElementById('charts').offsetParent === null")  # nothing to draw
        swarm(url, user_count=2, spawn_rate=2)
        wait(browser, "return document.getElementById('charts').offsetParent !== null")
        shown = wait(browser, "return document.querySelector('#failures td.text')?.textContent")
        assert shown == f"status 500: error: {HOSTILE}"
        assert script(browser, "return document.querySelectorAll('#failures script, #failures img').length") == 0
        assert script(browser, "return document.title") == "LLM load, live"
        notes = script(browser, "return document.querySelector('#notes').textContent")
        assert notes.startswith("Only the numbers of the load")
        screen(browser, width=320)
        cut = "const box = document.getElementById('failures').parentNode; return box.scrollWidth - box.clientWidth"
        assert wait(browser, f"{cut} <= 0"), "on a phone no message is cut"
        keep(browser, "live-hostile-phone")
        screen(browser)
        assert complaints(browser) == []
        browser.get(f"{url}?tab=failures")
        wait(browser, "return document.body.textContent.includes('status 500')")
        assert script(browser, "return document.title") != "1"


@pytest.fixture(scope="module")
def stock() -> Iterator[tuple[str, int]]:
    with spawned("--preset", "instant", "--served-model-name", "m") as server, stock_locust(server.url) as locust:
        yield locust


def test_a_page_of_another_site_can_neither_steer_nor_read_nor_frame_the_ui(
    browser: webdriver.Chrome, stock: tuple[str, int]
) -> None:
    url = stock[0]
    with serving(answering(whole(b"<title>other</title><main></main>", b"text/html"))) as other:
        browser.get(other)
        tries = f"""
            const [done] = arguments, results = [], url = {url!r};
            const form = new URLSearchParams({{ user_count: 1, spawn_rate: 1, host: location.origin }});
            const ask = (path, options) => fetch(url + path, options)
                .then((answer) => results.push(`${{path}}: ${{answer.type}}`), () => results.push(`${{path}}: failed`));
            const frame = document.createElement("iframe");
            frame.src = url;
            document.body.append(frame);
            ask("swarm", {{ method: "POST", mode: "no-cors", body: form }})
                .then(() => ask("swarm", {{ method: "POST", body: form }}))
                .then(() => ask("llm/live.json"))
                .then(() => ask("stats/reset", {{ method: "POST", mode: "no-cors" }}))
                .then(() => setTimeout(() => done(results), 1000));
        """
        assert browser.execute_async_script(tries) == [
            "swarm: failed", "swarm: failed", "llm/live.json: failed", "stats/reset: failed",
        ]  # fmt: skip
        browser.switch_to.frame(0)
        assert browser.find_elements(By.CSS_SELECTOR, "#root, form") == []
        browser.switch_to.default_content()
        complaints(browser)
        assert live_json(url)["state"] == "ready"


def test_edit_changes_the_users_of_a_running_load_and_offers_nothing_else(
    browser: webdriver.Chrome, stock: tuple[str, int]
) -> None:
    url, press = stock[0], "[...document.querySelectorAll('button')].find((b) => /^{}/i.test(b.textContent))"
    swarm(url, user_count=1, spawn_rate=1, output_tokens=9)
    screen(browser)
    browser.get(url)

    def edit(users: str) -> None:
        wait(browser, f"return {press.format('edit')} !== undefined")
        script(browser, f"{press.format('edit')}.click()")
        wait(browser, "return document.querySelector('form .MuiAccordion-root')?.offsetHeight === 0")
        box = browser.find_element(By.CSS_SELECTOR, "form input[name=userCount]")
        box.send_keys(Keys.CONTROL, "a")
        box.send_keys(users)
        script(browser, f"{press.format('update')}.click()")
        wait(browser, "return document.querySelector('form') === null")

    edit("100001")
    alert = wait(browser, "return document.querySelector('main > [role=alert]')?.textContent")
    assert alert.startswith("--users: ") and "'100001'" in alert
    keep(browser, "live-edit-refused")
    edit("3")
    until(lambda: live_json(url)["users"] == 3)


def test_the_tab_names_the_time_of_its_numbers_and_a_locust_that_does_not_answer(
    browser: webdriver.Chrome, stock: tuple[str, int]
) -> None:
    url, pid = stock
    swarm(url, user_count=2, spawn_rate=2)
    screen(browser)
    browser.get(f"{url}?tab=llm")
    inside = "window.llmLive?.shadowRoot"
    heads = "[...document.querySelectorAll('main th')].map((e) => e.textContent)"
    titles = wait(browser, f"const heads = {heads}; return heads.length > 5 ? heads : null")
    assert titles[0] == "Whole test, by user class"
    wait(browser, f"return {inside}?.getElementById('which-span')?.textContent === 'By user class, last 10 s'")
    assert script(browser, f"return {inside}.getElementById('recent').textContent") == "Now, and of the last 10 s:"
    script(browser, f"{inside}.querySelector('[data-span=whole]').click()")
    assert script(browser, f"return {inside}.getElementById('which-span').textContent") == "By user class, whole test"
    state = f"{inside}.getElementById('state').textContent"
    wait(browser, f"return {state}.startsWith('running, ')")
    psutil.Process(pid).suspend()  # the numbers that are shown then are old ones
    try:
        wait(browser, f"return {state}.startsWith('no answer from Locust (')")
    finally:
        psutil.Process(pid).resume()
    wait(browser, f"return {state}.startsWith('running, ')")
