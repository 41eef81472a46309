"""What text from outside must not carry into a log, a page or a terminal: secrets, control characters, formulas.

`masked` is the one function that blacks out secrets: those that this process knows (`know`), in every encoding, and
what has the form of one. Text is masked before it is shortened, stripped or stored.
"""

import json
import re
from base64 import b32encode, b64encode
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeVar, cast
from unicodedata import normalize
from urllib.parse import quote

T = TypeVar("T")

HIDDEN = "***"
MIN_SECRET_CHARS = 4  # characters of a secret; a shorter one is blacked out nowhere: it would take half a text with it
_MAX_CACHED_CHARS = 5000  # of a text whose result is kept
_MIN_STRONG_CHARS = (
    8  # characters: a shorter secret, a word, a path or a sentence is blacked out literally and as a whole only
)
_MIN_DIVIDED_CHARS = 12  # characters: of a longer secret its parts are blacked out, too
_PART_CHARS = (8, 12)  # characters of a part that is blacked out: at least, and at most as many where a third is more
_WORD_CHARS = 16  # of letters alone: what is shorter may be an everyday word
_JOINTS = re.compile(r"[-_./]")  # of words
_PATH = re.compile(r"[/~.]|[a-z]+://|.*\s", re.DOTALL)
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # and their full-width forms
_NAME = re.compile(  # of an environment variable or an argument; MAX_TOKENS, PWD and SSL_KEYFILE are no secrets
    r"(?:KEYS?|TOKEN|CREDS?|JWT|COOKIE|USERPWD|AUTHORIZATION)$"
    r"|(?:^|_)(?:AUTH|PASS|PAT|PW)$|_PWD$"
    r"|(?:^|_)(?:HF|HUB|API|AUTH|ACCESS|GH|GITHUB|GITLAB|NPM|BEARER|REFRESH|USER|ADMIN|SECRET)_TOKENS$"
    r"|(?:API_?KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)(?!.*(?:FILE|PATH|DIR|ENV|NAME)$)"
)
# In a log, a lower-case `key` or `token` is one of a cache or of a text, unless its name has more to say.
_NAME_IN_LOG = re.compile(
    r"(?:HF|HUB|API|AUTH|ACCESS|GH|GITHUB|GITLAB|NPM|BEARER|REFRESH|ADMIN|SECRET|PRIVATE)_?(?:KEY|TOKEN)S?$"
    r"|(?:SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|COOKIE|JWT|AUTHORIZATION)$"
)
_SHAPE = re.compile(
    r"(?<![\w/.-])(?:hf_(?:[A-Za-z0-9]{16,}|(?=[A-Za-z]*\d)[A-Za-z0-9]{8,})"  # Hugging Face
    r"|(?:sk-|gh[pousr]_|github_pat_|glpat-|nvapi-)(?:[\w-]{16,}|(?=[A-Za-z_-]*\d)[\w-]{8,})"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}\b|AIza[\w-]{30,}|xox[abeoprs]-[\w-]{10,}"  # Amazon, Google, Slack
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"  # a JSON Web Token
    r"|[\w.-]+:[^\s/@:\0]{4,}(?=@(?!sha256:)[\w-]+\.[\w.-]+))"  # user:password@host
    r"|(?P<kept>\bBearer\s+(?=[\w.~+/=-]{8})|\b[Aa]uthorization[:=]\s*Basic\s+)[\w.~+/=-]{4,}"
    r"|(?<=://)[^\s/:@'\"\0]*:[^\s/@'\"\0]+(?=@)"  # a password in an address
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----|[\s\S]*)"
)
_QUOTE = r"""(?:\\?['"])?"""
_ASSIGNMENT = re.compile(  # a flag, a variable, a key of a dictionary or a header, up to where its value starts
    rf"""(?:(?P<flag>(?<![\w-])--[\w.-]+)(?:{_QUOTE},\ ?|=|\ +)
    |(?P<name>(?<![\w-])[A-Za-z_][\w-]*){_QUOTE}\ ?[:=]\ ?)
    \[?{_QUOTE}(?:(?:Bearer|Basic|Token)\ +)?""",
    re.VERBOSE,
)
_VALUE = re.compile(
    r"""(?![-\[{$*]|None\b|null\b)(?:(?<=')[^'\\\n]+(?=\\?')|(?<=")[^"\\\n]+(?=\\?")|(?:[^\s'",\]}\\]|,(?=[^\s'"]))+)"""
)
_CONTROL = re.compile(
    r"[\x1b](?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|\x9b[0-9;?]*[ -/]*[@-~]"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]"  # what moves a terminal's text
)
_BLANKS = re.compile(rf"{_CONTROL.pattern}|\s+")  # what a reader may take out of a text, as it may ...
_TAGS = re.compile(r"<[^<>]*>")
_JOINING = re.compile(r"0x|[\W_]+")  # between the parts of what was taken apart


