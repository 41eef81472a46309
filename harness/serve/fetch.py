"""Servers that get a model through an API of their own: Ollama pulls it, LocalAI installs it from a gallery.

See docs/api.md of ollama/ollama, and docs/content/features/model-gallery.md of mudler/LocalAI.
"""

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import requests

from harness.errors import ServerError
from harness.failures.unexpected_response import decoded, model_ids
from harness.serve.ask import PROBE_TIMEOUT_S, lines_of, message, reason
from harness.serve.docker.images import amount

SAY_EVERY_S = 0.5
POLL_S = 0.5


def _from_ollama(
    url: str, model: str, _source: str | None, session: requests.Session, deadline: float, say: Callable[[str], None]
) -> None:
    """Pull a model unless Ollama has it, with progress. Raises ServerError in words for what is in the way."""
    if _has(url, model, session):
        return
    say(f"pulling {model} into Ollama")
    try:
        with session.post(
            url + "/api/pull",
            json={"model": model, "stream": True},
            stream=True,
            # A big layer is verified in silence; only the server's own time limit ends that.
            timeout=(PROBE_TIMEOUT_S, max(1.0, deadline - time.monotonic())),
        ) as response:
            if response.status_code != 200:
                raise _cannot_pull(model, message(response))
            _follow(response, model, deadline, say)
    except requests.RequestException as error:
        raise _cannot_pull(model, reason(error)) from None


def _has(url: str, model: str, session: requests.Session) -> bool:
    """Whether Ollama has the model already; a name without a tag means `latest`."""
    try:
        answer = decoded(session.get(url + "/api/tags", timeout=2 * PROBE_TIMEOUT_S).content)
        return full_name(model) in [entry["name"] for entry in answer["models"]]
    except (requests.RequestException, ValueError, KeyError, TypeError):
        return False


def full_name(model: str) -> str:
    return model if ":" in model.rpartition("/")[2] else f"{model}:latest"


def loaded(answer: Any, model: str | None) -> dict[str, Any]:
    """What /api/ps tells of the loaded model: digest, quantization, and how much of it is in the GPU's memory."""
    try:
        entry = next(one for one in answer["models"] if model is None or one["name"] == full_name(model))
        size, on_gpu = entry["size"], entry["size_vram"]
        shared = type(size) is type(on_gpu) is int and 0 <= on_gpu <= size
        details = entry.get("details")
        told = {
            "model_digest": (entry.get("digest"), str),
            "quantization": (details.get("quantization_level") if isinstance(details, dict) else None, str),
            "context_length": (entry.get("context_length"), int),
            "gpu_share": (round(on_gpu / size, 3) if shared and size else None, float),
        }
    except (KeyError, TypeError, AttributeError, StopIteration):
        return {}
    return {key: value for key, (value, kind) in told.items() if type(value) is kind}


def _follow(response: requests.Response, model: str, deadline: float, say: Callable[[str], None]) -> None:
    """Read the stream of objects, one a line, until it says "success"."""
    layers: dict[str, tuple[int, int]] = {}
    said = time.monotonic()
    status = "nothing"
    for line in lines_of(response):
        if time.monotonic() > deadline:
            raise _cannot_pull(model, f"it did not end within the server's time limit; last seen: {status}")
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


def _cannot_pull(model: str, why: str) -> ServerError:
    said = why.lower()
    if "file does not exist" in said or "invalid model name" in said:
        step = "Check the scenario's model: a name of ollama.com/library such as qwen3:0.6b, or hf.co/REPOSITORY:QUANT."
    elif any(word in said for word in ("no such host", "dial tcp", "i/o timeout", "connection refused", "tls")):
        step = (
            "Connect the machine for the first start (the volume keeps the model), or set HTTPS_PROXY in environment."
        )
    elif "time limit" in said:
        step = "Raise startup_timeout_s; what was downloaded is kept in the volume."
    else:
        step = "Look at the server's log; the disk may be full."
    return ServerError(f"Ollama cannot pull the model '{model}': {why}", next_step=step)


def _from_localai(
    url: str, model: str, source: str | None, session: requests.Session, deadline: float, say: Callable[[str], None]
) -> None:
    """Install a model unless LocalAI has it: `source` is the address of its configuration, null means the gallery.

    The backend that the model needs on this machine comes with it. Raises ServerError in words.
    """
    if model in _installed(url, session):
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


def _installed(url: str, session: requests.Session) -> list[str]:
    """The models that LocalAI has."""
    try:
        return model_ids(session.get(url + "/v1/models", timeout=2 * PROBE_TIMEOUT_S).content)
    except (requests.RequestException, ValueError):
        return []


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
        seen = _how_far(job)
        say(f"installing {model} in LocalAI: {seen}")
        time.sleep(POLL_S)
    raise _cannot_install(model, f"it did not end within the server's time limit; last seen: {seen}")


def _how_far(job: dict[str, Any]) -> str:
    parts = [str(job.get("file_name") or job.get("message") or "")]
    if job.get("downloaded_size") and job.get("file_size"):
        parts.append(f"{job['downloaded_size']} of {job['file_size']}")
    if job.get("progress"):
        parts.append(f"{float(job['progress']):.0f} %")
    return " ".join(part for part in parts if part)


def _cannot_install(model: str, why: str) -> ServerError:
    if "no model found" in why.lower() or "not found" in why.lower():
        step = (
            "Check the scenario's model: a name of the gallery (models.localai.io), or give model_config, the address "
            "of a configuration."
        )
    elif "time limit" in why:
        step = "Raise startup_timeout_s; what was downloaded is kept in the volumes."
    else:
        step = "Look at the server's log; models and backends come from the network at the first start."
    return ServerError(f"LocalAI cannot install the model '{model}': {why}", next_step=step)


# By `fetch.protocol` of a template. Each takes the server's address, the model, where it comes from, a session, the
# moment to give up, and a function for progress; it raises ServerError in words for what is in the way.
FETCH = {"ollama": _from_ollama, "localai": _from_localai}
LOADED = {"ollama": ("/api/ps", loaded)}  # by template: a path, and what its answer tells of the loaded model
