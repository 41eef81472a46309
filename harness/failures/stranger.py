"""An answer that no OpenAI-compatible API gives to who asks rightly: the same words before a load and at its start."""

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urljoin

import msgspec

from harness.failures.redact import hidden

CHECK_ADDRESS = "Check that the address is that of an OpenAI-compatible server."
_REDIRECTS = (301, 302, 303, 307, 308)


class Got(NamedTuple):
    """What came, as any client may have it."""

    url: str
    status: int
    headers: Mapping[str, str]  # found by names in lower case
    body: bytes


class Key(NamedTuple):
    """What was sent of an API key."""

    sent: bool
    name: str | None = None  # of the environment variable that holds it
    given: str = "as 'api_key_env' in the scenario"  # how a person names that variable


Words = tuple[str, str]  # what is wrong, and what to do next


def stranger(got: Got, base: str, key: Key) -> Words | None:
    """Of a server that does not let us in, or is another one than was meant; None: it is neither."""
    if got.status in (401, 403):
        return _no_entry(got, base, key)
    if got.status in _REDIRECTS and "location" in got.headers:
        target = urljoin(got.url, got.headers["location"])
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


def status_in_words(got: Got) -> str:
    return f"{got.url} answers HTTP {got.status}: {message(got.body)}"


def unlike(got: Got, what: str) -> str:
    return f"{got.url} answers with something that is not {what}"


def message(body: bytes) -> str:
    """What an API says of an error, without what looks like a secret."""
    try:
        error = msgspec.json.decode(body)["error"]
        return hidden(str(error["message"] if isinstance(error, dict) else error))[:300]
    except (msgspec.DecodeError, KeyError, TypeError):
        return hidden(body.decode(errors="replace"))[:200].strip() or "no text"


def _no_entry(got: Got, base: str, key: Key) -> Words:
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
