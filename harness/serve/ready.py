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
from harness.serve.containers import refused_load, start_error
from harness.serve.lemonade import Api, Loaded, bring_up
from harness.serve.probe import (
    POLL_S,
    PROBE_TIMEOUT_S,
    REPORT_EVERY_S,
    Phases,
    Post,
    Waiting,
    first_answer,
    message,
    no_answer,
    reason,
    refuse_no_api,
    server_version,
    watched,
)
from harness.trust import open_session


class Ready(Struct, frozen=True):
    """The facts of a server that became ready."""

    phases: list[Phase]  # "port open", "health", ("model", "load",) "first answer"; without a gap between them
    model: str  # its id
    version: str | None
    brought_up: Loaded | None = None  # by Lemonade


def wait_ready(
    url: str,
    serving: Serving,
    model: str,
    waiting: Waiting,
    *,
    api_key: str | None = None,
    key_name: str | None = None,
) -> Ready:
    """Wait until `model` at `url` has given one real answer. `key_name` is the variable that held the key.

    Raises ServerError when the server dies, does not become ready in time, or answers with what is no API.
    """
    phases = Phases(waiting.on_progress)
    deadline = time.monotonic() + waiting.timeout_s
    with open_session(api_key) as session:
        post = partial(_patient_post, waiting, deadline, api_key)
        _poll(session, url + serving.health, deadline, waiting, key_name, healthy=False)
        phases.done("port open")
        _poll(session, url + serving.health, deadline, waiting, key_name, healthy=True)
        phases.done("health")
        brought_up = None
        if serving.lemonade is not None:
            brought_up = bring_up(Api(url, api_key), serving.lemonade, waiting, deadline, phases)
            model = brought_up.model
        if serving.load is not None:
            _load(url, serving.load, model, post, waiting, phases)
        try:
            served, version = first_answer(url, model, session, post, key_name, deadline)
        except ServerError as error:
            refused = StartError(error.what, next_step=error.next_step, detail=error.detail)
            raise waiting.dead() or refused from None
        phases.done("first answer")
        if brought_up is not None:
            return Ready(phases.all, served, brought_up.version, brought_up)
        return Ready(phases.all, served, server_version(url, session, serving.version) or version)


def _load(url: str, load: LoadCall, model: str, post: Post, waiting: Waiting, phases: Phases) -> None:
    """Have the server load its model, which it gets first where it does not have it. Raises ServerError."""
    loaded = post(url + load.path, load.body)
    if loaded.status_code == 404 and load.fetch is not None:
        got = post(url + load.fetch.path, load.fetch.body)
        if got.status_code != 200:
            what = f"the server could not get '{model}': HTTP {got.status_code}"
            raise refused_load(what, message(got), waiting.log)
        phases.done("model")
        loaded = post(url + load.path, load.body)
    if loaded.status_code != 200:
        what = f"the server could not load '{model}': HTTP {loaded.status_code}"
        raise refused_load(what, message(loaded), waiting.log)
    phases.done("load")


def _poll(
    session: requests.Session, url: str, deadline: float, waiting: Waiting, key_name: str | None, *, healthy: bool
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
                    refuse_no_api(response, url, key_name)
                seen = f"HTTP {response.status_code}"
                if "html" in response.headers.get("Content-Type", ""):
                    seen += " with an HTML page"
        except requests.ReadTimeout:
            seen = f"no answer within {PROBE_TIMEOUT_S:.0f} s"
        except requests.RequestException:
            seen = "no connection"  # refused, or reset by Docker's proxy while no server listens
        if time.monotonic() > deadline:
            raise _not_ready(url, seen, waiting)
        pause(POLL_S)


def _not_ready(url: str, seen: str, waiting: Waiting) -> ServerError:
    failure = explain(waiting.log.path)
    hint = f" Its log has a hint: {failure.cause}; {failure.fix}." if failure is not None else ""
    what = f"the server did not become ready within {waiting.timeout_s:g} s; last seen at GET {url}: {seen}"
    step = "Look at its last lines; if it only needs longer, raise startup_timeout_s in the scenario."
    return start_error(what, waiting.log, failure, step + hint)


def _patient_post(
    waiting: Waiting, deadline: float, api_key: str | None, url: str, body: dict[str, Any]
) -> requests.Response:
    """POST and wait for the answer until the deadline, while the server lives."""
    while True:
        left = max(1.0, deadline - time.monotonic())
        try:
            answer = watched(partial(_post, url, body, left, api_key), waiting, deadline + 1, ["asking for the model"])
        except requests.RequestException as error:
            raise waiting.dead() or _gone(url, error, waiting) from None
        if answer.status_code not in (429, 503) or time.monotonic() > deadline:
            return answer
        pause(POLL_S)


def _post(url: str, body: dict[str, Any], timeout_s: float, api_key: str | None) -> requests.Response:
    with open_session(api_key) as session:
        return session.post(url, json=body, timeout=timeout_s, allow_redirects=False)


def _gone(url: str, error: requests.RequestException, waiting: Waiting) -> ServerError:
    return no_answer(error)(
        f"the server gave no answer to POST {url} ({reason(error)})",
        next_step="Look at its last lines.",
        detail=waiting.log.tail(),
    )
