"""The main table: one definition of its columns, used by every report."""

from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from harness import units
from harness.columns import LATENCIES, METRIC_WORDS, VALUES, WORK, LatencyColumn, ValueColumn
from harness.reasons import OTHERWISE
from harness.report import words
from harness.rundir.manifest import Run
from harness.scenario.plan import baseline_of
from harness.summary import Numbers, Row, Summary, Verdict, median_of_known

LIMITED = "‡"  # after a number that the load generator limited in one of the row's cells


class TableLine(Struct, frozen=True, kw_only=True):
    """A row of the summary with what the comparison says about it."""

    row: Row
    tokens: float | None  # completion tokens of a run, median over its runs
    verdicts: list[Verdict] = []  # its own: against the baseline, or of a part of a mix against the same load alone
    baseline: bool
    against: str = ""  # the verdict's other load, where that is not the run's baseline
    rate_mark: str = ""  # where the rate means something else than that of the first row

    @property
    def verdict(self) -> Verdict | None:
        """The first of its verdicts: that by work, or by TTFT."""
        return self.verdicts[0] if self.verdicts else None

    @property
    def word(self) -> str:
        """The word of all its verdicts; of several words the first that is a reason to look closer."""
        found = [verdict.word for verdict in self.verdicts]
        return next((word for word in ("slower", "inconclusive", "faster", "same") if word in found), "")

    @property
    def words(self) -> str:
        """The words of all its verdicts; those of one latency, and all of them, as one where they are the same."""
        if len({verdict.word for verdict in self.verdicts}) < 2:
            return self.word
        latencies: dict[str, list[Verdict]] = {}
        for verdict in self.verdicts:
            latencies.setdefault(METRIC_WORDS[verdict.metric].split()[0], []).append(verdict)
        parts = []
        for latency, found in latencies.items():
            if len({verdict.word for verdict in found}) == 1:
                parts.append(f"{latency} {found[0].word}")
            else:
                parts += [f"{METRIC_WORDS[verdict.metric]} {verdict.word}" for verdict in found]
        return ", ".join(parts)

    @property
    def metric(self) -> str:
        """The metric of its first verdict, where that is a latency."""
        shown = self.verdict is not None and self.verdict.metric not in WORK
        return f"{METRIC_WORDS[self.verdict.metric]} " if self.verdict is not None and shown else ""


class Meaning(Struct, frozen=True, kw_only=True):
    """What a column of any table means."""

    key: str
    title: str
    explanation: str
    formula: str

    @property
    def heading(self) -> str:
        return self.title


class TableColumn(Meaning, frozen=True, kw_only=True):
    """One column of the main table, and how its text is made."""

    unit: str = ""  # shown with the title; empty where the values carry it or have none
    group: Literal["name", "work", "latency", "verdict"]
    text: Callable[[TableLine], str]

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title


def lines(summary: Summary, run: Run) -> list[TableLine]:
    """The rows in the order of the summary."""
    base = baseline_of(run.scenario)
    name = f"{base.server} / {base.load}"
    found = summary.comparison.verdicts if summary.comparison else []
    # What else the scenario compares comes after a row's own verdicts.
    first = {verdict.side: verdict.baseline for verdict in reversed(found)}
    tokens = {cell.id: cell.numbers.output_tokens for cell in summary.cells}
    rates = [row.definitions.get("output_tok_s", "") for row in summary.rows]
    result = []
    for row in summary.rows:
        own = [one for one in found if one.side == row.name and one.baseline == first[row.name]]
        own = [] if row.name == name else list({one.metric: one for one in own}.values())
        result.append(
            TableLine(
                row=row,
                tokens=median_of_known(map(tokens.get, row.cells)),
                verdicts=own,
                baseline=row.name == name,
                against="" if not own or own[0].baseline == name else own[0].baseline,
                rate_mark="" if row.definitions.get("output_tok_s", "") == rates[0] else OTHERWISE,
            )
        )
    return result


def interval(verdict: Verdict) -> str:
    """The 95 % interval of a speedup, or why there is none."""
    if verdict.low is None or verdict.high is None:
        return "no interval"
    return f"{verdict.low:.2f}–{verdict.high:.2f}"


