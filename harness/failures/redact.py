"""What text from outside must not carry into a log, a page or a terminal: secrets, control characters, formulas."""

import re
from collections.abc import Sequence

HIDDEN = "***"
SHORTEST = 4  # characters of a secret; a shorter one is blacked out nowhere: it would take half a text with it
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
_GIVEN = re.compile(  # a flag, a variable, a key of a dictionary or a header, up to where its value starts
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


def is_secret(name: str) -> bool:
    """Whether the name of an environment variable or argument says that its value must not be shown."""
    return _NAME.search(_upper(name)) is not None


def looks_secret(text: str) -> str | None:
    """The first part of `text` that has the form of a secret."""
    found = _SHAPE.search(text)
    return None if found is None else found[0]


def without(text: str, secrets: Sequence[str]) -> str:
    """`text` with these blacked out. The longest first: one may be the beginning of another."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= SHORTEST:
            text = text.replace(secret, HIDDEN)
    return text


def hidden(text: str) -> str:
    """`text` with everything blacked out that has the form of a secret or follows the name of one."""
    parts, end = [], 0
    for given in _GIVEN.finditer(text):
        value = _VALUE.match(text, given.end()) if given.start() >= end and _is_given(given) else None
        if value is not None:
            parts += [text[end : value.start()], HIDDEN]
            end = value.end()
    return _SHAPE.sub(lambda found: f"{found['kept'] or ''}{HIDDEN}", "".join([*parts, text[end:]]))


def printable(text: str) -> str:
    """`text` without what a terminal would obey: colours, control characters, directions of writing. Lines stay."""
    return _CONTROL.sub("", text)


def csv_field(value: object) -> object:
    """A field of a CSV file: text that a spreadsheet would compute has a quote in front."""
    return f"'{value}" if isinstance(value, str) and value.lstrip().startswith(("=", "+", "-", "@")) else value


def _is_given(given: re.Match[str]) -> bool:
    name = given["flag"] or given["name"]
    if given["flag"] or name.startswith("-") or (name.isupper() and name not in ("KEY", "KEYS")):
        return is_secret(name)
    return _NAME_IN_LOG.search(_upper(name)) is not None


def _upper(name: str) -> str:
    return re.sub(r"[-.]", "_", name).upper()
