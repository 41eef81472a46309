"""The tab and the page of a live load in a real browser: charts, themes, phone, texts that try to be code."""

import json
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from harness.files import ROOT
from harness.process import free_port
from harness.simulated import spawned
from tests import prefork
from tests.browser.test_report_page import complaints, keep, script
from tests.command import going, write
from tests.fake_gpus import gpu, host
from tests.fake_server import answering, serving, whole

HOSTILE = "<script>document.title=1</script><img src=x onerror=document.title=1>${alert(1)}"
CHARTS = [
    "TTFT, ms", "TPOT, ms", "E2E, ms", "Output tokens, tok/s", "Requests, /s",
    "Users and requests in flight", "Server's queue, requests", "KV cache in use, %",
    "GPU busy, %", "GPU memory, GiB", "GPU power, W",
]  # fmt: skip


def until(found: Callable[[], Any], within_s: float = 60) -> Any:
    deadline = time.monotonic() + within_s
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return value


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
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


def wait(browser: webdriver.Chrome, text: str, timeout_s: float = 60) -> Any:
    return WebDriverWait(browser, timeout_s).until(lambda b: script(b, text))


def start(browser: webdriver.Chrome, live: str) -> None:
    """Start the load with the form, unless it runs.

    Chromium drops the requests of a page when a network of the machine comes or goes, as Docker's do in other tests.
    The form's request is sent once, so the page is opened again where it shows no load.
    """
    for _ in range(6):
        browser.get(live)
        with suppress(TimeoutException):
            wait(browser, "return document.querySelector('input[name=userCount], [role=tab]') !== null", 10)
            if script(browser, "return document.querySelector('[role=tab]') === null"):
                button = "[...document.querySelectorAll('button')].find((b) => /^start/i.test(b.textContent))"
                script(browser, f"{button}.click()")
            wait(browser, "return document.querySelector('[role=tab]') !== null", 10)
            return
    raise AssertionError("the page shows no load")


def test_the_form_proposes_the_scenario(browser: webdriver.Chrome, live: str) -> None:
    screen(browser)
    browser.get(live)
    wait(browser, "return document.querySelector('input[name=userCount]') !== null")
    # The parameters are in a part of the form that is folded at first.
    script(browser, "document.querySelectorAll('.MuiAccordionSummary-root').forEach((e) => e.click())")
    named = "return Object.fromEntries([...document.querySelectorAll('form [name]')].map((e) => [e.name, e.value]))"
    values = wait(browser, named + " ?? null")
    found = {key: values.get(key) for key in ("userCount", "outputTokens", "turns", "think", "slos", "arrivals")}
    assert found == {
        "userCount": "4", "outputTokens": "7", "turns": "2", "think": "0.1 0.4",
        "slos": "ttft<=500ms, tpot<=200ms", "arrivals": "",
    }  # fmt: skip
    assert (values["output"], values["stream"], values["promptTokens"]) == ("fixed", "yes", "8")
    time.sleep(0.6)
    keep(browser, "live-form")
    assert complaints(browser) == []