def _rate(line: TableLine) -> str:
    value = line.row.pooled.output_tok_s
    return units.NOTHING if value is None else f"{units.significant(value)}{line.rate_mark}"


def _of_answers(line: TableLine, which: str) -> str:
    """ "297 of 300 (99.0 %)" """
    answers = line.row.pooled.answers
    if answers is None:
        return units.NOTHING
    number, of = (answers.valid, answers.checked) if which == "valid" else (answers.right, answers.labelled)
    return units.NOTHING if number is None or not of else f"{number:,} of {of:,} ({number / of:.1%})"


def errors(numbers: Numbers) -> str:
    """ "2 of 25, 1 unfinished", or "0"; nothing where nothing was sent"""
    if not numbers.sent:
        return units.NOTHING
    said = [f"{numbers.failed:,} of {numbers.sent:,}"] if numbers.failed else []
    said += [f"{numbers.unfinished:,} unfinished"] if numbers.unfinished else []
    return ", ".join(said) or "0"


def _speedup(line: TableLine) -> str:
    if line.baseline:
        return "1 (baseline)"
    if line.verdict is None or line.verdict.ratio is None:
        return units.NOTHING
    against = f" of {line.against}" if line.against else ""
    return f"{line.metric}{line.verdict.ratio:.2f}×{against} ({interval(line.verdict)})"


def _verdict(line: TableLine) -> str:
    if line.row.failed is not None:
        return f"failed: {words.failed(line.row.failed)}"
    return "baseline" if line.baseline else line.words or units.NOTHING


_NAMES_AND_WORK = (
    TableColumn(
        key="server",
        title="Server",
        group="name",
        explanation="The server’s name in the scenario.",
        formula="servers.NAME",
        text=lambda line: line.row.server,
    ),
    TableColumn(
        key="load",
        title="Load",
        group="name",
        explanation="The load’s name in the scenario: who sends requests, and how many at once.",
        formula="loads.NAME",
        text=lambda line: line.row.load,
    ),
    TableColumn(
        key="wall",
        title="Wall time",
        group="work",
        explanation="How long the whole work took, from the first request sent to the last one ended. "
        "Median over the repeats; none for a load of fixed duration.",
        formula="wall time = last ended − first sent",
        text=lambda line: units.seconds(line.row.pooled.wall_s),
    ),
    TableColumn(
        key="tokens",
        title="Completion tokens",
        group="work",
        explanation="Tokens that the server generated in one run, by its own count. Median over the repeats.",
        formula="Σ usage.completion_tokens of the run’s successful requests",
        text=lambda line: units.NOTHING if line.tokens is None else f"{line.tokens:,.0f}",
    ),
    TableColumn(
        key="rate",
        title="Aggregate tok/s",
        group="work",
        explanation="Tokens per second of all requests together: what the server achieves. Median over the repeats.",
        formula="tok/s = tokens generated inside the window ÷ window; "
        "for a fixed amount of work the window is the wall time",
        text=_rate,
    ),
)
_INPUT = TableColumn(
    key="input_rate",
    title="Prompt tok/s",
    group="work",
    explanation="Prompt tokens per second of all requests together: what a server of embeddings achieves. "
    "Median over the repeats.",
    formula="Σ usage.prompt_tokens of the requests that ended inside the window ÷ window",
    text=lambda line: units.significant(line.row.pooled.input_tok_s),
)
_VALID = TableColumn(
    key="valid",
    title="Valid answers",
    group="work",
    explanation="Answers that have the form that was asked for, of the successful requests of all repeats. "
    "A fast server whose answers are of no use has won nothing.",
    formula="valid ÷ answers",
    text=lambda line: _of_answers(line, "valid"),
)
_RIGHT = TableColumn(
    key="right",
    title="Right answers",
    group="work",
    explanation="Answers that are the label that is known to be right.",
    formula="right ÷ answers of which the right label is known",
    text=lambda line: _of_answers(line, "right"),
)
_ERRORS_AND_VERDICT = (
    TableColumn(
        key="errors",
        title="Errors",
        group="latency",
        explanation="Requests that failed, of all that were sent, and how many the end of the run cut: these are no "
        "part of the error rate. They count here and never in a latency.",
        formula="errors = failed; error rate = failed ÷ sent",
        text=lambda line: errors(line.row.pooled),
    ),
    TableColumn(
        key="speedup",
        title="Speedup (95 %)",
        group="verdict",
        explanation="How many times as fast as the baseline, or, of a part of a mix, as the same load alone, with the "
        "interval that holds the true value in 95 of 100 experiments. The sample is the run, not the request.",
        formula="speedup = wall time of the baseline ÷ wall time; for a load of fixed duration tok/s ÷ tok/s of the "
        "baseline. Geometric means over the repeats, interval by Welch’s t on logarithms",
        text=_speedup,
    ),
    TableColumn(
        key="verdict",
        title="Verdict",
        group="verdict",
        explanation="Faster or slower only when the corrected p is below 0.05, the interval excludes 1 and the effect "
        "exceeds 2 %; “same” only when the interval is within ±2 %; else “inconclusive”.",
        formula="exact permutation test on run-level values, corrected for the number of comparisons",
        text=_verdict,
    ),
)

