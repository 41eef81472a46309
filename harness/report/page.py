"""What the pages share: templates, and the files that they are given, so that a page needs no other."""

import re
from collections.abc import Callable
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

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
