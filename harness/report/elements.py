"""The elements of a page. A page is a list of them, made once; terminal.py, markdown.py and html.py print it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from harness.base import units

LIMITED = "‡"  # after a number that the load generator limited in one of the row's cells


class Paragraph(Struct, frozen=True):
    """A heading or a sentence.

    `style`: "title", "heading", "part" (a smaller heading), "lead" (the answer), "warning", "fine", or a state: "good",
    "unsure", "bad", "simulated". `word`: of a state, such as VALID; text has it before the sentence.
    """

    text: str
    style: str = ""
    word: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.word}: {self.text}" if self.word else self.text


class Bullet(Struct, frozen=True):
    """An item of a list. `style`: the word of a verdict, the status of a check, "fine" or "bad"."""

    text: str
    style: str = ""
    mark: str = ""  # a word before it
    code: str = ""  # what it is about, verbatim; in a part of a finding it may have several lines
    is_command: bool = False  # `code` is pasted into a shell: it may be broken between its words
    parts: "Sequence[Bullet]" = ()  # of a finding


def pasted_parts(commands: Mapping[str, str], texts: Mapping[str, str] | None = None) -> list[Bullet]:
    """Parts of a finding: by place the commands for a shell, and the texts of files."""
    pasted = [Bullet("", mark=place, code=command, is_command=True) for place, command in commands.items()]
    return [*pasted, *(Bullet("", mark=place, code=text) for place, text in (texts or {}).items())]


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


class CellText(str):
    """The text of a cell of which a printer knows more than the letters.

    `more`: what a page shows small; text has it in parentheses. `kind`: "missing" of a number that is not known, "bad"
    of failures.
    """

    value: str
    more: str
    kind: Literal["missing", "bad", ""]

    def __new__(cls, value: str, more: str = "", kind: Literal["missing", "bad", ""] = "") -> "CellText":
        cell = super().__new__(cls, f"{value} ({more})" if more else value)
        cell.value, cell.more, cell.kind = value, more, kind
        return cell


def as_cell_text(text: str) -> CellText:
    return text if isinstance(text, CellText) else CellText(text)


def missing(why: str = "") -> CellText:
    """The text of a number that is not known."""
    return CellText("n/a", why, "missing")


def is_known(text: str | None) -> bool:
    """Whether the text of a cell is a value."""
    return text not in (None, units.NOTHING) and as_cell_text(text or "").kind != "missing"


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
        if not (self.field and self.field in line.row.client_limited and is_known(text)):
            return text
        cell = as_cell_text(text)
        return CellText(f"{cell.value}{LIMITED}", cell.more, cell.kind)


MAX_WORD = 60  # characters that a page does not break


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

    @property
    def has_long_words(self) -> bool:
        """Whether a word is so long that a page must break it, such as an image with its registry and digest."""
        return any(len(word) > MAX_WORD for row in self.rows for text in row for word in text.split())


class Fold(Struct, frozen=True):
    """Elements that a page shows on demand. `hint`: how to see them in a terminal; empty: nothing is said there."""

    title: str
    elements: "Sequence[Element]"
    hint: str = ""
    is_printed: bool = True  # on paper


class Section(Struct, frozen=True):
    """A part of a page: a list of elements with a title, to which an HTML page has a link.

    `is_titled`: the terminal and Markdown show the title as well. The first section is the answer, and has no title.
    """

    id: str
    title: str
    elements: "Sequence[Element]"
    is_titled: bool = False


class Sides(Struct, frozen=True):
    """Two lists of elements, next to each other where the page is wide enough."""

    left: "Sequence[Element]"
    right: "Sequence[Element]"


# What only HTML pages have.


class Chart(Struct, frozen=True, kw_only=True):
    """A chart with its texts and its numbers as a table."""

    id: str
    title: str
    caption: str
    figure: dict[str, Any]  # {"data": [...], "layout": {...}} of plotly
    head: list[str]
    body: list[list[str]]
    formula: str = ""
    findings: list[str] = []  # sentences on what it shows
    empty: str = ""  # why nothing is drawn


class Key(Struct, frozen=True, kw_only=True):
    """An entry of a legend that several charts share."""

    name: str
    colour: str  # CSS variable
    stroke: str = ""  # SVG dash pattern
    shown: bool = True


class Charts(Struct, frozen=True, kw_only=True):
    """Charts next to each other, with the legend that they share. `shape`: how many fit into the width of a page."""

    title: str = ""
    text: str = ""
    charts: Sequence[Chart]
    keys: Sequence[Key] = ()
    shape: Literal["pair", "triple", "wide"] = "pair"


class TimelineEvent(Struct, frozen=True, order=True):
    """A mark on a timeline."""

    at_s: float  # since the first measured request
    text: str
    bad: bool = False
    label: str = ""  # next to the mark, if there is room


class Timelines(Struct, frozen=True, kw_only=True):
    """The chart over time of one cell, which the reader chooses; `first` is shown at first."""

    figures: dict[str, dict[str, Any]]  # by cell
    events: dict[str, list[TimelineEvent]]
    first: str


class Tile(Struct, frozen=True):
    """A number that a reader looks for first, with its name and the row that has it."""

    label: str
    value: str
    where: str


class Tiles(Struct, frozen=True):
    items: Sequence[Tile]


class Definitions(Struct, frozen=True):
    """What columns mean, with their formulas, each with its anchor."""

    columns: "Sequence[tuple[str, TableColumn]]"


class Verbatim(Struct, frozen=True):
    """Lines as a file or a program has them."""

    code: str


PAGE_ONLY = (Chart, Charts, Timelines, Tiles, Definitions, Verbatim)
Element: TypeAlias = (
    Paragraph | Bullets | Facts | Grid | Fold | Section | Sides
    | Chart | Charts | Timelines | Tiles | Definitions | Verbatim
)  # fmt: skip


def lined_up(page: "Sequence[Element]") -> "list[Element]":
    """The elements of a page one after the other, as text has them: without sections, and what only HTML pages have."""
    lined: list[Element] = []
    for element in page:
        if isinstance(element, Section):
            title = [Paragraph(element.title, "heading")] if element.is_titled and element.elements else []
            lined += [*title, *lined_up(element.elements)]
        elif isinstance(element, Sides):
            lined += [*lined_up(element.left), *lined_up(element.right)]
        elif not isinstance(element, PAGE_ONLY):
            lined.append(element)
    return lined


def walk(page: "Sequence[Element]") -> "Iterator[Element]":
    """Each element of a page, also those within others."""
    for element in page:
        yield element
        if isinstance(element, Section | Fold):
            yield from walk(element.elements)
        elif isinstance(element, Sides):
            yield from walk([*element.left, *element.right])
        elif isinstance(element, Charts):
            yield from element.charts


def plain_grid(head: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> Grid:
    """A table of texts without explanations. `styles`: of the column "Verdict"."""
    return Grid(columns=[TableColumn(title.lower(), title, group="name") for title in head], rows=rows, styles=styles)