def test_the_form_says_what_is_wrong_with_it(browser: webdriver.Chrome, live: str) -> None:
    screen(browser)
    browser.get(live)
    wait(browser, "return document.querySelector('input[name=slos]') !== null")
    script(browser, "document.querySelectorAll('.MuiAccordionSummary-root').forEach((e) => e.click())")
    field = browser.find_element(By.CSS_SELECTOR, "input[name=slos]")
    WebDriverWait(browser, 20).until(lambda _: field.is_displayed())
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("soon")
    users = browser.find_element(By.CSS_SELECTOR, "input[name=userCount]")
    users.send_keys(Keys.CONTROL, "a")
    users.send_keys("99999999")
    press = "[...document.querySelectorAll('button')].find((b) => /^start/i.test(b.textContent)).click()"
    script(browser, press)
    said = wait(browser, "return document.querySelector('form [role=alert]')?.textContent")
    assert said == "--users: must be a whole number of 1 to 100,000 (got '99999999')."
    assert script(browser, "return document.querySelector('[role=tab]') === null"), "the form is still there"
    keep(browser, "live-form-refused")
    time.sleep(1.5)
    assert script(browser, "return document.querySelector('form [role=alert]') !== null")
    browser.get(live)
    wait(browser, "return document.querySelector('input[name=slos]')?.value === 'ttft<=500ms, tpot<=200ms'")
    (status,) = complaints(browser)  # which the browser writes of every 4xx
    assert "/swarm - Failed to load resource: the server responded with a status of 400" in status["message"]


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_the_tab_has_table_and_charts(browser: webdriver.Chrome, live: str, scheme: str) -> None:
    screen(browser, scheme=scheme)
    start(browser, live)
    tabs = browser.find_elements(By.CSS_SELECTOR, "[role=tab]")
    (tab,) = [one for one in tabs if one.text == "LLM"]
    tab.click()
    inside = "window.llmLive?.shadowRoot"
    wait(browser, f"return window.llmLive?.dataset.charts === '{len(CHARTS)}'")
    rows = "[...document.querySelectorAll('main > div tbody tr, main tbody tr')]"
    found = f"{rows}.find((e) => e.cells[0].textContent === 'ChatUser')"  # next to it is the warm-up
    row = f"return [...({found}?.cells ?? [])].map((e) => e.textContent)"
    full = "Number(found[1]) > 3 && found.slice(4).every((cell) => Number(cell) > 0)"
    cells = wait(browser, f"const found = (() => {{ {row} }})(); return {full} ? found : null")
    assert cells[0] == "ChatUser" and cells[2] == "0" and len(cells) == 14
    assert 0 <= int(cells[3]) <= 4
    assert script(browser, f"return {inside}.getElementById('notes').textContent").startswith("SIMULATED ENGINE: ")
    theme = script(browser, "return window.llmLive.dataset.theme")
    assert theme == scheme
    time.sleep(1.0)
    assert browser.find_elements(By.TAG_NAME, "iframe") == []  # no page of the UI may be framed
    assert script(browser, f"return getComputedStyle({inside}.querySelector('h1')).display") == "none"
    assert complaints(browser) == []
    keep(browser, f"live-tab-{scheme}")
    other = {"light": "dark", "dark": "light"}[scheme]
    for wanted in (other, scheme):  # Locust's own button
        script(
            browser,
            "[...document.querySelectorAll('header button')].filter((b) => b.querySelector('svg')).at(-1).click()",
        )
        wait(browser, f"return window.llmLive.dataset.theme === '{wanted}'")
    script(browser, "localStorage.removeItem('theme')")
    screen(browser, width=390, scheme=scheme)
    assert wait(browser, "return window.llmLive.scrollWidth <= 390")
    keep(browser, f"live-tab-phone-{scheme}")
    screen(browser, scheme=scheme)
    others = [one for one in browser.find_elements(By.CSS_SELECTOR, "[role=tab]") if one.text == "STATISTICS"]
    others[0].click()
    wait(browser, "return getComputedStyle(window.llmLive).display === 'none'")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (768, "dark"), (390, "light"), (320, "dark")])
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
    assert script(browser, "return document.querySelector('#notes').textContent").endswith("requests are not counted.")
    assert complaints(browser) == []


class Refuses(BaseHTTPRequestHandler):
    """Answers every request with an error that quotes code."""

    def do_GET(self) -> None:
        self._say(200, b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.05)
        self._say(500, f'{{"error": {{"message": "{HOSTILE}"}}}}'.encode())

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def by_hand(*arguments: str) -> Iterator[str]:
    """Stock Locust with a locustfile that ships; the address of its UI."""
    port = free_port()
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "locustfiles/chat.py"), *arguments]
    command += ["--web-host", "127.0.0.1", "--web-port", str(port)]
    if "--processes" in arguments:
        masters = str(free_port())
        command += ["--master-bind-host", "127.0.0.1", "--master-bind-port", masters, "--master-port", masters]
    child = prefork.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}/"))
        yield f"http://127.0.0.1:{port}/"
    finally:
        child.terminate()
        child.wait(20)


