"""Check that a response comes from an OpenAI-compatible API, and explain one that does not.

Recognizes an error in a decoded response or stream event, whatever its form: the OpenAI API defines one, and servers,
frameworks and proxies have a dozen others.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urljoin

import msgspec

from harness.base.redact import masked

CHECK_ADDRESS = "Check that the address is that of an OpenAI-compatible server."
_MAX_ID = 1000  # characters of a model's name
_MAX_SHOWN = 8  # models in a message
_MAX_BODY_BYTES = 1 << 20  # the rest of a longer body is ignored
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
        clean = {name.lower(): masked(value[:_MAX_SEARCHED_CHARS], "known") for name, value in headers.items()}
        text = body[:_MAX_BODY_BYTES].decode(errors="replace")
        return cls(url, status, clean, masked(text, "known").encode())


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
    if not all(isinstance(item, str) and 0 < len(item) <= _MAX_ID for item in ids):
        raise ValueError("a model's id is not a name")
    return ids


Advice = tuple[str, str]  # the problem, and what to do


JSON_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}  # others are numbers
_MAX_DEPTH = 4  # of the words of an error, in objects inside of it
_MAX_LISTED = 5  # errors of a list
_SEARCHED_TEXT_CHARS = 200  # a text that is an error says so at its start
_ERROR_NAME = re.compile(r"(?i)error|exception|(?:^|[\W_])(?:fail|fatal|abort|err(?:$|[_-]?(?:msg|code|type)))")
_FAILED_FINISH = re.compile(r"(?i)error|exception|fail|abort|cancel|timeout|insufficient|unavailable")
_ERROR_TEXT = re.compile(
    r"(?i)error|exception|\b(?:fail(?:ed|ure)?|fatal|abort(?:ed)?|panic|crashed|died|dead|unavailable|overload(?:ed)?"
    r"|denied|refused|exceed(?:s|ed)|out of memory|time(?:d )?out|bad gateway|too many requests|unauthorized|forbidden"
    r"|invalid|unsupported|cannot|could not|unable to|not found|traceback)\b"
)
_TEXT_KEYS = (
    "message", "msg", "detail", "details", "error", "errors", "error_message", "errorMessage", "errmsg", "exception",
    "reason", "description", "error_description", "text", "title", "response",
)  # fmt: skip
_TEXT_OF_MODEL = ("content", "prompt", "input", "output", "completion", "partial", "delta", "id", "object", "model")
_KIND_KEYS = ("type", "code")
_OTHER_KIND_KEYS = ("status", "status_code", "statusCode", "error_type", "error_code", "errorCode", "err_type")
_NUMBER_KEYS = ("code", "status", "status_code", "statusCode", "error_code")
_GOOD_CODES = ("ok", "success", "succeeded")
_HARMLESS_NAMES = re.compile(r"(?i)\W*(?:ping|pong|heart-?_?beat|keep-?_?alive|noop|no-?_?op)\W*")
# What an event may have that carries no token: the fields of OpenAI's chunks, and those that llama.cpp adds.
_KNOWN_KEYS = {
    "choices", "usage", "id", "object", "created", "model", "provider", "system_fingerprint", "service_tier", "timings",
    "prompt_progress", "x_groq",
}  # fmt: skip


def is_error_name(name: str) -> bool:
    """Whether a name, such as the type of an event, is that of an error."""
    return _ERROR_NAME.search(name[:_SEARCHED_TEXT_CHARS]) is not None


def is_failed_finish(reason: str) -> bool:
    """Whether a finish reason says that the server gave the answer up."""
    return _FAILED_FINISH.search(reason) is not None


def is_harmless_name(name: str) -> bool:
    """Whether a name, such as the type of an event, is that of a ping."""
    return _HARMLESS_NAMES.fullmatch(name[:_SEARCHED_TEXT_CHARS]) is not None


def is_error_text(text: str) -> bool:
    """Whether a text that is not JSON reports an error. Text in JSON may be generated, so it reports none."""
    start = text[:_SEARCHED_TEXT_CHARS].strip()
    if re.match(r"""\{\s*["']error["']\s*:\s*(?!null|None|false|False)""", start):
        return True  # it is cut, or printed by Python
    return not start.startswith(("{", '["', "[{")) and _ERROR_TEXT.search(start) is not None


def find_error(value: Any) -> str | None:
    """Return the words of the error that a decoded response or event reports, in any form; None if it reports none."""
    if isinstance(value, list):
        objects = [item for item in value[:_MAX_LISTED] if isinstance(item, dict)]
        return next((text for item in objects if (text := find_error(item)) is not None), None)
    if isinstance(value, str):
        return value if is_error_text(value) else None
    if not isinstance(value, dict):
        return None
    choices = value.get("choices")
    if value.get("error") or value.get("object") == "error":
        return error_words(value) or "error: no message"
    if isinstance(choices, list) and choices:
        return _find_error_of_choice(choices[0])
    if value.get("object") == "chat.completion.chunk" and value.keys() <= _KNOWN_KEYS:  # usage alone
        return None
    return error_words(value) or "error: no message" if _reports_error(value) else None


def _find_error_of_choice(choice: Any) -> str | None:
    """Return the words of an error inside of a choice, next to its text or in place of it."""
    if not isinstance(choice, dict):
        return None
    for part in (choice, choice.get("delta"), choice.get("message")):
        if isinstance(part, dict) and part.get("error"):
            return error_words({"error": part["error"]}) or "error: no message"
    finish = choice.get("finish_reason")  # an object in some versions of SGLang
    if isinstance(finish, dict) and isinstance(kind := finish.get("type"), str):
        return error_words(finish) or kind if is_error_name(kind) else None
    return None


def _reports_error(body: dict[str, Any]) -> bool:
    """Whether an object without choices and without `error` reports an error all the same."""
    words = _words_of(body)
    names = [body.get(key) for key in ("object", "event", "level", *_KIND_KEYS, *_OTHER_KIND_KEYS)]
    if any(isinstance(name, str) and is_error_name(name) for name in names):
        return True
    if any(value and is_error_name(key) and not _is_measure(key, value) for key, value in body.items()):
        return True
    if body.get("detail") or body.get("success") is False or body.get("ok") is False:  # FastAPI's form; others'
        return True
    code = body.get("code")
    if words is not None and isinstance(code, str) and code.strip() and not code.isdigit():
        return code.lower() not in _GOOD_CODES
    if any(_is_error_number(body.get(key), has_words=words is not None) for key in _NUMBER_KEYS):
        return True
    return words is not None and is_error_text(words)


def _is_measure(key: str, value: Any) -> bool:
    """Whether a field with a name such as `error_rate` is a number, and not the code of an error."""
    return isinstance(value, int | float) and value is not True and not key.lower().endswith("code")


def _is_error_number(code: Any, *, has_words: bool) -> bool:
    if isinstance(code, str) and code.isascii() and code.isdigit():
        code = int(code[:10])
    if not isinstance(code, int) or isinstance(code, bool):
        return False
    return 400 <= code <= 599 or (has_words and code != 0 and not 200 <= code <= 299)


def error_words(body: dict[str, Any]) -> str | None:
    """Return the message of an error body with its type and code; None without any.

    Never a mapping as a whole, which may hold the model's output.
    """
    error = body.get("error")
    error = error if error and error is not True else body
    if isinstance(error, dict):
        message = _words_of(error) or (_words_of(body) if error is not body else None)
        kinds = [text for key in _KIND_KEYS if (text := _kind(error.get(key)))]
        kinds = kinds or [text for key in _OTHER_KIND_KEYS if (text := _kind(error.get(key)))]
        is_error_object = error is not body or body.get("object") == "error"
        if not kinds and (not is_error_object or message is None):
            return message if message is not None or not is_error_object else "error: no message"
        return f"{' '.join(kinds) or 'error'}: {message or 'no message'}"
    return _words_of({"error": error})


def error_event_words(body: dict[str, Any]) -> str | None:
    """Return the words of an event that has the name of an error; those of any text if no field has a known name."""
    names = [
        key for key, value in body.items() if isinstance(value, str) and value.strip() and key not in _TEXT_OF_MODEL
    ]
    return error_words(body) or "; ".join(f"{key}: {body[key].strip()}" for key in names[:_MAX_LISTED]) or None


def has_empty_error(body: dict[str, Any]) -> bool:
    """Whether a decoded event has an error without anything in it: an object, an array or a text, and not null."""
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    parts = [body, choice, *((choice.get("delta"), choice.get("message")) if isinstance(choice, dict) else ())]
    return any(isinstance(part, dict) and part.get("error") in ({}, [], "") for part in parts)


def _kind(value: Any) -> str | None:
    return to_text(value) if value and isinstance(value, str | int) and not isinstance(value, bool) else None


def _words_of(value: Any, depth: int = 0) -> str | None:
    """Return the first text in the fields of an error that hold its words."""
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, list):
        texts = [text for item in value[:_MAX_LISTED] if depth < _MAX_DEPTH and (text := _words_of(item, depth + 1))]
        return "; ".join(texts) or None
    if not isinstance(value, dict):
        return to_text(value) if value and not isinstance(value, bool) else None
    if depth >= _MAX_DEPTH:
        return None
    for key in (*_TEXT_KEYS, *(key for key in value if is_error_name(key) and not key.lower().endswith("code"))):
        inner = value.get(key)
        if key in ("message", "text", "response") and isinstance(inner, dict) and "error" not in inner:
            continue  # of a model
        if inner and (text := _words_of(inner, depth + 1)):
            place = value.get("loc") if key in ("msg", "message") else None  # of pydantic: the field that is refused
            return f"{'.'.join(map(to_text, place))}: {text}" if isinstance(place, list) and place else text
    return None


def describe_unknown(value: Any) -> str | None:
    """Describe a decoded event that has no known form: with its words, else with its keys. None for any other.

    An event of a known form may carry nothing, as a ping does, and null.
    """
    if not value:
        return None
    if isinstance(value, str):
        return None if is_harmless_name(value) else "a string"
    if not isinstance(value, dict):
        return f"a JSON {JSON_TYPES.get(type(value), 'number')}"
    unknown = sorted(
        key for key, content in value.items() if content and content is not True and key not in _KNOWN_KEYS
    )
    kinds = [value.get(key) for key in ("type", "event", "status", "message")]
    is_completion = "choices" in value or "usage" in value
    if is_completion or not unknown or any(isinstance(kind, str) and is_harmless_name(kind) for kind in kinds):
        return None
    names = ", ".join(unknown[:5])
    words = next((text for key in _TEXT_KEYS[:4] if isinstance(text := value.get(key), str) and text), None)
    return f"it has {names}" if words is None else f"{words} (it has {names})"


def to_text(value: Any) -> str:
    """Return `str(value)`; for a value that has none, the name of its JSON type."""
    try:
        return str(value)
    except (RecursionError, ValueError):  # nested too deeply; a number of more than 4,300 digits
        return JSON_TYPES.get(type(value), "number")


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


def shown_names(ids: Sequence[str]) -> str:
    """Return the first names of a list of models, for a message."""
    more = [f"and {len(ids) - _MAX_SHOWN:,} more"] if len(ids) > _MAX_SHOWN else []
    return ", ".join([*(f"'{id}'" for id in ids[:_MAX_SHOWN]), *more]) or "no model at all"


def explain_several_loaded(base: str, loaded: Sequence[str]) -> Advice:
    """Explain that it is not known which of the loaded models of a server is meant."""
    return f"{base} has {len(loaded)} models loaded: {shown_names(loaded)}", "Name the one to measure: --model NAME."


def error_message(body: bytes) -> str:
    """Return the message of an API's error, without what looks like a secret."""
    try:
        error = decode_json(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
        return masked(text[:_MAX_SEARCHED_CHARS])[:300]
    except (ValueError, KeyError, TypeError, RecursionError):
        return masked(body.decode(errors="replace")[:_MAX_SEARCHED_CHARS])[:200].strip() or "no text"
