"""Secrets in the lines of a log: what `harness explain` prints is posted in public."""

import re
from collections.abc import Sequence

HIDDEN = "***"
SHORTEST = 4  # characters of a secret; a shorter one is blacked out nowhere: it would take half a text with it
_QUOTE = r"""(?:\\?['"])?"""
_IS = rf"{_QUOTE}\ ?[:=]\ ?\[?{_QUOTE}"
_NAMED = re.compile(  # a flag, a variable, a key of a dictionary or a header, up to where its value begins
    rf"""(?P<name>
      --[\w-]*(?:key|token|secret|password|passwd)(?:{_QUOTE},\ ?|=|\ )\[?{_QUOTE}
    | \b(?:[A-Z][A-Z0-9]*_)*(?:API_?KEY|ACCESS_KEY|TOKEN|SECRET|PASSWORD|PASSWD){_IS}
    | (?<![\w-])(?:api[_-]key|(?i:x-api-key)|(?:hf|access|auth|secret)_(?:token|key)|password){_IS}
    | (?i:\bauthorization){_IS}(?:(?:Bearer|Basic|Token)\ +)?+
    )(?![-\[{{$*]|None\b|null\b)[^\s'",\]}}\\]+""",
    re.VERBOSE,
)
_LOOKS = re.compile(
    r"(?<![\w/.-])(?:hf_[A-Za-z0-9]{8,}|(?:sk-|gh[pousr]_|github_pat_|glpat-|nvapi-)[\w-]{8,}|AKIA[0-9A-Z]{16})"
    r"|(?<=\bBearer )[\w.~+/=-]{8,}"
    r"|(?<=://)[^\s/:@'\"]+:[^\s/@'\"]+(?=@)"  # a name and its password in an address
)


def without(text: str, secrets: Sequence[str]) -> str:
    """`text` with these blacked out. The longest first: one may be the beginning of another."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= SHORTEST:
            text = text.replace(secret, HIDDEN)
    return text


def hidden(text: str) -> str:
    """`text` with everything blacked out that looks like a secret or stands where one is given."""
    text = _NAMED.sub(lambda found: f"{found['name']}{HIDDEN}", text)
    return _LOOKS.sub(HIDDEN, text)
