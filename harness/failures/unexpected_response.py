"""Check that a response comes from an OpenAI-compatible API, and explain one that does not."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urljoin

import msgspec

from harness.redact import masked

CHECK_ADDRESS = "Check that the address is that of an OpenAI-compatible server."
_MAX_ID = 1000  # characters of a model's name
_MAX_SEARCHED_CHARS = 65_536  # of a message, for secrets
_REDIRECTS = (301, 302, 303, 307, 308)


class HttpResponse(NamedTuple):
    """A response, whichever client got it."""

    url: str
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @classmethod
    def of(cls, url: str, status: int, headers: Mapping[str, str], body: bytes) -> "HttpResponse":
        """Return the response without secrets: some servers repeat the API key."""
        clean = {name.lower(): masked(value, "known") for name, value in headers.items()}
        return cls(url, status, clean, masked(body.decode(errors="replace"), "known").encode())


class SentKey(NamedTuple):
    """Whether a request had an API key, and where the key comes from."""

    sent: bool
    name: str | None = None  # of the environment variable that has it
    option: str = "as 'api_key_env' in the scenario"  # where the user names that variable


def decode_json(raw: bytes | str) -> Any:
    """Return the decoded JSON value. Raises ValueError, also if it is nested too deeply."""
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_model_ids(raw: bytes) -> list[str]:
    """Return the ids in an answer to GET /v1/models. Raises ValueError if it is not a list of models."""
    try:
        ids = [entry["id"] for entry in decode_json(raw)["data"]]
    except (KeyError, TypeError):
        raise ValueError("not a list of models") from None
    if not all(isinstance(one, str) and 0 < len(one) <= _MAX_ID for one in ids):
        raise ValueError("a model's id is not a name")
    return ids


Advice = tuple[str, str]  # the problem, and what to do


def explain_response(response: HttpResponse, base: str, key: SentKey) -> Advice | None:
    """Explain a response that refuses access, or does not come from the intended server; None for any other."""
    status = f"HTTP {response.status}"
    if response.status in (401, 403) and key.sent:
        which = f"the key in {key.name}" if key.name else "the API key"
        next_step = f"Export the right key as {key.name}." if key.name else "Export the right key."
        return f"the server rejected {which} ({base} answers {status})", next_step
    if response.status in (401, 403):
        next_step = f"Name the environment variable that holds it {key.option}, and export it."
        return f"{base} wants an API key ({status})", next_step
    if response.status in _REDIRECTS and "location" in response.headers:
        target = response.headers["location"]
        with suppress(ValueError):  # it is not an address
            target = urljoin(response.url, target)
        return (
            f"{response.url} redirects to {target}; redirects are not followed",
            "Give the address of the server itself, without the API's path.",
        )
    if "html" in response.headers.get("content-type", "") or response.body.lstrip()[:1] == b"<":
        return (
            f"{base} answers with an HTML page, not with an OpenAI-compatible API ({status})",
            "Check the address; a web page of another program may live on this port.",
        )
    return None


def describe_status(response: HttpResponse) -> str:
    return f"{response.url} answers HTTP {response.status}: {error_message(response.body)}"


def describe_mismatch(response: HttpResponse, expected: str) -> str:
    return f"{response.url} answers with something that is not {expected}"


def explain_secret_model(base: str) -> Advice:
    """Explain that the name of the server's model contains a known secret."""
    return (
        f"{base}: the id of its model has the API key in it, which may not be recorded",
        "Give the model another name in the server's settings, or change the key.",
    )


def error_message(body: bytes) -> str:
    """Return the message of an API's error, without what looks like a secret."""
    try:
        error = decode_json(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
        return masked(text[:_MAX_SEARCHED_CHARS])[:300]
    except (ValueError, KeyError, TypeError, RecursionError):
        return masked(body.decode(errors="replace")[:_MAX_SEARCHED_CHARS])[:200].strip() or "no text"
