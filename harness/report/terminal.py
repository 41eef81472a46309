"""Prints a page, which is a list of elements, in a terminal."""

import re
import textwrap
from collections.abc import Sequence
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.base.units import join_units
from harness.report import words
from harness.report.elements import Bullet, Bullets, Element, Fact, Facts, Fold, Grid, Paragraph, as_cell_text, lined_up

STYLES = {
    "faster": "green", "slower": "red", "same": "cyan", "no_shift": "cyan",
    "inconclusive": "yellow", "no_slowdown": "cyan", "cannot_tell": "yellow",
    "probably_slower": "yellow", "size_unknown": "yellow",
    "baseline": "dim", "passed": "green", "failed": "bold red", "title": "",
    "heading": "bold", "lead": "bold", "good": "bold green", "unsure": "bold yellow", "bad": "bold red",
    "simulated": "bold yellow", "warning": "bold yellow", "fine": "dim",
}  # fmt: skip


def print_page(page: Sequence[Element], console: Console, *, explain: bool = False) -> None:
    """Print a page. `explain`: with what is folded, and with the meaning of each column."""
    page = [part for part in lined_up(page) if explain or not isinstance(part, Fold) or part.hint]
    for before, element in zip([None, *page], page, strict=False):
        if before is not None and _is_apart(before, element):
            console.print()
        match element:
            case Paragraph():
                text = join_units(words.one_line(element.sentence), _GLUE)
                glued = _CODE.sub(lambda code: code[0].replace(" ", _GLUE), text)
                _print_paragraph(console, Text(glued, STYLES.get(element.style, "")))
            case Bullets(items):
                for item in items:
                    _print_item(console, _bullet(item))
                    for part in item.parts:
                        _print_part(console, part)
            case Facts(items):
                for fact in items:
                    _print_fact(console, fact)
            case Grid():
                _print_grid(element, console, explain=explain)
            case Fold(title, elements, hint):
                if explain:
                    print_page([Paragraph(title, "heading"), *elements], console)
                else:
                    _print_item(console, Text(f"{words.one_line(title)} ({hint})"))


def _is_apart(before: Element, element: Element) -> bool:
    """Whether an empty line is between two elements."""
    if isinstance(element, Paragraph):
        return element.style == "heading" or isinstance(before, Grid | Facts)
    if isinstance(element, Facts):
        return isinstance(before, Grid | Facts)
    heading = isinstance(before, Paragraph) and before.style == "heading"
    return not heading and isinstance(element, Grid) or isinstance(before, Grid)


def _bullet(item: Bullet) -> Text:
    style = STYLES.get(item.style, "")
    mark = Text(f"{item.mark} ", style) if item.mark else Text()
    text = f"{item.code}: {item.text}" if item.code else item.text
    return mark + Text(join_units(words.one_line(text), _GLUE), "" if item.mark else style)


_CODE = re.compile("`[^`]+`")  # may be a command, which is pasted in one line
_GLUE = "\ue000"  # where rich does not break a line, as it does at a no-break space; printed as a space


def _print_paragraph(console: Console, text: Text) -> None:
    """Print a paragraph; its further lines are indented."""
    lines, width = [text], console.width - 2
    if max(map(len, text.plain.split()), default=0) > width:  # rich would break a word that is longer than a line
        parts = textwrap.wrap(text.plain, width, break_long_words=False, break_on_hyphens=False)
        lines = [Text(part, text.style) for part in parts]
    elif text.cell_len > console.width:
        lines = list(text.wrap(console, width))
    for number, line in enumerate(lines):
        line.rstrip()
        console.print(Text("  " * (number > 0)) + _with_spaces(line), soft_wrap=True)


def _with_spaces(line: Text) -> Text:
    line.plain = line.plain.replace(_GLUE, " ")
    return line


_LABEL = 14  # columns of the word before a fact
_READABLE = 110  # columns of its text at most, with the word


def _print_fact(console: Console, fact: Fact) -> None:
    """Print a text with a word before it. An address is not broken: it could be neither clicked nor copied."""
    indent = _LABEL + 4
    width = max(min(console.width, _READABLE) - indent, 20)
    lines = textwrap.wrap(words.one_line(fact.text), width, break_long_words=False, break_on_hyphens=False) or [""]
    label = f"  {words.one_line(fact.label)[:_LABEL]:<{_LABEL}}  "
    text = Text(f"\n{' ' * indent}".join([label + lines[0], *lines[1:]]))
    style = STYLES.get(fact.style, "")
    text.stylize(style or "bold", 0, indent)
    if fact.style in ("bad", "heading", "fine"):
        text.stylize(style)
    console.print(text, soft_wrap=True)


def _print_part(console: Console, part: Bullet) -> None:
    """Print a part of a finding."""
    grid, mark = Table.grid(padding=(0, 1)), Text(f"{words.one_line(part.mark)}:", "bold")
    lines = list(map(words.neutral, part.code.splitlines()))
    if any(len(line) + len(mark) + 3 > console.width for line in lines):  # it is pasted
        console.print(Text("  ") + mark)
        if part.is_command:
            lines = [f"    {row}" for row in fold_command(part.code, console.width - 4)]
        for line in lines:  # of a setting in a file, the spaces count
            console.print(Text(line), soft_wrap=True)
        return
    grid.add_row(Text(" "), mark, Text("\n".join(lines) or join_units(words.one_line(part.text), _GLUE)))
    print_trimmed(console, grid)


_ONE_WORD = r"(?:\$'(?:[^'\\]|\\.)*'|[^\s'\"\\]|\\.|'[^']*'|\"(?:[^\"\\]|\\.)*\")+"
_WORD = re.compile(rf"--?[a-z][\w-]*\s+(?![-&|]){_ONE_WORD}|{_ONE_WORD}")  # an option has its value with it


