"""Asking a server who it is: what it serves, whether its model answers, and in words what is in the way."""

import socket
from typing import Any

import msgspec
import requests

from harness.errors import HarnessError, ServerError, did_you_mean
from harness.manifest import ServedBy

PROBE_TIMEOUT_S = 5.0


def attach(url: str, model: str | None, api_key: str | None = None, *, timeout_s: float = 300.0) -> ServedBy:
    """Look at a server that already runs: does its model answer?

    `model` None takes the only one that it serves. Raises ServerError in words for what is in the way.
    """
    base = base_url(url)
    with open_session(api_key) as session:
        served = find_model(base, model, session)
        response = _post(session, base + "/v1/chat/completions", one_token(served), timeout_s)
        check_answer(response, base)
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
    with open_session(api_key) as session:
        try:
            response = session.get(base + "/metrics", timeout=PROBE_TIMEOUT_S)
        except requests.RequestException:
            return None
    text = response.text.lstrip()
    return base + "/metrics" if response.status_code == 200 and not text.startswith("<") else None


def find_model(base: str, model: str | None, session: requests.Session) -> str:
    """The id under which the server answers for `model`. Raises ServerError that names what it serves."""
    response = _get(session, base + "/v1/models")
    refuse_no_api(response, base)
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


def listens(host: str, port: int, timeout_s: float = 2.0) -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError:
        return False
    return True


def open_session(api_key: str | None) -> requests.Session:
    session = requests.Session()
    session.trust_env = False  # a proxy of the environment must not stand between us and the server
    if api_key:
        session.headers["Authorization"] = f"Bearer {api_key}"
    return session


def one_token(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 1, "stream": False}


def _get(session: requests.Session, url: str) -> requests.Response:
    try:
        return session.get(url, timeout=2 * PROBE_TIMEOUT_S)
    except requests.RequestException as error:
        raise ServerError(
            f"no answer from {url}: {reason(error)}", next_step="Check the address and that the server runs."
        ) from None


def _post(session: requests.Session, url: str, body: dict[str, Any], timeout_s: float) -> requests.Response:
    try:
        return session.post(url, json=body, timeout=timeout_s)
    except requests.RequestException as error:
        raise ServerError(f"no answer from {url}: {reason(error)}", next_step="Look at the server's log.") from None


def refuse_no_api(response: requests.Response, base: str) -> None:
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
            f"{response.url} answers HTTP {response.status_code}: {message(response)}",
            next_step="Check that the address is that of an OpenAI-compatible server.",
        )


def check_answer(response: requests.Response, base: str) -> None:
    """The first real answer must be a chat completion."""
    if response.status_code != 200:
        _explain_refusal(response, base)
    refuse_no_api(response, base)
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
        f"the model does not answer: {response.url} says HTTP {response.status_code}: {message(response)}",
        next_step="Look at the server's log.",
    )


def message(response: requests.Response) -> str:
    try:
        error = msgspec.json.decode(response.content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (msgspec.DecodeError, KeyError, TypeError):
        return response.text[:200].strip() or "no text"


def reason(error: Exception) -> str:
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
