"""Whether the text of an answer is nonsense, which a broken build sends at full speed. No record has the text."""

import re
from collections.abc import Sequence

from harness.load.channels import is_blank
from harness.load.sse import CLASSIFIED_CHARS
from harness.records.records import OddText

# Tokens of vocabularies that no text has: <unused49>, <pad>, <|reserved_special_token_5|>, [UNUSED_TOKEN_145],
# <SPECIAL_20>, [control_8], <|endoftext|>, the fullwidth ones of DeepSeek.
_RESERVED = re.compile(
    r"[<\[](?:unused|pad|unk|mask|bos|eos|cls|sep|s|/s|extra_id|reserved|special|control|ctrl|dummy|blank|fim)"
    r"(?:[_-]?token)?[_-]?[0-9]{0,6}[>\]]|<[|\uff5c][^<>|\uff5c\s]{1,60}[|\uff5c]>",
    re.IGNORECASE,
)
_MAX_UNIT = 40  # characters of a token that repeats, with the space before it
MIN_TIMES = 12  # it repeats: "100000000" is a number
_MAX_START = 0.1  # of the text, before the repetition starts


def classify_text(texts: Sequence[str], reasoning: Sequence[str] = ()) -> OddText | None:
    """Return what is odd about the text of an answer, by its start; by that of its reasoning if it has no other text.

    None for any other text.
    """
    visible, hidden = _start(texts), _start(reasoning)
    text = (hidden if is_blank(visible) else visible).strip()
    if is_blank(text):
        return "blank"
    if text[0] in "<[" and not _RESERVED.sub("", text).strip():
        return "reserved"
    return "repeated" if _repeats(text) else None


def _start(texts: Sequence[str]) -> str:
    return "".join(texts[:CLASSIFIED_CHARS])[:CLASSIFIED_CHARS]


def _repeats(text: str) -> bool:
    """Whether the text is one sign or word, again and again, except for its start."""
    tail = text[int(_MAX_START * len(text)) :]
    for length in range(1, min(_MAX_UNIT, len(tail) // MIN_TIMES) + 1):
        if tail.startswith(tail[length : length + _MAX_UNIT]) and tail[length:] == tail[:-length]:
            words = (3 * tail[:length]).split()[1:-1]  # the first and the last one may be parts of a word
            return len(set(words)) <= 1  # several are a phrase: small models repeat phrases
    return False
