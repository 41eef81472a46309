"""HTTP probes of a server: what it serves, whether its model answers, its tokenizer; and free ports."""

import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
import requests
from msgspec import Struct

from harness.engines import engines, listed_names
from harness.errors import HarnessError, ServerError, did_you_mean
from harness.failures import unexpected_response
from harness.failures.unexpected_response import CHECK_ADDRESS, HttpResponse, decode_json
from harness.redact import masked
from harness.rundir.manifest import Phase, ServedBy
from harness.serve.containers import LogFile
from harness.trust import open_session

PROBE_TIMEOUT_S = 5.0
MAX_ANSWER_S = 300.0  # for a first answer, which may wait for a model that is being loaded
CONNECT_S = 2.0
MAX_RETRY_S = 10.0  # one broken answer is no reason to give up a server
RETRY_EVERY_S = 0.5
_MAX_VERSION = 200  # characters
_MAX_LINE = 65_536  # bytes

T = TypeVar("T")
Post = Callable[[str, dict[str, Any]], requests.Response]  # to an address, a body
BROKEN_CONNECTION = "the connection broke"
_DISTRUST = re.compile(r"certificate verify failed: ([^(]*)")


class TransientError(ServerError):
    """What may be over at the next request: a status of 5xx, half a body, a connection that broke."""


def probe_running_server(
    url: str, model: str | None, api_key: str | None = None, *, key_name: str | None = None
) -> ServedBy:
    """Look at a server that already runs: does its model answer?

    `model` None takes the only one that it serves; `key_name` is the environment variable that held the key. Raises
    ServerError with the problem.
    """
    base = parse_base_url(url)
    with open_session(api_key) as session:
        served, version = request_first_answer(base, model, session, partial(_post, session), key_name)
        version = get_version(base, session) or _get_engine_version(base, session) or version
    return ServedBy(url=base, version=version, model=served)