def is_secret(name: str) -> bool:
    """Whether the name of an environment variable or argument says that its value must not be shown."""
    return _NAME.search(_normalize_name(name)) is not None


def find_secret_form(text: str) -> str | None:
    """The first part of `text` that has the form of a secret."""
    found = _SHAPE.search(text)
    return None if found is None else found[0]


class _SecretForm(NamedTuple):
    """One form of a secret in lower case. A part of it is found by the anchors: each long enough part holds one."""

    text: str
    shortest: int  # characters of a part that is blacked out
    anchors: tuple[str, ...]
    letters: bool  # whether parts of letters alone may be words, which stay


class _Span(NamedTuple):
    start: int
    end: int


_secrets: dict[str, bool] = {}  # by text: whether it is surely a secret


def register_secrets(secrets: Mapping[str, bool]) -> None:
    """Black these out of all that this process keeps or shows from now on.

    By text, whether it is surely a secret. If not, it is blacked out literally and as a whole only.
    """
    # As a whole, and line by line, as a log has it.
    texts = {text.strip(): sure for secret, sure in secrets.items() for text in (secret, *secret.splitlines())}
    new = {
        text: sure for text, sure in texts.items() if len(text) >= MIN_SECRET_CHARS and (sure or text not in _secrets)
    }
    if not new.items() <= _secrets.items():
        _secrets.update(new)
        for kept in (_mask_cached, _strong_forms, _literal_forms):
            kept.cache_clear()


def forget_secrets() -> None:
    """Know no secret any more."""
    _secrets.clear()
    for kept in (_mask_cached, _strong_forms, _literal_forms):
        kept.cache_clear()


def registered_secrets() -> dict[str, bool]:
    """The secrets that `know` got."""
    return dict(_secrets)


