"""Servers that answer, that do not, and that answer nonsense."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from harness.base.errors import HarnessError, ServerError
from harness.base.process import free_port
from harness.records.manifest import ServedBy
from harness.serve import probe
from harness.serve.compose_file import LoadCall, Serving
from harness.serve.containers import LogFile
from harness.serve.lifecycle import attach_to_server, wait_ready
from harness.serve.probe import StartupWatch, parse_base_url
from tests.support.http_double import Handler, listening
from tests.support.wording import Wording

Answer = tuple[int, str, str]  # status, content type, body
MODELS: Answer = (200, "application/json", json.dumps({"data": [{"id": "one"}]}))
CHAT: Answer = (200, "application/json", json.dumps({"choices": [{"message": {"content": "yes"}}]}))
HTML: Answer = (200, "text/html; charset=utf-8", "<!doctype html><title>Printer</title>")
GOOD = {"GET /health": (200, "text/plain", ""), "GET /v1/models": MODELS, "POST /v1/chat/completions": CHAT,
        "GET /version": (200, "application/json", '{"version": "1.2.3"}')}  # fmt: skip
SERVING = Serving(template="simulated", port=8000, health="/health", metrics="/metrics")


HALF: Answer = (200, "broken", '{"choices": [{"mess')  # and then the end, before its Content-Length
RESET: Answer = (0, "broken", "")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MAX_RETRY_S", 0.2)
    monkeypatch.setattr(probe, "RETRY_EVERY_S", 0.05)


@contextlib.contextmanager
def server(
    answers: Mapping[str, Answer], seen: list[str] | None = None, first: Mapping[str, list[Answer]] | None = None
) -> Iterator[str]:
    """A server with one answer for each path, after those in `first`."""
    before = {path: list(given) for path, given in (first or {}).items()}

    class Double(Handler):
        def do_GET(self) -> None:
            asked = f"{self.command} {self.path}"
            if seen is not None:
                seen.append(f"{asked} {self.headers.get('Authorization')} {self.body().decode()}")
            status, kind, text = answers.get(asked, (404, "text/plain", "no such page"))
            if before.get(asked):
                status, kind, text = before[asked].pop(0)
            if (status, kind) == RESET[:2]:
                return
            if 300 <= status < 400:
                self.send_response(status)
                self.send_header("Location", text)
                self.end_headers()
            else:
                self.answer(status, text, kind, missing=100 * (kind == "broken"))

        do_POST = do_GET

    with listening(Double) as url:
        yield url


def waiting(
    tmp_path: Path, dead: ServerError | None = None, timeout_s: float = 10.0, log: str = "last words"
) -> StartupWatch:
    file = LogFile(tmp_path / "server.log")
    file.path.write_text(log)
    return StartupWatch(lambda: dead, file, timeout_s, lambda line: None)


def ready(url: str, wait: StartupWatch, model: str = "one", api_key: str | None = None) -> ServedBy:
    return wait_ready(url, SERVING, model, wait, api_key=api_key)


def test_ready_means_a_real_answer(tmp_path: Path) -> None:
    seen: list[str] = []
    with server(GOOD, seen) as url:
        found = ready(url, waiting(tmp_path), api_key="k")
    assert [phase.name for phase in found.phases] == ["port open", "health", "first answer"]
    assert (found.model, found.version) == ("one", "1.2.3")
    posts = [line for line in seen if line.startswith("POST")]
    assert len(posts) == 1
    assert json.loads(posts[0][posts[0].index("{") :])["max_tokens"] == 1
    assert all(" Bearer k " in line for line in seen)


def test_a_server_that_loads_on_request_is_asked_to(tmp_path: Path) -> None:
    seen: list[str] = []
    call = LoadCall(path="/api/v1/load", body={"model_name": "one", "ctx_size": 8192})
    serving = Serving(template="lemonade", port=1, health="/health", load=call)
    with server({**GOOD, "POST /api/v1/load": (200, "application/json", "{}")}, seen) as url:
        found = wait_ready(url, serving, "one", waiting(tmp_path))
    assert [phase.name for phase in found.phases] == ["port open", "health", "load", "first answer"]
    assert [line.split(" ", 3)[3] for line in seen if "/load" in line] == ['{"model_name": "one", "ctx_size": 8192}']


def test_a_model_that_cannot_be_loaded_is_explained(tmp_path: Path, wording: Wording) -> None:
    serving = Serving(template="lemonade", port=1, health="/health", load=LoadCall(path="/load", body={}))
    text = "Failed to load model 'x': vLLM argument '--model' in vllm_args is managed by Lemonade"
    failed: Answer = (500, "application/json", json.dumps({"error": {"message": text}}))
    said = pytest.raises(ServerError, match="'one'.* 500: Failed to load model 'x'")
    with server({**GOOD, "POST /load": failed}) as url, said as caught:
        wait_ready(url, serving, "one", waiting(tmp_path))
    assert "--model" in caught.value.next_step
    wording(caught.value)


def test_never_ready_ends_at_the_time_limit_with_the_last_lines(tmp_path: Path, wording: Wording) -> None:
    begin = time.monotonic()
    said = "did not become ready within 0.5 s; last seen at GET .*: connection refused"
    with pytest.raises(ServerError, match=said) as caught:
        ready(f"http://127.0.0.1:{free_port()}", waiting(tmp_path, timeout_s=0.5))
    assert time.monotonic() - begin >= 0.5
    assert caught.value.detail == "last words" and "startup_timeout_s" in caught.value.next_step
    log = "We couldn't connect to 'https://huggingface.co'"  # is read
    with pytest.raises(ServerError) as caught:
        ready(f"http://127.0.0.1:{free_port()}", waiting(tmp_path, log=log, timeout_s=0.1))
    wording(caught.value)


def test_a_death_during_the_first_answer_is_noticed(tmp_path: Path) -> None:
    asked, release = threading.Event(), threading.Event()

    class Slow(Handler):
        def do_GET(self) -> None:
            self.answer(200, GOOD[f"GET {self.path}"][2])

        def do_POST(self) -> None:
            asked.set()
            release.wait(100)

    with listening(Slow) as url:
        wait = waiting(tmp_path)
        wait = StartupWatch(lambda: ServerError("it died") if asked.is_set() else None, wait.log, 60, wait.on_progress)
        with pytest.raises(ServerError, match="it died"):
            ready(url, wait)
        release.set()


TWO: Answer = (200, "application/json", '{"data": [{"id": "a"}, {"id": "b"}]}')


def test_a_model_is_chosen_of_those_that_are_served(tmp_path: Path, wording: Wording) -> None:
    with server({**GOOD, "GET /v1/models": TWO}) as url:
        with pytest.raises(ServerError) as caught:
            ready(url, waiting(tmp_path))
        assert "'one'" in str(caught.value) and "'a'" in str(caught.value)
        wording(caught.value)
        assert attach_to_server(url, None, others=["b"]).served_by.model == "a", "the first"
        with pytest.raises(ServerError) as caught:
            attach_to_server(url, None, others=["a", "c"])
        assert "'c'" in str(caught.value) and "'a'" in str(caught.value)
        wording(caught.value)


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("GET /v1/models", HTML, "answers with an HTML page, not with an OpenAI-compatible API"),
        ("GET /v1/models", (401, "application/json", '{"error": "Unauthorized"}'), "wants an API key"),
        ("GET /v1/models", (200, "application/json", '{"models": []}'), "something that is not a list of models"),
        ("GET /v1/models", (500, "application/json", '{"error": "broken"}'), "answers HTTP 500: broken"),
        ("POST /v1/chat/completions", (200, "application/json", "[]"), "something that is not a chat completion"),
        ("POST /v1/chat/completions", (400, "application/json", '{"error": {"message": "no chat template"}}'),
         "the model does not answer: .* answers HTTP 400: no chat template"),
        ("POST /v1/chat/completions", (500, "text/plain", "no to sk-abcdefghijklmnopqrstuvwxyz123456"),
         r"answers HTTP 500: no to \*\*\*"),
        ("POST /v1/chat/completions", HALF, r"no answer (from|to POST) .*the connection broke"),
        ("GET /v1/models", (308, "text/plain", "https://other:9/v1/models"),
         "/v1/models redirects to https://other:9/v1/models; redirects are not followed"),
    ],
)  # fmt: skip
def test_an_answer_that_is_no_api_is_explained(tmp_path: Path, path: str, answer: Answer, message: str) -> None:
    with server({**GOOD, path: answer}) as url:
        with pytest.raises(ServerError, match=message):
            ready(url, waiting(tmp_path))
        with pytest.raises(ServerError, match=message):
            attach_to_server(url, "one")


CHAT_PATH = "POST /v1/chat/completions"
ERROR: Answer = (500, "application/json", '{"error": {"message": "a hiccup"}}')


@pytest.mark.parametrize(
    ("path", "broken"),
    [(CHAT_PATH, ERROR), (CHAT_PATH, RESET), ("GET /v1/models", HALF)],
)
def test_one_broken_answer_is_asked_again(tmp_path: Path, path: str, broken: Answer) -> None:
    seen: list[str] = []
    with server(GOOD, seen, {path: [broken]}) as url:
        assert ready(url, waiting(tmp_path)).model == "one"
        assert len([line for line in seen if line.startswith(path)]) == 2
    with server(GOOD, first={path: [broken]}) as url:
        assert attach_to_server(url, "one").served_by.model == "one"


def test_a_wrong_key_is_not_a_missing_one(tmp_path: Path, wording: Wording) -> None:
    answers: dict[str, Answer] = {**GOOD, "GET /v1/models": (401, "text/plain", "")}
    with server(answers) as url:
        with pytest.raises(ServerError) as caught:
            attach_to_server(url, "one", "k-123", key_name="MY_KEY")
        assert str(url) in caught.value.what and "401" in caught.value.what
        wording(caught.value)
        with pytest.raises(ServerError) as caught:
            wait_ready(url, SERVING, "one", waiting(tmp_path), api_key="k-123", key_name="MY_KEY")
        wording(caught.value)
        with pytest.raises(ServerError) as caught:
            attach_to_server(url, "one", key_name="MY_KEY")
        wording(caught.value)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("GET /v1/models", (307, "text/plain", "http://127.0.0.1:1/login?key=my-own-key")),
        ("GET /v1/models", (200, "application/json", '["my-own-key"]')),
        (CHAT_PATH, (400, "application/json", '{"error": "unknown token my-own-key"}')),
        (CHAT_PATH, (200, "text/plain", "x" * 495 + "my-own-key")),
    ],
)
def test_a_key_that_the_server_repeats_is_masked(tmp_path: Path, path: str, answer: Answer) -> None:
    for go in (lambda url: ready(url, waiting(tmp_path), api_key="my-own-key"),
               lambda url: attach_to_server(url, "one", "my-own-key")):  # fmt: skip
        with server({**GOOD, path: answer}) as url, pytest.raises(ServerError) as caught:
            go(url)
        assert "my-o" not in f"{caught.value} {caught.value.next_step} {caught.value.detail}"


def test_a_wrong_model_says_how_to_give_another(wording: Wording) -> None:
    with server(GOOD) as url, pytest.raises(ServerError) as caught:
        attach_to_server(url, "onne")
    assert "'onne'" in str(caught.value) and "'one'" in str(caught.value)
    wording(caught.value)
    assert "`--model one`" in caught.value.next_step
    with server({**GOOD, "GET /metrics": HTML}) as url:  # a web page is no metrics
        assert attach_to_server(url, "one").metrics_url is None
        assert attach_to_server(url, "one", metrics_url="http://127.0.0.1:9/m").metrics_url == "http://127.0.0.1:9/m"


def test_a_running_server_is_attached_to() -> None:
    with server({**GOOD, "GET /metrics": (200, "text/plain", "a 1\n")}) as url:
        endpoint = attach_to_server(url + "/v1/", None)
        assert endpoint.url == url
        assert endpoint.metrics_url == url + "/metrics"
        assert (endpoint.served_by.model, endpoint.served_by.version) == ("one", "1.2.3")
        assert endpoint.served_by.template is None
        assert endpoint.served_by.simulated is False
        assert endpoint.check_alive() is None


def test_where_nothing_answers(wording: Wording) -> None:
    for address, why in (
        ("127.0.0.1:9", "connection refused, nothing"),
        ("http://no-such-host.invalid", "name is not k"),
    ):
        with pytest.raises(ServerError, match=why) as caught:
            attach_to_server(address, "one")
        wording(caught.value)


def test_however_the_address_is_written(wording: Wording) -> None:
    meant = {
        "127.0.0.1:8000": "http://127.0.0.1:8000", "http://h:1/": "http://h:1", "http://h:1/v1": "http://h:1",
        "https://h/api/v1/": "https://h/api", "http://h:1/v1/chat/completions": "http://h:1",
    }  # fmt: skip
    assert {written: parse_base_url(written) for written in meant} == meant
    with pytest.raises(HarnessError) as caught:
        parse_base_url("ftp://h")
    wording(caught.value)
