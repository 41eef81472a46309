"""Decide which requests may reach the web UI: check Host, Origin and token on all routes, also on Locust's own.

This process has the server's API key, so a web page that is open in the same browser must neither control the UI nor
read from it (forged requests, DNS rebinding, framing).
"""

import hmac
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

from harness.base.errors import HarnessError
from harness.base.process import is_loopback
from harness.load.client import is_address

ADDRESS_ENV = "AMD_LLM_LOAD_UI_ADDRESS"  # HOST:PORT that browsers use, if it is not the one that Locust opens
TOKEN_ENV = "AMD_LLM_LOAD_UI_TOKEN"  # instead of a random token
MAX_BODY_BYTES = 1_000_000
_MIN_TOKEN = 16  # characters
_HOST = re.compile(r"(\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(:[0-9]+)?")
_HEADERS = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # without a policy, browsers send "null" as the origin of a form
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_POLICY = "frame-ancestors 'none'; object-src 'none'; base-uri 'none'; form-action 'self'"

logger = logging.getLogger(__name__)


def base_path(web_ui: WebUI) -> str:
    """Return Locust's --web-base-path, without a slash at the end."""
    return (getattr(web_ui.environment.parsed_options, "web_base_path", None) or "").rstrip("/")


def add_checks(web_ui: WebUI) -> None:
    """Put the checks in front of all routes, before the server gets its first request. Raises HarnessError.

    Beyond loopback a token is required, which is in the log, unless Locust's own login is used. A token that the user
    has chosen is required on loopback too.
    """
    app = web_ui.app
    assert app is not None
    address = os.environ.get(ADDRESS_ENV, "")
    published = _host_name(address.lower())
    if address and published is None:
        raise HarnessError(f"{ADDRESS_ENV}: must be HOST:PORT (got {address!r})", next_step="Such as 127.0.0.1:8089.")
    host = published or web_ui.host
    is_local = is_loopback(host)
    token = None if web_ui.web_login or (is_local and TOKEN_ENV not in os.environ) else _choose_token()
    names = {host.lower()} if is_local else {host.lower(), socket.gethostname().lower()}
    cookie = f"llm-load-{web_ui.port}"  # cookies of a host are shared by all its ports
    home = f"{base_path(web_ui)}/"
    if token is not None and TOKEN_ENV not in os.environ:  # a secret of the environment reaches no log
        own_host = f"[{web_ui.host}]" if ":" in web_ui.host else web_ui.host or socket.gethostname()
        origin = f"{'https' if web_ui.tls_cert else 'http'}://{address or f'{own_host}:{web_ui.port}'}"
        logger.warning("web UI with its token: %s%s?%s", origin, home, urlencode({"token": token}))
    app.config.update(
        MAX_CONTENT_LENGTH=MAX_BODY_BYTES,
        PROPAGATE_EXCEPTIONS=False,  # so that responses to internal errors have our headers too
        SESSION_COOKIE_SAMESITE="Lax",
    )
    routes: Any = app.wsgi_app

    def check_and_route(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        def start_with_headers(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
            return start_response(status, _secure_headers(status, headers), exc_info)

        request = Request(environ)
        rejection = _reject_foreign(request, names, any_address=not is_local)
        if rejection is None and token is not None:
            rejection = _ask_for_token(request, token, cookie, home, secure=bool(web_ui.tls_cert))
        body: Iterable[bytes] = (rejection or routes)(environ, start_with_headers)
        return body

    app.wsgi_app = check_and_route  # type: ignore[method-assign]


def _reject_foreign(request: Request, names: set[str], *, any_address: bool) -> Response | None:
    """Return a response to a request for another host, or from a page of another site; None for other requests.

    `any_address`: accept any IP address as Host, because DNS rebinding needs a name.
    """
    host = request.headers.get("Host", "").lower()
    name = _host_name(host)
    if name is None or not (is_loopback(name) or name in names or (any_address and is_address(name))):
        return _text_response(403, f"Not an address of this web UI. Use the one in Locust's log, or set {ADDRESS_ENV}.")
    origin = request.headers.get("Origin")
    if origin is not None:
        is_foreign = origin.lower() not in (f"http://{host}", f"https://{host}")
    else:  # without both headers: no browser, or plain HTTP beyond loopback, where SameSite withholds the cookie
        is_foreign = request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none")
        # A link on another page may open the UI: that page sees nothing of it.
        destination, mode = request.headers.get("Sec-Fetch-Dest"), request.headers.get("Sec-Fetch-Mode")
        is_foreign = is_foreign and (request.method, mode, destination) != ("GET", "navigate", "document")
    return _text_response(403, "Refused: the request comes from a page of another site.") if is_foreign else None


def _ask_for_token(request: Request, token: str, cookie: str, home: str, *, secure: bool) -> Response | None:
    """Return a response that asks for the token; None if the request has it.

    An address with the token gets a cookie and is redirected to the address without it.
    """

    def is_token(text: str) -> bool:
        return hmac.compare_digest(text.encode(), token.encode())

    if request.method in ("GET", "HEAD") and is_token(request.args.get("token", "")):
        response = Response(status=303, headers={"Location": home})
        response.set_cookie(cookie, token, httponly=True, samesite="Lax", secure=secure)
        return response
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if is_token(request.cookies.get(cookie, "")) or is_token(bearer):
        return None
    text = "The web UI needs its token: open the address in Locust's log, or send Authorization: Bearer."
    response = _text_response(401, text)
    response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _secure_headers(status: str, headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the headers without Locust's CORS, which lets every page read, and with ours, which forbid framing."""
    headers = [(n, v) for n, v in headers if not n.lower().startswith("access-control-") and n not in _HEADERS]
    if not any(name == "Content-Security-Policy" for name, _ in headers):
        headers.append(("Content-Security-Policy", _POLICY))
    if status >= "4":  # Locust's error pages quote the error as HTML
        plain = "text/plain; charset=utf-8"
        headers = [(n, plain if n == "Content-Type" and v.startswith("text/html") else v) for n, v in headers]
    return [*headers, *_HEADERS.items()]


def _choose_token() -> str:
    given = os.environ.get(TOKEN_ENV)
    if given is None:
        return secrets.token_urlsafe(24)
    if len(given) < _MIN_TOKEN or not given.isascii() or not given.isprintable() or set(given) & set(' ";,\\'):
        raise HarnessError(
            f"{TOKEN_ENV}: cannot be a token",  # without the value: it is a secret
            next_step=f"Use at least {_MIN_TOKEN} letters and digits, or unset it for a random token.",
        )
    return given


def _host_name(host: str) -> str | None:
    """Return the name or address in a Host header; None for an invalid header."""
    match = _HOST.fullmatch(host)
    return (match["v6"] or match["name"]) if match else None


def _text_response(status: int, text: str) -> Response:
    return Response(text, status=status, mimetype="text/plain")