def _mask_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {
            _mask_texts(key, partial(_mask_registered, words=False)): _mask_texts(item, change)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mask_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _mask_registered(text: str, words: bool) -> str:
    return (_mask_cached if len(text) < _MAX_CACHED_CHARS else _mask_cached.__wrapped__)(text, words)


@lru_cache(512)  # a manifest, written again and again, and a server that fails say the same things all the time
def _mask_cached(text: str, words: bool) -> str:
    if _strong_forms():
        text = _replace_spans(text, _find_secrets(text))
    for literal in _literal_forms() if words else ():
        text = text.replace(literal, HIDDEN)
    return text


def masked(value: T, which: Literal["all", "known", "sure"] = "all") -> T:
    """Return `value`, a text or what JSON can hold, with secrets blacked out. Numbers and None stay.

    `sure`: known secrets, except those that may be everyday words or paths: for names, which must stay readable.
    `known`: every known secret. `all`: also what has the form of a secret, or is given under a secret's name or flag.
    """
    if which != "all":
        return (
            value
            if not _secrets
            else cast(T, _mask_texts(value, lambda text: _mask_registered(text, which == "known")))
        )
    made: Any = value
    if isinstance(value, dict):
        made = {
            key: HIDDEN if is_secret(str(key)) and item not in (None, "", [], {}) else masked(item)
            for key, item in value.items()
        }
    elif isinstance(value, list):
        flags = [
            isinstance(item, str) and item.startswith("-") and "=" not in item and is_secret(item) for item in value
        ]
        hide = [before and not str(item).startswith("--") for before, item in zip([False, *flags], value, strict=False)]
        made = [HIDDEN if given else masked(item) for given, item in zip(hide, value, strict=True)]
    elif isinstance(value, str):
        made = _mask_forms(_mask_registered(value, words=True))
    return cast(T, masked(made, "known") if isinstance(made, dict) else made)


def _mask_forms(text: str) -> str:
    """`text` with everything blacked out that has the form of a secret or follows the name of one."""
    parts, end = [], 0
    for given in _ASSIGNMENT.finditer(text):
        value = _VALUE.match(text, given.end()) if given.start() >= end and _names_secret(given) else None
        if value is not None:
            parts += [text[end : value.start()], HIDDEN]
            end = value.end()
    return _SHAPE.sub(lambda found: f"{found['kept'] or ''}{HIDDEN}", "".join([*parts, text[end:]]))


def _is_strong(secret: str) -> bool:
    """Whether it cannot be taken for anything else, in lower case or in part."""
    if len(secret) < _MIN_STRONG_CHARS or _may_be_word(secret):
        return False
    return not (secret.isdigit() and len(secret) < _MIN_DIVIDED_CHARS) and _PATH.match(secret) is None


def _may_be_word(text: str, max_chars: int = _WORD_CHARS) -> bool:
    return text.isalpha() and len(text) < max_chars


@lru_cache
def _literal_forms() -> list[str]:
    """What is blacked out as it is, and as addresses and JSON write it."""
    weak = [secret for secret, sure in _secrets.items() if not (sure and _is_strong(secret))]
    forms = {form for secret in weak for form in (secret, quote(secret, safe=""), json.dumps(secret)[1:-1])}
    return sorted(forms, key=len, reverse=True)


@lru_cache
def _strong_forms() -> list[_SecretForm]:
    """All forms in which the strong secrets are looked for."""
    made: dict[str, _SecretForm] = {}
    for secret, sure in _secrets.items():
        if not (sure and _is_strong(secret)):
            continue
        size = len(secret)
        part = size if size < _MIN_DIVIDED_CHARS else min(_PART_CHARS[1], max(_PART_CHARS[0], size // 3))
        letters = not secret.isalpha()
        raw = secret.encode()
        forms = [
            (form, part, letters)
            for form in {secret, secret[::-1], *(plain for plain, _, _ in _decode_step_by_step(secret))}
        ]
        forms += [(raw.hex(), 2 * part, False), ("".join(map(str, raw)), 2 * part, False)]
        once = list(_encode_at_each_offset(raw, 6))
        coded = [*once, *_encode_at_each_offset(raw, 5), *_encode_at_each_offset(secret.encode("utf-16-le"), 6)]
        for inner in coded + [twice for one in once for twice in _encode_at_each_offset(one.encode(), 6)]:
            shortest = -(-part * len(inner) // size)  # characters for as large a part of the secret
            forms += [(inner, shortest, False), (inner.translate(_URL_SAFE), shortest, False)]
        for text, shortest, words in forms:
            text = text.lower()
            step = max(1, (shortest + 1) // 2)
            anchors = [text[at : at + step] for at in range(0, len(text) - step + 1, step)]
            made.setdefault(text, _SecretForm(text, shortest, tuple(dict.fromkeys(anchors)), words))
    return list(made.values())


def _encode_at_each_offset(raw: bytes, bits: int) -> Iterator[str]:
    """What of a text in base64 (6 bits a character) or base32 (5) depends on `raw` alone, for each place in it."""
    encode, places = (b64encode, 3) if bits == 6 else (b32encode, 5)
    for before in range(places):
        yield encode(bytes(before) + raw).decode()[-(-before * 8 // bits) : (before + len(raw)) * 8 // bits]


_URL_SAFE = str.maketrans("+/", "-_")
_ESCAPED = re.compile(
    r"%(?P<url>[0-9a-f]{2})|\\+(?:u00|u\{0*|x)(?P<hex>[0-9a-f]{2})\}?|&\#x0*(?P<html>[0-9a-f]{2});"
    r"|&\#0*(?P<number>[0-9]{2,3});|&(?P<name>amp|lt|gt|quot|apos);|\\+(?P<octal>[01][0-7]{2})|=(?P<quoted>[0-9a-f]{2})"
    r"|\\+(?=[/\"'])",
    re.IGNORECASE,
)
_ENTITIES = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}
_MAX_DECODING_STEPS = 3  # encodings of encodings that are looked into


def _find_secrets(text: str) -> list[_Span]:
    """Where the strong secrets are, or parts of them, in any encoding."""
    found: list[_Span] = []
    for plain, starts, ends in _decode_step_by_step(text):
        for start, end in _find_parts(plain, joined=starts is not None):
            found.append(_Span(start, end) if starts is None else _Span(starts[start], ends[end - 1]))
    return found


def _decode_step_by_step(text: str) -> list[tuple[str, list[int] | None, list[int]]]:
    """`text` in lower case, then decoded step by step, then without blanks and control characters, then without tags,
    then its letters and digits alone.

    With the place in `text` at which each character starts and ends; None: its own.
    """
    layers: list[tuple[str, list[int] | None, list[int]]] = [(_lower(text), None, [])]
    if text.isalnum():
        return layers
    starts, ends = list(range(len(text))), list(range(1, len(text) + 1))
    plain = layers[0][0]
    for pattern in [_ESCAPED] * _MAX_DECODING_STEPS + [_BLANKS, _TAGS, _JOINING]:
        if pattern.search(plain) is None:
            continue
        chars, begins, finishes, at = [], [], [], 0
        for match in [*pattern.finditer(plain), None]:
            start = len(plain) if match is None else match.start()
            chars.append(plain[at:start])
            begins += starts[at:start]
            finishes += ends[at:start]
            if match is not None:
                at = match.end()
                if char := _lower(_decode_char(match)) if pattern is _ESCAPED else "":
                    chars.append(char)
                    begins.append(starts[start])
                    finishes.append(ends[at - 1])
        plain, starts, ends = "".join(chars), begins, finishes
        layers.append((plain, starts, ends))
    return layers


def _lower(text: str) -> str:
    """In lower case and without forms such as full-width, each character in its place: some would become two."""
    return text.lower() if text.isascii() else "".join(map(_plain_char, text))


@lru_cache(4096)
def _plain_char(char: str) -> str:
    plain = normalize("NFKC", char).lower()
    return plain if len(plain) == 1 else char


def _decode_char(match: re.Match[str]) -> str:
    if code := match["url"] or match["hex"] or match["html"] or match["quoted"]:
        return chr(int(code, 16))
    if match["octal"]:
        return chr(int(match["octal"], 8))
    return chr(int(match["number"])) if match["number"] else _ENTITIES.get((match["name"] or "").lower(), "")


def _find_parts(plain: str, joined: bool) -> Iterator[_Span]:
    """Where long enough parts of the needles are. `joined`: words may have been joined, so letters alone are none."""
    for needle in _strong_forms():
        for number, anchor in enumerate(needle.anchors):
            at = plain.find(anchor)
            while at >= 0:
                start, end = _extend_match(plain, at, needle, number * len(anchor), len(anchor))
                run = plain[start:end]
                max_chars = len(run) + 1 if joined else _MIN_DIVIDED_CHARS
                word = needle.letters and run != needle.text and _may_be_word(_JOINTS.sub("", run), max_chars)
                if len(run) >= needle.shortest and not word:
                    yield _Span(start, end)
                at = plain.find(anchor, max(at + 1, end if len(run) >= needle.shortest else 0))


def _extend_match(plain: str, at: int, needle: _SecretForm, place: int, size: int) -> _Span:
    """The longest part of a needle around an anchor that is at `at` in the text and at `place` in the needle."""
    start, end, first, last = at, at + size, place, place + size
    while start > 0 and first > 0 and plain[start - 1] == needle.text[first - 1]:
        start, first = start - 1, first - 1
    while end < len(plain) and last < len(needle.text) and plain[end] == needle.text[last]:
        end, last = end + 1, last + 1
    return _Span(start, end)


def _replace_spans(text: str, spans: list[_Span]) -> str:
    """`text` with HIDDEN in the place of each span; those that meet are one."""
    parts: list[str] = []
    end = 0
    for span in sorted(spans):
        if span.start > end or not parts:
            parts += [text[end : span.start], HIDDEN]
        end = max(end, span.end)
    return "".join([*parts, text[end:]])


def printable(text: str) -> str:
    """`text` without what a terminal would obey: colours, control characters, directions of writing. Lines stay."""
    return text if text.isprintable() else _CONTROL.sub("", text)


def csv_field(value: object) -> object:
    """A field of a CSV file: text without control characters, and with a quote before what a spreadsheet computes."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text


def _names_secret(given: re.Match[str]) -> bool:
    name = given["flag"] or given["name"]
    if given["flag"] or name.startswith("-") or (name.isupper() and name not in ("KEY", "KEYS")):
        return is_secret(name)
    return _NAME_IN_LOG.search(_normalize_name(name)) is not None


def _normalize_name(name: str) -> str:
    return re.sub(r"[-.]", "_", name).upper()