def test_what_a_server_says_is_text(browser: webdriver.Chrome, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with by_hand("--host", f"http://127.0.0.1:{server.server_port}", "--think", "0.1") as url:
            screen(browser)
            browser.get(f"{url}llm")
            wait(browser, "return document.getElementById('state').textContent === 'not started, 0 users'")
            assert script(browser, "return document.getElementById('charts').offsetParent === null")  # nothing to draw
            form = urllib.parse.urlencode({"user_count": 2, "spawn_rate": 2}).encode()
            urllib.request.urlopen(f"{url}swarm", data=form).close()
            wait(browser, "return document.getElementById('charts').offsetParent !== null")
            shown = wait(browser, "return document.querySelector('#failures td.text')?.textContent")
            assert shown == f"status 500: error: {HOSTILE}"
            assert script(browser, "return document.querySelectorAll('#failures script, #failures img').length") == 0
            assert script(browser, "return document.title") == "LLM load, live"
            notes = script(browser, "return document.querySelector('#notes').textContent")
            assert notes.startswith("Only the numbers of the load")
            keep(browser, "live-hostile")
            screen(browser, width=320)
            cut = "const box = document.getElementById('failures').parentNode; return box.scrollWidth - box.clientWidth"
            assert wait(browser, f"{cut} <= 0"), "on a phone no message is cut"
            keep(browser, "live-hostile-phone")
            screen(browser)
            assert complaints(browser) == []
            browser.get(f"{url}?tab=failures")
            wait(browser, "return document.body.textContent.includes('status 500')")
            assert script(browser, "return document.title") != "1"
        server.shutdown()


def swarm(url: str, **form: object) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}swarm", urllib.parse.urlencode(form).encode()) as answer:
        return dict(json.load(answer))


def test_the_tab_says_of_which_time_its_numbers_are(browser: webdriver.Chrome) -> None:
    with (
        spawned("--preset", "instant", "--served-model-name", "m") as server,
        by_hand("--host", server.url, "--think", "0.1") as url,
    ):
        swarm(url, user_count=2, spawn_rate=2)
        screen(browser)
        browser.get(f"{url}?tab=llm")
        inside = "window.llmLive?.shadowRoot"
        assert wait(browser, f"return {inside}?.getElementById('which-span')?.textContent")
        heads = "[...document.querySelectorAll('main th')].map((e) => e.textContent)"
        assert wait(browser, f"const heads = {heads}; return heads.length > 5 ? heads : null")[0] == (
            "Whole test, by user class"
        )
        assert script(browser, f"return {inside}.getElementById('which-span').textContent") == (
            "By user class, last 10 s"
        )
        assert script(browser, f"return {inside}.getElementById('recent').textContent") == "Now, and of the last 10 s:"
        time.sleep(1.0)
        keep(browser, "live-tab-ended")
        script(browser, f"{inside}.querySelector('[data-span=whole]').click()")
        assert script(browser, f"return {inside}.getElementById('which-span').textContent") == (
            "By user class, whole test"
        )


def test_edit_changes_the_users_of_a_running_load_and_offers_nothing_else(browser: webdriver.Chrome) -> None:
    with (
        spawned("--preset", "instant", "--served-model-name", "m") as server,
        by_hand("--host", server.url, "--think", "0.1") as url,
    ):
        swarm(url, user_count=1, spawn_rate=1, output_tokens=9)
        screen(browser)
        browser.get(url)
        press = "[...document.querySelectorAll('button')].find((b) => /^{}/i.test(b.textContent))"
        wait(browser, f"return {press.format('edit')} !== undefined")
        script(browser, f"{press.format('edit')}.click()")
        wait(browser, "return document.querySelector('form input[name=turns]') !== null")
        wait(browser, "return document.querySelector('form .MuiAccordion-root').offsetHeight === 0")
        keep(browser, "live-edit")

        def give(users: str) -> None:
            box = browser.find_element(By.CSS_SELECTOR, "form input[name=userCount]")
            box.send_keys(Keys.CONTROL, "a")
            box.send_keys(users)

        give("100001")
        script(browser, f"{press.format('update')}.click()")
        said = wait(browser, "return document.querySelector('main > [role=alert]')?.textContent")
        assert said == "--users: must be a whole number of 1 to 100,000 (got '100001')."
        wait(browser, "return document.querySelector('form') === null")
        keep(browser, "live-edit-refused")
        script(browser, f"{press.format('edit')}.click()")
        wait(browser, "return document.querySelector('form input[name=turns]') !== null")
        give("3")
        # What it sends of the others is what they are: the page was opened after they had been changed.
        script(browser, f"{press.format('update')}.click()")
        wait(browser, "return document.querySelector('form') === null")

        def users() -> bool:
            with urllib.request.urlopen(f"{url}llm/live.json") as answer:
                return bool(json.load(answer)["users"] == 3)

        until(users)


