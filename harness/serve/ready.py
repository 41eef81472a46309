"""Wait until a server's model answers."""

import time
from functools import partial
from typing import Any

import requests
from msgspec import Struct

from harness.errors import ServerError, StartError
from harness.failures.explain import explain
from harness.process import pause
from harness.rundir.manifest import Phase
from harness.serve.compose_file import LoadCall, Serving
from harness.serve.containers import make_load_error, make_start_error
from harness.serve.lemonade import Api, LoadedModel, bring_up_model
from harness.serve.probe import (
    POLL_S,
    PROBE_TIMEOUT_S,
    REPORT_EVERY_S,
    PhaseTimer,
    Post,
    StartupWatch,
    connection_error_type,
    error_message,
    explain_connection_error,
    get_version,
    request_first_answer,
    require_api,
    run_watched,
)
from harness.trust import open_session


class ReadyServer(Struct, frozen=True):
    """The facts of a server that became ready."""

    phases: list[Phase]  # "port open", "health", ("model", "load",) "first answer"; without a gap between them
    model: str  # its id
    version: str | None
    brought_up: LoadedModel | None = None  # by Lemonade


def wait_ready(
    url: str,
    serving: Serving,
    model: str,
    waiting: StartupWatch,
    *,
    api_key: str | None = None,
    key_name: str | None = None,
) -> ReadyServer:
    """Wait until `model` at `url` has given one real answer. `key_name` is the variable that held the key.

    Raises ServerError when the server dies, does not become ready in time, or answers with what is no API.
    """
    phases = PhaseTimer(waiting.on_progress)
    deadline = time.monotonic() + waiting.timeout_s
    with open_session(api_key) as session:
        post = partial(_post_until_answered, waiting, deadline, api_key)
        _wait_for_http(session, url + serving.health, deadline, waiting, key_name, healthy=False)
        phases.done("port open")
        _wait_for_http(session, url + serving.health, deadline, waiting, key_name, healthy=True)
        phases.done("health")
        brought_up = None
        if serving.lemonade is not None:
            brought_up = bring_up_model(Api(url, api_key), serving.lemonade, waiting, deadline, phases)
            model = brought_up.model
        if serving.load is not None:
            _load_model(url, serving.load, model, post, waiting, phases)
        try:
            served, version = request_first_answer(url, model, session, post, key_name, deadline)
        except ServerError as error:
            refused = StartError(error.what, next_step=error.next_step, detail=error.detail)
            raise waiting.dead() or refused from None
        phases.done("first answer")
        if brought_up is not None:
            return ReadyServer(phases.all, served, brought_up.version, brought_up)
        return ReadyServer(phases.all, served, get_version(url, session, serving.version) or version)


def _load_model(url: str, load: LoadCall, model: str, post: Post, waiting: StartupWatch, phases: PhaseTimer) -> None:
    """Have the server load its model, which it gets first where it does not have it. Raises ServerError."""
    loaded = post(url + load.path, load.body)
    if loaded.status_code == 404 and load.fetch is not None:
        got = post(url + load.fetch.path, load.fetch.body)
        if got.status_code != 200:
            what = f"the server could not get '{model}': HTTP {got.status_code}"
            raise make_load_error(what, error_message(got), waiting.log)
        phases.done("model")
        loaded = post(url + load.path, load.body)
    if loaded.status_code != 200:
        what = f"the server could not load '{model}': HTTP {loaded.status_code}"
        raise make_load_error(what, error_message(loaded), waiting.log)
    phases.done("load")


def _wait_for_http(
    session: requests.Session, url: str, deadline: float, waiting: StartupWatch, key_name: str | None, *, healthy: bool
) -> None:
    """Wait for any answer, or for that of a `healthy` server."""
    seen = "nothing listens there"
    reported_s = time.monotonic()
    while True:
        if (dead := waiting.dead()) is not None:
            raise dead
        if time.monotonic() - reported_s >= REPORT_EVERY_S:
            reported_s = time.monotonic()
            waiting.on_progress(
                f"waiting for the server, at most {deadline - reported_s:.0f} s more: {waiting.log.last_line()}"
            )
        try:
            with session.get(url, timeout=PROBE_TIMEOUT_S) as response:
                if response.status_code == 200 or not healthy:
                    return
                if response.status_code in (401, 403):
                    require_api(response, url, key_name)
                seen = f"HTTP {response.status_code}"
                if "html" in response.headers.get("Content-Type", ""):
                    seen += " with an HTML page"
        except requests.ReadTimeout:
            seen = f"no answer within {PROBE_TIMEOUT_S:.0f} s"
        except requests.RequestException:
            seen = "no connection"  # refused, or reset by Docker's proxy while no server listens
        if time.monotonic() > deadline:
            raise _timeout_error(url, seen, waiting)
        pause(POLL_S)


def _timeout_error(url: str, seen: str, waiting: StartupWatch) -> ServerError:
    failure = explain(waiting.log.path)
    hint = f" Its log has a hint: {failure.cause}; {failure.fix}." if failure is not None else ""
    what = f"the server did not become ready within {waiting.timeout_s:g} s; last seen at GET {url}: {seen}"
    step = "Look at its last lines; if it only needs longer, raise startup_timeout_s in the scenario."
    return make_start_error(what, waiting.log, failure, step + hint)


def _post_until_answered(
    waiting: StartupWatch, deadline: float, api_key: str | None, url: str, body: dict[str, Any]
) -> requests.Response:
    """POST and wait for the answer until the deadline, while the server lives."""
    while True:
        left = max(1.0, deadline - time.monotonic())
        try:
            answer = run_watched(
                partial(_post, url, body, left, api_key), waiting, deadline + 1, ["asking for the model"]
            )
        except requests.RequestException as error:
            raise waiting.dead() or _broken_post_error(url, error, waiting) from None
        if answer.status_code not in (429, 503) or time.monotonic() > deadline:
            return answer
        pause(POLL_S)


def _post(url: str, body: dict[str, Any], timeout_s: float, api_key: str | None) -> requests.Response:
    with open_session(api_key) as session:
        return session.post(url, json=body, timeout=timeout_s, allow_redirects=False)


def _broken_post_error(url: str, error: requests.RequestException, waiting: StartupWatch) -> ServerError:
    return connection_error_type(error)(
        f"the server gave no answer to POST {url} ({explain_connection_error(error)})",
        next_step="Look at its last lines.",
        detail=waiting.log.tail(),
    )
