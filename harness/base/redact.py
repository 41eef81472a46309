"""Make text from outside safe for a log, a page or a terminal: no secrets, no control characters, no formulas.

`masked` removes the secrets that this process knows (`register_secrets`): plain, escaped as in JSON, HTML or URLs, in
base64 or hex, also with separators between the digits, in any case, and each piece of PIECE_CHARS, so a text may be cut
before. Its time is linear in the text.
"""

import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar, cast

T = TypeVar("T")
Secrets = frozenset[tuple[str, bool]]  # the texts, and whether each is surely a secret

HIDDEN = "***"
PIECE_CHARS = 8  # each piece of a secret that is this long is masked
MIN_SECRET_CHARS = 4  # a shorter text that may be no secret is not masked: that would mask half of a text
_MAX_SECRET_CHARS = 16_384  # the rest of a longer one is ignored, so that its pieces fit into memory
_MAX_CACHED_CHARS = 5000  # of a text whose result is cached
_MAX_DEPTH = 100  # of nested lists and dictionaries
_NAME_PIECE_CHARS = 16  # of a secret that consists of words: a shorter piece may be part of a name
_DIGITS = 12  # fewer digits may be a port, a count or a time
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
    rf"""(?:(?P<flag>(?<![\w.-])--[\w.-]+)(?:{_QUOTE},\ ?|=|\ +)
    |(?P<name>(?<![\w-])[A-Za-z_][\w-]*){_QUOTE}\ ?[:=]\ ?)
    \[?{_QUOTE}(?:(?:Bearer|Basic|Token)\ +)?""",
    re.VERBOSE,
)
_VALUE = re.compile(
    r"""(?![-\[{$*]|None\b|null\b)(?:(?<=')[^'\\\n]+(?=\\?')|(?<=")[^"\\\n]+(?=\\?")|(?:[^\s'",\]}\\]|,(?=[^\s'"]))+)"""
)
_CONTROL = re.compile(
    r"[\x1b](?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|\x9b[0-9;?]*[ -/]*[@-~]"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]"  # moves a terminal's text
)
# What may be between the characters of a secret: line ends, tabs, control characters and characters without a width.
_INVISIBLE = (
    rf"{_CONTROL.pattern}|[^\S ]|[\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2061-\u206f\u3164\ufe00-\ufe0f"
    r"\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
_SKIPPED = re.compile(rf"{_INVISIBLE}|\\")
# Backslashes of a run belong to one match: its time would be quadratic.
_ESCAPED = re.compile(
    r"(?:(?<!\\)\\++(?:u00|x)|%(?:25)*)1b\[[0-9;]{0,20}[a-z]"  # a colour, escaped
    r"|%(?:25)*(?P<url>[0-9a-f]{2})|(?<!\\)\\++(?:u(?P<json>[0-9a-f]{4})|x(?P<byte>[0-9a-f]{2})|[nrtbfv0])?"
    r"|&\#x0{0,8}(?P<hex>[0-9a-f]{1,6});|&\#0{0,8}(?P<number>[0-9]{1,7});|&(?P<name>amp|lt|gt|quot|apos);"
    rf"|(?:{_INVISIBLE})++",
    re.IGNORECASE,
)
_ENTITIES = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}
# Hex digits in groups, in lower case: `73 6b 2d`, `73:6b:2d`, `0x73, 0x6b`, `736b 2d61`.
_HEX_RUN = re.compile(r"(?:[0-9a-f]{1,16}+(?:[^0-9a-z]|\\[nrt]){1,8}+(?:0?x)?+)++[0-9a-f]{0,16}+")
_HEX_GROUP = re.compile(r"(?!0x)[0-9a-f]+")
_URL_SAFE = str.maketrans("+/", "-_")
_WORDS = re.compile(r"[-_./~: ]*(?:(?:[A-Z]?[a-z]+|[A-Z]+)(?:[-_./~: ]+|$))*")


def is_secret(name: str) -> bool:
    """Check that the name of an environment variable or argument means that its value is a secret."""
    return _NAME.search(_normalize_name(name)) is not None


def find_secret_form(text: str) -> str | None:
    """Return the first part of `text` that has the form of a secret."""
    match = _SHAPE.search(text)
    return None if match is None else match[0]


def _mask_forms(text: str) -> str:
    """Return `text` without what has the form of a secret or follows the name of one."""
    parts, end = [], 0
    for match in _ASSIGNMENT.finditer(text):
        value = _VALUE.match(text, match.end()) if match.start() >= end and _names_secret(match) else None
        if value is not None:
            parts += [text[end : value.start()], HIDDEN]
            end = value.end()
    return _SHAPE.sub(lambda match: f"{match['kept'] or ''}{HIDDEN}", "".join([*parts, text[end:]]))


_secrets: dict[str, bool] = {}  # of this process


