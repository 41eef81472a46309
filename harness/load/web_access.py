"""Decide which requests may reach the web UI: checks of Host, Origin and token, on every route of Locust's and ours.

The server's API key is in this process, so a web page that is open in the same browser must neither steer the UI nor
read from it (forged requests, DNS rebinding, framing).
"""

import hmac
import ipaddress
import logging
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlencode

from flask import Request, Response
from locust.web import WebUI

from harness.errors import HarnessError
from harness.load.client import is_address

ADDRESS_ENV = "AMD_LLM_LOAD_UI_ADDRESS"  # HOST:PORT that browsers use, where it is not the one that Locust opens
TOKEN_ENV = "AMD_LLM_LOAD_UI_TOKEN"  # instead of a random one
MAX_BODY_BYTES = 1_000_000
_MIN_TOKEN = 16
_HOST = re.compile(r"(\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(:[0-9]+)?")
_SAFE = ("GET", "HEAD")
_HEADERS = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # without any, browsers call the origin of a form null
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_POLICY = "frame-ancestors 'none'; object-src 'none'; base-uri 'none'; form-action 'self'"

logger = logging.getLogger(__name__)


def add_to(web_ui: WebUI) -> None:
    """Put the checks in front of all routes, before the server takes its first request. Raises HarnessError.

    Beyond loopback a token is required, which the log has, unless Locust's own login is used. A token that the user
    has chosen is required on loopback too.
    """
    app = web_ui.app
    assert app is not None
    given = os.environ.get(ADDRESS_ENV, "")
    published = _name(given.lower())
    if given and published is None:
        raise HarnessError(f"{ADDRESS_ENV}: must be HOST:PORT (got {given!r})", next_step="Such as 127.0.0.1:8089.")
    reached_at = published or web_ui.host
    local = _is_loopback(reached_at)
    token = None if web_ui.web_login or (local and TOKEN_ENV not in os.environ) else _token()
    names = {reached_at.lower()} if local else {reached_at.lower(), socket.gethostname().lower()}
    cookie = f"llm-load-{web_ui.port}"  # a browser does not tell ports of one host apart
    base = (getattr(web_ui.environment.parsed_options, "web_base_path", None) or "").rstrip("/")
    if token is not None and TOKEN_ENV not in os.environ:  # a secret of the environment reaches no log
        scheme, own = "https" if web_ui.tls_cert else "http", f"[{web_ui.host}]" if ":" in web_ui.host else web_ui.host
        address = f"{scheme}://{given or f'{own or socket.gethostname()}:{web_ui.port}'}{base}/"
        logger.warning("web UI with its token: %s?%s", address, urlencode({"token": token}))
    app.config.update(
        MAX_CONTENT_LENGTH=MAX_BODY_BYTES,
        PROPAGATE_EXCEPTIONS=False,  # an answer to an error of ours has our headers too
        SESSION_COOKIE_SAMESITE="Lax",
    )
    routes: Any = app.wsgi_app

    def checked(environ: dict[str, Any], begin: Callable[..., Any]) -> Iterable[bytes]:
        def begin_with_headers(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
            return begin(status, _headers(status, headers), exc_info)

        request = Request(environ)
        answer = _refusal(request, names, any_address=not local)
        if answer is None and token is not None:
            answer = _login(request, token, cookie, f"{base}/", secure=bool(web_ui.tls_cert))
        found: Iterable[bytes] = (answer or routes)(environ, begin_with_headers)
        return found

    app.wsgi_app = checked  # type: ignore[assignment, method-assign]


def _refusal(request: Request, names: set[str], *, any_address: bool) -> Response | None:
    """Why a request is not for this UI, or is from a page of another site; None: it is in order.

    `any_address`: a Host that is an IP address is taken, because no DNS server can give it away.
    """
    host = request.headers.get("Host", "").lower()
    name = _name(host)
    if name is None or not (_is_loopback(name) or name in names or (any_address and is_address(name))):
        return _text(403, f"Not an address of this web UI. Use the one in Locust's log, or set {ADDRESS_ENV}.")
    origin = request.headers.get("Origin")
    if origin is not None:
        foreign = origin.lower() not in (f"http://{host}", f"https://{host}")
    else:  # neither header: not a browser, or plain HTTP beyond loopback, where SameSite keeps the cookie back
        foreign = request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none")
        # A link on another page may open the UI: that page sees nothing of it.
        to, mode = request.headers.get("Sec-Fetch-Dest"), request.headers.get("Sec-Fetch-Mode")
        foreign = foreign and (request.method, mode, to) != ("GET", "navigate", "document")
    return _text(403, "Refused: the request comes from a page of another site.") if foreign else None


def _login(request: Request, token: str, cookie: str, home: str, *, secure: bool) -> Response | None:
    """Ask for the token; None: the request has it. An address with the token in it is exchanged for a cookie."""
    given = request.args.get("token", "")
    if request.method in _SAFE and hmac.compare_digest(given.encode(), token.encode()):
        answer = Response(status=303, headers={"Location": home})
        answer.set_cookie(cookie, token, httponly=True, samesite="Lax", secure=secure)
        return answer
    sent = [request.cookies.get(cookie, ""), request.headers.get("Authorization", "").removeprefix("Bearer ")]
    if any(hmac.compare_digest(one.encode(), token.encode()) for one in sent):
        return None
    answer = _text(401, "The web UI needs its token: open the address in Locust's log, or send Authorization: Bearer.")
    answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


def _headers(status: str, headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of any answer: no framing, and nothing of Locust's CORS, which lets every page read."""
    kept = [
        (name, value)
        for name, value in headers
        if not name.lower().startswith("access-control-") and name not in _HEADERS
    ]
    if not any(name == "Content-Security-Policy" for name, _ in kept):
        kept.append(("Content-Security-Policy", _POLICY))
    if status >= "4":  # Locust's own quote the error, as HTML
        plain = "text/plain; charset=utf-8"
        kept = [(n, plain if n == "Content-Type" and v.startswith("text/html") else v) for n, v in kept]
    return [*kept, *_HEADERS.items()]


def _token() -> str:
    given = os.environ.get(TOKEN_ENV)
    if given is None:
        return secrets.token_urlsafe(24)
    if len(given) < _MIN_TOKEN or not given.isascii() or not given.isprintable() or set(given) & set(' ";,\\'):
        raise HarnessError(
            f"{TOKEN_ENV}: cannot be a token",  # without the value: it is a secret
            next_step=f"Use at least {_MIN_TOKEN} letters and digits, or unset it for a random token.",
        )
    return given


def _name(host: str) -> str | None:
    """The host name or address in a Host header; None for what no browser sends."""
    found = _HOST.fullmatch(host)
    return (found["v6"] or found["name"]) if found else None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    return is_address(host) and ipaddress.ip_address(host).is_loopback


def _text(status: int, words: str) -> Response:
    return Response(words, status=status, mimetype="text/plain")
