"""A run's report in Markdown, for a pull request or a CI summary."""

import re
from collections.abc import Collection, Iterable, Sequence

from harness.base import units
from harness.base.columns import METRIC_WORDS
from harness.base.reasons import evidence, sentence
from harness.base.summary import CheckResult, Comparison, Difference, Summary, Verdict
from harness.records.manifest import Run
from harness.report import sentences, words
from harness.report.table import schedule_table, table_columns, table_lines, time_table
from harness.report.verdict_text import verdict_word


def render(summary: Summary, run: Run) -> str:
    """The report as GitHub Flavored Markdown. Texts from outside are escaped and stay text."""
    parts = [f"## {escape(summary.question)}", f"**{escape(sentences.run_answer(summary, run))}**"]
    if summary.simulated:
        parts.append(f"> **{words.SIMULATED}**")
    parts += _finding_parts(summary)
    parts.append(table(summary, run))
    details = [details for details in (schedule_table(summary, run), time_table(summary)) if details.rows]
    for detail in details:
        head = ["Row", *(column.title for column in detail.columns)]
        body = [[name, *texts] for name, texts in detail.rows.items()]
        parts += [f"**{detail.title}**", grid(head, body, [True, *(column.is_text for column in detail.columns)])]
    if summary.comparison is not None:
        parts += _verdict_parts(summary.comparison)
    parts.append(f"**{escape(sentences.validity_sentence(summary, run))}**")
    if summary.reasons or summary.notes:
        texts = sentences.group_reasons(summary.reasons) + sentences.group_reasons(summary.notes)
        parts.append(_bullets(map(escape, texts)))
    if summary.failures:
        parts += ["**Why requests failed**", _bullets(map(escape, sentences.failure_sentences(summary)))]
    if summary.checks:
        parts.append(_bullets(map(check_item, summary.checks)))
    if loads := sentences.load_descriptions(run):
        items = [f"{inline_code(name)}: {inline_code(text)}" for name, text in loads.items()]
        parts.append(_folded("Each load", _bullets(items)))
    design = escape(sentences.design_sentence(run))
    parts.append(f"Scenario {inline_code(summary.scenario)}, run {inline_code(summary.run)}. {design}")
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """The text on one line, with every character escaped that Markdown or HTML would act on."""
    text = words.one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", text)


def inline_code(text: str) -> str:
    return escape(text) if "`" in text or "\n" in text else f"`{text}`"


def check_item(check: CheckResult) -> str:
    """The result of a check and its evidence; bold unless it passed."""
    mark = words.CHECK_MARKS[check.status]
    mark = mark if check.status == "passed" else f"**{mark}**"
    return f"{mark}: {inline_code(check.check)}: {escape(evidence(check.evidence))}"


def table(summary: Summary, run: Run, keys: Collection[str] | None = None) -> str:
    shown = [column for column in table_columns(summary) if keys is None or column.key in keys]
    body = [[column.show(line) for column in shown] for line in table_lines(summary, run)]
    return grid([column.heading for column in shown], body, [column.is_text for column in shown])


def grid(head: Sequence[str], body: Iterable[Sequence[str]], left: Sequence[bool] = ()) -> str:
    """A table. `left`: for each column whether it is aligned left, else right; empty: no alignment."""
    first, *others = ("| " + " | ".join(map(escape, row)) + " |" for row in (head, *body))
    aligned = "|" + "|".join(":---" if is_left else "---:" for is_left in left) + "|"
    return "\n".join([first, aligned if left else "| " + " | ".join("---" for _ in head) + " |", *others])


def _verdict_parts(comparison: Comparison) -> list[str]:
    """At most SHOWN verdicts and how they were reached; the others folded."""
    verdicts = sentences.verdict_sentences(comparison.verdicts)
    shown, hidden = verdicts[: sentences.SHOWN], verdicts[sentences.SHOWN :]
    parts = [_bullets(map(escape, [*(text for _, text in shown), sentences.method_sentence(comparison)]))]
    if hidden:
        title = sentences.hidden_verdicts_text(word for word, _ in hidden)
        parts.append(_folded(title, _bullets(escape(text) for _, text in hidden)))
    return parts


def _finding_parts(summary: Summary) -> list[str]:
    """Why the run is slower than it could be, and what to change."""
    if summary.findings is None:
        return []
    parts = [f"**{sentences.findings_title(summary.findings)}**"]
    for finding in summary.findings:
        parts.append(f"- {escape(sentences.finding_sentence(finding))}")
        for name, text in sentences.finding_parts(finding):
            shown = [f"`{line}`" if "`" not in line else escape(line) for line in text.splitlines()]
            is_code = name == "Verify" or any(name in action.settings for action in finding.actions)
            parts[-1] += f"\n  - {escape(name)}: {'<br>'.join(shown) if is_code else escape(text)}"
    return parts


def _bullets(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


HEADINGS = ("Side", "Baseline", "Samples", "By", "Speed", "95 % interval", "p", "Verdict")
EQUAL = "Nothing that is recorded differs between them."
_MAX_VALUE_CHARS = 300  # that are shown of a value; JSON has all of it


def render_comparison(comparison: Comparison) -> str:
    parts = [f"> **{words.SIMULATED}**"] if comparison.simulated else []
    parts.append(f"**{escape(sentences.comparison_answer(comparison))}**")
    parts.append(grid(HEADINGS, map(verdict_cells, comparison.verdicts)))
    parts += [f"> **Warning:** {escape(sentence(note))}" for note in comparison.notes]
    parts += _verdict_parts(comparison)
    parts += [_bullets(map(check_item, comparison.checks))] if comparison.checks else []
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
        "n/a" if verdict.ratio is None else f"{units.factor(verdict.ratio, 3)}×",
        f"{units.factor(verdict.low or 0.0, 3)} to {units.factor(verdict.high or 0.0, 3)}" if known else "n/a",
        "n/a" if verdict.p is None else "< 0.001" if verdict.p < 0.001 else f"{verdict.p:.3f}",
        verdict_word(verdict),
    )


def difference_cells(difference: Difference) -> list[str]:
    """The key of a difference and the value of each side, on one line and shortened."""
    values = map(words.one_line, difference.values)
    return [difference.key, *(v if len(v) <= _MAX_VALUE_CHARS else f"{v[: _MAX_VALUE_CHARS - 3]}..." for v in values)]


def differences_markdown(differences: Sequence[Difference], sides: Sequence[str]) -> str:
    return grid(["What differs", *sides], map(difference_cells, differences)) if differences else EQUAL