def register_secrets(secrets: Mapping[str, bool]) -> None:
    """Mask these texts from now on in all that this process stores or shows.

    By text, whether it is surely a secret. If not, it is masked only literally and as a whole.
    """
    for secret, sure in secrets.items():
        for text in (secret, *_CONTROL.split(secret), *secret.splitlines()):  # a log has it line by line
            text = text.strip()[:_MAX_SECRET_CHARS]
            if text and (sure or len(text) >= MIN_SECRET_CHARS):
                _secrets[text] = sure or _secrets.get(text, False)


def forget_secrets() -> None:
    _secrets.clear()


def registered_secrets() -> dict[str, bool]:
    """Return the secrets that were registered, and whether each is surely one."""
    return dict(_secrets)


def masked(value: T, which: Literal["all", "known", "sure"] = "all") -> T:
    """Return `value`, a text or what JSON can hold, with its secrets masked. Numbers and None stay.

    `sure`: registered secrets, except those that may be everyday words: for names, which must stay readable.
    `known`: all registered secrets. `all`: also text that has the form of a secret, or follows a secret's name or flag.
    """
    secrets = frozenset(_secrets.items())

    def mask(text: str) -> str:
        text = _mask(text, secrets, which == "sure")
        return _mask_forms(text) if which == "all" else text

    def mask_key(key: Any) -> Any:
        return _mask(key, secrets, True) if isinstance(key, str) else key

    return cast(T, _walk(value, mask, mask_key, with_names=which == "all"))


def _mask(text: str, secrets: Secrets, names: bool) -> str:
    # A manifest that is written repeatedly, and a failing server, repeat the same texts.
    return (_mask_secrets if len(text) > _MAX_CACHED_CHARS else _mask_cached)(text, secrets, names)


def _mask_secrets(text: str, secrets: Secrets, names: bool) -> str:
    """Return `text` without the secrets.

    A secret of fewer characters than a piece is masked as a whole word, and a text that is not surely a secret
    literally and as a whole. `names`: words stay, because the text may be a name: short secrets, and pieces of words.
    """
    needles = _needles(secrets, names)
    if not any(needles):
        return text
    spans = list(_find(text, needles))
    if not text.isalnum() and _ESCAPED.search(text):
        decoded, starts, ends = _decode(text)
        spans += [(starts[start], ends[end - 1]) for start, end in _find(decoded, needles)]
    parts: list[str] = []
    done = 0
    for start, end in sorted(spans):
        if start > done or not parts:  # else it overlaps or follows the previous span
            parts += [text[done:start], HIDDEN]
        done = max(done, end)
    return "".join([*parts, text[done:]])


_mask_cached = lru_cache(512)(_mask_secrets)


def _walk(
    value: Any, mask: Callable[[str], str], mask_key: Callable[[Any], Any], *, with_names: bool, depth: int = 0
) -> Any:
    """Return `value` with its texts masked; `with_names`: also what follows the name or flag of a secret."""
    if isinstance(value, str):
        return mask(value)
    if not isinstance(value, dict | list | tuple):
        return value
    if depth == _MAX_DEPTH:
        return HIDDEN

    def inner(item: Any, name: str) -> Any:
        if with_names and is_secret(name) and item not in (None, "", [], {}) and not str(item).startswith(("--", "${")):
            return HIDDEN
        return _walk(item, mask, mask_key, with_names=with_names, depth=depth + 1)

    if isinstance(value, dict):
        return {mask_key(key): inner(item, str(key)) for key, item in value.items()}
    flags = [item if isinstance(item, str) and item.startswith("-") and "=" not in item else "" for item in value]
    return [inner(item, flag) for item, flag in zip(value, ["", *flags], strict=False)]


class _Needles(NamedTuple):
    """What is searched for in a text. All but `literals` are in lower case."""

    grams: tuple[tuple[int, frozenset[str]], ...]  # by length
    hexes: tuple[tuple[int, frozenset[str]], ...]  # likewise, of hex digits with separators between them
    words: tuple[str, ...]  # not as a part of a longer word
    literals: tuple[str, ...]


