"""What the pages share: templates, and the files that they are given, so that a page needs no other."""

from collections.abc import Callable
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template


def template(name: str, **filters: Callable[..., Any]) -> Template:
    """Everything that it is given from outside it escapes, so that it stays text."""
    environment = Environment(
        loader=PackageLoader("harness.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    return environment.get_template(name)


def asset(name: str) -> str:
    """A style, a script or a library as text."""
    return (resources.files("harness.report") / "assets" / name).read_text(encoding="utf-8")