def test_a_page_of_another_site_can_neither_steer_nor_read_nor_frame_the_ui(browser: webdriver.Chrome) -> None:
    with (
        spawned("--preset", "instant", "--served-model-name", "m") as server,
        serving(answering(whole(b"<title>other</title><main></main>", b"text/html"))) as other,
        by_hand("--host", server.url) as url,
    ):
        browser.get(other)
        tries = f"""
            const [done] = arguments, said = [], url = {url!r};
            const form = new URLSearchParams({{ user_count: 1, spawn_rate: 1, host: location.origin }});
            const ask = (path, options) => fetch(url + path, options)
                .then((answer) => said.push(`${{path}}: ${{answer.type}}`), () => said.push(`${{path}}: failed`));
            const frame = document.createElement("iframe");
            frame.src = url;
            document.body.append(frame);
            ask("swarm", {{ method: "POST", mode: "no-cors", body: form }})
                .then(() => ask("swarm", {{ method: "POST", body: form }}))
                .then(() => ask("llm/live.json"))
                .then(() => ask("stats/reset", {{ method: "POST", mode: "no-cors" }}))
                .then(() => setTimeout(() => done(said), 1000));
        """
        assert browser.execute_async_script(tries) == [
            "swarm: failed", "swarm: failed", "llm/live.json: failed", "stats/reset: failed",
        ]  # fmt: skip
        browser.switch_to.frame(0)
        assert browser.find_elements(By.CSS_SELECTOR, "#root, form") == []
        browser.switch_to.default_content()
        complaints(browser)
        with urllib.request.urlopen(f"{url}llm/live.json") as answer:
            assert json.load(answer)["state"] == "ready"


def processes_of(url: str) -> list[psutil.Process]:
    """The Locusts whose UI has that address: the first, then its load processes."""
    port = url.rstrip("/").rpartition(":")[2]
    found = [one for one in psutil.process_iter(["cmdline", "create_time"]) if port in (one.info["cmdline"] or [])]
    return sorted(found, key=lambda one: (one.info["create_time"], one.pid))


@pytest.mark.nightly
def test_a_load_process_that_is_lost_is_shown(browser: webdriver.Chrome) -> None:
    with (
        spawned("--preset", "instant", "--served-model-name", "m") as server,
        by_hand("--host", server.url, "--think", "0.1", "--processes", "2") as url,
    ):
        until(lambda: len(processes_of(url)) == 3)
        until(lambda: swarm(url, user_count=2, spawn_rate=2)["success"])
        screen(browser, width=390)
        browser.get(f"{url}llm")
        wait(browser, "return document.getElementById('state').textContent === 'running, 2 users, 2 load processes'")
        _, worker, _ = processes_of(url)
        worker.suspend()
        said = wait(browser, "return document.querySelector('#notes .bad')?.textContent")
        assert said == "LOST: 1 of 2 load processes gives no sign of life; these numbers are without what it sends."
        assert script(browser, "return document.getElementById('state').textContent").endswith(", 1 load process")
        worker.resume()
        wait(browser, "return document.querySelector('#notes .bad') === null")


def test_a_locust_that_does_not_answer_is_reported(browser: webdriver.Chrome) -> None:
    with (
        spawned("--preset", "instant", "--served-model-name", "m") as server,
        by_hand("--host", server.url, "--think", "0.1") as url,
    ):
        swarm(url, user_count=2, spawn_rate=2)
        browser.get(f"{url}llm")
        wait(browser, "return document.getElementById('state').textContent.startsWith('running, ')")
        (master,) = processes_of(url)
        master.suspend()  # the numbers that are shown then are old ones
        try:
            wait(browser, "return document.getElementById('state').textContent.startsWith('no answer from Locust (')")
        finally:
            master.resume()
        wait(browser, "return document.getElementById('state').textContent.startsWith('running, ')")
