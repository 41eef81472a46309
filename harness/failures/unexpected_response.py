"""Check that a response comes from an OpenAI-compatible API, and explain one that does not."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urljoin

import msgspec

from harness.redact import masked

CHECK_ADDRESS = "Check that the address is that of an OpenAI-compatible server."
_MAX_ID = 1000  # characters of a model's name
_SEARCHED_CHARS = 65_536  # of a message, for secrets
_REDIRECTS = (301, 302, 303, 307, 308)


class HttpResponse(NamedTuple):
    """What came, as any client may have it."""

    url: str
    status: int
    headers: Mapping[str, str]  # found by names in lower case
    body: bytes

    @classmethod
    def of(cls, url: str, status: int, headers: Mapping[str, str], body: bytes) -> "HttpResponse":
        """Without secrets: some servers repeat the key that they got."""
        clean = {name.lower(): masked(value, "known") for name, value in headers.items()}
        return cls(url, status, clean, masked(body.decode(errors="replace"), "known").encode())


class SentKey(NamedTuple):
    """What was sent of an API key."""

    sent: bool
    name: str | None = None  # of the environment variable that holds it
    given: str = "as 'api_key_env' in the scenario"  # how a person names that variable


def decode_json(raw: bytes | str) -> Any:
    """The JSON value in `raw`. Raises ValueError, also where it is nested too deeply."""
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_model_ids(raw: bytes) -> list[str]:
    """The models that an answer to GET /v1/models lists. Raises ValueError for anything else than such a list."""
    try:
        ids = [entry["id"] for entry in decode_json(raw)["data"]]
    except (KeyError, TypeError):
        raise ValueError("not a list of models") from None
    if not all(isinstance(one, str) and 0 < len(one) <= _MAX_ID for one in ids):
        raise ValueError("a model's id is not a name")
    return ids


Advice = tuple[str, str]  # what is wrong, and what to do next


def explain_response(got: HttpResponse, base: str, key: SentKey) -> Advice | None:
    """Explain a response of a server that refuses access, or is not the intended one; None: neither."""
    if got.status in (401, 403):
        return _explain_denied_access(got, base, key)
    if got.status in _REDIRECTS and "location" in got.headers:
        target = got.headers["location"]
        with suppress(ValueError):  # it is no address
            target = urljoin(got.url, target)
        return (
            f"{got.url} redirects to {target}; redirects are not followed",
            "Give the address of the server itself, without the API's path.",
        )
    if "html" in got.headers.get("content-type", "") or got.body.lstrip()[:1] == b"<":
        return (
            f"{base} answers with an HTML page, not with an OpenAI-compatible API (HTTP {got.status})",
            "Check the address; a web page of another program may live on this port.",
        )
    return None


def describe_status(got: HttpResponse) -> str:
    return f"{got.url} answers HTTP {got.status}: {error_message(got.body)}"


def describe_mismatch(got: HttpResponse, what: str) -> str:
    return f"{got.url} answers with something that is not {what}"


def explain_secret_model(base: str) -> Advice:
    """Of a server whose model has a known secret in its name."""
    return (
        f"{base}: the id of its model has the API key in it, which may not be recorded",
        "Give the model another name in the server's settings, or change the key.",
    )


def error_message(body: bytes) -> str:
    """What an API says of an error, without what looks like a secret."""
    try:
        error = decode_json(body)["error"]
        return masked(str(error["message"] if isinstance(error, dict) else error)[:_SEARCHED_CHARS])[:300]
    except (ValueError, KeyError, TypeError, RecursionError):
        return masked(body.decode(errors="replace")[:_SEARCHED_CHARS])[:200].strip() or "no text"


def _explain_denied_access(got: HttpResponse, base: str, key: SentKey) -> Advice:
    if key.sent:
        which = f"the key in {key.name}" if key.name else "the API key"
        return (
            f"the server rejected {which} ({base} answers HTTP {got.status})",
            f"Export the right key as {key.name}." if key.name else "Export the right key.",
        )
    return (
        f"{base} wants an API key (HTTP {got.status})",
        f"Name the environment variable that holds it {key.given}, and export it.",
    )
