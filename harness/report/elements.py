"""The elements of a page. A page is a list of them, made once; terminal.py, markdown.py and html.py print it."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from harness.base import units

LIMITED = "‡"  # after a number that the load generator limited in one of the row's cells


class Paragraph(Struct, frozen=True):
    """A heading or a sentence.

    `style`: "title", "heading", "lead" (the answer), "warning", "fine", or a state, whose text is "WORD: sentence":
    "good", "unsure", "bad", "simulated".
    """

    text: str
    style: str = ""


class Bullet(Struct, frozen=True):
    """An item of a list. `style`: the word of a verdict, the status of a check, "fine" or "bad"."""

    text: str
    style: str = ""
    mark: str = ""  # a word before it
    code: str = ""  # what it is about, verbatim; in a part of a finding it may have several lines
    parts: "Sequence[Bullet]" = ()  # of a finding


class Bullets(Struct, frozen=True):
    """A list. `kind`: of verdicts a page shows their words, of findings their parts."""

    items: Sequence[Bullet]
    kind: Literal["verdicts", "checks", "findings", ""] = ""


class Fact(Struct, frozen=True):
    """A text with a word before it. `style`: as of a bullet or a paragraph."""

    label: str
    text: str
    style: str = ""


class Facts(Struct, frozen=True):
    """Texts with a word before each, one below the other."""

    items: Sequence[Fact]


class TableColumn(Struct, frozen=True):
    """One column of a table. `text` makes its text of a line or row; None: the value is not known."""

    key: str
    title: str
    explanation: str = ""
    formula: str = ""
    text: Callable[[Any], str | None] = str
    group: Literal["name", "work", "latency", "verdict", "text", ""] = ""
    field: str = ""  # of Numbers: the text is marked if the load generator limited it
    unit: str = ""  # shown with the title; empty if the values have it, or for numbers without a unit

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title

    @property
    def is_text(self) -> bool:
        """Whether it has words, which are aligned left."""
        return self.group in ("name", "text") or self.key == "verdict"

    def show(self, line: Any) -> str:
        """The text, or a dash if the value is not known; with a mark if the load generator limited it."""
        text = self.text(line) or units.NOTHING
        limited = self.field and self.field in line.row.client_limited
        return f"{text}{LIMITED}" if limited and text != units.NOTHING and not text.startswith("n/a") else text


class Grid(Struct, frozen=True, kw_only=True):
    """A table of texts."""

    id: str = ""  # on a page
    title: str = ""
    columns: Sequence[TableColumn]
    rows: Sequence[Sequence[str]]
    styles: Sequence[str] = ()  # of each row: the word of its verdict, or "best" or "unusable"
    below: Sequence[str] = ()  # on a page: a line below each row
    note: str = ""

    @property
    def is_main(self) -> bool:
        """Whether a page shows it as its main table: with a line below each row, and as cards on a phone."""
        return any(column.group in ("latency", "verdict") for column in self.columns)


class Chart(Struct, frozen=True, kw_only=True):
    """A chart with its texts and its numbers as a table. Only pages have it."""

    id: str
    title: str
    caption: str
    figure: dict[str, Any]  # {"data": [...], "layout": {...}} of plotly
    head: list[str]
    body: list[list[str]]
    formula: str = ""
    findings: list[str] = []  # sentences on what it shows
    empty: str = ""  # why nothing is drawn


class Fold(Struct, frozen=True):
    """Elements that a page shows on demand. `hint`: how to see them in a terminal; empty: nothing is said there."""

    title: str
    elements: "Sequence[Element]"
    hint: str = ""


Element: TypeAlias = Paragraph | Bullets | Facts | Grid | Fold | Chart


def plain_grid(head: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> Grid:
    """A table of texts without explanations. `styles`: of the column "Verdict"."""
    return Grid(columns=[TableColumn(title.lower(), title, group="name") for title in head], rows=rows, styles=styles)


_T = TypeVar("_T")
_VERBATIM = ("id", "style", "code", "columns", "styles", "kind", "formula")


def with_names(value: _T, names: Mapping[str, str]) -> _T:
    """The same elements, or other texts, with the loads of these names called otherwise.

    What a user types keeps the names: `code`, checks (SERVER/LOAD), keys of a scenario (loads.LOAD).
    """
    if not names:
        return value
    known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    pattern = re.compile(rf"(?<![\w.@/-])(?:{known})(?![\w@/-])")

    def renamed(each: Any) -> Any:
        if isinstance(each, str):
            return pattern.sub(lambda found: names[found[0]], each)
        if isinstance(each, list | tuple):
            return each if each and isinstance(each[0], float) else type(each)(map(renamed, each))
        if isinstance(each, dict):
            return {key: renamed(one) for key, one in each.items()}
        if isinstance(each, Struct):
            kept = (field for field in each.__struct_fields__ if field not in _VERBATIM)
            return replace(each, **{field: renamed(getattr(each, field)) for field in kept})
        return each

    changed: _T = renamed(value)
    return changed
