"""HTML pages that need no network and no other file: the template, its style and script, and what may not be in it."""

import base64
import gzip
import hashlib
import re
from collections.abc import Sequence
from functools import cache, partial
from importlib import resources
from typing import Any

import msgspec
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from harness.base import units
from harness.report.charts import Figure
from harness.report.elements import Chart, Element

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
    dump = partial(yaml.safe_dump, sort_keys=False, allow_unicode=True, width=100)
    environment.filters |= {
        "kind": lambda element: type(element).__name__,
        "code": render_code,
        "moment": units.date_time, "seconds": units.seconds, "ms": units.milliseconds, "number": units.significant,
        "yaml": lambda value: dump(msgspec.to_builtins(value)),
    }  # fmt: skip
    return environment.get_template(name)


def read_asset(name: str) -> str:
    return (resources.files("harness.report") / "assets" / name).read_text(encoding="utf-8")


def render_page(page: Sequence[Element], title: str, where: Sequence[str]) -> str:
    """Return a page of elements. `where`: its place, in the bar above it."""
    charts = {element.id: element.figure for element in page if isinstance(element, Chart) and not element.empty}
    return render_template("page.html.j2", charts, {}, page=page, title=title, where=where)


def render_template(name: str, drawn: dict[str, Figure], drawn_timelines: dict[str, Figure], **values: Any) -> str:
    style, theme, script, library = map(read_asset, ("report.css", "theme.js", "report.js", LIBRARY))
    data = msgspec.json.encode({"charts": drawn, "timelines": drawn_timelines}).decode()
    has_charts = bool(drawn) or name == "report.html.j2"
    scripts = [theme, script, *([library] if has_charts else [])]
    return page_template(name).render(
        values,
        style=Markup(style),
        theme=Markup(theme),
        script=Markup(script),
        has_charts=has_charts,
        policy=content_security_policy(scripts),
        library=pack_data(library.encode()),
        chart_data=pack_data(neutralize(data).encode()),
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
