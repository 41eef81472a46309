"""A run's report in Markdown, for a pull request or a CI summary."""

import re
from collections.abc import Collection, Iterable, Sequence

from harness.columns import METRIC_WORDS
from harness.reasons import evidence, sentence
from harness.report import sentences, words
from harness.report.table import columns, lines, schedule_table, time_table
from harness.rundir.manifest import Run
from harness.summary import CheckResult, Comparison, Difference, Summary, Verdict


def render(summary: Summary, run: Run) -> str:
    """The report as GitHub Flavored Markdown. Texts from outside are escaped and stay text."""
    parts = [f"## {escape(summary.question)}", f"**{escape(sentences.answer_of(summary, run))}**"]
    if summary.simulated:
        parts.append(f"> **{words.SIMULATED}**")
    parts.append(table(summary, run))
    details = [found for found in (schedule_table(summary, run), time_table(summary)) if found.rows]
    for found in details:
        head = ["Row", *(column.title for column in found.columns)]
        rule = "|:---|" + "".join(":---|" if column.left else "---:|" for column in found.columns)
        parts += [f"**{found.title}**", grid(head, [[line.name, *line.texts] for line in found.rows], rule)]
    if summary.comparison is not None:
        parts += _verdicts(summary.comparison)
    parts.append(f"**{escape(sentences.of_validity(summary, run))}**")
    if summary.reasons or summary.notes:
        said = sentences.gathered(summary.reasons) + sentences.gathered(summary.notes)
        parts.append(_list([escape(text) for text in said]))
    if summary.failures:
        parts.append("**Why requests failed**")
        parts.append(_list([escape(text) for text in sentences.of_failures(summary)]))
    if summary.checks:
        parts.append(_list([check_item(check) for check in summary.checks]))
    if loads := sentences.of_loads(run):
        parts.append(_details("Each load", _list([f"{code(name)}: {code(said)}" for name, said in loads.items()])))
    meant = [*columns(summary), *(column for found in details for column in found.columns if column.explanation)]
    explained = [f"**{one.heading}**: {escape(one.explanation)} {code(one.formula)}" for one in meant]
    parts.append(_details("What the columns mean", _list(explained)))
    parts.append(f"Scenario {code(summary.scenario)}, run {code(summary.run)}. {escape(sentences.of_load(run))}")
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """`text` on one line with every character that Markdown or HTML would act on made plain."""
    text = words.one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", text)


def code(text: str) -> str:
    return escape(text) if "`" in text or "\n" in text else f"`{text}`"


def check_item(check: CheckResult) -> str:
    """The result of a check and its evidence; bold unless it passed."""
    mark = words.CHECK_MARKS[check.status]
    mark = mark if check.status == "passed" else f"**{mark}**"
    return f"{mark}: {code(check.check)}: {escape(evidence(check.evidence))}"


def table(summary: Summary, run: Run, keys: Collection[str] | None = None) -> str:
    shown = [column for column in columns(summary) if keys is None or column.key in keys]
    rule = "|" + "|".join(":---" if column.left else "---:" for column in shown) + "|"
    body = [[column.of(line) for column in shown] for line in lines(summary, run)]
    return grid([column.heading for column in shown], body, rule)


def grid(head: Sequence[str], body: Iterable[Sequence[str]], rule: str = "") -> str:
    """A table; `rule`: the line below its head, which says how columns are aligned."""
    first, *others = ("| " + " | ".join(map(escape, row)) + " |" for row in (head, *body))
    return "\n".join([first, rule or "| " + " | ".join("---" for _ in head) + " |", *others])


def _verdicts(comparison: Comparison) -> list[str]:
    """At most SHOWN verdicts and how they were reached; the others folded."""
    found = sentences.of_verdicts(comparison.verdicts)
    items, rest = ([escape(said) for _, said in part] for part in (found[: sentences.SHOWN], found[sentences.SHOWN :]))
    title = sentences.rest_in_words(word for word, _ in found[sentences.SHOWN :])
    shown = _list([*items, escape(sentences.of_method(comparison))])
    return [shown, _details(title, _list(rest))] if rest else [shown]


def _list(items: list[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


HEADINGS = ("Side", "Baseline", "Runs", "By", "Speed", "95 % interval", "p", "Verdict")
EQUAL = "Nothing that is recorded differs between them."
_MAX_VALUE = 300  # characters of a value that is shown; JSON has all of it


def of_comparison(comparison: Comparison) -> str:
    parts = [f"> **{words.SIMULATED}**"] if comparison.simulated else []
    parts.append(f"**{escape(sentences.answer_of_comparison(comparison))}**")
    parts.append(grid(HEADINGS, map(verdict_cells, comparison.verdicts)))
    parts += [f"> **Warning:** {escape(sentence(note))}" for note in comparison.notes]
    parts += _verdicts(comparison)
    parts += [_list(list(map(check_item, comparison.checks)))] if comparison.checks else []
    if comparison.sides:
        parts.append(differences_markdown(comparison.differences, comparison.sides))
    return "\n\n".join(parts)


def verdict_cells(verdict: Verdict) -> tuple[str, ...]:
    known = verdict.low is not None and verdict.high is not None
    return (
        verdict.side,
        verdict.baseline,
        f"{verdict.n[0]} : {verdict.n[1]}",
        METRIC_WORDS[verdict.metric],
        "n/a" if verdict.ratio is None else f"{verdict.ratio:.3f}×",
        f"{verdict.low:.3f} to {verdict.high:.3f}" if known else "n/a",
        "n/a" if verdict.p is None else f"{verdict.p:.3f}",
        verdict.word,
    )


def difference_cells(difference: Difference) -> list[str]:
    """The key of a difference and the value of each side, on one line and shortened."""
    values = map(words.one_line, difference.values)
    return [difference.key, *(v if len(v) <= _MAX_VALUE else f"{v[: _MAX_VALUE - 3]}..." for v in values)]


def differences_markdown(found: Sequence[Difference], sides: Sequence[str]) -> str:
    return grid(["What differs", *sides], map(difference_cells, found)) if found else EQUAL