def request_first_answer(
    base: str,
    model: str | None,
    session: requests.Session,
    post: Post,
    key_name: str | None,
    until: float | None = None,
) -> tuple[str, str | None]:
    """The id under which the server has answered for `model`, and the version that a proxy tells with answers alone.

    Raises ServerError with the problem.
    """
    served = retry_transient(lambda: find_model(base, model, session, key_name), until)
    body = {"model": served, "messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 1, "stream": False}

    def answer() -> str | None:
        response = post(base + "/v1/chat/completions", body)
        _require_chat_completion(response, base, key_name)
        named = (engine.version_header for engine in engines() if engine.version_header is not None)
        return next((response.headers[name] for name in named if name in response.headers), None)

    return served, retry_transient(answer, until)


def retry_transient(attempt: Callable[[], T], until: float | None = None) -> T:
    """The result of `attempt`, which is repeated for a while, until `until` at most, when it raises `Passing`."""
    limit = time.monotonic() + MAX_RETRY_S if until is None else min(until, time.monotonic() + MAX_RETRY_S)
    while True:
        try:
            return attempt()
        except TransientError:
            if time.monotonic() + RETRY_EVERY_S > limit:
                raise
        time.sleep(RETRY_EVERY_S)


def parse_base_url(url: str) -> str:
    """A server's address without the API's path, however the user wrote it."""
    if "://" not in url:
        url = "http://" + url
    if not url.startswith(("http://", "https://")):
        raise HarnessError(f"'{url}' is not the address of a server", next_step="Write it like http://127.0.0.1:8000.")
    return url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1").rstrip("/")


def find_metrics_url(base: str, api_key: str | None = None) -> str | None:
    """Where a running server publishes its metrics; None when it does not."""
    with open_session(api_key) as session:
        text = fetch_text(session, base + "/metrics").lstrip()
    return base + "/metrics" if text and not text.startswith("<") else None


def find_model(base: str, model: str | None, session: requests.Session, key_name: str | None = None) -> str:
    """The id under which the server answers for `model`. Raises ServerError that names what it serves."""
    response = _get(session, base + "/v1/models")
    require_api(response, base, key_name)
    try:
        _decode_response(response)
        names = unexpected_response.parse_model_ids(response.content)
    except ValueError:
        raise _unexpected_form("a list of models", response) from None
    if model is None:
        if len(names) == 1:
            if masked(names[0], "sure") != names[0]:
                what, next_step = unexpected_response.explain_secret_model(base)
                raise ServerError(what, next_step=next_step)
            return names[0]
        raise ServerError(f"{base} serves {_quote_names(names)}; choose one", next_step="Give `--model NAME`.")
    if listed_names(model) & set(names):
        return model
    raise ServerError(
        f"{base} does not serve '{model}'; it serves {_quote_names(names)}",
        next_step="Set the scenario's 'model' to one of these, or give `--model NAME`"
        + (f" ({did_you_mean(model, names)})." if did_you_mean(model, names).startswith("did") else "."),
    )


def get_version(base: str, session: requests.Session, path: str = "/version") -> str | None:
    """What GET /version says; None for a server that has no such thing."""
    try:
        version = unexpected_response.decode_json(session.get(base + path, timeout=PROBE_TIMEOUT_S).content)["version"]
    except (requests.RequestException, ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, str) and len(version) <= _MAX_VERSION else None


def _get_engine_version(base: str, session: requests.Session) -> str | None:
    """The version of a server that has no /version, from where one of the known engines tells it."""
    try:
        greeting = session.get(base + "/", timeout=PROBE_TIMEOUT_S).content.decode(errors="replace").strip()
    except requests.RequestException:
        return None
    asked = (one for engine in engines() for one in engine.versions if one.only_if in (None, greeting))
    return next((found for one in asked if (found := get_version(base, session, one.path)) is not None), None)


def accepts_connections(host: str, port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError:
        return False
    return True


def _get(session: requests.Session, url: str) -> requests.Response:
    try:
        return session.get(url, timeout=2 * PROBE_TIMEOUT_S, allow_redirects=False)
    except requests.RequestException as error:
        raise connection_error_type(error)(
            f"no answer from {url}: {explain_connection_error(error)}", next_step=_suggest_connection_fix(error)
        ) from None


def _post(session: requests.Session, url: str, body: dict[str, Any]) -> requests.Response:
    try:
        return session.post(url, json=body, timeout=MAX_ANSWER_S, allow_redirects=False)
    except requests.RequestException as error:
        step = "Look at the server's log."
        raise connection_error_type(error)(
            f"no answer from {url}: {explain_connection_error(error)}", next_step=step
        ) from None


def connection_error_type(error: requests.RequestException) -> type[ServerError]:
    """The kind of error for a request without an answer: a connection that was open and broke may hold next time."""
    return TransientError if explain_connection_error(error) == BROKEN_CONNECTION else ServerError


def require_api(response: requests.Response, base: str, key_name: str | None) -> None:
    """Raise ServerError, in words, for an answer that is not from an OpenAI-compatible API."""
    _require_expected_server(response, base, key_name)
    if response.status_code != 200:
        raise _error_type(response)(
            unexpected_response.describe_status(_to_http_response(response)), next_step=CHECK_ADDRESS
        )


def _to_http_response(response: requests.Response) -> HttpResponse:
    return HttpResponse.of(response.url, response.status_code, response.headers, response.content)


def _error_type(response: requests.Response) -> type[ServerError]:
    return TransientError if response.status_code == 429 or response.status_code >= 500 else ServerError


def _require_expected_server(response: requests.Response, base: str, key_name: str | None) -> None:
    """Unexpected responses: the server refuses access, or is not the intended one."""
    words = unexpected_response.explain_response(
        _to_http_response(response),
        base,
        unexpected_response.SentKey("Authorization" in response.request.headers, key_name),
    )
    if words is not None:
        raise ServerError(words[0], next_step=words[1])


def _require_chat_completion(response: requests.Response, base: str, key_name: str | None) -> None:
    """The first real answer must be a chat completion."""
    _require_expected_server(response, base, key_name)
    if response.status_code != 200:
        raise _error_type(response)(
            f"the model does not answer: {response.url} says HTTP {response.status_code}: {error_message(response)}",
            next_step="Look at the server's log.",
        )
    try:
        good = isinstance(_decode_response(response)["choices"][0]["message"], dict)
    except (ValueError, KeyError, TypeError, IndexError):
        good = False
    if not good:
        raise _unexpected_form("a chat completion", response)


def _decode_response(response: requests.Response) -> Any:
    try:
        return unexpected_response.decode_json(response.content)
    except ValueError:
        raise _unexpected_form("JSON", response, TransientError) from None


def _unexpected_form(what: str, response: requests.Response, kind: type[ServerError] = ServerError) -> ServerError:
    """The error for an answer that has the wrong form."""
    return kind(
        unexpected_response.describe_mismatch(_to_http_response(response), what),
        next_step=CHECK_ADDRESS,
        detail=_to_http_response(response).body.decode(errors="replace")[:500],
    )


def fetch_text(session: requests.Session, url: str, timeout_s: float = PROBE_TIMEOUT_S, body: str | None = None) -> str:
    """The text of a good answer to a GET, or to a POST of JSON, else nothing.

    It is taken for UTF-8, which JSON and metrics are: to guess the encoding of a long one takes minutes.
    """
    method, headers = "GET" if body is None else "POST", {"Content-Type": "application/json"} if body else {}
    try:
        response = session.request(method, url, data=body, headers=headers, timeout=timeout_s, allow_redirects=False)
    except requests.RequestException:
        return ""
    return response.content.decode("utf-8", "replace") if response.status_code == 200 else ""


def iterate_lines(response: requests.Response) -> Iterator[bytes]:
    """The lines of a stream as they come, without their ends. Raises requests.RequestException, also for a long one."""
    rest = b""
    for piece in response.iter_content(512):
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in lines)
        if len(rest) > _MAX_LINE:
            raise requests.RequestException(f"a line of more than {_MAX_LINE} bytes")
    if rest:
        yield rest


def error_message(response: requests.Response) -> str:
    return unexpected_response.error_message(_to_http_response(response).body)


def explain_connection_error(error: Exception) -> str:
    text = str(error)
    if "NameResolutionError" in text or "Name or service not known" in text or "getaddrinfo" in text:
        return "the host's name is not known"
    if "refused" in text:
        return "connection refused, nothing listens there"
    if "timed out" in text or isinstance(error, requests.Timeout):
        return "it did not answer in time"
    if (distrust := _DISTRUST.search(text)) is not None:
        return f"its certificate is not trusted ({distrust[1].strip()})"
    if "SSL" in text:
        return "the TLS handshake failed; is it http:// and not https://?"
    return BROKEN_CONNECTION


def _suggest_connection_fix(error: Exception) -> str:
    """What to do about a connection that failed."""
    distrust = _DISTRUST.search(str(error))
    if distrust is None:
        return "Check the address and that the server runs."
    if "ertificate has expired" in distrust[1]:
        return "Renew the server's certificate."
    if "ismatch" in distrust[1]:
        return "Give the address by the name that the certificate is for."
    return "Give the certificate of the authority that signed it with --ca FILE; unverified certificates are rejected."


def _quote_names(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:8])
    return (shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")) or "no model at all"


TOKENIZE_PATH = "/tokenize"
TOKENIZE_TIMEOUT_S = 30.0
_MAX_SPECIAL_TOKENS = 16  # tokens that a tokenizer may put around a text
_TOKENIZER_ADVICE = "Name a local tokenizer.json in prompts.tokenizer, or remove it: a word is then taken for a token."


def make_token_counter(
    url: str, model: str, api_key: str | None = None, ask_engine: Callable[[str, dict[str, Any]], str] | None = None
) -> Callable[[str], int]:
    """A function that has the server count the tokens of a text, without special ones.

    `ask_engine` posts to the engine behind the server, where the server itself does not count: Lemonade does not for
    vLLM. It raises ServerError in words where the server has no such thing.
    """
    address = parse_base_url(url) + TOKENIZE_PATH
    session = open_session(api_key)

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        if ask_engine is not None:
            text = ask_engine(TOKENIZE_PATH, body)
        else:
            text = fetch_text(session, address, TOKENIZE_TIMEOUT_S, msgspec.json.encode(body).decode())
        with suppress(ValueError):
            if isinstance(found := decode_json(text), dict):
                return found
        raise ServerError(
            f"{address}: tokens cannot be counted, the server does not do it", next_step=_TOKENIZER_ADVICE
        )

    of_llamacpp = False  # learned: a word list takes a thousand counts, each a process where a container is asked

    def count(text: str) -> int:
        nonlocal of_llamacpp
        # Each server looks at its own two keys; `model` is for those that serve several.
        number = None
        if not of_llamacpp:
            number = ask({"model": model, "prompt": text, "add_special_tokens": False}).get("count")
        if number is None:
            tokens = ask({"content": text, "add_special": False}).get("tokens")
            if not isinstance(tokens, list):
                raise ServerError(f"{address}: the answer has neither a count nor tokens", next_step=_TOKENIZER_ADVICE)
            number, of_llamacpp = len(tokens), True
        max_tokens = len(text.encode()) + _MAX_SPECIAL_TOKENS  # a token of a text has at least one byte
        if type(number) is not int or not bool(text) <= number <= max_tokens:
            what = number if type(number) is int and number.bit_length() <= 64 else "no count of tokens"
            problem = f"{address}: {what} for a text that has 1 to {max_tokens} tokens"
            raise ServerError(problem, next_step=_TOKENIZER_ADVICE)
        return number

    return count


POLL_S = 0.2
REPORT_EVERY_S = 1.0
MAX_DEATH_DELAY_S = 1.0  # the connections of a process that dies break before its supervisor notices


class StartupWatch(Struct, frozen=True):
    """How a server is watched while it becomes ready."""

    dead: Callable[[], ServerError | None]  # cheap: is called at every look
    log: LogFile
    timeout_s: float
    on_progress: Callable[[str], None]
    orphans: Callable[[], list[str]] = list  # engine processes that lost their server, in words


def wait_for_death(waiting: StartupWatch) -> ServerError | None:
    """Why the server died, asked after it broke a request; None where it lives on."""
    until = time.monotonic() + MAX_DEATH_DELAY_S
    while (dead := waiting.dead()) is None and time.monotonic() < until:
        time.sleep(POLL_S / 4)
    return dead


class PhaseTimer:
    """The steps of a start, each timed as it is done: they follow each other without a gap."""

    def __init__(self, on_progress: Callable[[str], None] | None = None) -> None:
        self.all: list[Phase] = []
        self._on_progress = on_progress
        self._began = self._mark = time.monotonic()

    def done(self, name: str) -> None:
        now = time.monotonic()
        self.all.append(Phase(name=name, seconds=now - self._mark))
        self._mark = now
        if self._on_progress is not None:
            self._on_progress(f"{name} after {now - self._began:.1f} s")


def run_watched(call: Callable[[], T], waiting: StartupWatch, until: float, doing: list[str]) -> T:
    """The result of `call`, which may take minutes, while the server lives. Raises what it raises.

    Raises ServerError when the server dies or `until` passes. Shown is the last of `doing`, which may grow. The call
    runs in a daemon thread, so Ctrl-C ends the wait at once.
    """
    results: queue.SimpleQueue[tuple[T] | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((call(),))
        except Exception as error:
            results.put(error)

    threading.Thread(target=work, name="waiting for the server", daemon=True).start()
    begin = reported_s = time.monotonic()
    while True:
        try:
            result = results.get(timeout=POLL_S)
            break
        except queue.Empty:
            dead, now = waiting.dead(), time.monotonic()
        if dead is not None:
            raise dead
        if now - reported_s >= REPORT_EVERY_S:
            reported_s = now
            waiting.on_progress(f"{doing[-1]}, {now - begin:.0f} s: {waiting.log.last_line()}")
        if now > until:
            raise ServerError(
                f"the server did not become ready within {waiting.timeout_s:g} s; last: {doing[-1]}",
                next_step="If it only needs longer, raise startup_timeout_s in the scenario.",
                detail=waiting.log.tail(),
            )
    if isinstance(result, Exception):
        raise result
    return result[0]
