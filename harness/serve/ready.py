"""Waiting until a server's model really answers, and looking at servers that already run."""

import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import requests
from msgspec import Struct

from harness.errors import HarnessError, ServerError, did_you_mean
from harness.manifest import Phase, ServedBy
from harness.serve.compose import Serving

POLL_S = 0.2
PROBE_TIMEOUT_S = 5.0


class Ready(Struct, frozen=True):
    """What was found out about a server while it became ready."""

    phases: list[Phase]  # "port open", "health", ("load",) "first answer"; they follow each other without a gap
    model: str  # id that it answers to
    version: str | None


class Waiting(Struct, frozen=True):
    """What the wait needs to know about the server's keeper."""

    dead: Callable[[], ServerError | None]  # cheap: is called at every look
    last_lines: Callable[[], str]
    timeout_s: float
    on_progress: Callable[[str], None]


def wait_ready(url: str, serving: Serving, model: str, waiting: Waiting, *, api_key: str | None = None) -> Ready:
    """Wait until `model` at `url` has given one real answer.

    Raises ServerError when the server dies, does not become ready in time, or answers with what is no API.
    """
    began = time.monotonic()
    phases: list[Phase] = []
    mark = began

    def done(name: str) -> None:
        nonlocal mark
        now = time.monotonic()
        phases.append(Phase(name=name, seconds=now - mark))
        waiting.on_progress(f"{name} after {now - began:.1f} s")
        mark = now

    with _session(api_key) as session:
        deadline = began + waiting.timeout_s
        _poll(session, url + serving.health, deadline, waiting, accept=lambda status: True)
        done("port open")
        _poll(session, url + serving.health, deadline, waiting, accept=lambda status: status == 200)
        done("health")
        if serving.load is not None:
            call = serving.load
            _patient_post(url + call.path, call.body, deadline, waiting, api_key)
            done("load")
        served = find_model(url, model, session)
        answer = _patient_post(url + "/v1/chat/completions", _one_token(served), deadline, waiting, api_key)
        _check_answer(answer, url)
        done("first answer")
        return Ready(phases, served, server_version(url, session))


def attach(url: str, model: str | None, api_key: str | None = None, *, timeout_s: float = 300.0) -> ServedBy:
    """Look at a server that already runs: does its model answer?

    `model` None takes the only one that it serves. Raises ServerError in words for what is in the way.
    """
    base = base_url(url)
    with _session(api_key) as session:
        served = find_model(base, model, session)
        response = _post(session, base + "/v1/chat/completions", _one_token(served), timeout_s)
        _check_answer(response, base)
        version = server_version(base, session)
        simulated = version is not None and "simulated" in version
    return ServedBy(url=base, simulated=simulated, version=version, model=served)


def base_url(url: str) -> str:
    """A server's address without the API's path, however the user wrote it."""
    if "://" not in url:
        url = "http://" + url
    if not url.startswith(("http://", "https://")):
        raise HarnessError(f"'{url}' is not the address of a server", next_step="Write it like http://127.0.0.1:8000.")
    return url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1").rstrip("/")


def metrics_url(base: str, api_key: str | None = None) -> str | None:
    """Where a running server publishes its metrics; None when it does not."""
    with _session(api_key) as session:
        try:
            response = session.get(base + "/metrics", timeout=PROBE_TIMEOUT_S)
        except requests.RequestException:
            return None
    text = response.text.lstrip()
    return base + "/metrics" if response.status_code == 200 and not text.startswith("<") else None


