"""Who may use Locust's web UI, and what a start may ask for: attacks with real HTTP requests on a real Locust."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.base.process import free_port
from harness.scenario import Load
from harness.workload.job import write_job
from tests.support.command import until
from tests.support.fake_server import read_request, serving, whole
from tests.support.faults import fault
from tests.support.load_runs import end, log_of, make_job, start
from tests.support.web_ui import UI, Answer, ui
from tests.support.wording import Wording

MODELS = whole(b'{"data":[{"id":"m"}]}')
KEY = "sk-of-the-user"
FORM = {"user_count": "1", "spawn_rate": "1"}
ROUTES = ["/", "/llm", "/llm/page.js", "/llm/live.json", "/stats/requests", "/logs", "/metrics", "/none"]
CHANGES = ["/swarm", "/stop", "/stats/reset", "/user"]


@pytest.fixture(scope="module")
def by_hand(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UI]:
    """The UI of stock Locust without --web-host."""
    with ui(tmp_path_factory.mktemp("ui"), engine) as opened:
        yield opened


OPEN = ("--web-host", "0.0.0.0")
ENDS = ("--autostart", "--autoquit", "0", "--run-time", "1")  # where it starts all the same, it ends by itself
EVIL = "http://evil.example"
FORGED: dict[str, dict[str, str]] = {
    "DNS rebinding": {"Host": "evil.example"},
    "DNS rebinding, with its origin": {"Host": "evil.example:8089", "Origin": "http://evil.example:8089"},
    "an address in the network": {"Host": "192.0.2.7:8089"},
    "no Host": {"Host": ""},
    "a Host with a user": {"Host": "evil@127.0.0.1"},
    "another site": {"Origin": EVIL},
    "a page in a sandbox": {"Origin": "null"},
    "another port of this machine": {"Origin": "http://127.0.0.1:1", "Sec_Fetch_Site": "same-site"},
    "an image or script of another site": {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
    "a frame": {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "iframe"},
}


@fault("web", "a page of another site sends requests to the UI (CSRF, DNS rebinding)", seen="403, with the reason")
def test_requests_of_another_site_are_refused_on_every_route(by_hand: UI) -> None:
    for name, headers in FORGED.items():
        for path in ROUTES:
            assert by_hand.ask(path, **headers).status == 403, (name, path)
        for path in CHANGES:
            assert by_hand.ask(path, FORM, **headers).status == 403, (name, path)
            preflight = by_hand.ask(path, method="OPTIONS", Access_Control_Request_Method="POST", **headers)
            assert preflight.status == 403, (name, path)
    assert by_hand.state()["state"] == "ready"


def test_no_page_may_be_framed_or_read_by_others(by_hand: UI) -> None:
    for path in [*ROUTES, *CHANGES, "/stats/report", "/llm/live.csv", "/llm/none.js", "/login"]:
        answer = by_hand.ask(path)
        assert answer.headers["X-Frame-Options"] == "DENY", path
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"], path
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin", path
        assert not [name for name in answer.headers if name.startswith("Access-Control")], path
        assert answer.status < 400 or not answer.headers["Content-Type"].startswith("text/html"), path
    # Nothing changes by a GET.
    assert [by_hand.ask(path).status for path in CHANGES] == [405] * len(CHANGES)


def test_the_ui_is_on_loopback_where_no_token_is_needed(by_hand: UI) -> None:
    listening = [tuple(one.laddr) for one in psutil.net_connections("tcp") if one.status == "LISTEN"]
    assert [address for address in listening if address[1] == by_hand.port] == [("127.0.0.1", by_hand.port)]
    for host in ("127.0.0.1", "localhost", "[::1]"):
        own = {"Host": f"{host}:9999", "Origin": f"http://{host}:9999", "Sec_Fetch_Site": "same-origin"}  # by a tunnel
        assert by_hand.ask("/", Host=own["Host"]).status == by_hand.ask("/stats/reset", FORM, **own).status == 200
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert by_hand.ask("/", **link).status == 200


@pytest.mark.parametrize("how", ["job", "by hand"])
def test_the_api_key_is_sent_to_the_host_of_the_start_only(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, wording: Wording
) -> None:
    monkeypatch.setenv("OUR_KEY", KEY)
    write_job(make_job(tmp_path, Load(user="chat"), api_key_env="OUR_KEY"), tmp_path / "job.json")
    options = ["--job", str(tmp_path / "job.json")] if how == "job" else ["--api-key-env", "OUR_KEY"]
    stolen: list[bytes] = []

    def steal(connection: socket.socket, number: int) -> None:
        stolen.append(read_request(connection))
        connection.sendall(MODELS)

    with serving(steal) as elsewhere, ui(tmp_path, engine, *options) as opened:
        refused = opened.ask("/swarm", {**FORM, "host": elsewhere})
        assert (refused.status, json.loads(refused.text)["host"]) == (400, engine)
        assert "--host" in json.loads(refused.text)["message"]
        wording(json.loads(refused.text)["message"])
        user = json.dumps({"user_class_name": "ChatUser", "host": elsewhere})
        opened.ask("/user", user, Content_Type="application/json")
        assert opened.ask("/swarm", {**FORM, "host": engine}).status == 200
        until(lambda: opened.state()["whole"]["all"]["ended"])
        assert KEY not in "".join(opened.ask(path).text for path in ROUTES)
        opened.ask("/stop", {})
    assert stolen == []


USERS = "--users: must be a whole number of 1 to 100,000 (got {!r})"
RATE = "--spawn-rate: must be a number above 0, at most 100,000 (got {!r})"
RUN = "--run-time: must be a time of at most 10,000,000 s, such as 90, 20m or 1h30m (got {!r})"
AMOUNTS = {
    "user_count": (USERS, ["99999999", "0", "-1", "1.5", "1_0", "nan", "many", "9" * 50]),
    "spawn_rate": (RATE, ["100001", "0", "nan", "inf", "1e400", "fast"]),
    "run_time": (RUN, ["99999999999", "9" * 40 + "h", "-5", "nan", "soon"]),
}
OTHERS = {
    "batch_size": ["99999999", "-1", "1e3", "nan", "9" * 5000],
    "in_flight": ["100001"],
    "output_tokens": ["9" * 30, "1.5", "inf"],
    "turns": ["99999999999", "0"],
    "documents": ["100001"],
    "timeout": ["nan", "inf", "-1", "1e300"],
    "think": ["nan", "inf inf", "-1", "1e300"],
    "arrivals": ["nan", "inf", "0", "1e300"],
    "warmup": ["-1", "9" * 30, "\u0663"],
    "abandon": ["1e999 after 3s", "0.1 after 99999999999 tokens"],
}


@fault("web", "99,999,999 users or an endless run time in the form", seen="400, with the bound in the page")
def test_a_start_beyond_the_bounds_or_with_other_fields_is_refused(by_hand: UI, wording: Wording) -> None:
    for field, (sentence, values) in AMOUNTS.items():
        for value in values:
            refused = by_hand.ask("/swarm", {**FORM, field: value})
            assert refused.status == 400
            assert json.loads(refused.text)["message"] == sentence.format(value)[:300] + "."
    for field, values in OTHERS.items():
        for value in values:
            refused = by_hand.ask("/swarm", {**FORM, field: value})
            assert refused.status == 400, (field, value)
            assert json.loads(refused.text)["message"].startswith(f"--{field.replace('_', '-')}: ")
    for field in ("api_key_env", "job", "records", "stop_timeout", "nonsense"):  # Locust takes any option as a field
        refused = by_hand.ask("/swarm", {**FORM, field: "HOME"})
        assert refused.status == 400
        assert str(field) in json.loads(refused.text)["message"]
        wording(json.loads(refused.text)["message"])
    assert by_hand.ask("/swarm", json.dumps(FORM), Content_Type="application/json").status == 415
    missing = by_hand.ask("/swarm", {})
    assert missing.status == 400 and "--users" in json.loads(missing.text)["message"]
    wording(json.loads(missing.text)["message"])
    assert by_hand.ask("/swarm", {**FORM, "model": "x" * 2_000_000}).status == 413
    assert (by_hand.state()["users"], by_hand.state()["state"]) == (0, "ready")


def test_the_class_picker_works_and_many_starts_at_once_are_one_load(engine: str, tmp_path: Path) -> None:
    answers: list[Answer] = []
    picked = {**FORM, "user_classes": "ChatUser", "shape_class": "Default", "profile": ""}
    with ui(tmp_path, engine, "--class-picker") as opened:
        threads = [threading.Thread(target=lambda: answers.append(opened.ask("/swarm", picked))) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answer.status for answer in answers] == [200] * 20
        until(lambda: opened.state()["state"] == "running")
        second = opened.ask("/swarm", {**picked, "user_count": "99999999"})  # while it goes on
        assert (second.status, opened.state()["users"]) == (400, 1)
        opened.ask("/stop", {})


@pytest.mark.parametrize(
    ("options", "env", "sentence"),
    [
        (["--headless", "--users", "99999999"], {}, USERS),
        ([*OPEN, *ENDS], {"AMD_LLM_LOAD_UI_TOKEN": "short"}, "AMD_LLM_LOAD_UI_TOKEN: cannot be a token"),
        ([*OPEN, *ENDS], {"AMD_LLM_LOAD_UI_ADDRESS": "http://x"}, "AMD_LLM_LOAD_UI_ADDRESS: must be HOST"),
    ],
)
def test_the_command_line_has_the_same_bounds(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], env: dict[str, str], sentence: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert end(start(tmp_path, engine, "chat", "--web-port", str(free_port()), *options)) == 1
    assert sentence.partition(" (got")[0] in log_of(tmp_path) and "Traceback" not in log_of(tmp_path)


def test_beyond_loopback_a_token_is_required_on_every_route(engine: str, tmp_path: Path) -> None:
    with ui(tmp_path, engine, "--web-host", "0.0.0.0") as opened:
        (token,) = re.findall(r"web UI with its token: \S+\?token=(\S+)", log_of(tmp_path))
        assert len(token) == 32
        for path in ROUTES:
            for wrong in ({}, {"Authorization": "Bearer"}, {"Authorization": f"Bearer {token}x"}, {"Cookie": "x=y"}):
                assert opened.ask(path, **wrong).status == 401, path
        assert [opened.ask(path, FORM).status for path in CHANGES] == [401] * len(CHANGES)
        assert [opened.ask(f"{path}?token={token}", FORM).status for path in CHANGES] == [401] * len(CHANGES)
        assert opened.ask("/?token=wrong").status == 401
        bearer = {"Authorization": f"Bearer {token}"}
        assert opened.ask("/llm/live.json", **bearer).status == 200
        login = opened.ask(f"//evil.example/?token={token}")  # a login is no way to another site
        assert (login.status, login.headers["Location"]) == (303, "/")
        cookie = login.headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Lax" in cookie and token not in login.text
        browser = {"Cookie": cookie.partition(";")[0]}
        assert opened.ask("/", **browser).status == opened.ask("/stats/reset", FORM, **browser).status == 200
        # The token does not make up for the other checks.
        assert opened.ask("/stop", FORM, Origin=EVIL, **browser).status == 403
        assert opened.ask("/", Host="evil.example", **bearer).status == 403
        assert opened.ask("/", Host="192.0.2.7:8089", **bearer).status == 200


def test_published_on_loopback_there_is_no_token_and_only_that_host(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `harness compose` starts it: open in its container, and published at an address of loopback."""
    monkeypatch.setenv("AMD_LLM_LOAD_UI_ADDRESS", "127.0.0.1:8089")
    with ui(tmp_path, engine, "--web-host", "0.0.0.0") as opened:
        assert opened.ask("/", Host="127.0.0.1:8089").status == 200
        for host in ("evil.example", "192.0.2.7:8089", "0.0.0.0:8089"):
            assert opened.ask("/", Host=host).status == 403