_SHARES = {"p50": "half of the", "p90": "90 of 100", "p95": "95 of 100", "p99": "99 of 100"}


def columns(summary: Summary) -> tuple[TableColumn, ...]:
    """The table's columns. The tail percentile is the highest that every row carries, p95 where none is.

    A run whose loads all have a fixed duration has no wall times.
    """
    rows = [row.pooled.ttft_s for row in summary.rows if row.pooled.ttft_s.n]
    tail = next((p for p in ("p99", "p95", "p90") if rows and all(getattr(row, p) is not None for row in rows)), "p95")
    timed = bool(summary.rows) and all(row.pooled.window == "timed" for row in summary.rows)
    work = [column for column in _NAMES_AND_WORK if not (timed and column.key == "wall")]
    numbers = [row.pooled for row in summary.rows]
    vectors = any(one.vectors is not None for one in numbers)
    work += [_INPUT] if vectors else []
    work += [_value(column) for column in VALUES if column.formula]
    latencies = [
        _latency(column, tail if at == "tail" or (at, tail) == ("p95", "p90") else at)
        for column in LATENCIES
        for at in (column.vectors if vectors else column.table)
    ]
    known = [one.answers for one in numbers if one.answers is not None]
    work += [_VALID] if known else []
    work += [_RIGHT] if any(answers.labelled for answers in known) else []
    return (*(_marked(column) for column in (*work, *latencies)), *_ERRORS_AND_VERDICT)


_FIELDS = {"wall": "wall_s", "rate": "output_tok_s", "input_rate": "input_tok_s"} | {
    column.field: column.field for column in VALUES if column.formula
}  # of Numbers, by column


def _marked(column: TableColumn) -> TableColumn:
    """A column whose numbers are marked where the load generator was their limit."""
    field = _FIELDS.get(column.key, f"{column.key.partition('_')[0]}_s")

    def text(line: TableLine) -> str:
        shown = column.text(line)
        limited = field in line.row.client_limited and shown != units.NOTHING and not shown.startswith("n/a")
        return f"{shown}{LIMITED}" if limited else shown

    return msgspec.structs.replace(column, text=text)


def _value(column: ValueColumn) -> TableColumn:
    title = column.title[0].upper() + column.title[1:]
    return TableColumn(
        key=column.field,
        title=title,
        group="work",
        explanation=f"{column.about} over the repeats.",
        formula=column.formula,
        text=lambda line: units.significant(column.of(line.row.pooled)),
    )


def _latency(column: LatencyColumn, at: str) -> TableColumn:
    def text(line: TableLine) -> str:
        numbers = line.row.pooled
        sample = getattr(numbers, column.field)
        if at == "max" or (numbers.e2e_s.n and not sample.n):
            # However many there were: vectors and answers in one piece have no first token.
            return units.milliseconds(sample.max)
        return words.percentile(sample, at)

    longest = at == "max"
    what = "the longest of all" if longest else f"{_SHARES[at]} requests {column.outcome}"
    enough = "" if longest else "; printed only when there are enough of them"
    return TableColumn(
        key=f"{column.name}_{at}",
        title=f"{column.title} {at}",
        unit="ms",
        group="latency",
        explanation=f"{column.about}: {what}. Over the successful requests of all repeats{enough}.",
        formula=f"{column.formula}; {'maximum' if longest else f'{at[1:]}th percentile'}",
        text=text,
    )