def find_model(base: str, model: str | None, session: requests.Session) -> str:
    """The id under which the server answers for `model`. Raises ServerError that names what it serves."""
    response = _get(session, base + "/v1/models")
    _refuse_no_api(response, base)
    try:
        names = [str(entry["id"]) for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise ServerError(
            f"{base}/v1/models answers with something that is not a list of models",
            next_step="Check that the address is that of an OpenAI-compatible server.",
            detail=response.text[:500],
        ) from None
    if model is None:
        if len(names) == 1:
            return names[0]
        raise ServerError(f"{base} serves {_listed(names)}; say which one is meant", next_step="Set 'model'.")
    if model in names or model.removeprefix("user.") in names:
        return model
    raise ServerError(
        f"{base} does not serve '{model}'; it serves {_listed(names)}",
        next_step="Set the scenario's 'model' to one of these"
        + (f" ({did_you_mean(model, names)})." if did_you_mean(model, names).startswith("did") else "."),
    )


def server_version(base: str, session: requests.Session) -> str | None:
    """What GET /version says; None for a server that has no such thing."""
    try:
        version = session.get(base + "/version", timeout=PROBE_TIMEOUT_S).json()["version"]
    except (requests.RequestException, ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, str) else None


def _session(api_key: str | None) -> requests.Session:
    session = requests.Session()
    session.trust_env = False  # a proxy of the environment must not stand between us and the server
    if api_key:
        session.headers["Authorization"] = f"Bearer {api_key}"
    return session


def _one_token(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 1, "stream": False}


def _poll(
    session: requests.Session, url: str, deadline: float, waiting: Waiting, accept: Callable[[int], bool]
) -> None:
    seen = "nothing listens there"
    while True:
        dead = waiting.dead()
        if dead is not None:
            raise dead
        try:
            with session.get(url, timeout=PROBE_TIMEOUT_S) as response:
                if accept(response.status_code):
                    return
                if response.status_code in (401, 403):
                    _refuse_no_api(response, url)
                seen = f"HTTP {response.status_code}"
                if "html" in response.headers.get("Content-Type", ""):
                    seen += " with an HTML page"
        except requests.ReadTimeout:
            seen = f"no answer within {PROBE_TIMEOUT_S:.0f} s"
        except requests.RequestException:
            seen = "no connection"  # refused, or reset by Docker's proxy while nothing listens behind it
        if time.monotonic() > deadline:
            raise _not_ready(url, seen, waiting)
        time.sleep(POLL_S)


def _not_ready(url: str, seen: str, waiting: Waiting) -> ServerError:
    return ServerError(
        f"the server did not become ready within {waiting.timeout_s:g} s; last seen at GET {url}: {seen}",
        next_step="Look at its last lines below; if it only needs longer, raise startup_timeout_s in the scenario.",
        detail=waiting.last_lines(),
    )


def _patient_post(
    url: str, body: dict[str, Any], deadline: float, waiting: Waiting, api_key: str | None
) -> requests.Response:
    """POST and wait for the answer as long as the deadline allows, watching that the server lives."""
    while True:
        left = max(1.0, deadline - time.monotonic())
        answers = _in_background(url, body, left, api_key)
        while True:
            try:
                answer = answers.get(timeout=POLL_S)
                break
            except queue.Empty:
                dead = waiting.dead()
            if dead is not None:
                raise dead
        if isinstance(answer, requests.RequestException):
            raise waiting.dead() or _gone(url, answer, waiting)
        if answer.status_code not in (429, 503) or time.monotonic() > deadline:
            return answer
        time.sleep(POLL_S)


def _in_background(
    url: str, body: dict[str, Any], timeout_s: float, api_key: str | None
) -> "queue.SimpleQueue[requests.Response | requests.RequestException]":
    """POST in a thread that nobody has to wait for: an answer may take minutes, Ctrl-C must not."""
    answers: queue.SimpleQueue[requests.Response | requests.RequestException] = queue.SimpleQueue()

    def post() -> None:
        with _session(api_key) as session:
            try:
                answers.put(session.post(url, json=body, timeout=timeout_s))
            except requests.RequestException as error:
                answers.put(error)

    threading.Thread(target=post, name="first-answer", daemon=True).start()
    return answers


def _gone(url: str, error: requests.RequestException, waiting: Waiting) -> ServerError:
    return ServerError(
        f"the server gave no answer to POST {url} ({_reason(error)})",
        next_step="Look at its last lines below.",
        detail=waiting.last_lines(),
    )


def _get(session: requests.Session, url: str) -> requests.Response:
    try:
        return session.get(url, timeout=2 * PROBE_TIMEOUT_S)
    except requests.RequestException as error:
        raise ServerError(
            f"no answer from {url}: {_reason(error)}", next_step="Check the address and that the server runs."
        ) from None


def _post(session: requests.Session, url: str, body: dict[str, Any], timeout_s: float) -> requests.Response:
    try:
        return session.post(url, json=body, timeout=timeout_s)
    except requests.RequestException as error:
        raise ServerError(f"no answer from {url}: {_reason(error)}", next_step="Look at the server's log.") from None


def _refuse_no_api(response: requests.Response, base: str) -> None:
    if response.status_code in (401, 403):
        raise ServerError(
            f"{base} wants an API key (HTTP {response.status_code})",
            next_step="Name the environment variable that holds it as 'api_key_env' in the scenario, and export it.",
        )
    if "html" in response.headers.get("Content-Type", "") or response.text.lstrip()[:1] == "<":
        raise ServerError(
            f"{base} answers with an HTML page, not with an OpenAI-compatible API (HTTP {response.status_code})",
            next_step="Check the address; a web page of another program may live on this port.",
        )
    if response.status_code != 200:
        raise ServerError(
            f"{response.url} answers HTTP {response.status_code}: {_message(response)}",
            next_step="Check that the address is that of an OpenAI-compatible server.",
        )


def _check_answer(response: requests.Response, base: str) -> None:
    """The first real answer must be a chat completion."""
    if response.status_code != 200:
        _explain_refusal(response, base)
    _refuse_no_api(response, base)
    try:
        response.json()["choices"][0]["message"]
    except (ValueError, KeyError, TypeError, IndexError):
        raise ServerError(
            f"{response.url} answers with something that is not a chat completion",
            next_step="Check that the address is that of an OpenAI-compatible server.",
            detail=response.text[:500],
        ) from None


def _explain_refusal(response: requests.Response, base: str) -> None:
    if response.status_code in (401, 403):
        return
    raise ServerError(
        f"the model does not answer: {response.url} says HTTP {response.status_code}: {_message(response)}",
        next_step="Look at the server's log.",
    )


def _message(response: requests.Response) -> str:
    try:
        error = msgspec.json.decode(response.content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (msgspec.DecodeError, KeyError, TypeError):
        return response.text[:200].strip() or "no text"


def _reason(error: Exception) -> str:
    text = str(error)
    if "NameResolutionError" in text or "Name or service not known" in text or "getaddrinfo" in text:
        return "the host's name is not known"
    if "refused" in text:
        return "connection refused, nothing listens there"
    if "timed out" in text or isinstance(error, requests.Timeout):
        return "it did not answer in time"
    if "SSL" in text:
        return "the TLS handshake failed; is it http:// and not https://?"
    return "the connection broke"


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:8])
    return (shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")) or "no model at all"


def listens(host: str, port: int, timeout_s: float = 2.0) -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError:
        return False
    return True