@pytest.mark.parametrize("address", [None, "llm.example:443"])
def test_a_token_that_the_user_chose_is_required_on_loopback_too(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    monkeypatch.setenv("AMD_LLM_LOAD_UI_TOKEN", "chosen-by-the-user")
    if address is not None:
        monkeypatch.setenv("AMD_LLM_LOAD_UI_ADDRESS", address)
    host = {"Host": "llm.example"} if address else {}
    with ui(tmp_path, engine, *(["--web-host", "0.0.0.0"] if address else [])) as opened:
        assert opened.ask("/", **host).status == opened.ask("/stop", {}, **host).status == 401
        assert opened.ask("/?token=chosen-by-the-user", **host).status == 303
        assert opened.ask("/", Authorization="Bearer chosen-by-the-user", **host).status == 200
    assert "chosen-by-the-user" not in log_of(tmp_path)


LOGIN = """
from locust import events

from locustfiles.chat import ChatUser


@events.init.add_listener
def login(environment, **_):
    environment.web_ui.app.secret_key = "of this test"
    environment.web_ui.login_manager.user_loader(lambda _: None)
"""


def test_a_login_of_the_users_own_takes_the_place_of_the_token(engine: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(LOGIN)
    with ui(tmp_path, engine, "--web-host", "0.0.0.0", "--web-login", locustfile=tmp_path / "own.py") as opened:
        for path in ("/", "/llm", "/llm/page.js", "/llm/live.json", "/metrics", "/stats/requests", "/logs"):
            assert opened.ask(path).status == 302, path
            assert opened.ask(path, Origin=EVIL).status == 403, path
        assert [opened.ask(path, FORM).status for path in CHANGES] == [302] * len(CHANGES)
        assert "its token" not in log_of(tmp_path)
