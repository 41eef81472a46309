"""Make text from outside safe for a log, a page or a terminal: no secrets, no control characters, no formulas.

`masked` is the only function that masks secrets: those that this process knows (`register_secrets`), in every encoding,
and text that has the form of a secret. Mask a text before it is shortened, stripped or stored.
"""

import json
import re
from base64 import b32encode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeVar, cast
from unicodedata import normalize
from urllib.parse import quote

T = TypeVar("T")

HIDDEN = "***"
MIN_SECRET_CHARS = 4  # a shorter secret is never masked: that would mask half of a text
_MAX_CACHED_CHARS = 5000  # of a text whose result is cached
_MIN_STRONG_CHARS = 8  # a shorter secret is masked only literally and as a whole, like a word, a path or a sentence
_MIN_DIVIDED_CHARS = 12  # parts of a longer secret are masked, too
_PART_CHARS = (8, 12)  # minimum and maximum size of a masked part, which is otherwise a third of the secret
_WORD_CHARS = 16  # fewer letters may be an everyday word
_JOINTS = re.compile(r"[-_./]")  # between words
_PATH = re.compile(r"[/~.]|[a-z]+://|.*\s", re.DOTALL)
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # and their full-width forms
_NAME = re.compile(  # of a secret variable or argument, but not MAX_TOKENS, PWD or SSL_KEYFILE
    r"(?:KEYS?|TOKEN|CREDS?|JWT|COOKIE|USERPWD|AUTHORIZATION)$"
    r"|(?:^|_)(?:AUTH|PASS|PAT|PW)$|_PWD$"
    r"|(?:^|_)(?:HF|HUB|API|AUTH|ACCESS|GH|GITHUB|GITLAB|NPM|BEARER|REFRESH|USER|ADMIN|SECRET)_TOKENS$"
    r"|(?:API_?KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)(?!.*(?:FILE|PATH|DIR|ENV|NAME)$)"
)
# In a log, a lower-case `key` or `token` is that of a cache or a text, unless its name has one of these words, too.
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
_ASSIGNMENT = re.compile(  # a flag, a variable, a dictionary's key or a header, up to the start of its value
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
    """Check that the name of an environment variable or argument means that its value is a secret."""
    return _NAME.search(_normalize_name(name)) is not None


def find_secret_form(text: str) -> str | None:
    """Return the first part of `text` that has the form of a secret."""
    match = _SHAPE.search(text)
    return None if match is None else match[0]


class _SecretForm(NamedTuple):
    """One encoding of a secret, in lower case. Each part of at least `min_chars` contains one of the anchors."""

    text: str
    min_chars: int  # of a part that is masked
    anchors: tuple[str, ...]
    keeps_words: bool  # parts that may be everyday words are not masked


class _Layer(NamedTuple):
    """A decoded text, and where each of its characters starts and ends in the original text."""

    text: str
    starts: Sequence[int]
    ends: Sequence[int]


_secrets: dict[str, bool] = {}  # by text: whether it is surely a secret


def register_secrets(secrets: Mapping[str, bool]) -> None:
    """Mask these texts from now on in all that this process stores or shows.

    By text, whether it is surely a secret. If not, it is masked only literally and as a whole.
    """
    # As a whole, and line by line, as in a log.
    texts = {text.strip(): sure for secret, sure in secrets.items() for text in (secret, *secret.splitlines())}
    new = {
        text: sure for text, sure in texts.items() if len(text) >= MIN_SECRET_CHARS and (sure or text not in _secrets)
    }
    if not new.items() <= _secrets.items():
        _secrets.update(new)
        _clear_caches()


def forget_secrets() -> None:
    _secrets.clear()
    _clear_caches()


def _clear_caches() -> None:
    for function in (_mask_cached, _strong_forms, _literal_forms):
        function.cache_clear()


def registered_secrets() -> dict[str, bool]:
    """Return the secrets that were registered, and whether each is surely one."""
    return dict(_secrets)


def _mask_texts(value: Any, mask: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        mask_key = partial(_mask_registered, words=False)
        return {_mask_texts(key, mask_key): _mask_texts(item, mask) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask_texts(item, mask) for item in value]
    return mask(value) if isinstance(value, str) else value


def _mask_registered(text: str, words: bool) -> str:
    """Return `text` with the registered secrets masked; `words`: also those that may be everyday words."""
    return (_mask_cached if len(text) < _MAX_CACHED_CHARS else _mask_cached.__wrapped__)(text, words)


@lru_cache(512)  # a manifest that is written repeatedly, and a failing server, repeat the same texts
def _mask_cached(text: str, words: bool) -> str:
    if _strong_forms():
        text = _mask_strong(text)
    for literal in _literal_forms() if words else ():
        text = text.replace(literal, HIDDEN)
    return text


def masked(value: T, which: Literal["all", "known", "sure"] = "all") -> T:
    """Return `value`, a text or what JSON can hold, with its secrets masked. Numbers and None stay.

    `sure`: registered secrets, except those that may be everyday words or paths: for names, which must stay readable.
    `known`: all registered secrets. `all`: also text that has the form of a secret, or follows a secret's name or flag.
    """
    result: Any = value
    if which != "all":
        if _secrets:
            result = _mask_texts(value, lambda text: _mask_registered(text, which == "known"))
    elif isinstance(value, dict):
        result = {
            key: HIDDEN if is_secret(str(key)) and item not in (None, "", [], {}) else masked(item)
            for key, item in value.items()
        }
        result = masked(result, "known")  # for its keys
    elif isinstance(value, list):
        follows_flag = False  # such as --api-key
        result = []
        for item in value:
            result.append(HIDDEN if follows_flag and not str(item).startswith("--") else masked(item))
            is_flag = isinstance(item, str) and item.startswith("-") and "=" not in item
            follows_flag = is_flag and is_secret(item)
    elif isinstance(value, str):
        result = _mask_forms(_mask_registered(value, words=True))
    return cast(T, result)


def _mask_forms(text: str) -> str:
    """Return `text` without what has the form of a secret or follows the name of one."""
    parts, end = [], 0
    for match in _ASSIGNMENT.finditer(text):
        value = _VALUE.match(text, match.end()) if match.start() >= end and _names_secret(match) else None
        if value is not None:
            parts += [text[end : value.start()], HIDDEN]
            end = value.end()
    return _SHAPE.sub(lambda match: f"{match['kept'] or ''}{HIDDEN}", "".join([*parts, text[end:]]))


def _is_strong(secret: str) -> bool:
    """Check that an ordinary text is unlikely to contain the secret, in lower case or in part."""
    if len(secret) < _MIN_STRONG_CHARS or _may_be_word(secret):
        return False
    return not (secret.isdigit() and len(secret) < _MIN_DIVIDED_CHARS) and _PATH.match(secret) is None


def _may_be_word(text: str, max_chars: int = _WORD_CHARS) -> bool:
    return text.isalpha() and len(text) < max_chars


@lru_cache
def _literal_forms() -> list[str]:
    """Return the other secrets, the longest first: as they are, and as addresses and JSON contain them."""
    weak = [secret for secret, sure in _secrets.items() if not (sure and _is_strong(secret))]
    forms = {form for secret in weak for form in (secret, quote(secret, safe=""), json.dumps(secret)[1:-1])}
    return sorted(forms, key=len, reverse=True)


@lru_cache
def _strong_forms() -> list[_SecretForm]:
    """Return all encodings of the strong secrets."""
    forms: dict[str, _SecretForm] = {}
    for secret, sure in _secrets.items():
        if not (sure and _is_strong(secret)):
            continue
        size = len(secret)
        part = size if size < _MIN_DIVIDED_CHARS else min(_PART_CHARS[1], max(_PART_CHARS[0], size // 3))
        keeps_words = not secret.isalpha()
        raw = secret.encode()
        texts = {secret, secret[::-1], *(layer.text for layer in _decode_step_by_step(secret))}
        candidates = [(text, part, keeps_words) for text in texts]
        candidates += [(raw.hex(), 2 * part, False), ("".join(map(str, raw)), 2 * part, False)]
        once = list(_encode_at_each_offset(raw, 6))
        coded = [*once, *_encode_at_each_offset(raw, 5), *_encode_at_each_offset(secret.encode("utf-16-le"), 6)]
        for text in coded + [twice for code in once for twice in _encode_at_each_offset(code.encode(), 6)]:
            min_chars = -(-part * len(text) // size)  # of an equally large part of the secret
            candidates += [(text, min_chars, False), (text.translate(_URL_SAFE), min_chars, False)]
        for text, min_chars, keeps in candidates:
            text = text.lower()
            step = max(1, (min_chars + 1) // 2)
            anchors = [text[start : start + step] for start in range(0, len(text) - step + 1, step)]
            forms.setdefault(text, _SecretForm(text, min_chars, tuple(dict.fromkeys(anchors)), keeps))
    return list(forms.values())


def _encode_at_each_offset(raw: bytes, bits: int) -> Iterator[str]:
    """Yield `raw` in base64 (6 bits a character) or base32 (5) at each offset, without what depends on other bytes."""
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
_MAX_DECODING_STEPS = 3  # of nested encodings


def _mask_strong(text: str) -> str:
    """Return `text` without the strong secrets and their parts, in any encoding."""
    spans = []
    for number, layer in enumerate(_decode_step_by_step(text)):
        for start, end in _find_parts(layer.text, is_decoded=number > 0):
            spans.append((layer.starts[start], layer.ends[end - 1]))
    parts: list[str] = []
    done = 0
    for start, end in sorted(spans):
        if start > done or not parts:  # else it overlaps or follows the previous span
            parts += [text[done:start], HIDDEN]
        done = max(done, end)
    return "".join([*parts, text[done:]])


def _decode_step_by_step(text: str) -> list[_Layer]:
    """Return `text` in lower case; then decoded step by step; then without blanks and control characters; then without
    tags; then only its letters and digits.
    """
    layer = _Layer(_lower(text), range(len(text)), range(1, len(text) + 1))
    layers = [layer]
    if text.isalnum():
        return layers
    for pattern in [_ESCAPED] * _MAX_DECODING_STEPS + [_BLANKS, _TAGS, _JOINING]:
        if pattern.search(layer.text) is None:
            continue
        chars: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        done = 0
        for match in [*pattern.finditer(layer.text), None]:
            start = len(layer.text) if match is None else match.start()
            chars.append(layer.text[done:start])
            starts += layer.starts[done:start]
            ends += layer.ends[done:start]
            if match is not None:
                done = match.end()
                if char := _lower(_decode_char(match)) if pattern is _ESCAPED else "":
                    chars.append(char)
                    starts.append(layer.starts[start])
                    ends.append(layer.ends[done - 1])
        layer = _Layer("".join(chars), starts, ends)
        layers.append(layer)
    return layers


def _lower(text: str) -> str:
    """Return `text` in lower case and without forms such as full-width. It keeps its length, so that places stay."""
    return text.lower() if text.isascii() else "".join(map(_lower_char, text))


@lru_cache(4096)
def _lower_char(char: str) -> str:
    lower = normalize("NFKC", char).lower()
    return lower if len(lower) == 1 else char


def _decode_char(match: re.Match[str]) -> str:
    if code := match["url"] or match["hex"] or match["html"] or match["quoted"]:
        return chr(int(code, 16))
    if match["octal"]:
        return chr(int(match["octal"], 8))
    return chr(int(match["number"])) if match["number"] else _ENTITIES.get((match["name"] or "").lower(), "")


def _find_parts(text: str, is_decoded: bool) -> Iterator[tuple[int, int]]:
    """Yield start and end of each part of a secret that is long enough.

    A part of letters alone that may be an everyday word is left out; in a decoded text, words may have been joined.
    """
    for form in _strong_forms():
        for number, anchor in enumerate(form.anchors):
            found = text.find(anchor)
            while found >= 0:
                # Extend the match to both sides, in the text and in the form.
                start, end, first = found, found + len(anchor), number * len(anchor)
                last = first + len(anchor)
                while start > 0 and first > 0 and text[start - 1] == form.text[first - 1]:
                    start, first = start - 1, first - 1
                while end < len(text) and last < len(form.text) and text[end] == form.text[last]:
                    end, last = end + 1, last + 1
                part, is_long = text[start:end], end - start >= form.min_chars
                word_chars = len(part) + 1 if is_decoded else _MIN_DIVIDED_CHARS
                is_word = form.keeps_words and part != form.text and _may_be_word(_JOINTS.sub("", part), word_chars)
                if is_long and not is_word:
                    yield start, end
                found = text.find(anchor, max(found + 1, end if is_long else 0))


def printable(text: str) -> str:
    """Return `text` without what changes a terminal: colours, control characters, directions. Line ends stay."""
    return text if text.isprintable() else _CONTROL.sub("", text)


def csv_field(value: object) -> object:
    """Return a field of a CSV file: no control characters, and a quote before what a spreadsheet would compute."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text


def _names_secret(assignment: re.Match[str]) -> bool:
    name = assignment["flag"] or assignment["name"]
    if assignment["flag"] or name.startswith("-") or (name.isupper() and name not in ("KEY", "KEYS")):
        return is_secret(name)
    return _NAME_IN_LOG.search(_normalize_name(name)) is not None


def _normalize_name(name: str) -> str:
    return re.sub(r"[-.]", "_", name).upper()
