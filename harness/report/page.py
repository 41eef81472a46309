"""What the pages share: templates, and the files that they are given, so that a page needs no other."""

import base64
import gzip
import hashlib
import re
from collections.abc import Callable
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

# The part of plotly.js that draws lines, dots and bars, as npm has it in plotly.js-basic-dist-min 4.1.1: the whole
# library is four times as long, and a browser spends most of the time until the charts are there on reading it.
LIBRARY = "plotly-basic.min.js"

# Characters that say in which direction the text after them runs: with one of them a page shows a text from outside,
# and its own after it, in another order than it has.
_DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def neutral(value: Any) -> Any:
    """A text without characters that a browser would act on; of what is no text from outside, the value itself."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return _DIRECTIONS.sub("\N{REPLACEMENT CHARACTER}", value)
    return value


def template(name: str, **filters: Callable[..., Any]) -> Template:
    """Everything that it is given from outside it escapes, so that it stays text."""
    environment = Environment(
        loader=PackageLoader("harness.report", "assets"),
        autoescape=True,
        finalize=neutral,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    return environment.get_template(name)


def asset(name: str) -> str:
    """A style, a script or a library as text."""
    return (resources.files("harness.report") / "assets" / name).read_text(encoding="utf-8")


def packed(data: bytes) -> str:
    """Data for the page to unpack by itself: base64 of gzip, the same for the same data."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def policy(scripts: list[str]) -> str:
    """A content security policy under which only these scripts run and nothing is fetched."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
