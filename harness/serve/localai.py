"""LocalAI's own API beside the OpenAI one: models are installed from a gallery, by a job that tells how far it is.

See docs/content/features/model-gallery.md of mudler/LocalAI.
"""

import time
from collections.abc import Callable
from typing import Any

import requests

from harness.errors import ServerError
from harness.serve.ask import PROBE_TIMEOUT_S, message, reason

POLL_S = 0.5


def fetch(
    url: str, model: str, source: str | None, session: requests.Session, deadline: float, say: Callable[[str], None]
) -> None:
    """Install a model unless LocalAI has it: `source` is the address of its configuration, null means the gallery.

    The backend that the model needs on this machine comes with it. Raises ServerError in words.
    """
    if model in installed(url, session):
        return
    say(f"installing {model} in LocalAI")
    asked = {"id": model} if source is None else {"url": source, "name": model}
    try:
        answer = session.post(url + "/models/apply", json=asked, timeout=60)
        if answer.status_code != 200:
            raise _cannot_install(model, message(answer))
        job = str(answer.json()["uuid"])
        _wait(f"{url}/models/jobs/{job}", model, session, deadline, say)
    except requests.RequestException as error:
        raise _cannot_install(model, reason(error)) from None
    except (KeyError, TypeError, ValueError):
        raise _cannot_install(model, "its answers are not those of LocalAI") from None


def installed(url: str, session: requests.Session) -> list[str]:
    """The models that LocalAI has."""
    try:
        answer = session.get(url + "/v1/models", timeout=2 * PROBE_TIMEOUT_S).json()
        return [str(entry["id"]) for entry in answer["data"]]
    except (requests.RequestException, ValueError, KeyError, TypeError):
        return []


def _wait(url: str, model: str, session: requests.Session, deadline: float, say: Callable[[str], None]) -> None:
    seen = "nothing"
    while time.monotonic() < deadline:
        job: dict[str, Any] = session.get(url, timeout=2 * PROBE_TIMEOUT_S).json()
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
