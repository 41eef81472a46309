"""HTML pages that need no network and no other file: the template, its style and script, and what may not be in it."""

import base64
import gzip
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from harness.report.elements import Chart, Definitions, Element, Section, Timelines, as_cell_text, walk

# The part of plotly.js that draws lines, dots and bars, as npm has it in plotly.js-basic-dist-min 4.1.1: the whole
# library is four times as long, and a browser spends most of the time until the charts appear on parsing it.
LIBRARY = "plotly-basic.min.js"

# Control characters, which a terminal obeys where the page is printed, and those that set the direction of the text
# after them: with one of them, a page shows a text from outside, and its own text after it, in another order.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def neutralize(value: Any) -> Any:
    """Replace the characters of a text from outside that a browser would act on; return any other value unchanged."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", value)
    return value


def render_code(text: str) -> Markup:
    """The text as HTML; what is between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(neutralize(text)))))


@cache
def page_template(name: str) -> Template:
    """Return a template that escapes every text."""
    environment = Environment(
        loader=PackageLoader("harness.report", "assets"),
        autoescape=True,
        finalize=neutralize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "kind": lambda element: type(element).__name__,
        "code": render_code,
        "cell": as_cell_text,
    }
    return environment.get_template(name)


def read_asset(name: str) -> str:
    return (resources.files("harness.report") / "assets" / name).read_text(encoding="utf-8")


def render_page(page: Sequence[Element], title: str, where: Sequence[str]) -> str:
    """Return a page of elements. `where`: its place, in the bar above it."""
    page = [element for element in page if not isinstance(element, Section) or element.elements]
    parts = list(walk(page))
    charts = {part.id: part.figure for part in parts if isinstance(part, Chart) and not part.empty}
    timelines = next((part.figures for part in parts if isinstance(part, Timelines)), {})
    data = neutralize(msgspec.json.encode({"charts": charts, "timelines": timelines}).decode())
    style, theme, script, library = map(read_asset, ("report.css", "theme.js", "report.js", LIBRARY))
    has_charts = bool(charts or timelines)
    anchors = {anchor for part in parts if isinstance(part, Definitions) for anchor, _ in part.columns}
    return page_template("page.html.j2").render(
        page=page,
        title=title,
        where=where,
        sections=[element for element in page if isinstance(element, Section)],
        style=Markup(style),
        theme=Markup(theme),
        script=Markup(script),
        has_charts=has_charts,
        anchors=anchors,
        policy=content_security_policy([theme, script, *([library] if has_charts else [])]),
        library=pack_data(library.encode()),
        chart_data=pack_data(data.encode()),
    )


def pack_data(data: bytes) -> str:
    """Pack data for the page's script: base64 of gzip, the same for the same data."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def content_security_policy(scripts: list[str]) -> str:
    """A content security policy under which only these scripts run and nothing is fetched."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
