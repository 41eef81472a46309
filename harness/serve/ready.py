"""Waiting until a server's model really answers."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import requests
from msgspec import Struct

from harness.errors import ServerError
from harness.failures.explain import explain
from harness.rundir.manifest import Phase
from harness.serve.ask import PROBE_TIMEOUT_S, first_answer, message, no_answer, reason, refuse_no_api, server_version
from harness.serve.compose.compose import Fetch, Serving
from harness.serve.docker.containers import advice, evidence_in
from harness.serve.fetch import FETCH
from harness.serve.lemonade.api import Api
from harness.serve.lemonade.bring_up import Loaded, bring_up
from harness.serve.waiting import POLL_S, Phases, Waiting, watched
from harness.trust import open_session

TELL_EVERY_S = 1.0


class Ready(Struct, frozen=True):
    """What was found out about a server while it became ready."""

    phases: list[Phase]  # "port open", "health", ("model", "load",) "first answer"; without a gap between them
    model: str  # id that it answers to
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
        _poll(session, url + serving.health, deadline, waiting, key_name, accept=lambda status: True)
        phases.done("port open")
        _poll(session, url + serving.health, deadline, waiting, key_name, accept=lambda status: status == 200)
        phases.done("health")
        if serving.fetch is not None:
            _fetch(url, serving.fetch, session, deadline, waiting)
            phases.done("model")
        brought_up = None
        if serving.lemonade is not None:
            brought_up = bring_up(Api(url, api_key), serving.lemonade, waiting, deadline, phases)
            model = brought_up.model
        if serving.load is not None:
            loaded = post(url + serving.load.path, serving.load.body)
            if loaded.status_code != 200:
                raise _not_loaded(loaded, model, waiting)
            phases.done("load")
        try:
            served, told = first_answer(url, model, session, post, key_name, deadline)
        except ServerError as error:
            raise waiting.dead() or error from None
        phases.done("first answer")
        if brought_up is not None:
            return Ready(phases.all, served, brought_up.version, brought_up)
        return Ready(phases.all, served, server_version(url, session, serving.version) or told)


def _fetch(url: str, fetch: Fetch, session: requests.Session, deadline: float, waiting: Waiting) -> None:
    try:
        FETCH[fetch.protocol](url, fetch.model, fetch.source, session, deadline, waiting.on_progress)
    except ServerError as error:
        raise waiting.dead() or error from None


def _poll(
    session: requests.Session,
    url: str,
    deadline: float,
    waiting: Waiting,
    key_name: str | None,
    accept: Callable[[int], bool],
) -> None:
    seen = "nothing listens there"
    told = time.monotonic()
    while True:
        dead = waiting.dead()
        if dead is not None:
            raise dead
        if time.monotonic() - told >= TELL_EVERY_S:
            told = time.monotonic()
            waiting.on_progress(
                f"waiting for the server, at most {deadline - told:.0f} s more: {waiting.log.last_line()}"
            )
        try:
            with session.get(url, timeout=PROBE_TIMEOUT_S) as response:
                if accept(response.status_code):
                    return
                if response.status_code in (401, 403):
                    refuse_no_api(response, url, key_name)
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
    failure = explain(waiting.log.path)
    hint = f" Its log has a hint: {failure.cause}; {failure.fix}." if failure is not None else ""
    return ServerError(
        f"the server did not become ready within {waiting.timeout_s:g} s; last seen at GET {url}: {seen}",
        next_step="Look at its last lines; if it only needs longer, raise startup_timeout_s in the scenario." + hint,
        detail=waiting.log.tail() if failure is None else evidence_in(failure, waiting.log),
    )


def _not_loaded(response: requests.Response, model: str, waiting: Waiting) -> ServerError:
    said = message(response)
    step, detail = advice(said, waiting.log)
    what = f"the server could not load '{model}': HTTP {response.status_code}: {said}"
    return ServerError(what, next_step=step, detail=detail)


def _patient_post(
    waiting: Waiting, deadline: float, api_key: str | None, url: str, body: dict[str, Any]
) -> requests.Response:
    """POST and wait for the answer as long as the deadline allows, watching that the server lives."""
    while True:
        left = max(1.0, deadline - time.monotonic())
        try:
            answer = watched(lambda: _post(url, body, left, api_key), waiting)  # noqa: B023 - called before the next
        except requests.RequestException as error:
            raise waiting.dead() or _gone(url, error, waiting) from None
        if answer.status_code not in (429, 503) or time.monotonic() > deadline:
            return answer
        time.sleep(POLL_S)


def _post(url: str, body: dict[str, Any], timeout_s: float, api_key: str | None) -> requests.Response:
    with open_session(api_key) as session:
        return session.post(url, json=body, timeout=timeout_s, allow_redirects=False)


def _gone(url: str, error: requests.RequestException, waiting: Waiting) -> ServerError:
    return no_answer(error)(
        f"the server gave no answer to POST {url} ({reason(error)})",
        next_step="Look at its last lines.",
        detail=waiting.log.tail(),
    )
