"""HTTP probes of a server: which models it serves, whether its model answers, its version, its tokenizer."""

import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import requests
from msgspec import Struct

from harness.base import https
from harness.base.command_line import command_line
from harness.base.errors import HarnessError, ServerError, closest_name
from harness.base.https import MAX_ANSWER_S, open_session
from harness.base.redact import masked
from harness.engines import engines, listed_names
from harness.engines.loaded import chat_models, loaded_models
from harness.failures import unexpected_response
from harness.failures.unexpected_response import CHECK_ADDRESS, HttpResponse, decode_json, shown_names
from harness.load.anthropic_api import as_chat_event, started_message
from harness.load.openai_api import Answer, note_event
from harness.load.sse import MAX_EVENT_BYTES, Event, EventTooLong, Parser
from harness.records.manifest import Phase, ServedBy
from harness.records.records import Request
from harness.serve.containers import LogFile

PROBE_TIMEOUT_S = 5.0
CONNECT_S = 2.0
MAX_RETRY_S, RETRY_EVERY_S = 2.0, 0.5  # one broken answer does not mean that the server failed
POLL_S = 0.2
REPORT_EVERY_S = 1.0
MAX_DEATH_DELAY_S = 1.0  # the connections of a process that dies break before its supervisor notices
TOKENIZE_PATH, TOKENIZE_TIMEOUT_S = "/tokenize", 30.0
MAX_TOKENIZE_S = 900.0  # of all counts; behind Lemonade each of a thousand starts a process
_MAX_SPECIAL_TOKENS = 16  # that a tokenizer may put around a text
_TOKENIZER_ADVICE = "Name a local tokenizer.json in prompts.tokenizer, or remove it: a word is then taken for a token."
_MAX_VERSION = 200  # characters

BUSY = (429, 503)  # of a server that loads its model, or has too much to do
_LOADING_ADVICE = "The server may still load its model: wait until it is ready, and run it again."

_COUNT_TRIES = 3

T = TypeVar("T")
Post = Callable[[str, dict[str, Any]], requests.Response]  # of an address and a body
_DISTRUST = re.compile(r"certificate verify failed: ([^(]*)")


class BusyError(ServerError):
    """The server answers that it is busy: it may still load its model."""


def probe_running_server(
    url: str, model: str | None, api_key: str | None = None, *, key_name: str | None = None
) -> ServedBy:
    """Return the facts of a server that already runs and whose model answers.

    Without `model`, the first one that it lists. `key_name`: the environment variable that has the API key.
    Raises ServerError.
    """
    base = parse_base_url(url)
    with open_session(api_key) as session:
        served, version = request_first_answer(base, model, session, partial(post, session), key_name)
        version = find_version(base, session) or version
    return ServedBy(url=base, version=version, model=served)


