"""Pages as GitHub Flavored Markdown, for a pull request or a CI summary. Texts are escaped and stay text."""

import html
import re
from collections.abc import Sequence

from harness.report import words
from harness.report.elements import Bullet, Bullets, Element, Facts, Fold, Grid, Paragraph, TableColumn, lined_up

_WORD_JOINER = "\u2060"  # not shown, and no place to break a line
_FORMS = {
    "title": "## {}", "heading": "### {}", "lead": "**{}**", "good": "**{}**", "unsure": "**{}**", "bad": "**{}**",
    "simulated": "> **{}**", "warning": "> **{}**",
}  # fmt: skip


def render(page: Sequence[Element]) -> str:
    """The page. It has no charts."""
    return "\n\n".join(map(_render_element, lined_up(page))) + "\n"


def _render_element(element: Element) -> str:
    match element:
        case Paragraph():
            return _FORMS.get(element.style, "{}").format(_render_text(element.sentence))
        case Bullets(items):
            return "\n".join(map(_render_bullet, items))
        case Facts(items):
            return "\n".join(f"- **{escape(item.label)}** {_render_text(item.text)}" for item in items)
        case Grid():
            title = [f"**{escape(element.title)}**"] if element.title else []
            return "\n\n".join([*title, _render_grid(element)])
        case Fold(title, elements):
            return f"<details><summary>{html.escape(words.one_line(title))}</summary>\n\n{render(elements)}\n</details>"
    raise AssertionError(element)


def _render_bullet(item: Bullet) -> str:
    is_bold = item.style in ("failed", "inconclusive") and item.mark
    mark = f"**{item.mark}**" if is_bold else escape(item.mark)
    if "\n" in item.code:  # in a part of a finding
        lines = list(map(words.neutral, item.code.splitlines()))
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", item.code)), default=0))
        return "\n    ".join([f"- {mark}:", fence, *lines, fence])
    code = item.code and inline_code(item.code)
    shown = "- " + ": ".join(filter(None, [mark, code, _render_text(item.text)]))
    return "\n".join([shown, *(f"  {_render_bullet(part)}" for part in item.parts)])


def _render_grid(grid: Grid) -> str:
    columns = [*grid.columns, *([TableColumn("below", "", group="text")] if any(grid.below) else [])]
    rows = zip(grid.rows, grid.below or [""] * len(grid.rows), strict=True)
    lines = [[column.heading for column in columns], *([*row, below][: len(columns)] for row, below in rows)]
    first, *others = ("| " + " | ".join(map(escape, line)) + " |" for line in lines)
    aligned = "|" + "|".join(":---" if column.is_text else "---:" for column in columns) + "|"
    return "\n".join([first, aligned, *others])


def _render_text(text: str) -> str:
    """The text, escaped; what is between backticks as code."""
    parts = re.split(r"`([^`]+)`", words.one_line(text))
    return "".join(f"`{part}`" if number % 2 else _escape(part) for number, part in enumerate(parts))


def escape(text: str) -> str:
    """The text on one line, with every character escaped that Markdown or HTML would act on."""
    return _escape(words.one_line(text))


def _escape(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"(?<!\w)@(?=\w)", f"@{_WORD_JOINER}", text)  # GitHub would notify the user of that name
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", text)


def inline_code(text: str) -> str:
    return escape(text) if "`" in text or "\n" in text else f"`{words.neutral(text)}`"
