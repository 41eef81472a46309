"""Wait until a server's model answers; Ollama and LocalAI get it through their own API.

See docs/api.md of ollama/ollama, and docs/content/features/model-gallery.md of mudler/LocalAI.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import quote

import requests
from msgspec import Struct

from harness.errors import ServerError, StartError
from harness.failures.explain import explain
from harness.failures.unexpected_response import decoded, model_ids
from harness.rundir.manifest import Phase
from harness.serve.compose_file import Serving
from harness.serve.containers import refused_load, start_error
from harness.serve.engine import amount
from harness.serve.lemonade import Api, Loaded, bring_up
from harness.serve.probe import (
    POLL_S,
    PROBE_TIMEOUT_S,
    Phases,
    Waiting,
    first_answer,
    lines_of,
    message,
    no_answer,
    reason,
    refuse_no_api,
    server_version,
    watched,
)
from harness.trust import open_session

SAY_EVERY_S = 0.5
JOB_POLL_S = 0.5


def _from_ollama(
    url: str, model: str, _source: str | None, session: requests.Session, deadline: float, say: Callable[[str], None]
) -> None:
    """Pull a model unless Ollama has it, with progress."""
    if _has(url, model, session):
        return
    say(f"pulling {model} into Ollama")
    try:
        with session.post(
            url + "/api/pull",
            json={"model": model, "stream": True},
            stream=True,
            # A large layer is verified without progress; only the server's time limit ends that.
            timeout=(PROBE_TIMEOUT_S, max(1.0, deadline - time.monotonic())),
        ) as response:
            if response.status_code != 200:
                raise _cannot_pull(model, message(response))
            _follow(response, model, deadline, say)
    except requests.RequestException as error:
        raise _cannot_pull(model, reason(error)) from None


def _has(url: str, model: str, session: requests.Session) -> bool:
    """Whether Ollama has the model; a name without a tag means `latest`."""
    try:
        answer = decoded(session.get(url + "/api/tags", timeout=2 * PROBE_TIMEOUT_S).content)
        return full_name(model) in [entry["name"] for entry in answer["models"]]
    except (requests.RequestException, ValueError, KeyError, TypeError):
        return False


def full_name(model: str) -> str:
    return model if ":" in model.rpartition("/")[2] else f"{model}:latest"


def loaded(answer: Any, model: str | None) -> dict[str, Any]:
    """Facts of the loaded model from /api/ps: digest, quantization, and its share in GPU memory."""
    try:
        entry = next(one for one in answer["models"] if model is None or one["name"] == full_name(model))
        size, on_gpu = entry["size"], entry["size_vram"]
        shared = type(size) is type(on_gpu) is int and 0 <= on_gpu <= size
        details = entry.get("details")
        facts = {
            "model_digest": (entry.get("digest"), str),
            "quantization": (details.get("quantization_level") if isinstance(details, dict) else None, str),
            "context_length": (entry.get("context_length"), int),
            "gpu_share": (round(on_gpu / size, 3) if shared and size else None, float),
        }
    except (KeyError, TypeError, AttributeError, StopIteration):
        return {}
    return {key: value for key, (value, kind) in facts.items() if type(value) is kind}


def _follow(response: requests.Response, model: str, deadline: float, say: Callable[[str], None]) -> None:
    """Read the stream of objects, one a line, until it says "success"."""
    layers: dict[str, tuple[int, int]] = {}
    said = time.monotonic()
    status = "nothing"
    for line in lines_of(response):
        if time.monotonic() > deadline:
            raise _cannot_pull(model, f"{_TOO_LONG}; last seen: {status}", _KEPT)
        if not line.strip():
            continue
        try:
            event = decoded(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise _cannot_pull(model, f"Ollama answers with something that is not JSON: {line[:200]!r}")
        if event.get("error"):
            raise _cannot_pull(model, str(event["error"]))
        status = str(event.get("status", ""))
        digest, total, completed = event.get("digest"), event.get("total"), event.get("completed") or 0
        if isinstance(digest, str) and type(total) is type(completed) is int and 0 <= completed <= total < 2**63:
            layers[digest] = (completed, total)
        if time.monotonic() - said > SAY_EVERY_S:
            said = time.monotonic()
            say(f"pulling {model} into Ollama: {amount(layers) if layers else status}")
    if status != "success":
        raise _cannot_pull(model, f"the answer ended with '{status}'")


_TOO_LONG = "it did not end within the server's time limit"
_KEPT = "Raise startup_timeout_s; what was downloaded is kept in the volume."
_STEPS: dict[str, tuple[tuple[tuple[str, ...], str], ...]] = {  # words of the error, and what to do; "" matches all
    "Ollama cannot pull": (
        (
            ("file does not exist", "invalid model name"),
            "Check the scenario's model: a name of ollama.com/library such as qwen3:0.6b, or hf.co/REPOSITORY:QUANT.",
        ),
        (
            ("no such host", "dial tcp", "i/o timeout", "connection refused", "tls"),
            "Connect the machine for the first start (the volume keeps the model), or set HTTPS_PROXY in environment.",
        ),
        (("",), "Look at the server's log; the disk may be full."),
    ),
    "LocalAI cannot install": (
        (
            ("no model found", "not found"),
            "Check the scenario's model: a name of the gallery (models.localai.io), or give model_config, the address "
            "of a configuration.",
        ),
        (("",), "Look at the server's log; models and backends come from the network at the first start."),
    ),
}


def _not_fetched(doing: str, model: str, why: str, step: str = "") -> ServerError:
    """The error of a failed pull; `doing` is a key of _STEPS."""
    step = step or next(step for words, step in _STEPS[doing] if any(word in why.lower() for word in words))
    return ServerError(f"{doing} the model '{model}': {why}", next_step=step)


_cannot_pull = partial(_not_fetched, "Ollama cannot pull")
_cannot_install = partial(_not_fetched, "LocalAI cannot install")


def _from_localai(
    url: str, model: str, source: str | None, session: requests.Session, deadline: float, say: Callable[[str], None]
) -> None:
    """Install a model unless LocalAI has it: `source` is the address of its configuration, null means the gallery.

    The backend that the model needs on this machine comes with it.
    """
    with suppress(requests.RequestException, ValueError):
        if model in model_ids(session.get(url + "/v1/models", timeout=2 * PROBE_TIMEOUT_S).content):
            return
    say(f"installing {model} in LocalAI")
    asked = {"id": model} if source is None else {"url": source, "name": model}
    try:
        answer = session.post(url + "/models/apply", json=asked, timeout=60)
        if answer.status_code != 200:
            raise _cannot_install(model, message(answer))
        job = decoded(answer.content)["uuid"]
        _wait(f"{url}/models/jobs/{quote(str(job), safe='')}", model, session, deadline, say)
    except requests.RequestException as error:
        raise _cannot_install(model, reason(error)) from None
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise _cannot_install(model, "its answers are not those of LocalAI") from None


def _wait(url: str, model: str, session: requests.Session, deadline: float, say: Callable[[str], None]) -> None:
    seen = "nothing"
    while time.monotonic() < deadline:
        job: dict[str, Any] = decoded(session.get(url, timeout=2 * PROBE_TIMEOUT_S).content)
        # Older versions send an error as {} and its words as the message.
        if job.get("error") is not None and job["error"] != "":
            raise _cannot_install(model, str(job["error"] or job.get("message") or "no reason is given"))
        if job.get("cancelled"):
            raise _cannot_install(model, "the installation was cancelled")
        if job.get("processed"):
            return
        seen = f"{job.get('file_name') or job.get('message') or ''} {float(job.get('progress') or 0):.0f} %".strip()
        say(f"installing {model} in LocalAI: {seen}")
        time.sleep(JOB_POLL_S)
    raise _cannot_install(model, f"{_TOO_LONG}; last seen: {seen}", _KEPT)


# By `fetch.protocol` of a template. Each takes the server's address, the model, where it comes from, a session, the
# moment to give up, and a function for progress; it raises ServerError with the problem.
FETCH = {"ollama": _from_ollama, "localai": _from_localai}
LOADED = {"ollama": ("/api/ps", loaded)}  # by template: a path, and the facts in its answer


REPORT_EVERY_S = 1.0


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
        if (fetch := serving.fetch) is not None:
            try:
                FETCH[fetch.protocol](url, fetch.model, fetch.source, session, deadline, waiting.on_progress)
            except ServerError as error:
                raise waiting.dead() or error from None
            phases.done("model")
        brought_up = None
        if serving.lemonade is not None:
            brought_up = bring_up(Api(url, api_key), serving.lemonade, waiting, deadline, phases)
            model = brought_up.model
        if serving.load is not None:
            loaded = post(url + serving.load.path, serving.load.body)
            if loaded.status_code != 200:
                what = f"the server could not load '{model}': HTTP {loaded.status_code}"
                raise refused_load(what, message(loaded), waiting.log)
            phases.done("load")
        try:
            served, version = first_answer(url, model, session, post, key_name, deadline)
        except ServerError as error:
            refused = StartError(error.what, next_step=error.next_step, detail=error.detail)
            raise waiting.dead() or refused from None
        phases.done("first answer")
        if brought_up is not None:
            return Ready(phases.all, served, brought_up.version, brought_up)
        return Ready(phases.all, served, server_version(url, session, serving.version) or version)


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
        time.sleep(POLL_S)


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