def fold_command(command: str, width: int) -> list[str]:
    """Break a long shell command between its words, so that it is pasted as one."""
    if len(command) <= width or _WORD.sub("", command).strip():  # with an open quote: it stays whole
        return [command]
    rows = [""]
    for word in _WORD.findall(command):
        if rows[-1].strip() and len(rows[-1]) + len(word) + 3 > width:  # " \\" ends the row
            rows[-1] += " \\"
            rows.append("  ")
        rows[-1] += f" {word}" if rows[-1].strip() else word
    return rows


def _print_grid(grid: Grid, console: Console, *, explain: bool) -> None:
    """Print one table where it fits, else several one below the other, or a list for each row where that is shorter."""
    if grid.title:
        console.print(Text(words.one_line(grid.title), "bold"))
    parts, fits = _fitting_parts(grid, console.width)
    lines = len(parts) * (len(grid.rows) + 3)
    if len(parts) == 1 or (fits and len(grid.rows) > 1 and lines <= len(grid.rows) * len(grid.columns)):
        tables: list[RenderableType] = [_rich_table(grid, part, console.width) for part in parts]
    else:
        tables = [_row_list(grid, number) for number in range(len(grid.rows))]
    for number, table in enumerate(tables):
        if number:
            console.print()
        print_trimmed(console, table)
    if explain and grid.note:
        _print_item(console, Text(grid.note))
    for column in grid.columns if explain else ():
        if column.explanation:
            _print_item(console, Text(f"{column.heading}: ", "bold") + Text(f"{column.explanation} [{column.formula}]"))


def _fitting_parts(grid: Grid, width: int) -> tuple[list[list[int]], bool]:
    """The columns of each table that fits, the work before the latencies; and whether all fit."""

    def fits(part: list[int]) -> bool:
        return Console(width=1000).measure(_rich_table(grid, part)).maximum <= width

    places = list(range(len(grid.columns)))
    names = [place for place in places if grid.columns[place].group == "name"]
    if names == places or fits(places):
        return [places], True
    parts: list[list[int]] = []
    for is_latency in (False, True):
        part = list(names)
        for place in places:
            if place in names or (grid.columns[place].group == "latency") != is_latency:
                continue
            if part != names and not fits([*part, place]):
                parts, part = [*parts, part], list(names)
            part.append(place)
        parts += [part] if part != names else []
    return parts, all(map(fits, parts))


_SHORT = 16  # columns of texts that stay whole, such as a date with its time


def _folded_widths(grid: Grid, places: Sequence[int], width: int) -> dict[int, int]:
    """The widths of columns with long texts that break no word; empty where all texts fit, or where no widths do."""
    texts = {place: [grid.columns[place].title, *(row[place] for row in grid.rows)] for place in places}
    wanted = {place: max(map(len, texts[place])) for place in places}
    widths = {place: max(len(word) for text in texts[place] for word in text.split() or [""]) for place in places}
    widths |= {place: width for place, width in wanted.items() if width <= _SHORT}
    left = width - 2 * (len(places) - 1) - sum(widths.values())
    if left < 0 or sum(wanted.values()) - sum(widths.values()) <= left:
        return {}
    by_need = sorted(places, key=lambda place: wanted[place] - widths[place])
    for number, place in enumerate(by_need):
        more = min(wanted[place] - widths[place], left // (len(by_need) - number))
        widths[place], left = widths[place] + more, left - more
    return widths


def _rich_table(grid: Grid, places: Sequence[int], width: int = 1000) -> Table:
    """A table of some columns, without rules."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    are_names = all(grid.columns[place].group == "name" for place in places)
    widths = _folded_widths(grid, places, width) if are_names else {}
    for place in places:
        column = grid.columns[place]
        justify: Literal["left", "right"] = "left" if column.is_text else "right"
        title, _, rest = words.one_line(column.title).partition(" " if grid.is_main else "\n")
        heading = Text(f"{title}\n{rest} {column.unit}".rstrip())
        folds = column.group == "name"  # where the width does not suffice for long ones
        table.add_column(
            heading, justify=justify, no_wrap=not folds, overflow="fold", vertical="top", width=widths.get(place)
        )
    for number in range(len(grid.rows)):
        table.add_row(*(_cell(grid, number, place) for place in places))
    return table


def _row_list(grid: Grid, number: int) -> Group:
    """The names of a row, and a line for each of its other values."""
    lines = Table.grid(padding=(0, 2, 0, 0))
    lines.add_column()
    lines.add_column(overflow="fold")
    names = [grid.rows[number][place] for place, column in enumerate(grid.columns) if column.group == "name"]
    for place, column in enumerate(grid.columns):
        if column.group != "name":
            lines.add_row(column.heading, _cell(grid, number, place))
    return Group(Text(words.one_line(" / ".join(names)), "bold"), lines)


def _cell(grid: Grid, number: int, place: int) -> Text:
    cell = grid.rows[number][place]
    text = words.one_line(cell)
    if grid.columns[place].key == "verdict":
        return Text(text, STYLES.get(grid.styles[number], ""))
    return Text(text, "bold red" if as_cell_text(cell).kind == "bad" else "")


def _print_item(console: Console, text: Text) -> None:
    """Print an item of a list; its further lines are indented."""
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Text("-"), text)
    print_trimmed(console, grid)


def print_trimmed(console: Console, table: RenderableType) -> None:
    """Print a table without trailing spaces, which would be in the way in a log or a paste."""
    for segments in console.render_lines(table, pad=False):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
        line.rstrip()
        console.print(_with_spaces(line), soft_wrap=True)
