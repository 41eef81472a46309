"""A run's report in Markdown, for a pull request or a CI summary."""

import re
from collections.abc import Collection, Iterable, Sequence

from harness.report import schedules, sentences, words
from harness.report.table import Meaning, columns, lines
from harness.rundir.manifest import Run
from harness.summary import CheckResult, Summary

LEFT = ("server", "load", "verdict")


def render(summary: Summary, run: Run) -> str:
    """The report as GitHub Flavored Markdown. Texts from outside are escaped and stay text."""
    parts = [f"## {escape(summary.question)}"]
    if summary.simulated:
        parts.append(f"> **{words.SIMULATED}**")
    parts.append(table(summary, run))
    if lines_ := schedules.lines(summary, run):
        parts.append(_schedules(lines_))
    if summary.comparison is not None:
        items = [escape(said) for _, said in sentences.of_verdicts(summary.comparison.verdicts)]
        parts.append(_list([*items, escape(sentences.of_method(summary.comparison))]))
    parts.append(f"**{escape(sentences.of_validity(summary, run))}**")
    if summary.reasons or summary.notes:
        found = sentences.gathered(summary.reasons, run) + sentences.gathered(summary.notes, run)
        parts.append(_list([escape(text) for text in found]))
    if summary.failures:
        parts.append("**Why requests failed**")
        parts.append(_list([escape(text) for text in sentences.of_failures(summary)]))
    if summary.checks:
        parts.append(_list([check_item(check) for check in summary.checks]))
    parts.append(_details("Each row in words", _rows_in_words(summary, run)))
    parts.append(_details("What the columns mean", _explanations(columns(summary))))
    parts.append(f"Scenario {code(summary.scenario)}, run {code(summary.run)}. {escape(sentences.of_load(run))}")
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """`text` on one line with every character that Markdown or HTML would act on made plain."""
    text = words.one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", text)


def code(text: str) -> str:
    """`text` in the type of code, unless it holds what would end that."""
    return escape(text) if "`" in text or "\n" in text else f"`{text}`"


def check_item(check: CheckResult) -> str:
    """The result of a check and its evidence; bold unless it passed."""
    mark = words.CHECK_MARKS[check.status]
    mark = mark if check.status == "passed" else f"**{mark}**"
    return f"{mark}: {code(check.check)}: {escape(check.evidence)}"


def table(summary: Summary, run: Run, keys: Collection[str] | None = None) -> str:
    """The main table alone, or some of its columns."""
    shown = [column for column in columns(summary) if keys is None or column.key in keys]
    rule = "|" + "|".join(":---" if column.key in LEFT else "---:" for column in shown) + "|"
    body = [[column.text(line) for column in shown] for line in lines(summary, run)]
    return grid([column.heading for column in shown], body, rule)


def grid(head: Sequence[str], body: Iterable[Sequence[str]], rule: str = "") -> str:
    """A table; `rule`: the line below its head, which says how columns are aligned."""
    first, *others = ("| " + " | ".join(map(escape, row)) + " |" for row in (head, *body))
    return "\n".join([first, rule or "| " + " | ".join("---" for _ in head) + " |", *others])


def _schedules(lines_: list[schedules.ScheduleLine]) -> str:
    """How open loops kept their schedule."""
    head = ["Server", "Load", "Schedule", *(column.title for column in schedules.COLUMNS)]
    body = [[line.server, line.load, line.course, *line.texts] for line in lines_]
    rule = "|" + ":---|" * 3 + "---:|" * len(schedules.COLUMNS)
    return grid(head, body, rule) + "\n\n" + _details("What they mean", _explanations(schedules.COLUMNS))


def _rows_in_words(summary: Summary, run: Run) -> str:
    rows = lines(summary, run)
    return _list([f"**{escape(line.row.name)}**: {escape(sentences.of_row(line, run))}" for line in rows])


def _explanations(columns: Iterable[Meaning]) -> str:
    return _list([f"**{c.heading}**: {escape(c.explanation)} {code(c.formula)}" for c in columns])


def _list(items: list[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"
