"""Chat and text completions, passed on to the backend."""

import http.client
import json
from collections.abc import Iterator
from typing import Any

from tests.doubles.lemonade.bodies import Refused, error
from tests.doubles.lemonade.router import Loaded, Router
from tests.doubles.lemonade.watch import Died, answered, error_event, pieces, reset_event

MAX_TOKENS = 8192  # above it the prompt is counted first


def answer(router: Router, path: str, asked: dict[str, Any]) -> dict[str, Any]:
    """A reply that is not streamed. Raises Refused with the backend's status."""
    loaded = _loaded(router, asked)
    for attempt in (1, 2):
        try:
            status, found = _post(loaded, path, asked)
            break
        except OSError:
            router.reset(loaded.backend, "backend process exited during request")
            if attempt == 2:
                raise error("load_timeout", 500, message="backend unavailable") from None
            loaded = _loaded(router, asked)  # loaded again, and asked again: the client sees a slow success
    if status != 200:
        inner = dict(found["error"])
        details = {"backend": loaded.backend.name, "response": found}
        raise Refused(status, {"error": {**inner, "details": details, "status_code": status}})
    return found


def stream(router: Router, path: str, asked: dict[str, Any]) -> Iterator[bytes]:
    """Events of a streamed reply: errors of the backend are events, too. Raises Refused for an unknown model."""
    return _events(router, _loaded(router, asked), path, asked)


def _events(router: Router, loaded: Loaded, path: str, asked: dict[str, Any]) -> Iterator[bytes]:
    options = {**(asked.get("stream_options") or {}), "include_usage": True}  # whatever the client wants
    asked = {**asked, "stream_options": options}
    for attempt in (1, 2):
        try:
            yield from _streamed(router, loaded, path, asked)
            return
        except Died as death:
            router.reset(loaded.backend, death.reason)
            if death.sent or attempt == 2:
                yield reset_event(loaded.backend, death.reason)
                return
            loaded = _loaded(router, asked)


def _streamed(router: Router, loaded: Loaded, path: str, asked: dict[str, Any]) -> Iterator[bytes]:
    backend = loaded.backend
    connection = backend.connect()
    backend.busy += 1
    try:
        response = yield from answered(router.settings, backend, lambda: _send(connection, loaded, path, asked))
        if response.status != 200:
            yield error_event(response.status, json.loads(response.read()))
            return
        yield from pieces(router.settings, backend, response)
    except (OSError, http.client.HTTPException):
        raise Died("backend process exited during streaming request", False) from None
    finally:
        backend.busy -= 1
        connection.close()


def _post(loaded: Loaded, path: str, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    connection = loaded.backend.connect()
    loaded.backend.busy += 1
    try:
        response = _send(connection, loaded, path, asked)
        return response.status, json.loads(response.read())
    except http.client.HTTPException as problem:
        raise ConnectionError(str(problem)) from None
    finally:
        loaded.backend.busy -= 1
        connection.close()


def _send(
    connection: http.client.HTTPConnection, loaded: Loaded, path: str, asked: dict[str, Any]
) -> http.client.HTTPResponse:
    body = dict(asked)
    if loaded.model.recipe == "llamacpp":
        body["model"] = "llama"  # llama-server does not look at the name
    elif body.get("model") == loaded.model.canonical:
        body["model"] = loaded.model.served
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(body.get(name), int) and body[name] > min(MAX_TOKENS, loaded.options["ctx_size"]):
            body[name] = min(body[name], loaded.options["ctx_size"] - _prompt_tokens(loaded, body))
    text = json.dumps(body, sort_keys=True)
    connection.request("POST", path, text, {"Content-Type": "application/json"})
    return connection.getresponse()


def _prompt_tokens(loaded: Loaded, body: dict[str, Any]) -> int:
    connection = loaded.backend.connect()
    try:
        connection.request("POST", "/tokenize", json.dumps(body), {"Content-Type": "application/json"})
        return int(json.loads(connection.getresponse().read())["count"])
    finally:
        connection.close()


def _loaded(router: Router, asked: dict[str, Any]) -> Loaded:
    name = asked.get("model")
    if not name:
        raise error("no_model", 400)
    return router.for_request(str(name), asked)
