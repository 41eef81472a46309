"""Ollama's own API beside the OpenAI one: its models are pulled through it. See docs/api.md of ollama/ollama."""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import requests

from harness.errors import ServerError
from harness.serve.ask import PROBE_TIMEOUT_S, message, reason
from harness.serve.docker.images import amount

SAY_EVERY_S = 0.5


def fetch(
    url: str, model: str, _source: str | None, session: requests.Session, deadline: float, say: Callable[[str], None]
) -> None:
    """Pull a model unless Ollama has it, with progress. Raises ServerError in words for what is in the way."""
    if has(url, model, session):
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


def has(url: str, model: str, session: requests.Session) -> bool:
    """Whether Ollama has the model already; a name without a tag means `latest`."""
    try:
        answer = session.get(url + "/api/tags", timeout=2 * PROBE_TIMEOUT_S).json()
        return full_name(model) in {str(entry["name"]) for entry in answer["models"]}
    except (requests.RequestException, ValueError, KeyError, TypeError):
        return False


def full_name(model: str) -> str:
    return model if ":" in model.rpartition("/")[2] else f"{model}:latest"


def loaded(answer: Any, model: str | None) -> dict[str, Any]:
    """What /api/ps tells of the loaded model: digest, quantization, and how much of it is in the GPU's memory."""
    try:
        entry = next(one for one in answer["models"] if model is None or one["name"] == full_name(model))
        size, on_gpu = int(entry["size"]), int(entry["size_vram"])
        details = entry.get("details") or {}
    except (KeyError, TypeError, ValueError, StopIteration):
        return {}
    told = {
        "model_digest": entry.get("digest"),
        "quantization": details.get("quantization_level"),
        "context_length": entry.get("context_length"),
        "gpu_share": round(on_gpu / size, 3) if size else None,
    }
    return {key: value for key, value in told.items() if value is not None}


def _follow(response: requests.Response, model: str, deadline: float, say: Callable[[str], None]) -> None:
    """Read the stream of objects, one a line, until it says "success"."""
    layers: dict[str, tuple[int, int]] = {}
    said = time.monotonic()
    status = "nothing"
    for line in response.iter_lines():
        if time.monotonic() > deadline:
            raise _cannot_pull(model, f"it did not end within the server's time limit; last seen: {status}")
        if not line.strip():
            continue
        try:
            event = msgspec.json.decode(line)
        except msgspec.DecodeError:
            raise _cannot_pull(model, f"Ollama answers with something that is not JSON: {line[:200]!r}") from None
        if event.get("error"):
            raise _cannot_pull(model, str(event["error"]))
        status = str(event.get("status", ""))
        if event.get("digest") and event.get("total"):
            layers[event["digest"]] = (int(event.get("completed") or 0), int(event["total"]))
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