def request_first_answer(
    base: str,
    model: str | None,
    session: requests.Session,
    post: Post,
    key_name: str | None,
) -> tuple[str, str | None]:
    """Return the id under which `model` has answered, and the version that some proxies report in a header only.

    Raises ServerError.
    """
    served = retry(lambda: find_model(base, model, session, key_name))
    body = {"model": served, "messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 1, "stream": False}

    def request_answer() -> str | None:
        response = post(base + "/v1/chat/completions", body)
        require_chat_completion(response, base, key_name)
        headers = (engine.version_header for engine in engines() if engine.version_header is not None)
        return next((response.headers[name] for name in headers if name in response.headers), None)

    return served, retry(request_answer)


def retry(attempt: Callable[[], T]) -> T:
    """Return the result of `attempt`, which is made again after a ServerError: once, however long the first one took,
    then for MAX_RETRY_S.
    """
    last_try = time.monotonic() + MAX_RETRY_S
    attempts = 0
    while True:
        try:
            return attempt()
        except ServerError:
            attempts += 1
            if attempts > 1 and time.monotonic() + RETRY_EVERY_S > last_try:
                raise
        time.sleep(RETRY_EVERY_S)


def parse_base_url(url: str) -> str:
    """Return a server's address without the path of the API."""
    if "://" not in url:
        url = "http://" + url
    if not url.startswith(("http://", "https://")):
        raise HarnessError(f"'{url}' is not the address of a server", next_step="Write it like http://127.0.0.1:8000.")
    return url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1").rstrip("/")


def find_metrics_url(base: str, api_key: str | None = None, model: str | None = None) -> str | None:
    """Return the address of a running server's metrics; None if it has none.

    `model`: also those of one model, as llama.cpp's router has them. They end with the model's process.
    """
    urls = [base + "/metrics"]
    if model is not None:
        urls.append(f"{base}/metrics?model={quote(model, safe='')}&autoload=false")
    with open_session(api_key) as session:
        texts = ((url, fetch_text(session, url).lstrip()) for url in urls)
        return next((url for url, text in texts if text and not text.startswith("<")), None)


def list_models(base: str, session: requests.Session, key_name: str | None = None) -> list[str]:
    """Return the ids of a server's models. Raises ServerError."""
    url = base + "/v1/models"
    try:
        response = session.get(url, timeout=2 * PROBE_TIMEOUT_S, allow_redirects=False)
    except requests.RequestException as error:
        raise _make_connection_error(url, error) from None
    require_api(response, base, key_name)
    try:
        return unexpected_response.parse_model_ids(response.content)
    except ValueError:
        raise _unexpected_form("a list of models", response) from None


def find_loaded(base: str, session: requests.Session) -> list[str] | None:
    """Return the chat models that a server has loaded; None if it does not report which of its models are loaded."""
    loaded = loaded_models(lambda path: fetch_text(session, base + path))
    return None if loaded is None else chat_models(loaded)


def find_model(
    base: str,
    model: str | None,
    session: requests.Session,
    key_name: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> str:
    """Return the id to send for `model`; without `model`, that of the chat model that is loaded, else of the first one
    in the list, of which it says that it will be loaded.

    Raises ServerError that lists the ids, and HarnessError if several models are loaded.
    """
    ids = list_models(base, session, key_name)
    first, shown = next(iter(chat_models(ids)), None), shown_names(ids)
    if model is None:
        loaded = find_loaded(base, session)
        if loaded is not None and len(loaded) > 1:
            what, next_step = unexpected_response.explain_several_loaded(base, loaded)
            raise HarnessError(what, next_step=next_step)
        chosen = next(iter(loaded or []), first)
        if chosen is None:
            raise ServerError(f"{base} serves no chat model: {shown}", next_step="Load one, or give `--model NAME`.")
        if masked(chosen, "sure") != chosen:
            what, next_step = unexpected_response.explain_secret_model(base)
            raise ServerError(what, next_step=next_step)
        if not loaded and (text := _first_of(base, ids, chosen, is_known=loaded is not None)):
            say(text)
        return chosen
    if listed_names(model) & set(ids):
        return model
    plain = [name for name in ids if "\0" not in name]  # no argument of a command can have a NUL
    proposed = command_line("--model", closest_name(model, plain) or next(iter(chat_models(plain)), "NAME"))
    raise ServerError(
        f"{base} does not serve '{model}'; it serves {shown}",
        next_step=f"Give `{proposed}`, or set the scenario's 'model' to one of these."
        if plain or not ids
        else "Give its model a name without the character NUL in the server's settings.",
    )


def _first_of(base: str, ids: Sequence[str], chosen: str, *, is_known: bool) -> str:
    """Say why the first chat model of a server is taken; nothing where it is the only one and may be loaded."""
    more = len(chat_models(ids)) - 1
    other = f" (another of its {more + 1}: --model NAME)" if more else ""
    if is_known:
        return f"{base} has no model loaded: the first request loads '{chosen}'{other}."
    return (
        f"{base} does not report which model is loaded: its first one is measured, '{chosen}'{other}." if more else ""
    )


def require_models(base: str, models: Sequence[str], api_key: str | None, key_name: str | None) -> None:
    """Raise ServerError if the server does not list one of the models of a scenario."""
    with open_session(api_key) as session:
        for model in models:
            try:
                find_model(base, model, session, key_name)
            except ServerError as error:
                if isinstance(error, BusyError) or len(models) == 1:
                    raise
                next_step = "Load it, or give one model of the server for each of the loads: `--model A,B`."
                raise ServerError(error.what, next_step=next_step) from None


def has_models(response: requests.Response) -> bool:
    """Return whether an answer is a list of models."""
    try:
        return response.status_code == 200 and bool(unexpected_response.parse_model_ids(response.content))
    except ValueError:
        return False


def get_version(base: str, session: requests.Session, path: str = "/version") -> str | None:
    """Return the version that GET /version reports; None without one."""
    try:
        version = decode_json(session.get(base + path, timeout=PROBE_TIMEOUT_S).content)["version"]
    except (requests.RequestException, ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, str) and len(version) <= _MAX_VERSION else None


def find_version(base: str, session: requests.Session) -> str | None:
    """Return the version that a server reports, on whichever path; None without one."""
    return get_version(base, session) or _get_engine_version(base, session)


def _get_engine_version(base: str, session: requests.Session) -> str | None:
    """Return the version of a server without /version, from the path that its engine uses."""
    try:
        greeting = session.get(base + "/", timeout=PROBE_TIMEOUT_S).content.decode(errors="replace").strip()
    except requests.RequestException:
        return None
    sources = (source for engine in engines() for source in engine.versions if source.only_if in (None, greeting))
    versions = (get_version(base, session, source.path) for source in sources)
    return next((version for version in versions if version is not None), None)


def accepts_connections(host: str, port: int) -> bool:
    """Check that a connection to the port can be opened."""
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError:
        return False
    return True


def post(session: requests.Session, url: str, body: dict[str, Any], *, stream: bool = False) -> requests.Response:
    """POST a body as JSON. Raises ServerError without an answer."""
    try:
        return session.post(url, json=body, timeout=MAX_ANSWER_S, allow_redirects=False, stream=stream)
    except requests.RequestException as error:
        raise _make_connection_error(url, error) from None


def _make_connection_error(url: str, error: requests.RequestException) -> ServerError:
    next_step = "Check the address and that the server runs."
    if _DISTRUST.search(str(error)) is not None:
        next_step = "Give the certificate of an authority of your own with --ca FILE; unverified ones are rejected."
    return ServerError(f"no answer from {url}: {explain_connection_error(error)}", next_step=next_step)


def require_api(response: requests.Response, base: str, key_name: str | None) -> None:
    """Raise ServerError for an answer that does not come from an OpenAI-compatible API."""
    _require_expected_server(response, base, key_name)
    if response.status_code != 200:
        what = unexpected_response.describe_status(_to_http_response(response))
        if response.status_code in BUSY:
            raise BusyError(what, next_step=_LOADING_ADVICE)
        raise ServerError(what, next_step=CHECK_ADDRESS)


def _to_http_response(response: requests.Response) -> HttpResponse:
    return HttpResponse.of(response.url, response.status_code, response.headers, response.content)


class KeyMissingError(ServerError):
    """The server wants an API key, and the request had none."""


def _require_expected_server(response: requests.Response, base: str, key_name: str | None) -> None:
    """Raise ServerError if the server refuses access, or is not the intended one."""
    key = unexpected_response.SentKey("Authorization" in response.request.headers, key_name)
    problem = unexpected_response.explain_response(_to_http_response(response), base, key)
    if problem is not None:
        is_missing = response.status_code in (401, 403) and not key.sent
        raise (KeyMissingError if is_missing else ServerError)(problem[0], next_step=problem[1])


def require_chat_completion(response: requests.Response, base: str, key_name: str | None) -> None:
    """Raise ServerError for an answer that is not a chat completion."""
    _require_expected_server(response, base, key_name)
    if response.status_code != 200:
        what = f"the model does not answer: {unexpected_response.describe_status(_to_http_response(response))}"
        if response.status_code in BUSY:
            raise BusyError(what, next_step=_LOADING_ADVICE)
        raise ServerError(what, next_step="Look at the server's log, or give another of its models: --model NAME.")
    try:
        is_completion = isinstance(decode_json(response.content)["choices"][0]["message"], dict)
    except (ValueError, KeyError, TypeError, IndexError):
        is_completion = False
    if not is_completion:
        raise _unexpected_form("a chat completion", response)


def _unexpected_form(form: str, response: requests.Response) -> ServerError:
    answer = _to_http_response(response)
    detail = answer.body.decode(errors="replace")[:500]
    return ServerError(unexpected_response.describe_mismatch(answer, form), next_step=CHECK_ADDRESS, detail=detail)


def fetch_text(session: requests.Session, url: str, timeout_s: float = PROBE_TIMEOUT_S, body: str | None = None) -> str:
    """Return the text of a good answer to a GET, or to a POST of JSON; empty without one.

    The text is decoded as UTF-8, as JSON and metrics are: guessing the encoding of a long text takes minutes.
    """
    method, headers = "GET" if body is None else "POST", {"Content-Type": "application/json"} if body else {}
    try:
        response = session.request(method, url, data=body, headers=headers, timeout=timeout_s, allow_redirects=False)
    except requests.RequestException:
        return ""
    return response.content.decode("utf-8", "replace") if response.status_code == 200 else ""


def streams_prompt_counts(base: str, model: str, api_key: str | None) -> bool | None:
    """Return whether a stream of Anthropic's API has the tokens of its prompt; None without such a stream.

    It generates one token, and up to twice again where nothing was counted: a model may end its answer at once.
    """
    message = {"role": "user", "content": "Say yes."}
    body = {"model": model, "max_tokens": 1, "stream": True, "messages": [message]}
    started, answer = False, Answer()
    with open_session(api_key) as session, suppress(ServerError, requests.RequestException):
        session.headers["anthropic-version"] = "2023-06-01"
        for _ in range(_COUNT_TRIES):
            with post(session, f"{base}/v1/messages", body, stream=True) as response:
                if response.status_code != 200:
                    break
                for event in read_events(response):
                    started = started or started_message(event) != {}
                    note_event(as_chat_event(event), 1, answer)
                    if started and answer.prompt_tokens:
                        return True
    return False if started else None


def time_request(base: str, body: dict[str, Any], api_key: str | None, key_name: str | None, max_s: float) -> Request:
    """Send a streamed chat request, and return what the load client would record of it. Raises ServerError.

    Its times are those of this thread's reads. It reads at most `max_s` after the first text.
    """
    answer, url = Answer(None, None), f"{base}/v1/chat/completions"
    with open_session(api_key) as session:
        sent_s = time.monotonic()
        with post(session, url, body, stream=True) as response:
            if response.status_code != 200:
                require_chat_completion(response, base, key_name)
            try:
                for number, event in enumerate(read_events(response), start=1):
                    answer.ended_s = time.monotonic() - sent_s
                    if event.data.strip() != b"[DONE]" and note_event(event, number, answer) in ("text", "blank"):
                        answer.chunks_s.append(answer.ended_s)
                    if answer.chunks_s and answer.ended_s - answer.chunks_s[0] > max_s:
                        break
            except requests.RequestException as error:
                what = f"{url}: the answer broke off ({explain_connection_error(error)})"
                raise ServerError(what, next_step="Look at the server's log.") from None
    answer.ended_s = time.monotonic() - sent_s
    answer.note_first_arrival(answer.chunk_chars)
    answer.drop_impossible_counts(body["max_tokens"], len(msgspec.json.encode(body)))
    no_cell: dict[str, Any] = {"cell": "", "load": "", "user_class": "", "index": 0, "user": 0, "process": 0}
    fields = answer.recorded() | {"id": "probe", "phase": "measured", "asked_tokens": body["max_tokens"]}
    return Request(sent_s=sent_s, **fields, **no_cell)


def read_events(response: requests.Response) -> Iterator[Event]:
    """Yield the events of a stream as they arrive.

    Raises requests.RequestException, also for an event that is too long, or takes more than MAX_REST_S from its start.
    """
    parser, begun_s = Parser(), None
    try:
        for piece in response.iter_content(512):
            events = parser.feed(piece)
            yield from events
            begun_s = None if events or parser.idle else begun_s or time.monotonic()
            if begun_s is not None and time.monotonic() - begun_s > https.MAX_REST_S:
                raise requests.ReadTimeout(f"no complete event within {https.MAX_REST_S:g} s")
        yield from parser.finish()
    except EventTooLong:
        raise requests.RequestException(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB") from None


def explain_connection_error(error: Exception) -> str:
    """Return the reason for a failed request in a few words."""
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
    return "the connection broke"


def make_token_counter(
    url: str, model: str, api_key: str | None = None, ask_engine: Callable[[str, dict[str, Any]], str] | None = None
) -> Callable[[str], int]:
    """Return a function that lets the server count the tokens of a text, without special tokens.

    `ask_engine` posts to the engine behind Lemonade, which does not count tokens for vLLM itself. The function raises
    ServerError if the server cannot count.
    """
    address = parse_base_url(url) + TOKENIZE_PATH
    session = open_session(api_key)

    def request(body: dict[str, Any]) -> dict[str, Any]:
        if ask_engine is not None:
            text = ask_engine(TOKENIZE_PATH, body)
        else:
            text = fetch_text(session, address, TOKENIZE_TIMEOUT_S, msgspec.json.encode(body).decode())
        with suppress(ValueError):
            if isinstance(answer := decode_json(text), dict):
                return answer
        return {}

    deadline_s = time.monotonic() + MAX_TOKENIZE_S
    is_llamacpp = False  # remembered: a word list takes a thousand counts, and behind Lemonade each starts a process

    def count_tokens(text: str) -> int:
        nonlocal is_llamacpp
        if time.monotonic() > deadline_s:
            raise ServerError(
                f"{address}: counting tokens takes more than {MAX_TOKENIZE_S:g} s", next_step=_TOKENIZER_ADVICE
            )
        # vLLM reads `prompt`, llama.cpp `content`; a server of several models reads `model`.
        count = None
        if not is_llamacpp:
            count = request({"model": model, "prompt": text, "add_special_tokens": False}).get("count")
        if count is None:
            tokens = request({"model": model, "content": text, "add_special": False}).get("tokens")
            is_llamacpp = isinstance(tokens, list)
            count = len(tokens) if isinstance(tokens, list) else None
        max_tokens = len(text.encode()) + _MAX_SPECIAL_TOKENS  # a token of a text has at least one byte
        if type(count) is not int or not bool(text) <= count <= max_tokens:
            raise ServerError(
                f"{address}: tokens cannot be counted, the server does not do it", next_step=_TOKENIZER_ADVICE
            )
        return count

    return count_tokens


class StartupWatch(Struct, frozen=True):
    """How a server is watched until it is ready."""

    find_death: Callable[[], ServerError | None]  # cheap: is called at every check
    log: LogFile
    timeout_s: float
    on_progress: Callable[[str], None]


def wait_for_death(watch: StartupWatch) -> ServerError | None:
    """Return why the server died, after it broke a request; None if it is still alive after MAX_DEATH_DELAY_S."""
    deadline = time.monotonic() + MAX_DEATH_DELAY_S
    while (death := watch.find_death()) is None and time.monotonic() < deadline:
        time.sleep(POLL_S / 4)
    return death


class PhaseTimer:
    """Times the phases of a start, which follow each other without a gap."""

    def __init__(self, on_progress: Callable[[str], None] = lambda text: None) -> None:
        self.phases: list[Phase] = []
        self._on_progress = on_progress
        self._start = self._phase_start = time.monotonic()

    def finish(self, name: str) -> None:
        """Add the phase that ends now."""
        now = time.monotonic()
        self.phases.append(Phase(name=name, seconds=now - self._phase_start))
        self._phase_start = now
        self._on_progress(f"{name} after {now - self._start:.1f} s")


def run_watched(call: Callable[[], T], watch: StartupWatch, deadline: float, status: list[str]) -> T:
    """Return the result of `call`, which may take minutes. Raises its exception.

    Raises ServerError when the server dies or the deadline passes. The last item of `status` is the progress shown;
    the call may replace it. The call runs in a daemon thread, so Ctrl-C ends the wait at once.
    """
    results: queue.SimpleQueue[tuple[T] | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((call(),))
        except Exception as error:
            results.put(error)

    threading.Thread(target=work, name="waiting for the server", daemon=True).start()
    start = reported_s = time.monotonic()
    while True:
        try:
            result = results.get(timeout=POLL_S)
        except queue.Empty:
            death, now = watch.find_death(), time.monotonic()
        else:
            if isinstance(result, Exception):
                raise result
            return result[0]
        if death is not None:
            raise death
        if now - reported_s >= REPORT_EVERY_S:
            reported_s = now
            watch.on_progress(f"{status[-1]}, {now - start:.0f} s: {watch.log.last_line()}")
        if now > deadline:
            raise ServerError(
                f"the server did not become ready within {watch.timeout_s:g} s; last: {status[-1]}",
                next_step="If it only needs longer, raise startup_timeout_s in the scenario.",
                detail=watch.log.tail(),
            )
