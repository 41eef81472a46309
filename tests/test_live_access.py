"""Who may use Locust's web UI, and what a start may ask for: attacks with real HTTP requests on a real Locust."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import psutil
import pytest

from harness.job import write_job
from harness.process import free_port
from harness.run.drive import locust_arguments
from harness.scenario import MAX_USERS, Load
from tests.command import until
from tests.fake_server import read_request, serving, whole
from tests.faults import fault
from tests.load_runs import end, log_of, make_job, start
from tests.web_ui import UI, Answer, ui

MODELS = whole(b'{"data":[{"id":"m"}]}')
KEY = "sk-of-the-user"
FORM = {"user_count": "1", "spawn_rate": "1"}
ROUTES = [
    "/", "/llm", "/llm/page.js", "/llm/live.json", "/stats/requests", "/logs", "/assets/favicon-dark.png", "/none",
]  # fmt: skip
CHANGES = ["/swarm", "/stop", "/stats/reset", "/user"]


@pytest.fixture(scope="module")
def by_hand(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UI]:
    """As docs say: without --web-host."""
    with ui(tmp_path_factory.mktemp("ui"), engine) as found:
        yield found


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


@pytest.mark.parametrize("headers", FORGED.values(), ids=list(FORGED))
@fault("web", "a page of another site sends requests to the UI (CSRF, DNS rebinding)", seen="403, with the reason")
def test_what_a_page_of_another_site_asks_is_refused_on_every_route(by_hand: UI, headers: dict[str, str]) -> None:
    for path in ROUTES:
        assert by_hand.ask(path, **headers).status == 403, path
    for path in CHANGES:
        assert by_hand.ask(path, FORM, **headers).status == 403, path
        preflight = by_hand.ask(path, method="OPTIONS", Access_Control_Request_Method="POST", **headers)
        assert preflight.status == 403, path
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


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_the_user_of_this_machine_needs_no_token(by_hand: UI, host: str) -> None:
    own = {"Host": f"{host}:9999", "Origin": f"http://{host}:9999", "Sec_Fetch_Site": "same-origin"}  # by a tunnel
    assert by_hand.ask("/", Host=own["Host"]).status == by_hand.ask("/stats/reset", FORM, **own).status == 200
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert by_hand.ask("/", **link).status == 200


def test_by_hand_the_ui_listens_on_loopback_only(by_hand: UI) -> None:
    listening = [tuple(one.laddr) for one in psutil.net_connections("tcp") if one.status == "LISTEN"]
    assert [at for at in listening if at[1] == by_hand.port] == [("127.0.0.1", by_hand.port)]


@contextmanager
def thief() -> Iterator[tuple[str, list[bytes]]]:
    """A server that keeps what it is sent."""
    seen: list[bytes] = []

    def keep(connection: socket.socket, number: int) -> None:
        seen.append(read_request(connection))
        connection.sendall(MODELS)

    with serving(keep) as url:
        yield url, seen


@pytest.mark.parametrize("how", ["job", "by hand"])
def test_the_api_key_is_sent_to_the_host_of_the_start_only(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("OUR_KEY", KEY)
    write_job(make_job(tmp_path, Load(user="chat"), api_key_env="OUR_KEY"), tmp_path / "job.json")
    options = ["--job", str(tmp_path / "job.json")] if how == "job" else ["--api-key-env", "OUR_KEY"]
    with thief() as (elsewhere, seen), ui(tmp_path, engine, *options) as found:
        refused = found.ask("/swarm", {**FORM, "host": elsewhere})
        assert (refused.status, json.loads(refused.text)["host"]) == (400, engine)
        assert json.loads(refused.text)["message"].startswith("--host: cannot be changed after the start")
        user = json.dumps({"user_class_name": "ChatUser", "host": elsewhere})
        found.ask("/user", user, Content_Type="application/json")
        assert found.ask("/swarm", {**FORM, "host": engine}).status == 200
        until(lambda: found.state()["whole"]["all"]["ended"])
        assert KEY not in "".join(found.ask(path).text for path in ROUTES)
        found.ask("/stop", {})
    assert seen == []


@pytest.mark.parametrize("field", ["api_key_env", "job", "records", "machine", "headless", "stop_timeout", "nonsense"])
def test_only_fields_of_the_form_are_taken(by_hand: UI, field: str) -> None:
    """Locust takes any option of the command line as a field."""
    refused = by_hand.ask("/swarm", {**FORM, field: "HOME"})
    assert refused.status == 400
    assert json.loads(refused.text)["message"] == f"'{field}': no field of the form."


USERS = "--users: must be a whole number of 1 to 100,000 (got {!r})"
RATE = "--spawn-rate: must be a number above 0, at most 100,000 (got {!r})"
RUN = "--run-time: must be a time of at most 10,000,000 s, such as 90, 20m or 1h30m (got {!r})"
AMOUNTS = {
    "user_count": (USERS, ["99999999", "100001", "0", "-1", "1.5", "1_0", "nan", "many", "9" * 50]),
    "spawn_rate": (RATE, ["100001", "0", "-1", "nan", "inf", "-inf", "1e400", "fast"]),
    "run_time": (RUN, ["99999999999", "10000001", "9" * 40 + "h", "-5", "nan", "soon"]),
}
OTHERS = {
    "batch_size": ["99999999", "-1", "1e3", "nan", "9" * 5000],
    "in_flight": ["100001", "-1"],
    "output_tokens": ["9" * 30, "-1", "1.5", "inf"],
    "prompt_tokens": ["9" * 30, "-1"],
    "system_tokens": ["9" * 30, "-1"],
    "turns": ["99999999999", "0"],
    "steps": ["1001"],
    "sub_agents": ["1001", "-1"],
    "documents": ["100001", "0"],
    "document_tokens": ["9" * 30],
    "timeout": ["nan", "inf", "-1", "1e300"],
    "regenerate": ["nan", "2"],
    "think": ["nan", "inf inf", "1 inf", "-1", "1e300"],
    "arrivals": ["nan", "inf", "-1", "0", "1e300"],
    "warmup": ["-1", "9" * 30, "\u0663"],
    "abandon": ["1e999 after 3s", "0.1 after 1e999s", "0.1 after 99999999999 tokens"],
}


@fault("web", "99,999,999 users or an endless run time in the form", seen="400, with the bound in the page")
def test_a_start_beyond_the_bounds_is_refused(by_hand: UI) -> None:
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
    assert (by_hand.state()["users"], by_hand.state()["state"]) == (0, "ready")


def test_what_is_no_form_is_refused(by_hand: UI) -> None:
    assert by_hand.ask("/swarm", json.dumps(FORM), Content_Type="application/json").status == 415
    assert by_hand.ask("/swarm", urlencode(FORM), Content_Type="text/plain").status == 415
    missing = by_hand.ask("/swarm", {})
    assert missing.status == 400
    assert json.loads(missing.text)["message"] == "--users: is missing."
    assert by_hand.ask("/swarm", {**FORM, "model": "x" * 2_000_000}).status == 413
    assert by_hand.state()["state"] == "ready"


def test_the_class_picker_takes_what_its_form_has(engine: str, tmp_path: Path) -> None:
    with ui(tmp_path, engine, "--class-picker") as found:
        for field in ("user_classes", "shape_class"):
            assert found.ask("/swarm", {**FORM, field: "Nope"}).status == 400
        picked = {**FORM, "user_classes": "ChatUser", "shape_class": "Default", "profile": ""}
        assert found.ask("/swarm", picked).status == 200
        assert found.ask("/stop", {}).status == 200


def test_many_starts_at_once_are_one_load(engine: str, tmp_path: Path) -> None:
    answers: list[Answer] = []
    with ui(tmp_path, engine) as found:
        asked = [threading.Thread(target=lambda: answers.append(found.ask("/swarm", FORM))) for _ in range(40)]
        for thread in asked:
            thread.start()
        for thread in asked:
            thread.join()
        assert {one.status for one in answers} == {200} and len(answers) == 40
        until(lambda: found.state()["state"] == "running")
        assert found.state()["users"] == 1
        second = found.ask("/swarm", {**FORM, "user_count": "99999999"})  # while it goes on
        assert (second.status, found.state()["users"]) == (400, 1)
        found.ask("/stop", {})


@pytest.mark.parametrize(
    ("more", "option", "value", "sentence"),
    [
        (["--headless"], "--users", "99999999", USERS),
        ([], "--spawn-rate", "1e9", RATE),
        (["--headless"], "--run-time", "99999999999", RUN),
    ],
)
def test_the_command_line_has_the_same_bounds(
    engine: str, tmp_path: Path, more: list[str], option: str, value: str, sentence: str
) -> None:
    assert end(start(tmp_path, engine, "chat", "--web-port", str(free_port()), option, value, *more)) == 1
    assert sentence.partition(" (got")[0] in log_of(tmp_path) and "Traceback" not in log_of(tmp_path)


def test_what_the_harness_gives_locust_is_in_the_bounds(tmp_path: Path) -> None:
    job = make_job(tmp_path, Load(user="batch", users=MAX_USERS))
    arguments = locust_arguments(job, tmp_path, tmp_path, "http://127.0.0.1:9")
    assert arguments[arguments.index("--spawn-rate") + 1] == f"{MAX_USERS}"


def token_of(found: UI) -> str:
    (address,) = re.findall(r"web UI with its token: (\S+)", log_of(found.folder))
    return str(re.findall(r"\?token=(\S+)$", address)[0])


@pytest.mark.parametrize("opened", ["0.0.0.0", pytest.param("*", marks=pytest.mark.nightly)])
def test_beyond_loopback_a_token_is_required_on_every_route(engine: str, tmp_path: Path, opened: str) -> None:
    with ui(tmp_path, engine, "--web-host", opened) as found:
        token = token_of(found)
        assert len(token) == 32
        for path in ROUTES:
            for wrong in ({}, {"Authorization": "Bearer"}, {"Authorization": f"Bearer {token}x"}, {"Cookie": "x=y"}):
                assert found.ask(path, **wrong).status == 401, path
        assert [found.ask(path, FORM).status for path in CHANGES] == [401] * len(CHANGES)
        assert [found.ask(f"{path}?token={token}", FORM).status for path in CHANGES] == [401] * len(CHANGES)
        assert found.ask("/?token=wrong").status == 401
        bearer = {"Authorization": f"Bearer {token}"}
        assert found.ask("/llm/live.json", **bearer).status == 200
        opens = found.ask(f"//evil.example/?token={token}")  # a login is no way to another site
        assert (opens.status, opens.headers["Location"]) == (303, "/")
        cookie = opens.headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Lax" in cookie and token not in opens.text
        browser = {"Cookie": cookie.partition(";")[0]}
        assert found.ask("/", **browser).status == found.ask("/stats/reset", FORM, **browser).status == 200
        # The token does not make up for the other checks.
        assert found.ask("/stop", FORM, Origin=EVIL, **browser).status == 403
        assert found.ask("/", Host="evil.example", **bearer).status == 403
        assert found.ask("/", Host="192.0.2.7:8089", **bearer).status == 200


def test_published_on_loopback_there_is_no_token_and_only_that_host(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `harness compose` starts it: open in its container, and published at an address of loopback."""
    monkeypatch.setenv("AMD_LLM_LOAD_UI_ADDRESS", "127.0.0.1:8089")
    with ui(tmp_path, engine, "--web-host", "0.0.0.0") as found:
        assert found.ask("/", Host="127.0.0.1:8089").status == 200
        for host in ("evil.example", "192.0.2.7:8089", "0.0.0.0:8089"):
            assert found.ask("/", Host=host).status == 403


