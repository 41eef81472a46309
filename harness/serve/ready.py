"""Wait until a server's model answers."""

import time
from functools import partial
from typing import Any

import requests
from msgspec import Struct

from harness.errors import ServerError, StartError
from harness.failures.explain import explain
from harness.failures.unexpected_response import error_message
from harness.process import pause
from harness.rundir.manifest import Phase
from harness.serve import probe
from harness.serve.compose_file import LoadCall, Serving
from harness.serve.containers import make_load_error, make_start_error
from harness.serve.lemonade import Api, LoadedModel, bring_up_model
from harness.serve.probe import PhaseTimer, Post, StartupWatch, explain_connection_error
from harness.trust import open_session


class ReadyServer(Struct, frozen=True):
    """The facts of a server that became ready."""

    phases: list[Phase]  # "port open", "health", ("model", "load",) "first answer"; without a gap between them
    model: str  # the id that requests send
    version: str | None
    loaded: LoadedModel | None = None  # if Lemonade loaded it


def wait_ready(
    url: str,
    serving: Serving,
    model: str,
    watch: StartupWatch,
    *,
    api_key: str | None = None,
    key_name: str | None = None,
) -> ReadyServer:
    """Wait until `model` at `url` has given one real answer. `key_name`: the environment variable that has the API key.

    Raises ServerError when the server dies, is not ready in time, or is not an OpenAI-compatible API.
    """
    timer = PhaseTimer(watch.on_progress)
    deadline = time.monotonic() + watch.timeout_s
    with open_session(api_key) as session:
        post = partial(_post_until_answered, watch, deadline, api_key)
        _wait_for_http(session, url + serving.health, deadline, watch, key_name, healthy=False)
        timer.finish("port open")
        _wait_for_http(session, url + serving.health, deadline, watch, key_name, healthy=True)
        timer.finish("health")
        loaded = None
        if serving.lemonade is not None:
            loaded = bring_up_model(Api(url, api_key), serving.lemonade, watch, deadline, timer)
            model = loaded.model
        if serving.load is not None:
            _load_model(url, serving.load, model, post, watch, timer)
        try:
            model, version = probe.request_first_answer(url, model, session, post, key_name)
        except ServerError as error:
            refused = StartError(error.what, next_step=error.next_step, detail=error.detail)
            raise watch.find_death() or refused from None
        timer.finish("first answer")
        version = loaded.version if loaded is not None else probe.get_version(url, session, serving.version) or version
        return ReadyServer(timer.phases, model, version, loaded)


def _load_model(url: str, load: LoadCall, model: str, post: Post, watch: StartupWatch, timer: PhaseTimer) -> None:
    """Let the server load its model, and fetch it first if the server does not have it. Raises ServerError."""
    response, verb = post(url + load.path, load.body), "load"
    if response.status_code == 404 and load.fetch is not None:
        response, verb = post(url + load.fetch.path, load.fetch.body), "get"
        if response.status_code == 200:
            timer.finish("model")
            response, verb = post(url + load.path, load.body), "load"
    if response.status_code != 200:
        what = f"the server could not {verb} '{model}': HTTP {response.status_code}"
        raise make_load_error(what, error_message(response.content), watch.log)
    timer.finish("load")


def _wait_for_http(
    session: requests.Session, url: str, deadline: float, watch: StartupWatch, key_name: str | None, *, healthy: bool
) -> None:
    """Wait for any answer; with `healthy`, for status 200."""
    last_seen = "nothing listens there"
    reported_s = time.monotonic()
    while True:
        if (death := watch.find_death()) is not None:
            raise death
        if time.monotonic() - reported_s >= probe.REPORT_EVERY_S:
            reported_s = time.monotonic()
            remaining = f"at most {deadline - reported_s:.0f} s more"
            watch.on_progress(f"waiting for the server, {remaining}: {watch.log.last_line()}")
        try:
            with session.get(url, timeout=probe.PROBE_TIMEOUT_S) as response:
                if response.status_code == 200 or not healthy:
                    return
                if response.status_code in (401, 403):
                    probe.require_api(response, url, key_name)
                last_seen = f"HTTP {response.status_code}"
        except requests.RequestException as error:
            last_seen = explain_connection_error(error)  # Docker's proxy resets it while no server listens
        if time.monotonic() > deadline:
            raise _timeout_error(url, last_seen, watch)
        pause(probe.POLL_S)


def _timeout_error(url: str, last_seen: str, watch: StartupWatch) -> ServerError:
    failure = explain(watch.log.path)
    hint = f" Its log has a hint: {failure.cause}; {failure.fix}." if failure is not None else ""
    what = f"the server did not become ready within {watch.timeout_s:g} s; last seen at GET {url}: {last_seen}"
    step = "Look at its last lines; if it only needs longer, raise startup_timeout_s in the scenario."
    return make_start_error(what, watch.log, failure, step + hint)


def _post_until_answered(
    watch: StartupWatch, deadline: float, api_key: str | None, url: str, body: dict[str, Any]
) -> requests.Response:
    """POST, and again while the server is busy (429, 503), until the deadline."""

    def post() -> requests.Response:
        with open_session(api_key) as session:
            timeout_s = max(1.0, deadline - time.monotonic())
            return session.post(url, json=body, timeout=timeout_s, allow_redirects=False)

    while True:
        try:
            answer = probe.run_watched(post, watch, deadline + 1, ["asking for the model"])
        except requests.RequestException as error:
            what = f"the server gave no answer to POST {url} ({explain_connection_error(error)})"
            broken = ServerError(what, next_step="Look at its last lines.", detail=watch.log.tail())
            raise watch.find_death() or broken from None
        if answer.status_code not in (429, 503) or time.monotonic() > deadline:
            return answer
        pause(probe.POLL_S)