@lru_cache(8)
def _needles(secrets: Secrets, names: bool) -> _Needles:
    grams: dict[int, set[str]] = {}
    hexes: dict[int, set[str]] = {}
    words, literals = set[str](), set[str]()

    def add(text: str, size: int, leave: re.Pattern[str] | None = None, into: dict[int, set[str]] = grams) -> None:
        low, pieces = _lower(text), into.setdefault(size, set())
        for start in range(len(text) - size + 1):
            if leave is None or not leave.fullmatch(text[start : start + size]):
                pieces.add(low[start : start + size])

    for secret, sure in secrets:
        # As it is, with the plus of an address for a blank, and decoded.
        plain = (secret, secret.replace(" ", "+"), _decode(secret)[0])
        forms = {form for text in plain for form in (text, *_misread(text)) if form}
        if not sure:
            literals |= set() if names else forms
            continue
        if names and _may_be_name(secret):
            continue
        for form in forms:
            if len(form) < PIECE_CHARS:
                words |= set() if names else {_lower(form)}
                continue
            add(form, PIECE_CHARS, _WORDS if names else None)
            if names:
                add(form, min(len(form), _NAME_PIECE_CHARS))
        for text in _encodings(secret) if len(secret) >= MIN_SECRET_CHARS else ():
            add(text, min(len(text), PIECE_CHARS))
        for raw in _bytes_of(secret) if len(secret) >= MIN_SECRET_CHARS else ():
            # Twice as long as a piece without separators: short lists of numbers are common.
            add(raw.hex(), min(2 * len(raw), 2 * PIECE_CHARS), into=hexes)
    return _Needles(
        _by_length(grams),
        _by_length(hexes),
        tuple(sorted(words)),
        tuple(sorted(literals)),
    )


def _by_length(pieces: Mapping[int, set[str]]) -> tuple[tuple[int, frozenset[str]], ...]:
    return tuple((size, frozenset(texts)) for size, texts in sorted(pieces.items()) if texts)


def _may_be_name(secret: str) -> bool:
    is_word = secret.isalpha() and len(secret) < _NAME_PIECE_CHARS and _WORDS.fullmatch(secret) is not None
    return len(secret) < PIECE_CHARS or is_word or (secret.isdigit() and len(secret) < _DIGITS)


def _is_latin(text: str) -> bool:
    return max(text, default="") <= "\xff"


def _misread(text: str) -> Iterator[str]:
    """Yield a text in UTF-8 that was read as latin-1, and one in latin-1 that was read as UTF-8."""
    yield text.encode(errors="surrogatepass").decode("latin-1")
    if _is_latin(text):
        yield text.encode("latin-1").decode(errors="replace")


def _bytes_of(secret: str) -> set[bytes]:
    return {secret.encode(errors="surrogatepass"), *({secret.encode("latin-1")} if _is_latin(secret) else ())}


def _encodings(secret: str) -> Iterator[str]:
    """Yield a secret in hex, and in base64 at each offset without the characters that depend on other bytes."""
    for raw in _bytes_of(secret):
        yield raw.hex()
        for before in range(3):
            text = b64encode(bytes(before) + raw).decode()[-(-before * 8 // 6) : (before + len(raw)) * 8 // 6]
            yield from {text, text.translate(_URL_SAFE)}


def _find(text: str, needles: _Needles) -> Iterator[tuple[int, int]]:
    """Yield start and end of each needle in `text`."""
    low = _lower(text)
    for size, pieces in needles.grams:
        for start in range(len(low) - size + 1):
            if low[start : start + size] in pieces:
                yield start, start + size
    for run in _HEX_RUN.finditer(low) if needles.hexes else ():
        groups = _HEX_GROUP.finditer(low, run.start(), run.end())
        places = [place for group in groups for place in range(group.start(), group.end())]
        digits = "".join(low[place] for place in places)
        for size, pieces in needles.hexes:
            for start in range(len(digits) - size + 1):
                if digits[start : start + size] in pieces:
                    yield places[start], places[start + size - 1] + 1
    for word in needles.words:
        for start, end in _find_all(low, word):
            if not (low[start - 1 : start].isalnum() or low[end : end + 1].isalnum()):
                yield start, end
    for literal in needles.literals:
        yield from _find_all(text, literal)


def _find_all(text: str, part: str) -> Iterator[tuple[int, int]]:
    start = text.find(part)
    while start >= 0:
        yield start, start + len(part)
        start = text.find(part, start + len(part))


def _decode(text: str) -> tuple[str, list[int], list[int]]:
    """Return `text` with its escapes decoded, or dropped if they are no character; and where each character was."""
    chars: list[str] = []
    starts: list[int] = []
    ends: list[int] = []
    done = 0
    for match in [*_ESCAPED.finditer(text), None]:
        start = len(text) if match is None else match.start()
        chars.append(text[done:start])
        starts += range(done, start)
        ends += range(done + 1, start + 1)
        if match is not None:
            done = match.end()
            if match.lastgroup and (char := _decode_char(match.lastgroup, match[match.lastgroup])):
                chars.append(char)
                starts.append(start)
                ends.append(done)
    return "".join(chars), starts, ends


def _decode_char(form: str, digits: str) -> str:
    if form == "name":
        return _ENTITIES[digits.lower()]
    code = int(digits, 10 if form == "number" else 16)
    char = chr(code) if code <= 0x10FFFF else ""
    return "" if _SKIPPED.match(char) else char


def _lower(text: str) -> str:
    """Return `text` in lower case. It keeps its length, so that places stay."""
    low = text.lower()
    return low if len(low) == len(text) else "".join(char.lower() if len(char.lower()) == 1 else char for char in text)


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