@pytest.mark.parametrize("address", [None, "llm.example:443"])
def test_a_token_that_the_user_chose_is_required_on_loopback_too(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    monkeypatch.setenv("AMD_LLM_LOAD_UI_TOKEN", "chosen-by-the-user")
    if address is not None:
        monkeypatch.setenv("AMD_LLM_LOAD_UI_ADDRESS", address)
    host = {"Host": "llm.example"} if address else {}
    with ui(tmp_path, engine, *(["--web-host", "0.0.0.0"] if address else [])) as found:
        assert found.ask("/", **host).status == found.ask("/stop", {}, **host).status == 401
        assert found.ask("/?token=chosen-by-the-user", **host).status == 303
        assert found.ask("/", Authorization="Bearer chosen-by-the-user", **host).status == 200
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
    with ui(tmp_path, engine, "--web-host", "0.0.0.0", "--web-login", locustfile=tmp_path / "own.py") as found:
        for path in ("/", "/llm", "/llm/page.js", "/llm/live.json", "/stats/requests", "/logs", "/exceptions"):
            assert found.ask(path).status == 302, path
            assert found.ask(path, Origin=EVIL).status == 403, path
        assert [found.ask(path, FORM).status for path in CHANGES] == [302] * len(CHANGES)
        assert "its token" not in log_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("AMD_LLM_LOAD_UI_TOKEN", "short"), ("AMD_LLM_LOAD_UI_TOKEN", ""), ("AMD_LLM_LOAD_UI_ADDRESS", "http://x")],
)
def test_a_token_or_address_of_no_use_ends_the_start(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert end(start(tmp_path, engine, "chat", "--web-host", "0.0.0.0", "--web-port", str(free_port()))) == 1
    assert f"{name}: " in log_of(tmp_path) and "Traceback" not in log_of(tmp_path)
