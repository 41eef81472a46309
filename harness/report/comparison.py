"""A comparison of runs and the differences between their manifests, for the terminal and for Markdown."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.judge.verdicts import METRIC_WORDS
from harness.report import sentences, words
from harness.report.markdown import check_item, escape, grid
from harness.report.terminal import STYLES, check_line
from harness.report.words import one_line
from harness.summary import Comparison, Difference, Verdict

HEADINGS = ("Side", "Baseline", "Runs", "By", "Speed", "95 % interval", "p", "Verdict")
EQUAL = "Nothing that is recorded differs between them."
_MOST = 300  # characters of a value that people are shown; JSON has all of it


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The table of ratios, the verdicts in words, and how they were reached."""
    if comparison.simulated:
        console.print(Text(words.SIMULATED, "bold yellow"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in HEADINGS:
        table.add_column(heading, overflow="fold")
    for verdict in comparison.verdicts:
        cells = _cells(verdict)
        table.add_row(*map(Text, cells[:-1]), Text(cells[-1], STYLES.get(verdict.word, "")))
    console.print(table)
    console.print()
    for note in comparison.notes:
        console.print(Text(f"Mind: {words.one_line(note)}", "bold yellow"))
    for word, said in sentences.of_verdicts(comparison.verdicts):
        console.print(Text(f"- {said}", STYLES.get(word, "")))
    console.print(Text(f"- {sentences.of_method(comparison)}", "dim"))
    for check in comparison.checks:
        console.print(Text("- ") + check_line(check))
    if comparison.sides:
        console.print()
        print_differences(comparison.differences, comparison.sides, console)


def markdown(comparison: Comparison) -> str:
    """The same for a pull request."""
    rows = [HEADINGS, ("---",) * len(HEADINGS), *map(_cells, comparison.verdicts)]
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
    said = [text for _, text in sentences.of_verdicts(comparison.verdicts)] + [sentences.of_method(comparison)]
    banner = f"> **{words.SIMULATED}**\n\n" if comparison.simulated else ""
    noted = "".join(f"> **Mind:** {escape(words.one_line(note))}\n\n" for note in comparison.notes)
    text = f"{banner}{table}\n\n{noted}" + "\n".join(f"- {sentence}" for sentence in said)
    for check in comparison.checks:
        text += f"\n- {check_item(check)}"
    return f"{text}\n\n{differences_markdown(comparison.differences, comparison.sides)}" if comparison.sides else text


def _cells(verdict: Verdict) -> tuple[str, ...]:
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


def print_differences(found: Sequence[Difference], sides: Sequence[str], console: Console) -> None:
    """A line for each key that differs. What is equal is not shown."""
    if not found:
        console.print(Text(EQUAL, "dim"))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("What differs", *sides):
        table.add_column(Text(one_line(heading)), overflow="fold")
    for difference in found:
        table.add_row(Text(difference.key), *(Text(_short(value)) for value in difference.values))
    console.print(table)


def differences_markdown(found: Sequence[Difference], sides: Sequence[str]) -> str:
    """The same for a pull request."""
    if not found:
        return EQUAL
    return grid(["What differs", *sides], [[one.key, *map(_short, one.values)] for one in found])


def _short(value: str) -> str:
    text = one_line(value)
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."
